//! `EtcdCluster.spec.upkeep` and its status: defragmentation, and full databases.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::KubeSchema;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::EtcdClusterSpec;
use super::options::AutoCompactionMode;
use crate::schema::null_as_empty;
use crate::text::text_enum;

/// The default of `minFreeBytes`.
pub const DEFAULT_MIN_FREE_BYTES: i64 = 104_857_600;
/// The default quota of etcd (`DefaultQuotaBytes` in etcd's `server/storage/quota.go`).
pub const DEFAULT_QUOTA_BYTES: i64 = 2_147_483_648;

text_enum! {
    /// What the operator does after a database has reached its quota.
    NoSpacePolicy {
        /// The operator compacts if the spec allows it, defragments the members one at a time, and disarms the alarm.
        Cure = "Cure",
        /// The operator reports the problem and changes nothing.
        Report = "Report",
    }
}

text_enum! {
    /// The cause of a defragmentation.
    DefragmentationCause {
        /// The database of a member has reached its quota.
        NoSpace = "NoSpace",
        /// The schedule of defragmentations.
        Schedule = "Schedule",
        /// The free percentage of a database file has reached `freePercent`.
        Threshold = "Threshold",
    }
}

/// Maintenance of the members' databases.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Upkeep {
    /// Settings for a database that has reached its quota, so that etcd rejects writes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub no_space: Option<NoSpace>,
    /// Settings for the defragmentation of databases that are not full. If not set, they are not defragmented.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub defragmentation: Option<Defragmentation>,
}

/// Settings for a database that has reached its quota.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct NoSpace {
    /// `Cure`: compact, defragment, and disarm the alarm. `Report`: only report the problem. The default is `Cure`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub policy: Option<NoSpacePolicy>,
    /// Number of revisions that stay when the operator compacts a full database. If not set, the operator uses
    /// `spec.etcd.autoCompactionRetention` in the mode `revision`. In the mode `periodic`, or without a retention, the
    /// operator does not compact.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0))]
    pub keep_revisions: Option<i64>,
}

/// Settings for the defragmentation. A member serves no requests during its defragmentation, so members are
/// defragmented one at a time, the leader last.
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
    /// Schedule for the defragmentation of all members: five cron fields, or one of `@hourly`, `@daily`, `@weekly`,
    /// `@monthly`, `@yearly`. The operator skips a run that it has missed by more than an hour.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 128))]
    #[x_kube(validation = (
        "self.matches('^(@(hourly|daily|weekly|monthly|yearly)|[^ =]+( [^ =]+){4})$')",
        "spec.upkeep.defragmentation.schedule must have five cron fields such as 0 3 * * 6, or be @hourly, @daily, \
         @weekly, @monthly or @yearly: correct it, and set a time zone only in spec.upkeep.defragmentation.timeZone"
    ))]
    pub schedule: Option<String>,
    /// Time zone of the schedule, such as `Europe/Berlin`. The default is `Etc/UTC`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 64))]
    pub time_zone: Option<String>,
    /// Percentage of a database file. If at least this percentage is free, the operator defragments the member,
    /// independent of the schedule.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 10, max = 95))]
    pub free_percent: Option<i64>,
    /// Minimum number of free bytes for a defragmentation because of `freePercent`. The default is 104857600 (100
    /// MiB).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1_048_576))]
    pub min_free_bytes: Option<i64>,
}

/// An active alarm of etcd.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct AlarmStatus {
    /// Type of the alarm: `NoSpace` or `Corrupt`.
    #[serde(rename = "type")]
    pub kind: String,
    /// Name of the member with the alarm. The member ID if the operator does not know the name.
    pub member: String,
}

/// The last defragmentation of the cluster. The operator updates it before each request to a member.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct DefragmentationStatus {
    /// Cause of the defragmentation: `NoSpace`, `Schedule` or `Threshold`.
    #[schemars(with = "String")]
    pub cause: DefragmentationCause,
    /// Time at which the operator recorded the defragmentation.
    pub start_time: Time,
    /// Time at which the defragmentation completed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub completion_time: Option<Time>,
    /// Revision of the compaction before the defragmentation. Not set if the operator has not compacted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub compacted_revision: Option<i64>,
    /// The members in the order of the requests.
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
    /// Time of the request to the member.
    pub start_time: Time,
    /// Time at which the member responded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub completion_time: Option<Time>,
    /// Size of the database file before the defragmentation, in bytes.
    pub size_before: i64,
    /// Size of the database file after the defragmentation, in bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub size_after: Option<i64>,
    /// Error of the failed defragmentation.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

impl EtcdClusterSpec {
    /// The quota of the databases, in bytes.
    pub fn quota_bytes(&self) -> i64 {
        let given = self.etcd.as_ref().and_then(|etcd| etcd.quota_backend_bytes);
        given.unwrap_or(DEFAULT_QUOTA_BYTES)
    }

    /// True if the operator only reports a full database.
    pub fn only_reports_no_space(&self) -> bool {
        let policy = self.no_space().and_then(|rule| rule.policy.as_ref());
        policy == Some(&NoSpacePolicy::Report)
    }

    /// The number of revisions that stay when the operator compacts a full database. `None` if the operator must not
    /// compact.
    pub fn revisions_kept(&self) -> Option<i64> {
        if let Some(kept) = self.no_space().and_then(|rule| rule.keep_revisions) {
            return Some(kept);
        }
        let etcd = self.etcd.as_ref()?;
        let by_revision = etcd.auto_compaction_mode == Some(AutoCompactionMode::Revision);
        let kept = etcd.auto_compaction_retention.as_ref()?.parse().ok();
        kept.filter(|kept| by_revision && *kept > 0)
    }

    /// The settings for databases that are not full, if any.
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
    fn full_database_is_compacted_only_if_spec_sets_number_of_revisions() {
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
            // Without `autoCompactionMode`, etcd uses the mode `periodic`, so 5 means five hours, and not five
            // revisions.
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
    fn database_quota_defaults_to_2_gib_as_in_etcd() {
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
