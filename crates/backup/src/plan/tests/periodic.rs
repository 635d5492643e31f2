//! Backups that are made again and again, what is kept of them, and what goes with the object.

use api::backup::name;

use super::*;
use crate::snapshot::{Kept, Listed};

fn periodic(change: impl FnOnce(&mut Value)) -> EtcdBackup {
    with(|object| {
        object["spec"]["backupPolicy"] = json!({ "backupIntervalInSecond": 3600, "maxBackups": 3 });
        change(object);
    })
}

fn location(second: i64) -> String {
    let parts = name::Numbered {
        time: at(second),
        revision: 40,
    };
    format!("s3://bucket/{}", name::name("key", parts))
}

/// One backup was complete at second 5, and what it left to do is not done yet.
fn once(change: impl FnOnce(&mut Value)) -> EtcdBackup {
    let backup = periodic(change);
    let first = plan(&backup, &Snapshot::default(), at(0));
    assert_eq!(first.action, Action::RecordIntent);
    let backup = after(backup, &first, at(0));
    let stored = Stored {
        location: location(0),
        ..stored()
    };
    let done = plan(
        &backup,
        &known(Work::Ended(Ok(stored)), Place::NotAsked),
        at(5),
    );
    assert!(matches!(done.verdict, Verdict::Succeeded(_)));
    after(backup, &done, at(5))
}

fn tidied(backup: EtcdBackup) -> EtcdBackup {
    let kept = Kept {
        backups: vec![
            Listed {
                location: location(0),
                parts: name::Numbered {
                    time: at(0),
                    revision: 40,
                },
            },
            Listed {
                location: location(-3600),
                parts: name::Numbered {
                    time: at(-3600),
                    revision: 30,
                },
            },
        ],
        deleted: 1,
        everything: false,
    };
    let mut snapshot = Snapshot::default();
    snapshot.removal.work = Work::Ended(Ok(kept));
    let done = plan(&backup, &snapshot, at(8));
    assert!(matches!(done.verdict, Verdict::Tidied(_)), "{done:?}");
    assert!(
        notices(&backup, &done)
            .iter()
            .any(|notice| notice.reason == "BackupsRemoved")
    );
    after(backup, &done, at(8))
}

#[test]
fn the_next_of_a_periodic_backup_is_due_after_the_interval_whatever_process_looks() {
    let backup = tidied(once(|_| ()));
    assert!(backup.status.as_ref().unwrap().succeeded);
    for second in [9, 600, 3599] {
        let resting = plan(&backup, &Snapshot::default(), at(second));
        assert_eq!(resting.action, Action::Nothing);
        assert!(
            matches!(resting.verdict, Verdict::Scheduled(Some(time)) if time >= at(3600) && time <= at(3631)),
            "{resting:?}"
        );
        assert!(resting.requeue.is_some());
    }
    // However many were missed, one is made up.
    for second in [3640, 1_000_000] {
        let due = plan(&backup, &Snapshot::default(), at(second));
        assert_eq!(due.action, Action::RecordIntent);
        let again = after(backup.clone(), &due, at(second));
        // While it runs, the conditions say how the last one went.
        assert!(is_true(again.conditions(), &ConditionType::Complete));
        assert!(is_true(again.conditions(), &ConditionType::Progressing));
        assert!(again.status.as_ref().unwrap().succeeded);
        assert_eq!(crate::plan::intent(&again), Some(at(second)));
        assert!(needs_place(&again, &Snapshot::default(), at(second + 1)));
    }
}

#[test]
fn backups_do_not_overlap() {
    let backup = tidied(once(|_| ()));
    let due = plan(&backup, &Snapshot::default(), at(4000));
    let running = after(backup, &due, at(4000));
    // Longer than the interval, without a limit.
    let mut slow = running;
    slow.spec.backup_policy.as_mut().unwrap().timeout_in_second = Some(0);
    let snapshot = known(Work::Running(Moved::default()), Place::NotAsked);
    let plan = plan(&slow, &snapshot, at(100_000));
    assert_eq!(
        (plan.action, plan.verdict),
        (Action::Nothing, Verdict::Running(Moved::default()))
    );
}

