//! Reads the API server's clock for decisions about lost pods and generated certificates (invariants 5 and 20).
//!
//! A pod shows since when its node has been lost or its deletion has been overdue, by the clocks of the control plane.
//! With an operator's clock that is ahead, a pod that was just deleted would seem overdue for a long time, and the
//! operator would remove its member and the volume.

use jiff::SignedDuration;
use k8s_openapi::api::core::v1::Pod;
use kube::Client;

use super::pods;

/// The API server's time minus the operator's time; `None` if no decision depends on it. `generates`: true if the
/// operator generates the certificates.
pub(super) async fn read(
    client: &Client,
    pods: &[Pod],
    generates: bool,
) -> Result<Option<SignedDuration>, kube::Error> {
    if generates || pods.iter().any(pods::tells_a_time) {
        return runtime::clock::difference(client).await;
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use http::{Request, Response};
    use jiff::Timestamp;
    use kube::ResourceExt;
    use kube::client::Body;
    use serde_json::{Value, json};
    use tower::service_fn;

    use super::*;
    use crate::observe::tests::made_durable;

    /// A fake API server whose clock is far in the past.
    fn server() -> (Client, Arc<AtomicUsize>) {
        let asked = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&asked);
        let answer = move |request: Request<Body>| {
            assert_eq!(request.uri().path(), "/version");
            counted.fetch_add(1, Ordering::Relaxed);
            let answer = Response::builder().header("date", "Sat, 21 Nov 2020 00:00:00 GMT");
            std::future::ready(Ok::<_, Infallible>(answer.body(Body::empty()).unwrap()))
        };
        (Client::new(service_fn(answer), "prod"), asked)
    }

    fn pod(metadata: &Value, ready: &str, restarts: i32) -> Pod {
        let object = json!({
            "metadata": metadata,
            "status": {
                "conditions": [{ "type": "Ready", "status": ready }],
                "containerStatuses": [{ "name": "etcd", "image": "", "imageID": "", "ready": ready == "True",
                    "restartCount": restarts }],
            },
        });
        serde_json::from_value(object).unwrap()
    }

    /// Invariants 5 and 20: the operator needs the API server's time to decide whether a member is lost or a
    /// certificate is due.
    #[tokio::test]
    async fn api_server_time_is_read_for_lost_pods_and_generated_certificates() {
        let plain = json!({ "name": "db-a" });
        let deleted = json!({ "name": "db-a", "deletionTimestamp": "2020-11-21T00:00:30Z" });
        for (pod, generates, asks) in [
            (pod(&plain, "True", 0), false, false),
            (pod(&plain, "False", 0), false, false),
            (pod(&plain, "True", 7), false, false),
            (pod(&plain, "False", 2), false, true),
            (pod(&deleted, "True", 0), false, true),
            (pod(&plain, "True", 0), true, true),
        ] {
            let (client, asked) = server();
            let read = read(&client, std::slice::from_ref(&pod), generates).await;
            let clock = read.unwrap();
            assert_eq!(asked.load(Ordering::Relaxed), usize::from(asks), "{pod:?}");
            let theirs = clock.map(|clock| Timestamp::now().checked_add(clock).unwrap());
            let told = theirs.map(|theirs| theirs.strftime("%F %H").to_string());
            assert_eq!(told, asks.then(|| "2020-11-21 00".to_owned()));
        }
    }

    /// A fake API server with one cluster. The member's pod is terminating and has lost its labels, so no list
    /// contains it.
    fn server_without_labels() -> Client {
        let objects = made_durable();
        let cluster = serde_json::to_value(&objects.cluster).unwrap();
        let mut pod = objects.pods[0].clone();
        let member = pod.name_any();
        pod.metadata.labels = None;
        let mut pod = serde_json::to_value(&pod).unwrap();
        pod["metadata"]["deletionTimestamp"] = json!("2020-11-21T00:00:30Z");
        let answer = move |request: Request<Body>| {
            let path = request.uri().path().to_owned();
            let (kind, name) = match path.split('/').collect::<Vec<_>>()[..] {
                [.., "prod", kind] => (kind.to_owned(), None),
                [.., "prod", kind, name] => (kind.to_owned(), Some(name.to_owned())),
                _ => (path, None),
            };
            let (code, body) = match (kind.as_str(), name.as_deref()) {
                ("etcdclusters", Some("db")) => (200, cluster.clone()),
                ("pods", Some(name)) if name == member => (200, pod.clone()),
                (_, Some(_)) => (
                    404,
                    json!({ "kind": "Status", "status": "Failure", "code": 404, "reason": "NotFound" }),
                ),
                ("/version", None) => (200, json!({})),
                (_, None) => (200, json!({ "metadata": {}, "items": [] })),
            };
            let answer = Response::builder().status(code);
            let answer = answer.header("date", "Sat, 21 Nov 2020 00:00:00 GMT");
            let body = Body::from(serde_json::to_vec(&body).unwrap());
            std::future::ready(Ok::<_, Infallible>(answer.body(body).unwrap()))
        };
        Client::new(service_fn(answer), "prod")
    }

    #[tokio::test]
    async fn invariant_5_api_server_time_is_read_for_unlabeled_lost_pod() {
        let client = server_without_labels();
        let watched = runtime::watched::Watched::default();
        let read = crate::observe::objects(&client, &watched, ("prod", "db")).await;
        let objects = read.unwrap().unwrap();
        assert_eq!(
            objects.pods.len(),
            1,
            "the pod without labels must be found by its name"
        );
        assert!(objects.clock.0.is_some());
    }
}
