//! `EtcdCluster.spec.upkeep` and its status: full databases and defragmentation.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::KubeSchema;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::EtcdClusterSpec;
use super::options::AutoCompactionMode;
use crate::schema::null_as_empty;
use crate::text::text_enum;

/// Default of `minFreeBytes`.
pub const DEFAULT_MIN_FREE_BYTES: i64 = 104_857_600;
/// etcd's default quota (`DefaultQuotaBytes` in etcd's `server/storage/quota.go`).
pub const DEFAULT_QUOTA_BYTES: i64 = 2_147_483_648;

text_enum! {
    /// What the operator does if a database has reached its quota.
    NoSpacePolicy {
        /// The operator compacts as configured, defragments the members one at a time, and disarms the alarm.
        Cure = "Cure",
        /// The operator reports the problem and changes nothing.
        Report = "Report",
    }
}

text_enum! {
    /// Cause of a defragmentation.
    DefragmentationCause {
        /// The database of a member has reached its quota.
        NoSpace = "NoSpace",
        /// A time in `spec.upkeep.defragmentation.schedule` has come.
        Schedule = "Schedule",
        /// The free share of the database file exceeds the threshold.
        Threshold = "Threshold",
    }
}

/// Maintenance of the members' databases.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Upkeep {
    /// What the operator does if the database has reached its quota and etcd rejects writes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub no_space: Option<NoSpace>,
    /// When the operator defragments members although the database is not full. If not set, never.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub defragmentation: Option<Defragmentation>,
}

/// What the operator does if the database has reached its quota.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct NoSpace {
    /// `Cure` (default): compact, defragment and disarm the alarm. `Report`: report the problem and change
    /// nothing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub policy: Option<NoSpacePolicy>,
    /// Number of revisions to keep when the operator compacts a full database. If not set, the operator uses
    /// `spec.etcd.autoCompactionRetention` in mode `revision`. In mode `periodic` or without a retention it
    /// does not compact, because the revisions to keep are unknown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0))]
    pub keep_revisions: Option<i64>,
}

/// When the operator defragments members. A member does not serve requests during its defragmentation, so
/// members are defragmented one at a time, the leader last.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = (
    "!has(self.timeZone) || has(self.schedule)",
    "spec.upkeep.defragmentation.timeZone requires a schedule: add spec.upkeep.defragmentation.schedule or remove timeZone"
))]
#[x_kube(validation = (
    "has(self.schedule) || has(self.freePercent)",
    "spec.upkeep.defragmentation has no schedule and no threshold: set schedule or freePercent"
))]
pub struct Defragmentation {
    /// Schedule of the defragmentation of all members: five cron fields, or one of `@hourly`, `@daily`,
    /// `@weekly`, `@monthly`, `@yearly`. A run that is missed by more than an hour is skipped.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 128))]
    #[x_kube(validation = (
        "self.matches('^(@(hourly|daily|weekly|monthly|yearly)|[^ =]+( [^ =]+){4})$')",
        "spec.upkeep.defragmentation.schedule must have five cron fields such as 0 3 * * 6, or be @hourly, @daily, \
         @weekly, @monthly or @yearly: correct it, and set a time zone only in spec.upkeep.defragmentation.timeZone"
    ))]
    pub schedule: Option<String>,
    /// Time zone of the schedule, such as `Europe/Berlin`. Default `Etc/UTC`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 64))]
    pub time_zone: Option<String>,
    /// The operator defragments a member, independent of the schedule, when at least this percentage of its
    /// database file is free.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 10, max = 95))]
    pub free_percent: Option<i64>,
    /// Minimum number of free bytes for a defragmentation by `freePercent`. Default 104857600 (100 MiB).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1_048_576))]
    pub min_free_bytes: Option<i64>,
}

/// An alarm that etcd has raised.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct AlarmStatus {
    /// `NoSpace` or `Corrupt`.
    #[serde(rename = "type")]
    pub kind: String,
    /// Name of the member that raised the alarm, or the member ID if the member is unknown.
    pub member: String,
}

