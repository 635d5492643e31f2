//! Changes that wait for a recent backup (`spec.backup.beforeChanges`).

use api::cluster::{BeforeChangeStatus, ClusterChange, LastBackup};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use serde_json::json;

use crate::plan::tests::recovery::{approved, begun, one_left, problem};
use crate::plan::tests::rolling::{one, patched, towards};
use crate::plan::tests::scene::{CLUSTER, Scene, at};
use crate::plan::tests::writes::Write;
use crate::reason::Reason;

impl Scene {
    /// Makes the spec require a backup that is at most 100 s old before these changes.
    fn guarded(mut self, changes: &[&str]) -> Self {
        let backup = json!({
            "storageType": "S3", "s3": { "path": "b/k" }, "backupPolicy": { "schedule": "@daily" },
            "beforeChanges": changes, "beforeChangesMaxAge": "100s",
        });
        self.desired.object.spec.backup = Some(serde_json::from_value(backup).unwrap());
        self
    }

    /// Adds the backup operator's report of a backup that was complete at this Unix time.
    pub(super) fn backed_up(mut self, seconds: i64) -> Self {
        self.observed.before_change.backup = Some(backup(CLUSTER.to_string(), seconds));
        self
    }

    pub(super) fn recorded(
        mut self,
        change: ClusterChange,
        mend: impl FnOnce(&mut BeforeChangeStatus),
    ) -> Self {
        let mut record = waiting(change);
        mend(&mut record);
        self.observed.before_change.record = Some(record);
        self
    }

    pub(super) fn waived(mut self, waiver: &str) -> Self {
        self.observed.before_change.waiver = Some(waiver.to_owned());
        self
    }

    pub(super) fn record_written(&self) -> Option<BeforeChangeStatus> {
        self.writes().into_iter().find_map(|write| match write {
            Write::RecordBeforeChange { record, over } => {
                assert_eq!(over, self.observed.resource_version);
                record
            }
            _ => None,
        })
    }
}

fn backup(cluster_id: String, seconds: i64) -> LastBackup {
    LastBackup {
        name: "db".into(),
        time: Some(Time(at(seconds))),
        revision: Some(7),
        location: Some("s3://b/k".into()),
        cluster_id: Some(cluster_id),
    }
}

/// The record of a change that has waited since 990 s (Unix time).
fn waiting(change: ClusterChange) -> BeforeChangeStatus {
    BeforeChangeStatus {
        change,
        cluster_id: CLUSTER.to_string(),
        start_time: Time(at(990)),
        revision: None,
        backup: None,
        waived: false,
        completion_time: None,
    }
}

fn upgrade() -> Scene {
    towards("3.6.15", "3.6.16").compared()
}

fn shrinking() -> Scene {
    Scene::formed(&["a", "b", "c", "d", "e"]).size(3)
}

/// The annotation that waives the backup for the change that has waited since 990 s (Unix time).
const WAIVER: &str = "Upgrade/1970-01-01T00:16:30Z";

#[test]
fn invariant_32_upgrade_requests_backup_and_waits() {
    let scene = upgrade().guarded(&["Upgrade"]);
    assert_eq!(patched(&scene), []);
    let record = scene.record_written().unwrap();
    assert_eq!(record.change, ClusterChange::Upgrade);
    assert_eq!(record.start_time, Time(at(1000)));
    assert!(record.requests_backup(&CLUSTER.to_string()));
    let waiting = scene.recorded(ClusterChange::Upgrade, |_| ());
    assert_eq!(waiting.record_written(), None);
    assert_eq!(patched(&waiting), []);
    assert_eq!(waiting.waits(), [Reason::AwaitingBackup]);
    let plan = waiting.plan();
    let text = &plan.waiting_for[0].message;
    let command = format!(
        "`kubectl -n prod annotate etcdcluster db etcd.database.coreos.com/skip-backup={WAIVER} --overwrite`"
    );
    for part in ["etcd 3.6.16", "100 s", "EtcdBackup db", command.as_str()] {
        assert!(text.contains(part), "{part}: {text}");
    }
}

