//! The types that observe returns: plain data without clients. Data that cannot be read is `Unknown` with the reason,
//! never empty (invariant 1).

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
    /// The plain data from which the plan is made.
    pub snapshot: Snapshot,
    /// The Kubernetes objects from which the requests of the plan are built.
    pub objects: Objects,
}

/// The Kubernetes objects as they were read.
pub struct Objects {
    /// The EtcdCluster as it was read. `None` if it does not exist.
    pub cluster: Option<EtcdCluster>,
    /// The spec of the EtcdCluster with the TLS settings and the address format in effect.
    pub effective: Option<EtcdClusterSpec>,
    /// The recorded backup, or without a record the backup that the spec names.
    pub backup: Result<ChosenBackup, Trouble>,
    /// The image of the container `fetch`.
    pub image: Result<OperatorImage, String>,
    /// The seed's objects as they were read.
    pub seed: SeedObjects,
}

/// The objects of the seed that this EtcdCluster owns.
#[derive(Default)]
pub struct SeedObjects {
    /// The seed's pod. `None` if it does not exist.
    pub pod: Option<KubePod>,
    /// The seed's PVC. `None` if it does not exist.
    pub pvc: Option<PersistentVolumeClaim>,
    /// The seed's Service. `None` if it does not exist.
    pub service: Option<Service>,
}

/// Whether the object occupies the name of a seed's object: it is being deleted, or its owner is not `owner`.
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
    /// The backup to record. `None` if the record is valid or no backup was found.
    pub found: Option<ChosenBackup>,
    /// The objects of the seed. Read while the restore holds the lock of the cluster.
    pub seed: Seed,
    /// The answer of etcd. Before the handover, the seed is queried. After the handover, any member of the cluster is
    /// queried.
    pub serving: Serving,
    /// The pods of the old members. Read after the cutover.
    pub old_members: OldMembers,
}

impl Snapshot {
    /// A snapshot without any data.
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

/// The pods of the old members, which the restore replaces.
#[derive(Clone, Debug, PartialEq)]
pub enum OldMembers {
    /// The pods were not read, because the plan does not need them.
    NotRead,
    /// The API server did not answer.
    Unknown(String),
    /// The pods that still exist.
    Known(Vec<OldPod>),
}

impl OldMembers {
    /// Whether no old member is an endpoint of a Service: each pod is terminating and not ready, or no longer exists.
    pub fn have_stopped(&self) -> bool {
        matches!(self, Self::Known(pods) if pods.iter().all(|pod| pod.terminating && !pod.ready))
    }
}

/// A pod of the cluster that the restore replaces.
#[derive(Clone, Debug, PartialEq)]
pub struct OldPod {
    /// The name of the pod.
    pub name: String,
    /// The UID of the pod, which is the precondition of its deletion.
    pub uid: String,
    /// Whether the pod is being deleted.
    pub terminating: bool,
    /// Whether the readiness probe succeeds.
    pub ready: bool,
}

/// The target EtcdCluster.
#[derive(Clone, Debug, PartialEq)]
pub enum Cluster {
    /// The API server did not answer.
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
    /// The UID by which a recreated EtcdCluster is recognized.
    pub uid: String,
    /// The UID of the EtcdRestore that holds the restore lock.
    pub lock: Option<String>,
    /// The cluster ID in the EtcdCluster's status.
    pub cluster_id: Option<String>,
    /// Whether the cluster operator reports a healthy quorum.
    pub available: bool,
    /// Whether `spec.paused` is true.
    pub paused: bool,
    /// Whether the members have volumes.
    pub durable: bool,
    /// The problems of the spec. With a problem, no seed is started.
    pub problems: Vec<Problem>,
    /// The maximum age of the backup that a restore in place needs. `None` if it needs no backup.
    pub max_backup_age: Option<Duration>,
    /// A description of the backup that a restore in place needs, as part of a sentence. Empty if it needs no backup.
    pub needed_backup: String,
    /// The newest backup of the cluster that counts for `spec.backup.beforeChanges`.
    pub backup: Option<LastBackup>,
    /// Time since which the condition `Available` has been False. `None` while it is not False.
    pub unavailable_since: Option<Timestamp>,
}

impl ClusterFacts {
    /// Whether the recorded cluster ID is `id`.
    pub fn is_cluster(&self, id: &str) -> bool {
        self.cluster_id.as_deref() == Some(id)
    }

