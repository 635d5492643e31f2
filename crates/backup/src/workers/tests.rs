//! Tests of the workers with stores that wait until the test opens a gate.

use std::sync::atomic::{AtomicBool, Ordering};

use async_trait::async_trait;
use bytes::Bytes;
use etcd::fake::FakeEtcd;
use store::{Error, LocalStore, Object, ObjectStream, Store, Unfinished, Upload};
use tokio::sync::Semaphore;

use super::*;
use crate::snapshot::{EndpointLimits, Stored};
use crate::transfer::{ObjectName, Transfer};

const LIMITS: Limits = Limits {
    concurrent: 4,
    per_store: 2,
    per_namespace: 4,
    max_backoff_seconds: 30,
    record_timeout: Duration::from_mins(10),
    timeout: Duration::from_hours(1),
};

/// The key for which the store panics.
const PANICS: &str = "panics";

/// A store that stores no object until the test opens the gate.
struct Gated {
    inner: LocalStore,
    gate: Arc<Semaphore>,
    location: String,
}

#[async_trait]
impl Store for Gated {
    fn location(&self) -> String {
        self.location.clone()
    }
    async fn begin(&self, key: &str) -> Result<Box<dyn Upload>, Error> {
        let _open = self.gate.acquire().await;
        assert!(key != PANICS, "the test requests this panic");
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

/// A transfer that starts without an update of the status.
struct Unrecorded(Transfer);

impl Worker for Unrecorded {
    type Output = Stored;

    fn store(&self) -> String {
        Worker::store(&self.0)
    }

    fn run<'a>(
        &'a self,
        progress: &'a Progress,
        cancelled: &'a CancellationToken,
    ) -> BoxFuture<'a, Result<Stored, Trouble>> {
        Worker::run(&self.0, progress, cancelled)
    }
}

/// The EtcdBackup with this name in the namespace `n`.
fn owner(uid: &str) -> Owner {
    ObjectRef::new(uid).within("n")
}

struct Case {
    workers: Arc<Workers<Stored>>,
    changes: mpsc::UnboundedReceiver<Owner>,
    gate: Arc<Semaphore>,
    shutdown: CancellationToken,
    dir: tempfile::TempDir,
}

impl Case {
    fn new() -> Self {
        Self::with(LIMITS)
    }

    fn with(limits: Limits) -> Self {
        let (sender, changes) = mpsc::unbounded_channel();
        let shutdown = CancellationToken::new();
        Self {
            workers: Workers::new(limits, shutdown.clone(), sender),
            changes,
            gate: Arc::new(Semaphore::new(0)),
            shutdown,
            dir: tempfile::tempdir().unwrap(),
        }
    }

    /// Queues a transfer to a separate store. Its snapshot is empty, so the transfer fails after the gate is opened.
    fn enqueue(&self, uid: &str, exists: impl Fn() -> bool + Send + Sync + 'static) {
        self.enqueue_at(uid, uid, exists);
    }

    fn enqueue_at(
        &self,
        location: &str,
        uid: &str,
        exists: impl Fn() -> bool + Send + Sync + 'static,
    ) {
        let transfer = Unrecorded(self.transfer(location, uid));
        self.workers.enqueue((owner(uid), uid), transfer, exists);
    }