/// The last defragmentation of the cluster. The operator updates this record before each call to a member.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct DefragmentationStatus {
    /// `NoSpace`, `Schedule` or `Threshold`.
    #[schemars(with = "String")]
    pub cause: DefragmentationCause,
    /// Time at which the operator decided to start the defragmentation.
    pub start_time: Time,
    /// Time at which the defragmentation ended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub completion_time: Option<Time>,
    /// Revision of the compaction before the defragmentation, if the operator compacted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub compacted_revision: Option<i64>,
    /// The members, in the order of the calls.
    #[serde(
        default,
        deserialize_with = "null_as_empty",
        skip_serializing_if = "Vec::is_empty"
    )]
    pub members: Vec<MemberDefragmentation>,
}

/// The defragmentation of one member.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct MemberDefragmentation {
    /// Name of the member.
    pub name: String,
    /// Time at which the operator called the member.
    pub start_time: Time,
    /// Time at which the member answered.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub completion_time: Option<Time>,
    /// Size of the database file before the defragmentation, in bytes.
    pub size_before: i64,
    /// Size of the database file after the defragmentation, in bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub size_after: Option<i64>,
    /// Why the defragmentation failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

impl EtcdClusterSpec {
    /// The quota of the members' databases, in bytes.
    pub fn quota_bytes(&self) -> i64 {
        let given = self.etcd.as_ref().and_then(|etcd| etcd.quota_backend_bytes);
        given.unwrap_or(DEFAULT_QUOTA_BYTES)
    }

    /// Whether the operator only reports a full database.
    pub fn only_reports_no_space(&self) -> bool {
        let policy = self.no_space().and_then(|rule| rule.policy.as_ref());
        policy == Some(&NoSpacePolicy::Report)
    }

    /// Number of revisions to keep when the operator compacts a full database. `None` if the operator must not compact
    /// it.
    pub fn revisions_kept(&self) -> Option<i64> {
        if let Some(kept) = self.no_space().and_then(|rule| rule.keep_revisions) {
            return Some(kept);
        }
        let etcd = self.etcd.as_ref()?;
        let by_revision = etcd.auto_compaction_mode == Some(AutoCompactionMode::Revision);
        let kept = etcd.auto_compaction_retention.as_ref()?.parse().ok();
        kept.filter(|kept| by_revision && *kept > 0)
    }

    /// The settings for defragmentations of databases that are not full. `None` if there are none.
    pub fn defragmentation(&self) -> Option<&Defragmentation> {
        self.upkeep.as_ref()?.defragmentation.as_ref()
    }

    fn no_space(&self) -> Option<&NoSpace> {
        self.upkeep.as_ref()?.no_space.as_ref()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(json: &str) -> EtcdClusterSpec {
        serde_json::from_str(json).unwrap()
    }

    #[test]
    fn full_database_is_compacted_only_if_spec_sets_retained_revisions() {
        for (json, kept) in [
            ("{}", None),
            (r#"{"upkeep":{"noSpace":{"keepRevisions":10}}}"#, Some(10)),
            (
                r#"{"etcd":{"autoCompactionMode":"revision","autoCompactionRetention":"1000"}}"#,
                Some(1000),
            ),
            (
                r#"{"etcd":{"autoCompactionMode":"periodic","autoCompactionRetention":"30m"}}"#,
                None,
            ),
            (
                r#"{"etcd":{"autoCompactionMode":"periodic","autoCompactionRetention":"1"}}"#,
                None,
            ),
            // etcd's default mode is periodic, so 5 means five hours, not five revisions.
            (r#"{"etcd":{"autoCompactionRetention":"5"}}"#, None),
            (
                r#"{"upkeep":{"noSpace":{"keepRevisions":5}},"etcd":{"autoCompactionMode":"revision","autoCompactionRetention":"1000"}}"#,
                Some(5),
            ),
        ] {
            assert_eq!(spec(json).revisions_kept(), kept, "{json}");
        }
    }

    #[test]
    fn database_quota_defaults_to_default_of_etcd() {
        assert_eq!(spec("{}").quota_bytes(), 2 << 30);
        let given = spec(r#"{"etcd":{"quotaBackendBytes":16777216}}"#);
        assert_eq!(given.quota_bytes(), 16 << 20);
    }

    #[test]
    fn defragmentation_is_off_by_default() {
        assert_eq!(spec("{}").defragmentation(), None);
        assert!(!spec("{}").only_reports_no_space());
        let scheduled = spec(r#"{"upkeep":{"defragmentation":{"schedule":"@weekly"}}}"#);
        assert!(scheduled.defragmentation().is_some());
    }
}
