//! Caches the child objects of EtcdClusters that watches deliver, so that a reconcile can read them without a request
//! to the API server.
//!
//! The cached objects may be older than the objects in the API server, so no write may be decided from the cache
//! (invariant 33).
//!
//! Objects are cached as JSON text without `metadata.managedFields`, because parsed objects take several times the
//! memory. A reconcile parses the text, so an invalid object does not end the watch (invariant 15).

use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::marker::PhantomData;
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::time::{Duration, Instant};

use api::names;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::api::ObjectList;
use kube::runtime::watcher::{Error, Event};
use kube::{Resource, ResourceExt};
use serde::de::{DeserializeOwned, Error as _};
use serde::{Deserialize, Deserializer};
use serde_json::Value;

#[cfg(test)]
mod tests;

/// After an error, a watch counts as up to date again if this time passes without a further error. A watch without data
/// fails after [`READ_TIMEOUT`](crate::process) and is retried within a minute, so within this time the watch has
/// delivered all changes from before the error.
const CAUGHT_UP: Duration = Duration::from_mins(5);

/// The namespace and the name of a cluster. The name is the value of the label [`names::LABEL_CLUSTER`].
type Group = (String, String);

/// The cached objects of one kind, grouped by cluster. Empty until
/// [`Controllers::children`](crate::controller::Controllers::children) fills the cache.
pub struct WatchCache<K> {
    state: Arc<RwLock<State>>,
    kind: PhantomData<fn() -> K>,
}

impl<K> Clone for WatchCache<K> {
    fn clone(&self) -> Self {
        Self {
            state: Arc::clone(&self.state),
            kind: PhantomData,
        }
    }
}

impl<K> Default for WatchCache<K> {
    fn default() -> Self {
        Self {
            state: Arc::default(),
            kind: PhantomData,
        }
    }
}

impl<K> fmt::Debug for WatchCache<K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("WatchCache")
    }
}

#[derive(Default)]
struct State {
    watches: Vec<Watch>,
    /// The last read of each cluster's objects from the API server.
    reads: HashMap<Group, Read>,
    /// The time at which old reads were last dropped.
    swept: Option<Instant>,
}

/// One watch, and the objects that it has delivered.
#[derive(Default)]
struct Watch {
    /// `None` for all namespaces.
    namespace: Option<String>,
    objects: Objects,
    /// The list that the watch is receiving. It replaces [`Self::objects`] when it is complete.
    list: List,
    is_complete: bool,
    /// The time of the last error. `None` after the next event or the next complete list.
    failed: Option<Instant>,
}

#[derive(Default)]
struct List {
    objects: Objects,
    /// The metadata of the listed objects that differ from the cached objects.
    changed: Vec<ObjectMeta>,
}

#[derive(Default)]
struct Objects {
    groups: HashMap<Group, BTreeMap<String, Cached>>,
    /// The name of each object's cluster, by the namespace and the name of the object.
    clusters: HashMap<(String, String), String>,
}

#[derive(Clone)]
struct Cached {
    version: Option<u64>,
    json: Arc<[u8]>,
}

/// The resource versions of a cluster's objects in a read from the API server.
struct Read {
    at: Instant,
    /// The resource version of the whole list. `None` if it is unknown.
    version: Option<u64>,
    objects: BTreeMap<String, Option<u64>>,
}

impl Read {
    /// True as long as the watch may lack a change that this read has seen.
    fn is_recent(&self) -> bool {
        self.at.elapsed() < CAUGHT_UP
    }

    /// True if the cached objects may be older than this read.
    fn is_newer_than(&self, cached: Option<&BTreeMap<String, Cached>>) -> bool {
        let version = |name: &String| cached?.get(name)?.version;
        let mut read = self.objects.iter();
        let missed = read.any(|(name, read)| read.is_none() || version(name) < *read);
        let deleted = |(name, object): (&String, &Cached)| {
            let is_older = self.version.is_none() || object.version <= self.version;
            is_older && !self.objects.contains_key(name)
        };
        missed || cached.into_iter().flatten().any(deleted)
    }
}

impl<K> WatchCache<K> {
    fn state(&self) -> RwLockReadGuard<'_, State> {
        self.state.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn state_mut(&self) -> RwLockWriteGuard<'_, State> {
        self.state.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a watch of this namespace. `None` means all namespaces.
    pub(crate) fn feed(&self, namespace: Option<&str>) -> Feed<K> {
        let watches = &mut self.state_mut().watches;
        watches.push(Watch {
            namespace: namespace.map(str::to_owned),
            ..Watch::default()
        });
        Feed {
            cache: self.clone(),
            watch: watches.len() - 1,
        }
    }
}

impl<K: Resource + DeserializeOwned + Clone> WatchCache<K> {
    /// The objects of a cluster, ordered by name. `None` if they may be older than the last recorded read, or if an
    /// object cannot be parsed.
    pub fn get(&self, (namespace, cluster): (&str, &str)) -> Option<Vec<K>> {
        let group = (namespace.to_owned(), cluster.to_owned());
        let texts = self.texts(&group)?;
        let parsed = texts.iter().map(|text| serde_json::from_slice(text).ok());
        parsed.collect()
    }