/// The metric and its alert go by the condition: each attempt of the next one took it back, and nobody heard of it.
#[test]
fn one_that_failed_is_shown_until_the_next_has_ended() {
    let begin = |backup: EtcdBackup, second| {
        let due = plan(&backup, &Snapshot::default(), at(second));
        assert_eq!(due.action, Action::RecordIntent);
        after(backup, &due, at(second))
    };
    let failing = known(Work::Ended(Err(refused())), Place::Free);
    let running = begin(tidied(once(|_| ())), 4000);
    let failed = after(
        running.clone(),
        &plan(&running, &failing, at(5000)),
        at(5000),
    );
    assert!(is_true(failed.conditions(), &ConditionType::Failed));
    let next = begin(failed, 9000);
    let waiting = plan(&next, &failing, at(9001));
    assert!(
        matches!(waiting.verdict, Verdict::Waiting(_)),
        "{waiting:?}"
    );
    let waits = after(next, &waiting, at(9001));
    assert!(is_true(waits.conditions(), &ConditionType::Failed));
    let complete = find(waits.conditions(), &ConditionType::Complete).unwrap();
    assert_eq!(complete.reason, "AccessDenied");
    let done = known(Work::Ended(Ok(stored())), Place::NotAsked);
    let done = after(waits.clone(), &plan(&waits, &done, at(9002)), at(9002));
    assert!(!is_true(done.conditions(), &ConditionType::Failed));
}

#[test]
fn one_that_failed_is_followed_by_the_next_and_at_once_when_the_spec_is_changed() {
    let backup = tidied(once(|_| ()));
    let due = plan(&backup, &Snapshot::default(), at(4000));
    let running = after(backup, &due, at(4000));
    let late = plan(
        &running,
        &known(Work::Ended(Err(refused())), Place::Free),
        at(5000),
    );
    let failed = after(running, &late, at(5000));
    assert!(is_true(failed.conditions(), &ConditionType::Failed));
    let status = failed.status.as_ref().unwrap();
    assert!(!status.succeeded);
    assert_eq!(
        status.last_success_date.as_ref().map(|time| time.0),
        Some(at(5))
    );
    assert_eq!(
        plan(&failed, &Snapshot::default(), at(5001)).action,
        Action::Nothing
    );
    assert_eq!(
        plan(&failed, &Snapshot::default(), at(7700)).action,
        Action::RecordIntent
    );
    let mut changed = failed;
    changed.metadata.generation = Some(2);
    assert_eq!(
        plan(&changed, &Snapshot::default(), at(5001)).action,
        Action::RecordIntent
    );
}

#[test]
fn a_suspended_backup_makes_no_new_one_and_says_so() {
    for suspended in [
        with(|object| object["spec"]["backupPolicy"] = json!({ "suspend": true })),
        periodic(|object| object["spec"]["backupPolicy"]["suspend"] = json!(true)),
    ] {
        let resting = plan(&suspended, &Snapshot::default(), at(0));
        assert_eq!(
            (resting.action, &resting.verdict),
            (Action::Nothing, &Verdict::Suspended)
        );
        let told = after(suspended, &resting, at(0));
        let progressing = find(told.conditions(), &ConditionType::Progressing).unwrap();
        assert_eq!(progressing.reason, "Suspended");
        let mut resumed = told;
        resumed.spec.backup_policy.as_mut().unwrap().suspend = false;
        resumed.metadata.generation = Some(2);
        let begun = plan(&resumed, &Snapshot::default(), at(9));
        assert_eq!(begun.action, Action::RecordIntent);
        assert!(is_true(
            after(resumed, &begun, at(9)).conditions(),
            &ConditionType::Progressing
        ));
    }
}

