//! Measures the operators, and compares them with a reference such as a StatefulSet: `cargo xtask bench cluster`.
//!
//! Rounds of the operators and of the reference alternate, so that other load on the machine affects the operators and
//! the reference equally.

mod by_hand;
mod cluster;
mod continuous;
mod defrag;
mod idle;
mod restore;
mod scale;
mod stats;
mod subject;
mod upgrade;

use std::path::PathBuf;

use anyhow::Result;
use clap::{Parser, Subcommand};

/// Measures the operators on the Kubernetes cluster of the environment.
#[derive(Parser)]
struct Arguments {
    #[command(subcommand)]
    benchmark: Benchmark,
}

#[derive(Subcommand)]
enum Benchmark {
    /// Measure the start, restart and replacement of members, compared with a StatefulSet, and the resource usage of
    /// the idle operator.
    Cluster {
        /// Number of rounds. The result is the median of all rounds.
        #[arg(long, default_value_t = 5)]
        rounds: usize,
        /// Run only these measurements. The names are those of the printed table: `--only create --only delete_one`.
        #[arg(long)]
        only: Vec<cluster::Row>,
        /// Write the results to this file as JSON.
        #[arg(long)]
        json: Option<PathBuf>,
        /// The DNS configuration of the Kubernetes cluster. The benchmark only records this value in its results.
        #[arg(long, default_value = "nocache", env = "E2E_DNS")]
        dns: String,
    },
    /// Measure a continuous backup: the throughput of etcd with and without the agent, the resources of the agent, and
    /// the recovery point.
    Continuous(continuous::Options),
    /// Measure the restore of a large backup, compared with a manual restore, and the downtime of clients during an
    /// in-place restore.
    Restore {
        /// Sizes of the databases, in MiB.
        #[arg(long, value_delimiter = ',', default_value = "100,1024")]
        sizes: Vec<usize>,
        /// Number of rounds for each size. The result is the median of all rounds.
        #[arg(long, default_value_t = 2)]
        rounds: usize,
        /// Path of the program `aws`, which downloads the backup for the manual restore. To install `aws/bin/aws`, run
        /// `python3 -m venv aws; aws/bin/pip install awscli==1.46.3`. Without `--aws`, the benchmark downloads the
        /// backup in one HTTP request.
        #[arg(long, value_name = "FILE")]
        aws: Option<PathBuf>,
        /// Write the results to this file as JSON.
        #[arg(long)]
        json: Option<PathBuf>,
    },
    /// Measure the failed and delayed writes of clients while three members with a large database are defragmented.
    Defrag {
        /// Size of the database before the defragmentation, in MiB. Half of this size is free space.
        #[arg(long, default_value_t = 1024)]
        mebibytes: usize,
        /// Number of clusters to defragment.
        #[arg(long, default_value_t = 1)]
        rounds: usize,
        /// Write the results to this file as JSON.
        #[arg(long)]
        json: Option<PathBuf>,
    },
    /// Measure one operator, or its replicas with shards, that manages many clusters. Nodes, kubelets and etcd members
    /// are simulated, so this benchmark runs only on the testbed.
    Scale(scale::Options),
    /// Measure the upgrade of three members from 3.5 to 3.6, and its effect on a client that writes.
    Upgrade {
        /// Number of clusters of each kind to upgrade: without volumes, and with volumes. The result is the median of
        /// each kind.
        #[arg(long, default_value_t = 3)]
        rounds: usize,
        /// Write the results to this file as JSON.
        #[arg(long)]
        json: Option<PathBuf>,
    },
}

#[tokio::main]
async fn main() -> Result<()> {
    match Arguments::parse().benchmark {
        Benchmark::Cluster {
            rounds,
            only,
            json,
            dns,
        } => cluster::bench(rounds, &only, json.as_deref(), &dns).await,
        Benchmark::Continuous(options) => Box::pin(continuous::bench(&options)).await,
        Benchmark::Defrag {
            mebibytes,
            rounds,
            json,
        } => defrag::bench(mebibytes, rounds, json.as_deref()).await,
        Benchmark::Restore {
            sizes,
            rounds,
            aws,
            json,
        } => restore::bench(&sizes, rounds, aws.as_deref(), json.as_deref()).await,
        Benchmark::Scale(options) => scale::bench(&options).await,
        Benchmark::Upgrade { rounds, json } => upgrade::bench(rounds, json.as_deref()).await,
    }
}
