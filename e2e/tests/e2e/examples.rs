//! The API server creates every example, the operators accept it, and the test deletes it. A ResourceQuota prevents the
//! pods of members, because all examples together would need dozens of pods.

use anyhow::{Context, Result, ensure};
use e2e::objects::{Kind, await_object, field, has_condition};
use e2e::wait::Poll;
use e2e::{DEADLINE, Sandbox, kubectl, scenario, step, until};
use futures::future::try_join_all;
use k8s_openapi::api::core::v1::{ResourceQuota, Service};
use kube::api::PostParams;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::fixtures::manifests;

/// The reasons with which the operators reject a spec.
const REFUSALS: [&str; 8] = [
    "HibernationRefused",
    "InvalidSchedule",
    "InvalidSpec",
    "JoinRefused",
    "NameTaken",
    "NotSupported",
    "NotYetInEffect",
    "VersionRefused",
];
const SCOPE: &str = "/metadata/annotations/etcd.database.coreos.com~1scope";

/// All examples as one manifest, and as objects.
fn examples() -> Result<(String, Vec<Value>)> {
    let texts: Vec<String> = manifests("examples")?
        .iter()
        .map(std::fs::read_to_string)
        .collect::<Result<_, _>>()?;
    let text = texts.join("\n---\n");
    let objects: Vec<Value> = serde_yaml_ng::Deserializer::from_str(&text)
        .map(Value::deserialize)
        .collect::<Result<_, _>>()?;
    ensure!(objects.len() >= 30, "only {} objects", objects.len());
    Ok((text, objects))
}

async fn kubectl_with(sandbox: &Sandbox, words: &[&str], manifest: &str) -> Result<String> {
    let mut all = vec!["-n", &sandbox.namespace];
    all.extend_from_slice(words);
    kubectl::run_with_input(&sandbox.env, &all, Some(manifest)).await
}

async fn are_created(sandbox: &Sandbox, text: &str, objects: &[Value]) -> Result<()> {
    // The three operator pods use up this quota, so no member can start.
    let quota =
        json!({ "metadata": { "name": "no-members" }, "spec": { "hard": { "pods": "3" } } });
    let quota: ResourceQuota = serde_json::from_value(quota)?;
    let quotas = sandbox.api::<ResourceQuota>();
    quotas.create(&PostParams::default(), &quota).await?;
    // The API server enforces the quota only after the quota controller has counted the existing pods.
    until("the quota is used up", DEADLINE, async || {
        let used = quotas
            .get("no-members")
            .await?
            .status
            .and_then(|status| status.used);
        let used = used.and_then(|mut used| used.remove("pods"));
        Ok(match used {
            Some(used) if used.0 == "3" => Poll::Done(()),
            used => Poll::NotYet(format!("{used:?}")),
        })
    })
    .await?;
    let printed = kubectl_with(sandbox, &["apply", "--server-side", "-f", "-"], text).await?;
    let applied = printed.lines().count();
    let expected = objects.len();
    ensure!(applied == expected, "{applied} of {expected}: {printed}");
    Ok(())
}

/// Waits until an operator manages the object. Ensures that no condition has a reason of [`REFUSALS`].
async fn is_accepted(sandbox: &Sandbox, kind: Kind, name: &str) -> Result<()> {
    let api = sandbox.objects(kind);
    let found = await_object(&api, name, "Managed", DEADLINE, |object| {
        has_condition(object, "Managed", "True")
    })
    .await?;
    let conditions = field(&found, "/status/conditions").as_array();
    for condition in conditions.into_iter().flatten() {
        let reason = condition["reason"].as_str().unwrap_or_default();
        ensure!(!REFUSALS.contains(&reason), "{name}: {condition}");
    }
    Ok(())
}

async fn are_accepted(sandbox: &Sandbox, objects: &[Value]) -> Result<()> {
    let mut accepted = Vec::new();
    for object in objects {
        let kind = match object["kind"].as_str() {
            Some("EtcdCluster") => Kind::EtcdCluster,
            Some("EtcdBackup") => Kind::EtcdBackup,
            Some("EtcdRestore") => Kind::EtcdRestore,
            Some("EtcdMirror") => Kind::EtcdMirror,
            Some("EtcdRole") => Kind::EtcdRole,
            Some("EtcdUser") => Kind::EtcdUser,
            _ => continue,
        };
        // The example with the scope annotation is skipped, because namespaced operators do not manage it.
        // `clusterwide.rs` tests this example.
        if object.pointer(SCOPE).is_none() {
            let name = object["metadata"]["name"].as_str();
            accepted.push(is_accepted(sandbox, kind, name.context("no name")?));
        }
    }
    ensure!(accepted.len() >= 20, "only {} objects", accepted.len());
    try_join_all(accepted).await?;
    // In the examples for external clients, the client Services have the types NodePort and LoadBalancer.
    for (name, expected) in [("nodeport", "NodePort"), ("loadbalancer", "LoadBalancer")] {
        let name = format!("example-etcd-cluster-{name}-client");
        let service = until("the client Service exists", DEADLINE, async || {
            Ok(match sandbox.api::<Service>().get_opt(&name).await? {
                Some(service) => Poll::Done(service),
                None => Poll::NotYet(name.clone()),
            })
        })
        .await?;
        let found = service.spec.and_then(|spec| spec.type_);
        ensure!(found.as_deref() == Some(expected), "{name}: {found:?}");
    }
    Ok(())
}

/// Sets `spec.protected` to false in all examples, so that the API server accepts their deletion.
async fn are_no_longer_protected(sandbox: &Sandbox, objects: &[Value]) -> Result<()> {
    let protected: Vec<&str> = objects
        .iter()
        .filter(|object| object["spec"]["protected"] == true)
        .filter_map(|object| object["metadata"]["name"].as_str())
        .collect();
    ensure!(!protected.is_empty(), "no example is protected");
    let patch = r#"{"spec":{"protected":false}}"#;
    for name in protected {
        let words = ["patch", "etcdcluster", name, "--type=merge", "-p", patch];
        sandbox.kubectl(&words).await?;
    }
    Ok(())
}

#[tokio::test]
async fn operators_accept_every_example() {
    scenario("examples", async |sandbox| {
        let (text, objects) = examples()?;
        let created = are_created(sandbox, &text, &objects);
        step("create every example", created).await?;
        let accepted = are_accepted(sandbox, &objects);
        step("accept every example", accepted).await?;
        let unprotected = are_no_longer_protected(sandbox, &objects);
        step("end the protection", unprotected).await?;
        let words = ["delete", "--timeout=2m", "-f", "-"];
        step("delete every example", kubectl_with(sandbox, &words, &text))
            .await
            .map(drop)
    })
    .await;
}
