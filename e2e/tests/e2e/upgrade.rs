//! The version changes under a cluster that serves: member by member, forwards, backwards, and not at all where etcd
//! has no way.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Result, ensure};
use e2e::objects::{Kind, await_object, condition, field, has_condition, members};
use e2e::wait::Look;
use e2e::{PATIENCE, Sandbox, Writer, cluster_scenario, until};
use kube::api::{DynamicObject, Patch, PatchParams};
use serde_json::json;

use crate::fixtures::DURABLE;

/// From one write of the client to the next.
pub(crate) const EVERY: Duration = Duration::from_millis(50);

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

/// All members run the version, and nothing is in progress.
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
        PATIENCE,
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

/// By pod: its UID, its address, and how often its etcd was started again.
async fn pods(sandbox: &Sandbox, name: &str) -> Result<BTreeMap<String, (String, String, i32)>> {
    let pods = sandbox.member_pods(name).await?.into_iter();
    let seen = pods.filter_map(|pod| {
        let status = pod.status?;
        let restarts = status.container_statuses?.first()?.restart_count;
        let address = status.pod_ip?;
        Some((pod.metadata.name?, (pod.metadata.uid?, address, restarts)))
    });
    Ok(seen.collect())
}

/// Waits until the pods are the same, and each was started again so many times: a member may answer before its kubelet
/// has told that it runs again.
async fn await_in_place(
    sandbox: &Sandbox,
    before: &BTreeMap<String, (String, String, i32)>,
    times: i32,
) -> Result<()> {
    let what = format!("the same pods, each started again {times} times");
    until(&what, PATIENCE, async || {
        in_place(before, &pods(sandbox, "c").await?, times).map(Look::Done)
    })
    .await
}

/// The pods are the same, and each was started again so many times.
fn in_place(
    before: &BTreeMap<String, (String, String, i32)>,
    after: &BTreeMap<String, (String, String, i32)>,
    times: i32,
) -> Result<()> {
    let same = before.iter().all(|(name, (uid, address, restarts))| {
        after.get(name).is_some_and(|(now, here, count)| {
            now == uid && here == address && *count == restarts + times
        })
    });
    ensure!(
        same && before.len() == after.len(),
        "{before:?} became {after:?}"
    );
    Ok(())
}

/// The restarts of the members' containers do not overlap: when each ended and when it ran again. A kubelet may have
/// counted a restart and told of a container that is made, but not yet that it runs.
async fn one_by_one(sandbox: &Sandbox, name: &str) -> Result<()> {
    let what = "each member was started again and runs";
    let mut restarts = until(what, PATIENCE, async || {
        let pods = sandbox.member_pods(name).await?.into_iter();
        let restarts = pods.map(|pod| {
            let status = pod.status?.container_statuses?.into_iter().next()?;
            let ended = status.last_state?.terminated?.finished_at?;
            Some((ended, status.state?.running?.started_at?))
        });
        let restarts: Option<Vec<_>> = restarts.collect();
        let not_yet = || Look::NotYet("one was not, or is not told to run".to_owned());
        Ok(restarts.map_or_else(not_yet, Look::Done))
    })
    .await?;
    restarts.sort();
    let apart = restarts.windows(2).all(|two| two[0].1 <= two[1].0);
    ensure!(apart, "two members at once: {restarts:?}");
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
    await_object(&clusters, name, &what, PATIENCE, |object| {
        is_condition(object, kind, status, reason)
    })
    .await
}

/// From 3.4 to 3.7, one minor release after the other: no write fails for a client that retries, and no pod is made
/// anew.
#[tokio::test]
async fn upgrade_under_load() {
    cluster_scenario("upgrade_under_load", async |sandbox| {
        let versions = ["3.4", "3.5", "3.6", "3.7"].map(|minor| sandbox.env.newest_of(minor));
        let [first, versions @ ..] = versions;
        sandbox.apply(&manifest("c", 3, &first?, "")).await?;
        let before = sandbox.await_members("c", 3).await?;
        let pods_before = pods(sandbox, "c").await?;
        let writer = Writer::start_retrying(sandbox, "c", EVERY).await?;
        for (version, times) in versions.into_iter().zip(1..) {
            let version = version?;
            change(sandbox, "c", json!({ "version": version })).await?;
            await_version(sandbox, "c", 3, &version).await?;
            await_in_place(sandbox, &pods_before, times).await?;
            one_by_one(sandbox, "c").await?;
        }
        let after = sandbox.await_members("c", 3).await?;
        ensure!(members(&after) == members(&before), "other members");
        writer.await_more(10).await?;
        let tally = writer.finish("three upgrades").await?;
        ensure!(tally.unknown == 0, "failed writes: {tally}");
        Ok(())
    })
    .await;
}

