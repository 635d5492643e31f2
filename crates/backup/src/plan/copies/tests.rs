//! Tests of the plan of copies. Each test has an EtcdBackup, a snapshot, and the expected plan.

use std::collections::BTreeSet;

use api::names::FINALIZER_STORED;
use serde_json::{Value, json};

use super::*;
use crate::plan::{need as need_of, plan as plan_all};
use crate::snapshot::{CopyRetention, Moved, RemovalResult, Stored, WorkState};
use crate::status::{notices, status};

const NEWEST: &str = "_v42_2027-01-15-08:00:00";
const OLDER: &str = "_v40_2027-01-15-07:00:00";

fn at(second: i64) -> Timestamp {
    Timestamp::from_second(1_800_000_000 + second).unwrap()
}

/// A periodic EtcdBackup with two stored backups, and the copy `offsite`.
fn with(change: impl FnOnce(&mut Value)) -> EtcdBackup {
    let location = |suffix: &str| format!("s3://bucket/etcd{suffix}");
    let mut object = json!({
        "apiVersion": "etcd.database.coreos.com/v1beta2", "kind": "EtcdBackup",
        "metadata": { "name": "b", "namespace": "n", "uid": "u", "generation": 1 },
        "spec": {
            "etcdCluster": { "name": "c" }, "storageType": "S3", "s3": { "path": "bucket/etcd", "awsSecret": "aws" },
            "backupPolicy": { "schedule": "0 0 1 1 *" },
            "copyTo": [{ "name": "offsite", "storageType": "GCS", "gcs": { "path": "other/copies" } }],
        },
        "status": {
            "observedGeneration": 1, "succeeded": true, "location": location(NEWEST), "sha256": "ab",
            "etcdRevision": 42, "startTime": "2027-01-15T08:00:00Z", "completionTime": "2027-01-15T08:00:05Z",
            "lastSuccessDate": "2027-01-15T08:00:04Z",
            "backups": [{ "location": location(NEWEST), "sha256": "ab" }, { "location": location(OLDER) }],
        },
    });
    change(&mut object);
    serde_json::from_value(object).unwrap()
}

fn single(change: impl FnOnce(&mut Value)) -> EtcdBackup {
    with(|object| {
        object["spec"]["backupPolicy"] = Value::Null;
        object["status"]["location"] = json!("s3://bucket/etcd");
        change(object);
    })
}

fn copied() -> Copied {
    Copied {
        stored: Stored {
            location: format!("gs://other/copies{NEWEST}"),
            etcd_version: "3.6.16".to_owned(),
            cluster_id: "aa".to_owned(),
            revision: 42,
            size: 10,
            sha256: "ab".to_owned(),
            keys: None,
            encryption_key: None,
            created_at: at(4),
        },
        problem: None,
    }
}

fn denied() -> Trouble {
    Trouble::new(Reason::AccessDenied, "access denied: 403")
}

fn worker(work: Work<Copied>) -> CopyInputs {
    CopyInputs {
        work: WorkState {
            work,
            ..WorkState::default()
        },
        ..CopyInputs::default()
    }
}

fn opened() -> CopyInputs {
    CopyInputs {
        opened: Some(Ok(())),
        ..CopyInputs::default()
    }
}

fn snapshot(inputs: CopyInputs) -> Snapshot {
    Snapshot {
        copies: vec![inputs],
        ..Snapshot::default()
    }
}

fn planned(backup: &EtcdBackup, inputs: CopyInputs, now: Timestamp) -> Plan {
    plan_all(backup, &snapshot(inputs), now)
}

/// The EtcdBackup with the status that the plan results in.
fn after(mut backup: EtcdBackup, plan: &Plan, now: Timestamp) -> EtcdBackup {
    backup.status = Some(status(&backup, plan, now));
    backup
}

fn needs(backup: &EtcdBackup, inputs: &CopyInputs, now: Timestamp) -> CopyNeed {
    need(backup, &backup.spec.copy_to[0], inputs, now)
}

fn job_of(plan: &Plan) -> &CopyJob {
    match &plan.copies.copies[0].step {
        CopyStep::Copy(job) => job,
        step => panic!("{step:?}"),
    }
}

fn record_in(backup: &EtcdBackup) -> CopyStatus {
    backup.status.as_ref().unwrap().copies[0].clone()
}

