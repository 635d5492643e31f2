//! The types that observe returns. Plain data without clients.

use std::collections::BTreeSet;
use std::time::Duration;

use api::backup::EncryptionKey;
use api::backup::name::Numbered;
use api::manifest::ManifestCluster;
use etcd::ClusterId;
use jiff::{SignedDuration, Timestamp};
use member::OperatorImage;
use runtime::endpoints::EndpointRule;
use serde::{Deserialize, Serialize};
pub use store::progress::Moved;

use crate::reason::Trouble;
use crate::verification::PodState;

/// A backup. The store has acknowledged its object and its manifest.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Stored {
    /// The location, such as `s3://bucket/key`.
    pub location: String,
    /// The etcd version of the member that sent the snapshot.
    pub etcd_version: String,
    /// The cluster ID in hexadecimal, without leading zeros.
    pub cluster_id: String,
    /// The revision that an etcd serves if it starts from this backup.
    pub revision: i64,
    /// The size of the snapshot in bytes.
    pub size: i64,
    /// The SHA-256 of the snapshot in hexadecimal.
    pub sha256: String,
    /// Number of keys at that revision; `None` if unknown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub keys: Option<i64>,
    /// The key with which the backup is encrypted; `None` if the backup is not encrypted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub encryption_key: Option<EncryptionKey>,
    /// The time at which the snapshot was complete.
    pub created_at: Timestamp,
}

/// A complete backup: the store has acknowledged its object and its manifest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listed {
    /// The location, such as `s3://bucket/key`.
    pub location: String,
    /// The time and the revision in the object name.
    pub parts: Numbered,
}

/// What a removal has deleted and kept.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RemovalResult {
    /// The kept backups, newest first.
    pub backups: Vec<Listed>,
    /// Number of deleted backups.
    pub deleted: usize,
    /// True if the task was to remove all backups of the EtcdBackup, and all of them are deleted.
    pub everything: bool,
}

/// The state of a worker of this process. A new process starts with `Idle`: it finds the work of earlier processes only
/// in the status and in the store.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Work<T = Stored> {
    /// No worker exists.
    #[default]
    Idle,
    /// The worker waits for other workers to end.
    Queued,
    /// The worker has a slot, and starts as soon as the status counts the attempt.
    Ready,
    /// The worker is running. Contains its progress.
    Running(Moved),
    /// The worker has ended with this result.
    Ended(Result<T, Trouble>),
}

impl<T> Work<T> {
    /// True if a worker is queued, ready or running.
    pub fn is_active(&self) -> bool {
        matches!(self, Self::Queued | Self::Ready | Self::Running(_))
    }
}

/// What this process has done for one EtcdBackup: the current work and its previous attempts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WorkState<T> {
    /// The current state of the worker.
    pub work: Work<T>,
    /// The earliest time of the next attempt; `None` if an attempt may start at once.
    pub not_before: Option<Timestamp>,
    /// The failure of the previous attempt.
    pub last_failure: Option<Trouble>,
    /// The reason why the running task makes no progress; `None` while it makes progress.
    pub obstacle: Option<Trouble>,
    /// The total time that all attempts have spent in the queue.
    pub queue_time: Duration,
    /// The count of attempts in the status, including the attempt of this process. `None` if the status does not count
    /// that attempt.
    pub recorded_count: Option<i32>,
}

impl<T> Default for WorkState<T> {
    fn default() -> Self {
        Self {
            work: Work::Idle,
            not_before: None,
            last_failure: None,
            obstacle: None,
            queue_time: Duration::ZERO,
            recorded_count: None,
        }
    }
}

impl<T> WorkState<T> {
    /// True if another attempt may start at this time.
    pub fn may_begin(&self, now: Timestamp) -> bool {
        !self.work.is_active() && self.not_before.is_none_or(|time| time <= now)
    }

    /// The failure of the last attempt. While an attempt runs: the reason why it makes no progress.
    pub fn problem(&self) -> Option<&Trouble> {
        match &self.work {
            Work::Ended(Err(trouble)) => Some(trouble),
            Work::Running(_) => self.obstacle.as_ref(),
            _ => None,
        }
    }
}

/// The content of the store at the path of the spec.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Destination {
    /// The store was not read, because the plan does not need its content.
    #[default]
    NotRead,
    /// The content is unknown, because an input is missing or the store did not answer.
    Unknown(Trouble),
    /// The store contains no complete backup of this EtcdBackup since its recorded start.
    Free,
    /// The store contains a complete backup. The operator process that wrote it ended before it reported the backup.
    Complete(Stored),
}

