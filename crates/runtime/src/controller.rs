//! The controller of all three operators. It selects objects by scope, reports objects that cannot be parsed, retries
//! each object with its own back-off, limits the concurrency, and shuts down gracefully.
//!
//! Each operator implements [`Reconcile`], which decides what happens to an object.

use std::collections::{BTreeMap, HashMap};
use std::fmt::Debug;
use std::future::{Future, ready};
use std::hash::Hash;
use std::panic::AssertUnwindSafe;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use api::problem::Chain;
use futures::future::{join_all, select_all};
use futures::{FutureExt, StreamExt, TryStreamExt};
use k8s_openapi::NamespaceResourceScope;
use k8s_openapi::api::core::v1::ObjectReference;
use kube::runtime::applier;
use kube::runtime::controller::{Action, Error as ControllerError};
use kube::runtime::reflector::ObjectRef;
use kube::runtime::utils::CancelableJoinHandle;
use kube::{Resource, ResourceExt};
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::runtime::Handle;
use tokio_util::sync::CancellationToken;
use tracing::{debug, warn};

use crate::controllers::Watches;
pub use crate::controllers::{Cache, Controllers};
pub use crate::guarded::Guarded;
use crate::logs;
use crate::marks::Marks;
use crate::outcome::{Done, Failure, Notice, Report};
use crate::process::Operator;
use crate::queue::{Key as QueueKey, Queue};
pub use crate::scope::{SCOPE_ANNOTATION, SCOPE_CLUSTER_WIDE, Scope};
use crate::shards::Shards;

// Panics must unwind in every build profile, because a panic in one reconcile must not end the process.
const _: () = assert!(
    cfg!(panic = "unwind"),
    "remove `panic = \"abort\"` from the profile"
);

const MIN_BACKOFF: Duration = Duration::from_secs(1);
/// Maximum pause between two attempts of a failing reconcile.
pub const MAX_BACKOFF: Duration = Duration::from_mins(2);

/// The reconciler of one operator.
pub trait Reconcile: Send + Sync + 'static {
    /// The custom resource that the operator reconciles.
    type Object: Resource<DynamicType = (), Scope = NamespaceResourceScope>
        + Clone
        + Debug
        + Serialize
        + DeserializeOwned
        + Send
        + Sync
        + 'static;
    /// The error of a failed reconcile.
    type Error: Failure;
    /// True if this operator manages the objects of this kind, and therefore writes their conditions `Managed` and
    /// `Unreadable`.
    const MANAGES: bool = true;

    /// Observes, plans, executes one step, and writes the status.
    fn reconcile(
        &self,
        object: Arc<Self::Object>,
    ) -> impl Future<Output = Result<Done, Self::Error>> + Send;
}

/// Runs the controllers until the shutdown, and then waits for the running reconciles.
pub async fn drive<R: Reconcile>(
    operator: &Operator,
    controllers: Controllers<R::Object>,
    reconciler: Arc<R>,
) {
    let controllers = controllers.reconcile_acquired(operator.shards.clone());
    let driver = Arc::new(Driver {
        reconciler,
        scope: operator.scope.clone(),
        shards: operator.shards.clone(),
        report: operator.report.clone(),
        backoff: Backoff::default(),
        queue: operator.queues.of(&R::Object::plural(&())),
        marks: R::MANAGES.then(|| Marks::new(operator)),
    });
    let (cache, shards) = (controllers.cache(), operator.shards.clone());
    operator.objects.count_with(move || {
        let mut counts = BTreeMap::new();
        for object in cache.select(|object| shards.holds(object)) {
            *counts
                .entry(object.namespace().unwrap_or_default())
                .or_insert(0) += 1;
        }
        counts
    });
    let all = controllers.into_watches().into_iter();
    let running = all.map(|watches| {
        let shutdown = operator.shutdown.clone();
        Box::pin(run(watches, shutdown, Arc::clone(&driver)))
    });
    // Controllers end only at the shutdown. If a defect ends one of them earlier, this function returns, the process
    // ends, and Kubernetes restarts the container.
    let ((), _, others) = select_all(running).await;
    if operator.shutdown.is_cancelled() {
        join_all(others).await;
    }
}

