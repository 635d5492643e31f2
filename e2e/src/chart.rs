//! Runs Helm, and installs the chart as a user does.

use std::process::Stdio;

use anyhow::{Context, Result, bail};
use serde::Deserialize as _;
use serde_json::Value;
use tokio::process::Command;

use crate::retry::{is_transient, retry_transient};
use crate::{Env, kubectl};

/// Runs `helm` and returns its output. Retries `upgrade` and `uninstall` after transient errors of the API server.
///
/// # Errors
/// Fails if Helm fails. The error contains the complete error output.
pub async fn helm(env: &Env, args: &[&str]) -> Result<String> {
    let verb = args.first().copied().unwrap_or_default();
    retry_transient(
        |error| ["upgrade", "uninstall"].contains(&verb) && is_transient(&error.to_string()),
        async |is_retry| {
            if is_retry && verb == "upgrade" {
                delete_unfinished_releases(env, args).await?;
            }
            match helm_once(env, args).await {
                // Helm may report an error although it has uninstalled the release. The retry then fails with "not
                // found", which counts as success.
                Err(error)
                    if is_retry
                        && verb == "uninstall"
                        && error.to_string().contains("not found") =>
                {
                    Ok(String::new())
                }
                outcome => outcome,
            }
        },
    )
    .await
}

/// Deletes the Secrets of releases that Helm did not finish. Helm would assume that another Helm process still works
/// on such a release, and refuse to continue.
async fn delete_unfinished_releases(env: &Env, args: &[&str]) -> Result<()> {
    let mut words = args.iter().skip_while(|word| **word != "-n").skip(1);
    let Some(namespace) = words.next() else {
        return Ok(());
    };
    let unfinished = "owner=helm,status in (failed,pending-install,pending-upgrade)";
    let delete = ["-n", namespace, "delete", "secret", "-l", unfinished];
    kubectl::run(env, &delete).await.map(drop)
}

async fn helm_once(env: &Env, args: &[&str]) -> Result<String> {
    let mut command = Command::new("helm");
    if let Some(context) = &env.context {
        command.args(["--kube-context", context]);
    }
    let output = command
        .args(args)
        .stdin(Stdio::null())
        .output()
        .await
        .context("helm cannot be started: is it on PATH? (`cargo xtask testbed env` adds the helm of the testbed)")?;
    if !output.status.success() {
        bail!(
            "helm {}: {}",
            args.join(" "),
            String::from_utf8_lossy(&output.stderr).trim()
        );
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Parses the objects in the output of `helm template`.
///
/// # Errors
/// Fails if the output is not valid YAML.
pub fn objects(rendered: &str) -> Result<Vec<Value>> {
    let documents = serde_yaml_ng::Deserializer::from_str(rendered);
    let mut objects = Vec::new();
    for document in documents {
        let object = Value::deserialize(document).context("the rendered chart")?;
        if !object.is_null() {
            objects.push(object);
        }
    }
    Ok(objects)
}

/// Installs or upgrades the chart as `release` in `namespace`.
///
/// # Errors
/// Fails if Helm fails. The error contains the error output of Helm.
pub async fn install(
    env: &Env,
    release: &str,
    namespace: &str,
    settings: &[&str],
) -> Result<String> {
    let (repository, tag) = env.image_parts();
    let chart = env.chart.to_string_lossy().into_owned();
    let repository = format!("image.repository={repository}");
    let tag = format!("image.tag={tag}");
    let mut args = vec![
        "upgrade",
        "--install",
        release,
        &chart,
        "-n",
        namespace,
        "--create-namespace",
        "--set",
        &repository,
        // The tag is set with `--set-string`, because `--set` would parse a tag of digits as a number.
        "--set-string",
        &tag,
        "--set",
        "image.pullPolicy=IfNotPresent",
    ];
    args.extend_from_slice(settings);
    helm(env, &args).await
}
