//! Checks with porcupine whether a history is linearizable. The program is `e2e/testbed/linearize`.

use std::fmt::Write as _;
use std::path::Path;
use std::process::Stdio;

use anyhow::{Context, Result, bail};
use tokio::io::AsyncWriteExt;
use tokio::process::Command;

use super::history::Operation;

/// The result of the check.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The history is linearizable. The text is the output of the checker.
    Linearizable(String),
    /// The history is not linearizable, or the check took too long. The text explains it.
    Violated(String),
}

/// Writes a history as lines of JSON.
///
/// # Errors
/// Fails if serde cannot write an operation, which does not happen for the current fields.
pub fn lines(operations: &[Operation]) -> Result<String> {
    let mut lines = String::new();
    for operation in operations {
        let _ = writeln!(lines, "{}", serde_json::to_string(operation)?);
    }
    Ok(lines)
}

/// Runs the checker. It writes pages that explain violations to the folder `pages`.
///
/// # Errors
/// Fails if the checker cannot be run or rejects the history as invalid.
pub async fn linearity(program: &Path, operations: &[Operation], pages: &Path) -> Result<Verdict> {
    let mut child = Command::new(program)
        .arg("-pages")
        .arg(pages)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .with_context(|| {
            format!(
                "{}: `cargo xtask testbed build` builds it",
                program.display()
            )
        })?;
    let mut input = child.stdin.take().context("stdin is piped")?;
    // The checker prints nothing until it has read all input, so this write cannot block.
    let written = input.write_all(lines(operations)?.as_bytes()).await;
    drop(input);
    let output = child.wait_with_output().await?;
    let text = String::from_utf8_lossy(&output.stdout).trim().to_owned();
    match output.status.code() {
        Some(0) => {
            written.context("the checker did not read the whole history")?;
            Ok(Verdict::Linearizable(text))
        }
        Some(1) => Ok(Verdict::Violated(text)),
        _ => bail!(
            "the checker failed: {}",
            String::from_utf8_lossy(&output.stderr).trim()
        ),
    }
}

#[cfg(test)]
mod tests;
