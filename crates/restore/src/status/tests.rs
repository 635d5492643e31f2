//! Tests of the status and the Events of an EtcdRestore.

use api::restore::ReplacesStatus;
use store::progress::Moved;

use super::*;

fn restore() -> EtcdRestore {
    let spec = r#"{"etcdCluster":{"name":"main"},"backupStorageType":"S3","s3":{"path":"b/k"}}"#;
    let mut restore = EtcdRestore::new("again", serde_json::from_str(spec).unwrap());
    restore.metadata.generation = Some(3);
    restore
}

fn at(second: i64) -> Time {
    Time(k8s_openapi::jiff::Timestamp::from_second(second).unwrap())
}

fn planned(action: Action, state: PlanState) -> Plan {
    Plan {
        action,
        state,
        requeue: None,
    }
}

fn halted() -> PlanState {
    PlanState::Halted(Trouble::new(Reason::ClusterExists, "it exists"))
}

#[test]
fn failed_restore_step_does_not_record_cluster_id() {
    let action = Action::RecordRestored {
        cluster_id: "ab".into(),
        revision: 7,
        sha256: Some("cd".into()),
    };
    let working = || PlanState::Working(Trouble::new(Reason::InProgress, "x"));
    let failure = Trouble::new(Reason::StepFailed, "conflict");
    let status = compute(
        &restore(),
        &planned(action.clone(), working()),
        Some(&failure),
        &at(1),
    );
    assert_eq!((status.cluster_id, status.restored_revision), (None, None));
    assert_eq!(
        conditions::find(&status.conditions, &ConditionType::Complete)
            .unwrap()
            .reason,
        "StepFailed"
    );
    let status = compute(&restore(), &planned(action, working()), None, &at(1));
    assert_eq!(
        (status.cluster_id.as_deref(), status.restored_revision),
        (Some("ab"), Some(7))
    );
    assert!(!status.succeeded);
}

#[test]
fn rejected_restore_reports_condition_and_phase_failed() {
    let status = compute(
        &restore(),
        &planned(Action::Nothing, halted()),
        None,
        &at(1),
    );
    let failed = conditions::find(&status.conditions, &ConditionType::Failed).unwrap();
    assert_eq!(
        (failed.status.as_str(), failed.reason.as_str()),
        ("True", "ClusterExists")
    );
    assert_eq!(failed.observed_generation, Some(3));
    assert_eq!(status.reason.as_deref(), Some("it exists"));
    assert_eq!(status.phase, Some(RestorePhase::Failed));
    assert!(!status.succeeded && status.completion_time.is_some());
}

#[test]
fn restore_status_is_unchanged_after_same_outcome() {
    let mut restore = restore();
    let plan = planned(Action::Nothing, halted());
    restore.status = Some(compute(&restore, &plan, None, &at(1)));
    assert_eq!(
        compute(&restore, &plan, None, &at(99)),
        restore.status.unwrap()
    );
}

#[test]
fn complete_restore_is_reported_as_succeeded() {
    let status = compute(
        &restore(),
        &planned(Action::Nothing, PlanState::Complete),
        None,
        &at(5),
    );
    assert!(status.succeeded && conditions::is_true(&status.conditions, &ConditionType::Complete));
    assert_eq!(status.completion_time, Some(at(5)));
}

#[test]
fn outdated_etcdrestore_crd_is_reported_in_existing_status_fields() {
    let mut restore = restore();
    let seed = api::restore::SeedStatus::default();
    restore.status.get_or_insert_default().seed = Some(seed);
    let error = std::io::Error::other("the definition (CRD) of EtcdRestore is older");
    let status = outdated_definition(&restore, &error, &at(1));
    let failed = conditions::find(&status.conditions, &ConditionType::Failed).unwrap();
    assert_eq!(
        (failed.status.as_str(), failed.reason.as_str()),
        ("True", "DefinitionOutdated")
    );
    let reason = status.reason.as_ref();
    assert!(reason.is_some_and(|it| it.contains("older")));
    // All fields of the status except `conditions` and `reason` are unchanged.
    let before = EtcdRestoreStatus {
        conditions: Vec::new(),
        reason: None,
        ..status.clone()
    };
    assert_eq!(Some(before), restore.status);
    restore.status = Some(status.clone());
    assert_eq!(outdated_definition(&restore, &error, &at(9)), status);
}

