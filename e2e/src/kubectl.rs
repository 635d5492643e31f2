//! Runs `kubectl` as a user does, for example `apply` or `port-forward`.

use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::process::{Child, Command};
use tokio::time::timeout;

use crate::Env;
use crate::retry::{is_transient, retry_transient};

/// The verbs of commands that are safe to retry, because they are idempotent.
const IDEMPOTENT_VERBS: [&str; 17] = [
    "annotate", "apply", "auth", "cordon", "delete", "describe", "drain", "get", "label", "logs",
    "patch", "rollout", "scale", "set", "taint", "uncordon", "wait",
];

/// Time limit until `kubectl port-forward` has opened the local port.
const FORWARD_TIMEOUT: Duration = Duration::from_secs(30);

/// A `kubectl` command with the context of the cluster under test.
#[must_use]
pub fn command(env: &Env) -> Command {
    let mut command = Command::new("kubectl");
    if let Some(context) = &env.context {
        command.args(["--context", context]);
    }
    command.stdin(Stdio::null()).kill_on_drop(true);
    command
}

/// Runs `kubectl` and returns its output.
///
/// # Errors
/// Fails if kubectl fails. The error contains the complete error output of kubectl.
pub async fn run(env: &Env, args: &[&str]) -> Result<String> {
    run_with_input(env, args, None).await
}

/// Runs `kubectl` with `input` as standard input. Retries idempotent commands after transient errors of the API
/// server.
///
/// # Errors
/// Fails if kubectl fails. The error contains the complete error output of kubectl.
pub async fn run_with_input(env: &Env, args: &[&str], input: Option<&str>) -> Result<String> {
    let verb = verb(args);
    let idempotent = verb.is_some_and(|verb| IDEMPOTENT_VERBS.contains(&verb));
    retry_transient(
        |error| idempotent && is_transient(&error.to_string()),
        async |is_retry| match run_once(env, args, input).await {
            Err(error) if is_retry && succeeded_before(verb, &error.to_string()) => {
                Ok(String::new())
            }
            outcome => outcome,
        },
    )
    .await
}

/// The verb of the command: the first word that is neither a flag nor the namespace after `-n`.
fn verb<'a>(args: &[&'a str]) -> Option<&'a str> {
    let after_namespace = |index: usize| index > 0 && args[index - 1] == "-n";
    let mut words = args.iter().enumerate();
    let found = words.find(|(index, word)| !word.starts_with('-') && !after_namespace(*index));
    found.map(|(_, word)| *word)
}

/// True if a retry failed only because the first attempt succeeded, although its response was lost.
fn succeeded_before(verb: Option<&str>, error: &str) -> bool {
    match verb {
        Some("delete") => {
            let mut lines = error.lines().filter(|line| !line.contains("Warning: "));
            lines.all(|line| line.contains("(NotFound)"))
        }
        Some("annotate") => error.contains("already has a value"),
        _ => false,
    }
}

async fn run_once(env: &Env, args: &[&str], input: Option<&str>) -> Result<String> {
    let mut command = command(env);
    command
        .args(args)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    if input.is_some() {
        command.stdin(Stdio::piped());
    }
    let mut child = command
        .spawn()
        .context("kubectl cannot be started: is it on PATH?")?;
    if let (Some(text), Some(mut stdin)) = (input, child.stdin.take()) {
        stdin.write_all(text.as_bytes()).await?;
        stdin.shutdown().await?;
    }
    let output = child.wait_with_output().await?;
    if !output.status.success() {
        bail!(
            "kubectl {}: {}",
            args.join(" "),
            String::from_utf8_lossy(&output.stderr).trim()
        );
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// A port of a pod or Service, forwarded to this machine until this value is dropped.
pub struct PortForward {
    _child: Child,
    /// The local port on 127.0.0.1.
    pub port: u16,
}

impl PortForward {
    /// Forwards `port` of `target` (such as `pod/name` or `service/name`) to a free local port.
    ///
    /// # Errors
    /// Fails if kubectl exits before it has opened the local port. The error contains kubectl's error output.
    pub async fn open(env: &Env, namespace: &str, target: &str, port: u16) -> Result<Self> {
        let mut child = command(env)
            .args([
                "-n",
                namespace,
                "port-forward",
                "--pod-running-timeout=5s",
                target,
            ])
            .arg(format!(":{port}"))
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .context("kubectl cannot be started: is it on PATH?")?;
        let stdout = child.stdout.take().context("stdout is piped")?;
        let mut lines = BufReader::new(stdout).lines();
        let local = loop {
            let line = timeout(FORWARD_TIMEOUT, lines.next_line()).await;
            let line =
                line.with_context(|| format!("kubectl did not forward a port of {target}"))??;
            let Some(line) = line else {
                let output = child.wait_with_output().await?;
                bail!(
                    "kubectl port-forward {target}: {}",
                    String::from_utf8_lossy(&output.stderr).trim()
                );
            };
            if let Some(local) = local_port(&line) {
                break local;
            }
        };
        // The output after the line with the local port is read and dropped, because kubectl would block on a full
        // pipe.
        tokio::spawn(async move { while let Ok(Some(_)) = lines.next_line().await {} });
        if let Some(mut stderr) = child.stderr.take() {
            tokio::spawn(async move { tokio::io::copy(&mut stderr, &mut tokio::io::sink()).await });
        }
        Ok(Self {
            _child: child,
            port: local,
        })
    }
}

/// Parses the local port in a line such as `Forwarding from 127.0.0.1:40123 -> 2379`.
fn local_port(line: &str) -> Option<u16> {
    let (_, rest) = line.split_once("127.0.0.1:")?;
    rest.split(' ').next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::{local_port, succeeded_before, verb};

    #[test]
    fn kubectl_verb_is_found_after_flags() {
        assert_eq!(
            verb(&["-n", "ns", "--as=alice", "get", "pods"]),
            Some("get")
        );
        assert_eq!(verb(&["apply", "--server-side", "-f", "-"]), Some("apply"));
    }

    #[test]
    fn not_found_counts_as_success_of_repeated_delete() {
        let not_found =
            "kubectl -n a delete pod b: Error from server (NotFound): pods \"b\" not found";
        assert!(succeeded_before(Some("delete"), not_found));
        assert!(!succeeded_before(Some("get"), not_found));
        assert!(!succeeded_before(
            Some("delete"),
            "Error from server (Forbidden): pods is forbidden"
        ));
    }

    #[test]
    fn local_port_of_port_forward_is_parsed() {
        assert_eq!(
            local_port("Forwarding from 127.0.0.1:40123 -> 2379"),
            Some(40123)
        );
        assert_eq!(local_port("Forwarding from [::1]:40123 -> 2379"), None);
    }
}
