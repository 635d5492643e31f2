//! `spec.backup.beforeChanges`: changes that wait for a recent backup, and the last such change in the status.

use std::time::Duration;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time};
use k8s_openapi::jiff::{SignedDuration, Timestamp};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::EtcdClusterSpec;
use crate::command;
use crate::duration::DurationText;
use crate::names::ANNOTATION_SKIP_BACKUP;
use crate::schema::is_false;
use crate::text::text_enum;

/// The default of `spec.backup.beforeChangesMaxAge`, in seconds.
pub const DEFAULT_BEFORE_CHANGES_MAX_AGE_SECONDS: u64 = 3600;

/// A recorded time may exceed the current time by at most this duration. A later time comes from a wrong clock, so it
/// is ignored: a backup with such a time counts as old, and a request with such a time has no effect.
pub const MAX_CLOCK_SKEW: SignedDuration = SignedDuration::from_hours(1);

text_enum! {
    /// A change that can wait for a recent backup.
    ClusterChange {
        /// A change of the etcd version, also a downgrade.
        Upgrade = "Upgrade",
        /// A recovery from a lost quorum.
        Recovery = "Recovery",
        /// A restore in place.
        Restore = "Restore",
        /// The removal of members after `spec.size` was reduced.
        Shrink = "Shrink",
    }
}

/// A backup of the cluster.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct LastBackup {
    /// Name of the EtcdBackup.
    pub name: String,
    /// Time at which the backup completed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub time: Option<Time>,
    /// Revision of the backup.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub revision: Option<i64>,
    /// Location, such as `s3://bucket/key`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub location: Option<String>,
    /// Cluster ID of the backed up cluster, in hexadecimal without leading zeros.
    #[serde(default, rename = "clusterID", skip_serializing_if = "Option::is_none")]
    pub cluster_id: Option<String>,
}

/// The last upgrade or removal of members that waited for a backup. The operator records it before the change starts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct BeforeChangeStatus {
    /// The kind of the change: `Upgrade` or `Shrink`.
    #[schemars(with = "String")]
    pub change: ClusterChange,
    /// Cluster ID at the time of the change.
    #[serde(rename = "clusterID")]
    pub cluster_id: String,
    /// Time at which the change began to wait for a backup.
    pub start_time: Time,
    /// The backup after which the change started. Not set while the change waits, or if a user has waived the backup.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub backup: Option<LastBackup>,
    /// True if a user has waived the backup.
    #[serde(default, skip_serializing_if = "is_false")]
    pub waived: bool,
    /// Time at which the change completed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub completion_time: Option<Time>,
}

impl BeforeChangeStatus {
    /// The status of a change that has waited for a backup since `start_time`.
    pub fn waiting(change: ClusterChange, cluster_id: String, start_time: Time) -> Self {
        Self {
            change,
            cluster_id,
            start_time,
            backup: None,
            waived: false,
            completion_time: None,
        }
    }

    /// True if the change may start.
    pub fn has_passed(&self) -> bool {
        self.backup.is_some() || self.waived
    }

    /// True if the change waits for a backup of the cluster with this ID.
    pub fn requests_backup(&self, cluster_id: &str) -> bool {
        self.cluster_id == cluster_id && !self.has_passed() && self.completion_time.is_none()
    }
}

impl EtcdClusterSpec {
    /// The maximum age of the backup before this change. `None` if the change does not wait for a backup.
    pub fn max_backup_age_before(&self, change: &ClusterChange) -> Option<Duration> {
        let backup = self.backup.as_ref()?;
        let age = backup.before_changes_max_age.as_ref();
        let default = Duration::from_secs(DEFAULT_BEFORE_CHANGES_MAX_AGE_SECONDS);
        let waits = backup.before_changes.contains(change);
        waits.then(|| age.and_then(DurationText::parse).unwrap_or(default))
    }

    /// The required backup as part of a sentence. `age` is its maximum age.
    pub fn needed_backup(&self, age: Duration) -> String {
        let backup = self.backup.as_ref();
        let proven = backup.is_some_and(|backup| backup.verification.is_some());
        let proven = if proven { "proven to restore and " } else { "" };
        let age = age.as_secs();
        format!("a backup of this cluster that is {proven}at most {age} s old")
    }

    /// True if `spec.backup` is suspended.
    pub fn suspends_backups(&self) -> bool {
        let backup = self.backup.as_ref();
        backup.is_some_and(|backup| backup.suspend || backup.backup_policy.suspend)
    }
}

