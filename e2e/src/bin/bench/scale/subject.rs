//! The operator under test, and a function that runs `cargo xtask testbed`.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use e2e::Env;
use tokio::process::Command;

/// The programs of the operator and of `xtask`.
pub(super) struct Subject {
    pub(super) program: PathBuf,
    pub(super) profile: String,
    pub(super) xtask: PathBuf,
}

impl Subject {
    pub(super) fn of(env: &Env) -> Result<Self> {
        let xtask = env.xtask.clone();
        let xtask = xtask.context("bench scale runs only on the testbed: omit --context")?;
        ensure!(
            env.ip_family.as_deref() != Some("IPv6"),
            "bench scale needs a testbed with IPv4: omit --ip-family"
        );
        let operator = env.operator.clone();
        let operator =
            operator.context("E2E_OPERATOR is not set: use `cargo xtask bench scale`")?;
        Ok(Self {
            program: operator.program,
            profile: operator.profile,
            xtask,
        })
    }
}

/// Runs `xtask testbed` with these arguments.
pub(super) async fn testbed(xtask: &Path, words: &[&str]) -> Result<()> {
    let output = Command::new(xtask).arg("testbed").args(words).output();
    let output = output.await.with_context(|| xtask.display().to_string())?;
    ensure!(
        output.status.success(),
        "testbed {}: {}",
        words.join(" "),
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(())
}
