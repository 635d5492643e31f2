//! `bench scale` measures one operator, or its replicas with shards, that manages many clusters, on the API server of
//! the testbed.
//!
//! One machine cannot run thousands of nodes and etcd members. This process therefore simulates the nodes (module
//! `nodes`), their kubelets (`kubelet`) and the members (`fleet`). The API server, its etcd, the scheduler, the
//! controllers and the operator are real.

mod cluster;
mod fleet;
mod kubelet;
mod load;
mod network;
mod nodes;
mod operator;
mod replicas;
mod report;
mod run;
mod scenarios;
mod server;
mod subject;
mod wire;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use e2e::Env;
use serde_json::json;
use tokio::net::TcpListener;
use tokio::task::JoinSet;

use fleet::Fleet;
use kubelet::Kubelet;
use load::Conditions;
use report::Measured;
use run::{Run, Settings};
use subject::{Subject, testbed};

/// The benchmark stops kube-proxy, because kube-proxy would use much CPU time for thousands of Services. No process
/// connects to these Services.
const STOPPED: &str = "kube-proxy";

/// The options of the benchmark.
#[derive(clap::Args)]
pub(crate) struct Options {
    /// Numbers of clusters. The benchmark runs all scenarios for each number.
    #[arg(long, value_delimiter = ',', default_value = "10,100,1000")]
    clusters: Vec<usize>,
    /// Members of each cluster.
    #[arg(long, default_value_t = 3)]
    members: usize,
    /// Number of shards into which the operator is divided. 1 means that it is not divided.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=64))]
    shards: u16,
    /// Numbers of replicas of the operator, such as 1,2,4. The benchmark runs all scenarios for each number.
    #[arg(long, value_delimiter = ',', default_value = "1")]
    replicas: Vec<u16>,
    /// Number of changes. The benchmark makes one change at a time, and measures how long its effect takes.
    #[arg(long, default_value_t = 200)]
    changes: usize,
    /// Duration of each measurement of the idle operator, in seconds.
    #[arg(long, default_value_t = 60)]
    window: u64,
    /// Write the results to this file as JSON.
    #[arg(long)]
    json: Option<PathBuf>,
}

/// The simulated nodes and members.
struct Simulation {
    client: kube::Client,
    fleet: Arc<Fleet>,
    kubelet: Arc<Kubelet>,
    conditions: Arc<Conditions>,
    tasks: JoinSet<()>,
}

impl Simulation {
    fn new(client: &kube::Client) -> Self {
        let fleet = Arc::new(Fleet::default());
        Self {
            client: client.clone(),
            kubelet: Kubelet::new(client.clone(), Arc::clone(&fleet)),
            fleet,
            conditions: Arc::default(),
            tasks: JoinSet::new(),
        }
    }

    /// Opens the ports of the simulated members, and creates nodes for this number of pods.
    async fn start(&mut self, pods: usize) -> Result<()> {
        let listen = async |port: u16| {
            let listener = TcpListener::bind(("0.0.0.0", port)).await;
            listener.with_context(|| {
                format!("port {port} is in use: the simulated members need this port")
            })
        };
        let clients = listen(api::names::CLIENT_PORT).await?;
        let health = listen(api::names::METRICS_PORT).await?;
        let fleet = || Arc::clone(&self.fleet);
        self.tasks.spawn(server::serve_clients(clients, fleet()));
        self.tasks.spawn(server::serve_health(health, fleet()));
        self.tasks.spawn(Arc::clone(&self.kubelet).run());
        let (conditions, client) = (Arc::clone(&self.conditions), self.client.clone());
        self.tasks
            .spawn(async move { conditions.watch(client).await });
        let count = nodes::create(&self.client, pods).await?;
        self.tasks.spawn(nodes::renew(self.client.clone(), count));
        nodes::await_schedulable(&self.client, count).await?;
        println!("{count} simulated nodes are ready");
        Ok(())
    }

    /// Deletes all objects of the benchmark. Stops the simulated kubelet last, because pods need a kubelet to be
    /// deleted.
    async fn end(mut self) -> Result<()> {
        println!("cleaning up");
        let namespaces = load::delete_namespaces(&self.client).await;
        let nodes = nodes::delete(&self.client).await;
        self.tasks.shutdown().await;
        namespaces.and(nodes)
    }
}

/// Runs the benchmark and prints the results. Also cleans up after a failure or Ctrl-C.
pub(crate) async fn bench(options: &Options) -> Result<()> {
    let env = Env::from_vars()?;
    let subject = Subject::of(&env)?;
    let most = options.clusters.iter().copied().max().unwrap_or_default();
    ensure!(
        !options.clusters.contains(&0) && most > 0 && options.members > 0 && options.changes > 0,
        "--clusters, --members and --changes must be greater than 0"
    );
    ensure!(
        options
            .replicas
            .iter()
            .all(|count| (1..=options.shards).contains(count)),
        "--replicas must be greater than 0, and at most the number of --shards"
    );
    // Each cluster may have one more pod than members, because the operator adds the replacement of a member before
    // it removes the member.
    let pods = most * (options.members + 1);
    network::allow_files(pods)?;
    println!(
        "the operator is a process of the profile {}; nodes, kubelets and etcd are simulated",
        subject.profile
    );
    let client = env.client().await?;
    let mut simulation = Simulation::new(&client);
    let mut results = Vec::new();
    network::add_route().await?;
    let work = run(options, &subject, (&mut simulation, pods), &mut results);
    let outcome = tokio::select! {
        outcome = work => outcome,
        _ = tokio::signal::ctrl_c() => Err(anyhow::anyhow!("interrupted")),
    };
    let ended = simulation.end().await;
    let restored = restore(&subject).await;
    report::print(&results);
    if let Some(file) = &options.json {
        let settings = json!({
            "members": options.members, "changes": options.changes, "window_seconds": options.window,
            "profile": subject.profile, "shards": options.shards,
        });
        let text = serde_json::to_string_pretty(&report::as_json(&results, &settings))?;
        std::fs::write(file, text).with_context(|| file.display().to_string())?;
    }
    outcome.and(ended).and(restored)
}

async fn run(
    options: &Options,
    subject: &Subject,
    (simulation, pods): (&mut Simulation, usize),
    results: &mut Vec<Measured>,
) -> Result<()> {
    testbed(&subject.xtask, &["daemon", "stop", STOPPED]).await?;
    simulation.start(pods).await?;
    // An earlier run that was killed may have left namespaces. They are deleted before the measurements.
    load::delete_namespaces(&simulation.client).await?;
    let sizes = options.clusters.iter().copied();
    let runs = sizes.flat_map(|size| options.replicas.iter().map(move |count| (size, *count)));
    for (clusters, replicas) in runs {
        println!(
            "\n{clusters} clusters of {} members, {replicas} replicas of the operator",
            options.members
        );
        load::operator_namespace(&simulation.client).await?;
        let mut run = Run {
            settings: Settings {
                clusters,
                members: options.members,
                shards: options.shards,
                replicas,
                changes: options.changes,
                window: Duration::from_secs(options.window),
            },
            subject,
            client: simulation.client.clone(),
            fleet: Arc::clone(&simulation.fleet),
            kubelet: Arc::clone(&simulation.kubelet),
            conditions: Arc::clone(&simulation.conditions),
            results,
        };
        run.scenarios().await?;
        load::delete_namespaces(&simulation.client).await?;
    }
    Ok(())
}

async fn restore(subject: &Subject) -> Result<()> {
    let removed = network::remove_route().await;
    testbed(&subject.xtask, &["daemon", "start", STOPPED]).await?;
    removed
}
