//! A simulated etcd for the model of the capture.

use std::collections::{BTreeMap, BTreeSet};
use std::future::pending;
use std::sync::{Arc, Mutex, MutexGuard};

use async_trait::async_trait;
use bytes::Bytes;
use etcd::{
    Change, ClusterId, Error, KeyHash, LeaseTtl, Value, WatchBatch, WatchError, WatchEvent,
};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use tokio::sync::Notify;
use tokio::task::yield_now;

use crate::record::GapReason;
use crate::source::{Changes, Source};

/// The cluster ID before the cluster is replaced.
pub(super) const CLUSTER: u64 = 7;

/// The IDs of all leases in the model.
const LEASES: [i64; 2] = [21, 22];

struct State {
    rng: StdRng,
    cluster: u64,
    revision: i64,
    compacted: i64,
    /// The highest compaction revision so far. `all_skipped` contains all skipped revisions so far.
    /// [`EtcdModel::explains`] uses both.
    max_compacted: i64,
    all_skipped: BTreeSet<i64>,
    /// The changes of each revision since the base. After `is_replaced` is set, the model makes no further changes.
    history: BTreeMap<i64, Vec<Change>>,
    /// The revision after the last change of the history.
    next: i64,
    /// A revision whose events are never sent.
    skipped: Option<i64>,
    /// Increased when all watches end.
    generation: u64,
    is_replaced: bool,
    has_faults: bool,
}

impl State {
    /// True for one of `count` requests on average, while the model has faults.
    fn fails(&mut self, count: u32) -> bool {
        self.has_faults && self.rng.random_range(0..count) == 0
    }

    fn write(&mut self, count: usize) {
        for _ in 0..count {
            let changes = self.rng.random_range(1..5);
            let changes = (0..changes).map(|index| self.change(index)).collect();
            self.history.insert(self.next, changes);
            self.revision = self.next;
            self.next += 1;
        }
    }

    fn change(&mut self, index: usize) -> Change {
        let lease = match self.rng.random_range(0..6_usize) {
            kind @ 0..2 => LEASES[kind],
            _ => 0,
        };
        let value = Value {
            content: Bytes::from(format!("{} {index}", self.next)),
            lease,
            version: 1,
            create_revision: self.next,
        };
        Change {
            key: Bytes::from(format!("key {index}")),
            value: self.rng.random_bool(0.8).then_some(value),
        }
    }
}

/// A simulated etcd.
pub(super) struct EtcdModel {
    state: Arc<Mutex<State>>,
    /// Notified when a watch has sent all events.
    drained: Arc<Notify>,
}

impl EtcdModel {
    /// An etcd with this revision and no changes.
    pub(super) fn new(revision: i64, seed: u64) -> Self {
        let state = State {
            rng: StdRng::seed_from_u64(seed),
            cluster: CLUSTER,
            revision,
            compacted: 0,
            max_compacted: 0,
            all_skipped: BTreeSet::new(),
            history: BTreeMap::new(),
            next: revision + 1,
            skipped: None,
            generation: 0,
            is_replaced: false,
            has_faults: true,
        };
        Self {
            state: Arc::new(Mutex::new(state)),
            drained: Arc::default(),
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    /// Writes keys. Sometimes compacts revisions, skips a revision, or replaces the data.
    pub(super) fn change(&self) {
        let mut state = self.state();
        if state.is_replaced {
            return;
        }
        let count = state.rng.random_range(0..10);
        state.write(count);
        match state.rng.random_range(0..100) {
            0..8 => {
                let (compacted, revision) = (state.compacted, state.revision);
                let compacted = state.rng.random_range(compacted..=revision);
                (state.compacted, state.max_compacted) = (compacted, compacted);
            }
            8..10 => {
                let skipped = state.next;
                state.skipped = Some(skipped);
                state.all_skipped.insert(skipped);
                state.write(2);
            }
            10..12 => {
                state.cluster = CLUSTER + 1;
                state.is_replaced = true;
                state.generation += 1;
            }
            12..14 => {
                // A restore sets etcd back to a revision before the base.
                (state.revision, state.compacted) = (5, 0);
                state.is_replaced = true;
                state.generation += 1;
            }
            14..20 => state.generation += 1,
            _ => {}
        }
    }

    pub(super) fn end_faults(&self) {
        self.state().has_faults = false;
    }

    pub(super) fn revision(&self) -> i64 {
        self.state().revision
    }

    /// The changes of a revision.
    pub(super) fn changes(&self, revision: i64) -> Option<Vec<Change>> {
        self.state().history.get(&revision).cloned()
    }

    /// Whether a gap after this revision can have this reason.
    pub(super) fn explains(&self, reason: GapReason, after: i64) -> bool {
        let state = self.state();
        match reason {
            GapReason::Compacted => after < state.max_compacted,
            GapReason::ClusterChanged => state.cluster != CLUSTER,
            GapReason::RevisionMissing => state.all_skipped.contains(&(after + 1)),
            GapReason::RevisionReset => state.cluster == CLUSTER && state.revision < after,
            GapReason::TransactionTooLarge | GapReason::Unknown => false,
        }
    }

    /// Completes when a watch has sent all events.
    pub(super) async fn drained(&self) {
        self.drained.notified().await;
    }

    async fn answer(&self) -> Result<MutexGuard<'_, State>, Error> {
        for _ in 0..self.pauses() {
            yield_now().await;
        }
        let mut state = self.state();
        if state.fails(12) {
            Err(Error::Timeout("a request".to_owned()))
        } else {
            Ok(state)
        }
    }

    /// Number of times that a request waits before its answer.
    fn pauses(&self) -> usize {
        self.state().rng.random_range(0..3)
    }
}

#[async_trait]
impl Source for EtcdModel {
    async fn watch(&self, _: &str, start_revision: i64) -> Result<Box<dyn Changes>, Error> {
        let generation = self.answer().await?.generation;
        Ok(Box::new(WatchModel {
            state: Arc::clone(&self.state),
            drained: Arc::clone(&self.drained),
            generation,
            next: start_revision,
            sent: 0,
        }))
    }

