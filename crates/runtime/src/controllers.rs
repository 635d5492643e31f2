//! The watches of an operator: one controller for each listed namespace, or one controller for all namespaces. A listed
//! namespace that cannot be watched therefore does not delay other namespaces (invariant 15).

mod child;

use std::collections::HashMap;
use std::fmt::Debug;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use futures::stream::{BoxStream, SelectAll};
use futures::{FutureExt, Stream, StreamExt, stream};
use k8s_openapi::NamespaceResourceScope;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::runtime::controller::{Config, ReconcileReason, ReconcileRequest, trigger_with};
use kube::runtime::reflector::store::Writer;
use kube::runtime::reflector::{ObjectRef, Store};
use kube::runtime::utils::StreamBackoff;
use kube::runtime::watcher::Event;
use kube::runtime::{WatchStreamExt, reflector, watcher};
use kube::{Client, Resource, ResourceExt};
use serde::de::DeserializeOwned;
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;

use crate::guarded::Guarded;
use crate::process::Operator;
use crate::scope::Scope;
use crate::shards::Shards;
use crate::watch_cache::{Raw, WatchCache};
use crate::watch_pause::WatchPauses;

/// Maximum number of concurrent reconciles of all controllers. [`Controllers::without_concurrency_limit`] turns off
/// this limit.
const CONCURRENCY: u16 = 64;

/// Maximum time, after the first event, that reconciles wait for the caches of child objects.
const GATE: Duration = Duration::from_secs(5);

/// The controllers of one kind, in the order of [`Scope::apis`].
pub struct Controllers<K>
where
    K: Resource<DynamicType = ()> + Clone + Debug + DeserializeOwned + Send + Sync + 'static,
{
    client: Client,
    scope: Scope,
    all: Vec<Watches<K>>,
}

/// A stream of requests to reconcile objects.
pub(crate) type Requests<K> =
    BoxStream<'static, Result<ReconcileRequest<Guarded<K>>, watcher::Error>>;

/// The watches of one controller. This crate uses them instead of `kube::runtime::Controller`, which does not show its
/// requests to the metrics of the queue.
pub(crate) struct Watches<K>
where
    K: Resource<DynamicType = ()> + Clone + 'static,
{
    pub(crate) requests: SelectAll<Requests<K>>,
    pub(crate) objects: Store<Guarded<K>>,
    pub(crate) config: Config,
    gate: Arc<Gate>,
}

/// Delays the first reconciles until the caches of child objects are complete, at most for `patience`. A reconcile
/// without a complete cache reads from the API server.
struct Gate {
    /// The number of incomplete caches.
    missing: watch::Sender<usize>,
    patience: Duration,
    opens: OnceLock<Instant>,
}

impl Gate {
    fn new(patience: Duration) -> Self {
        Self {
            missing: watch::Sender::new(0),
            patience,
            opens: OnceLock::new(),
        }
    }

    async fn passed(&self) {
        let opens = *self.opens.get_or_init(|| Instant::now() + self.patience);
        let mut missing = self.missing.subscribe();
        let complete = missing.wait_for(|missing| *missing == 0);
        // `complete` cannot fail, because the sender is a field of this gate.
        let _ = tokio::time::timeout_at(opens, complete).await;
    }
}

