//! Restores are interrupted: the EtcdRestore is deleted before or after the cutover, or the restore operator crashes.

use anyhow::{Result, ensure};
use e2e::manifests::restore_with;
use e2e::objects::{Kind, await_object, field, ready_members};
use e2e::store_state::StoreState;
use e2e::wait::Poll;
use e2e::{DEADLINE, Sandbox, Writer, scenario, step, until};
use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Pod, Service};
use kube::ResourceExt;
use kube::api::{DeleteParams, DynamicObject, ListParams};

use crate::fixtures::newest_version;
use crate::member_loss::await_one_volume_per_member;
use crate::restore_crash::{
    CRASHES, await_crash, completes_after_crashes, has_the_backup, is_replaced, restart_operator,
    restart_with_env, restart_with_failpoint,
};
use crate::restore_in_place::{
    RunningCluster, await_replaced, await_restore_deleted, cluster_with_backup, in_place_restore,
    in_place_restore_from, restarts_of, restore_lock,
};
use crate::restore_sources::await_equal_restore;

#[tokio::test]
async fn interrupted_restores_leave_one_complete_cluster() {
    scenario("restore_crash", async |sandbox| {
        let running = cluster_with_backup(sandbox).await?;
        let path = format!("{}/etcd.backup", running.bucket.name);
        let version = newest_version(&sandbox.env)?;
        let target = format!(
            "{{name: d, template: {{spec: {{size: 1, version: \"{version}\", pod: {{persistentVolumeClaimSpec: \
             {{accessModes: [ReadWriteOnce], resources: {{requests: {{storage: 64Mi}}}}}}}}}}}}}}"
        );
        let new = restore_with(sandbox.env.s3()?, "new", &target, &path, "");
        restart_with_failpoint(sandbox, "restore-before-record-formed").await?;
        let deleted = new_cluster_is_deleted(sandbox, &running, &new);
        let first = step("delete the restore of a new cluster", deleted).await?;
        let unharmed = running_cluster_stays(sandbox, &running);
        step("delete a restore before the cutover", unharmed).await?;
        let restored = restored_cluster_stays(sandbox, &running);
        step("delete a restore after the cutover", restored).await?;
        let crashed = completes_after_crashes(sandbox, &running, "crash", CRASHES);
        step("crash the operator", crashed).await?;
        let again = new_cluster_is_restored_again(sandbox, &running, &new, &first);
        step("restore into the new cluster again", again).await
    })
    .await;
}

/// Deletes the EtcdRestore of a new cluster before the cutover. Kubernetes must delete all objects of the restore.
/// Returns the unfinished EtcdCluster.
async fn new_cluster_is_deleted(
    sandbox: &Sandbox,
    running: &RunningCluster,
    manifest: &str,
) -> Result<DynamicObject> {
    sandbox.apply(manifest).await?;
    await_crash(sandbox, "restore-before-record-formed").await?;
    let clusters = sandbox.objects(Kind::EtcdCluster);
    let begun = clusters.get("d").await?;
    let there = all_of(sandbox, "d").await?;
    ensure!(
        there.len() == 3,
        "expected a seed with volume and Service: {there:?}"
    );
    let restores = sandbox.objects(Kind::EtcdRestore);
    restores.delete("new", &DeleteParams::default()).await?;
    // The failpoint is still set. If the new process continued the restore, it would crash at this failpoint again.
    restart_operator(sandbox).await?;
    await_restore_deleted(sandbox, "new").await?;
    until("all objects are deleted", DEADLINE, async || {
        let cluster = clusters.get_opt("d").await?.is_some();
        let left = all_of(sandbox, "d").await?;
        Ok(if cluster || !left.is_empty() {
            Poll::NotYet(format!("EtcdCluster: {cluster}, {left:?}"))
        } else {
            Poll::Done(())
        })
    })
    .await?;
    running.keys.verify("later/", 50).await?;
    Ok(begun)
}

