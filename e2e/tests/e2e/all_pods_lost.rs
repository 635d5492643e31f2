//! All pods or containers of a cluster fail at the same time. The members restart with their data, unless the data was
//! in the deleted pods.

use anyhow::{Context, Result, ensure};
use e2e::objects::{Kind, await_object, field, has_condition, is_ready, members};
use e2e::wait::Poll;
use e2e::{DEADLINE, Sandbox, Testbed, Writer, cluster_scenario, until};
use k8s_openapi::api::core::v1::Pod;
use kube::api::DynamicObject;

use crate::fixtures::{DURABLE, cluster, cluster_with};

/// Invariant 8: if all pods are lost, no data is lost while the volumes of a quorum exist.
#[tokio::test]
async fn losing_all_pods_keeps_data_on_volumes() {
    cluster_scenario("all_pods_lost", async |sandbox| {
        let manifest = cluster_with(&sandbox.env, "c", 3, DURABLE)?;
        sandbox.apply(&manifest).await?;
        let before = sandbox.await_members("c", 3).await?;
        // The test deletes the pods immediately, and then gracefully. In a graceful deletion, the leader has time to
        // transfer its leadership, and members wait for open requests of their clients.
        for (how, options) in [("immediately", &["--now"][..]), ("gracefully", &[])] {
            let writer = Writer::start(sandbox, "c").await?;
            let pods = sandbox.member_pods("c").await?;
            delete_all(sandbox, options).await?;
            await_other_pods(sandbox, &pods).await?;
            let after = sandbox.await_members("c", 3).await?;
            same_members(&before, &after)?;
            writer.await_more(10).await?;
            let what = format!("all pods deleted {how}, volumes kept");
            writer.finish(&what).await?;
        }
        Ok(())
    })
    .await;
}

/// Without a volume, the data of a member is in its pod, so the data survives if only the containers are killed.
#[tokio::test]
async fn killed_containers_restart_with_their_data() {
    cluster_scenario("all_containers", async |sandbox| {
        let testbed = Testbed::of(sandbox)?;
        sandbox.apply(&cluster(&sandbox.env, "c", 3)?).await?;
        let before = sandbox.await_members("c", 3).await?;
        let writer = Writer::start(sandbox, "c").await?;
        let pods = sandbox.member_pods("c").await?;
        testbed.kill_containers(&pods).await?;
        await_restarts(sandbox, &pods).await?;
        let after = sandbox.await_members("c", 3).await?;
        same_members(&before, &after)?;
        let uids = |pods: &[Pod]| -> Vec<Option<String>> {
            pods.iter().map(|pod| pod.metadata.uid.clone()).collect()
        };
        let now = sandbox.member_pods("c").await?;
        ensure!(uids(&now) == uids(&pods), "a pod was recreated");
        writer.await_more(10).await?;
        writer.finish("all containers killed").await.map(drop)
    })
    .await;
}

/// All pods of a cluster without volumes are deleted. The status reports the loss, and names an EtcdRestore as the
/// remedy.
#[tokio::test]
async fn loss_of_all_data_is_reported_and_starts_no_bootstrap() {
    cluster_scenario("nothing_left", async |sandbox| {
        sandbox.apply(&cluster(&sandbox.env, "c", 3)?).await?;
        sandbox.await_members("c", 3).await?;
        delete_all(sandbox, &["--now"]).await?;
        await_object(
            &sandbox.objects(Kind::EtcdCluster),
            "c",
            "QuorumLost",
            DEADLINE,
            |object| {
                // The first report of the lost quorum names no remedy. The operator names the EtcdRestore only after
                // the API server has removed the pods.
                let lost = e2e::objects::condition(object, "Degraded").is_some_and(|c| {
                    let message = c["message"].as_str().unwrap_or_default();
                    c["status"] == "True"
                        && c["reason"] == "QuorumLost"
                        && message.contains("EtcdRestore")
                });
                lost && has_condition(object, "Available", "False")
            },
        )
        .await?;
        // Invariant 7: the operator must not bootstrap the cluster again.
        tokio::time::sleep(std::time::Duration::from_secs(5)).await;
        let pods = sandbox.member_pods("c").await?;
        ensure!(pods.is_empty(), "{} pods were created", pods.len());
        Ok(())
    })
    .await;
}

/// Waits until new, ready pods have replaced all pods in `before`. Polls the pods and not the EtcdCluster, because the
/// EtcdCluster's status may change and change back between two polls.
async fn await_other_pods(sandbox: &Sandbox, before: &[Pod]) -> Result<()> {
    let old: Vec<_> = before.iter().map(|pod| &pod.metadata.uid).collect();
    until("every member has a new pod", DEADLINE, async || {
        let pods = sandbox.member_pods("c").await?;
        let new = |pod: &&Pod| is_ready(pod) && !old.contains(&&pod.metadata.uid);
        let new = pods.iter().filter(new).count();
        Ok(if new == before.len() && new == pods.len() {
            Poll::Done(())
        } else {
            Poll::NotYet(format!("{new} of {} pods are new and ready", pods.len()))
        })
    })
    .await
}

async fn delete_all(sandbox: &Sandbox, options: &[&str]) -> Result<()> {
    let all = ["delete", "pods", "-l", "etcd_cluster=c", "--wait=false"];
    sandbox
        .kubectl(&[&all[..], options].concat())
        .await
        .map(drop)
}

/// Ensures that the cluster ID, and the names and IDs of the members, are the same in both statuses.
pub(crate) fn same_members(before: &DynamicObject, after: &DynamicObject) -> Result<()> {
    let sorted = |object| {
        let mut members = members(object);
        members.sort();
        members
    };
    let (expected, found) = (sorted(before), sorted(after));
    ensure!(
        found == expected,
        "members before: {expected:?}, after: {found:?}"
    );
    ensure!(field(after, "/status/clusterID") == field(before, "/status/clusterID"));
    Ok(())
}

pub(crate) fn restarts(pod: &Pod) -> i32 {
    let statuses = pod
        .status
        .as_ref()
        .and_then(|status| status.container_statuses.as_ref());
    statuses
        .into_iter()
        .flatten()
        .map(|container| container.restart_count)
        .sum()
}

/// Waits until the containers of all pods in `before` have restarted.
pub(crate) async fn await_restarts(sandbox: &Sandbox, before: &[Pod]) -> Result<()> {
    until("the containers have restarted", DEADLINE, async || {
        for old in before {
            let name = old.metadata.name.as_deref().unwrap_or_default();
            let new = sandbox.api::<Pod>().get_opt(name).await?;
            let new = new.with_context(|| format!("{name} is deleted"))?;
            if restarts(&new) <= restarts(old) {
                return Ok(Poll::NotYet(format!("{name} has not restarted")));
            }
        }
        Ok(Poll::Done(()))
    })
    .await
}
