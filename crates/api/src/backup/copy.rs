//! Copies of the stored backups in further stores.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::KubeSchema;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

mod place;

use place::is_same_place;

use super::{BackupPolicy, EtcdBackupSpec, Retention, name};
use crate::duration::DurationText;
use crate::problem::Problem;
use crate::schema::without_descriptions_of_fields;
use crate::storage::{
    AbsSource, Blocks, GcsSource, OssSource, S3Source, StorageBlock, StorageType,
};

/// A further store to which each complete backup is copied.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = (
    "self.storageType != 'PVC' && self.storageType != 'Local'",
    "storageType of a copy must be S3, ABS, GCS or OSS: correct spec.copyTo"
))]
#[x_kube(validation = (
    "has(self.s3) == (self.storageType == 'S3')",
    "the block s3 of a copy must be set if and only if its storageType is S3: correct spec.copyTo"
))]
#[x_kube(validation = (
    "has(self.abs) == (self.storageType == 'ABS')",
    "the block abs of a copy must be set if and only if its storageType is ABS: correct spec.copyTo"
))]
#[x_kube(validation = (
    "has(self.gcs) == (self.storageType == 'GCS')",
    "the block gcs of a copy must be set if and only if its storageType is GCS: correct spec.copyTo"
))]
#[x_kube(validation = (
    "has(self.oss) == (self.storageType == 'OSS')",
    "the block oss of a copy must be set if and only if its storageType is OSS: correct spec.copyTo"
))]
pub struct BackupCopy {
    /// Name of the copy in the status, in Events and in messages.
    #[schemars(length(min = 1, max = 63))]
    #[x_kube(validation = (
        "self.matches('^[a-z0-9]([-a-z0-9]*[a-z0-9])?$')",
        "the name of a copy may have lowercase letters, digits and dashes: correct spec.copyTo"
    ))]
    pub name: String,
    /// Type of the store: `S3`, `ABS`, `GCS` or `OSS`.
    pub storage_type: StorageType,
    /// Location in S3, with `storageType: S3`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(transform = without_descriptions_of_fields)]
    pub s3: Option<S3Source>,
    /// Location in Azure Blob Storage, with `storageType: ABS`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(transform = without_descriptions_of_fields)]
    pub abs: Option<AbsSource>,
    /// Location in Google Cloud Storage, with `storageType: GCS`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(transform = without_descriptions_of_fields)]
    pub gcs: Option<GcsSource>,
    /// Location in Alibaba Cloud OSS, with `storageType: OSS`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(transform = without_descriptions_of_fields)]
    pub oss: Option<OssSource>,
    /// Number of copies to keep in addition to the copies that `retention` keeps; 0 means all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[x_kube(validation = ("self >= 0", "maxBackups of a copy may not be negative: use 0 to keep all"))]
    pub max_backups: Option<i64>,
    /// Age after which a copy is deleted, such as `720h`, even if another rule keeps it. The newest copy is always
    /// kept.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_age: Option<DurationText>,
    /// Number of copies to keep for each hour, day, week and month, in UTC, in addition to the newest `maxBackups`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(transform = without_descriptions_of_fields)]
    pub retention: Option<Retention>,
}

/// The state of the copies in one store.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct CopyStatus {
    /// Name of the copy in the spec.
    pub name: String,
    /// Location of the newest complete copy, such as `s3://bucket/key`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub location: Option<String>,
    /// Revision of the newest complete copy.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub etcd_revision: Option<i64>,
    /// SHA-256 of the snapshot in the newest complete copy, in hexadecimal.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sha256: Option<String>,
    /// Time at which the copied backup completed in the first store.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub backup_time: Option<Time>,
    /// Time at which the newest copy completed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub completion_time: Option<Time>,
    /// Why the newest backup is not copied, or why old copies cannot be deleted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// Number of attempts since the last success, including the running attempt.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub attempts: Option<i32>,
    /// Time at which the last attempt started or failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_attempt_time: Option<Time>,
}