impl LastBackup {
    /// True if the backup has this cluster ID and completed at `since` or later. False if its time comes from a wrong
    /// clock ([`MAX_CLOCK_SKEW`]).
    pub fn covers(&self, cluster_id: &str, since: Timestamp, now: Timestamp) -> bool {
        let is_own = self.cluster_id.as_deref() == Some(cluster_id);
        let time = self.time.as_ref().map(|time| time.0);
        is_own
            && time.is_some_and(|time| time >= since && time.duration_since(now) <= MAX_CLOCK_SKEW)
    }
}

/// The completion time of a backup whose age is `age` at the time `at`. Earlier backups are too old.
pub fn earliest_backup(at: Timestamp, age: Duration) -> Timestamp {
    let age = SignedDuration::try_from(age).unwrap_or(SignedDuration::MAX);
    at.checked_sub(age).unwrap_or(Timestamp::MIN)
}

/// The value of the annotation [`crate::names::ANNOTATION_SKIP_BACKUP`] that waives the backup before one change. The
/// value contains the start of the wait, so it does not apply to later changes.
pub fn backup_waiver(change: &ClusterChange, since: Timestamp) -> String {
    format!("{change}/{since}")
}

/// A sentence that tells the user how to waive the backup. `object` is the EtcdCluster or EtcdRestore, and `kind` its
/// kind in lower case.
pub fn how_to_waive_backup(kind: &str, object: &ObjectMeta, waiver: &str) -> String {
    let command = command::annotate(kind, object, ANNOTATION_SKIP_BACKUP, waiver);
    format!("To continue without a backup, run {command}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(text: &str) -> Timestamp {
        text.parse().unwrap()
    }

    fn backup(cluster_id: &str, time: &str) -> LastBackup {
        LastBackup {
            cluster_id: Some(cluster_id.into()),
            time: Some(Time(at(time))),
            ..LastBackup::default()
        }
    }

    #[test]
    fn only_listed_changes_wait_for_backup() {
        let spec = |more: &str| -> EtcdClusterSpec {
            let text = format!(
                r#"{{"backup":{{"storageType":"S3","s3":{{"path":"b/k"}},"backupPolicy":{{"schedule":"@daily"}}{more}}}}}"#
            );
            serde_json::from_str(&text).unwrap()
        };
        let none = spec("");
        assert_eq!(none.max_backup_age_before(&ClusterChange::Upgrade), None);
        let some = spec(r#","beforeChanges":["Upgrade"]"#);
        let hour = Some(Duration::from_hours(1));
        assert_eq!(some.max_backup_age_before(&ClusterChange::Upgrade), hour);
        assert_eq!(some.max_backup_age_before(&ClusterChange::Shrink), None);
        let short = spec(r#","beforeChanges":["Shrink"],"beforeChangesMaxAge":"5m""#);
        let age = short.max_backup_age_before(&ClusterChange::Shrink);
        assert_eq!(age, Some(Duration::from_mins(5)));
        assert!(!short.suspends_backups());
        let minutes = Duration::from_mins(5);
        assert_eq!(
            short.needed_backup(minutes),
            "a backup of this cluster that is at most 300 s old"
        );
        let proven = spec(r#","verification":{}"#).needed_backup(minutes);
        assert!(proven.contains("proven to restore"), "{proven}");
        assert!(spec(r#","suspend":true"#).suspends_backups());
    }

    #[test]
    fn only_recent_backup_of_same_cluster_covers_change() {
        let now = at("2026-11-27T12:00:00Z");
        let since = earliest_backup(now, Duration::from_hours(1));
        assert_eq!(since, at("2026-11-27T11:00:00Z"));
        for (time, covers) in [
            ("2026-11-27T10:59:59Z", false),
            ("2026-11-27T11:00:00Z", true),
            ("2026-11-27T12:30:00Z", true),
            ("2026-11-27T13:00:01Z", false),
        ] {
            assert_eq!(
                backup("ab", time).covers("ab", since, now),
                covers,
                "{time}"
            );
            assert!(!backup("cd", time).covers("ab", since, now), "{time}");
        }
        assert!(!LastBackup::default().covers("ab", since, now));
        assert_eq!(earliest_backup(now, Duration::MAX), Timestamp::MIN);
    }

    #[test]
    fn waiver_contains_change_and_start_of_wait() {
        let since = at("2026-11-27T12:00:00Z");
        let waiver = backup_waiver(&ClusterChange::Upgrade, since);
        assert_eq!(waiver, "Upgrade/2026-11-27T12:00:00Z");
        let object = ObjectMeta {
            name: Some("main".into()),
            ..ObjectMeta::default()
        };
        let advice = how_to_waive_backup("etcdcluster", &object, &waiver);
        let set =
            "etcdcluster main etcd.database.coreos.com/skip-backup=Upgrade/2026-11-27T12:00:00Z ";
        assert!(advice.contains(set), "{advice}");
    }
}
