//! The DNS of the Kubernetes cluster is stopped, as a step of `node_reboot.rs`. During the outage:
//!
//! - Members keep their connections. Clients that are connected or know an IP address are served, even if a follower
//!   is lost.
//! - The operator stays ready, and does not change members to which it cannot connect.
//! - If a pod is lost, the operator recreates it at once on its volume, because this needs only the Kubernetes API.
//!   etcd in this pod connects to the other members after the outage.

use anyhow::{Context, Result, ensure};
use e2e::objects::follower;
use e2e::wait::Poll;
use e2e::{DEADLINE, Sandbox, Testbed, Writer, until};
use k8s_openapi::api::core::v1::Pod;

use crate::node_reboot::{TwoClusters, serve};

pub(crate) async fn pod_is_lost_during_outage(
    sandbox: &Sandbox,
    testbed: &Testbed<'_>,
    writers: &[Writer],
) -> Result<()> {
    let before = TwoClusters::of(sandbox).await?;
    testbed.stop_daemon("coredns").await?;
    serve(writers, 50).await?;
    let victim = follower(&before.durable)?;
    let old = sandbox.api::<Pod>().get(&victim).await?.metadata.uid;
    let delete = ["delete", "pod", &victim, "--now", "--wait=false"];
    sandbox.kubectl(&delete).await?;
    until("the pod is recreated", DEADLINE, async || {
        let new = sandbox.api::<Pod>().get_opt(&victim).await?;
        let new = new.and_then(|pod| pod.metadata.uid);
        Ok(if new.is_some() && new != old {
            Poll::Done(())
        } else {
            Poll::NotYet(format!("{old:?}, {new:?}"))
        })
    })
    .await?;
    serve(writers, 50).await?;
    await_started(sandbox, &victim).await?;
    sandbox.await_operators().await?;

    testbed.start_daemon("coredns").await?;
    before.ensure_same_members(sandbox).await?;
    serve(writers, 10).await
}

async fn await_started(sandbox: &Sandbox, name: &str) -> Result<()> {
    until("the container runs", DEADLINE, async || {
        let pod = sandbox.api::<Pod>().get(name).await?;
        let status = pod.status.context("no status")?;
        let containers = status.container_statuses.unwrap_or_default();
        let restarts: i32 = containers.iter().map(|it| it.restart_count).sum();
        ensure!(restarts == 0, "the container restarted {restarts} times");
        Ok(if containers.iter().any(|it| it.started == Some(true)) {
            Poll::Done(())
        } else {
            Poll::NotYet(format!("{:?}", status.phase))
        })
    })
    .await
}
