//! The commands of `cargo xtask`. This crate runs other programs, and has no code about etcd or Kubernetes objects. It
//! must compile within seconds, because it installs the packages that other crates need.

mod archive;
mod checkout;
mod conformance;
mod dist;
mod drill;
mod drive;
mod fuzz;
mod image;
mod libtest;
mod oci;
mod origin;
mod packages;
mod pool;
mod preflight;
mod previous;
mod programs;
mod progress;
mod prose;
mod release;
mod report;
mod shell;
mod site;
mod suite;
mod testbed;
#[cfg(test)]
mod tests;
mod times;

use std::process::ExitCode;

use anyhow::Result;
use clap::{Parser, Subcommand};

use crate::image::Profile;
use crate::origin::{Origin, VERSION};
use crate::testbed::Dns;

/// Builds, tests and demonstrates the etcd operators.
#[derive(Debug, Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Run a demo: install the operators, create a cluster, back it up, delete it, restore it, and compare the data.
    ///
    /// The demo starts the testbed, unless --context names a cluster. Arguments after `--` are passed to the demo. The
    /// operators have the profile `fast`, not the profile of a release.
    Demo(drive::Program),
    /// Run all unit and end-to-end tests, and print the numbers of passed and failed tests.
    ///
    /// The end-to-end tests start the testbed, unless --context names a cluster. A testbed that was up before stays
    /// up. The operators have the profile `fast` and failpoints.
    Test(suite::Tests),
    /// Run a benchmark on the testbed: `bench cluster`, `scale`, `backup`, `continuous`, `restore`, `upgrade` or
    /// `defrag`. See docs/benchmarks.md.
    ///
    /// The options of `bench` precede the name of the benchmark, and the options of the benchmark follow it: `bench
    /// --dns cache30 cluster --rounds 10 --json FILE`. `bench backup --sizes 100,1024 --rounds 3` needs no testbed.
    Bench(drive::Program),
    /// Inject random faults while clients use a cluster, and check the history of the clients. See
    /// docs/contributing/testing.md.
    ///
    /// The same seed gives the same faults. A failed soak prints its seed, and keeps its steps and the history.
    Soak(drive::Soak),
    /// Test the parsers with damaged input for some minutes. See docs/contributing/testing.md.
    ///
    /// Each round uses the next seed. A failed round prints its seed, and the smallest input that fails.
    Fuzz(fuzz::Fuzz),
    /// Practice for on-call engineers: inject unnamed faults on the testbed, and measure the time to their repair. See
    /// docs/drill.md.
    #[command(subcommand)]
    Drill(drill::Drill),
    /// Build the image of the operators as a docker-archive, and print its path, size and reference.
    ///
    /// The default profile is that of a release. `demo` and `test` use `--profile fast`.
    Image {
        /// Also load the image into all nodes of the testbed. The image is never pushed to a registry.
        #[arg(long)]
        load: bool,
        /// Compilation profile of the program.
        #[arg(long, value_enum, default_value_t = Profile::Release)]
        profile: Profile,
    },
    /// Write all files of a release to a folder: image, chart, manifests, CRDs, OLM bundle, SBOM, provenance, and
    /// checksums.
    ///
    /// The command publishes nothing: docs/contributing/releasing.md has the steps of a release. The first build takes
    /// about 20 minutes on two cores.
    Dist(dist::Options),
    /// Build the documentation site with mdBook, check its links, and print its folder.
    ///
    /// The first run compiles mdBook and hyperlink, which takes about five minutes on two cores.
    Site(site::Options),
    /// Install the Debian packages for compiling and for the testbed, or print their names.
    Packages,
    /// Print prose for a review: a random sample, long sentences and paragraphs, long commit subjects, and words that
    /// should be replaced.
    ///
    /// The rules are in docs/contributing/language.md. The command does not fail because of findings.
    Prose(prose::Options),
    /// Print the tests of each requirement, and the code that enforces each invariant.
    ///
    /// `conformance "invariant 5"` prints one requirement of docs/conformance.md.
    Conformance(conformance::Options),
    /// Manage a Kubernetes cluster on this machine, without Docker.
    #[command(subcommand)]
    Testbed(TestbedCommand),
}

