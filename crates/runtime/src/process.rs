//! The life of an operator process: logs, client, admin server, CRD, lease, controller, and the end.
//!
//! The order matters at the end: reconciles finish, then the lease is given back, so that the next process
//! begins at once and never beside this one.

use std::collections::BTreeMap;
use std::fmt;
use std::future::Future;
use std::io::IsTerminal;
use std::process::ExitCode;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::core::ApiResource;
use kube::{Client, Config};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::{ConstGauge, Gauge};
use prometheus_client::registry::Registry;
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};
use tracing_subscriber::EnvFilter;

use crate::admin::{self, Admin, Readiness};
use crate::cli::Common;
use crate::client::sending_once;
use crate::outcome::{Metrics, Report};
use crate::scope::Scope;
use crate::{crd, lease};

/// How long running reconciles may take to finish after the signal; the pod's own grace period is 30 s.
const DRAIN: Duration = Duration::from_secs(20);

/// An operator waits for others nearly all the time; a thread for each of a large machine's cores would only cost
/// memory.
const WORKERS: usize = 2;
/// The longest silence on a connection to the API server. A connection whose other end is gone says nothing for ever;
/// a watch is told how far it is about once a minute.
const SILENCE: Duration = Duration::from_mins(2);
/// Looking up names and reading files block a thread each. While DNS is down look-ups hang for long, and what asked
/// has given up before; so their number is bounded.
const BLOCKING: usize = 64;

