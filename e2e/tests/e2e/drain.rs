//! An administrator drains a node. The PodDisruptionBudgets allow one eviction at a time, so the clusters keep their
//! quorum. `node_loss.rs` calls this function.

use anyhow::{Context, Result, ensure};
use e2e::objects::{Kind, await_object, members, node_of};
use e2e::wait::Poll;
use e2e::{DEADLINE, RollingCheck, Sandbox, Testbed, Writer, until};
use k8s_openapi::api::policy::v1::PodDisruptionBudget;

use crate::all_pods_lost::same_members;
use crate::fixtures::cluster;
use crate::node_loss::members_on;

/// Drains a node with two of three members of the cluster `durable`, and with all members of the cluster `packed`.
/// Without PodDisruptionBudgets, both clusters would lose their quorum.
pub(crate) async fn drain_keeps_quorum(sandbox: &Sandbox, testbed: &Testbed<'_>) -> Result<()> {
    let before = sandbox.await_members("durable", 3).await?;
    let node_with_two_members = node_with_two_members(sandbox, "durable").await?;
    let writer = pack(sandbox, testbed, &node_with_two_members).await?;
    let replaced = members_on(sandbox, "packed", &node_with_two_members).await?;
    ensure!(
        replaced.len() == 3,
        "only {replaced:?} are on {node_with_two_members}"
    );
    let moved = members_on(sandbox, "durable", &node_with_two_members).await?;
    let checks = [
        (
            RollingCheck::start(sandbox, "packed", 3).await?,
            replaced.len(),
        ),
        (
            RollingCheck::start(sandbox, "durable", 3).await?,
            moved.len(),
        ),
    ];
    drain(sandbox, &node_with_two_members).await?;
    // After the drain, the status may list deleted members until the operator reconciles the cluster, so the test
    // waits.
    let clusters = sandbox.objects(Kind::EtcdCluster);
    let what = "the members without volumes are replaced";
    await_object(&clusters, "packed", what, DEADLINE, |object| {
        !members(object)
            .iter()
            .any(|(name, _)| replaced.contains(name))
    })
    .await?;
    for cluster in ["packed", "durable"] {
        sandbox.await_members(cluster, 3).await?;
        let left = members_on(sandbox, cluster, &node_with_two_members).await?;
        ensure!(left.is_empty(), "{left:?} remain on the drained node");
    }
    for (check, expected) in checks {
        let ended = check.finish().await?;
        ensure!(
            ended == expected,
            "{ended} pods were terminated, expected {expected}"
        );
    }
    // Members with volumes have moved to another node, and have kept their names and IDs. The members without volumes
    // were replaced.
    same_members(&before, &sandbox.await_members("durable", 3).await?)?;
    sandbox
        .kubectl(&["uncordon", &node_with_two_members])
        .await?;
    writer.await_more(10).await?;
    writer.finish("drained members without volumes").await?;
    budget_as_before(sandbox).await
}

/// Creates a cluster without volumes whose members all run on this node, and starts a client that writes.
async fn pack(sandbox: &Sandbox, testbed: &Testbed<'_>, node: &str) -> Result<Writer> {
    let nodes = testbed.nodes();
    let others = nodes.iter().map(String::as_str);
    let others: Vec<&str> = others.filter(|other| *other != node).collect();
    sandbox
        .kubectl(&[&["cordon"][..], &others[..]].concat())
        .await?;
    sandbox.apply(&cluster(&sandbox.env, "packed", 3)?).await?;
    sandbox.await_members("packed", 3).await?;
    sandbox
        .kubectl(&[&["uncordon"][..], &others[..]].concat())
        .await?;
    Writer::start(sandbox, "packed").await
}

async fn node_with_two_members(sandbox: &Sandbox, cluster: &str) -> Result<String> {
    let pods = sandbox.member_pods(cluster).await?;
    let nodes: Vec<&str> = pods.iter().map(node_of).collect();
    nodes
        .iter()
        .find(|node| nodes.iter().filter(|other| other == node).count() > 1)
        .map(|node| (*node).to_owned())
        .with_context(|| format!("no node has two members: {nodes:?}"))
}

/// Drains the node as the Kubernetes documentation describes. `kubectl drain` retries evictions that a
/// PodDisruptionBudget denies.
async fn drain(sandbox: &Sandbox, node: &str) -> Result<()> {
    let args = ["drain", node, "--ignore-daemonsets"];
    let more = ["--delete-emptydir-data", "--timeout=300s"];
    sandbox
        .kubectl(&[&args[..], &more].concat())
        .await
        .map(drop)
}

async fn budget_as_before(sandbox: &Sandbox) -> Result<()> {
    until("each budget allows one disruption", DEADLINE, async || {
        let budgets = sandbox.api::<PodDisruptionBudget>();
        let budgets = budgets.list(&kube::api::ListParams::default()).await?;
        let allowed: Vec<Option<i32>> = budgets
            .iter()
            .map(|budget| budget.status.as_ref().map(|it| it.disruptions_allowed))
            .collect();
        Ok(if allowed == [Some(1), Some(1)] {
            Poll::Done(())
        } else {
            Poll::NotYet(format!("{allowed:?}"))
        })
    })
    .await
}
