//! Writes transactions into the segments of a chain. A segment is complete after a time or a number of bytes, and at
//! most one incomplete segment is in memory. Performs no I/O.

use std::collections::BTreeSet;
use std::io;
use std::ops::Bound;
use std::time::{Duration, Instant};

use crate::base::StoredBase;
use crate::digest::Digest;
use crate::record::{Gap, GapReason, Record, Transaction};
use crate::segment::{
    FRAME, Identity, MAX_BODY, MAX_MESSAGE, Sealed, Segment, SegmentBuilder, encoded,
};

/// The limits at which a segment is complete.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Maximum time between the first record and the completion of a segment.
    pub interval: Duration,
    /// Maximum length in bytes of a body before compression. A larger record gets its own segment.
    pub bytes: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            interval: Duration::from_secs(1),
            bytes: 8 << 20,
        }
    }
}

/// Why a record cannot be added.
#[derive(Debug, thiserror::Error)]
pub enum RecorderError {
    /// The transaction does not have the next revision.
    #[error("revision {found} cannot be recorded, because revision {expected} must follow")]
    OutOfOrder {
        /// The revision that must follow.
        expected: i64,
        /// The revision of the transaction.
        found: i64,
    },
    /// The chain has ended with a gap.
    #[error("the chain ends with a gap after revision {after}: start a new base")]
    Ended {
        /// The last revision of the chain.
        after: i64,
    },
    /// The segment belongs to the chain of another base.
    #[error("the last segment does not belong to this base")]
    OtherChain,
    /// The record exceeds the limit of the format.
    #[error("a record has {size} bytes, but at most {MAX_MESSAGE} are allowed")]
    TooLarge {
        /// Number of bytes.
        size: usize,
    },
    /// The compression failed.
    #[error("a segment cannot be compressed")]
    Compression(#[from] io::Error),
}

/// Records one chain.
pub struct Recorder {
    limits: Limits,
    cluster_id: u64,
    base_revision: i64,
    /// The last recorded revision.
    last: i64,
    /// The SHA-256 of the last complete segment, or of the base before the first segment.
    previous: Digest,
    /// The time of the latest record. A later record with an earlier time gets this time.
    time: i64,
    /// The IDs of the leases that are recorded and have not ended.
    leases: BTreeSet<i64>,
    has_ended: bool,
    open: Option<(SegmentBuilder, Instant)>,
}

impl Recorder {
    /// Begins the chain of a base.
    pub fn new(base: &StoredBase, limits: Limits) -> Self {
        Self {
            limits,
            cluster_id: base.base.cluster_id.0,
            base_revision: base.base.revision,
            last: base.base.revision,
            previous: base.digest,
            time: base.base.created,
            leases: BTreeSet::new(),
            has_ended: false,
            open: None,
        }
    }

    /// Continues a chain after its last stored segment.
    ///
    /// # Errors
    /// Fails if the segment belongs to another base, or if it ends with a gap.
    pub fn resume(base: &StoredBase, tip: &Segment, limits: Limits) -> Result<Self, RecorderError> {
        let header = &tip.header;
        if (header.cluster_id, header.base_revision) != (base.base.cluster_id.0, base.base.revision)
        {
            return Err(RecorderError::OtherChain);
        }
        if matches!(tip.records.last(), Some(Record::Gap(_))) {
            return Err(RecorderError::Ended { after: header.last });
        }
        let times = tip.records.iter().filter_map(|record| match record {
            Record::Transaction(it) => Some(it.observed),
            Record::Hash(it) => Some(it.observed),
            _ => None,
        });
        let new = Self::new(base, limits);
        Ok(Self {
            last: header.last,
            previous: tip.digest,
            time: times.fold(new.time, i64::max),
            ..new
        })
    }

    /// The last recorded revision.
    pub fn last(&self) -> i64 {
        self.last
    }

    /// The latest time of a record, in microseconds since the epoch.
    pub fn time(&self) -> i64 {
        self.time
    }

    /// The IDs of the leases that the transaction names, and that this recorder has not recorded. The records of these
    /// leases must precede the transaction.
    pub fn unknown_leases(&self, transaction: &Transaction) -> BTreeSet<i64> {
        let values = transaction
            .changes
            .iter()
            .filter_map(|it| it.value.as_ref());
        values
            .map(|value| value.lease)
            .filter(|lease| *lease != 0 && !self.leases.contains(lease))
            .collect()
    }

