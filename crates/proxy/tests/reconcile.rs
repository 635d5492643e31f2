//! The proxies of a cluster with a real kube-apiserver. No kube-controller-manager and no kubelet run, so no proxy
//! starts. The reconciler of the EtcdCluster does nothing, so this test sees only the writes of this crate.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "../../runtime/tests/api_server/server.rs"]
mod server;

use std::fmt::Debug;
use std::sync::Arc;
use std::time::Duration;

use api::EtcdCluster;
use k8s_openapi::NamespaceResourceScope;
use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::core::v1::{Secret, Service};
use k8s_openapi::api::events::v1::Event;
use k8s_openapi::api::networking::v1::NetworkPolicy;
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use kube::api::{DeleteParams, ListParams, Patch, PatchParams, PostParams};
use kube::core::ApiResource;
use kube::{Api, Client, CustomResourceExt, Resource, ResourceExt};
use prometheus_client::registry::Registry;
use proxy::{Proxies, WithProxies};
use rcgen::{CertificateParams, DistinguishedName, KeyPair};
use runtime::admin::Readiness;
use runtime::controller::{Controllers, drive};
use runtime::{Done, Operator, Reconcile, Scope, apply, crd};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use server::ApiServer;

const NAMESPACE: &str = "default";

/// A reconciler of EtcdClusters that changes nothing.
struct Idle;

impl Reconcile for Idle {
    type Object = EtcdCluster;
    type Error = apply::Error;

    async fn reconcile(&self, _: Arc<EtcdCluster>) -> Result<Done, apply::Error> {
        Ok(Done::default())
    }
}

struct Scene {
    client: Client,
    _server: ApiServer,
}

impl Scene {
    /// Starts the API server and the controller of EtcdClusters.
    async fn start() -> Self {
        let server = ApiServer::start().await;
        let client = server.client();
        let scope = Scope::namespace(NAMESPACE);
        let kind = ApiResource::erase::<EtcdCluster>(&());
        let make: &(dyn Fn() -> _ + Sync) = &EtcdCluster::crd;
        let readiness = Readiness::default();
        crd::ready(&client, &kind, Some(make), &scope, &readiness).await;
        let operator = Operator::new(
            ("etcd-operator", "cluster"),
            (client.clone(), client.clone()),
            scope,
            (NAMESPACE.into(), "pod".into()),
            &mut Registry::default(),
        );
        let proxies = Proxies::new(&operator);
        let controllers = proxies.watch(Controllers::<EtcdCluster>::new(&operator));
        let reconciler = Arc::new(WithProxies::new(Arc::new(Idle), proxies));
        tokio::spawn(async move { drive(&operator, controllers, reconciler).await });
        Self {
            client,
            _server: server,
        }
    }

    fn api<K>(&self) -> Api<K>
    where
        K: Resource<DynamicType = (), Scope = NamespaceResourceScope>,
    {
        Api::namespaced(self.client.clone(), NAMESPACE)
    }

    async fn create<K>(&self, object: &Value)
    where
        K: Resource<DynamicType = (), Scope = NamespaceResourceScope>
            + Clone
            + Debug
            + Serialize
            + DeserializeOwned,
    {
        let object: K = serde_json::from_value(object.clone()).unwrap();
        let params = PostParams::default();
        self.api::<K>().create(&params, &object).await.unwrap();
    }

    /// Creates a formed EtcdCluster with this spec.
    async fn create_cluster(&self, spec: &Value) {
        self.create::<EtcdCluster>(&json!({
            "apiVersion": "etcd.database.coreos.com/v1beta2", "kind": "EtcdCluster",
            "metadata": { "name": "db" }, "spec": spec,
        }))
        .await;
        let status = json!({ "status": {
            "clusterID": "abc", "currentVersion": "3.6.16", "bootstrap": { "token": "db-1", "members": [] },
        } });
        let (params, patch) = (PatchParams::default(), Patch::Merge(status));
        let clusters = self.api::<EtcdCluster>();
        clusters.patch_status("db", &params, &patch).await.unwrap();
    }

    async fn patch<K>(&self, name: &str, patch: Value)
    where
        K: Resource<DynamicType = (), Scope = NamespaceResourceScope>
            + Clone
            + Debug
            + DeserializeOwned,
    {
        let (params, patch) = (PatchParams::default(), Patch::Merge(patch));
        let objects = self.api::<K>();
        objects.patch(name, &params, &patch).await.unwrap();
    }

