//! The types that observe returns: plain data, no client.

use std::collections::BTreeSet;
use std::time::Duration;

use api::backup::name::Numbered;
use api::manifest::ManifestCluster;
use jiff::Timestamp;
use member::OperatorImage;
use serde::{Deserialize, Serialize};
pub use store::progress::Moved;

use crate::reason::Trouble;

/// A backup that the store has acknowledged, manifest included.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Stored {
    /// Where it lies: `s3://bucket/key`.
    pub location: String,
    /// The etcd version of the member it came from.
    pub etcd_version: String,
    /// In hexadecimal, without leading zeros.
    pub cluster_id: String,
    /// The revision an etcd that is started from it serves.
    pub revision: i64,
    /// Bytes.
    pub size: i64,
    /// Of all bytes, in hexadecimal.
    pub sha256: String,
    /// When the snapshot was complete.
    pub created_at: Timestamp,
}

/// A backup as its name tells it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listed {
    /// Where it lies.
    pub location: String,
    /// What the name says.
    pub parts: Numbered,
}

/// What was found when the kept backups were looked through.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Kept {
    /// What is there, newest first.
    pub backups: Vec<Listed>,
    /// How many were deleted.
    pub deleted: usize,
    /// Whether all that the EtcdBackup has stored was to go, and went.
    pub everything: bool,
}

/// What this process itself is doing for the object. Memory only: an operator that starts again finds `Idle`, and
/// what it did before in the status and in the store.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Work<T = Stored> {
    /// Nothing.
    #[default]
    Idle,
    /// It waits for its turn.
    Queued,
    /// It is its turn: it runs when the status counts the attempt.
    Called,
    /// It runs.
    Running(Moved),
    /// It ended, and how.
    Ended(Result<T, Trouble>),
}

impl<T> Work<T> {
    /// Whether it waits for its turn or runs.
    pub fn is_active(&self) -> bool {
        matches!(self, Self::Queued | Self::Called | Self::Running(_))
    }
}

/// What this process does, and from when on it may be tried again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pace<T> {
    /// What it does.
    pub work: Work<T>,
    /// Not before this time the next attempt is made.
    pub not_before: Option<Timestamp>,
    /// Why the attempt before this one failed.
    pub before: Option<Trouble>,
    /// How long its attempts have waited for their turn behind others.
    pub waited: Duration,
    /// What the status counted, the attempt of this process included, if that was counted.
    pub counted: Option<i32>,
}

impl<T> Default for Pace<T> {
    fn default() -> Self {
        Self {
            work: Work::Idle,
            not_before: None,
            before: None,
            waited: Duration::ZERO,
            counted: None,
        }
    }
}

impl<T> Pace<T> {
    /// Whether another attempt may begin.
    pub fn may_begin(&self, now: Timestamp) -> bool {
        !self.work.is_active() && self.not_before.is_none_or(|time| time <= now)
    }
}

/// What lies at the place the spec names.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Place {
    /// Nobody asked: it is not needed now.
    #[default]
    NotAsked,
    /// A Secret or the cluster is missing, or the store did not answer: unknown.
    Unknown(Trouble),
    /// Nothing whole that was written for this EtcdBackup since it began.
    Free,
    /// The whole backup of this EtcdBackup: an operator that stopped before it said so has written it.
    Written(Stored),
}

/// Where the backups of the spec lie.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Site {
    /// In a store that this process has opened.
    Store {
        /// The key that the spec names.
        key: String,
    },
    /// On a PersistentVolumeClaim, which only a pod that mounts it can read.
    Volume {
        /// The name of the PersistentVolumeClaim.
        claim: String,
        /// The path below the root of the volume.
        path: String,
        /// The image of the pod.
        image: OperatorImage,
    },
}

/// The etcd cluster that is backed up.
#[derive(Clone, Debug, PartialEq)]
pub enum Source {
    /// The endpoints of the spec.
    Endpoints(Vec<String>),
    /// An EtcdCluster.
    Cluster {
        /// The client URLs of its members and of its Service.
        endpoints: Vec<String>,
        /// What the manifest records of it.
        recorded: Box<ManifestCluster>,
        /// A restore owns it.
        restoring: bool,
    },
}

/// What the plan builds a transfer or a removal from.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum Inputs {
    /// Not needed now, or not readable.
    #[default]
    NotRead,
    /// Of a transfer.
    Transfer {
        /// Where the backup is stored.
        site: Site,
        /// The key that an earlier attempt left in the store without a manifest.
        left: Option<String>,
        /// The etcd cluster.
        source: Source,
    },
    /// Of a removal.
    Removal {
        /// Where the backups are stored.
        site: Site,
        /// The UIDs of the other EtcdBackups that number their backups at the same path.
        others: BTreeSet<String>,
    },
}

/// Everything a plan is made from, besides the EtcdBackup itself.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Snapshot {
    /// The transfer.
    pub transfer: Pace<Stored>,
    /// The removal of what is not kept.
    pub removal: Pace<Kept>,
    /// What the store holds.
    pub place: Place,
    /// What the next transfer or removal is built from.
    pub inputs: Inputs,
    /// Why what was to be removed cannot even be read.
    pub obstacle: Option<Trouble>,
    /// Since when this process has run, if that is known.
    pub since: Option<Timestamp>,
}
