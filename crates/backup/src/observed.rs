//! What is known before a decision: plain data, no client.

use std::time::Duration;

use api::backup::name::Numbered;
use api::conditions::Reason;
use jiff::Timestamp;
pub use runtime::progress::Moved;
use serde::{Deserialize, Serialize};

/// Something that stands in the way, for people and for the condition.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Trouble {
    /// The condition's reason.
    pub reason: Reason,
    /// What, and where a person can do something, how.
    pub message: String,
}

impl Trouble {
    /// A trouble.
    pub fn new(reason: Reason, message: impl Into<String>) -> Self {
        Self {
            reason,
            message: message.into(),
        }
    }
}

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

/// Everything a plan is made from, besides the EtcdBackup itself.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Observed {
    /// The transfer.
    pub transfer: Pace<Stored>,
    /// The removal of what is not kept.
    pub removal: Pace<Kept>,
    /// What the store holds.
    pub place: Place,
    /// Why what was to be removed cannot even be looked at.
    pub obstacle: Option<Trouble>,
    /// From when on this process has looked after backups, if that is known.
    pub since: Option<Timestamp>,
}
