//! Tests of the planner. A test compares the plan for an EtcdBackup and a snapshot with the expected plan.

use std::time::Duration;

use api::EtcdBackup;
use api::conditions::{ConditionType, find, is_true};
use jiff::{SignedDuration, Timestamp};
use serde_json::{Value, json};

use super::{Action, Need, Plan, Verdict, need, plan};
use crate::reason::{Reason, Trouble};
use crate::snapshot::{Destination, Moved, Snapshot, Stored, Work, WorkState};
use crate::status::{notices, status};

mod anything;
mod attempts;
mod clock;
mod deadline;
mod deletion;
mod model;
mod periodic;
mod reported;

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

/// The EtcdBackup with the status after this plan.
fn after(mut backup: EtcdBackup, plan: &Plan, now: Timestamp) -> EtcdBackup {
    backup.status = Some(status(&backup, plan, now));
    backup
}

/// An EtcdBackup whose status records the start of its backup at second 0.
fn begun(change: impl FnOnce(&mut Value)) -> EtcdBackup {
    let backup = with(change);
    let plan = plan(&backup, &Snapshot::default(), at(0));
    assert_eq!(plan.action, Action::RecordIntent);
    after(backup, &plan, at(0))
}

#[test]
fn unverified_store_certificate_causes_warning() {
    for unverified in [false, true] {
        let backup = with(|backup| backup["spec"]["s3"]["insecureSkipVerify"] = json!(unverified));
        let plan = plan(&backup, &Snapshot::default(), at(0));
        assert_eq!(plan.action, Action::RecordIntent);
        let notices = notices(&backup, &plan);
        let warned = notices
            .iter()
            .any(|notice| notice.warning && notice.reason == "CertificateNotChecked");
        assert_eq!(warned, unverified, "{notices:?}");
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
        keys: Some(3),
        encryption_key: None,
        created_at: at(5),
    }
}

fn known(work: Work, destination: Destination) -> Snapshot {
    Snapshot {
        transfer: WorkState {
            work,
            ..WorkState::default()
        },
        destination,
        ..Snapshot::default()
    }
}

fn needs_destination(backup: &EtcdBackup, snapshot: &Snapshot, now: Timestamp) -> bool {
    need(backup, snapshot, now) == Need::Destination
}

fn refused() -> Trouble {
    Trouble::new(Reason::AccessDenied, "access denied: 403")
}

#[test]
fn invariant_10_backup_start_is_recorded_before_store_is_read() {
    let backup = fresh();
    let snapshot = known(Work::Idle, Destination::Free);
    assert!(!needs_destination(&backup, &snapshot, at(0)));
    let plan = plan(&backup, &snapshot, at(0));
    assert_eq!(plan.action, Action::RecordIntent);
    let status = status(&backup, &plan, at(0));
    assert_eq!(status.start_time.map(|time| time.0), Some(at(0)));
    assert_eq!(status.observed_generation, Some(1));
    assert!(!status.succeeded);
}

#[test]
fn transfer_starts_if_store_has_no_complete_backup() {
    let backup = begun(|_| ());
    assert!(needs_destination(&backup, &Snapshot::default(), at(1)));
    let plan = plan(&backup, &known(Work::Idle, Destination::Free), at(1));
    assert_eq!(
        (plan.action, plan.verdict),
        (Action::StartTransfer, Verdict::Starting)
    );
}

