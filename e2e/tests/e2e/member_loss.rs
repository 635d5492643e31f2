//! A member is lost, and the operator repairs the cluster without loss of data.

use anyhow::{Context, Result, ensure};
use e2e::objects::{Kind, field, follower, leader, members, ready_members};
use e2e::wait::Poll;
use e2e::{DEADLINE, Sandbox, Writer, cluster_scenario, until};
use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use kube::api::{DynamicObject, ListParams};

use crate::fixtures::{DURABLE, cluster, cluster_with};

/// Each test loses a follower, and then the leader.
const VICTIMS: [(&str, SelectMember); 2] = [("a follower", follower), ("the leader", leader)];

pub(crate) type SelectMember = fn(&DynamicObject) -> Result<String>;

fn sorted(object: &DynamicObject) -> Vec<(String, String)> {
    let mut members = members(object);
    members.sort();
    members
}

#[tokio::test]
async fn member_without_volume_is_replaced_after_loss_of_its_pod() {
    cluster_scenario("replace_member", async |sandbox| {
        sandbox.apply(&cluster(&sandbox.env, "c", 3)?).await?;
        let before = sandbox.await_members("c", 3).await?;
        let writer = Writer::start(sandbox, "c").await?;
        for (role, choose) in VICTIMS {
            let victim = choose(&sandbox.await_members("c", 3).await?)?;
            sandbox.lose_pod("c", &victim).await?;
            let after = sandbox.await_members("c", 3).await.context(role)?;
            ensure!(
                !ready_members(&after).contains(&victim),
                "{victim} is a member again: its name was reused"
            );
            ensure!(field(&after, "/status/clusterID") == field(&before, "/status/clusterID"));
        }
        writer.await_more(10).await?;
        writer
            .finish("members without volumes lost their pods")
            .await?;
        // The operator must report each kind of membership change with an Event.
        for reason in [" MemberRemoved: ", " MemberAdded: ", " MemberPromoted: "] {
            sandbox
                .await_event(Kind::EtcdCluster, "c", &[reason])
                .await?;
        }
        Ok(())
    })
    .await;
}

/// Invariant 5: the operator does not remove a member whose volume exists.
#[tokio::test]
async fn member_with_volume_keeps_its_identity_after_loss_of_its_pod() {
    cluster_scenario("member_returns", async |sandbox| {
        let manifest = cluster_with(&sandbox.env, "c", 3, DURABLE)?;
        sandbox.apply(&manifest).await?;
        let before = sandbox.await_members("c", 3).await?;
        let writer = Writer::start(sandbox, "c").await?;
        for (role, choose) in VICTIMS {
            let victim = choose(&sandbox.await_members("c", 3).await?)?;
            sandbox.lose_pod("c", &victim).await?;
            let after = sandbox.await_members("c", 3).await.context(role)?;
            let (expected, found) = (sorted(&before), sorted(&after));
            ensure!(
                found == expected,
                "{role}: members before: {expected:?}, after: {found:?}"
            );
        }
        writer.await_more(10).await?;
        writer
            .finish("members lost their pods, but not their volumes")
            .await
            .map(drop)
    })
    .await;
}

/// Invariants 5 and 6: a member that has lost its volume is replaced by a new member with a new volume.
#[tokio::test]
async fn member_with_lost_volume_is_replaced() {
    cluster_scenario("volume_gone", async |sandbox| {
        let manifest = cluster_with(&sandbox.env, "c", 3, DURABLE)?;
        sandbox.apply(&manifest).await?;
        let before = sandbox.await_members("c", 3).await?;
        let writer = Writer::start(sandbox, "c").await?;
        for (role, choose) in VICTIMS {
            let victim = choose(&sandbox.await_members("c", 3).await?)?;
            // The pod is deleted too, because Kubernetes keeps a deleted PVC while a pod uses it.
            sandbox
                .kubectl(&["delete", "pvc", &victim, "--wait=false"])
                .await?;
            sandbox.lose_pod("c", &victim).await?;
            let after = sandbox.await_members("c", 3).await.context(role)?;
            ensure!(
                !ready_members(&after).contains(&victim),
                "{victim} is a member again without its volume"
            );
            ensure!(field(&after, "/status/clusterID") == field(&before, "/status/clusterID"));
            await_one_volume_per_member(sandbox, &ready_members(&after)).await?;
        }
        writer.await_more(10).await?;
        writer
            .finish("members lost with their volumes")
            .await
            .map(drop)
    })
    .await;
}

/// Waits until every member has its PVC, and no other PVC exists.
pub(crate) async fn await_one_volume_per_member(
    sandbox: &Sandbox,
    members: &[String],
) -> Result<()> {
    let mut members = members.to_vec();
    members.sort();
    until("each member has one volume", DEADLINE, async || {
        let claims = sandbox.api::<PersistentVolumeClaim>();
        let selector = ListParams::default().labels("etcd_cluster");
        let claims = claims.list(&selector).await?.into_iter();
        let mut names: Vec<String> = claims.filter_map(|claim| claim.metadata.name).collect();
        names.sort();
        Ok(if names == members {
            Poll::Done(())
        } else {
            Poll::NotYet(format!("PVCs {names:?}, members {members:?}"))
        })
    })
    .await
}
