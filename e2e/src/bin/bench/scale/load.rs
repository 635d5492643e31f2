//! The objects of the benchmark: namespaces, EtcdClusters, and copies of the members' objects for the scenario
//! `reference`.

use std::collections::HashMap;
use std::pin::pin;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result};
use e2e::objects::{Kind, has_condition};
use e2e::until;
use e2e::wait::Poll;
use futures::stream::{self, StreamExt, TryStreamExt};
use k8s_openapi::api::core::v1::{Namespace, Pod, Service, ServiceAccount};
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use kube::api::{
    Api, ApiResource, DeleteParams, DynamicObject, ListParams, Patch, PatchParams, PostParams,
};
use kube::runtime::WatchStreamExt;
use kube::runtime::watcher::{self, Event, watcher};
use kube::{Client, ResourceExt};
use serde_json::{Value, json};

use super::operator::NAMESPACE;

/// A label of the pods. Each change sets a new value, which identifies the pods that already have the change.
pub(super) const CHANGE: &str = "scale-change";
/// Number of concurrent requests of the benchmark.
pub(super) const CONCURRENCY: usize = 64;
/// Number of clusters in each namespace. Real clusters are also spread over many namespaces, one for each team.
const CLUSTERS_PER_NAMESPACE: usize = 10;
/// The label of the benchmark's namespaces.
const LABEL: &str = "etcd-operator-bench=scale";
const TIMEOUT: Duration = Duration::from_mins(30);
/// A node label that does not exist. The node selector of unschedulable pods requires this label.
const NO_NODE: &str = "etcd-operator-bench-none";

/// EtcdClusters with the same spec.
#[derive(Clone)]
pub(super) struct Load {
    client: Client,
    /// The prefix of the names of all namespaces and clusters.
    prefix: &'static str,
    pub(super) clusters: usize,
    members: usize,
    version: &'static str,
    /// True if the pods must not match any node.
    unschedulable: bool,
}

impl Load {
    pub(super) fn new(
        client: &Client,
        prefix: &'static str,
        (clusters, members): (usize, usize),
        version: &'static str,
    ) -> Self {
        Self {
            client: client.clone(),
            prefix,
            clusters,
            members,
            version,
            unschedulable: false,
        }
    }

    pub(super) fn unschedulable(self) -> Self {
        Self {
            unschedulable: true,
            ..self
        }
    }

    fn name(&self, index: usize) -> String {
        format!("{}-{index:05}", self.prefix)
    }

    fn namespace(&self, index: usize) -> String {
        format!("{}-ns-{}", self.prefix, index / CLUSTERS_PER_NAMESPACE)
    }

    fn api(&self, index: usize) -> Api<DynamicObject> {
        Kind::EtcdCluster.api(self.client.clone(), &self.namespace(index))
    }

    /// Number of EtcdClusters of this load whose condition `Ready` is True.
    pub(super) fn ready(&self, known: &Conditions) -> usize {
        let start = format!("{}-ns-", self.prefix);
        known.ready(&start)
    }

    /// Creates the namespaces, and waits for their ServiceAccounts, which pods need.
    pub(super) async fn prepare(&self) -> Result<()> {
        // The namespaces must also suffice for the additional clusters of `create_another`.
        let count = self.clusters / CLUSTERS_PER_NAMESPACE + 2;
        let names = (0..count).map(|index| self.namespace(index * CLUSTERS_PER_NAMESPACE));
        stream::iter(names.map(|name| namespace(&self.client, name)))
            .buffer_unordered(CONCURRENCY)
            .try_collect()
            .await
    }

    /// Creates all clusters with up to [`CONCURRENCY`] concurrent requests.
    pub(super) async fn create(&self) -> Result<()> {
        stream::iter((0..self.clusters).map(|index| self.create_one(index, None)))
            .buffer_unordered(CONCURRENCY)
            .try_collect()
            .await
    }

    /// Creates an additional cluster. Its pods have the label [`CHANGE`] with the value `value`.
    pub(super) async fn create_another(&self, nth: usize, value: &str) -> Result<()> {
        self.create_one(self.clusters + nth, Some(value)).await
    }

    async fn create_one(&self, index: usize, change: Option<&str>) -> Result<()> {
        let cluster = self.cluster(index, change)?;
        let (api, params) = (self.api(index), PostParams::default());
        let made = api.create(&params, &cluster).await;
        made.map(drop).context("create an EtcdCluster")
    }

