//! Tests of the finalizer, and of the removal of all stored backups.

use super::periodic::first_complete;
use super::*;
use crate::plan::removable_finalizers;
use crate::snapshot::RemovalResult;

#[test]
fn finalizer_is_set_only_for_deletion_policy_delete() {
    let delete = |object: &mut Value| object["spec"]["deletionPolicy"] = json!("Delete");
    // The finalizer is added before the first transfer starts.
    let fresh = with(delete);
    let snapshot = Snapshot::default();
    let free = known(Work::Idle, Destination::Free);
    let started = begun(delete);
    assert_eq!(
        plan(&started, &free, at(1)).action,
        Action::SetFinalizer(true)
    );
    let mut guarded = started;
    guarded.metadata.finalizers = Some(vec![api::names::FINALIZER_STORED.to_owned()]);
    assert_eq!(plan(&guarded, &free, at(1)).action, Action::StartTransfer);
    let mut finalized = fresh;
    finalized.metadata.finalizers = Some(vec![api::names::FINALIZER_STORED.to_owned()]);
    assert_eq!(
        plan(&finalized, &snapshot, at(0)).action,
        Action::RecordIntent
    );
    let mut retained = finalized.clone();
    retained.spec.deletion_policy = None;
    assert_eq!(
        plan(&retained, &snapshot, at(0)).action,
        Action::SetFinalizer(false)
    );

    // During the deletion, the operator cancels the transfer, removes the stored backups, and then removes the
    // finalizer.
    finalized.metadata.deletion_timestamp = Some(at(10).into());
    let running = known(Work::Running(Moved::default()), Destination::NotRead);
    assert_eq!(
        plan(&finalized, &running, at(10)).action,
        Action::AbandonTransfer
    );
    assert_eq!(need(&finalized, &running, at(10)), Need::Nothing);
    assert_eq!(need(&finalized, &snapshot, at(10)), Need::RemoveAll);
    assert_eq!(
        plan(&finalized, &snapshot, at(10)).action,
        Action::RemoveAll
    );
    let mut removed = Snapshot::default();
    removed.removal.work = Work::Ended(Ok(RemovalResult {
        everything: true,
        ..RemovalResult::default()
    }));
    assert_eq!(need(&finalized, &removed, at(11)), Need::Nothing);
    assert_eq!(
        plan(&finalized, &removed, at(11)).action,
        Action::SetFinalizer(false)
    );
    // A failed removal blocks the deletion of the EtcdBackup, and a condition reports it.
    let denied = Snapshot {
        obstacle: Some(refused()),
        ..Snapshot::default()
    };
    let waits = plan(&finalized, &denied, at(1000));
    assert_eq!(
        (waits.action, &waits.verdict),
        (Action::Nothing, &Verdict::DeletionBlocked(refused()))
    );
    let status = status(&finalized, &waits, at(1000));
    let applied = find(&status.conditions, &ConditionType::RetentionApplied).unwrap();
    assert!(applied.message.contains("Retain"), "{}", applied.message);
    // If the namespace is being deleted, its Secrets are deleted, too, and the operator cannot open the store. After
    // five minutes, the operator removes the finalizer and keeps the stored backups.
    let secret_missing = Snapshot {
        obstacle: Some(Trouble::new(Reason::SecretMissing, "missing")),
        ..Snapshot::default()
    };
    assert_eq!(
        plan(&finalized, &secret_missing, at(20)).action,
        Action::Nothing
    );
    assert_eq!(
        plan(&finalized, &secret_missing, at(400)).action,
        Action::SetFinalizer(false)
    );
}

/// coreos/etcd-operator adds a finalizer to periodic EtcdBackups. When coreos/etcd-operator no longer runs, only this
/// operator can remove the finalizer.
#[test]
fn finalizer_of_coreos_operator_does_not_block_deletion() {
    use api::names::{FINALIZER_COREOS_PERIODIC, FINALIZER_STORED};
    let idle = Snapshot::default();
    let mut backup = first_complete(|_| ());
    let old = FINALIZER_COREOS_PERIODIC.to_owned();
    backup.metadata.finalizers = Some(vec![old.clone()]);
    let before = plan(&backup, &idle, at(8));
    assert!(!before.action.changes_object(), "{before:?}");
    assert_eq!(removable_finalizers(&backup), [FINALIZER_STORED]);

    backup.metadata.deletion_timestamp = Some(at(10).into());
    let all = [FINALIZER_STORED, FINALIZER_COREOS_PERIODIC];
    assert_eq!(
        plan(&backup, &idle, at(10)).action,
        Action::SetFinalizer(false)
    );
    assert_eq!(removable_finalizers(&backup), all);

    // The finalizer of coreos/etcd-operator and the finalizer of this operator are removed only after the stored
    // backups.
    backup.spec.deletion_policy = Some(api::backup::DeletionPolicy::Delete);
    backup.metadata.finalizers = Some(vec![old, FINALIZER_STORED.to_owned()]);
    assert_eq!(plan(&backup, &idle, at(10)).action, Action::RemoveAll);

    backup.metadata.finalizers = Some(vec!["example.com/other".to_owned()]);
    assert_eq!(plan(&backup, &idle, at(10)).action, Action::Nothing);
}