    fn texts(&self, group: &Group) -> Option<Vec<Arc<[u8]>>> {
        let state = self.state();
        let mut watches = state.watches.iter();
        let watch =
            watches.find(|watch| watch.namespace.as_ref().is_none_or(|it| *it == group.0))?;
        let fails = watch.failed.is_some_and(|at| at.elapsed() < CAUGHT_UP);
        let objects = watch.objects.groups.get(group);
        let read = state.reads.get(group).filter(|read| read.is_recent());
        if fails || !watch.is_complete || read.is_some_and(|read| read.is_newer_than(objects)) {
            return None;
        }
        let objects = objects.into_iter().flat_map(BTreeMap::values);
        Some(objects.map(|object| Arc::clone(&object.json)).collect())
    }

    /// True if the object may be older than its last recorded read.
    pub fn is_outdated(&self, (namespace, cluster): (&str, &str), object: &K) -> bool {
        let state = self.state();
        let read = state.reads.get(&(namespace.to_owned(), cluster.to_owned()));
        let read = read.filter(|read| read.is_recent());
        let read = read.and_then(|read| read.objects.get(&object.name_any()));
        read.is_some_and(|read| read.is_none() || number(object.meta()) < *read)
    }

    /// Records a list of a cluster's objects from the API server. After this, [`Self::get`] returns no older objects.
    pub fn record_list(&self, cluster: (&str, &str), list: &ObjectList<K>) {
        self.record(
            cluster,
            list.metadata.resource_version.as_deref(),
            &list.items,
        );
    }

    /// Records a read of a single object by its name. Each cluster must have at most one object of this kind.
    pub fn record_object(&self, cluster: (&str, &str), object: Option<&K>) {
        self.record(cluster, None, object);
    }

    fn record<'a>(
        &self,
        (namespace, cluster): (&str, &str),
        version: Option<&str>,
        objects: impl IntoIterator<Item = &'a K>,
    ) where
        K: 'a,
    {
        let objects = objects.into_iter();
        let read = Read {
            at: Instant::now(),
            version: version.and_then(|version| version.parse().ok()),
            objects: objects
                .map(|object| (object.name_any(), number(object.meta())))
                .collect(),
        };
        let group = (namespace.to_owned(), cluster.to_owned());
        let mut state = self.state_mut();
        // Old reads are dropped only once per `CAUGHT_UP`, because a scan of all clusters in each read would cost
        // quadratic time.
        if state.swept.is_none_or(|at| at.elapsed() >= CAUGHT_UP) {
            state.swept = Some(read.at);
            state.reads.retain(|_, older| older.is_recent());
        }
        state.reads.insert(group, read);
    }
}

/// The resource version as a number, which grows with each write. `None` if it is missing or not a number.
fn number(metadata: &ObjectMeta) -> Option<u64> {
    metadata.resource_version.as_ref()?.parse().ok()
}

impl Objects {
    fn insert<K>(&mut self, object: &Raw<K>) {
        let metadata = &object.metadata;
        let (namespace, name) = key(metadata);
        let labels = metadata.labels.as_ref();
        let cluster = labels.and_then(|labels| labels.get(names::LABEL_CLUSTER));
        let cluster = cluster.cloned().unwrap_or_default();
        self.remove(metadata);
        let group = self.groups.entry((namespace.clone(), cluster.clone()));
        let cached = Cached {
            version: number(metadata),
            json: Arc::clone(&object.json),
        };
        group.or_default().insert(name.clone(), cached);
        self.clusters.insert((namespace, name), cluster);
    }

    fn remove(&mut self, metadata: &ObjectMeta) {
        let key = key(metadata);
        let Some(cluster) = self.clusters.remove(&key) else {
            return;
        };
        let (namespace, name) = key;
        let group = (namespace, cluster);
        if let Some(objects) = self.groups.get_mut(&group) {
            objects.remove(&name);
            if objects.is_empty() {
                self.groups.remove(&group);
            }
        }
    }

    fn get(&self, key: &(String, String)) -> Option<&Cached> {
        let cluster = self.clusters.get(key)?;
        let group = self.groups.get(&(key.0.clone(), cluster.clone()))?;
        group.get(&key.1)
    }

    /// The objects that are not in `other`, as JSON text.
    fn without(&self, other: &Self) -> Vec<Arc<[u8]>> {
        let missing = self
            .clusters
            .keys()
            .filter(|key| !other.clusters.contains_key(*key));
        let cached = missing.filter_map(|key| self.get(key));
        cached.map(|object| Arc::clone(&object.json)).collect()
    }
}

fn key(metadata: &ObjectMeta) -> (String, String) {
    let namespace = metadata.namespace.clone().unwrap_or_default();
    (namespace, metadata.name.clone().unwrap_or_default())
}

/// Writes the events of one watch into the cache.
pub(crate) struct Feed<K> {
    cache: WatchCache<K>,
    watch: usize,
}