/// Runs one controller. At the shutdown, its watches end, and its running reconciles finish.
async fn run<R: Reconcile>(
    watches: Watches<R::Object>,
    shutdown: CancellationToken,
    driver: Arc<Driver<R>>,
) {
    let queue = driver.queue.clone();
    let requests = watches
        .requests
        .inspect_ok(move |request| {
            queue.request(key(&request.obj_ref), Instant::now());
        })
        .take_until(shutdown.cancelled_owned());
    let gone = driver.queue.clone();
    applier(
        |object, driver: Arc<Driver<R>>| {
            let reconcile = async move { driver.reconcile(object).await };
            CancelableJoinHandle::spawn(reconcile, &Handle::current())
        },
        |object, error, driver: Arc<Driver<R>>| {
            let pause = driver.backoff.pause(&object, error);
            driver.requeue(&ObjectRef::from_obj(object.as_ref()), Some(pause))
        },
        driver,
        watches.objects,
        requests,
        watches.config,
    )
    .for_each(|result| {
        match result {
            // `Driver::reconcile` has already reported the error of a failed reconcile.
            Ok(_) | Err(ControllerError::ReconcilerFailed(..)) => {}
            Err(ControllerError::ObjectNotFound(object)) => {
                gone.remove(&key(&object));
                debug!(%object, "object was deleted before its reconcile");
            }
            Err(error) => warn!(
                error = Chain(&error).to_string(),
                "the watch was interrupted and will be resumed"
            ),
        }
        ready(())
    })
    .await;
}

fn key<K: kube::runtime::reflector::Lookup>(object: &ObjectRef<K>) -> QueueKey {
    let namespace = object.namespace.clone().unwrap_or_default();
    (namespace, object.name.clone())
}

/// A reconcile that failed or panicked.
#[derive(Debug, thiserror::Error)]
enum Failed<E: Failure> {
    #[error(transparent)]
    Reconcile(E),
    /// Only the log contains the message of the panic, because the message may contain a secret (invariant 14).
    #[error(
        "the operator panicked in the reconcile of this object and retries it. Other objects are not affected. Report this \
         defect with the log of the operator's pod"
    )]
    Panicked,
}

impl<E: Failure> Failure for Failed<E> {
    fn reason(&self) -> &'static str {
        match self {
            Self::Reconcile(error) => error.reason(),
            Self::Panicked => "Panicked",
        }
    }

    fn notices(&self) -> &[Notice] {
        match self {
            Self::Reconcile(error) => error.notices(),
            Self::Panicked => &[],
        }
    }

    fn retry_after(&self) -> Option<Duration> {
        match self {
            Self::Reconcile(error) => error.retry_after(),
            Self::Panicked => None,
        }
    }
}

struct Driver<R: Reconcile> {
    reconciler: Arc<R>,
    scope: Scope,
    shards: Shards,
    report: Arc<Report>,
    backoff: Backoff,
    queue: Queue,
    /// Writes the conditions `Managed` and `Unreadable`. `None` if another operator manages the objects.
    marks: Option<Marks<R::Object>>,
}

impl<R: Reconcile> Driver<R> {
    /// Invariant 15: a panic becomes a failure of its object, and the process continues with other objects.
    async fn reconcile(&self, object: Arc<Guarded<R::Object>>) -> Result<Action, Failed<R::Error>> {
        let target = ObjectRef::from_obj(object.as_ref());
        self.queue.remove(&key(&target));
        // Invariant 40: only the process that holds the object's shard reconciles the object and writes its conditions.
        // This process does not release the shard before `_visit` is dropped.
        let (namespace, name) = key(&target);
        let Some(_visit) = self.shards.enter(&namespace, &name) else {
            return Ok(Action::await_change());
        };
        let reference = object.object_ref(&());
        let requeue = logs::in_reconcile(&reference, self.reconcile_once(&reference, &object));
        let requeue = requeue.await?;
        Ok(self.requeue(&target, requeue))
    }

    async fn reconcile_once(
        &self,
        reference: &ObjectReference,
        object: &Guarded<R::Object>,
    ) -> Result<Option<Duration>, Failed<R::Error>> {
        let started = Instant::now();
        let reconciled = AssertUnwindSafe(self.reconcile_object(reference, object));
        if let Ok(result) = reconciled.catch_unwind().await {
            return result.map_err(Failed::Reconcile);
        }
        let result = Err(Failed::Panicked);
        self.report.outcome(reference, started.elapsed(), &result);
        result.map(|_: Done| None)
    }

    /// Requests the next reconcile of the object after the pause. Without a pause (`None`), only a change of the object
    /// triggers the next reconcile.
    fn requeue(&self, object: &ObjectRef<Guarded<R::Object>>, pause: Option<Duration>) -> Action {
        let Some(pause) = pause else {
            return Action::await_change();
        };
        // If the clock cannot represent `due`, the metrics of the queue omit this requeue.
        if let Some(due) = Instant::now().checked_add(pause) {
            self.queue.request(key(object), due);
        }
        Action::requeue(pause)
    }

