//! Checks invariant 33 on the requests of the cluster operator: a reconcile without changes reads at most Secrets and
//! the clock of the API server (the header `Date` of `GET /version`). The operator reads all objects before each write.
//!
//! The API server is real. No kubelet runs, so the pods stay in the phase `Pending`, and no member answers.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "../../runtime/tests/api_server/server.rs"]
mod server;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use api::{EtcdCluster, names};
use http::{Method, Request};
use k8s_openapi::api::core::v1::{Pod, Service as KubeService};
use kube::api::{DeleteParams, ListParams, Patch, PatchParams, PostParams};
use kube::client::{Body, ClientBuilder};
use kube::core::ApiResource;
use kube::{Api, Client, CustomResourceExt, ResourceExt};
use prometheus_client::registry::Registry;
use runtime::admin::Readiness;
use runtime::controller::Scope;
use runtime::{Operator, crd};
use serde_json::{Value, json};
use server::ApiServer;
use tower::{Layer, Service};

const NAMESPACE: &str = "default";
const PATIENCE: Duration = Duration::from_mins(1);

/// The requests of the operator, as `METHOD path?query`, except those of the watch caches and those for Events.
#[derive(Clone, Default)]
struct Requests(Arc<Mutex<Vec<String>>>);

impl Requests {
    fn all(&self) -> Vec<String> {
        self.0.lock().unwrap().clone()
    }

    fn since(&self, before: usize) -> Vec<String> {
        self.all().split_off(before)
    }

    /// The number of requests by method and kind.
    fn by_kind(&self) -> BTreeMap<String, usize> {
        let mut counts = BTreeMap::new();
        for request in self.all() {
            let (method, rest) = request.split_once(' ').unwrap();
            let path = rest.split('?').next().unwrap();
            let (_, below) = path.split_once(NAMESPACE).unwrap_or(("", path));
            let kind = below.split('/').nth(1).unwrap_or_default();
            *counts.entry(format!("{method} {kind}")).or_default() += 1;
        }
        counts
    }
}

impl<S> Layer<S> for Requests {
    type Service = Recorded<S>;

    fn layer(&self, inner: S) -> Self::Service {
        Recorded {
            inner,
            requests: self.clone(),
        }
    }
}

struct Recorded<S> {
    inner: S,
    requests: Requests,
}

impl<S: Service<Request<Body>>> Service<Request<Body>> for Recorded<S> {
    type Response = S::Response;
    type Error = S::Error;
    type Future = S::Future;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let text = format!("{} {}", request.method(), request.uri());
        // Neither watches nor the list requests before them, which have the parameter `limit`, are recorded.
        let watches = text.contains("watch=") || text.contains("limit=");
        if !watches && !text.contains("/events") {
            self.requests.0.lock().unwrap().push(text);
        }
        self.inner.call(request)
    }
}

fn is_read(request: &str) -> bool {
    request.starts_with(Method::GET.as_str())
}

/// The operator with its watches, and a client of the test.
struct Scene {
    client: Client,
    requests: Requests,
    registry: Registry,
    operator: Operator,
}

impl Scene {
    fn api<K>(&self) -> Api<K>
    where
        K: kube::Resource<DynamicType = (), Scope = k8s_openapi::NamespaceResourceScope>,
    {
        Api::namespaced(self.client.clone(), NAMESPACE)
    }

