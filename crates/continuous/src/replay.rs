//! Applies the transactions of a chain to the target: an etcd that was restored from the base. Each revision is one
//! etcd transaction. Several transactions are in flight at a time (`replay/window.rs`).
//!
//! etcd must listen only on localhost, so that only the replay writes to it. The replay fails if another write has
//! increased the revision.

mod leases;
mod operations;
mod pipeline;
mod target;
mod window;

use etcd::KeyHash;

use self::pipeline::{Failure, Pipeline};
pub use self::target::Target;
use self::window::Drift;
use crate::chain::RangeError;
use crate::record::{Gap, Hash, Lease, LeaseEnd, Record, Transaction};
use crate::stored::{ReadError, Reader};

/// Where a replay ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Until {
    /// The replay ends at this revision.
    Revision(i64),
    /// The replay ends at the last transaction that the recorder received at this time or before, in microseconds since
    /// the epoch.
    Time(i64),
    /// The replay ends at the end of the chain.
    Latest,
}

/// Options of a replay.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Where the replay ends.
    pub until: Until,
    /// etcd's hash depends on the compaction revision. If true, the replay compacts the target at the compaction
    /// revision of a recorded hash before it compares the hashes. If false, hashes after a compaction are not compared.
    pub follow_compactions: bool,
}

/// The result of a replay.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// The revision of the target.
    pub revision: i64,
    /// Number of applied transactions.
    pub transactions: u64,
    /// Number of transactions that were sent again, because they had overtaken their predecessors.
    pub repeated: u64,
    /// Number of recorded hashes that match the target's hash.
    pub hashes_compared: u64,
    /// Number of recorded hashes that were not compared, because the target has another compaction revision.
    pub hashes_skipped: u64,
    /// Number of recorded ends of leases that were skipped, because the lease still has keys.
    pub leases_kept: u64,
}

/// Why a replay failed. The caller must then discard the target.
#[derive(Debug, thiserror::Error)]
pub enum ReplayError {
    /// The chain cannot be read.
    #[error("the chain cannot be read after revision {after}")]
    Read {
        /// The last revision that was read.
        after: i64,
        /// The error.
        #[source]
        error: ReadError,
    },
    /// The chain does not contain the requested revision.
    #[error(transparent)]
    Range(#[from] RangeError),
    /// The base was written after the requested time.
    #[error("the base was written after the requested time: use an earlier base")]
    BeforeBase,
    /// The chain ends with a gap before the requested revision.
    #[error("the chain has a gap after revision {}: {:?}", .0.after, .0.reason)]
    Gap(Gap),
    /// A call to the target failed.
    #[error("the target fails at revision {revision}")]
    Target {
        /// The revision at which the call failed.
        revision: i64,
        /// The error of etcd.
        #[source]
        error: etcd_client::Error,
    },
    /// The target does not have the revision of the base.
    #[error(
        "the target has revision {found}, and the base has revision {expected}: restore the base again"
    )]
    WrongStart {
        /// The revision of the base.
        expected: i64,
        /// The revision of the target.
        found: i64,
    },
    /// The target applied a transaction at another revision than the recorded one.
    #[error("the target has revision {found} after the transaction of revision {expected}")]
    Drifted {
        /// The recorded revision.
        expected: i64,
        /// The revision in the target's answer.
        found: i64,
    },
    /// The target's hash differs from the recorded hash.
    #[error(
        "the hash of all keys at revision {revision} is {found:?}, but {expected:?} is recorded"
    )]
    HashDiffers {
        /// The revision of the hash.
        revision: i64,
        /// The recorded hash.
        expected: KeyHash,
        /// The hash of the target.
        found: KeyHash,
    },
    /// A lease has ended during the replay.
    #[error("lease {id:x} has ended during the replay, at revision {revision} or before")]
    LeaseLost {
        /// The ID of the lease.
        id: i64,
        /// The current revision.
        revision: i64,
    },
}