#[test]
fn one_that_is_suspended_midway_stops_and_is_made_when_it_is_resumed() {
    let mut backup = periodic(|_| ());
    backup = after(
        backup.clone(),
        &plan(&backup, &Snapshot::default(), at(0)),
        at(0),
    );
    backup.metadata.generation = Some(2);
    backup.spec.backup_policy.as_mut().unwrap().suspend = true;
    let running = known(Work::Running(Moved::default()), Place::NotAsked);
    assert_eq!(
        plan(&backup, &running, at(1)).action,
        Action::AbandonTransfer
    );
    let resting = plan(&backup, &Snapshot::default(), at(2));
    backup = after(backup, &resting, at(2));
    assert_eq!(need(&backup, &Snapshot::default(), at(3)), Need::Nothing);
    assert_eq!(
        plan(&backup, &Snapshot::default(), at(3)).verdict,
        Verdict::Suspended
    );
    backup.metadata.generation = Some(3);
    backup.spec.backup_policy.as_mut().unwrap().suspend = false;
    assert_eq!(
        plan(&backup, &Snapshot::default(), at(9)).action,
        Action::RecordIntent
    );
}

/// Invariant 9.
#[test]
fn invariant_9_old_backups_go_only_after_the_status_says_that_a_newer_one_is_complete() {
    let backup = periodic(|_| ());
    let idle = Snapshot::default();
    assert_ne!(need(&backup, &idle, at(0)), Need::RemoveSurplus);
    let first = plan(&backup, &idle, at(0));
    let running = after(backup, &first, at(0));
    assert_eq!(need(&running, &idle, at(1)), Need::Place);
    let complete = once(|_| ());
    assert_eq!(need(&complete, &idle, at(6)), Need::RemoveSurplus);
    assert_eq!(plan(&complete, &idle, at(6)).action, Action::RemoveSurplus);
    // Once done, not again: not by this process and not by another.
    let done = tidied(complete);
    assert_eq!(need(&done, &idle, at(9)), Need::Nothing);
    assert!(matches!(
        plan(&done, &idle, at(9)).verdict,
        Verdict::Scheduled(_)
    ));
    let kept = &done.status.as_ref().unwrap().backups;
    assert_eq!(kept.len(), 2);
    assert_eq!(
        (kept[0].etcd_revision, kept[0].size),
        (Some(42), Some(20_512))
    );
    assert_eq!((kept[1].etcd_revision, kept[1].size), (Some(30), None));
    assert!(is_true(done.conditions(), &ConditionType::RetentionApplied));
}

#[test]
fn a_removal_that_fails_is_told_and_repeated_and_the_backup_stays_a_success() {
    let complete = once(|_| ());
    let mut failed = Snapshot::default();
    failed.removal.work = Work::Ended(Err(refused()));
    failed.removal.not_before = Some(at(30));
    assert_eq!(need(&complete, &failed, at(10)), Need::Nothing);
    let waits = plan(&complete, &failed, at(10));
    assert_eq!(
        (waits.action, &waits.verdict),
        (Action::Nothing, &Verdict::Untidy(refused()))
    );
    assert!(
        notices(&complete, &waits)
            .iter()
            .any(|notice| notice.warning)
    );
    let told = after(complete, &waits, at(10));
    assert!(told.status.as_ref().unwrap().succeeded);
    assert!(is_true(told.conditions(), &ConditionType::Complete));
    let applied = find(told.conditions(), &ConditionType::RetentionApplied).unwrap();
    assert_eq!(
        (applied.status.as_str(), applied.reason.as_str()),
        ("False", "AccessDenied")
    );
    assert_eq!(need(&told, &failed, at(30)), Need::RemoveSurplus);
    assert_eq!(plan(&told, &failed, at(30)).action, Action::RemoveSurplus);
    // The next backup does not wait for it.
    assert_eq!(plan(&told, &failed, at(4000)).action, Action::RecordIntent);
}

#[test]
fn without_rules_nothing_is_removed_and_the_newest_are_listed() {
    let complete = once(|object| object["spec"]["backupPolicy"]["maxBackups"] = json!(0));
    assert_eq!(need(&complete, &Snapshot::default(), at(6)), Need::Nothing);
    assert_eq!(complete.status.unwrap().backups.len(), 1);
}

