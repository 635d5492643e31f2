//! Computes the status and the Events of an EtcdRestore. Performs no I/O: the time is an argument.

use api::EtcdRestore;
use api::backup::Progress;
use api::conditions::{self, ConditionStatus, ConditionType, Finding};
use api::readiness::{Readiness, set_readiness};
use api::restore::{self, AbandonedStatus, EtcdRestoreStatus, RestorePhase};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use runtime::Notice;

use crate::plan::{Action, Plan, PlanState};
use crate::reason::{Reason, Trouble};
use crate::snapshot::{Pod, PodFacts};

/// The status after a reconcile. If a step has failed, the status reports the failure instead of the state of the plan,
/// and records nothing.
pub fn compute(
    restore: &EtcdRestore,
    plan: &Plan,
    failure: Option<&Trouble>,
    now: &Time,
) -> EtcdRestoreStatus {
    let mut status = restore.status.clone().unwrap_or_default();
    let generation = restore.metadata.generation;
    if failure.is_none() {
        record(&mut status, &plan.action, now);
    }
    let state = match failure {
        Some(trouble) => PlanState::Working(trouble.clone()),
        None => plan.state.clone(),
    };
    let (complete, failed) = findings(&state, &status);
    set_ready(&mut status, (&state, &complete), generation, now);
    for finding in [complete, failed, in_effect(restore)] {
        conditions::set(&mut status.conditions, &finding, generation, now);
    }
    status.succeeded = state == PlanState::Complete;
    status.reason = reason(&state);
    status.phase = Some(phase(&state, &status));
    status.observed_generation = generation;
    let ended = matches!(state, PlanState::Complete | PlanState::Halted(_));
    status.completion_time = match (ended, status.completion_time.take()) {
        (true, known) => known.or_else(|| Some(now.clone())),
        (false, _) => None,
    };
    status
}

/// The status if the CustomResourceDefinition lacks a field that must be recorded. The status reports this problem and
/// otherwise stays unchanged. The restore does not continue without the record (invariant 10).
pub fn outdated_definition(
    restore: &EtcdRestore,
    error: &dyn std::error::Error,
    now: &Time,
) -> EtcdRestoreStatus {
    let mut status = restore.status.clone().unwrap_or_default();
    let state = PlanState::Stuck(Trouble::new(Reason::DefinitionOutdated, error.to_string()));
    let (complete, failed) = findings(&state, &status);
    set_ready(
        &mut status,
        (&state, &complete),
        restore.metadata.generation,
        now,
    );
    for finding in [complete, failed] {
        conditions::set(
            &mut status.conditions,
            &finding,
            restore.metadata.generation,
            now,
        );
    }
    status.reason = reason(&state);
    status
}

/// Sets the progress of the seed. If the seed does not answer, the last progress stays.
pub fn set_progress(status: &mut EtcdRestoreStatus, seed: &Pod) {
    let number = |bytes| i64::try_from(bytes).unwrap_or(i64::MAX);
    if let Pod::Present(PodFacts {
        progress: Some(progress),
        ..
    }) = seed
    {
        status.progress = Some(Progress {
            bytes: number(progress.bytes),
            total_bytes: progress.total.map(number),
        });
    }
}

fn record(status: &mut EtcdRestoreStatus, action: &Action, now: &Time) {
    match action {
        Action::RecordIntent { seed, replaces } => {
            status.seed = Some(seed.clone());
            status.replaces.clone_from(replaces);
            status.start_time.get_or_insert_with(|| now.clone());
        }
        Action::RecordBackup(chosen) => status.backup = Some(chosen.as_ref().clone()),
        Action::RecordRestored {
            cluster_id,
            revision,
            sha256,
        } => {
            if let Some(chosen) = &mut status.backup {
                chosen.sha256 = chosen.sha256.take().or_else(|| sha256.clone());
            }
            status.cluster_id = Some(cluster_id.clone());
            status.restored_revision = Some(*revision);
        }
        Action::Abandon(trouble) => {
            status.abandoned = Some(AbandonedStatus {
                reason: trouble.reason.as_str().to_owned(),
                message: trouble.message.clone(),
            });
        }
        _ => {}
    }
}

const NOT_FAILED: &str = "the restore has not failed";

fn findings(state: &PlanState, status: &EtcdRestoreStatus) -> (Finding, Finding) {
    let finding = |kind, status: ConditionStatus, reason: Reason, message: &str| {
        Finding::new(kind, status, reason.into(), message)
    };
    let (complete, failed) = (ConditionType::Complete, ConditionType::Failed);
    let (yes, no) = (ConditionStatus::True, ConditionStatus::False);
    match state {
        PlanState::Working(trouble) => (
            finding(complete, no, trouble.reason, &trouble.message),
            finding(failed, no, Reason::InProgress, NOT_FAILED),
        ),
        PlanState::Stuck(trouble) | PlanState::Halted(trouble) => (
            finding(complete, no, trouble.reason, &trouble.message),
            finding(failed, yes, trouble.reason, &trouble.message),
        ),
        PlanState::Complete => {
            let revision = status.restored_revision.unwrap_or_default();
            let message =
                format!("the cluster serves; the restored backup has revision {revision}");
            (
                finding(complete, yes, Reason::Succeeded, &message),
                finding(failed, no, Reason::Succeeded, NOT_FAILED),
            )
        }
    }
}

