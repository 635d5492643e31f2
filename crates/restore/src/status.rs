//! Computes the status and the Events of an EtcdRestore. Performs no I/O.

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

/// The status after a reconcile. If the action of the plan has failed, the status reports `failure`, and does not
/// record the action.
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
    status.source = restore.spec.source_text();
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

/// The status if the CustomResourceDefinition does not contain a field of the status. The status reports this problem,
/// and the restore waits, because it cannot record its steps (invariant 10).
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

/// Sets the progress of the download. If the seed reports none, the last progress is kept.
pub fn set_progress(status: &mut EtcdRestoreStatus, seed: &Pod) {
    let number = |bytes| i64::try_from(bytes).unwrap_or(i64::MAX);
    if let Pod::Present(PodFacts {
        progress: Some(progress),
        ..
    }) = seed
    {
        let total = progress.total.map(number);
        status.progress = Some(Progress::new(number(progress.bytes), total));
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
            let chosen = status.backup.as_ref();
            let message = match chosen.and_then(|chosen| Some((chosen, chosen.copy.as_ref()?))) {
                Some((chosen, copy)) => {
                    format!(
                        "{message}, from the copy {} at {}",
                        copy.name, chosen.location
                    )
                }
                None => message,
            };
            (
                finding(complete, yes, Reason::Succeeded, &message),
                finding(failed, no, Reason::Succeeded, NOT_FAILED),
            )
        }
    }
}

/// Sets the condition `Ready`, with the reason and the message of the condition `Complete`.
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

/// The Events of this reconcile.
pub fn notices(restore: &EtcdRestore, plan: &Plan) -> Vec<Notice> {
    let target = crate::naming::target(restore);
    let action = match &plan.action {
        Action::CreateCluster(_) => Some(Notice::normal(
            Reason::ClusterCreated.as_str(),
            "Create",
            format!("created the EtcdCluster {target}"),
        )),
        Action::RecordBackup(chosen) => chosen.copy.as_ref().map(|copy| {
            let message = format!(
                "restoring from the copy {} at {}, because the backup in the first store cannot be restored: {}",
                copy.name, chosen.location, copy.reason
            );
            Notice::warning(Reason::CopyChosen.as_str(), "Restore", message)
        }),
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
    let state =
        match &plan.state {
            PlanState::Stuck(trouble) | PlanState::Halted(trouble) => Some(Notice::warning(
                Reason::RestoreFailed.as_str(),
                "Restore",
                trouble.to_string(),
            )),
            PlanState::Working(trouble) if trouble.reason == Reason::DryRun => Some(
                Notice::normal(Reason::DryRun.as_str(), "Restore", trouble.message.clone()),
            ),
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
mod tests;
