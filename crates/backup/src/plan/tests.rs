//! The plan, told as cases: a backup, what is known, what happens next.

use api::EtcdBackup;
use api::conditions::{ConditionType, Reason, find, is_true};
use jiff::{SignedDuration, Timestamp};
use serde_json::{Value, json};

use super::{Need, Plan, Step, Verdict, need, plan};
use crate::observed::{Kept, Listed, Moved, Observed, Pace, Place, Stored, Trouble, Work};
use crate::status::{notices, status};

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
    let plan = plan(&backup, &Observed::default(), at(0));
    assert_eq!(plan.step, Step::RecordIntent);
    after(backup, &plan, at(0))
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

fn known(work: Work, place: Place) -> Observed {
    Observed {
        transfer: Pace {
            work,
            not_before: None,
        },
        place,
        ..Observed::default()
    }
}

fn needs_place(backup: &EtcdBackup, observed: &Observed, now: Timestamp) -> bool {
    need(backup, observed, now) == Need::Place
}

fn refused() -> Trouble {
    Trouble::new(Reason::AccessDenied, "access denied: 403")
}

/// Invariant 10.
#[test]
fn invariant_10_the_intent_is_recorded_before_anything_else() {
    let backup = fresh();
    let observed = known(Work::Idle, Place::Free);
    assert!(!needs_place(&backup, &observed, at(0)));
    let plan = plan(&backup, &observed, at(0));
    assert_eq!(plan.step, Step::RecordIntent);
    let status = status(&backup, &plan, at(0));
    assert_eq!(status.start_time.map(|time| time.0), Some(at(0)));
    assert_eq!(status.observed_generation, Some(1));
    assert!(!status.succeeded);
}

#[test]
fn begins_when_the_place_is_free() {
    let backup = begun(|_| ());
    assert!(needs_place(&backup, &Observed::default(), at(1)));
    let plan = plan(&backup, &known(Work::Idle, Place::Free), at(1));
    assert_eq!((plan.step, plan.verdict), (Step::Begin, Verdict::Begun));
}

