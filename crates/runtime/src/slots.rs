//! Limits concurrent tasks in total, per namespace and per store. A task is for example a transfer, or a read of a
//! large response from a store.
//!
//! A waiting task occupies no slot, so a busy store or namespace does not delay tasks of other stores or namespaces. Of
//! the waiting tasks within the limits, those of the namespace with the fewest running tasks are next. Of these, the
//! oldest task is next.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::oneshot;

use crate::Scope;

/// Number of concurrent reads of listings and manifests, and of searches for points of recorded changes, in all
/// namespaces. A read takes up to 50 MiB of memory, and a search up to 95 MiB. docs/install.md has the calculation.
const READS: usize = 4;

/// Limits of concurrent tasks.
#[derive(Clone, Copy, Debug)]
pub struct SlotLimits {
    /// Maximum number of concurrent tasks in total.
    pub concurrent: usize,
    /// Maximum number of concurrent tasks for one store.
    pub per_store: usize,
    /// Maximum number of concurrent tasks for one namespace.
    pub per_namespace: usize,
}

impl SlotLimits {
    /// The limits for reads of listings and manifests (ADR 24). If the operator manages several namespaces, one
    /// namespace gets at most half of the slots.
    pub fn of_reads(scope: &Scope) -> Self {
        Self {
            concurrent: READS,
            per_store: READS,
            per_namespace: if scope.is_shared() { READS / 2 } else { READS },
        }
    }
}

/// The properties of a task that the limits use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// The namespace of the object for which the task runs.
    pub namespace: String,
    /// The endpoint and location of the store.
    pub store: String,
    /// True if a pod does the work of the task, so that only the limit per store applies.
    pub in_pod: bool,
}

struct Waiting {
    place: Place,
    admit: oneshot::Sender<Slot>,
}

#[derive(Default)]
struct Tasks {
    running: Vec<Place>,
    /// The waiting tasks, oldest first.
    waiting: VecDeque<Waiting>,
}

/// The slots for the tasks of one kind.
pub struct Slots {
    limits: SlotLimits,
    tasks: Mutex<Tasks>,
}

/// The permission to run a task. When the slot is dropped, the next task is admitted.
pub struct Slot {
    slots: Arc<Slots>,
    place: Place,
}

impl Drop for Slot {
    fn drop(&mut self) {
        {
            let mut tasks = self.slots.tasks();
            let ended = tasks.running.iter().position(|one| *one == self.place);
            if let Some(ended) = ended {
                tasks.running.swap_remove(ended);
            }
        }
        self.slots.admit();
    }
}

impl Slots {
    /// Creates slots with these limits.
    pub fn new(limits: SlotLimits) -> Arc<Self> {
        Arc::new(Self {
            limits,
            tasks: Mutex::default(),
        })
    }

    /// Waits for a slot. If the caller drops the future, the task leaves the queue. Never returns `None` while `self`
    /// exists.
    pub async fn acquire(self: &Arc<Self>, place: Place) -> Option<Slot> {
        let (admit, admitted) = oneshot::channel();
        self.tasks().waiting.push_back(Waiting { place, admit });
        self.admit();
        admitted.await.ok()
    }

    fn tasks(&self) -> MutexGuard<'_, Tasks> {
        self.tasks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn admit(self: &Arc<Self>) {
        loop {
            let next = self.tasks().next(&self.limits);
            let Some(Waiting { place, admit }) = next else {
                return;
            };
            let slot = Slot {
                slots: self.clone(),
                place,
            };
            // If the task no longer waits, `send` returns the slot, and the slot is dropped here. This drop takes the
            // lock to admit the next task, so the lock must not be held here.
            drop(admit.send(slot));
        }
    }
}