    async fn delete<K>(&self, name: &str)
    where
        K: Resource<DynamicType = (), Scope = NamespaceResourceScope>
            + Clone
            + Debug
            + DeserializeOwned,
    {
        let params = DeleteParams::default();
        drop(self.api::<K>().delete(name, &params).await.unwrap());
    }

    /// Waits until the object exists and `is` returns true.
    async fn await_object<K>(&self, name: &str, is: impl Fn(&Value) -> bool) -> Value
    where
        K: Resource<DynamicType = (), Scope = NamespaceResourceScope>
            + Clone
            + Debug
            + Serialize
            + DeserializeOwned,
    {
        let what = format!("{} {name}", K::kind(&()));
        eventually(&what, async || {
            let found = self.api::<K>().get_opt(name).await.unwrap()?;
            Some(json!(found)).filter(|found| is(found))
        })
        .await
    }

    async fn await_missing<K>(&self, name: &str)
    where
        K: Resource<DynamicType = (), Scope = NamespaceResourceScope>
            + Clone
            + Debug
            + DeserializeOwned,
    {
        let what = format!("{} {name} is deleted", K::kind(&()));
        eventually(&what, async || {
            let found = self.api::<K>().get_opt(name).await.unwrap();
            found.is_none().then_some(())
        })
        .await;
    }

    /// Waits for an Event with this reason. Returns its text.
    async fn await_event(&self, reason: &str) -> String {
        eventually(reason, async || {
            let all = self.api::<Event>().list(&ListParams::default()).await;
            let mut events = all.unwrap().items.into_iter();
            events
                .find(|event| event.reason.as_deref() == Some(reason))
                .map(|event| event.note.unwrap_or_default())
        })
        .await
    }
}