/// Sets the condition `Ready` with the reason and the message of the condition `Complete`.
fn set_ready(
    status: &mut EtcdRestoreStatus,
    (state, complete): (&PlanState, &Finding),
    generation: Option<i64>,
    now: &Time,
) {
    let readiness = match state {
        PlanState::Complete => Readiness::Ready,
        PlanState::Working(_) => Readiness::Reconciling,
        PlanState::Stuck(_) | PlanState::Halted(_) => Readiness::Stalled,
    };
    let text = (complete.reason.clone(), complete.message.as_str());
    set_readiness(&mut status.conditions, readiness, text, generation, now);
}

fn in_effect(restore: &EtcdRestore) -> Finding {
    let fields = restore::not_in_effect(&restore.spec);
    if fields.is_empty() {
        return Finding::new(
            ConditionType::FieldsInEffect,
            true,
            Reason::AllInEffect.into(),
            "every field of the spec is in effect",
        );
    }
    let message = format!("not in effect: {}", fields.join(", "));
    Finding::new(
        ConditionType::FieldsInEffect,
        false,
        Reason::NotYetInEffect.into(),
        message,
    )
}

fn reason(state: &PlanState) -> Option<String> {
    match state {
        PlanState::Stuck(trouble) | PlanState::Halted(trouble) => Some(trouble.message.clone()),
        PlanState::Working(_) | PlanState::Complete => None,
    }
}

fn phase(state: &PlanState, status: &EtcdRestoreStatus) -> RestorePhase {
    match state {
        PlanState::Complete => RestorePhase::Complete,
        PlanState::Halted(_) => RestorePhase::Failed,
        _ if status.cluster_id.is_some() => RestorePhase::Starting,
        _ if status.seed.is_some() => RestorePhase::Preparing,
        _ => RestorePhase::Pending,
    }
}

/// The Events to publish after this reconcile.
pub fn notices(restore: &EtcdRestore, plan: &Plan) -> Vec<Notice> {
    let target = crate::naming::target(restore);
    let action = match &plan.action {
        Action::CreateCluster(_) => Some(Notice::normal(
            Reason::ClusterCreated.as_str(),
            "Create",
            format!("created the EtcdCluster {target}"),
        )),
        Action::CreatePod => Some(Notice::normal(
            Reason::SeedStarted.as_str(),
            "Create",
            "started the seed member's pod",
        )),
        Action::ReplacePod(why) => Some(Notice::warning(
            Reason::SeedEnded.as_str(),
            "Delete",
            why.clone(),
        )),
        Action::RecordRestored { revision, .. } => Some(Notice::normal(
            Reason::SeedServes.as_str(),
            "Verify",
            format!("the seed member serves the verified backup of revision {revision}"),
        )),
        Action::Lock => Some(Notice::normal(
            Reason::Claimed.as_str(),
            "Claim",
            format!(
                "locked the EtcdCluster {target}: its members serve until the seed has verified the backup"
            ),
        )),
        Action::Abandon(trouble) => Some(Notice::warning(
            Reason::GivenUp.as_str(),
            "Restore",
            format!("EtcdCluster {target}: {}", trouble.message),
        )),
        Action::RecordFormed { .. } if is_in_place(restore) => Some(Notice::normal(
            Reason::Replacing.as_str(),
            "Replace",
            format!(
                "stopping the members of the EtcdCluster {target}: the verified seed replaces them"
            ),
        )),
        Action::ReleaseLock => Some(Notice::normal(
            Reason::HandedOver.as_str(),
            "HandOver",
            format!("handed the EtcdCluster {target} over to the cluster operator"),
        )),
        _ => None,
    };
    let state = match &plan.state {
        PlanState::Stuck(trouble) | PlanState::Halted(trouble) => Some(Notice::warning(
            Reason::RestoreFailed.as_str(),
            "Restore",
            trouble.to_string(),
        )),
        PlanState::Working(trouble) if trouble.reason != Reason::InProgress => {
            let note = trouble.to_string();
            Some(Notice::warning(
                Reason::RestoreWaits.as_str(),
                "Restore",
                note,
            ))
        }
        PlanState::Complete
            if !restore
                .status
                .as_ref()
                .is_some_and(|status| status.succeeded) =>
        {
            Some(Notice::normal(
                Reason::RestoreComplete.as_str(),
                "Restore",
                format!("the EtcdCluster {target} serves"),
            ))
        }
        _ => None,
    };
    action.into_iter().chain(state).collect()
}

fn is_in_place(restore: &EtcdRestore) -> bool {
    let status = restore.status.as_ref();
    status.is_some_and(|status| status.replaces.is_some())
}

#[cfg(test)]
mod tests {
    use api::restore::ReplacesStatus;
    use store::progress::Moved;

    use super::*;

    fn restore() -> EtcdRestore {
        let spec =
            r#"{"etcdCluster":{"name":"main"},"backupStorageType":"S3","s3":{"path":"b/k"}}"#;
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
    fn failed_restore_step_records_nothing() {
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
    fn rejected_restore_sets_conditions_reason_and_phase() {
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
    fn restore_succeeds_only_when_complete() {
        let status = compute(
            &restore(),
            &planned(Action::Nothing, PlanState::Complete),
            None,
            &at(5),
        );
        assert!(
            status.succeeded && conditions::is_true(&status.conditions, &ConditionType::Complete)
        );
        assert_eq!(status.completion_time, Some(at(5)));
    }

    #[test]
    fn outdated_restore_crd_is_reported_in_existing_fields() {
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
        // All other fields of the status stay unchanged.
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
    fn progress_stays_in_status_after_download() {
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
    fn reports_main_restore_steps_as_events() {
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
        // A restore into a new cluster reports no replacement of members.
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
    fn reports_waits_failures_and_completion_as_events() {
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
        // The Event of the action precedes the Event of the state.
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
}
