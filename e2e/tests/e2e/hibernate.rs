//! `spec.hibernate`: the operator deletes the pods and keeps volumes and Services. A resumed cluster has its old data.

use anyhow::{Result, ensure};
use e2e::metrics::Page;
use e2e::objects::{Kind, await_object, condition, field, has_condition};
use e2e::wait::Poll;
use e2e::{DEADLINE, Sandbox, Writer, cluster_scenario, until};
use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Pod, Service};

use crate::all_pods_lost::same_members;
use crate::fixtures::{DURABLE, cluster_with};
use crate::paused::all;

async fn hibernate(sandbox: &Sandbox, hibernate: bool) -> Result<()> {
    let patch = format!("{{\"spec\":{{\"hibernate\":{hibernate}}}}}");
    let words = ["patch", "etcdcluster", "c", "--type=merge", "-p", &patch];
    sandbox.kubectl(&words).await.map(drop)
}

async fn volumes_and_services(sandbox: &Sandbox) -> Result<Vec<String>> {
    let mut found = all::<PersistentVolumeClaim>(sandbox).await?;
    found.extend(all::<Service>(sandbox).await?);
    Ok(found)
}

#[tokio::test]
async fn hibernated_cluster_resumes_with_its_data() {
    cluster_scenario("hibernate", async |sandbox| {
        let manifest = cluster_with(&sandbox.env, "c", 3, DURABLE)?;
        sandbox.apply(&manifest).await?;
        let before = sandbox.await_members("c", 3).await?;
        let writer = Writer::start(sandbox, "c").await?;
        writer.await_more(20).await?;
        let objects = volumes_and_services(sandbox).await?;

        hibernate(sandbox, true).await?;
        let clusters = sandbox.objects(Kind::EtcdCluster);
        let what = "the cluster is hibernated and not degraded";
        let asleep = await_object(&clusters, "c", what, DEADLINE, |object| {
            field(object, "/status/phase") == "Hibernated"
                && condition(object, "Available").is_some_and(|found| {
                    found["status"] == "False" && found["reason"] == "Hibernated"
                })
                && has_condition(object, "Degraded", "False")
                && has_condition(object, "Recovering", "False")
        })
        .await?;
        ensure!(field(&asleep, "/status/clusterID") == field(&before, "/status/clusterID"));
        ensure!(all::<Pod>(sandbox).await?.is_empty());
        ensure!(
            volumes_and_services(sandbox).await? == objects,
            "volumes or Services were deleted"
        );

        // A restarted operator must not change the hibernated cluster.
        sandbox
            .kubectl(&[
                "delete",
                "pod",
                "-l",
                "app.kubernetes.io/component=etcd-operator",
                "--wait=true",
            ])
            .await?;
        sandbox.await_operators().await?;
        until(
            "the new process has reconciled the cluster",
            DEADLINE,
            async || {
                let page = Page::of_operator(sandbox, "etcd-operator").await?;
                let reconciles = page.sum("etcd_operator_cluster_reconcile_duration_count", "");
                Ok(if reconciles > 0.5 {
                    Poll::Done(())
                } else {
                    Poll::NotYet("no reconcile".to_owned())
                })
            },
        )
        .await?;
        let pods = all::<Pod>(sandbox).await?;
        ensure!(pods.is_empty(), "{pods:?}");

        hibernate(sandbox, false).await?;
        let after = sandbox.await_members("c", 3).await?;
        same_members(&before, &after)?;
        await_object(&clusters, "c", "phase Running", DEADLINE, |object| {
            field(object, "/status/phase") == "Running"
        })
        .await?;
        ensure!(
            volumes_and_services(sandbox).await? == objects,
            "volumes or Services changed"
        );
        writer.await_more(10).await?;
        writer.finish("hibernation").await.map(drop)
    })
    .await;
}
