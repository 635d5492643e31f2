//! Searches for leaked secrets (invariant 14). Logs, Events, objects, metrics, process arguments and environments must
//! contain neither the content of a Secret of the namespace nor an etcd token.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use anyhow::{Result, ensure};
use k8s_openapi::api::core::v1::{Pod, Secret};
use kube::ResourceExt;
use kube::api::ListParams;

use crate::metrics::Page;
use crate::{Sandbox, cluster_scenario, scenario};

/// Minimum length of a text that is searched for. Shorter texts would match by chance.
const MIN_LENGTH: usize = 8;
/// Keys of Secrets whose values are public: user names, configuration, locations. Certificates are recognized by the
/// file extension of their key.
const NOT_SECRET: [&str; 4] = ["username", "config", "namespace", "type"];
/// Length of the random part of etcd's simple tokens. A dot and a number follow it.
const TOKEN_LENGTH: usize = 16;

/// A secret text that must not appear in any log, object, metric or process, and the Secret that contains it.
struct SecretValue {
    of: String,
    text: String,
}

/// Runs a test like [`scenario`]. Searches for leaked secrets at its end.
///
/// # Panics
/// Panics if the test fails or a secret is found.
pub async fn scenario_without_leaks(name: &str, body: impl AsyncFnOnce(&Sandbox) -> Result<()>) {
    scenario(name, async move |sandbox: &Sandbox| {
        body(sandbox).await?;
        ensure_no_leaks(sandbox).await
    })
    .await;
}

/// Like [`scenario_without_leaks`], but only with the cluster operator.
///
/// # Panics
/// Panics if the test fails or a secret is found.
pub async fn cluster_scenario_without_leaks(
    name: &str,
    body: impl AsyncFnOnce(&Sandbox) -> Result<()>,
) {
    cluster_scenario(name, async move |sandbox: &Sandbox| {
        body(sandbox).await?;
        ensure_no_leaks(sandbox).await
    })
    .await;
}

/// Searches all data of the namespace for the content of its Secrets.
///
/// # Errors
/// Fails if a secret is found, or if data cannot be read. The error contains the place, the Secret and its key.
pub async fn ensure_no_leaks(sandbox: &Sandbox) -> Result<()> {
    let secret_values = secret_values(sandbox).await?;
    ensure!(
        !secret_values.is_empty(),
        "no Secret of the namespace has a value to search for"
    );
    let mut places = visible(sandbox).await?;
    let pods = sandbox.api::<Pod>().list(&ListParams::default()).await?;
    let processes = processes(&pods.iter().filter_map(Pod::uid).collect::<Vec<_>>());
    ensure!(
        !processes.is_empty() || sandbox.env.xtask.is_none(),
        "no process of a pod of the namespace was found in /proc"
    );
    places.extend(processes);
    let mut leaks = Vec::new();
    for (place, text) in &places {
        for one in secret_values.iter().filter(|one| text.contains(&one.text)) {
            leaks.push(format!("{} appears in {place}", one.of));
        }
        let is_log = place.starts_with("the log");
        if is_log && text.split(is_separator).any(is_token) {
            leaks.push(format!("an etcd token appears in {place}"));
        }
    }
    ensure!(leaks.is_empty(), "{}", leaks.join("; "));
    Ok(())
}

/// The secret values in all Secrets of the namespace, line by line. Public values are not included.
async fn secret_values(sandbox: &Sandbox) -> Result<Vec<SecretValue>> {
    let secrets = sandbox.api::<Secret>().list(&ListParams::default()).await?;
    let mut secret_values = Vec::new();
    for secret in &secrets {
        // The Secret in which Helm records a release is skipped, because it contains only the chart, which is public.
        let kind = secret.type_.as_deref().unwrap_or_default();
        if kind.starts_with("helm.sh/") {
            continue;
        }
        for (key, value) in secret.data.iter().flatten() {
            if NOT_SECRET.contains(&key.as_str())
                || Path::new(key).extension().is_some_and(|end| end == "crt")
            {
                continue;
            }
            let text = String::from_utf8_lossy(&value.0).into_owned();
            for text in parts(&text) {
                let of = format!("{key} of Secret {}", secret.name_any());
                secret_values.push(SecretValue { of, text });
            }
        }
    }
    Ok(secret_values)
}

/// The lines or list items of a Secret's value that are secret on their own.
fn parts(value: &str) -> Vec<String> {
    if let Ok(list) = serde_json::from_str::<Vec<String>>(value) {
        return list;
    }
    let lines = value.lines().map(str::trim);
    let is_content = |line: &&str| !line.starts_with("-----") && !line.starts_with('[');
    let bare = lines.filter(is_content).filter_map(|line| {
        // In an AWS credentials file, the line with the access key ID is not secret.
        match line.split_once('=') {
            Some((name, _)) if name.trim() == "aws_access_key_id" => None,
            Some((name, value)) if name.trim() == "aws_secret_access_key" => Some(value.trim()),
            _ => Some(line),
        }
    });
    bare.filter(|line| line.len() >= MIN_LENGTH)
        .map(str::to_owned)
        .collect()
}