    async fn reconcile_object(
        &self,
        reference: &ObjectReference,
        object: &Guarded<R::Object>,
    ) -> Result<Option<Duration>, R::Error> {
        if !self.scope.takes(object) {
            let again = match &self.marks {
                Some(marks) => {
                    marks
                        .report_unmanaged(reference, object.0.as_ref().ok())
                        .await
                }
                None => None,
            };
            return Ok(again);
        }
        match &object.0 {
            Err(invalid) => {
                if let Some(marks) = &self.marks {
                    marks.unreadable(reference, invalid).await;
                }
                Ok(None)
            }
            Ok(readable) => {
                if let Some(marks) = &self.marks {
                    marks.readable_again(reference, readable).await;
                }
                let started = Instant::now();
                let result = self.reconciler.reconcile(Arc::new(readable.clone())).await;
                self.report.outcome(reference, started.elapsed(), &result);
                if let Some(marks) = &self.marks {
                    marks.report_managed(reference, readable).await;
                }
                let done = result?;
                self.backoff.reset(object);
                Ok(done.requeue)
            }
        }
    }
}

/// The number of consecutive failures of each object.
#[derive(Default)]
struct Backoff {
    failures: Mutex<HashMap<Key, (u32, Instant)>>,
}

#[derive(PartialEq, Eq, Hash)]
struct Key(String);

impl Key {
    fn of<K: Resource>(object: &K) -> Self {
        Self(object.uid().unwrap_or_else(|| object.name_any()))
    }
}

impl Backoff {
    /// The pause before a failed reconcile is retried.
    fn pause<K: Resource, E: Failure>(&self, object: &Arc<K>, error: &E) -> Duration {
        if let Some(pause) = error.retry_after() {
            return pause;
        }
        let mut failures = self.failures.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        // Old entries are removed, because their objects may have been deleted.
        failures.retain(|_, (_, last)| now.duration_since(*last) < MAX_BACKOFF * 10);
        let (count, last) = failures.entry(Key::of(object.as_ref())).or_insert((0, now));
        let delay = delay(*count);
        *count = count.saturating_add(1);
        *last = now;
        delay
    }

    fn reset<K: Resource>(&self, object: &K) {
        self.failures
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .remove(&Key::of(object));
    }
}

/// The pause after a failure. `failures_before` is the number of consecutive failures before this failure.
pub fn delay(failures_before: u32) -> Duration {
    MIN_BACKOFF
        .saturating_mul(1 << failures_before.min(16))
        .min(MAX_BACKOFF)
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1::ConfigMap;

    use super::*;

    mod panics;

    #[derive(Debug, thiserror::Error)]
    #[error("it failed")]
    struct Failed;

    impl Failure for Failed {
        fn reason(&self) -> &'static str {
            "Failed"
        }
    }

    fn object(uid: &str) -> Arc<ConfigMap> {
        let mut object = ConfigMap::default();
        object.metadata.uid = Some(uid.into());
        Arc::new(object)
    }

    #[test]
    fn repeated_failures_back_off_only_the_failing_object() {
        let backoff = Backoff::default();
        let (bad, good) = (object("bad"), object("good"));
        let delays: Vec<_> = (0..3).map(|_| backoff.pause(&bad, &Failed)).collect();
        assert_eq!(delays, [1, 2, 4].map(Duration::from_secs));
        assert_eq!(backoff.pause(&good, &Failed), MIN_BACKOFF);
    }

    #[derive(Debug, thiserror::Error)]
    #[error("it waits")]
    struct Waits(Duration);

    impl Failure for Waits {
        fn reason(&self) -> &'static str {
            "Waits"
        }

        fn retry_after(&self) -> Option<Duration> {
            Some(self.0)
        }
    }

    #[test]
    fn failure_with_retry_time_is_retried_without_back_off() {
        let (backoff, bad) = (Backoff::default(), object("bad"));
        let pause = Duration::from_secs(7);
        for _ in 0..3 {
            let action = backoff.pause(&bad, &Waits(pause));
            assert_eq!(action, pause);
        }
        assert_eq!(backoff.pause(&bad, &Failed), MIN_BACKOFF);
    }

    #[test]
    fn successful_reconcile_resets_backoff() {
        let backoff = Backoff::default();
        let bad = object("bad");
        for _ in 0..40 {
            backoff.pause(&bad, &Failed);
        }
        assert_eq!(backoff.pause(&bad, &Failed), MAX_BACKOFF);
        backoff.reset(bad.as_ref());
        assert_eq!(backoff.pause(&bad, &Failed), MIN_BACKOFF);
    }
}
