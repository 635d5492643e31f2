//! A member's PVC.

use std::collections::BTreeSet;

use etcd::ClusterId;
use jiff::Timestamp;

/// A member's PVC, as the planner sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Disk {
    /// UID of the PVC, the precondition for deleting it.
    pub uid: String,
    /// The resourceVersion of the PVC, the precondition for recording a removal.
    pub resource_version: String,
    /// Who removed the member from etcd, as recorded on the PVC; `None` without a record.
    pub removal: Option<Removal>,
    /// True if the PVC has the labels and the owner that the EtcdCluster requires. A retained PVC must have no owner
    /// (invariant 35).
    pub owned: bool,
    /// The cluster token in the PVC's annotations.
    pub token: Option<String>,
    /// The cluster ID in the PVC's annotations.
    pub cluster_id: Option<ClusterId>,
    /// The etcd version that is recorded on the PVC. A recreated pod of the member starts with this version.
    pub version: Option<String>,
    /// The image of [`Disk::version`], as recorded on the PVC; `None` if the image has no digest.
    pub image: Option<String>,
    /// The etcd version that last served the data, as recorded on the PVC; `None` if it is [`Disk::version`], or if it
    /// is unknown.
    pub served: Option<String>,
    /// Names of all first members, recorded only on the PVC of a first member.
    pub initial: BTreeSet<String>,
    /// The voters and the TLS settings, for a later EtcdCluster of the same name.
    pub retention: RetentionNotes,
    /// True if the PVC is being deleted. Kubernetes keeps it until the pod that uses it is deleted.
    pub terminating: bool,
    /// True if Kubernetes reports the volume as lost. A pod that has mounted the volume may continue to run. No other
    /// pod can mount it.
    pub lost: bool,
    /// The StorageClass, and the requested and the actual size of the volume.
    pub claim: Claim,
}

impl Disk {
    /// True if the data survives the deletion of the pod: the PVC is not being deleted, and its volume exists.
    pub fn stays(&self) -> bool {
        !self.terminating && !self.lost
    }

    /// Invariant 25: true if other software or a person removed the member from etcd. The operator starts no member on
    /// this PVC.
    pub(crate) fn is_evidence(&self) -> bool {
        matches!(self.removal, Some(Removal::ByOthers { .. }))
    }
}

/// Annotations of a retained PVC, for a later EtcdCluster of the same name. Empty unless the spec retains volumes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RetentionNotes {
    /// Names of the voters.
    pub voters: BTreeSet<String>,
    /// The TLS settings with which the members were started, as JSON.
    pub tls: Option<String>,
}

/// Who removed the member of a PVC from etcd.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Removal {
    /// This operator removed the member. It records the removal on the PVC before it sends the request to etcd.
    ByOperator,
    /// Other software or a person removed the member.
    ByOthers {
        /// Time at which the operator noticed the removal.
        since: Timestamp,
        /// True if a majority of the voters was missing from the member list at that time.
        majority: bool,
    },
}

const BY_OPERATOR: &str = "operator";
const MAJORITY: &str = "majority";

impl Removal {
    /// Parses the annotation of a PVC. An annotation that cannot be parsed counts as a removal by other software: the
    /// operator then keeps the volume until a person decides.
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

    /// The value of the annotation that records the removal on the PVC.
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

/// The requested and the actual properties of a PVC, or only the properties that the spec requests.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Claim {
    /// Name of the StorageClass of the PVC.
    pub class: Option<String>,
    /// Requested size in bytes.
    pub requested: Option<u64>,
    /// Requested size as written in the spec.
    pub text: String,
    /// Actual size in bytes.
    pub capacity: Option<u64>,
    /// Progress of a resize of the volume, as Kubernetes reports it.
    pub resizing: Option<String>,
}
