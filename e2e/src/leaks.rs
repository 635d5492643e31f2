//! Looks for what must not be seen (invariant 14): the content of every Secret of a namespace, and etcd's tokens, in
//! logs, events, objects, metrics, process arguments and environments.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use anyhow::{Result, ensure};
use k8s_openapi::api::core::v1::{Pod, Secret};
use kube::ResourceExt;
use kube::api::ListParams;

use crate::metrics::Page;
use crate::{Sandbox, cluster_scenario, scenario};

/// Shorter texts are found by chance.
const SHORTEST: usize = 8;
/// Keys of Secrets that hold nothing secret: names, certificates, places.
const PUBLIC: [&str; 4] = ["username", "config", "namespace", "type"];
/// The length of the random part of etcd's simple tokens, before a dot and a number.
const TOKEN: usize = 16;

/// A text that must not be seen, and where it stands.
struct Hidden {
    of: String,
    text: String,
}

/// Runs a test as [`scenario`] does, and searches at its end for everything that must not be seen.
///
/// # Panics
/// When the test fails, or something is found.
pub async fn discreet(name: &str, body: impl AsyncFnOnce(&Sandbox) -> Result<()>) {
    scenario(name, async move |sandbox: &Sandbox| {
        body(sandbox).await?;
        nothing_leaks(sandbox).await
    })
    .await;
}

/// As [`discreet`], with the cluster operator alone.
///
/// # Panics
/// When the test fails, or something is found.
pub async fn discreet_cluster(name: &str, body: impl AsyncFnOnce(&Sandbox) -> Result<()>) {
    cluster_scenario(name, async move |sandbox: &Sandbox| {
        body(sandbox).await?;
        nothing_leaks(sandbox).await
    })
    .await;
}

/// Searches everything that belongs to the namespace for everything that is secret in it.
///
/// # Errors
/// When something is found: where, and of which Secret and key; or when something cannot be read.
pub async fn nothing_leaks(sandbox: &Sandbox) -> Result<()> {
    let hidden = hidden(sandbox).await?;
    ensure!(!hidden.is_empty(), "there is no Secret to look for");
    let mut places = shown(sandbox).await?;
    places.extend(processes());
    let mut found = Vec::new();
    for (place, text) in &places {
        for one in hidden.iter().filter(|one| text.contains(&one.text)) {
            found.push(format!("{} stands in {place}", one.of));
        }
        let is_log = place.starts_with("the log");
        if is_log && text.split(is_no_part).any(is_token) {
            found.push(format!("a token of etcd stands in {place}"));
        }
    }
    ensure!(found.is_empty(), "{}", found.join("; "));
    Ok(())
}

/// What is secret: the values of all Secrets, line by line, without what everybody may know.
async fn hidden(sandbox: &Sandbox) -> Result<Vec<Hidden>> {
    let secrets = sandbox.api::<Secret>().list(&ListParams::default()).await?;
    let mut hidden = Vec::new();
    for secret in &secrets {
        // Helm's record of the release is the chart, which everybody has.
        let kind = secret.type_.as_deref().unwrap_or_default();
        if kind.starts_with("helm.sh/") {
            continue;
        }
        for (key, value) in secret.data.iter().flatten() {
            if PUBLIC.contains(&key.as_str())
                || Path::new(key).extension().is_some_and(|end| end == "crt")
            {
                continue;
            }
            let text = String::from_utf8_lossy(&value.0).into_owned();
            for text in parts(&text) {
                let of = format!("{key} of Secret {}", secret.name_any());
                hidden.push(Hidden { of, text });
            }
        }
    }
    Ok(hidden)
}

/// The parts of a value that are secret by themselves.
fn parts(value: &str) -> Vec<String> {
    if let Ok(list) = serde_json::from_str::<Vec<String>>(value) {
        return list;
    }
    let lines = value.lines().map(str::trim);
    let told = |line: &&str| !line.starts_with("-----") && !line.starts_with('[');
    let bare = lines.filter(told).filter_map(|line| {
        // As in credentials files; the key's ID is no secret, its owner is told by it.
        match line.split_once('=') {
            Some((name, _)) if name.trim() == "aws_access_key_id" => None,
            Some((name, value)) if name.trim() == "aws_secret_access_key" => Some(value.trim()),
            _ => Some(line),
        }
    });
    bare.filter(|line| line.len() >= SHORTEST)
        .map(str::to_owned)
        .collect()
}

/// What people and programs get to see of the namespace, by place.
async fn shown(sandbox: &Sandbox) -> Result<BTreeMap<String, String>> {
    let mut shown = BTreeMap::new();
    for kinds in [
        "etcdclusters,etcdbackups,etcdrestores",
        "events.events.k8s.io",
        "pods,deployments",
        "services,configmaps,persistentvolumeclaims,networkpolicies,poddisruptionbudgets,leases",
    ] {
        let text = sandbox.kubectl(&["get", kinds, "-o", "yaml"]).await?;
        shown.insert(format!("the objects {kinds}"), text);
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
                // One that was never started, or never before, has none.
                if let Ok(text) = sandbox.kubectl(&words).await {
                    shown.insert(format!("the log of {name}/{container} {previous}"), text);
                }
            }
        }
        let namespace = &sandbox.namespace;
        for port in [2381, 8080] {
            let path = format!("/api/v1/namespaces/{namespace}/pods/{name}:{port}/proxy/metrics");
            if let Ok(text) = sandbox.kubectl(&["get", "--raw", &path]).await {
                shown.insert(format!("the metrics of {name}"), text);
            }
        }
    }
    // At least those of the operators were to be had.
    Page::of_operator(sandbox, "etcd-operator").await?;
    Ok(shown)
}

/// Arguments and environments of all processes of ours on the nodes, which run on this machine.
fn processes() -> BTreeMap<String, String> {
    let mut shown = BTreeMap::new();
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    for entry in entries {
        let path = entry.path();
        let name = fs::read_to_string(path.join("comm")).unwrap_or_default();
        if !name.starts_with("etcd") {
            continue;
        }
        for file in ["cmdline", "environ"] {
            if let Ok(bytes) = fs::read(path.join(file)) {
                let place = format!("{file} of process {} ({})", path.display(), name.trim());
                shown.insert(place, String::from_utf8_lossy(&bytes).into_owned());
            }
        }
    }
    shown
}

fn is_no_part(letter: char) -> bool {
    !letter.is_ascii_alphanumeric() && letter != '.'
}

/// Whether a word looks like a simple token: sixteen letters, a dot, a number.
fn is_token(word: &str) -> bool {
    word.split_once('.').is_some_and(|(letters, number)| {
        letters.len() == TOKEN
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
    fn splits_secret_values_into_lines() {
        assert_eq!(parts("correct horse"), ["correct horse"]);
        assert_eq!(parts("[\"new one\",\"old one\"]"), ["new one", "old one"]);
        let pem = "-----BEGIN PRIVATE KEY-----\nMIGHAgEAMBMGByqG\nabc\n-----END PRIVATE KEY-----\n";
        assert_eq!(parts(pem), ["MIGHAgEAMBMGByqG"]);
        let aws = "[default]\naws_access_key_id = tester00\naws_secret_access_key = very-secret\n";
        assert_eq!(parts(aws), ["very-secret"]);
    }

    #[test]
    fn recognizes_etcd_simple_token() {
        assert!(is_token("vPZAVJpjVnTnYiQN.12"));
        assert!(!is_token("vPZAVJpjVnTnYiQN.local"));
        assert!(!is_token("short.12"));
    }
}