impl<K> Controllers<K>
where
    K: Resource<DynamicType = (), Scope = NamespaceResourceScope>
        + Clone
        + Debug
        + DeserializeOwned
        + Send
        + Sync
        + 'static,
{
    /// Creates the controllers for `K`. The caller adds [`Self::watches`], and passes the controllers to `drive`.
    pub fn new(operator: &Operator) -> Self {
        Self::with_changes(operator, |_| ())
    }

    /// Creates the controllers for `K`, and calls `notify` with each changed or deleted object. [`Self::cache`] contains
    /// the change before the call.
    ///
    /// If a reconcile of another kind reads this cache, request it in `notify`, and not from a second watch of `K`. The
    /// events of a second watch may arrive before the cache contains the change.
    pub fn with_changes(
        operator: &Operator,
        notify: impl Fn(&Guarded<K>) + Clone + Send + 'static,
    ) -> Self {
        // The watches use a client without retries, because a client with retries would report the error of a watch
        // only after minutes.
        let apis = operator.scope.apis(&operator.client_without_retry);
        let share = Config::default().concurrency(concurrency(apis.len()));
        let one = |api| {
            let writer = Writer::<Guarded<K>>::new(());
            let objects = writer.as_reader();
            let events = watcher(api, watcher::Config::default());
            let (mut requests, gate) = (SelectAll::new(), Arc::new(Gate::new(GATE)));
            let own = own_requests(writer, events, notify.clone());
            requests.push(with_pauses(after(Arc::clone(&gate), own)));
            Watches {
                requests,
                objects,
                config: share.clone(),
                gate,
            }
        };
        Self {
            client: operator.client_without_retry.clone(),
            scope: operator.scope.clone(),
            all: apis.into_iter().map(one).collect(),
        }
    }

    /// Turns off the limit of concurrent reconciles, so that a hanging reconcile does not delay other objects.
    #[must_use]
    pub fn without_concurrency_limit(mut self) -> Self {
        for one in &mut self.all {
            one.config = Config::default().concurrency(0);
        }
        self
    }

    /// Reconciles the objects that `mapper` returns for each changed object of another kind.
    ///
    /// Use [`kube::core::PartialObjectMeta`] as `Other`, so that the watch transfers and caches no specs, and an
    /// invalid spec does not end the watch.
    #[must_use]
    pub fn watches<Other, I>(
        mut self,
        config: &watcher::Config,
        mapper: impl Fn(Other) -> I + Clone + Send + Sync + 'static,
    ) -> Self
    where
        Other: Resource<DynamicType = (), Scope = NamespaceResourceScope>
            + Clone
            + Debug
            + DeserializeOwned
            + Send
            + 'static,
        I: IntoIterator<Item = ObjectRef<Guarded<K>>> + 'static,
        I::IntoIter: Send,
    {
        let apis = self.scope.apis::<Other>(&self.client);
        for (one, api) in self.all.iter_mut().zip(apis) {
            let changes = watcher(api, config.clone()).touched_objects();
            let mapper = mapper.clone();
            let requests = trigger_with(changes, move |changed: Other| {
                let related = ObjectRef::from_obj(&changed).erase();
                let targets = mapper(changed).into_iter();
                targets.map(move |obj_ref| ReconcileRequest {
                    obj_ref,
                    reason: ReconcileReason::RelatedObjectUpdated {
                        obj_ref: Box::new(related.clone()),
                    },
                })
            });
            one.requests.push(with_pauses(requests));
        }
        self
    }

    /// Fills the cache with child objects of one kind. When a child changes, its owner of kind `K` is reconciled. If
    /// the child has no owner, the `K` that the cluster label of the child names is reconciled. The cache contains the
    /// change before the reconcile starts.
    ///
    /// `notify` is called with the UID of the owner, and with the name, the namespace, the owners and the deletion
    /// timestamp of the child.
    #[must_use]
    pub fn children<Child>(
        mut self,
        config: &watcher::Config,
        cache: &WatchCache<Child>,
        notify: impl Fn(&str, &ObjectMeta) + Clone + Send + Sync + 'static,
    ) -> Self
    where
        Child: Resource<DynamicType = (), Scope = NamespaceResourceScope> + 'static,
    {
        let apis = self.scope.apis::<Raw<Child>>(&self.client);
        for (one, api) in self.all.iter_mut().zip(apis) {
            let feed = cache.feed(api.namespace());
            let (notify, gate) = (notify.clone(), Arc::clone(&one.gate));
            let objects = one.objects.clone();
            gate.missing.send_modify(|missing| *missing += 1);
            let mut is_missing = true;
            let requests = watcher(api, config.clone()).flat_map(move |event| {
                let changed = feed.apply(event).into_iter();
                if is_missing && feed.is_complete() {
                    is_missing = false;
                    gate.missing.send_modify(|missing| *missing -= 1);
                }
                let requests = changed.filter_map(|child| match child {
                    Ok(child) => {
                        let uid_of = |object: &ObjectRef<Guarded<K>>| {
                            objects.get(object)?.meta().uid.clone()
                        };
                        child::request::<K, Child>(&child, &notify, uid_of).map(Ok)
                    }
                    Err(error) => Some(Err(error)),
                });
                stream::iter(requests.collect::<Vec<_>>())
            });
            one.requests
                .push(with_pauses(after(Arc::clone(&one.gate), requests)));
        }
        self
    }

    /// Reconciles the object that a message names. Ignores a message if the object is not in the cache.
    #[must_use]
    pub fn reconcile_on(
        mut self,
        mut messages: mpsc::UnboundedReceiver<ObjectRef<Guarded<K>>>,
    ) -> Self {
        let mut controllers = Vec::new();
        for one in &mut self.all {
            let (sender, receiver) = mpsc::unbounded_channel();
            let requests = stream::unfold(receiver, async |mut receiver| {
                let obj_ref = receiver.recv().await?;
                let reason = ReconcileReason::ObjectUpdated;
                Some((Ok(ReconcileRequest { obj_ref, reason }), receiver))
            });
            one.requests.push(requests.boxed());
            controllers.push((one.objects.clone(), sender));
        }
        tokio::spawn(async move {
            while let Some(object) = messages.recv().await {
                for (objects, sender) in &controllers {
                    if objects.get(&object).is_some() {
                        let _ = sender.send(object.clone());
                    }
                }
            }
        });
        self
    }

    /// Reconciles all objects of a shard when this process acquires the shard, because earlier changes of these objects
    /// have caused no reconcile.
    pub(crate) fn reconcile_acquired(self, shards: Shards) -> Self {
        let Some(mut acquired) = shards.acquisitions() else {
            return self;
        };
        let (sender, messages) = mpsc::unbounded_channel();
        let cache = self.cache();
        tokio::spawn(async move {
            while let Some(shard) = acquired.recv().await {
                for object in cache.select(|object| shards.of_object(object) == shard) {
                    let _ = sender.send(ObjectRef::from_obj(&*object));
                }
            }
        });
        self.reconcile_on(messages)
    }

    /// The watches of each controller.
    pub(crate) fn into_watches(self) -> Vec<Watches<K>> {
        self.all
    }

    /// The objects that the controllers have cached.
    pub fn cache(&self) -> Cache<K> {
        Cache(self.all.iter().map(|one| one.objects.clone()).collect())
    }
}

