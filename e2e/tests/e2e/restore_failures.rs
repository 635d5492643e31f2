//! Restores that are rejected, fail or are canceled do not change the running cluster (invariant 9). A restore does
//! not run additional containers that the manifest of a backup contains (invariant 27).

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use e2e::manifests::restore_with;
use e2e::objects::{
    Kind, await_no_data, await_object, conditions_line, field, has_condition, has_failed_for,
};
use e2e::store_state::StoreState;
use e2e::wait::Poll;
use e2e::{DEADLINE, Keyspace, Sandbox, Writer, scenario, step, until};
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use kube::api::DeleteParams;
use serde_json::{Value, json};
use tokio::time::timeout;

use crate::all_pods_lost::same_members;
use crate::restore_in_place::{
    RunningCluster, await_restore_deleted, cluster_with_backup, in_place_restore_from, restarts_of,
    restore_lock,
};
use crate::restore_storage::{
    await_no_seed, new_cluster_without_class, restore_without_class, running_cluster_without_quota,
};

/// A member's pod: its name, its UID, and its number of restarts.
type Seen = (String, Option<String>, i32);

#[tokio::test]
async fn failed_restores_leave_running_cluster_unchanged() {
    scenario("restore_failures", async |sandbox| {
        let running = cluster_with_backup(sandbox).await?;
        let pods = restarts_of(sandbox).await?;
        let before = (&running, pods.as_slice());
        let writer = Writer::start(sandbox, "c").await?;
        restore_without_class(sandbox, &running).await?;

        let rejected = without_overwrite(sandbox);
        ensure_unchanged_by("restore without overwrite", rejected, sandbox, before).await?;
        let damaged = of_a_damaged_backup(sandbox, &running);
        ensure_unchanged_by("restore a damaged backup", damaged, sandbox, before).await?;
        let changed = invariant_27_refuses_recorded_sidecar(sandbox, &running);
        ensure_unchanged_by("restore a changed spec", changed, sandbox, before).await?;
        let missing = new_cluster_without_class(sandbox, &running);
        ensure_unchanged_by("restore without StorageClass", missing, sandbox, before).await?;
        let exceeded = running_cluster_without_quota(sandbox, &running);
        ensure_unchanged_by("restore without quota", exceeded, sandbox, before).await?;

        writer.await_more(10).await?;
        writer.finish("failed restores").await?;
        sandbox.scale("c", 1).await?;
        sandbox.await_members("c", 1).await.map(drop)
    })
    .await;
}

/// Runs a step, and ensures that the cluster is unchanged.
async fn ensure_unchanged_by(
    name: &str,
    work: impl Future<Output = Result<()>>,
    sandbox: &Sandbox,
    (running, pods): (&RunningCluster, &[Seen]),
) -> Result<()> {
    let all = async {
        work.await?;
        ensure_unchanged(sandbox, running, pods).await
    };
    step(name, all).await
}

/// Ensures that the members, pods, volumes and keys are unchanged, that no object of a seed exists, and that the
/// cluster operator manages the cluster.
async fn ensure_unchanged(
    sandbox: &Sandbox,
    running: &RunningCluster,
    pods: &[Seen],
) -> Result<()> {
    let clusters = sandbox.objects(Kind::EtcdCluster);
    await_object(&clusters, "c", "no restore lock", DEADLINE, |cluster| {
        restore_lock(cluster).is_none()
    })
    .await?;
    let after = sandbox.await_members("c", 3).await?;
    ensure!(
        after.metadata.uid == running.before.metadata.uid,
        "the EtcdCluster was recreated"
    );
    ensure!(field(&after, "/spec") == field(&running.before, "/spec"));
    same_members(&running.before, &after)?;
    running.keys.verify("later/", 50).await?;
    let is = StoreState::at(&running.keys, running.state.revision).await?;
    running.state.ensure_same(&is)?;
    await_no_seed(sandbox, "c").await?;
    let now = restarts_of(sandbox).await?;
    ensure!(now == pods, "pods {now:?}, before {pods:?}");
    let volumes = sandbox
        .kubectl(&["get", "pvc", "-l", "etcd_cluster=c", "-o", "name"])
        .await?;
    ensure!(volumes.lines().count() == 3, "{volumes}");
    is_managed(sandbox).await
}

/// Deletes the PodDisruptionBudget, and waits until the cluster operator creates it again. With a restore lock, the
/// operator would not create it.
async fn is_managed(sandbox: &Sandbox) -> Result<()> {
    let budgets = sandbox.api::<PodDisruptionBudget>();
    let before = budgets.get("c").await?.metadata.uid;
    budgets.delete("c", &DeleteParams::default()).await?;
    until(
        "the PodDisruptionBudget is created again",
        DEADLINE,
        async || {
            let budget = budgets.get_opt("c").await?;
            let now = budget.and_then(|budget| budget.metadata.uid);
            Ok(if now.is_some() && now != before {
                Poll::Done(())
            } else {
                Poll::NotYet(format!("{now:?}"))
            })
        },
    )
    .await
}

