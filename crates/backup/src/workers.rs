//! What takes long and runs beside the reconciles, transfers and removals: a few at a time, each for one EtcdBackup,
//! tracked by UID.
//!
//! What is kept here is lost with the process, and may be: what was running is begun again, a backup that was
//! complete is found in the store.

use std::collections::HashMap;
use std::panic::AssertUnwindSafe;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use api::conditions::Reason;
use futures::FutureExt;
use futures::future::BoxFuture;
use jiff::Timestamp;
use tokio::sync::{Semaphore, mpsc};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::observed::{Pace, Trouble, Work};
use crate::transfer::Meter;

/// How often the EtcdBackup of what runs is looked for.
const WANTED: Duration = Duration::from_secs(1);

enum State<T> {
    Queued,
    Running,
    Ended(Result<T, Trouble>),
}

/// Something that takes long. Given up, it leaves nothing behind.
pub(crate) trait Job: Send + Sync + 'static {
    /// What comes of it.
    type Product: Clone + Send + 'static;

    /// The store it uses: one that is slow holds up no more than its part of what runs at the same time.
    fn store(&self) -> String;

    /// Whether its bytes move in another process, so that it takes nothing of what this one has.
    fn is_elsewhere(&self) -> bool {
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
}

impl<T> Entry<T> {
    fn waited(&self) -> Duration {
        match self.state {
            State::Queued => self.waited + self.queued.elapsed(),
            State::Running | State::Ended(_) => self.waited,
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
                    State::Running => Work::Running(entry.meter.read()),
                    State::Ended(outcome) => Work::Ended(outcome.clone()),
                },
                not_before: entry.not_before,
                before: entry.before.clone(),
                waited: entry.waited(),
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
        job: impl Job<Product = T>,
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
                    state: State::Queued | State::Running,
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
        job: &impl Job<Product = T>,
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
        self.with(|entries| {
            if let Some(entry) = entries.get_mut(uid) {
                entry.waited = entry.waited();
                entry.state = State::Running;
            }
        });
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
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use async_trait::async_trait;
    use bytes::Bytes;
    use etcd::fake::FakeEtcd;
    use store::{Error, LocalStore, Object, ObjectStream, Store, Unfinished, Upload};

    use super::*;
    use crate::observed::Stored;
    use crate::transfer::{Name, Transfer};

    const LIMITS: Limits = Limits {
        at_a_time: 4,
        to_one_store: 2,
        longest_pause: 30,
    };

    /// The key a store has a defect for.
    const PANICS: &str = "panics";

    /// A store that takes nothing until the gate is opened.
    struct Gated {
        inner: LocalStore,
        gate: Arc<Semaphore>,
        place: String,
    }

    #[async_trait]
    impl Store for Gated {
        fn location(&self) -> String {
            self.place.clone()
        }
        async fn begin(&self, key: &str) -> Result<Box<dyn Upload>, Error> {
            let _open = self.gate.acquire().await;
            assert!(key != PANICS, "on purpose");
            self.inner.begin(key).await
        }
        async fn put(&self, key: &str, content: Bytes) -> Result<(), Error> {
            self.inner.put(key, content).await
        }
        async fn get(&self, key: &str) -> Result<ObjectStream, Error> {
            self.inner.get(key).await
        }
        async fn head(&self, key: &str) -> Result<Option<Object>, Error> {
            self.inner.head(key).await
        }
        async fn list(&self, prefix: &str) -> Result<Vec<Object>, Error> {
            self.inner.list(prefix).await
        }
        async fn delete(&self, key: &str) -> Result<(), Error> {
            self.inner.delete(key).await
        }
        async fn unfinished(&self, prefix: &str) -> Result<Vec<Unfinished>, Error> {
            self.inner.unfinished(prefix).await
        }
        async fn discard(&self, unfinished: &Unfinished) -> Result<(), Error> {
            self.inner.discard(unfinished).await
        }
    }

    struct Case {
        workers: Arc<Workers<Stored>>,
        news: mpsc::UnboundedReceiver<()>,
        gate: Arc<Semaphore>,
        shutdown: CancellationToken,
        dir: tempfile::TempDir,
    }

    impl Case {
        fn new() -> Self {
            let (sender, news) = mpsc::unbounded_channel();
            let shutdown = CancellationToken::new();
            Self {
                workers: Workers::new(LIMITS, shutdown.clone(), sender),
                news,
                gate: Arc::new(Semaphore::new(0)),
                shutdown,
                dir: tempfile::tempdir().unwrap(),
            }
        }

        /// The snapshot is empty: every attempt fails once the gate is open.
        fn begin(&self, uid: &str, wanted: impl Fn() -> bool + Send + Sync + 'static) {
            // A store of its own for each.
            self.begin_at(uid, uid, wanted);
        }

        fn begin_at(
            &self,
            place: &str,
            uid: &str,
            wanted: impl Fn() -> bool + Send + Sync + 'static,
        ) {
            let url = |name: &str| format!("http://{name}:2379");
            let transfer = Transfer {
                etcd: Arc::new(FakeEtcd::formed(1, &["a"], url)),
                endpoints: vec![url("a")],
                store: Arc::new(Gated {
                    inner: LocalStore::new(self.dir.path()),
                    gate: self.gate.clone(),
                    place: place.to_owned(),
                }),
                name: Name::Exact(uid.to_owned()),
                compress: false,
                uid: uid.to_owned(),
                cluster: None,
                since: Timestamp::UNIX_EPOCH,
            };
            self.workers.begin(uid, transfer, wanted);
        }

        fn count(&self, running: bool) -> usize {
            let all = (0..20).map(|index| self.workers.observe(&index.to_string()).work);
            all.filter(|work| match work {
                Work::Queued => !running,
                Work::Running(_) => running,
                _ => false,
            })
            .count()
        }

        async fn until(&self, what: &str, holds: impl Fn(&Self) -> bool) {
            for _ in 0..6000 {
                if holds(self) {
                    return;
                }
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
            panic!("not within 60 s: {what}");
        }
    }

    #[tokio::test]
    async fn runs_a_few_at_a_time_and_the_others_after_them() {
        let mut case = Case::new();
        for index in 0..7 {
            case.begin(&index.to_string(), || true);
        }
        case.until("four run", |case| case.count(true) == LIMITS.at_a_time)
            .await;
        assert_eq!(case.count(false), 3);
        case.gate.add_permits(1);
        for _ in 0..7 {
            case.news.recv().await.unwrap();
        }
        assert_eq!(case.count(true) + case.count(false), 0);
        for index in 0..7 {
            let observed = case.workers.observe(&index.to_string());
            assert!(matches!(observed.work, Work::Ended(Err(_))), "{observed:?}");
            assert!(observed.not_before.is_some());
        }
    }

    #[tokio::test]
    async fn a_slow_store_delays_no_other_stores_backups() {
        let case = Case::new();
        for index in 0..6 {
            case.begin_at("slow", &index.to_string(), || true);
        }
        case.until("two run", |case| case.count(true) == LIMITS.to_one_store)
            .await;
        case.begin_at("other", "6", || true);
        case.until("the other's too", |case| case.count(true) == 3)
            .await;
        assert!(matches!(case.workers.observe("6").work, Work::Running(_)));
        case.gate.add_permits(1);
        // In the order they came.
        case.until("all have ended", |case| {
            (0..7).all(|index| {
                matches!(
                    case.workers.observe(&index.to_string()).work,
                    Work::Ended(_)
                )
            })
        })
        .await;
    }

    /// By this the time in the queue is not taken for time in which it did not work.
    #[tokio::test]
    async fn the_time_in_the_queue_is_told_and_added_up_until_it_is_forgotten() {
        let mut case = Case::new();
        for index in 0..3 {
            case.begin_at("slow", &index.to_string(), || true);
        }
        case.until("two run", |case| case.count(true) == LIMITS.to_one_store)
            .await;
        let waited = |case: &Case| case.workers.observe("2").waited;
        case.until("it waits", |case| waited(case) > Duration::from_millis(300))
            .await;
        assert!(case.workers.observe("0").waited < Duration::from_millis(300));
        case.gate.add_permits(1);
        for _ in 0..3 {
            case.news.recv().await.unwrap();
        }
        // It stays what it was.
        let ended = waited(&case);
        assert!(ended > Duration::from_millis(300), "{ended:?}");
        assert_eq!(waited(&case), ended);
        case.begin("2", || true);
        case.news.recv().await.unwrap();
        assert!(waited(&case) >= ended);
        case.workers.forget("2");
        assert_eq!(waited(&case), Duration::ZERO);
    }

    /// A pod beside a claim, as far as it matters here: one that does not start.
    struct Elsewhere(String);

    impl Job for Elsewhere {
        type Product = Stored;

        fn store(&self) -> String {
            self.0.clone()
        }

        fn is_elsewhere(&self) -> bool {
            true
        }

        fn run<'a>(
            &'a self,
            _: &'a Meter,
            cancelled: &'a CancellationToken,
        ) -> BoxFuture<'a, Result<Stored, Trouble>> {
            async {
                cancelled.cancelled().await;
                Err(Trouble::new(Reason::StepFailed, "given up"))
            }
            .boxed()
        }
    }

