//! The commands of the README: `cargo xtask demo`, `test`, `bench`, `testbed`,
//! `image`. It drives other programs and knows nothing of etcd or Kubernetes
//! objects; it must compile in seconds, because it installs what the rest
//! needs to compile.

mod archive;
mod checkout;
mod drive;
mod image;
mod libtest;
mod packages;
mod pool;
mod preflight;
mod programs;
mod progress;
mod prose;
mod report;
mod shell;
mod suite;
mod testbed;
#[cfg(test)]
mod tests;
mod times;

use std::process::ExitCode;

use anyhow::Result;
use clap::{Parser, Subcommand};

use crate::testbed::Dns;

/// Builds, tests and shows the etcd operators.
#[derive(Debug, Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Show the main job: install the operators, run a cluster, back it up, lose it, restore it, compare.
    ///
    /// Brings up the testbed first, unless --context names a cluster. Arguments after `--` go to the demo.
    Demo(drive::Program),
    /// Run all tests, unit and end-to-end, and print how many passed and failed.
    ///
    /// Brings up the testbed for the end-to-end tests, unless --context names a cluster. A testbed that was up before
    /// stays up.
    Test(suite::Tests),
    /// Measure on the testbed: `bench cluster`, `backup`, `restore`, `upgrade`, `defrag`; see docs/benchmarks.md.
    ///
    /// Options come first, then what to measure and its own options: `bench --dns cache30 cluster --rounds 10 --json FILE`.
    /// `bench backup --sizes 100,1024 --rounds 3` needs no testbed.
    Bench(drive::Program),
    /// Build the operators' image as a docker-archive, and print where it is.
    Image {
        /// Put it into all nodes of the running testbed, too. It is never pushed to a registry.
        #[arg(long)]
        load: bool,
    },
    /// Install the Debian packages that compiling and the testbed need, or name them.
    Packages,
    /// Print prose for a review: a random sample, long sentences, long commit subjects, and replaced words.
    ///
    /// The rules are in docs/contributing/language.md. The command changes nothing and never fails because of a finding.
    Prose(prose::Options),
    /// A real Kubernetes on this machine, without Docker: bring it up, take it down, look at it.
    #[command(subcommand)]
    Testbed(TestbedCommand),
}

#[derive(Debug, Subcommand)]
enum TestbedCommand {
    /// Build the programs it runs, and the servers of the tests, into the cache; start nothing.
    Build,
    /// Bring the testbed of this checkout up, or find it running. The first time builds Kubernetes (about 15 minutes).
    Up {
        /// How the cluster's DNS caches: as kubeadm sets it up now, or for 30 s as before 1.33.
        #[arg(long, value_enum, default_value_t = Dns::Nocache)]
        dns: Dns,
        /// How many nodes.
        #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u8).range(1..=9))]
        nodes: u8,
    },
    /// End the testbed of this checkout and remove all it made; its logs stay in target/testbed-logs.
    Down,
    /// Show the testbed's daemons, nodes and pods.
    Status,
    /// Print what a shell needs to use the testbed: `eval "$(cargo xtask testbed env)"`.
    Env {
        /// As JSON, for programs.
        #[arg(long)]
        json: bool,
    },
    /// Change how the running testbed's DNS caches.
    Dns {
        /// As kubeadm sets it up now, or for 30 s as before 1.33.
        #[arg(value_enum)]
        dns: Dns,
    },
    /// Lose a node and bring it back.
    #[command(subcommand)]
    Node(NodeCommand),
    /// Stop a daemon of the control plane and start it again.
    #[command(subcommand)]
    Daemon(DaemonCommand),
    /// Start every node and daemon that does not run, with DNS as it is at first.
    Mend,
    /// Run a command in the testbed's namespaces, for looking around: `exec -- ip address`.
    Exec {
        /// The command and its arguments.
        #[arg(trailing_var_arg = true, required = true)]
        command: Vec<String>,
    },
}

#[derive(Debug, Subcommand)]
enum DaemonCommand {
    /// Stop it at once, as if it had crashed.
    Stop {
        /// As `testbed status` names it: kube-apiserver, coredns, ...
        name: String,
    },
    /// Start it, and wait until the control plane answers.
    Start {
        /// As `testbed status` names it.
        name: String,
    },
}

#[derive(Debug, Subcommand)]
enum NodeCommand {
    /// Lose a node as if its power went: kubelet, container runtime, all containers. Its disks stay.
    Kill {
        /// node-0, node-1, ...
        node: String,
    },
    /// Start what of a node does not run, and wait until it is ready.
    Start {
        /// node-0, node-1, ...
        node: String,
    },
    /// Stop only a node's kubelet: its containers go on, and the cluster hears nothing of it.
    StopKubelet {
        /// node-0, node-1, ...
        node: String,
    },
}

fn main() -> ExitCode {
    match run(Cli::parse().command) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(command: Command) -> Result<ExitCode> {
    match command {
        Command::Demo(options) => return drive::program("demo", &options),
        Command::Test(options) => return suite::test(&options),
        Command::Bench(options) => return drive::program("bench", &options),
        Command::Packages => {
            packages::ensure_packages(&[packages::Purpose::Build, packages::Purpose::Testbed])?;
        }
        Command::Image { load } => run_image(load)?,
        Command::Prose(options) => prose::run(&options)?,
        Command::Testbed(command) => run_testbed(command)?,
    }
    Ok(ExitCode::SUCCESS)
}

fn run_image(load: bool) -> Result<()> {
    packages::ensure_packages(&[packages::Purpose::Build])?;
    let built = image::build(&image::compile()?)?;
    if load {
        image::load(&built)?;
    } else {
        drive::tell_how_to_load(&built);
    }
    println!("{}", built.reference);
    Ok(())
}

fn run_testbed(command: TestbedCommand) -> Result<()> {
    match command {
        TestbedCommand::Up { dns, nodes } => {
            testbed::up(testbed::Options { dns, nodes })?;
            progress::say(
                "the testbed is up; `eval \"$(cargo xtask testbed env)\"` makes this shell use it",
            );
            Ok(())
        }
        TestbedCommand::Build => {
            packages::ensure_packages(&[packages::Purpose::Testbed])?;
            programs::ensure().map(|_| ())
        }
        TestbedCommand::Down => testbed::down(),
        TestbedCommand::Status => {
            println!("{}", testbed::status()?);
            Ok(())
        }
        TestbedCommand::Env { json: true } => {
            println!("{}", serde_json::to_string_pretty(&testbed::env()?)?);
            Ok(())
        }
        TestbedCommand::Env { json: false } => {
            print!("{}", testbed::exports(&testbed::env()?.vars()));
            Ok(())
        }
        TestbedCommand::Dns { dns } => testbed::set_dns(dns),
        TestbedCommand::Node(NodeCommand::Kill { node }) => testbed::kill_node(&node),
        TestbedCommand::Node(NodeCommand::Start { node }) => testbed::start_node(&node),
        TestbedCommand::Node(NodeCommand::StopKubelet { node }) => testbed::stop_kubelet(&node),
        TestbedCommand::Daemon(DaemonCommand::Stop { name }) => testbed::stop_daemon(&name),
        TestbedCommand::Daemon(DaemonCommand::Start { name }) => testbed::start_daemon(&name),
        TestbedCommand::Mend => testbed::mend(),
        TestbedCommand::Exec { command } => testbed::exec(&command),
    }
}
