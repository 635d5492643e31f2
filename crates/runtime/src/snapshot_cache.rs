//! A cache of the last snapshot for each object, for example of the Kubernetes objects of a cluster. With a cached
//! snapshot, the reconcile of an idle object sends no request to the API server.
//!
//! The operator watches the objects in a snapshot, except Secrets. A snapshot is therefore valid until an event
//! arrives, and at most for `LONGEST`. The operator never writes from a cached snapshot: if a plan contains a write,
//! the operator reads everything again and plans again (invariants 1 and 33).

use std::collections::{HashMap, HashSet};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Maximum age of a snapshot. Then the operator takes a new snapshot from its watch caches and reads the Secrets,
/// because a change of a Secret causes no event.
const LONGEST: Duration = Duration::from_mins(1);

/// Maximum time between two reads of all objects from the API server. In between, new snapshots come from the watch
/// caches. A read shows a change even if a watch fails or loses an event.
const READ_INTERVAL: Duration = Duration::from_mins(10);

/// The last snapshot of each object, by UID.
pub struct SnapshotCache<S>(Mutex<Memory<S>>);

struct Memory<S> {
    snapshots: HashMap<String, Kept<S>>,
    /// Objects that are being read. An event removes the object from this set, so that the result of the read is not
    /// cached.
    reading: HashSet<String>,
    /// The last read of each object from the API server.
    reads: HashMap<String, LastRead>,
}

struct LastRead {
    /// The time of the last read, or of the first reconcile if the object was never read.
    at: Instant,
    /// True if the plan of the last reconcile contained a step.
    changing: bool,
}

struct Kept<S> {
    /// The resourceVersion of the reconciled object.
    version: Option<String>,
    snapshot: S,
    read: Instant,
}

impl<S> Memory<S> {
    fn last_read(&mut self, uid: &str, now: Instant) -> &mut LastRead {
        let first = LastRead {
            at: now,
            changing: false,
        };
        self.reads.entry(uid.to_owned()).or_insert(first)
    }
}

impl<S> Default for SnapshotCache<S> {
    fn default() -> Self {
        Self(Mutex::new(Memory {
            snapshots: HashMap::new(),
            reading: HashSet::new(),
            reads: HashMap::new(),
        }))
    }
}

impl<S: Clone> SnapshotCache<S> {
    fn memory(&self) -> MutexGuard<'_, Memory<S>> {
        // A poisoned lock is safe to use, because every operation under the lock keeps the cache consistent.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Drops the snapshot of an object. Callers use this after an event, after a failed read, and for a deleted object.
    pub fn invalidate(&self, uid: &str) {
        let mut memory = self.memory();
        memory.snapshots.remove(uid);
        memory.reading.remove(uid);
    }

    /// Records that a read begins. Call this before the read, so that an event during the read prevents the caching.
    pub fn begin(&self, uid: &str) {
        self.memory().reading.insert(uid.to_owned());
    }

    /// Records that an object was read from the API server.
    pub fn record_read(&self, uid: &str, now: Instant) {
        self.memory().last_read(uid, now).at = now;
    }

    /// Records whether the plan of a reconcile contains a step. After a step, the next plan probably contains a step
    /// too, or the status changes, so the next reconcile reads the API server. After a plan without a step, the cache
    /// is used again.
    pub fn record_step(&self, uid: &str, has_step: bool) {
        if let Some(read) = self.memory().reads.get_mut(uid) {
            read.changing = has_step;
        }
    }

    /// True if the object must be read from the API server, because its last read is too old or the last plan contained
    /// a step.
    pub fn needs_read(&self, uid: &str, now: Instant) -> bool {
        let mut memory = self.memory();
        let read = memory.last_read(uid, now);
        read.changing || now.duration_since(read.at) >= READ_INTERVAL
    }

    /// Caches the snapshot, unless an event has arrived since `begin`. `version` is the resourceVersion of the object.
    pub fn keep(&self, uid: &str, version: Option<&str>, snapshot: S, now: Instant) {
        let mut memory = self.memory();
        if memory.reading.remove(uid) {
            let kept = Kept {
                version: version.map(str::to_owned),
                snapshot,
                read: now,
            };
            memory.snapshots.insert(uid.to_owned(), kept);
        }
    }

    /// Drops snapshots above the maximum age, and the reads of deleted objects. The caller must not call this in each
    /// reconcile, because it scans all objects.
    pub fn forget(&self, now: Instant) {
        let mut memory = self.memory();
        let snapshots = &mut memory.snapshots;
        snapshots.retain(|_, kept| now.duration_since(kept.read) < LONGEST);
        // An existing object is read again within `2 * READ_INTERVAL`, so an older read belongs to a deleted object.
        let reads = &mut memory.reads;
        reads.retain(|_, read| now.duration_since(read.at) < 2 * READ_INTERVAL);
    }

