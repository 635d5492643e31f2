//! An API server of a few lines, for tests: what it is asked is kept, and answered by a function.

use std::convert::Infallible;
use std::sync::{Arc, Mutex};

use http::{Request, Response};
use kube::Client;
use kube::client::Body;
use prometheus_client::registry::Registry;
use runtime::Operator;
use runtime::controller::Scope;
use runtime::image::OwnImage;
use serde_json::{Value, json};
use tower::service_fn;

/// What a server was asked, one after the other: the method and the kind, `PATCH etcdrestores/status`.
pub(crate) type Asked = Arc<Mutex<Vec<String>>>;

/// `answer` is told what is asked and how often that was asked before, and says the code and the object. What is refused
/// needs none.
pub(crate) fn server(
    answer: impl Fn(&str, usize) -> (u16, Value) + Send + Sync + 'static,
) -> (Client, Asked) {
    serve(move |what, before, _| answer(what, before))
}

/// As [`server`]; `answer` is told what is asked and what comes with it.
pub(crate) fn told(
    answer: impl Fn(&str, &Value) -> (u16, Value) + Send + Sync + 'static,
) -> (Client, Asked) {
    serve(move |what, _, body| answer(what, body))
}

fn serve(
    answer: impl Fn(&str, usize, &Value) -> (u16, Value) + Send + Sync + 'static,
) -> (Client, Asked) {
    let (asked, answer) = (Asked::default(), Arc::new(answer));
    let service = service_fn({
        let asked = Arc::clone(&asked);
        move |request: Request<Body>| {
            let (asked, answer) = (Arc::clone(&asked), Arc::clone(&answer));
            async move {
                let what = what(&request);
                let before = {
                    let mut asked = asked.lock().unwrap();
                    let before = asked.iter().filter(|one| **one == what).count();
                    asked.push(what.clone());
                    before
                };
                let body = request.into_body().collect_bytes().await.unwrap();
                let body = serde_json::from_slice(&body).unwrap_or_default();
                Ok::<_, Infallible>(response(answer(&what, before, &body)))
            }
        }
    });
    (Client::new(service, "prod"), asked)
}

/// An image that is configured.
pub(crate) fn image(client: &Client) -> OwnImage {
    let operator = Operator::new(
        ("etcd-restore-operator", "restore"),
        (client.clone(), client.clone()),
        Scope::Cluster,
        ("prod".into(), "pod".into()),
        &mut Registry::default(),
    );
    OwnImage::new(&operator, Some("operator".to_owned()))
}

/// What a deletion is answered with.
pub(crate) fn success() -> Value {
    json!({ "kind": "Status", "apiVersion": "v1", "status": "Success" })
}

fn what(request: &Request<Body>) -> String {
    let path = request.uri().path();
    let mut below = path.split('/').skip_while(|one| *one != "namespaces");
    let kind = below.nth(2).unwrap();
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
