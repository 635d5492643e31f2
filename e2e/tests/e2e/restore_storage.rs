//! The seed of a restore gets no volume, and the EtcdRestore names the remedy. A restore into a new cluster continues
//! when the user has corrected the cause. A restore in place fails without a change of the running cluster.
//! `restore_failures.rs` calls these functions.

use anyhow::{Context, Result, ensure};
use e2e::manifests::restore_with;
use e2e::objects::{
    Kind, await_object, condition, conditions_line, field, has_condition, has_failed_for,
};
use e2e::store_state::StoreState;
use e2e::wait::Poll;
use e2e::{DEADLINE, Keyspace, Sandbox, until};
use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Pod, ResourceQuota, Service};
use kube::ResourceExt;
use kube::api::{DeleteParams, ListParams, PostParams};
use serde_json::json;

use crate::fixtures::newest_version;
use crate::restore_in_place::{
    RESTORE_LOCK, RunningCluster, await_restore_deleted, in_place_restore_from, restarts_of_cluster,
};
use crate::restore_sources::await_equal_restore;
use crate::storage_class_change::{claims_with, with_class};

/// Waits until the EtcdRestore has the reason StorageMissing with these words in its message, and a Warning Event.
async fn await_storage_missing(sandbox: &Sandbox, restore: &str, words: &[&str]) -> Result<()> {
    let restores = sandbox.objects(Kind::EtcdRestore);
    let what = format!("StorageMissing with {words:?}");
    await_object(&restores, restore, &what, DEADLINE, |object| {
        let failed = condition(object, "Failed");
        let message = failed.and_then(|it| it["message"].as_str());
        has_failed_for(object, "StorageMissing")
            && message.is_some_and(|message| words.iter().all(|word| message.contains(word)))
    })
    .await?;
    until("a Warning Event exists", DEADLINE, async || {
        let events = sandbox.events(Kind::EtcdRestore, restore).await?;
        let says =
            |event: &String| event.starts_with("Warning") && event.contains("StorageMissing");
        Ok(if events.iter().any(says) {
            Poll::Done(())
        } else {
            Poll::NotYet(format!("{events:?}"))
        })
    })
    .await
}

/// Starts a restore into the new cluster `d`, whose StorageClass does not exist. The operator reports the missing class
/// after a minute.
pub(crate) async fn restore_without_class(
    sandbox: &Sandbox,
    running: &RunningCluster,
) -> Result<()> {
    let spec = claims_with(&class_of(sandbox), "64Mi").replace('\n', "\n      ");
    let version = newest_version(&sandbox.env)?;
    let template = format!(
        "\n    name: d\n    template:\n      spec:\n        size: 1\n        version: \"{version}\"\n      {}",
        spec.trim_end()
    );
    let path = format!("{}/etcd.backup", running.bucket.name);
    let manifest = restore_with(sandbox.env.s3()?, "late", &template, &path, "");
    sandbox.apply(&manifest).await.map(drop)
}

/// The name of the missing StorageClass.
fn class_of(sandbox: &Sandbox) -> String {
    format!("late-{}", sandbox.namespace)
}

/// The restore of [`restore_without_class`] completes when the StorageClass exists. After the class is deleted again, a
/// restore in place reports the missing class. At the end, this function deletes the cluster `d`.
pub(crate) async fn new_cluster_without_class(
    sandbox: &Sandbox,
    running: &RunningCluster,
) -> Result<()> {
    let class = class_of(sandbox);
    let path = format!("{}/etcd.backup", running.bucket.name);
    let field = "spec.pod.persistentVolumeClaimSpec.storageClassName";
    await_storage_missing(sandbox, "late", &[&class, "does not exist", field]).await?;

    with_class(sandbox, "late", false, async |made| {
        ensure!(made == class, "{made}");
        let restores = sandbox.objects(Kind::EtcdRestore);
        await_object(&restores, "late", "Complete", DEADLINE, |object| {
            has_condition(object, "Complete", "True")
        })
        .await?;
        await_equal_restore(sandbox, "late", "d", &running.state).await?;
        sandbox.await_members("d", 1).await.map(drop)
    })
    .await?;
    in_place_restore_without_class(sandbox, &path, &class).await?;
    sandbox.delete_cluster("d").await
}

