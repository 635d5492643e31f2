//! The database reaches its quota: etcd refuses writes, the status says so, and the cluster is writable again by
//! itself when there is something to free.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use anyhow::{Result, ensure};
use e2e::objects::{Kind, await_object, condition, conditions_line, field};
use e2e::wait::Poll;
use e2e::{DEADLINE, Keyspace, cluster_scenario, until};
use kube::api::DynamicObject;

use crate::all_pods_lost::same_members;
use crate::fixtures::cluster_with;

const SMALL: &str = "  etcd: {quotaBackendBytes: 25165824}
  upkeep: {noSpace: {keepRevisions: 0}}
  pod:
    persistentVolumeClaimSpec:
      accessModes: [ReadWriteOnce]
      resources: {requests: {storage: 128Mi}}
";

fn is_degraded_with(object: &DynamicObject, words: &str) -> bool {
    condition(object, "Degraded").is_some_and(|found| {
        found["reason"] == "NoSpace" && found["message"].as_str().unwrap_or("").contains(words)
    })
}

/// Waits until a large value is taken.
pub(crate) async fn await_writable(keys: &Keyspace) -> Result<()> {
    until("it is writable again", DEADLINE, async || {
        Ok(match keys.write("again", vec![7; 1 << 20]).await {
            Ok(()) => Poll::Done(()),
            Err(error) => Poll::NotYet(format!("{error:#}")),
        })
    })
    .await
}

#[tokio::test]
async fn full_database_accepts_writes_after_deletion() {
    cluster_scenario("nospace", async |sandbox| {
        let manifest = cluster_with(&sandbox.env, "c", 3, SMALL)?;
        sandbox.apply(&manifest).await?;
        let before = sandbox.await_members("c", 3).await?;
        let keys = Keyspace::of_cluster(&sandbox.env, &sandbox.namespace, "c").await?;
        keys.fill("kept/", 100, |_| {}).await?;

        // Different keys: in the end there is neither history to compact nor anything to free. Until then the operator
        // makes room again and again, so the values are small: large ones leave much room in the file.
        let clusters = sandbox.objects(Kind::EtcdCluster);
        let number = AtomicUsize::new(0);
        let refused = AtomicBool::new(false);
        let full = until("it says that it is full", DEADLINE * 2, async || {
            for _ in 0..8 {
                let key = format!("big/{}", number.fetch_add(1, Ordering::Relaxed));
                // A member that is being defragmented, or an election, has other reasons.
                if let Err(error) = keys.write(&key, vec![7; 64 << 10]).await {
                    let is_full = format!("{error:#}").contains("database space exceeded");
                    refused.fetch_or(is_full, Ordering::Relaxed);
                    break;
                }
            }
            let object = clusters.get("c").await?;
            Ok(if is_degraded_with(&object, "quotaBackendBytes") {
                Poll::Done(object)
            } else {
                Poll::NotYet(conditions_line(&object))
            })
        })
        .await?;
        ensure!(
            refused.load(Ordering::Relaxed),
            "etcd has refused no write for want of space"
        );
        ensure!(
            field(&full, "/status/alarms/0/type") == "NoSpace",
            "{}",
            field(&full, "/status/alarms")
        );

        keys.delete("big/").await?;
        let cured = await_object(&clusters, "c", "the alarm is gone", DEADLINE, |object| {
            field(object, "/status/alarms").is_null() && !is_degraded_with(object, "")
        })
        .await?;
        await_writable(&keys).await?;
        keys.verify("kept/", 100).await?;
        let done = field(&cured, "/status/defragmentation");
        ensure!(done["cause"] == "NoSpace", "{done}");
        ensure!(
            done["members"].as_array().is_some_and(|all| all.len() == 3),
            "{done}"
        );
        same_members(&before, &sandbox.await_members("c", 3).await?)?;
        for reason in [
            "NoSpace",
            "Compacted",
            "MemberDefragmented",
            "AlarmDisarmed",
        ] {
            sandbox
                .await_event(Kind::EtcdCluster, "c", &[reason])
                .await?;
        }
        Ok(())
    })
    .await;
}
