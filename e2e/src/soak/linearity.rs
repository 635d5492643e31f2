//! Checks whether a history is linearizable, with the program `e2e/testbed/linearize`, which uses porcupine.

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
    /// The history is linearizable. Contains the output of the checker.
    Linearizable(String),
    /// The history is not linearizable, or the check took too long. Contains the explanation of the checker.
    Violated(String),
}

/// Encodes a history as one line of JSON for each operation.
///
/// # Errors
/// Fails if an operation cannot be encoded.
pub fn lines(operations: &[Operation]) -> Result<String> {
    let mut lines = String::new();
    for operation in operations {
        let _ = writeln!(lines, "{}", serde_json::to_string(operation)?);
    }
    Ok(lines)
}

/// Runs the checker, which writes HTML pages about violations to the folder `pages`.
///
/// # Errors
/// Fails if the checker cannot be run, or rejects the input as invalid.
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
    // The checker reads its whole input before it prints, so this write cannot block on a full output pipe.
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
