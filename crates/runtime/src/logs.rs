//! The logs of a process: text or JSON on standard error, and traces for an OpenTelemetry collector.
//!
//! Every line of a reconcile contains the kind, the namespace and the name of the object, and the ID of the reconcile.
//! These fields belong to a span of this module, so no log filter for a dependency removes them.

use std::fmt;
use std::io::IsTerminal;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::ObjectReference;
use serde_json::{Map, Value};
use tracing::field::{Field, Visit};
use tracing::instrument::Instrumented;
use tracing::{Event, Instrument, Span, Subscriber};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::Layer;
use tracing_subscriber::fmt::format::{JsonFields, Writer};
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormattedFields};
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::registry::{LookupSpan, Scope};
use tracing_subscriber::util::SubscriberInitExt;

use crate::traces::{TRACE_ONLY, Traces};

/// The filter if `RUST_LOG` is not set. It hides the spans of kube_runtime, which would repeat the name of the object.
const DEFAULT_FILTER: &str = "info,kube_runtime=warn";

/// Starts to log to standard error, as text or as JSON. `RUST_LOG` sets the filter. `traces` receives the spans.
pub(crate) fn start(json: bool, traces: Option<&Traces>) {
    let filter =
        EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new(DEFAULT_FILTER));
    let output = tracing_subscriber::fmt::layer().with_writer(std::io::stderr);
    let output = if json {
        let output = output.fmt_fields(JsonFields::new()).event_format(JsonLines);
        output.with_filter(filter).boxed()
    } else {
        let output = output.with_ansi(std::io::stderr().is_terminal());
        output.with_filter(filter).boxed()
    };
    let subscriber = tracing_subscriber::registry().with(output);
    // An error of `try_init` is ignored, because tests call this function several times in one process, and only the
    // first call has an effect.
    let started = match traces {
        Some(traces) => subscriber.with(traces.layer()).try_init(),
        None => subscriber.try_init(),
    };
    if json && started.is_ok() {
        log_panics();
    }
}

/// Logs each panic as an event, because Rust's default text is not JSON.
fn log_panics() {
    std::panic::set_hook(Box::new(|panic| tracing::error!("{panic}")));
}

tokio::task_local! {
    static CURRENT: Identity;
}

/// The fields of every log line of a reconcile.
#[derive(Clone)]
struct Identity {
    kind: String,
    namespace: String,
    name: String,
    reconcile_id: String,
}

impl Identity {
    fn new(object: &ObjectReference) -> Self {
        Self {
            kind: object.kind.clone().unwrap_or_default(),
            namespace: object.namespace.clone().unwrap_or_default(),
            name: object.name.clone().unwrap_or_default(),
            reconcile_id: format!("{:016x}", rand::random::<u64>()),
        }
    }
}

/// Runs a reconcile in a span with a new ID. The span has the level `ERROR`, so that every filter that shows lines of
/// this crate also shows the span's fields.
pub(crate) async fn in_reconcile<F: Future>(object: &ObjectReference, work: F) -> F::Output {
    let identity = Identity::new(object);
    let span = tracing::error_span!(
        "reconcile",
        kind = %identity.kind,
        namespace = %identity.namespace,
        name = %identity.name,
        reconcile_id = %identity.reconcile_id,
    );
    CURRENT.scope(identity, work.instrument(span)).await
}

/// Runs a stage of a reconcile in a span that appears only in traces.
pub fn in_stage<F: Future>(stage: &'static str, work: F) -> Instrumented<F> {
    let span = tracing::debug_span!(target: TRACE_ONLY, "stage", otel.name = stage);
    work.instrument(span)
}

/// Prepares a task that continues after its reconcile. The log lines of the task have the ID of the reconcile. The task
/// has its own span, so that the trace of the reconcile does not last as long as the task.
pub fn in_background<F: Future>(task: F) -> Instrumented<F> {
    let span = CURRENT.try_with(|identity| {
        tracing::error_span!(
            parent: None,
            "background",
            kind = %identity.kind,
            namespace = %identity.namespace,
            name = %identity.name,
            reconcile_id = %identity.reconcile_id,
        )
    });
    task.instrument(span.unwrap_or_else(|_| Span::none()))
}

/// Writes each event as one JSON object in one line. The fields of the event and of its spans are on the top level, in
/// alphabetical order.
struct JsonLines;

impl<S> FormatEvent<S, JsonFields> for JsonLines
where
    S: Subscriber + for<'lookup> LookupSpan<'lookup>,
{
    fn format_event(
        &self,
        context: &FmtContext<'_, S, JsonFields>,
        mut writer: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        let mut line = Map::new();
        let metadata = event.metadata();
        let time = format!("{:.6}", Timestamp::now());
        line.insert("timestamp".to_owned(), time.into());
        line.insert("level".to_owned(), metadata.level().as_str().into());
        line.insert("target".to_owned(), metadata.target().into());
        let spans = context.event_scope().into_iter();
        for span in spans.flat_map(Scope::from_root) {
            let extensions = span.extensions();
            let fields = extensions.get::<FormattedFields<JsonFields>>();
            let fields = fields.and_then(|fields| serde_json::from_str(&fields.fields).ok());
            line.extend(fields.unwrap_or_else(Map::new));
        }
        event.record(&mut Fields(&mut line));
        let line = serde_json::to_string(&line).map_err(|_| fmt::Error)?;
        writeln!(writer, "{line}")
    }
}

