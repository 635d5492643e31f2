//! What was read last of each cluster, so that a look at a cluster at rest costs the API server nothing.
//!
//! Between two looks only etcd can change without an event; everything else is watched. So the periodic look takes
//! the Kubernetes side from here as long as no event came in between, and asks etcd alone. Nothing is ever decided
//! upon it: whatever would be written is planned again from what is read afresh (invariant 1).

use std::collections::{HashMap, HashSet};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::observe::Look;

/// How long what was read is taken for true at most: the loss of an event (a watch that was interrupted while an
/// object was deleted) is made up for after this long.
const LONGEST: Duration = Duration::from_mins(1);

/// What was read last, by the cluster's UID.
#[derive(Default)]
pub struct Recall(Mutex<Memory>);

#[derive(Default)]
struct Memory {
    looks: HashMap<String, (Look, Instant)>,
    /// Clusters that are being read, and of which no event has come since that began.
    reading: HashSet<String>,
}

impl Recall {
    fn memory(&self) -> MutexGuard<'_, Memory> {
        // Nothing is left half done under the lock.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Something of the cluster was changed: what was read does not hold any more. Also when nothing could be read, or
    /// nothing is there any more.
    pub fn stir(&self, uid: &str) {
        let mut memory = self.memory();
        memory.looks.remove(uid);
        memory.reading.remove(uid);
    }

    /// To be called before reading: an event that comes from now on is later than what is read.
    pub fn begin(&self, uid: &str) {
        self.memory().reading.insert(uid.to_owned());
    }

    /// Keeps what was read, unless an event came meanwhile.
    pub fn keep(&self, uid: &str, look: Look, now: Instant) {
        self.forget(now);
        let mut memory = self.memory();
        if memory.reading.remove(uid) {
            memory.looks.insert(uid.to_owned(), (look, now));
        }
    }

    /// Drops what is too old to be taken for true.
    pub fn forget(&self, now: Instant) {
        let looks = &mut self.memory().looks;
        looks.retain(|_, (_, read)| now.duration_since(*read) < LONGEST);
    }

    /// What was read of this version of the object, if nothing of the cluster has changed since.
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
    fn what_was_read_holds_until_an_event_comes() {
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
    fn an_event_that_comes_while_reading_is_not_lost() {
        let (recall, look, now) = (Recall::default(), look(), Instant::now());
        recall.begin(UID);
        recall.stir(UID);
        recall.keep(UID, look.clone(), now);
        assert!(recall.still_true(UID, version(&look), now).is_none());
        // The next reading is later than the event.
        recall.begin(UID);
        recall.keep(UID, look.clone(), now);
        assert!(recall.still_true(UID, version(&look), now).is_some());
    }

    #[test]
    fn another_version_of_the_object_and_an_old_reading_are_read_again() {
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
    fn a_cluster_that_is_gone_leaves_nothing() {
        let (recall, look, now) = (Recall::default(), look(), Instant::now());
        recall.begin(UID);
        recall.keep(UID, look.clone(), now);
        // Its children's ends are events.
        recall.stir(UID);
        let nothing = || {
            let memory = recall.memory();
            memory.looks.is_empty() && memory.reading.is_empty()
        };
        assert!(nothing());
        // It was found out by reading.
        recall.begin(UID);
        recall.stir(UID);
        assert!(nothing());
        // Its last event was lost.
        recall.begin(UID);
        recall.keep(UID, look, now);
        recall.forget(now + LONGEST);
        assert!(nothing());
    }
}
