//! Searches for leaked secrets (invariant 14): the content of the namespace's Secrets, and etcd tokens. Searches logs,
//! Events, objects, metrics, process arguments and environment variables.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use anyhow::{Result, ensure};
use k8s_openapi::api::core::v1::{Pod, Secret};
use kube::ResourceExt;
use kube::api::ListParams;

use crate::metrics::Page;
use crate::{Sandbox, cluster_scenario, scenario};

/// The minimum length of a text to search for. Shorter texts would match by chance.
const MIN_LENGTH: usize = 8;
/// Keys of Secrets whose values are public, such as user names and locations. Public certificates are recognized by
/// the file extension of their key.
const NOT_SECRET: [&str; 4] = ["username", "config", "namespace", "type"];
/// The length of the random part of an etcd simple token. The token ends with a dot and a number.
const TOKEN_LENGTH: usize = 16;

/// A text that must not appear outside of its Secret.
struct SecretValue {
    of: String,
    text: String,
}

/// Runs a test like [`scenario`], and then searches for leaked secrets.
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

/// Searches the objects, Events, logs, metrics and processes of the namespace for the content of its Secrets, and for
/// etcd tokens.
///
/// # Errors
/// Fails if a secret is found, or if data cannot be read. The error names the Secret, its key, and the data that
/// contains the secret.
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

/// The [`parts`] of all secret values in the Secrets of the namespace.
async fn secret_values(sandbox: &Sandbox) -> Result<Vec<SecretValue>> {
    let secrets = sandbox.api::<Secret>().list(&ListParams::default()).await?;
    let mut secret_values = Vec::new();
    for secret in &secrets {
        // The Secrets in which Helm stores a release are skipped, because the chart and its values are not secret.
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

/// The texts to search for in a Secret's value: its lines, or its items if the value is a JSON list. Lines that are
/// short or not secret are omitted.
fn parts(value: &str) -> Vec<String> {
    if let Ok(list) = serde_json::from_str::<Vec<String>>(value) {
        return list;
    }
    let lines = value.lines().map(str::trim);
    let is_content = |line: &&str| !line.starts_with("-----") && !line.starts_with('[');
    let bare = lines.filter(is_content).filter_map(|line| {
        // In an AWS credentials file, only the secret access key is secret, and the access key ID is public.
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

/// All texts that must not contain secrets, each with the name of its source.
async fn visible(sandbox: &Sandbox) -> Result<BTreeMap<String, String>> {
    let mut visible = BTreeMap::new();
    for kinds in [
        "etcdclusters,etcdbackups,etcdrestores,etcdmirrors,etcdroles,etcdusers",
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
                // kubectl fails if a container never started, or if it has no previous log because it never
                // restarted. There is then no log to search.
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
    // The loop above skips pods whose metrics cannot be read. This call fails if the metrics of the cluster operator
    // cannot be read, so that at least these metrics are searched.
    Page::of_operator(sandbox, "etcd-operator").await?;
    Ok(visible)
}

/// The arguments and environment variables of the processes of etcd and the operators in these pods. This function
/// reads them from `/proc`, because the nodes of the testbed run on this machine. The control group of a process
/// contains the UID of its pod. Processes of other pods are skipped, because other tests pass credentials in
/// environment variables.
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

/// True if a word has the form of an etcd simple token: sixteen letters, a dot, and a number.
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
    fn secret_parts_are_extracted_from_lists_pem_and_aws_files() {
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