impl From<Failure> for ReplayError {
    fn from(failure: Failure) -> Self {
        match failure {
            Failure::Target { revision, error } => Self::Target { revision, error },
            Failure::Drift(Drift { expected, found }) => Self::Drifted { expected, found },
            Failure::LeaseLost { id, revision } => Self::LeaseLost { id, revision },
        }
    }
}

/// A replay in progress.
struct Replay<'a> {
    target: &'a Target,
    pipeline: Pipeline<'a>,
    options: Options,
    report: Report,
    /// The compaction revision of the target.
    compacted: i64,
    /// Leases of the next transaction, which are not granted yet.
    grants: Vec<Lease>,
    /// Recorded hashes and ends of leases whose revision the target has not reached.
    waiting: Vec<Record>,
}

/// Applies the chain to the target. The target must have the revision of the base.
///
/// # Errors
/// Fails if the chain or the target fails, or if the target would differ from the recorded cluster.
pub async fn replay(
    reader: &mut Reader<'_>,
    target: &Target,
    options: Options,
) -> Result<Report, ReplayError> {
    let base = reader.base().clone();
    match options.until {
        Until::Revision(requested) => reader.chain().check(base.name, requested)?,
        Until::Time(time) if time < base.base.created => return Err(ReplayError::BeforeBase),
        Until::Time(_) | Until::Latest => {}
    }
    let start = base.base.revision;
    let found = target.revision().await.map_err(at(start))?;
    if found != start {
        return Err(ReplayError::WrongStart {
            expected: start,
            found,
        });
    }
    target.adopt_leases().await.map_err(at(start))?;
    let compacted = target.hash(start).await.map_err(at(start))?.compacted;
    let mut replay = Replay {
        target,
        pipeline: Pipeline::new(target, start),
        options,
        report: Report {
            revision: start,
            ..Report::default()
        },
        compacted,
        grants: Vec::new(),
        waiting: Vec::new(),
    };
    loop {
        let after = reader.last();
        let segment = reader.next().await;
        let segment = segment.map_err(|error| ReplayError::Read { after, error })?;
        let Some(segment) = segment else { break };
        for record in segment.records {
            if replay.is_done(&record) {
                return replay.finish().await;
            }
            replay.apply(record).await?;
        }
    }
    replay.drain().await?;
    if let Until::Revision(requested) = options.until
        && replay.report.revision != requested
    {
        reader.chain().check(base.name, requested)?;
    }
    replay.finish().await
}

/// Returns a function that converts an error of the target into an error at this revision.
fn at(revision: i64) -> impl Fn(etcd_client::Error) -> ReplayError {
    move |error| ReplayError::Target { revision, error }
}