#[test]
fn invariant_32_upgrade_starts_only_with_recorded_recent_backup() {
    let waiting = || {
        upgrade()
            .guarded(&["Upgrade"])
            .recorded(ClusterChange::Upgrade, |_| ())
    };
    for too_old in [0, 889] {
        let scene = waiting().backed_up(too_old);
        assert_eq!(scene.record_written(), None, "{too_old}");
        assert_eq!(patched(&scene), [], "{too_old}");
    }
    let mut other = waiting().backed_up(995);
    other.observed.before_change.backup = Some(backup("beef".into(), 995));
    assert_eq!(other.record_written(), None);
    let scene = waiting().backed_up(995);
    let record = scene.record_written().unwrap();
    assert_eq!(record.backup, scene.observed.before_change.backup);
    assert_eq!(record.start_time, Time(at(990)));
    assert_eq!(
        patched(&scene),
        [],
        "the backup must be recorded before any image changes"
    );
    let mut recorded = waiting();
    recorded.observed.before_change.record = Some(record);
    assert_eq!(patched(&recorded), one("b", "3.6.16"));
}

#[test]
fn existing_recent_backup_is_recorded_without_request() {
    let scene = upgrade().guarded(&["Upgrade"]).backed_up(900);
    let record = scene.record_written().unwrap();
    assert!(record.has_passed());
    assert!(!record.requests_backup(&CLUSTER.to_string()));
}

#[test]
fn backup_made_for_waiting_change_counts_after_slow_verification() {
    let slow = |record: &mut BeforeChangeStatus| record.start_time = Time(at(500));
    let scene = upgrade()
        .guarded(&["Upgrade"])
        .recorded(ClusterChange::Upgrade, slow);
    assert_eq!(scene.clone().backed_up(499).record_written(), None);
    assert!(scene.backed_up(510).record_written().is_some());
}

#[test]
fn started_upgrade_continues_with_recorded_backup() {
    let passed = |record: &mut BeforeChangeStatus| {
        record.start_time = Time(at(0));
        record.backup = Some(backup(CLUSTER.to_string(), 0));
    };
    let scene = upgrade()
        .guarded(&["Upgrade"])
        .runs("b", "3.6.16")
        .recorded(ClusterChange::Upgrade, passed);
    assert_eq!(patched(&scene), one("c", "3.6.16"));
    let done = scene.all_run("3.6.16");
    let record = done.record_written().unwrap();
    assert_eq!(record.completion_time, Some(Time(at(1000))));
    assert!(record.backup.is_some());
    let mut later = upgrade().guarded(&["Upgrade"]);
    later.observed.before_change.record = Some(record);
    assert_eq!(patched(&later), [], "the next upgrade needs another backup");
    assert!(later.record_written().unwrap().backup.is_none());
}

#[test]
fn waiver_must_name_recorded_change_and_start_time() {
    let scene = || upgrade().guarded(&["Upgrade"]);
    assert!(!scene().waived(WAIVER).record_written().unwrap().waived);
    let waiting = || scene().recorded(ClusterChange::Upgrade, |_| ());
    for other in [
        "Upgrade",
        "Shrink/1970-01-01T00:16:30Z",
        "Upgrade/1970-01-01T00:16:31Z",
    ] {
        assert_eq!(waiting().waived(other).record_written(), None, "{other}");
    }
    let record = waiting().waived(WAIVER).record_written().unwrap();
    assert!(record.waived && record.backup.is_none());
    let mut waived = scene();
    waived.observed.before_change.record = Some(record);
    assert_eq!(patched(&waived), one("b", "3.6.16"));
}

#[test]
fn withdrawn_upgrade_removes_backup_request() {
    let scene = towards("3.6.16", "3.6.16")
        .guarded(&["Upgrade"])
        .recorded(ClusterChange::Upgrade, |_| ());
    let removes = |write: &Write| matches!(write, Write::RecordBeforeChange { record: None, .. });
    assert!(scene.writes().iter().any(removes));
}

