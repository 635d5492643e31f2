//! Validates an `EtcdRestore`. Performs no I/O.

use super::{EtcdRestore, EtcdRestoreSpec};
use crate::backup::unreadable_store;
use crate::cluster::{self, can_restore_from, validate_spec};
use crate::problem::{Problem, names_of_set};
use crate::storage::StorageType;

/// The path of the template, with a trailing dot.
const TEMPLATE: &str = "spec.etcdCluster.template.";

/// The problems of the object. The schema rejects such objects, but an object may be older than the schema.
pub fn validate(restore: &EtcdRestore) -> Vec<Problem> {
    let spec = &restore.spec;
    let mut problems = Vec::new();
    match (&spec.backup, &spec.backup_storage_type) {
        (None, None) => problems.push(Problem::new(
            "spec.backupStorageType",
            "is missing",
            "set spec.backupStorageType with its block, or set spec.backup.name",
        )),
        (Some(_), Some(_)) => problems.push(Problem::new(
            "spec.backup",
            "is set together with spec.backupStorageType",
            "remove one of the two fields",
        )),
        (Some(_), None) if spec.blocks().any() => problems.push(Problem::new(
            "spec.backup",
            "is set together with a storage block",
            "remove spec.backup or the storage block",
        )),
        (Some(_), None) => {}
        (None, Some(kind)) => {
            problems.extend(spec.blocks().problems(kind, "spec", "backupStorageType"));
        }
    }
    problems.extend(Problem::invalid_cluster_name(
        "spec.etcdCluster.name",
        &spec.etcd_cluster.name,
    ));
    if (spec.bump_revision.unwrap_or_default() > 0) != spec.mark_compacted {
        problems.push(Problem::new(
            "spec.bumpRevision",
            "and spec.markCompacted do not agree",
            "set both or neither",
        ));
    }
    problems.extend(Problem::invalid_duration(
        "spec.keepOldData",
        spec.keep_old_data.as_ref(),
    ));
    if let Some(encryption) = &spec.encryption
        && encryption.secret.is_empty()
    {
        problems.push(Problem::new(
            "spec.encryption.secret",
            "is empty",
            "name the Secret with the keys",
        ));
    }
    problems.extend(super::continuous::problems(spec));
    if let Some(template) = &spec.etcd_cluster.template {
        problems.extend(validate_spec(&template.spec).into_iter().map(in_template));
    }
    problems
}

fn in_template(problem: Problem) -> Problem {
    Problem {
        field: format!("{TEMPLATE}{}", problem.field),
        ..problem
    }
}

/// The fields of the spec that have no effect.
pub fn not_in_effect(spec: &EtcdRestoreSpec) -> Vec<String> {
    let kind = spec.backup_storage_type.as_ref();
    let mut fields = names_of_set([(
        kind.is_some_and(|kind| !can_restore_from(kind)),
        "spec.backupStorageType",
    )]);
    if let Some(template) = &spec.etcd_cluster.template {
        fields.extend(
            cluster::not_in_effect(&template.spec)
                .into_iter()
                .map(|field| format!("{TEMPLATE}{field}")),
        );
    }
    fields
}

/// The problems of fields that this release does not support, but must not ignore. If such a field is set, the
/// operator restores nothing.
pub fn unsafe_to_ignore(spec: &EtcdRestoreSpec) -> Vec<Problem> {
    let kind = spec.backup_storage_type.as_ref();
    let mut problems: Vec<Problem> = kind
        .and_then(|kind| unreadable_store(kind, "spec.backupStorageType"))
        .into_iter()
        .collect();
    if let Some(template) = &spec.etcd_cluster.template {
        problems.extend(
            cluster::unsafe_to_ignore(&template.spec)
                .into_iter()
                .map(in_template),
        );
    }
    problems
}

/// The problem of a storage type from which no restore can read. `None` for other types.
pub fn unreachable(kind: &StorageType) -> Option<Problem> {
    unreadable_store(kind, "spec.storageType")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::problem::fields;

    fn restore(spec: &str) -> EtcdRestore {
        EtcdRestore::new("again", serde_json::from_str(spec).unwrap())
    }

    #[test]
    fn all_fields_of_s3_restore_take_effect() {
        let restore = restore(
            r#"{"etcdCluster":{"name":"main"},"backupStorageType":"S3","s3":{"path":"b/k","awsSecret":"aws"}}"#,
        );
        assert_eq!(validate(&restore), []);
        assert_eq!(not_in_effect(&restore.spec), Vec::<String>::new());
        assert_eq!(unsafe_to_ignore(&restore.spec), []);
    }

    #[test]
    fn each_invalid_field_of_stored_etcdrestore_is_reported() {
        let cases = [
            (
                r#"{"etcdCluster":{"name":"main"}}"#,
                "spec.backupStorageType",
            ),
            (
                r#"{"etcdCluster":{"name":"main"},"backupStorageType":"Tape"}"#,
                "spec.backupStorageType",
            ),
            (
                r#"{"etcdCluster":{"name":"main"},"backupStorageType":"S3"}"#,
                "spec.s3",
            ),
            (
                r#"{"etcdCluster":{"name":"main"},"backup":{"name":"a"},"s3":{"path":"b/k"}}"#,
                "spec.backup",
            ),
            (
                r#"{"etcdCluster":{"name":"Main"},"backup":{"name":"a"}}"#,
                "spec.etcdCluster.name",
            ),
            (
                r#"{"etcdCluster":{"name":"main"},"backup":{"name":"a"},"markCompacted":true}"#,
                "spec.bumpRevision",
            ),
            (
                r#"{"etcdCluster":{"name":"main"},"backup":{"name":"a"},"overwrite":true,"keepOldData":"a day"}"#,
                "spec.keepOldData",
            ),
            (
                r#"{"etcdCluster":{"name":"main"},"backup":{"name":"a"},"encryption":{"secret":""}}"#,
                "spec.encryption.secret",
            ),
            (
                r#"{"etcdCluster":{"name":"main"},"backup":{"name":"a"},"continuous":{"at":{}}}"#,
                "spec.continuous.at",
            ),
            (
                r#"{"etcdCluster":{"name":"main","template":{"spec":{"size":0}}},"backup":{"name":"a"}}"#,
                "spec.etcdCluster.template.spec.size",
            ),
        ];
        for (spec, field) in cases {
            assert_eq!(fields(&validate(&restore(spec))), [field], "{spec}");
        }
    }

    #[test]
    fn restore_template_fields_without_effect_have_full_path() {
        let restore = restore(
            r#"{"etcdCluster":{"name":"main","template":{"spec":{"pod":{"busyboxImage":"b"}}}},"backup":{"name":"a"}}"#,
        );
        assert_eq!(
            not_in_effect(&restore.spec),
            ["spec.etcdCluster.template.spec.pod.busyboxImage"]
        );
        assert_eq!(unsafe_to_ignore(&restore.spec), []);
    }
}
