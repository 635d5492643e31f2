//! Runs transfers and removals in background tasks, and limits the number of concurrent tasks. Each task belongs to one
//! EtcdBackup, identified by its UID.
//!
//! The state is only in memory. After a restart of the operator, interrupted tasks start again, unless the store
//! already contains the complete backup.

use std::collections::HashMap;
use std::panic::AssertUnwindSafe;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use api::EtcdBackup;
use futures::FutureExt;
use futures::future::BoxFuture;
use jiff::Timestamp;
use kube::runtime::reflector::ObjectRef;
use runtime::controller::Guarded;
use runtime::logs::in_background;
use runtime::slots::{Place, SlotLimits, Slots};
use store::progress::Meter;
use tokio::sync::{Notify, mpsc};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::reason::{Reason, Trouble};
use crate::snapshot::{Work, WorkState};

/// Interval at which a task checks that its EtcdBackup exists.
const EXISTENCE_POLL: Duration = Duration::from_secs(1);

/// The EtcdBackup to which a task belongs.
pub(crate) type Owner = ObjectRef<Guarded<EtcdBackup>>;

enum State<T> {
    Queued,
    Ready,
    Running,
    Ended(Result<T, Trouble>),
}

/// A transfer or a removal. A canceled transfer discards its upload, or completes the backup if its object is already
/// committed.
pub(crate) trait Worker: Send + Sync + 'static {
    /// The result of the task.
    type Output: Clone + Send + 'static;

    /// The endpoint and the location of the store, for the limit per store.
    fn store(&self) -> String;

    /// True if a pod does the work. Only the limit per store applies to such a task, because it uses no memory of this
    /// process.
    fn runs_in_pod(&self) -> bool {
        false
    }

    /// True if the task may start only after the status counts the attempt. The count shows attempts that crash this
    /// process.
    fn records_attempts(&self) -> bool {
        false
    }

    fn run<'a>(
        &'a self,
        progress: &'a Progress,
        cancelled: &'a CancellationToken,
    ) -> BoxFuture<'a, Result<Self::Output, Trouble>>;
}

/// The progress of a running task.
#[derive(Default)]
pub(crate) struct Progress {
    /// Counts the transferred bytes.
    pub(crate) meter: Meter,
    /// The reason why the task makes no progress; `None` if it makes progress.
    obstacle: Mutex<Option<Trouble>>,
}

impl Progress {
    /// Sets the reason why the task makes no progress. `None` means that it makes progress.
    pub(crate) fn report(&self, obstacle: Option<Trouble>) {
        *self.obstacle.lock().unwrap_or_else(PoisonError::into_inner) = obstacle;
    }

    pub(crate) fn obstacle(&self) -> Option<Trouble> {
        let obstacle = self.obstacle.lock();
        obstacle.unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// Limits of concurrent tasks and of their retries.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    /// Limit of concurrent tasks.
    pub(crate) concurrent: usize,
    /// Limit of concurrent tasks per store.
    pub(crate) per_store: usize,
    /// Limit of concurrent tasks per namespace.
    pub(crate) per_namespace: usize,
    /// Maximum delay between two attempts.
    pub(crate) max_backoff_seconds: u64,
    /// Time limit for the update of the status before the task starts. While the task waits for this update, it
    /// occupies its slot.
    pub(crate) record_timeout: Duration,
    /// Time limit of one attempt.
    pub(crate) timeout: Duration,
}

struct Entry<T> {
    state: State<T>,
    progress: Arc<Progress>,
    cancelled: CancellationToken,
    attempts: u32,
    not_before: Option<Timestamp>,
    /// The failure of the previous attempt, if it failed.
    last_failure: Option<Trouble>,
    /// The total time of all attempts in the queue. The time of this attempt is added when it leaves the queue.
    queue_time: Duration,
    queued: Instant,
    /// The number of unfinished attempts in the status, including this attempt. `None` until the status counts this
    /// attempt.
    recorded_count: Option<i32>,
    /// Notified when the status counts this attempt.
    start: Arc<Notify>,
}

impl<T> Entry<T> {
    fn total_queue_time(&self) -> Duration {
        match self.state {
            State::Queued => self.queue_time + self.queued.elapsed(),
            State::Ready | State::Running | State::Ended(_) => self.queue_time,
        }
    }
}

/// All transfers, or all removals, of this process.
pub(crate) struct Workers<T> {
    limits: Limits,
    slots: Arc<Slots>,
    entries: Mutex<HashMap<String, Entry<T>>>,
    tasks: TaskTracker,
    shutdown: CancellationToken,
    /// Receives each EtcdBackup whose task has changed its state, so that the EtcdBackup is reconciled.
    changes: mpsc::UnboundedSender<Owner>,
}

impl<T: Clone + Send + 'static> Workers<T> {
    pub(crate) fn new(
        limits: Limits,
        shutdown: CancellationToken,
        changes: mpsc::UnboundedSender<Owner>,
    ) -> Arc<Self> {
        Arc::new(Self {
            limits,
            slots: Slots::new(SlotLimits {
                concurrent: limits.concurrent,
                per_store: limits.per_store,
                per_namespace: limits.per_namespace,
            }),
            entries: Mutex::default(),
            tasks: TaskTracker::new(),
            shutdown,
            changes,
        })
    }