#[test]
fn backup_waiver_of_former_cluster_is_ignored() {
    let former = |record: &mut BeforeChangeStatus| {
        record.cluster_id = "beef".into();
        record.waived = true;
    };
    let scene = upgrade()
        .guarded(&["Upgrade"])
        .recorded(ClusterChange::Upgrade, former);
    assert_eq!(patched(&scene), []);
    assert!(!scene.record_written().unwrap().waived);
}

#[test]
fn suspended_backups_are_reported_as_problem() {
    let mut scene = upgrade()
        .guarded(&["Upgrade"])
        .recorded(ClusterChange::Upgrade, |_| ());
    scene.desired.object.spec.backup.as_mut().unwrap().suspend = true;
    let text = problem(&scene, Reason::NoRecentBackup);
    assert!(text.contains("suspend to false"), "{text}");
}

#[test]
fn change_missing_in_before_changes_needs_no_backup() {
    let scene = upgrade().guarded(&["Recovery", "Restore", "Shrink"]);
    assert_eq!(patched(&scene), one("b", "3.6.16"));
    assert_eq!(shrinking().guarded(&["Upgrade"]).changes().len(), 1);
}

#[test]
fn rollback_of_one_member_needs_no_backup() {
    let scene = towards("3.6.15", "3.6.15")
        .guarded(&["Upgrade"])
        .changed("b", "3.6.15", "3.6.16");
    assert_eq!(patched(&scene), one("b", "3.6.15"));
}

#[test]
fn invariant_32_surplus_members_are_removed_after_backup() {
    let scene = shrinking().guarded(&["Shrink"]);
    assert_eq!(scene.changes(), []);
    let record = scene.record_written().unwrap();
    assert_eq!(record.change, ClusterChange::Shrink);
    let passed = |record: &mut BeforeChangeStatus| record.waived = true;
    let passed = scene.recorded(ClusterChange::Shrink, passed);
    assert_eq!(passed.changes().len(), 1);
    let done = Scene::formed(&["a", "b", "c"])
        .guarded(&["Shrink"])
        .recorded(ClusterChange::Shrink, |record| record.waived = true);
    let record = done.record_written().unwrap();
    assert!(record.completion_time.is_some());
}

#[test]
fn invariant_32_recovery_needs_backup_that_is_recent_at_quorum_loss() {
    let scene = || approved(one_left()).guarded(&["Recovery"]);
    assert!(begun(&scene()).is_none());
    let text = problem(&scene(), Reason::NoRecentBackup);
    // In this scene, the quorum was lost at 900 s (Unix time).
    let waiver = "Recovery/1970-01-01T00:15:00Z";
    for part in [waiver, "`kubectl etcd -n prod backup db`"] {
        assert!(text.contains(part), "{part}: {text}");
    }
    assert!(begun(&scene().backed_up(799)).is_none());
    assert!(begun(&scene().backed_up(800)).is_some());
    let mut unreported = scene().backed_up(800);
    unreported.observed.recovery.unavailable_since = None;
    assert!(
        begun(&unreported).is_none(),
        "no recovery may start while the time of the quorum loss is unknown"
    );
    assert!(begun(&scene().waived("Recovery/1970-01-01T00:15:01Z")).is_none());
    assert!(begun(&scene().waived(waiver)).is_some());
    assert!(begun(&approved(one_left()).guarded(&["Upgrade"])).is_some());
    assert_eq!(
        scene().record_written(),
        None,
        "the plan must not request a backup"
    );
}

/// A member sends a snapshot even without a quorum, so a user can back up the data with which the recovery continues.
#[test]
fn recovery_accepts_backup_of_survivor_taken_after_quorum_loss() {
    let scene = approved(one_left()).guarded(&["Recovery"]);
    assert!(begun(&scene.backed_up(990)).is_some());
}
