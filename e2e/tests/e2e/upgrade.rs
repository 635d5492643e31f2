//! Upgrades and downgrades while clients write, one member at a time. The operator rejects changes that etcd does not
//! support.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use e2e::objects::{Kind, await_object, condition, field, has_condition, members};
use e2e::wait::Poll;
use e2e::{DEADLINE, Sandbox, Writer, cluster_scenario, step, until};
use kube::api::{DynamicObject, Patch, PatchParams};
use serde_json::json;

use crate::fixtures::DURABLE;
use crate::old_etcd::one_learner_at_a_time;

/// The time between two writes of the client.
pub(crate) const WRITE_INTERVAL: Duration = Duration::from_millis(50);

pub(crate) fn manifest(name: &str, size: usize, version: &str, more: &str) -> String {
    format!(
        "apiVersion: etcd.database.coreos.com/v1beta2\nkind: EtcdCluster\nmetadata: {{name: {name}}}\nspec:\n  \
         size: {size}\n  version: \"{version}\"\n{more}"
    )
}

pub(crate) async fn change(sandbox: &Sandbox, name: &str, spec: serde_json::Value) -> Result<()> {
    let clusters = sandbox.objects(Kind::EtcdCluster);
    let patch = Patch::Merge(json!({ "spec": spec }));
    let params = PatchParams::default();
    clusters.patch(name, &params, &patch).await.map(drop)?;
    Ok(())
}

/// Waits until all members run this version, and no work is pending.
pub(crate) async fn await_version(
    sandbox: &Sandbox,
    name: &str,
    size: usize,
    version: &str,
) -> Result<DynamicObject> {
    let what = format!("{size} members of etcd {version}");
    await_object(
        &sandbox.objects(Kind::EtcdCluster),
        name,
        &what,
        DEADLINE,
        |object| {
            let details = field(object, "/status/memberDetails").as_array();
            let run = details.map_or(0, |list| {
                list.iter().filter(|one| one["version"] == version).count()
            });
            run == size && is_condition(object, "Upgrading", "False", "AsDesired")
        },
    )
    .await?;
    sandbox.await_members(name, size).await
}

fn is_condition(object: &DynamicObject, kind: &str, status: &str, reason: &str) -> bool {
    condition(object, kind)
        .is_some_and(|found| found["status"] == status && found["reason"] == reason)
}

/// The parts of a member's pod that tests compare before and after a change of the version.
#[derive(Debug)]
struct MemberPod {
    uid: String,
    address: String,
    restarts: i32,
    container_id: String,
}

/// The pods of a cluster by name.
type MemberPods = BTreeMap<String, MemberPod>;

async fn pods(sandbox: &Sandbox, name: &str) -> Result<MemberPods> {
    let pods = sandbox.member_pods(name).await?.into_iter();
    let seen = pods.filter_map(|pod| {
        let status = pod.status?;
        let etcd = status.container_statuses?.into_iter().next()?;
        let member = MemberPod {
            uid: pod.metadata.uid?,
            address: status.pod_ip?,
            restarts: etcd.restart_count,
            container_id: etcd.container_id?,
        };
        Some((pod.metadata.name?, member))
    });
    Ok(seen.collect())
}

/// Waits until all pods are the same as in `before`, with one restart each. The kubelet may report the restart after
/// the member serves clients.
async fn await_in_place(sandbox: &Sandbox, name: &str, before: &MemberPods) -> Result<()> {
    until("the same pods, each restarted once", DEADLINE, async || {
        in_place(before, &pods(sandbox, name).await?, 1).map(Poll::Done)
    })
    .await
}

/// Ensures that the pods are the same as in `before`, and that each pod has restarted `times` times since then.
fn in_place(before: &MemberPods, after: &MemberPods, times: i32) -> Result<()> {
    let same = before.iter().all(|(name, before)| {
        after.get(name).is_some_and(|after| {
            after.uid == before.uid
                && after.address == before.address
                && after.restarts == before.restarts + times
        })
    });
    ensure!(
        same && before.len() == after.len(),
        "{before:?} became {after:?}"
    );
    Ok(())
}

