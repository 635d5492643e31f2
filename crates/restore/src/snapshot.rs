//! The types that observe returns: plain data, no client. What could not be read is `Unknown` with its reason,
//! never empty (invariant 1).

use api::EtcdCluster;
use api::cluster::EtcdClusterSpec;
use api::problem::Problem;
use api::restore::{ChosenBackup, ReplacesStatus};
use etcd::KeyHash;
use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Pod as KubePod, Service};
use kube::Resource;
use member::{OperatorImage, Origin};
use runtime::apply::is_owned;
use store::progress::Moved;

use crate::reason::Trouble;

/// What was observed: the facts from which the action is planned, and the objects from which its requests are built.
pub struct Observation {
    /// The facts.
    pub snapshot: Snapshot,
    /// The objects.
    pub objects: Objects,
}

/// Objects as they were read.
pub struct Objects {
    /// The EtcdCluster.
    pub cluster: Option<EtcdCluster>,
    /// The spec that the members of the EtcdCluster are started with.
    pub effective: Option<EtcdClusterSpec>,
    /// The backup that was recorded, or the one that the spec names now.
    pub backup: Result<ChosenBackup, Trouble>,
    /// The image that the seed fetches with, or why it is unknown.
    pub image: Result<OperatorImage, String>,
    /// The objects of the seed.
    pub seed: SeedObjects,
}

/// The objects of the seed, where they are the seed's.
#[derive(Default)]
pub struct SeedObjects {
    /// Its pod.
    pub pod: Option<KubePod>,
    /// Its PersistentVolumeClaim.
    pub claim: Option<PersistentVolumeClaim>,
    /// Its Service.
    pub service: Option<Service>,
}

/// Whether the object is being deleted, or does not belong to this EtcdCluster.
pub(crate) fn is_in_the_way<K: Resource>(object: &K, owner: &str) -> bool {
    let metadata = object.meta();
    metadata.deletion_timestamp.is_some() || !is_owned(metadata, owner)
}

/// Everything a plan is made from, besides the EtcdRestore itself.
#[derive(Clone, Debug, PartialEq)]
pub struct Snapshot {
    /// The EtcdCluster of the target's name.
    pub cluster: Cluster,
    /// The backup. Looked at while the cluster is still to be created.
    pub source: Source,
    /// The backup to take, where none is recorded that stands.
    pub found: Option<ChosenBackup>,
    /// The seed member's objects. Looked at while the cluster carries our claim.
    pub seed: Seed,
    /// etcd itself: the seed, or after the handover the cluster.
    pub serving: Serving,
    /// The pods of the members that are replaced. Looked at once the new cluster is recorded.
    pub former: Former,
}

impl Snapshot {
    /// Nothing was looked at.
    pub fn not_asked() -> Self {
        Self {
            cluster: Cluster::Absent,
            source: Source::NotAsked,
            found: None,
            seed: Seed::not_asked(),
            serving: Serving::NotAsked,
            former: Former::NotAsked,
        }
    }
}

/// The pods of the members that are replaced.
#[derive(Clone, Debug, PartialEq)]
pub enum Former {
    /// Not needed now.
    NotAsked,
    /// The API server did not say.
    Unknown(String),
    /// These are left.
    Known(Vec<FormerPod>),
}

impl Former {
    /// Whether no member that is replaced is an endpoint any more: each is gone, or ending and not ready.
    pub fn have_stopped(&self) -> bool {
        matches!(self, Self::Known(pods) if pods.iter().all(|pod| pod.terminating && !pod.ready))
    }
}

/// A pod of a member that is replaced.
#[derive(Clone, Debug, PartialEq)]
pub struct FormerPod {
    /// Its name.
    pub name: String,
    /// Its UID; it is deleted by that.
    pub uid: String,
    /// It is being deleted.
    pub terminating: bool,
    /// Its readiness probe passes.
    pub ready: bool,
}

/// The EtcdCluster of the target's name.
#[derive(Clone, Debug, PartialEq)]
pub enum Cluster {
    /// The API server did not say.
    Unknown(String),
    /// There is none.
    Absent,
    /// There is one that is being deleted.
    Ending,
    /// There is one.
    Present(Box<ClusterFacts>),
}

/// What matters about the EtcdCluster.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ClusterFacts {
    /// Its UID.
    pub uid: String,
    /// The UID of the EtcdRestore it belongs to, from the claim annotation.
    pub claim: Option<String>,
    /// The recorded cluster ID.
    pub cluster_id: Option<String>,
    /// Whether the cluster operator reports a healthy quorum.
    pub available: bool,
    /// Whether its operator may not change it.
    pub paused: bool,
    /// Whether its members have volumes.
    pub durable: bool,
    /// Why its spec cannot be started, if so.
    pub problems: Vec<Problem>,
}

