//! What takes long and runs beside the reconciles, transfers and removals: a few at a time, each for one EtcdBackup,
//! tracked by UID.
//!
//! What is kept here is lost with the process, and may be: what was running is begun again, a backup that was
//! complete is found in the store.

use std::collections::HashMap;
use std::panic::AssertUnwindSafe;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use futures::FutureExt;
use futures::future::BoxFuture;
use jiff::Timestamp;
use store::progress::Meter;
use tokio::sync::{Notify, Semaphore, mpsc};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::reason::{Reason, Trouble};
use crate::snapshot::{Pace, Work};

/// How often the EtcdBackup of what runs is looked for.
const WANTED: Duration = Duration::from_secs(1);

enum State<T> {
    Queued,
    Called,
    Running,
    Ended(Result<T, Trouble>),
}

/// Something that takes long. Given up, it leaves nothing behind.
pub(crate) trait Worker: Send + Sync + 'static {
    /// What comes of it.
    type Product: Clone + Send + 'static;

    /// The store it uses: one that is slow holds up no more than its part of what runs at the same time.
    fn store(&self) -> String;

    /// Whether its bytes move in another process, so that it takes nothing of what this one has.
    fn is_elsewhere(&self) -> bool {
        false
    }

    /// Whether each attempt is counted before it runs: one that takes this process with it is known by that.
    fn is_counted(&self) -> bool {
        false
    }

    /// Does it.
    fn run<'a>(
        &'a self,
        meter: &'a Meter,
        cancelled: &'a CancellationToken,
    ) -> BoxFuture<'a, Result<Self::Product, Trouble>>;
}

/// How much runs at the same time, and how long failures are waited out.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    /// In all.
    pub(crate) at_a_time: usize,
    /// To one store.
    pub(crate) to_one_store: usize,
    /// The longest pause between two attempts, in seconds.
    pub(crate) longest_pause: u64,
    /// How long a job whose turn it is waits for being counted: it holds up others meanwhile.
    pub(crate) uncounted: Duration,
}

struct Entry<T> {
    state: State<T>,
    meter: Arc<Meter>,
    cancelled: CancellationToken,
    attempts: u32,
    not_before: Option<Timestamp>,
    /// Why the attempt before this one failed.
    before: Option<Trouble>,
    /// How long the attempts before this one waited for their turn, and this one too once it runs.
    waited: Duration,
    queued: Instant,
    /// What the status counted with the attempts of this process, if that was done.
    counted: Option<i32>,
    /// Told that this attempt is.
    start: Arc<Notify>,
}

impl<T> Entry<T> {
    fn waited(&self) -> Duration {
        match self.state {
            State::Queued => self.waited + self.queued.elapsed(),
            State::Called | State::Running | State::Ended(_) => self.waited,
        }
    }
}

/// All that runs of one kind.
pub(crate) struct Workers<T> {
    limits: Limits,
    slots: Semaphore,
    stores: Mutex<HashMap<String, Arc<Semaphore>>>,
    entries: Mutex<HashMap<String, Entry<T>>>,
    tasks: TaskTracker,
    shutdown: CancellationToken,
    /// Told that something has ended.
    news: mpsc::UnboundedSender<()>,
}

