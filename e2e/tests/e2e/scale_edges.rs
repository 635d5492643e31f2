//! `spec.size` is increased and decreased, also during an earlier change. No data is lost.

use anyhow::{Context, Result};
use e2e::wait::Poll;
use e2e::{DEADLINE, Sandbox, Writer, cluster_scenario, step, until};
use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Service};
use kube::api::ListParams;

use crate::fixtures::{DURABLE, cluster_with};
use crate::operator_crash::await_desired_members;

/// Waits until no object of a removed member exists, because a later member must not start on an old volume.
async fn await_no_leftovers(
    sandbox: &Sandbox,
    cluster: &str,
    volumes: usize,
    services: usize,
) -> Result<()> {
    let what = format!("{cluster} has {volumes} volumes and {services} Services");
    until(&what, DEADLINE, async || {
        let selector = ListParams::default().labels(&format!("etcd_cluster={cluster}"));
        let claims = sandbox.api::<PersistentVolumeClaim>();
        let claims = claims.list(&selector).await?.items.len();
        let found = sandbox.api::<Service>().list(&selector).await?.items.len();
        Ok(if (claims, found) == (volumes, services) {
            Poll::Done(())
        } else {
            Poll::NotYet(format!("{claims} volumes, {found} Services"))
        })
    })
    .await
}

/// Scales a cluster with volumes from one member to seven and back. Some sizes are set before the previous change is
/// complete.
#[tokio::test]
async fn cluster_scales_between_one_and_seven_members() {
    cluster_scenario("scale_edges", async |sandbox| {
        let manifest = cluster_with(&sandbox.env, "c", 1, DURABLE)?;
        sandbox.apply(&manifest).await?;
        sandbox.await_members("c", 1).await?;
        let writer = Writer::start(sandbox, "c").await?;
        let sizes = scales_to(sandbox, &[3, 5, 7, 5, 3]);
        step("scale 1-3-5-7-5-3", sizes).await?;
        step("change the target midway", changes_midway(sandbox)).await?;
        let cycles = scales_to(sandbox, &[1, 2, 1, 2, 1]);
        step("scale 2-1-2-1-2-1", cycles).await?;
        writer.await_more(10).await?;
        writer
            .finish("scaling between one and seven members")
            .await?;
        await_no_leftovers(sandbox, "c", 1, 3).await
    })
    .await;
}

async fn scales_to(sandbox: &Sandbox, sizes: &[usize]) -> Result<()> {
    for size in sizes {
        sandbox.scale("c", *size).await?;
        let reached = sandbox.await_members("c", *size).await;
        reached.with_context(|| format!("scale to {size} of {sizes:?}"))?;
    }
    Ok(())
}

/// Sets a new size while the change to the previous size is in progress.
async fn changes_midway(sandbox: &Sandbox) -> Result<()> {
    for (size, next) in [(7, 3), (1, 5), (3, 2)] {
        let before = sandbox.member_pods("c").await?.len();
        sandbox.scale("c", size).await?;
        until("the first pod is added or removed", DEADLINE, async || {
            let now = sandbox.member_pods("c").await?.len();
            Ok(if now == before && now != size {
                Poll::NotYet(format!("{now} pods"))
            } else {
                Poll::Done(())
            })
        })
        .await?;
        sandbox.scale("c", next).await?;
        let reached = sandbox.await_members("c", next).await;
        reached.with_context(|| format!("scale to {size}, then to {next}"))?;
        await_desired_members(sandbox, "c", next).await?;
        await_no_leftovers(sandbox, "c", next, next + 2).await?;
    }
    Ok(())
}

mod full {
    use super::*;
    use crate::fixtures::cluster;

    /// Number of times that a member is added and removed.
    const CYCLES: usize = 20;

    #[tokio::test]
    async fn twenty_scaling_cycles_lose_no_data() {
        cluster_scenario("scale_cycles", async |sandbox| {
            // Two clusters share the cycles and run concurrently, because a cycle mostly waits until etcd accepts the
            // next change of its members.
            let cycles = CYCLES / 2;
            let (one, other) = tokio::join!(
                grow_and_shrink(sandbox, "c", cycles),
                grow_and_shrink(sandbox, "d", cycles)
            );
            one.and(other)
        })
        .await;
    }

    async fn grow_and_shrink(sandbox: &Sandbox, name: &str, cycles: usize) -> Result<()> {
        sandbox.apply(&cluster(&sandbox.env, name, 1)?).await?;
        sandbox.await_members(name, 1).await?;
        let writer = Writer::start(sandbox, name).await?;
        for cycle in 1..=cycles {
            for size in [2, 1] {
                sandbox.scale(name, size).await?;
                sandbox
                    .await_members(name, size)
                    .await
                    .with_context(|| format!("{name}, cycle {cycle}, scale to {size}"))?;
            }
        }
        writer.await_more(10).await?;
        writer.finish(&format!("{cycles} times 1-2-1")).await?;
        await_no_leftovers(sandbox, name, 0, 3).await
    }
}