/// Writes the events to the cache. Then calls `notify` and requests a reconcile for each changed object.
fn own_requests<K>(
    cache: Writer<K>,
    events: impl Stream<Item = Result<Event<K>, watcher::Error>> + Send + 'static,
    notify: impl Fn(&K) + Send + 'static,
) -> impl Stream<Item = Result<ReconcileRequest<K>, watcher::Error>> + Send + 'static
where
    K: Resource<DynamicType = ()> + Clone + Send + Sync + 'static,
{
    let objects = cache.as_reader();
    reflector(cache, events).flat_map(move |event| {
        let requests = match event {
            Ok(event) => changed(event, &objects)
                .iter()
                .map(|object| {
                    notify(object);
                    Ok(ReconcileRequest {
                        obj_ref: ObjectRef::from_obj(object.as_ref()),
                        reason: ReconcileReason::ObjectUpdated,
                    })
                })
                .collect(),
            Err(error) => vec![Err(error)],
        };
        stream::iter(requests)
    })
}

/// The objects that this event has changed in the cache. The cache replaces its objects only at the end of a list
/// (`InitDone`), so the objects of a list are not reported earlier. A reconcile before the end of the list could read
/// an old object.
fn changed<K>(event: Event<K>, cache: &Store<K>) -> Vec<Arc<K>>
where
    K: Resource<DynamicType = ()> + Clone + 'static,
{
    match event {
        Event::Apply(object) | Event::Delete(object) => vec![Arc::new(object)],
        Event::InitDone => cache.state(),
        Event::Init | Event::InitApply(_) => Vec::new(),
    }
}

