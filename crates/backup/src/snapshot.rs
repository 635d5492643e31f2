//! The types that `observe` returns. Plain data without clients.

use std::collections::BTreeSet;
use std::time::Duration;

use api::backup::EncryptionKey;
use api::backup::name::Numbered;
use api::manifest::ManifestCluster;
use etcd::ClusterId;
use jiff::{SignedDuration, Timestamp};
use member::OperatorImage;
use runtime::endpoints::EndpointRule;
pub use runtime::members::{EndpointReach, MemberPods};
use serde::{Deserialize, Serialize};
pub use store::progress::Moved;

use crate::reason::Trouble;
use crate::recording::RecordingInputs;
use crate::verification::PodState;

/// A complete backup: the store has acknowledged its object and its manifest.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Stored {
    /// The location, such as `s3://bucket/key`.
    pub location: String,
    /// The etcd version of the member that sent the snapshot.
    pub etcd_version: String,
    /// The cluster ID in hexadecimal, without leading zeros.
    pub cluster_id: String,
    /// The revision of the snapshot, which an etcd serves after it has restored this backup.
    pub revision: i64,
    /// The size of the snapshot in bytes.
    pub size: i64,
    /// The SHA-256 of the snapshot in hexadecimal.
    pub sha256: String,
    /// Number of keys at `revision`; `None` if unknown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub keys: Option<i64>,
    /// The key that encrypts the backup; `None` without encryption.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub encryption_key: Option<EncryptionKey>,
    /// The time at which the snapshot was complete.
    pub created_at: Timestamp,
}

/// A complete backup in the listing of a store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listed {
    /// The location, such as `s3://bucket/key`.
    pub location: String,
    /// The time and the revision in the object name.
    pub parts: Numbered,
}

/// The result of a removal.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RemovalResult {
    /// The kept backups, newest first.
    pub backups: Vec<Listed>,
    /// Number of deleted backups.
    pub deleted: usize,
    /// True if the removal had to delete all backups of the EtcdBackup, and has deleted them.
    pub everything: bool,
}

/// The result of a task that copies backups to another store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Copied {
    /// The copy of the newest backup.
    pub stored: Stored,
    /// Why an older backup could not be copied, or why old copies could not be removed.
    pub problem: Option<Trouble>,
}

/// The state of a worker of this process. A new process starts with `Idle`, because only the status and the store
/// describe earlier work.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Work<T = Stored> {
    /// No worker exists.
    #[default]
    Idle,
    /// The worker waits until other workers have ended.
    Queued,
    /// The worker has a slot, and waits until the status counts the attempt.
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

/// The state of the worker for one EtcdBackup, with its earlier attempts in this process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WorkState<T> {
    /// The current state of the worker.
    pub work: Work<T>,
    /// The earliest time of the next attempt. `None` if the attempt may start now.
    pub not_before: Option<Timestamp>,
    /// The failure of the previous attempt.
    pub last_failure: Option<Trouble>,
    /// The reason why the running worker makes no progress; `None` if it makes progress.
    pub obstacle: Option<Trouble>,
    /// The total time that all attempts have spent in the queue.
    pub queue_time: Duration,
    /// The number of unfinished attempts in the status, including the attempt of this process. `None` if the status
    /// does not count this attempt.
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

    /// The failure of the last attempt, or the reason why the running attempt makes no progress.
    pub fn problem(&self) -> Option<&Trouble> {
        match &self.work {
            Work::Ended(Err(trouble)) => Some(trouble),
            Work::Running(_) => self.obstacle.as_ref(),
            _ => None,
        }
    }
}

/// The result of the search in the store for the backup in progress.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Destination {
    /// The store was not read, because the plan does not need it.
    #[default]
    NotRead,
    /// Unknown, because an input is missing or the store did not answer.
    Unknown(Trouble),
    /// The store contains no complete backup of this EtcdBackup from after the recorded start.
    Free,
    /// The store contains the complete backup, but the operator process that wrote it ended before it reported the
    /// backup.
    Complete(Stored),
}

