//! Nodes, the API server and DNS stop and start again. Members keep their identity and data, and a cluster serves
//! clients while it has a quorum.

use anyhow::{Context, Result, ensure};
use e2e::metrics::operator_pods;
use e2e::objects::node_of;
use e2e::{Sandbox, Testbed, Writer};
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use kube::api::DynamicObject;

use crate::all_pods_lost::{await_restarts, restarts, same_members};

/// The two clusters of this test: `durable` has volumes, and `plain` has none. The data of `plain` survives in its
/// pods, which restart with their node.
pub(crate) struct TwoClusters {
    pub(crate) plain: DynamicObject,
    pub(crate) durable: DynamicObject,
    pub(crate) pods: Vec<Pod>,
}

impl TwoClusters {
    /// Waits until both clusters have three members and no pending work.
    pub(crate) async fn of(sandbox: &Sandbox) -> Result<Self> {
        let plain = sandbox.await_members("plain", 3).await.context("plain")?;
        let durable = sandbox.await_members("durable", 3).await;
        let durable = durable.context("durable")?;
        let mut pods = sandbox.member_pods("plain").await?;
        pods.extend(sandbox.member_pods("durable").await?);
        Ok(Self {
            plain,
            durable,
            pods,
        })
    }

    /// Waits until both clusters are healthy. Ensures that their members have the names and IDs in `self`.
    pub(crate) async fn ensure_same_members(&self, sandbox: &Sandbox) -> Result<()> {
        let after = Self::of(sandbox).await?;
        same_members(&self.plain, &after.plain)?;
        same_members(&self.durable, &after.durable)
    }

    pub(crate) fn on(&self, node: &str) -> Vec<Pod> {
        let pods = self.pods.iter().filter(|pod| node_of(pod) == node);
        pods.cloned().collect()
    }
}

/// Waits for `count` more acknowledged writes of each client.
pub(crate) async fn serve(writers: &[Writer], count: usize) -> Result<()> {
    for writer in writers {
        writer.await_more(count).await?;
    }
    Ok(())
}

pub(crate) async fn operator(sandbox: &Sandbox) -> Result<Pod> {
    let pods = operator_pods(sandbox, "etcd-operator").await?;
    let first = pods.into_iter().next();
    first.context("the cluster operator has no pod")
}

async fn one_reboots(sandbox: &Sandbox, testbed: &Testbed<'_>, writers: &[Writer]) -> Result<()> {
    let before = TwoClusters::of(sandbox).await?;
    // A node without the operator is stopped, because the operator must report the loss.
    let operator = operator(sandbox).await?;
    let pods = sandbox.member_pods("plain").await?;
    let mut elsewhere = pods.iter().filter(|pod| node_of(pod) != node_of(&operator));
    let lost = elsewhere
        .next()
        .context("all members share a node with the operator")?;
    testbed.kill_node(node_of(lost)).await?;
    // The operator reports the loss before Kubernetes does, because the operator queries etcd.
    sandbox.await_unhealthy("plain", &lost.name_any()).await?;
    testbed.start_node(node_of(lost)).await?;
    await_restarts(sandbox, &before.on(node_of(lost))).await?;
    before.ensure_same_members(sandbox).await?;
    serve(writers, 10).await
}

/// Invariant 8: pods with and without volumes survive the restart of their nodes.
async fn all_reboot(sandbox: &Sandbox, testbed: &Testbed<'_>, writers: &[Writer]) -> Result<()> {
    let before = TwoClusters::of(sandbox).await?;
    let operator = operator(sandbox).await?;
    for node in testbed.nodes() {
        testbed.kill_node(&node).await?;
    }
    for node in testbed.nodes() {
        testbed.start_node(&node).await?;
    }
    await_restarts(sandbox, &before.pods).await?;
    await_restarts(sandbox, &[operator]).await?;
    before.ensure_same_members(sandbox).await?;
    serve(writers, 10).await
}

/// The restart of the kubelets restarts no container and changes no member.
async fn kubelets_restart(
    sandbox: &Sandbox,
    testbed: &Testbed<'_>,
    writers: &[Writer],
) -> Result<()> {
    let before = TwoClusters::of(sandbox).await?;
    for node in testbed.nodes() {
        testbed.stop_kubelet(&node).await?;
    }
    serve(writers, 20).await?;
    for node in testbed.nodes() {
        testbed.start_node(&node).await?;
    }
    before.ensure_same_members(sandbox).await?;
    let then: i32 = before.pods.iter().map(restarts).sum();
    let now: i32 = TwoClusters::of(sandbox)
        .await?
        .pods
        .iter()
        .map(restarts)
        .sum();
    ensure!(now == then, "{now} restarts, {then} before");
    serve(writers, 10).await
}

mod alone {
    use e2e::{Testbed, Writer, cluster_scenario, step};

    use super::{TwoClusters, all_reboot, kubelets_restart, one_reboots};
    use crate::api_outage::member_dies_during_outage;
    use crate::dns_cached::names_change_with_dns_cache;
    use crate::dns_down::pod_is_lost_during_outage;
    use crate::fixtures::{DURABLE, cluster, cluster_with};

    #[tokio::test]
    async fn members_survive_node_reboots_and_outages() {
        cluster_scenario("node_reboot", async |sandbox| {
            Testbed::with_faults(sandbox, async |testbed| {
                sandbox.apply(&cluster(&sandbox.env, "plain", 3)?).await?;
                let durable = cluster_with(&sandbox.env, "durable", 3, DURABLE)?;
                sandbox.apply(&durable).await?;
                TwoClusters::of(sandbox).await?;
                let writers = [
                    Writer::start(sandbox, "plain").await?,
                    Writer::start(sandbox, "durable").await?,
                ];
                let rebooted = one_reboots(sandbox, testbed, &writers);
                step("reboot a node", rebooted).await?;
                let restarted = kubelets_restart(sandbox, testbed, &writers);
                step("restart all kubelets", restarted).await?;
                let rebooted = all_reboot(sandbox, testbed, &writers);
                step("reboot all nodes", rebooted).await?;
                let outage = pod_is_lost_during_outage(sandbox, testbed, &writers);
                step("stop DNS", outage).await?;
                let outage = member_dies_during_outage(sandbox, testbed, &writers);
                step("stop the API server", outage).await?;
                let cached = names_change_with_dns_cache(sandbox, testbed, &writers);
                step("let DNS cache names", cached).await?;
                for (writer, cluster) in writers.into_iter().zip(["plain", "durable"]) {
                    let what =
                        format!("node reboots and outages, members of the cluster {cluster}");
                    writer.finish(&what).await?;
                }
                Ok(())
            })
            .await
        })
        .await;
    }
}
