//! `size` changes, and the data stays.

use anyhow::{Context, Result, ensure};
use e2e::{Keyspace, Sandbox, scenario};
use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Service};
use kube::api::ListParams;

use crate::fixtures::{DURABLE, cluster, cluster_with};

const KEYS: usize = 500;

async fn scale(sandbox: &Sandbox, size: usize) -> Result<()> {
    sandbox
        .kubectl(&["scale", "etcdcluster/c", &format!("--replicas={size}")])
        .await?;
    Ok(())
}

async fn verify(sandbox: &Sandbox, revision: i64) -> Result<()> {
    let keys = Keyspace::of_cluster(&sandbox.env, &sandbox.namespace, "c").await?;
    ensure!(keys.verify("kept/", KEYS).await? >= revision);
    Ok(())
}

#[tokio::test]
async fn grows_and_shrinks_by_kubectl_scale() {
    scenario("scale", async |sandbox| {
        sandbox
            .apply(&cluster_with(&sandbox.env, "c", 1, DURABLE)?)
            .await?;
        sandbox.await_members("c", 1).await?;
        let keys = Keyspace::of_cluster(&sandbox.env, &sandbox.namespace, "c").await?;
        let revision = keys.fill("kept/", KEYS, |_| ()).await?;
        for size in [3, 5, 3, 1] {
            scale(sandbox, size).await?;
            sandbox
                .await_members("c", size)
                .await
                .with_context(|| format!("towards {size}"))?;
            verify(sandbox, revision).await?;
        }
        // What removed members left is gone: a volume left by a removed member could be taken for a member's.
        e2e::until(
            "one volume and three Services are left",
            e2e::PATIENCE,
            async || {
                let selector = ListParams::default().labels("etcd_cluster=c");
                let volumes = sandbox
                    .api::<PersistentVolumeClaim>()
                    .list(&selector)
                    .await?
                    .items
                    .len();
                let services = sandbox.api::<Service>().list(&selector).await?.items.len();
                Ok(if (volumes, services) == (1, 3) {
                    e2e::wait::Look::Done(())
                } else {
                    e2e::wait::Look::NotYet(format!("{volumes} volumes, {services} Services"))
                })
            },
        )
        .await
    })
    .await;
}

#[tokio::test]
async fn a_target_that_changes_midway_is_reached() {
    scenario("scale_midway", async |sandbox| {
        sandbox.apply(&cluster(&sandbox.env, "c", 3)?).await?;
        sandbox.await_members("c", 3).await?;
        let keys = Keyspace::of_cluster(&sandbox.env, &sandbox.namespace, "c").await?;
        let revision = keys.fill("kept/", KEYS, |_| ()).await?;
        scale(sandbox, 7).await?;
        e2e::until("a fourth pod", e2e::PATIENCE, async || {
            let count = sandbox.member_pods("c").await?.len();
            Ok(if count > 3 {
                e2e::wait::Look::Done(())
            } else {
                e2e::wait::Look::NotYet(format!("{count}"))
            })
        })
        .await?;
        scale(sandbox, 3).await?;
        sandbox.await_members("c", 3).await?;
        ensure!(sandbox.member_pods("c").await?.len() == 3);
        verify(sandbox, revision).await
    })
    .await;
}
