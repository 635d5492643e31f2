//! Validates an `EtcdBackup`. Performs no I/O.

use super::copy::{self, copy_problems};
use super::{BackupPolicy, Compression, DeletionPolicy, EtcdBackup, EtcdBackupSpec};
use crate::cluster::can_restore_from;
use crate::problem::{Problem, names_of_set};
use crate::storage::StorageType;

/// The problems of the object. The schema rejects such objects, but an object may be older than the schema.
pub fn validate(backup: &EtcdBackup) -> Vec<Problem> {
    let spec = &backup.spec;
    let mut problems = spec
        .blocks()
        .problems(&spec.storage_type, "spec", "storageType");
    match (spec.etcd_endpoints.is_empty(), &spec.etcd_cluster) {
        (true, None) => problems.push(Problem::new(
            "spec.etcdEndpoints",
            "is empty",
            "set at least one client URL such as http://example-client:2379, or set spec.etcdCluster.name",
        )),
        (false, Some(_)) => problems.push(Problem::new(
            "spec.etcdCluster",
            "is set together with spec.etcdEndpoints",
            "remove one of the two fields",
        )),
        _ => {}
    }
    if spec.etcd_endpoints.iter().any(String::is_empty) {
        problems.push(Problem::new(
            "spec.etcdEndpoints",
            "contains an empty string",
            "use URLs such as http://example-client:2379",
        ));
    }
    if let Some(compression @ Compression::Unknown(_)) = &spec.compression {
        problems.push(Problem::unknown(
            "spec.compression",
            compression.as_str(),
            Compression::KNOWN,
        ));
    }
    if let Some(policy @ DeletionPolicy::Unknown(_)) = &spec.deletion_policy {
        problems.push(Problem::unknown(
            "spec.deletionPolicy",
            policy.as_str(),
            DeletionPolicy::KNOWN,
        ));
    }
    problems.extend(
        spec.backup_policy
            .iter()
            .flat_map(|policy| policy.problems("spec.backupPolicy")),
    );
    problems.extend(
        spec.encryption
            .iter()
            .flat_map(|block| block.problems("spec.encryption")),
    );
    problems.extend(
        spec.verification
            .iter()
            .flat_map(|block| block.problems("spec.verification", &spec.storage_type)),
    );
    let first = spec.block();
    problems.extend(copy_problems(&spec.copy_to, "spec.copyTo", first));
    if let Some(block) = &spec.continuous {
        problems.extend(block.problems("spec.continuous", &spec.storage_type));
        if spec.ttl_seconds_after_finished.is_some() {
            problems.push(Problem::new(
                "spec.ttlSecondsAfterFinished",
                "is set together with spec.continuous, and would end the recording",
                "remove one of the two fields",
            ));
        }
    }
    problems
}

impl EtcdBackupSpec {
    /// True if the EtcdBackup has a schedule or an interval.
    pub fn is_periodic(&self) -> bool {
        self.backup_policy
            .as_ref()
            .is_some_and(BackupPolicy::is_periodic)
    }
}

impl BackupPolicy {
    /// True if the policy has a schedule or an interval.
    pub fn is_periodic(&self) -> bool {
        self.schedule.is_some()
            || self
                .backup_interval_in_second
                .is_some_and(|seconds| seconds > 0)
    }

