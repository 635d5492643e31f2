//! The shards of an operator. Each object belongs to one shard by its namespace and name, and a process reconciles only
//! the objects of the shards whose Leases it holds (invariant 40).
//!
//! An operator without `--shards` has one shard, which its leader always holds.

mod assign;
pub mod keeper;
mod ring;

#[cfg(test)]
mod tests;

use std::hash::Hasher;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use fnv::FnvHasher;
use kube::Resource;
use tokio::sync::{Notify, mpsc};

/// The shards of one process, and the reconciles that run in each shard.
#[derive(Clone, Debug)]
pub struct Shards(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    count: u16,
    slots: Mutex<Vec<Slot>>,
    /// For each kind that the process reconciles, the channel to which acquired shards are sent.
    listeners: Mutex<Vec<mpsc::UnboundedSender<u16>>>,
    /// Notified when the last reconcile of a shard in [`State::Leaving`] ends.
    idle: Notify,
}

/// One shard in this process.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Slot {
    pub(crate) state: State,
    /// The number of reconciles that have not ended.
    pub(crate) running: usize,
}

/// Whether this process may reconcile the objects of a shard.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum State {
    /// This process does not hold the Lease.
    #[default]
    Free,
    /// This process holds the Lease, and reconciles the objects.
    Held,
    /// This process holds the Lease until its running reconciles have ended, and starts no new reconciles.
    Leaving,
}

impl Slot {
    /// Whether this process needs the Lease of this shard, so that no other process may take the Lease.
    pub(crate) fn needs_lease(self) -> bool {
        self.state == State::Held || self.running > 0
    }
}

/// A running reconcile. While it exists, the Lease of its shard is not released (invariant 40).
#[derive(Debug)]
pub(crate) struct Visit {
    shards: Shards,
    shard: u16,
}

impl Drop for Visit {
    fn drop(&mut self) {
        let mut slots = self.shards.slots();
        let Some(slot) = slots.get_mut(usize::from(self.shard)) else {
            return;
        };
        slot.running = slot.running.saturating_sub(1);
        if slot.running == 0 && slot.state == State::Leaving {
            self.shards.0.idle.notify_one();
        }
    }
}

impl Shards {
    /// The only shard of an operator that is not divided. The process holds this shard.
    pub fn undivided() -> Self {
        let shards = Self::divided(1);
        shards.hold(0);
        shards
    }

    /// The shards of an operator that is divided into `count` shards. The process holds none of them.
    pub fn divided(count: u16) -> Self {
        let count = count.max(1);
        Self(Arc::new(Inner {
            count,
            slots: Mutex::new(vec![Slot::default(); usize::from(count)]),
            listeners: Mutex::default(),
            idle: Notify::new(),
        }))
    }

    /// The number of shards.
    pub fn count(&self) -> u16 {
        self.0.count
    }

    /// The shard of an object. Replicas of different releases must agree on the shard, so this function must not
    /// change.
    pub fn of(&self, namespace: &str, name: &str) -> u16 {
        let mut hasher = FnvHasher::default();
        hasher.write(namespace.as_bytes());
        hasher.write(b"/");
        hasher.write(name.as_bytes());
        let hash = hasher.finish();
        // The lowest bits of an FNV hash depend only on the lowest bits of the characters, so the upper half of the
        // hash is mixed in.
        u16::try_from((hash ^ (hash >> 32)) % u64::from(self.0.count)).unwrap_or_default()
    }

    /// The shard of an object.
    pub(crate) fn of_object<K: Resource>(&self, object: &K) -> u16 {
        let namespace = object.meta().namespace.as_deref();
        let name = object.meta().name.as_deref();
        self.of(namespace.unwrap_or_default(), name.unwrap_or_default())
    }

    /// Whether this process holds the shard of the object.
    pub fn holds<K: Resource>(&self, object: &K) -> bool {
        let shard = self.of_object(object);
        let slots = self.slots();
        let slot = slots.get(usize::from(shard));
        slot.is_some_and(|slot| slot.state == State::Held)
    }

    /// Invariant 40: begins a reconcile of the object. `None` if this process must not reconcile the object, because
    /// this process does not hold the shard of the object.
    pub(crate) fn enter(&self, namespace: &str, name: &str) -> Option<Visit> {
        let shard = self.of(namespace, name);
        let mut slots = self.slots();
        let slot = slots.get_mut(usize::from(shard))?;
        if slot.state != State::Held {
            return None;
        }
        slot.running += 1;
        Some(Visit {
            shards: self.clone(),
            shard,
        })
    }

    /// Receives each shard that this process holds or acquires. `None` if the operator is not divided. A shard that is
    /// acquired during this call may be received twice.
    pub(crate) fn acquisitions(&self) -> Option<mpsc::UnboundedReceiver<u16>> {
        if self.0.count == 1 {
            return None;
        }
        let (sender, acquisitions) = mpsc::unbounded_channel();
        let mut listeners = self.listeners();
        for (shard, slot) in (0..).zip(self.all()) {
            if slot.state == State::Held {
                let _ = sender.send(shard);
            }
        }
        listeners.push(sender);
        Some(acquisitions)
    }

    /// The shards that this process holds, as a line of text. `None` if the operator is not divided.
    pub(crate) fn summary(&self) -> Option<String> {
        let slots = self.all();
        let held = slots.iter().enumerate();
        let held = held.filter(|(_, slot)| slot.state == State::Held);
        let held: Vec<String> = held.map(|(shard, _)| shard.to_string()).collect();
        let count = self.0.count;
        match held[..] {
            _ if count == 1 => None,
            [] => Some(format!("holds no shard of {count}\n")),
            _ => Some(format!("holds shards {} of {count}\n", held.join(", "))),
        }
    }

    /// The state of each shard.
    pub(crate) fn all(&self) -> Vec<Slot> {
        self.slots().clone()
    }

    /// Begins to reconcile the objects of a shard, after this process has taken the Lease of the shard.
    pub(crate) fn hold(&self, shard: u16) {
        let before = self.set(shard, State::Held);
        if before != Some(State::Held) {
            self.listeners()
                .retain(|listener| listener.send(shard).is_ok());
        }
    }

    /// Starts no more reconciles of the shard. Returns true if no reconcile of the shard is running, so that the Lease
    /// may be released.
    pub(crate) fn leave(&self, shard: u16) -> bool {
        self.set(shard, State::Leaving);
        let slots = self.slots();
        let slot = slots.get(usize::from(shard));
        slot.is_none_or(|slot| slot.running == 0)
    }

    /// Records that this process has released the Lease of the shard.
    pub(crate) fn free(&self, shard: u16) {
        self.set(shard, State::Free);
    }

    /// Waits until the last reconcile of a shard in [`State::Leaving`] ends.
    pub(crate) async fn idle(&self) {
        self.0.idle.notified().await;
    }

    fn set(&self, shard: u16, state: State) -> Option<State> {
        let mut slots = self.slots();
        let slot = slots.get_mut(usize::from(shard))?;
        Some(std::mem::replace(&mut slot.state, state))
    }

    fn listeners(&self) -> MutexGuard<'_, Vec<mpsc::UnboundedSender<u16>>> {
        let listeners = self.0.listeners.lock();
        listeners.unwrap_or_else(PoisonError::into_inner)
    }

    fn slots(&self) -> MutexGuard<'_, Vec<Slot>> {
        self.0.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
