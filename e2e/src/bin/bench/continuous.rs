//! `bench continuous` measures a continuous backup: its effect on etcd, the resources of its agent, and its recovery
//! point.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use clap::{Args, ValueEnum};
use e2e::bucket::Bucket;
use e2e::manifests::aws_secret;
use e2e::objects::{field, has_condition};
use e2e::wait::Poll;
use e2e::{DEADLINE, Keyspace, Load, Recording, Sandbox, Testbed, Writer, until};
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use kube::api::ListParams;
use serde::Serialize;
use serde_json::json;
use tokio::time::sleep;

use crate::idle::{Usage, usage};
use crate::stats::{Spread, quantile, spread};

const SIZE: usize = 3;
const CLUSTER: &str = "c";
/// The goals in docs/benchmarks.md: the minimum ratio of throughputs, and the maximum recovery point in seconds.
const GOALS: (f64, f64) = (0.97, 1.5);
/// Time between the start of the clients and the measurement of the throughput.
const WARM_UP: Duration = Duration::from_secs(5);
/// Time between the start of the clients and the first statistics. The kubelet updates its statistics about every 15 s.
const STATISTICS: Duration = Duration::from_secs(20);
/// Interval between two measurements of the memory.
const MEMORY_INTERVAL: Duration = Duration::from_secs(5);
/// Number of acknowledged writes before the first sample, and after each kill.
const WRITES: usize = 50;

/// A part of the benchmark.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
#[value(rename_all = "snake_case")]
enum Part {
    /// The throughput of etcd with and without the agent.
    Throughput,
    /// The CPU time and the memory of the agent, and its writes to the store, at given rates of writes to etcd.
    Resources,
    /// The recovery point: the time range of the acknowledged writes that the store does not have if the cluster is
    /// lost.
    RecoveryPoint,
}

/// The options of the benchmark.
#[derive(Args)]
pub(crate) struct Options {
    /// Number of rounds of the throughput. Each round measures with and without the agent. The result is the median of
    /// all rounds.
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// Duration of each measurement of the throughput and of the resources, in seconds.
    #[arg(long, default_value_t = 60, value_parser = clap::value_parser!(u64).range(30..))]
    seconds: u64,
    /// Rates for the resources of the agent, in writes per second.
    #[arg(long, value_delimiter = ',', default_value = "100,1000,5000")]
    rates: Vec<u32>,
    /// Number of random moments at which the store is compared with the acknowledged writes.
    #[arg(long, default_value_t = 100)]
    samples: usize,
    /// Number of times that all members and the agent are killed at a random moment. Requires the testbed.
    #[arg(long, default_value_t = 50)]
    kills: usize,
    /// Run only these parts.
    #[arg(long)]
    only: Vec<Part>,
    /// Write the results to this file as JSON.
    #[arg(long)]
    json: Option<PathBuf>,
}

/// The throughput of one round, in writes per second.
#[derive(Debug, Serialize)]
struct Throughput {
    with_agent: f64,
    without_agent: f64,
}

/// The resources of the agent at one rate.
#[derive(Debug, Serialize)]
struct Resources {
    /// The requested and the reached rate, in writes per second.
    requested: u32,
    reached: f64,
    cores: f64,
    /// The largest measured values of the memory.
    resident_megabytes: f64,
    working_set_megabytes: f64,
    segments_per_hour: f64,
    megabytes_per_hour: f64,
    /// `status.continuous` at the end of the measurement.
    lag_seconds: Option<i64>,
    lag_revisions: Option<i64>,
}

/// Recovery points in seconds. A recovery point is the time between the first and the last acknowledged write that the
/// store does not have.
#[derive(Debug, Default, Serialize)]
struct RecoveryPoint {
    /// Recovery points at random moments, without a failure.
    samples: Vec<f64>,
    /// Recovery points after kills of all members and the agent.
    kills: Vec<f64>,
}

#[derive(Debug, Default, Serialize)]
struct Figures {
    seconds: u64,
    throughput: Vec<Throughput>,
    resources: Vec<Resources>,
    recovery_point: RecoveryPoint,
}