/// Ensures that members restart one at a time. The kubelet may count a restart before the container runs, so the test
/// waits for running containers.
///
/// Once a minute, the kubelet removes all stopped containers except the newest, so the end time of the previous
/// container may be missing. The test then compares only the start time.
async fn ensure_one_by_one(sandbox: &Sandbox, name: &str, before: &MemberPods) -> Result<()> {
    let what = "each member was restarted and is running";
    let mut restarts = until(what, DEADLINE, async || {
        let pods = sandbox.member_pods(name).await?.into_iter();
        let restarts = pods.map(|pod| {
            let status = pod.status?.container_statuses?.into_iter().next()?;
            let started = status.state?.running?.started_at?;
            let replaced = &before.get(&pod.metadata.name?)?.container_id;
            let last = status.last_state.and_then(|last| last.terminated);
            let last = last.filter(|last| last.container_id.as_ref() == Some(replaced));
            let ended = last.and_then(|last| last.finished_at);
            Some((ended.unwrap_or_else(|| started.clone()), started))
        });
        let restarts: Option<Vec<_>> = restarts.collect();
        let not_yet = || Poll::NotYet("a member is not running".to_owned());
        Ok(restarts.map_or_else(not_yet, Poll::Done))
    })
    .await?;
    restarts.sort();
    let apart = restarts.windows(2).all(|two| two[0].1 <= two[1].0);
    ensure!(
        apart,
        "two members restarted at the same time: {restarts:?}"
    );
    Ok(())
}

async fn await_reason(
    sandbox: &Sandbox,
    name: &str,
    kind: &str,
    status: &str,
    reason: &str,
) -> Result<DynamicObject> {
    let what = format!("{kind} {status} {reason}");
    let clusters = sandbox.objects(Kind::EtcdCluster);
    await_object(&clusters, name, &what, DEADLINE, |object| {
        is_condition(object, kind, status, reason)
    })
    .await
}

/// Upgrades members without volumes from 3.4 to 3.7, one minor release at a time. No write of a client with retries
/// fails, and no pod is replaced.
#[tokio::test]
async fn cluster_upgrades_from_3_4_to_3_7_without_failed_writes() {
    cluster_scenario("upgrade_under_load", async |sandbox| {
        let oldest = sandbox.env.etcd_versions.first().context("no versions")?;
        ensure!(oldest.starts_with("3.4."), "the oldest version is {oldest}");
        let newest = |minor: &str| sandbox.env.newest_of(minor);
        let (second, third, last) = (newest("3.5")?, newest("3.6")?, newest("3.7")?);
        // Invariant 29: before the upgrade to 3.7, the operator appends `snapshotCount` entries to the Raft log, so
        // that etcd saves a snapshot of the log. The small value makes this fast.
        let options = "  etcd: {snapshotCount: 1000}\n";
        sandbox.apply(&manifest("c", 3, oldest, options)).await?;
        let formed = await_version(sandbox, "c", 3, oldest).await?;
        ensure!(field(&formed, "/status/currentVersion") == oldest.as_str());
        step(
            "replace members of etcd 3.4",
            one_learner_at_a_time(sandbox),
        )
        .await?;

        let before = sandbox.await_members("c", 3).await?;
        let writer = Writer::start_retrying(sandbox, "c", WRITE_INTERVAL).await?;
        let upgraded = is_changed_in_place(sandbox, "c", &second);
        step("upgrade to 3.5", upgraded).await?;
        let versions = [
            (last.as_str(), "3.6.11 or a later 3.6"),
            (oldest.as_str(), "cannot be downgraded"),
        ];
        let rejected = are_rejected(sandbox, "c", &second, &versions);
        step("reject 3.7 and 3.4", rejected).await?;
        let stopped = missing_image(sandbox, &writer, &second);
        step("upgrade to a missing image", stopped).await?;
        let upgraded = is_changed_in_place(sandbox, "c", &third);
        step("upgrade to 3.6", upgraded).await?;
        // Invariant 29: the members have not restarted since the upgrade to 3.6, so the Raft log contains requests of
        // the API v2. etcd 3.7 cannot read such requests.
        let upgraded = is_changed_in_place(sandbox, "c", &last);
        step("upgrade to 3.7", upgraded).await?;
        let after = sandbox.await_members("c", 3).await?;
        ensure!(members(&after) == members(&before), "the members changed");
        finish(writer, "three upgrades").await
    })
    .await;
}

/// Only a few steps of this test return to an earlier version, to keep the test short: the kubelet delays the restart
/// of a container whose image ran before.
#[tokio::test]
async fn version_change_can_be_rolled_back_or_replaced() {
    cluster_scenario("versions", async |sandbox| {
        let (patch, old) = sandbox.env.oldest_and_newest_of("3.5")?;
        let new = sandbox.env.newest_of("3.6")?;
        sandbox.apply(&manifest("patch", 3, &patch, "")).await?;
        sandbox.apply(&manifest("c", 3, &old, DURABLE)).await?;
        let patched = is_patched(sandbox, &patch, &old, &new);
        step("change the patch release", patched).await?;

        await_version(sandbox, "c", 3, &old).await?;
        let writer = Writer::start_retrying(sandbox, "c", WRITE_INTERVAL).await?;
        step("roll back an upgrade", is_rolled_back(sandbox, &old, &new)).await?;
        // The cluster `plain` is created here, because the step "downgrade" needs a cluster that runs the new
        // version.
        sandbox.apply(&manifest("plain", 3, &new, "")).await?;
        step("redirect an upgrade", is_redirected(sandbox, &new)).await?;
        await_version(sandbox, "plain", 3, &new).await?;
        step("downgrade", are_downgraded(sandbox, &old)).await?;
        finish(writer, "reversed version changes").await
    })
    .await;
}