/// The storage of the backups.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Site {
    /// A store that this process has opened.
    Store {
        /// The path in the spec, without the bucket.
        key: String,
    },
    /// A PersistentVolumeClaim, which only a pod that mounts it can read.
    Volume {
        /// The name of the PersistentVolumeClaim.
        claim: String,
        /// The path in the spec, relative to the root of the volume.
        path: String,
        /// The image of the backup pod.
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
        /// The pods of the members, or the reason why they are unknown. `None` if the operator may connect to every
        /// endpoint.
        pods: Option<Result<MemberPods, Trouble>>,
        /// The EtcdCluster, as the manifest records it.
        recorded: Box<ManifestCluster>,
        /// True if a restore holds the restore lock of the EtcdCluster.
        restoring: bool,
    },
}

/// A URL in `spec.etcdEndpoints`.
#[derive(Clone, Debug, PartialEq)]
pub struct Endpoint {
    /// The URL with a complete host name.
    pub url: String,
    /// The permission to connect to the URL.
    pub reach: EndpointReach,
}

/// The members to which a transfer may connect (invariant 28).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EndpointLimits {
    /// The rule for client URLs in the member list from etcd.
    pub advertised: EndpointRule,
    /// The ID of the only cluster that may answer. `None` allows every cluster.
    pub cluster_id: Option<ClusterId>,
}

/// The inputs of a transfer or removal.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum Inputs {
    /// The plan needs no inputs, or `observe` could not read them.
    #[default]
    NotRead,
    /// The inputs of a transfer.
    Transfer {
        /// The storage of the backup.
        site: Site,
        /// The key of an object without a manifest that an earlier attempt has written.
        leftover: Option<String>,
        /// The etcd cluster whose snapshot is transferred.
        source: Source,
        /// The rule for endpoints in objects of this namespace.
        rule: EndpointRule,
    },
    /// The inputs of a removal.
    Removal {
        /// The storage of the backups.
        site: Site,
        /// The UIDs of all other periodic EtcdBackups with the same path.
        others: BTreeSet<String>,
    },
}

/// The inputs of a verification.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct VerificationInputs {
    /// The state of the pod.
    pub pod: PodState,
    /// True if the verification may start now: no other EtcdBackup of the namespace is being verified, or this
    /// EtcdBackup allows concurrent verifications.
    pub has_turn: bool,
    /// The image of the operators. `None` if it is unknown or not needed.
    pub image: Option<OperatorImage>,
    /// `spec.image` of the EtcdCluster, if the backup has the version of this image.
    pub etcd_image: Option<String>,
    /// The repository of etcd images in the spec of the EtcdCluster.
    pub repository: Option<String>,
}

/// The data that the retention rules of a copy need.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct CopyRetention {
    /// The UIDs of all other periodic EtcdBackups that write to the path of the copy.
    pub others: BTreeSet<String>,
    /// The API server's time minus the operator's time.
    pub clock_difference: SignedDuration,
}

/// The input of the plan for one copy.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct CopyInputs {
    /// The worker of this process that copies backups.
    pub work: WorkState<Copied>,
    /// The worker of this process that removes the copies of an EtcdBackup that is being deleted.
    pub removal: WorkState<RemovalResult>,
    /// The result of opening the store of the backups and the store of the copy. `None` if the plan does not need the
    /// stores.
    pub opened: Option<Result<(), Trouble>>,
    /// The data that the retention rules need, or why this data is unknown. `None` if the copy has no retention rules.
    pub retention: Option<Result<CopyRetention, Trouble>>,
}

/// The input of a plan, in addition to the EtcdBackup.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Snapshot {
    /// The transfer worker of this process.
    pub transfer: WorkState<Stored>,
    /// The removal worker of this process.
    pub removal: WorkState<RemovalResult>,
    /// The result of the search in the store for the backup in progress.
    pub destination: Destination,
    /// The inputs of the next transfer or removal.
    pub inputs: Inputs,
    /// The problem that prevents the start of a removal.
    pub obstacle: Option<Trouble>,
    /// The API server's time minus the operator's time. `None` if it was not read.
    pub clock_difference: Option<SignedDuration>,
    /// The inputs of the verification.
    pub verification: VerificationInputs,
    /// The inputs of the copies, one for each entry of `spec.copyTo`.
    pub copies: Vec<CopyInputs>,
    /// The inputs of the agent.
    pub recording: RecordingInputs,
    /// The time at which this process started, if known.
    pub since: Option<Timestamp>,
}