    /// The problems of the policy. `prefix` is the path of the policy in the object.
    pub(crate) fn problems(&self, prefix: &str) -> Vec<Problem> {
        let numbers = [
            (
                "timeoutInSecond",
                self.timeout_in_second,
                "use 0 for the maximum of 48 hours, or remove it",
            ),
            (
                "backupIntervalInSecond",
                self.backup_interval_in_second,
                "use 0 for one backup only",
            ),
            ("maxBackups", self.max_backups, "use 0 to keep all"),
        ];
        let mut problems: Vec<Problem> = numbers
            .into_iter()
            .filter(|(_, number, _)| number.is_some_and(|number| number < 0))
            .map(|(field, _, remedy)| {
                Problem::new(format!("{prefix}.{field}"), "is negative", remedy)
            })
            .collect();
        if self.schedule.is_some()
            && self
                .backup_interval_in_second
                .is_some_and(|seconds| seconds > 0)
        {
            problems.push(Problem::new(
                format!("{prefix}.schedule"),
                "is set together with backupIntervalInSecond",
                "remove one of the two fields",
            ));
        }
        problems.extend(Problem::invalid_duration(
            format!("{prefix}.maxAge"),
            self.max_age.as_ref(),
        ));
        problems
    }
}

/// The fields of the spec that have no effect.
pub fn not_in_effect(spec: &EtcdBackupSpec) -> Vec<String> {
    // Retention rules and a starting deadline have an effect only on a periodic EtcdBackup.
    let mut fields = copy::not_in_effect(spec);
    let Some(policy) = spec.backup_policy.as_ref().filter(|_| !spec.is_periodic()) else {
        return fields;
    };
    fields.extend(names_of_set([
        (
            policy.max_backups.is_some_and(|count| count > 0),
            "spec.backupPolicy.maxBackups",
        ),
        (
            policy.starting_deadline_seconds.is_some(),
            "spec.backupPolicy.startingDeadlineSeconds",
        ),
        (policy.max_age.is_some(), "spec.backupPolicy.maxAge"),
        (policy.retention.is_some(), "spec.backupPolicy.retention"),
    ]));
    fields
}

/// The problems of fields that this release does not support, but must not ignore. The list is empty, because this
/// release has no such field. With such a problem, the operator would make no backup.
pub fn unsafe_to_ignore(_: &EtcdBackupSpec) -> Vec<Problem> {
    Vec::new()
}