#[test]
fn restore_progress_stays_in_status_after_download() {
    let mut status = EtcdRestoreStatus::default();
    let seed = |progress| {
        Pod::Present(PodFacts {
            progress,
            ..PodFacts::default()
        })
    };
    let half = Moved {
        bytes: 5,
        total: Some(10),
    };
    for pod in [seed(Some(half)), seed(None), Pod::Absent] {
        set_progress(&mut status, &pod);
        let progress = status.progress.as_ref().unwrap();
        assert_eq!((progress.bytes, progress.total_bytes), (5, Some(10)));
    }
}

#[test]
fn main_restore_steps_are_reported_as_events() {
    let fresh = restore();
    let mut over = restore();
    over.status.get_or_insert_default().replaces = Some(ReplacesStatus::default());
    let formed = || Action::RecordFormed {
        cluster_id: "ab".into(),
    };
    let restored = Action::RecordRestored {
        cluster_id: "ab".into(),
        revision: 7,
        sha256: None,
    };
    let create = Action::CreateCluster(Box::default());
    let evicted = Action::ReplacePod("evicted".into());
    let abandoned = Action::Abandon(Trouble::new(Reason::BackupMissing, "no such key"));
    let working = || PlanState::Working(Trouble::new(Reason::InProgress, "x"));
    for (restore, action, reason, part) in [
        (&fresh, create, "ClusterCreated", "EtcdCluster main"),
        (
            &over,
            Action::Lock,
            "Claimed",
            "main: its members serve until",
        ),
        (&fresh, Action::CreatePod, "SeedStarted", "seed member"),
        (&fresh, evicted, "SeedEnded", "evicted"),
        (&fresh, restored, "SeedServes", "revision 7"),
        (&over, abandoned, "GivenUp", "main: no such key"),
        (
            &over,
            formed(),
            "Replacing",
            "members of the EtcdCluster main",
        ),
        (&over, Action::ReleaseLock, "HandedOver", "main over to"),
    ] {
        let notices = notices(restore, &planned(action, working()));
        let [notice] = &notices[..] else {
            panic!("{reason}: {notices:?}")
        };
        let is_warning = ["SeedEnded", "GivenUp"].contains(&reason);
        assert_eq!((notice.reason, notice.warning), (reason, is_warning));
        assert!(notice.note.contains(part), "{notice:?}");
    }
    // These actions of a restore into a new cluster cause no Event. `formed()` causes none, because no members are
    // replaced.
    for action in [
        formed(),
        Action::Nothing,
        Action::SetFinalizer(true),
        Action::Join,
    ] {
        let plan = planned(action, working());
        assert!(notices(&fresh, &plan).is_empty(), "{plan:?}");
    }
}

#[test]
fn waiting_and_failure_and_completion_emit_events() {
    let events = |restore: &EtcdRestore, action: Action, state: PlanState| -> Vec<_> {
        let notices = notices(restore, &planned(action, state)).into_iter();
        notices
            .map(|one| (one.warning, one.reason, one.note))
            .collect()
    };
    let missing = || Trouble::new(Reason::BackupMissing, "no such key");
    let note = || "BackupMissing: no such key".to_owned();
    let mut restore = restore();
    for (state, reason) in [
        (PlanState::Working(missing()), "RestoreWaits"),
        (PlanState::Stuck(missing()), "RestoreFailed"),
        (PlanState::Halted(missing()), "RestoreFailed"),
    ] {
        let reported = events(&restore, Action::Nothing, state);
        assert_eq!(reported, [(true, reason, note())]);
    }
    // The Event of the action (`GivenUp`) is reported before the Event of the state (`RestoreFailed`).
    let abandon = Action::Abandon(missing());
    let reported = events(&restore, abandon, PlanState::Halted(missing()));
    let reasons: Vec<_> = reported.iter().map(|(_, reason, _)| *reason).collect();
    assert_eq!(reasons, ["GivenUp", "RestoreFailed"]);

    let serves = "the EtcdCluster main serves".to_owned();
    let reported = events(&restore, Action::Nothing, PlanState::Complete);
    assert_eq!(reported, [(false, "RestoreComplete", serves)]);
    restore.status.get_or_insert_default().succeeded = true;
    let reported = events(&restore, Action::Nothing, PlanState::Complete);
    assert!(reported.is_empty(), "{reported:?}");
}

