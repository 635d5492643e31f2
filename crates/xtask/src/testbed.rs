//! The testbed: a real Kubernetes cluster on one machine, for the tests, with control plane, nodes, DNS and object
//! stores. Each checkout has its own testbed.

pub(crate) mod addresses;
pub(crate) mod cgroup;
pub(crate) mod commands;
mod control;
mod environment;
mod inside;
mod network;
mod node;
mod pki;
mod process;
mod slot;
mod state;

use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;
use std::{fmt, fs};

use anyhow::{Context, Result, bail};
use clap::ValueEnum;
use serde::{Deserialize, Serialize};

use self::addresses::IpFamily;
use self::cgroup::Cgroups;
pub(crate) use self::environment::{Env, exports};
use self::inside::Inside;
use self::state::State;
use crate::programs::{self, Kubernetes, Programs};
use crate::{checkout, preflight, progress, shell};

const READY_LIMIT: Duration = Duration::from_mins(2);

/// The value of `GOGC` for Go programs: the growth of the heap, in percent, that starts a garbage collection. It is
/// higher than the default of Go, because the tests are limited by CPU time, not by memory.
pub(crate) const GOGC: &str = "400";

/// How long DNS in the testbed caches names of the Kubernetes cluster.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Dns {
    /// Names of the cluster are not cached. This is the default of kubeadm since 1.33.
    Nocache,
    /// DNS caches for 30 s that a name exists or is missing, like kubeadm before 1.33 and like NodeLocal DNS.
    Cache30,
}

impl fmt::Display for Dns {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        to.write_str(match self {
            Self::Nocache => "nocache",
            Self::Cache30 => "cache30",
        })
    }
}

#[derive(Debug, Clone)]
pub(crate) struct Options {
    pub(crate) dns: Dns,
    pub(crate) nodes: u8,
    pub(crate) platform: Platform,
}

/// The IP family and the Kubernetes version of a testbed. They cannot change while the testbed is up.
#[derive(Debug, Clone, Default, clap::Args)]
pub(crate) struct Platform {
    /// IP family of pods and Services: ipv4 or ipv6 [default: ipv4 on a new testbed, unchanged on a running testbed]
    #[arg(long, value_enum, value_name = "FAMILY")]
    ip_family: Option<IpFamily>,
    /// Version of Kubernetes, such as 1.33 [default: that of e2e/testbed/kube, unchanged on a running testbed]
    #[arg(long, value_name = "VERSION")]
    kubernetes: Option<String>,
}

impl Platform {
    /// The version of Kubernetes for a new testbed.
    pub(crate) fn kubernetes(&self) -> Result<Kubernetes> {
        match &self.kubernetes {
            Some(version) => Kubernetes::find(version),
            None => Kubernetes::default_version(),
        }
    }

    /// The IP family for a new testbed.
    pub(crate) fn ip_family(&self) -> IpFamily {
        self.ip_family.unwrap_or_default()
    }

    /// True if the user has set neither `--ip-family` nor `--kubernetes`.
    pub(crate) fn is_default(&self) -> bool {
        self.ip_family.is_none() && self.kubernetes.is_none()
    }

    /// Fails if the running testbed has another IP family or Kubernetes version than the user wants.
    fn check(&self, state: &State) -> Result<()> {
        let mut others = Vec::new();
        if let Some(family) = self.ip_family.filter(|family| *family != state.ip_family) {
            others.push(format!("{}, not {}", state.ip_family.name(), family.name()));
        }
        if self.kubernetes.is_some() {
            let wanted = self.kubernetes()?;
            if wanted.minor() != state.kubernetes {
                let minor = wanted.minor();
                others.push(format!("Kubernetes {}, not {minor}", state.kubernetes));
            }
        }
        if !others.is_empty() {
            bail!(
                "the running testbed has {}: take it down first with `cargo xtask testbed down`",
                others.join(", and ")
            );
        }
        Ok(())
    }
}

impl Default for Options {
    fn default() -> Self {
        Self {
            dns: Dns::Nocache,
            nodes: 3,
            platform: Platform::default(),
        }
    }
}

#[derive(Debug)]
pub(crate) struct Testbed {
    pub(crate) run_folder: PathBuf,
    pub(crate) state: State,
    pub(crate) programs: Programs,
    pub(crate) cgroups: Cgroups,
    inside: Inside,
}

