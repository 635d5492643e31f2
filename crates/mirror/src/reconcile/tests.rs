//! Tests of the reconcile with a fake API server.

use std::convert::Infallible;
use std::sync::Mutex;

use api::conditions::{ConditionType, find};
use http::{Request, Response};
use kube::client::Body;
use prometheus_client::registry::Registry;
use runtime::Operator;
use runtime::controller::Controllers;
use runtime::endpoints::GrantedBy;
use runtime::slots::SlotLimits;
use serde_json::{Value, json};
use tokio::sync::mpsc;
use tower::service_fn;

use super::*;

/// The requests in their order, such as `PATCH etcdmirrors/status`, with their bodies.
type Requests = Arc<Mutex<Vec<(String, Value)>>>;

/// A fake API server with one EtcdMirror and, if given, the EtcdCluster `new`.
fn server(mirror: &Value, cluster: Option<&Value>) -> (Client, Requests) {
    let (mirror, cluster) = (mirror.clone(), cluster.cloned());
    let requests = Requests::default();
    let recorded = requests.clone();
    let service = service_fn(move |request: Request<Body>| {
        let (mirror, cluster) = (mirror.clone(), cluster.clone());
        let recorded = recorded.clone();
        async move {
            let path = request.uri().path().to_owned();
            let mut below = path.split('/').skip_while(|part| *part != "namespaces");
            let kind = below.nth(2).unwrap_or_default();
            let suffix = if path.ends_with("/status") {
                "/status"
            } else {
                ""
            };
            let text = format!("{} {kind}{suffix}", request.method());
            let found = match kind {
                "etcdmirrors" => Some(mirror),
                "etcdclusters" if path.ends_with("/new") => cluster,
                _ => None,
            };
            let body = request.into_body().collect_bytes().await.unwrap();
            let body = serde_json::from_slice(&body).unwrap_or_default();
            recorded.lock().unwrap().push((text, body));
            let missing = json!({ "kind": "Status", "apiVersion": "v1", "status": "Failure", "code": 404,
                "reason": "NotFound", "message": "no" });
            let code = if found.is_some() { 200 } else { 404 };
            let body = Body::from(serde_json::to_vec(&found.unwrap_or(missing)).unwrap());
            Ok::<_, Infallible>(Response::builder().status(code).body(body).unwrap())
        }
    });
    (Client::new(service, "prod"), requests)
}

fn context(client: &Client) -> ReconcileContext {
    let operator = Operator::new(
        (MANAGER_BACKUP, "backup"),
        (client.clone(), client.clone()),
        Scope::All,
        ("operators".into(), "pod".into()),
        &mut Registry::default(),
    );
    let limits = SlotLimits {
        concurrent: 1,
        per_store: 1,
        per_namespace: 1,
    };
    let (changes, _) = mpsc::unbounded_channel();
    ReconcileContext {
        client: client.clone(),
        endpoints: EndpointGrants::new("operators", GrantedBy::default(), Vec::new()),
        tasks: Tasks::new(limits, operator.shutdown.clone(), changes),
        objects: Controllers::<EtcdMirror>::new(&operator).cache(),
        scope: operator.scope.clone(),
        max_mirrors: 1,
    }
}

/// An EtcdMirror of the namespace `prod`, with these finalizers.
fn mirror(finalizers: &[&str], is_deleted: bool) -> Value {
    let mut mirror = json!({
        "apiVersion": "etcd.database.coreos.com/v1beta2", "kind": "EtcdMirror",
        "metadata": { "name": "copy", "namespace": "prod", "uid": "m", "resourceVersion": "7",
            "finalizers": finalizers },
        "spec": {
            "source": { "etcdEndpoints": ["http://etcd.example.com:2379"] },
            "destination": { "etcdCluster": { "name": "new" } },
        },
    });
    if is_deleted {
        mirror["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z");
    }
    mirror
}

/// Reconciles the EtcdMirror. Returns the context, the writes with their bodies, and the result of the reconcile.
async fn reconciled(
    mirror: &Value,
    cluster: Option<&Value>,
) -> (ReconcileContext, Vec<(String, Value)>, Done) {
    let (client, requests) = server(mirror, cluster);
    let context = context(&client);
    let object: EtcdMirror = serde_json::from_value(mirror.clone()).unwrap();
    let done = Box::pin(context.reconcile(Arc::new(object))).await.unwrap();
    let mut writes = std::mem::take(&mut *requests.lock().unwrap());
    writes.retain(|(request, _)| !request.starts_with("GET"));
    (context, writes, done)
}