async fn eventually<T>(what: &str, mut check: impl AsyncFnMut() -> Option<T>) -> T {
    for _ in 0..900 {
        if let Some(seen) = check().await {
            return seen;
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    panic!("not true within 90 s: {what}");
}

fn grpc_proxy(settings: &Value) -> Value {
    json!({ "spec": { "grpcProxy": settings } })
}

fn exists(_: &Value) -> bool {
    true
}

#[tokio::test]
async fn proxies_are_created_repaired_and_deleted() {
    let scene = Scene::start().await;
    let spec = json!({ "grpcProxy": { "replicas": 3 }, "networkPolicy": {} });
    scene.create_cluster(&spec).await;
    let has_three = |found: &Value| found["spec"]["replicas"] == 3;
    let deployment = scene.await_object::<Deployment>("db-proxy", has_three);
    let owner = deployment.await["metadata"]["ownerReferences"][0].clone();
    assert_eq!(
        (&owner["kind"], &owner["name"]),
        (&json!("EtcdCluster"), &json!("db"))
    );
    scene.await_object::<Service>("db-proxy", exists).await;
    scene
        .await_object::<PodDisruptionBudget>("db-proxy", exists)
        .await;
    scene
        .await_object::<NetworkPolicy>("db-proxy", exists)
        .await;
    let text = scene.await_event("GrpcProxyApplied").await;
    assert!(text.contains("Deployment db-proxy"), "{text}");

    // The operator reverts changes by other programs. It watches only the Deployment, and checks all objects after a
    // change of the Deployment.
    scene
        .patch::<Deployment>("db-proxy", json!({ "spec": { "replicas": 9 } }))
        .await;
    scene
        .await_object::<Deployment>("db-proxy", has_three)
        .await;
    scene.delete::<Service>("db-proxy").await;
    scene.delete::<Deployment>("db-proxy").await;
    scene
        .await_object::<Deployment>("db-proxy", has_three)
        .await;
    scene.await_object::<Service>("db-proxy", exists).await;

    // After a change of `serviceName`, the former Service is deleted.
    scene
        .patch::<EtcdCluster>("db", grpc_proxy(&json!({ "serviceName": "front" })))
        .await;
    scene.await_object::<Service>("front", exists).await;
    scene.await_missing::<Service>("db-proxy").await;

    // The NetworkPolicy is deleted when the spec no longer needs it.
    let disabled = json!({ "spec": { "networkPolicy": { "enabled": false } } });
    scene.patch::<EtcdCluster>("db", disabled).await;
    scene.await_missing::<NetworkPolicy>("db-proxy").await;

    scene
        .patch::<EtcdCluster>("db", grpc_proxy(&json!(null)))
        .await;
    scene.await_missing::<Deployment>("db-proxy").await;
    scene.await_missing::<Service>("front").await;
    scene.await_missing::<PodDisruptionBudget>("db-proxy").await;
}

#[tokio::test]
async fn service_of_another_owner_is_not_changed() {
    let scene = Scene::start().await;
    scene
        .create::<Service>(&json!({
            "metadata": { "name": "front" },
            "spec": { "selector": { "app": "shop" }, "ports": [{ "port": 80 }] },
        }))
        .await;
    scene
        .create_cluster(&json!({ "grpcProxy": { "serviceName": "front" } }))
        .await;
    let text = scene.await_event("GrpcProxyNameTaken").await;
    assert!(
        text.contains("Service front belongs to another owner"),
        "{text}"
    );
    let found = scene.await_object::<Service>("front", exists).await;
    assert_eq!(found["spec"]["selector"], json!({ "app": "shop" }));
    scene
        .patch::<EtcdCluster>("db", grpc_proxy(&json!(null)))
        .await;
    tokio::time::sleep(Duration::from_secs(3)).await;
    scene.await_object::<Service>("front", exists).await;
}

/// The Deployment of the proxies is applied last, so the other objects exist when the API server rejects the
/// Deployment.
#[tokio::test]
async fn objects_of_proxies_are_deleted_if_deployment_is_missing() {
    let scene = Scene::start().await;
    let labels = json!({ "team": "not a label" });
    scene
        .create_cluster(&json!({ "grpcProxy": { "labels": labels } }))
        .await;
    let text = scene.await_event("GrpcProxyFailed").await;
    assert!(text.contains("cannot apply Deployment db-proxy"), "{text}");
    scene.await_object::<Service>("db-proxy", exists).await;
    scene
        .patch::<EtcdCluster>("db", grpc_proxy(&json!(null)))
        .await;
    scene.await_missing::<Service>("db-proxy").await;
    scene.await_missing::<PodDisruptionBudget>("db-proxy").await;
}

/// A Secret like that of the operator, with a new self-signed certificate.
fn secret() -> Value {
    let key = KeyPair::generate().unwrap();
    let mut params = CertificateParams::new(vec!["db-proxy.default.svc".to_owned()]).unwrap();
    params.distinguished_name = DistinguishedName::new();
    let pem = params.self_signed(&key).unwrap().pem();
    json!({
        "metadata": { "name": "db-proxy-tls" },
        "type": "kubernetes.io/tls",
        "stringData": { "tls.crt": pem, "tls.key": key.serialize_pem(), "ca.crt": pem },
    })
}

#[tokio::test]
async fn changed_certificate_replaces_pods_of_proxies() {
    const DIGEST: &str = "etcd.database.coreos.com/certificates";
    let scene = Scene::start().await;
    scene
        .create_cluster(&json!({ "TLS": { "generated": {} }, "grpcProxy": {} }))
        .await;
    let text = scene.await_event("GrpcProxyCertificateInvalid").await;
    assert!(
        text.contains("Secret db-proxy-tls does not exist"),
        "{text}"
    );
    let found = scene.api::<Deployment>().get_opt("db-proxy").await.unwrap();
    assert!(
        found.is_none(),
        "no proxy may start without its certificate"
    );

    scene.create::<Secret>(&secret()).await;
    let of = |found: &Value| found["spec"]["template"]["metadata"]["annotations"][DIGEST].clone();
    let deployment = scene.await_object::<Deployment>("db-proxy", exists).await;
    let before = of(&deployment);
    assert!(before.is_string(), "{deployment}");
    let renewed = secret();
    scene
        .patch::<Secret>(
            "db-proxy-tls",
            json!({ "stringData": renewed["stringData"] }),
        )
        .await;
    let touched = json!({ "metadata": { "annotations": { "touched": "now" } } });
    scene.patch::<EtcdCluster>("db", touched).await;
    let is_new = |found: &Value| of(found) != before;
    let after = scene.await_object::<Deployment>("db-proxy", is_new).await;
    assert!(of(&after).is_string());

    // The test has created the Secret without an owner reference to the EtcdCluster, so the operator does not delete
    // it.
    scene
        .patch::<EtcdCluster>("db", grpc_proxy(&json!(null)))
        .await;
    scene.await_missing::<Deployment>("db-proxy").await;
    let found = scene.api::<Secret>().get_opt("db-proxy-tls").await.unwrap();
    assert_eq!(
        found.map(|secret| secret.name_any()).as_deref(),
        Some("db-proxy-tls")
    );
}
