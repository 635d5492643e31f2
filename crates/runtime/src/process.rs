//! The operator process: logs, clients, admin server, CRD, lease, controller and shutdown.
//!
//! At the shutdown, the process finishes its running reconciles and then releases the lease. The next leader can
//! therefore start at once, without reconciles of both processes at the same time.

use std::collections::BTreeMap;
use std::fmt;
use std::future::Future;
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
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use crate::admin::{self, Admin, Readiness};
use crate::api_requests::ApiRequests;
use crate::cli::Common;
use crate::client::{measured, without_retry};
use crate::duty::Duty;
use crate::outcome::{Metrics, Report};
use crate::process_metrics::ProcessMetrics;
use crate::queue::{QueueMetrics, Queues};
use crate::scope::Scope;
use crate::shards::Shards;
use crate::shards::keeper::{Gauges, Keeper};
use crate::traces::{self, Traces};
use crate::{crd, lease, logs};

/// Maximum time that running reconciles may take after the shutdown signal. The pod's grace period is 30 s.
const DRAIN: Duration = Duration::from_secs(20);

/// Number of worker threads. An operator mostly waits for responses, so more threads on a large machine would only take
/// memory.
const WORKER_THREADS: usize = 2;
/// Read timeout for connections to the API server, so that a connection to a lost server does not hang forever. A
/// healthy watch receives a bookmark about once a minute.
const READ_TIMEOUT: Duration = Duration::from_mins(2);
/// Maximum number of threads for blocking operations, such as DNS lookups and file reads. If DNS is down, lookups hang,
/// and without a limit the number of threads would grow.
const MAX_BLOCKING_THREADS: usize = 64;