impl BackupCopy {
    /// The storage blocks of the copy.
    pub fn blocks(&self) -> Blocks<'_> {
        Blocks {
            s3: self.s3.as_ref(),
            abs: self.abs.as_ref(),
            gcs: self.gcs.as_ref(),
            oss: self.oss.as_ref(),
            pvc: None,
            local: None,
        }
    }

    /// The storage block of the copy; `None` if the copy is invalid.
    pub fn block(&self) -> Option<StorageBlock> {
        let blocks = self.blocks();
        let selected = blocks.select(&self.storage_type, "spec.copyTo", "storageType");
        selected.ok().map(StorageBlock::from)
    }

    /// The retention rules of the copy, as a policy.
    pub fn policy(&self) -> BackupPolicy {
        BackupPolicy {
            max_backups: self.max_backups,
            max_age: self.max_age.clone(),
            retention: self.retention.clone(),
            ..BackupPolicy::default()
        }
    }

    /// The problems of the copy. `prefix` is the JSON path of the copy in the object.
    fn problems(&self, prefix: &str) -> Vec<Problem> {
        let mut problems = match &self.storage_type {
            StorageType::Pvc | StorageType::Local => vec![Problem::new(
                format!("{prefix}.storageType"),
                format!("is {}, which is not possible for a copy", self.storage_type),
                "use S3, ABS, GCS or OSS",
            )],
            kind => self.blocks().problems(kind, prefix, "storageType"),
        };
        let is_name = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
        if self.name.is_empty() || !self.name.bytes().all(is_name) {
            problems.push(Problem::new(
                format!("{prefix}.name"),
                format!("is {:?}", self.name),
                "use lowercase letters, digits and dashes",
            ));
        }
        problems.extend(self.policy().problems(prefix));
        problems
    }
}

impl EtcdBackupSpec {
    /// The storage block of the first store; `None` if the spec is invalid.
    pub fn block(&self) -> Option<StorageBlock> {
        let blocks = self.blocks();
        let selected = blocks.select(&self.storage_type, "spec", "storageType");
        selected.ok().map(StorageBlock::from)
    }
}

/// The problems of a list of copies. `field` is the JSON path of the list in the object, and `first` the block of the
/// first store; `None` if that block is invalid.
pub(crate) fn copy_problems(
    copies: &[BackupCopy],
    field: &str,
    first: Option<StorageBlock>,
) -> Vec<Problem> {
    let mut problems = Vec::new();
    if !copies.is_empty() && matches!(first, Some(StorageBlock::Pvc(_))) {
        problems.push(Problem::new(
            field,
            "is set, but the storage type is PVC, a volume that the operator cannot read",
            format!("remove {field}, or store the backups in a bucket"),
        ));
    }
    let mut places: Vec<StorageBlock> = first.into_iter().collect();
    for (index, copy) in copies.iter().enumerate() {
        let prefix = format!("{field}[{index}]");
        problems.extend(copy.problems(&prefix));
        let mut earlier = copies.iter().take(index);
        if earlier.any(|other| other.name == copy.name) {
            problems.push(Problem::new(
                format!("{prefix}.name"),
                format!("is {:?}, the name of another copy", copy.name),
                "use a different name for each copy",
            ));
        }
        let Some(block) = copy.block() else { continue };
        // Two stores of one EtcdBackup must not have the same location: the backup in one store would overwrite the
        // backup in the other, and two sets of retention rules would apply to it.
        if places.iter().any(|other| is_same_place(other, &block)) {
            problems.push(Problem::new(
                format!("{prefix}.{}.path", block.source().block()),
                "is the location of another store of this EtcdBackup",
                "use a different bucket or path",
            ));
        }
        places.push(block);
    }
    problems
}

/// The retention rules of copies that have no effect, because the EtcdBackup makes only one backup.
pub(super) fn not_in_effect(spec: &EtcdBackupSpec) -> Vec<String> {
    let copies = spec.copy_to.iter().enumerate();
    let limited = copies.filter(|(_, copy)| {
        copy.max_backups.is_some_and(|count| count > 0)
            || copy.max_age.is_some()
            || copy.retention.is_some()
    });
    let fields = limited.map(|(index, _)| format!("retention rules of spec.copyTo[{index}]"));
    fields.filter(|_| !spec.is_periodic()).collect()
}

/// The part of a backup's location after the path of its storage block: `_v<revision>_<time>`, or an empty text for a
/// single backup. A copy has the same suffix in every store. `None` if the location does not belong to this block.
pub fn name_suffix<'a>(block: &StorageBlock, location: &'a str) -> Option<&'a str> {
    let source = block.source();
    let path = source.path();
    let found = block.path_in(location)?;
    // The location in a local store starts with the path of the operator's backup directory, so only the end of the
    // location is compared.
    let is_path = |text: &str| match block {
        StorageBlock::Local(_) => text.ends_with(&format!("/{path}")),
        _ => text == path,
    };
    if is_path(found) {
        return Some("");
    }
    let (before, suffix) = found.split_at(found.rfind("_v")?);
    let is_numbered = name::parse(path, &format!("{path}{suffix}")).is_some();
    (is_numbered && is_path(before)).then_some(suffix)
}

