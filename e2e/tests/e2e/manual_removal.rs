//! A user removes members from etcd without the operator. The operator keeps the volumes of these members, because a
//! volume may have the only copy of data (invariant 25).

use anyhow::{Context, Result, ensure};
use e2e::objects::{Kind, await_object, condition, field, follower, members};
use e2e::wait::Poll;
use e2e::{DEADLINE, Keyspace, Sandbox, Writer, cluster_scenario, until};
use k8s_openapi::api::core::v1::{EnvVar, PersistentVolumeClaim, Pod};
use kube::ResourceExt;
use kube::api::{DynamicObject, PostParams};

use crate::fixtures::{DURABLE, cluster_with};

/// The annotation that the operator sets on the PVC of a removed member.
const REMOVED: &str = "etcd.database.coreos.com/removed";
const KEYS: usize = 200;

/// Creates a cluster of three members with volumes. `keep` is the time for which the operator keeps volumes of removed
/// members.
async fn durable(sandbox: &Sandbox, keep: &str) -> Result<DynamicObject> {
    let keep = format!("{DURABLE}  memberReplacement: {{keepVolumes: {keep}}}\n");
    let manifest = cluster_with(&sandbox.env, "c", 3, &keep)?;
    sandbox.apply(&manifest).await?;
    sandbox.await_members("c", 3).await
}

fn member_id(object: &DynamicObject, name: &str) -> Result<String> {
    let found = members(object).into_iter().find(|(one, _)| one == name);
    Ok(found.context("no such member")?.1)
}

fn names(object: &DynamicObject) -> Vec<String> {
    members(object).into_iter().map(|(name, _)| name).collect()
}

/// Waits until the message of the condition Degraded names every kept PVC.
async fn await_report(sandbox: &Sandbox, kept: &[String]) -> Result<()> {
    let clusters = sandbox.objects(Kind::EtcdCluster);
    await_object(
        &clusters,
        "c",
        "kept volumes are reported",
        DEADLINE,
        |object| {
            let degraded = condition(object, "Degraded");
            let message = degraded.and_then(|degraded| degraded["message"].as_str());
            message.is_some_and(|message| {
                message.contains("kubectl delete pvc")
                    && kept.iter().all(|name| message.contains(name))
            })
        },
    )
    .await
    .map(drop)
}

async fn is_kept(sandbox: &Sandbox, claim: &str) -> Result<()> {
    let claim = sandbox.api::<PersistentVolumeClaim>().get(claim).await?;
    ensure!(claim.metadata.deletion_timestamp.is_none());
    ensure!(claim.annotations().contains_key(REMOVED));
    Ok(())
}

#[tokio::test]
async fn manually_removed_members_keep_their_volumes() {
    cluster_scenario("members_removed", async |sandbox| {
        let before = durable(sandbox, "30s").await?;
        let writer = Writer::start(sandbox, "c").await?;
        let victim = follower(&before)?;
        let id = member_id(&before, &victim)?;
        // The request never goes to the member that it removes, because this member may stop before it responds.
        let others = names(&before);
        let mut others = others.iter().filter(|name| **name != victim).cycle();
        // Each attempt calls another member. etcd refuses a removal until the called member has been connected to all
        // voters for 5 s. Because of etcd issue 14523, one member may refuse the removal forever.
        until("etcd removes the member", DEADLINE, async || {
            let called = others.next().context("no other member")?;
            let words = ["exec", called, "--", "etcdctl", "member", "remove", &id];
            Ok(match sandbox.kubectl(&words).await {
                Ok(_) => Poll::Done(()),
                Err(error) if error.to_string().contains("unhealthy cluster") => {
                    Poll::NotYet(format!("{called}: unhealthy cluster"))
                }
                // The member was removed by an earlier request whose response was lost.
                Err(error) if error.to_string().contains("member not found") => Poll::Done(()),
                Err(error) => return Err(error),
            })
        })
        .await?;

        await_report(sandbox, std::slice::from_ref(&victim)).await?;
        is_kept(sandbox, &victim).await?;
        // A new member with a new volume replaces the removed member. The operator keeps the old volume for the time in
        // `memberReplacement.keepVolumes`, and then deletes it.
        let clusters = sandbox.objects(Kind::EtcdCluster);
        await_object(
            &clusters,
            "c",
            "the member is replaced",
            DEADLINE,
            |object| {
                let names = names(object);
                names.len() == 3 && !names.contains(&victim)
            },
        )
        .await?;
        sandbox.await_members("c", 3).await?;
        sandbox
            .await_event(Kind::EtcdCluster, "c", &["VolumeKept", &victim])
            .await?;
        until("the kept volume is deleted", DEADLINE, async || {
            let claims = sandbox.api::<PersistentVolumeClaim>();
            Ok(match claims.get_opt(&victim).await? {
                None => Poll::Done(()),
                Some(_) => Poll::NotYet("the PVC exists".to_owned()),
            })
        })
        .await?;
        await_object(
            &clusters,
            "c",
            "the cluster is healthy",
            DEADLINE,
            |object| e2e::objects::has_condition(object, "Degraded", "False"),
        )
        .await?;
        // The operator deletes the volume of a member that it removes because of `spec.size`.
        sandbox.scale("c", 1).await?;
        let left = sandbox.await_members("c", 1).await?;
        crate::member_loss::await_one_volume_per_member(sandbox, &names(&left)).await?;
        writer.finish("manually removed member").await.map(drop)
    })
    .await;
}