impl<T: Clone + Send + 'static> Workers<T> {
    pub(crate) fn new(
        limits: Limits,
        shutdown: CancellationToken,
        news: mpsc::UnboundedSender<()>,
    ) -> Arc<Self> {
        Arc::new(Self {
            limits,
            slots: Semaphore::new(limits.at_a_time),
            stores: Mutex::default(),
            entries: Mutex::default(),
            tasks: TaskTracker::new(),
            shutdown,
            news,
        })
    }

    fn with<A>(&self, look: impl FnOnce(&mut HashMap<String, Entry<T>>) -> A) -> A {
        look(&mut self.entries.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// What is known of an EtcdBackup's work; the store is not asked here.
    pub(crate) fn observe(&self, uid: &str) -> Pace<T> {
        self.with(|entries| match entries.get(uid) {
            None => Pace::default(),
            Some(entry) => Pace {
                work: match &entry.state {
                    State::Queued => Work::Queued,
                    State::Called => Work::Called,
                    State::Running => Work::Running(entry.meter.read()),
                    State::Ended(outcome) => Work::Ended(outcome.clone()),
                },
                not_before: entry.not_before,
                before: entry.before.clone(),
                waited: entry.waited(),
                counted: entry.counted,
            },
        })
    }

    /// How often the work of an EtcdBackup failed since it last succeeded.
    pub(crate) fn failures(&self, uid: &str) -> u32 {
        self.with(|entries| entries.get(uid).map_or(0, |entry| entry.attempts))
    }

    /// Starts a job unless one is under way. `wanted` says whether its EtcdBackup is still there.
    pub(crate) fn begin(
        self: &Arc<Self>,
        uid: &str,
        job: impl Worker<Product = T>,
        wanted: impl Fn() -> bool + Send + Sync + 'static,
    ) {
        let cancelled = self.shutdown.child_token();
        let meter = Arc::new(Meter::default());
        let fresh = self.with(|entries| {
            prune(entries);
            let old = entries.get(uid);
            if matches!(
                old,
                Some(Entry {
                    state: State::Queued | State::Called | State::Running,
                    ..
                })
            ) {
                return false;
            }
            let attempts = old.map_or(0, |entry| entry.attempts);
            let before = old.and_then(|entry| match &entry.state {
                State::Ended(Err(trouble)) => Some(trouble.clone()),
                _ => None,
            });
            let entry = Entry {
                state: State::Queued,
                meter: meter.clone(),
                cancelled: cancelled.clone(),
                attempts,
                not_before: None,
                before,
                waited: old.map(Entry::waited).unwrap_or_default(),
                queued: Instant::now(),
                counted: old.and_then(|entry| entry.counted),
                start: Arc::default(),
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
            let work = workers.work(&uid, &job, &meter, &cancelled);
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
        job: &impl Worker<Product = T>,
        meter: &Meter,
        cancelled: &CancellationToken,
    ) -> Result<T, Trouble> {
        let store = self.slots_of(job.store());
        // In turn: first among those of the same store, then among all.
        let slots = tokio::select! {
            slots = async {
                let of_store = store.acquire().await.ok();
                // A pod that does not start holds up those of its claim alone.
                let of_all = if job.is_elsewhere() { None } else { self.slots.acquire().await.ok() };
                (of_store, of_all)
            } => Some(slots),
            // The job sees it at once.
            () = cancelled.cancelled() => None,
        };
        let waits = job.is_counted() && slots.is_some();
        let start = self.with(|entries| {
            let entry = entries.get_mut(uid)?;
            entry.waited = entry.waited();
            entry.state = if waits { State::Called } else { State::Running };
            waits.then(|| entry.start.clone())
        });
        if let Some(start) = start {
            self.counted(&start, cancelled).await?;
        }
        // A defect in here must not look like something that runs for ever.
        let run = AssertUnwindSafe(job.run(meter, cancelled)).catch_unwind();
        let outcome = run.await.unwrap_or_else(|_| {
            Err(Trouble::new(
                Reason::StepFailed,
                "it broke off by a defect of the operator: see its log",
            ))
        });
        drop(slots);
        outcome
    }

    /// Waits until the status counts the attempt, which [`Workers::start`] tells.
    async fn counted(&self, start: &Notify, cancelled: &CancellationToken) -> Result<(), Trouble> {
        let _ = self.news.send(());
        tokio::select! {
            () = start.notified() => Ok(()),
            // The job sees it at once.
            () = cancelled.cancelled() => Ok(()),
            () = tokio::time::sleep(self.limits.uncounted) => Err(Trouble::new(
                Reason::StepFailed,
                "the attempt could not be recorded in the status in time: the API server does not take it, or the operator has \
                 too much to look at; see the operator's log",
            )),
        }
    }

    /// Lets a job run whose turn it is: its attempt is counted.
    pub(crate) fn start(&self, uid: &str, count: i32) {
        self.with(|entries| {
            if let Some(entry) = entries.get_mut(uid)
                && matches!(entry.state, State::Called)
            {
                entry.state = State::Running;
                entry.counted = Some(count);
                entry.start.notify_one();
            }
        });
    }

    fn slots_of(&self, store: String) -> Arc<Semaphore> {
        let mut stores = self.stores.lock().unwrap_or_else(PoisonError::into_inner);
        // Nobody waits for or holds those that are known here alone.
        stores.retain(|_, slots| Arc::strong_count(slots) > 1);
        let slots = || Arc::new(Semaphore::new(self.limits.to_one_store));
        stores.entry(store).or_insert_with(slots).clone()
    }

    fn end(&self, uid: &str, outcome: Result<T, Trouble>) {
        self.with(|entries| {
            if let Some(entry) = entries.get_mut(uid) {
                if outcome.is_err() {
                    let pause = 1_u64
                        .wrapping_shl(entry.attempts.min(10))
                        .min(self.limits.longest_pause);
                    entry.attempts = entry.attempts.saturating_add(1);
                    entry.not_before = Timestamp::now()
                        .checked_add(Duration::from_secs(pause))
                        .ok();
                }
                entry.state = State::Ended(outcome);
            }
        });
    }

    /// Gives up what is under way; it ends soon after.
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

    /// Waits until everything has ended; it is given up by the shutdown.
    pub(crate) async fn ended(&self) {
        self.tasks.close();
        self.tasks.wait().await;
    }
}

/// Forgets failures nobody asked about for an hour: their EtcdBackups were deleted.
fn prune<T>(entries: &mut HashMap<String, Entry<T>>) {
    let hour = Duration::from_hours(1);
    let now = Timestamp::now();
    entries.retain(|_, entry| {
        !matches!(entry.state, State::Ended(Err(_)))
            || entry.not_before.is_none_or(|time| time + hour > now)
    });
}

#[cfg(test)]
mod tests;