/// The testbed that [`up`] returns.
#[derive(Debug)]
pub(crate) struct Up {
    pub(crate) env: Env,
    /// True if [`up`] found a running testbed. In this case, the caller must not stop the testbed.
    pub(crate) found: bool,
}

/// Starts the testbed of this checkout, unless it is up.
pub(crate) fn up(options: &Options) -> Result<Up> {
    let run_folder = checkout::run_folder();
    let _lock = state::lock(&run_folder)?;
    if let Some(state) = State::read(&run_folder).unwrap_or_default()
        && state.is_alive()
        && state.ready
    {
        options.platform.check(&state)?;
        progress::say(&format!(
            "the testbed of this checkout is already up, in {}",
            run_folder.display()
        ));
        let testbed = Testbed::open(&run_folder)?;
        let stopped = testbed.stopped();
        if !stopped.is_empty() {
            bail!(
                "these daemons of the testbed are not running: {}. Start them with `cargo xtask testbed mend`, or recreate the testbed with `down` and `up`.",
                stopped.join(", ")
            );
        }
        testbed.wait_ready().context(
            "the testbed does not answer: recreate it with `cargo xtask testbed down` and `up`",
        )?;
        for index in 0..testbed.state.nodes {
            node::complete_images(&testbed, index)?;
        }
        let env = Env::of(&testbed.run_folder, &testbed.state, &testbed.programs);
        return Ok(Up { env, found: true });
    }
    clean(&run_folder)?;
    let found = preflight::check(&run_folder, options.platform.ip_family())?;
    let programs = programs::ensure(&options.platform.kubernetes()?)?;
    match begin(&run_folder, options, &found, programs) {
        Ok(env) => Ok(Up { env, found: false }),
        Err(error) => Err(error.context(format!(
            "the testbed did not start; its logs are in {} until the next `up` or `down`",
            run_folder.join("logs").display()
        ))),
    }
}

/// The environment variables of the running testbed.
pub(crate) fn env() -> Result<Env> {
    let testbed = Testbed::running()?;
    Ok(Env::of(
        &testbed.run_folder,
        &testbed.state,
        &testbed.programs,
    ))
}

/// Stops the testbed of this checkout and removes its files. The logs are kept in `target/testbed-logs`.
pub(crate) fn down() -> Result<()> {
    let run_folder = checkout::run_folder();
    let _lock = state::lock(&run_folder)?;
    let was_there = run_folder.exists();
    keep_logs(&run_folder);
    progress::step("taking the testbed down", || clean(&run_folder))?;
    if !was_there {
        progress::say("this checkout had no testbed");
    }
    Ok(())
}

impl Testbed {
    /// The running testbed of this checkout.
    pub(crate) fn running() -> Result<Self> {
        Self::open(&checkout::run_folder())
    }

    fn open(run_folder: &Path) -> Result<Self> {
        let state = State::read(run_folder)?.filter(State::is_alive);
        let Some(state) = state else {
            bail!(
                "the testbed of this checkout is not up: start it with `cargo xtask testbed up` (about 20 s; the first run builds Kubernetes in about 15 minutes)"
            );
        };
        let programs = programs::ensure(&Kubernetes::find(&state.kubernetes)?)?;
        let init = state.init.context("the testbed is still starting")?;
        let inside = Inside::of(init, run_folder, &programs.bin);
        Ok(Self {
            run_folder: run_folder.to_path_buf(),
            state,
            programs,
            cgroups: Cgroups::detect()?,
            inside,
        })
    }

    /// The daemons that are not running. Azurite is listed only if the testbed has it.
    fn stopped(&self) -> Vec<String> {
        daemons(self.state.nodes)
            .filter(|(name, _)| name != "azurite" || control::stores::has_azurite(self))
            .filter(|(_, group)| self.cgroups.processes(&group_of(group)).is_empty())
            .map(|(name, _)| name)
            .collect()
    }

    /// Runs kubectl as the cluster administrator.
    pub(crate) fn kubectl(&self, args: &[&str]) -> Result<String> {
        let mut command = std::process::Command::new(self.programs.bin.join("kubectl"));
        command
            .arg("--kubeconfig")
            .arg(self.run_folder.join("kubeconfig"))
            .args(args);
        network::without_proxy(&mut command);
        shell::output(&mut command)
    }

