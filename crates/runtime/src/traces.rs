//! Sends the spans of reconciles to an OpenTelemetry collector, with the protocol OTLP over gRPC.
//!
//! Traces are optional. If the collector does not answer, spans are dropped, and reconciles do not wait.
//!
//! Invariant 14: spans contain names of objects, verbs and resources, but no texts of requests or errors.

use std::time::Duration;

use opentelemetry::KeyValue;
use opentelemetry::trace::TracerProvider as _;
use opentelemetry_otlp::{SpanExporter, WithTonicConfig};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::trace::SdkTracerProvider;
use tonic::transport::{ClientTlsConfig, Endpoint};
use tracing::{Metadata, Subscriber, warn};
use tracing_subscriber::Layer;
use tracing_subscriber::filter::filter_fn;
use tracing_subscriber::registry::LookupSpan;

/// The target of spans that appear only in traces, not in logs.
pub(crate) const TRACE_ONLY: &str = "etcd_operator_trace";

/// Time limit for a connection to the collector, and for a request.
const TIMEOUT: Duration = Duration::from_secs(10);
/// At its end, the process waits at most this long until the last spans are sent.
const FLUSH: Duration = Duration::from_secs(3);

/// Why traces cannot be sent.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The URL or the TLS settings are invalid.
    #[error(
        "--otlp-endpoint is not the URL of a collector: use the form http://collector.observability.svc:4317"
    )]
    Endpoint(#[source] tonic::transport::Error),
    /// The exporter cannot be created.
    #[error("cannot create the exporter of traces")]
    Exporter(#[source] opentelemetry_otlp::ExporterBuildError),
}

/// The traces of a process.
#[derive(Debug)]
pub(crate) struct Traces {
    provider: SdkTracerProvider,
    name: &'static str,
}

impl Traces {
    /// Prepares the connection to the collector, which opens when the first spans are sent. Must be called in the async
    /// runtime.
    ///
    /// # Errors
    /// Fails if the URL is invalid.
    pub(crate) fn to(endpoint: &str, name: &'static str, instance: &str) -> Result<Self, Error> {
        let mut channel = Endpoint::from_shared(endpoint.to_owned()).map_err(Error::Endpoint)?;
        if endpoint.starts_with("https://") {
            let tls = ClientTlsConfig::new().with_native_roots();
            channel = channel.tls_config(tls).map_err(Error::Endpoint)?;
        }
        let channel = channel.connect_timeout(TIMEOUT).timeout(TIMEOUT);
        let exporter = SpanExporter::builder()
            .with_tonic()
            .with_channel(channel.connect_lazy())
            .build()
            .map_err(Error::Exporter)?;
        let resource = Resource::builder()
            .with_service_name(name)
            .with_attributes([
                KeyValue::new("service.version", env!("CARGO_PKG_VERSION")),
                KeyValue::new("service.instance.id", instance.to_owned()),
            ])
            .build();
        let provider = SdkTracerProvider::builder()
            .with_batch_exporter(exporter)
            .with_resource(resource)
            .build();
        Ok(Self { provider, name })
    }

    /// The layer that records the spans of this project. The log filter does not apply to this layer.
    pub(crate) fn layer<S>(&self) -> impl Layer<S> + use<S>
    where
        S: Subscriber + for<'lookup> LookupSpan<'lookup>,
    {
        tracing_opentelemetry::layer()
            .with_tracer(self.provider.tracer(self.name))
            .with_location(false)
            .with_threads(false)
            .with_filter(filter_fn(is_traced))
    }

    /// Sends the remaining spans. Must not be called on a thread of the async runtime.
    pub(crate) fn end(self) {
        if let Err(error) = self.provider.shutdown_with_timeout(FLUSH) {
            warn!(%error, "the last traces were not sent");
        }
    }
}

/// Whether a span is part of the traces. Events are not part of the traces, because the logs contain them with the same
/// reconcile ID.
fn is_traced(metadata: &Metadata<'_>) -> bool {
    metadata.is_span() && (metadata.target() == TRACE_ONLY || metadata.name() == "reconcile")
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::sync::{Arc, Mutex};

    use k8s_openapi::api::core::v1::ObjectReference;
    use opentelemetry_proto::tonic::collector::trace::v1::trace_service_server::{
        TraceService, TraceServiceServer,
    };
    use opentelemetry_proto::tonic::collector::trace::v1::{
        ExportTraceServiceRequest, ExportTraceServiceResponse,
    };
    use opentelemetry_proto::tonic::common::v1::KeyValue as Attribute;
    use opentelemetry_proto::tonic::common::v1::any_value::Value;
    use tokio::net::TcpListener;
    use tonic::transport::server::TcpIncoming;
    use tonic::{Request, Response, Status};
    use tracing::instrument::WithSubscriber;
    use tracing_subscriber::layer::SubscriberExt;

    use super::*;
    use crate::logs::{in_reconcile, in_stage};

    /// A collector that stores the received requests.
    #[derive(Clone, Default)]
    struct Collector(Arc<Mutex<Vec<ExportTraceServiceRequest>>>);

    #[tonic::async_trait]
    impl TraceService for Collector {
        async fn export(
            &self,
            request: Request<ExportTraceServiceRequest>,
        ) -> Result<Response<ExportTraceServiceResponse>, Status> {
            self.0.lock().unwrap().push(request.into_inner());
            Ok(Response::new(ExportTraceServiceResponse::default()))
        }
    }

    async fn collector() -> (Collector, String) {
        let collector = Collector::default();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let service = TraceServiceServer::new(collector.clone());
        let server = tonic::transport::Server::builder().add_service(service);
        tokio::spawn(server.serve_with_incoming(TcpIncoming::from(listener)));
        (collector, url)
    }

    fn texts(attributes: &[Attribute]) -> BTreeMap<String, String> {
        let texts = attributes.iter().filter_map(|attribute| {
            match attribute.value.as_ref()?.value.as_ref()? {
                Value::StringValue(text) => Some((attribute.key.clone(), text.clone())),
                _ => None,
            }
        });
        texts.collect()
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn collector_receives_reconcile_with_its_stages() {
        let (collector, url) = collector().await;
        let traces = Traces::to(&url, "etcd-operator", "pod-a").unwrap();
        let subscriber = tracing_subscriber::registry().with(traces.layer());
        let object = ObjectReference {
            kind: Some("EtcdCluster".to_owned()),
            namespace: Some("prod".to_owned()),
            name: Some("main".to_owned()),
            ..ObjectReference::default()
        };
        let work = async {
            in_stage("observe", async { tracing::info!("the text of an event") }).await;
            // Spans of dependencies, such as `hyper`, must not be sent.
            tracing::info_span!(target: "hyper", "connection").in_scope(|| ());
        };
        let reconcile = async { in_reconcile(&object, work).await };
        reconcile.with_subscriber(subscriber).await;
        tokio::task::spawn_blocking(move || traces.end())
            .await
            .unwrap();

        let received = collector.0.lock().unwrap();
        let resources: Vec<_> = { received.iter() }
            .flat_map(|one| &one.resource_spans)
            .collect();
        let resource = texts(&resources[0].resource.as_ref().unwrap().attributes);
        assert_eq!(resource["service.name"], "etcd-operator");
        assert_eq!(resource["service.instance.id"], "pod-a");
        let scopes = resources.iter().flat_map(|one| &one.scope_spans);
        let spans: Vec<_> = scopes.flat_map(|scope| &scope.spans).collect();
        let mut names: Vec<&str> = spans.iter().map(|span| span.name.as_str()).collect();
        names.sort_unstable();
        assert_eq!(names, ["observe", "reconcile"]);
        let span = |name: &str| *spans.iter().find(|span| span.name == name).unwrap();
        let (reconcile, observe) = (span("reconcile"), span("observe"));
        assert_eq!(observe.parent_span_id, reconcile.span_id);
        let fields = texts(&reconcile.attributes);
        assert_eq!(fields["namespace"], "prod");
        assert_eq!(fields["name"], "main");
        assert_eq!(fields["reconcile_id"].len(), 16);
        // Invariant 14: the texts of log events are not sent to the collector.
        assert!(!format!("{received:?}").contains("the text of an event"));
    }

    #[tokio::test]
    async fn invalid_url_of_collector_is_refused_with_remedy() {
        let error = Traces::to("not a url", "etcd-operator", "pod-a").unwrap_err();
        assert!(error.to_string().contains("--otlp-endpoint"), "{error}");
        assert!(Traces::to("https://collector:4317", "etcd-operator", "").is_ok());
    }
}