async fn pause(sandbox: &Sandbox, paused: bool) -> Result<()> {
    let patch = format!("{{\"spec\":{{\"paused\":{paused}}}}}");
    let words = ["patch", "etcdcluster", "c", "--type=merge", "-p", &patch];
    sandbox.kubectl(&words).await?;
    let clusters = sandbox.objects(Kind::EtcdCluster);
    await_object(
        &clusters,
        "c",
        "the pause is reported",
        DEADLINE,
        |object| (field(object, "/status/controlPaused") == true) == paused,
    )
    .await
    .map(drop)
}

/// Recreates the pod of a member with `ETCD_FORCE_NEW_CLUSTER`. Guides for etcd without an operator recommend the flag
/// `--force-new-cluster`, which does the same.
async fn force_new_cluster(sandbox: &Sandbox, member: &str) -> Result<()> {
    let pods = sandbox.api::<Pod>();
    let mut pod = pods.get(member).await?;
    sandbox
        .kubectl(&["delete", "pod", member, "--grace-period=1", "--wait=true"])
        .await?;
    pod.status = None;
    pod.metadata.resource_version = None;
    pod.metadata.uid = None;
    pod.metadata.creation_timestamp = None;
    let spec = pod.spec.as_mut().context("no spec")?;
    spec.node_name = None;
    let containers = spec.containers.iter_mut();
    for container in containers.filter(|container| container.name == "etcd") {
        container.env.get_or_insert_default().push(EnvVar {
            name: "ETCD_FORCE_NEW_CLUSTER".to_owned(),
            value: Some("true".to_owned()),
            ..EnvVar::default()
        });
    }
    pods.create(&PostParams::default(), &pod).await?;
    Ok(())
}

#[tokio::test]
async fn manual_force_new_cluster_deletes_no_volume() {
    cluster_scenario("force_new_cluster", async |sandbox| {
        let before = durable(sandbox, "1s").await?;
        let keys = Keyspace::of_cluster(&sandbox.env, &sandbox.namespace, "c").await?;
        keys.fill("kept-", KEYS, |_| ()).await?;
        let survivor = follower(&before)?;
        let vanished: Vec<String> = { names(&before).into_iter() }
            .filter(|name| *name != survivor)
            .collect();
        ensure!(vanished.len() == 2);

        pause(sandbox, true).await?;
        force_new_cluster(sandbox, &survivor).await?;
        until("the member serves alone", DEADLINE, async || {
            let alone = Keyspace::of_pod(&sandbox.env, &sandbox.namespace, &survivor).await;
            let list = match alone {
                Ok(alone) => alone.members().await,
                Err(error) => Err(error),
            };
            Ok(match list {
                Ok(list) if list.len() == 1 => Poll::Done(()),
                other => Poll::NotYet(format!("{other:?}")),
            })
        })
        .await?;
        pause(sandbox, false).await?;

        await_report(sandbox, &vanished).await?;
        // Two new members join, but the operator must not delete the old volumes, because only the user may decide
        // about them.
        let clusters = sandbox.objects(Kind::EtcdCluster);
        await_object(
            &clusters,
            "c",
            "two members are replaced",
            DEADLINE,
            |object| {
                let names = names(object);
                names.len() == 3 && !names.iter().any(|name| vanished.contains(name))
            },
        )
        .await?;
        // The pod of `survivor` has the variable `ETCD_FORCE_NEW_CLUSTER`, so the test deletes this pod. The operator
        // must create a pod without the variable.
        sandbox.lose_pod("c", &survivor).await?;
        sandbox.await_members("c", 3).await?;
        await_report(sandbox, &vanished).await?;
        for claim in &vanished {
            is_kept(sandbox, claim).await?;
        }
        let keys = Keyspace::of_cluster(&sandbox.env, &sandbox.namespace, "c").await?;
        keys.verify("kept-", KEYS).await?;
        let words = ["delete", "pvc", &vanished[0], &vanished[1], "--wait=false"];
        sandbox.kubectl(&words).await?;
        await_object(
            &clusters,
            "c",
            "the cluster is healthy",
            DEADLINE,
            |object| e2e::objects::has_condition(object, "Degraded", "False"),
        )
        .await
        .map(drop)
    })
    .await;
}
