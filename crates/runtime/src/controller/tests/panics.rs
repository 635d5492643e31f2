//! A test of a reconcile that panics, against a small fake API server.

use std::convert::Infallible;

use axum::Router;
use axum::body::Body;
use axum::extract::State;
use axum::http::{Method, StatusCode, Uri};
use axum::response::{IntoResponse, Response};
use k8s_openapi::api::core::v1::ConfigMap;
use kube::Client;
use prometheus_client::encoding::text::encode;
use prometheus_client::registry::Registry;
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::sync::mpsc;

use super::super::*;

type Bodies = Arc<Mutex<Vec<Value>>>;

/// An API server that lists two objects and records Events. It answers no other requests.
async fn api(State(events): State<Bodies>, method: Method, uri: Uri, body: String) -> Response {
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
    let missing =
        json!({ "kind": "Status", "status": "Failure", "reason": "NotFound", "code": 404 });
    (StatusCode::NOT_FOUND, missing.to_string()).into_response()
}

#[derive(Debug, thiserror::Error)]
#[error("never")]
struct Never;

impl Failure for Never {
    fn reason(&self) -> &'static str {
        "Never"
    }
}

/// A reconciler that sends the name of each object, and panics for the object `bad`.
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

/// Invariant 15: a panic affects only its own object.
#[tokio::test]
async fn invariant_15_panic_of_one_reconcile_does_not_stop_others() {
    let events = Bodies::default();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let routes = Router::new().fallback(api).with_state(events.clone());
    tokio::spawn(async move { axum::serve(listener, routes).await });

    let client = Client::try_from(kube::Config::new(url.parse().unwrap())).unwrap();
    let mut registry = Registry::default();
    let operator = Operator::new(
        ("test-operator", "test"),
        (client.clone(), client),
        Scope::Namespace("ns".to_owned()),
        ("ns".to_owned(), "pod".to_owned()),
        &mut registry,
    );
    let (sender, mut seen) = mpsc::unbounded_channel();
    let run = drive(&operator, controller(&operator), Arc::new(Panics(sender)));

    // `bad` is retried after the first back-off of one second. Until then, `good` is reconciled ten times.
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
    // Invariant 14: the message of the panic is in no Event.
    let published = format!("{:?}", events.lock().unwrap());
    assert!(!published.contains("secret text"), "{published}");
}
