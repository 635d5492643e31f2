//! Plans the agent that records all changes of a cluster (`spec.continuous`). The plan is a pure function.
//!
//! The operator applies a Deployment with one replica for each EtcdBackup with `spec.continuous`. The operator reads
//! the report of the agent regularly, and writes it to the status. Each write of the status triggers a reconcile. The
//! reconcile reads the agent only if a check is due, so that these writes cause no endless loop.

use std::time::Duration;

use api::EtcdBackup;
use api::backup::{Continuous, ContinuousStatus};
use api::names::LABEL_BACKUP;
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::apps::v1::Deployment;
use kube::ResourceExt;
use member::ANNOTATION_SPEC_HASH;
use sha2::{Digest, Sha256};

use super::recorded::{has_finalizer, wants_finalizer};
use super::refusal::refusal;
use super::requeue::until;
use crate::reason::{Reason, Trouble};
use crate::recording::{AgentReport, AgentState, AgentTarget, FoundAgent, RecordingInputs};

mod deployment;

/// Interval between two checks of an agent that reports.
const CHECK: SignedDuration = SignedDuration::from_secs(15);
/// Interval between two checks of an agent that starts, ends, or has a problem.
const POLL: SignedDuration = SignedDuration::from_secs(5);
/// Time limit for the end of the agent during the deletion of the EtcdBackup. The pod of the agent has a grace period
/// of 30 seconds.
const STOP_WAIT: SignedDuration = SignedDuration::from_mins(2);
/// Number of digits of the digest in the name of a Deployment.
const NAME_DIGITS: usize = 20;

/// The action of the operator for the Deployment.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum RecordingStep {
    /// Nothing.
    #[default]
    Nothing,
    /// Apply this Deployment.
    Apply(Box<Deployment>),
    /// Delete this Deployment.
    Delete(Box<Deployment>),
}

/// The state of the agent for the status.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum RecordingVerdict {
    /// The report in the status does not change.
    #[default]
    Unchanged,
    /// The EtcdBackup has no agent.
    Off,
    /// The operator has no report of the agent, because of this problem.
    Waiting(Trouble),
    /// The agent has reported its progress.
    Reported {
        /// The location of the objects that the agent writes. `None` if unknown.
        location: Option<String>,
        /// The report.
        report: Box<AgentReport>,
        /// Why the operator cannot apply the current spec to the agent, which runs with the previous spec. `None` if
        /// the agent has the current spec or is updated now.
        obstacle: Option<Trouble>,
    },
}

/// The next step of the agent.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RecordingPlan {
    /// The action of the operator in this reconcile.
    pub step: RecordingStep,
    /// The state of the agent for the status.
    pub verdict: RecordingVerdict,
    /// Time until the next check; `None` waits for a change of the EtcdBackup.
    pub requeue: Option<Duration>,
}

impl RecordingPlan {
    fn wait(trouble: Trouble) -> Self {
        Self {
            verdict: RecordingVerdict::Waiting(trouble),
            ..Self::again()
        }
    }

    fn again() -> Self {
        Self {
            requeue: Some(POLL.unsigned_abs()),
            ..Self::default()
        }
    }

    fn with(self, step: RecordingStep) -> Self {
        Self { step, ..self }
    }

    /// Adds the obstacle to a report. A failed request to the API server is no obstacle, because the next check repeats
    /// the request.
    fn with_obstacle(mut self, trouble: &Trouble) -> Self {
        if let RecordingVerdict::Reported { obstacle, .. } = &mut self.verdict
            && trouble.reason != Reason::StepFailed
        {
            *obstacle = Some(trouble.clone());
        }
        self
    }
}

/// The data that the plan needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RecordingNeed {
    /// No data about the agent.
    Nothing,
    /// The Deployment, and the report of its pod.
    Agent,
    /// The Deployment, the report of its pod, the cluster that the agent records, and the store.
    AgentAndTarget,
}

/// The data that [`plan`] needs at this time.
pub(crate) fn need(backup: &EtcdBackup, now: Timestamp) -> RecordingNeed {
    let agent_if = |needed: bool| {
        if needed {
            RecordingNeed::Agent
        } else {
            RecordingNeed::Nothing
        }
    };
    if backup.metadata.deletion_timestamp.is_some() {
        return agent_if(must_stop_first(backup));
    }
    match &backup.spec.continuous {
        None => agent_if(recorded(backup).is_some()),
        Some(_) if refusal(backup).is_some() || next_check(backup) > Some(now) => {
            RecordingNeed::Nothing
        }
        Some(_) => RecordingNeed::AgentAndTarget,
    }
}