fn condition(backup: &EtcdBackup) -> (String, String) {
    let found = find(backup.conditions(), &ConditionType::Copied).unwrap();
    (found.status.clone(), found.reason.clone())
}

fn reasons(backup: &EtcdBackup, plan: &Plan) -> Vec<&'static str> {
    let notices = notices(backup, plan);
    notices.iter().map(|notice| notice.reason).collect()
}

#[test]
fn newest_and_older_backups_are_copied_once() {
    let backup = with(|_| ());
    assert_eq!(
        needs(&backup, &CopyInputs::default(), at(9)),
        CopyNeed::Copy
    );
    let starting = planned(&backup, opened(), at(9));
    let job = job_of(&starting);
    let suffixes: Vec<&str> = job.backups.iter().map(|one| one.suffix.as_str()).collect();
    assert_eq!(suffixes, [NEWEST, OLDER]);
    assert_eq!(job.backups[0].sha256.as_deref(), Some("ab"));
    assert_eq!(job.rules, CopyRules::KeepAll);
    // The start of the copy is in the field `copies` of the plan. The field `action` stays `Nothing`.
    assert_eq!(starting.action, Action::Nothing);
    let backup = after(backup, &starting, at(9));
    assert_eq!(condition(&backup), ("Unknown".into(), "Copying".into()));

    let running = worker(Work::Running(Moved::default()));
    assert_eq!(needs(&backup, &running, at(60)), CopyNeed::Nothing);
    assert!(planned(&backup, running, at(60)).copies.is_unchanged());

    let done = planned(&backup, worker(Work::Ended(Ok(copied()))), at(70));
    assert_eq!(reasons(&backup, &done), ["BackupCopied"]);
    let backup = after(backup, &done, at(70));
    assert_eq!(condition(&backup), ("True".into(), "BackupCopied".into()));
    let record = record_in(&backup);
    assert_eq!(record.location, Some(copied().stored.location));
    assert_eq!(record.completion_time.map(|time| time.0), Some(at(70)));
    assert_eq!(record.backup_time.map(|time| time.0), Some(at(4)));
    assert_eq!((record.attempts, record.error), (None, None));
    assert_eq!(
        needs(&backup, &CopyInputs::default(), at(99)),
        CopyNeed::Nothing
    );
    assert!(planned(&backup, opened(), at(99)).copies.is_unchanged());
}

#[test]
fn newer_backup_is_copied_while_condition_reports_previous_copy() {
    let done = planned(&with(|_| ()), worker(Work::Ended(Ok(copied()))), at(9));
    let mut backup = after(with(|_| ()), &done, at(9));
    let newer = "s3://bucket/etcd_v50_2027-01-15-09:00:00";
    backup.status.as_mut().unwrap().location = Some(newer.to_owned());
    assert_eq!(
        needs(&backup, &CopyInputs::default(), at(9)),
        CopyNeed::Copy
    );
    let starting = planned(&backup, opened(), at(9));
    assert_eq!(job_of(&starting).backups.len(), 3);
    let backup = after(backup, &starting, at(9));
    assert_eq!(condition(&backup), ("True".into(), "BackupCopied".into()));
}

/// Invariant 10: an attempt that crashes the operator is counted, and the next process waits.
#[test]
fn invariant_10_copy_attempt_is_counted_before_start_and_backs_off() {
    let mut backup = with(|_| ());
    let mut time = 0;
    for (attempt, pause) in [
        (1, 30),
        (2, 60),
        (3, 120),
        (4, 240),
        (5, 480),
        (6, 600),
        (7, 600),
    ] {
        let starting = planned(&backup, opened(), at(time));
        job_of(&starting);
        backup = after(backup, &starting, at(time));
        let record = record_in(&backup);
        assert_eq!(record.attempts, Some(attempt));
        // After a restart, the new operator process has no worker, so it computes the pause from the status.
        let early = at(time + pause - 1);
        assert_eq!(
            needs(&backup, &CopyInputs::default(), early),
            CopyNeed::Nothing
        );
        let waiting = planned(&backup, CopyInputs::default(), early);
        assert_eq!(waiting.copies.requeue, Some(Duration::from_secs(1)));
        time += pause;
        assert_eq!(
            needs(&backup, &CopyInputs::default(), at(time)),
            CopyNeed::Copy
        );
    }
}

