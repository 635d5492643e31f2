//! A majority of members is lost, and the status names the survivors. After an approval by the user or by
//! `spec.recovery.policy`, a new cluster continues with all data up to the survivor's revision. The status names the
//! lost members.

use anyhow::{Context, Result, ensure};
use e2e::objects::{
    Kind, await_object, condition, field, follower, has_condition, ready_members, strings,
};
use e2e::wait::Poll;
use e2e::{DEADLINE, Keyspace, Sandbox, Testbed, Writer, cluster_scenario, step, until};
use kube::api::DynamicObject;

use crate::fixtures::{DURABLE, cluster, cluster_with};
use crate::member_loss::await_one_volume_per_member;
use crate::operator_crash::CrashingOperator;

const KEYS: usize = 300;
const APPROVE: &str = "etcd.database.coreos.com/recover";
/// The failpoint at which the operator crashes during a recovery.
pub(crate) const CRASHES: &[&str] = &["before-record-recovery"];

/// A cluster of three members with data, before the loss.
struct Before {
    object: DynamicObject,
    writer: Writer,
    cluster_id: String,
    survivor: String,
    victims: Vec<String>,
}

async fn create_cluster(sandbox: &Sandbox, manifest: &str) -> Result<Before> {
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

/// Deletes objects of these kinds with the names of members at the same time, and waits until the containers of deleted
/// pods have stopped. `--force` is not used, because a container could then run longer than its pod. This container
/// would form a quorum with the survivor, which would make an approval stale.
pub(crate) async fn lose(sandbox: &Sandbox, kinds: &[&str], members: &[String]) -> Result<()> {
    let objects = kinds
        .iter()
        .flat_map(|kind| members.iter().map(move |name| format!("{kind}/{name}")));
    let objects: Vec<String> = objects.collect();
    let mut words = vec!["delete", "--grace-period=1"];
    words.extend(objects.iter().map(String::as_str));
    sandbox.kubectl(&words).await.map(drop)
}

pub(crate) async fn approve(sandbox: &Sandbox, cluster_id: &str) -> Result<()> {
    let value = format!("{APPROVE}={cluster_id}");
    sandbox
        .kubectl(&["annotate", "etcdcluster", "c", &value, "--overwrite"])
        .await
        .map(drop)
}

/// Waits until the condition Degraded reports the loss, with all fragments `says` in its message. Returns the
/// EtcdCluster.
pub(crate) async fn await_loss(sandbox: &Sandbox, says: &[&str]) -> Result<DynamicObject> {
    let what = format!("Degraded because of QuorumLost, with {says:?}");
    let clusters = sandbox.objects(Kind::EtcdCluster);
    await_object(&clusters, "c", &what, DEADLINE, |object| {
        condition(object, "Degraded").is_some_and(|degraded| {
            let message = degraded["message"].as_str().unwrap_or_default();
            degraded["reason"] == "QuorumLost"
                && says.iter().all(|part| message.contains(part))
                && has_condition(object, "Available", "False")
        })
    })
    .await
}

/// Waits until the recovery from the cluster `before` has this phase. Ignores an earlier recovery in the status.
async fn await_phase(sandbox: &Sandbox, before: &Before, phase: &str) -> Result<DynamicObject> {
    let clusters = sandbox.objects(Kind::EtcdCluster);
    let what = format!("recovery {phase}");
    await_object(&clusters, "c", &what, DEADLINE, |object| {
        let record = field(object, "/status/recovery");
        record["phase"] == phase && record["fromClusterID"] == *before.cluster_id
    })
    .await
}

/// Ensures that no recovery has started: the status records the same recovery as before the loss.
fn ensure_no_recovery(before: &Before, object: &DynamicObject) -> Result<()> {
    let record = field(object, "/status/recovery");
    ensure!(
        record == field(&before.object, "/status/recovery"),
        "{record}"
    );
    ensure!(text(object, "/status/clusterID") == before.cluster_id);
    Ok(())
}

async fn await_event(sandbox: &Sandbox, reason: &str, says: &str) -> Result<()> {
    until(
        &format!("an Event {reason}: {says}"),
        DEADLINE,
        async || {
            let events = sandbox.events(Kind::EtcdCluster, "c").await?;
            let found = events
                .iter()
                .any(|event| event.contains(reason) && event.contains(says));
            Ok(if found {
                Poll::Done(())
            } else {
                Poll::NotYet(events.join("; "))
            })
        },
    )
    .await
}

/// Ensures that the new cluster has all data up to the survivor's revision, and that the status names at least one of
/// the lost members.
async fn is_recovered(sandbox: &Sandbox, before: Before, approved_by: &str) -> Result<()> {
    await_phase(sandbox, &before, "Complete").await?;
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
        "the record does not name the lost and silent members {:?}: {record}",
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
        "the revision decreased from {revision} to {now}"
    );
    before.writer.await_more(10).await?;
    let tally = before.writer.finish_counting("lost majority").await?;
    let kept: Vec<_> = tally
        .lost
        .iter()
        .filter(|lost| lost.revision <= revision)
        .collect();
    ensure!(
        kept.is_empty(),
        "writes up to the survivor's revision {revision} are lost: {kept:?}"
    );
    let old: Vec<String> = ready_members(&before.object);
    let reused = ready_members(&after)
        .into_iter()
        .find(|name| old.contains(name));
    ensure!(reused.is_none(), "{reused:?} is a member of both clusters");
    Ok(())
}