/// The requests of one watch, delayed until the gate opens. Errors are not delayed, so that the watch is retried.
fn after<T: Send + 'static>(
    gate: Arc<Gate>,
    requests: impl Stream<Item = Result<T, watcher::Error>> + Send + 'static,
) -> impl Stream<Item = Result<T, watcher::Error>> + Send + 'static {
    requests.then(move |request| {
        let gate = Arc::clone(&gate);
        async move {
            if request.is_ok() {
                gate.passed().await;
            }
            request
        }
    })
}

/// The requests of one watch, with a pause after each error. Each watch pauses separately, so the pauses do not add up
/// when the API server is down.
fn with_pauses<K: Resource>(
    requests: impl Stream<Item = Result<ReconcileRequest<Guarded<K>>, watcher::Error>> + Send + 'static,
) -> Requests<K> {
    StreamBackoff::new(requests, WatchPauses::default()).boxed()
}

/// Maximum number of concurrent reconciles of each controller.
fn concurrency(controllers: usize) -> u16 {
    let controllers = u16::try_from(controllers).unwrap_or(u16::MAX);
    CONCURRENCY.div_ceil(controllers.max(1))
}

/// The objects of one kind in all watched namespaces.
#[derive(Clone)]
pub struct Cache<K>(Vec<Store<Guarded<K>>>)
where
    K: Resource<DynamicType = ()> + Clone + 'static;

impl<K> Cache<K>
where
    K: Resource<DynamicType = ()> + Clone + 'static,
{
    /// All objects in the cache. A reconcile must use [`Self::select`] instead, because it copies fewer objects.
    pub fn state(&self) -> Vec<Arc<Guarded<K>>> {
        self.0.iter().flat_map(Store::state).collect()
    }

    /// The objects for which `matches` returns true. `matches` is called for each object in the cache. It should
    /// compare the namespace first and copy nothing, so that many objects in one namespace do not slow down other
    /// namespaces.
    pub fn select(&self, matches: impl Fn(&Guarded<K>) -> bool) -> Vec<Arc<Guarded<K>>> {
        let selected = self.0.iter().map(|store| store.state_filter(&matches));
        selected.flatten().collect()
    }

    /// The objects of a namespace.
    pub fn in_namespace(&self, namespace: &str) -> Vec<Arc<Guarded<K>>> {
        self.select(|object| object.meta().namespace.as_deref() == Some(namespace))
    }

    /// The UID of each object in the cache, and whether this process holds the shard of the object.
    pub fn uids(&self, shards: &Shards) -> HashMap<String, bool> {
        let objects = self.state().into_iter();
        let uids = objects.filter_map(|object| Some((object.uid()?, shards.holds(&*object))));
        uids.collect()
    }

    /// The object in the cache. `None` if the cache does not contain it.
    pub fn get(&self, object: &ObjectRef<Guarded<K>>) -> Option<Arc<Guarded<K>>> {
        self.0.iter().find_map(|store| store.get(object))
    }

    /// Whether the objects of every watched namespace were listed since the start of the process. If not, an object
    /// that is not in the cache may exist (invariant 1).
    pub fn is_complete(&self) -> bool {
        let mut stores = self.0.iter();
        stores.all(|store| matches!(store.wait_until_ready().now_or_never(), Some(Ok(()))))
    }
}

#[cfg(test)]
mod tests;
