//! The version changes under a cluster that serves: member by member, forwards, backwards, and not at all where etcd
//! has no way.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use e2e::objects::{Kind, await_object, condition, field, members};
use e2e::{PATIENCE, Sandbox, Writer, scenario};
use kube::api::{DynamicObject, Patch, PatchParams};
use serde_json::json;

use crate::fixtures::DURABLE;

/// From one write of the client to the next.
const EVERY: Duration = Duration::from_millis(50);

/// The version of this minor release that the nodes hold the image of.
pub(crate) fn of_minor(sandbox: &Sandbox, minor: &str) -> Result<String> {
    let prefix = format!("{minor}.");
    let mut known = sandbox.env.etcd_versions.iter();
    let found = known.find(|version| version.starts_with(&prefix));
    found
        .cloned()
        .with_context(|| format!("the nodes hold no image of etcd {minor}"))
}

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
    scenario("upgrade_under_load", async |sandbox| {
        let versions = ["3.4", "3.5", "3.6", "3.7"].map(|minor| of_minor(sandbox, minor));
        let [first, versions @ ..] = versions;
        sandbox.apply(&manifest("c", 3, &first?, "")).await?;
        let before = sandbox.await_members("c", 3).await?;
        let pods_before = pods(sandbox, "c").await?;
        let writer = Writer::start_retrying(sandbox, "c", EVERY).await?;
        for version in versions {
            let version = version?;
            change(sandbox, "c", json!({ "version": version })).await?;
            await_version(sandbox, "c", 3, &version).await?;
        }
        let after = sandbox.await_members("c", 3).await?;
        ensure!(members(&after) == members(&before), "other members");
        in_place(&pods_before, &pods(sandbox, "c").await?, 3)?;
        writer.await_more(10).await?;
        let tally = writer.finish("three upgrades").await?;
        ensure!(tally.unknown == 0, "failed writes: {tally}");
        Ok(())
    })
    .await;
}

/// A minor release that is skipped, and a way back that etcd does not have: nothing changes, and the stop-over is named.
#[tokio::test]
async fn upgrade_refused() {
    scenario("upgrade_refused", async |sandbox| {
        let old = of_minor(sandbox, "3.5")?;
        sandbox.apply(&manifest("c", 1, &old, "")).await?;
        sandbox.await_members("c", 1).await?;
        let before = pods(sandbox, "c").await?;
        for (wanted, says) in [
            (of_minor(sandbox, "3.7")?, "3.6.11 or a later 3.6"),
            (of_minor(sandbox, "3.4")?, "cannot go back"),
        ] {
            change(sandbox, "c", json!({ "version": wanted })).await?;
            let clusters = sandbox.objects(Kind::EtcdCluster);
            await_object(&clusters, "c", says, PATIENCE, |object| {
                let found = condition(object, "Upgrading");
                let message = found.and_then(|found| found["message"].as_str());
                is_condition(object, "Upgrading", "False", "VersionRefused")
                    && message.is_some_and(|message| message.contains(says))
            })
            .await?;
            let object = clusters.get("c").await?;
            ensure!(field(&object, "/status/currentVersion") == old.as_str());
            ensure!(field(&object, "/status/targetVersion").is_null());
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
    scenario("bad_image", async |sandbox| {
        let old = of_minor(sandbox, "3.6")?;
        let missing = "3.6.999";
        sandbox.apply(&manifest("c", 3, &old, "")).await?;
        let before = sandbox.await_members("c", 3).await?;
        let writer = Writer::start_retrying(sandbox, "c", EVERY).await?;
        change(sandbox, "c", json!({ "version": missing })).await?;
        await_reason(sandbox, "c", "Upgrading", "True", "UpgradeStopped").await?;
        let object = sandbox.objects(Kind::EtcdCluster).get("c").await?;
        ensure!(condition(&object, "Degraded").is_some_and(|found| found["status"] == "True"));
        ensure!(field(&object, "/status/currentVersion") == old.as_str());
        ensure!(field(&object, "/status/targetVersion") == missing);
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
    scenario("rollback", async |sandbox| {
        let (old, new) = (of_minor(sandbox, "3.5")?, of_minor(sandbox, "3.6")?);
        sandbox.apply(&manifest("c", 3, &old, DURABLE)).await?;
        let before = sandbox.await_members("c", 3).await?;
        let writer = Writer::start_retrying(sandbox, "c", EVERY).await?;
        change(sandbox, "c", json!({ "version": new })).await?;
        let clusters = sandbox.objects(Kind::EtcdCluster);
        await_object(
            &clusters,
            "c",
            "one member is changed",
            PATIENCE,
            |object| {
                let details = field(object, "/status/memberDetails").as_array();
                details.is_some_and(|list| list.iter().any(|one| one["version"] == new.as_str()))
            },
        )
        .await?;
        change(sandbox, "c", json!({ "version": old })).await?;
        let after = await_version(sandbox, "c", 3, &old).await?;
        ensure!(members(&after) == members(&before), "other members");
        writer.await_more(10).await?;
        let tally = writer.finish("an upgrade taken back").await?;
        ensure!(tally.unknown == 0, "failed writes: {tally}");
        Ok(())
    })
    .await;
}

/// From 3.6 back to 3.5 by etcd's own downgrade, with disks and without.
#[tokio::test]
async fn downgrade() {
    scenario("downgrade", async |sandbox| {
        let (old, new) = (of_minor(sandbox, "3.5")?, of_minor(sandbox, "3.6")?);
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
    scenario("change_midway", async |sandbox| {
        let (old, new) = (of_minor(sandbox, "3.5")?, of_minor(sandbox, "3.6")?);
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
