//! Computes the transactions of a mirror from the events of its source. Performs no I/O.
//!
//! A transaction of the source becomes one transaction of the destination. Consecutive transactions are combined only
//! if they change different keys and fit into the limits. Clients that watch the destination therefore receive every
//! change. A transaction that exceeds a limit is applied in parts, and the checkpoint counts its applied events.

use std::collections::{HashSet, VecDeque};

use bytes::Bytes;
use etcd::{Operation, WatchBatch, WatchEvent};

use crate::checkpoint::{Checkpoint, Split};
use crate::mapping::Mapping;
use crate::step::{Limits, Room, Step};

/// Why the events of a watch cannot be applied.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FollowError {
    /// The batch belongs to another cluster.
    #[error("the endpoint belongs to another etcd cluster")]
    OtherCluster,
    /// An event arrived after an event of a later revision, or instead of the next event of a split transaction. Events
    /// may be missing.
    #[error("the source has sent revision {found} after revision {seen}")]
    OutOfOrder {
        /// The revision of the event.
        found: i64,
        /// The revision that arrived before the event.
        seen: i64,
    },
}

/// An event that is not applied yet.
#[derive(Clone, Debug)]
struct Pending {
    revision: i64,
    /// `None` for a key that is not copied. The event is kept, because a checkpoint counts events.
    operation: Option<Operation>,
}

/// Applies the events of one watch. The watch must start with the revision of the checkpoint, although the follower
/// skips the events of this revision.
///
/// Reason: etcd before 3.4.34 and 3.5.16 can omit the deletions of the compacted revision from a watch that starts with
/// this revision. A watch that starts with the last applied revision fails in this case, because its start is
/// compacted.
#[derive(Debug)]
pub struct Follower {
    checkpoint: Checkpoint,
    mapping: Mapping,
    limits: Limits,
    /// Whether a progress notification proves that all earlier events have arrived.
    trusts_progress: bool,
    /// The revision of the checkpoint at the start of the watch.
    start: i64,
    pending: VecDeque<Pending>,
    /// The highest revision of the events that have arrived.
    seen: i64,
    /// All events up to this revision have arrived.
    complete: i64,
    /// A progress notification has proven that all events up to this revision have arrived.
    progress: i64,
    /// The revision of the last progress notification. 0 if an event arrived after the notification.
    notified: i64,
    /// The number of events of a split transaction to skip, because the checkpoint counts them as applied.
    skip: u64,
}

impl Follower {
    /// Creates a follower that continues after a checkpoint of the phase `Following`.
    pub fn new(
        checkpoint: Checkpoint,
        mapping: Mapping,
        limits: Limits,
        trusts_progress: bool,
    ) -> Self {
        let start = checkpoint.revision;
        Self {
            skip: checkpoint.split().map_or(0, |split| split.applied),
            checkpoint,
            mapping,
            limits,
            trusts_progress,
            start,
            pending: VecDeque::new(),
            seen: start,
            complete: start,
            progress: 0,
            notified: 0,
        }
    }

    /// The checkpoint after all applied steps.
    pub fn checkpoint(&self) -> &Checkpoint {
        &self.checkpoint
    }

    /// The revision of the source that the destination contains. It can be higher than the revision of the checkpoint,
    /// because a progress notification alone does not change the checkpoint.
    pub fn position(&self) -> i64 {
        if self.pending.is_empty() && self.checkpoint.split().is_none() {
            self.checkpoint.revision.max(self.progress)
        } else {
            self.checkpoint.revision
        }
    }

    /// Adds a batch.
    ///
    /// # Errors
    /// Fails if events may be missing. The follower must not be used after an error.
    pub fn push(&mut self, batch: WatchBatch) -> Result<(), FollowError> {
        if batch.cluster_id.to_string() != self.checkpoint.source {
            return Err(FollowError::OtherCluster);
        }
        if batch.events.is_empty() {
            if !batch.is_fragment {
                self.notify(batch.revision);
            }
            return Ok(());
        }
        self.notified = 0;
        for event in batch.events {
            self.push_event(event)?;
        }
        self.complete = if batch.is_fragment {
            self.seen - 1
        } else {
            self.seen
        };
        Ok(())
    }

    /// Adds a progress notification. Without `trusts_progress`, earlier events can arrive after a notification. The
    /// notification then counts only after a second notification, if no event arrives between them.
    fn notify(&mut self, revision: i64) {
        let before = std::mem::replace(&mut self.notified, revision);
        let proven = if self.trusts_progress {
            revision
        } else {
            before
        };
        self.progress = self.progress.max(proven);
    }

    fn push_event(&mut self, event: WatchEvent) -> Result<(), FollowError> {
        let found = event.revision;
        if found <= self.start {
            return Ok(());
        }
        let seen = self.seen.max(self.checkpoint.revision);
        let is_current = self.pending.is_empty() && found == self.checkpoint.revision;
        if found < seen || is_current {
            return Err(FollowError::OutOfOrder { found, seen });
        }
        self.seen = found;
        if self.skip > 0 {
            let split = self.checkpoint.split().map_or(0, |split| split.revision);
            if found != split {
                return Err(FollowError::OutOfOrder { found, seen: split });
            }
            self.skip -= 1;
            return Ok(());
        }
        let key = self.mapping.to_destination(&event.change.key);
        let operation = key.map(|key| match event.change.value {
            // The key gets no lease. If the lease in the source ends, the deletions of its keys arrive as events.
            Some(value) => Operation::Put {
                key,
                value: value.content,
            },
            None => Operation::Delete { key },
        });
        self.pending.push_back(Pending {
            revision: found,
            operation,
        });
        Ok(())
    }

