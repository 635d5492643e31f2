//! A member's PVC.

use std::collections::BTreeSet;

use etcd::ClusterId;
use jiff::Timestamp;

/// A member's PVC.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Disk {
    /// UID of the PVC, the precondition of deletes.
    pub uid: String,
    /// Resource version of the PVC, the precondition for recording a removal.
    pub resource_version: String,
    /// Who removed the member from etcd, as recorded on the PVC.
    pub removal: Option<Removal>,
    /// `false` if the PVC has no owner, or if its labels were removed.
    pub owned: bool,
    /// The cluster token in the PVC's annotations.
    pub token: Option<String>,
    /// The cluster ID in the PVC's annotations.
    pub cluster_id: Option<ClusterId>,
    /// The etcd version for which the PVC was made.
    pub version: Option<String>,
    /// The first members, on the PVC of a first member.
    pub initial: BTreeSet<String>,
    /// The PVC is being deleted; it disappears with its pod.
    pub terminating: bool,
    /// Kubernetes reports the volume as lost. A pod that has mounted it may continue to run; no other pod can mount it.
    pub lost: bool,
    /// Requested and actual size and class.
    pub claim: Claim,
}

impl Disk {
    /// The data outlives the pod: the PVC is not being deleted, and its volume exists.
    pub fn stays(&self) -> bool {
        !self.terminating && !self.lost
    }

    /// Invariant 25: another party removed the member from etcd. No member is started on this PVC.
    pub(crate) fn is_evidence(&self) -> bool {
        matches!(self.removal, Some(Removal::ByOthers { .. }))
    }
}

/// Who removed the member of a PVC from etcd.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Removal {
    /// This operator. Recorded before the request to etcd.
    ByOperator,
    /// Another party.
    ByOthers {
        /// Time at which the operator noticed the removal.
        since: Timestamp,
        /// A majority of the voters was missing from the member list.
        majority: bool,
    },
}

const BY_OPERATOR: &str = "operator";
const MAJORITY: &str = "majority";

impl Removal {
    /// Parses the annotation of a PVC. An annotation that cannot be parsed keeps the volume until a person decides.
    pub fn read(note: &str) -> Self {
        if note == BY_OPERATOR {
            return Self::ByOperator;
        }
        let (since, rest) = note.split_once('/').unwrap_or((note, ""));
        match since.parse() {
            Ok(since) => Self::ByOthers {
                since,
                majority: !rest.is_empty(),
            },
            Err(_) => Self::ByOthers {
                since: Timestamp::UNIX_EPOCH,
                majority: true,
            },
        }
    }

    /// The annotation of a PVC.
    pub(crate) fn note(self) -> String {
        match self {
            Self::ByOperator => BY_OPERATOR.to_owned(),
            Self::ByOthers {
                since,
                majority: false,
            } => since.to_string(),
            Self::ByOthers { since, .. } => format!("{since}/{MAJORITY}"),
        }
    }
}

/// Requested and actual properties of a PVC, or those that it should have.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Claim {
    /// The storage class.
    pub class: Option<String>,
    /// The requested bytes.
    pub requested: Option<u64>,
    /// The requested size as written in the spec.
    pub text: String,
    /// The actual bytes.
    pub capacity: Option<u64>,
    /// Progress of the resize, as Kubernetes reports it.
    pub resizing: Option<String>,
}
