//! The types that `observe` returns: plain data without clients. Data that cannot be read is `Unknown`, never empty
//! (invariant 1).

use std::time::Duration;

use api::EtcdCluster;
use api::cluster::{EtcdClusterSpec, LastBackup};
use api::problem::Problem;
use api::restore::{ChosenBackup, ReplacesStatus};
use etcd::KeyHash;
use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Pod as KubePod, Service};
use k8s_openapi::jiff::Timestamp;
use kube::Resource;
use member::{OperatorImage, Origin};
use runtime::apply::is_owned;
use store::progress::Moved;

use crate::reason::Trouble;

/// An observation: the facts for the plan, and the objects for the requests.
pub struct Observation {
    /// The input of the plan.
    pub snapshot: Snapshot,
    /// The objects from which the requests are built.
    pub objects: Objects,
}

/// The Kubernetes objects as they were read.
pub struct Objects {
    /// The EtcdCluster as it was read. `None` if it does not exist.
    pub cluster: Option<EtcdCluster>,
    /// The spec of the EtcdCluster, with the TLS settings and the address format in effect.
    pub effective: Option<EtcdClusterSpec>,
    /// The recorded backup, or else the backup in the spec.
    pub backup: Result<ChosenBackup, Trouble>,
    /// The image of the container `fetch`.
    pub image: Result<OperatorImage, String>,
    /// The objects of the seed.
    pub seed: SeedObjects,
}

/// The objects of the seed, which the EtcdCluster owns.
#[derive(Default)]
pub struct SeedObjects {
    /// The seed's pod. `None` if it does not exist.
    pub pod: Option<KubePod>,
    /// The seed's PVC. `None` if it does not exist.
    pub pvc: Option<PersistentVolumeClaim>,
    /// The seed's Service. `None` if it does not exist.
    pub service: Option<Service>,
}

/// True if the object prevents the creation of a seed's object with this name: it is being deleted, or `owner` does
/// not own it.
pub(crate) fn takes_name<K: Resource>(object: &K, owner: &str) -> bool {
    let metadata = object.meta();
    metadata.deletion_timestamp.is_some() || !is_owned(metadata, owner)
}

/// The input of a plan, in addition to the EtcdRestore.
#[derive(Clone, Debug, PartialEq)]
pub struct Snapshot {
    /// The target EtcdCluster.
    pub cluster: Cluster,
    /// The result of the check of the backup. The backup is checked until the cluster is created or locked.
    pub source: Source,
    /// The chosen backup, which the plan records unless it is recorded already. `None` if no usable backup was chosen.
    pub found: Option<ChosenBackup>,
    /// The objects of the seed. They are read while the restore holds the lock.
    pub seed: Seed,
    /// The answer of etcd: from the seed before the handover, and from any member of the cluster afterwards.
    pub serving: Serving,
    /// The pods of the old members. They are read after the cutover.
    pub old_members: OldMembers,
}

impl Snapshot {
    /// A snapshot before any read.
    pub fn not_read() -> Self {
        Self {
            cluster: Cluster::Absent,
            source: Source::NotRead,
            found: None,
            seed: Seed::not_read(),
            serving: Serving::NotRead,
            old_members: OldMembers::NotRead,
        }
    }
}

/// The pods of the members that the seed replaces.
#[derive(Clone, Debug, PartialEq)]
pub enum OldMembers {
    /// The pods were not read, because the plan does not need them.
    NotRead,
    /// The pods cannot be read, for this reason.
    Unknown(String),
    /// The pods that still exist.
    Known(Vec<OldPod>),
}

impl OldMembers {
    /// True if no old member receives requests through a Service: each pod is terminating and not ready, or is
    /// deleted.
    pub fn have_stopped(&self) -> bool {
        matches!(self, Self::Known(pods) if pods.iter().all(|pod| pod.terminating && !pod.ready))
    }
}