#[test]
fn invariant_1_transfer_waits_while_store_content_is_unknown() {
    let backup = begun(|_| ());
    let unknown = known(Work::Idle, Destination::Unknown(refused()));
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
fn checks_of_unreachable_store_back_off() {
    let backup = begun(|object| {
        object["spec"]["backupPolicy"] = json!({ "timeoutInSecond": 0 });
    });
    let unknown = known(Work::Idle, Destination::Unknown(refused()));
    for (waited, requeue) in [(1, 3), (30, 3), (120, 12), (300, 30), (86_400, 30)] {
        let plan = plan(&backup, &unknown, at(waited));
        assert_eq!(plan.requeue, Some(Duration::from_secs(requeue)), "{waited}");
    }
}

#[test]
fn complete_backup_of_interrupted_operator_is_adopted() {
    let backup = begun(|_| ());
    let plan = plan(
        &backup,
        &known(Work::Idle, Destination::Complete(stored())),
        at(9),
    );
    assert_eq!(plan.action, Action::Nothing);
    let status = status(&backup, &plan, at(9));
    assert!(status.succeeded);
    assert_eq!((status.etcd_revision, status.keys), (Some(42), Some(3)));
    assert_eq!(status.last_success_date.map(|time| time.0), Some(at(5)));
    assert!(is_true(&status.conditions, &ConditionType::Complete));
}

#[test]
fn complete_single_backup_is_never_repeated() {
    let backup = begun(|_| ());
    let done = plan(
        &backup,
        &known(Work::Ended(Ok(stored())), Destination::NotRead),
        at(9),
    );
    let mut backup = after(backup, &done, at(9));
    // A complete backup is not repeated after a restart of the operator, a long time, or a change of the spec.
    for generation in [1, 2] {
        backup.metadata.generation = Some(generation);
        let snapshot = Snapshot::default();
        assert!(!needs_destination(&backup, &snapshot, at(1_000_000)));
        let plan = plan(&backup, &snapshot, at(1_000_000));
        assert_eq!(
            (plan.action, plan.verdict.clone()),
            (Action::Nothing, Verdict::Unchanged)
        );
        // Apart from the observed generation, the status and its conditions do not change.
        let mut reported = status(&backup, &plan, at(1_000_000));
        assert_eq!(reported.observed_generation, Some(generation));
        reported.observed_generation = Some(1);
        for condition in &mut reported.conditions {
            condition.observed_generation = Some(1);
        }
        assert_eq!(Some(reported), backup.status);
        assert!(notices(&backup, &plan).is_empty());
    }
}

#[test]
fn status_reports_progress_of_running_transfer() {
    let backup = begun(|_| ());
    let moved = Moved {
        bytes: 10,
        total: Some(100),
    };
    let snapshot = known(Work::Running(moved), Destination::NotRead);
    assert!(!needs_destination(&backup, &snapshot, at(1)));
    let plan = plan(&backup, &snapshot, at(1));
    assert_eq!(plan.action, Action::Nothing);
    let progress = status(&backup, &plan, at(1)).progress.unwrap();
    assert_eq!((progress.bytes, progress.total_bytes), (10, Some(100)));
}

#[test]
fn failed_attempt_is_retried_after_pause() {
    let backup = begun(|_| ());
    let snapshot = Snapshot {
        transfer: WorkState {
            work: Work::Ended(Err(refused())),
            not_before: Some(at(20)),
            ..WorkState::default()
        },
        ..Snapshot::default()
    };
    assert!(!needs_destination(&backup, &snapshot, at(10)));
    let early = plan(&backup, &snapshot, at(10));
    assert_eq!(early.action, Action::Nothing);
    assert_eq!(early.requeue, Some(std::time::Duration::from_secs(10)));
    assert!(needs_destination(&backup, &snapshot, at(20)));
    let due = Snapshot {
        destination: Destination::Free,
        ..snapshot
    };
    let due = plan(&backup, &due, at(20));
    assert_eq!(
        (due.action, due.verdict),
        (Action::StartTransfer, Verdict::Waiting(refused()))
    );
}

#[test]
fn backup_is_reconciled_at_its_deadline_or_earlier() {
    let backup = begun(|object| object["spec"]["backupPolicy"] = json!({ "timeoutInSecond": 310 }));
    let unknown = known(Work::Idle, Destination::Unknown(refused()));
    let failed = Snapshot {
        transfer: WorkState {
            work: Work::Ended(Err(refused())),
            not_before: Some(at(900)),
            ..WorkState::default()
        },
        ..Snapshot::default()
    };
    for waiting in [unknown, failed] {
        let early = plan(&backup, &waiting, at(300));
        assert_eq!(early.verdict, Verdict::Waiting(refused()));
        let next = at(300) + SignedDuration::try_from(early.requeue.unwrap()).unwrap();
        assert_eq!(next, at(310));
        let overdue = plan(&backup, &waiting, next);
        assert!(matches!(overdue.verdict, Verdict::Failed(_)), "{overdue:?}");
    }
}

#[test]
fn backup_fails_at_deadline_and_reports_last_failure() {
    let backup = begun(|object| object["spec"]["backupPolicy"] = json!({ "timeoutInSecond": 60 }));
    let snapshot = known(Work::Ended(Err(refused())), Destination::Free);
    assert_eq!(
        plan(&backup, &snapshot, at(59)).action,
        Action::StartTransfer
    );
    let overdue = plan(&backup, &snapshot, at(60));
    assert_eq!(overdue.action, Action::Nothing);
    let failed = after(backup.clone(), &overdue, at(61));
    let condition = find(failed.conditions(), &ConditionType::Failed)
        .unwrap()
        .clone();
    assert_eq!(
        (condition.status.as_str(), condition.reason.as_str()),
        ("True", "DeadlineExceeded")
    );
    assert!(condition.message.contains("timeoutInSecond") && condition.message.contains("403"));
    // The running attempt has no result yet, so the deadline message contains the failure of the previous attempt.
    let mut retrying = known(Work::Running(Moved::default()), Destination::NotRead);
    retrying.transfer.last_failure = Some(refused());
    let canceling = after(backup.clone(), &plan(&backup, &retrying, at(61)), at(61));
    let canceled = plan(&canceling, &canceled(), at(62));
    let canceled = after(canceling, &canceled, at(62));
    let reported = find(canceled.conditions(), &ConditionType::Failed).map(|found| &found.message);
    assert!(
        reported.is_some_and(|message| message.contains("403")),
        "{reported:?}"
    );
    // A failed backup is repeated only after a change of the spec.
    assert_eq!(
        plan(&failed, &Snapshot::default(), at(99)).verdict,
        Verdict::Unchanged
    );
    let mut changed = failed;
    changed.metadata.generation = Some(2);
    assert_eq!(
        plan(&changed, &Snapshot::default(), at(99)).action,
        Action::RecordIntent
    );
}

#[test]
fn transfer_is_canceled_after_deadline() {
    let backup = begun(|object| object["spec"]["backupPolicy"] = json!({ "timeoutInSecond": 60 }));
    let snapshot = known(Work::Running(Moved::default()), Destination::NotRead);
    let overdue = plan(&backup, &snapshot, at(61));
    assert_eq!(overdue.action, Action::AbandonTransfer);
    let canceling = after(backup, &overdue, at(61));
    assert!(!is_true(canceling.conditions(), &ConditionType::Failed));
    let ended = plan(&canceling, &canceled(), at(62));
    assert!(matches!(ended.verdict, Verdict::Failed(_)), "{ended:?}");
    // If the canceled transfer does not end, the failure is reported two minutes after the deadline.
    let hung = plan(&canceling, &snapshot, at(179));
    assert!(matches!(hung.verdict, Verdict::Waiting(_)), "{hung:?}");
    let hung = plan(&canceling, &snapshot, at(180));
    assert_eq!(hung.action, Action::AbandonTransfer);
    assert!(matches!(hung.verdict, Verdict::Failed(_)), "{hung:?}");
}

/// A transfer that was canceled at the deadline without a complete backup in the store.
fn canceled() -> Snapshot {
    let trouble = Trouble::new(Reason::StepFailed, "the backup was canceled");
    known(Work::Ended(Err(trouble)), Destination::Free)
}

/// The transfer has stored its whole backup, and is canceled while it reads the backup again.
#[test]
fn canceled_transfer_with_complete_backup_succeeds() {
    let backup = begun(|object| object["spec"]["backupPolicy"] = json!({ "timeoutInSecond": 60 }));
    let running = known(Work::Running(Moved::default()), Destination::NotRead);
    let canceling = after(backup.clone(), &plan(&backup, &running, at(61)), at(61));
    // After a canceled transfer has ended, the operator reads the store at once, and does not wait until `not_before`.
    let mut ended = canceled();
    ended.transfer.not_before = Some(at(90));
    assert_eq!(need(&canceling, &running, at(62)), Need::Nothing);
    assert_eq!(need(&canceling, &ended, at(62)), Need::Destination);
    ended.destination = Destination::Complete(stored());
    let found = plan(&canceling, &ended, at(62));
    assert_eq!(found.verdict, Verdict::Succeeded(stored()));
    // If the store does not answer after the deadline, the backup has failed.
    ended.destination = Destination::Unknown(refused());
    let unknown = plan(&canceling, &ended, at(62));
    assert!(matches!(unknown.verdict, Verdict::Failed(_)), "{unknown:?}");
}

#[test]
fn time_limit_grows_with_database_up_to_48_hours() {
    let moved = Moved {
        bytes: 1,
        total: Some(4 << 30),
    };
    let snapshot = known(Work::Running(moved), Destination::NotRead);
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
    // The status records the size of the database, so a restart of the operator does not shorten the time limit.
    let recorded = after(
        default.clone(),
        &plan(&default, &snapshot, minutes(1)),
        minutes(1),
    );
    let restarted = known(Work::Idle, Destination::Free);
    assert_eq!(
        plan(&recorded, &restarted, minutes(60)).action,
        Action::StartTransfer
    );
    // The time limit is at most 48 hours, also for `timeoutInSecond: 0`.
    for seconds in [0, i64::MAX] {
        let longest =
            begun(|object| object["spec"]["backupPolicy"] = json!({ "timeoutInSecond": seconds }));
        let step = |time| plan(&longest, &snapshot, time).action;
        assert_eq!(step(minutes(48 * 60 - 1)), Action::Nothing);
        assert_eq!(step(minutes(48 * 60)), Action::AbandonTransfer);
    }
}

#[test]
fn complete_backup_succeeds_even_after_deadline() {
    let backup = begun(|object| object["spec"]["backupPolicy"] = json!({ "timeoutInSecond": 60 }));
    let plan = plan(
        &backup,
        &known(Work::Ended(Ok(stored())), Destination::NotRead),
        at(999),
    );
    assert_eq!(plan.verdict, Verdict::Succeeded(stored()));
}

#[test]
fn deletion_of_etcdbackup_cancels_transfer() {
    let mut backup = begun(|_| ());
    backup.metadata.deletion_timestamp = Some(at(1).into());
    let running = known(Work::Running(Moved::default()), Destination::NotRead);
    assert_eq!(
        plan(&backup, &running, at(1)).action,
        Action::AbandonTransfer
    );
    assert_eq!(
        plan(&backup, &known(Work::Idle, Destination::Free), at(1)).action,
        Action::Nothing
    );
}

#[test]
fn changed_spec_starts_new_backup_instead_of_adopting_earlier_one() {
    let mut backup = begun(|_| ());
    backup.metadata.generation = Some(2);
    let running = known(Work::Running(Moved::default()), Destination::NotRead);
    let first = plan(&backup, &running, at(10));
    assert_eq!(first.action, Action::AbandonTransfer);
    // The start of the new backup is recorded only after the canceled transfer has ended.
    let unchanged = after(backup, &first, at(10));
    assert_eq!(
        unchanged.status.as_ref().unwrap().observed_generation,
        Some(1)
    );
    let idle = known(Work::Ended(Ok(stored())), Destination::NotRead);
    let second = plan(&unchanged, &idle, at(11));
    assert_eq!(second.action, Action::RecordIntent);
    let recorded = after(unchanged, &second, at(11));
    assert_eq!(super::intent(&recorded), Some(at(11)));
}

#[test]
fn invalid_etcdbackup_is_rejected_with_field_and_remedy() {
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
        let snapshot = known(Work::Idle, Destination::Free);
        assert!(
            !needs_destination(&backup, &snapshot, at(0)),
            "{fragments:?}"
        );
        let plan = plan(&backup, &snapshot, at(0));
        assert_eq!(plan.action, Action::Nothing, "{fragments:?}");
        let notices = notices(&backup, &plan);
        let after = after(backup, &plan, at(0));
        let failed = find(after.conditions(), &ConditionType::Failed).unwrap();
        assert_eq!(
            (failed.status.as_str(), failed.reason.as_str()),
            ("True", reason),
            "{}",
            failed.message
        );
        assert!(
            notices
                .iter()
                .any(|notice| notice.warning && notice.reason == reason),
            "{notices:?}"
        );
        for fragment in fragments {
            assert!(
                failed.message.contains(fragment),
                "{fragment} is not in {}",
                failed.message
            );
        }
        // After a correction of the spec, the EtcdBackup starts its backup.
        let mut corrected = fresh();
        corrected.metadata.generation = Some(2);
        corrected.status = after.status;
        let plan = super::plan(&corrected, &Snapshot::default(), at(5));
        assert_eq!(plan.action, Action::RecordIntent);
        let status = status(&corrected, &plan, at(5));
        assert!(!is_true(&status.conditions, &ConditionType::Failed));
        assert_eq!(status.reason, None);
    }
}

