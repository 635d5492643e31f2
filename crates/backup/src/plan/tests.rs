//! The plan, told as cases: a backup, what is known, what happens next.

use std::time::Duration;

use api::EtcdBackup;
use api::conditions::{ConditionType, find, is_true};
use jiff::{SignedDuration, Timestamp};
use serde_json::{Value, json};

use super::{Action, Need, Plan, Verdict, need, plan};
use crate::reason::{Reason, Trouble};
use crate::snapshot::{Moved, Pace, Place, Snapshot, Stored, Work};
use crate::status::{notices, status};

mod anything;
mod attempts;
mod deadline;
mod model;
mod periodic;

fn at(second: i64) -> Timestamp {
    Timestamp::from_second(1_800_000_000 + second).unwrap()
}

fn with(change: impl FnOnce(&mut Value)) -> EtcdBackup {
    let mut object = json!({
        "apiVersion": "etcd.database.coreos.com/v1beta2",
        "kind": "EtcdBackup",
        "metadata": { "name": "b", "namespace": "n", "uid": "u", "generation": 1 },
        "spec": {
            "etcdEndpoints": ["http://example-client:2379"],
            "storageType": "S3",
            "s3": { "path": "bucket/key", "awsSecret": "aws" },
        },
    });
    change(&mut object);
    serde_json::from_value(object).unwrap()
}

fn fresh() -> EtcdBackup {
    with(|_| ())
}

/// After one round: the status the plan leads to, written.
fn after(mut backup: EtcdBackup, plan: &Plan, now: Timestamp) -> EtcdBackup {
    backup.status = Some(status(&backup, plan, now));
    backup
}

/// The intent was recorded at second 0.
fn begun(change: impl FnOnce(&mut Value)) -> EtcdBackup {
    let backup = with(change);
    let plan = plan(&backup, &Snapshot::default(), at(0));
    assert_eq!(plan.action, Action::RecordIntent);
    after(backup, &plan, at(0))
}

#[test]
fn that_no_certificate_is_checked_is_said_aloud() {
    for unchecked in [false, true] {
        let backup = with(|backup| backup["spec"]["s3"]["insecureSkipVerify"] = json!(unchecked));
        let plan = plan(&backup, &Snapshot::default(), at(0));
        assert_eq!(plan.action, Action::RecordIntent);
        let told = notices(&backup, &plan);
        let warned = told
            .iter()
            .any(|notice| notice.warning && notice.reason == "CertificateNotChecked");
        assert_eq!(warned, unchecked, "{told:?}");
    }
}

fn stored() -> Stored {
    Stored {
        location: "s3://bucket/key".to_owned(),
        etcd_version: "3.6.16".to_owned(),
        cluster_id: "00000000000000aa".to_owned(),
        revision: 42,
        size: 20_512,
        sha256: "ab".repeat(32),
        created_at: at(5),
    }
}

fn known(work: Work, place: Place) -> Snapshot {
    Snapshot {
        transfer: Pace {
            work,
            ..Pace::default()
        },
        place,
        ..Snapshot::default()
    }
}

fn needs_place(backup: &EtcdBackup, snapshot: &Snapshot, now: Timestamp) -> bool {
    need(backup, snapshot, now) == Need::Place
}

fn refused() -> Trouble {
    Trouble::new(Reason::AccessDenied, "access denied: 403")
}

/// Invariant 10.
#[test]
fn invariant_10_the_intent_is_recorded_before_anything_else() {
    let backup = fresh();
    let snapshot = known(Work::Idle, Place::Free);
    assert!(!needs_place(&backup, &snapshot, at(0)));
    let plan = plan(&backup, &snapshot, at(0));
    assert_eq!(plan.action, Action::RecordIntent);
    let status = status(&backup, &plan, at(0));
    assert_eq!(status.start_time.map(|time| time.0), Some(at(0)));
    assert_eq!(status.observed_generation, Some(1));
    assert!(!status.succeeded);
}

#[test]
fn begins_when_the_place_is_free() {
    let backup = begun(|_| ());
    assert!(needs_place(&backup, &Snapshot::default(), at(1)));
    let plan = plan(&backup, &known(Work::Idle, Place::Free), at(1));
    assert_eq!(
        (plan.action, plan.verdict),
        (Action::StartTransfer, Verdict::Begun)
    );
}

