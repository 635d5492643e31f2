//! DNS caches answers for 30 s, including the answer that a name does not exist. kubeadm before 1.33 and NodeLocal DNS
//! have such caches. `node_reboot.rs` calls this function.

use anyhow::{Context, Result, ensure};
use e2e::objects::{leader, ready_members};
use e2e::{Sandbox, Testbed, Writer};

use crate::all_pods_lost::same_members;
use crate::fixtures::cluster;
use crate::node_reboot::serve;

/// Forms the cluster `fresh`, scales the cluster `durable`, and deletes a pod of each cluster. `cargo xtask bench --dns
/// cache30` measures the duration of such changes.
pub(crate) async fn names_change_with_dns_cache(
    sandbox: &Sandbox,
    testbed: &Testbed<'_>,
    writers: &[Writer],
) -> Result<()> {
    testbed.dns("cache30").await?;
    sandbox.apply(&cluster(&sandbox.env, "fresh", 3)?).await?;
    let fresh = sandbox.await_members("fresh", 3).await.context("fresh")?;
    let writer = Writer::start(sandbox, "fresh").await?;

    // The new members must join, although DNS may have cached that their names do not exist.
    let victim = leader(&fresh)?;
    sandbox.lose_pod("fresh", &victim).await?;
    sandbox.scale("durable", 4).await?;
    let after = sandbox.await_members("fresh", 3).await;
    let after = after.context("fresh, one replaced")?;
    ensure!(!ready_members(&after).contains(&victim));
    let before = sandbox.await_members("durable", 4).await;
    let before = before.context("durable")?;

    // The recreated pod of the leader has another IP address, but DNS may have cached the old address.
    sandbox.lose_pod("durable", &leader(&before)?).await?;
    let after = sandbox
        .await_members("durable", 4)
        .await
        .context("durable, one restarted")?;
    same_members(&before, &after)?;
    serve(writers, 10).await?;
    writer.await_more(10).await?;
    writer.finish("caching DNS").await.map(drop)
}
