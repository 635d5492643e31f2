//! A node dies with everything on it and comes back: what ran there is there again, by itself.

mod alone {
    use anyhow::{Context, Result, ensure};
    use e2e::objects::{Kind, await_object, field, ready_members};
    use e2e::wait::Look;
    use e2e::{Keyspace, PATIENCE, Sandbox, scenario, until};
    use k8s_openapi::api::core::v1::Pod;
    use kube::api::ListParams;
    use tokio::process::Command;

    use crate::fixtures::cluster;

    const KEYS: usize = 500;

    /// `cargo xtask testbed node <what> <node>`.
    async fn node(sandbox: &Sandbox, what: &str, node: &str) -> Result<()> {
        let xtask = sandbox
            .env
            .xtask
            .as_ref()
            .context("E2E_XTASK is not set: nodes can only be broken on the testbed")?;
        let output = Command::new(xtask)
            .args(["testbed", "node", what, node])
            .output()
            .await
            .with_context(|| xtask.display().to_string())?;
        ensure!(
            output.status.success(),
            "testbed node {what} {node}: {}",
            String::from_utf8_lossy(&output.stderr)
        );
        Ok(())
    }

    async fn operator_node(sandbox: &Sandbox) -> Result<String> {
        let selector = ListParams::default().labels("app.kubernetes.io/component=etcd-operator");
        let pods = sandbox.api::<Pod>().list(&selector).await?;
        let mut nodes = pods.into_iter().filter_map(|pod| pod.spec?.node_name);
        nodes
            .next_back()
            .context("the cluster operator runs nowhere")
    }

    fn restarts(pod: &Pod) -> i32 {
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

    /// Members without volumes: their data lies in the pod and outlives the node's restart with it.
    #[tokio::test]
    async fn a_node_that_reboots_brings_its_member_back() {
        scenario("node_reboot", async |sandbox| {
            sandbox.apply(&cluster(&sandbox.env, "c", 3)?).await?;
            let before = sandbox.await_members("c", 3).await?;
            let keys = Keyspace::of_cluster(&sandbox.env, &sandbox.namespace, "c").await?;
            let revision = keys.fill("kept/", KEYS, |_| ()).await?;
            drop(keys);

            // A node on which the cluster operator does not run: it is to tell what it sees.
            let operator = operator_node(sandbox).await?;
            let (name, place) = sandbox
                .member_pods("c")
                .await?
                .into_iter()
                .filter_map(|pod| Some((pod.metadata.name?, pod.spec?.node_name?)))
                .find(|(_, node)| *node != operator)
                .context("all members run beside the operator")?;
            node(sandbox, "kill", &place).await?;
            // etcd is asked, not the kubelet, which is dead: the loss shows long before Kubernetes notices it.
            let clusters = sandbox.objects(Kind::EtcdCluster);
            let seen = await_object(&clusters, "c", "the loss is seen", PATIENCE, |object| {
                let details = field(object, "/status/memberDetails");
                details.as_array().is_some_and(|members| {
                    members
                        .iter()
                        .any(|member| member["name"] == name.as_str() && member["healthy"] == false)
                })
            })
            .await;
            // Whatever comes out, the node comes back: other tests need it.
            node(sandbox, "start", &place).await?;
            seen?;
            until(
                "the member's container has restarted",
                PATIENCE,
                async || {
                    let pods = sandbox.member_pods("c").await?;
                    let pod = pods
                        .iter()
                        .find(|pod| pod.metadata.name.as_deref() == Some(&name))
                        .with_context(|| format!("{name} is gone"))?;
                    Ok(match restarts(pod) {
                        0 => Look::NotYet("no restart yet".to_owned()),
                        _ => Look::Done(()),
                    })
                },
            )
            .await?;
            let after = sandbox.await_members("c", 3).await?;
            ensure!(ready_members(&after).contains(&name), "{name} was replaced");
            ensure!(field(&after, "/status/clusterID") == field(&before, "/status/clusterID"));
            let keys = Keyspace::of_cluster(&sandbox.env, &sandbox.namespace, "c").await?;
            ensure!(keys.verify("kept/", KEYS).await? >= revision);
            Ok(())
        })
        .await;
    }
}