/// Where the backups of the spec are stored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Site {
    /// In a store that this process has opened.
    Store {
        /// The key of the backup in the store, as the spec names it.
        key: String,
    },
    /// On a PersistentVolumeClaim, which only a pod with this volume can read.
    Volume {
        /// The name of the PersistentVolumeClaim.
        claim: String,
        /// The path below the root of the volume.
        path: String,
        /// The image that the backup pod runs.
        image: OperatorImage,
    },
}

/// The etcd cluster to back up.
#[derive(Clone, Debug, PartialEq)]
pub enum Source {
    /// `spec.etcdEndpoints`.
    Endpoints(Vec<Endpoint>),
    /// The EtcdCluster that the spec names.
    Cluster {
        /// The client URLs of its members and of its Service.
        endpoints: Vec<String>,
        /// The pods of the members, or why they are unknown. Only set if endpoints in this namespace need a grant.
        pods: Option<Result<MemberPods, Trouble>>,
        /// The data about the EtcdCluster for the manifest.
        recorded: Box<ManifestCluster>,
        /// True if a restore holds the lock of the EtcdCluster.
        restoring: bool,
    },
}

/// A URL in `spec.etcdEndpoints`.
#[derive(Clone, Debug, PartialEq)]
pub struct Endpoint {
    /// The URL with a complete host name.
    pub url: String,
    /// How the operator may reach the URL.
    pub reach: EndpointReach,
}

/// How an operator may reach an endpoint of a spec.
#[derive(Clone, Debug, PartialEq)]
pub enum EndpointReach {
    /// The operator connects to the URL. The namespace is not restricted, or it has a grant for the URL.
    Direct,
    /// The URL names an EtcdCluster of the namespace, so the operator connects to these pods instead.
    Pods(MemberPods),
    /// The operator must not connect to the URL, for this reason.
    NotGranted(String),
}

/// The members of an EtcdCluster, at the addresses of their pods. Users of a namespace control its DNS names, for
/// example with a Service of type ExternalName. They cannot change the address of a pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemberPods {
    /// The client URLs of the members.
    pub urls: Vec<String>,
    /// The recorded ID of the cluster. Answers of other clusters are ignored, because the address of a deleted pod may
    /// belong to another pod by now.
    pub cluster_id: ClusterId,
}

/// Restricts the members to which a transfer may connect.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EndpointLimits {
    /// The rule for client URLs in etcd's answers.
    pub advertised: EndpointRule,
    /// The ID of the only cluster that may answer; `None` allows every cluster.
    pub cluster_id: Option<ClusterId>,
}

/// The inputs of a transfer or removal.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum Inputs {
    /// The plan does not need the inputs, or the operator could not read them.
    #[default]
    NotRead,
    /// The inputs of a transfer.
    Transfer {
        /// The storage of the backup.
        site: Site,
        /// The key of an object without a manifest that an earlier attempt has left in the store.
        leftover: Option<String>,
        /// The etcd cluster whose snapshot is transferred.
        source: Source,
        /// The rule for endpoints that objects of this namespace may name.
        rule: EndpointRule,
    },
    /// The inputs of a removal.
    Removal {
        /// The storage of the backups.
        site: Site,
        /// The UIDs of the other periodic EtcdBackups with the same path.
        others: BTreeSet<String>,
    },
}

/// The inputs of a verification.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct VerificationInputs {
    /// The state of the pod.
    pub pod: PodState,
    /// True if no other EtcdBackup of the namespace verifies its backup now, or if this EtcdBackup allows concurrent
    /// verifications.
    pub has_turn: bool,
    /// The image of the operators; `None` if the plan does not need the image, or if the image is unknown.
    pub image: Option<OperatorImage>,
    /// The repository of etcd images in the EtcdCluster that the spec names.
    pub repository: Option<String>,
}

/// The input of a plan, in addition to the EtcdBackup.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Snapshot {
    /// The transfer worker of this process.
    pub transfer: WorkState<Stored>,
    /// The removal worker of this process.
    pub removal: WorkState<RemovalResult>,
    /// The content of the store.
    pub destination: Destination,
    /// The inputs of the next transfer or removal.
    pub inputs: Inputs,
    /// The problem that prevents the start of a removal.
    pub obstacle: Option<Trouble>,
    /// The API server's time minus the operator's time; `None` if no removal depends on the time.
    pub clock_difference: Option<SignedDuration>,
    /// The inputs of the verification.
    pub verification: VerificationInputs,
    /// The time at which this process started, if known.
    pub since: Option<Timestamp>,
}