    /// Whether the cluster still has the recorded UID and cluster ID.
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
}

/// The facts about the seed's objects.
#[derive(Clone, Debug, PartialEq)]
pub struct Seed {
    /// The state of the seed's Service.
    pub service: Child,
    /// The state of the seed's PersistentVolumeClaim. Not read if members have no volumes.
    pub pvc: Child,
    /// The state of the seed's pod.
    pub pod: Pod,
}

impl Seed {
    /// A seed without any data.
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
    /// The API server did not answer.
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
    /// The API server did not answer.
    Unknown(String),
    /// The pod does not exist.
    Absent,
    /// A pod with this name is being deleted or has another owner.
    NameTaken,
    /// The pod exists and belongs to this restore.
    Present(PodFacts),
}

/// The state of a pod: a kubelet still runs its containers, or the pod has ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Life {
    /// The pod is starting or running.
    #[default]
    Active,
    /// The pod has ended. It was created too recently to be replaced.
    EndedRecently,
    /// The pod has ended: it was evicted, shut down with its node, or rejected by a kubelet. No container is restarted.
    Ended,
}

/// The backup of a seed's pod, if it differs from the recorded backup. The text names both backups.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OtherBackup {
    /// The pod fetches the other backup and has not reported its data.
    Fetches(String),
    /// The data in the pod is from the other backup.
    Contains(String),
}

/// The facts of the seed's pod.
#[expect(
    clippy::struct_excessive_bools,
    reason = "each flag is an independent fact of a pod"
)]
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PodFacts {
    /// The state of the pod: a kubelet still runs its containers, or the pod has ended.
    pub life: Life,
    /// Whether the pod was created too recently to be replaced.
    pub recent: bool,
    /// Whether the container `fetch` has succeeded, but its report is missing or unreadable. A kubelet may lose a
    /// termination message.
    pub report_lost: bool,
    /// The backup of the pod, if it differs from the recorded backup.
    pub other_backup: Option<OtherBackup>,
    /// Whether the arguments of the pod require the recorded SHA-256, the recorded encryption and the recorded
    /// `bumpRevision`. Such a pod cannot restore another backup.
    pub checks_sha256: bool,
    /// Why the pod does not start. `None` without a problem. The kubelet retries the start.
    pub trouble: Option<Trouble>,
    /// The revision of the restored data. `None` until the pod has reported a downloaded and verified backup. etcd
    /// starts only on the restored data, so each answer at the pod's address comes from this data.
    pub restored: Option<i64>,
    /// Whether etcd is ready on the verified data directory.
    pub verified: bool,
    /// The hash of etcd's keys at the revision `restored`, if the manifest contains a hash.
    pub hash: Option<KeyHash>,
    /// The SHA-256 of the fetched snapshot in hexadecimal.
    pub sha256: Option<String>,
    /// The origin of the fetched snapshot, as the pod reports it.
    pub origin: Option<Origin>,
    /// Whether the container `fetch` is running.
    pub fetching: bool,
    /// The progress of the container `fetch`, while it runs and after it has succeeded.
    pub progress: Option<Moved>,
    /// Whether the pod has the labels of the cluster, by which Services select it.
    pub joined: bool,
}

/// The answer of the seed's etcd.
#[derive(Clone, Debug, PartialEq)]
pub enum Serving {
    /// etcd was not queried, because the plan does not need an answer.
    NotRead,
    /// The seed's etcd did not answer, for this reason.
    Unknown(String),
    /// The hash of the seed's keys differs from the hash in the manifest.
    Differs {
        /// The hash in the manifest.
        expected: u32,
        /// The hash that the seed's etcd reports.
        found: u32,
    },
    /// The seed's etcd answers.
    Serves {
        /// The cluster ID in hexadecimal, without leading zeros.
        cluster_id: String,
        /// The current revision of the seed's etcd.
        revision: i64,
    },
}