#[test]
fn etcdbackup_rejected_by_earlier_release_starts_if_now_valid() {
    let backup = with(|object| {
        object["spec"]["etcdEndpoints"] = json!(["https://secure:2379"]);
    });
    let refused = after(
        backup.clone(),
        &plan(&backup, &Snapshot::default(), at(0)),
        at(0),
    );
    // The spec is valid, but the status reports a refusal. This happens if a later release of the operator accepts a
    // spec that an earlier release refused.
    let mut accepted = fresh();
    accepted.status = refused.status;
    assert_eq!(
        plan(&accepted, &Snapshot::default(), at(1)).action,
        Action::RecordIntent
    );
}

#[test]
fn stuck_pvc_backup_is_reported_while_its_pod_waits() {
    let backup = begun(|object| object["spec"]["backupPolicy"] = json!({ "timeoutInSecond": 60 }));
    let obstacle = Trouble::new(
        Reason::PodNotStarting,
        "FailedAttachVolume: Multi-Attach error",
    );
    let mut stuck = known(Work::Running(Moved::default()), Destination::NotRead);
    stuck.transfer.obstacle = Some(obstacle.clone());
    let waits = plan(&backup, &stuck, at(30));
    assert_eq!(
        (waits.action, &waits.verdict),
        (Action::Nothing, &Verdict::Waiting(obstacle))
    );
    let reported = after(backup, &waits, at(30));
    let complete = find(reported.conditions(), &ConditionType::Complete).unwrap();
    assert_eq!(complete.reason, "PodNotStarting");
    assert!(notices(&reported, &waits)[0].warning);
    let canceling = plan(&reported, &stuck, at(60));
    assert_eq!(canceling.action, Action::AbandonTransfer);
    let canceling = after(reported, &canceling, at(60));
    let Verdict::Failed(trouble) = plan(&canceling, &canceled(), at(61)).verdict else {
        panic!("the backup has not failed")
    };
    assert!(trouble.message.contains("Multi-Attach"), "{trouble:?}");
}
