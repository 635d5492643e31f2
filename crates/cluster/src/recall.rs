//! A cache of the last read of each cluster, so that reconciling an idle cluster costs no request to the API server.
//!
//! Between two reconciles only etcd can change without an event; all other objects are watched. The periodic reconcile
//! takes the Kubernetes side from this cache until an event arrives, and calls only etcd. The operator never writes
//! from cached data: a plan that would write is made again from a fresh read (invariant 1).

use std::collections::{HashMap, HashSet};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::observe::Look;

/// Maximum age of a cached read. It limits the effect of a lost event (a watch that was interrupted while an object was
/// deleted).
const LONGEST: Duration = Duration::from_mins(1);

/// The last read, by the cluster's UID.
#[derive(Default)]
pub struct Recall(Mutex<Memory>);

#[derive(Default)]
struct Memory {
    looks: HashMap<String, (Look, Instant)>,
    /// Clusters that are being read and have had no event since the read began.
    reading: HashSet<String>,
}

impl Recall {
    fn memory(&self) -> MutexGuard<'_, Memory> {
        // No operation under the lock leaves a partial state.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Invalidates the cached read after an event. Also called if a read failed or the cluster no longer exists.
    pub fn stir(&self, uid: &str) {
        let mut memory = self.memory();
        memory.looks.remove(uid);
        memory.reading.remove(uid);
    }

    /// Must be called before reading: a later event is newer than the read.
    pub fn begin(&self, uid: &str) {
        self.memory().reading.insert(uid.to_owned());
    }

    /// Caches a read, unless an event arrived meanwhile.
    pub fn keep(&self, uid: &str, look: Look, now: Instant) {
        self.forget(now);
        let mut memory = self.memory();
        if memory.reading.remove(uid) {
            memory.looks.insert(uid.to_owned(), (look, now));
        }
    }

    /// Drops stale reads.
    pub fn forget(&self, now: Instant) {
        let looks = &mut self.memory().looks;
        looks.retain(|_, (_, read)| now.duration_since(*read) < LONGEST);
    }

    /// The cached read of this version of the object, if no event of the cluster arrived since.
    pub fn still_true(&self, uid: &str, version: Option<&str>, now: Instant) -> Option<Look> {
        let memory = self.memory();
        let (look, read) = memory.looks.get(uid)?;
        let same = look.cluster.metadata.resource_version.as_deref() == version;
        (same && now.duration_since(*read) < LONGEST).then(|| look.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::observe::tests::look;

    const UID: &str = "uid";

    fn version(look: &Look) -> Option<&str> {
        look.cluster.metadata.resource_version.as_deref()
    }

    #[test]
    fn cached_read_is_valid_until_event() {
        let (recall, look, now) = (Recall::default(), look(), Instant::now());
        assert!(recall.still_true(UID, version(&look), now).is_none());
        recall.begin(UID);
        recall.keep(UID, look.clone(), now);
        assert!(recall.still_true(UID, version(&look), now).is_some());
        assert!(recall.still_true("other", version(&look), now).is_none());
        recall.stir(UID);
        assert!(recall.still_true(UID, version(&look), now).is_none());
    }

    #[test]
    fn event_during_read_invalidates_cache() {
        let (recall, look, now) = (Recall::default(), look(), Instant::now());
        recall.begin(UID);
        recall.stir(UID);
        recall.keep(UID, look.clone(), now);
        assert!(recall.still_true(UID, version(&look), now).is_none());
        // The next read is later than the event.
        recall.begin(UID);
        recall.keep(UID, look.clone(), now);
        assert!(recall.still_true(UID, version(&look), now).is_some());
    }

    #[test]
    fn new_version_or_stale_read_is_read_again() {
        let (recall, look, now) = (Recall::default(), look(), Instant::now());
        recall.begin(UID);
        recall.keep(UID, look.clone(), now);
        assert!(recall.still_true(UID, Some("another"), now).is_none());
        assert!(
            recall
                .still_true(UID, version(&look), now + LONGEST)
                .is_none()
        );
    }

    #[test]
    fn deleted_cluster_leaves_no_cached_read() {
        let (recall, look, now) = (Recall::default(), look(), Instant::now());
        recall.begin(UID);
        recall.keep(UID, look.clone(), now);
        // Deletions of its children are events.
        recall.stir(UID);
        let nothing = || {
            let memory = recall.memory();
            memory.looks.is_empty() && memory.reading.is_empty()
        };
        assert!(nothing());
        // A read found that the cluster was deleted.
        recall.begin(UID);
        recall.stir(UID);
        assert!(nothing());
        // The last event was lost.
        recall.begin(UID);
        recall.keep(UID, look, now);
        recall.forget(now + LONGEST);
        assert!(nothing());
    }
}
