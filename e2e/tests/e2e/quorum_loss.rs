//! A majority of the members is lost: what is left is said, and a new cluster begins with it when a person or the
//! policy says so. What was acknowledged up to the survivor's revision is there afterwards; what is not is stated.

use anyhow::{Context, Result, ensure};
use e2e::objects::{
    Kind, await_object, condition, field, follower, has_condition, ready_members, strings,
};
use e2e::wait::Look;
use e2e::{Keyspace, PATIENCE, Sandbox, Testbed, Writer, cluster_scenario, until};
use kube::api::DynamicObject;

use crate::fixtures::{DURABLE, cluster, cluster_with};
use crate::member_loss::await_one_volume_a_member;

const KEYS: usize = 300;
const APPROVE: &str = "etcd.database.coreos.com/recover";

/// A cluster of three with data, and a client that writes.
struct Before {
    object: DynamicObject,
    writer: Writer,
    cluster_id: String,
    survivor: String,
    victims: Vec<String>,
}

async fn begin(sandbox: &Sandbox, manifest: &str) -> Result<Before> {
    sandbox.apply(manifest).await?;
    let object = sandbox.await_members("c", 3).await?;
    let keys = Keyspace::of_cluster(&sandbox.env, &sandbox.namespace, "c").await?;
    keys.fill("kept/", KEYS, |_| ()).await?;
    let writer = Writer::start(sandbox, "c").await?;
    writer.await_more(20).await?;
    let survivor = follower(&object)?;
    let mut victims = ready_members(&object);
    victims.retain(|name| *name != survivor);
    let cluster_id = text(&object, "/status/clusterID");
    Ok(Before {
        object,
        writer,
        cluster_id,
        survivor,
        victims,
    })
}

fn text(object: &DynamicObject, pointer: &str) -> String {
    field(object, pointer)
        .as_str()
        .unwrap_or_default()
        .to_owned()
}

async fn delete_at_once(sandbox: &Sandbox, kind: &str, names: &[String]) -> Result<()> {
    let mut arguments = vec!["delete", kind, "--wait=false"];
    if kind == "pod" {
        arguments.extend(["--grace-period=0", "--force"]);
    }
    arguments.extend(names.iter().map(String::as_str));
    sandbox.kubectl(&arguments).await.map(drop)
}

async fn approve(sandbox: &Sandbox, cluster_id: &str) -> Result<()> {
    let value = format!("{APPROVE}={cluster_id}");
    sandbox
        .kubectl(&["annotate", "etcdcluster", "c", &value, "--overwrite"])
        .await
        .map(drop)
}

/// Waits until the loss is reported, and returns what is said about it.
async fn await_loss(sandbox: &Sandbox, says: &[&str]) -> Result<DynamicObject> {
    let what = format!("Degraded because of QuorumLost, saying {says:?}");
    let clusters = sandbox.objects(Kind::EtcdCluster);
    await_object(&clusters, "c", &what, PATIENCE, |object| {
        condition(object, "Degraded").is_some_and(|degraded| {
            let message = degraded["message"].as_str().unwrap_or_default();
            degraded["reason"] == "QuorumLost"
                && says.iter().all(|part| message.contains(part))
                && has_condition(object, "Available", "False")
        })
    })
    .await
}

async fn await_phase(sandbox: &Sandbox, phase: &str) -> Result<DynamicObject> {
    let clusters = sandbox.objects(Kind::EtcdCluster);
    await_object(
        &clusters,
        "c",
        &format!("recovery {phase}"),
        PATIENCE,
        |object| field(object, "/status/recovery/phase") == phase,
    )
    .await
}

async fn await_event(sandbox: &Sandbox, reason: &str, says: &str) -> Result<()> {
    until(
        &format!("an Event {reason}: {says}"),
        PATIENCE,
        async || {
            let events = sandbox.events(Kind::EtcdCluster, "c").await?;
            let found = events
                .iter()
                .any(|event| event.contains(reason) && event.contains(says));
            Ok(if found {
                Look::Done(())
            } else {
                Look::NotYet(events.join("; "))
            })
        },
    )
    .await
}

