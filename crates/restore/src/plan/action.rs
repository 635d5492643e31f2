//! The actions and the states of a restore.

use std::time::Duration;

use api::cluster::EtcdClusterSpec;
use api::restore::{ChosenBackup, ReplacesStatus, SeedStatus};
use k8s_openapi::api::core::v1::Pod;

use crate::reason::{Reason, Trouble};
use crate::snapshot::OldPod;

/// Delay between reconciles while the restore waits for a change that triggers no watch event.
pub(crate) const POLL: Duration = Duration::from_secs(2);

/// Delay between reconciles while a user must correct a problem.
pub(crate) const PROBLEM_POLL: Duration = Duration::from_secs(15);

/// The plan of one reconcile.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    /// The action of this reconcile.
    pub action: Action,
    /// The state for the status.
    pub state: PlanState,
    /// Time until the next reconcile.
    pub requeue: Option<Duration>,
}

/// One action. Every action is idempotent, so the next reconcile can plan the action again after a crash.
#[derive(Clone, Debug, PartialEq)]
pub enum Action {
    /// Write only the status.
    Nothing,
    /// Record the seed's name, the new token and the replaced cluster in the status of the EtcdRestore (invariant 10).
    RecordIntent {
        /// The seed and the new token.
        seed: SeedStatus,
        /// The existing cluster, whose data is replaced.
        replaces: Option<ReplacesStatus>,
    },
    /// Record the chosen backup in the status of the EtcdRestore (invariant 10).
    RecordBackup(Box<ChosenBackup>),
    /// Add the finalizer if true, remove it if false.
    SetFinalizer(bool),
    /// Create the EtcdCluster with the restore lock.
    CreateCluster(Box<EtcdClusterSpec>),
    /// Set the restore lock on the existing EtcdCluster.
    Lock,
    /// Create the seed's Service.
    CreateService,
    /// Create the seed's PersistentVolumeClaim.
    CreatePvc,
    /// Create the seed's pod.
    CreatePod,
    /// Delete the seed's pod for this reason, so that the next reconcile creates another pod.
    ReplacePod(String),
    /// Record in the status of the EtcdRestore that the seed serves the verified backup.
    RecordRestored {
        /// The cluster ID in hexadecimal, without leading zeros.
        cluster_id: String,
        /// The revision that the seed serves.
        revision: i64,
        /// The SHA-256 of the snapshot that the seed has downloaded.
        sha256: Option<String>,
    },
    /// Record in the status of the EtcdRestore that it is abandoned for this reason.
    Abandon(Trouble),
    /// Delete all objects of the seed.
    DiscardSeed,
    /// The cutover: record the new cluster ID, and the seed as the first member, in the status of the EtcdCluster.
    RecordFormed {
        /// The cluster ID in hexadecimal, without leading zeros.
        cluster_id: String,
    },
    /// Delete the pods of the old members, but keep their volumes.
    StopOldMembers(Vec<OldPod>),
    /// Set the labels with which Services select the seed's pod.
    Join,
    /// Create the pod that searches recorded changes on a PVC.
    StartSearch(Box<Pod>),
    /// Delete the pod that has searched recorded changes, because its result is old.
    EndSearch(Box<Pod>),
    /// Delete the EtcdRestore after `ttlSecondsAfterFinished`.
    Expire,
    /// Remove the restore lock, so that the cluster operator manages the cluster.
    ReleaseLock,
}

impl Action {
    /// True if the action changes the EtcdRestore itself. The next reconcile writes the status, because the
    /// resourceVersion has changed.
    pub fn changes_object(&self) -> bool {
        matches!(self, Self::SetFinalizer(_) | Self::Expire)
    }

    /// The name of the failpoint before the action, as in `FAILPOINTS=restore-before-claim=panic`.
    pub fn failpoint(&self) -> &'static str {
        match self {
            Self::Nothing => "restore-before-nothing",
            Self::RecordIntent { .. } => "restore-before-record-intent",
            Self::RecordBackup(_) => "restore-before-record-backup",
            Self::SetFinalizer(true) => "restore-before-guard",
            Self::SetFinalizer(false) => "restore-before-let-go",
            Self::CreateCluster(_) => "restore-before-create-cluster",
            Self::Lock => "restore-before-claim",
            Self::CreateService => "restore-before-create-service",
            Self::CreatePvc => "restore-before-create-volume-claim",
            Self::CreatePod => "restore-before-create-pod",
            Self::ReplacePod(_) => "restore-before-clear-pod",
            Self::RecordRestored { .. } => "restore-before-record-restored",
            Self::Abandon(_) => "restore-before-abandon",
            Self::DiscardSeed => "restore-before-discard-seed",
            Self::RecordFormed { .. } => "restore-before-record-formed",
            Self::StopOldMembers(_) => "restore-before-stop-former",
            Self::Join => "restore-before-join",
            Self::ReleaseLock => "restore-before-release-claim",
            Self::StartSearch(_) => "restore-before-start-search",
            Self::EndSearch(_) => "restore-before-end-search",
            Self::Expire => "restore-before-expire",
        }
    }
}

/// The state of a restore.
#[derive(Clone, Debug, PartialEq)]
pub enum PlanState {
    /// The restore continues without manual action.
    Working(Trouble),
    /// The restore waits until a user has corrected this problem.
    Stuck(Trouble),
    /// The restore has ended without success.
    Halted(Trouble),
    /// The cluster serves the revision of the backup or a later revision.
    Complete,
}

impl Plan {
    pub(crate) fn act(action: Action, description: &str) -> Self {
        let state = PlanState::Working(Trouble::new(Reason::InProgress, description));
        Self {
            action,
            state,
            requeue: Some(Duration::ZERO),
        }
    }

    pub(crate) fn wait(trouble: Trouble) -> Self {
        Self {
            action: Action::Nothing,
            state: PlanState::Working(trouble),
            requeue: Some(POLL),
        }
    }

    pub(crate) fn wait_for(description: impl Into<String>) -> Self {
        Self::wait(Trouble::new(Reason::InProgress, description))
    }

    pub(crate) fn stuck(trouble: Trouble) -> Self {
        Self {
            action: Action::Nothing,
            state: PlanState::Stuck(trouble),
            requeue: Some(PROBLEM_POLL),
        }
    }

    /// The plan for a problem. A temporary problem is only reported. Any other problem is a failure until a user has
    /// corrected it.
    pub(crate) fn trouble(trouble: &Trouble) -> Self {
        match trouble.reason {
            Reason::PodNotStarting
            | Reason::StoreUnreachable
            | Reason::StepFailed
            | Reason::InProgress
            | Reason::Unknown => Self::wait(trouble.clone()),
            _ => Self::stuck(trouble.clone()),
        }
    }

    pub(crate) fn halt(reason: Reason, message: impl Into<String>) -> Self {
        Self {
            action: Action::Nothing,
            state: PlanState::Halted(Trouble::new(reason, message)),
            requeue: None,
        }
    }

    pub(crate) fn complete() -> Self {
        Self {
            action: Action::Nothing,
            state: PlanState::Complete,
            requeue: None,
        }
    }
}
