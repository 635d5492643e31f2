//! A newer operator replaces the running operator without a restart of members. `two_operators.rs` calls this function.
//!
//! The test creates pods as another release of the operator might have created them: with other probes and environment
//! variables, but with annotations that record the same spec.

use anyhow::{Context, Result, ensure};
use e2e::wait::Poll;
use e2e::{DEADLINE, Sandbox, Writer, until};
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use serde_json::{Value, json};

use crate::rollout::restarts_by_pod;
use crate::upgrade::WRITE_INTERVAL;

/// The pod as another release of the operator might have created it.
fn of_another_release(pod: &Pod) -> Result<Value> {
    let mut old = serde_json::to_value(pod)?;
    old["status"] = Value::Null;
    let metadata = old["metadata"].as_object_mut().context("no metadata")?;
    metadata.retain(|key, _| {
        [
            "name",
            "namespace",
            "labels",
            "annotations",
            "ownerReferences",
        ]
        .contains(&key.as_str())
    });
    let spec = old["spec"].as_object_mut().context("no spec")?;
    spec.remove("nodeName");
    let etcd = &mut spec["containers"][0];
    etcd["terminationMessagePolicy"] = json!("File");
    etcd["readinessProbe"]["periodSeconds"] = json!(7);
    etcd["env"] = json!([{ "name": "OF_ANOTHER_RELEASE", "value": "1" }]);
    Ok(old)
}

/// Recreates every pod on its volume, one at a time, as another release of the operator might have created it.
async fn recreate_pods(sandbox: &Sandbox) -> Result<()> {
    for pod in sandbox.member_pods("c").await? {
        let (name, old) = (pod.name_any(), of_another_release(&pod)?);
        sandbox.kubectl(&["delete", "pod", &name]).await?;
        sandbox.apply(&old.to_string()).await?;
        let pod = format!("pod/{name}");
        sandbox
            .kubectl(&["wait", "--for=condition=Ready", "--timeout=300s", &pod])
            .await?;
    }
    Ok(())
}

/// Recreates the pods as another release might have created them, replaces the operator, and ensures that no member
/// restarts. The cluster `c` must have three members with volumes.
pub(crate) async fn restarts_no_member(sandbox: &Sandbox) -> Result<()> {
    sandbox
        .kubectl(&["scale", "deployment/etcd-operator", "--replicas=0"])
        .await?;
    until("no operator runs", DEADLINE, async || {
        let pods = sandbox.kubectl(&["get", "pods", "-o", "name"]).await?;
        Ok(if pods.lines().any(is_operator) {
            Poll::NotYet(pods)
        } else {
            Poll::Done(())
        })
    })
    .await?;
    recreate_pods(sandbox).await?;
    let before = restarts_by_pod(sandbox).await?;
    let writer = Writer::start_retrying(sandbox, "c", WRITE_INTERVAL).await?;

    sandbox
        .kubectl(&["scale", "deployment/etcd-operator", "--replicas=1"])
        .await?;
    // The test adds a label to the spec. When all pods have the label, the new operator has compared all pods with
    // the spec.
    let patch = json!({ "spec": { "pod": { "labels": { "team": "a" } } } }).to_string();
    let words = ["patch", "etcdcluster", "c", "--type=merge", "-p", &patch];
    sandbox.kubectl(&words).await?;
    until("every pod has the new label", DEADLINE, async || {
        let pods = sandbox.member_pods("c").await?;
        let has = |pod: &&Pod| pod.labels().get("team").is_some_and(|team| team == "a");
        let count = pods.iter().filter(has).count();
        Ok(if count == 3 {
            Poll::Done(())
        } else {
            Poll::NotYet(format!("{count} of {}", pods.len()))
        })
    })
    .await?;
    sandbox.await_members("c", 3).await?;
    ensure!(
        restarts_by_pod(sandbox).await? == before,
        "a member was restarted"
    );
    writer.await_more(20).await?;
    ensure!(
        restarts_by_pod(sandbox).await? == before,
        "a member was restarted later"
    );
    let tally = writer.finish("replaced operator").await?;
    ensure!(tally.unknown == 0, "{tally}");
    Ok(())
}

fn is_operator(pod: &str) -> bool {
    let name = pod.strip_prefix("pod/etcd-operator-").unwrap_or_default();
    !name.is_empty()
}