/// Invariant 1.
#[test]
fn invariant_1_does_not_begin_while_the_store_is_unknown() {
    let backup = begun(|_| ());
    let unknown = known(Work::Idle, Place::Unknown(refused()));
    let plan = plan(&backup, &unknown, at(1));
    assert_eq!(plan.action, Action::Nothing);
    assert_eq!(plan.verdict, Verdict::Waiting(refused()));
    assert!(plan.requeue.is_some());
    let status = status(&backup, &plan, at(1));
    assert_eq!(status.reason.as_deref(), Some("access denied: 403"));
    let complete = find(&status.conditions, &ConditionType::Complete).unwrap();
    assert_eq!(
        (complete.status.as_str(), complete.reason.as_str()),
        ("False", "AccessDenied")
    );
    assert!(!is_true(&status.conditions, &ConditionType::Failed));
    assert!(notices(&backup, &plan).iter().all(|notice| notice.warning));
}

#[test]
fn what_is_missing_is_looked_for_less_often_the_longer_it_is_missing() {
    let backup = begun(|object| {
        object["spec"]["backupPolicy"] = json!({ "timeoutInSecond": 0 });
    });
    let unknown = known(Work::Idle, Place::Unknown(refused()));
    for (waited, soon) in [(1, 3), (30, 3), (120, 12), (300, 30), (86_400, 30)] {
        let plan = plan(&backup, &unknown, at(waited));
        assert_eq!(plan.requeue, Some(Duration::from_secs(soon)), "{waited}");
    }
}

#[test]
fn adopts_what_an_operator_wrote_that_stopped_before_it_said_so() {
    let backup = begun(|_| ());
    let plan = plan(&backup, &known(Work::Idle, Place::Written(stored())), at(9));
    assert_eq!(plan.action, Action::Nothing);
    let status = status(&backup, &plan, at(9));
    assert!(status.succeeded);
    assert_eq!(status.etcd_revision, Some(42));
    assert_eq!(status.last_success_date.map(|time| time.0), Some(at(5)));
    assert!(is_true(&status.conditions, &ConditionType::Complete));
}

#[test]
fn what_is_complete_is_never_begun_again() {
    let backup = begun(|_| ());
    let done = plan(
        &backup,
        &known(Work::Ended(Ok(stored())), Place::NotAsked),
        at(9),
    );
    let mut backup = after(backup, &done, at(9));
    // Not after a restart, not years later, not after a change of the spec.
    for generation in [1, 2] {
        backup.metadata.generation = Some(generation);
        let snapshot = Snapshot::default();
        assert!(!needs_place(&backup, &snapshot, at(1_000_000)));
        let plan = plan(&backup, &snapshot, at(1_000_000));
        assert_eq!(
            (plan.action, plan.verdict.clone()),
            (Action::Nothing, Verdict::Settled)
        );
        assert_eq!(Some(status(&backup, &plan, at(1_000_000))), backup.status);
        assert!(notices(&backup, &plan).is_empty());
    }
}

#[test]
fn shows_progress_while_bytes_move() {
    let backup = begun(|_| ());
    let moved = Moved {
        bytes: 10,
        total: Some(100),
    };
    let snapshot = known(Work::Running(moved), Place::NotAsked);
    assert!(!needs_place(&backup, &snapshot, at(1)));
    let plan = plan(&backup, &snapshot, at(1));
    assert_eq!(plan.action, Action::Nothing);
    let progress = status(&backup, &plan, at(1)).progress.unwrap();
    assert_eq!((progress.bytes, progress.total_bytes), (10, Some(100)));
}

#[test]
fn a_failed_attempt_is_repeated_after_a_pause() {
    let backup = begun(|_| ());
    let snapshot = Snapshot {
        transfer: Pace {
            work: Work::Ended(Err(refused())),
            not_before: Some(at(20)),
            ..Pace::default()
        },
        ..Snapshot::default()
    };
    assert!(!needs_place(&backup, &snapshot, at(10)));
    let early = plan(&backup, &snapshot, at(10));
    assert_eq!(early.action, Action::Nothing);
    assert_eq!(early.requeue, Some(std::time::Duration::from_secs(10)));
    assert!(needs_place(&backup, &snapshot, at(20)));
    let due = Snapshot {
        place: Place::Free,
        ..snapshot
    };
    let due = plan(&backup, &due, at(20));
    assert_eq!(
        (due.action, due.verdict),
        (Action::StartTransfer, Verdict::Waiting(refused()))
    );
}

