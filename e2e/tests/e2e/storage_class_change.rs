//! The spec names another StorageClass. The operator replaces members one at a time by members with a volume of this
//! class. If the class changes during a bootstrap, the operator repeats the bootstrap with new members.

use anyhow::{Context, Result, ensure};
use e2e::objects::{Kind, field, ready_members};
use e2e::wait::Poll;
use e2e::{DEADLINE, RollingCheck, Sandbox, Writer, cluster_scenario, until};
use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use k8s_openapi::api::storage::v1::StorageClass;
use kube::api::{Api, DeleteParams, ListParams, PostParams};
use serde_json::json;

use crate::fixtures::{DURABLE, cluster_with};
use crate::member_loss::await_one_volume_per_member;

/// Creates a StorageClass like the default class of the testbed, and deletes it after `body`. The class is
/// cluster-scoped, so its name contains the namespace.
pub(crate) async fn with_class(
    sandbox: &Sandbox,
    name: &str,
    may_grow: bool,
    body: impl AsyncFnOnce(&str) -> Result<()>,
) -> Result<()> {
    let classes: Api<StorageClass> = Api::all(sandbox.client.clone());
    let standard = classes
        .get("standard")
        .await
        .context("read the default StorageClass of the testbed")?;
    let name = format!("{name}-{}", sandbox.namespace);
    let class: StorageClass = serde_json::from_value(json!({
        "metadata": {"name": name},
        "provisioner": standard.provisioner,
        "reclaimPolicy": "Delete",
        "volumeBindingMode": "Immediate",
        "allowVolumeExpansion": may_grow,
    }))?;
    classes.create(&PostParams::default(), &class).await?;
    let outcome = body(&name).await;
    classes.delete(&name, &DeleteParams::default()).await?;
    outcome
}

/// Lines under `spec` that request volumes of this class and size.
pub(crate) fn claims_with(class: &str, size: &str) -> String {
    format!(
        "  pod:\n    persistentVolumeClaimSpec:\n      storageClassName: {class}\n      \
         accessModes: [ReadWriteOnce]\n      resources: {{requests: {{storage: {size}}}}}\n"
    )
}

/// The condition `Degraded` of the EtcdCluster `c` as text.
async fn degraded(sandbox: &Sandbox) -> Result<String> {
    let object = sandbox.objects(Kind::EtcdCluster).get("c").await?;
    let conditions = field(&object, "/status/conditions");
    let all = conditions.as_array().into_iter().flatten();
    let mut found = all.filter(|condition| condition["type"] == "Degraded");
    Ok(found.next().map(ToString::to_string).unwrap_or_default())
}

#[tokio::test]
async fn cluster_forms_after_storage_class_is_corrected() {
    cluster_scenario("storage_class_missing", async |sandbox| {
        let manifest =
            |class: &str| cluster_with(&sandbox.env, "c", 3, &claims_with(class, "64Mi"));
        sandbox.apply(&manifest("nowhere")?).await?;
        until("the missing class is reported", DEADLINE, async || {
            let found = degraded(sandbox).await?;
            let parts = ["\"True\"", "StorageMissing", "StorageClass nowhere"];
            Ok(if parts.iter().all(|part| found.contains(part)) {
                Poll::Done(())
            } else {
                Poll::NotYet(found)
            })
        })
        .await?;
        sandbox.apply(&manifest("standard")?).await?;
        let object = sandbox.await_members("c", 3).await?;
        await_one_volume_per_member(sandbox, &ready_members(&object)).await
    })
    .await;
}

#[tokio::test]
async fn storage_class_change_replaces_members_one_by_one() {
    cluster_scenario("storage_class_change", async |sandbox| {
        with_class(sandbox, "other", false, async |class| {
            let manifest = cluster_with(&sandbox.env, "c", 3, DURABLE)?;
            sandbox.apply(&manifest).await?;
            let before = sandbox.await_members("c", 3).await?;
            let writer = Writer::start(sandbox, "c").await?;
            let check = RollingCheck::start(sandbox, "c", 3).await?;
            let patch = json!({"spec": {"pod": {"persistentVolumeClaimSpec": {"storageClassName": class}}}});
            let patch = patch.to_string();
            let words = ["patch", "etcdcluster", "c", "--type=merge", "-p", &patch];
            sandbox.kubectl(&words).await?;

            let claims = sandbox.api::<PersistentVolumeClaim>();
            let of_cluster = ListParams::default().labels("etcd_cluster=c");
            until("every volume has the new class", DEADLINE, async || {
                let found: Vec<String> = claims
                    .list(&of_cluster)
                    .await?
                    .into_iter()
                    .filter_map(|claim| claim.spec?.storage_class_name)
                    .collect();
                Ok(if found.len() == 3 && found.iter().all(|one| one == class) {
                    Poll::Done(())
                } else {
                    Poll::NotYet(format!("{found:?}"))
                })
            })
            .await?;
            let after = sandbox.await_members("c", 3).await?;
            let ended = check.finish().await?;
            ensure!(ended == 3, "{ended} pods were terminated");
            ensure!(field(&after, "/status/clusterID") == field(&before, "/status/clusterID"));
            let (old, new) = (ready_members(&before), ready_members(&after));
            ensure!(!new.iter().any(|member| old.contains(member)), "{old:?} {new:?}");
            await_one_volume_per_member(sandbox, &new).await?;
            writer.await_more(10).await?;
            writer.finish("changed StorageClass").await.map(drop)
        })
        .await
    })
    .await;
}
