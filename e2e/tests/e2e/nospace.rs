//! The database reaches its quota, etcd rejects writes, and the status reports the alarm. After keys are deleted, the
//! cluster accepts writes again.

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

/// Waits until etcd accepts a large value.
pub(crate) async fn await_writable(keys: &Keyspace) -> Result<()> {
    until("etcd accepts writes again", DEADLINE, async || {
        Ok(match keys.write("again", vec![7; 1 << 20]).await {
            Ok(()) => Poll::Done(()),
            Err(error) => Poll::NotYet(format!("{error:#}")),
        })
    })
    .await
}

#[tokio::test]
async fn full_database_accepts_writes_after_keys_are_deleted() {
    cluster_scenario("nospace", async |sandbox| {
        let manifest = cluster_with(&sandbox.env, "c", 3, SMALL)?;
        sandbox.apply(&manifest).await?;
        let before = sandbox.await_members("c", 3).await?;
        let keys = Keyspace::of_cluster(&sandbox.env, &sandbox.namespace, "c").await?;
        keys.fill("kept/", 100, |_| {}).await?;

        // Each write uses a new key, so that compactions free little space and the database reaches its quota. The
        // values are small, because large values do not fit into small gaps of free pages in the database file.
        let clusters = sandbox.objects(Kind::EtcdCluster);
        let number = AtomicUsize::new(0);
        let rejected = AtomicBool::new(false);
        let full = until("the full database is reported", DEADLINE * 2, async || {
            for _ in 0..8 {
                let key = format!("big/{}", number.fetch_add(1, Ordering::Relaxed));
                // Only "database space exceeded" means that the database has reached its quota. Writes also fail
                // during a defragmentation.
                if let Err(error) = keys.write(&key, vec![7; 64 << 10]).await {
                    let is_full = format!("{error:#}").contains("database space exceeded");
                    rejected.fetch_or(is_full, Ordering::Relaxed);
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
            rejected.load(Ordering::Relaxed),
            "etcd rejected no write because of the quota"
        );
        ensure!(
            field(&full, "/status/alarms/0/type") == "NoSpace",
            "{}",
            field(&full, "/status/alarms")
        );

        keys.delete("big/").await?;
        let cured = await_object(
            &clusters,
            "c",
            "the alarm is disarmed",
            DEADLINE,
            |object| field(object, "/status/alarms").is_null() && !is_degraded_with(object, ""),
        )
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