    /// The number of reconciles since the operator started.
    fn reconciles(&self) -> u64 {
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &self.registry).unwrap();
        let name = "etcd_operator_cluster_reconcile_duration_seconds_count";
        let mut lines = text.lines().filter(|line| line.starts_with(name));
        let count = lines.next().and_then(|line| line.rsplit(' ').next());
        count.map_or(0, |count| count.parse().unwrap())
    }

    async fn until(&self, what: &str, done: impl AsyncFn() -> bool) {
        let begun = Instant::now();
        while !done().await {
            let requests = self.requests.by_kind();
            assert!(begun.elapsed() < PATIENCE, "not true: {what}\n{requests:?}");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// Waits until `quiet` reconciles in a row have sent no request.
    async fn rests(&self, quiet: u64) {
        let last = Mutex::new((self.requests.all().len(), self.reconciles()));
        let is_quiet = async || {
            let (requests, reconciles) = (self.requests.all().len(), self.reconciles());
            let mut last = last.lock().unwrap();
            if last.0 != requests {
                *last = (requests, reconciles);
            }
            reconciles >= last.1 + quiet
        };
        self.until("the operator sends no request", is_quiet).await;
    }

    /// Sets an annotation of the pod that the operator ignores, and waits until the operator reconciles.
    async fn annotate(&self, pod: &str, value: &str) {
        let before = self.reconciles();
        let patch = json!({ "metadata": { "annotations": { "example.com/note": value } } });
        let pods = self.api::<Pod>();
        let patch = Patch::Merge(&patch);
        pods.patch(pod, &PatchParams::default(), &patch)
            .await
            .unwrap();
        let reconciled = async || self.reconciles() > before;
        self.until("the change triggers a reconcile", reconciled)
            .await;
    }
}

async fn begin(server: &ApiServer) -> Scene {
    let client = server.client();
    let kind = ApiResource::erase::<EtcdCluster>(&());
    let crd: &(dyn Fn() -> _ + Sync) = &EtcdCluster::crd;
    let (scope, ready) = (Scope::namespace(NAMESPACE), Readiness::default());
    crd::ready(&client, &kind, Some(crd), &scope, &ready).await;
    let requests = Requests::default();
    let recorded = ClientBuilder::try_from(server.config()).unwrap();
    let recorded = recorded.with_layer(&requests).build();
    let mut registry = Registry::default();
    let operator = Operator::new(
        ("etcd-operator", "cluster"),
        (recorded.clone(), recorded),
        scope,
        (NAMESPACE.into(), "pod".into()),
        &mut registry,
    );
    Scene {
        client,
        requests,
        registry,
        operator,
    }
}

#[tokio::test]
async fn invariant_33_all_objects_are_read_before_a_write_and_none_otherwise() {
    let server = ApiServer::start().await;
    let scene = begin(&server).await;
    let (operator, image) = (scene.operator.clone(), Some("operator".to_owned()));
    tokio::select! {
        () = cluster::app::work(operator, image, BTreeMap::new(), Vec::new()) => panic!("the operator ended"),
        () = Box::pin(reads_before_writes(&scene)) => {}
    }
}

/// Creates a cluster of three members, and waits until the operator sends no more requests. Returns the name of a pod.
async fn create(scene: &Scene, spec: Value) -> String {
    let cluster = json!({ "apiVersion": "etcd.database.coreos.com/v1beta2", "kind": "EtcdCluster",
        "metadata": { "name": "db", "namespace": NAMESPACE }, "spec": spec });
    let cluster: EtcdCluster = serde_json::from_value(cluster).unwrap();
    let (clusters, params) = (scene.api::<EtcdCluster>(), PostParams::default());
    clusters.create(&params, &cluster).await.unwrap();
    let of_cluster = ListParams::default().labels(&names::cluster_selector("db"));
    let pods = scene.api::<Pod>();
    let all_exist = async || pods.list(&of_cluster).await.unwrap().items.len() == 3;
    scene.until("three pods exist", all_exist).await;
    let members = pods.list(&of_cluster).await.unwrap().items;
    let members: Vec<String> = members.iter().map(ResourceExt::name_any).collect();
    // No kubelet runs, so no member starts. The members' Services select their pods only after a time limit.
    let services = scene.api::<KubeService>();
    let are_open = async || {
        let all = services.list(&of_cluster).await.unwrap().items;
        let mut of_members = all.iter().filter(|it| members.contains(&it.name_any()));
        !of_members.any(member::is_closed)
    };
    scene
        .until("the members' Services have endpoints", are_open)
        .await;
    scene.rests(3).await;
    members[0].clone()
}

async fn reads_before_writes(scene: &Scene) {
    let pod = create(scene, json!({ "size": 3, "version": "3.6.16" })).await;
    let requests = scene.requests.all();
    let reads = requests.iter().filter(|request| is_read(request)).count();
    println!(
        "{reads} reads of {} requests in {} reconciles",
        requests.len(),
        scene.reconciles()
    );
    println!("{:?}", scene.requests.by_kind());
    let by_name = |request: &&String| is_read(request) && request.contains("/pods/");
    let by_name: Vec<_> = requests.iter().filter(by_name).collect();
    assert_eq!(
        by_name, [""; 0],
        "no pod of a new cluster may be read by name"
    );

    // A change without effect on the plan triggers a reconcile, which sends no request.
    let before = scene.requests.all().len();
    for value in ["1", "2", "3"] {
        scene.annotate(&pod, value).await;
    }
    assert_eq!(scene.requests.since(before), [""; 0]);

    // Before the operator creates a deleted Service again, it reads all objects of the cluster.
    let (services, delete) = (scene.api::<KubeService>(), DeleteParams::default());
    services.delete("db", &delete).await.unwrap();
    let exists = async || services.get_opt("db").await.unwrap().is_some();
    scene.until("the Service exists again", exists).await;
    let sent = scene.requests.since(before);
    let write = sent.iter().position(|request| !is_read(request));
    let reads = &sent[..write.expect("a write")];
    for kind in [
        "pods",
        "services",
        "persistentvolumeclaims",
        "etcdclusters/db",
    ] {
        let is_there = reads.iter().any(|read| read.contains(kind));
        assert!(is_there, "{kind} is not read before the write: {sent:?}");
    }
    // The operator reads no NetworkPolicy, because the spec requests none, and the watch has delivered none.
    let policies = sent.iter().filter(|it| it.contains("networkpolicies"));
    assert_eq!(policies.count(), 0, "{sent:?}");

    // After a write, the operator reads all objects in each reconcile, until a reconcile needs no write. From then on,
    // a change without effect on the plan causes no read.
    scene.rests(3).await;
    let before = scene.requests.all().len();
    scene.annotate(&pod, "4").await;
    assert_eq!(scene.requests.since(before), [""; 0]);
}

/// The operator has no permission to watch Secrets. After a change of a pod, it therefore reads the Secrets of a
/// cluster with TLS, and no other objects.
#[tokio::test]
async fn invariant_33_idle_tls_cluster_causes_reads_of_secrets_only() {
    let server = ApiServer::start().await;
    let scene = begin(&server).await;
    let (operator, image) = (scene.operator.clone(), Some("operator".to_owned()));
    tokio::select! {
        () = cluster::app::work(operator, image, BTreeMap::new(), Vec::new()) => panic!("the operator ended"),
        () = Box::pin(reads_secrets(&scene)) => {}
    }
}

async fn reads_secrets(scene: &Scene) {
    let spec = json!({ "size": 3, "version": "3.6.16", "TLS": { "generated": {} } });
    let pod = create(scene, spec).await;
    let before = scene.requests.all().len();
    scene.annotate(&pod, "1").await;
    let is_secret = |request: &String| is_read(request) && request.contains("/secrets/");
    let are_read = async || scene.requests.since(before).iter().any(is_secret);
    scene.until("the Secrets are read", are_read).await;
    // `rests` waits until the reconcile that reads the Secrets has ended.
    scene.rests(1).await;
    let sent = scene.requests.since(before);
    println!("{} requests: {sent:?}", sent.len());
    // The operator reads the API server's clock from the header `Date` of `GET /version`, to renew certificates.
    let is_other = |it: &&String| !is_secret(it) && !it.starts_with("GET /version");
    let others: Vec<_> = sent.iter().filter(is_other).collect();
    assert_eq!(others, [""; 0]);
}