/// Runs the measurement and prints the results. Also writes the results to the file of `--json`.
pub(crate) async fn bench(options: &Options) -> Result<()> {
    let sandbox = Sandbox::create("bench-continuous").await?;
    let mut figures = Figures {
        seconds: options.seconds,
        ..Figures::default()
    };
    let outcome = Box::pin(measure(&sandbox, options, &mut figures)).await;
    if outcome.is_err() {
        sandbox.print_state().await;
    }
    sandbox.delete().await;
    figures.print();
    if let Some(path) = &options.json {
        figures.write(path)?;
    }
    outcome
}

async fn measure(sandbox: &Sandbox, options: &Options, figures: &mut Figures) -> Result<()> {
    let wanted = |part| options.only.is_empty() || options.only.contains(&part);
    sandbox.install_operators().await?;
    let s3 = sandbox.env.s3()?;
    let bucket = Bucket::create(s3, &sandbox.namespace).await?;
    sandbox.apply(&aws_secret(s3, "aws")).await?;
    sandbox.apply(&manifest(sandbox)?).await?;
    sandbox.await_members(CLUSTER, SIZE).await?;
    if wanted(Part::Throughput) {
        // The result of round 0 is discarded, because the caches and the database of etcd are still empty in this
        // round.
        for number in 0..=options.rounds {
            let round = Box::pin(throughput(sandbox, &bucket, number, options.seconds)).await?;
            println!("throughput, round {number}: {round:?}");
            if number > 0 {
                figures.throughput.push(round);
            }
        }
    }
    if wanted(Part::Resources) {
        for rate in &options.rates {
            let measured = Box::pin(resources(sandbox, &bucket, *rate, options.seconds)).await?;
            println!("{measured:?}");
            figures.resources.push(measured);
        }
    }
    if wanted(Part::RecoveryPoint) {
        let points = &mut figures.recovery_point;
        Box::pin(recovery_point(sandbox, &bucket, options, points)).await?;
    }
    Ok(())
}

/// A cluster whose members have volumes, so that the benchmark can replace their pods after each kill.
fn manifest(sandbox: &Sandbox) -> Result<String> {
    let newest = sandbox.env.etcd_versions.last();
    let version = newest.context("the nodes have no image of etcd")?;
    Ok(format!(
        "apiVersion: etcd.database.coreos.com/v1beta2\nkind: EtcdCluster\nmetadata: {{name: {CLUSTER}}}\nspec:\n  \
         size: {SIZE}\n  version: \"{version}\"\n  etcd: {{quotaBackendBytes: 8589934592}}\n  pod: \
         {{persistentVolumeClaimSpec: {{accessModes: [ReadWriteOnce], resources: {{requests: {{storage: 4Gi}}}}}}}}\n"
    ))
}

/// Starts an agent, and waits until the ordinary backup of its EtcdBackup is complete.
async fn start<'a>(sandbox: &'a Sandbox, bucket: &'a Bucket, name: &str) -> Result<Recording<'a>> {
    let recording = Recording::start(sandbox, bucket, name, CLUSTER).await?;
    let complete = recording.await_status("the backup is complete", |object| {
        has_condition(object, "Complete", "True")
    });
    complete.await?;
    Ok(recording)
}

/// Deletes the EtcdBackup `name`, and waits until no pod of an agent is left.
async fn stop(sandbox: &Sandbox, recording: &Recording<'_>, name: &str) -> Result<()> {
    sandbox.kubectl(&["delete", "etcdbackup", name]).await?;
    recording.await_agents(0).await
}

/// Compacts the history of etcd, so that the database of each measurement has about the same size.
async fn compact(sandbox: &Sandbox) -> Result<()> {
    let keys = Keyspace::of_cluster(&sandbox.env, &sandbox.namespace, CLUSTER).await?;
    keys.compact(keys.revision().await?).await
}