/// Invariant 1.
#[test]
fn invariant_1_does_not_begin_while_the_store_is_unknown() {
    let backup = begun(|_| ());
    let unknown = known(Work::Idle, Place::Unknown(refused()));
    let plan = plan(&backup, &unknown, at(1));
    assert_eq!(plan.step, Step::Nothing);
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
fn adopts_what_an_operator_wrote_that_stopped_before_it_said_so() {
    let backup = begun(|_| ());
    let plan = plan(&backup, &known(Work::Idle, Place::Written(stored())), at(9));
    assert_eq!(plan.step, Step::Nothing);
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
        let observed = Observed::default();
        assert!(!needs_place(&backup, &observed, at(1_000_000)));
        let plan = plan(&backup, &observed, at(1_000_000));
        assert_eq!(
            (plan.step, plan.verdict.clone()),
            (Step::Nothing, Verdict::Settled)
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
    let observed = known(Work::Running(moved), Place::NotAsked);
    assert!(!needs_place(&backup, &observed, at(1)));
    let plan = plan(&backup, &observed, at(1));
    assert_eq!(plan.step, Step::Nothing);
    let progress = status(&backup, &plan, at(1)).progress.unwrap();
    assert_eq!((progress.bytes, progress.total_bytes), (10, Some(100)));
}

#[test]
fn a_failed_attempt_is_repeated_after_a_pause() {
    let backup = begun(|_| ());
    let observed = Observed {
        transfer: Pace {
            work: Work::Ended(Err(refused())),
            not_before: Some(at(20)),
        },
        ..Observed::default()
    };
    assert!(!needs_place(&backup, &observed, at(10)));
    let early = plan(&backup, &observed, at(10));
    assert_eq!(early.step, Step::Nothing);
    assert_eq!(early.requeue, Some(std::time::Duration::from_secs(10)));
    assert!(needs_place(&backup, &observed, at(20)));
    let due = Observed {
        place: Place::Free,
        ..observed
    };
    let due = plan(&backup, &due, at(20));
    assert_eq!(
        (due.step, due.verdict),
        (Step::Begin, Verdict::Waiting(refused()))
    );
}

#[test]
fn fails_at_the_deadline_and_says_what_was_wrong() {
    let backup = begun(|object| object["spec"]["backupPolicy"] = json!({ "timeoutInSecond": 60 }));
    let observed = known(Work::Ended(Err(refused())), Place::Free);
    assert_eq!(plan(&backup, &observed, at(60)).step, Step::Begin);
    let late = plan(&backup, &observed, at(61));
    assert_eq!(late.step, Step::Nothing);
    let failed = after(backup, &late, at(61));
    let condition = find(failed.conditions(), &ConditionType::Failed)
        .unwrap()
        .clone();
    assert_eq!(
        (condition.status.as_str(), condition.reason.as_str()),
        ("True", "DeadlineExceeded")
    );
    assert!(condition.message.contains("timeoutInSecond") && condition.message.contains("403"));
    // And stays failed, until the spec is changed.
    assert_eq!(
        plan(&failed, &Observed::default(), at(99)).verdict,
        Verdict::Settled
    );
    let mut changed = failed;
    changed.metadata.generation = Some(2);
    assert_eq!(
        plan(&changed, &Observed::default(), at(99)).step,
        Step::RecordIntent
    );
}

#[test]
fn a_transfer_that_takes_too_long_is_given_up() {
    let backup = begun(|object| object["spec"]["backupPolicy"] = json!({ "timeoutInSecond": 60 }));
    let observed = known(Work::Running(Moved::default()), Place::NotAsked);
    let late = plan(&backup, &observed, at(61));
    assert_eq!(late.step, Step::Abandon);
    assert!(matches!(late.verdict, Verdict::Failed(_)));
}

#[test]
fn the_time_allowed_grows_with_the_database_and_can_be_unlimited() {
    let moved = Moved {
        bytes: 1,
        total: Some(4 << 30),
    };
    let observed = known(Work::Running(moved), Place::NotAsked);
    let minutes = |minutes| at(SignedDuration::from_mins(minutes).as_secs());
    let default = begun(|_| ());
    assert_eq!(plan(&default, &observed, minutes(60)).step, Step::Nothing);
    assert_eq!(plan(&default, &observed, minutes(90)).step, Step::Abandon);
    // The size is remembered in the status: a restart does not shorten the time.
    let shown = after(
        default.clone(),
        &plan(&default, &observed, minutes(1)),
        minutes(1),
    );
    let again = known(Work::Idle, Place::Free);
    assert_eq!(plan(&shown, &again, minutes(60)).step, Step::Begin);
    let unlimited =
        begun(|object| object["spec"]["backupPolicy"] = json!({ "timeoutInSecond": 0 }));
    assert_eq!(
        plan(&unlimited, &observed, minutes(100_000)).step,
        Step::Nothing
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
    assert_eq!(plan(&backup, &running, at(1)).step, Step::Abandon);
    assert_eq!(
        plan(&backup, &known(Work::Idle, Place::Free), at(1)).step,
        Step::Nothing
    );
}

#[test]
fn a_changed_spec_begins_anew_and_adopts_nothing_older() {
    let mut backup = begun(|_| ());
    backup.metadata.generation = Some(2);
    let running = known(Work::Running(Moved::default()), Place::NotAsked);
    let first = plan(&backup, &running, at(10));
    assert_eq!(first.step, Step::Abandon);
    // Giving up is not yet the record: that comes when nothing runs any more.
    let unchanged = after(backup, &first, at(10));
    assert_eq!(
        unchanged.status.as_ref().unwrap().observed_generation,
        Some(1)
    );
    let idle = known(Work::Ended(Ok(stored())), Place::NotAsked);
    let second = plan(&unchanged, &idle, at(11));
    assert_eq!(second.step, Step::RecordIntent);
    let recorded = after(unchanged, &second, at(11));
    assert_eq!(super::intent(&recorded), Some(at(11)));
}

#[test]
fn what_cannot_work_is_refused_with_field_and_remedy() {
    type Change = fn(&mut Value);
    let cases: [(Change, &str, &[&str]); 9] = [
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
            &["spec.etcdEndpoints", "give at least one"],
        ),
        (
            |o| o["spec"]["etcdEndpoints"] = json!(["https://secure:2379"]),
            "NotSupported",
            &["spec.etcdEndpoints", "https"],
        ),
        (
            |o| o["spec"]["clientTLSSecret"] = json!("tls"),
            "NotSupported",
            &["spec.clientTLSSecret"],
        ),
        (
            |o| {
                o["spec"]["storageType"] = json!("GCS");
                o["spec"]["gcs"] = json!({ "path": "bucket/key" });
            },
            "NotSupported",
            &["spec.storageType", "GCS"],
        ),
        (
            |o| o["spec"]["backupPolicy"] = json!({ "backupIntervalInSecond": -1 }),
            "InvalidSpec",
            &["spec.backupPolicy.backupIntervalInSecond", "negative"],
        ),
    ];
    for (change, reason, fragments) in cases {
        let backup = with(change);
        let observed = known(Work::Idle, Place::Free);
        assert!(!needs_place(&backup, &observed, at(0)), "{fragments:?}");
        let plan = plan(&backup, &observed, at(0));
        assert_eq!(plan.step, Step::Nothing, "{fragments:?}");
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
        let plan = super::plan(&mended, &Observed::default(), at(5));
        assert_eq!(plan.step, Step::RecordIntent);
        let status = status(&mended, &plan, at(5));
        assert!(!is_true(&status.conditions, &ConditionType::Failed));
        assert_eq!(status.reason, None);
    }
}

#[test]
fn a_refusal_is_judged_anew_by_a_later_release() {
    let backup = with(|object| object["spec"]["clientTLSSecret"] = json!("tls"));
    let refused = after(
        backup.clone(),
        &plan(&backup, &Observed::default(), at(0)),
        at(0),
    );
    // The same spec as a release sees it that has no objection.
    let mut accepted = fresh();
    accepted.status = refused.status;
    assert_eq!(
        plan(&accepted, &Observed::default(), at(1)).step,
        Step::RecordIntent
    );
}

fn periodic(change: impl FnOnce(&mut Value)) -> EtcdBackup {
    with(|object| {
        object["spec"]["backupPolicy"] = json!({ "backupIntervalInSecond": 3600, "maxBackups": 3 });
        change(object);
    })
}

fn location(second: i64) -> String {
    let parts = api::backup::name::Numbered {
        time: at(second),
        revision: 40,
    };
    format!("s3://bucket/{}", api::backup::name::name("key", parts))
}

/// One backup was complete at second 5, and what it left to do is not done yet.
fn once(change: impl FnOnce(&mut Value)) -> EtcdBackup {
    let backup = periodic(change);
    let first = plan(&backup, &Observed::default(), at(0));
    assert_eq!(first.step, Step::RecordIntent);
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
                parts: api::backup::name::Numbered {
                    time: at(0),
                    revision: 40,
                },
            },
            Listed {
                location: location(-3600),
                parts: api::backup::name::Numbered {
                    time: at(-3600),
                    revision: 30,
                },
            },
        ],
        deleted: 1,
    };
    let mut observed = Observed::default();
    observed.removal.work = Work::Ended(Ok(kept));
    let done = plan(&backup, &observed, at(8));
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
        let resting = plan(&backup, &Observed::default(), at(second));
        assert_eq!(resting.step, Step::Nothing);
        assert!(
            matches!(resting.verdict, Verdict::Scheduled(Some(time)) if time >= at(3600) && time <= at(3631)),
            "{resting:?}"
        );
        assert!(resting.requeue.is_some());
    }
    // However many were missed, one is made up.
    for second in [3640, 1_000_000] {
        let due = plan(&backup, &Observed::default(), at(second));
        assert_eq!(due.step, Step::RecordIntent);
        let again = after(backup.clone(), &due, at(second));
        // While it runs, the conditions say how the last one went.
        assert!(is_true(again.conditions(), &ConditionType::Complete));
        assert!(is_true(again.conditions(), &ConditionType::Progressing));
        assert!(again.status.as_ref().unwrap().succeeded);
        assert_eq!(super::intent(&again), Some(at(second)));
        assert!(needs_place(&again, &Observed::default(), at(second + 1)));
    }
}

