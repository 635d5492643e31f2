//! etcd raises the alarm CORRUPT for a member and rejects all writes. The operator replaces the member and disarms the
//! alarm, and the cluster accepts writes again.
//!
//! The test raises the alarm with a request, because only a defect of etcd could make the data of members differ.

use anyhow::{Context, ensure};
use e2e::objects::{Kind, await_object, field, follower, members};
use e2e::{DEADLINE, Keyspace, Writer, cluster_scenario};

use crate::fixtures::{DURABLE, cluster_with};
use crate::member_loss::await_one_volume_per_member;

#[tokio::test]
async fn member_with_corrupt_alarm_is_replaced_and_writes_resume() {
    cluster_scenario("corrupt_alarm", async |sandbox| {
        let manifest = cluster_with(&sandbox.env, "c", 3, DURABLE)?;
        sandbox.apply(&manifest).await?;
        let before = sandbox.await_members("c", 3).await?;
        let writer = Writer::start(sandbox, "c").await?;
        let victim = follower(&before)?;
        let details = field(&before, "/status/memberDetails").as_array();
        let id = details
            .into_iter()
            .flatten()
            .find(|one| one["name"] == victim.as_str())
            .and_then(|one| one["id"].as_str())
            .context("the member has no ID")?;
        let keys = Keyspace::of_cluster(&sandbox.env, &sandbox.namespace, "c").await?;
        keys.raise_corrupt(u64::from_str_radix(id, 16)?).await?;

        let clusters = sandbox.objects(Kind::EtcdCluster);
        let after = await_object(
            &clusters,
            "c",
            "the member is replaced",
            DEADLINE,
            |object| {
                let names: Vec<String> =
                    members(object).into_iter().map(|(name, _)| name).collect();
                !names.contains(&victim) && field(object, "/status/alarms").is_null()
            },
        )
        .await?;
        ensure!(field(&after, "/status/clusterID") == field(&before, "/status/clusterID"));
        let names: Vec<String> = members(&sandbox.await_members("c", 3).await?)
            .into_iter()
            .map(|(name, _)| name)
            .collect();
        await_one_volume_per_member(sandbox, &names).await?;
        writer.await_more(10).await?;
        for reason in ["Corrupt", "AlarmDisarmed"] {
            sandbox
                .await_event(Kind::EtcdCluster, "c", &[reason])
                .await?;
        }
        writer.finish("a corrupt member").await.map(drop)
    })
    .await;
}
