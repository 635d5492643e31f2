//! The IP addresses of the simulated pods, and the limit of open files.
//!
//! RFC 2544 reserves these addresses for benchmarks. A local route assigns all of them to this machine, so that one
//! process can serve all pods. No packet leaves the machine.

use anyhow::{Context, Result, ensure};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tokio::process::Command;

/// The address range of the pods.
const PODS: &str = "198.18.0.0/15";
/// Number of open files to allow for each member. Each connection to a member needs one file in the operator and one in
/// this process.
const FILES_PER_MEMBER: u64 = 4;
/// Number of open files to allow for everything except members.
const OTHER_FILES: u64 = 1024;

/// Adds the local route for the addresses of the pods. The route may already exist, if an earlier run was killed.
pub(super) async fn add_route() -> Result<()> {
    let others = ip(&["route", "show", "root", PODS]).await?;
    ensure!(
        others.trim().is_empty(),
        "the benchmark needs the addresses {PODS}, but the machine already has a route to them: {}",
        others.trim()
    );
    ip(&["route", "replace", "local", PODS, "dev", "lo"]).await?;
    Ok(())
}

/// Deletes the local route.
pub(super) async fn remove_route() -> Result<()> {
    ip(&["route", "del", "local", PODS, "dev", "lo"]).await?;
    Ok(())
}

async fn ip(words: &[&str]) -> Result<String> {
    let output = Command::new("ip").args(words).output().await;
    let output = output.context("cannot run the program ip: install iproute2")?;
    ensure!(
        output.status.success(),
        "ip {}: {}",
        words.join(" "),
        String::from_utf8_lossy(&output.stderr).trim()
    );
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Raises the limit of open files for this process and its child processes.
pub(super) fn allow_files(members: usize) -> Result<()> {
    let needed = FILES_PER_MEMBER * u64::try_from(members)? + OTHER_FILES;
    let limit = getrlimit(Resource::Nofile);
    if limit.current.is_none_or(|current| current >= needed) {
        return Ok(());
    }
    ensure!(
        limit.maximum.is_none_or(|maximum| maximum >= needed),
        "{members} members need {needed} open files: raise the hard limit with `ulimit -Hn {needed}`"
    );
    let raised = Rlimit {
        current: Some(needed),
        ..limit
    };
    setrlimit(Resource::Nofile, raised).context("raise the limit of open files")
}
