//! Tests with a small fake API server: a reconcile panics, a namespace cannot be read, or a shard changes its holder.

use std::convert::Infallible;

use axum::Router;
use axum::body::Body;
use axum::extract::State;
use axum::http::{Method, StatusCode, Uri};
use axum::response::{IntoResponse, Response};
use k8s_openapi::api::core::v1::ConfigMap;
use kube::Client;
use kube::core::ApiResource;
use prometheus_client::encoding::text::encode;
use prometheus_client::registry::Registry;
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::sync::mpsc;

use super::super::*;
use crate::admin::Readiness;
use crate::crd;

type Bodies = Arc<Mutex<Vec<Value>>>;

/// An API server that lists two objects in each namespace, records Events, and denies access to the namespace `denied`.
async fn api(State(events): State<Bodies>, method: Method, uri: Uri, body: String) -> Response {
    let status = |code: StatusCode, reason: &str| {
        let status = json!({ "kind": "Status", "status": "Failure", "reason": reason, "message": reason,
            "code": code.as_u16() });
        (code, status.to_string()).into_response()
    };
    if uri.path().contains("/namespaces/denied/") {
        return status(StatusCode::FORBIDDEN, "Forbidden");
    }
    let object =
        |name: &str| json!({ "metadata": { "name": name, "namespace": "ns", "uid": name } });
    let query = uri.query().unwrap_or_default();
    if method == Method::GET && uri.path().ends_with("/configmaps") {
        if query.contains("watch=true") {
            let nothing = futures::stream::pending::<Result<String, Infallible>>();
            return Body::from_stream(nothing).into_response();
        }
        let list = json!({
            "kind": "ConfigMapList", "apiVersion": "v1", "metadata": { "resourceVersion": "1" },
            "items": [object("bad"), object("good")],
        });
        return list.to_string().into_response();
    }
    if uri.path().contains("/events") {
        let event = serde_json::from_str(&body).unwrap_or_default();
        events
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push(event);
        return (StatusCode::CREATED, body).into_response();
    }
    status(StatusCode::NOT_FOUND, "NotFound")
}

#[derive(Debug, thiserror::Error)]
#[error("never")]
struct Never;

impl Failure for Never {
    fn reason(&self) -> &'static str {
        "Never"
    }
}

/// A reconciler that sends the name of each object to the test, and panics for the object `bad`.
struct Panics(mpsc::UnboundedSender<String>);

impl Reconcile for Panics {
    type Object = ConfigMap;
    type Error = Never;

    async fn reconcile(&self, object: Arc<ConfigMap>) -> Result<Done, Never> {
        tokio::task::yield_now().await;
        let _ = self.0.send(object.name_any());
        assert_ne!(object.name_any(), "bad", "the secret text of a panic");
        Ok(Done {
            requeue: Some(Duration::from_millis(100)),
            ..Done::default()
        })
    }
}

async fn operator(scope: Scope, events: &Bodies, registry: &mut Registry) -> Operator {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let routes = Router::new().fallback(api).with_state(events.clone());
    tokio::spawn(async move { axum::serve(listener, routes).await });
    let client = Client::try_from(kube::Config::new(url.parse().unwrap())).unwrap();
    Operator::new(
        ("test-operator", "test"),
        (client.clone(), client),
        scope,
        ("ns".to_owned(), "pod".to_owned()),
        registry,
    )
}

/// Invariant 15: a namespace that the operator may not watch does not delay other namespaces. Invariant 1: the cache is
/// complete only after every namespace was listed.
#[tokio::test]
async fn invariant_15_denied_namespace_does_not_block_other_namespaces() {
    let list = Scope::Namespaces(["denied", "ns"].map(str::to_owned).into());
    let operator = operator(list, &Bodies::default(), &mut Registry::default()).await;
    let (sender, mut seen) = mpsc::unbounded_channel();
    let controllers = Controllers::new(&operator);
    let cache = controllers.cache();
    let run = drive(&operator, controllers, Arc::new(Panics(sender)));
    let checks = async {
        for _ in 0..20 {
            seen.recv().await.unwrap();
        }
    };
    tokio::select! {
        () = run => panic!("the controllers ended"),
        checked = tokio::time::timeout(Duration::from_secs(30), checks) => checked.unwrap(),
    }
    assert_eq!(cache.state().len(), 2);
    assert!(!cache.is_complete());
}

