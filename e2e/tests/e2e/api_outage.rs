//! The API server is away while a member dies: clients notice neither, and the operator sees to it afterwards.

mod alone {
    use anyhow::Context;
    use e2e::metrics::operator_pods;
    use e2e::objects::{leader, node_of};
    use e2e::{Testbed, Writer, scenario};

    use crate::all_pods_lost::{await_restarts, same_members};
    use crate::fixtures::cluster;

    /// Invariant 1: an API server that does not answer is no reason for anything. The outage is longer than the
    /// operator's lease, so its process ends meanwhile, and a new one finds the member that died unseen.
    #[tokio::test]
    async fn a_member_that_dies_while_the_api_server_is_away_is_seen_to_afterwards() {
        scenario("api_outage", async |sandbox| {
            Testbed::breaking(sandbox, async |testbed| {
                sandbox.apply(&cluster(&sandbox.env, "c", 3)?).await?;
                let before = sandbox.await_members("c", 3).await?;
                let writer = Writer::start(sandbox, "c").await?;
                let operators = operator_pods(sandbox, "etcd-operator").await?;
                let operator = operators
                    .first()
                    .context("the cluster operator runs nowhere")?;
                // The leader, unless it shares the operator's node: then another.
                let mut pods = sandbox.member_pods("c").await?;
                pods.retain(|pod| node_of(pod) != node_of(operator));
                let leader = leader(&before)?;
                pods.sort_by_key(|pod| pod.metadata.name.as_deref() != Some(&leader));
                pods.truncate(1);
                let victim = pods
                    .first()
                    .context("all members run beside the operator")?;
                let name = victim.metadata.name.clone().unwrap_or_default();

                testbed.stop_daemon("kube-apiserver").await?;
                testbed.kill_node(node_of(victim)).await?;
                writer.await_more(50).await?;
                testbed.await_container_gone(operator).await?;
                // They go on to the end of it.
                writer.await_more(10).await?;
                testbed.start_daemon("kube-apiserver").await?;

                sandbox.await_unhealthy("c", &name).await?;
                testbed.start_node(node_of(victim)).await?;
                await_restarts(sandbox, &pods).await?;
                let after = sandbox.await_members("c", 3).await?;
                same_members(&before, &after)?;
                writer.await_more(10).await?;
                let what = "API server away while a member died";
                writer.finish(what).await.map(drop)
            })
            .await
        })
        .await;
    }
}