    /// The snapshot of an object. `None` if the object has another resourceVersion, if an event has arrived since the
    /// read, or if the snapshot is too old.
    pub fn get(&self, uid: &str, version: Option<&str>, now: Instant) -> Option<S> {
        let memory = self.memory();
        let kept = memory.snapshots.get(uid)?;
        let same = kept.version.as_deref() == version;
        let recent = now.duration_since(kept.read) < LONGEST;
        (same && recent).then(|| kept.snapshot.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const UID: &str = "uid";
    const VERSION: Option<&str> = Some("7");

    fn cache() -> (SnapshotCache<&'static str>, Instant) {
        (SnapshotCache::default(), Instant::now())
    }

    #[test]
    fn cached_snapshot_is_used_until_next_watch_event() {
        let (cache, now) = cache();
        assert!(cache.get(UID, VERSION, now).is_none());
        cache.begin(UID);
        cache.keep(UID, VERSION, "snapshot", now);
        assert_eq!(cache.get(UID, VERSION, now), Some("snapshot"));
        assert!(cache.get("other", VERSION, now).is_none());
        cache.invalidate(UID);
        assert!(cache.get(UID, VERSION, now).is_none());
    }

    #[test]
    fn snapshot_is_not_cached_if_event_arrives_during_read() {
        let (cache, now) = cache();
        cache.begin(UID);
        cache.invalidate(UID);
        cache.keep(UID, VERSION, "snapshot", now);
        assert!(cache.get(UID, VERSION, now).is_none());
        // This read begins after the event, so its snapshot is cached.
        cache.begin(UID);
        cache.keep(UID, VERSION, "snapshot", now);
        assert!(cache.get(UID, VERSION, now).is_some());
    }

    #[test]
    fn new_resource_version_or_age_limit_invalidates_cache() {
        let (cache, now) = cache();
        cache.begin(UID);
        cache.keep(UID, VERSION, "snapshot", now);
        assert!(cache.get(UID, Some("8"), now).is_none());
        assert!(cache.get(UID, None, now).is_none());
        assert!(cache.get(UID, VERSION, now + LONGEST).is_none());
    }

    #[test]
    fn object_is_read_again_after_read_interval() {
        let (cache, now) = cache();
        let (soon, later) = (now + READ_INTERVAL / 2, now + READ_INTERVAL);
        assert!(!cache.needs_read(UID, now), "the first reconcile");
        assert!(!cache.needs_read(UID, soon));
        assert!(cache.needs_read(UID, later));
        cache.record_read(UID, soon);
        assert!(!cache.needs_read(UID, later));
        assert!(cache.needs_read(UID, soon + READ_INTERVAL));
        cache.forget(soon + 2 * READ_INTERVAL);
        assert!(cache.memory().reads.is_empty());
    }

    #[test]
    fn changing_object_is_read_until_reconcile_without_step() {
        let (cache, now) = cache();
        cache.record_step(UID, true);
        assert!(!cache.needs_read(UID, now), "the object was never read");
        cache.record_read(UID, now);
        assert!(!cache.needs_read(UID, now));
        cache.record_step(UID, true);
        for _ in 0..2 {
            assert!(cache.needs_read(UID, now));
            cache.record_read(UID, now);
        }
        assert!(cache.needs_read(UID, now), "a read must not end the reads");
        assert!(!cache.needs_read("other", now));
        // After a plan without a step, the object needs no further read.
        cache.record_step(UID, false);
        assert!(!cache.needs_read(UID, now));
    }

    #[test]
    fn deleted_object_leaves_no_cached_snapshot() {
        let (cache, now) = cache();
        cache.begin(UID);
        cache.keep(UID, VERSION, "snapshot", now);
        // The deletion of a child object causes a watch event, which invalidates the snapshot.
        cache.invalidate(UID);
        let nothing = || {
            let memory = cache.memory();
            memory.snapshots.is_empty() && memory.reading.is_empty()
        };
        assert!(nothing());
        // The next read finds that the object was deleted, and invalidates the snapshot.
        cache.begin(UID);
        cache.invalidate(UID);
        assert!(nothing());
        // Without a watch event, the snapshot is dropped at its maximum age.
        cache.begin(UID);
        cache.keep(UID, VERSION, "snapshot", now);
        cache.forget(now + LONGEST);
        assert!(nothing());
    }
}