fn recorded(backup: &EtcdBackup) -> Option<&ContinuousStatus> {
    backup.status.as_ref()?.continuous.as_deref()
}

/// True if the EtcdBackup has, or had, an agent.
pub(super) fn records(backup: &EtcdBackup) -> bool {
    backup.spec.continuous.is_some() || recorded(backup).is_some()
}

/// True if the deletion of the EtcdBackup removes the objects of the agent. The agent must end before this removal.
fn must_stop_first(backup: &EtcdBackup) -> bool {
    records(backup) && wants_finalizer(backup) && has_finalizer(backup)
}

/// The time of the next check. `None` if the agent must be checked now.
fn next_check(backup: &EtcdBackup) -> Option<Timestamp> {
    let status = recorded(backup)?;
    let current = status.observed_generation == backup.metadata.generation;
    let last = status.check_time.as_ref().filter(|_| current)?.0;
    let condition = api::conditions::ConditionType::Recording;
    let reports = api::conditions::is_true(backup.conditions(), &condition);
    last.checked_add(if reports { CHECK } else { POLL }).ok()
}

/// The name of the Deployment. The name depends only on the UID of the EtcdBackup, so a second operator process applies
/// the same Deployment (invariant 11).
pub(crate) fn agent_name(backup: &EtcdBackup) -> String {
    let digest = hex::encode(Sha256::digest(backup.uid().unwrap_or_default()));
    format!("etcd-record-{}", &digest[..NAME_DIGITS])
}

/// True if the deletion of the EtcdBackup must wait until the agent has ended.
pub(super) fn delays_deletion(backup: &EtcdBackup, inputs: &RecordingInputs) -> bool {
    let has_ended = matches!(inputs.agent, AgentState::Missing | AgentState::Foreign);
    backup.metadata.deletion_timestamp.is_some() && must_stop_first(backup) && !has_ended
}

/// The problem that delays the deletion of the EtcdBackup: the state of the agent is unknown, or the agent has not
/// ended within [`STOP_WAIT`]. `None` if there is no problem yet.
pub(super) fn deletion_obstacle(
    backup: &EtcdBackup,
    inputs: &RecordingInputs,
    now: Timestamp,
) -> Option<Trouble> {
    if let AgentState::Unknown(why) = &inputs.agent {
        return Some(Trouble::new(Reason::StepFailed, why.clone()));
    }
    let deleted = backup.metadata.deletion_timestamp.as_ref()?.0;
    let message = || {
        format!(
            "the pod of the agent with the label {LABEL_BACKUP}={} has not ended: if its node is lost, shut down the \
             node and delete its Node, or force the deletion of the pod",
            backup.uid().unwrap_or_default()
        )
    };
    (now.duration_since(deleted) > STOP_WAIT).then(|| Trouble::new(Reason::StepFailed, message()))
}

/// Plans the next step of the agent.
pub(super) fn plan(backup: &EtcdBackup, inputs: &RecordingInputs, now: Timestamp) -> RecordingPlan {
    if backup.metadata.deletion_timestamp.is_some() {
        // The operator deletes the Deployment only if it must remove the stored backups after the end of the agent. In
        // every other case, Kubernetes deletes the Deployment together with the EtcdBackup.
        return if must_stop_first(backup) {
            stop(&inputs.agent, RecordingVerdict::Unchanged)
        } else {
            RecordingPlan::default()
        };
    }
    let Some(settings) = &backup.spec.continuous else {
        return if recorded(backup).is_some() {
            stop(&inputs.agent, RecordingVerdict::Off)
        } else {
            RecordingPlan::default()
        };
    };
    if refusal(backup).is_some() {
        return RecordingPlan::default();
    }
    let target = match &inputs.target {
        None => {
            return RecordingPlan {
                requeue: next_check(backup).map(|time| until(time, now)),
                ..RecordingPlan::default()
            };
        }
        Some(Ok(target)) if hibernates(target) => return hibernated(&inputs.agent),
        Some(target) => target.as_ref(),
    };
    plan_agent(backup, settings, &inputs.agent, target)
}