    #[tokio::test]
    async fn pods_that_do_not_start_hold_up_no_other_stores_backups() {
        let case = Case::new();
        for index in 0..10 {
            let claim = Elsewhere(format!("pvc://n/{}", index / 2));
            case.workers.begin(&index.to_string(), claim, || true);
        }
        case.until("all wait for their pods", |case| case.count(true) == 10)
            .await;
        case.begin("10", || true);
        case.until("the other's runs", |case| case.count(true) == 11)
            .await;
        case.shutdown.cancel();
        case.gate.add_permits(1);
        case.workers.ended().await;
    }

    #[tokio::test]
    async fn a_transfer_that_is_under_way_is_not_begun_twice() {
        let mut case = Case::new();
        case.begin("0", || true);
        case.begin("0", || true);
        case.gate.add_permits(1);
        case.news.recv().await.unwrap();
        tokio::time::sleep(Duration::from_millis(100)).await;
        assert!(case.news.try_recv().is_err());
    }

    #[tokio::test]
    async fn the_pause_grows_with_each_failure() {
        let mut case = Case::new();
        case.gate.add_permits(1);
        for pause in [1, 2, 4, 8, 16, 30, 30, 30] {
            let pause = jiff::SignedDuration::from_secs(pause);
            let before = Timestamp::now();
            case.begin("0", || true);
            case.news.recv().await.unwrap();
            let not_before = case.workers.observe("0").not_before.unwrap();
            // It failed between the two.
            let (longest, shortest) = (
                not_before.duration_since(before),
                not_before.duration_since(Timestamp::now()),
            );
            assert!(
                shortest <= pause && pause <= longest,
                "{pause}: {shortest} to {longest}"
            );
        }
        // One that is done with begins from the shortest again.
        case.workers.forget("0");
        assert_eq!(case.workers.observe("0"), Pace::default());
    }