    /// The next transaction. `None` if more events must arrive.
    pub fn next_step(&self) -> Option<Step> {
        let first = self.pending.front()?.revision;
        let whole = self.fitting();
        let after = self.pending.get(whole);
        if after.is_some_and(|event| event.revision == first) {
            return Some(self.part(first, whole));
        }
        if first > self.complete {
            return None;
        }
        let count = self.combined(whole);
        let last = self.pending.get(count - 1)?.revision;
        Some(Step {
            operations: self.operations(count),
            next: self.checkpoint.applied(last),
            events: count,
            begins_split: false,
        })
    }

    /// The transaction that records the progress of a source without changes of copied keys. `None` without
    /// `trusts_progress`, while events are pending, or if the checkpoint is up to date.
    pub fn idle(&self) -> Option<Step> {
        let is_idle = self.pending.is_empty() && self.checkpoint.split().is_none();
        let is_behind = self.progress > self.checkpoint.revision;
        (self.trusts_progress && is_idle && is_behind).then(|| Step {
            operations: Vec::new(),
            next: self.checkpoint.applied(self.progress),
            events: 0,
            begins_split: false,
        })
    }

    /// Records that the destination has applied a step of [`Self::next_step`] or [`Self::idle`].
    pub fn applied(&mut self, step: &Step) {
        self.pending.drain(..step.events.min(self.pending.len()));
        self.checkpoint = step.next.clone();
    }

    /// The number of pending events with the same revision as the event at `index`, from this event on.
    fn count_of(&self, index: usize) -> usize {
        let mut rest = self.pending.iter().skip(index);
        let Some(first) = rest.next() else {
            return 0;
        };
        1 + rest
            .take_while(|event| event.revision == first.revision)
            .count()
    }

    /// The number of events of the first pending revision that fit into one transaction, at least 1. etcd rejects a
    /// transaction that changes a key twice.
    fn fitting(&self) -> usize {
        let (mut room, mut keys) = (Room::new(self.limits), HashSet::new());
        let first = self.pending.front().map(|event| event.revision);
        let same = self.pending.iter();
        let same = same.take_while(|event| Some(event.revision) == first);
        same.take_while(|&event| is_added(event, &mut room, &mut keys))
            .count()
            .max(1)
    }

    /// The number of pending events for the next transaction of the destination: as many complete transactions of the
    /// source as fit together, and at least the first `whole` events.
    fn combined(&self, whole: usize) -> usize {
        let (mut room, mut keys) = (Room::new(self.limits), HashSet::new());
        let mut count = 0;
        let mut next = whole;
        while next > 0 {
            let mut events = self.pending.iter().skip(count).take(next);
            let is_complete = events.clone().all(|event| event.revision <= self.complete);
            if !is_complete || !events.all(|event| is_added(event, &mut room, &mut keys)) {
                break;
            }
            count += next;
            next = self.count_of(count);
        }
        count.max(whole)
    }

    fn part(&self, revision: i64, count: usize) -> Step {
        let before = self.checkpoint.split();
        let applied = before.map_or(0, |split| split.applied);
        let split = Split {
            revision,
            applied: applied + u64::try_from(count).unwrap_or_default(),
        };
        Step {
            operations: self.operations(count),
            next: self.checkpoint.applied_in_part(split),
            events: count,
            begins_split: before.is_none(),
        }
    }

    fn operations(&self, count: usize) -> Vec<Operation> {
        let events = self.pending.iter().take(count);
        events.filter_map(|event| event.operation.clone()).collect()
    }
}

/// Adds an event to a transaction. Returns false if the event does not fit, or if the transaction already changes its
/// key.
fn is_added<'a>(event: &'a Pending, room: &mut Room, keys: &mut HashSet<&'a Bytes>) -> bool {
    let is_new = |operation: &'a Operation| !keys.contains(operation.key());
    if !event.operation.as_ref().is_none_or(is_new) || !room.add(event.operation.as_ref()) {
        return false;
    }
    keys.extend(event.operation.as_ref().map(Operation::key));
    true
}

/// Whether a progress notification of the etcd release `version` proves that all earlier events have arrived. Releases
/// before 3.4.25 and 3.5.8 can send earlier events after a progress notification.
pub fn trusts_progress(version: &str) -> bool {
    let mut parts = version.trim_start_matches('v').split(['.', '-', '+']);
    let mut number = || parts.next().and_then(|part| part.parse::<u64>().ok());
    match (number(), number(), number()) {
        (Some(3), Some(4), Some(patch)) => patch >= 25,
        (Some(3), Some(5), Some(patch)) => patch >= 8,
        (Some(major), Some(minor), Some(_)) => (major, minor) > (3, 5),
        _ => false,
    }
}

#[cfg(test)]
mod tests;