/// One round: the throughput with and without the agent. The order of the two measurements alternates from round to
/// round, so that a gradual change of the machine's speed affects both equally.
async fn throughput(
    sandbox: &Sandbox,
    bucket: &Bucket,
    number: usize,
    seconds: u64,
) -> Result<Throughput> {
    let mut round = Throughput {
        with_agent: 0.0,
        without_agent: 0.0,
    };
    let is_even = number.is_multiple_of(2);
    for with_agent in [!is_even, is_even] {
        let name = format!("throughput-{number}");
        let agent = if with_agent {
            Some(start(sandbox, bucket, &name).await?)
        } else {
            None
        };
        let load = Load::start(sandbox, CLUSTER, None).await?;
        sleep(WARM_UP).await;
        let wait = async {
            sleep(Duration::from_secs(seconds)).await;
            Ok(())
        };
        let (rate, ()) = load.rate_during(wait).await?;
        drop(load);
        if let Some(agent) = agent {
            round.with_agent = rate;
            stop(sandbox, &agent, &name).await?;
        } else {
            round.without_agent = rate;
        }
        compact(sandbox).await?;
    }
    Ok(round)
}

async fn resources(
    sandbox: &Sandbox,
    bucket: &Bucket,
    rate: u32,
    seconds: u64,
) -> Result<Resources> {
    let name = format!("rate-{rate}");
    let recording = start(sandbox, bucket, &name).await?;
    recording.await_agents(1).await?;
    let agents = recording.agents().await?;
    let agent = agents.first().context("the agent has no pod")?;
    let load = Load::start(sandbox, CLUSTER, Some(rate)).await?;
    sleep(STATISTICS).await;
    let before = first_usage(sandbox, agent).await?;
    let stored = recording.size().await?;
    let (reached, all) = load.rate_during(usages(sandbox, agent, seconds)).await?;
    let (segments, bytes) = recording.size().await?;
    let object = recording.status().await?;
    drop(load);
    let after = all.last().context("no statistics")?;
    let most = |figure: fn(&Usage) -> f64| all.iter().map(figure).fold(0.0, f64::max) / 1e6;
    let continuous = field(&object, "/status/continuous");
    #[allow(clippy::cast_precision_loss)] // `f64` represents integers below 2^52 exactly.
    let per_hour = |count: u64| count as f64 * 3600.0 / seconds as f64;
    let measured = Resources {
        requested: rate,
        reached,
        cores: after.cores_since(&before)?,
        resident_megabytes: most(|usage| usage.resident_bytes),
        working_set_megabytes: most(|usage| usage.working_set_bytes),
        segments_per_hour: per_hour(segments - stored.0),
        megabytes_per_hour: per_hour(bytes - stored.1) / 1e6,
        lag_seconds: continuous["lagSeconds"].as_i64(),
        lag_revisions: continuous["lagRevisions"].as_i64(),
    };
    stop(sandbox, &recording, &name).await?;
    compact(sandbox).await?;
    Ok(measured)
}

/// Waits until the kubelet reports statistics for a new pod, which takes some seconds. Returns the statistics.
async fn first_usage(sandbox: &Sandbox, pod: &Pod) -> Result<Usage> {
    until("the kubelet has statistics", DEADLINE, async || {
        Ok(Poll::Done(usage(sandbox, pod).await?))
    })
    .await
}

/// Reads the statistics of a pod every [`MEMORY_INTERVAL`] for this number of seconds.
async fn usages(sandbox: &Sandbox, pod: &Pod, seconds: u64) -> Result<Vec<Usage>> {
    let mut all = Vec::new();
    let mut left = Duration::from_secs(seconds);
    while !left.is_zero() {
        let pause = left.min(MEMORY_INTERVAL);
        sleep(pause).await;
        left = left.saturating_sub(pause);
        all.push(usage(sandbox, pod).await?);
    }
    Ok(all)
}