impl<K> Feed<K> {
    /// Whether the first list is complete.
    pub(crate) fn is_complete(&self) -> bool {
        let state = self.cache.state();
        let watch = state.watches.get(self.watch);
        watch.is_some_and(|watch| watch.is_complete)
    }

    /// Applies an event to the cache. Returns the metadata of the changed objects, or the error of the watch. The
    /// metadata contains only the name, the namespace, the owners, the label of the cluster and the deletion timestamp.
    ///
    /// For a list, returns the changed objects when the list is complete and in the cache. They include objects that
    /// were deleted while the watch was interrupted.
    pub(crate) fn apply(
        &self,
        event: Result<Event<Raw<K>>, Error>,
    ) -> Vec<Result<ObjectMeta, Error>> {
        let mut state = self.cache.state_mut();
        let Some(watch) = state.watches.get_mut(self.watch) else {
            return Vec::new();
        };
        let changed: Vec<ObjectMeta> = match event {
            Err(error) => {
                watch.failed = Some(Instant::now());
                return vec![Err(error)];
            }
            Ok(Event::Init) => {
                watch.list = List::default();
                return Vec::new();
            }
            Ok(Event::InitApply(object)) => {
                let cached = watch.objects.get(&key(&object.metadata));
                if cached.is_none_or(|cached| cached.version != number(&object.metadata)) {
                    watch.list.changed.push(slim(&object.metadata));
                }
                watch.list.objects.insert(&object);
                return Vec::new();
            }
            Ok(Event::InitDone) => {
                let List { objects, changed } = std::mem::take(&mut watch.list);
                let deleted = watch.objects.without(&objects);
                let deleted = deleted.iter().filter_map(|json| metadata(json));
                watch.objects = objects;
                watch.is_complete = true;
                changed.into_iter().chain(deleted).collect()
            }
            Ok(Event::Apply(object)) => {
                watch.objects.insert(&object);
                vec![slim(&object.metadata)]
            }
            Ok(Event::Delete(object)) => {
                watch.objects.remove(&object.metadata);
                vec![slim(&object.metadata)]
            }
        };
        watch.failed = None;
        changed.into_iter().map(Ok).collect()
    }
}

fn metadata(json: &[u8]) -> Option<ObjectMeta> {
    let object: Value = serde_json::from_slice(json).ok()?;
    let metadata = ObjectMeta::deserialize(object.get("metadata")?).ok()?;
    Some(slim(&metadata))
}

/// The metadata that identifies an object, its owners and its cluster, and the deletion timestamp.
fn slim(metadata: &ObjectMeta) -> ObjectMeta {
    let mut labels = metadata.labels.clone();
    if let Some(labels) = &mut labels {
        labels.retain(|key, _| key == names::LABEL_CLUSTER);
    }
    ObjectMeta {
        labels,
        name: metadata.name.clone(),
        namespace: metadata.namespace.clone(),
        owner_references: metadata.owner_references.clone(),
        deletion_timestamp: metadata.deletion_timestamp.clone(),
        ..ObjectMeta::default()
    }
}

/// An object of kind `K` as JSON text without `metadata.managedFields`, with its metadata.
pub(crate) struct Raw<K> {
    metadata: ObjectMeta,
    json: Arc<[u8]>,
    kind: PhantomData<fn() -> K>,
}

impl<K> Clone for Raw<K> {
    fn clone(&self) -> Self {
        Self {
            metadata: self.metadata.clone(),
            json: Arc::clone(&self.json),
            kind: PhantomData,
        }
    }
}

/// Prints only the name, because the object may be large.
impl<K> fmt::Debug for Raw<K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Raw({:?})", self.metadata.name)
    }
}

impl<'de, K> Deserialize<'de> for Raw<K> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let mut object = Value::deserialize(deserializer)?;
        let metadata = object.get_mut("metadata").and_then(Value::as_object_mut);
        let metadata = metadata.ok_or_else(|| D::Error::missing_field("metadata"))?;
        metadata.remove("managedFields");
        let metadata = Value::Object(metadata.clone());
        let metadata = ObjectMeta::deserialize(metadata).map_err(D::Error::custom)?;
        let json = serde_json::to_vec(&object).map_err(D::Error::custom)?;
        Ok(Self {
            metadata,
            json: json.into(),
            kind: PhantomData,
        })
    }
}

impl<K: Resource> Resource for Raw<K> {
    type DynamicType = K::DynamicType;
    type Scope = K::Scope;

    fn kind(of: &K::DynamicType) -> Cow<'_, str> {
        K::kind(of)
    }

    fn group(of: &K::DynamicType) -> Cow<'_, str> {
        K::group(of)
    }

    fn version(of: &K::DynamicType) -> Cow<'_, str> {
        K::version(of)
    }

    fn plural(of: &K::DynamicType) -> Cow<'_, str> {
        K::plural(of)
    }

    fn meta(&self) -> &ObjectMeta {
        &self.metadata
    }

    fn meta_mut(&mut self) -> &mut ObjectMeta {
        &mut self.metadata
    }
}
