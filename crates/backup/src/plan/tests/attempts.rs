//! Attempts that end with their operator.

use super::*;
use crate::plan::attempts::MOST;

fn called(counted: Option<i32>) -> Snapshot {
    let mut snapshot = known(Work::Called, Place::NotAsked);
    snapshot.transfer.counted = counted;
    snapshot
}

fn unfinished(backup: &EtcdBackup) -> Option<i32> {
    backup.status.as_ref().unwrap().unfinished_attempts
}

/// The intent is recorded, and so many attempts have ended with their operator.
fn cut_off(times: i32) -> EtcdBackup {
    let mut backup = begun(|_| ());
    for time in 1..=times {
        let plan = plan(&backup, &called(None), at(i64::from(time)));
        assert_eq!(plan.action, Action::RecordAttempts(time));
        backup = after(backup, &plan, at(i64::from(time)));
    }
    backup
}

/// Invariant 10.
#[test]
fn invariant_10_an_attempt_is_counted_before_it_runs_and_until_it_was_seen_to_end() {
    let backup = cut_off(3);
    assert_eq!(unfinished(&backup), Some(3));
    let status_of = |backup: &EtcdBackup| backup.status.clone().unwrap();
    assert!(!status_of(&backup).succeeded);
    // The fourth is seen to fail.
    let fourth = plan(&backup, &called(None), at(10));
    let backup = after(backup, &fourth, at(10));
    assert_eq!(unfinished(&backup), Some(4));
    let mut failed = known(Work::Ended(Err(refused())), Place::NotAsked);
    failed.transfer.counted = Some(4);
    failed.transfer.not_before = Some(at(20));
    let waits = plan(&backup, &failed, at(11));
    assert_eq!(waits.verdict, Verdict::Waiting(refused()));
    let waiting = after(backup, &waits, at(11));
    assert_eq!(unfinished(&waiting), Some(3));
    // As often as that is looked at.
    let again = plan(&waiting, &failed, at(12));
    assert_eq!(after(waiting.clone(), &again, at(12)), waiting);
    // The next attempt of the same process counts once, whether or not the end of the last was written.
    for backup in [&waiting, &cut_off(4)] {
        let next = plan(backup, &called(Some(4)), at(20));
        assert_eq!(next.action, Action::RecordAttempts(4));
    }
    // One that ran alone and has ended leaves nothing.
    let alone = plan(
        &cut_off(1),
        &Snapshot {
            transfer: Pace {
                counted: Some(1),
                ..failed.transfer
            },
            ..failed
        },
        at(11),
    );
    assert_eq!(unfinished(&after(cut_off(1), &alone, at(11))), None);
}

#[test]
fn a_backup_whose_attempts_end_with_their_operator_fails_and_says_what_to_do() {
    let few = known(Work::Idle, Place::Free);
    assert_eq!(
        plan(&cut_off(MOST - 1), &few, at(30)).action,
        Action::StartTransfer
    );
    let backup = cut_off(MOST);
    let gives_up = plan(&backup, &few, at(30));
    assert_eq!(gives_up.action, Action::Nothing);
    let told = notices(&backup, &gives_up);
    assert!(
        told.iter()
            .any(|notice| notice.warning && notice.reason == "AttemptsCutOff")
    );
    let failed = after(backup.clone(), &gives_up, at(30));
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
    // What is in the store counts, and what the store holds has to be known.
    let found = known(Work::Idle, Place::Written(stored()));
    let found = plan(&backup, &found, at(30));
    assert_eq!(found.verdict, Verdict::Succeeded(stored()));
    assert_eq!(unfinished(&after(backup.clone(), &found, at(30))), None);
    let unknown = known(Work::Idle, Place::Unknown(refused()));
    assert_eq!(
        plan(&backup, &unknown, at(30)).verdict,
        Verdict::Waiting(refused())
    );
    // The last attempt is not given up while it runs, nor when it has failed by itself.
    for work in [Work::Running(Moved::default()), Work::Ended(Err(refused()))] {
        let verdict = plan(&backup, &known(work, Place::Free), at(30)).verdict;
        assert!(!matches!(verdict, Verdict::Failed(_)), "{verdict:?}");
    }
    // Another spec begins anew.
    let mut changed = failed;
    changed.metadata.generation = Some(2);
    let anew = plan(&changed, &Snapshot::default(), at(40));
    assert_eq!(anew.action, Action::RecordIntent);
}

/// Operators that are replaced while a store is away for weeks are no crash loop.
#[test]
fn attempts_that_fail_by_themselves_are_not_counted_against_a_backup() {
    let mut backup =
        begun(|object| object["spec"]["backupPolicy"] = json!({ "timeoutInSecond": 0 }));
    for process in 0..i64::from(MOST) * 2 {
        let now = at(process * 100);
        let idle = known(Work::Idle, Place::Free);
        assert_eq!(plan(&backup, &idle, now).action, Action::StartTransfer);
        let begins = plan(&backup, &called(None), now);
        backup = after(backup, &begins, now);
        assert_eq!(unfinished(&backup), Some(1));
        let mut failed = known(Work::Ended(Err(refused())), Place::NotAsked);
        failed.transfer.counted = Some(1);
        failed.transfer.not_before = Some(now + SignedDuration::from_secs(30));
        // Also where the pause was over before anybody looked, and the store is away by then.
        if process % 2 == 1 {
            failed.transfer.not_before = Some(now - SignedDuration::from_secs(1));
            failed.place = Place::Unknown(refused());
        }
        let waits = plan(&backup, &failed, now);
        backup = after(backup, &waits, now);
        assert_eq!(unfinished(&backup), None);
    }
}

/// A database of 20 GiB has six hours, also while the next attempt has not heard of its size.
#[test]
fn the_time_a_large_database_was_given_is_known_in_the_next_attempt() {
    let backup = begun(|_| ());
    let moved = |total| {
        let moved = Moved { bytes: 0, total };
        known(Work::Running(moved), Place::NotAsked)
    };
    let large = plan(&backup, &moved(Some(20 << 30)), at(1));
    let mut backup = after(backup, &large, at(1));
    for second in [3000, 3001] {
        let next = plan(&backup, &moved(None), at(second));
        assert_eq!(next.action, Action::Nothing, "{next:?}");
        backup = after(backup, &next, at(second));
    }
}