/// The storage block of the copy of the backup at `location`. `first` is the block of the first store, and `copy` the
/// block in `spec.copyTo`. `None` if the backup is not at the path of the first store.
pub fn copied_block(
    first: &StorageBlock,
    location: &str,
    copy: &StorageBlock,
) -> Option<StorageBlock> {
    let suffix = name_suffix(first, location)?;
    let path = format!("{}{suffix}", copy.source().path());
    Some(copy.clone().at(path))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::EtcdBackup;
    use crate::backup::validate;

    fn block(value: Value) -> StorageBlock {
        serde_json::from_value(value).unwrap()
    }

    fn backup(change: impl FnOnce(&mut Value)) -> EtcdBackup {
        let mut object = json!({
            "apiVersion": "etcd.database.coreos.com/v1beta2", "kind": "EtcdBackup", "metadata": { "name": "b" },
            "spec": {
                "etcdCluster": { "name": "c" }, "storageType": "S3", "s3": { "path": "bucket/etcd/b" },
                "copyTo": [{ "name": "second", "storageType": "GCS", "gcs": { "path": "other/etcd/b" } }],
            },
        });
        change(&mut object["spec"]);
        serde_json::from_value(object).unwrap()
    }

    #[test]
    fn copy_keeps_suffix_of_backup_name() {
        let s3 = block(json!({ "s3": { "path": "bucket/etcd/b" } }));
        let local = block(json!({ "local": { "path": "etcd/b" } }));
        let gcs = block(json!({ "gcs": { "path": "other/copies/b" } }));
        let name = "_v42_2026-11-28-01:02:03";
        for (first, location, expected) in [
            (&s3, "s3://bucket/etcd/b", Some("other/copies/b".to_owned())),
            (
                &s3,
                "s3://bucket/etcd/b_v42_2026-11-28-01:02:03",
                Some(format!("other/copies/b{name}")),
            ),
            (
                &local,
                "file:///backups/namespaces/n/etcd/b_v42_2026-11-28-01:02:03",
                Some(format!("other/copies/b{name}")),
            ),
            (
                &local,
                "file:///backups/etcd/b",
                Some("other/copies/b".to_owned()),
            ),
            // These locations do not belong to the path of the storage block.
            (&s3, "s3://bucket/etcd/b-prod_v42_2026-11-28-01:02:03", None),
            (&s3, "s3://bucket/etcd/b_v042_2026-11-28-01:02:03", None),
            (&s3, "s3://earlier/etcd/b", None),
            (&local, "file:///backups/other-etcd/b", None),
        ] {
            let copied = copied_block(first, location, &gcs);
            let path = copied.map(|block| block.source().path().to_owned());
            assert_eq!(path, expected, "{location}");
        }
    }

    #[test]
    fn invalid_copy_is_reported_with_its_field() {
        type Change = fn(&mut Value);
        let cases: [(Change, &str); 8] = [
            (|_| (), ""),
            (
                |spec| spec["copyTo"][0]["gcs"] = Value::Null,
                "spec.copyTo[0].gcs",
            ),
            (
                |spec| spec["copyTo"][0]["gcs"]["path"] = json!("bucket"),
                "spec.copyTo[0].gcs.path",
            ),
            (
                |spec| spec["copyTo"][0]["storageType"] = json!("Local"),
                "spec.copyTo[0].storageType",
            ),
            (
                |spec| spec["copyTo"][0]["maxBackups"] = json!(-1),
                "spec.copyTo[0].maxBackups",
            ),
            (
                |spec| {
                    let copy = spec["copyTo"][0].clone();
                    spec["copyTo"] = json!([copy, copy]);
                },
                "spec.copyTo[1].name",
            ),
            (
                |spec| {
                    let same = json!({ "name": "same", "storageType": "S3", "s3": { "path": "bucket/etcd/b" } });
                    spec["copyTo"] = json!([same]);
                },
                "spec.copyTo[0].s3.path",
            ),
            (
                |spec| {
                    spec["storageType"] = json!("PVC");
                    spec["pvc"] = json!({ "claimName": "c", "path": "etcd/b" });
                },
                "spec.copyTo",
            ),
        ];
        for (change, field) in cases {
            let problems = validate(&backup(change));
            let found = problems.iter().any(|problem| problem.field == field);
            assert_eq!(found, !field.is_empty(), "{field}: {problems:?}");
        }
    }

    #[test]
    fn same_path_at_different_endpoint_is_another_location() {
        let backup = backup(|spec| {
            let copy = json!({ "path": "bucket/etcd/b", "endpoint": "https://other.example" });
            spec["copyTo"] = json!([{ "name": "same", "storageType": "S3", "s3": copy }]);
        });
        assert_eq!(validate(&backup), []);
    }

    #[test]
    fn retention_of_copy_has_no_effect_on_single_backup() {
        for (policy, expected) in [(json!({}), 1), (json!({ "schedule": "@daily" }), 0)] {
            let backup = backup(|spec| {
                spec["copyTo"][0]["maxBackups"] = json!(3);
                spec["backupPolicy"] = policy;
            });
            let ignored = crate::backup::not_in_effect(&backup.spec);
            assert_eq!(ignored.len(), expected, "{ignored:?}");
        }
    }
}