    #[tokio::test]
    async fn a_deleted_backups_transfer_is_given_up_and_forgotten() {
        let mut case = Case::new();
        let there = Arc::new(AtomicBool::new(true));
        let wanted = there.clone();
        case.begin("0", move || wanted.load(Ordering::SeqCst));
        case.until("it runs", |case| case.count(true) == 1).await;
        there.store(false, Ordering::SeqCst);
        case.news.recv().await.unwrap();
        assert_eq!(case.workers.observe("0"), Pace::default());
        assert!(std::fs::read_dir(case.dir.path()).unwrap().next().is_none());
    }

    #[tokio::test]
    async fn a_defect_ends_the_transfer_and_not_the_others() {
        let mut case = Case::new();
        case.gate.add_permits(1);
        case.begin(PANICS, || true);
        case.begin("0", || true);
        for _ in 0..2 {
            case.news.recv().await.unwrap();
        }
        match case.workers.observe(PANICS).work {
            Work::Ended(Err(trouble)) => assert!(trouble.message.contains("defect"), "{trouble:?}"),
            other => panic!("{other:?}"),
        }
        assert!(matches!(
            case.workers.observe("0").work,
            Work::Ended(Err(_))
        ));
    }

    #[tokio::test]
    async fn one_that_is_abandoned_ends_and_so_do_all_at_the_shutdown() {
        let mut case = Case::new();
        case.begin("0", || true);
        case.until("it runs", |case| case.count(true) == 1).await;
        case.workers.abandon("0");
        case.news.recv().await.unwrap();
        match case.workers.observe("0").work {
            Work::Ended(Err(trouble)) => assert_eq!(trouble.reason, Reason::StepFailed),
            other => panic!("{other:?}"),
        }
        for index in 1..9 {
            case.begin(&index.to_string(), || true);
        }
        case.shutdown.cancel();
        tokio::time::timeout(Duration::from_mins(1), case.workers.ended())
            .await
            .unwrap();
    }
}