    /// Stores a link to an image archive, and removes links to archives that no longer exist. A node that is down loads
    /// the image at its next start.
    fn remember_image(&self, archive: &Path) -> Result<()> {
        let folder = self.run_folder.join("images");
        for entry in fs::read_dir(&folder)
            .with_context(|| folder.display().to_string())?
            .flatten()
        {
            if !entry.path().exists() {
                let _ = fs::remove_file(entry.path());
            }
        }
        let link = folder.join(archive.file_name().context("archive name")?);
        if !link.exists() {
            std::os::unix::fs::symlink(archive, &link)
                .with_context(|| link.display().to_string())?;
        }
        Ok(())
    }

    /// Waits until `ready` returns true. A daemon that this command has started and that ends during the wait is
    /// restarted once. Fails after `limit`, or when a daemon ends for the second time.
    fn wait_for(&self, what: &str, limit: Duration, ready: impl FnMut() -> bool) -> Result<()> {
        shell::wait_checking(
            what,
            limit,
            || self.inside.restart_ended(&self.cgroups),
            ready,
        )
    }

    fn wait_ready(&self) -> Result<()> {
        self.wait_for("the API server", READY_LIMIT, || {
            self.kubectl(&["get", "--raw", "/readyz"]).is_ok()
        })
        .map_err(|error| self.explained(error, "kube-apiserver", ""))
    }

    fn wait_nodes(&self) -> Result<()> {
        let mut waits = Vec::new();
        let outcome = self.wait_for("the nodes", READY_LIMIT, || {
            let path = "jsonpath={range .items[*]}{.metadata.name}={.status.conditions[?(@.type=='Ready')].status} {end}";
            let text = self.kubectl(&["get", "nodes", "-o", path]).unwrap_or_default();
            waits = unready(self.state.nodes, &text);
            waits.is_empty()
        });
        outcome.map_err(|error| match waits.first() {
            Some(name) => {
                let daemon = format!("{name}-kubelet");
                self.explained(
                    error,
                    &daemon,
                    &format!("not ready: {}; ", waits.join(", ")),
                )
            }
            None => error,
        })
    }

    /// Adds the last lines of a daemon's log to the error, unless a daemon has ended and the error already contains
    /// them.
    fn explained(&self, error: anyhow::Error, daemon: &str, what: &str) -> anyhow::Error {
        if self.inside.restart_ended(&self.cgroups).is_err() {
            return error;
        }
        let last = self.inside.last_lines(daemon);
        anyhow::anyhow!("{error:#}; {what}the last lines of logs/{daemon}.log:\n{last}")
    }
}

/// The nodes that are not ready. `text` contains an entry `NAME=STATUS` for each known node, with the status of its
/// condition Ready.
fn unready(nodes: u8, text: &str) -> Vec<String> {
    (0..nodes)
        .map(|index| format!("node-{index}"))
        .filter(|name| {
            let ready = format!("{name}=True");
            !text.split_whitespace().any(|word| word == ready)
        })
        .collect()
}

/// The control group of all processes of this checkout's testbed.
fn group() -> String {
    format!("etb-{}", checkout::identity())
}

/// The control group of a node or daemon of the testbed.
fn group_of(part: &str) -> String {
    format!("{}/{part}", group())
}

/// Stops the testbed of this checkout and removes its files, even if its start was not complete.
fn clean(run_folder: &Path) -> Result<()> {
    let cgroups = Cgroups::detect()?;
    let state = State::read(run_folder).unwrap_or_default();
    cgroups.kill(&group())?;
    if let Some(state) = &state {
        network::remove(state.slot)?;
    }
    cgroups.remove(&group())?;
    if run_folder.exists() {
        network::refuse_mounts_below(run_folder)?;
        fs::remove_dir_all(run_folder)
            .with_context(|| format!("cannot remove {}", run_folder.display()))?;
    }
    if let Some(state) = state {
        slot::release(state.slot, run_folder);
    }
    // The mount points on the machine are removed only if no other testbed is up, because their removal also unmounts
    // the folders of other testbeds.
    slot::if_alone(run_folder, network::remove_covered);
    Ok(())
}

