//! The controller wiring, the same for all three operators: which objects are ours, reading them so that one
//! that cannot be parsed stops nobody, back-off per object, limited concurrency, and an end that lets running
//! reconciles finish.
//!
//! It decides nothing about an object; that is the `Reconcile` it is given.

use std::collections::{BTreeMap, HashMap};
use std::fmt::Debug;
use std::future::Future;
use std::hash::Hash;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use futures::StreamExt;
use k8s_openapi::NamespaceResourceScope;
use kube::core::PartialObjectMeta;
use kube::runtime::controller::{Action, Config, Controller, Error as ControllerError};
use kube::runtime::watcher;
use kube::{Api, Resource, ResourceExt};
use serde::Serialize;
use serde::de::DeserializeOwned;
use tracing::{debug, warn};

pub use crate::guarded::Guarded;
use crate::marks::Marks;
use crate::outcome::{Chain, Done, Failure, Report};
use crate::process::Operator;
pub use crate::scope::{SCOPE_ANNOTATION, SCOPE_CLUSTER_WIDE, Scope};

/// How many objects are reconciled at the same time, unless the operator bounds what it has to spare itself: see
/// [`all_at_once`].
const CONCURRENCY: u16 = 64;
const FIRST_BACKOFF: Duration = Duration::from_secs(1);
/// The longest pause after what has failed.
pub const LAST_BACKOFF: Duration = Duration::from_mins(2);

/// What an operator does for one object.
pub trait Reconcile: Send + Sync + 'static {
    /// The custom resource.
    type Object: Resource<DynamicType = (), Scope = NamespaceResourceScope>
        + Clone
        + Debug
        + Serialize
        + DeserializeOwned
        + Send
        + Sync
        + 'static;
    /// Why a reconcile failed.
    type Error: Failure;

    /// Observes, plans, takes one step, writes the status.
    fn reconcile(
        &self,
        object: Arc<Self::Object>,
    ) -> impl Future<Output = Result<Done, Self::Error>> + Send;
}

/// A controller for `K`; the caller adds `owns` and `watches` (with [`watched`]) and gives it to [`drive`].
pub fn controller<K>(operator: &Operator) -> Controller<Guarded<K>>
where
    K: Resource<DynamicType = (), Scope = NamespaceResourceScope>
        + Clone
        + Debug
        + DeserializeOwned
        + Send
        + Sync
        + 'static,
{
    let api = operator.scope.api::<Guarded<K>>(operator.client.clone());
    Controller::new(api, watcher::Config::default())
        .with_config(Config::default().concurrency(CONCURRENCY))
        .graceful_shutdown_on(operator.shutdown.clone().cancelled_owned())
}

/// Reconciles every object that is due at the same time. Most of a reconcile is waiting, and one that waits for
/// something that hangs must not take the place of another.
pub fn all_at_once<K>(controller: Controller<Guarded<K>>) -> Controller<Guarded<K>>
where
    K: Resource<DynamicType = (), Scope = NamespaceResourceScope>
        + Clone
        + Debug
        + DeserializeOwned
        + Send
        + Sync
        + 'static,
{
    controller.with_config(Config::default().concurrency(0))
}

/// The API to watch children or other kinds through: their metadata only. That something changed is all an event has
/// to say, so nothing else is sent, parsed or kept, and nothing that cannot be parsed ends the watch.
pub fn watched<K>(operator: &Operator) -> Api<PartialObjectMeta<K>>
where
    K: Resource<DynamicType = (), Scope = NamespaceResourceScope>,
{
    operator.scope.api(operator.client.clone())
}

/// Runs the controller until the shutdown; running reconciles are finished first.
pub async fn drive<R: Reconcile>(
    operator: &Operator,
    controller: Controller<Guarded<R::Object>>,
    reconciler: Arc<R>,
) {
    let driver = Arc::new(Driver {
        reconciler,
        scope: operator.scope.clone(),
        report: operator.report.clone(),
        backoff: Backoff::default(),
        marks: Marks::new(operator),
    });
    let store = controller.store();
    operator.objects.count_with(move || {
        let mut counts = BTreeMap::new();
        for object in store.state() {
            *counts
                .entry(object.namespace().unwrap_or_default())
                .or_insert(0) += 1;
        }
        counts
    });
    controller
        .run(
            |object, driver: Arc<Driver<R>>| async move { driver.reconcile(object).await },
            |object, error, driver| driver.backoff.next_action(&object, error),
            driver,
        )
        .for_each(async |result| match result {
            // Reported where it happened.
            Ok(_) | Err(ControllerError::ReconcilerFailed(..)) => {}
            Err(ControllerError::ObjectNotFound(object)) => debug!(%object, "gone before its turn"),
            Err(error) => warn!(
                error = Chain(&error).to_string(),
                "the watch is interrupted and will be resumed"
            ),
        })
        .await;
}

struct Driver<R: Reconcile> {
    reconciler: Arc<R>,
    scope: Scope,
    report: Arc<Report>,
    backoff: Backoff,
    marks: Marks<R::Object>,
}

