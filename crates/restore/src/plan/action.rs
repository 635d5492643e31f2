//! The next action of a restore, and its state.

use std::time::Duration;

use api::cluster::EtcdClusterSpec;
use api::restore::{ChosenBackup, ReplacesStatus, SeedStatus};

use crate::reason::{Reason, Trouble};
use crate::snapshot::FormerPod;

/// How soon to look again at what emits no event.
pub(crate) const SOON: Duration = Duration::from_secs(2);

/// How soon to look again at what a person has to put right.
pub(crate) const LATER: Duration = Duration::from_secs(15);

/// What to do now, and how it stands.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    /// The one action, if any.
    pub action: Action,
    /// How it stands.
    pub outlook: Outlook,
    /// When to look again at the latest.
    pub requeue: Option<Duration>,
}

/// One action. Each can be lost or repeated, and is planned again from what is observed alone.
#[derive(Clone, Debug, PartialEq)]
pub enum Action {
    /// Nothing to write.
    Nothing,
    /// Into the restore's status: the seed's name and the new token, and what it replaces (invariant 10).
    RecordIntent {
        /// The seed.
        seed: SeedStatus,
        /// The cluster that is there.
        replaces: Option<ReplacesStatus>,
    },
    /// Into the restore's status: the backup it is made of (invariant 10).
    RecordBackup(Box<ChosenBackup>),
    /// The finalizer of the restore: set before the claim, taken away after it.
    Guard(bool),
    /// The EtcdCluster, with our claim on it.
    CreateCluster(Box<EtcdClusterSpec>),
    /// Our claim on the EtcdCluster that is there.
    Claim,
    /// The seed's Service.
    CreateService,
    /// The seed's volume claim.
    CreateClaim,
    /// The seed's pod.
    CreatePod,
    /// The seed's pod goes: it has ended for good, for this reason, and another one is to take its place.
    ClearPod(String),
    /// Into the restore's status: the seed serves, verified.
    RecordRestored {
        /// In hexadecimal, without leading zeros.
        cluster_id: String,
        /// The revision the seed holds.
        revision: i64,
        /// SHA-256 of the snapshot it was made from.
        sha256: Option<String>,
    },
    /// Into the restore's status: it is given up, and this is why.
    Abandon(Trouble),
    /// The seed's objects go: it was given up.
    DiscardSeed,
    /// Into the cluster's status: its ID, and the seed as its first member.
    RecordFormed {
        /// In hexadecimal, without leading zeros.
        cluster_id: String,
    },
    /// The pods of the members that are replaced go; their volumes stay.
    StopFormer(Vec<FormerPod>),
    /// The labels by which Services find the seed's pod.
    Join,
    /// The EtcdRestore itself goes: it ended long enough ago.
    Expire,
    /// The claim annotation, last: from then on it is an ordinary cluster.
    ReleaseClaim,
}

impl Action {
    /// Whether it changes the EtcdRestore itself: the next reconcile, of the new version, writes the status.
    pub fn changes_object(&self) -> bool {
        matches!(self, Self::Guard(_) | Self::Expire)
    }

    /// The failpoint before the action: `FAILPOINTS=restore-before-claim=panic`.
    pub fn failpoint(&self) -> &'static str {
        match self {
            Self::Nothing => "restore-before-nothing",
            Self::RecordIntent { .. } => "restore-before-record-intent",
            Self::RecordBackup(_) => "restore-before-record-backup",
            Self::Guard(true) => "restore-before-guard",
            Self::Guard(false) => "restore-before-let-go",
            Self::CreateCluster(_) => "restore-before-create-cluster",
            Self::Claim => "restore-before-claim",
            Self::CreateService => "restore-before-create-service",
            Self::CreateClaim => "restore-before-create-volume-claim",
            Self::CreatePod => "restore-before-create-pod",
            Self::ClearPod(_) => "restore-before-clear-pod",
            Self::RecordRestored { .. } => "restore-before-record-restored",
            Self::Abandon(_) => "restore-before-abandon",
            Self::DiscardSeed => "restore-before-discard-seed",
            Self::RecordFormed { .. } => "restore-before-record-formed",
            Self::StopFormer(_) => "restore-before-stop-former",
            Self::Join => "restore-before-join",
            Self::ReleaseClaim => "restore-before-release-claim",
            Self::Expire => "restore-before-expire",
        }
    }
}

/// How it stands.
#[derive(Clone, Debug, PartialEq)]
pub enum Outlook {
    /// It goes on by itself.
    Working(Trouble),
    /// It goes on once somebody has put this right.
    Stuck(Trouble),
    /// It does not go on with this spec.
    Halted(Trouble),
    /// The cluster serves, at the backup's revision at least.
    Complete,
}

impl Plan {
    pub(crate) fn act(action: Action, what: &str) -> Self {
        let outlook = Outlook::Working(Trouble::new(Reason::InProgress, what));
        Self {
            action,
            outlook,
            requeue: Some(Duration::ZERO),
        }
    }

    pub(crate) fn wait(trouble: Trouble) -> Self {
        Self {
            action: Action::Nothing,
            outlook: Outlook::Working(trouble),
            requeue: Some(SOON),
        }
    }

    pub(crate) fn wait_for(what: impl Into<String>) -> Self {
        Self::wait(Trouble::new(Reason::InProgress, what))
    }

    pub(crate) fn stuck(trouble: Trouble) -> Self {
        Self {
            action: Action::Nothing,
            outlook: Outlook::Stuck(trouble),
            requeue: Some(LATER),
        }
    }

    /// Trouble that passes by itself is waited for; the rest is reported as a failure until it is put right.
    pub(crate) fn trouble(trouble: &Trouble) -> Self {
        match trouble.reason {
            Reason::PodNotStarting
            | Reason::StoreUnreachable
            | Reason::StepFailed
            | Reason::Unknown => Self::wait(trouble.clone()),
            _ => Self::stuck(trouble.clone()),
        }
    }

    pub(crate) fn halt(reason: Reason, message: impl Into<String>) -> Self {
        Self {
            action: Action::Nothing,
            outlook: Outlook::Halted(Trouble::new(reason, message)),
            requeue: None,
        }
    }

    pub(crate) fn complete() -> Self {
        Self {
            action: Action::Nothing,
            outlook: Outlook::Complete,
            requeue: None,
        }
    }
}