/// The pod of an old member.
#[derive(Clone, Debug, PartialEq)]
pub struct OldPod {
    /// The name of the pod.
    pub name: String,
    /// The UID of the pod, which is the precondition of its deletion.
    pub uid: String,
    /// True if the pod is being deleted.
    pub terminating: bool,
    /// True if the pod is ready.
    pub ready: bool,
}

/// The target EtcdCluster.
#[derive(Clone, Debug, PartialEq)]
pub enum Cluster {
    /// The EtcdCluster cannot be read, for this reason.
    Unknown(String),
    /// The EtcdCluster does not exist.
    Absent,
    /// The EtcdCluster is being deleted.
    Terminating,
    /// The EtcdCluster exists.
    Present(Box<ClusterFacts>),
}

/// The facts about the EtcdCluster.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ClusterFacts {
    /// The UID of the EtcdCluster, which differs if a user has created it again.
    pub uid: String,
    /// The UID of the EtcdRestore that holds the restore lock.
    pub lock: Option<String>,
    /// The cluster ID in the EtcdCluster's status.
    pub cluster_id: Option<String>,
    /// True if the condition `Available` is True.
    pub available: bool,
    /// True if `spec.paused` is true.
    pub paused: bool,
    /// True if the members have volumes.
    pub durable: bool,
    /// The problems of the spec. No seed is started while the spec has a problem.
    pub problems: Vec<Problem>,
    /// The maximum age of the backup that a restore in place needs. `None` if it needs no backup.
    pub max_backup_age: Option<Duration>,
    /// The required backup, as part of a sentence in a message. Empty if no backup is required.
    pub needed_backup: String,
    /// The newest backup that the status of the EtcdCluster reports for `spec.backup.beforeChanges`.
    pub backup: Option<LastBackup>,
    /// The time at which the condition `Available` became False. `None` if it is not False.
    pub unavailable_since: Option<Timestamp>,
}

impl ClusterFacts {
    /// True if `id` is the cluster ID in the status.
    pub fn is_cluster(&self, id: &str) -> bool {
        self.cluster_id.as_deref() == Some(id)
    }

    /// True if the UID and the cluster ID are equal to those in `was`.
    pub fn is_still(&self, was: &ReplacesStatus) -> bool {
        let same = match &was.cluster_id {
            Some(id) => self.is_cluster(id),
            None => self.cluster_id.is_none(),
        };
        same && self.uid == was.uid
    }
}

/// The result of the check of the backup.
#[derive(Clone, Debug, PartialEq)]
pub enum Source {
    /// The backup was not checked, because the plan does not need it.
    NotRead,
    /// The backup cannot be read or cannot be used.
    Unavailable(Trouble),
    /// The backup can be restored. Contains the spec of the restored cluster.
    Ready(Box<EtcdClusterSpec>),
    /// The recorded changes are on a PVC. Contains the next step of the pod that searches them.
    Search(SearchStep),
}

/// Why no backup is chosen.
pub(crate) enum Missing {
    /// The problem that prevents the choice.
    Trouble(Trouble),
    /// A pod must search the recorded changes on a PVC first.
    Search(SearchStep),
}

impl From<Trouble> for Missing {
    fn from(trouble: Trouble) -> Self {
        Self::Trouble(trouble)
    }
}

/// The next step of the pod that searches recorded changes on a PVC.
#[derive(Clone, Debug, PartialEq)]
pub enum SearchStep {
    /// Create this pod.
    Start(Box<KubePod>),
    /// Delete this pod, whose result is old, to repeat the search.
    End(Box<KubePod>),
}

/// The facts about the seed's objects.
#[derive(Clone, Debug, PartialEq)]
pub struct Seed {
    /// The state of the seed's Service.
    pub service: Child,
    /// The state of the seed's PersistentVolumeClaim, which is read only if the members have volumes.
    pub pvc: Child,
    /// The state of the seed's pod.
    pub pod: Pod,
}

