//! Assembles the events of a watch into complete transactions, in order and without a missing revision. Performs no
//! I/O.

use std::mem::take;

use etcd::{Change, ClusterId, WatchBatch};

use crate::message::MAX_CHANGES;
use crate::record::{GapReason, Transaction};

/// Maximum size of a transaction in bytes. With etcd's default limits, only a deletion of many keys can exceed it.
pub const MAX_TRANSACTION: usize = 32 << 20;

/// Estimated memory of a change in bytes, in addition to its key and value.
const OVERHEAD: usize = 128;

/// The result of adding one batch.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Assembled {
    /// The transactions that are complete.
    pub transactions: Vec<Transaction>,
    /// Why the chain cannot continue after these transactions. `None` if it can continue.
    pub gap: Option<GapReason>,
}

/// Assembles the batches of one watch.
#[derive(Debug)]
pub struct Assembler {
    cluster_id: ClusterId,
    /// The last complete revision.
    last: i64,
    /// The changes of the revision `last + 1` that have arrived. `size` is their size in bytes.
    open: Vec<Change>,
    size: usize,
}

impl Assembler {
    /// Continues after the revision `last` of a cluster.
    pub fn new(cluster_id: ClusterId, last: i64) -> Self {
        Self {
            cluster_id,
            last,
            open: Vec::new(),
            size: 0,
        }
    }

    /// The last complete revision. The watch must start with this revision, although [`Self::push`] skips its events.
    ///
    /// Reason: etcd before 3.4.34 and 3.5.16 can lose deletions in the revision at which it was compacted. A watch that
    /// starts at the next revision could miss them. A watch that starts at the last complete revision fails after such
    /// a compaction.
    pub fn last(&self) -> i64 {
        self.last
    }

    /// Adds a batch. `observed` is the current time in microseconds since the epoch.
    pub fn push(&mut self, batch: WatchBatch, observed: i64) -> Assembled {
        let mut result = Assembled::default();
        if batch.cluster_id != self.cluster_id {
            result.gap = Some(GapReason::ClusterChanged);
            return result;
        }
        for event in batch.events {
            if event.revision <= self.last {
                continue;
            }
            if event.revision > self.last + 1 {
                result.transactions.extend(self.complete(observed));
            }
            if event.revision != self.last + 1 {
                result.gap = Some(GapReason::RevisionMissing);
                return result;
            }
            let content = event.change.value.as_ref();
            let content = content.map_or(0, |value| value.content.len());
            self.size += OVERHEAD + event.change.key.len() + content;
            if self.size > MAX_TRANSACTION || self.open.len() >= MAX_CHANGES {
                result.gap = Some(GapReason::TransactionTooLarge);
                return result;
            }
            self.open.push(event.change);
        }
        if !batch.is_fragment {
            result.transactions.extend(self.complete(observed));
        }
        result
    }

    fn complete(&mut self, observed: i64) -> Option<Transaction> {
        if self.open.is_empty() {
            return None;
        }
        self.last += 1;
        self.size = 0;
        Some(Transaction {
            revision: self.last,
            observed,
            changes: take(&mut self.open),
        })
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use etcd::{Value, WatchEvent};

    use super::*;

    const CLUSTER: ClusterId = ClusterId(7);

    fn event(revision: i64, key: &'static str) -> WatchEvent {
        WatchEvent {
            revision,
            change: Change {
                key: Bytes::from_static(key.as_bytes()),
                value: Some(Value::default()),
            },
        }
    }

    fn batch(events: &[(i64, &'static str)], is_fragment: bool) -> WatchBatch {
        let events = events.iter().map(|(revision, key)| event(*revision, key));
        WatchBatch {
            cluster_id: CLUSTER,
            revision: 100,
            events: events.collect(),
            is_fragment,
        }
    }

    fn revisions(assembled: &Assembled) -> Vec<(i64, usize)> {
        let transactions = assembled.transactions.iter();
        transactions
            .map(|transaction| (transaction.revision, transaction.changes.len()))
            .collect()
    }

    #[test]
    fn fragments_of_watch_response_form_one_transaction() {
        let mut assembler = Assembler::new(CLUSTER, 4);
        let first = assembler.push(batch(&[(4, "x"), (5, "a"), (6, "a")], true), 1);
        assert_eq!(revisions(&first), [(5, 1)]);
        let second = assembler.push(batch(&[(6, "b")], true), 2);
        assert_eq!(revisions(&second), []);
        let third = assembler.push(batch(&[(6, "c"), (7, "a")], false), 3);
        assert_eq!(revisions(&third), [(6, 3), (7, 1)]);
        assert_eq!(third.gap, None);
        // A progress notification has no events, so it yields no transaction.
        assert_eq!(assembler.push(batch(&[], false), 4), Assembled::default());
        assert_eq!(assembler.last(), 7);
    }

    #[test]
    fn missing_revision_causes_gap() {
        let mut assembler = Assembler::new(CLUSTER, 4);
        let found = assembler.push(batch(&[(5, "a"), (7, "a")], false), 1);
        assert_eq!(revisions(&found), [(5, 1)]);
        assert_eq!(found.gap, Some(GapReason::RevisionMissing));
        let mut assembler = Assembler::new(CLUSTER, 4);
        let found = assembler.push(batch(&[(6, "a")], false), 1);
        assert_eq!(revisions(&found), []);
        assert_eq!(found.gap, Some(GapReason::RevisionMissing));
    }

    #[test]
    fn batch_from_other_cluster_causes_gap() {
        let mut assembler = Assembler::new(ClusterId(8), 4);
        let found = assembler.push(batch(&[(5, "a")], false), 1);
        assert_eq!(found.gap, Some(GapReason::ClusterChanged));
        assert_eq!(revisions(&found), []);
    }

    #[test]
    fn transaction_above_memory_limit_causes_gap() {
        let mut assembler = Assembler::new(CLUSTER, 4);
        let value = Value {
            content: Bytes::from(vec![0; 1 << 20]),
            ..Value::default()
        };
        let events = (0..MAX_TRANSACTION >> 20).map(|_| WatchEvent {
            revision: 5,
            change: Change {
                key: Bytes::from_static(b"k"),
                value: Some(value.clone()),
            },
        });
        let large = WatchBatch {
            events: events.collect(),
            ..batch(&[], true)
        };
        let found = assembler.push(large, 1);
        assert_eq!(found.gap, Some(GapReason::TransactionTooLarge));
    }
}