/// Applies the manifest of the deleted EtcdRestore again. The cluster is restored, and stays after the EtcdRestore has
/// expired.
async fn new_cluster_is_restored_again(
    sandbox: &Sandbox,
    running: &RunningCluster,
    manifest: &str,
    first: &DynamicObject,
) -> Result<()> {
    sandbox.apply(manifest).await?;
    await_equal_restore(sandbox, "new", "d", &running.state).await?;
    let made = sandbox.await_members("d", 1).await?;
    ensure!(
        made.metadata.uid != first.metadata.uid,
        "the EtcdCluster was not recreated"
    );
    let ttl = r#"{"spec":{"ttlSecondsAfterFinished":1}}"#;
    let patch = ["patch", "etcdrestore", "new", "--type=merge", "-p", ttl];
    sandbox.kubectl(&patch).await?;
    await_restore_deleted(sandbox, "new").await?;
    let stays = sandbox.await_members("d", 1).await?;
    ensure!(stays.metadata.uid == made.metadata.uid);
    has_the_backup(sandbox, running).await
}

/// Deletes the EtcdRestore of a restore in place before the cutover. The running cluster must be unchanged.
async fn running_cluster_stays(sandbox: &Sandbox, running: &RunningCluster) -> Result<()> {
    let pods = restarts_of(sandbox).await?;
    let writer = Writer::start(sandbox, "c").await?;
    sandbox
        .apply(&in_place_restore(sandbox, &running.bucket, "")?)
        .await?;
    let clusters = sandbox.objects(Kind::EtcdCluster);
    await_object(&clusters, "c", "the restore lock", DEADLINE, |object| {
        restore_lock(object).is_some()
    })
    .await?;
    let restores = sandbox.objects(Kind::EtcdRestore);
    restores.delete("over", &DeleteParams::default()).await?;
    await_restore_deleted(sandbox, "over").await?;
    let after = sandbox.await_members("c", 3).await?;
    ensure!(
        restore_lock(&after).is_none(),
        "the restore lock still exists"
    );
    let kept = field(&after, "/status/clusterID") == field(&running.before, "/status/clusterID");
    ensure!(kept, "the cluster changed before the cutover");
    writer.finish("deleted restore").await?;
    running.keys.verify("later/", 50).await?;
    let is = StoreState::at(&running.keys, running.state.revision).await?;
    running.state.ensure_same(&is)?;
    let now = restarts_of(sandbox).await?;
    ensure!(now == pods, "pods {now:?}, before {pods:?}");
    await_one_volume_per_member(sandbox, &ready_members(&after)).await
}

/// Deletes the EtcdRestore after the cutover. The restore must complete nevertheless.
async fn restored_cluster_stays(sandbox: &Sandbox, running: &RunningCluster) -> Result<()> {
    let point = "restore-before-stop-former";
    restart_with_failpoint(sandbox, point).await?;
    let manifest = in_place_restore_from(sandbox, "late", &running.bucket, "etcd.backup", "")?;
    sandbox.apply(&manifest).await?;
    await_crash(sandbox, point).await?;
    let restores = sandbox.objects(Kind::EtcdRestore);
    let begun = restores.get("late").await?;
    restores.delete("late", &DeleteParams::default()).await?;
    restart_with_env(sandbox, "FAILPOINTS-").await?;
    await_restore_deleted(sandbox, "late").await?;

    await_replaced(sandbox, &begun).await?;
    let after = sandbox.await_members("c", 3).await?;
    is_replaced(sandbox, running, &running.before, &after).await?;
    await_one_volume_per_member(sandbox, &ready_members(&after)).await
}

/// The names of the pods, PVCs and Services of members, without the headless Service and the client Service.
async fn all_of(sandbox: &Sandbox, cluster: &str) -> Result<Vec<String>> {
    let all = ListParams::default();
    let pods = sandbox.api::<Pod>().list(&all).await?;
    let mut there: Vec<_> = pods.iter().map(|it| ("Pod", it.name_any())).collect();
    let volumes = sandbox.api::<PersistentVolumeClaim>().list(&all).await?;
    there.extend(volumes.iter().map(|it| ("volume", it.name_any())));
    let services = sandbox.api::<Service>().list(&all).await?;
    there.extend(services.iter().map(|it| ("Service", it.name_any())));
    let (of_it, client) = (format!("{cluster}-"), format!("{cluster}-client"));
    there.retain(|(_, name)| name.starts_with(&of_it) && *name != client);
    Ok(there
        .into_iter()
        .map(|(kind, name)| format!("{kind} {name}"))
        .collect())
}
