//! Decides which transactions of a replay are in flight. Performs no I/O.
//!
//! etcd can process concurrent requests in any order. Each transaction therefore has a guard: a comparison that is true
//! only after etcd has applied the preceding transaction. etcd rejects a transaction that overtakes its predecessor,
//! and uses no revision for it. The replay sends the rejected transaction again after etcd has applied its predecessor.

use std::collections::VecDeque;
use std::sync::Arc;

use bytes::Bytes;

use crate::record::Transaction;

/// Maximum number of transactions in flight.
pub(super) const MAX_IN_FLIGHT: usize = 64;

/// Maximum size of all keys and values in flight in bytes. A larger transaction is sent alone.
const MAX_CONTENT: usize = 4 << 20;

/// Maximum number of changes in flight. A transaction with more changes is sent alone.
const MAX_CHANGES: usize = 4_096;

/// The window shrinks if etcd rejects more than one attempt for this number of applied attempts.
const REJECTION_DIVISOR: usize = 5;

/// After this number of applied transactions, the window gets its maximum size again. If etcd always processes the last
/// request of a burst first, a small window has many rejected transactions, and a large one has few.
const PROBE_INTERVAL: usize = 4_096;

/// Number of deleted keys of a transaction that are examined for a guard.
const EXAMINED_DELETIONS: usize = 4;

/// A comparison that is true only after etcd has applied the preceding transaction.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Guard {
    /// The preceding transaction puts this key, and so sets the key's modification revision to `revision`.
    Modified {
        /// The key.
        key: Bytes,
        /// The revision of the preceding transaction.
        revision: i64,
    },
    /// The preceding transaction deletes this key. No transaction in flight puts the key, so the key exists until etcd
    /// applies the preceding transaction.
    Deleted {
        /// The key.
        key: Bytes,
    },
}

/// A transaction to send, with its guard. The guard is `None` if etcd has already applied the preceding transaction.
#[derive(Clone, Debug)]
pub(super) struct Attempt {
    pub(super) transaction: Arc<Transaction>,
    pub(super) guard: Option<Guard>,
}

/// etcd's answer to an attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Answer {
    /// Whether the guard was true, so that etcd has applied the transaction.
    pub(super) applied: bool,
    /// The revision of etcd after the attempt.
    pub(super) revision: i64,
}

/// The target has another revision than the recorded one: another client has written to it, or a lease has expired.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Drift {
    /// The recorded revision of the transaction.
    pub(super) expected: i64,
    /// The revision in etcd's answer.
    pub(super) found: i64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    InFlight,
    Applied,
    /// etcd had this revision when it rejected the transaction.
    Rejected(i64),
}

struct Entry {
    attempt: Attempt,
    state: State,
}

impl Entry {
    fn revision(&self) -> i64 {
        self.attempt.transaction.revision
    }

    /// Returns a drift if etcd rejected this transaction although it had applied the preceding one. This happens only
    /// if another client has written to etcd, or if a lease has expired. A second attempt cannot succeed.
    fn drift(&self) -> Option<Drift> {
        let expected = self.revision();
        match self.state {
            State::Rejected(found) if found >= expected - 1 => Some(Drift { expected, found }),
            _ => None,
        }
    }
}

/// The maximum number of transactions in flight. It shrinks while etcd rejects many transactions, and grows while etcd
/// rejects few.
struct Limit {
    current: usize,
    /// Number of applied transactions since `current` was calculated.
    applied: usize,
    /// Number of rejected transactions since `current` was calculated.
    rejected: usize,
    /// Number of applied transactions since `current` was [`MAX_IN_FLIGHT`].
    since_probe: usize,
}

impl Limit {
    fn new() -> Self {
        Self {
            current: MAX_IN_FLIGHT,
            applied: 0,
            rejected: 0,
            since_probe: 0,
        }
    }

    fn count(&mut self, applied: bool) {
        if applied {
            self.applied += 1;
            self.since_probe += 1;
        } else {
            self.rejected += 1;
        }
        if self.applied + self.rejected < 2 * self.current {
            return;
        }
        let shrinks = self.rejected * REJECTION_DIVISOR > self.applied;
        self.current = if shrinks {
            (self.current / 2).max(1)
        } else {
            (self.current + 1 + self.current / 4).min(MAX_IN_FLIGHT)
        };
        if self.since_probe >= PROBE_INTERVAL {
            self.current = MAX_IN_FLIGHT;
        }
        if self.current == MAX_IN_FLIGHT {
            self.since_probe = 0;
        }
        (self.applied, self.rejected) = (0, 0);
    }
}

/// The transactions that were sent, and whose answers or whose predecessors' answers are outstanding.
pub(super) struct Window {
    /// In the order of their revisions.
    entries: VecDeque<Entry>,
    /// All transactions up to this revision have been answered and are not in `entries`.
    answered: i64,
    /// etcd has applied all transactions up to this revision.
    applied: i64,
    limit: Limit,
    repeated: u64,
}

