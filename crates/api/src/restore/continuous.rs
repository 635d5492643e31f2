//! Restore of an exact point in time from recorded changes.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use kube::KubeSchema;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::problem::Problem;
use crate::schema::is_false;
use crate::storage::StorageType;

use super::EtcdRestoreSpec;

const FIELD: &str = "spec.continuous";

/// Restore of an exact point from the changes that `spec.continuous` of an EtcdBackup has recorded. The source is the
/// EtcdBackup in `backup.name`, or the directory of the recorded changes in the storage block.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct RestoreContinuous {
    /// The point to restore.
    pub at: RestorePoint,
    /// If true, the operator only finds the revision of the point, and reports it in `status.backup.continuous`. It
    /// creates and changes nothing else, except that a pod searches changes on a PersistentVolumeClaim. To restore the
    /// point, set the field to false.
    #[serde(default, skip_serializing_if = "is_false")]
    pub dry_run: bool,
}

/// A point in the recorded history. Exactly one field is set.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = (
    "(has(self.time) ? 1 : 0) + (has(self.revision) ? 1 : 0) + (has(self.latest) && self.latest ? 1 : 0) == 1",
    "spec.continuous.at must name one point: set exactly one of time, revision and latest: true"
))]
pub struct RestorePoint {
    /// The state at this time: all changes that the agent had received by then, by the clock of the agent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub time: Option<MicroTime>,
    /// The state at this revision.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1))]
    pub revision: Option<i64>,
    /// The newest recorded state.
    #[serde(default, skip_serializing_if = "is_false")]
    pub latest: bool,
}

/// The revision that is restored, and the recorded objects for it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ChosenPoint {
    /// Revision of the point.
    pub revision: i64,
    /// Time at which the agent received this revision, by the clock of the agent.
    pub time: MicroTime,
    /// Name of the base, which is the snapshot that is restored first.
    pub base: String,
    /// Revision of the base.
    pub base_revision: i64,
    /// Time of the base.
    pub base_time: MicroTime,
    /// Cluster ID of the recorded cluster, in hexadecimal without leading zeros.
    #[serde(rename = "clusterID")]
    pub cluster_id: String,
    /// Number of segments with the changes between the base and the point.
    pub segments: i64,
    /// Size of these segments in bytes.
    pub segment_bytes: i64,
    /// Prefix of all recorded objects in the store, without the bucket.
    pub prefix: String,
}

impl RestorePoint {
    fn count(&self) -> usize {
        let set = [self.time.is_some(), self.revision.is_some(), self.latest];
        set.into_iter().filter(|is_set| *is_set).count()
    }
}

impl EtcdRestoreSpec {
    /// Whether the restore only reports the revision of `spec.continuous.at`.
    pub fn is_dry_run(&self) -> bool {
        self.continuous.as_ref().is_some_and(|block| block.dry_run)
    }
}

/// The problems of `spec.continuous`, and of the fields that are not possible with it.
pub(super) fn problems(spec: &EtcdRestoreSpec) -> Vec<Problem> {
    let Some(block) = &spec.continuous else {
        return Vec::new();
    };
    let mut problems = Vec::new();
    if block.at.count() != 1 {
        problems.push(Problem::new(
            format!("{FIELD}.at"),
            "does not name exactly one point",
            "set exactly one of time, revision and latest: true",
        ));
    }
    if block.at.revision.is_some_and(|revision| revision < 1) {
        problems.push(Problem::new(
            format!("{FIELD}.at.revision"),
            "is less than 1",
            "use a revision of etcd",
        ));
    }
    let before = spec.backup.as_ref().and_then(|it| it.before.as_ref());
    if before.is_some() {
        problems.push(Problem::new(
            "spec.backup.before",
            format!("is set together with {FIELD}"),
            format!("remove it, and set the point in {FIELD}.at"),
        ));
    }
    if spec.bump_revision.unwrap_or_default() > 0 {
        problems.push(Problem::new(
            "spec.bumpRevision",
            format!("is set together with {FIELD}, which restores exact revisions"),
            "remove one of the two fields",
        ));
    }
    let kind = spec.backup_storage_type.as_ref();
    if kind == Some(&StorageType::Local) {
        problems.push(Problem::new(
            "spec.backupStorageType",
            format!("is a directory of the operator, but {FIELD} needs a bucket or a PVC"),
            "copy the recorded objects to a bucket, and name the bucket",
        ));
    }
    problems
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::problem::fields;

    fn problems_with(at: &Value, more: &Value) -> Vec<String> {
        let mut spec = json!({
            "etcdCluster": { "name": "main" }, "backup": { "name": "a" }, "continuous": { "at": at },
        });
        for (field, value) in more.as_object().unwrap() {
            spec[field] = value.clone();
        }
        let spec: EtcdRestoreSpec = serde_json::from_value(spec).unwrap();
        fields(&problems(&spec))
            .into_iter()
            .map(str::to_owned)
            .collect()
    }

    #[test]
    fn exactly_one_restore_point_must_be_set() {
        let time = "2026-11-28T01:02:03.456789Z";
        for valid in [
            json!({ "time": time }),
            json!({ "revision": 7 }),
            json!({ "latest": true }),
            json!({ "revision": 7, "latest": false }),
        ] {
            assert_eq!(problems_with(&valid, &json!({})), [""; 0], "{valid}");
        }
        for invalid in [
            json!({}),
            json!({ "latest": false }),
            json!({ "revision": 7, "latest": true }),
            json!({ "revision": 7, "time": time }),
        ] {
            let found = problems_with(&invalid, &json!({}));
            assert_eq!(found, ["spec.continuous.at"], "{invalid}");
        }
        let encryption = json!({ "encryption": { "secret": "keys" } });
        assert_eq!(
            problems_with(&json!({ "revision": 1 }), &encryption),
            [""; 0]
        );
        let found = problems_with(&json!({ "revision": 0 }), &json!({}));
        assert_eq!(found, ["spec.continuous.at.revision"]);
    }

    #[test]
    fn time_of_restore_point_keeps_microseconds() {
        let time = json!({ "time": "2026-11-28T01:02:03.456789Z" });
        let point: RestorePoint = serde_json::from_value(time.clone()).unwrap();
        assert_eq!(serde_json::to_value(point).unwrap(), time);
    }

    #[test]
    fn fields_incompatible_with_continuous_restore_are_reported() {
        let at = json!({ "latest": true });
        for (more, field) in [
            (
                json!({ "backup": { "name": "a", "before": "2026-11-28T01:02:03Z" } }),
                "spec.backup.before",
            ),
            (
                json!({ "bumpRevision": 7, "markCompacted": true }),
                "spec.bumpRevision",
            ),
            (
                json!({ "backupStorageType": "Local" }),
                "spec.backupStorageType",
            ),
        ] {
            assert_eq!(problems_with(&at, &more), [field], "{more}");
        }
        let pvc = json!({ "backupStorageType": "PVC" });
        assert_eq!(problems_with(&at, &pvc), [""; 0]);
    }
}
