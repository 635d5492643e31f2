//! Continuous backup: an agent records all changes of a cluster.

use std::time::Duration;

use k8s_openapi::api::core::v1::ResourceRequirements;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::KubeSchema;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::duration::DurationText;
use crate::problem::Problem;
use crate::schema::{embedded, is_false, object_name, readable_items};
use crate::storage::StorageType;

/// Default of `continuous.flushInterval`.
const DEFAULT_FLUSH_INTERVAL: Duration = Duration::from_secs(1);
/// Default of `continuous.maxBaseAge`.
const DEFAULT_MAX_BASE_AGE: Duration = Duration::from_hours(24);
/// Default of `continuous.maxBaseBytes`.
const DEFAULT_MAX_BASE_BYTES: i64 = 1 << 30;
/// Default of `continuous.retentionWindow`.
const DEFAULT_RETENTION_WINDOW: Duration = Duration::from_hours(72);
/// Default of `continuous.spoolLimitBytes`.
const DEFAULT_SPOOL_LIMIT_BYTES: i64 = 1 << 30;

/// How an agent records all changes of the cluster after a snapshot.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct Continuous {
    /// Maximum time between a change and the upload of the segment with this change, from `100ms` to `1m`. Default
    /// `1s`. A shorter time causes more requests to the store.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[x_kube(validation = (
        "duration(self) >= duration('100ms') && duration(self) <= duration('1m')",
        "continuous.flushInterval must be from 100ms to 1m: correct it"
    ))]
    pub flush_interval: Option<DurationText>,
    /// Maximum age of a base, from `10m` to `168h`. Default `24h`. A base is a snapshot, after which the agent records
    /// the changes. At this age, the agent takes a new base.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[x_kube(validation = (
        "duration(self) >= duration('10m') && duration(self) <= duration('168h')",
        "continuous.maxBaseAge must be from 10m to 168h: correct it"
    ))]
    pub max_base_age: Option<DurationText>,
    /// Maximum size in bytes of the segments after a base. Default 1 GiB. When the segments reach this size, the agent
    /// takes a new base.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1_048_576))]
    pub max_base_bytes: Option<i64>,
    /// Time for which every recorded revision is kept, from `10m` to `8760h`. Default `72h`. Older bases are deleted
    /// with their segments.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[x_kube(validation = (
        "duration(self) >= duration('10m') && duration(self) <= duration('8760h')",
        "continuous.retentionWindow must be from 10m to 8760h: correct it"
    ))]
    pub retention_window: Option<DurationText>,
    /// Maximum size in bytes of the segments that wait on a volume of the pod while the store is slow or unavailable.
    /// Default 1 GiB.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0))]
    pub spool_limit_bytes: Option<i64>,
    /// Resources of the agent. By default, it requests 64 MiB of memory and is limited to 512 MiB.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "embedded::<ResourceRequirements>")]
    pub resources: Option<ResourceRequirements>,
    /// Service account of the agent's pod. Needed for a store without a Secret, because the pod then writes to the
    /// store with its own identity.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "object_name")]
    pub service_account_name: Option<String>,
}

/// The last report of the agent.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ContinuousStatus {
    /// Location of the objects that the agent writes, such as `s3://bucket/etcd/main.continuous/UID/`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub location: Option<String>,
    /// Generation of the spec for which the operator has checked the agent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// Time at which the operator last checked the agent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub check_time: Option<Time>,
    /// Newest revision in the store.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub revision: Option<i64>,
    /// Time at which the agent received this revision, by the clock of the agent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub revision_time: Option<Time>,
    /// All changes before this time are in the store.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub complete_time: Option<Time>,
    /// Age of `completeTime` at the last check, in seconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lag_seconds: Option<i64>,
    /// Number of revisions that were not in the store at the last check.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lag_revisions: Option<i64>,
    /// The current base, after which the agent records changes, and its segments.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub base: Option<ContinuousBase>,
    /// Number of bases in the store.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bases: Option<i64>,
    /// Revision of the oldest base in the store.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub oldest_revision: Option<i64>,
    /// Time of the oldest base in the store.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub oldest_time: Option<Time>,
    /// Number of gaps between the bases in the store.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gap_count: Option<i64>,
    /// The newest gaps, newest first; at most ten.
    #[serde(
        default,
        deserialize_with = "readable_items",
        skip_serializing_if = "Vec::is_empty"
    )]
    pub gaps: Vec<ContinuousGap>,
}

/// A snapshot and the segments with the changes after it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ContinuousBase {
    /// Revision of the snapshot.
    pub revision: i64,
    /// Time of the snapshot.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub time: Option<Time>,
    /// Cluster ID of the recorded cluster, in hexadecimal without leading zeros.
    #[serde(default, rename = "clusterID", skip_serializing_if = "Option::is_none")]
    pub cluster_id: Option<String>,
    /// Number of segments.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub segments: Option<i64>,
    /// Size of the segments in bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes: Option<i64>,
}

/// Revisions that are missing in the store.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ContinuousGap {
    /// Last revision before the gap.
    pub after_revision: i64,
    /// Revision of the base after the gap.
    pub until_revision: i64,
    /// Time of the base after the gap.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub until_time: Option<Time>,
    /// True if the base after the gap belongs to another cluster ID, for example after a restore.
    #[serde(default, skip_serializing_if = "is_false")]
    pub cluster_changed: bool,
}

