//! A node fails permanently. After `memberReplacement.after`, the operator replaces the members on this node by new
//! members on other nodes.

use anyhow::{Context, Result, bail, ensure};
use e2e::objects::{field, leader, node_of, ready_members};
use e2e::wait::Poll;
use e2e::{DEADLINE, Sandbox, Testbed, Writer, until};
use k8s_openapi::api::core::v1::Pod;
use kube::api::DynamicObject;

use crate::member_loss::await_one_volume_per_member;
use crate::node_reboot::{TwoClusters, operator, serve};

const REPLACE_AFTER_5S: &str = "  memberReplacement: {after: 5s}\n";

/// The members of a cluster that run on this node.
pub(crate) async fn members_on(
    sandbox: &Sandbox,
    cluster: &str,
    node: &str,
) -> Result<Vec<String>> {
    let pods = sandbox.member_pods(cluster).await?.into_iter();
    Ok(pods
        .filter(|pod| node_of(pod) == node)
        .filter_map(|pod| pod.metadata.name)
        .collect())
}

/// Chooses a node with a member of each cluster, and returns the node and these members. Prefers the node of the leader
/// of `plain`, and excludes the operator's node.
async fn node_with_both(
    sandbox: &Sandbox,
    testbed: &Testbed<'_>,
    plain: &DynamicObject,
) -> Result<(String, [String; 2])> {
    let operator = operator(sandbox).await?;
    let mut nodes = testbed.nodes();
    nodes.retain(|node| node != node_of(&operator));
    let leader = sandbox.api::<Pod>().get(&leader(plain)?).await?;
    nodes.sort_by_key(|node| node != node_of(&leader));
    for node in nodes {
        let plain = members_on(sandbox, "plain", &node).await?;
        let durable = members_on(sandbox, "durable", &node).await?;
        if let ([plain], [durable]) = (&plain[..], &durable[..]) {
            return Ok((node, [plain.clone(), durable.clone()]));
        }
    }
    bail!("no node has one member of each cluster")
}

async fn node_stays_down(
    sandbox: &Sandbox,
    testbed: &Testbed<'_>,
    writers: &[Writer],
) -> Result<()> {
    let before = TwoClusters::of(sandbox).await?;
    let (node, lost) = node_with_both(sandbox, testbed, &before.plain).await?;
    testbed.kill_node(&node).await?;
    let clusters = [("plain", &before.plain), ("durable", &before.durable)];
    for ((name, before), lost) in clusters.into_iter().zip(&lost) {
        sandbox.await_unready(name, lost).await?;
        let after = sandbox.await_members(name, 3).await.context(name)?;
        ensure!(!ready_members(&after).contains(lost));
        ensure!(field(&after, "/status/clusterID") == field(before, "/status/clusterID"));
    }
    serve(writers, 10).await?;

    // When the node has started again, the operator must delete the pods of the replaced members.
    testbed.start_node(&node).await?;
    for lost in &lost {
        await_pod_deleted(sandbox, lost).await?;
    }
    let after = TwoClusters::of(sandbox).await?;
    await_one_volume_per_member(sandbox, &ready_members(&after.durable)).await
}

async fn await_pod_deleted(sandbox: &Sandbox, name: &str) -> Result<()> {
    let what = format!("the old pod {name} is deleted");
    until(&what, DEADLINE, async || {
        let pod = sandbox.api::<Pod>().get_opt(name).await?;
        Ok(match pod {
            None => Poll::Done(()),
            Some(pod) => Poll::NotYet(format!("{:?}", pod.status.and_then(|it| it.phase))),
        })
    })
    .await
}

mod alone {
    use e2e::{Testbed, Writer, cluster_scenario, step};

    use super::{REPLACE_AFTER_5S, TwoClusters, node_stays_down};
    use crate::drain::drain_keeps_quorum;
    use crate::fixtures::{DURABLE, cluster_with};

    #[tokio::test]
    async fn members_move_off_dead_and_drained_nodes() {
        cluster_scenario("node_loss", async |sandbox| {
            Testbed::with_faults(sandbox, async |testbed| {
                let manifest = cluster_with(&sandbox.env, "plain", 3, REPLACE_AFTER_5S)?;
                sandbox.apply(&manifest).await?;
                let spec = format!("{REPLACE_AFTER_5S}{DURABLE}");
                let manifest = cluster_with(&sandbox.env, "durable", 3, &spec)?;
                sandbox.apply(&manifest).await?;
                TwoClusters::of(sandbox).await?;
                let writers = [
                    Writer::start(sandbox, "plain").await?,
                    Writer::start(sandbox, "durable").await?,
                ];
                let replaced = node_stays_down(sandbox, testbed, &writers);
                step("lose a node", replaced).await?;
                let [plain, durable] = writers;
                plain.finish("lost node, members without volumes").await?;
                sandbox.delete_cluster("plain").await?;

                // The test restores the default of `memberReplacement`. With the short time that it set before, the
                // operator could replace a member while the member moves to another node.
                let manifest = cluster_with(&sandbox.env, "durable", 3, DURABLE)?;
                sandbox.apply(&manifest).await?;
                step("drain a node", drain_keeps_quorum(sandbox, testbed)).await?;
                durable.await_more(10).await?;
                let what = "lost and drained nodes, members with volumes";
                durable.finish(what).await.map(drop)
            })
            .await
        })
        .await;
    }
}