fn ready(status: &Value) -> (String, String) {
    let status: api::EtcdMirrorStatus = serde_json::from_value(status.clone()).unwrap();
    let ready = find(&status.conditions, &ConditionType::Ready).unwrap();
    (ready.reason.clone(), ready.message.clone())
}

/// Invariant 10: a checkpoint without a finalizer would stay after the deletion of the EtcdMirror.
#[tokio::test]
async fn invariant_10_finalizer_is_set_before_task_starts() {
    let (context, writes, _) = reconciled(&mirror(&[], false), None).await;
    let [(request, body)] = &writes[..] else {
        panic!("{writes:?}");
    };
    assert_eq!(request, "PATCH etcdmirrors");
    let finalizers = &body["metadata"]["finalizers"];
    assert_eq!(*finalizers, json!([FINALIZER_MIRROR]));
    assert!(context.tasks.monitor("m").is_none());
}

#[tokio::test]
async fn invariant_28_mirror_of_tenant_needs_grant_for_endpoint() {
    let object = mirror(&[FINALIZER_MIRROR], false);
    let (context, writes, done) = reconciled(&object, None).await;
    let [(request, body)] = &writes[..] else {
        panic!("{writes:?}");
    };
    assert_eq!(request, "PATCH etcdmirrors/status");
    let (reason, message) = ready(&body["status"]);
    assert_eq!(reason, "EndpointNotGranted");
    assert!(message.contains("namespace prod"), "{message}");
    assert!(context.tasks.monitor("m").is_none());
    assert_eq!(done.notices.len(), 1);
}

#[tokio::test]
async fn deleted_mirror_without_destination_loses_its_finalizer() {
    let object = mirror(&[FINALIZER_MIRROR, "example.com/other"], true);
    // Without a cluster ID, the cluster has never formed, and contains no checkpoint.
    let unformed = json!({
        "apiVersion": "etcd.database.coreos.com/v1beta2", "kind": "EtcdCluster",
        "metadata": { "name": "new", "namespace": "prod" }, "spec": { "size": 1 },
    });
    for cluster in [None, Some(&unformed)] {
        let (_, writes, done) = reconciled(&object, cluster).await;
        let [(request, body)] = &writes[..] else {
            panic!("{writes:?}");
        };
        assert_eq!(request, "PATCH etcdmirrors");
        let finalizers = &body["metadata"]["finalizers"];
        assert_eq!(*finalizers, json!(["example.com/other"]));
        assert!(done.notices.is_empty());
    }
}

#[tokio::test]
async fn finalizer_stays_while_destination_cannot_be_reached() {
    let object = mirror(&[FINALIZER_MIRROR], true);
    let cluster = json!({
        "apiVersion": "etcd.database.coreos.com/v1beta2", "kind": "EtcdCluster",
        "metadata": { "name": "new", "namespace": "prod" }, "spec": { "size": 1 },
        "status": { "clusterID": "b", "memberDetails": [{ "name": "new-aaaaaaaaaa" }] },
    });
    let (_, writes, _) = reconciled(&object, Some(&cluster)).await;
    let [(request, body)] = &writes[..] else {
        panic!("{writes:?}");
    };
    assert_eq!(request, "PATCH etcdmirrors/status");
    let (reason, message) = ready(&body["status"]);
    assert_eq!(reason, "ReleaseFailed");
    assert!(message.contains(FINALIZER_MIRROR), "{message}");
}

#[test]
fn promotion_during_copy_is_reported_as_incomplete() {
    let identity = Identity {
        uid: "m".to_owned(),
        name: "prod/m".to_owned(),
        mapping: Mapping::new("", ""),
    };
    let copying = Checkpoint::new(&identity, (ClusterId(0xab), 7));
    let incomplete = promoted(&copying);
    assert!(incomplete.warning && incomplete.change);
    assert_eq!(incomplete.reason, "PromotedIncomplete");
    let complete = promoted(&copying.copied(None));
    assert!(!complete.warning);
    assert!(complete.note.contains("cluster ab at revision 7"));
}