impl Tasks {
    /// Removes the next task within the limits from the waiting tasks, and counts it as running.
    fn next(&mut self, limits: &SlotLimits) -> Option<Waiting> {
        self.waiting.retain(|one| !one.admit.is_closed());
        let admissible = self.waiting.iter().enumerate();
        let admissible = admissible.filter(|(_, one)| self.fits(&one.place, limits));
        let (next, _) = admissible.min_by_key(|(_, one)| self.running_in(&one.place.namespace))?;
        let next = self.waiting.remove(next)?;
        self.running.push(next.place.clone());
        Some(next)
    }

    fn fits(&self, place: &Place, limits: &SlotLimits) -> bool {
        let of_store = self.running.iter().filter(|one| one.store == place.store);
        if of_store.count() >= limits.per_store {
            return false;
        }
        let in_process = self.running.iter().filter(|one| !one.in_pod).count();
        place.in_pod
            || (in_process < limits.concurrent
                && self.running_in(&place.namespace) < limits.per_namespace)
    }

    fn running_in(&self, namespace: &str) -> usize {
        let running = self.running.iter();
        running
            .filter(|one| !one.in_pod && one.namespace == namespace)
            .count()
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt;

    use super::*;

    fn slots() -> Arc<Slots> {
        Slots::new(SlotLimits {
            concurrent: 4,
            per_store: 2,
            per_namespace: 2,
        })
    }

    fn place(namespace: &str, store: &str) -> Place {
        Place {
            namespace: namespace.to_owned(),
            store: store.to_owned(),
            in_pod: false,
        }
    }

    #[tokio::test]
    async fn namespace_cannot_occupy_all_slots() {
        let slots = slots();
        let mut running = Vec::new();
        for store in ["s1", "s2"] {
            running.push(slots.acquire(place("greedy", store)).await);
        }
        // The third task of the namespace must wait, so that two slots remain for other namespaces.
        let mut third = Box::pin(slots.acquire(place("greedy", "s3")));
        assert!(third.as_mut().now_or_never().is_none());
        for namespace in ["a", "b"] {
            let slot = slots.acquire(place(namespace, "s3")).now_or_never();
            running.push(slot.unwrap());
        }
        drop(running);
        assert!(third.await.is_some());
    }

    #[tokio::test]
    async fn namespace_with_fewest_running_tasks_is_next() {
        let slots = slots();
        let mut running = Vec::new();
        for (namespace, store) in [("a", "s1"), ("a", "s2"), ("b", "s3"), ("b", "s4")] {
            running.push(slots.acquire(place(namespace, store)).await);
        }
        let mut older = Box::pin(slots.acquire(place("a", "s5")));
        let mut newer = Box::pin(slots.acquire(place("c", "s6")));
        assert!(older.as_mut().now_or_never().is_none());
        assert!(newer.as_mut().now_or_never().is_none());
        drop(running.swap_remove(0));
        assert!(older.as_mut().now_or_never().is_none());
        assert!(newer.await.is_some());
        assert!(older.await.is_some());
    }

    #[test]
    fn namespace_gets_at_most_half_of_read_slots_of_shared_operator() {
        let own = SlotLimits::of_reads(&Scope::namespace("n"));
        assert_eq!((own.concurrent, own.per_namespace), (4, 4));
        for shared in [Scope::Annotated, Scope::All] {
            let limits = SlotLimits::of_reads(&shared);
            assert_eq!((limits.concurrent, limits.per_namespace), (4, 2));
        }
    }

    #[tokio::test]
    async fn canceled_task_leaves_slot_queue() {
        let slots = slots();
        let first = slots.acquire(place("a", "s")).await;
        let second = slots.acquire(place("b", "s")).await;
        let mut abandoned = Box::pin(slots.acquire(place("c", "s")));
        let mut next = Box::pin(slots.acquire(place("d", "s")));
        assert!(abandoned.as_mut().now_or_never().is_none());
        assert!(next.as_mut().now_or_never().is_none());
        drop(abandoned);
        drop(first);
        assert!(next.await.is_some());
        drop(second);
    }
}