#[test]
fn schedules_and_time_zones_that_cannot_be_read_are_refused() {
    for (policy, field) in [
        (
            json!({ "schedule": "61 * * * *" }),
            "spec.backupPolicy.schedule",
        ),
        (
            json!({ "schedule": "@daily", "timeZone": "Mars/Olympus" }),
            "spec.backupPolicy.timeZone",
        ),
    ] {
        let backup = with(|object| object["spec"]["backupPolicy"] = policy);
        let refused = plan(&backup, &Snapshot::default(), at(0));
        assert!(
            matches!(&refused.verdict, Verdict::Refused(trouble) if trouble.message.contains(field)),
            "{refused:?}"
        );
    }
}

#[test]
fn what_v1beta2s_operator_recorded_is_where_the_next_interval_begins() {
    let backup = periodic(|object| {
        object["status"] =
            json!({ "succeeded": true, "lastSuccessDate": at(0).to_string(), "etcdRevision": 3 });
    });
    assert_eq!(
        plan(&backup, &Snapshot::default(), at(60)).action,
        Action::Nothing
    );
    assert_eq!(
        plan(&backup, &Snapshot::default(), at(3640)).action,
        Action::RecordIntent
    );
}

#[test]
fn a_finished_object_goes_after_its_time() {
    let backup = begun(|object| object["spec"]["ttlSecondsAfterFinished"] = json!(60));
    let done = plan(
        &backup,
        &known(Work::Ended(Ok(stored())), Place::NotAsked),
        at(9),
    );
    let backup = after(backup, &done, at(9));
    let early = plan(&backup, &Snapshot::default(), at(60));
    assert_eq!(
        (early.action, early.requeue),
        (Action::Nothing, Some(std::time::Duration::from_secs(9)))
    );
    assert_eq!(
        plan(&backup, &Snapshot::default(), at(69)).action,
        Action::DeleteBackup
    );
    // One that goes on never finishes.
    let periodic = tidied(once(|object| {
        object["spec"]["ttlSecondsAfterFinished"] = json!(60);
    }));
    assert_eq!(
        plan(&periodic, &Snapshot::default(), at(100)).action,
        Action::Nothing
    );
    // Nor does one whose spec can be put right.
    let refused = with(|object| {
        object["spec"]["ttlSecondsAfterFinished"] = json!(0);
        object["spec"]["s3"] = Value::Null;
    });
    let verdict = plan(&refused, &Snapshot::default(), at(0));
    let refused = after(refused, &verdict, at(0));
    assert_eq!(
        plan(&refused, &Snapshot::default(), at(100)).action,
        Action::Nothing
    );
}