/// After the operator is uninstalled, no process removes finalizers, so an EtcdBackup gets the finalizer only if a
/// stored backup needs it.
#[test]
fn etcdbackup_without_stored_backup_has_no_finalizer() {
    let delete = |object: &mut Value| object["spec"]["deletionPolicy"] = json!("Delete");
    let idle = Snapshot::default();
    assert_eq!(
        plan(&with(delete), &idle, at(0)).action,
        Action::RecordIntent
    );
    // The bucket is missing until the deadline, so the backup fails.
    let started = begun(delete);
    let no_bucket = Trouble::new(Reason::BucketMissing, "create the bucket");
    let missing = known(Work::Idle, Destination::Unknown(no_bucket));
    for second in [1, 100, 599] {
        assert_eq!(plan(&started, &missing, at(second)).action, Action::Nothing);
    }
    let failed = plan(&started, &missing, at(600));
    assert!(matches!(failed.verdict, Verdict::Failed(_)), "{failed:?}");
    let failed = after(started.clone(), &failed, at(600));
    assert_eq!(plan(&failed, &missing, at(601)).action, Action::Nothing);
    let mut deleted = failed;
    deleted.metadata.deletion_timestamp = Some(at(700).into());
    assert_eq!(plan(&deleted, &idle, at(700)).action, Action::Nothing);

    // The finalizer is added before the status reports a stored backup, and also if a transfer already runs.
    let found = known(Work::Idle, Destination::Complete(stored()));
    assert_eq!(
        plan(&started, &found, at(1)).action,
        Action::SetFinalizer(true)
    );
    let running = known(Work::Running(Moved::default()), Destination::NotRead);
    assert_eq!(
        plan(&started, &running, at(1)).action,
        Action::SetFinalizer(true)
    );
    let mut complete = first_complete(|_| ());
    complete.spec.deletion_policy = Some(api::backup::DeletionPolicy::Delete);
    assert_eq!(
        plan(&complete, &idle, at(6)).action,
        Action::SetFinalizer(true)
    );
}

/// The pod that removes the backups cannot mount its volume.
#[test]
fn stuck_removal_of_stored_backups_is_reported() {
    let obstacle = Trouble::new(Reason::PodNotStarting, "FailedMount: timed out");
    let mut stuck = Snapshot::default();
    stuck.removal.work = Work::Running(Moved::default());
    stuck.removal.obstacle = Some(obstacle.clone());
    let backup = first_complete(|_| {});
    let retention = plan(&backup, &stuck, at(8));
    assert_eq!(
        (retention.action, &retention.verdict),
        (Action::Nothing, &Verdict::RetentionFailed(obstacle.clone()))
    );
    let status_of = |backup: &EtcdBackup, plan| {
        let status = status(backup, plan, at(8));
        let applied = find(&status.conditions, &ConditionType::RetentionApplied);
        applied.cloned().unwrap()
    };
    assert_eq!(status_of(&backup, &retention).reason, "PodNotStarting");

    let mut deleted = backup;
    deleted.spec.deletion_policy = Some(api::backup::DeletionPolicy::Delete);
    deleted.metadata.finalizers = Some(vec![api::names::FINALIZER_STORED.to_owned()]);
    deleted.metadata.deletion_timestamp = Some(at(7).into());
    let deletion = plan(&deleted, &stuck, at(8));
    assert_eq!(
        (deletion.action, &deletion.verdict),
        (Action::Nothing, &Verdict::DeletionBlocked(obstacle))
    );
    let message = status_of(&deleted, &deletion).message;
    assert!(message.contains("FailedMount"), "{message}");
}

/// A removal by the retention rules may end just before the EtcdBackup is deleted. This removal has not deleted all
/// backups, so the finalizer must stay.
#[test]
fn retention_result_does_not_count_as_removal_of_all_backups() {
    let mut backup = first_complete(|_| ());
    backup.spec.deletion_policy = Some(api::backup::DeletionPolicy::Delete);
    backup.metadata.finalizers = Some(vec![api::names::FINALIZER_STORED.to_owned()]);
    backup.metadata.deletion_timestamp = Some(at(10).into());
    let mut snapshot = Snapshot::default();
    snapshot.removal.work = Work::Ended(Ok(RemovalResult {
        deleted: 1,
        ..RemovalResult::default()
    }));
    assert_eq!(need(&backup, &snapshot, at(11)), Need::RemoveAll);
    assert_eq!(plan(&backup, &snapshot, at(11)).action, Action::RemoveAll);
}