    fn transfer(&self, location: &str, uid: &str) -> Transfer {
        let url = |name: &str| format!("http://{name}:2379");
        Transfer {
            etcd: Arc::new(FakeEtcd::formed(1, &["a"], url)),
            endpoints: vec![url("a")],
            store: Arc::new(Gated {
                inner: LocalStore::new(self.dir.path()),
                gate: self.gate.clone(),
                location: location.to_owned(),
            }),
            name: ObjectName::Exact(uid.to_owned()),
            compress: false,
            encryption: None,
            uid: uid.to_owned(),
            cluster: None,
            limits: EndpointLimits::default(),
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

    async fn until(&self, description: &str, condition: impl Fn(&Self) -> bool) {
        for _ in 0..6000 {
            if condition(self) {
                return;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        panic!("not true within 60 s: {description}");
    }
}

#[tokio::test]
async fn workers_limit_concurrent_transfers() {
    let mut case = Case::new();
    for index in 0..7 {
        case.enqueue(&index.to_string(), || true);
    }
    case.until("four transfers run", |case| {
        case.count(true) == LIMITS.concurrent
    })
    .await;
    assert_eq!(case.count(false), 3);
    case.gate.add_permits(1);
    // Each of the seven transfers causes a reconcile when it ends. The three queued transfers also cause a reconcile
    // when they start.
    let mut reconciled = Vec::new();
    for _ in 0..10 {
        reconciled.push(case.changes.recv().await.unwrap().name);
    }
    reconciled.sort();
    assert_eq!(reconciled.join(" "), "0 1 2 3 4 4 5 5 6 6");
    assert_eq!(case.count(true) + case.count(false), 0);
    for index in 0..7 {
        let observed = case.workers.observe(&index.to_string());
        assert!(matches!(observed.work, Work::Ended(Err(_))), "{observed:?}");
        assert!(observed.not_before.is_some());
    }
}

#[tokio::test]
async fn slow_store_does_not_delay_transfers_to_other_stores() {
    let case = Case::new();
    for index in 0..6 {
        case.enqueue_at("slow", &index.to_string(), || true);
    }
    case.until("two transfers run", |case| {
        case.count(true) == LIMITS.per_store
    })
    .await;
    case.enqueue_at("other", "6", || true);
    case.until("the transfer to the other store runs", |case| {
        case.count(true) == 3
    })
    .await;
    assert!(matches!(case.workers.observe("6").work, Work::Running(_)));
    case.gate.add_permits(1);
    // A transfer that ends releases its slot for a queued transfer, so all transfers end.
    case.until("all transfers have ended", |case| {
        (0..7).all(|index| {
            matches!(
                case.workers.observe(&index.to_string()).work,
                Work::Ended(_)
            )
        })
    })
    .await;
}

/// The deadline of a backup excludes the time in the queue.
#[tokio::test]
async fn queue_time_accumulates_over_attempts() {
    let mut case = Case::new();
    for index in 0..3 {
        case.enqueue_at("slow", &index.to_string(), || true);
    }
    case.until("two transfers run", |case| {
        case.count(true) == LIMITS.per_store
    })
    .await;
    let queue_time = |case: &Case| case.workers.observe("2").queue_time;
    case.until("the third transfer waits", |case| {
        queue_time(case) > Duration::from_millis(300)
    })
    .await;
    assert!(case.workers.observe("0").queue_time < Duration::from_millis(300));
    case.gate.add_permits(1);
    // Each of the three transfers causes a reconcile when it ends. The third transfer was queued, so it also causes a
    // reconcile when it starts.
    for _ in 0..4 {
        case.changes.recv().await.unwrap();
    }
    // After the end of the third transfer, its queue time no longer grows.
    let ended = queue_time(&case);
    assert!(ended > Duration::from_millis(300), "{ended:?}");
    assert_eq!(queue_time(&case), ended);
    case.enqueue("2", || true);
    case.changes.recv().await.unwrap();
    assert!(queue_time(&case) >= ended);
    case.workers.forget("2");
    assert_eq!(queue_time(&case), Duration::ZERO);
}

/// A task whose pod does not start.
struct PodTask(String);

impl Worker for PodTask {
    type Output = Stored;

    fn store(&self) -> String {
        self.0.clone()
    }

    fn runs_in_pod(&self) -> bool {
        true
    }

    fn run<'a>(
        &'a self,
        progress: &'a Progress,
        cancelled: &'a CancellationToken,
    ) -> BoxFuture<'a, Result<Stored, Trouble>> {
        async {
            let obstacle = Trouble::new(Reason::PodNotStarting, "no volume");
            progress.report(Some(obstacle));
            cancelled.cancelled().await;
            Err(Trouble::new(Reason::StepFailed, "canceled"))
        }
        .boxed()
    }
}

#[tokio::test]
async fn stuck_pods_do_not_delay_transfers_to_other_stores() {
    let case = Case::new();
    for index in 0..10 {
        let task = PodTask(format!("pvc://n/{}", index / 2));
        let uid = index.to_string();
        case.workers.enqueue((owner(&uid), &uid), task, || true);
    }
    case.until("all tasks wait for their pods", |case| {
        case.count(true) == 10
    })
    .await;
    case.enqueue("10", || true);
    case.until("the transfer to the other store runs", |case| {
        case.count(true) == 11
    })
    .await;
    case.shutdown.cancel();
    case.gate.add_permits(1);
    case.workers.join().await;
}

#[tokio::test]
async fn active_transfer_is_not_queued_twice() {
    let mut case = Case::new();
    case.enqueue("0", || true);
    case.enqueue("0", || true);
    case.gate.add_permits(1);
    case.changes.recv().await.unwrap();
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert!(case.changes.try_recv().is_err());
}

#[tokio::test]
async fn worker_backs_off_after_each_failure() {
    let mut case = Case::new();
    case.gate.add_permits(1);
    for pause in [1, 2, 4, 8, 16, 30, 30, 30] {
        let pause = jiff::SignedDuration::from_secs(pause);
        let before = Timestamp::now();
        case.enqueue("0", || true);
        case.changes.recv().await.unwrap();
        let not_before = case.workers.observe("0").not_before.unwrap();
        // The attempt failed between `before` and the current time, so the delay is between `shortest` and `longest`.
        let (longest, shortest) = (
            not_before.duration_since(before),
            not_before.duration_since(Timestamp::now()),
        );
        assert!(
            shortest <= pause && pause <= longest,
            "expected {pause}, but the pause is between {shortest} and {longest}"
        );
    }
    // After `forget`, the worker has no state of the transfer, so the next failure causes the minimum delay again.
    case.workers.forget("0");
    assert_eq!(case.workers.observe("0"), WorkState::default());
}

#[tokio::test]
async fn worker_cancels_transfer_of_deleted_etcdbackup() {
    let mut case = Case::new();
    let exists = Arc::new(AtomicBool::new(true));
    let observed = exists.clone();
    case.enqueue("0", move || observed.load(Ordering::SeqCst));
    case.until("the transfer runs", |case| case.count(true) == 1)
        .await;
    exists.store(false, Ordering::SeqCst);
    case.changes.recv().await.unwrap();
    assert_eq!(case.workers.observe("0"), WorkState::default());
    case.until("the unfinished file of the transfer is removed", |case| {
        std::fs::read_dir(case.dir.path()).unwrap().next().is_none()
    })
    .await;
}

#[tokio::test]
async fn panic_ends_only_its_own_transfer() {
    let mut case = Case::new();
    case.gate.add_permits(1);
    case.enqueue(PANICS, || true);
    case.enqueue("0", || true);
    for _ in 0..2 {
        case.changes.recv().await.unwrap();
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
async fn transfers_end_when_canceled_or_at_shutdown() {
    let mut case = Case::new();
    case.enqueue("0", || true);
    case.until("the transfer runs", |case| case.count(true) == 1)
        .await;
    case.workers.abandon("0");
    case.changes.recv().await.unwrap();
    match case.workers.observe("0").work {
        Work::Ended(Err(trouble)) => assert_eq!(trouble.reason, Reason::StepFailed),
        other => panic!("{other:?}"),
    }
    for index in 1..9 {
        case.enqueue(&index.to_string(), || true);
    }
    case.shutdown.cancel();
    tokio::time::timeout(Duration::from_mins(1), case.workers.join())
        .await
        .unwrap();
}

/// Invariant 10: the status counts the attempt before the transfer starts.
#[tokio::test]
async fn invariant_10_transfer_writes_nothing_before_attempt_is_recorded() {
    let mut case = Case::new();
    case.gate.add_permits(1);
    let work = |case: &Case, uid: &str| case.workers.observe(uid).work;
    for uid in ["0", "1", "2"] {
        let transfer = case.transfer("slow", uid);
        case.workers.enqueue((owner(uid), uid), transfer, || true);
    }
    // A transfer that gets a slot causes a reconcile.
    for _ in 0..LIMITS.per_store {
        case.changes.recv().await.unwrap();
    }
    assert_eq!(work(&case, "0"), Work::Ready);
    assert_eq!(work(&case, "1"), Work::Ready);
    assert!(case.workers.observe("0").work.is_active());
    // `start` has no effect on a queued transfer.
    case.workers.start("2", 1);
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert_eq!(work(&case, "2"), Work::Queued);
    assert!(std::fs::read_dir(case.dir.path()).unwrap().next().is_none());
    case.workers.start("0", 3);
    case.until("the first transfer has ended", |case| {
        matches!(work(case, "0"), Work::Ended(_))
    })
    .await;
    assert_eq!(case.workers.observe("0").recorded_count, Some(3));
    case.until("the next transfer is ready", |case| {
        work(case, "2") == Work::Ready
    })
    .await;
    assert_eq!(work(&case, "1"), Work::Ready);
    // The retry keeps the recorded count of unfinished attempts, and waits until `start` is called.
    let transfer = case.transfer("other", "0");
    case.workers.enqueue((owner("0"), "0"), transfer, || true);
    case.until("the retry is ready", |case| work(case, "0") == Work::Ready)
        .await;
    assert_eq!(case.workers.observe("0").recorded_count, Some(3));
    // A shutdown ends the transfers that wait for `start`.
    case.shutdown.cancel();
    tokio::time::timeout(Duration::from_mins(1), case.workers.join())
        .await
        .unwrap();
}

/// If the status cannot be written, the transfer releases its slot.
#[tokio::test]
async fn unrecorded_transfer_times_out_and_releases_slot() {
    let record_timeout = Duration::from_millis(300);
    let case = Case::with(Limits {
        record_timeout,
        ..LIMITS
    });
    // Queue one more transfer than the store has slots.
    let all: Vec<String> = (0..=LIMITS.per_store)
        .map(|index| index.to_string())
        .collect();
    for uid in &all {
        let transfer = case.transfer("slow", uid);
        case.workers.enqueue((owner(uid), uid), transfer, || true);
    }
    // Each transfer is queued, then ready, and then ends with the timeout. It never runs.
    let timed_out = |case: &Case, uid: &String| {
        let state = case.workers.observe(uid);
        assert_eq!(state.recorded_count, None, "{uid}");
        match state.work {
            Work::Queued | Work::Ready => false,
            Work::Ended(Err(trouble)) => trouble.message.contains("API server"),
            other => panic!("{uid}: {other:?}"),
        }
    };
    case.until("all transfers have timed out", |case| {
        all.iter().all(|uid| timed_out(case, uid))
    })
    .await;
    // The last transfer waited in the queue until another transfer had timed out.
    let queue_time = |uid: &String| case.workers.observe(uid).queue_time;
    let (last, others) = all.split_last().unwrap();
    assert!(queue_time(last) >= record_timeout, "{:?}", queue_time(last));
    for uid in others {
        let waited = queue_time(uid);
        assert!(waited < queue_time(last), "{uid}: {waited:?}");
    }
}

#[tokio::test]
async fn transfer_task_is_ended_at_its_time_limit() {
    let mut case = Case::with(Limits {
        timeout: Duration::from_millis(100),
        ..LIMITS
    });
    let task = PodTask("pvc://n/c".to_owned());
    case.workers.enqueue((owner("0"), "0"), task, || true);
    case.changes.recv().await.unwrap();
    match case.workers.observe("0").work {
        Work::Ended(Err(trouble)) => {
            assert_eq!(trouble.reason, Reason::DeadlineExceeded);
            assert!(trouble.message.contains("no volume"), "{trouble:?}");
        }
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn slow_store_of_one_namespace_does_not_delay_other_namespaces() {
    let case = Case::with(Limits {
        per_namespace: 2,
        ..LIMITS
    });
    for index in 0..5 {
        let uid = index.to_string();
        let transfer = Unrecorded(case.transfer(&uid, &uid));
        case.workers
            .enqueue((owner(&uid).within("slow"), &uid), transfer, || true);
    }
    case.until("two transfers run", |case| case.count(true) == 2)
        .await;
    let other = Unrecorded(case.transfer("5", "5"));
    case.workers
        .enqueue((owner("5").within("other"), "5"), other, || true);
    case.until("the transfer of the other namespace runs", |case| {
        matches!(case.workers.observe("5").work, Work::Running(_))
    })
    .await;
    assert_eq!(case.count(false), 3);
    assert!(case.workers.queued_for("4").is_some());
    assert_eq!(case.workers.queued_for("5"), None);
    case.gate.add_permits(1);
    case.until("all transfers have ended", |case| {
        (0..6).all(|index| {
            matches!(
                case.workers.observe(&index.to_string()).work,
                Work::Ended(_)
            )
        })
    })
    .await;
}

/// Two namespaces use the same bucket name at different endpoints.
#[test]
fn stores_at_different_endpoints_have_separate_limits() {
    struct At(LocalStore, &'static str);

    #[async_trait]
    impl Store for At {
        fn location(&self) -> String {
            "s3://bucket".to_owned()
        }
        fn endpoint(&self) -> String {
            self.1.to_owned()
        }
        async fn begin(&self, key: &str) -> Result<Box<dyn Upload>, Error> {
            self.0.begin(key).await
        }
        async fn put(&self, key: &str, content: Bytes) -> Result<(), Error> {
            self.0.put(key, content).await
        }
        async fn get(&self, key: &str) -> Result<ObjectStream, Error> {
            self.0.get(key).await
        }
        async fn head(&self, key: &str) -> Result<Option<Object>, Error> {
            self.0.head(key).await
        }
        async fn list(&self, prefix: &str) -> Result<Vec<Object>, Error> {
            self.0.list(prefix).await
        }
        async fn delete(&self, key: &str) -> Result<(), Error> {
            self.0.delete(key).await
        }
        async fn unfinished(&self, prefix: &str) -> Result<Vec<Unfinished>, Error> {
            self.0.unfinished(prefix).await
        }
        async fn discard(&self, unfinished: &Unfinished) -> Result<(), Error> {
            self.0.discard(unfinished).await
        }
    }

    let key = |endpoint| {
        let store = At(LocalStore::new("/unused"), endpoint);
        crate::transfer::slot_key(&store)
    };
    assert_ne!(key("https://a"), key("https://b"));
    assert_eq!(key("https://a"), key("https://a"));
}