/// Restores in place after the StorageClass of the volume was deleted. The restore must report the missing class and
/// not change the cluster.
async fn in_place_restore_without_class(
    sandbox: &Sandbox,
    backup: &str,
    class: &str,
) -> Result<()> {
    let before = sandbox.await_members("d", 1).await?;
    let keys = Keyspace::of_cluster(&sandbox.env, &sandbox.namespace, "d").await?;
    keys.fill_mixed("later/", 20).await?;
    let (pods, state) = (
        restarts_of_cluster(sandbox, "d").await?,
        StoreState::now(&keys).await?,
    );
    let s3 = sandbox.env.s3()?;
    let overwrite = "  overwrite: true\n";
    let manifest = restore_with(s3, "late-over", "{name: d}", backup, overwrite);
    sandbox.apply(&manifest).await?;
    let abandoned = "the restore is abandoned";
    await_storage_missing(sandbox, "late-over", &[class, "does not exist", abandoned]).await?;
    let is = StoreState::now(&keys).await?;
    state.ensure_same(&is).context("after the report")?;
    let seed = seed_objects(sandbox, "d").await?;
    ensure!(!seed.is_empty(), "no object of a seed exists");

    // The EtcdRestore is deleted now to save time, because without a volume it fails only after three minutes.
    let restores = sandbox.objects(Kind::EtcdRestore);
    restores
        .delete("late-over", &DeleteParams::default())
        .await?;
    await_restore_deleted(sandbox, "late-over").await?;
    await_no_seed(sandbox, "d").await?;
    let after = sandbox.await_members("d", 1).await?;
    ensure!(
        !after.annotations().contains_key(RESTORE_LOCK),
        "the cluster has a restore lock"
    );
    for part in ["/spec", "/status/clusterID", "/status/memberDetails/0/id"] {
        ensure!(
            field(&after, part) == field(&before, part),
            "{part} changed"
        );
    }
    let now = restarts_of_cluster(sandbox, "d").await?;
    ensure!(now == pods, "pods {now:?}, before {pods:?}");
    state.ensure_same(&StoreState::now(&keys).await?)
}

/// The pods, PVCs and Services of seeds of a cluster, without the objects of its members.
pub(crate) async fn seed_objects(sandbox: &Sandbox, cluster: &str) -> Result<Vec<String>> {
    let of_seed = ListParams::default().labels(RESTORE_LOCK);
    let selector = format!("etcd_cluster={cluster}");
    let of_cluster = ListParams::default().labels(&selector);
    let members = restarts_of_cluster(sandbox, cluster).await?;
    let members: Vec<String> = members.into_iter().map(|it| it.0).collect();
    let pods = sandbox.api::<Pod>().list(&of_seed).await?;
    let claims = sandbox.api::<PersistentVolumeClaim>();
    let claims = claims.list(&of_cluster).await?;
    let services = sandbox.api::<Service>();
    let services = services.list(&of_cluster).await?;
    let mut left: Vec<String> = pods.iter().map(ResourceExt::name_any).collect();
    left.extend(claims.iter().map(ResourceExt::name_any));
    left.extend(services.iter().map(ResourceExt::name_any));
    let (of_it, client) = (format!("{cluster}-"), format!("{cluster}-client"));
    left.retain(|name| name.starts_with(&of_it) && *name != client && !members.contains(name));
    Ok(left)
}

pub(crate) async fn await_no_seed(sandbox: &Sandbox, cluster: &str) -> Result<()> {
    until(
        "all objects of the seed are deleted",
        DEADLINE,
        async || {
            let left = seed_objects(sandbox, cluster).await?;
            Ok(match left.as_slice() {
                [] => Poll::Done(()),
                _ => Poll::NotYet(left.join(", ")),
            })
        },
    )
    .await
}

/// Restores in place while a ResourceQuota rejects the PVC of the seed. The restore must fail and name the quota.
pub(crate) async fn running_cluster_without_quota(
    sandbox: &Sandbox,
    running: &RunningCluster,
) -> Result<()> {
    let quota = json!({ "metadata": { "name": "few" }, "spec": { "hard": { "persistentvolumeclaims": "3" } } });
    let quotas = sandbox.api::<ResourceQuota>();
    let quota: ResourceQuota = serde_json::from_value(quota)?;
    quotas.create(&PostParams::default(), &quota).await?;
    // The API server enforces the quota only after the quota controller has counted the PVCs.
    until("the quota is used up", DEADLINE, async || {
        let used = quotas
            .get("few")
            .await?
            .status
            .and_then(|status| status.used);
        let used = used.and_then(|mut used| used.remove("persistentvolumeclaims"));
        Ok(match used {
            Some(used) if used.0 == "3" => Poll::Done(()),
            used => Poll::NotYet(format!("{used:?}")),
        })
    })
    .await?;

    let manifest = in_place_restore_from(sandbox, "quota", &running.bucket, "etcd.backup", "")?;
    sandbox.apply(&manifest).await?;
    let field_named = "spec.pod.persistentVolumeClaimSpec";
    await_storage_missing(sandbox, "quota", &["exceeded quota: few", field_named]).await?;
    let restores = sandbox.objects(Kind::EtcdRestore);
    let failed = await_object(&restores, "quota", "failed", DEADLINE, |object| {
        field(object, "/status/phase") == "Failed" && has_failed_for(object, "StorageMissing")
    })
    .await?;
    let text = conditions_line(&failed);
    ensure!(text.contains("existing cluster is unchanged"), "{text}");
    Ok(())
}
