//! A fake API server for tests. It records all requests, and a function of the test returns the responses.

use std::convert::Infallible;
use std::sync::{Arc, Mutex};

use api::EtcdRestore;
use http::{Request, Response};
use kube::Client;
use kube::client::Body;
use prometheus_client::registry::Registry;
use runtime::Operator;
use runtime::controller::Scope;
use runtime::image::OwnImage;
use runtime::slots::{SlotLimits, Slots};
use serde_json::{Value, json};
use tower::service_fn;

/// The received requests in their order, such as `PATCH etcdrestores/status`.
pub(crate) type Requests = Arc<Mutex<Vec<String>>>;

/// Starts a server. `answer` gets a request and the number of earlier equal requests, and returns a status code and an
/// object. For an error code, the object is ignored.
pub(crate) fn server(
    answer: impl Fn(&str, usize) -> (u16, Value) + Send + Sync + 'static,
) -> (Client, Requests) {
    serve(move |request, before, _| answer(request, before))
}

/// Like [`server`], but `answer` gets the request and its body.
pub(crate) fn server_with_body(
    answer: impl Fn(&str, &Value) -> (u16, Value) + Send + Sync + 'static,
) -> (Client, Requests) {
    serve(move |request, _, body| answer(request, body))
}

fn serve(
    answer: impl Fn(&str, usize, &Value) -> (u16, Value) + Send + Sync + 'static,
) -> (Client, Requests) {
    let (requests, answer) = (Requests::default(), Arc::new(answer));
    let service = service_fn({
        let requests = Arc::clone(&requests);
        move |request: Request<Body>| {
            let (requests, answer) = (Arc::clone(&requests), Arc::clone(&answer));
            async move {
                let description = describe(&request);
                let before = {
                    let mut requests = requests.lock().unwrap();
                    let before = requests.iter().filter(|one| **one == description).count();
                    requests.push(description.clone());
                    before
                };
                let body = request.into_body().collect_bytes().await.unwrap();
                let body = serde_json::from_slice(&body).unwrap_or_default();
                Ok::<_, Infallible>(response(answer(&description, before, &body)))
            }
        }
    });
    (Client::new(service, "prod"), requests)
}

pub(crate) fn reads() -> Arc<Slots> {
    Slots::new(SlotLimits::of_reads(&Scope::All))
}

/// An EtcdRestore with `overwrite: true` and no status.
pub(crate) fn restore_in_place() -> EtcdRestore {
    let spec =
        json!({ "etcdCluster": { "name": "main" }, "backup": { "name": "b" }, "overwrite": true });
    let mut restore = EtcdRestore::new("again", serde_json::from_value(spec).unwrap());
    restore.metadata.namespace = Some("prod".into());
    restore.metadata.uid = Some("restore-uid".into());
    restore
}

/// The image of seed pods in tests.
pub(crate) fn image(client: &Client) -> OwnImage {
    let operator = Operator::new(
        ("etcd-restore-operator", "restore"),
        (client.clone(), client.clone()),
        Scope::Annotated,
        ("prod".into(), "pod".into()),
        &mut Registry::default(),
    );
    OwnImage::new(&operator, Some("operator".to_owned()))
}

/// The response to a successful deletion.
pub(crate) fn success() -> Value {
    json!({ "kind": "Status", "apiVersion": "v1", "status": "Success" })
}

fn describe(request: &Request<Body>) -> String {
    let path = request.uri().path();
    let mut below = path.split('/').skip_while(|one| *one != "namespaces");
    let kind = below.nth(2).unwrap_or(path);
    let status = if path.ends_with("/status") {
        "/status"
    } else {
        ""
    };
    format!("{} {kind}{status}", request.method())
}

fn response((code, object): (u16, Value)) -> Response<Body> {
    let object = match code {
        200..300 => object,
        code => {
            let reason = match code {
                404 => "NotFound",
                409 => "Conflict",
                _ => "InternalError",
            };
            json!({ "kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code, "reason": reason,
                "message": "no" })
        }
    };
    let body = Body::from(serde_json::to_vec(&object).unwrap());
    Response::builder().status(code).body(body).unwrap()
}