/// Why the process ended by itself.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The runtime could not be started.
    #[error("the runtime cannot be started")]
    Runtime(#[source] std::io::Error),
    /// Neither in-cluster configuration nor a kubeconfig.
    #[error("no Kubernetes to talk to: run in a pod, or set KUBECONFIG")]
    Config(#[source] kube::config::InferConfigError),
    /// The client could not be built.
    #[error("the Kubernetes client cannot be made")]
    Client(#[source] kube::Error),
    /// The admin server.
    #[error("admin server")]
    Admin(#[from] admin::Error),
    /// The lease was lost: another process may act.
    #[error("no longer the leader")]
    Lease(#[from] lease::Error),
    /// The signal handler could not be installed.
    #[error("signals cannot be received")]
    Signal(#[source] std::io::Error),
    /// The controller came to an end without being asked to.
    #[error("the controller ended")]
    ControllerEnded,
}

/// What makes one operator differ from the others.
pub struct Definition {
    /// The binary's name: the Lease's, the field manager's and the Events' too.
    pub name: &'static str,
    /// The word in metric names: `cluster`, `backup`, `restore`.
    pub word: &'static str,
    /// The kind it serves.
    pub kind: ApiResource,
    /// Makes its CRD.
    pub crd: fn() -> CustomResourceDefinition,
}

/// What a running operator works with.
#[derive(Clone)]
pub struct Operator {
    /// The binary's name; the field manager of all its writes.
    pub name: &'static str,
    /// Talks to the API server as the operator's ServiceAccount. What is refused for now (429, 503, 504) it asks for
    /// again by itself, for minutes.
    pub client: Client,
    /// The same, and sends each request once: for writes that must not be made later than they were meant.
    pub once: Client,
    /// Which objects it takes.
    pub scope: Scope,
    /// Its own namespace.
    pub namespace: String,
    /// Its own pod's name.
    pub identity: String,
    /// Where outcomes are reported.
    pub report: Arc<Report>,
    /// Ends when the process should.
    pub shutdown: CancellationToken,
    /// The number of objects, for the metrics.
    pub objects: Objects,
    /// The operator's own metrics.
    pub figures: Figures,
}

impl Operator {
    /// An operator of this name, with its word in the names of its metrics, which are put into `registry`. Nothing of it
    /// runs yet.
    pub fn new(
        (name, word): (&'static str, &str),
        (client, once): (Client, Client),
        scope: Scope,
        (namespace, identity): (String, String),
        registry: &mut Registry,
    ) -> Self {
        let metrics = Metrics::register(registry, word);
        let objects = Objects::register(registry, word);
        let figures = Figures::default();
        registry.register_collector(Box::new(figures.clone()));
        Self {
            name,
            report: Arc::new(Report::new(client.clone(), name, &identity, metrics)),
            client,
            once,
            scope,
            namespace,
            identity,
            shutdown: CancellationToken::new(),
            objects,
            figures,
        }
    }
}

/// Runs an operator from its command line to its end. `work` is called once this process leads, and returns
/// after `Operator::shutdown`.
pub fn run<F, W>(definition: Definition, options: Common, work: F) -> Result<(), Error>
where
    F: FnOnce(Operator) -> W,
    W: Future<Output = ()>,
{
    log_to_stderr(options.log_json);
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(WORKERS)
        .max_blocking_threads(BLOCKING)
        .enable_all()
        .build()
        .map_err(Error::Runtime)?;
    runtime.block_on(live(definition, options, work))
}

/// Logs to standard error: text, or JSON; `RUST_LOG` filters, `info` by default.
pub fn log_to_stderr(json: bool) {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("info"));
    let builder = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr);
    // A second initialisation in one process (tests) keeps the first.
    let _ = if json {
        builder.json().try_init()
    } else {
        builder
            .with_ansi(std::io::stderr().is_terminal())
            .try_init()
    };
}

/// Runs one task of a pod that an operator has made, logs included, to its end; its answer is the container's exit code.
pub fn run_once(log_json: bool, task: impl Future<Output = bool>) -> std::io::Result<ExitCode> {
    log_to_stderr(log_json);
    let worked = tokio::runtime::Runtime::new()?.block_on(task);
    Ok(if worked {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

/// From now on a panic, wherever it is, is the death of the process and not of one task: what a fail point stands for.
pub fn abort_on_panic() {
    std::panic::set_hook(Box::new(|what| {
        tracing::error!("{what}");
        std::process::abort();
    }));
}

async fn live<F, W>(definition: Definition, options: Common, work: F) -> Result<(), Error>
where
    F: FnOnce(Operator) -> W,
    W: Future<Output = ()>,
{
    info!(
        version = env!("CARGO_PKG_VERSION"),
        "{} starts", definition.name
    );
    options
        .warnings()
        .iter()
        .for_each(|warning| warn!("{warning}"));
    let mut config = Config::infer().await.map_err(Error::Config)?;
    config.read_timeout = Some(SILENCE);
    let lease_client = lease::client(config.clone())?;
    let once = sending_once(config.clone()).map_err(Error::Client)?;
    let client = Client::try_from(config).map_err(Error::Client)?;

    let mut registry = Registry::default();
    let (operator, leader) = assemble(&definition, &options, (client, once), &mut registry);
    let readiness = Readiness::default();
    let listener = admin::bind(options.listen_addr).await?;
    let mut server = tokio::spawn(admin::serve(
        listener,
        Admin {
            readiness: readiness.clone(),
            registry: Arc::new(registry),
        },
    ));
    cancel_on_signal(operator.shutdown.clone())?;

    let candidate = lease::Candidate {
        name: options
            .lease_name
            .clone()
            .unwrap_or_else(|| definition.name.to_owned()),
        namespace: operator.namespace.clone(),
        identity: operator.identity.clone(),
    };
    let make: &(dyn Fn() -> CustomResourceDefinition + Sync) = &definition.crd;
    let lead = async {
        crd::ready(
            &operator.client,
            &definition.kind,
            options.create_crd.then_some(make),
            &operator.scope,
            &readiness,
        )
        .await;
        readiness.ready();
        lease::acquire(&lease_client, candidate).await
    };
    let lease = tokio::select! {
        lease = lead => lease,
        () = operator.shutdown.cancelled() => return Ok(()),
        ended = &mut server => return served(ended),
    };
    leader.set(1);
    tokio::select! {
        // Invariant 11: from here on another process may act; nothing is finished, the process ends.
        lost = lease.hold() => return Err(lost.into()),
        ended = &mut server => return served(ended),
        () = until_ended(work(operator.clone()), &operator.shutdown) => {}
    }
    lease.release().await;
    if operator.shutdown.is_cancelled() {
        Ok(())
    } else {
        Err(Error::ControllerEnded)
    }
}

fn assemble(
    definition: &Definition,
    options: &Common,
    (client, once): (Client, Client),
    registry: &mut Registry,
) -> (Operator, Gauge) {
    let namespace = options
        .pod_namespace
        .clone()
        .unwrap_or_else(|| client.default_namespace().to_owned());
    let identity = options
        .pod_name
        .clone()
        .unwrap_or_else(|| format!("{}-{}", definition.name, std::process::id()));
    let scope = if options.cluster_wide {
        Scope::Cluster
    } else {
        Scope::Namespace(namespace.clone())
    };
    let names = (definition.name, definition.word);
    let operator = Operator::new(
        names,
        (client, once),
        scope,
        (namespace, identity),
        registry,
    );
    registry.register_collector(Box::new(Memory));
    let leader = Gauge::default();
    registry.register(
        "etcd_operator_leader",
        "1 while this process leads",
        leader.clone(),
    );
    (operator, leader)
}

fn served(ended: Result<Result<(), admin::Error>, tokio::task::JoinError>) -> Result<(), Error> {
    match ended {
        Ok(result) => result.map_err(Error::Admin),
        Err(panicked) => Err(Error::Admin(admin::Error::Serve(std::io::Error::other(
            panicked,
        )))),
    }
}

/// Waits for the work; once the shutdown has begun, not longer than the drain time.
async fn until_ended(work: impl Future<Output = ()>, shutdown: &CancellationToken) {
    let deadline = async {
        shutdown.cancelled().await;
        tokio::time::sleep(DRAIN).await;
    };
    tokio::select! {
        () = work => {}
        () = deadline => warn!("a reconcile did not finish in {DRAIN:?}; it will be planned again"),
    }
}

fn cancel_on_signal(shutdown: CancellationToken) -> Result<(), Error> {
    let mut terminate = signal(SignalKind::terminate()).map_err(Error::Signal)?;
    let mut interrupt = signal(SignalKind::interrupt()).map_err(Error::Signal)?;
    tokio::spawn(async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
        info!("shutting down: running reconciles finish first");
        shutdown.cancel();
    });
    Ok(())
}

/// An operator's own metrics, which it has only once it works.
#[derive(Clone, Debug, Default)]
pub struct Figures(Arc<OnceLock<Box<dyn Collector>>>);

impl Figures {
    /// Collects these from now on; the first collector stays.
    pub fn collect(&self, collector: impl Collector) {
        let _ = self.0.set(Box::new(collector));
    }
}

impl Collector for Figures {
    fn encode(&self, encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        self.0.get().map_or(Ok(()), |own| own.encode(encoder))
    }
}

/// What the process itself takes, under Prometheus' usual names.
#[derive(Debug)]
struct Memory;

impl Collector for Memory {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
        for (name, help, field, unit) in [
            (
                "process_resident_memory_bytes",
                "Resident memory",
                "VmRSS:",
                1024,
            ),
            ("process_threads", "Threads", "Threads:", 1),
        ] {
            if let Some(value) = number(&status, field) {
                let gauge = ConstGauge::new(value * unit);
                gauge.encode(encoder.encode_descriptor(name, help, None, MetricType::Gauge)?)?;
            }
        }
        Ok(())
    }
}

/// The number after a field of `/proc/self/status`.
fn number(status: &str, field: &str) -> Option<i64> {
    let line = status.lines().find_map(|line| line.strip_prefix(field))?;
    line.split_whitespace().next()?.parse().ok()
}

type Count = Box<dyn Fn() -> BTreeMap<String, i64> + Send + Sync>;

/// The number of objects by namespace, counted when the metrics are read.
#[derive(Clone, Default)]
pub struct Objects(Arc<Mutex<Option<Count>>>);

impl Objects {
    fn register(registry: &mut Registry, word: &str) -> Self {
        let objects = Self::default();
        registry.register_collector(Box::new(ObjectsCollector {
            name: format!("etcd_operator_controller_{word}s"),
            objects: objects.clone(),
        }));
        objects
    }

    /// Counts with this from now on.
    pub fn count_with(&self, count: impl Fn() -> BTreeMap<String, i64> + Send + Sync + 'static) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(Box::new(count));
    }

    fn counts(&self) -> BTreeMap<String, i64> {
        self.0
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .as_ref()
            .map(|count| count())
            .unwrap_or_default()
    }
}

#[derive(Debug)]
struct ObjectsCollector {
    name: String,
    objects: Objects,
}

impl fmt::Debug for Objects {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Objects")
    }
}

impl Collector for ObjectsCollector {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let family = Family::<Vec<(String, String)>, Gauge>::default();
        for (namespace, count) in self.objects.counts() {
            family
                .get_or_create(&vec![("namespace".to_owned(), namespace)])
                .set(count);
        }
        let descriptor = encoder.encode_descriptor(
            &self.name,
            "Objects this operator sees, by namespace",
            None,
            MetricType::Gauge,
        )?;
        family.encode(descriptor)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_process_says_what_memory_it_takes() {
        let mut registry = Registry::default();
        registry.register_collector(Box::new(Memory));
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &registry).unwrap();
        for name in ["process_resident_memory_bytes ", "process_threads "] {
            let value = text
                .lines()
                .find_map(|line| line.strip_prefix(name))
                .unwrap();
            assert!(value.parse::<i64>().unwrap() > 0, "{text}");
        }
    }
}
