//! The oldest etcd that is supported, 3.4: it takes one learner at a time, and no more is asked of it.

use std::convert::Infallible;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use e2e::objects::{field, leader, ready_members};
use e2e::{Keyspace, Sandbox, Writer, cluster_scenario};

/// Counts the learners etcd has, all along, and never ends.
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

#[tokio::test]
async fn etcd_3_4_grows_by_one_learner_at_a_time() {
    cluster_scenario("old_etcd", async |sandbox| {
        let oldest = sandbox.env.etcd_versions.first().context("no versions")?;
        ensure!(oldest.starts_with("3.4."), "the oldest here is {oldest}");
        let manifest = format!(
            "apiVersion: etcd.database.coreos.com/v1beta2\nkind: EtcdCluster\nmetadata: {{name: c}}\n\
             spec: {{size: 3, version: \"{oldest}\"}}\n"
        );
        sandbox.apply(&manifest).await?;
        let before = sandbox.await_members("c", 3).await?;
        ensure!(field(&before, "/status/currentVersion") == oldest.as_str());
        let writer = Writer::start(sandbox, "c").await?;
        let most = AtomicUsize::new(0);
        tokio::select! {
            outcome = grow_and_replace(sandbox) => outcome?,
            never = count_learners(sandbox, "c", &most) => match never {},
        }
        let most = most.into_inner();
        ensure!(most == 1, "{most} learners at a time");
        sandbox.scale("c", 3).await?;
        sandbox.await_members("c", 3).await.context("towards 3")?;
        writer.await_more(10).await?;
        writer.finish("etcd 3.4").await.map(drop)
    })
    .await;
}

async fn grow_and_replace(sandbox: &Sandbox) -> Result<()> {
    sandbox.scale("c", 5).await?;
    let object = sandbox.await_members("c", 5).await.context("towards 5")?;
    // Two at once: both are replaced, one after the other.
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
    ensure!(back.is_empty(), "{back:?} are back");
    Ok(())
}