#[test]
fn the_finalizer_is_there_only_when_stored_backups_go_with_the_object() {
    let delete = |object: &mut Value| object["spec"]["deletionPolicy"] = json!("Delete");
    // Before anything is stored.
    let fresh = with(delete);
    let snapshot = Snapshot::default();
    assert_eq!(
        plan(&fresh, &snapshot, at(0)).action,
        Action::SetFinalizer(true)
    );
    let mut guarded = fresh;
    guarded.metadata.finalizers = Some(vec![api::names::FINALIZER_STORED.to_owned()]);
    assert_eq!(
        plan(&guarded, &snapshot, at(0)).action,
        Action::RecordIntent
    );
    let mut retained = guarded.clone();
    retained.spec.deletion_policy = None;
    assert_eq!(
        plan(&retained, &snapshot, at(0)).action,
        Action::SetFinalizer(false)
    );

    // On deletion: first what runs, then what is stored, then the object.
    guarded.metadata.deletion_timestamp = Some(at(10).into());
    let running = known(Work::Running(Moved::default()), Place::NotAsked);
    assert_eq!(
        plan(&guarded, &running, at(10)).action,
        Action::AbandonTransfer
    );
    assert_eq!(need(&guarded, &running, at(10)), Need::Nothing);
    assert_eq!(need(&guarded, &snapshot, at(10)), Need::RemoveAll);
    assert_eq!(plan(&guarded, &snapshot, at(10)).action, Action::RemoveAll);
    let mut purged = Snapshot::default();
    purged.removal.work = Work::Ended(Ok(Kept {
        everything: true,
        ..Kept::default()
    }));
    assert_eq!(need(&guarded, &purged, at(11)), Need::Nothing);
    assert_eq!(
        plan(&guarded, &purged, at(11)).action,
        Action::SetFinalizer(false)
    );
    // What cannot be removed keeps the object, and the user is told how to let it go.
    let denied = Snapshot {
        obstacle: Some(refused()),
        ..Snapshot::default()
    };
    let waits = plan(&guarded, &denied, at(1000));
    assert_eq!(
        (waits.action, &waits.verdict),
        (Action::Nothing, &Verdict::Ending(refused()))
    );
    let told = status(&guarded, &waits, at(1000));
    let applied = find(&told.conditions, &ConditionType::RetentionApplied).unwrap();
    assert!(applied.message.contains("Retain"), "{}", applied.message);
    // A namespace that goes takes the Secret with it.
    let gone = Snapshot {
        obstacle: Some(Trouble::new(Reason::SecretMissing, "gone")),
        ..Snapshot::default()
    };
    assert_eq!(plan(&guarded, &gone, at(20)).action, Action::Nothing);
    assert_eq!(
        plan(&guarded, &gone, at(400)).action,
        Action::SetFinalizer(false)
    );
}

/// A removal that is slower than the next backup was done after the one before: it is done again.
#[test]
fn a_removal_that_ran_while_the_newest_was_made_says_nothing_of_it() {
    let backup = once(|_| {});
    let of = |place: &str| Kept {
        backups: vec![Listed {
            location: place.to_owned(),
            parts: name::Numbered {
                time: at(0),
                revision: 40,
            },
        }],
        deleted: 1,
        everything: false,
    };
    let mut snapshot = Snapshot::default();
    snapshot.removal.work = Work::Ended(Ok(of(&location(-3600))));
    assert_eq!(need(&backup, &snapshot, at(8)), Need::RemoveSurplus);
    assert_eq!(
        plan(&backup, &snapshot, at(8)).action,
        Action::RemoveSurplus
    );
    snapshot.removal.work = Work::Ended(Ok(of(&location(0))));
    assert_eq!(need(&backup, &snapshot, at(8)), Need::Nothing);
    let done = plan(&backup, &snapshot, at(8));
    assert!(matches!(done.verdict, Verdict::Tidied(_)), "{done:?}");
}

/// One that takes longer than the pause between two is due again when it ends; what it made surplus still goes first.
#[test]
fn old_backups_go_also_when_the_next_one_is_due_at_once() {
    // It began at 0 and was complete at 5; the next was due at 7.
    let backup = once(|object| object["spec"]["backupPolicy"]["backupIntervalInSecond"] = json!(2));
    let idle = Snapshot::default();
    assert_eq!(need(&backup, &idle, at(8)), Need::RemoveSurplus);
    let first = plan(&backup, &idle, at(8));
    assert_eq!(first.action, Action::RemoveSurplus);
    // What the status says meanwhile is when the next begins at the latest.
    assert_eq!(first.verdict, Verdict::Scheduled(Some(at(65))));
    let mut removing = Snapshot::default();
    removing.removal.work = Work::Running(Moved::default());
    assert_eq!(plan(&backup, &removing, at(20)).action, Action::Nothing);
    assert_eq!(need(&backup, &removing, at(20)), Need::Nothing);
    let done = tidied(backup);
    assert_eq!(plan(&done, &idle, at(9)).action, Action::RecordIntent);
}