/// Adds the fields of an event to a line. A field whose name already exists gets the prefix `event.`, so that `name` is
/// always the name of the reconciled object.
struct Fields<'a>(&'a mut Map<String, Value>);

impl Fields<'_> {
    fn add(&mut self, field: &Field, value: Value) {
        let name = field.name().trim_start_matches("r#");
        let name = if self.0.contains_key(name) {
            format!("event.{name}")
        } else {
            name.to_owned()
        };
        self.0.insert(name, value);
    }
}

impl Visit for Fields<'_> {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.add(field, format!("{value:?}").into());
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.add(field, value.into());
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.add(field, value.into());
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.add(field, value.into());
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.add(field, value.into());
    }

    fn record_f64(&mut self, field: &Field, value: f64) {
        self.add(field, value.into());
    }
}

#[cfg(test)]
mod tests {
    use std::io;
    use std::sync::{Arc, Mutex};

    use tracing::instrument::WithSubscriber;

    use super::*;

    #[derive(Clone, Default)]
    struct Output(Arc<Mutex<Vec<u8>>>);

    impl io::Write for Output {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    /// The JSON lines that `work` logs with this filter.
    async fn logged(filter: &str, work: impl Future<Output = ()>) -> Vec<Map<String, Value>> {
        let output = Output::default();
        let writer = output.clone();
        let layer = tracing_subscriber::fmt::layer()
            .with_writer(move || writer.clone())
            .fmt_fields(JsonFields::new())
            .event_format(JsonLines)
            .with_filter(EnvFilter::new(filter));
        let subscriber = tracing_subscriber::registry().with(layer);
        work.with_subscriber(subscriber).await;
        let text = String::from_utf8(output.0.lock().unwrap().clone()).unwrap();
        let lines = text.lines().map(serde_json::from_str);
        lines.collect::<Result<_, _>>().expect("JSON lines")
    }

    fn object() -> ObjectReference {
        ObjectReference {
            kind: Some("EtcdCluster".to_owned()),
            namespace: Some("prod".to_owned()),
            name: Some("main".to_owned()),
            ..ObjectReference::default()
        }
    }

    #[tokio::test]
    #[allow(
        clippy::async_yields_async,
        reason = "the task must continue after the reconcile has ended"
    )]
    async fn log_line_has_object_and_reconcile_id_with_every_filter() {
        for filter in [DEFAULT_FILTER, "info", "warn", "error", "info,kube=warn"] {
            let lines = logged(filter, async {
                let work = async {
                    tracing::error!(reason = "QuorumLost", count = 2, "two members are lost");
                    in_background(async { tracing::error!("later") }.with_current_subscriber())
                };
                let task = in_reconcile(&object(), work).await;
                tokio::spawn(task).await.unwrap();
            })
            .await;
            assert_eq!(lines.len(), 2, "{filter}: {lines:?}");
            for line in &lines {
                for (field, value) in [
                    ("kind", "EtcdCluster"),
                    ("namespace", "prod"),
                    ("name", "main"),
                    ("level", "ERROR"),
                    ("target", "runtime::logs::tests"),
                ] {
                    assert_eq!(line[field], value, "{filter}: {line:?}");
                }
                assert_eq!(line["reconcile_id"], lines[0]["reconcile_id"]);
                let time: Timestamp = line["timestamp"].as_str().unwrap().parse().unwrap();
                assert!(Timestamp::now().duration_since(time).as_secs() < 60);
            }
            assert_eq!(lines[0]["message"], "two members are lost");
            assert_eq!(lines[0]["reason"], "QuorumLost");
            assert_eq!(lines[0]["count"], 2);
            assert_eq!(lines[0]["reconcile_id"].as_str().unwrap().len(), 16);
        }
    }

    #[tokio::test]
    async fn reconciles_have_different_ids() {
        let lines = logged("info", async {
            for _ in 0..2 {
                in_reconcile(&object(), async { tracing::info!("x") }).await;
            }
        })
        .await;
        assert_ne!(lines[0]["reconcile_id"], lines[1]["reconcile_id"]);
    }

    #[tokio::test]
    async fn log_field_called_name_does_not_replace_object_name() {
        let lines = logged("info", async {
            in_reconcile(&object(), async { tracing::info!(name = "other", "x") }).await;
        })
        .await;
        assert_eq!(lines[0]["name"], "main");
        assert_eq!(lines[0]["event.name"], "other");
    }

    #[tokio::test]
    async fn fields_of_trace_spans_do_not_appear_in_log() {
        let lines = logged(DEFAULT_FILTER, async {
            let span = tracing::debug_span!(target: TRACE_ONLY, "request", verb = "get");
            span.in_scope(|| tracing::info!("x"));
        })
        .await;
        assert!(!lines[0].contains_key("verb"), "{lines:?}");
    }
}
