//! What counts of the time a backup may take.

use super::*;

fn limited() -> EtcdBackup {
    begun(|object| object["spec"]["backupPolicy"] = json!({ "timeoutInSecond": 60 }))
}

/// A hundred clusters that are backed up at midnight, two at a time, are not late because of each other.
#[test]
fn the_time_in_which_others_had_their_turn_does_not_count() {
    let backup = limited();
    let queued = known(Work::Queued, Place::NotAsked);
    let waits = plan(&backup, &queued, at(5000));
    assert_eq!(
        (waits.action, &waits.verdict),
        (Action::Nothing, &Verdict::Queued)
    );
    let told = status(&backup, &waits, at(5000));
    let complete = find(&told.conditions, &ConditionType::Complete).unwrap();
    assert!(complete.message.contains("its turn"), "{complete:?}");
    let mut running = known(Work::Running(Moved::default()), Place::NotAsked);
    running.transfer.waited = Duration::from_secs(5000);
    assert_eq!(plan(&backup, &running, at(5059)).action, Action::Nothing);
    let late = plan(&backup, &running, at(5060));
    assert_eq!(late.action, Action::AbandonTransfer);
    assert!(matches!(late.verdict, Verdict::Failed(_)));
    // Between two attempts as well.
    let mut failed = known(Work::Ended(Err(refused())), Place::Free);
    failed.transfer.waited = Duration::from_secs(5000);
    assert_eq!(
        plan(&backup, &failed, at(5059)).action,
        Action::StartTransfer
    );
}

/// An operator whose node was away for an hour looks at the store before it calls a backup failed.
#[test]
fn the_time_in_which_no_operator_ran_does_not_count() {
    let backup = limited();
    let back = |place| Snapshot {
        since: Some(at(3600)),
        ..known(Work::Idle, place)
    };
    let asked = back(Place::NotAsked);
    assert_eq!(need(&backup, &asked, at(3601)), Need::Place);
    let found = plan(&backup, &back(Place::Written(stored())), at(3601));
    assert_eq!(found.verdict, Verdict::Succeeded(stored()));
    assert_eq!(
        plan(&backup, &back(Place::Free), at(3601)).action,
        Action::StartTransfer
    );
    // And it has its time from then on.
    let late = plan(&backup, &back(Place::NotAsked), at(3660));
    assert!(matches!(late.verdict, Verdict::Failed(_)), "{late:?}");
    // A process that was there before takes nothing away.
    let there = Snapshot {
        since: Some(at(-3600)),
        ..known(Work::Idle, Place::NotAsked)
    };
    assert_eq!(need(&backup, &there, at(61)), Need::Nothing);
}

/// A clock that was ten days ahead gives no run ten days.
#[test]
fn what_a_clock_that_was_ahead_has_begun_ends_in_its_time() {
    let ahead = 864_000;
    let backup = begun(|object| {
        object["spec"]["backupPolicy"] = json!({ "timeoutInSecond": 60 });
        object["metadata"]["creationTimestamp"] = json!(at(-ahead - 30).to_string());
    });
    let of = |since: i64| Snapshot {
        since: Some(at(since)),
        ..known(Work::Running(Moved::default()), Place::NotAsked)
    };
    let step = |since, now| plan(&backup, &of(since), at(now)).action;
    // It is worked on since this process is there, or the object.
    assert_eq!(step(-ahead, 59 - ahead), Action::Nothing);
    assert_eq!(step(-ahead, 60 - ahead), Action::AbandonTransfer);
    assert_eq!(step(-2 * ahead, 29 - ahead), Action::Nothing);
    assert_eq!(step(-2 * ahead, 30 - ahead), Action::AbandonTransfer);
    // This process began by the same clock: nothing is known.
    assert_eq!(step(-1, 60 - ahead), Action::Nothing);
    // A clock that is a little ahead counts as it did.
    assert_eq!(step(-ahead, 59), Action::Nothing);
    assert_eq!(step(-ahead, 60), Action::AbandonTransfer);
}
