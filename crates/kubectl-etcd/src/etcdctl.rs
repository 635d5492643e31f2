//! Runs etcdctl in the container of a member, or the local etcdctl through a port-forward.

mod forward;
mod local;

use std::io::{Read, Write};
use std::time::Duration;

use api::EtcdCluster;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Status;
use kube::api::AttachParams;
use kube::{Api, ResourceExt};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWriteExt};
use tokio::sync::mpsc;

use crate::access::Access;
use crate::error::{Error, Result};
use crate::members;

/// Size in bytes of each of the two buffers between the API server and the plugin.
const BUFFER: usize = 64 * 1024;

/// The output and the exit code of etcdctl.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ended {
    /// Standard output.
    pub stdout: String,
    /// Standard error.
    pub stderr: String,
    /// Exit code.
    pub code: u8,
}

/// True if etcdctl needs a user and a password, so that the local etcdctl must run. In a container, the password would
/// be in the arguments, which the audit log of the API server records. Standard input is no alternative, because etcd's
/// images contain no shell.
pub fn needs_password(cluster: &EtcdCluster, args: &[String]) -> bool {
    let names_user = args
        .iter()
        .any(|arg| arg == "--user" || arg.starts_with("--user="));
    let off = cluster
        .spec
        .auth
        .as_ref()
        .is_none_or(|auth| auth.enabled == Some(false));
    !off && !names_user
}

/// Runs etcdctl for one member and returns its output. Runs the local etcdctl if [`needs_password`] returns true, and
/// etcdctl in the member's container if it returns false.
///
/// # Errors
/// Fails if etcdctl cannot be run within the time limit. Does not fail if the exit code is not 0.
pub async fn run(
    access: &Access,
    cluster: &EtcdCluster,
    pod: &Pod,
    endpoints: &[String],
    args: &[String],
    limit: Duration,
) -> Result<Ended> {
    if needs_password(cluster, args) {
        return limited(pod, limit, local::run(access, cluster, pod, args)).await;
    }
    run_without_user(access, pod, endpoints, args, limit).await
}

/// Runs etcdctl in the container of a member, for requests that etcd accepts without a user.
///
/// # Errors
/// Fails like [`run`].
pub async fn run_without_user(
    access: &Access,
    pod: &Pod,
    endpoints: &[String],
    args: &[String],
    limit: Duration,
) -> Result<Ended> {
    let command = members::etcdctl(pod, endpoints, args);
    limited(pod, limit, run_in_pod(access, pod, command)).await
}

async fn limited(
    pod: &Pod,
    limit: Duration,
    work: impl Future<Output = Result<Ended>>,
) -> Result<Ended> {
    let seconds = limit.as_secs();
    tokio::time::timeout(limit, work)
        .await
        .unwrap_or_else(|_| Err(failed(pod, format!("no answer within {seconds} s"))))
}

/// Like [`run`], but an exit code that is not 0 is an error.
///
/// # Errors
/// Fails like [`run`], or if the exit code is not 0.
pub async fn run_ok(
    access: &Access,
    cluster: &EtcdCluster,
    pod: &Pod,
    endpoints: &[String],
    args: &[&str],
    limit: Duration,
) -> Result<String> {
    let args: Vec<String> = args.iter().map(ToString::to_string).collect();
    let ended = run(access, cluster, pod, endpoints, &args, limit).await?;
    if ended.code == 0 {
        return Ok(ended.stdout);
    }
    let output = format!("{}{}", ended.stderr, ended.stdout);
    Err(Error::Etcdctl {
        member: pod.name_any(),
        message: last_line(&output).to_owned(),
    })
}

/// The last line that is not empty. etcdctl logs before it prints its error, so this line is the error.
pub fn last_line(output: &str) -> &str {
    let mut lines = output.lines().rev().map(str::trim);
    lines.find(|line| !line.is_empty()).unwrap_or("no output")
}

/// Runs etcdctl in the container of a member, and passes its output to the output of the plugin. Returns etcdctl's exit
/// code.
///
/// # Errors
/// Fails if etcdctl cannot be started.
pub async fn attach(
    access: &Access,
    pod: &Pod,
    endpoints: &[String],
    args: &[String],
    stdin: bool,
) -> Result<u8> {
    let command = members::etcdctl(pod, endpoints, args);
    let mut process = exec(access, pod, command, stdin).await?;
    let status = process.take_status();
    let out = process.stdout();
    let errors = process.stderr();
    if let Some(writer) = process.stdin() {
        tokio::spawn(pass_input(writer));
    }
    let (copied, reported) = tokio::join!(
        copy(out, std::io::stdout()),
        copy(errors, std::io::stderr())
    );
    copied?;
    reported?;
    let status = match status {
        Some(status) => status.await,
        None => None,
    };
    exit_code(pod, status.as_ref())
}

/// Runs the local etcdctl with the standard input and output of the plugin. Returns etcdctl's exit code.
///
/// # Errors
/// Fails if the port-forward or etcdctl cannot be started, or if a Secret cannot be read.
pub async fn attach_local(
    access: &Access,
    cluster: &EtcdCluster,
    pod: &Pod,
    args: &[String],
) -> Result<u8> {
    local::attach(access, cluster, pod, args).await
}

async fn run_in_pod(access: &Access, pod: &Pod, command: Vec<String>) -> Result<Ended> {
    let mut process = exec(access, pod, command, false).await?;
    let status = process.take_status();
    let (mut out, mut errors) = (Vec::new(), Vec::new());
    let (read, reported) = tokio::join!(
        copy(process.stdout(), &mut out),
        copy(process.stderr(), &mut errors)
    );
    read?;
    reported?;
    let status = match status {
        Some(status) => status.await,
        None => None,
    };
    Ok(Ended {
        stdout: String::from_utf8_lossy(&out).into_owned(),
        stderr: String::from_utf8_lossy(&errors).into_owned(),
        code: exit_code(pod, status.as_ref())?,
    })
}