    async fn newest_revision(&self, _: &str) -> Result<(ClusterId, i64), Error> {
        let state = self.answer().await?;
        Ok((ClusterId(state.cluster), state.revision))
    }

    async fn lease(&self, _: &str, _: i64) -> Result<LeaseTtl, Error> {
        let mut state = self.answer().await?;
        let exists = state.rng.random_bool(0.8);
        Ok(LeaseTtl {
            granted: exists.then_some(60),
            revision: state.revision,
        })
    }

    async fn hash(&self, _: &str, revision: i64) -> Result<Option<KeyHash>, Error> {
        let state = self.answer().await?;
        Ok((revision >= state.compacted).then_some(KeyHash {
            hash: 1,
            compacted: state.compacted,
        }))
    }
}

/// A watch of the simulated etcd.
struct WatchModel {
    state: Arc<Mutex<State>>,
    drained: Arc<Notify>,
    generation: u64,
    /// The revision of the next event. `sent` is the number of events of this revision that were sent.
    next: i64,
    sent: usize,
}

impl WatchModel {
    /// The next batch. `None` if all events were sent.
    fn batch(&mut self) -> Result<Option<WatchBatch>, WatchError> {
        let mut state = self.state.lock().unwrap();
        if self.generation != state.generation || state.fails(25) {
            let error = Error::Unreachable("the connection is closed".to_owned());
            return Err(WatchError::Ended(error));
        }
        if self.next < state.compacted {
            let compacted = state.compacted;
            return Err(WatchError::Compacted { compacted });
        }
        let limit = state.rng.random_range(1..8);
        let mut events = Vec::new();
        while events.len() < limit && self.next <= state.revision {
            let is_skipped = state.skipped == Some(self.next);
            let changes = state.history.get(&self.next).filter(|_| !is_skipped);
            let change = changes.and_then(|changes| changes.get(self.sent));
            if let Some(change) = change {
                events.push(WatchEvent {
                    revision: self.next,
                    change: change.clone(),
                });
                self.sent += 1;
            }
            if changes.is_none_or(|changes| self.sent >= changes.len()) {
                (self.next, self.sent) = (self.next + 1, 0);
            }
        }
        if events.is_empty() {
            return Ok(None);
        }
        let has_more = self.next <= state.revision && state.skipped != Some(self.next);
        Ok(Some(WatchBatch {
            cluster_id: ClusterId(state.cluster),
            revision: state.revision,
            events,
            is_fragment: self.sent > 0 || (has_more && state.rng.random_bool(0.5)),
        }))
    }
}

#[async_trait]
impl Changes for WatchModel {
    async fn next(&mut self) -> Result<WatchBatch, WatchError> {
        yield_now().await;
        if let Some(batch) = self.batch()? {
            return Ok(batch);
        }
        self.drained.notify_one();
        pending().await
    }

    async fn request_progress(&mut self) -> Result<(), WatchError> {
        Ok(())
    }
}
