//! Metrics and traces of the requests to the API server, as a layer of the Kubernetes client.
//!
//! The labels are the verb, the resource and the status code. They contain no names of objects, so the number of label
//! values is limited.

use std::fmt;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Instant;

use http::{Method, Request, Response};
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::Registry;
use tower::{Layer, Service};
use tracing::Instrument;

use crate::traces::TRACE_ONLY;

/// The value of the label `resource` if the path of the request has an unexpected form.
const OTHER: &str = "other";

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct Labels {
    verb: &'static str,
    resource: String,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct Answered {
    verb: &'static str,
    resource: String,
    code: String,
}

/// The metrics of requests to the API server, as a layer of a client.
#[derive(Clone)]
pub(crate) struct ApiRequests {
    duration: Family<Labels, Histogram, fn() -> Histogram>,
    answers: Family<Answered, Counter>,
}

impl Default for ApiRequests {
    fn default() -> Self {
        // The buckets cover 5 ms to 41 s.
        let buckets: fn() -> Histogram = || Histogram::new(exponential_buckets(0.005, 2.0, 14));
        Self {
            duration: Family::new_with_constructor(buckets),
            answers: Family::default(),
        }
    }
}

impl fmt::Debug for ApiRequests {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ApiRequests")
    }
}

impl ApiRequests {
    /// Registers the metrics.
    pub(crate) fn register(&self, registry: &mut Registry) {
        registry.register(
            "etcd_operator_api_request_duration_seconds",
            "Time until the API server's response, with retries, by verb and resource",
            self.duration.clone(),
        );
        registry.register(
            "etcd_operator_api_requests",
            "Requests to the API server, by verb, resource and status code",
            self.answers.clone(),
        );
    }

    /// Creates one time series of each metric, because a metric without a time series is not exported. For tests.
    #[cfg(test)]
    pub(crate) fn fill(&self) {
        let labels = labels(&Method::GET, "/api/v1/pods", None);
        self.observe(labels, "200".to_owned(), Instant::now());
    }

    fn observe(&self, labels: Labels, code: String, began: Instant) {
        let took = began.elapsed().as_secs_f64();
        self.duration.get_or_create(&labels).observe(took);
        let Labels { verb, resource } = labels;
        let answered = Answered {
            verb,
            resource,
            code,
        };
        self.answers.get_or_create(&answered).inc();
    }
}

impl<S> Layer<S> for ApiRequests {
    type Service = Measured<S>;

    fn layer(&self, inner: S) -> Measured<S> {
        Measured {
            inner,
            metrics: self.clone(),
        }
    }
}

/// A client whose requests are measured.
#[derive(Clone, Debug)]
pub(crate) struct Measured<S> {
    inner: S,
    metrics: ApiRequests,
}

type Answer<T, E> = Pin<Box<dyn Future<Output = Result<T, E>> + Send>>;

impl<S, In, Out> Service<Request<In>> for Measured<S>
where
    S: Service<Request<In>, Response = Response<Out>>,
    S::Future: Send + 'static,
    S::Error: 'static,
    Out: 'static,
{
    type Response = S::Response;
    type Error = S::Error;
    type Future = Answer<S::Response, S::Error>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, request: Request<In>) -> Self::Future {
        let labels = labels(
            request.method(),
            request.uri().path(),
            request.uri().query(),
        );
        let span = tracing::debug_span!(
            target: TRACE_ONLY,
            "request",
            otel.name = format!("{} {}", labels.verb, labels.resource),
            verb = labels.verb,
            resource = %labels.resource,
        );
        let (metrics, began) = (self.metrics.clone(), Instant::now());
        let answer = self.inner.call(request);
        let measured = async move {
            let answer = answer.await;
            let code = match &answer {
                Ok(response) => response.status().as_str().to_owned(),
                // The connection failed or timed out, so the request has no status code.
                Err(_) => "none".to_owned(),
            };
            metrics.observe(labels, code, began);
            answer
        };
        Box::pin(measured.instrument(span))
    }
}

/// The verb as in RBAC, and the resource with its subresource.
fn labels(method: &Method, path: &str, query: Option<&str>) -> Labels {
    let (resource, named) = resource(path);
    let watches = query.is_some_and(|query| {
        let mut parameters = query.split('&');
        parameters.any(|one| one == "watch=true" || one == "watch=1")
    });
    let verb = match (method.as_str(), named) {
        ("GET", _) if watches => "watch",
        ("GET", true) => "get",
        ("GET", false) => "list",
        ("POST", _) => "create",
        ("PUT", _) => "update",
        ("PATCH", _) => "patch",
        ("DELETE", true) => "delete",
        ("DELETE", false) => "deletecollection",
        _ => OTHER,
    };
    Labels { verb, resource }
}