impl Continuous {
    /// The maximum time between a change and the upload of its segment.
    pub fn flush_interval(&self) -> Duration {
        parsed(self.flush_interval.as_ref(), DEFAULT_FLUSH_INTERVAL)
    }

    /// The maximum age of a base.
    pub fn max_base_age(&self) -> Duration {
        parsed(self.max_base_age.as_ref(), DEFAULT_MAX_BASE_AGE)
    }

    /// The maximum size of the segments of a base in bytes.
    pub fn max_base_bytes(&self) -> u64 {
        size(self.max_base_bytes, DEFAULT_MAX_BASE_BYTES)
    }

    /// The length of the retention window.
    pub fn retention_window(&self) -> Duration {
        parsed(self.retention_window.as_ref(), DEFAULT_RETENTION_WINDOW)
    }

    /// The maximum size of the segments that wait on a volume of the pod, in bytes.
    pub fn spool_limit_bytes(&self) -> u64 {
        size(self.spool_limit_bytes, DEFAULT_SPOOL_LIMIT_BYTES)
    }

    /// The problems of the block. `prefix` is the JSON path of the block in the object.
    pub(crate) fn problems(&self, prefix: &str, storage_type: &StorageType) -> Vec<Problem> {
        let mut problems = Vec::new();
        if *storage_type == StorageType::Local {
            problems.push(Problem::new(
                prefix,
                "is set, but the storage type is Local, a directory of the backup operator, which no pod can mount",
                format!("remove {prefix}, or store the backups in a bucket or on a PVC"),
            ));
        }
        let minutes = |minutes: u64| Duration::from_secs(60 * minutes);
        let limits = [
            (
                "flushInterval",
                self.flush_interval.as_ref(),
                (Duration::from_millis(100), minutes(1)),
                "use a time from 100ms to 1m",
            ),
            (
                "maxBaseAge",
                self.max_base_age.as_ref(),
                (minutes(10), minutes(168 * 60)),
                "use a time from 10m to 168h",
            ),
            (
                "retentionWindow",
                self.retention_window.as_ref(),
                (minutes(10), minutes(8760 * 60)),
                "use a time from 10m to 8760h",
            ),
        ];
        for (name, text, (min, max), remedy) in limits {
            let field = format!("{prefix}.{name}");
            let Some(text) = text else { continue };
            match text.parse() {
                None => problems.extend(Problem::invalid_duration(field, Some(text))),
                Some(time) if time < min || time > max => problems.push(Problem::new(
                    field,
                    format!("is {:?}, which is not allowed", text.0),
                    remedy,
                )),
                Some(_) => {}
            }
        }
        if self.max_base_bytes.is_some_and(|bytes| bytes < 1 << 20) {
            problems.push(Problem::new(
                format!("{prefix}.maxBaseBytes"),
                "is less than 1048576",
                "use at least 1048576",
            ));
        }
        if self.spool_limit_bytes.is_some_and(|bytes| bytes < 0) {
            problems.push(Problem::new(
                format!("{prefix}.spoolLimitBytes"),
                "is negative",
                "use 0 for no volume",
            ));
        }
        problems
    }
}

fn parsed(text: Option<&DurationText>, default: Duration) -> Duration {
    text.and_then(DurationText::parse).unwrap_or(default)
}

fn size(bytes: Option<i64>, default: i64) -> u64 {
    u64::try_from(bytes.unwrap_or(default)).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::problem::fields;

    fn block(text: &str) -> Continuous {
        serde_json::from_str(text).unwrap()
    }

    #[test]
    fn empty_continuous_block_has_defaults() {
        let block = block("{}");
        assert_eq!(block.flush_interval(), Duration::from_secs(1));
        assert_eq!(block.max_base_age(), Duration::from_hours(24));
        assert_eq!(block.retention_window(), Duration::from_hours(72));
        assert_eq!(block.max_base_bytes(), 1 << 30);
        assert_eq!(block.spool_limit_bytes(), 1 << 30);
        assert_eq!(block.problems("p", &StorageType::S3), []);
    }

    #[test]
    fn continuous_backup_values_outside_of_limits_are_reported() {
        for (text, field) in [
            (r#"{"flushInterval":"99ms"}"#, "p.flushInterval"),
            (r#"{"flushInterval":"61s"}"#, "p.flushInterval"),
            (r#"{"flushInterval":"soon"}"#, "p.flushInterval"),
            (r#"{"maxBaseAge":"9m"}"#, "p.maxBaseAge"),
            (r#"{"maxBaseAge":"169h"}"#, "p.maxBaseAge"),
            (r#"{"retentionWindow":"9m"}"#, "p.retentionWindow"),
            (r#"{"maxBaseBytes":1048575}"#, "p.maxBaseBytes"),
            (r#"{"spoolLimitBytes":-1}"#, "p.spoolLimitBytes"),
        ] {
            let problems = block(text).problems("p", &StorageType::S3);
            assert_eq!(fields(&problems), [field], "{text}");
        }
        let limits = r#"{"flushInterval":"100ms","maxBaseAge":"168h","retentionWindow":"10m","spoolLimitBytes":0}"#;
        assert_eq!(block(limits).problems("p", &StorageType::S3), []);
    }

    #[test]
    fn continuous_backup_to_local_directory_is_rejected() {
        let found = block("{}").problems("p", &StorageType::Local);
        assert_eq!(fields(&found), ["p"]);
    }
}