impl ClusterFacts {
    /// Whether this is the cluster that is recorded.
    pub fn is_cluster(&self, id: &str) -> bool {
        self.cluster_id.as_deref() == Some(id)
    }

    /// Whether nothing became of this EtcdCluster since that was recorded of it.
    pub fn is_still(&self, was: &ReplacesStatus) -> bool {
        let same = match &was.cluster_id {
            Some(id) => self.is_cluster(id),
            None => self.cluster_id.is_none(),
        };
        same && self.uid == was.uid
    }
}

/// The backup, as far as the operator looks at it.
#[derive(Clone, Debug, PartialEq)]
pub enum Source {
    /// Not needed now.
    NotAsked,
    /// It cannot be read.
    Unavailable(Trouble),
    /// It is there, and this is the cluster to make of it.
    Ready(Box<EtcdClusterSpec>),
}

/// The seed member's objects.
#[derive(Clone, Debug, PartialEq)]
pub struct Seed {
    /// Its Service.
    pub service: Child,
    /// Its volume claim; not looked at when members have no volumes.
    pub claim: Child,
    /// Its pod.
    pub pod: Pod,
}

impl Seed {
    /// Nothing was looked at.
    pub fn not_asked() -> Self {
        Self {
            service: Child::Absent,
            claim: Child::Absent,
            pod: Pod::Absent,
        }
    }
}

/// An object of the seed member.
#[derive(Clone, Debug, PartialEq)]
pub enum Child {
    /// The API server did not say.
    Unknown(String),
    /// There is none.
    Absent,
    /// One of that name is being deleted or belongs to somebody else.
    InTheWay,
    /// It is there.
    Present,
}

/// The seed member's pod.
#[derive(Clone, Debug, PartialEq)]
pub enum Pod {
    /// The API server did not say.
    Unknown(String),
    /// There is none.
    Absent,
    /// One of that name is being deleted or belongs to somebody else.
    InTheWay,
    /// It is there.
    Present(PodFacts),
}

/// Whether a kubelet still has to do with a pod.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Life {
    /// It runs, or will.
    #[default]
    Lives,
    /// It has ended for good, a moment after it was made.
    EndedAtOnce,
    /// It has ended for good: evicted, ended with its node, refused by a kubelet. No container of it is started again.
    Ended,
}

/// How a seed's pod is of another backup than the recorded one, in words.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Another {
    /// It is told to fetch another one, and has not said yet what it holds.
    Fetches(String),
    /// What it holds is of another one.
    Holds(String),
}

/// What the pod reports.
#[expect(
    clippy::struct_excessive_bools,
    reason = "what is so of a pod, one by one"
)]
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PodFacts {
    /// Whether a kubelet still has to do with it.
    pub life: Life,
    /// It was made a moment ago: no other one is put in its place yet.
    pub young: bool,
    /// What was to be told of the backup was told, and nobody can read it: a kubelet may lose a container's message.
    pub silent: bool,
    /// It is not of the recorded backup.
    pub another: Option<Another>,
    /// It fetches nothing that has not the recorded SHA-256.
    pub vouched: bool,
    /// What keeps it from starting. The kubelet tries again by itself.
    pub trouble: Option<Trouble>,
    /// The revision an etcd serves that is started from what was fetched and verified. Whatever answers at the pod's
    /// address was: its container becomes etcd only when the data directory is there.
    pub restored: Option<i64>,
    /// The data directory is there and verified: etcd is ready on it.
    pub verified: bool,
    /// What etcd must say of its keys at that revision, where the backup tells.
    pub hash: Option<KeyHash>,
    /// SHA-256 of what was fetched, in hexadecimal.
    pub sha256: Option<String>,
    /// Of which backup it says that is.
    pub of: Option<Origin>,
    /// Whether the container that fetches runs.
    pub fetching: bool,
    /// How far it is, in bytes of what is stored.
    pub moved: Option<Moved>,
    /// Whether it carries the cluster's labels, so that Services find it.
    pub joined: bool,
}

/// etcd's own answer.
#[derive(Clone, Debug, PartialEq)]
pub enum Serving {
    /// Not needed now.
    NotAsked,
    /// No answer.
    Unknown(String),
    /// It serves other keys than the backup holds: the hashes in the manifest and of etcd.
    Differs {
        /// The manifest's.
        expected: u32,
        /// etcd's.
        found: u32,
    },
    /// It serves.
    Serves {
        /// In hexadecimal, without leading zeros.
        cluster_id: String,
        /// The store's revision.
        revision: i64,
    },
}