fn plan_agent(
    backup: &EtcdBackup,
    settings: &Continuous,
    agent: &AgentState,
    target: Result<&AgentTarget, &Trouble>,
) -> RecordingPlan {
    let name = agent_name(backup);
    let desired = |target| Box::new(deployment::deployment(backup, settings, target));
    let starting = || Trouble::new(Reason::Pending, "the agent is starting");
    match (agent, target) {
        (AgentState::NotRead, _) => RecordingPlan::again(),
        (AgentState::Unknown(why), _) => {
            RecordingPlan::wait(Trouble::new(Reason::StepFailed, why.clone()))
        }
        (AgentState::Foreign, _) => RecordingPlan::wait(Trouble::new(
            Reason::NameTaken,
            format!("Deployment {name} has another owner: delete the Deployment"),
        )),
        (AgentState::Found(found), _) if found.deployment.metadata.deletion_timestamp.is_some() => {
            RecordingPlan::wait(starting())
        }
        (AgentState::Stopping, _) => RecordingPlan::wait(starting()),
        (AgentState::Missing, Err(trouble)) => RecordingPlan::wait(trouble.clone()),
        // Invariant 10: the status records the agent before the Deployment is created. Without this record, the
        // operator would not delete the Deployment after `spec.continuous` is removed.
        (AgentState::Missing, Ok(_)) if recorded(backup).is_none() => {
            RecordingPlan::wait(starting())
        }
        (AgentState::Missing, Ok(target)) => {
            RecordingPlan::wait(starting()).with(RecordingStep::Apply(desired(target)))
        }
        // The spec requires encryption, but the running agent does not encrypt. The agent is therefore stopped until
        // `trouble` ends, for example until the Secret with the key exists. The stop costs little, because the start of
        // encryption always causes a gap in the recorded changes.
        (AgentState::Found(found), Err(trouble))
            if backup.spec.encryption.is_some() && !deployment::encrypts(&found.deployment) =>
        {
            let stopped = stop(agent, RecordingVerdict::Off);
            RecordingPlan::wait(trouble.clone()).with(stopped.step)
        }
        (AgentState::Found(found), Err(trouble)) => {
            let plan = report(found, None, trouble.clone());
            plan.with_obstacle(trouble)
        }
        (AgentState::Found(found), Ok(target)) => {
            let plan = report(found, Some(target.location.clone()), starting());
            let desired = desired(target);
            let hash = |one: &Deployment| one.annotations().get(ANNOTATION_SPEC_HASH).cloned();
            if hash(desired.as_ref()) == hash(&found.deployment) {
                plan
            } else {
                plan.with(RecordingStep::Apply(desired))
            }
        }
    }
}

/// Reports the progress of an agent. If there is no report, reports the problem of the pod, or `otherwise` if the pod
/// has no problem.
fn report(found: &FoundAgent, location: Option<String>, otherwise: Trouble) -> RecordingPlan {
    let Some(report) = &found.report else {
        return RecordingPlan::wait(found.problem.clone().unwrap_or(otherwise));
    };
    RecordingPlan {
        step: RecordingStep::Nothing,
        verdict: RecordingVerdict::Reported {
            location,
            report: Box::new(report.clone()),
            obstacle: None,
        },
        requeue: Some(CHECK.unsigned_abs()),
    }
}

/// Deletes the Deployment. Reports `ended` when the Deployment and its pod no longer exist.
fn stop(agent: &AgentState, ended: RecordingVerdict) -> RecordingPlan {
    match agent {
        AgentState::Missing | AgentState::Foreign => RecordingPlan {
            verdict: ended,
            ..RecordingPlan::default()
        },
        AgentState::Found(found) => {
            let delete = RecordingStep::Delete(Box::new(found.deployment.clone()));
            RecordingPlan::again().with(delete)
        }
        AgentState::NotRead | AgentState::Unknown(_) | AgentState::Stopping => {
            RecordingPlan::again()
        }
    }
}

fn hibernates(target: &AgentTarget) -> bool {
    let cluster = target.cluster.as_ref();
    cluster.is_some_and(|cluster| cluster.spec.hibernate)
}

/// A hibernated cluster has no pods and no changes, so the operator deletes the Deployment of the agent. The operator
/// creates the Deployment again when the cluster runs.
fn hibernated(agent: &AgentState) -> RecordingPlan {
    let message = "the EtcdCluster hibernates, so there are no changes to record";
    let plan = RecordingPlan::wait(Trouble::new(Reason::Hibernated, message));
    plan.with(stop(agent, RecordingVerdict::Off).step)
}

#[cfg(test)]
mod tests;
