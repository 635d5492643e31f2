//! A member is lost and the cluster is whole again, with its data.

use anyhow::{Context, Result, ensure};
use e2e::objects::{Kind, field, follower, leader, members, ready_members};
use e2e::wait::Poll;
use e2e::{DEADLINE, Sandbox, Writer, cluster_scenario, until};
use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use kube::api::{DynamicObject, ListParams};

use crate::fixtures::{DURABLE, cluster, cluster_with};

/// Who is lost, one after the other.
const VICTIMS: [(&str, SelectMember); 2] = [("a follower", follower), ("the leader", leader)];

/// Chooses a member.
pub(crate) type SelectMember = fn(&DynamicObject) -> Result<String>;

fn sorted(object: &DynamicObject) -> Vec<(String, String)> {
    let mut members = members(object);
    members.sort();
    members
}

#[tokio::test]
async fn lost_member_without_volume_is_replaced() {
    cluster_scenario("replace_member", async |sandbox| {
        sandbox.apply(&cluster(&sandbox.env, "c", 3)?).await?;
        let before = sandbox.await_members("c", 3).await?;
        let writer = Writer::start(sandbox, "c").await?;
        for (who, choose) in VICTIMS {
            let victim = choose(&sandbox.await_members("c", 3).await?)?;
            sandbox.lose_pod("c", &victim).await?;
            let after = sandbox.await_members("c", 3).await.context(who)?;
            ensure!(
                !ready_members(&after).contains(&victim),
                "{victim} is back: a name was used twice"
            );
            ensure!(field(&after, "/status/clusterID") == field(&before, "/status/clusterID"));
        }
        writer.await_more(10).await?;
        writer.finish("members without a disk lost").await?;
        // The changes leave Events.
        for reason in [" MemberRemoved: ", " MemberAdded: ", " MemberPromoted: "] {
            sandbox
                .await_event(Kind::EtcdCluster, "c", &[reason])
                .await?;
        }
        Ok(())
    })
    .await;
}

/// Invariant 5: a member whose disk exists is not touched in the membership.
#[tokio::test]
async fn lost_member_with_volume_keeps_its_identity() {
    cluster_scenario("member_returns", async |sandbox| {
        let manifest = cluster_with(&sandbox.env, "c", 3, DURABLE)?;
        sandbox.apply(&manifest).await?;
        let before = sandbox.await_members("c", 3).await?;
        let writer = Writer::start(sandbox, "c").await?;
        for (who, choose) in VICTIMS {
            let victim = choose(&sandbox.await_members("c", 3).await?)?;
            sandbox.lose_pod("c", &victim).await?;
            let after = sandbox.await_members("c", 3).await.context(who)?;
            let (expected, found) = (sorted(&before), sorted(&after));
            ensure!(
                found == expected,
                "{who}: members before: {expected:?}, after: {found:?}"
            );
        }
        writer.await_more(10).await?;
        writer.finish("members with a disk lost").await.map(drop)
    })
    .await;
}

/// Invariants 5 and 6: with its volume, a member is lost for good; another one comes, on a volume of its own.
#[tokio::test]
async fn member_with_lost_volume_is_replaced() {
    cluster_scenario("volume_gone", async |sandbox| {
        let manifest = cluster_with(&sandbox.env, "c", 3, DURABLE)?;
        sandbox.apply(&manifest).await?;
        let before = sandbox.await_members("c", 3).await?;
        let writer = Writer::start(sandbox, "c").await?;
        for (who, choose) in VICTIMS {
            let victim = choose(&sandbox.await_members("c", 3).await?)?;
            // While its pod runs, Kubernetes keeps the claim.
            sandbox
                .kubectl(&["delete", "pvc", &victim, "--wait=false"])
                .await?;
            sandbox.lose_pod("c", &victim).await?;
            let after = sandbox.await_members("c", 3).await.context(who)?;
            ensure!(
                !ready_members(&after).contains(&victim),
                "{victim} is back without its volume"
            );
            ensure!(field(&after, "/status/clusterID") == field(&before, "/status/clusterID"));
            await_one_volume_per_member(sandbox, &ready_members(&after)).await?;
        }
        writer.await_more(10).await?;
        writer
            .finish("members with their volumes lost")
            .await
            .map(drop)
    })
    .await;
}

/// Every member has its volume, and nobody else has one.
pub(crate) async fn await_one_volume_per_member(
    sandbox: &Sandbox,
    members: &[String],
) -> Result<()> {
    let mut members = members.to_vec();
    members.sort();
    until("one volume a member is left", DEADLINE, async || {
        let claims = sandbox.api::<PersistentVolumeClaim>();
        let selector = ListParams::default().labels("etcd_cluster");
        let claims = claims.list(&selector).await?.into_iter();
        let mut names: Vec<String> = claims.filter_map(|claim| claim.metadata.name).collect();
        names.sort();
        Ok(if names == members {
            Poll::Done(())
        } else {
            Poll::NotYet(format!("{names:?}, members {members:?}"))
        })
    })
    .await
}