    /// At most `count` IDs of recorded leases that have not ended. The IDs are greater than `id`, in ascending order.
    pub fn leases_after(&self, id: i64, count: usize) -> Vec<i64> {
        let after = (Bound::Excluded(id), Bound::Unbounded);
        self.leases.range(after).take(count).copied().collect()
    }

    /// Adds a record. If the record does not fit into the incomplete segment, completes and returns this segment, and
    /// adds the record to a new segment.
    ///
    /// # Errors
    /// Fails if the record breaks a rule of the format. The recorder then stays unchanged. After
    /// [`RecorderError::Compression`], the recorder must not be used.
    pub fn push(
        &mut self,
        mut record: Record,
        now: Instant,
    ) -> Result<Option<Sealed>, RecorderError> {
        if self.has_ended {
            return Err(RecorderError::Ended { after: self.last });
        }
        let revision = match &mut record {
            Record::Transaction(it) => {
                if it.revision != self.last + 1 {
                    return Err(RecorderError::OutOfOrder {
                        expected: self.last + 1,
                        found: it.revision,
                    });
                }
                it.observed = it.observed.max(self.time);
                Some(it.revision)
            }
            Record::Hash(it) => {
                it.observed = it.observed.max(self.time);
                None
            }
            Record::Gap(it) => {
                (it.after, it.observed) = (self.last, it.observed.max(self.time));
                None
            }
            Record::Lease(_) | Record::LeaseEnd(_) => None,
        };
        let message = encoded(&record);
        if message.len() > MAX_MESSAGE {
            return Err(RecorderError::TooLarge {
                size: message.len(),
            });
        }
        let length = (FRAME + message.len()) as u64;
        let limit = self.limits.bytes.min(MAX_BODY as u64);
        let is_full = self
            .open
            .as_ref()
            .is_some_and(|(open, _)| !open.has_room(length, limit));
        let sealed = if is_full { self.seal()? } else { None };
        if self.open.is_none() {
            let identity = Identity {
                cluster_id: self.cluster_id,
                base_revision: self.base_revision,
                first: self.last + 1,
                previous: self.previous,
            };
            self.open = Some((SegmentBuilder::new(identity)?, now));
        }
        if let Some((open, _)) = &mut self.open {
            open.push(&message, revision)?;
        }
        self.note(&record);
        Ok(sealed)
    }

    /// Updates the recorder after a record was added.
    fn note(&mut self, record: &Record) {
        match record {
            Record::Transaction(it) => (self.last, self.time) = (it.revision, it.observed),
            Record::Hash(it) => self.time = it.observed,
            Record::Lease(it) => {
                self.leases.insert(it.id);
            }
            Record::LeaseEnd(it) => {
                self.leases.remove(&it.id);
            }
            Record::Gap(_) => self.has_ended = true,
        }
    }

    /// Ends the chain with a gap after the last recorded revision. Returns up to two complete segments.
    ///
    /// # Errors
    /// Fails if the chain has already ended.
    pub fn end(
        &mut self,
        reason: GapReason,
        observed: i64,
        now: Instant,
    ) -> Result<Vec<Sealed>, RecorderError> {
        let gap = Record::Gap(Gap {
            after: self.last,
            reason,
            observed,
        });
        let before = self.push(gap, now)?;
        Ok(before.into_iter().chain(self.seal()?).collect())
    }

    /// The time at which the incomplete segment must be completed. `None` if there is no incomplete segment.
    pub fn deadline(&self) -> Option<Instant> {
        let (_, since) = self.open.as_ref()?;
        Some(*since + self.limits.interval)
    }

    /// Completes the incomplete segment. `None` if there is no incomplete segment. The caller must store the segments
    /// in order.
    ///
    /// # Errors
    /// Fails if the compression fails.
    pub fn seal(&mut self) -> Result<Option<Sealed>, RecorderError> {
        let Some((open, _)) = self.open.take() else {
            return Ok(None);
        };
        let sealed = open.seal()?;
        self.previous = sealed.digest;
        Ok(Some(sealed))
    }
}

#[cfg(test)]
mod tests;
