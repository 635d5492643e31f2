//! A cache with the last read of each cluster's Kubernetes objects. The reconcile of an idle cluster therefore sends no
//! request to the API server.
//!
//! The operator watches these objects, so only etcd can change without an event. Until an event arrives, the periodic
//! reconcile takes the objects from this cache and calls only etcd. The operator never writes from cached data: if a
//! plan contains a write, the operator reads everything again and plans again (invariant 1).

use std::collections::{HashMap, HashSet};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::observe::KubeSnapshot;

/// Maximum age of a cached read. Limits the effect of a lost event, for example of a deletion while a watch was
/// interrupted.
const LONGEST: Duration = Duration::from_mins(1);

/// The last snapshot of each cluster's Kubernetes objects, by the cluster's UID.
#[derive(Default)]
pub struct SnapshotCache(Mutex<Memory>);

#[derive(Default)]
struct Memory {
    snapshots: HashMap<String, (KubeSnapshot, Instant)>,
    /// Clusters that are being read now. An event removes the cluster from this set, so that the read is not cached.
    reading: HashSet<String>,
}

impl SnapshotCache {
    fn memory(&self) -> MutexGuard<'_, Memory> {
        // No operation under this lock can panic and leave the cache inconsistent, so a poisoned lock is safe to use.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Invalidates the cached read of a cluster. Called after an event, after a failed read, and if the cluster no
    /// longer exists.
    pub fn invalidate(&self, uid: &str) {
        let mut memory = self.memory();
        memory.snapshots.remove(uid);
        memory.reading.remove(uid);
    }

    /// Starts a read. The caller must call this before it reads, so that an event during the read invalidates it.
    pub fn begin(&self, uid: &str) {
        self.memory().reading.insert(uid.to_owned());
    }

    /// Caches the snapshot, unless a watch event for the cluster arrived since `begin`.
    pub fn keep(&self, uid: &str, snapshot: KubeSnapshot, now: Instant) {
        self.forget(now);
        let mut memory = self.memory();
        if memory.reading.remove(uid) {
            memory.snapshots.insert(uid.to_owned(), (snapshot, now));
        }
    }

    /// Drops snapshots that are older than the maximum age.
    pub fn forget(&self, now: Instant) {
        let snapshots = &mut self.memory().snapshots;
        snapshots.retain(|_, (_, read)| now.duration_since(*read) < LONGEST);
    }

    /// The cached read. `None` if the EtcdCluster has another resourceVersion, if an event has arrived since the read,
    /// or if the read is too old.
    pub fn get(&self, uid: &str, version: Option<&str>, now: Instant) -> Option<KubeSnapshot> {
        let memory = self.memory();
        let (snapshot, read) = memory.snapshots.get(uid)?;
        let same = snapshot.cluster.metadata.resource_version.as_deref() == version;
        (same && now.duration_since(*read) < LONGEST).then(|| snapshot.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::observe::tests::snapshot;

    const UID: &str = "uid";

    fn version(snapshot: &KubeSnapshot) -> Option<&str> {
        snapshot.cluster.metadata.resource_version.as_deref()
    }

    #[test]
    fn cached_snapshot_is_used_until_next_watch_event() {
        let (cache, snapshot, now) = (SnapshotCache::default(), snapshot(), Instant::now());
        assert!(cache.get(UID, version(&snapshot), now).is_none());
        cache.begin(UID);
        cache.keep(UID, snapshot.clone(), now);
        assert!(cache.get(UID, version(&snapshot), now).is_some());
        assert!(cache.get("other", version(&snapshot), now).is_none());
        cache.invalidate(UID);
        assert!(cache.get(UID, version(&snapshot), now).is_none());
    }

    #[test]
    fn snapshot_is_not_cached_if_event_arrives_during_read() {
        let (cache, snapshot, now) = (SnapshotCache::default(), snapshot(), Instant::now());
        cache.begin(UID);
        cache.invalidate(UID);
        cache.keep(UID, snapshot.clone(), now);
        assert!(cache.get(UID, version(&snapshot), now).is_none());
        // This read begins after the event, so the cache keeps its snapshot.
        cache.begin(UID);
        cache.keep(UID, snapshot.clone(), now);
        assert!(cache.get(UID, version(&snapshot), now).is_some());
    }

    #[test]
    fn new_resource_version_or_age_limit_invalidates_cache() {
        let (cache, snapshot, now) = (SnapshotCache::default(), snapshot(), Instant::now());
        cache.begin(UID);
        cache.keep(UID, snapshot.clone(), now);
        assert!(cache.get(UID, Some("another"), now).is_none());
        assert!(cache.get(UID, version(&snapshot), now + LONGEST).is_none());
    }

    #[test]
    fn deleted_cluster_leaves_no_cached_snapshot() {
        let (cache, snapshot, now) = (SnapshotCache::default(), snapshot(), Instant::now());
        cache.begin(UID);
        cache.keep(UID, snapshot.clone(), now);
        // The deletion of a child object sends an event, which invalidates the cache.
        cache.invalidate(UID);
        let nothing = || {
            let memory = cache.memory();
            memory.snapshots.is_empty() && memory.reading.is_empty()
        };
        assert!(nothing());
        // The next read finds that the cluster was deleted, and invalidates the cache.
        cache.begin(UID);
        cache.invalidate(UID);
        assert!(nothing());
        // This cache has missed the event of the deletion. The cache drops the snapshot at its age limit.
        cache.begin(UID);
        cache.keep(UID, snapshot, now);
        cache.forget(now + LONGEST);
        assert!(nothing());
    }
}