/// Copies the logs of the daemons to the target directory, because `down` removes the run folder.
fn keep_logs(run_folder: &Path) {
    let Ok(target) = checkout::target() else {
        return;
    };
    let (from, to) = (run_folder.join("logs"), target.join("testbed-logs"));
    if from.is_dir() {
        let _ = fs::remove_dir_all(&to);
        let _ = fs::create_dir_all(&to);
        for entry in fs::read_dir(&from).into_iter().flatten().flatten() {
            // An error is ignored, so that the testbed is stopped even if a log cannot be copied.
            let _ = fs::copy(entry.path(), to.join(entry.file_name()));
        }
    }
}

fn begin(
    run_folder: &Path,
    options: &Options,
    found: &preflight::Found,
    programs: Programs,
) -> Result<Env> {
    for part in [
        "logs", "pki", "volumes", "tmp", "cni", "leases", "s3", "images",
    ] {
        let folder = run_folder.join(part);
        fs::create_dir_all(&folder)
            .with_context(|| format!("cannot create {}", folder.display()))?;
    }
    let mut state = State {
        slot: slot::claim(run_folder)?,
        boot: state::boot(),
        init: None,
        ready: false,
        dns: options.dns,
        nodes: options.nodes,
        kubernetes: options.platform.kubernetes()?.minor().to_owned(),
        ip_family: options.platform.ip_family(),
        snapshotter: found.snapshotter.clone(),
        s3_access_key: pki::random_word(10),
        s3_secret_key: pki::random_word(20),
    };
    // The state file is written before the first process starts. If the start is interrupted, the next `up` or `down`
    // finds the file and removes the incomplete testbed.
    state.write(run_folder)?;
    let cgroups = Cgroups::detect()?;
    cgroups.create(&group())?;
    let inside = Inside::begin(
        &cgroups,
        &group(),
        &programs.init,
        run_folder,
        &programs.bin,
    )?;
    state.init = Some(inside.init());
    state.write(run_folder)?;
    let mut testbed = Testbed {
        run_folder: run_folder.to_path_buf(),
        state,
        programs,
        cgroups,
        inside,
    };
    testbed.start()?;
    testbed.state.ready = true;
    testbed.state.write(run_folder)?;
    Ok(Env::of(run_folder, &testbed.state, &testbed.programs))
}

impl Testbed {
    fn start(&self) -> Result<()> {
        progress::step("network and mounts", || network::create(self))?;
        progress::step("certificates", || control::certificates(self))?;
        progress::step("control plane, and images into the nodes", || {
            control::start_api(self)?;
            // The nodes load their images while the API server starts.
            thread::scope(|scope| {
                let nodes: Vec<_> = (0..self.state.nodes)
                    .map(|index| scope.spawn(move || node::start_runtime(self, index)))
                    .collect();
                self.wait_ready()?;
                control::start_rest(self)?;
                for node in nodes {
                    node.join()
                        .map_err(|_| anyhow::anyhow!("the thread of a node panicked"))??;
                }
                anyhow::Ok(())
            })
        })?;
        progress::step("nodes", || {
            for index in 0..self.state.nodes {
                node::start_kubelet(self, index)?;
            }
            control::apply_addons(self)?;
            self.wait_nodes()
        })?;
        progress::step("DNS and S3", || control::wait_services(self))
    }
}

pub(crate) use self::node::{kill as kill_node, start as start_node, stop_kubelet};

/// Loads an image archive into all running nodes that do not have the image.
pub(crate) fn load_image(archive: &Path, reference: &str) -> Result<()> {
    let testbed = Testbed::running()?;
    testbed.remember_image(archive)?;
    thread::scope(|scope| {
        let testbed = &testbed;
        let nodes: Vec<_> = (0..testbed.state.nodes)
            .map(|index| scope.spawn(move || node::load_image(testbed, index, archive, reference)))
            .collect();
        for node in nodes {
            node.join()
                .map_err(|_| anyhow::anyhow!("the thread of a node panicked"))??;
        }
        Ok(())
    })
}

/// The name and control group of each daemon.
fn daemons(nodes: u8) -> impl Iterator<Item = (String, String)> {
    control::DAEMONS
        .iter()
        .map(|name| ((*name).to_owned(), format!("control/{name}")))
        .chain(node::daemons(nodes))
}

#[cfg(test)]
mod tests;