    fn cluster(&self, index: usize, change: Option<&str>) -> Result<DynamicObject> {
        let mut pod = json!({});
        if self.unschedulable {
            pod["nodeSelector"] = json!({NO_NODE: "true"});
        }
        if let Some(value) = change {
            pod["labels"] = json!({CHANGE: value});
        }
        Ok(serde_json::from_value(json!({
            "apiVersion": "etcd.database.coreos.com/v1beta2", "kind": "EtcdCluster",
            "metadata": {"name": self.name(index), "namespace": self.namespace(index)},
            "spec": {"size": self.members, "version": self.version, "pod": pod},
        }))?)
    }

    /// Sets the label [`CHANGE`] in the spec of one cluster. The operator then sets the label of the running pods.
    pub(super) async fn change(&self, index: usize, value: &str) -> Result<()> {
        let spec = json!({"pod": {"labels": {CHANGE: value}}});
        self.patch(index, spec).await
    }

    /// Sets the version of all clusters.
    pub(super) async fn set_version(&self, version: &str) -> Result<()> {
        let patches = (0..self.clusters).map(|one| self.patch(one, json!({"version": version})));
        stream::iter(patches)
            .buffer_unordered(CONCURRENCY)
            .try_collect()
            .await
    }

    async fn patch(&self, index: usize, spec: Value) -> Result<()> {
        let (name, patch) = (self.name(index), Patch::Merge(json!({"spec": spec})));
        let (api, params) = (self.api(index), PatchParams::default());
        let done = api.patch(&name, &params, &patch).await;
        done.map(drop).with_context(|| format!("change {name}"))
    }
}

async fn namespace(client: &Client, name: String) -> Result<()> {
    let (key, value) = LABEL.split_once('=').unwrap_or_default();
    let object: Namespace =
        serde_json::from_value(json!({"metadata": {"name": name, "labels": {key: value}}}))?;
    let api: Api<Namespace> = Api::all(client.clone());
    api.create(&PostParams::default(), &object)
        .await
        .with_context(|| format!("create the namespace {name}"))?;
    let accounts: Api<ServiceAccount> = Api::namespaced(client.clone(), &name);
    until("the ServiceAccount exists", TIMEOUT, async || {
        Ok(match accounts.get_opt("default").await? {
            Some(_) => Poll::Done(()),
            None => Poll::NotYet(name.clone()),
        })
    })
    .await
}

/// Creates the namespace in which the operator keeps its Lease.
pub(super) async fn operator_namespace(client: &Client) -> Result<()> {
    namespace(client, NAMESPACE.to_owned()).await
}

/// Deletes all namespaces of the benchmark, and waits until the API server has removed them.
pub(super) async fn delete_namespaces(client: &Client) -> Result<()> {
    let api: Api<Namespace> = Api::all(client.clone());
    let ours = ListParams::default().labels(LABEL);
    let names = api.list(&ours).await?.items.into_iter();
    let params = DeleteParams::default();
    stream::iter(names.map(|one| one.name_any()))
        .map(async |name| is_missing(api.delete(&name, &params).await))
        .buffer_unordered(CONCURRENCY)
        .try_collect::<()>()
        .await?;
    let mut last = usize::MAX;
    until("the namespaces are deleted", TIMEOUT, async || {
        let left = api.list(&ours).await?.items.len();
        if left > 0 && left != last && left % 10 == 0 {
            println!("  {left} namespaces still exist");
        }
        last = left;
        Ok(if left == 0 {
            Poll::Done(())
        } else {
            Poll::NotYet(format!("{left} are left"))
        })
    })
    .await
}

/// Ignores the error that the object does not exist (404). Returns all other errors.
pub(super) fn is_missing<T>(done: kube::Result<T>) -> kube::Result<()> {
    match done {
        Err(kube::Error::Api(status)) if status.code == 404 => Ok(()),
        done => done.map(drop),
    }
}

/// The objects that the operator created for one cluster. The scenario `reference`, which runs without an operator,
/// creates a copy for each cluster.
pub(super) struct Template {
    namespace: String,
    name: String,
    objects: Vec<(ApiResource, String)>,
}