#[derive(Debug, Subcommand)]
enum TestbedCommand {
    /// Build the programs of the testbed and the servers of the tests into the cache.
    Build {
        /// Version of Kubernetes, such as 1.33 [default: that of e2e/testbed/kube]
        #[arg(long, value_name = "VERSION")]
        kubernetes: Option<String>,
    },
    /// Start the testbed of this checkout, unless it is up. The first run builds Kubernetes, which takes about 15
    /// minutes.
    Up {
        /// DNS cache for names of the cluster: `nocache` (kubeadm since 1.33), or `cache30` for 30 s (kubeadm before
        /// 1.33).
        #[arg(long, value_enum, default_value_t = Dns::Nocache)]
        dns: Dns,
        /// Number of nodes.
        #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u8).range(1..=9))]
        nodes: u8,
        #[command(flatten)]
        platform: testbed::Platform,
    },
    /// Stop the testbed of this checkout and remove its files. Its logs stay in target/testbed-logs.
    Down,
    /// Show the daemons, nodes and pods of the testbed.
    Status,
    /// Print shell variables for the testbed: `eval "$(cargo xtask testbed env)"`.
    Env {
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// Change the DNS cache of the running testbed.
    Dns {
        /// DNS cache for names of the cluster: `nocache` (kubeadm since 1.33), or `cache30` for 30 s (kubeadm before
        /// 1.33).
        #[arg(value_enum)]
        dns: Dns,
    },
    /// Stop and start nodes.
    #[command(subcommand)]
    Node(NodeCommand),
    /// Stop and start daemons of the control plane.
    #[command(subcommand)]
    Daemon(DaemonCommand),
    /// Build the controllers of cert-manager, unless they are in the cache, and print the path of the program.
    CertManager,
    /// Start all stopped nodes and daemons, and reset the DNS cache to its default.
    Mend,
    /// Run a command in the namespaces of the testbed, for example `exec -- ip address`.
    Exec {
        /// Command and arguments.
        #[arg(trailing_var_arg = true, required = true)]
        command: Vec<String>,
    },
}

#[derive(Debug, Subcommand)]
enum DaemonCommand {
    /// Kill a daemon.
    Stop {
        /// Name in the output of `testbed status`: kube-apiserver, coredns, ...
        name: String,
    },
    /// Start a daemon, and wait until the control plane is ready.
    Start {
        /// Name in the output of `testbed status`.
        name: String,
    },
}

#[derive(Debug, Subcommand)]
enum NodeCommand {
    /// Kill the kubelet, the container runtime and all containers of a node, as in a power failure. The disks keep
    /// their data.
    Kill {
        /// node-0, node-1, ...
        node: String,
    },
    /// Start the stopped processes of a node, and wait until the node is ready.
    Start {
        /// node-0, node-1, ...
        node: String,
    },
    /// Kill only the kubelet of a node. Its containers continue, but the node reports no status.
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
        Command::Soak(options) => return drive::soak(&options),
        Command::Fuzz(options) => return fuzz::fuzz(&options),
        Command::Drill(drill) => return drill::run(&drill),
        Command::Packages => {
            packages::ensure_packages(&[packages::Purpose::Build, packages::Purpose::Testbed])?;
        }
        Command::Image { load, profile } => run_image(load, profile)?,
        Command::Dist(options) => dist::run(&options)?,
        Command::Site(options) => site::run(&options)?,
        Command::Prose(options) => prose::run(&options)?,
        Command::Conformance(options) => conformance::run(&options)?,
        Command::Testbed(command) => run_testbed(command)?,
    }
    Ok(ExitCode::SUCCESS)
}

fn run_image(load: bool, profile: Profile) -> Result<()> {
    packages::ensure_packages(&[packages::Purpose::Build])?;
    let built = match profile {
        Profile::Release => {
            image::build(&release::compile()?, &Origin::of_checkout(VERSION, None)?)?
        }
        Profile::Fast => image::build(&image::compile()?, &Origin::unreleased())?,
    };
    let size = std::fs::metadata(&built.archive)?.len();
    progress::say(&format!("size of the image: {}", image::megabytes(size)));
    if profile == Profile::Release {
        image::check_size(size)?;
    }
    if load {
        image::load(&built)?;
    } else {
        drive::print_load_commands(&built);
    }
    println!("{}", built.reference);
    Ok(())
}

fn run_testbed(command: TestbedCommand) -> Result<()> {
    match command {
        TestbedCommand::Up {
            dns,
            nodes,
            platform,
        } => {
            testbed::up(&testbed::Options {
                dns,
                nodes,
                platform,
            })?;
            progress::say(
                "the testbed is up; use it in this shell with `eval \"$(cargo xtask testbed env)\"`",
            );
            Ok(())
        }
        TestbedCommand::Build { kubernetes } => {
            packages::ensure_packages(&[packages::Purpose::Testbed])?;
            let kubernetes = match kubernetes {
                Some(version) => programs::Kubernetes::find(&version)?,
                None => programs::Kubernetes::default_version()?,
            };
            programs::ensure(&kubernetes).map(|_| ())
        }
        TestbedCommand::CertManager => {
            println!("{}", programs::cert_manager()?.display());
            Ok(())
        }
        TestbedCommand::Down => testbed::down(),
        TestbedCommand::Status => {
            println!("{}", testbed::commands::status()?);
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
        TestbedCommand::Dns { dns } => testbed::commands::set_dns(dns),
        TestbedCommand::Node(NodeCommand::Kill { node }) => testbed::kill_node(&node),
        TestbedCommand::Node(NodeCommand::Start { node }) => testbed::start_node(&node),
        TestbedCommand::Node(NodeCommand::StopKubelet { node }) => testbed::stop_kubelet(&node),
        TestbedCommand::Daemon(DaemonCommand::Stop { name }) => {
            testbed::commands::stop_daemon(&name)
        }
        TestbedCommand::Daemon(DaemonCommand::Start { name }) => {
            testbed::commands::start_daemon(&name)
        }
        TestbedCommand::Mend => testbed::commands::mend(),
        TestbedCommand::Exec { command } => testbed::commands::exec(&command),
    }
}
