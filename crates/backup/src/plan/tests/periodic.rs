//! Tests of periodic backups and their retention.

use api::backup::name;

use super::*;
use crate::snapshot::{Listed, RemovalResult};

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

/// A periodic EtcdBackup after its first backup, which was complete at second 5. The retention rules were not applied
/// yet.
pub(super) fn first_complete(change: impl FnOnce(&mut Value)) -> EtcdBackup {
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
        &known(Work::Ended(Ok(stored)), Destination::NotRead),
        at(5),
    );
    assert!(matches!(done.verdict, Verdict::Succeeded(_)));
    after(backup, &done, at(5))
}

fn with_retention(backup: EtcdBackup) -> EtcdBackup {
    let result = RemovalResult {
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
    snapshot.removal.work = Work::Ended(Ok(result));
    let done = plan(&backup, &snapshot, at(8));
    assert!(
        matches!(done.verdict, Verdict::RetentionApplied(_)),
        "{done:?}"
    );
    assert!(
        notices(&backup, &done)
            .iter()
            .any(|notice| notice.reason == "BackupsRemoved")
    );
    after(backup, &done, at(8))
}

#[test]
fn next_run_is_due_after_interval() {
    let backup = with_retention(first_complete(|_| ()));
    assert!(backup.status.as_ref().unwrap().succeeded);
    for second in [9, 600, 3599] {
        let waiting = plan(&backup, &Snapshot::default(), at(second));
        assert_eq!(waiting.action, Action::Nothing);
        assert!(
            matches!(waiting.verdict, Verdict::Scheduled(Some(time)) if time >= at(3600) && time <= at(3631)),
            "{waiting:?}"
        );
        assert!(waiting.requeue.is_some());
    }
    // Although several runs were missed, only one backup starts.
    for second in [3640, 1_000_000] {
        let due = plan(&backup, &Snapshot::default(), at(second));
        assert_eq!(due.action, Action::RecordIntent);
        let started = after(backup.clone(), &due, at(second));
        // While the next backup runs, the conditions report the previous backup.
        assert!(is_true(started.conditions(), &ConditionType::Complete));
        assert!(is_true(started.conditions(), &ConditionType::Progressing));
        assert!(started.status.as_ref().unwrap().succeeded);
        assert_eq!(crate::plan::intent(&started), Some(at(second)));
        let need = need(&started, &Snapshot::default(), at(second + 1));
        assert_eq!(need, Need::Destination);
    }
}

#[test]
fn next_backup_does_not_start_while_backup_runs() {
    let backup = with_retention(first_complete(|_| ()));
    let due = plan(&backup, &Snapshot::default(), at(4000));
    let running = after(backup, &due, at(4000));
    // With `timeoutInSecond: 0`, a backup may take longer than the interval.
    let mut slow = running;
    slow.spec.backup_policy.as_mut().unwrap().timeout_in_second = Some(0);
    let snapshot = known(Work::Running(Moved::default()), Destination::NotRead);
    let plan = plan(&slow, &snapshot, at(100_000));
    assert_eq!(
        (plan.action, plan.verdict),
        (Action::Nothing, Verdict::Running(Moved::default()))
    );
}

/// The metric `failed` and its alert depend on this condition, so the start of the next backup must not reset it.
#[test]
fn failed_condition_remains_until_next_backup_ends() {
    let begin = |backup: EtcdBackup, second| {
        let due = plan(&backup, &Snapshot::default(), at(second));
        assert_eq!(due.action, Action::RecordIntent);
        after(backup, &due, at(second))
    };
    let failing = known(Work::Ended(Err(refused())), Destination::Free);
    let running = begin(with_retention(first_complete(|_| ())), 4000);
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
    let done = known(Work::Ended(Ok(stored())), Destination::NotRead);
    let done = after(waits.clone(), &plan(&waits, &done, at(9002)), at(9002));
    assert!(!is_true(done.conditions(), &ConditionType::Failed));
}

#[test]
fn failed_backup_is_repeated_at_next_run_or_spec_change() {
    let backup = with_retention(first_complete(|_| ()));
    let due = plan(&backup, &Snapshot::default(), at(4000));
    let running = after(backup, &due, at(4000));
    let overdue = plan(
        &running,
        &known(Work::Ended(Err(refused())), Destination::Free),
        at(5000),
    );
    let failed = after(running, &overdue, at(5000));
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
fn suspended_etcdbackup_starts_no_backup() {
    for suspended in [
        with(|object| object["spec"]["backupPolicy"] = json!({ "suspend": true })),
        periodic(|object| object["spec"]["backupPolicy"]["suspend"] = json!(true)),
    ] {
        let idle = plan(&suspended, &Snapshot::default(), at(0));
        assert_eq!(
            (idle.action, &idle.verdict),
            (Action::Nothing, &Verdict::Suspended)
        );
        let reported = after(suspended, &idle, at(0));
        let progressing = find(reported.conditions(), &ConditionType::Progressing).unwrap();
        assert_eq!(progressing.reason, "Suspended");
        let mut resumed = reported;
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
fn suspension_cancels_backup_and_resumption_repeats_it() {
    let mut backup = periodic(|_| ());
    backup = after(
        backup.clone(),
        &plan(&backup, &Snapshot::default(), at(0)),
        at(0),
    );
    backup.metadata.generation = Some(2);
    backup.spec.backup_policy.as_mut().unwrap().suspend = true;
    let running = known(Work::Running(Moved::default()), Destination::NotRead);
    assert_eq!(
        plan(&backup, &running, at(1)).action,
        Action::AbandonTransfer
    );
    let idle = plan(&backup, &Snapshot::default(), at(2));
    backup = after(backup, &idle, at(2));
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

#[test]
fn invariant_9_retention_starts_only_after_status_reports_complete_backup() {
    let backup = periodic(|_| ());
    let idle = Snapshot::default();
    assert_ne!(need(&backup, &idle, at(0)), Need::RemoveSurplus);
    let first = plan(&backup, &idle, at(0));
    let running = after(backup, &first, at(0));
    assert_eq!(need(&running, &idle, at(1)), Need::Destination);
    let complete = first_complete(|_| ());
    assert_eq!(need(&complete, &idle, at(6)), Need::RemoveSurplus);
    assert_eq!(plan(&complete, &idle, at(6)).action, Action::RemoveSurplus);
    // After a complete removal, the operator does not repeat the removal.
    let done = with_retention(complete);
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
fn failed_retention_is_reported_and_retried() {
    let complete = first_complete(|_| ());
    let mut failed = Snapshot::default();
    failed.removal.work = Work::Ended(Err(refused()));
    failed.removal.not_before = Some(at(30));
    assert_eq!(need(&complete, &failed, at(10)), Need::Nothing);
    let waits = plan(&complete, &failed, at(10));
    assert_eq!(
        (waits.action, &waits.verdict),
        (Action::Nothing, &Verdict::RetentionFailed(refused()))
    );
    assert!(
        notices(&complete, &waits)
            .iter()
            .any(|notice| notice.warning)
    );
    let reported = after(complete, &waits, at(10));
    assert!(reported.status.as_ref().unwrap().succeeded);
    assert!(is_true(reported.conditions(), &ConditionType::Complete));
    let applied = find(reported.conditions(), &ConditionType::RetentionApplied).unwrap();
    assert_eq!(
        (applied.status.as_str(), applied.reason.as_str()),
        ("False", "AccessDenied")
    );
    assert_eq!(need(&reported, &failed, at(30)), Need::RemoveSurplus);
    assert_eq!(
        plan(&reported, &failed, at(30)).action,
        Action::RemoveSurplus
    );
    // The next backup, which is due, starts before the failed removal is repeated.
    assert_eq!(
        plan(&reported, &failed, at(4000)).action,
        Action::RecordIntent
    );
}

#[test]
fn without_retention_rules_no_backup_is_removed() {
    let complete = first_complete(|object| object["spec"]["backupPolicy"]["maxBackups"] = json!(0));
    assert_eq!(need(&complete, &Snapshot::default(), at(6)), Need::Nothing);
    assert_eq!(complete.status.unwrap().backups.len(), 1);
}

#[test]
fn etcdbackup_with_invalid_schedule_or_time_zone_is_rejected() {
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
fn backup_interval_continues_from_status_of_coreos_operator() {
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
fn finished_etcdbackup_is_deleted_after_ttl() {
    let backup = begun(|object| object["spec"]["ttlSecondsAfterFinished"] = json!(60));
    let done = plan(
        &backup,
        &known(Work::Ended(Ok(stored())), Destination::NotRead),
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
    // A periodic EtcdBackup never finishes, so `ttlSecondsAfterFinished` has no effect.
    let periodic = with_retention(first_complete(|object| {
        object["spec"]["ttlSecondsAfterFinished"] = json!(60);
    }));
    assert_eq!(
        plan(&periodic, &Snapshot::default(), at(100)).action,
        Action::Nothing
    );
    // A rejected EtcdBackup is not finished, because the user can correct its spec.
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

/// The removal started before the newest backup was stored, and has not listed this backup. The operator therefore
/// repeats the removal.
#[test]
fn retention_is_repeated_if_it_did_not_list_newest_backup() {
    let backup = first_complete(|_| {});
    let with_newest = |location: &str| RemovalResult {
        backups: vec![Listed {
            location: location.to_owned(),
            parts: name::Numbered {
                time: at(0),
                revision: 40,
            },
        }],
        deleted: 1,
        everything: false,
    };
    let mut snapshot = Snapshot::default();
    snapshot.removal.work = Work::Ended(Ok(with_newest(&location(-3600))));
    assert_eq!(need(&backup, &snapshot, at(8)), Need::RemoveSurplus);
    assert_eq!(
        plan(&backup, &snapshot, at(8)).action,
        Action::RemoveSurplus
    );
    snapshot.removal.work = Work::Ended(Ok(with_newest(&location(0))));
    assert_eq!(need(&backup, &snapshot, at(8)), Need::Nothing);
    let done = plan(&backup, &snapshot, at(8));
    assert!(
        matches!(done.verdict, Verdict::RetentionApplied(_)),
        "{done:?}"
    );
}

/// If a backup takes longer than its interval, the next backup is due when the first backup ends. The operator applies
/// the retention rules before the next backup starts.
#[test]
fn retention_runs_before_due_backup_starts() {
    // The interval is two seconds. The backup started at second 0 and ended at second 5, so at second 8 the next backup
    // is due.
    let backup = first_complete(|object| {
        object["spec"]["backupPolicy"]["backupIntervalInSecond"] = json!(2);
    });
    let idle = Snapshot::default();
    assert_eq!(need(&backup, &idle, at(8)), Need::RemoveSurplus);
    let first = plan(&backup, &idle, at(8));
    assert_eq!(first.action, Action::RemoveSurplus);
    // The next backup starts at second 65 at the latest, one minute after the end of the previous backup.
    assert_eq!(first.verdict, Verdict::Scheduled(Some(at(65))));
    let mut removing = Snapshot::default();
    removing.removal.work = Work::Running(Moved::default());
    assert_eq!(plan(&backup, &removing, at(20)).action, Action::Nothing);
    assert_eq!(need(&backup, &removing, at(20)), Need::Nothing);
    let done = with_retention(backup);
    assert_eq!(plan(&done, &idle, at(9)).action, Action::RecordIntent);
}

/// The next backup starts one minute after the end of the previous backup, even if the removal hangs. After a failed
/// removal, the next backup starts when the failure is reported.
#[test]
fn hung_or_failed_retention_delays_next_backup_by_at_most_one_minute() {
    let backup = first_complete(|object| {
        object["spec"]["backupPolicy"]["backupIntervalInSecond"] = json!(2);
    });
    let mut hangs = Snapshot::default();
    hangs.removal.work = Work::Running(Moved::default());
    assert_eq!(plan(&backup, &hangs, at(64)).action, Action::Nothing);
    assert_eq!(plan(&backup, &hangs, at(65)).action, Action::RecordIntent);
    let mut failed = Snapshot::default();
    failed.removal.work = Work::Ended(Err(refused()));
    failed.removal.not_before = Some(at(9));
    let unreadable = Snapshot {
        obstacle: Some(refused()),
        ..Snapshot::default()
    };
    assert_eq!(need(&backup, &failed, at(8)), Need::Nothing);
    for fails in [&failed, &unreadable] {
        // The failure is reported before the next backup starts.
        let report = plan(&backup, fails, at(8));
        assert_eq!(report.verdict, Verdict::RetentionFailed(refused()));
        let reported = after(backup.clone(), &report, at(8));
        let applied = find(reported.conditions(), &ConditionType::RetentionApplied).unwrap();
        assert_eq!(applied.status, "False");
        assert_eq!(plan(&reported, fails, at(8)).action, Action::RecordIntent);
    }
    let running = after(backup.clone(), &plan(&backup, &hangs, at(65)), at(65));
    assert_eq!(crate::plan::intent(&running), Some(at(65)));
}

/// Backups must not stop for a year because the clock was a year ahead when a backup started.
#[test]
fn recorded_start_in_future_does_not_stop_schedule() {
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
            &known(Work::Ended(Ok(ahead)), Destination::NotRead),
            at(YEAR + 5),
        );
        let backup = after(backup, &done, at(YEAR + 5));
        let next = plan(&backup, &Snapshot::default(), at(60));
        assert_eq!(next.action, Action::RecordIntent, "{policy}");
        // After the backup at second 60, the time of the next run depends only on the corrected clock.
        let backup = after(backup, &next, at(60));
        let now = Stored {
            created_at: at(65),
            ..stored()
        };
        let done = plan(
            &backup,
            &known(Work::Ended(Ok(now)), Destination::NotRead),
            at(65),
        );
        let backup = after(backup, &done, at(65));
        let waiting = plan(&backup, &Snapshot::default(), at(70));
        assert!(
            matches!(waiting.verdict, Verdict::Scheduled(Some(time)) if time <= at(2 * 3600 + 60)),
            "{policy}: {waiting:?}"
        );
    }
}