impl Template {
    /// Reads the objects of the first cluster of a load, without the fields that the control plane sets.
    pub(super) async fn of(load: &Load) -> Result<Self> {
        let (namespace, name) = (load.namespace(0), load.name(0));
        let selector = ListParams::default().labels(&format!("etcd_cluster={name}"));
        let cluster = Kind::EtcdCluster.resource();
        let text = serde_json::to_string(&load.cluster(0, None)?)?;
        let mut objects = vec![(cluster, text)];
        for kind in [
            ApiResource::erase::<Service>(&()),
            ApiResource::erase::<PodDisruptionBudget>(&()),
            ApiResource::erase::<Pod>(&()),
        ] {
            let api = Api::<DynamicObject>::namespaced_with(load.client.clone(), &namespace, &kind);
            for object in api.list(&selector).await?.items {
                let object = stripped(serde_json::to_value(&object)?);
                objects.push((kind.clone(), object.to_string()));
            }
        }
        Ok(Self {
            namespace,
            name,
            objects,
        })
    }

    /// Number of objects in the template.
    pub(super) fn objects(&self) -> usize {
        self.objects.len()
    }

    /// Creates a copy of the template for each cluster of the load, with concurrent requests.
    pub(super) async fn create(&self, load: &Load) -> Result<()> {
        let all =
            (0..load.clusters).flat_map(|index| self.objects.iter().map(move |it| (index, it)));
        stream::iter(all)
            .map(async |(index, (kind, text))| {
                let namespace = load.namespace(index);
                let text = text.replace(&self.namespace, &namespace);
                let text = text.replace(&self.name, &load.name(index));
                let object: DynamicObject = serde_json::from_str(&text)?;
                let api =
                    Api::<DynamicObject>::namespaced_with(load.client.clone(), &namespace, kind);
                let made = api.create(&PostParams::default(), &object).await;
                made.map(drop)
                    .with_context(|| format!("create a {}", kind.kind))
            })
            .buffer_unordered(CONCURRENCY)
            .try_collect()
            .await
    }
}

/// Removes the status and the other fields that the control plane sets.
fn stripped(mut object: Value) -> Value {
    if let Some(fields) = object.as_object_mut() {
        fields.remove("status");
    }
    if let Some(metadata) = object["metadata"].as_object_mut() {
        metadata.retain(|key, _| ["name", "namespace", "labels", "annotations"].contains(&&**key));
    }
    if let Some(spec) = object["spec"].as_object_mut() {
        // The creator of a headless Service sets the address "None", so this value is kept. The API server assigns all
        // other addresses.
        let is_set = |value: &Value| value == "None" || *value == json!(["None"]);
        spec.retain(|key, value| match key.as_str() {
            "nodeName" => false,
            "clusterIP" | "clusterIPs" => is_set(value),
            _ => true,
        });
    }
    object
}

/// Whether the condition `Ready` of each EtcdCluster is True, by namespace and name.
#[derive(Default)]
pub(super) struct Conditions(Mutex<HashMap<String, bool>>);

impl Conditions {
    fn known(&self) -> MutexGuard<'_, HashMap<String, bool>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Number of ready clusters in namespaces with this prefix.
    fn ready(&self, start: &str) -> usize {
        let known = self.known();
        let ready = known
            .iter()
            .filter(|(key, ready)| **ready && key.starts_with(start));
        ready.count()
    }

    /// Watches all EtcdClusters, until the caller aborts the task.
    pub(super) async fn watch(&self, client: Client) {
        let api = Api::<DynamicObject>::all_with(client, &Kind::EtcdCluster.resource());
        let mut events = pin!(watcher(api, watcher::Config::default()).default_backoff());
        let key = |object: &DynamicObject| {
            format!(
                "{}/{}",
                object.namespace().unwrap_or_default(),
                object.name_any()
            )
        };
        while let Some(event) = events.next().await {
            match event {
                Ok(Event::Init) => self.known().clear(),
                Ok(Event::Apply(object) | Event::InitApply(object)) => {
                    let ready = has_condition(&object, "Ready", "True");
                    self.known().insert(key(&object), ready);
                }
                Ok(Event::Delete(object)) => drop(self.known().remove(&key(&object))),
                Ok(Event::InitDone) | Err(_) => {}
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn object_template_has_no_fields_that_control_plane_sets() {
        let object = json!({
            "metadata": {"name": "a", "uid": "u", "resourceVersion": "7", "labels": {"x": "y"},
                         "ownerReferences": []},
            "spec": {"clusterIP": "10.0.0.1", "clusterIPs": ["10.0.0.1"], "nodeName": "n", "ports": []},
            "status": {},
        });
        let expected =
            json!({"metadata": {"name": "a", "labels": {"x": "y"}}, "spec": {"ports": []}});
        assert_eq!(stripped(object), expected);
    }
}