#[test]
fn backups_do_not_overlap() {
    let backup = tidied(once(|_| ()));
    let due = plan(&backup, &Observed::default(), at(4000));
    let running = after(backup, &due, at(4000));
    // Longer than the interval, without a limit.
    let mut slow = running;
    slow.spec.backup_policy.as_mut().unwrap().timeout_in_second = Some(0);
    let observed = known(Work::Running(Moved::default()), Place::NotAsked);
    let plan = plan(&slow, &observed, at(100_000));
    assert_eq!(
        (plan.step, plan.verdict),
        (Step::Nothing, Verdict::Running(Moved::default()))
    );
}

#[test]
fn one_that_failed_is_followed_by_the_next_and_at_once_when_the_spec_is_changed() {
    let backup = tidied(once(|_| ()));
    let due = plan(&backup, &Observed::default(), at(4000));
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
        plan(&failed, &Observed::default(), at(5001)).step,
        Step::Nothing
    );
    assert_eq!(
        plan(&failed, &Observed::default(), at(7700)).step,
        Step::RecordIntent
    );
    let mut changed = failed;
    changed.metadata.generation = Some(2);
    assert_eq!(
        plan(&changed, &Observed::default(), at(5001)).step,
        Step::RecordIntent
    );
}

#[test]
fn a_suspended_backup_makes_no_new_one_and_says_so() {
    for suspended in [
        with(|object| object["spec"]["backupPolicy"] = json!({ "suspend": true })),
        periodic(|object| object["spec"]["backupPolicy"]["suspend"] = json!(true)),
    ] {
        let resting = plan(&suspended, &Observed::default(), at(0));
        assert_eq!(
            (resting.step, &resting.verdict),
            (Step::Nothing, &Verdict::Suspended)
        );
        let told = after(suspended, &resting, at(0));
        let progressing = find(told.conditions(), &ConditionType::Progressing).unwrap();
        assert_eq!(progressing.reason, "Suspended");
        let mut resumed = told;
        resumed.spec.backup_policy.as_mut().unwrap().suspend = false;
        resumed.metadata.generation = Some(2);
        let begun = plan(&resumed, &Observed::default(), at(9));
        assert_eq!(begun.step, Step::RecordIntent);
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
        &plan(&backup, &Observed::default(), at(0)),
        at(0),
    );
    backup.metadata.generation = Some(2);
    backup.spec.backup_policy.as_mut().unwrap().suspend = true;
    let running = known(Work::Running(Moved::default()), Place::NotAsked);
    assert_eq!(plan(&backup, &running, at(1)).step, Step::Abandon);
    let resting = plan(&backup, &Observed::default(), at(2));
    backup = after(backup, &resting, at(2));
    assert_eq!(need(&backup, &Observed::default(), at(3)), Need::Nothing);
    assert_eq!(
        plan(&backup, &Observed::default(), at(3)).verdict,
        Verdict::Suspended
    );
    backup.metadata.generation = Some(3);
    backup.spec.backup_policy.as_mut().unwrap().suspend = false;
    assert_eq!(
        plan(&backup, &Observed::default(), at(9)).step,
        Step::RecordIntent
    );
}

