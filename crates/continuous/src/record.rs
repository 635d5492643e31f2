//! The decoded records of a segment. Performs no I/O.

use etcd::{Change, KeyHash};

/// All changes of one revision, in the order of etcd's sub-revisions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Transaction {
    /// The main revision of all changes.
    pub revision: i64,
    /// The time at which the recorder received the transaction, in microseconds since the epoch.
    pub observed: i64,
    /// The changes. Never empty.
    pub changes: Vec<Change>,
}

/// A lease to which keys are attached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lease {
    /// The ID of the lease.
    pub id: i64,
    /// The granted TTL in seconds. `None` if the lease had already ended when the recorder read its TTL.
    pub ttl: Option<i64>,
    /// The revision of etcd when the recorder read the TTL.
    pub seen: i64,
}

/// The end of a lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LeaseEnd {
    /// The ID of the lease.
    pub id: i64,
    /// At this revision, the lease no longer existed.
    pub seen: i64,
}

/// etcd's hash of all keys at a revision.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hash {
    /// The revision that the hash covers.
    pub revision: i64,
    /// The hash, and the compaction revision that etcd had at the time of the request.
    pub hash: KeyHash,
    /// The time of the request, in microseconds since the epoch.
    pub observed: i64,
}

/// Why a chain has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GapReason {
    /// A reason of a later version, which this version does not know.
    Unknown,
    /// etcd compacted revisions that the recorder had not received.
    Compacted,
    /// The endpoint now belongs to a cluster with another ID.
    ClusterChanged,
    /// etcd did not send the next revision.
    RevisionMissing,
    /// One transaction exceeds [`MAX_TRANSACTION`](crate::MAX_TRANSACTION).
    TransactionTooLarge,
    /// etcd has a lower revision than the chain, although the cluster ID is the same: its data was restored.
    RevisionReset,
}

/// A revision, and the time at which the recorder received it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Moment {
    /// The revision.
    pub revision: i64,
    /// The time in microseconds since the epoch.
    pub time: i64,
}

/// The end of a chain, after which changes are missing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gap {
    /// The last revision that the chain contains.
    pub after: i64,
    /// The cause.
    pub reason: GapReason,
    /// The time at which the recorder detected the gap, in microseconds since the epoch.
    pub observed: i64,
}

/// One record of a segment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Record {
    /// The changes of one revision.
    Transaction(Transaction),
    /// A lease, which precedes the first key that is attached to it.
    Lease(Lease),
    /// The end of a lease.
    LeaseEnd(LeaseEnd),
    /// A hash of all keys.
    Hash(Hash),
    /// The end of the chain.
    Gap(Gap),
}

/// A record without the changes of a transaction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outline {
    /// A transaction.
    Transaction(Moment),
    /// The end of the chain.
    Gap(Gap),
    /// A lease, the end of a lease, or a hash.
    Other,
}

impl From<&Record> for Outline {
    fn from(record: &Record) -> Self {
        match record {
            Record::Transaction(it) => Self::Transaction(Moment {
                revision: it.revision,
                time: it.observed,
            }),
            Record::Gap(gap) => Self::Gap(*gap),
            Record::Lease(_) | Record::LeaseEnd(_) | Record::Hash(_) => Self::Other,
        }
    }
}