/// The cluster is whole again, another one, with everything up to the survivor's revision; the rest is stated.
async fn is_recovered(sandbox: &Sandbox, before: Before, approved_by: &str) -> Result<()> {
    await_phase(sandbox, "Complete").await?;
    let after = sandbox.await_members("c", 3).await?;
    let record = field(&after, "/status/recovery");
    ensure!(record["phase"] == "Complete", "{record}");
    ensure!(record["approvedBy"] == approved_by, "{record}");
    ensure!(
        record["fromClusterID"] == *before.cluster_id && record["survivor"] == *before.survivor,
        "{record}"
    );
    ensure!(record["toClusterID"] == *field(&after, "/status/clusterID"));
    ensure!(text(&after, "/status/clusterID") != before.cluster_id);
    let mut lost = strings(&record["lostMembers"]);
    lost.extend(strings(&record["silentMembers"]));
    ensure!(
        before.victims.iter().any(|victim| lost.contains(victim)),
        "the lost and silent members {:?} are not stated: {record}",
        before.victims
    );
    let message = record["message"].as_str().unwrap_or_default();
    ensure!(message.contains("may be missing"), "{message}");
    let revision = record["revision"].as_i64().context("no revision")?;
    await_event(sandbox, "RecoveryComplete", &before.cluster_id).await?;

    let keys = Keyspace::of_cluster(&sandbox.env, &sandbox.namespace, "c").await?;
    let now = keys.verify("kept/", KEYS).await?;
    ensure!(
        now > revision,
        "the revision went back: {now}, was {revision}"
    );
    before.writer.await_more(10).await?;
    let tally = before.writer.finish_counting("a majority lost").await?;
    let kept: Vec<_> = tally
        .lost
        .iter()
        .filter(|lost| lost.revision <= revision)
        .collect();
    ensure!(
        kept.is_empty(),
        "lost, though the survivor had revision {revision}: {kept:?}"
    );
    let old: Vec<String> = ready_members(&before.object);
    let reused = ready_members(&after)
        .into_iter()
        .find(|name| old.contains(name));
    ensure!(reused.is_none(), "{reused:?} is a member of both clusters");
    Ok(())
}

#[tokio::test]
async fn a_majority_without_disks_is_recovered_when_a_person_approves() {
    cluster_scenario("quorum_manual", async |sandbox| {
        let before = begin(sandbox, &cluster(&sandbox.env, "c", 3)?).await?;
        delete_at_once(sandbox, "pod", &before.victims).await?;
        let how = format!("{APPROVE}={}", before.cluster_id);
        let told = [&how, &*before.survivor, "at revision", "EtcdRestore"];
        await_loss(sandbox, &told).await?;

        // Another cluster's ID approves nothing, and says so.
        approve(sandbox, "deadbeef").await?;
        await_loss(sandbox, &["deadbeef", "nothing is recovered"]).await?;
        await_event(sandbox, "RecoveryRefused", "deadbeef").await?;
        let object = sandbox.objects(Kind::EtcdCluster).get("c").await?;
        ensure!(field(&object, "/status/recovery").is_null());
        ensure!(text(&object, "/status/clusterID") == before.cluster_id);

        approve(sandbox, &before.cluster_id).await?;
        let (old, survivor) = (before.cluster_id.clone(), before.survivor.clone());
        is_recovered(sandbox, before, "Annotation").await?;

        // The annotation stays, and is of the old cluster: nothing is recovered twice.
        let after = sandbox.await_members("c", 3).await?;
        let annotations = after.metadata.annotations.clone().unwrap_or_default();
        ensure!(annotations.get(APPROVE) == Some(&old));
        ensure!(
            !ready_members(&after).contains(&survivor),
            "the survivor of the old cluster is still there"
        );
        Ok(())
    })
    .await;
}

#[tokio::test]
async fn a_majority_of_volumes_lost_is_recovered_onto_new_volumes() {
    cluster_scenario("quorum_volumes", async |sandbox| {
        let manifest = cluster_with(&sandbox.env, "c", 3, DURABLE)?;
        let before = begin(sandbox, &manifest).await?;
        // Together: an operator that saw volumes alone go would replace their members one by one.
        let both = |kind: &str| -> Vec<String> {
            let named = before.victims.iter().map(|name| format!("{kind}/{name}"));
            named.collect()
        };
        let gone = [both("pvc"), both("pod")].concat();
        let mut words = vec!["delete", "--wait=false", "--grace-period=0", "--force"];
        words.extend(gone.iter().map(String::as_str));
        sandbox.kubectl(&words).await?;
        await_loss(sandbox, &[&before.cluster_id, &before.survivor]).await?;
        approve(sandbox, &before.cluster_id).await?;
        is_recovered(sandbox, before, "Annotation").await?;
        let members = ready_members(&sandbox.await_members("c", 3).await?);
        // Of the old cluster none is left.
        await_one_volume_a_member(sandbox, &members).await
    })
    .await;
}

#[tokio::test]
async fn a_lost_majority_is_recovered_by_policy_after_the_time_it_gives() {
    cluster_scenario("quorum_automatic", async |sandbox| {
        let policy = "  recovery: {policy: Automatic, after: 5s}\n";
        let before = begin(sandbox, &cluster_with(&sandbox.env, "c", 3, policy)?).await?;
        delete_at_once(sandbox, "pod", &before.victims).await?;
        await_phase(sandbox, "Complete").await?;
        is_recovered(sandbox, before, "Policy").await
    })
    .await;
}