/// From one patch release to another, forwards and backwards: in place, one member after the other, no failed write.
/// The older one is below the floor of the next minor release, which is refused with the stop-over.
#[tokio::test]
async fn upgrade_within_a_minor_release() {
    cluster_scenario("upgrade_within_a_minor", async |sandbox| {
        let (older, newer) = sandbox.env.oldest_and_newest_of("3.5")?;
        sandbox.apply(&manifest("c", 3, &older, "")).await?;
        let before = sandbox.await_members("c", 3).await?;
        let pods_before = pods(sandbox, "c").await?;
        let writer = Writer::start_retrying(sandbox, "c", EVERY).await?;
        let next = sandbox.env.newest_of("3.6")?;
        change(sandbox, "c", json!({ "version": next })).await?;
        await_refused(sandbox, "c", &older, "3.5.26 or a later 3.5").await?;
        in_place(&pods_before, &pods(sandbox, "c").await?, 0)?;
        for (version, times) in [(&newer, 1), (&older, 2)] {
            change(sandbox, "c", json!({ "version": version })).await?;
            await_version(sandbox, "c", 3, version).await?;
            await_in_place(sandbox, &pods_before, times).await?;
            one_by_one(sandbox, "c").await?;
        }
        let after = sandbox.await_members("c", 3).await?;
        ensure!(members(&after) == members(&before), "other members");
        writer.await_more(10).await?;
        let tally = writer.finish("a patch release and back").await?;
        ensure!(tally.unknown == 0, "failed writes: {tally}");
        Ok(())
    })
    .await;
}

/// The version is set back when the first member has been changed within a minor release: it goes back in its pod, and
/// the change does not go on meanwhile.
#[tokio::test]
async fn rollback_within_a_minor_release() {
    cluster_scenario("rollback_within_a_minor", async |sandbox| {
        let (older, newer) = sandbox.env.oldest_and_newest_of("3.5")?;
        is_taken_back(sandbox, (&older, &newer), "a patch release taken back").await
    })
    .await;
}

/// The version is set back when one member runs the new one: those that were changed go back in their pods, the others
/// stay as they are, and no write fails for a client that retries.
async fn is_taken_back(sandbox: &Sandbox, (old, new): (&str, &str), what: &str) -> Result<()> {
    sandbox.apply(&manifest("c", 3, old, DURABLE)).await?;
    let before = sandbox.await_members("c", 3).await?;
    let pods_before = pods(sandbox, "c").await?;
    let writer = Writer::start_retrying(sandbox, "c", EVERY).await?;
    change(sandbox, "c", json!({ "version": new })).await?;
    await_one_of_version(sandbox, "c", new).await?;
    // How far it has got by now is the machine's business.
    let mut begun = changed_pods(sandbox, new).await?;
    change(sandbox, "c", json!({ "version": old })).await?;
    begun = begun.max(changed_pods(sandbox, new).await?);
    let after = await_version(sandbox, "c", 3, old).await?;
    ensure!(members(&after) == members(&before), "other members");
    until("those that were changed are back", PATIENCE, async || {
        let pods_after = pods(sandbox, "c").await?;
        let restarts = |(name, (uid, _, count)): (&String, &(String, String, i32))| {
            let now = pods_after.get(name).filter(|(now, ..)| now == uid);
            now.map(|(_, _, now)| now - count)
        };
        let restarts: Vec<Option<i32>> = pods_before.iter().map(restarts).collect();
        // Forth and back, on the way when it was stopped, or untouched, as the leader is, which would be the last.
        let known = restarts.iter().all(|times| matches!(times, Some(0..=2)));
        let back = restarts.contains(&Some(2));
        let touched = restarts.iter().filter(|times| **times != Some(0)).count();
        // One step may have been under way when the version was set back.
        let stopped = touched <= begun + 1;
        Ok(if known && back && stopped {
            Look::Done(())
        } else {
            Look::NotYet(format!("restarts: {restarts:?}, {begun} had begun"))
        })
    })
    .await?;
    writer.await_more(10).await?;
    let tally = writer.finish(what).await?;
    ensure!(tally.unknown == 0, "failed writes: {tally}");
    Ok(())
}

/// A minor release that is skipped, and a way back that etcd does not have: nothing changes, and the stop-over is named.
#[tokio::test]
async fn upgrade_refused() {
    cluster_scenario("upgrade_refused", async |sandbox| {
        let old = sandbox.env.newest_of("3.5")?;
        sandbox.apply(&manifest("c", 1, &old, "")).await?;
        sandbox.await_members("c", 1).await?;
        let before = pods(sandbox, "c").await?;
        for (wanted, says) in [
            (sandbox.env.newest_of("3.7")?, "3.6.11 or a later 3.6"),
            (sandbox.env.newest_of("3.4")?, "cannot go back"),
        ] {
            change(sandbox, "c", json!({ "version": wanted })).await?;
            await_refused(sandbox, "c", &old, says).await?;
        }
        sandbox
            .await_event(Kind::EtcdCluster, "c", &["Warning", "VersionRefused"])
            .await?;
        in_place(&before, &pods(sandbox, "c").await?, 0)?;
        // Back to what runs, and all is well.
        change(sandbox, "c", json!({ "version": old })).await?;
        await_version(sandbox, "c", 1, &old).await.map(drop)
    })
    .await;
}