#[test]
fn nothing_is_waited_for_beyond_the_deadline() {
    let backup = begun(|object| object["spec"]["backupPolicy"] = json!({ "timeoutInSecond": 310 }));
    let unknown = known(Work::Idle, Place::Unknown(refused()));
    let failed = Snapshot {
        transfer: Pace {
            work: Work::Ended(Err(refused())),
            not_before: Some(at(900)),
            ..Pace::default()
        },
        ..Snapshot::default()
    };
    for waiting in [unknown, failed] {
        let early = plan(&backup, &waiting, at(300));
        assert_eq!(early.verdict, Verdict::Waiting(refused()));
        let again = at(300) + SignedDuration::try_from(early.requeue.unwrap()).unwrap();
        assert_eq!(again, at(310));
        let late = plan(&backup, &waiting, again);
        assert!(matches!(late.verdict, Verdict::Failed(_)), "{late:?}");
    }
}

#[test]
fn fails_at_the_deadline_and_says_what_was_wrong() {
    let backup = begun(|object| object["spec"]["backupPolicy"] = json!({ "timeoutInSecond": 60 }));
    let snapshot = known(Work::Ended(Err(refused())), Place::Free);
    assert_eq!(
        plan(&backup, &snapshot, at(59)).action,
        Action::StartTransfer
    );
    let late = plan(&backup, &snapshot, at(60));
    assert_eq!(late.action, Action::Nothing);
    let failed = after(backup.clone(), &late, at(61));
    let condition = find(failed.conditions(), &ConditionType::Failed)
        .unwrap()
        .clone();
    assert_eq!(
        (condition.status.as_str(), condition.reason.as_str()),
        ("True", "DeadlineExceeded")
    );
    assert!(condition.message.contains("timeoutInSecond") && condition.message.contains("403"));
    // What is under way has said nothing yet; the attempt before it has.
    let mut again = known(Work::Running(Moved::default()), Place::NotAsked);
    again.transfer.before = Some(refused());
    let cut_off = after(backup.clone(), &plan(&backup, &again, at(61)), at(61));
    let said = find(cut_off.conditions(), &ConditionType::Failed).map(|found| &found.message);
    assert!(said.is_some_and(|said| said.contains("403")), "{said:?}");
    // And stays failed, until the spec is changed.
    assert_eq!(
        plan(&failed, &Snapshot::default(), at(99)).verdict,
        Verdict::Settled
    );
    let mut changed = failed;
    changed.metadata.generation = Some(2);
    assert_eq!(
        plan(&changed, &Snapshot::default(), at(99)).action,
        Action::RecordIntent
    );
}

#[test]
fn a_transfer_that_takes_too_long_is_given_up() {
    let backup = begun(|object| object["spec"]["backupPolicy"] = json!({ "timeoutInSecond": 60 }));
    let snapshot = known(Work::Running(Moved::default()), Place::NotAsked);
    let late = plan(&backup, &snapshot, at(61));
    assert_eq!(late.action, Action::AbandonTransfer);
    assert!(matches!(late.verdict, Verdict::Failed(_)));
}

#[test]
fn the_time_allowed_grows_with_the_database_and_can_be_unlimited() {
    let moved = Moved {
        bytes: 1,
        total: Some(4 << 30),
    };
    let snapshot = known(Work::Running(moved), Place::NotAsked);
    let minutes = |minutes| at(SignedDuration::from_mins(minutes).as_secs());
    let default = begun(|_| ());
    assert_eq!(
        plan(&default, &snapshot, minutes(60)).action,
        Action::Nothing
    );
    assert_eq!(
        plan(&default, &snapshot, minutes(90)).action,
        Action::AbandonTransfer
    );
    // The size is remembered in the status: a restart does not shorten the time.
    let shown = after(
        default.clone(),
        &plan(&default, &snapshot, minutes(1)),
        minutes(1),
    );
    let again = known(Work::Idle, Place::Free);
    assert_eq!(
        plan(&shown, &again, minutes(60)).action,
        Action::StartTransfer
    );
    let unlimited =
        begun(|object| object["spec"]["backupPolicy"] = json!({ "timeoutInSecond": 0 }));
    assert_eq!(
        plan(&unlimited, &snapshot, minutes(100_000)).action,
        Action::Nothing
    );
}

#[test]
fn what_is_complete_counts_also_when_it_is_found_late() {
    let backup = begun(|object| object["spec"]["backupPolicy"] = json!({ "timeoutInSecond": 60 }));
    let plan = plan(
        &backup,
        &known(Work::Ended(Ok(stored())), Place::NotAsked),
        at(999),
    );
    assert_eq!(plan.verdict, Verdict::Succeeded(stored()));
}