async fn without_overwrite(sandbox: &Sandbox) -> Result<()> {
    let s3 = sandbox.env.s3()?;
    let path = format!("{}/etcd.backup", sandbox.namespace);
    let manifest = restore_with(s3, "refused", "{name: c}", &path, "");
    sandbox.apply(&manifest).await?;
    let restores = sandbox.objects(Kind::EtcdRestore);
    let refused = await_object(&restores, "refused", "a rejection", DEADLINE, |object| {
        has_condition(object, "Complete", "False") && has_failed_for(object, "ClusterExists")
    })
    .await?;
    let text = conditions_line(&refused);
    ensure!(text.contains("nothing was changed"), "{text}");
    ensure!(field(&refused, "/status/phase") == "Failed", "{text}");
    ensure!(field(&refused, "/status/succeeded") != true);
    Ok(())
}

/// Invariant 27: a user with write access to the bucket can add a container to the manifest of a backup. A restore
/// must not create an EtcdCluster from such a spec.
async fn invariant_27_refuses_recorded_sidecar(
    sandbox: &Sandbox,
    running: &RunningCluster,
) -> Result<()> {
    let bucket = &running.bucket;
    let manifest = bucket.read("etcd.backup.manifest.json").await?;
    let mut manifest: Value = serde_json::from_slice(&manifest)?;
    let spec = manifest
        .pointer_mut("/cluster/spec")
        .context("the manifest has no spec")?;
    spec["pod"]["sidecars"] = json!([{ "name": "tool", "image": "registry.example/tool:1" }]);
    let content = bucket.read("etcd.backup").await?;
    bucket.write("changed", content).await?;
    let manifest = serde_json::to_vec(&manifest)?;
    bucket.write("changed.manifest.json", manifest).await?;
    let path = format!("{}/changed", bucket.name);
    let restore = restore_with(sandbox.env.s3()?, "changed", "{name: f}", &path, "");
    sandbox.apply(&restore).await?;

    let restores = sandbox.objects(Kind::EtcdRestore);
    let reason = "RecordedSpecRefused";
    let refused = await_object(&restores, "changed", reason, DEADLINE, |object| {
        has_condition(object, "Complete", "False") && has_failed_for(object, reason)
    })
    .await?;
    let text = conditions_line(&refused);
    for part in ["spec.pod.sidecars", "spec.etcdCluster.template"] {
        ensure!(text.contains(part), "{text}");
    }
    let created = sandbox.objects(Kind::EtcdCluster).get_opt("f").await?;
    ensure!(
        created.is_none(),
        "an EtcdCluster was created from the spec"
    );
    let delete = DeleteParams::default();
    restores.delete("changed", &delete).await?;
    await_restore_deleted(sandbox, "changed").await
}

/// Restores a damaged backup in place and into a new cluster. The operator must detect the damage before etcd starts.
async fn of_a_damaged_backup(sandbox: &Sandbox, running: &RunningCluster) -> Result<()> {
    let bucket = &running.bucket;
    let mut content = bucket.read("etcd.backup").await?;
    let middle = content.len() / 2;
    content[middle] ^= 0xff;
    bucket.write("damaged", content).await?;
    let manifest = bucket.read("etcd.backup.manifest.json").await?;
    bucket.write("damaged.manifest.json", manifest).await?;
    let path = format!("{}/damaged", bucket.name);
    let over = in_place_restore_from(sandbox, "damaged-over", bucket, "damaged", "")?;
    let new = restore_with(sandbox.env.s3()?, "damaged-new", "{name: e}", &path, "");
    sandbox.apply(&[over, new].join("---\n")).await?;

    let restores = sandbox.objects(Kind::EtcdRestore);
    let what = "phase Failed";
    let failed = await_object(&restores, "damaged-over", what, DEADLINE, |object| {
        field(object, "/status/phase") == "Failed" && has_failed_for(object, "SnapshotUnreadable")
    })
    .await?;
    let text = conditions_line(&failed);
    ensure!(text.contains("existing cluster is unchanged"), "{text}");

    let what = "SnapshotUnreadable";
    let found = await_object(&restores, "damaged-new", what, DEADLINE, |object| {
        has_failed_for(object, "SnapshotUnreadable")
    })
    .await?;
    ensure!(field(&found, "/status/succeeded") != true);
    let served = Keyspace::of_cluster(&sandbox.env, &sandbox.namespace, "e");
    let served = timeout(Duration::from_secs(20), served).await;
    ensure!(!matches!(served, Ok(Ok(_))), "etcd serves a damaged backup");
    let delete = DeleteParams::default();
    restores.delete("damaged-new", &delete).await?;
    await_restore_deleted(sandbox, "damaged-new").await?;
    await_no_data(&sandbox.client, &sandbox.namespace, "e", DEADLINE)
        .await
        .context("the new cluster")
}