impl Window {
    /// An empty window. etcd has this revision.
    pub(super) fn new(revision: i64) -> Self {
        Self {
            entries: VecDeque::new(),
            answered: revision,
            applied: revision,
            limit: Limit::new(),
            repeated: 0,
        }
    }

    /// The revision of the last transaction that was admitted.
    pub(super) fn sent(&self) -> i64 {
        self.entries.back().map_or(self.answered, Entry::revision)
    }

    /// Number of attempts that etcd has rejected and that were sent again.
    pub(super) fn repeated(&self) -> u64 {
        self.repeated
    }

    /// Admits the next transaction. Returns `None` if the caller must first wait for an answer. After a rejection, no
    /// transaction is admitted until all rejected ones were sent again, because etcd would reject a transaction that
    /// follows a rejected one.
    pub(super) fn admit(&mut self, transaction: &Arc<Transaction>) -> Option<Attempt> {
        let guard = match self.entries.back() {
            None => None,
            Some(_) if self.is_full(transaction) || self.has_rejected() => return None,
            Some(before) if before.revision() <= self.applied => None,
            Some(before) => Some(self.guard(&before.attempt.transaction)?),
        };
        let attempt = Attempt {
            transaction: transaction.clone(),
            guard,
        };
        self.entries.push_back(Entry {
            attempt: attempt.clone(),
            state: State::InFlight,
        });
        Some(attempt)
    }

    /// Processes the answer to an attempt of the transaction with this revision. Returns the attempt to send again.
    pub(super) fn answer(
        &mut self,
        revision: i64,
        answer: Answer,
    ) -> Result<Option<Attempt>, Drift> {
        // Invariant 38: etcd must have applied each transaction at exactly the recorded revision.
        if answer.applied && answer.revision != revision {
            return Err(Drift {
                expected: revision,
                found: answer.revision,
            });
        }
        self.limit.count(answer.applied);
        let answered = self
            .entries
            .iter_mut()
            .find(|entry| entry.revision() == revision);
        if let Some(entry) = answered {
            entry.state = if answer.applied {
                State::Applied
            } else {
                State::Rejected(answer.revision)
            };
        }
        if answer.applied {
            self.applied = self.applied.max(revision);
        }
        while let Some(entry) = self.entries.front()
            && entry.state == State::Applied
        {
            self.answered = entry.revision();
            self.entries.pop_front();
        }
        let again = self.repeat();
        let is_in_flight = |entry: &Entry| entry.state == State::InFlight;
        if !self.entries.iter().any(is_in_flight)
            && let Some(drift) = self.entries.iter().find_map(Entry::drift)
        {
            return Err(drift);
        }
        Ok(again)
    }

    /// The rejected transaction whose predecessor is applied. etcd cannot reject this transaction a second time, so
    /// each transaction is sent at most twice.
    fn repeat(&mut self) -> Option<Attempt> {
        let next = self.applied + 1;
        let entry = self.entries.iter_mut().find(|it| it.revision() == next)?;
        let repeats = matches!(entry.state, State::Rejected(_)) && entry.drift().is_none();
        repeats.then(|| {
            entry.state = State::InFlight;
            self.repeated += 1;
            entry.attempt.clone()
        })
    }

    fn has_rejected(&self) -> bool {
        let mut entries = self.entries.iter();
        entries.any(|entry| matches!(entry.state, State::Rejected(_)))
    }

    fn is_full(&self, next: &Transaction) -> bool {
        let transactions = self.entries.iter().map(|entry| &*entry.attempt.transaction);
        let (mut content, mut changes) = (0, 0);
        for transaction in transactions.chain([next]) {
            content += content_of(transaction);
            changes += transaction.changes.len();
        }
        self.entries.len() >= self.limit.current || content > MAX_CONTENT || changes > MAX_CHANGES
    }

    /// The guard of the transaction that follows `before`. `None` if `before` has only deletions, and transactions in
    /// flight put all keys that are examined.
    fn guard(&self, before: &Transaction) -> Option<Guard> {
        let put = before.changes.iter().find(|change| change.value.is_some());
        if let Some(put) = put {
            return Some(Guard::Modified {
                key: put.key.clone(),
                revision: before.revision,
            });
        }
        let deleted = before.changes.iter().map(|change| &change.key);
        let key = deleted
            .take(EXAMINED_DELETIONS)
            .find(|key| !self.is_put_in_flight(key))?;
        Some(Guard::Deleted { key: key.clone() })
    }

    /// Whether a transaction that etcd may not have applied yet puts this key.
    fn is_put_in_flight(&self, key: &Bytes) -> bool {
        let pending = self.entries.iter().rev();
        pending
            .take_while(|entry| entry.revision() > self.applied)
            .flat_map(|entry| &entry.attempt.transaction.changes)
            .any(|change| change.value.is_some() && change.key == *key)
    }
}

/// The size of all keys and values in bytes.
fn content_of(transaction: &Transaction) -> usize {
    let sizes = transaction.changes.iter().map(|change| {
        let value = change.value.as_ref().map_or(0, |value| value.content.len());
        change.key.len() + value
    });
    sizes.sum()
}

#[cfg(test)]
mod tests;
