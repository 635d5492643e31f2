//! A member fails while the API server is stopped. The cluster serves clients, and the operator repairs the member
//! afterwards. `node_reboot.rs` calls this function.

use anyhow::{Context, Result};
use e2e::objects::{leader, node_of};
use e2e::{Sandbox, Testbed, Writer};
use kube::ResourceExt;

use crate::all_pods_lost::await_restarts;
use crate::node_reboot::{TwoClusters, operator, serve};

/// Invariant 1: without the API server, the operator changes nothing. The outage is longer than the validity of the
/// operator's Lease, so the operator exits. Its next process must find the failed member.
pub(crate) async fn member_dies_during_outage(
    sandbox: &Sandbox,
    testbed: &Testbed<'_>,
    writers: &[Writer],
) -> Result<()> {
    let before = TwoClusters::of(sandbox).await?;
    let operator = operator(sandbox).await?;
    // The victim is the leader, unless the leader is on the operator's node.
    let mut pods = sandbox.member_pods("plain").await?;
    pods.retain(|pod| node_of(pod) != node_of(&operator));
    let leader = leader(&before.plain)?;
    pods.sort_by_key(|pod| pod.name_any() != leader);
    let victim = pods
        .first()
        .context("all members share a node with the operator")?;

    testbed.stop_daemon("kube-apiserver").await?;
    testbed.kill_node(node_of(victim)).await?;
    serve(writers, 50).await?;
    testbed.await_containers_stopped(&operator).await?;
    // The cluster must serve clients while neither the API server nor the operator runs.
    serve(writers, 10).await?;
    testbed.start_daemon("kube-apiserver").await?;

    sandbox.await_unhealthy("plain", &victim.name_any()).await?;
    testbed.start_node(node_of(victim)).await?;
    await_restarts(sandbox, &before.on(node_of(victim))).await?;
    before.ensure_same_members(sandbox).await?;
    serve(writers, 10).await
}
