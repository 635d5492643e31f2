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
        (waits.step, &waits.verdict),
        (Step::Nothing, &Verdict::Queued)
    );
    let told = status(&backup, &waits, at(5000));
    let complete = find(&told.conditions, &ConditionType::Complete).unwrap();
    assert!(complete.message.contains("its turn"), "{complete:?}");
    let mut running = known(Work::Running(Moved::default()), Place::NotAsked);
    running.transfer.waited = Duration::from_secs(5000);
    assert_eq!(plan(&backup, &running, at(5059)).step, Step::Nothing);
    let late = plan(&backup, &running, at(5060));
    assert_eq!(late.step, Step::Abandon);
    assert!(matches!(late.verdict, Verdict::Failed(_)));
    // Between two attempts as well.
    let mut failed = known(Work::Ended(Err(refused())), Place::Free);
    failed.transfer.waited = Duration::from_secs(5000);
    assert_eq!(plan(&backup, &failed, at(5059)).step, Step::Begin);
}

/// An operator whose node was away for an hour looks at the store before it calls a backup failed.
#[test]
fn the_time_in_which_no_operator_ran_does_not_count() {
    let backup = limited();
    let back = |place| Observed {
        since: Some(at(3600)),
        ..known(Work::Idle, place)
    };
    let asked = back(Place::NotAsked);
    assert_eq!(need(&backup, &asked, at(3601)), Need::Place);
    let found = plan(&backup, &back(Place::Written(stored())), at(3601));
    assert_eq!(found.verdict, Verdict::Succeeded(stored()));
    assert_eq!(
        plan(&backup, &back(Place::Free), at(3601)).step,
        Step::Begin
    );
    // And it has its time from then on.
    let late = plan(&backup, &back(Place::NotAsked), at(3660));
    assert!(matches!(late.verdict, Verdict::Failed(_)), "{late:?}");
    // A process that was there before takes nothing away.
    let there = Observed {
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
    let of = |since: i64| Observed {
        since: Some(at(since)),
        ..known(Work::Running(Moved::default()), Place::NotAsked)
    };
    let step = |since, now| plan(&backup, &of(since), at(now)).step;
    // It is worked on since this process is there, or the object.
    assert_eq!(step(-ahead, 59 - ahead), Step::Nothing);
    assert_eq!(step(-ahead, 60 - ahead), Step::Abandon);
    assert_eq!(step(-2 * ahead, 29 - ahead), Step::Nothing);
    assert_eq!(step(-2 * ahead, 30 - ahead), Step::Abandon);
    // This process began by the same clock: nothing is known.
    assert_eq!(step(-1, 60 - ahead), Step::Nothing);
    // A clock that is a little ahead counts as it did.
    assert_eq!(step(-ahead, 59), Step::Nothing);
    assert_eq!(step(-ahead, 60), Step::Abandon);
}