impl Seed {
    /// A seed before any read.
    pub fn not_read() -> Self {
        Self {
            service: Child::Absent,
            pvc: Child::Absent,
            pod: Pod::Absent,
        }
    }
}

/// The state of an object of the seed, such as its Service.
#[derive(Clone, Debug, PartialEq)]
pub enum Child {
    /// The object cannot be read, for this reason.
    Unknown(String),
    /// The object does not exist.
    Absent,
    /// An object with this name is being deleted or has another owner.
    NameTaken,
    /// The object exists.
    Present,
}

/// The state of the seed's pod.
#[derive(Clone, Debug, PartialEq)]
pub enum Pod {
    /// The pod or its volume cannot be read, for this reason.
    Unknown(String),
    /// The pod does not exist.
    Absent,
    /// A pod with this name is being deleted or has another owner.
    NameTaken,
    /// The pod exists, and the EtcdCluster owns it.
    Present(PodFacts),
}

/// Whether a pod has ended, and may be replaced.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Life {
    /// The pod is starting or running.
    #[default]
    Active,
    /// The pod has ended, but must not be replaced yet.
    EndedRecently,
    /// The pod has ended and may be replaced: it was evicted, shut down with its node, or rejected by a kubelet.
    Ended,
}

/// The backup of a seed's pod, if it differs from the recorded backup. The text describes both backups.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OtherBackup {
    /// The pod fetches another backup, and has not reported its data yet.
    Fetches(String),
    /// The data of the pod is from another backup.
    Contains(String),
}

/// The facts of the seed's pod.
#[expect(
    clippy::struct_excessive_bools,
    reason = "each flag is an independent fact of a pod"
)]
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PodFacts {
    /// Whether the pod has ended, and may be replaced.
    pub life: Life,
    /// True if the pod was created so recently that it must not be replaced yet.
    pub recent: bool,
    /// True if the container `fetch` has succeeded, but its report is missing, because the kubelet may lose a
    /// termination message.
    pub report_lost: bool,
    /// The backup of the pod, if it differs from the recorded backup.
    pub other_backup: Option<OtherBackup>,
    /// True if the arguments of the pod contain the recorded SHA-256, encryption, `bumpRevision` and replay revision.
    /// Such a pod cannot restore another backup.
    pub checks_sha256: bool,
    /// The problem of the pod or of one of its containers, if any.
    pub trouble: Option<Trouble>,
    /// The revision of the restored data. `None` until the pod has reported a verified backup. etcd starts only after
    /// this report.
    pub restored: Option<i64>,
    /// True if the pod has reported a verified backup, and etcd is ready.
    pub verified: bool,
    /// The hash of the keys at the revision `restored`, if the manifest contains a hash.
    pub hash: Option<KeyHash>,
    /// The SHA-256 of the fetched snapshot in hexadecimal.
    pub sha256: Option<String>,
    /// The origin of the fetched snapshot, from the report of the pod.
    pub origin: Option<Origin>,
    /// True if the container `fetch` is running.
    pub fetching: bool,
    /// True if the seed replays recorded changes before it serves.
    pub replays: bool,
    /// The progress of the replay while changes are replayed, or else the last progress of the download.
    pub progress: Option<Moved>,
    /// True if the pod has the labels of the cluster, so that Services select it.
    pub joined: bool,
}

/// The answer of the etcd of the seed or of the restored cluster.
#[derive(Clone, Debug, PartialEq)]
pub enum Serving {
    /// etcd was not queried.
    NotRead,
    /// etcd returned no usable answer, for this reason.
    Unknown(String),
    /// The hash of the seed's keys differs from the hash in the manifest.
    Differs {
        /// The hash in the manifest.
        expected: u32,
        /// The hash from the seed's etcd.
        found: u32,
    },
    /// etcd answers.
    Serves {
        /// The cluster ID in hexadecimal, without leading zeros.
        cluster_id: String,
        /// The current revision of etcd.
        revision: i64,
    },
}