/// The disks are there and the pods cannot come back: nothing is recovered without a person, and what a person
/// began ends when the quorum is back.
#[tokio::test]
async fn a_quorum_that_comes_back_cancels_the_recovery() {
    cluster_scenario("quorum_returns", async |sandbox| {
        let spec = format!("{DURABLE}  recovery: {{after: 5s}}\n");
        let manifest = cluster_with(&sandbox.env, "c", 3, &spec)?;
        let before = begin(sandbox, &manifest).await?;
        // No pod may be made any more, and no fourth volume.
        sandbox.apply(&quota("pods", "pods: \"1\"")).await?;
        let volumes = "persistentvolumeclaims: \"3\"";
        sandbox.apply(&quota("volumes", volumes)).await?;
        until("the quotas are in force", PATIENCE, async || {
            let path = "jsonpath={range .items[*]}{.status.used}{\"\\n\"}{end}";
            let used = sandbox
                .kubectl(&["get", "resourcequota", "-o", path])
                .await?;
            Ok(
                if used.lines().filter(|line| !line.is_empty()).count() == 2 {
                    Look::Done(())
                } else {
                    Look::NotYet(used)
                },
            )
        })
        .await?;
        delete_at_once(sandbox, "pod", &before.victims).await?;
        let clusters = sandbox.objects(Kind::EtcdCluster);
        let how = format!("{APPROVE}={}", before.cluster_id);
        let silent = await_object(&clusters, "c", "the way on is said", PATIENCE, |object| {
            text(object, "/status/waitingFor").contains(&how)
        })
        .await?;
        ensure!(field(&silent, "/status/recovery").is_null());

        approve(sandbox, &before.cluster_id).await?;
        await_phase(sandbox, "InProgress").await?;
        let silence = before.writer.acknowledged();
        sandbox
            .kubectl(&["delete", "resourcequota", "pods"])
            .await?;
        await_phase(sandbox, "Cancelled").await?;
        let after = sandbox.await_members("c", 3).await?;
        ensure!(text(&after, "/status/clusterID") == before.cluster_id);
        ensure!(ready_members(&after).len() == 3 && before.writer.acknowledged() >= silence);
        await_one_volume_a_member(sandbox, &ready_members(&before.object)).await?;
        await_event(sandbox, "RecoveryCancelled", "answers again").await?;

        // The approval was for a loss that is over.
        await_object(
            &clusters,
            "c",
            "the approval is stale",
            PATIENCE,
            |object| text(object, "/status/staleApproval") == before.cluster_id,
        )
        .await?;
        sandbox
            .kubectl(&["annotate", "etcdcluster", "c", &format!("{APPROVE}-")])
            .await?;
        await_object(
            &clusters,
            "c",
            "the approval is forgotten",
            PATIENCE,
            |object| field(object, "/status/staleApproval").is_null(),
        )
        .await?;
        before.writer.await_more(10).await?;
        before
            .writer
            .finish("a quorum away and back")
            .await
            .map(drop)
    })
    .await;
}

mod alone {
    use super::*;

    /// A majority hangs with its data, and a person knows that it will not come back: the cluster goes on from the
    /// member that answers, the others are named, and none of them is a member or an endpoint afterwards.
    #[tokio::test]
    async fn a_silent_majority_is_given_up_when_a_person_approves() {
        cluster_scenario("quorum_silent", async |sandbox| {
            Testbed::breaking(sandbox, async |testbed| {
                let spec = format!("{DURABLE}  recovery: {{after: 5s}}\n");
                let manifest = cluster_with(&sandbox.env, "c", 3, &spec)?;
                let before = begin(sandbox, &manifest).await?;
                let mut pods = sandbox.member_pods("c").await?;
                pods.retain(|pod| pod.metadata.name.as_ref() != Some(&before.survivor));
                testbed.signal_containers(&pods, "SIGSTOP").await?;
                let clusters = sandbox.objects(Kind::EtcdCluster);
                let how = format!("{APPROVE}={}", before.cluster_id);
                let told = await_object(&clusters, "c", "the way on is said", PATIENCE, |object| {
                    text(object, "/status/waitingFor").contains(&how)
                })
                .await?;
                let said = text(&told, "/status/waitingFor");
                ensure!(
                    before.victims.iter().all(|victim| said.contains(victim)),
                    "{said}"
                );
                ensure!(field(&told, "/status/recovery").is_null());

                approve(sandbox, &before.cluster_id).await?;
                await_phase(sandbox, "Complete").await?;
                is_recovered(sandbox, before, "Annotation").await?;
                let members = ready_members(&sandbox.await_members("c", 3).await?);
                await_one_volume_a_member(sandbox, &members).await
            })
            .await
        })
        .await;
    }
}

fn quota(name: &str, hard: &str) -> String {
    format!(
        "apiVersion: v1\nkind: ResourceQuota\nmetadata:\n  name: {name}\nspec:\n  hard:\n    {hard}\n"
    )
}