/// Why the process ended without a shutdown signal.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The flags contradict each other.
    #[error("{0}")]
    Flags(&'static str),
    /// The async runtime could not be started.
    #[error("cannot start the async runtime")]
    Runtime(#[source] std::io::Error),
    /// Traces cannot be sent.
    #[error("cannot send traces")]
    Traces(#[from] traces::Error),
    /// There is neither an in-cluster configuration nor a kubeconfig.
    #[error("no Kubernetes configuration found: run the operator in a pod, or set KUBECONFIG")]
    Config(#[source] kube::config::InferConfigError),
    /// The Kubernetes client could not be created.
    #[error("cannot create the Kubernetes client")]
    Client(#[source] kube::Error),
    /// The admin server failed.
    #[error("the admin server failed")]
    Admin(#[from] admin::Error),
    /// The process has lost the lease, so another process may be the leader.
    #[error("no longer the leader")]
    Lease(#[from] lease::Error),
    /// The signal handlers could not be installed.
    #[error("cannot install the signal handlers")]
    Signal(#[source] std::io::Error),
    /// The controller ended before the shutdown.
    #[error("the controller ended unexpectedly")]
    ControllerEnded,
}

/// The properties in which the operators differ.
pub struct Definition {
    /// Name of the binary. The Lease, the field manager and the source of Events have the same name.
    pub name: &'static str,
    /// A part of metric names: `cluster`, `backup` or `restore`.
    pub word: &'static str,
    /// The kind that the operator reconciles.
    pub kind: ApiResource,
    /// Builds the CRD of that kind.
    pub crd: fn() -> CustomResourceDefinition,
    /// The number of shards. 1 for an operator with one leader.
    pub shards: u16,
}

/// The clients, the identity and the reports of a running operator.
#[derive(Clone)]
pub struct Operator {
    /// Name of the binary, which is the field manager of all writes.
    pub name: &'static str,
    /// A client with the operator's ServiceAccount. It retries requests that the API server rejects with 429, 503 or
    /// 504, which can take minutes.
    pub client: Client,
    /// A client without retries, for writes that must not be delayed.
    pub client_without_retry: Client,
    /// The objects that the operator manages.
    pub scope: Scope,
    /// The shards whose objects this process reconciles.
    pub shards: Shards,
    /// The namespace of the operator's own pod.
    pub namespace: String,
    /// Name of the operator's pod.
    pub identity: String,
    /// Publishes the outcomes of reconciles.
    pub report: Arc<Report>,
    /// Canceled at the shutdown of the process.
    pub shutdown: CancellationToken,
    /// Counts the objects for the metrics.
    pub objects: Objects,
    /// The queues of the controllers, for the metrics.
    pub queues: Queues,
    /// The metrics that only this kind of operator has.
    pub metrics: OperatorMetrics,
}

impl Operator {
    /// Creates an operator without starting it. Registers its metrics, whose names contain `word`, in `registry`.
    pub fn new(
        (name, word): (&'static str, &str),
        (client, client_without_retry): (Client, Client),
        scope: Scope,
        (namespace, identity): (String, String),
        registry: &mut Registry,
    ) -> Self {
        let metrics = Metrics::register(registry, word);
        let objects = Objects::register(registry, word);
        let queues = Queues::default();
        registry.register_collector(Box::new(QueueMetrics {
            queues: queues.clone(),
        }));
        let operator_metrics = OperatorMetrics::default();
        registry.register_collector(Box::new(operator_metrics.clone()));
        Self {
            name,
            report: Arc::new(Report::new(client.clone(), name, &identity, metrics)),
            client,
            client_without_retry,
            scope,
            shards: Shards::undivided(),
            namespace,
            identity,
            shutdown: CancellationToken::new(),
            objects,
            queues,
            metrics: operator_metrics,
        }
    }
}

/// Runs an operator until the process ends. Calls `work` when this process becomes the leader. With shards, calls
/// `work` at the start, and the controllers skip objects of shards that this process does not hold. `work` must return
/// after `Operator::shutdown` was canceled.
///
/// # Errors
/// Fails if a part of the process cannot start, if the lease is lost, or if the controller or the admin server ends
/// before the shutdown.
pub fn run<F, W>(definition: Definition, options: Common, work: F) -> Result<(), Error>
where
    F: FnOnce(Operator) -> W,
    W: Future<Output = ()>,
{
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(WORKER_THREADS)
        .max_blocking_threads(MAX_BLOCKING_THREADS)
        .enable_all()
        .build()
        .map_err(Error::Runtime)?;
    let traces = runtime.block_on(async { traces(&options, definition.name) });
    let (traces, failed) = match traces {
        Ok(traces) => (traces, None),
        Err(error) => (None, Some(error)),
    };
    logs::start(options.log_json, traces.as_ref());
    if let Some(error) = failed {
        return Err(Error::Traces(error));
    }
    let ended = runtime.block_on(run_until_ended(definition, options, work));
    if let Some(traces) = traces {
        traces.end();
    }
    ended
}

fn traces(options: &Common, name: &'static str) -> Result<Option<Traces>, traces::Error> {
    let instance = options.pod_name.as_deref().unwrap_or_default();
    let endpoint = options.otlp_endpoint.as_deref();
    let endpoint = endpoint.filter(|endpoint| !endpoint.is_empty());
    endpoint
        .map(|endpoint| Traces::to(endpoint, name, instance))
        .transpose()
}

/// Starts the log, and runs the task of a container that an operator has created. The result of the task becomes the
/// container's exit code.
///
/// # Errors
/// Fails if the async runtime cannot be started.
pub fn run_once(log_json: bool, task: impl Future<Output = bool>) -> Result<ExitCode, Error> {
    logs::start(log_json, None);
    let worked = tokio::runtime::Runtime::new()
        .map_err(Error::Runtime)?
        .block_on(task);
    Ok(if worked {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

/// Makes every panic abort the process, not only its task. Failpoints simulate a crash with this function.
pub fn abort_on_panic() {
    std::panic::set_hook(Box::new(|what| {
        tracing::error!("{what}");
        std::process::abort();
    }));
}

async fn run_until_ended<F, W>(
    definition: Definition,
    options: Common,
    work: F,
) -> Result<(), Error>
where
    F: FnOnce(Operator) -> W,
    W: Future<Output = ()>,
{
    info!(
        version = env!("CARGO_PKG_VERSION"),
        "starting {}", definition.name
    );
    options
        .warnings()
        .iter()
        .for_each(|warning| warn!("{warning}"));
    let mut config = Config::infer().await.map_err(Error::Config)?;
    config.read_timeout = Some(READ_TIMEOUT);
    let mut registry = Registry::default();
    let requests = ApiRequests::default();
    requests.register(&mut registry);
    let lease_client = lease::client(config.clone())?;
    let client_without_retry =
        measured(without_retry(config.clone()), &requests).map_err(Error::Client)?;
    let client = measured(config, &requests).map_err(Error::Client)?;

    let (operator, gauges) = assemble(
        &definition,
        &options,
        (client, client_without_retry),
        &mut registry,
    )?;
    let readiness = Readiness::default();
    readiness.report_shards(operator.shards.clone());
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
        take_up(lease_client, candidate, &operator, gauges).await
    };
    let mut duty = tokio::select! {
        duty = lead => duty,
        () = operator.shutdown.cancelled() => return Ok(()),
        ended = &mut server => return admin_result(ended),
    };
    tokio::select! {
        // Invariant 11: after the loss of the lease, this process ends without waiting for its reconciles, because
        // another process may now be the leader. The same applies to the leases of shards (invariant 40).
        lost = duty.hold() => return Err(lost.into()),
        ended = &mut server => return admin_result(ended),
        () = drain(work(operator.clone()), &operator.shutdown) => {}
    }
    duty.release().await;
    if operator.shutdown.is_cancelled() {
        Ok(())
    } else {
        Err(Error::ControllerEnded)
    }
}

/// Waits until this process may begin to work. A process with shards need not wait, because it holds no shard yet.
async fn take_up(
    client: Client,
    candidate: lease::Candidate,
    operator: &Operator,
    gauges: Gauges,
) -> Duty {
    let shards = operator.shards.clone();
    if shards.count() > 1 {
        let shutdown = operator.shutdown.clone();
        let keeper = Keeper::new(client, &candidate, shards, gauges, shutdown);
        return Duty::Shards(Box::new(keeper));
    }
    let lease = lease::acquire(&client, candidate).await;
    gauges.leader.set(1);
    gauges.held.set(1);
    Duty::Whole(Box::new(lease))
}

fn assemble(
    definition: &Definition,
    options: &Common,
    (client, client_without_retry): (Client, Client),
    registry: &mut Registry,
) -> Result<(Operator, Gauges), Error> {
    let namespace = options
        .pod_namespace
        .clone()
        .unwrap_or_else(|| client.default_namespace().to_owned());
    let identity = options
        .pod_name
        .clone()
        .unwrap_or_else(|| format!("{}-{}", definition.name, std::process::id()));
    let scope = options.scope(&namespace).map_err(Error::Flags)?;
    let names = (definition.name, definition.word);
    let mut operator = Operator::new(
        names,
        (client, client_without_retry),
        scope,
        (namespace, identity),
        registry,
    );
    if definition.shards > 1 {
        operator.shards = Shards::divided(definition.shards);
    }
    registry.register_collector(Box::new(ProcessMetrics));
    let gauges = Gauges::register(registry, definition.shards);
    Ok((operator, gauges))
}

fn admin_result(
    ended: Result<Result<(), admin::Error>, tokio::task::JoinError>,
) -> Result<(), Error> {
    match ended {
        Ok(result) => result.map_err(Error::Admin),
        Err(panicked) => Err(Error::Admin(admin::Error::Serve(std::io::Error::other(
            panicked,
        )))),
    }
}

/// Waits until `work` ends, at most for [`DRAIN`] after the shutdown signal.
async fn drain(work: impl Future<Output = ()>, shutdown: &CancellationToken) {
    let deadline = async {
        shutdown.cancelled().await;
        tokio::time::sleep(DRAIN).await;
    };
    tokio::select! {
        () = work => {}
        () = deadline => warn!("a reconcile did not finish within {DRAIN:?}; the next leader plans it again"),
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
        info!("shutting down when all running reconciles have finished");
        shutdown.cancel();
    });
    Ok(())
}

/// The metrics that an operator registers when it becomes the leader.
#[derive(Clone, Debug, Default)]
pub struct OperatorMetrics(Arc<OnceLock<Box<dyn Collector>>>);

impl OperatorMetrics {
    /// Sets the collector. Only the first call has an effect.
    pub fn collect(&self, collector: impl Collector) {
        let _ = self.0.set(Box::new(collector));
    }
}

impl Collector for OperatorMetrics {
    fn encode(&self, encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        self.0.get().map_or(Ok(()), |own| own.encode(encoder))
    }
}

type Count = Box<dyn Fn() -> BTreeMap<String, i64> + Send + Sync>;

/// The number of objects in each namespace, which is counted when Prometheus reads the metrics.
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

    /// Sets the function that counts the objects in each namespace.
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
            "Objects in the operator's watch cache, by namespace",
            None,
            MetricType::Gauge,
        )?;
        family.encode(descriptor)
    }
}

#[cfg(test)]
mod tests;