#[test]
fn a_deleted_backup_gives_its_transfer_up() {
    let mut backup = begun(|_| ());
    backup.metadata.deletion_timestamp = Some(at(1).into());
    let running = known(Work::Running(Moved::default()), Place::NotAsked);
    assert_eq!(
        plan(&backup, &running, at(1)).action,
        Action::AbandonTransfer
    );
    assert_eq!(
        plan(&backup, &known(Work::Idle, Place::Free), at(1)).action,
        Action::Nothing
    );
}

#[test]
fn a_changed_spec_begins_anew_and_adopts_nothing_older() {
    let mut backup = begun(|_| ());
    backup.metadata.generation = Some(2);
    let running = known(Work::Running(Moved::default()), Place::NotAsked);
    let first = plan(&backup, &running, at(10));
    assert_eq!(first.action, Action::AbandonTransfer);
    // Giving up is not yet the record: that comes when nothing runs any more.
    let unchanged = after(backup, &first, at(10));
    assert_eq!(
        unchanged.status.as_ref().unwrap().observed_generation,
        Some(1)
    );
    let idle = known(Work::Ended(Ok(stored())), Place::NotAsked);
    let second = plan(&unchanged, &idle, at(11));
    assert_eq!(second.action, Action::RecordIntent);
    let recorded = after(unchanged, &second, at(11));
    assert_eq!(super::intent(&recorded), Some(at(11)));
}

#[test]
fn what_cannot_work_is_refused_with_field_and_remedy() {
    type Change = fn(&mut Value);
    let cases: [(Change, &str, &[&str]); 7] = [
        (
            |o| o["spec"]["storageType"] = json!("Floppy"),
            "InvalidSpec",
            &["spec.storageType", "Floppy", "S3"],
        ),
        (
            |o| o["spec"]["s3"] = Value::Null,
            "InvalidSpec",
            &["spec.s3", "missing"],
        ),
        (
            |o| o["spec"]["s3"]["path"] = json!("bucket"),
            "InvalidSpec",
            &["spec.s3.path", "<bucket>/<key>"],
        ),
        (
            |o| o["spec"]["s3"]["path"] = json!("/key"),
            "InvalidSpec",
            &["spec.s3.path", "bucket"],
        ),
        (
            |o| o["spec"]["etcdEndpoints"] = json!([]),
            "InvalidSpec",
            &["spec.etcdEndpoints", "set at least one"],
        ),
        (
            |o| o["spec"]["etcdEndpoints"] = json!(["https://secure:2379"]),
            "InvalidSpec",
            &["spec.etcdEndpoints", "spec.clientTLSSecret"],
        ),
        (
            |o| o["spec"]["backupPolicy"] = json!({ "backupIntervalInSecond": -1 }),
            "InvalidSpec",
            &["spec.backupPolicy.backupIntervalInSecond", "negative"],
        ),
    ];
    for (change, reason, fragments) in cases {
        let backup = with(change);
        let snapshot = known(Work::Idle, Place::Free);
        assert!(!needs_place(&backup, &snapshot, at(0)), "{fragments:?}");
        let plan = plan(&backup, &snapshot, at(0));
        assert_eq!(plan.action, Action::Nothing, "{fragments:?}");
        let told = notices(&backup, &plan);
        let after = after(backup, &plan, at(0));
        let failed = find(after.conditions(), &ConditionType::Failed).unwrap();
        assert_eq!(
            (failed.status.as_str(), failed.reason.as_str()),
            ("True", reason),
            "{}",
            failed.message
        );
        assert!(
            told.iter()
                .any(|notice| notice.warning && notice.reason == reason),
            "{told:?}"
        );
        for fragment in fragments {
            assert!(
                failed.message.contains(fragment),
                "{fragment} is not in {}",
                failed.message
            );
        }
        // A spec that is put right goes on, as the same object.
        let mut mended = fresh();
        mended.metadata.generation = Some(2);
        mended.status = after.status;
        let plan = super::plan(&mended, &Snapshot::default(), at(5));
        assert_eq!(plan.action, Action::RecordIntent);
        let status = status(&mended, &plan, at(5));
        assert!(!is_true(&status.conditions, &ConditionType::Failed));
        assert_eq!(status.reason, None);
    }
}

#[test]
fn a_refusal_is_judged_anew_by_a_later_release() {
    let backup = with(|object| {
        object["spec"]["etcdEndpoints"] = json!(["https://secure:2379"]);
    });
    let refused = after(
        backup.clone(),
        &plan(&backup, &Snapshot::default(), at(0)),
        at(0),
    );
    // The same spec as a release sees it that has no objection.
    let mut accepted = fresh();
    accepted.status = refused.status;
    assert_eq!(
        plan(&accepted, &Snapshot::default(), at(1)).action,
        Action::RecordIntent
    );
}
