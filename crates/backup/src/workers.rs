//! The transfers this process runs: a few at a time, each for one EtcdBackup, tracked by UID.
//!
//! What is kept here is lost with the process, and may be: a transfer that was running is begun again, one that
//! was complete is found in the store.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use jiff::Timestamp;
use tokio::sync::{Semaphore, mpsc};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::observed::{Observed, Place, Stored, Trouble, Work};
use crate::transfer::{Meter, Transfer};

/// Transfers that move bytes at the same time: each takes 32 MiB of memory.
const AT_A_TIME: usize = 4;

/// How often a running transfer's EtcdBackup is looked for.
const WANTED: Duration = Duration::from_secs(1);

/// The longest pause between two attempts.
const LONGEST_PAUSE: u64 = 30;

enum State {
    Queued,
    Running,
    Ended(Result<Stored, Trouble>),
}

struct Entry {
    state: State,
    meter: Arc<Meter>,
    cancelled: CancellationToken,
    attempts: u32,
    not_before: Option<Timestamp>,
}

/// All transfers.
pub(crate) struct Workers {
    slots: Arc<Semaphore>,
    entries: Mutex<HashMap<String, Entry>>,
    tasks: TaskTracker,
    shutdown: CancellationToken,
    /// Told that a transfer has ended.
    news: mpsc::UnboundedSender<()>,
}

impl Workers {
    pub(crate) fn new(shutdown: CancellationToken, news: mpsc::UnboundedSender<()>) -> Arc<Self> {
        Arc::new(Self {
            slots: Arc::new(Semaphore::new(AT_A_TIME)),
            entries: Mutex::default(),
            tasks: TaskTracker::new(),
            shutdown,
            news,
        })
    }

    fn with<T>(&self, look: impl FnOnce(&mut HashMap<String, Entry>) -> T) -> T {
        look(&mut self.entries.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// What is known of an EtcdBackup's transfer; the store is not asked here.
    pub(crate) fn observe(&self, uid: &str) -> Observed {
        self.with(|entries| match entries.get(uid) {
            None => Observed::default(),
            Some(entry) => Observed {
                work: match &entry.state {
                    State::Queued => Work::Queued,
                    State::Running => Work::Running(entry.meter.read()),
                    State::Ended(outcome) => Work::Ended(outcome.clone()),
                },
                not_before: entry.not_before,
                place: Place::NotAsked,
            },
        })
    }

    /// Starts a transfer unless one is under way. `wanted` says whether its EtcdBackup is still there.
    pub(crate) fn begin(
        self: &Arc<Self>,
        uid: &str,
        transfer: Transfer,
        wanted: impl Fn() -> bool + Send + Sync + 'static,
    ) {
        let cancelled = self.shutdown.child_token();
        let meter = Arc::new(Meter::default());
        let fresh = self.with(|entries| {
            let old = entries.get(uid);
            if matches!(
                old,
                Some(Entry {
                    state: State::Queued | State::Running,
                    ..
                })
            ) {
                return false;
            }
            let attempts = old.map_or(0, |entry| entry.attempts);
            let entry = Entry {
                state: State::Queued,
                meter: meter.clone(),
                cancelled: cancelled.clone(),
                attempts,
                not_before: None,
            };
            entries.insert(uid.to_owned(), entry);
            true
        });
        if !fresh {
            return;
        }
        let (workers, uid) = (self.clone(), uid.to_owned());
        self.tasks.spawn(async move {
            let watch = async {
                while wanted() {
                    tokio::time::sleep(WANTED).await;
                }
            };
            let work = workers.work(&uid, &transfer, &meter, &cancelled);
            tokio::pin!(work, watch);
            let outcome = tokio::select! {
                outcome = &mut work => Some(outcome),
                () = &mut watch => None,
            };
            if let Some(outcome) = outcome {
                workers.end(&uid, outcome);
            } else {
                // Deleted: what was uploaded is taken back, and nothing is remembered.
                cancelled.cancel();
                let _ = work.await;
                workers.with(|entries| entries.remove(&uid));
            }
            let _ = workers.news.send(());
        });
    }

    async fn work(
        &self,
        uid: &str,
        transfer: &Transfer,
        meter: &Meter,
        cancelled: &CancellationToken,
    ) -> Result<Stored, Trouble> {
        let slot = tokio::select! {
            slot = self.slots.acquire() => slot.ok(),
            // The transfer sees it at once.
            () = cancelled.cancelled() => None,
        };
        self.with(|entries| {
            if let Some(entry) = entries.get_mut(uid) {
                entry.state = State::Running;
            }
        });
        let outcome = transfer.run(meter, cancelled).await;
        drop(slot);
        outcome
    }

    fn end(&self, uid: &str, outcome: Result<Stored, Trouble>) {
        self.with(|entries| {
            if let Some(entry) = entries.get_mut(uid) {
                if outcome.is_err() {
                    let pause = 1_u64
                        .wrapping_shl(entry.attempts.min(10))
                        .min(LONGEST_PAUSE);
                    entry.attempts = entry.attempts.saturating_add(1);
                    entry.not_before = Timestamp::now()
                        .checked_add(Duration::from_secs(pause))
                        .ok();
                }
                entry.state = State::Ended(outcome);
            }
        });
    }

    /// Gives up the transfer that is under way; it ends soon after.
    pub(crate) fn abandon(&self, uid: &str) {
        self.with(|entries| {
            if let Some(entry) = entries.get(uid) {
                entry.cancelled.cancel();
            }
        });
    }

    /// Forgets an EtcdBackup that is done with.
    pub(crate) fn forget(&self, uid: &str) {
        self.with(|entries| {
            if matches!(
                entries.get(uid),
                Some(Entry {
                    state: State::Ended(_),
                    ..
                })
            ) {
                entries.remove(uid);
            }
        });
    }

    /// Waits until every transfer has ended; they are given up by the shutdown.
    pub(crate) async fn ended(&self) {
        self.tasks.close();
        self.tasks.wait().await;
    }
}
