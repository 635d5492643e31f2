//! What runs beside the reconciles, told as cases on stores that take nothing until they are let.

use std::sync::atomic::{AtomicBool, Ordering};

use async_trait::async_trait;
use bytes::Bytes;
use etcd::fake::FakeEtcd;
use store::{Error, LocalStore, Object, ObjectStream, Store, Unfinished, Upload};

use super::*;
use crate::snapshot::Stored;
use crate::transfer::{Name, Transfer};

const LIMITS: Limits = Limits {
    at_a_time: 4,
    to_one_store: 2,
    longest_pause: 30,
    uncounted: Duration::from_mins(10),
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

/// A transfer that runs as soon as it is its turn.
struct Uncounted(Transfer);

impl Worker for Uncounted {
    type Product = Stored;

    fn store(&self) -> String {
        Worker::store(&self.0)
    }

    fn run<'a>(
        &'a self,
        meter: &'a Meter,
        cancelled: &'a CancellationToken,
    ) -> BoxFuture<'a, Result<Stored, Trouble>> {
        Worker::run(&self.0, meter, cancelled)
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
        Self::with(LIMITS)
    }

    fn with(limits: Limits) -> Self {
        let (sender, news) = mpsc::unbounded_channel();
        let shutdown = CancellationToken::new();
        Self {
            workers: Workers::new(limits, shutdown.clone(), sender),
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

    fn begin_at(&self, place: &str, uid: &str, wanted: impl Fn() -> bool + Send + Sync + 'static) {
        let transfer = Uncounted(self.transfer(place, uid));
        self.workers.begin(uid, transfer, wanted);
    }

    fn transfer(&self, place: &str, uid: &str) -> Transfer {
        let url = |name: &str| format!("http://{name}:2379");
        Transfer {
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
        }
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

impl Worker for Elsewhere {
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

/// Invariant 10: whoever comes after this process knows of the attempt.
#[tokio::test]
async fn a_transfer_moves_nothing_before_its_attempt_is_counted() {
    let mut case = Case::new();
    case.gate.add_permits(1);
    let work = |case: &Case, uid: &str| case.workers.observe(uid).work;
    for uid in ["0", "1", "2"] {
        let transfer = case.transfer("slow", uid);
        case.workers.begin(uid, transfer, || true);
    }
    // It is told when it is their turn.
    for _ in 0..LIMITS.to_one_store {
        case.news.recv().await.unwrap();
    }
    assert_eq!(work(&case, "0"), Work::Called);
    assert_eq!(work(&case, "1"), Work::Called);
    assert!(case.workers.observe("0").work.is_active());
    // One that waits for its turn is not started by it, and they hold their places.
    case.workers.start("2", 1);
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert_eq!(work(&case, "2"), Work::Queued);
    assert!(std::fs::read_dir(case.dir.path()).unwrap().next().is_none());
    case.workers.start("0", 3);
    case.until("it has run", |case| {
        matches!(work(case, "0"), Work::Ended(_))
    })
    .await;
    assert_eq!(case.workers.observe("0").counted, Some(3));
    case.until("the next is called", |case| work(case, "2") == Work::Called)
        .await;
    assert_eq!(work(&case, "1"), Work::Called);
    // The next attempt of this process knows its count, and waits for it again.
    let transfer = case.transfer("other", "0");
    case.workers.begin("0", transfer, || true);
    case.until("it is called again", |case| work(case, "0") == Work::Called)
        .await;
    assert_eq!(case.workers.observe("0").counted, Some(3));
    // Given up, it ends.
    case.shutdown.cancel();
    tokio::time::timeout(Duration::from_mins(1), case.workers.ended())
        .await
        .unwrap();
}

/// Where the API server takes no record, others get their turn.
#[tokio::test]
async fn a_transfer_that_is_not_counted_gives_its_turn_to_others() {
    let uncounted = Duration::from_millis(300);
    let case = Case::with(Limits {
        uncounted,
        ..LIMITS
    });
    // One more than have a turn at that store.
    let all: Vec<String> = (0..=LIMITS.to_one_store)
        .map(|index| index.to_string())
        .collect();
    for uid in &all {
        let transfer = case.transfer("slow", uid);
        case.workers.begin(uid, transfer, || true);
    }
    // So ends what was called, and nothing else.
    let is_given_up = |case: &Case, uid: &String| {
        let pace = case.workers.observe(uid);
        assert_eq!(pace.counted, None, "{uid}");
        match pace.work {
            Work::Queued | Work::Called => false,
            Work::Ended(Err(trouble)) => trouble.message.contains("API server"),
            other => panic!("{uid}: {other:?}"),
        }
    };
    case.until("all had their turn", |case| {
        all.iter().all(|uid| is_given_up(case, uid))
    })
    .await;
    // The last one had to wait for it.
    let waited = |uid: &String| case.workers.observe(uid).waited;
    let (last, before) = all.split_last().unwrap();
    assert!(waited(last) >= uncounted, "{:?}", waited(last));
    for uid in before {
        assert!(waited(uid) < waited(last), "{uid}: {:?}", waited(uid));
    }
}