/// Changes the patch release and back, one member at a time. The operator rejects a change from the older patch
/// release to the next minor release.
async fn is_patched(sandbox: &Sandbox, older: &str, newer: &str, next: &str) -> Result<()> {
    sandbox.await_members("patch", 3).await?;
    let writer = Writer::start_retrying(sandbox, "patch", WRITE_INTERVAL).await?;
    let rejected = [(next, "3.5.26 or a later 3.5")];
    are_rejected(sandbox, "patch", older, &rejected).await?;
    for version in [newer, older] {
        is_changed_in_place(sandbox, "patch", version).await?;
    }
    finish(writer, "patch release and back").await?;
    sandbox.delete_cluster("patch").await
}

/// Ensures that no write failed, and that no acknowledged write is lost.
async fn finish(writer: Writer, what: &str) -> Result<()> {
    writer.await_more(10).await?;
    let tally = writer.finish(what).await?;
    ensure!(tally.unknown == 0, "failed writes: {tally}");
    Ok(())
}

/// Changes the version. Ensures that members restart one at a time in their pods.
async fn is_changed_in_place(sandbox: &Sandbox, name: &str, version: &str) -> Result<()> {
    let before = sandbox.await_members(name, 3).await?;
    let pods_before = pods(sandbox, name).await?;
    change(sandbox, name, json!({ "version": version })).await?;
    await_version(sandbox, name, 3, version).await?;
    await_in_place(sandbox, name, &pods_before).await?;
    ensure_one_by_one(sandbox, name, &pods_before).await?;
    let after = sandbox.await_members(name, 3).await?;
    ensure!(members(&after) == members(&before), "the members changed");
    Ok(())
}

/// Requests versions to which etcd cannot change directly. Ensures that the status reports the reason, and that no
/// member restarts.
async fn are_rejected(
    sandbox: &Sandbox,
    name: &str,
    runs: &str,
    versions: &[(&str, &str)],
) -> Result<()> {
    let before = pods(sandbox, name).await?;
    for (version, says) in versions {
        change(sandbox, name, json!({ "version": version })).await?;
        await_rejected(sandbox, name, runs, says).await?;
    }
    sandbox
        .await_event(Kind::EtcdCluster, name, &["Warning", "VersionRefused"])
        .await?;
    // The test sets the running version in the spec again.
    change(sandbox, name, json!({ "version": runs })).await?;
    await_version(sandbox, name, 3, runs).await?;
    in_place(&before, &pods(sandbox, name).await?, 0)
}

/// Requests a version whose image does not exist. Ensures that the upgrade stops at the first member, and that the
/// cluster keeps its members when the old version is set again.
async fn missing_image(sandbox: &Sandbox, writer: &Writer, old: &str) -> Result<()> {
    let before = sandbox.await_members("c", 3).await?;
    let missing = "3.5.999";
    change(sandbox, "c", json!({ "version": missing })).await?;
    let clusters = sandbox.objects(Kind::EtcdCluster);
    await_object(&clusters, "c", "the upgrade stops", DEADLINE, |object| {
        is_condition(object, "Upgrading", "True", "UpgradeStopped")
            && has_condition(object, "Degraded", "True")
            && field(object, "/status/currentVersion") == old
            && field(object, "/status/targetVersion") == missing
    })
    .await?;
    sandbox
        .await_event(Kind::EtcdCluster, "c", &["Warning", "UpgradeStopped"])
        .await?;
    writer.await_more(60).await?;
    let changed = changed_pods(sandbox, missing).await?;
    ensure!(
        changed == 1,
        "{changed} members have the image that does not exist"
    );
    change(sandbox, "c", json!({ "version": old })).await?;
    let after = await_version(sandbox, "c", 3, old).await?;
    ensure!(members(&after) == members(&before), "the members changed");
    Ok(())
}

/// Requests a version whose image does not exist, and then an existing version together with another size.
async fn is_redirected(sandbox: &Sandbox, version: &str) -> Result<()> {
    change(sandbox, "c", json!({ "version": "3.6.999" })).await?;
    await_reason(sandbox, "c", "Upgrading", "True", "UpgradeStopped").await?;
    change(sandbox, "c", json!({ "version": version, "size": 5 })).await?;
    await_version(sandbox, "c", 5, version).await?;
    change(sandbox, "c", json!({ "size": 3 })).await?;
    sandbox.await_members("c", 3).await.map(drop)
}