/// The problem of a storage type from which no restore can read. `None` for other types.
pub(crate) fn unreadable_store(storage_type: &StorageType, field: &str) -> Option<Problem> {
    (storage_type.is_known() && !can_restore_from(storage_type)).then(|| {
        Problem::new(
            field,
            format!("is {storage_type}, a directory of the backup operator, which pods of members cannot access"),
            "copy the backup and its manifest into a bucket or a PVC, and restore from that copy",
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::problem::fields;

    fn backup(spec: &str) -> EtcdBackup {
        EtcdBackup::new("nightly", serde_json::from_str(spec).unwrap())
    }

    #[test]
    fn all_fields_of_single_s3_backup_take_effect() {
        let backup = backup(
            r#"{"etcdEndpoints":["http://a:2379"],"storageType":"S3","s3":{"path":"b/k","awsSecret":"aws"}}"#,
        );
        assert_eq!(validate(&backup), []);
        assert_eq!(not_in_effect(&backup.spec), Vec::<String>::new());
        assert_eq!(unsafe_to_ignore(&backup.spec), []);
    }

    #[test]
    fn each_invalid_field_of_stored_etcdbackup_is_reported() {
        let cases = [
            (
                r#"{"etcdEndpoints":null,"storageType":"S3","s3":{"path":"b/k"}}"#,
                "spec.etcdEndpoints",
            ),
            (
                r#"{"etcdEndpoints":["a"],"storageType":"Tape"}"#,
                "spec.storageType",
            ),
            (r#"{"etcdEndpoints":["a"],"storageType":"S3"}"#, "spec.s3"),
            (
                r#"{"etcdEndpoints":["a"],"storageType":"S3","s3":{"path":"bucket"}}"#,
                "spec.s3.path",
            ),
            (
                r#"{"etcdEndpoints":["a"],"storageType":"S3","s3":{"path":"b/k"},"backupPolicy":{"backupIntervalInSecond":-1}}"#,
                "spec.backupPolicy.backupIntervalInSecond",
            ),
            (
                r#"{"etcdEndpoints":["a"],"storageType":"S3","s3":{"path":"b/k"},"backupPolicy":{"maxBackups":-1}}"#,
                "spec.backupPolicy.maxBackups",
            ),
            (
                r#"{"etcdEndpoints":["a"],"storageType":"S3","s3":{"path":"b/k"},"encryption":{"secret":""}}"#,
                "spec.encryption.secret",
            ),
            (
                r#"{"etcdEndpoints":["a"],"storageType":"S3","s3":{"path":"b/k"},"encryption":{"secret":"keys","key":"a/b"}}"#,
                "spec.encryption.key",
            ),
            (
                r#"{"etcdEndpoints":["a"],"storageType":"S3","s3":{"path":"b/k"},"verification":{"window":{"schedule":"@daily","duration":"4m59s"}}}"#,
                "spec.verification.window.duration",
            ),
            (
                r#"{"etcdEndpoints":["a"],"storageType":"S3","s3":{"path":"b/k"},"verification":{"window":{"schedule":"@daily","duration":"a night"}}}"#,
                "spec.verification.window.duration",
            ),
            (
                r#"{"etcdEndpoints":["a"],"storageType":"S3","s3":{"path":"b/k"},"continuous":{"flushInterval":"2m"}}"#,
                "spec.continuous.flushInterval",
            ),
            (
                r#"{"etcdEndpoints":["a"],"storageType":"S3","s3":{"path":"b/k"},"continuous":{},"ttlSecondsAfterFinished":1}"#,
                "spec.ttlSecondsAfterFinished",
            ),
        ];
        for (spec, field) in cases {
            assert_eq!(fields(&validate(&backup(spec))), [field], "{spec}");
        }
    }

    #[test]
    fn all_fields_of_each_storage_type_take_effect() {
        for place in [
            r#""storageType":"S3","s3":{"path":"b/k","objectLock":{"mode":"COMPLIANCE","days":7},"insecureSkipVerify":true}"#,
            r#""storageType":"GCS","gcs":{"path":"b/k","objectLock":{"mode":"GOVERNANCE","days":7}}"#,
            r#""storageType":"ABS","abs":{"path":"b/k","objectLock":{"mode":"COMPLIANCE","days":7}}"#,
            r#""storageType":"OSS","oss":{"path":"b/k"}"#,
            r#""storageType":"PVC","pvc":{"claimName":"c","path":"k"}"#,
            r#""storageType":"Local","local":{"path":"k"}"#,
            r#""storageType":"GCS","gcs":{"path":"b/k"},"continuous":{},"encryption":{"secret":"keys"}"#,
        ] {
            let backup = backup(&format!(r#"{{"etcdEndpoints":["a"],{place}}}"#));
            assert_eq!(validate(&backup), [], "{place}");
            assert_eq!(unsafe_to_ignore(&backup.spec), [], "{place}");
            assert_eq!(not_in_effect(&backup.spec), Vec::<String>::new(), "{place}");
        }
    }

    #[test]
    fn all_fields_of_periodic_backup_take_effect() {
        let backup = backup(
            r#"{"etcdCluster":{"name":"main"},"storageType":"S3","s3":{"path":"b/k"},"compression":"zstd","deletionPolicy":"Delete",
                "encryption":{"secret":"keys","key":"2026-11"},"ttlSecondsAfterFinished":1,"backupPolicy":{"schedule":"@daily","maxBackups":3,"retention":{"keepDaily":7}}}"#,
        );
        assert_eq!(validate(&backup), []);
        assert_eq!(not_in_effect(&backup.spec), Vec::<String>::new());
    }

    #[test]
    fn retention_has_no_effect_on_single_backup() {
        let backup = backup(
            r#"{"etcdCluster":{"name":"main"},"storageType":"S3","s3":{"path":"b/k"},"backupPolicy":{"maxBackups":3}}"#,
        );
        assert_eq!(
            not_in_effect(&backup.spec),
            ["spec.backupPolicy.maxBackups"]
        );
    }
}
