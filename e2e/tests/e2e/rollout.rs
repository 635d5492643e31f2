//! The spec of a running cluster changes while clients write. The operator changes running pods in place if Kubernetes
//! allows this. Otherwise a rolling update recreates the pods.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Result, ensure};
use e2e::objects::{Kind, field};
use e2e::wait::Poll;
use e2e::{DEADLINE, RollingCheck, Sandbox, Writer, cluster_scenario, until};
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use serde_json::{Value, json};

use crate::fixtures::{DURABLE, cluster, cluster_with};
use crate::upgrade::WRITE_INTERVAL;

/// The maximum time between two writes: longer than a leadership transfer on a busy machine, but shorter than a lost
/// quorum while a member restarts.
pub(crate) const MAX_WRITE_GAP: Duration = Duration::from_secs(30);

/// The UID and the restarts of each pod, by name.
pub(crate) async fn restarts_by_pod(sandbox: &Sandbox) -> Result<BTreeMap<String, (String, i32)>> {
    let pods = sandbox.member_pods("c").await?;
    let life = |pod: &Pod| {
        let statuses = pod.status.as_ref()?.container_statuses.as_ref()?;
        let restarts = statuses.iter().map(|status| status.restart_count).sum();
        Some((pod.name_any(), (pod.uid()?, restarts)))
    };
    Ok(pods.iter().filter_map(life).collect())
}

async fn patch(sandbox: &Sandbox, spec: &Value) -> Result<()> {
    let patch = json!({ "spec": spec }).to_string();
    let words = ["patch", "etcdcluster", "c", "--type=merge", "-p", &patch];
    sandbox.kubectl(&words).await.map(drop)
}

/// Waits until `holds` is true for every pod of the cluster, and no work is pending.
async fn await_pods(sandbox: &Sandbox, what: &str, holds: impl Fn(&Value) -> bool) -> Result<()> {
    until(what, DEADLINE, async || {
        let pods = sandbox.member_pods("c").await?;
        let pods = pods.iter().map(serde_json::to_value);
        let pods = pods.collect::<Result<Vec<Value>, _>>()?;
        let differ = pods.iter().filter(|pod| !holds(pod));
        let names: Vec<&Value> = differ.map(|pod| &pod["metadata"]["name"]).collect();
        Ok(if names.is_empty() && pods.len() == 3 {
            Poll::Done(())
        } else {
            Poll::NotYet(format!("{} pods, not updated: {names:?}", pods.len()))
        })
    })
    .await?;
    sandbox.await_members("c", 3).await.map(drop)
}

fn has_flag(pod: &Value, flag: &str) -> bool {
    let args = pod["spec"]["containers"][0]["args"].as_array();
    args.is_some_and(|args| args.iter().any(|arg| arg == flag))
}

/// Changes an option of etcd. Ensures that at most one member is missing at any time.
async fn option_change_rolls(sandbox: &Sandbox, manifest: String, keeps_names: bool) -> Result<()> {
    sandbox.apply(&manifest).await?;
    let object = sandbox.await_members("c", 3).await?;
    let (id, before) = (
        field(&object, "/status/clusterID"),
        restarts_by_pod(sandbox).await?,
    );
    let writer = Writer::start(sandbox, "c").await?;
    let check = RollingCheck::start(sandbox, "c", 3).await?;
    patch(sandbox, &json!({ "etcd": { "snapshotCount": 5000 } })).await?;
    await_pods(sandbox, "every member runs with the new flag", |pod| {
        has_flag(pod, "--snapshot-count=5000")
    })
    .await?;
    let ended = check.finish().await?;
    ensure!(ended == 3, "{ended} pods were terminated");
    let after = restarts_by_pod(sandbox).await?;
    let same: Vec<&String> = before
        .keys()
        .filter(|name| after.contains_key(*name))
        .collect();
    ensure!(
        same.len() == if keeps_names { 3 } else { 0 },
        "members must keep their names if they have volumes, and only then: {same:?}"
    );
    ensure!(
        before
            .values()
            .all(|(uid, _)| after.values().all(|(other, _)| other != uid)),
        "a pod was not recreated"
    );
    let object = sandbox.objects(Kind::EtcdCluster).get("c").await?;
    ensure!(
        field(&object, "/status/clusterID") == id,
        "the cluster ID changed"
    );
    writer.await_more(10).await?;
    let tally = writer.finish("changed etcd option").await?;
    // Only the gap between writes is limited, because single writes of this client, which does not retry, may fail.
    // The limit is long, because a freeze of the machine also causes a gap.
    ensure!(tally.gap < MAX_WRITE_GAP, "{tally}");
    Ok(())
}

#[tokio::test]
async fn rolling_update_keeps_members_with_volumes() {
    cluster_scenario("rollout_durable", async |sandbox| {
        let manifest = cluster_with(&sandbox.env, "c", 3, DURABLE)?;
        option_change_rolls(sandbox, manifest, true).await
    })
    .await;
}