/// Invariant 9.
#[test]
fn invariant_9_old_backups_go_only_after_the_status_says_that_a_newer_one_is_complete() {
    let backup = periodic(|_| ());
    let idle = Observed::default();
    assert_ne!(need(&backup, &idle, at(0)), Need::Tidy);
    let first = plan(&backup, &idle, at(0));
    let running = after(backup, &first, at(0));
    assert_eq!(need(&running, &idle, at(1)), Need::Place);
    let complete = once(|_| ());
    assert_eq!(need(&complete, &idle, at(6)), Need::Tidy);
    assert_eq!(plan(&complete, &idle, at(6)).step, Step::Tidy);
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
    let mut failed = Observed::default();
    failed.removal.work = Work::Ended(Err(refused()));
    failed.removal.not_before = Some(at(30));
    assert_eq!(need(&complete, &failed, at(10)), Need::Nothing);
    let waits = plan(&complete, &failed, at(10));
    assert_eq!(
        (waits.step, &waits.verdict),
        (Step::Nothing, &Verdict::Untidy(refused()))
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
    assert_eq!(need(&told, &failed, at(30)), Need::Tidy);
    assert_eq!(plan(&told, &failed, at(30)).step, Step::Tidy);
    // The next backup does not wait for it.
    assert_eq!(plan(&told, &failed, at(4000)).step, Step::RecordIntent);
}

#[test]
fn without_rules_nothing_is_removed_and_the_newest_are_listed() {
    let complete = once(|object| object["spec"]["backupPolicy"]["maxBackups"] = json!(0));
    assert_eq!(need(&complete, &Observed::default(), at(6)), Need::Nothing);
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
        let refused = plan(&backup, &Observed::default(), at(0));
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
        plan(&backup, &Observed::default(), at(60)).step,
        Step::Nothing
    );
    assert_eq!(
        plan(&backup, &Observed::default(), at(3640)).step,
        Step::RecordIntent
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
    let early = plan(&backup, &Observed::default(), at(60));
    assert_eq!(
        (early.step, early.requeue),
        (Step::Nothing, Some(std::time::Duration::from_secs(9)))
    );
    assert_eq!(
        plan(&backup, &Observed::default(), at(69)).step,
        Step::Expire
    );
    // One that goes on never finishes.
    let periodic = tidied(once(|object| {
        object["spec"]["ttlSecondsAfterFinished"] = json!(60);
    }));
    assert_eq!(
        plan(&periodic, &Observed::default(), at(100)).step,
        Step::Nothing
    );
    // Nor does one whose spec can be put right.
    let refused = with(|object| {
        object["spec"]["ttlSecondsAfterFinished"] = json!(0);
        object["spec"]["s3"] = Value::Null;
    });
    let verdict = plan(&refused, &Observed::default(), at(0));
    let refused = after(refused, &verdict, at(0));
    assert_eq!(
        plan(&refused, &Observed::default(), at(100)).step,
        Step::Nothing
    );
}

#[test]
fn the_finalizer_is_there_only_when_stored_backups_go_with_the_object() {
    let delete = |object: &mut Value| object["spec"]["deletionPolicy"] = json!("Delete");
    // Before anything is stored.
    let fresh = with(delete);
    let observed = Observed::default();
    assert_eq!(plan(&fresh, &observed, at(0)).step, Step::Guard(true));
    let mut guarded = fresh;
    guarded.metadata.finalizers = Some(vec![api::names::FINALIZER_STORED.to_owned()]);
    assert_eq!(plan(&guarded, &observed, at(0)).step, Step::RecordIntent);
    let mut retained = guarded.clone();
    retained.spec.deletion_policy = None;
    assert_eq!(plan(&retained, &observed, at(0)).step, Step::Guard(false));

    // On deletion: first what runs, then what is stored, then the object.
    guarded.metadata.deletion_timestamp = Some(at(10).into());
    let running = known(Work::Running(Moved::default()), Place::NotAsked);
    assert_eq!(plan(&guarded, &running, at(10)).step, Step::Abandon);
    assert_eq!(need(&guarded, &running, at(10)), Need::Nothing);
    assert_eq!(need(&guarded, &observed, at(10)), Need::Purge);
    assert_eq!(plan(&guarded, &observed, at(10)).step, Step::Purge);
    let mut purged = Observed::default();
    purged.removal.work = Work::Ended(Ok(Kept::default()));
    assert_eq!(plan(&guarded, &purged, at(11)).step, Step::Guard(false));
    // What cannot be removed keeps the object, and the user is told how to let it go.
    let denied = Observed {
        obstacle: Some(refused()),
        ..Observed::default()
    };
    let waits = plan(&guarded, &denied, at(1000));
    assert_eq!(
        (waits.step, &waits.verdict),
        (Step::Nothing, &Verdict::Ending(refused()))
    );
    let told = status(&guarded, &waits, at(1000));
    let applied = find(&told.conditions, &ConditionType::RetentionApplied).unwrap();
    assert!(applied.message.contains("Retain"), "{}", applied.message);
    // A namespace that goes takes the Secret with it.
    let gone = Observed {
        obstacle: Some(Trouble::new(Reason::SecretMissing, "gone")),
        ..Observed::default()
    };
    assert_eq!(plan(&guarded, &gone, at(20)).step, Step::Nothing);
    assert_eq!(plan(&guarded, &gone, at(400)).step, Step::Guard(false));
}