impl Replay<'_> {
    /// Whether the replay must end before this record.
    fn is_done(&self, record: &Record) -> bool {
        let Record::Transaction(transaction) = record else {
            return false;
        };
        match self.options.until {
            Until::Revision(revision) => transaction.revision > revision,
            Until::Time(time) => transaction.observed > time,
            Until::Latest => false,
        }
    }

    async fn apply(&mut self, record: Record) -> Result<(), ReplayError> {
        match record {
            Record::Transaction(transaction) => self.transaction(transaction).await,
            Record::Lease(lease) => {
                self.grants.push(lease);
                Ok(())
            }
            Record::LeaseEnd(LeaseEnd { seen, .. }) | Record::Hash(Hash { revision: seen, .. })
                if seen > self.pipeline.sent() =>
            {
                self.waiting.push(record);
                Ok(())
            }
            Record::LeaseEnd(end) => {
                self.drain().await?;
                self.lease_end(end).await
            }
            Record::Hash(hash) => {
                self.drain().await?;
                self.compare(hash).await
            }
            Record::Gap(gap) => match self.options.until {
                // With `Until::Latest`, the replay ends without an error at the last change before the gap.
                Until::Latest => Ok(()),
                Until::Revision(revision) if revision <= gap.after => Ok(()),
                Until::Time(time) if time < gap.observed => Ok(()),
                _ => Err(ReplayError::Gap(gap)),
            },
        }
    }

    /// Processes the waiting records whose revision was sent: compares hashes and revokes leases. Waits first until
    /// etcd has applied all transactions, so that etcd has exactly the revision of the last transaction.
    async fn release(&mut self) -> Result<(), ReplayError> {
        let revision = self.pipeline.sent();
        let is_due = |record: &Record| match record {
            Record::LeaseEnd(end) => end.seen <= revision,
            Record::Hash(hash) => hash.revision <= revision,
            _ => false,
        };
        if !self.waiting.iter().any(is_due) {
            return Ok(());
        }
        self.drain().await?;
        let (due, waiting): (Vec<_>, Vec<_>) = std::mem::take(&mut self.waiting)
            .into_iter()
            .partition(is_due);
        self.waiting = waiting;
        for record in due {
            match record {
                Record::LeaseEnd(end) => self.lease_end(end).await?,
                Record::Hash(hash) => self.compare(hash).await?,
                _ => {}
            }
        }
        Ok(())
    }

    async fn transaction(&mut self, transaction: Transaction) -> Result<(), ReplayError> {
        if !self.grants.is_empty() {
            // `grant` checks whether an existing lease with the same ID has keys. Transactions in flight could change
            // its keys.
            self.drain().await?;
            for lease in std::mem::take(&mut self.grants) {
                let granted = self.target.grant(lease).await;
                granted.map_err(at(transaction.revision))?;
            }
        }
        self.pipeline.send(transaction).await?;
        self.report.transactions += 1;
        self.release().await
    }

    /// Waits until etcd has applied all transactions that were sent.
    async fn drain(&mut self) -> Result<(), ReplayError> {
        self.pipeline.drain().await?;
        self.report.revision = self.pipeline.sent();
        self.report.repeated = self.pipeline.repeated();
        Ok(())
    }

    fn lost_lease(&self, revision: i64) -> Option<ReplayError> {
        let id = self.target.lost_lease()?;
        Some(ReplayError::LeaseLost { id, revision })
    }

    async fn lease_end(&mut self, end: LeaseEnd) -> Result<(), ReplayError> {
        let revision = self.report.revision;
        let is_free = self.target.revoke(end.id).await.map_err(at(revision))?;
        if !is_free {
            // The lease has keys, because its ID was granted again after the recorded end. The lease is kept, and
            // counted.
            self.report.leases_kept += 1;
        }
        Ok(())
    }

    async fn compare(&mut self, recorded: Hash) -> Result<(), ReplayError> {
        let (revision, expected) = (recorded.revision, recorded.hash);
        let is_later = expected.compacted > self.compacted;
        if is_later && self.options.follow_compactions && expected.compacted <= revision {
            let compacted = self.target.compact(expected.compacted).await;
            compacted.map_err(at(revision))?;
            self.compacted = expected.compacted;
        }
        if expected.compacted != self.compacted || revision < self.compacted {
            self.report.hashes_skipped += 1;
            return Ok(());
        }
        let found = self.target.hash(revision).await.map_err(at(revision))?;
        if found != expected {
            return Err(ReplayError::HashDiffers {
                revision,
                expected,
                found,
            });
        }
        self.report.hashes_compared += 1;
        Ok(())
    }

    /// Waits for all transactions, and checks that the target has exactly the revision of the last transaction.
    async fn finish(mut self) -> Result<Report, ReplayError> {
        self.drain().await?;
        let expected = self.report.revision;
        let found = self.target.revision().await.map_err(at(expected))?;
        if let Some(error) = self.lost_lease(expected) {
            return Err(error);
        }
        if found != expected {
            return Err(ReplayError::Drifted { expected, found });
        }
        Ok(self.report)
    }
}