/// All texts of the namespace in which a secret must not appear, each with the place where it was found.
async fn visible(sandbox: &Sandbox) -> Result<BTreeMap<String, String>> {
    let mut visible = BTreeMap::new();
    for kinds in [
        "etcdclusters,etcdbackups,etcdrestores",
        "events.events.k8s.io",
        "pods,deployments",
        "services,configmaps,persistentvolumeclaims,networkpolicies,poddisruptionbudgets,leases",
    ] {
        let text = sandbox.kubectl(&["get", kinds, "-o", "yaml"]).await?;
        visible.insert(format!("the objects {kinds}"), text);
    }
    for pod in &sandbox.api::<Pod>().list(&ListParams::default()).await? {
        let name = pod.name_any();
        let containers = pod.spec.iter().flat_map(|spec| {
            let first = spec.init_containers.iter().flatten();
            first.chain(&spec.containers).map(|one| one.name.clone())
        });
        for container in containers {
            for previous in ["--previous=false", "--previous=true"] {
                let words = ["logs", &name, "-c", &container, previous];
                // kubectl fails for containers that never started, and for the previous log of containers that never
                // restarted. There is nothing to search in these cases.
                if let Ok(text) = sandbox.kubectl(&words).await {
                    visible.insert(format!("the log of {name}/{container} {previous}"), text);
                }
            }
        }
        let namespace = &sandbox.namespace;
        for port in [2381, 8080] {
            let path = format!("/api/v1/namespaces/{namespace}/pods/{name}:{port}/proxy/metrics");
            if let Ok(text) = sandbox.kubectl(&["get", "--raw", &path]).await {
                visible.insert(format!("the metrics of {name}"), text);
            }
        }
    }
    // The loop above skips metrics that cannot be read. This line fails if the metrics of the operator cannot be read.
    Page::of_operator(sandbox, "etcd-operator").await?;
    Ok(visible)
}

/// The arguments and environments of the etcd and operator processes in these pods. `/proc` contains them, because the
/// nodes of the testbed run on this machine. Processes of other pods are left out, because other tests pass credentials
/// to their operators in environment variables. The control group of a process contains the UID of its pod.
fn processes(pods: &[String]) -> BTreeMap<String, String> {
    let mut visible = BTreeMap::new();
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    for entry in entries {
        let path = entry.path();
        let name = fs::read_to_string(path.join("comm")).unwrap_or_default();
        let groups = fs::read_to_string(path.join("cgroup")).unwrap_or_default();
        let groups = groups.replace('_', "-");
        let is_of_pods = pods.iter().any(|uid| groups.contains(uid.as_str()));
        if !name.starts_with("etcd") || !is_of_pods {
            continue;
        }
        for file in ["cmdline", "environ"] {
            if let Ok(bytes) = fs::read(path.join(file)) {
                let place = format!("{file} of process {} ({})", path.display(), name.trim());
                visible.insert(place, String::from_utf8_lossy(&bytes).into_owned());
            }
        }
    }
    visible
}

fn is_separator(letter: char) -> bool {
    !letter.is_ascii_alphanumeric() && letter != '.'
}

/// Whether a word has the form of etcd's simple token: sixteen letters, a dot and a number.
fn is_token(word: &str) -> bool {
    word.split_once('.').is_some_and(|(letters, number)| {
        letters.len() == TOKEN_LENGTH
            && letters.bytes().all(|byte| byte.is_ascii_alphabetic())
            && letters.bytes().any(|byte| byte.is_ascii_uppercase())
            && !number.is_empty()
            && number.bytes().all(|byte| byte.is_ascii_digit())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secret_values_are_split_into_lines() {
        assert_eq!(parts("correct horse"), ["correct horse"]);
        assert_eq!(parts("[\"new one\",\"old one\"]"), ["new one", "old one"]);
        let pem = "-----BEGIN PRIVATE KEY-----\nMIGHAgEAMBMGByqG\nabc\n-----END PRIVATE KEY-----\n";
        assert_eq!(parts(pem), ["MIGHAgEAMBMGByqG"]);
        let aws = "[default]\naws_access_key_id = tester00\naws_secret_access_key = very-secret\n";
        assert_eq!(parts(aws), ["very-secret"]);
    }

    #[test]
    fn simple_token_of_etcd_is_recognized() {
        assert!(is_token("vPZAVJpjVnTnYiQN.12"));
        assert!(!is_token("vPZAVJpjVnTnYiQN.local"));
        assert!(!is_token("short.12"));
    }
}