/// Invariant 40: the operator skips objects of other shards, and reconciles all objects of a shard that it acquires.
#[tokio::test]
async fn invariant_40_only_objects_of_held_shards_are_reconciled() {
    let scope = Scope::namespace("ns");
    let mut operator = operator(scope, &Bodies::default(), &mut Registry::default()).await;
    operator.shards = Shards::divided(8);
    let shards = operator.shards.clone();
    let good = shards.of("ns", "good");
    assert_ne!(good, shards.of("ns", "bad"));
    let (sender, mut seen) = mpsc::unbounded_channel();
    let controllers = Controllers::new(&operator);
    let cache = controllers.cache();
    let pause = Duration::from_millis(300);
    let run = drive(&operator, controllers, Arc::new(Panics(sender)));
    let checks = async {
        while !cache.is_complete() {
            tokio::time::sleep(pause).await;
        }
        tokio::time::sleep(pause).await;
        assert_eq!(seen.try_recv().ok(), None);
        // Each reconcile requests the next one after 100 ms, so a held shard causes several reconciles of `good`.
        shards.hold(good);
        for _ in 0..3 {
            assert_eq!(seen.recv().await.as_deref(), Some("good"));
        }
        while !shards.leave(good) {
            tokio::time::sleep(pause).await;
        }
        while seen.try_recv().is_ok() {}
        tokio::time::sleep(pause).await;
        assert_eq!(seen.try_recv().ok(), None);
        shards.free(good);
        shards.hold(good);
        assert_eq!(seen.recv().await.as_deref(), Some("good"));
    };
    tokio::select! {
        () = run => panic!("the controllers ended"),
        checked = tokio::time::timeout(Duration::from_secs(30), checks) => checked.unwrap(),
    }
}

/// Invariant 15: the operator can start although one of its namespaces was deleted together with its Role.
#[tokio::test]
async fn invariant_15_one_readable_namespace_is_enough_to_start() {
    let list = Scope::Namespaces(["denied", "ns"].map(str::to_owned).into());
    let operator = operator(list, &Bodies::default(), &mut Registry::default()).await;
    let kind = ApiResource::erase::<ConfigMap>(&());
    let (client, readiness) = (&operator.client, Readiness::default());
    let ready = crd::ready(client, &kind, None, &operator.scope, &readiness);
    let ready = tokio::time::timeout(Duration::from_secs(30), ready).await;
    assert!(ready.is_ok());
    let denied = Scope::namespace("denied");
    let waiting = crd::ready(client, &kind, None, &denied, &readiness);
    let waiting = tokio::time::timeout(Duration::from_millis(500), waiting).await;
    assert!(waiting.is_err());
}

/// Invariant 15: a panic affects only the object whose reconcile panicked.
#[tokio::test]
async fn invariant_15_panic_of_one_reconcile_does_not_stop_other_reconciles() {
    let events = Bodies::default();
    let mut registry = Registry::default();
    let operator = operator(Scope::namespace("ns"), &events, &mut registry).await;
    let (sender, mut seen) = mpsc::unbounded_channel();
    let controllers = Controllers::new(&operator);
    let run = drive(&operator, controllers, Arc::new(Panics(sender)));

    // `bad` is retried after a back-off of one second. Meanwhile, `good` must be reconciled several times.
    let checks = async {
        let (mut good, mut bad) = (0, 0);
        while good < 3 || bad < 2 {
            match seen.recv().await.as_deref() {
                Some("bad") => bad += 1,
                _ => good += 1,
            }
        }
        assert!(good > bad, "{good} {bad}");
        loop {
            let found =
                events.lock().unwrap().iter().any(|event| {
                    event["reason"] == "Panicked" && event["regarding"]["name"] == "bad"
                });
            if found {
                break;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::select! {
        () = run => panic!("the controller ended"),
        checked = tokio::time::timeout(Duration::from_secs(30), checks) => checked.unwrap(),
    }
    let mut metrics = String::new();
    encode(&mut metrics, &registry).unwrap();
    let failed = "etcd_operator_test_reconcile_failed_total{namespace=\"ns\",reason=\"Panicked\"}";
    assert!(metrics.contains(failed), "{metrics}");
    // Invariant 14: no Event contains the message of the panic.
    let published = format!("{:?}", events.lock().unwrap());
    assert!(!published.contains("secret text"), "{published}");
}