#[tokio::test]
async fn rolling_update_replaces_members_without_volumes() {
    cluster_scenario("rollout_empty_dir", async |sandbox| {
        let manifest = cluster(&sandbox.env, "c", 3)?;
        option_change_rolls(sandbox, manifest, false).await
    })
    .await;
}

#[tokio::test]
async fn metadata_change_restarts_no_member() {
    cluster_scenario("rollout_metadata", async |sandbox| {
        let manifest = cluster(&sandbox.env, "c", 3)?;
        sandbox.apply(&manifest).await?;
        sandbox.await_members("c", 3).await?;
        let before = restarts_by_pod(sandbox).await?;
        let writer = Writer::start_retrying(sandbox, "c", WRITE_INTERVAL).await?;
        let set = json!({ "pod": { "labels": { "team": "a" }, "annotations": { "note": "b" } } });
        patch(sandbox, &set).await?;
        await_pods(sandbox, "labels and annotations are set", |pod| {
            pod["metadata"]["labels"]["team"] == "a"
                && pod["metadata"]["annotations"]["note"] == "b"
        })
        .await?;
        let unset =
            json!({ "pod": { "labels": { "team": null, "tier": "1" }, "annotations": null } });
        patch(sandbox, &unset).await?;
        await_pods(
            sandbox,
            "removed labels and annotations are deleted",
            |pod| {
                let metadata = &pod["metadata"];
                metadata["labels"]["team"].is_null()
                    && metadata["labels"]["tier"] == "1"
                    && metadata["annotations"]["note"].is_null()
                    && metadata["labels"]["app"] == "etcd"
            },
        )
        .await?;
        ensure!(
            restarts_by_pod(sandbox).await? == before,
            "a pod was recreated or restarted"
        );
        writer.await_more(10).await?;
        let tally = writer.finish("labels and annotations").await?;
        ensure!(tally.unknown == 0, "{tally}");
        Ok(())
    })
    .await;
}

/// True if the container has this memory request, in the spec and in the status.
fn has_resources(pod: &Value, memory: &str) -> bool {
    let container = &pod["status"]["containerStatuses"][0];
    container["resources"]["requests"]["memory"] == memory
        && pod["spec"]["containers"][0]["resources"]["requests"]["memory"] == memory
}

#[tokio::test]
async fn in_place_resize_restarts_no_member() {
    cluster_scenario("resize_in_place", async |sandbox| {
        let more = "  pod:\n    resources: {requests: {cpu: 10m, memory: 64Mi}, limits: {memory: 512Mi}}\n";
        let manifest = cluster_with(&sandbox.env, "c", 3, more)?;
        sandbox.apply(&manifest).await?;
        sandbox.await_members("c", 3).await?;
        let before = restarts_by_pod(sandbox).await?;
        let writer = Writer::start_retrying(sandbox, "c", WRITE_INTERVAL).await?;
        let resources = json!({ "requests": { "cpu": "20m", "memory": "96Mi" } });
        patch(sandbox, &json!({ "pod": { "resources": resources } })).await?;
        await_pods(sandbox, "every member has the new memory", |pod| has_resources(pod, "96Mi")).await?;
        ensure!(restarts_by_pod(sandbox).await? == before, "a pod was recreated or restarted");
        writer.await_more(10).await?;
        let tally = writer.finish("in-place resize").await?;
        ensure!(tally.unknown == 0, "{tally}");
        sandbox
            .await_event(Kind::EtcdCluster, "c", &[" PodResized: "])
            .await
    })
    .await;
}

/// The API server does not allow another QoS class for a running pod, so a rolling update recreates the pods.
#[tokio::test]
async fn rejected_resize_triggers_rolling_update() {
    cluster_scenario("resize_refused", async |sandbox| {
        let manifest = cluster_with(&sandbox.env, "c", 3, DURABLE)?;
        sandbox.apply(&manifest).await?;
        sandbox.await_members("c", 3).await?;
        let before = restarts_by_pod(sandbox).await?;
        let writer = Writer::start_retrying(sandbox, "c", WRITE_INTERVAL).await?;
        let check = RollingCheck::start(sandbox, "c", 3).await?;
        let resources = json!({ "requests": { "memory": "96Mi" } });
        patch(sandbox, &json!({ "pod": { "resources": resources } })).await?;
        await_pods(sandbox, "every member has the new memory", |pod| {
            has_resources(pod, "96Mi")
        })
        .await?;
        let ended = check.finish().await?;
        ensure!(ended == 3, "{ended} pods were terminated");
        let after = restarts_by_pod(sandbox).await?;
        ensure!(before.keys().eq(after.keys()), "the members changed");
        ensure!(
            before.iter().all(|(name, life)| after[name].0 != life.0),
            "a pod was not recreated"
        );
        writer.finish("resize by rolling update").await.map(drop)
    })
    .await;
}