#[test]
fn failed_copy_is_reported_and_leaves_backup_complete() {
    let backup = with(|_| ());
    let blocked = CopyInputs {
        opened: Some(Err(denied())),
        ..CopyInputs::default()
    };
    for inputs in [worker(Work::Ended(Err(denied()))), blocked] {
        let failed = planned(&backup, inputs, at(9));
        assert_eq!(reasons(&backup, &failed), ["CopyFailed"]);
        assert!(notices(&backup, &failed)[0].warning);
        let failed = after(backup.clone(), &failed, at(9));
        let status = failed.status.as_ref().unwrap();
        assert!(status.succeeded);
        assert_eq!(status.location, backup.status.as_ref().unwrap().location);
        assert_eq!(condition(&failed), ("False".into(), "CopyFailed".into()));
        let ready = find(&status.conditions, &ConditionType::Ready).unwrap();
        assert_eq!(ready.reason, "CopyFailed");
        let record = record_in(&failed);
        assert_eq!(record.error, Some(denied().message));
        assert_eq!(record.location, None);
        // The retry copies the stored backup again, and takes no new snapshot.
        let retry = planned(&failed, opened(), at(700));
        assert_eq!(job_of(&retry).backups[0].suffix, NEWEST);
        assert_ne!(retry.action, Action::StartTransfer);
    }
}

#[test]
fn copy_is_retried_if_only_newest_backup_was_copied() {
    let partial = Copied {
        problem: Some(denied()),
        ..copied()
    };
    let backup = with(|_| ());
    let done = planned(&backup, worker(Work::Ended(Ok(partial))), at(9));
    let backup = after(backup, &done, at(9));
    let record = record_in(&backup);
    assert!(record.location.is_some() && record.error.is_some());
    assert_eq!(condition(&backup).0, "False");
    assert_eq!(
        needs(&backup, &CopyInputs::default(), at(700)),
        CopyNeed::Copy
    );
}

/// Invariants 9 and 31: the retention rules get a time on which both clocks agree. If the clocks differ or are unknown,
/// the rules remove no copy.
#[test]
fn retention_of_copy_needs_clocks_that_agree() {
    let backup = with(|object| object["spec"]["copyTo"][0]["maxBackups"] = json!(1));
    let with_difference = |hours| CopyInputs {
        retention: Some(Ok(CopyRetention {
            others: BTreeSet::from(["other".to_owned()]),
            clock_difference: SignedDuration::from_hours(hours),
        })),
        ..opened()
    };
    let agree = planned(&backup, with_difference(0), at(9));
    let CopyRules::Apply { others, now, .. } = &job_of(&agree).rules else {
        panic!("{agree:?}")
    };
    assert_eq!((others.len(), *now), (1, at(9)));
    let differ = planned(&backup, with_difference(2), at(9));
    let CopyRules::Blocked(trouble) = &job_of(&differ).rules else {
        panic!("{differ:?}")
    };
    assert_eq!(trouble.reason, Reason::ClocksDiffer);
    let unknown = CopyInputs {
        retention: Some(Err(denied())),
        ..opened()
    };
    let unknown = planned(&backup, unknown, at(9));
    assert_eq!(job_of(&unknown).rules, CopyRules::Blocked(denied()));
}

#[test]
fn status_of_removed_or_moved_copy_is_discarded() {
    let backup = with(|_| ());
    let done = planned(&backup, worker(Work::Ended(Ok(copied()))), at(9));
    let backup = after(backup, &done, at(9));
    let mut moved = backup.clone();
    moved.spec.copy_to[0].gcs.as_mut().unwrap().path = "other/elsewhere".to_owned();
    assert_eq!(needs(&moved, &CopyInputs::default(), at(9)), CopyNeed::Copy);
    let mut removed = backup;
    removed.spec.copy_to.clear();
    let plan = plan_all(&removed, &Snapshot::default(), at(9));
    assert!(plan.copies.outdated);
    let removed = after(removed, &plan, at(9));
    assert_eq!(removed.status.as_ref().unwrap().copies, []);
    assert!(find(removed.conditions(), &ConditionType::Copied).is_none());
    let plan = plan_all(&removed, &Snapshot::default(), at(10));
    assert!(plan.copies.is_unchanged());
}

#[test]
fn etcdbackup_with_rejected_spec_copies_nothing() {
    let backup = with(|object| object["spec"]["copyTo"][0]["gcs"]["path"] = json!("bucket"));
    assert_eq!(
        needs(&backup, &CopyInputs::default(), at(9)),
        CopyNeed::Nothing
    );
    assert_eq!(
        planned(&backup, opened(), at(9)).copies,
        CopiesPlan::default()
    );
}

