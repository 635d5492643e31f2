//! `spec.paused`: the operator changes no object of the cluster, but updates the status.

use anyhow::{Result, ensure};
use e2e::objects::{Kind, await_object, condition, field, follower, members};
use e2e::{DEADLINE, Sandbox, Writer, cluster_scenario};
use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Pod, Service};
use kube::api::ListParams;
use kube::{Resource, ResourceExt};
use serde::de::DeserializeOwned;

use crate::fixtures::{DURABLE, cluster_with};

async fn pause(sandbox: &Sandbox, paused: bool) -> Result<()> {
    let patch = format!("{{\"spec\":{{\"paused\":{paused}}}}}");
    let words = ["patch", "etcdcluster", "c", "--type=merge", "-p", &patch];
    sandbox.kubectl(&words).await.map(drop)
}

/// The name and UID of each object of the cluster `c` with the kind `K`.
pub(crate) async fn all<K>(sandbox: &Sandbox) -> Result<Vec<String>>
where
    K: Resource<Scope = k8s_openapi::NamespaceResourceScope, DynamicType = ()>
        + DeserializeOwned
        + Clone
        + std::fmt::Debug,
{
    let selector = ListParams::default().labels("etcd_cluster=c");
    let list = sandbox.api::<K>().list(&selector).await?;
    let line = |one: &K| format!("{} {} {:?}", K::kind(&()), one.name_any(), one.uid());
    Ok(list.iter().map(line).collect())
}

async fn everything(sandbox: &Sandbox) -> Result<Vec<String>> {
    let mut found = all::<Pod>(sandbox).await?;
    found.extend(all::<PersistentVolumeClaim>(sandbox).await?);
    found.extend(all::<Service>(sandbox).await?);
    Ok(found)
}

#[tokio::test]
async fn operator_reports_but_does_not_change_paused_cluster() {
    cluster_scenario("paused_durable", async |sandbox| {
        let manifest = cluster_with(&sandbox.env, "c", 3, DURABLE)?;
        sandbox.apply(&manifest).await?;
        let before = sandbox.await_members("c", 3).await?;
        let writer = Writer::start(sandbox, "c").await?;
        let clusters = sandbox.objects(Kind::EtcdCluster);

        pause(sandbox, true).await?;
        await_object(
            &clusters,
            "c",
            "the pause is reported",
            DEADLINE,
            |object| {
                field(object, "/status/controlPaused") == true
                    && condition(object, "Progressing")
                        .is_some_and(|found| found["reason"] == "Paused")
            },
        )
        .await?;

        // While the cluster is paused, the test deletes the pod of a member, deletes the client Service, and sets a new
        // size.
        let lost = follower(&before)?;
        sandbox.lose_pod("c", &lost).await?;
        let ended = format!("pod/{lost}");
        sandbox
            .kubectl(&["wait", "--for=delete", &ended, "--timeout=300s"])
            .await?;
        sandbox
            .kubectl(&["delete", "service", "c-client", "--wait=true"])
            .await?;
        sandbox.scale("c", 5).await?;
        let found = everything(sandbox).await?;
        // When the status reports all three changes, the operator has reconciled the cluster. The operator must not
        // have changed any object.
        let seen = await_object(
            &clusters,
            "c",
            "all changes are reported",
            DEADLINE,
            |object| {
                let details = field(object, "/status/memberDetails").as_array();
                let down = details.is_some_and(|members| {
                    members
                        .iter()
                        .any(|member| member["name"] == lost.as_str() && member["healthy"] == false)
                });
                // The reason is `NoEndpoint`, because the members have a quorum, but clients cannot reach them
                // without the client Service.
                let available = condition(object, "Available");
                down && available.is_some_and(|found| found["reason"] == "NoEndpoint")
                    && field(object, "/status/observedGeneration").as_i64()
                        == object.metadata.generation
            },
        )
        .await?;
        let after = everything(sandbox).await?;
        ensure!(found == after, "before: {found:?}, after: {after:?}");
        ensure!(members(&seen).len() == 3, "{:?}", members(&seen));
        sandbox
            .await_event(Kind::EtcdCluster, "c", &[" Paused: "])
            .await?;

        pause(sandbox, false).await?;
        let after = sandbox.await_members("c", 5).await?;
        ensure!(field(&after, "/status/controlPaused") != true);
        ensure!(field(&after, "/status/clusterID") == field(&before, "/status/clusterID"));
        let names: Vec<String> = members(&after).into_iter().map(|(name, _)| name).collect();
        ensure!(names.contains(&lost), "{lost} is not a member: {names:?}");
        // The writer is restarted, because the recreated client Service has a new IP address.
        drop(writer);
        let writer = Writer::start(sandbox, "c").await?;
        writer.finish("pause and resume").await.map(drop)
    })
    .await;
}
