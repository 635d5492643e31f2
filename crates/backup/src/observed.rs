//! What is known before a decision: plain data, no client.

use api::conditions::Reason;
use jiff::Timestamp;

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
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stored {
    /// Where it lies: `s3://bucket/key`.
    pub location: String,
    /// The etcd version of the member it came from.
    pub etcd_version: String,
    /// 16 hexadecimal digits.
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

/// How far a transfer is, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Moved {
    /// Done.
    pub bytes: u64,
    /// In all, as far as the member's database size says so.
    pub total: Option<u64>,
}

/// What this process itself is doing for the object. Memory only: an operator that starts again finds `Idle`, and
/// what it did before in the status and in the store.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Work {
    /// Nothing.
    #[default]
    Idle,
    /// A transfer waits for its turn.
    Queued,
    /// A transfer runs.
    Running(Moved),
    /// The last transfer ended, and how.
    Ended(Result<Stored, Trouble>),
}

/// What lies at the place the spec names.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Place {
    /// Nobody asked: it is not needed now.
    #[default]
    NotAsked,
    /// A Secret or the cluster is missing, or the store did not answer: unknown.
    Unknown(Trouble),
    /// Nothing that was written for this EtcdBackup since it began.
    Free,
    /// The whole backup of this EtcdBackup: an operator that stopped before it said so has written it.
    Written(Stored),
}

/// Everything a plan is made from, besides the EtcdBackup itself.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Observed {
    /// What this process does.
    pub work: Work,
    /// Not before this time the next attempt is made.
    pub not_before: Option<Timestamp>,
    /// What the store holds.
    pub place: Place,
}