    fn with<A>(&self, access: impl FnOnce(&mut HashMap<String, Entry<T>>) -> A) -> A {
        access(&mut self.entries.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// The state of the task of an EtcdBackup.
    pub(crate) fn observe(&self, uid: &str) -> WorkState<T> {
        self.with(|entries| match entries.get(uid) {
            None => WorkState::default(),
            Some(entry) => WorkState {
                work: match &entry.state {
                    State::Queued => Work::Queued,
                    State::Ready => Work::Ready,
                    State::Running => Work::Running(entry.progress.meter.read()),
                    State::Ended(outcome) => Work::Ended(outcome.clone()),
                },
                obstacle: match &entry.state {
                    State::Running => entry.progress.obstacle(),
                    State::Queued | State::Ready | State::Ended(_) => None,
                },
                not_before: entry.not_before,
                last_failure: entry.last_failure.clone(),
                queue_time: entry.total_queue_time(),
                recorded_count: entry.recorded_count,
            },
        })
    }

    /// Number of failed attempts since the last success.
    pub(crate) fn failures(&self, uid: &str) -> u32 {
        self.with(|entries| entries.get(uid).map_or(0, |entry| entry.attempts))
    }

    /// The time that the task of an EtcdBackup has been in the queue. `None` if it is not queued.
    pub(crate) fn queued_for(&self, uid: &str) -> Option<Duration> {
        self.with(|entries| {
            let entry = entries.get(uid)?;
            matches!(entry.state, State::Queued).then(|| entry.queued.elapsed())
        })
    }

    /// Queues a task for the EtcdBackup with this UID, unless this EtcdBackup has an active task. The task is canceled
    /// when `exists` returns false, because its EtcdBackup was deleted.
    pub(crate) fn enqueue(
        self: &Arc<Self>,
        (owner, uid): (Owner, &str),
        job: impl Worker<Output = T>,
        exists: impl Fn() -> bool + Send + Sync + 'static,
    ) {
        let cancelled = self.shutdown.child_token();
        let progress = Arc::new(Progress::default());
        let is_new = self.with(|entries| {
            prune(entries);
            let old = entries.get(uid);
            if matches!(
                old,
                Some(Entry {
                    state: State::Queued | State::Ready | State::Running,
                    ..
                })
            ) {
                return false;
            }
            let attempts = old.map_or(0, |entry| entry.attempts);
            let last_failure = old.and_then(|entry| match &entry.state {
                State::Ended(Err(trouble)) => Some(trouble.clone()),
                _ => None,
            });
            let entry = Entry {
                state: State::Queued,
                progress: progress.clone(),
                cancelled: cancelled.clone(),
                attempts,
                not_before: None,
                last_failure,
                queue_time: old.map(Entry::total_queue_time).unwrap_or_default(),
                queued: Instant::now(),
                recorded_count: old.and_then(|entry| entry.recorded_count),
                start: Arc::default(),
            };
            entries.insert(uid.to_owned(), entry);
            true
        });
        if !is_new {
            return;
        }
        let (workers, uid) = (self.clone(), uid.to_owned());
        let place = Place {
            namespace: owner.namespace.clone().unwrap_or_default(),
            store: job.store(),
            in_pod: job.runs_in_pod(),
        };
        let task = async move {
            let watch = async {
                while exists() {
                    tokio::time::sleep(EXISTENCE_POLL).await;
                }
            };
            let work = workers.work((&owner, &uid, place), &job, &progress, &cancelled);
            tokio::pin!(work, watch);
            let outcome = tokio::select! {
                outcome = &mut work => Some(outcome),
                () = &mut watch => None,
            };
            if let Some(outcome) = outcome {
                workers.finish(&uid, outcome);
            } else {
                // The EtcdBackup was deleted. The task is canceled, and discards its upload. When the task has ended,
                // its entry is removed.
                cancelled.cancel();
                let _ = work.await;
                workers.with(|entries| entries.remove(&uid));
            }
            let _ = workers.changes.send(owner.clone());
        };
        // `in_background` adds the ID of the reconcile that started the task to the log lines of the task.
        self.tasks.spawn(in_background(task));
    }

    async fn work(
        &self,
        (owner, uid, place): (&Owner, &str, Place),
        job: &impl Worker<Output = T>,
        progress: &Progress,
        cancelled: &CancellationToken,
    ) -> Result<T, Trouble> {
        // The slot is released at the end of this function.
        let acquire = self.slots.acquire(place);
        tokio::pin!(acquire);
        let at_once = acquire.as_mut().now_or_never();
        let queued = at_once.is_none();
        let slot = if let Some(slot) = at_once {
            slot
        } else {
            tokio::select! {
                slot = &mut acquire => slot,
                // A canceled task continues without a slot, because it must discard its upload.
                () = cancelled.cancelled() => None,
            }
        };
        let waits = job.records_attempts() && slot.is_some();
        let start = self.with(|entries| {
            let entry = entries.get_mut(uid)?;
            entry.queue_time = entry.total_queue_time();
            entry.state = if waits { State::Ready } else { State::Running };
            waits.then(|| entry.start.clone())
        });
        if queued || start.is_some() {
            let _ = self.changes.send(owner.clone());
        }
        if let Some(start) = start {
            self.wait_for_record(&start, cancelled).await?;
        }
        // A panic is caught, because the task would stay in the state `Running` without an end.
        let run = AssertUnwindSafe(job.run(progress, cancelled)).catch_unwind();
        tokio::pin!(run);
        let outcome = tokio::select! {
            outcome = &mut run => outcome,
            () = tokio::time::sleep(self.limits.timeout) => {
                cancelled.cancel();
                // A task that succeeds despite this cancellation counts as successful.
                return match run.await {
                    Ok(Ok(done)) => Ok(done),
                    _ => Err(timed_out(self.limits.timeout, progress.obstacle())),
                };
            }
        };
        outcome.unwrap_or_else(|_| {
            Err(Trouble::new(
                Reason::StepFailed,
                "a task of the operator panicked, which is a defect: report it with the operator's log",
            ))
        })
    }

    /// Waits until a reconcile has written the attempt to the status and calls [`Workers::start`].
    async fn wait_for_record(
        &self,
        start: &Notify,
        cancelled: &CancellationToken,
    ) -> Result<(), Trouble> {
        tokio::select! {
            () = start.notified() => Ok(()),
            // A canceled task continues although its attempt is not recorded, because it must discard its upload.
            () = cancelled.cancelled() => Ok(()),
            () = tokio::time::sleep(self.limits.record_timeout) => Err(Trouble::new(
                Reason::StepFailed,
                "the attempt was not recorded in the status in time: the API server rejects the write, or the operator \
                 is overloaded; see the operator's log",
            )),
        }
    }

    /// Starts the ready task of an EtcdBackup. The status now contains `count` unfinished attempts.
    pub(crate) fn start(&self, uid: &str, count: i32) {
        self.with(|entries| {
            if let Some(entry) = entries.get_mut(uid)
                && matches!(entry.state, State::Ready)
            {
                entry.state = State::Running;
                entry.recorded_count = Some(count);
                entry.start.notify_one();
            }
        });
    }

    fn finish(&self, uid: &str, outcome: Result<T, Trouble>) {
        self.with(|entries| {
            if let Some(entry) = entries.get_mut(uid) {
                if outcome.is_err() {
                    let pause = 1_u64
                        .wrapping_shl(entry.attempts.min(10))
                        .min(self.limits.max_backoff_seconds);
                    entry.attempts = entry.attempts.saturating_add(1);
                    entry.not_before = Timestamp::now()
                        .checked_add(Duration::from_secs(pause))
                        .ok();
                }
                entry.state = State::Ended(outcome);
            }
        });
    }

    /// Cancels the task of an EtcdBackup. The function does not wait for the end of the task.
    pub(crate) fn abandon(&self, uid: &str) {
        self.with(|entries| {
            if let Some(entry) = entries.get(uid) {
                entry.cancelled.cancel();
            }
        });
    }

    /// Deletes the state of the task if the task has ended.
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

    /// Waits until all tasks have ended. The shutdown of the process cancels them.
    pub(crate) async fn join(&self) {
        self.tasks.close();
        self.tasks.wait().await;
    }
}

fn timed_out(limit: Duration, obstacle: Option<Trouble>) -> Trouble {
    let limit = limit.as_secs() / 60;
    let why = obstacle.map_or_else(String::new, |obstacle| format!(": {}", obstacle.message));
    Trouble::new(
        Reason::DeadlineExceeded,
        format!("the task did not end within {limit} minutes and is retried{why}"),
    )
}

/// Deletes the state of failed tasks that were not retried for an hour, because their EtcdBackups no longer exist.
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
