//! Nodes die with everything on them and come back: what ran there is there again, by itself.

mod alone {
    use anyhow::{Context, ensure};
    use e2e::metrics::operator_pods;
    use e2e::objects::node_of;
    use e2e::{Testbed, Writer, scenario};

    use crate::all_pods_lost::{await_restarts, restarts, same_members};
    use crate::fixtures::{DURABLE, cluster, cluster_with};

    /// Members without volumes: their data lies in the pod and outlives the node's restart with it.
    #[tokio::test]
    async fn a_node_that_reboots_brings_its_member_back() {
        scenario("node_reboot", async |sandbox| {
            Testbed::breaking(sandbox, async |testbed| {
                sandbox.apply(&cluster(&sandbox.env, "c", 3)?).await?;
                let before = sandbox.await_members("c", 3).await?;
                let writer = Writer::start(sandbox, "c").await?;

                // A node on which the cluster operator does not run: it is to tell what it sees.
                let operators = operator_pods(sandbox, "etcd-operator").await?;
                let operator = operators
                    .first()
                    .context("the cluster operator runs nowhere")?;
                let mut pods = sandbox.member_pods("c").await?;
                pods.retain(|pod| node_of(pod) != node_of(operator));
                pods.truncate(1);
                let lost = pods
                    .first()
                    .context("all members run beside the operator")?;
                let name = lost.metadata.name.clone().unwrap_or_default();
                testbed.kill_node(node_of(lost)).await?;
                // etcd is asked, not the kubelet, which is dead: the loss shows long before Kubernetes notices it.
                sandbox.await_unhealthy("c", &name).await?;
                testbed.start_node(node_of(lost)).await?;
                await_restarts(sandbox, &pods).await?;
                let after = sandbox.await_members("c", 3).await?;
                same_members(&before, &after)?;
                writer.await_more(10).await?;
                writer.finish("one node rebooted").await.map(drop)
            })
            .await
        })
        .await;
    }

    /// Invariant 8: with volumes and without, since a pod outlives its node's restart.
    #[tokio::test]
    async fn all_nodes_reboot_at_once_and_every_member_is_back_with_its_data() {
        scenario("all_reboot", async |sandbox| {
            Testbed::breaking(sandbox, async |testbed| {
                sandbox.apply(&cluster(&sandbox.env, "plain", 3)?).await?;
                let durable = cluster_with(&sandbox.env, "durable", 3, DURABLE)?;
                sandbox.apply(&durable).await?;
                let mut before = Vec::new();
                for name in ["plain", "durable"] {
                    let object = sandbox.await_members(name, 3).await?;
                    let writer = Writer::start(sandbox, name).await?;
                    before.push((name, object, sandbox.member_pods(name).await?, writer));
                }
                for node in testbed.nodes() {
                    testbed.kill_node(&node).await?;
                }
                for node in testbed.nodes() {
                    testbed.start_node(&node).await?;
                }
                for (name, object, pods, writer) in before {
                    await_restarts(sandbox, &pods).await?;
                    let after = sandbox.await_members(name, 3).await?;
                    same_members(&object, &after)?;
                    writer.await_more(10).await?;
                    let what = format!("all nodes rebooted, {name} members");
                    writer.finish(&what).await?;
                }
                Ok(())
            })
            .await
        })
        .await;
    }

    /// A kubelet that restarts leaves its containers alone, and so does the operator.
    #[tokio::test]
    async fn kubelets_that_restart_cost_nothing() {
        scenario("kubelets", async |sandbox| {
            Testbed::breaking(sandbox, async |testbed| {
                sandbox.apply(&cluster(&sandbox.env, "c", 3)?).await?;
                let before = sandbox.await_members("c", 3).await?;
                let writer = Writer::start(sandbox, "c").await?;
                let pods = sandbox.member_pods("c").await?;
                for node in testbed.nodes() {
                    testbed.stop_kubelet(&node).await?;
                }
                writer.await_more(20).await?;
                for node in testbed.nodes() {
                    testbed.start_node(&node).await?;
                }
                let after = sandbox.await_members("c", 3).await?;
                same_members(&before, &after)?;
                let now: i32 = sandbox.member_pods("c").await?.iter().map(restarts).sum();
                let then: i32 = pods.iter().map(restarts).sum();
                ensure!(now == then, "{now} restarts, {then} before");
                writer.await_more(10).await?;
                writer.finish("all kubelets restarted").await.map(drop)
            })
            .await
        })
        .await;
    }
}
