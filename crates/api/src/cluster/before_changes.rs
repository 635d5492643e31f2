//! `spec.backup.beforeChanges` and `spec.deletionPolicy: BackupThenDelete`: changes that wait for a backup, and the
//! last such change in the status.

use std::time::Duration;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time};
use k8s_openapi::jiff::{SignedDuration, Timestamp};
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Serialize};

use super::{ClusterDeletionPolicy, EtcdCluster, EtcdClusterSpec};
use crate::command;
use crate::duration::DurationText;
use crate::names::{ANNOTATION_RESTORE, ANNOTATION_SKIP_BACKUP};
use crate::schema::is_false;
use crate::text::text_enum;

/// The default of `spec.backup.beforeChangesMaxAge`, in seconds.
pub const DEFAULT_BEFORE_CHANGES_MAX_AGE_SECONDS: u64 = 3600;

/// A recorded time may exceed the current time by at most this duration. A later time comes from a wrong clock, so it
/// is ignored: a backup with such a time counts as old, and a request with such a time has no effect.
pub const MAX_CLOCK_SKEW: SignedDuration = SignedDuration::from_hours(1);

text_enum! {
    /// A change that can wait for a backup.
    ClusterChange {
        /// A change of the etcd version, also a downgrade.
        Upgrade = "Upgrade",
        /// A recovery from a lost quorum.
        Recovery = "Recovery",
        /// A restore in place.
        Restore = "Restore",
        /// The removal of members after `spec.size` was reduced.
        Shrink = "Shrink",
        /// The deletion of an EtcdCluster with `spec.deletionPolicy: BackupThenDelete`.
        Deletion = "Deletion",
    }
}

/// The changes that `spec.backup.beforeChanges` may contain. For the deletion, a user sets `spec.deletionPolicy`.
pub const BEFORE_CHANGES: &[&str] = &["Upgrade", "Recovery", "Restore", "Shrink"];

/// The schema of `spec.backup.beforeChanges`.
pub(super) fn change_list(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "array",
        "maxItems": 8,
        "items": { "type": "string", "enum": BEFORE_CHANGES },
    })
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

/// The backup that `status.beforeChange` requests, as the backup operator reports it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct BackupRequestStatus {
    /// Time of the request: `startTime` in `status.beforeChange`.
    pub start_time: Time,
    /// State of the EtcdBackup that makes the backup.
    pub message: String,
}

/// The last upgrade, removal of members or deletion that waited for a backup. The operator records it before the change
/// starts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct BeforeChangeStatus {
    /// The kind of the change: `Upgrade`, `Shrink` or `Deletion`.
    #[schemars(with = "String")]
    pub change: ClusterChange,
    /// Cluster ID at the time of the change.
    #[serde(rename = "clusterID")]
    pub cluster_id: String,
    /// Time at which the change began to wait for a backup.
    pub start_time: Time,
    /// Revision of etcd at the time of the request, for a deletion. The backup must have this revision or a later one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub revision: Option<i64>,
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
            revision: None,
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
        if *change == ClusterChange::Deletion {
            // A maximum age of zero: the backup must be newer than the request for the deletion.
            return self.backs_up_before_deletion().then_some(Duration::ZERO);
        }
        let backup = self.backup.as_ref()?;
        let age = backup.before_changes_max_age.as_ref();
        let default = Duration::from_secs(DEFAULT_BEFORE_CHANGES_MAX_AGE_SECONDS);
        let waits = backup.before_changes.contains(change);
        waits.then(|| age.and_then(DurationText::parse).unwrap_or(default))
    }

    /// True if the deletion of the EtcdCluster waits for a backup.
    pub fn backs_up_before_deletion(&self) -> bool {
        self.deletion_policy == Some(ClusterDeletionPolicy::BackupThenDelete)
    }

    /// True if changes wait for a backup, so that the backup operator must report the newest backup.
    pub fn has_changes_after_backup(&self) -> bool {
        let backup = self.backup.as_ref();
        backup.is_some_and(|backup| !backup.before_changes.is_empty())
            || self.backs_up_before_deletion()
    }

    /// The part of a message that describes the required backup. `age` is the maximum age of the backup.
    pub fn needed_backup(&self, change: &ClusterChange, age: Duration) -> String {
        let backup = self.backup.as_ref();
        let proven = backup.is_some_and(|backup| backup.verification.is_some());
        let proven = if proven { "proven to restore and " } else { "" };
        if *change == ClusterChange::Deletion {
            return format!(
                "a backup of this cluster that is {proven}newer than the request for the deletion"
            );
        }
        let age = age.as_secs();
        format!("a backup of this cluster that is {proven}at most {age} s old")
    }

    /// Why the spec prevents backups, with the remedy. `None` if the spec allows backups.
    pub fn backup_obstacle(&self) -> Option<&'static str> {
        let Some(backup) = &self.backup else {
            return Some("spec.backup is not set: set spec.backup");
        };
        if backup.suspend || backup.backup_policy.suspend {
            return Some(
                "spec.backup is suspended: set suspend to false in spec.backup and its backupPolicy",
            );
        }
        self.hibernate
            .then_some("spec.hibernate is true: set spec.hibernate to false")
    }
}

