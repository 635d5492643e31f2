//! Tests the operator with an API server that answers slowly. The operator acts on an observation of the cluster for
//! only ten seconds, so it may have to stop after any write. If it stops during the start of a member, it must not
//! replace this member.
//!
//! The API server is real, and the test simulates the kubelets and etcd. The test prints the number of requests,
//! because each request delays the bootstrap.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "../../runtime/tests/api_server/server.rs"]
mod server;

use std::collections::BTreeSet;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use api::EtcdCluster;
use api::names;
use cluster::metrics::Metrics as ClusterMetrics;
use cluster::reconcile::{ClusterOperator, SnapshotCache};
use etcd::fake::{FakeEtcd, FakeMember};
use etcd::{Deadlines, Etcd, Member, MemberId};
use futures::future::join_all;
use http::Request;
use k8s_openapi::api::core::v1::{Pod, Service as KubeService};
use kube::api::{ListParams, Patch, PatchParams, PostParams};
use kube::client::{Body, ClientBuilder};
use kube::core::ApiResource;
use kube::{Api, Client, CustomResourceExt, ResourceExt};
use prometheus_client::registry::Registry;
use runtime::admin::Readiness;
use runtime::clients::Clients;
use runtime::controller::Scope;
use runtime::crd;
use runtime::image::OwnImage;
use runtime::{Operator, Reconcile};
use serde_json::json;
use server::ApiServer;
use tower::{Layer, Service};

const NAMESPACE: &str = "default";
/// Time limit of a [`Story`], which usually takes one minute.
const PATIENCE: Duration = Duration::from_mins(4);

/// Delays every answer, and counts the requests.
#[derive(Clone, Default)]
struct Slow {
    delay: Duration,
    asked: Arc<Mutex<Vec<Instant>>>,
}

impl Slow {
    /// The number of requests, and the same number with concurrent requests counted as one.
    fn counted(&self) -> (usize, usize) {
        let asked = self.asked.lock().unwrap();
        let mut turns = 0;
        let mut answered: Option<Instant> = None;
        for at in asked.iter() {
            if answered.is_none_or(|answered| *at >= answered) {
                turns += 1;
                answered = Some(*at + self.delay);
            }
        }
        (asked.len(), turns)
    }
}

impl<S> Layer<S> for Slow {
    type Service = SlowService<S>;

    fn layer(&self, inner: S) -> Self::Service {
        let slow = self.clone();
        SlowService { inner, slow }
    }
}

struct SlowService<S> {
    inner: S,
    slow: Slow,
}

impl<S> Service<Request<Body>> for SlowService<S>
where
    S: Service<Request<Body>>,
    S::Future: Send + 'static,
    S::Response: Send,
    S::Error: Send,
{
    type Response = S::Response;
    type Error = S::Error;
    type Future = Pin<Box<dyn Future<Output = Result<S::Response, S::Error>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        self.slow.asked.lock().unwrap().push(Instant::now());
        let delay = self.slow.delay;
        let answer = self.inner.call(request);
        Box::pin(async move {
            let answer = answer.await;
            tokio::time::sleep(delay).await;
            answer
        })
    }
}

/// A test cluster and the operator that manages it.
struct Story {
    name: &'static str,
    /// The client of the test, without the delay.
    client: Client,
    slow: Slow,
    operator: ClusterOperator,
    cache: Arc<SnapshotCache>,
    etcd: Arc<FakeEtcd>,
    begun: Instant,
}

impl Story {
    async fn begin(server: &ApiServer, name: &'static str, delay: u64, spec: &str) -> Self {
        let client = server.client();
        let slow = Slow {
            delay: Duration::from_millis(delay),
            ..Slow::default()
        };
        let behind = ClientBuilder::try_from(server.config()).unwrap();
        let behind = behind.with_layer(&slow).build();
        let etcd = Arc::new(FakeEtcd::formed(0xab, &[], |_| String::new()));
        let clients = Clients::new(
            Arc::clone(&etcd) as Arc<dyn Etcd>,
            Deadlines {
                connect: Duration::from_millis(100),
                status: Duration::from_millis(100),
                call: Duration::from_millis(100),
                ..Deadlines::default()
            },
        );
        let image = OwnImage::new(&operator(&behind), Some("operator".to_owned()));
        let (cache, metrics) = (
            Arc::new(SnapshotCache::default()),
            ClusterMetrics::default(),
        );
        let kept = Arc::clone(&cache);
        let operator = ClusterOperator::new(behind, clients, image, kept, metrics);
        let spec: serde_json::Value = serde_json::from_str(spec).unwrap();
        let cluster = json!({ "apiVersion": "etcd.database.coreos.com/v1beta2", "kind": "EtcdCluster",
            "metadata": { "name": name, "namespace": NAMESPACE }, "spec": spec });
        let story = Self {
            name,
            client,
            slow,
            operator,
            cache,
            etcd,
            begun: Instant::now(),
        };
        let cluster: EtcdCluster = serde_json::from_value(cluster).unwrap();
        let clusters = story.api::<EtcdCluster>();
        clusters
            .create(&PostParams::default(), &cluster)
            .await
            .unwrap();
        story
    }

