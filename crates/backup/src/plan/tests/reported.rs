//! Tests of the conditions and the other status fields after a plan.

use api::backup::EtcdBackupStatus;

use super::periodic::first_complete;
use super::*;

fn condition(status: &EtcdBackupStatus, kind: &ConditionType) -> (String, String, String) {
    let found = find(&status.conditions, kind).unwrap_or_else(|| panic!("no {kind}: {status:?}"));
    let text = |text: &String| text.clone();
    (
        text(&found.status),
        text(&found.reason),
        text(&found.message),
    )
}

/// A periodic EtcdBackup whose first backup is in progress.
fn first_run() -> EtcdBackup {
    begun(|object| object["spec"]["backupPolicy"] = json!({ "backupIntervalInSecond": 3600 }))
}

/// A periodic EtcdBackup whose first backup is complete, and whose second backup is in progress.
fn second_run() -> EtcdBackup {
    let backup = first_complete(|object| object["spec"]["backupPolicy"]["maxBackups"] = json!(0));
    let due = plan(&backup, &Snapshot::default(), at(4000));
    assert_eq!(due.action, Action::RecordIntent);
    after(backup, &due, at(4000))
}

/// Three EtcdBackups with a backup in progress, each with the time at which its next reconcile is planned.
fn started() -> [(EtcdBackup, Timestamp); 3] {
    [
        (begun(|_| ()), at(1)),
        (first_run(), at(1)),
        (second_run(), at(4001)),
    ]
}

#[test]
fn waiting_backup_reports_reason_of_wait() {
    let troubles = [
        Trouble::new(
            Reason::SecretMissing,
            "spec.s3.awsSecret: there is no Secret aws",
        ),
        Trouble::new(
            Reason::EndpointNotGranted,
            "an administrator must grant the endpoint",
        ),
        refused(),
    ];
    for (backup, now) in started() {
        for trouble in &troubles {
            let waits = known(Work::Idle, Destination::Unknown(trouble.clone()));
            let status = status(&backup, &plan(&backup, &waits, now), now);
            let expected = |holds: &str| {
                let reason = trouble.reason.as_str().to_owned();
                (holds.to_owned(), reason, trouble.message.clone())
            };
            assert_eq!(condition(&status, &ConditionType::Ready), expected("False"));
            assert_eq!(
                condition(&status, &ConditionType::Complete),
                expected("False")
            );
            if backup.spec.is_periodic() {
                let (holds, reason, message) = expected("True");
                let message = match &status.last_success_date {
                    Some(time) => format!("{message}; the newest backup is from {}", time.0),
                    None => format!("{message}; no backup exists yet"),
                };
                assert_eq!(
                    condition(&status, &ConditionType::Progressing),
                    (holds, reason, message)
                );
            }
            assert_eq!(status.next_backup_time, None);
        }
    }
}

#[test]
fn queued_backup_reports_wait_for_other_transfers() {
    let queued = known(Work::Queued, Destination::Free);
    for (backup, now) in started() {
        let status = status(&backup, &plan(&backup, &queued, now), now);
        let (holds, reason, message) = condition(&status, &ConditionType::Ready);
        let ready = if backup.spec.is_periodic() {
            "True"
        } else {
            "False"
        };
        assert_eq!((holds.as_str(), reason.as_str()), (ready, "Pending"));
        assert!(message.contains("the backup is queued"), "{message}");
    }
}

/// While the backup runs, the status must not contain the reason of the earlier wait.
#[test]
fn running_backup_reports_progress_instead_of_earlier_wait() {
    for (backup, now) in started().into_iter().skip(1) {
        let waits = known(Work::Idle, Destination::Unknown(refused()));
        let waiting = after(backup.clone(), &plan(&backup, &waits, now), now);
        let runs = known(Work::Running(Moved::default()), Destination::NotRead);
        let status = status(&waiting, &plan(&waiting, &runs, now), now);
        for kind in [
            ConditionType::Ready,
            ConditionType::Complete,
            ConditionType::Progressing,
        ] {
            let (_, reason, _) = condition(&status, &kind);
            assert_eq!(reason, "InProgress", "{kind}");
        }
    }
}

#[test]
fn next_backup_time_is_reported_unless_backup_is_due() {
    let complete = first_complete(|object| object["spec"]["backupPolicy"]["maxBackups"] = json!(0));
    assert_eq!(complete.status.as_ref().unwrap().next_backup_time, None);
    let idle = after(
        complete.clone(),
        &plan(&complete, &Snapshot::default(), at(10)),
        at(10),
    );
    let next = |backup: &EtcdBackup| backup.status.as_ref().unwrap().next_backup_time.clone();
    let time = next(&idle).expect("the next backup is scheduled").0;
    assert!(time >= at(3600) && time <= at(3631), "{time}");
    let due = after(
        idle.clone(),
        &plan(&idle, &Snapshot::default(), at(4000)),
        at(4000),
    );
    assert_eq!(next(&due), None);
    let mut suspended = idle;
    suspended.spec.backup_policy.as_mut().unwrap().suspend = true;
    let suspended = after(
        suspended.clone(),
        &plan(&suspended, &Snapshot::default(), at(11)),
        at(11),
    );
    assert_eq!(next(&suspended), None);
    let schedule = suspended.status.unwrap().schedule;
    assert_eq!(schedule.as_deref(), Some("every 1h0m0s (suspended)"));
}

/// The next backup is scheduled although old backups cannot be removed.
#[test]
fn next_backup_time_is_reported_although_retention_fails() {
    let complete = first_complete(|_| ());
    let mut failed = Snapshot::default();
    failed.removal.work = Work::Ended(Err(refused()));
    failed.removal.not_before = Some(at(30));
    let waits = plan(&complete, &failed, at(10));
    assert_eq!(waits.verdict, Verdict::RetentionFailed(refused()));
    assert!(status(&complete, &waits, at(10)).next_backup_time.is_some());
}

#[test]
fn completed_backup_reports_cluster_and_size_and_duration() {
    let backup = begun(|_| ());
    let done = known(Work::Ended(Ok(stored())), Destination::NotRead);
    let status = status(&backup, &plan(&backup, &done, at(72)), at(72));
    assert_eq!(status.cluster.as_deref(), Some("example-client"));
    assert_eq!(status.size_text.as_deref(), Some("20.0 KiB"));
    assert_eq!(status.duration.unwrap().0, "1m12s");
    assert_eq!(status.progress.unwrap().text.as_deref(), Some("100%"));
    assert_eq!(status.schedule, None);
}

/// `kubectl wait`, Helm and Flux wait until the status reports the new generation.
#[test]
fn status_of_complete_backup_reports_new_generation() {
    let backup = begun(|_| ());
    let done = known(Work::Ended(Ok(stored())), Destination::NotRead);
    let mut complete = after(backup.clone(), &plan(&backup, &done, at(5)), at(5));
    complete.metadata.generation = Some(2);
    complete.spec.ttl_seconds_after_finished = Some(600);
    let idle = plan(&complete, &Snapshot::default(), at(9));
    assert_eq!(idle.verdict, Verdict::Unchanged);
    let status = status(&complete, &idle, at(9));
    assert!(status.succeeded);
    assert_eq!(status.observed_generation, Some(2));
    for condition in &status.conditions {
        assert_eq!(condition.observed_generation, Some(2), "{condition:?}");
    }
    assert_eq!(condition(&status, &ConditionType::Ready).0, "True");
}
