//! `EtcdCluster.spec.upkeep`: full databases and their defragmentation, and what is recorded of it.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::KubeSchema;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::options::AutoCompactionMode;
use super::{EtcdCluster, EtcdClusterSpec};
use crate::schema::null_as_empty;
use crate::text::text_enum;

/// Bytes that have to be free in a database file before its share counts, where `minFreeBytes` is not given.
pub const DEFAULT_MIN_FREE_BYTES: i64 = 104_857_600;
/// The quota of an etcd that was given none (`DefaultQuotaBytes` in etcd's `server/storage/quota.go`).
pub const DEFAULT_QUOTA_BYTES: i64 = 2_147_483_648;

text_enum! {
    /// What is done about a database that has reached its quota.
    NoSpacePolicy {
        /// Compact as configured, defragment member after member, take the alarm back.
        Cure = "Cure",
        /// Report, and leave it to a person.
        Report = "Report",
    }
}

text_enum! {
    /// Why members are defragmented.
    DefragmentationCause {
        /// The database has reached its quota.
        NoSpace = "NoSpace",
        /// The schedule says so.
        Schedule = "Schedule",
        /// Too much of the file is free.
        Threshold = "Threshold",
    }
}

/// Upkeep of the members' databases.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Upkeep {
    /// When the database has reached its quota and etcd refuses writes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub no_space: Option<NoSpace>,
    /// When members are defragmented although no database is full. Never where it is not given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub defragmentation: Option<Defragmentation>,
}

/// What happens when the database has reached its quota.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct NoSpace {
    /// `Cure` (where it is not given): compact, defragment and take the alarm back. `Report`: leave it to a person.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub policy: Option<NoSpacePolicy>,
    /// Revisions that are kept when the operator compacts a database that is full. Where it is not given it keeps
    /// what `spec.etcd.autoCompactionRetention` says in mode `revision`, and compacts nothing in the other mode or
    /// without one: what has to be kept is not known then.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0))]
    pub keep_revisions: Option<i64>,
}

/// When members are defragmented. A member answers nobody while it is, so it is one at a time, the leader last.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = (
    "!has(self.timeZone) || has(self.schedule)",
    "spec.upkeep.defragmentation.timeZone is for a schedule: add spec.upkeep.defragmentation.schedule or remove timeZone"
))]
#[x_kube(validation = (
    "has(self.schedule) || has(self.freePercent)",
    "spec.upkeep.defragmentation must say when: set schedule or freePercent"
))]
pub struct Defragmentation {
    /// When all members are defragmented, as five cron fields or one of `@hourly`, `@daily`, `@weekly`, `@monthly`,
    /// `@yearly`. A time that is missed by more than an hour is left out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 128))]
    #[x_kube(validation = (
        "self.matches('^(@(hourly|daily|weekly|monthly|yearly)|[^ =]+( [^ =]+){4})$')",
        "spec.upkeep.defragmentation.schedule must have five cron fields such as 0 3 * * 6, or be @hourly, @daily, @weekly, @monthly or @yearly: name a time zone in spec.upkeep.defragmentation.timeZone"
    ))]
    pub schedule: Option<String>,
    /// Time zone of the schedule, such as `Europe/Berlin`; `Etc/UTC` where it is not given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 64))]
    pub time_zone: Option<String>,
    /// Share of a member's database file that has to be free, in percent, for that member to be defragmented at
    /// any time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 10, max = 95))]
    pub free_percent: Option<i64>,
    /// Bytes that have to be free besides; 104857600 (100 MiB) where it is not given.
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
    /// Whose: the member's name, or its ID where it is none of the members.
    pub member: String,
}

/// The last defragmentation of the cluster: written before its first call to a member, and before each.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct DefragmentationStatus {
    /// `NoSpace`, `Schedule` or `Threshold`.
    #[schemars(with = "String")]
    pub cause: DefragmentationCause,
    /// When it was decided.
    pub start_time: Time,
    /// When it was over.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub completion_time: Option<Time>,
    /// Revision before which everything was compacted first, where that was asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub compacted_revision: Option<i64>,
    /// The members, in the order they were told.
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
    /// When it was told.
    pub start_time: Time,
    /// When it had answered.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub completion_time: Option<Time>,
    /// Bytes of its database file before.
    pub size_before: i64,
    /// Bytes of its database file after.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub size_after: Option<i64>,
    /// Why it failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

impl EtcdClusterSpec {
    /// The quota the members are given.
    pub fn quota_bytes(&self) -> i64 {
        let given = self.etcd.as_ref().and_then(|etcd| etcd.quota_backend_bytes);
        given.unwrap_or(DEFAULT_QUOTA_BYTES)
    }

    /// Whether a full database is left to a person.
    pub fn only_reports_no_space(&self) -> bool {
        let policy = self.no_space().and_then(|rule| rule.policy.as_ref());
        policy == Some(&NoSpacePolicy::Report)
    }

    /// How many revisions are kept when a full database is compacted; `None`: it is not.
    pub fn revisions_kept(&self) -> Option<i64> {
        if let Some(kept) = self.no_space().and_then(|rule| rule.keep_revisions) {
            return Some(kept);
        }
        let etcd = self.etcd.as_ref()?;
        let by_revision = etcd.auto_compaction_mode == Some(AutoCompactionMode::Revision);
        let kept = etcd.auto_compaction_retention.as_ref()?.parse().ok();
        kept.filter(|kept| by_revision && *kept > 0)
    }

    /// When members are defragmented besides.
    pub fn defragmentation(&self) -> Option<&Defragmentation> {
        self.upkeep.as_ref()?.defragmentation.as_ref()
    }

    fn no_space(&self) -> Option<&NoSpace> {
        self.upkeep.as_ref()?.no_space.as_ref()
    }
}

impl EtcdCluster {
    /// The record of the last defragmentation.
    pub fn last_defragmentation(&self) -> Option<&DefragmentationStatus> {
        self.status.as_ref()?.defragmentation.as_ref()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(json: &str) -> EtcdClusterSpec {
        serde_json::from_str(json).unwrap()
    }

    #[test]
    fn a_full_database_is_compacted_as_the_spec_says_and_not_otherwise() {
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
            (
                r#"{"upkeep":{"noSpace":{"keepRevisions":5}},"etcd":{"autoCompactionMode":"revision","autoCompactionRetention":"1000"}}"#,
                Some(5),
            ),
        ] {
            assert_eq!(spec(json).revisions_kept(), kept, "{json}");
        }
    }

    #[test]
    fn the_quota_is_etcds_own_where_none_is_given() {
        assert_eq!(spec("{}").quota_bytes(), 2 << 30);
        let given = spec(r#"{"etcd":{"quotaBackendBytes":16777216}}"#);
        assert_eq!(given.quota_bytes(), 16 << 20);
    }

    #[test]
    fn members_are_defragmented_only_when_somebody_asks_for_it() {
        assert_eq!(spec("{}").defragmentation(), None);
        assert!(!spec("{}").only_reports_no_space());
        let asked = spec(r#"{"upkeep":{"defragmentation":{"schedule":"@weekly"}}}"#);
        assert!(asked.defragmentation().is_some());
    }
}