/// The resource in the path of a request, and whether the path names an object.
fn resource(path: &str) -> (String, bool) {
    let mut parts = path.split('/').filter(|part| !part.is_empty());
    let found = match parts.next() {
        Some("api") => parts.next().is_some(),
        Some("apis") => parts.next().is_some() && parts.next().is_some(),
        _ => false,
    };
    let mut rest: Vec<&str> = if found { parts.collect() } else { Vec::new() };
    if let ["namespaces", _, _, ..] = *rest {
        rest.drain(..2);
    }
    match *rest {
        [resource] => (resource.to_owned(), false),
        [resource, _] => (resource.to_owned(), true),
        [resource, _, subresource] => (format!("{resource}/{subresource}"), true),
        _ => (OTHER.to_owned(), true),
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use http::StatusCode;
    use tower::ServiceExt;

    use super::*;

    #[test]
    fn metric_labels_contain_resource_but_no_object_name() {
        let group = "/apis/etcd.database.coreos.com/v1beta2";
        let cases = [
            (
                "GET",
                "/api/v1/namespaces/prod/pods/db-a",
                "",
                "get",
                "pods",
            ),
            ("GET", "/api/v1/namespaces/prod/pods", "", "list", "pods"),
            (
                "GET",
                "/api/v1/pods",
                "limit=500&watch=true",
                "watch",
                "pods",
            ),
            (
                "POST",
                "/api/v1/namespaces/prod/secrets",
                "",
                "create",
                "secrets",
            ),
            (
                "DELETE",
                "/api/v1/namespaces/prod/pods/x",
                "",
                "delete",
                "pods",
            ),
            (
                "DELETE",
                "/api/v1/namespaces/prod/pods",
                "",
                "deletecollection",
                "pods",
            ),
            ("GET", "/api/v1/namespaces/prod", "", "get", "namespaces"),
            ("GET", "/api/v1/nodes/node-a", "", "get", "nodes"),
            (
                "PUT",
                "/api/v1/namespaces/prod/pods/a/eviction",
                "",
                "update",
                "pods/eviction",
            ),
            ("GET", "/version", "", "get", "other"),
            ("GET", "/apis/apps/v1", "", "get", "other"),
        ];
        for (method, path, query, verb, resource) in cases {
            let found = labels(&method.parse().unwrap(), path, Some(query));
            assert_eq!(
                (found.verb, found.resource.as_str()),
                (verb, resource),
                "{path}"
            );
        }
        let path = format!("{group}/namespaces/prod/etcdclusters/db/status");
        let found = labels(&Method::PATCH, &path, None);
        assert_eq!(
            (found.verb, found.resource.as_str()),
            ("patch", "etcdclusters/status")
        );
    }

    #[tokio::test]
    async fn api_requests_are_counted_by_verb_resource_and_code() {
        let metrics = ApiRequests::default();
        let mut registry = Registry::default();
        metrics.register(&mut registry);
        let server = tower::service_fn(async |request: Request<()>| {
            let mut response = Response::new(());
            if request.method() == Method::PUT {
                *response.status_mut() = StatusCode::CONFLICT;
            }
            Ok::<_, Infallible>(response)
        });
        for (method, path) in [
            (Method::GET, "/api/v1/namespaces/prod/pods/a"),
            (Method::GET, "/api/v1/namespaces/prod/pods/b"),
            (Method::PUT, "/api/v1/namespaces/prod/pods/b"),
        ] {
            let mut request = Request::new(());
            *request.method_mut() = method;
            *request.uri_mut() = path.parse().unwrap();
            metrics.layer(server).oneshot(request).await.unwrap();
        }
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &registry).unwrap();
        for line in [
            "etcd_operator_api_requests_total{verb=\"get\",resource=\"pods\",code=\"200\"} 2\n",
            "etcd_operator_api_requests_total{verb=\"update\",resource=\"pods\",code=\"409\"} 1\n",
            "etcd_operator_api_request_duration_seconds_count{verb=\"get\",resource=\"pods\"} 2\n",
        ] {
            assert!(text.contains(line), "{line} is missing in\n{text}");
        }
    }
}
