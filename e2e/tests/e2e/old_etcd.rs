//! The operator must add only one learner at a time to a cluster of etcd 3.4, because this release accepts no second
//! learner. `upgrade.rs` calls this function.

use std::convert::Infallible;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use e2e::objects::{leader, ready_members};
use e2e::{Keyspace, Sandbox, Writer};

/// Records the maximum number of concurrent learners in `most`. Never returns.
async fn count_learners(sandbox: &Sandbox, cluster: &str, most: &AtomicUsize) -> Infallible {
    let mut keys: Option<Keyspace> = None;
    loop {
        let list = match &keys {
            Some(keys) => keys.members().await.ok(),
            None => None,
        };
        if let Some(list) = list {
            let learners = list.iter().filter(|(_, learner)| *learner).count();
            most.fetch_max(learners, Ordering::Relaxed);
            tokio::time::sleep(Duration::from_millis(100)).await;
        } else {
            keys = Keyspace::of_cluster(&sandbox.env, &sandbox.namespace, cluster)
                .await
                .ok();
        }
    }
}

/// Scales a cluster from three members to five, replaces two members, and scales the cluster back to three.
pub(crate) async fn one_learner_at_a_time(sandbox: &Sandbox) -> Result<()> {
    let writer = Writer::start(sandbox, "c").await?;
    let most = AtomicUsize::new(0);
    tokio::select! {
        outcome = grow_and_replace(sandbox) => outcome?,
        never = count_learners(sandbox, "c", &most) => match never {},
    }
    let most = most.into_inner();
    ensure!(most == 1, "{most} learners at the same time");
    sandbox.scale("c", 3).await?;
    sandbox.await_members("c", 3).await.context("scale to 3")?;
    writer.await_more(10).await?;
    writer.finish("etcd 3.4").await.map(drop)
}

async fn grow_and_replace(sandbox: &Sandbox) -> Result<()> {
    sandbox.scale("c", 5).await?;
    let object = sandbox.await_members("c", 5).await.context("scale to 5")?;
    // Two members are lost at the same time. With etcd 3.4, the operator must replace them one at a time.
    let leader = leader(&object)?;
    let mut victims = ready_members(&object);
    victims.retain(|name| *name != leader);
    victims.truncate(1);
    victims.push(leader);
    let delete = ["delete", "pod", &victims[0], &victims[1], "--now"];
    sandbox
        .kubectl(&[&delete[..], &["--wait=false"]].concat())
        .await?;
    for victim in &victims {
        sandbox.await_unready("c", victim).await?;
    }
    let after = sandbox
        .await_members("c", 5)
        .await
        .context("two replaced")?;
    let ready = ready_members(&after);
    let back: Vec<_> = victims
        .iter()
        .filter(|victim| ready.contains(victim))
        .collect();
    ensure!(back.is_empty(), "{back:?} are members again");
    Ok(())
}