#[test]
fn restore_reports_fields_without_effect() {
    let mut restore = restore();
    restore.spec.backup_storage_type = Some("Local".into());
    let status = compute(&restore, &planned(Action::Nothing, halted()), None, &at(1));
    let finding = conditions::find(&status.conditions, &ConditionType::FieldsInEffect).unwrap();
    assert_eq!(
        (finding.status.as_str(), finding.reason.as_str()),
        ("False", "NotYetInEffect")
    );
    assert!(finding.message.contains("spec.backupStorageType"));
}

#[test]
fn restore_status_has_source_and_progress_text_for_columns() {
    let mut restore = restore();
    let working = || PlanState::Working(Trouble::new(Reason::InProgress, "x"));
    let mut status = compute(&restore, &planned(Action::Nothing, working()), None, &at(1));
    assert_eq!(status.source.as_deref(), Some("S3 b/k"));
    assert_eq!(status.progress, None);
    let seed = Pod::Present(PodFacts {
        progress: Some(Moved {
            bytes: 45,
            total: Some(100),
        }),
        ..PodFacts::default()
    });
    set_progress(&mut status, &seed);
    assert_eq!(status.progress.unwrap().text.as_deref(), Some("45%"));
    let spec = r#"{"etcdCluster":{"name":"main"},"backup":{"name":"nightly"}}"#;
    restore.spec = serde_json::from_str(spec).unwrap();
    let status = compute(&restore, &planned(Action::Nothing, working()), None, &at(1));
    assert_eq!(status.source.as_deref(), Some("EtcdBackup nightly"));
}

#[test]
fn restore_from_copy_is_reported_with_cause() {
    let mut restore = restore();
    let block = serde_json::from_str(r#"{"s3":{"path":"second/k"}}"#).unwrap();
    let mut chosen = crate::plan::choice::chosen_from(&restore, block);
    chosen.copy = Some(restore::ChosenCopy {
        name: "offsite".into(),
        reason: "the store does not answer".into(),
    });
    let working = PlanState::Working(Trouble::new(Reason::InProgress, "recording"));
    let record = planned(Action::RecordBackup(Box::new(chosen)), working);
    let notices = notices(&restore, &record);
    assert_eq!(
        (notices[0].reason, notices[0].warning),
        ("CopyChosen", true)
    );
    for part in ["offsite", "s3://second/k", "the store does not answer"] {
        assert!(notices[0].note.contains(part), "{notices:?}");
    }
    restore.status = Some(compute(&restore, &record, None, &at(1)));
    let complete = planned(Action::Nothing, PlanState::Complete);
    let status = compute(&restore, &complete, None, &at(2));
    let complete = conditions::find(&status.conditions, &ConditionType::Complete).unwrap();
    let expected = "from the copy offsite at s3://second/k";
    assert!(complete.message.contains(expected), "{complete:?}");
}

#[test]
fn dry_run_is_reported_without_warning() {
    let found = Trouble::new(Reason::DryRun, "revision 17");
    let reported = planned(Action::Nothing, PlanState::Working(found));
    let notices = notices(&restore(), &reported);
    assert_eq!(notices.len(), 1);
    let notice = &notices[0];
    assert_eq!((notice.reason, notice.warning), ("DryRun", false));
    assert_eq!(notice.note, "revision 17");
    let status = compute(&restore(), &reported, None, &at(1));
    assert_eq!(status.phase, Some(RestorePhase::Pending));
    assert_eq!(status.completion_time, None);
    let ready = conditions::find(&status.conditions, &ConditionType::Ready).unwrap();
    assert_eq!(
        (ready.status.as_str(), ready.reason.as_str()),
        ("False", "DryRun")
    );
}