    fn api<K>(&self) -> Api<K>
    where
        K: kube::Resource<DynamicType = (), Scope = k8s_openapi::NamespaceResourceScope>,
    {
        Api::namespaced(self.client.clone(), NAMESPACE)
    }

    async fn cluster(&self) -> EtcdCluster {
        self.api::<EtcdCluster>().get(self.name).await.unwrap()
    }

    async fn pods(&self) -> BTreeSet<String> {
        let of_cluster = ListParams::default().labels(&names::cluster_selector(self.name));
        let pods = self.api::<Pod>().list(&of_cluster).await.unwrap().items;
        pods.iter().map(ResourceExt::name_any).collect()
    }

    /// The names of all members that have a Service.
    async fn named(&self) -> BTreeSet<String> {
        let of_cluster = ListParams::default().labels(&names::cluster_selector(self.name));
        let services = self.api::<KubeService>().list(&of_cluster).await.unwrap();
        let services = services.items.iter();
        services
            .filter_map(|service| service.labels().get(names::LABEL_MEMBER).cloned())
            .collect()
    }

    /// Simulates the kubelets and etcd: each new pod runs at once, and its member joins the fake etcd cluster.
    async fn run_pods(&self) {
        let pods = self.pods().await;
        for (at, name) in (1..).zip(&pods) {
            let (url, now) = (format!("http://10.0.0.{at}:2379"), "2026-01-01T00:00:00Z");
            let known = self.etcd.with(|state| {
                let mut members = state.members.iter();
                members.any(|one| one.member.client_urls.contains(&url))
            });
            if known {
                continue;
            }
            let status = json!({ "status": { "phase": "Running", "podIP": format!("10.0.0.{at}"),
                "podIPs": [{ "ip": format!("10.0.0.{at}") }],
                "conditions": [{ "type": "Ready", "status": "True", "lastTransitionTime": now },
                    { "type": "ContainersReady", "status": "True", "lastTransitionTime": now }],
                "containerStatuses": [{ "name": "etcd", "ready": true, "started": true, "restartCount": 0,
                    "image": "etcd", "imageID": "etcd", "state": { "running": { "startedAt": now } } }] } });
            let pods = self.api::<Pod>();
            pods.patch_status(name, &PatchParams::default(), &Patch::Merge(&status))
                .await
                .unwrap();
            let member = Member {
                id: MemberId(at),
                name: name.clone(),
                peer_urls: vec![format!("http://{name}.{NAMESPACE}.svc:2380")],
                client_urls: vec![url],
                is_learner: false,
            };
            self.etcd.with(|state| {
                state.members.push(FakeMember {
                    member,
                    up: true,
                    caught_up: true,
                    version: "3.6.16".to_owned(),
                    revision: 1,
                    db_size: 20_480,
                    free: 0,
                });
            });
        }
    }

    /// Reconciles until the condition is true. Returns the recorded bootstrap members, and fails if they change.
    async fn until(&self, done: impl AsyncFn(&EtcdCluster) -> bool) -> BTreeSet<String> {
        let mut first: Option<BTreeSet<String>> = None;
        while self.begun.elapsed() < PATIENCE {
            let cluster = self.cluster().await;
            let recorded = cluster.status.as_ref();
            let recorded = recorded.and_then(|status| status.bootstrap.clone());
            if let Some(bootstrap) = recorded {
                let names: BTreeSet<String> = bootstrap.members.into_iter().collect();
                let first = first.get_or_insert_with(|| names.clone());
                assert_eq!(
                    names, *first,
                    "{}: the operator began a second bootstrap",
                    self.name
                );
            }
            if done(&cluster).await {
                return first.unwrap_or_default();
            }
            // The cached snapshot is dropped, because this test watches no objects, and any object may have changed
            // since the last reconcile.
            self.cache.invalidate(&cluster.uid().unwrap_or_default());
            let snapshot = Box::pin(self.operator.reconcile(Arc::new(cluster)));
            let pause = match snapshot.await {
                Ok(done) => done.requeue.unwrap_or_default(),
                Err(error) => {
                    eprintln!("{}: {}", self.name, api::problem::Chain(&error));
                    Duration::from_secs(1)
                }
            };
            tokio::time::sleep(pause.min(Duration::from_millis(100))).await;
        }
        panic!(
            "{}: the condition is not true after {PATIENCE:?}",
            self.name
        );
    }

