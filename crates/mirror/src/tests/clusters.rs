//! A source and a destination in memory, for the model.

use std::collections::BTreeMap;

use bytes::Bytes;
use etcd::{
    Change, ClusterId, KeyPage, KeyRange, Operation, Precondition, Value, WatchBatch, WatchEvent,
};

pub(super) type Keys = BTreeMap<Bytes, Bytes>;

/// Pseudo-random numbers (SplitMix64). The seed of a failed test reproduces the failure.
pub(super) struct Random(pub(super) u64);

impl Random {
    pub(super) fn below(&mut self, end: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^= mixed >> 31;
        usize::try_from(mixed % u64::try_from(end).unwrap()).unwrap()
    }

    /// True with a probability of `percent`.
    pub(super) fn chance(&mut self, percent: usize) -> bool {
        self.below(100) < percent
    }
}

/// An etcd with its whole history. A compaction hides revisions from reads, but not from the checks of the model.
pub(super) struct Source {
    pub(super) cluster_id: ClusterId,
    /// The changes of each revision. The first revision is 2.
    history: Vec<Vec<Change>>,
    pub(super) compacted: i64,
}

impl Source {
    pub(super) fn new(cluster_id: ClusterId) -> Self {
        Self {
            cluster_id,
            history: Vec::new(),
            compacted: 0,
        }
    }

    pub(super) fn revision(&self) -> i64 {
        i64::try_from(self.history.len()).unwrap() + 1
    }

    /// Writes a random transaction. A few transactions change many keys.
    pub(super) fn write(&mut self, random: &mut Random) {
        let now = self.state(self.revision());
        let largest = if random.chance(10) { 9 } else { 2 };
        let count = 1 + random.below(largest);
        let mut changes: BTreeMap<Bytes, Option<Bytes>> = BTreeMap::new();
        for _ in 0..count {
            let prefix = ["a/", "a/", "a/", "b/"][random.below(4)];
            let key = Bytes::from(format!("{prefix}{}", random.below(12)));
            let is_deleted = random.chance(35) && now.contains_key(&key);
            let value = Bytes::from(format!("{}", self.revision()));
            changes.insert(key, (!is_deleted).then_some(value));
        }
        let changes = changes.into_iter().map(|(key, content)| Change {
            key,
            value: content.map(|content| Value {
                content,
                ..Value::default()
            }),
        });
        self.history.push(changes.collect());
    }

    pub(super) fn compact(&mut self, random: &mut Random) {
        let span = usize::try_from(self.revision() - self.compacted).unwrap();
        self.compacted += i64::try_from(random.below(span + 1)).unwrap();
    }

    /// The keys at a revision.
    pub(super) fn state(&self, revision: i64) -> Keys {
        let count = usize::try_from(revision - 1).unwrap();
        let mut keys = Keys::new();
        for change in self.history.iter().take(count).flatten() {
            match &change.value {
                Some(value) => drop(keys.insert(change.key.clone(), value.content.clone())),
                None => drop(keys.remove(&change.key)),
            }
        }
        keys
    }

    /// The keys of a page at a revision. `None` if the revision is compacted.
    pub(super) fn page(&self, range: &KeyRange, revision: i64, limit: usize) -> Option<KeyPage> {
        let is_readable = revision >= self.compacted;
        is_readable.then(|| page(&self.state(revision), range, limit))
    }

    /// Batches with the events of a range in the revisions from `from` to `to`. All batches except the last are
    /// fragments.
    pub(super) fn batches(
        &self,
        range: &KeyRange,
        (from, to): (i64, i64),
        random: &mut Random,
    ) -> Vec<WatchBatch> {
        let mut events = Vec::new();
        for revision in from.max(2)..=to {
            let index = usize::try_from(revision - 2).unwrap();
            let changes = self.history[index].iter();
            let watched = changes.filter(|change| range.contains(&change.key));
            events.extend(watched.map(|change| WatchEvent {
                revision,
                change: change.clone(),
            }));
        }
        let mut batches = Vec::new();
        while !events.is_empty() {
            let rest = events.split_off(1 + random.below(events.len().min(5)));
            batches.push(self.batch(std::mem::replace(&mut events, rest), true));
        }
        if let Some(last) = batches.last_mut() {
            last.is_fragment = false;
        }
        batches
    }

    /// A progress notification.
    pub(super) fn progress(&self) -> WatchBatch {
        self.batch(Vec::new(), false)
    }

    fn batch(&self, events: Vec<WatchEvent>, is_fragment: bool) -> WatchBatch {
        WatchBatch {
            cluster_id: self.cluster_id,
            revision: self.revision(),
            events,
            is_fragment,
        }
    }
}

/// The first keys of a range, at most `limit`.
pub(super) fn page(keys: &Keys, range: &KeyRange, limit: usize) -> KeyPage {
    let inside = keys.iter().filter(|(key, _)| range.contains(key));
    let mut entries: Vec<(Bytes, Bytes)> = inside
        .map(|(key, value)| (key.clone(), value.clone()))
        .collect();
    let has_more = entries.len() > limit;
    entries.truncate(limit);
    KeyPage {
        cluster_id: ClusterId(0),
        revision: 0,
        entries,
        first_changed: 0,
        has_more,
    }
}

/// A destination, and the transactions that it has received but not applied yet.
#[derive(Default)]
pub(super) struct Destination {
    pub(super) keys: Keys,
    pub(super) delayed: Vec<(Vec<Precondition>, Vec<Operation>)>,
}

impl Destination {
    /// Applies a transaction if its preconditions hold. Returns whether they hold.
    pub(super) fn apply(
        &mut self,
        preconditions: &[Precondition],
        operations: &[Operation],
    ) -> bool {
        let holds = preconditions.iter().all(|precondition| match precondition {
            Precondition::Value { key, value } => self.keys.get(key) == Some(value),
            Precondition::Empty(range) => !self.keys.keys().any(|key| range.contains(key)),
            Precondition::Changed { key, revision } => {
                assert_eq!(*revision, 0, "the model has no revisions");
                !self.keys.contains_key(key)
            }
        });
        if holds {
            let mut changed = std::collections::BTreeSet::new();
            for operation in operations {
                assert!(
                    changed.insert(operation.key()),
                    "etcd rejects {operations:?}"
                );
                match operation {
                    Operation::Put { key, value } => {
                        self.keys.insert(key.clone(), value.clone());
                    }
                    Operation::Delete { key } => {
                        self.keys.remove(key);
                    }
                }
            }
        }
        holds
    }
}
