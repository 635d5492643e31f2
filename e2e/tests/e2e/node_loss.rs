//! A node dies and does not come back: after `memberReplacement.after` its members are replaced elsewhere.

mod alone {
    use anyhow::{Context, Result, ensure};
    use e2e::objects::{field, leader, node_of, ready_members};
    use e2e::wait::Look;
    use e2e::{PATIENCE, Sandbox, Testbed, Writer, cluster_scenario, until};
    use k8s_openapi::api::core::v1::Pod;
    use kube::api::ListParams;

    use crate::fixtures::{DURABLE, cluster_with};
    use crate::member_loss::await_one_volume_a_member;

    const SOON: &str = "  memberReplacement: {after: 5s}\n";

    async fn members_on(sandbox: &Sandbox, cluster: &str, node: &str) -> Result<Vec<String>> {
        let pods = sandbox.member_pods(cluster).await?.into_iter();
        Ok(pods
            .filter(|pod| node_of(pod) == node)
            .filter_map(|pod| pod.metadata.name)
            .collect())
    }

    async fn operator_node(sandbox: &Sandbox) -> Result<String> {
        let selector = ListParams::default().labels("app.kubernetes.io/component=etcd-operator");
        let pods = sandbox.api::<Pod>().list(&selector).await?;
        let pod = pods.into_iter().next_back().context("no operator")?;
        Ok(node_of(&pod).to_owned())
    }

    /// The leader's node, unless the operator runs there: then another with a member of each.
    #[tokio::test]
    async fn members_on_a_node_that_stays_dead_are_replaced_on_those_left() {
        cluster_scenario("node_loss", async |sandbox| {
            Testbed::breaking(sandbox, async |testbed| {
                let manifest = cluster_with(&sandbox.env, "plain", 3, SOON)?;
                sandbox.apply(&manifest).await?;
                let spec = format!("{SOON}{DURABLE}");
                let manifest = cluster_with(&sandbox.env, "durable", 3, &spec)?;
                sandbox.apply(&manifest).await?;
                let plain = sandbox.await_members("plain", 3).await?;
                let durable = sandbox.await_members("durable", 3).await?;
                let operator = operator_node(sandbox).await?;
                let mut nodes = testbed.nodes();
                nodes.retain(|node| *node != operator);
                let leader = sandbox.api::<Pod>().get(&leader(&plain)?).await?;
                nodes.sort_by_key(|node| node != node_of(&leader));
                let mut found = None;
                for node in &nodes {
                    let plain = members_on(sandbox, "plain", node).await?;
                    let durable = members_on(sandbox, "durable", node).await?;
                    if (plain.len(), durable.len()) == (1, 1) && found.is_none() {
                        found = Some((node, [plain, durable].concat()));
                    }
                }
                let (node, lost) = found.context("no node has one member of each")?;
                let writers = [
                    Writer::start(sandbox, "plain").await?,
                    Writer::start(sandbox, "durable").await?,
                ];

                testbed.kill_node(node).await?;
                for ((name, before), lost) in [("plain", &plain), ("durable", &durable)]
                    .into_iter()
                    .zip(&lost)
                {
                    sandbox.await_unready(name, lost).await?;
                    let after = sandbox.await_members(name, 3).await.context(name)?;
                    ensure!(!ready_members(&after).contains(lost));
                    ensure!(
                        field(&after, "/status/clusterID") == field(before, "/status/clusterID")
                    );
                }
                for (writer, name) in writers.into_iter().zip(["plain", "durable"]) {
                    writer.await_more(10).await?;
                    writer
                        .finish(&format!("a node lost, {name} members"))
                        .await?;
                }

                // It comes back after all: what it still has of the old members goes.
                testbed.start_node(node).await?;
                for (name, lost) in ["plain", "durable"].into_iter().zip(&lost) {
                    await_pod_gone(sandbox, lost).await?;
                    sandbox.await_members(name, 3).await?;
                }
                let members = ready_members(&sandbox.await_members("durable", 3).await?);
                await_one_volume_a_member(sandbox, &members).await
            })
            .await
        })
        .await;
    }

    async fn await_pod_gone(sandbox: &Sandbox, name: &str) -> Result<()> {
        until(
            &format!("the old pod {name} is gone"),
            PATIENCE,
            async || {
                let pod = sandbox.api::<Pod>().get_opt(name).await?;
                Ok(match pod {
                    None => Look::Done(()),
                    Some(pod) => Look::NotYet(format!("{:?}", pod.status.and_then(|it| it.phase))),
                })
            },
        )
        .await
    }
}