impl EtcdCluster {
    /// True if the EtcdCluster is being deleted and needs no backup anymore: its backup is complete or waived, or the
    /// cluster has never formed. `is_marked`: an object of a member has a cluster ID, so the cluster has formed, even
    /// if the status has lost this ID.
    ///
    /// If the status has no cluster ID, the result is false without `status.bootstrap`, because the status may be lost,
    /// and false while a restore has locked the EtcdCluster.
    pub fn may_be_deleted(&self, is_marked: bool) -> bool {
        if self.metadata.deletion_timestamp.is_none() {
            return false;
        }
        let Some(status) = &self.status else {
            return false;
        };
        let record = status.before_change.as_ref();
        let annotations = self.metadata.annotations.as_ref();
        match &status.cluster_id {
            Some(id) => record.is_some_and(|record| {
                record.change == ClusterChange::Deletion
                    && record.cluster_id == *id
                    && record.has_passed()
            }),
            None => {
                !is_marked
                    && status.bootstrap.is_some()
                    && annotations.is_none_or(|all| !all.contains_key(ANNOTATION_RESTORE))
            }
        }
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
    fn only_changes_listed_in_before_changes_wait_for_backup() {
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
        assert_eq!(short.backup_obstacle(), None);
        let minutes = Duration::from_mins(5);
        assert_eq!(
            short.needed_backup(&ClusterChange::Shrink, minutes),
            "a backup of this cluster that is at most 300 s old"
        );
        let proven = spec(r#","verification":{}"#);
        let proven = proven.needed_backup(&ClusterChange::Shrink, minutes);
        assert!(proven.contains("proven to restore"), "{proven}");
        let suspended = spec(r#","suspend":true"#).backup_obstacle();
        assert!(suspended.is_some_and(|text| text.contains("suspend to false")));
    }

    fn being_deleted(status: &str, annotations: &str) -> EtcdCluster {
        let text = format!(
            r#"{{"apiVersion":"etcd.database.coreos.com/v1beta2","kind":"EtcdCluster","metadata":{{"name":"main",
               "deletionTimestamp":"2026-11-27T12:00:00Z","annotations":{{{annotations}}}}},
               "spec":{{"deletionPolicy":"BackupThenDelete"}},"status":{status}}}"#
        );
        serde_json::from_str(&text).unwrap()
    }

    #[test]
    fn backup_then_delete_requires_backup_even_without_before_changes() {
        let spec = being_deleted("{}", "").spec;
        let age = spec.max_backup_age_before(&ClusterChange::Deletion);
        assert_eq!(age, Some(Duration::ZERO));
        assert!(spec.has_changes_after_backup() && spec.retains_volumes());
        assert_eq!(spec.max_backup_age_before(&ClusterChange::Upgrade), None);
        let needed = spec.needed_backup(&ClusterChange::Deletion, Duration::ZERO);
        assert!(needed.ends_with("newer than the request for the deletion"));
        assert!(
            spec.backup_obstacle()
                .is_some_and(|text| text.contains("not set"))
        );
        let other = EtcdClusterSpec::default();
        assert_eq!(other.max_backup_age_before(&ClusterChange::Deletion), None);
        assert!(!other.has_changes_after_backup());
    }

    #[test]
    fn invariant_41_cluster_may_be_deleted_only_after_its_own_backup_or_waiver() {
        let formed = |change: &str, id: &str, end: &str| {
            let status = format!(
                r#"{{"clusterID":"ab","bootstrap":{{"token":"t"}},"beforeChange":{{"change":"{change}",
                   "clusterID":"{id}","startTime":"2026-11-27T12:00:00Z"{end}}}}}"#
            );
            being_deleted(&status, "").may_be_deleted(true)
        };
        let backup = r#","backup":{"name":"main"}"#;
        assert!(formed("Deletion", "ab", backup));
        assert!(formed("Deletion", "ab", r#","waived":true"#));
        assert!(!formed("Deletion", "ab", ""), "without a backup");
        assert!(
            !formed("Deletion", "cd", backup),
            "with a backup of another cluster"
        );
        assert!(
            !formed("Upgrade", "ab", backup),
            "with the backup of another change"
        );
        let unformed = r#"{"bootstrap":{"token":"t"}}"#;
        assert!(being_deleted(unformed, "").may_be_deleted(false));
        assert!(!being_deleted(unformed, "").may_be_deleted(true));
        let lock = r#""etcd.database.coreos.com/restore":"uid""#;
        assert!(!being_deleted(unformed, lock).may_be_deleted(false));
        assert!(
            !being_deleted("{}", "").may_be_deleted(false),
            "the cluster must be kept if its status is lost"
        );
        let mut live = being_deleted(unformed, "");
        live.metadata.deletion_timestamp = None;
        assert!(!live.may_be_deleted(false));
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
    fn backup_waiver_names_change_and_start_of_wait() {
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