/// Members without volumes lose their data with their pods. The first recovery starts after an approval, and the second
/// by the policy.
#[tokio::test]
async fn members_without_volumes_recover_from_quorum_loss_by_approval_or_policy() {
    cluster_scenario("quorum_plain", async |sandbox| {
        step("approve the recovery", approved_by_a_person(sandbox)).await?;
        step("recover by policy", approved_by_policy(sandbox)).await
    })
    .await;
}

/// Each step uses the cluster from the previous step.
#[tokio::test]
async fn members_with_volumes_recover_from_quorum_loss_after_approval() {
    cluster_scenario("quorum_volumes", async |sandbox| {
        step("cancel the recovery", canceled(sandbox)).await?;
        step("abandon a hanging majority", abandons_majority(sandbox)).await?;
        step("recover from lost volumes", without_volumes(sandbox)).await
    })
    .await;
}

/// Deletes a majority, and approves the recovery. The operator crashes before it records the recovery, and its next
/// process completes the recovery.
async fn approved_by_a_person(sandbox: &Sandbox) -> Result<()> {
    let before = create_cluster(sandbox, &cluster(&sandbox.env, "c", 3)?).await?;
    lose(sandbox, &["pod"], &before.victims).await?;
    let how = format!("{APPROVE}={}", before.cluster_id);
    let expected = [&how, &*before.survivor, "at revision", "EtcdRestore"];
    await_loss(sandbox, &expected).await?;

    // The operator must refuse an approval with another cluster ID, and report the refusal.
    approve(sandbox, "deadbeef").await?;
    await_loss(sandbox, &["deadbeef", "no recovery starts"]).await?;
    await_event(sandbox, "RecoveryRefused", "deadbeef").await?;
    let object = sandbox.objects(Kind::EtcdCluster).get("c").await?;
    ensure_no_recovery(&before, &object)?;

    let mut operator = CrashingOperator {
        sandbox,
        crashes: 0,
    };
    operator
        .crash_at_each(CRASHES, async |_| {
            approve(sandbox, &before.cluster_id).await
        })
        .await?;
    let object = sandbox.objects(Kind::EtcdCluster).get("c").await?;
    ensure_no_recovery(&before, &object)?;
    ensure!(operator.run_without_failpoints().await? == CRASHES.len());
    let (old, survivor) = (before.cluster_id.clone(), before.survivor.clone());
    is_recovered(sandbox, before, "Annotation").await?;

    // The annotation has the ID of the old cluster. This annotation must not start a second recovery.
    let after = sandbox.await_members("c", 3).await?;
    let annotations = after.metadata.annotations.clone().unwrap_or_default();
    ensure!(annotations.get(APPROVE) == Some(&old));
    ensure!(
        !ready_members(&after).contains(&survivor),
        "the survivor of the old cluster is still a member"
    );
    Ok(())
}

async fn approved_by_policy(sandbox: &Sandbox) -> Result<()> {
    let policy = "  recovery: {policy: Automatic, after: 5s}\n";
    let before = create_cluster(sandbox, &cluster_with(&sandbox.env, "c", 3, policy)?).await?;
    lose(sandbox, &["pod"], &before.victims).await?;
    is_recovered(sandbox, before, "Policy").await
}

/// The manifest of the cluster `c` with volumes and short times for a recovery.
fn durable(sandbox: &Sandbox) -> Result<String> {
    let spec = format!("{DURABLE}  recovery: {{after: 5s, keepVolumes: 5s}}\n");
    cluster_with(&sandbox.env, "c", 3, &spec)
}

/// Waits until the status explains how to approve a recovery. Ensures that no recovery has started.
async fn await_offer(sandbox: &Sandbox, before: &Before) -> Result<DynamicObject> {
    let clusters = sandbox.objects(Kind::EtcdCluster);
    let how = format!("{APPROVE}={}", before.cluster_id);
    let silent = await_object(
        &clusters,
        "c",
        "the approval is explained",
        DEADLINE,
        |object| text(object, "/status/waitingFor").contains(&how),
    )
    .await?;
    ensure_no_recovery(before, &silent)?;
    Ok(silent)
}