async fn recovery_point(
    sandbox: &Sandbox,
    bucket: &Bucket,
    options: &Options,
    points: &mut RecoveryPoint,
) -> Result<()> {
    let recording = start(sandbox, bucket, "recovery").await?;
    let writer = Writer::start(sandbox, CLUSTER).await?;
    writer.await_more(WRITES).await?;
    let samples = recording.sample(&writer, options.samples).await?;
    points.samples = samples.iter().map(Duration::as_secs_f64).collect();
    if options.kills == 0 {
        return Ok(());
    }
    let testbed = Testbed::of(sandbox)?;
    for number in 1..=options.kills {
        let (pods, point) = recording.kill(&testbed, CLUSTER, &writer).await?;
        println!("kill {number}: {point:?}");
        points.kills.push(point.as_secs_f64());
        replace(sandbox, &pods).await?;
        sandbox.await_members(CLUSTER, SIZE).await?;
        recording.await_agents(1).await?;
        writer.await_more(WRITES).await?;
        let keys = Keyspace::of_cluster(&sandbox.env, &sandbox.namespace, CLUSTER).await?;
        recording.await_revision(keys.revision().await?).await?;
    }
    writer
        .finish("all members and the agent were killed")
        .await?;
    let object = recording.await_condition("True").await?;
    let gaps = field(&object, "/status/continuous/gapCount");
    ensure!(gaps == 0, "{gaps} gaps");
    Ok(())
}

/// Deletes the killed pods, and waits until other pods have replaced them. The kubelet would start a killed container
/// only after a back-off, which doubles with each kill.
async fn replace(sandbox: &Sandbox, killed: &[Pod]) -> Result<()> {
    let names: Vec<String> = killed.iter().map(ResourceExt::name_any).collect();
    let mut words = vec!["delete", "pod", "--now", "--wait=false"];
    words.extend(names.iter().map(String::as_str));
    sandbox.kubectl(&words).await?;
    let old: Vec<Option<String>> = killed.iter().map(ResourceExt::uid).collect();
    until("the killed pods are replaced", DEADLINE, async || {
        let pods = sandbox.api::<Pod>().list(&ListParams::default()).await?;
        let left = pods.iter().filter(|pod| old.contains(&pod.uid())).count();
        Ok(if left == 0 {
            Poll::Done(())
        } else {
            Poll::NotYet(format!("{left} killed pods"))
        })
    })
    .await
}

impl Figures {
    /// The spread of `figure` over all rounds of the throughput. `None` without rounds.
    fn throughput(&self, figure: fn(&Throughput) -> f64) -> Option<Spread> {
        spread(self.throughput.iter().map(figure))
    }

    fn print(&self) {
        let with = self.throughput(|round| round.with_agent);
        let without = self.throughput(|round| round.without_agent);
        let ratio = self.throughput(|round| round.with_agent / round.without_agent);
        if let (Some(with), Some(without), Some(ratio)) = (with, without, ratio) {
            println!(
                "\nthroughput, median of {} rounds: {:.0} writes/s with the agent, {:.0} without; ratio {:.3} ({:.3} \
                 to {:.3}; goal {})",
                self.throughput.len(),
                with.median,
                without.median,
                ratio.median,
                ratio.low,
                ratio.high,
                GOALS.0,
            );
        }
        for one in &self.resources {
            let lag = one
                .lag_seconds
                .map_or_else(|| "unknown".to_owned(), |lag| format!("{lag} s"));
            println!(
                "{} writes/s (reached {:.0}): {:.3} cores, at most {:.0} MB resident (working set {:.0} MB), {:.0} \
                 segments and {:.1} MB per hour, lag {lag}",
                one.requested,
                one.reached,
                one.cores,
                one.resident_megabytes,
                one.working_set_megabytes,
                one.segments_per_hour,
                one.megabytes_per_hour,
            );
        }
        for (name, points) in [
            ("random moments", &self.recovery_point.samples),
            ("kills", &self.recovery_point.kills),
        ] {
            let of = |share| quantile(points, share).unwrap_or_default();
            if !points.is_empty() {
                println!(
                    "recovery point, {} {name}: p50 {:.2} s, p99 {:.2} s, maximum {:.2} s (goal of p99: {} s)",
                    points.len(),
                    of(0.5),
                    of(0.99),
                    of(1.0),
                    GOALS.1,
                );
            }
        }
    }

    fn write(&self, path: &Path) -> Result<()> {
        let figures = json!({ "bench": "continuous", "figures": self });
        let text = serde_json::to_string_pretty(&figures)?;
        std::fs::write(path, text).with_context(|| path.display().to_string())
    }
}