    async fn comes_to_its_end(&self) {
        let all_there = async |_: &EtcdCluster| self.pods().await.len() == 3;
        let names = self.until(all_there).await;
        let (asked, turns) = self.slow.counted();
        println!(
            "{}: pods after {:.1?}, {asked} requests, {turns} one after the other",
            self.name,
            self.begun.elapsed()
        );
        assert_eq!(self.pods().await, names);
        assert_eq!(self.named().await, names, "{}", self.name);
    }

    async fn forms(&self) {
        let formed = async |cluster: &EtcdCluster| {
            self.run_pods().await;
            let status = cluster.status.as_ref();
            status.is_some_and(|status| status.cluster_id.is_some())
        };
        let names = self.until(formed).await;
        assert_eq!(self.named().await, names, "{}", self.name);
    }

    /// Requests a fourth member. Checks that exactly one member was added, and that its pod has the member's name.
    async fn grows(&self) {
        let size = Patch::Merge(json!({ "spec": { "size": 4 } }));
        let clusters = self.api::<EtcdCluster>();
        clusters
            .patch(self.name, &PatchParams::default(), &size)
            .await
            .unwrap();
        let (begun, (_, before)) = (Instant::now(), self.slow.counted());
        self.until(async |_| self.pods().await.len() == 4).await;
        let (_, turns) = self.slow.counted();
        println!(
            "{}: another pod after {:.1?}, {} requests one after the other",
            self.name,
            begun.elapsed(),
            turns - before
        );
        assert_eq!(self.named().await, self.pods().await, "{}", self.name);
        let listed = self.etcd.with(|state| state.members.len());
        assert_eq!(listed, 4, "{}", self.name);
    }
}

fn operator(client: &Client) -> Operator {
    Operator::new(
        ("etcd-operator", "cluster"),
        (client.clone(), client.clone()),
        Scope::namespace(NAMESPACE),
        (NAMESPACE.into(), "pod".into()),
        &mut Registry::default(),
    )
}

const PLAIN: &str = r#"{"size":3,"version":"3.6.16"}"#;
const VOLUMES: &str = r#"{"size":3,"version":"3.6.16","pod":{"persistentVolumeClaimSpec":{
    "accessModes":["ReadWriteOnce"],"resources":{"requests":{"storage":"1Gi"}}}}}"#;
const TLS: &str = r#"{"size":3,"version":"3.6.16","TLS":{"generated":{}}}"#;
const BOTH: &str = r#"{"size":3,"version":"3.6.16","TLS":{"generated":{}},"pod":{"persistentVolumeClaimSpec":{
    "accessModes":["ReadWriteOnce"],"resources":{"requests":{"storage":"1Gi"}}}}}"#;

/// Each request takes 500 ms or 1000 ms, depending on the case. In every case, the bootstrap members must get their
/// pods. In the cases without TLS, the cluster must form and then grow.
#[tokio::test]
async fn bootstrap_keeps_member_names_with_slow_api_server() {
    let server = ApiServer::start().await;
    let scope = Scope::namespace(NAMESPACE);
    let kind = ApiResource::erase::<EtcdCluster>(&());
    let crd: &(dyn Fn() -> _ + Sync) = &EtcdCluster::crd;
    crd::ready(
        &server.client(),
        &kind,
        Some(crd),
        &scope,
        &Readiness::default(),
    )
    .await;
    let cases = [
        ("plain-500", 500, PLAIN),
        ("volumes-500", 500, VOLUMES),
        ("tls-500", 500, TLS),
        ("both-500", 500, BOTH),
        ("plain-1000", 1000, PLAIN),
        ("volumes-1000", 1000, VOLUMES),
        ("tls-1000", 1000, TLS),
        ("both-1000", 1000, BOTH),
    ];
    let story = async |(name, delay, spec): (&'static str, u64, &str)| {
        let story = Story::begin(&server, name, delay, spec).await;
        Box::pin(story.comes_to_its_end()).await;
        if !spec.contains("TLS") {
            Box::pin(story.forms()).await;
            Box::pin(story.grows()).await;
        }
    };
    join_all(cases.map(|case| Box::pin(story(case)))).await;
}
