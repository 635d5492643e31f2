//! Tests of removals if the clocks of the operator and the API server differ.

use super::*;

fn compared(hours: i64) -> Snapshot {
    Snapshot {
        clock_difference: Some(SignedDuration::from_hours(hours)),
        ..Snapshot::default()
    }
}

/// An EtcdBackup whose backup was complete at second 5, and that expires 60 seconds later.
fn expiring() -> EtcdBackup {
    let backup = begun(|backup| {
        backup["metadata"]["finalizers"] = json!(["etcd.database.coreos.com/stored-backups"]);
        backup["spec"]["deletionPolicy"] = json!("Delete");
        backup["spec"]["ttlSecondsAfterFinished"] = json!(60);
    });
    let ended = known(Work::Ended(Ok(stored())), Destination::NotRead);
    let plan = plan(&backup, &ended, at(5));
    assert_eq!(plan.verdict, Verdict::Succeeded(stored()));
    after(backup, &plan, at(5))
}

/// Invariant 9: an expired EtcdBackup is deleted with its stored backups, so both clocks must have passed the time of
/// expiry.
#[test]
fn invariant_9_backup_does_not_expire_while_clocks_differ() {
    let backup = expiring();
    assert_eq!(need(&backup, &Snapshot::default(), at(64)), Need::Nothing);
    assert_eq!(need(&backup, &Snapshot::default(), at(66)), Need::Clock);
    // The EtcdBackup is not deleted if the API server's clock cannot be read.
    let unread = Snapshot {
        obstacle: Some(Trouble::new(Reason::StepFailed, "no answer")),
        ..Snapshot::default()
    };
    for (snapshot, reason) in [
        (compared(-2), Some(Reason::ClocksDiffer)),
        (compared(2), Some(Reason::ClocksDiffer)),
        (unread, Some(Reason::StepFailed)),
        (Snapshot::default(), None),
    ] {
        let plan = plan(&backup, &snapshot, at(66));
        assert_eq!(plan.action, Action::Nothing, "{snapshot:?}");
        let reported = after(backup.clone(), &plan, at(66)).status.unwrap();
        let applied = find(&reported.conditions, &ConditionType::RetentionApplied);
        assert_eq!(
            applied.map(|applied| applied.reason.as_str()),
            reason.map(Reason::as_str)
        );
        assert!(is_true(&reported.conditions, &ConditionType::Complete));
    }
    // The API server's clock has not passed the time of expiry yet.
    let behind = Snapshot {
        clock_difference: Some(SignedDuration::from_secs(-30)),
        ..Snapshot::default()
    };
    assert_eq!(plan(&backup, &behind, at(66)).action, Action::Nothing);
    assert_eq!(plan(&backup, &behind, at(95)).action, Action::DeleteBackup);
    assert_eq!(
        plan(&backup, &compared(0), at(66)).action,
        Action::DeleteBackup
    );
}

#[test]
fn expiry_that_retains_backups_needs_no_clock_comparison() {
    let mut backup = expiring();
    backup.spec.deletion_policy = None;
    backup.metadata.finalizers = None;
    assert_eq!(need(&backup, &Snapshot::default(), at(66)), Need::Nothing);
    let plan = plan(&backup, &Snapshot::default(), at(66));
    assert_eq!(plan.action, Action::DeleteBackup);
}

/// Retention rules need a time on which both clocks agree.
#[test]
fn retention_has_no_agreed_time_if_clocks_differ_by_more_than_one_hour() {
    let backup = fresh();
    for (snapshot, time) in [
        (Snapshot::default(), None),
        (compared(0), Some(at(0))),
        (compared(1), Some(at(0))),
        (compared(-1), Some(at(-3600))),
        (compared(-2), None),
    ] {
        let agreed = crate::plan::clock::agreed_time(&snapshot, at(0));
        assert_eq!(agreed, time, "{snapshot:?}");
        let disagreement = crate::plan::clock::disagreement(&backup, &snapshot, at(0));
        let differ = snapshot.clock_difference.is_some() && time.is_none();
        assert_eq!(disagreement.is_some(), differ, "{snapshot:?}");
    }
}