#[test]
fn etcdbackup_expires_only_after_its_copies_are_complete() {
    let backup = single(|object| object["spec"]["ttlSecondsAfterFinished"] = json!(0));
    let pending = planned(&backup, opened(), at(100));
    assert_eq!(pending.action, Action::Nothing);
    let mut done = copied();
    done.stored.location = "gs://other/copies".to_owned();
    let done = planned(&backup, worker(Work::Ended(Ok(done))), at(100));
    let backup = after(backup, &done, at(100));
    let expired = planned(&backup, CopyInputs::default(), at(101));
    assert_eq!(expired.action, Action::DeleteBackup);
}

/// An EtcdBackup with `deletionPolicy: Delete` and one attempt to copy. Its deletion started at second 0.
fn deleted() -> EtcdBackup {
    with(|object| {
        object["metadata"]["deletionTimestamp"] = json!(at(0).to_string());
        object["metadata"]["finalizers"] = json!([FINALIZER_STORED]);
        object["spec"]["deletionPolicy"] = json!("Delete");
        object["status"]["copies"] = json!([{ "name": "offsite", "attempts": 1 }]);
    })
}

fn removal(work: Work<RemovalResult>) -> CopyInputs {
    CopyInputs {
        removal: WorkState {
            work,
            ..WorkState::default()
        },
        ..opened()
    }
}

#[test]
fn deletion_removes_copies_before_backups_of_first_store() {
    let backup = deleted();
    assert_eq!(
        needs(&backup, &CopyInputs::default(), at(1)),
        CopyNeed::Removal
    );
    // A canceled worker may write a manifest before it ends, so the removal waits until the worker has ended.
    let running = worker(Work::Running(Moved::default()));
    assert_eq!(needs(&backup, &running, at(1)), CopyNeed::Nothing);
    let waiting = planned(&backup, running, at(1));
    assert_eq!(waiting.copies.copies[0].step, CopyStep::Nothing);
    assert_eq!(
        (waiting.action, waiting.requeue.is_some()),
        (Action::Nothing, true)
    );

    let begun = planned(&backup, opened(), at(2));
    assert_eq!(begun.copies.copies[0].step, CopyStep::Remove);
    assert_eq!(begun.action, Action::Nothing);
    let blocked = planned(&backup, removal(Work::Ended(Err(denied()))), at(3));
    let Verdict::DeletionBlocked(trouble) = &blocked.verdict else {
        panic!("{blocked:?}")
    };
    assert!(trouble.message.starts_with("copy offsite: "), "{trouble:?}");

    let everything = RemovalResult {
        everything: true,
        ..RemovalResult::default()
    };
    let removed = removal(Work::Ended(Ok(everything)));
    assert_eq!(needs(&backup, &removed, at(4)), CopyNeed::Nothing);
    let next = planned(&backup, removed, at(4));
    assert_eq!(next.action, Action::RemoveAll);
}

#[test]
fn deletion_waits_until_copies_are_observed() {
    let waiting = plan_all(&deleted(), &Snapshot::default(), at(1));
    assert_eq!(waiting.action, Action::Nothing);
}

#[test]
fn deletion_ignores_copies_that_cannot_exist() {
    let never_tried = {
        let mut backup = deleted();
        backup.status.as_mut().unwrap().copies.clear();
        backup
    };
    let missing = |reason| CopyInputs {
        opened: Some(Err(Trouble::new(reason, "missing"))),
        ..CopyInputs::default()
    };
    for (backup, inputs, time) in [
        (never_tried, CopyInputs::default(), 1),
        (deleted(), missing(Reason::BucketMissing), 1),
        (deleted(), missing(Reason::SecretMissing), 301),
    ] {
        let next = planned(&backup, inputs, at(time));
        assert_eq!(next.action, Action::RemoveAll, "{next:?}");
    }
    let early = planned(&deleted(), missing(Reason::SecretMissing), at(299));
    assert_eq!(early.action, Action::Nothing);
    // The operator reads the first store even while the removal of the copies is not complete.
    let need = need_of(&deleted(), &snapshot(opened()), at(1));
    assert_eq!(need, crate::plan::Need::RemoveAll);
}
