//! A member is lost and the cluster is whole again, with its data.

use anyhow::ensure;
use e2e::objects::{Kind, await_object, field, follower, leader, members, ready_members, strings};
use e2e::{Keyspace, PATIENCE, scenario};

use crate::fixtures::{DURABLE, cluster, cluster_with};

const KEYS: usize = 500;

#[tokio::test]
async fn a_lost_member_without_a_disk_is_replaced_by_another() {
    scenario("replace_member", async |sandbox| {
        sandbox.apply(&cluster(&sandbox.env, "c", 3)?).await?;
        let before = sandbox.await_members("c", 3).await?;
        let keys = Keyspace::of_cluster(&sandbox.env, &sandbox.namespace, "c").await?;
        let revision = keys.fill("kept/", KEYS, |_| ()).await?;

        // First a follower, then the leader.
        for round in ["follower", "leader"] {
            let object = sandbox.await_members("c", 3).await?;
            let victim = match round {
                "leader" => leader(&object)?,
                _ => follower(&object)?,
            };
            sandbox.lose_pod("c", &victim).await?;
            let after = sandbox.await_members("c", 3).await?;
            ensure!(
                !ready_members(&after).contains(&victim),
                "{victim} is back: a name was used twice"
            );
            ensure!(field(&after, "/status/clusterID") == field(&before, "/status/clusterID"));
        }
        let keys = Keyspace::of_cluster(&sandbox.env, &sandbox.namespace, "c").await?;
        ensure!(keys.verify("kept/", KEYS).await? >= revision);
        let events = sandbox.events(Kind::EtcdCluster, "c").await?;
        ensure!(events.len() > 2, "the changes left no Events: {events:?}");
        Ok(())
    })
    .await;
}

/// Invariant 5: a member whose disk exists is not touched in the membership.
#[tokio::test]
async fn a_lost_member_with_a_disk_is_the_same_member_again() {
    scenario("member_returns", async |sandbox| {
        sandbox
            .apply(&cluster_with(&sandbox.env, "c", 3, DURABLE)?)
            .await?;
        let before = sandbox.await_members("c", 3).await?;
        let keys = Keyspace::of_cluster(&sandbox.env, &sandbox.namespace, "c").await?;
        let revision = keys.fill("kept/", KEYS, |_| ()).await?;
        let mut expected = members(&before);
        expected.sort();
        sandbox.lose_pod("c", &leader(&before)?).await?;
        let after = sandbox.await_members("c", 3).await?;
        let mut found = members(&after);
        found.sort();
        ensure!(
            found == expected,
            "members before: {expected:?}, after: {found:?}"
        );
        let keys = Keyspace::of_cluster(&sandbox.env, &sandbox.namespace, "c").await?;
        ensure!(keys.verify("kept/", KEYS).await? >= revision);
        Ok(())
    })
    .await;
}

/// Invariant 8: losing every pod loses no data while the disks exist.
#[tokio::test]
async fn losing_every_pod_loses_nothing_while_the_disks_exist() {
    scenario("all_pods_lost", async |sandbox| {
        sandbox
            .apply(&cluster_with(&sandbox.env, "c", 3, DURABLE)?)
            .await?;
        let before = sandbox.await_members("c", 3).await?;
        let keys = Keyspace::of_cluster(&sandbox.env, &sandbox.namespace, "c").await?;
        let revision = keys.fill("kept/", KEYS, |_| ()).await?;
        sandbox
            .kubectl(&[
                "delete",
                "pods",
                "-l",
                "etcd_cluster=c",
                "--now",
                "--wait=false",
            ])
            .await?;
        await_object(
            &sandbox.objects(Kind::EtcdCluster),
            "c",
            "the loss is seen",
            PATIENCE,
            |object| strings(field(object, "/status/members/ready")).is_empty(),
        )
        .await?;
        let after = sandbox.await_members("c", 3).await?;
        ensure!(field(&after, "/status/clusterID") == field(&before, "/status/clusterID"));
        let keys = Keyspace::of_cluster(&sandbox.env, &sandbox.namespace, "c").await?;
        ensure!(keys.verify("kept/", KEYS).await? >= revision);
        Ok(())
    })
    .await;
}

/// Every pod of a cluster without disks is gone: the status says so, and names the way on.
#[tokio::test]
async fn a_cluster_with_nothing_left_says_so_and_is_not_made_anew() {
    scenario("nothing_left", async |sandbox| {
        sandbox.apply(&cluster(&sandbox.env, "c", 3)?).await?;
        sandbox.await_members("c", 3).await?;
        sandbox
            .kubectl(&[
                "delete",
                "pods",
                "-l",
                "etcd_cluster=c",
                "--now",
                "--wait=false",
            ])
            .await?;
        let object = await_object(
            &sandbox.objects(Kind::EtcdCluster),
            "c",
            "QuorumLost",
            PATIENCE,
            |object| {
                e2e::objects::condition(object, "Degraded")
                    .is_some_and(|c| c["status"] == "True" && c["reason"] == "QuorumLost")
            },
        )
        .await?;
        let message = e2e::objects::condition(&object, "Degraded")
            .map(|c| c["message"].clone())
            .unwrap_or_default();
        ensure!(
            message
                .as_str()
                .is_some_and(|text| text.contains("EtcdRestore")),
            "no way on in: {message}"
        );
        ensure!(e2e::objects::has_condition(&object, "Available", "False"));
        // Invariant 7: it is not bootstrapped again.
        tokio::time::sleep(std::time::Duration::from_secs(5)).await;
        let pods = sandbox.member_pods("c").await?;
        ensure!(pods.is_empty(), "{} pods were made", pods.len());
        Ok(())
    })
    .await;
}
