//! Runs the plugin `kubectl etcd` as a user does.

use std::path::PathBuf;
use std::process::Stdio;

use anyhow::{Context, Result, bail};
use tokio::process::Command;

use crate::Sandbox;

/// The path of the plugin `kubectl-etcd`, which cargo builds into the target directory of the tests.
fn program() -> Result<PathBuf> {
    let test = std::env::current_exe().context("the path of the test program")?;
    let folders = test.ancestors().skip(1).take(2);
    let mut files = folders.map(|folder| folder.join("kubectl-etcd"));
    let built = files.find(|file| file.is_file());
    built.context("kubectl-etcd is not built: run `cargo build -p kubectl-etcd`")
}

/// Runs `kubectl etcd` in the namespace of the test, and returns its standard output.
///
/// # Errors
/// Fails if the exit code is not 0. The error contains the output.
pub async fn run(sandbox: &Sandbox, args: &[&str]) -> Result<String> {
    let mut command = Command::new(program()?);
    command.args(["--namespace", &sandbox.namespace]);
    if let Some(context) = &sandbox.env.context {
        command.args(["--context", context]);
    }
    command.args(args).stdin(Stdio::null()).kill_on_drop(true);
    let output = command.output().await.context("start kubectl-etcd")?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    if output.status.success() {
        return Ok(text);
    }
    let errors = String::from_utf8_lossy(&output.stderr);
    bail!("kubectl etcd {}: {text}{errors}", args.join(" "))
}