impl<R: Reconcile> Driver<R> {
    async fn reconcile(&self, object: Arc<Guarded<R::Object>>) -> Result<Action, R::Error> {
        let reference = object.object_ref(&());
        if !self.scope.takes(object.as_ref()) {
            let again = self
                .marks
                .not_ours(&reference, object.0.as_ref().ok())
                .await;
            return Ok(again.map_or_else(Action::await_change, Action::requeue));
        }
        match &object.0 {
            Err(invalid) => {
                self.marks.unreadable(&reference, invalid).await;
                Ok(Action::await_change())
            }
            Ok(readable) => {
                self.marks.readable_again(&reference, readable).await;
                let started = Instant::now();
                let result = self.reconciler.reconcile(Arc::new(readable.clone())).await;
                self.report.outcome(&reference, started.elapsed(), &result);
                self.marks.ours(&reference, readable).await;
                let done = result?;
                self.backoff.reset(object.as_ref());
                Ok(done
                    .requeue
                    .map_or_else(Action::await_change, Action::requeue))
            }
        }
    }
}

/// How often each object failed in a row.
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
    fn next_action<K: Resource, E: Failure>(&self, object: &Arc<K>, error: &E) -> Action {
        if let Some(pause) = error.again_in() {
            return Action::requeue(pause);
        }
        let mut failures = self.failures.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        // Objects that are gone leave no trace for ever.
        failures.retain(|_, (_, last)| now.duration_since(*last) < LAST_BACKOFF * 10);
        let (count, last) = failures.entry(Key::of(object.as_ref())).or_insert((0, now));
        let delay = delay(*count);
        *count = count.saturating_add(1);
        *last = now;
        Action::requeue(delay)
    }

    fn reset<K: Resource>(&self, object: &K) {
        self.failures
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .remove(&Key::of(object));
    }
}

/// The pause after what has failed so often before.
pub fn delay(failures_before: u32) -> Duration {
    FIRST_BACKOFF
        .saturating_mul(1 << failures_before.min(16))
        .min(LAST_BACKOFF)
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1::ConfigMap;

    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("it failed")]
    struct Failed;

    impl Failure for Failed {
        fn reason(&self) -> &'static str {
            "Failed"
        }
    }

    fn object(uid: &str, scope: Option<&str>) -> Arc<ConfigMap> {
        let mut object = ConfigMap::default();
        object.metadata.uid = Some(uid.into());
        if let Some(scope) = scope {
            object
                .annotations_mut()
                .insert(SCOPE_ANNOTATION.into(), scope.into());
        }
        Arc::new(object)
    }

    #[test]
    fn a_namespaced_operator_takes_objects_without_a_scope() {
        let scope = Scope::Namespace("a".into());
        assert!(scope.takes(object("1", None).as_ref()));
        assert!(!scope.takes(object("1", Some("clusterwide")).as_ref()));
        assert!(!scope.takes(object("1", Some("other")).as_ref()));
    }

    #[test]
    fn a_cluster_wide_operator_takes_what_is_handed_to_it() {
        assert!(Scope::Cluster.takes(object("1", Some("clusterwide")).as_ref()));
        assert!(!Scope::Cluster.takes(object("1", None).as_ref()));
        assert!(!Scope::Cluster.takes(object("1", Some("other")).as_ref()));
    }

    #[test]
    fn failures_of_one_object_delay_only_that_object() {
        let backoff = Backoff::default();
        let (bad, good) = (object("bad", None), object("good", None));
        let delays: Vec<_> = (0..3).map(|_| backoff.next_action(&bad, &Failed)).collect();
        assert_eq!(
            delays,
            [1, 2, 4].map(|s| Action::requeue(Duration::from_secs(s)))
        );
        assert_eq!(
            backoff.next_action(&good, &Failed),
            Action::requeue(FIRST_BACKOFF)
        );
    }

    #[derive(Debug, thiserror::Error)]
    #[error("it waits")]
    struct Waits(Duration);

    impl Failure for Waits {
        fn reason(&self) -> &'static str {
            "Waits"
        }

        fn again_in(&self) -> Option<Duration> {
            Some(self.0)
        }
    }

    #[test]
    fn what_knows_when_it_is_tried_again_is_tried_then_and_counts_for_nothing() {
        let (backoff, bad) = (Backoff::default(), object("bad", None));
        let pause = Duration::from_secs(7);
        for _ in 0..3 {
            let action = backoff.next_action(&bad, &Waits(pause));
            assert_eq!(action, Action::requeue(pause));
        }
        assert_eq!(
            backoff.next_action(&bad, &Failed),
            Action::requeue(FIRST_BACKOFF)
        );
    }

    #[test]
    fn a_success_ends_the_delay() {
        let backoff = Backoff::default();
        let bad = object("bad", None);
        for _ in 0..40 {
            backoff.next_action(&bad, &Failed);
        }
        assert_eq!(
            backoff.next_action(&bad, &Failed),
            Action::requeue(LAST_BACKOFF)
        );
        backoff.reset(bad.as_ref());
        assert_eq!(
            backoff.next_action(&bad, &Failed),
            Action::requeue(FIRST_BACKOFF)
        );
    }
}
