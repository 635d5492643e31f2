//! Measures the operators against a reference in the same run: `cargo xtask bench cluster`.
//!
//! Figures are ratios where there is something to compare with: rounds alternate between ours and the reference, so
//! that what else the machine does falls on both alike.

mod cluster;
mod defrag;
mod idle;
mod restore;
mod stats;
mod subject;
mod upgrade;

use std::path::PathBuf;

use anyhow::Result;
use clap::{Parser, Subcommand};

/// Measures the operators on the cluster of the environment.
#[derive(Parser)]
struct Arguments {
    #[command(subcommand)]
    what: What,
}

#[derive(Subcommand)]
enum What {
    /// How long members take to start, to come back and to be replaced, beside a StatefulSet's; and what the
    /// operator needs at rest.
    Cluster {
        /// Rounds of each measurement; the median is reported.
        #[arg(long, default_value_t = 5)]
        rounds: usize,
        /// Measure only these rows, by their names in the table: `--only create --only delete_one`.
        #[arg(long)]
        only: Vec<cluster::Row>,
        /// Write the figures to this file as JSON.
        #[arg(long)]
        json: Option<PathBuf>,
        /// How the cluster's DNS is set up; only a note in the figures.
        #[arg(long, default_value = "nocache", env = "E2E_DNS")]
        dns: String,
    },
    /// How long a large backup takes until it serves again, beside doing it by hand; and how long a client of a living
    /// cluster waits when it is restored over.
    Restore {
        /// Sizes of the databases, in MiB.
        #[arg(long, value_delimiter = ',', default_value = "100,1024")]
        sizes: Vec<usize>,
        /// Rounds of each size; the median is reported.
        #[arg(long, default_value_t = 2)]
        rounds: usize,
        /// The command line of AWS, the store's own tool, to fetch with by hand: `python3 -m venv aws; aws/bin/pip
        /// install awscli==1.46.3` makes `aws/bin/aws`. Without it by hand means one bare request.
        #[arg(long, value_name = "FILE")]
        aws: Option<PathBuf>,
        /// Write the figures to this file as JSON.
        #[arg(long)]
        json: Option<PathBuf>,
    },
    /// What a client notices while three members with a large database are defragmented.
    Defrag {
        /// Size of the database, in MiB; half of it is freed before.
        #[arg(long, default_value_t = 1024)]
        mebibytes: usize,
        /// How many clusters are defragmented.
        #[arg(long, default_value_t = 1)]
        rounds: usize,
        /// Write the figures to this file as JSON.
        #[arg(long)]
        json: Option<PathBuf>,
    },
    /// How long three members take from 3.5 to 3.6 while a client writes, and what the client notices.
    Upgrade {
        /// How many clusters are upgraded, without volumes and with; the median is reported.
        #[arg(long, default_value_t = 3)]
        rounds: usize,
        /// Write the figures to this file as JSON.
        #[arg(long)]
        json: Option<PathBuf>,
    },
}

#[tokio::main]
async fn main() -> Result<()> {
    match Arguments::parse().what {
        What::Cluster {
            rounds,
            only,
            json,
            dns,
        } => cluster::bench(rounds, &only, json.as_deref(), &dns).await,
        What::Defrag {
            mebibytes,
            rounds,
            json,
        } => defrag::bench(mebibytes, rounds, json.as_deref()).await,
        What::Restore {
            sizes,
            rounds,
            aws,
            json,
        } => restore::bench(&sizes, rounds, aws.as_deref(), json.as_deref()).await,
        What::Upgrade { rounds, json } => upgrade::bench(rounds, json.as_deref()).await,
    }
}
