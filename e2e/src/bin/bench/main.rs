//! Measures the operators and a reference, and compares the results: `cargo xtask bench cluster`.
//!
//! Rounds of the operators and of the reference alternate, so that other load on the machine affects both. Results that
//! have a reference are printed as a ratio.

mod by_hand;
mod cluster;
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
        /// Rounds of each measurement. The median is reported.
        #[arg(long, default_value_t = 5)]
        rounds: usize,
        /// Run only these measurements, by their names in the table: `--only create --only delete_one`.
        #[arg(long)]
        only: Vec<cluster::Row>,
        /// Write the results to this file as JSON.
        #[arg(long)]
        json: Option<PathBuf>,
        /// DNS configuration of the cluster. Only recorded in the results.
        #[arg(long, default_value = "nocache", env = "E2E_DNS")]
        dns: String,
    },
    /// Measure the restore of a large backup, compared with a manual restore, and the downtime of clients during an
    /// in-place restore.
    Restore {
        /// Sizes of the databases, in MiB.
        #[arg(long, value_delimiter = ',', default_value = "100,1024")]
        sizes: Vec<usize>,
        /// Rounds of each size. The median is reported.
        #[arg(long, default_value_t = 2)]
        rounds: usize,
        /// Path of the AWS command line, for the download of the manual restore. `python3 -m venv aws; aws/bin/pip
        /// install awscli==1.46.3` installs `aws/bin/aws`. Without this option, the download is a single HTTP request.
        #[arg(long, value_name = "FILE")]
        aws: Option<PathBuf>,
        /// Write the results to this file as JSON.
        #[arg(long)]
        json: Option<PathBuf>,
    },
    /// Measure the effect on clients while three members with a large database are defragmented.
    Defrag {
        /// Size of the database, in MiB. Half of it is free.
        #[arg(long, default_value_t = 1024)]
        mebibytes: usize,
        /// Number of clusters to defragment.
        #[arg(long, default_value_t = 1)]
        rounds: usize,
        /// Write the results to this file as JSON.
        #[arg(long)]
        json: Option<PathBuf>,
    },
    /// Measure one operator with many clusters: creation, rest, reaction to changes, lost pods, restarts and a rolling
    /// update. Nodes, kubelets and etcd members are simulated. Only on the testbed.
    Scale(scale::Options),
    /// Measure the upgrade of three members from 3.5 to 3.6 and its effect on a client that writes.
    Upgrade {
        /// Number of clusters to upgrade, each without and with volumes. The median is reported.
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
