//! A larger storage request enlarges all volumes without a restart of members.
//!
//! The volumes of the testbed are directories, which cannot grow, so the test sets the new capacity in the status of
//! the PVCs. If a StorageClass does not allow the growth, the API server rejects the request.

use anyhow::{Result, ensure};
use e2e::objects::{Kind, await_object, condition, field};
use e2e::wait::Poll;
use e2e::{DEADLINE, Sandbox, Writer, cluster_scenario, until};
use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Pod};
use kube::ResourceExt;
use kube::api::{ListParams, Patch, PatchParams};
use serde_json::json;

use crate::fixtures::cluster_with;
use crate::paused::all;
use crate::storage_class_change::{claims_with, with_class};

pub(crate) async fn claims(sandbox: &Sandbox) -> Result<Vec<PersistentVolumeClaim>> {
    let of_cluster = ListParams::default().labels("etcd_cluster=c");
    let claims = sandbox.api::<PersistentVolumeClaim>();
    Ok(claims.list(&of_cluster).await?.items)
}

pub(crate) fn requested(claim: &PersistentVolumeClaim) -> String {
    let spec = claim.spec.as_ref();
    let asked = spec.and_then(|spec| spec.resources.as_ref()?.requests.as_ref()?.get("storage"));
    asked.map(|asked| asked.0.clone()).unwrap_or_default()
}

pub(crate) async fn request_size(sandbox: &Sandbox, size: &str) -> Result<()> {
    let patch = json!({"spec": {"pod": {"persistentVolumeClaimSpec": {"resources": {"requests": {"storage": size}}}}}});
    let words = [
        "patch",
        "etcdcluster",
        "c",
        "--type=merge",
        "-p",
        &patch.to_string(),
    ];
    sandbox.kubectl(&words).await.map(drop)
}

#[tokio::test]
async fn larger_storage_request_grows_volumes_without_restart() {
    cluster_scenario("volume_growth", async |sandbox| {
        with_class(sandbox, "growing", true, async |class| {
            let manifest = cluster_with(&sandbox.env, "c", 3, &claims_with(class, "64Mi"))?;
            sandbox.apply(&manifest).await?;
            sandbox.await_members("c", 3).await?;
            let (pods, before) = (all::<Pod>(sandbox).await?, claims(sandbox).await?);
            let writer = Writer::start(sandbox, "c").await?;

            request_size(sandbox, "128Mi").await?;
            let clusters = sandbox.objects(Kind::EtcdCluster);
            await_object(
                &clusters,
                "c",
                "the growth is reported",
                DEADLINE,
                |object| {
                    let waits = field(object, "/status/waitingFor").as_str().unwrap_or("");
                    waits.matches("grows from 64Mi to 128Mi").count() == 3
                },
            )
            .await?;
            let api = sandbox.api::<PersistentVolumeClaim>();
            until("every PVC requests the new size", DEADLINE, async || {
                let asked: Vec<String> = claims(sandbox).await?.iter().map(requested).collect();
                Ok(if asked == ["128Mi"; 3] {
                    Poll::Done(())
                } else {
                    Poll::NotYet(format!("{asked:?}"))
                })
            })
            .await?;
            for claim in claims(sandbox).await? {
                let has = json!({"status": {"capacity": {"storage": "128Mi"}}});
                let params = PatchParams::default();
                api.patch_status(&claim.name_any(), &params, &Patch::Merge(&has))
                    .await?;
            }
            await_object(
                &clusters,
                "c",
                "the growth is complete",
                DEADLINE,
                |object| {
                    !field(object, "/status/waitingFor")
                        .as_str()
                        .unwrap_or("")
                        .contains("grows from")
                },
            )
            .await?;
            ensure!(all::<Pod>(sandbox).await? == pods, "a pod was recreated");
            let uids = |list: &[PersistentVolumeClaim]| -> Vec<_> {
                list.iter().map(ResourceExt::uid).collect()
            };
            ensure!(uids(&claims(sandbox).await?) == uids(&before));
            writer.await_more(10).await?;
            writer.finish("volume growth").await.map(drop)
        })
        .await
    })
    .await;
}

#[tokio::test]
async fn rejected_volume_growth_reports_remedy() {
    cluster_scenario("volume_growth_refused", async |sandbox| {
        with_class(sandbox, "fixed", false, async |class| {
            let manifest = cluster_with(&sandbox.env, "c", 1, &claims_with(class, "64Mi"))?;
            sandbox.apply(&manifest).await?;
            sandbox.await_members("c", 1).await?;
            let pods = all::<Pod>(sandbox).await?;
            request_size(sandbox, "128Mi").await?;
            let clusters = sandbox.objects(Kind::EtcdCluster);
            await_object(
                &clusters,
                "c",
                "the remedy is reported",
                DEADLINE,
                |object| {
                    condition(object, "Degraded").is_some_and(|found| {
                        let text = found["message"].as_str().unwrap_or("");
                        found["status"] == "True" && text.contains("allowVolumeExpansion: true")
                    })
                },
            )
            .await?;
            ensure!(all::<Pod>(sandbox).await? == pods, "a pod was recreated");
            // When the user sets the old size again, the operator must no longer report the cluster as degraded.
            request_size(sandbox, "64Mi").await?;
            until("Degraded=False", DEADLINE, async || {
                let object = clusters.get("c").await?;
                let found = condition(&object, "Degraded").cloned().unwrap_or_default();
                Ok(if found["status"] == "False" {
                    Poll::Done(())
                } else {
                    Poll::NotYet(found.to_string())
                })
            })
            .await
        })
        .await
    })
    .await;
}