async fn exec(
    access: &Access,
    pod: &Pod,
    command: Vec<String>,
    stdin: bool,
) -> Result<kube::api::AttachedProcess> {
    let params = AttachParams::default()
        .container(api::names::CONTAINER_ETCD)
        .stdin(stdin)
        .stdout(true)
        .stderr(true)
        .max_stdout_buf_size(BUFFER)
        .max_stderr_buf_size(BUFFER);
    let api: Api<Pod> = access.api();
    let started = api.exec(&pod.name_any(), command, &params).await;
    started.map_err(|source| match source {
        kube::Error::Api(_) => Error::Request {
            verb: "create",
            object: format!("pods/exec for {}", access.named::<Pod>(&pod.name_any())),
            source: Box::new(source),
        },
        other => failed(pod, other.to_string()),
    })
}

fn failed(pod: &Pod, message: impl Into<String>) -> Error {
    Error::Exec {
        pod: pod.name_any(),
        message: message.into(),
    }
}

/// Copies the output of etcdctl to `to`. etcdctl waits if `to` accepts data slowly.
async fn copy(from: Option<impl AsyncRead + Unpin>, mut to: impl Write) -> Result<()> {
    let Some(mut from) = from else {
        return Ok(());
    };
    let mut buffer = vec![0; BUFFER];
    loop {
        let count = from.read(&mut buffer).await?;
        if count == 0 {
            return Ok(to.flush()?);
        }
        to.write_all(&buffer[..count])?;
        to.flush()?;
    }
}

/// Passes the plugin's standard input to etcdctl. A separate thread reads it, because a blocking read cannot be
/// canceled.
async fn pass_input(mut to: impl tokio::io::AsyncWrite + Unpin) {
    let (sender, mut receiver) = mpsc::channel::<Vec<u8>>(4);
    std::thread::spawn(move || {
        let mut buffer = vec![0; BUFFER];
        while let Ok(count) = std::io::stdin().read(&mut buffer) {
            if count == 0 || sender.blocking_send(buffer[..count].to_vec()).is_err() {
                return;
            }
        }
    });
    while let Some(bytes) = receiver.recv().await {
        if to.write_all(&bytes).await.is_err() {
            return;
        }
    }
    let _ = to.shutdown().await;
}

/// The exit code in the status that the kubelet sends when the command has ended.
fn exit_code(pod: &Pod, status: Option<&Status>) -> Result<u8> {
    let Some(status) = status else {
        return Err(failed(
            pod,
            "the connection ended while etcdctl was running",
        ));
    };
    if status.status.as_deref() == Some("Success") {
        return Ok(0);
    }
    let details = status.details.as_ref();
    let causes = details.and_then(|details| details.causes.as_ref());
    let code = causes.into_iter().flatten().find_map(|cause| {
        let is_code = cause.reason.as_deref() == Some("ExitCode");
        cause.message.as_ref().filter(|_| is_code)?.parse().ok()
    });
    code.ok_or_else(|| failed(pod, status.message.clone().unwrap_or_default()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn status(json: serde_json::Value) -> Status {
        serde_json::from_value(json).unwrap()
    }

    #[test]
    fn exit_code_of_etcdctl_is_read_from_exec_status() {
        let pod = Pod::default();
        let good = status(serde_json::json!({ "status": "Success" }));
        assert_eq!(exit_code(&pod, Some(&good)).unwrap(), 0);
        let bad = status(serde_json::json!({
            "status": "Failure", "reason": "NonZeroExitCode",
            "details": { "causes": [{ "reason": "ExitCode", "message": "4" }] }
        }));
        assert_eq!(exit_code(&pod, Some(&bad)).unwrap(), 4);
        let missing = status(serde_json::json!({
            "status": "Failure", "message": "executable file not found"
        }));
        let error = exit_code(&pod, Some(&missing)).unwrap_err();
        assert!(error.to_string().contains("executable file not found"));
        assert!(exit_code(&pod, None).is_err());
    }

    #[test]
    fn etcdctl_needs_password_if_auth_may_be_enabled_and_no_user_is_given() {
        let cluster = |auth: &str| -> EtcdCluster {
            serde_json::from_str(&format!(
                r#"{{"apiVersion":"etcd.database.coreos.com/v1beta2","kind":"EtcdCluster","metadata":{{"name":"a"}},"spec":{{{auth}}}}}"#
            ))
            .unwrap()
        };
        let words = |text: &str| text.split(' ').map(str::to_owned).collect::<Vec<_>>();
        assert!(!needs_password(&cluster(""), &words("get a")));
        let on = cluster(r#""auth":{"secret":"s","enabled":true}"#);
        assert!(needs_password(&on, &words("get a")));
        assert!(!needs_password(&on, &words("--user=a:b get a")));
        let unmanaged = cluster(r#""auth":{"secret":"s"}"#);
        assert!(needs_password(&unmanaged, &words("get a")));
        let off = cluster(r#""auth":{"secret":"s","enabled":false}"#);
        assert!(!needs_password(&off, &words("get a")));
    }

    #[test]
    fn error_message_of_etcdctl_is_its_last_line() {
        assert_eq!(
            last_line("{\"level\":\"warn\"}\nError: no\n\n"),
            "Error: no"
        );
        assert_eq!(last_line("\n"), "no output");
    }
}
