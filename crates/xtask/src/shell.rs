//! Runs other programs. If a program fails, the error contains the output of the program.

use std::process::{Command, Output, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

/// Runs the command and returns its standard output.
pub(crate) fn output(command: &mut Command) -> Result<String> {
    let Output {
        status,
        stdout,
        stderr,
    } = command
        .stdin(Stdio::null())
        .output()
        .with_context(|| format!("cannot start {}", shown(command)))?;
    if !status.success() {
        bail!(
            "{} failed ({status})\n{}",
            shown(command),
            tail(&String::from_utf8_lossy(&stderr), 20)
        );
    }
    Ok(String::from_utf8_lossy(&stdout).into_owned())
}

/// Runs the command. Its output goes to the standard output and standard error of xtask.
pub(crate) fn inherit(command: &mut Command) -> Result<()> {
    let status = command
        .status()
        .with_context(|| format!("cannot start {}", shown(command)))?;
    if !status.success() {
        bail!("{} failed ({status})", shown(command));
    }
    Ok(())
}

/// Calls `ready` repeatedly until it returns true. The error after the time limit contains `what`.
pub(crate) fn wait_for(what: &str, limit: Duration, ready: impl FnMut() -> bool) -> Result<()> {
    wait_checking(what, limit, || Ok(()), ready)
}

/// Like [`wait_for`], but also calls `check` each time. An error of `check` ends the wait at once.
pub(crate) fn wait_checking(
    what: &str,
    limit: Duration,
    mut check: impl FnMut() -> Result<()>,
    mut ready: impl FnMut() -> bool,
) -> Result<()> {
    let begun = Instant::now();
    loop {
        check().with_context(|| format!("waiting for {what}"))?;
        if ready() {
            return Ok(());
        }
        if begun.elapsed() > limit {
            bail!("{what}: not within {} s", limit.as_secs());
        }
        thread::sleep(Duration::from_millis(50));
    }
}

/// The last `lines` lines of a text.
pub(crate) fn tail(text: &str, lines: usize) -> String {
    let all: Vec<&str> = text.trim_end().lines().collect();
    all[all.len().saturating_sub(lines)..].join("\n")
}

/// The path of a program in the PATH or in the sbin directories, which the PATH of a normal user does not contain.
pub(crate) fn which(program: &str) -> Option<std::path::PathBuf> {
    let path = std::env::var("PATH").unwrap_or_default();
    path.split(':')
        .chain(["/usr/sbin", "/sbin", "/usr/local/sbin"])
        .map(|dir| std::path::Path::new(dir).join(program))
        .find(|file| file.is_file())
}

fn shown(command: &Command) -> String {
    let mut words = vec![command.get_program().to_string_lossy().into_owned()];
    words.extend(
        command
            .get_args()
            .map(|arg| arg.to_string_lossy().into_owned()),
    );
    words.join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn error_of_failed_program_contains_its_output() {
        let error =
            output(Command::new("sh").args(["-c", "echo the reason >&2; exit 3"])).unwrap_err();
        assert!(format!("{error}").contains("the reason"), "{error}");
    }

    #[test]
    fn tail_contains_at_most_requested_number_of_lines() {
        assert_eq!(tail("a\nb\n", 5), "a\nb");
        assert_eq!(tail("a\nb\nc\n", 2), "b\nc");
    }

    #[test]
    fn failed_check_ends_wait_at_once() {
        let check = || anyhow::bail!("a daemon ended");
        let error = wait_checking("nodes", Duration::from_mins(1), check, || false).unwrap_err();
        assert_eq!(format!("{error:#}"), "waiting for nodes: a daemon ended");
    }

    #[test]
    fn wait_timeout_error_contains_given_description() {
        let error = wait_for("the moon", Duration::from_millis(1), || false).unwrap_err();
        assert!(error.to_string().contains("the moon"));
    }
}
