//! A member's pod.

use std::collections::BTreeSet;

use etcd::ClusterId;
use jiff::Timestamp;
use member::Difference;

/// A member's pod.
#[allow(clippy::struct_excessive_bools)] // Independent facts of a pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pod {
    /// UID of the pod, the precondition of deletes.
    pub uid: String,
    /// `false` if the pod has no owner because its owner was deleted without its children, or if its labels were
    /// removed.
    pub owned: bool,
    /// The cluster token in the pod's annotations.
    pub token: Option<String>,
    /// The cluster ID in the pod's annotations.
    pub cluster_id: Option<ClusterId>,
    /// The etcd version in the pod's annotations.
    pub version: Option<String>,
    /// The image of the etcd container in the pod's spec.
    pub image: String,
    /// Set after the image was changed in place, until the member is healthy again.
    pub changed: Option<Changed>,
    /// The flags of etcd and the names of its environment variables, without values.
    pub flags: BTreeSet<String>,
    /// The readiness probe calls `/readyz`, which not every etcd release serves.
    pub readyz: bool,
    /// The hash of the spec from which the pod was made.
    pub spec_hash: Option<String>,
    /// Differences between the pod and the current spec, except the image.
    pub difference: Difference,
    /// The names in its `--initial-cluster`.
    pub initial: BTreeSet<String>,
    /// The pod was made for a joining member (`--initial-cluster-state=existing`). At its first start, etcd compares
    /// `initial` with the member list. A first member's etcd does not.
    pub joins: bool,
    /// The data is on a PVC and outlives the pod.
    pub durable: bool,
    /// The pod is being deleted. Data that is not durable is lost.
    pub terminating: bool,
    /// The pod ended permanently (evicted, node lost) and does not run again.
    pub failed: bool,
    /// The pod has an IP address. Its etcd may answer before the kubelet reports the container as running, because the
    /// kubelet checks once a second.
    pub addressed: bool,
    /// The etcd container runs.
    pub running: bool,
    /// Time at which the etcd container started.
    pub running_since: Option<Timestamp>,
    /// The readiness probe passes.
    pub ready: bool,
    /// Number of restarts of the etcd container.
    pub restarts: i32,
    /// The role in the pod's labels.
    pub role: Option<Role>,
    /// Why the pod does not run, as Kubernetes reports it.
    pub trouble: Option<Trouble>,
    /// Time since which the pod has not been ready, by the clock of the API server.
    pub unready_since: Option<Timestamp>,
    /// Time since which the pod's node, or the only node that reaches its volume, has been unavailable, as far as the
    /// pod shows.
    pub lost_since: Option<Timestamp>,
    /// The last exit of the etcd container.
    pub ending: Option<Ending>,
    /// The node on which the pod runs.
    pub node: Option<String>,
    /// Creation time of the pod.
    pub created: Timestamp,
}

/// Suffix of the annotation about an image change, set if the previous version could not read the data.
const UNREADABLE: &str = "unreadable";

/// A change of a pod's image in place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Changed {
    /// The previous version.
    pub from: String,
    /// The number of restarts of the container at that time.
    pub restarts: i32,
    /// The previous version could not read the data either.
    pub unreadable: bool,
}

impl Changed {
    /// Parses the annotation of a pod.
    pub fn read(note: &str) -> Option<Self> {
        let mut words = note.split('/');
        Some(Self {
            from: words.next()?.to_owned(),
            restarts: words.next()?.parse().ok()?,
            unreadable: words.any(|word| word == UNREADABLE),
        })
    }

    /// The annotation of a pod.
    pub(crate) fn note(&self) -> String {
        let Self { from, restarts, .. } = self;
        let unreadable = if self.unreadable { UNREADABLE } else { "" };
        let note = format!("{from}/{restarts}/{unreadable}");
        note.trim_end_matches('/').to_owned()
    }
}

impl Pod {
    /// The pod is not being deleted, so data in it is kept.
    pub fn stays(&self) -> bool {
        !self.terminating && !self.failed
    }
}

/// A member's role in the quorum, from the label of its pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Role {
    /// A voter with client endpoints.
    Voter,
    /// A voter that is drained from the client Service, because it is about to stop or is being defragmented.
    Busy {
        /// Start of the drain; a time long ago if unknown.
        since: Timestamp,
    },
    /// A learner.
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
    /// Data on its disk is damaged or missing, in etcd's own words.
    Data(String),
    /// The container exceeded its memory limit.
    Memory,
    /// The environment does not fit: a full disk, permissions, an address, a flag.
    Surroundings(String),
    /// etcd failed, and it is unknown whether its data is the reason.
    Failed(String),
    /// The container was stopped, or exited normally.
    Ended,
}