/// Downgrades clusters with and without volumes.
async fn are_downgraded(sandbox: &Sandbox, version: &str) -> Result<()> {
    let before = sandbox.await_members("c", 3).await?;
    let plain = sandbox.await_members("plain", 3).await?;
    let writer = Writer::start_retrying(sandbox, "plain", WRITE_INTERVAL).await?;
    for name in ["c", "plain"] {
        change(sandbox, name, json!({ "version": version })).await?;
    }
    for (name, before) in [("c", before), ("plain", plain)] {
        let after = await_version(sandbox, name, 3, version).await?;
        ensure!(
            members(&after) == members(&before),
            "{name}: the members changed"
        );
        sandbox
            .await_event(Kind::EtcdCluster, name, &["DowngradeAllowed"])
            .await?;
    }
    finish(writer, "downgrade without volumes").await
}

/// Sets the old version again when one member runs the new version. Ensures that changed members return to the old
/// version in their pods, and that unchanged members do not restart.
async fn is_rolled_back(sandbox: &Sandbox, old: &str, new: &str) -> Result<()> {
    let before = sandbox.await_members("c", 3).await?;
    let pods_before = pods(sandbox, "c").await?;
    change(sandbox, "c", json!({ "version": new })).await?;
    await_one_of_version(sandbox, "c", new).await?;
    // The operator may have changed several members by now, so the test counts the changed pods.
    let mut begun = changed_pods(sandbox, new).await?;
    change(sandbox, "c", json!({ "version": old })).await?;
    begun = begun.max(changed_pods(sandbox, new).await?);
    let after = await_version(sandbox, "c", 3, old).await?;
    ensure!(members(&after) == members(&before), "the members changed");
    until(
        "the changed members are rolled back",
        DEADLINE,
        async || {
            let pods_after = pods(sandbox, "c").await?;
            let restarts = |(name, before): (&String, &MemberPod)| {
                let now = pods_after.get(name).filter(|now| now.uid == before.uid);
                now.map(|now| now.restarts - before.restarts)
            };
            let restarts: Vec<Option<i32>> = pods_before.iter().map(restarts).collect();
            // `restarts` contains 2 for a member that was changed and rolled back, 1 for a member whose change was
            // interrupted, and 0 for a member that was not changed.
            let known = restarts.iter().all(|times| matches!(times, Some(0..=2)));
            let back = restarts.contains(&Some(2));
            let touched = restarts.iter().filter(|times| **times != Some(0)).count();
            // One more member than `begun` may have been changed, because the operator may begin a change before it
            // reads the old version in the spec.
            let stopped = touched <= begun + 1;
            Ok(if known && back && stopped {
                Poll::Done(())
            } else {
                Poll::NotYet(format!("restarts: {restarts:?}, {begun} pods were changed"))
            })
        },
    )
    .await
}

/// Waits until the status rejects the version with this message. Ensures that the cluster keeps its version.
async fn await_rejected(sandbox: &Sandbox, name: &str, runs: &str, says: &str) -> Result<()> {
    let clusters = sandbox.objects(Kind::EtcdCluster);
    let object = await_object(&clusters, name, says, DEADLINE, |object| {
        let found = condition(object, "Upgrading");
        let message = found.and_then(|found| found["message"].as_str());
        is_condition(object, "Upgrading", "False", "VersionRefused")
            && message.is_some_and(|message| message.contains(says))
    })
    .await?;
    ensure!(field(&object, "/status/currentVersion") == runs);
    ensure!(field(&object, "/status/targetVersion").is_null());
    Ok(())
}

/// Waits until at least one member reports this version.
pub(crate) async fn await_one_of_version(
    sandbox: &Sandbox,
    name: &str,
    version: &str,
) -> Result<()> {
    let clusters = sandbox.objects(Kind::EtcdCluster);
    let what = format!("one member runs etcd {version}");
    await_object(&clusters, name, &what, DEADLINE, |object| {
        let details = field(object, "/status/memberDetails").as_array();
        details.is_some_and(|list| list.iter().any(|one| one["version"] == version))
    })
    .await
    .map(drop)
}

async fn changed_pods(sandbox: &Sandbox, version: &str) -> Result<usize> {
    let pods = sandbox.member_pods("c").await?;
    let tag = format!(":v{version}");
    let images = pods.iter().filter_map(|pod| pod.spec.as_ref());
    let images = images.filter_map(|spec| spec.containers.first()?.image.as_ref());
    Ok(images.filter(|image| image.ends_with(&tag)).count())
}
