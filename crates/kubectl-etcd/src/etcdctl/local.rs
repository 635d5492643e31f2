//! Runs the local etcdctl through a port-forward. etcdctl gets the user and the password in environment variables. The
//! certificates are in a temporary directory that only the current user can read, and that is deleted at the end.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Stdio;

use api::EtcdCluster;
use api::names::{self, CertificateUse};
use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::{Pod, Secret};
use kube::ResourceExt;
use tempfile::TempDir;
use tokio::process::Command;

use super::Ended;
use super::forward::{Forward, forward};
use crate::access::Access;
use crate::error::{Error, Result};
use crate::members;

/// A prepared etcdctl command. Dropping it deletes the certificate files and closes the forwarded port.
struct Prepared {
    command: Command,
    _files: TempDir,
    _forward: Forward,
}

pub(super) async fn run(
    access: &Access,
    cluster: &EtcdCluster,
    pod: &Pod,
    args: &[String],
) -> Result<Ended> {
    let mut prepared = prepare(access, cluster, pod, args).await?;
    prepared.command.stdin(Stdio::null());
    let output = prepared.command.output().await.map_err(Error::Local)?;
    Ok(Ended {
        stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
        stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
        code: code(output.status.code()),
    })
}

pub(super) async fn attach(
    access: &Access,
    cluster: &EtcdCluster,
    pod: &Pod,
    args: &[String],
) -> Result<u8> {
    let mut prepared = prepare(access, cluster, pod, args).await?;
    let status = prepared.command.status().await.map_err(Error::Local)?;
    Ok(code(status.code()))
}

/// The exit code of etcdctl, or 1 if a signal ended etcdctl.
fn code(code: Option<i32>) -> u8 {
    code.and_then(|code| u8::try_from(code).ok()).unwrap_or(1)
}

async fn prepare(
    access: &Access,
    cluster: &EtcdCluster,
    pod: &Pod,
    args: &[String],
) -> Result<Prepared> {
    let name = cluster.name_any();
    let url = members::client_url(pod).unwrap_or_default();
    let files = tempfile::tempdir()?;
    let forward = forward(access, pod, port(url)).await?;
    let mut command = Command::new("etcdctl");
    command.kill_on_drop(true);
    for (variable, _) in std::env::vars_os() {
        // The variables for etcdctl are removed, because etcdctl fails if a variable and an option set the same
        // value.
        if variable.to_string_lossy().starts_with("ETCDCTL_") {
            command.env_remove(variable);
        }
    }
    let scheme = if url.starts_with("https://") {
        "https"
    } else {
        "http"
    };
    command.env(
        "ETCDCTL_ENDPOINTS",
        format!("{scheme}://localhost:{}", forward.port),
    );
    if scheme == "https" {
        for (variable, file) in certificates(access, cluster, &name, files.path()).await? {
            command.env(variable, file);
        }
    }
    if super::needs_password(cluster, args)
        && let Some(auth) = &cluster.spec.auth
    {
        let secret: Secret = access.get(&auth.secret).await?;
        let data = secret.data.unwrap_or_default();
        command.env(
            "ETCDCTL_USER",
            text(access, &auth.secret, &data, "username")?,
        );
        command.env(
            "ETCDCTL_PASSWORD",
            text(access, &auth.secret, &data, "password")?,
        );
    }
    command.args(args);
    Ok(Prepared {
        command,
        _files: files,
        _forward: forward,
    })
}

/// The port number in a client URL, or 2379 if the URL has no port number.
fn port(url: &str) -> u16 {
    let port = url.rsplit(':').next().and_then(|port| port.parse().ok());
    port.unwrap_or(names::CLIENT_PORT)
}

/// Writes the cluster's client certificate into files. Returns the environment variables of etcdctl that name these
/// files.
async fn certificates(
    access: &Access,
    cluster: &EtcdCluster,
    name: &str,
    directory: &Path,
) -> Result<Vec<(&'static str, std::path::PathBuf)>> {
    let tls = cluster.spec.tls.as_ref();
    let secret_name = match tls {
        Some(tls) if tls.generated.is_some() => {
            Some(names::certificate_secret(name, CertificateUse::Client))
        }
        Some(tls) => tls.operator_secret_of(name),
        None => None,
    };
    let Some(secret_name) = secret_name else {
        return Err(Error::refused(
            format!("cluster {name} uses TLS, but its spec names no client certificate"),
            "wait until the operator has completed the change of spec.TLS",
        ));
    };
    let secret: Secret = access.get(&secret_name).await?;
    let data = secret.data.unwrap_or_default();
    let mut variables = Vec::new();
    for (variable, keys) in [
        ("ETCDCTL_CERT", ["tls.crt", "etcd-client.crt"]),
        ("ETCDCTL_KEY", ["tls.key", "etcd-client.key"]),
        ("ETCDCTL_CACERT", ["ca.crt", "etcd-client-ca.crt"]),
    ] {
        let found = keys.iter().find_map(|key| data.get(*key));
        let content = found.ok_or_else(|| missing(access, &secret_name, keys[0]))?;
        let file = directory.join(keys[0]);
        std::fs::write(&file, &content.0).map_err(|source| Error::File {
            path: file.clone(),
            source,
        })?;
        variables.push((variable, file));
    }
    Ok(variables)
}

fn missing(access: &Access, secret: &str, key: &str) -> Error {
    Error::Missing {
        object: format!("key {key} of {}", access.named::<Secret>(secret)),
        remedy: "add the key to the Secret".to_owned(),
    }
}

fn text(
    access: &Access,
    secret: &str,
    data: &BTreeMap<String, ByteString>,
    key: &str,
) -> Result<String> {
    let value = data.get(key).ok_or_else(|| missing(access, secret, key))?;
    Ok(String::from_utf8_lossy(&value.0).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn forwarded_port_is_taken_from_client_url() {
        assert_eq!(port("https://main-a.prod.svc:2379"), 2379);
        assert_eq!(port("http://[fd00::7]:12379"), 12379);
        assert_eq!(port(""), 2379);
    }

    #[test]
    fn etcdctl_ended_by_signal_has_exit_code_1() {
        assert_eq!((code(Some(0)), code(Some(5)), code(None)), (0, 5, 1));
    }
}
