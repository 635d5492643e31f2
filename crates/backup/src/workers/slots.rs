//! Admits tasks within three limits: for all tasks, per namespace and per store.
//!
//! A waiting task occupies no slot, so the tasks of a busy store or namespace do not delay other tasks. Among the
//! waiting tasks that the limits permit, a task of the namespace with the fewest running tasks is next. If there are
//! several, the oldest task is next.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::oneshot;

use super::Limits;

/// The properties of a task to which limits apply.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Place {
    pub(super) namespace: String,
    /// The endpoint and location of the store.
    pub(super) store: String,
    /// True if a pod does the work.
    pub(super) in_pod: bool,
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

/// The slots of the tasks of one kind.
pub(super) struct Slots {
    limits: Limits,
    tasks: Mutex<Tasks>,
}

/// The permission to run. When it is dropped, the next task is admitted.
pub(super) struct Slot {
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
    pub(super) fn new(limits: Limits) -> Arc<Self> {
        Arc::new(Self {
            limits,
            tasks: Mutex::default(),
        })
    }

    /// Waits for a slot. If the future is dropped, the task leaves the queue.
    pub(super) async fn acquire(self: &Arc<Self>, place: Place) -> Option<Slot> {
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
            // If the task no longer waits, the slot is dropped here, which admits the next task. Dropping a slot needs
            // the lock, so the lock is not held here.
            drop(admit.send(slot));
        }
    }
}

impl Tasks {
    /// Takes the next task that the limits permit from the queue, and counts it as running.
    fn next(&mut self, limits: &Limits) -> Option<Waiting> {
        self.waiting.retain(|one| !one.admit.is_closed());
        let admissible = self.waiting.iter().enumerate();
        let admissible = admissible.filter(|(_, one)| self.fits(&one.place, limits));
        let (next, _) = admissible.min_by_key(|(_, one)| self.running_in(&one.place.namespace))?;
        let next = self.waiting.remove(next)?;
        self.running.push(next.place.clone());
        Some(next)
    }

    fn fits(&self, place: &Place, limits: &Limits) -> bool {
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
    use std::time::Duration;

    use futures::FutureExt;

    use super::*;

    fn slots() -> Arc<Slots> {
        Slots::new(Limits {
            concurrent: 4,
            per_store: 2,
            per_namespace: 2,
            max_backoff_seconds: 30,
            record_timeout: Duration::from_mins(10),
            timeout: Duration::MAX,
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
        // The third task of the namespace waits and occupies no slot.
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

    #[tokio::test]
    async fn canceled_task_leaves_queue() {
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