/// The backup is worth more than the room it takes.
#[test]
fn a_removal_that_fails_or_hangs_holds_up_no_backup() {
    let backup = once(|object| object["spec"]["backupPolicy"]["backupIntervalInSecond"] = json!(2));
    let mut hangs = Snapshot::default();
    hangs.removal.work = Work::Running(Moved::default());
    assert_eq!(plan(&backup, &hangs, at(64)).action, Action::Nothing);
    assert_eq!(plan(&backup, &hangs, at(65)).action, Action::RecordIntent);
    let mut failed = Snapshot::default();
    failed.removal.work = Work::Ended(Err(refused()));
    failed.removal.not_before = Some(at(9));
    let unseen = Snapshot {
        obstacle: Some(refused()),
        ..Snapshot::default()
    };
    assert_eq!(need(&backup, &failed, at(8)), Need::Nothing);
    for fails in [&failed, &unseen] {
        // It is told first: there is no pause in which it could be.
        let told = plan(&backup, fails, at(8));
        assert_eq!(told.verdict, Verdict::Untidy(refused()));
        let told = after(backup.clone(), &told, at(8));
        let applied = find(told.conditions(), &ConditionType::RetentionApplied).unwrap();
        assert_eq!(applied.status, "False");
        assert_eq!(plan(&told, fails, at(8)).action, Action::RecordIntent);
    }
    let running = after(backup.clone(), &plan(&backup, &hangs, at(65)), at(65));
    assert_eq!(crate::plan::intent(&running), Some(at(65)));
}

/// `deletionPolicy: Delete`: a removal of what the policy does not keep may just have ended when the object is deleted.
#[test]
fn what_a_policy_did_not_keep_is_not_all_that_was_stored() {
    let mut backup = once(|_| ());
    backup.spec.deletion_policy = Some(api::backup::DeletionPolicy::Delete);
    backup.metadata.finalizers = Some(vec![api::names::FINALIZER_STORED.to_owned()]);
    backup.metadata.deletion_timestamp = Some(at(10).into());
    let mut snapshot = Snapshot::default();
    snapshot.removal.work = Work::Ended(Ok(Kept {
        deleted: 1,
        ..Kept::default()
    }));
    assert_eq!(need(&backup, &snapshot, at(11)), Need::RemoveAll);
    assert_eq!(plan(&backup, &snapshot, at(11)).action, Action::RemoveAll);
}

/// A clock that was a year ahead for a moment is no reason for a year without backups.
#[test]
fn a_run_of_a_clock_that_was_ahead_does_not_count() {
    const YEAR: i64 = 365 * 86_400;
    for policy in [
        json!({ "backupIntervalInSecond": 3600 }),
        json!({ "schedule": "@hourly" }),
    ] {
        let mut backup = periodic(|object| {
            object["spec"]["backupPolicy"] = policy.clone();
            object["metadata"]["creationTimestamp"] = json!("2020-01-01T00:00:00Z");
        });
        let first = plan(&backup, &Snapshot::default(), at(YEAR));
        backup = after(backup, &first, at(YEAR));
        let ahead = Stored {
            created_at: at(YEAR + 5),
            ..stored()
        };
        let done = plan(
            &backup,
            &known(Work::Ended(Ok(ahead)), Place::NotAsked),
            at(YEAR + 5),
        );
        let backup = after(backup, &done, at(YEAR + 5));
        let next = plan(&backup, &Snapshot::default(), at(60));
        assert_eq!(next.action, Action::RecordIntent, "{policy}");
        // From here on it goes by the clock there is now.
        let backup = after(backup, &next, at(60));
        let now = Stored {
            created_at: at(65),
            ..stored()
        };
        let done = plan(
            &backup,
            &known(Work::Ended(Ok(now)), Place::NotAsked),
            at(65),
        );
        let backup = after(backup, &done, at(65));
        let rest = plan(&backup, &Snapshot::default(), at(70));
        assert!(
            matches!(rest.verdict, Verdict::Scheduled(Some(time)) if time <= at(2 * 3600 + 60)),
            "{policy}: {rest:?}"
        );
    }
}
