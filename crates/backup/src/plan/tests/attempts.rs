//! Tests of attempts that end without a result, because the operator process ends.

use super::*;
use crate::plan::attempts::MAX_UNFINISHED;

fn ready(recorded_count: Option<i32>) -> Snapshot {
    let mut snapshot = known(Work::Ready, Destination::NotRead);
    snapshot.transfer.recorded_count = recorded_count;
    snapshot
}

fn unfinished(backup: &EtcdBackup) -> Option<i32> {
    backup.status.as_ref().unwrap().unfinished_attempts
}

/// An EtcdBackup after `count` attempts during which the operator process ended.
fn interrupted(count: i32) -> EtcdBackup {
    let mut backup = begun(|_| ());
    for time in 1..=count {
        let plan = plan(&backup, &ready(None), at(i64::from(time)));
        assert_eq!(plan.action, Action::RecordAttempts(time));
        backup = after(backup, &plan, at(i64::from(time)));
    }
    backup
}

#[test]
fn invariant_10_attempt_counts_as_unfinished_until_it_ends() {
    let backup = interrupted(3);
    assert_eq!(unfinished(&backup), Some(3));
    let status_of = |backup: &EtcdBackup| backup.status.clone().unwrap();
    assert!(!status_of(&backup).succeeded);
    // The status counts the fourth attempt until a reconcile has observed that this attempt failed.
    let fourth = plan(&backup, &ready(None), at(10));
    let backup = after(backup, &fourth, at(10));
    assert_eq!(unfinished(&backup), Some(4));
    let mut failed = known(Work::Ended(Err(refused())), Destination::NotRead);
    failed.transfer.recorded_count = Some(4);
    failed.transfer.not_before = Some(at(20));
    let waits = plan(&backup, &failed, at(11));
    assert_eq!(waits.verdict, Verdict::Waiting(refused()));
    let waiting = after(backup, &waits, at(11));
    assert_eq!(unfinished(&waiting), Some(3));
    // The next reconcile after the failure does not change the status.
    let repeated = plan(&waiting, &failed, at(12));
    assert_eq!(after(waiting.clone(), &repeated, at(12)), waiting);
    // The next attempt of the same process does not increase the count, even if the end of the previous attempt was
    // not recorded.
    for backup in [&waiting, &interrupted(4)] {
        let next = plan(backup, &ready(Some(4)), at(20));
        assert_eq!(next.action, Action::RecordAttempts(4));
    }
    // After the only attempt has ended, the status contains no count of unfinished attempts.
    let single = plan(
        &interrupted(1),
        &Snapshot {
            transfer: WorkState {
                recorded_count: Some(1),
                ..failed.transfer
            },
            ..failed
        },
        at(11),
    );
    assert_eq!(unfinished(&after(interrupted(1), &single, at(11))), None);
}

#[test]
fn backup_fails_after_too_many_interrupted_attempts() {
    let idle = known(Work::Idle, Destination::Free);
    assert_eq!(
        plan(&interrupted(MAX_UNFINISHED - 1), &idle, at(30)).action,
        Action::StartTransfer
    );
    let backup = interrupted(MAX_UNFINISHED);
    let fails = plan(&backup, &idle, at(30));
    assert_eq!(fails.action, Action::Nothing);
    assert!(
        notices(&backup, &fails)
            .iter()
            .any(|notice| notice.warning && notice.reason == "AttemptsCutOff")
    );
    let failed = after(backup.clone(), &fails, at(30));
    let condition = find(failed.conditions(), &ConditionType::Failed).unwrap();
    assert_eq!(condition.status, "True");
    for fragment in [
        "10 attempts",
        "kubectl describe pod",
        "backupOperator.resources",
    ] {
        assert!(
            condition.message.contains(fragment),
            "{}",
            condition.message
        );
    }
    assert_eq!(unfinished(&failed), None);
    // The operator reads the store before it reports the failure, because a complete backup in the store is a success.
    let found = known(Work::Idle, Destination::Complete(stored()));
    let found = plan(&backup, &found, at(30));
    assert_eq!(found.verdict, Verdict::Succeeded(stored()));
    assert_eq!(unfinished(&after(backup.clone(), &found, at(30))), None);
    let unknown = known(Work::Idle, Destination::Unknown(refused()));
    assert_eq!(
        plan(&backup, &unknown, at(30)).verdict,
        Verdict::Waiting(refused())
    );
    // The backup does not fail while the last allowed attempt runs, or after this attempt has reported an error. Only
    // interrupted attempts count for the limit.
    for work in [Work::Running(Moved::default()), Work::Ended(Err(refused()))] {
        let verdict = plan(&backup, &known(work, Destination::Free), at(30)).verdict;
        assert!(!matches!(verdict, Verdict::Failed(_)), "{verdict:?}");
    }
    // A change of the spec starts a new backup.
    let mut changed = failed;
    changed.metadata.generation = Some(2);
    let restarted = plan(&changed, &Snapshot::default(), at(40));
    assert_eq!(restarted.action, Action::RecordIntent);
}

/// Attempts that fail because the store is unreachable are no crashes, even if the operator restarts several times.
#[test]
fn observed_failures_do_not_count_as_interrupted_attempts() {
    let mut backup =
        begun(|object| object["spec"]["backupPolicy"] = json!({ "timeoutInSecond": 0 }));
    for process in 0..i64::from(MAX_UNFINISHED) * 2 {
        let now = at(process * 100);
        let idle = known(Work::Idle, Destination::Free);
        assert_eq!(plan(&backup, &idle, now).action, Action::StartTransfer);
        let begins = plan(&backup, &ready(None), now);
        backup = after(backup, &begins, now);
        assert_eq!(unfinished(&backup), Some(1));
        let mut failed = known(Work::Ended(Err(refused())), Destination::NotRead);
        failed.transfer.recorded_count = Some(1);
        failed.transfer.not_before = Some(now + SignedDuration::from_secs(30));
        // In every second process, the store is unreachable and the back-off of the attempt has ended.
        if process % 2 == 1 {
            failed.transfer.not_before = Some(now - SignedDuration::from_secs(1));
            failed.destination = Destination::Unknown(refused());
        }
        let waits = plan(&backup, &failed, now);
        backup = after(backup, &waits, now);
        assert_eq!(unfinished(&backup), None);
    }
}

/// The time limit for a database of 20 GiB is almost six hours. The next attempt gets this limit before it knows the
/// size of the database.
#[test]
fn next_attempt_keeps_time_limit_of_large_database() {
    let backup = begun(|_| ());
    let moved = |total| {
        let moved = Moved { bytes: 0, total };
        known(Work::Running(moved), Destination::NotRead)
    };
    let large = plan(&backup, &moved(Some(20 << 30)), at(1));
    let mut backup = after(backup, &large, at(1));
    for second in [3000, 3001] {
        let next = plan(&backup, &moved(None), at(second));
        assert_eq!(next.action, Action::Nothing, "{next:?}");
        backup = after(backup, &next, at(second));
    }
}
