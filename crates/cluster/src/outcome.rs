//! What a reconcile says: the Events for what was done and for what stands in the way, and its errors.

use runtime::outcome::{Chain, Failure, Notice};

use crate::act::{self, Acted};
use crate::observe;
use crate::plan::Plan;
use crate::write::Write;

/// Why a reconcile failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Nothing could be observed.
    #[error("the cluster cannot be observed")]
    Observe(#[from] observe::Error),
    /// The step could not be done.
    #[error("the step was not done")]
    Act(#[source] act::Error),
    /// The status could not be written.
    #[error("the status was not written")]
    Status(#[from] runtime::apply::Error),
}

impl Failure for Error {
    fn reason(&self) -> &'static str {
        match self {
            Self::Observe(observe::Error::Read { source, .. }) => {
                runtime::apply::kube_reason(source)
            }
            Self::Observe(observe::Error::Deadline) => "ApiServerUnreachable",
            Self::Act(error) => error.reason(),
            Self::Status(error) => error.reason(),
        }
    }
}

impl Acted {
    /// The failure that does not pass by itself: its kind and its causes.
    pub fn in_words(&self) -> Option<(&'static str, String)> {
        self.failure()
            .map(|error| (error.reason(), Chain(error).to_string()))
    }
}

/// The Events of a reconcile.
pub fn notices(plan: &Plan, acted: &Acted) -> Vec<Notice> {
    let done = acted.done.iter().filter_map(|write| {
        let (reason, action) = event(write)?;
        Some(Notice::normal(reason, action, write.to_string()))
    });
    let refused = acted
        .failed
        .iter()
        .filter(|error| error.reason().starts_with("Etcd"));
    let refused = refused.map(|error| Notice::normal(error.reason(), "Postpone", postponed(error)));
    let problems = plan
        .problems
        .iter()
        .map(|problem| Notice::warning(problem.code, "Plan", problem.message.clone()));
    done.chain(refused).chain(problems).collect()
}

/// Without the member that gave the answer: each gives the same, and each would be an Event of its own.
fn postponed(error: &act::Error) -> String {
    match error {
        act::Error::Etcd {
            what,
            source: etcd::Error::Unavailable(text),
        } => {
            format!(
                "cannot {what} yet: {}",
                text.rsplit(": ").next().unwrap_or_default()
            )
        }
        other => Chain(other).to_string(),
    }
}

/// Reason and action of the Event about a write; `None` for what is of no interest to a user.
fn event(write: &Write) -> Option<(&'static str, &'static str)> {
    match write {
        Write::RecordIntent { .. } => Some(("BootstrapBegun", "Bootstrap")),
        Write::RecordClusterId { .. } => Some(("ClusterFormed", "Bootstrap")),
        Write::CreatePod(_) => Some(("MemberStarted", "Start")),
        Write::DeletePod { .. } => Some(("PodDeleted", "Delete")),
        Write::DeleteDisk { .. } => Some(("VolumeClaimDeleted", "Delete")),
        Write::AddMember { .. } => Some(("MemberAdded", "Add")),
        Write::Promote { .. } => Some(("MemberPromoted", "Promote")),
        Write::Remove { .. } => Some(("MemberRemoved", "Remove")),
        Write::MoveLeader { .. } => Some(("LeaderMoved", "Move")),
        Write::RepairService { .. } => Some(("ServiceRepaired", "Repair")),
        _ => None,
    }
}