/// Deletes the pods of a majority while quotas prevent new pods. No recovery starts without an approval. An approved
/// recovery is canceled when the quorum returns.
async fn canceled(sandbox: &Sandbox) -> Result<()> {
    let before = create_cluster(sandbox, &durable(sandbox)?).await?;
    // The quotas allow only the pod of the survivor and the three existing PVCs, so the operator cannot create pods or
    // PVCs.
    sandbox.apply(&quota("pods", "pods: \"1\"")).await?;
    let volumes = "persistentvolumeclaims: \"3\"";
    sandbox.apply(&quota("volumes", volumes)).await?;
    await_quotas(sandbox).await?;
    lose(sandbox, &["pod"], &before.victims).await?;
    await_offer(sandbox, &before).await?;

    approve(sandbox, &before.cluster_id).await?;
    await_phase(sandbox, &before, "InProgress").await?;
    let silence = before.writer.acknowledged();
    sandbox
        .kubectl(&["delete", "resourcequota", "pods"])
        .await?;
    await_phase(sandbox, &before, "Cancelled").await?;
    let after = sandbox.await_members("c", 3).await?;
    ensure!(text(&after, "/status/clusterID") == before.cluster_id);
    ensure!(ready_members(&after).len() == 3 && before.writer.acknowledged() >= silence);
    await_one_volume_per_member(sandbox, &ready_members(&before.object)).await?;
    await_event(sandbox, "RecoveryCancelled", "answers again").await?;

    // The operator must report the annotation as stale, because the annotation approves the recovery of an earlier
    // loss.
    let clusters = sandbox.objects(Kind::EtcdCluster);
    let what = "the approval is stale";
    await_object(&clusters, "c", what, DEADLINE, |object| {
        text(object, "/status/staleApproval") == before.cluster_id
    })
    .await?;
    sandbox
        .kubectl(&["annotate", "etcdcluster", "c", &format!("{APPROVE}-")])
        .await?;
    let what = "the approval is removed";
    await_object(&clusters, "c", what, DEADLINE, |object| {
        field(object, "/status/staleApproval").is_null()
    })
    .await?;
    sandbox
        .kubectl(&["delete", "resourcequota", "volumes"])
        .await?;
    before.writer.await_more(10).await?;
    let tally = before.writer.finish("lost and returned quorum").await;
    tally.map(drop)
}

async fn await_quotas(sandbox: &Sandbox) -> Result<()> {
    until("the quotas are enforced", DEADLINE, async || {
        let path = "jsonpath={range .items[*]}{.status.used}{\"\\n\"}{end}";
        let used = sandbox
            .kubectl(&["get", "resourcequota", "-o", path])
            .await?;
        let count = used.lines().filter(|line| !line.is_empty()).count();
        Ok(if count == 2 {
            Poll::Done(())
        } else {
            Poll::NotYet(used)
        })
    })
    .await
}

/// Suspends the processes of a majority, and approves a recovery without these members. The new cluster has the
/// survivor's data, the status names the suspended members, and the operator deletes their volumes.
async fn abandons_majority(sandbox: &Sandbox) -> Result<()> {
    let testbed = Testbed::of(sandbox)?;
    let before = create_cluster(sandbox, &durable(sandbox)?).await?;
    let mut pods = sandbox.member_pods("c").await?;
    pods.retain(|pod| pod.metadata.name.as_ref() != Some(&before.survivor));
    testbed.signal_containers(&pods, "SIGSTOP").await?;
    let offer = await_offer(sandbox, &before).await?;
    let message = text(&offer, "/status/waitingFor");
    ensure!(
        before.victims.iter().all(|victim| message.contains(victim)),
        "{message}"
    );

    approve(sandbox, &before.cluster_id).await?;
    is_recovered(sandbox, before, "Annotation").await?;
    let members = ready_members(&sandbox.await_members("c", 3).await?);
    await_one_volume_per_member(sandbox, &members).await
}

async fn without_volumes(sandbox: &Sandbox) -> Result<()> {
    let before = create_cluster(sandbox, &durable(sandbox)?).await?;
    // The test deletes PVCs and pods at the same time. If only the PVCs were deleted, the operator would replace the
    // members one at a time, without a loss of the quorum.
    lose(sandbox, &["pvc", "pod"], &before.victims).await?;
    await_loss(sandbox, &[&before.cluster_id, &before.survivor]).await?;
    approve(sandbox, &before.cluster_id).await?;
    is_recovered(sandbox, before, "Annotation").await?;
    let members = ready_members(&sandbox.await_members("c", 3).await?);
    // The operator must have deleted all volumes of the old cluster.
    await_one_volume_per_member(sandbox, &members).await
}

fn quota(name: &str, hard: &str) -> String {
    format!(
        "apiVersion: v1\nkind: ResourceQuota\nmetadata:\n  name: {name}\nspec:\n  hard:\n    {hard}\n"
    )
}