/// An image that does not exist stops after one member; set back, the cluster is as it was.
#[tokio::test]
async fn bad_image() {
    cluster_scenario("bad_image", async |sandbox| {
        let old = sandbox.env.newest_of("3.6")?;
        let missing = "3.6.999";
        sandbox.apply(&manifest("c", 3, &old, "")).await?;
        let before = sandbox.await_members("c", 3).await?;
        let writer = Writer::start_retrying(sandbox, "c", EVERY).await?;
        change(sandbox, "c", json!({ "version": missing })).await?;
        let clusters = sandbox.objects(Kind::EtcdCluster);
        await_object(&clusters, "c", "the upgrade stops", PATIENCE, |object| {
            is_condition(object, "Upgrading", "True", "UpgradeStopped")
                && has_condition(object, "Degraded", "True")
                && field(object, "/status/currentVersion") == old.as_str()
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
        let after = await_version(sandbox, "c", 3, &old).await?;
        ensure!(members(&after) == members(&before), "other members");
        let tally = writer.finish("a bad image").await?;
        ensure!(tally.unknown == 0, "failed writes: {tally}");
        Ok(())
    })
    .await;
}

/// The version is refused with these words, and the cluster goes nowhere.
async fn await_refused(sandbox: &Sandbox, name: &str, runs: &str, says: &str) -> Result<()> {
    let clusters = sandbox.objects(Kind::EtcdCluster);
    let object = await_object(&clusters, name, says, PATIENCE, |object| {
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

/// At least one member answers with the version.
async fn await_one_of_version(sandbox: &Sandbox, name: &str, version: &str) -> Result<()> {
    let clusters = sandbox.objects(Kind::EtcdCluster);
    let what = format!("one member runs etcd {version}");
    await_object(&clusters, name, &what, PATIENCE, |object| {
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

/// The version is set back in the middle of an upgrade to the next minor release: those that were changed go back.
#[tokio::test]
async fn rollback() {
    cluster_scenario("rollback", async |sandbox| {
        let (old, new) = (sandbox.env.newest_of("3.5")?, sandbox.env.newest_of("3.6")?);
        is_taken_back(sandbox, (&old, &new), "an upgrade taken back").await
    })
    .await;
}

/// From 3.6 back to 3.5 by etcd's own downgrade, with disks and without.
#[tokio::test]
async fn downgrade() {
    cluster_scenario("downgrade", async |sandbox| {
        let (old, new) = (sandbox.env.newest_of("3.5")?, sandbox.env.newest_of("3.6")?);
        sandbox.apply(&manifest("c", 3, &new, DURABLE)).await?;
        sandbox.apply(&manifest("plain", 3, &new, "")).await?;
        let before = sandbox.await_members("c", 3).await?;
        sandbox.await_members("plain", 3).await?;
        let writers = [
            Writer::start_retrying(sandbox, "c", EVERY).await?,
            Writer::start_retrying(sandbox, "plain", EVERY).await?,
        ];
        for name in ["c", "plain"] {
            change(sandbox, name, json!({ "version": old })).await?;
        }
        let after = await_version(sandbox, "c", 3, &old).await?;
        ensure!(members(&after) == members(&before), "other members");
        await_version(sandbox, "plain", 3, &old).await?;
        sandbox
            .await_event(Kind::EtcdCluster, "c", &["DowngradeAllowed"])
            .await?;
        for writer in writers {
            writer.await_more(10).await?;
            let tally = writer.finish("a downgrade").await?;
            ensure!(tally.unknown == 0, "failed writes: {tally}");
        }
        Ok(())
    })
    .await;
}

/// Another version and another size while an upgrade runs.
#[tokio::test]
async fn change_midway() {
    cluster_scenario("change_midway", async |sandbox| {
        let (old, new) = (sandbox.env.newest_of("3.5")?, sandbox.env.newest_of("3.6")?);
        sandbox.apply(&manifest("c", 3, &old, "")).await?;
        sandbox.await_members("c", 3).await?;
        let writer = Writer::start_retrying(sandbox, "c", EVERY).await?;
        change(sandbox, "c", json!({ "version": "3.6.999" })).await?;
        await_reason(sandbox, "c", "Upgrading", "True", "UpgradeStopped").await?;
        // Another version for the one that does not exist, and two members more.
        change(sandbox, "c", json!({ "version": new, "size": 5 })).await?;
        await_version(sandbox, "c", 5, &new).await?;
        change(sandbox, "c", json!({ "size": 3 })).await?;
        sandbox.await_members("c", 3).await?;
        writer.await_more(10).await?;
        let tally = writer.finish("an upgrade changed midway").await?;
        ensure!(tally.unknown == 0, "failed writes: {tally}");
        Ok(())
    })
    .await;
}
