//! A member's pod.

use std::collections::BTreeSet;

use etcd::ClusterId;
use jiff::Timestamp;
use member::{Changed, Difference};

/// A member's pod, as the planner sees it.
#[allow(clippy::struct_excessive_bools)] // Each flag is a separate fact.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pod {
    /// UID of the pod, the precondition for deleting it.
    pub uid: String,
    /// True if the EtcdCluster owns the pod, and the pod has the labels of the cluster. False, for example, if the
    /// EtcdCluster was deleted without its children.
    pub owned: bool,
    /// The cluster token in the pod's annotations.
    pub token: Option<String>,
    /// The cluster ID in the pod's annotations.
    pub cluster_id: Option<ClusterId>,
    /// The etcd version in the pod's annotations.
    pub version: Option<String>,
    /// The image that the operator requested for the etcd container.
    pub image: String,
    /// The last in-place change of the image, until the member is healthy again; otherwise `None`.
    pub changed: Option<Changed>,
    /// The flags of etcd and the names of its environment variables, without the values.
    pub flags: BTreeSet<String>,
    /// The value of etcd's option `--snapshot-count`; `None` if the pod does not set it.
    pub snapshot_count: Option<u64>,
    /// True if the readiness probe calls `/readyz`, which not every etcd release serves.
    pub readyz: bool,
    /// The hash of the spec from which the pod was built.
    pub spec_hash: Option<String>,
    /// Differences between the pod and the current spec, except the image.
    pub difference: Difference,
    /// The names in `--initial-cluster` of the pod.
    pub initial: BTreeSet<String>,
    /// True if the pod was built for a joining member (`--initial-cluster-state=existing`). At its first start, the
    /// etcd of a joining member compares `initial` with the member list. The etcd of a first member does not.
    pub joins: bool,
    /// True if the data is on a PVC, so that it survives the deletion of the pod.
    pub durable: bool,
    /// True if the pod is being deleted. Data that is not on a PVC is then lost.
    pub terminating: bool,
    /// True if the pod will never run again, for example after an eviction.
    pub failed: bool,
    /// True if the pod has an IP address. etcd may answer before the kubelet reports the container as running, because
    /// the kubelet checks once a second.
    pub addressed: bool,
    /// True if the etcd container runs.
    pub running: bool,
    /// Time at which the etcd container started.
    pub running_since: Option<Timestamp>,
    /// True if the etcd container is ready, and the pod's condition `Ready` is not false.
    pub ready: bool,
    /// Number of restarts of the etcd container.
    pub restarts: i32,
    /// The role in the pod's labels.
    pub role: Option<Role>,
    /// Why the pod does not run, as Kubernetes reports it; `None` if Kubernetes reports no reason.
    pub trouble: Option<Trouble>,
    /// Time since which the pod has not been ready, by the clock of the API server.
    pub unready_since: Option<Timestamp>,
    /// Time since which the pod's node, or the only node that reaches its volume, has been lost; `None` if the pod
    /// shows no loss.
    pub lost_since: Option<Timestamp>,
    /// The last exit of the etcd container.
    pub ending: Option<Ending>,
    /// The node on which the pod runs.
    pub node: Option<String>,
    /// Creation time of the pod.
    pub created: Timestamp,
}

impl Pod {
    /// True if the pod is not being deleted and can run again. Data in such a pod is kept.
    pub fn stays(&self) -> bool {
        !self.terminating && !self.failed
    }
}

/// The role of a member in the quorum, from the label of its pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Role {
    /// A voter with client endpoints.
    Voter,
    /// A voter outside of the client Service, because it does not serve yet, is about to stop, or is being
    /// defragmented.
    Busy {
        /// Start of the drain. If the start is unknown, a time in the distant past.
        since: Timestamp,
    },
    /// A member without a vote.
    Learner,
}

/// Why a pod does not run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Trouble {
    /// No node accepts the pod.
    Unschedulable(String),
    /// The image cannot be pulled.
    Image(String),
    /// The container exits repeatedly, or cannot be created.
    Failing(String),
}

impl Trouble {
    /// The message from Kubernetes.
    pub fn message(&self) -> &str {
        match self {
            Self::Unschedulable(text) | Self::Image(text) | Self::Failing(text) => text,
        }
    }
}

/// An exit of a member's etcd container.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ending {
    /// Time of the exit.
    pub at: Timestamp,
    /// The cause, as far as it can be determined.
    pub cause: Cause,
}

/// Why a member's etcd container exited.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Cause {
    /// The data on the member's disk is damaged or missing. The text is etcd's own message.
    Data(String),
    /// The container exceeded its memory limit.
    Memory,
    /// The environment prevents the start, for example a full disk, permissions, an address or a flag.
    Surroundings(String),
    /// etcd failed for another reason. Its data may or may not be the cause.
    Failed(String),
    /// The container was stopped from outside, or exited normally.
    Ended,
}
