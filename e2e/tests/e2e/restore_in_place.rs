//! Restores over a running cluster: with clients that write and read, and with a higher revision.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use e2e::bucket::Bucket;
use e2e::manifests::{aws_secret, restore_with};
use e2e::objects::{Kind, await_complete, await_object, conditions_line, field, ready_members};
use e2e::store_state::StoreState;
use e2e::wait::Poll;
use e2e::watch::watch_until;
use e2e::{DEADLINE, Keyspace, Reader, Sandbox, Writer, scenario, step, until};
use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Pod, Service};
use k8s_openapi::jiff::Timestamp;
use kube::ResourceExt;
use kube::api::{DynamicObject, ListParams, WatchEvent, WatchParams};

use crate::all_pods_lost::restarts;
use crate::backup_restore_s3::backup;
use crate::fixtures::{DURABLE, cluster_with};
use crate::member_loss::await_one_volume_per_member;
use crate::restore_sources::{await_equal_restore, seconds_between, time};

const KEYS: usize = 500;
pub(crate) const RESTORE_LOCK: &str = "etcd.database.coreos.com/restore";
/// For how long old volumes are kept: longer than the new cluster needs to be complete.
const KEEP_OLD_DATA: Duration = Duration::from_secs(40);
/// Many times what an idle machine needs, so that a busy one passes.
const MAX_DOWNTIME: Duration = Duration::from_mins(2);

/// A cluster with a backup of it, and keys that came after the backup.
pub(crate) struct RunningCluster {
    pub(crate) bucket: Bucket,
    pub(crate) before: DynamicObject,
    pub(crate) keys: Keyspace,
    /// What is in the backup.
    pub(crate) state: StoreState,
}

/// Of three members, with volumes. The backup is `etcd.backup` in the bucket.
pub(crate) async fn cluster_with_backup(sandbox: &Sandbox) -> Result<RunningCluster> {
    let bucket = Bucket::create(sandbox.env.s3()?, &sandbox.namespace).await?;
    sandbox.apply(&aws_secret(sandbox.env.s3()?, "aws")).await?;
    sandbox
        .apply(&cluster_with(&sandbox.env, "c", 3, DURABLE)?)
        .await?;
    let before = sandbox.await_members("c", 3).await?;
    let keys = Keyspace::of_cluster(&sandbox.env, &sandbox.namespace, "c").await?;
    keys.fill("kept/", KEYS, |_| ()).await?;
    keys.fill_mixed("mixed/", 40).await?;
    let state = StoreState::now(&keys).await?;
    sandbox
        .apply(&backup(sandbox, "first", &bucket.name, "etcd.backup")?)
        .await?;
    await_complete(&sandbox.objects(Kind::EtcdBackup), "first", DEADLINE).await?;
    keys.fill("later/", 50, |_| ()).await?;
    Ok(RunningCluster {
        bucket,
        before,
        keys,
        state,
    })
}

/// The manifest of a restore of that backup over that cluster.
pub(crate) fn in_place_restore(sandbox: &Sandbox, bucket: &Bucket, more: &str) -> Result<String> {
    in_place_restore_from(sandbox, "over", bucket, "etcd.backup", more)
}

/// The same, with the name of the EtcdRestore and the key of the backup.
pub(crate) fn in_place_restore_from(
    sandbox: &Sandbox,
    name: &str,
    bucket: &Bucket,
    key: &str,
    more: &str,
) -> Result<String> {
    let path = format!("{}/{key}", bucket.name);
    let more = format!("  overwrite: true\n{more}");
    let s3 = sandbox.env.s3()?;
    Ok(restore_with(s3, name, "{name: c}", &path, &more))
}

pub(crate) fn restore_lock(cluster: &DynamicObject) -> Option<&String> {
    cluster.metadata.annotations.as_ref()?.get(RESTORE_LOCK)
}

/// A cluster of before and the restored one have a token each, which keeps members of one out of the other.
pub(crate) fn ensure_new_token(before: &DynamicObject, after: &DynamicObject) -> Result<()> {
    let token = "/status/bootstrap/token";
    let (before, after) = (field(before, token), field(after, token));
    ensure!(before.is_string() && after.is_string() && before != after);
    Ok(())
}

/// Waits until the cluster's status is of what was restored. It is the cluster operator's, which has the cluster back and
/// tells of the one before until it has looked.
pub(crate) async fn await_replaced(sandbox: &Sandbox, restored: &DynamicObject) -> Result<()> {
    let clusters = sandbox.objects(Kind::EtcdCluster);
    let id = field(restored, "/status/clusterID");
    ensure!(id.is_string(), "no cluster ID is recorded");
    await_object(&clusters, "c", "the restored one", DEADLINE, |object| {
        field(object, "/status/clusterID") == id && restore_lock(object).is_none()
    })
    .await
    .map(drop)
}

/// Waits until an EtcdRestore that was deleted, or has had its time, is gone.
pub(crate) async fn await_gone(sandbox: &Sandbox, restore: &str) -> Result<()> {
    let restores = sandbox.objects(Kind::EtcdRestore);
    until("the EtcdRestore is gone", DEADLINE, async || {
        Ok(match restores.get_opt(restore).await? {
            None => Poll::Done(()),
            Some(object) => Poll::NotYet(conditions_line(&object)),
        })
    })
    .await
}

/// The pods of the members of `c`: the name, the UID and the restarts of each.
pub(crate) async fn restarts_of(sandbox: &Sandbox) -> Result<Vec<(String, Option<String>, i32)>> {
    restarts_of_cluster(sandbox, "c").await
}

/// The same, of any cluster.
pub(crate) async fn restarts_of_cluster(
    sandbox: &Sandbox,
    cluster: &str,
) -> Result<Vec<(String, Option<String>, i32)>> {
    let pods = sandbox.member_pods(cluster).await?;
    let describe = |pod: &Pod| (pod.name_any(), pod.uid(), restarts(pod));
    Ok(pods.iter().map(describe).collect())
}

async fn service_uids(sandbox: &Sandbox) -> Result<Vec<Option<String>>> {
    let services = sandbox.api::<Service>();
    let (headless, client) = (services.get("c").await?, services.get("c-client").await?);
    Ok(vec![headless.metadata.uid, client.metadata.uid])
}

async fn volumes(sandbox: &Sandbox) -> Result<Vec<String>> {
    let selector = ListParams::default().labels("etcd_cluster=c");
    let volumes = sandbox.api::<PersistentVolumeClaim>();
    let list = volumes.list(&selector).await?;
    let there = list
        .iter()
        .filter(|one| one.metadata.deletion_timestamp.is_none());
    Ok(there.filter_map(|one| one.metadata.name.clone()).collect())
}

async fn await_volumes(sandbox: &Sandbox, count: usize) -> Result<()> {
    until(&format!("{count} volumes"), DEADLINE, async || {
        let there = volumes(sandbox).await?;
        Ok(if there.len() == count {
            Poll::Done(())
        } else {
            Poll::NotYet(there.join(", "))
        })
    })
    .await
}

#[tokio::test]
async fn running_cluster_is_restored_in_place() {
    scenario("restore_in_place", async |sandbox| {
        let running = cluster_with_backup(sandbox).await?;
        let restored = while_clients_write_and_read(sandbox, &running);
        step("restore while clients write and read", restored).await?;
        let bumped = with_bumped_revision(sandbox, &running);
        step("restore with a higher revision", bumped).await
    })
    .await;
}

/// Clients go on at the same address, and never reach both clusters. Old volumes are kept for as long as was asked for.
async fn while_clients_write_and_read(sandbox: &Sandbox, running: &RunningCluster) -> Result<()> {
    let services = service_uids(sandbox).await?;
    let reader = Reader::start(sandbox, "c", "kept/").await?;
    let writer = Writer::start(sandbox, "c").await?;
    let old = volumes(sandbox).await?;
    let kept = format!("  keepOldData: {}s\n", KEEP_OLD_DATA.as_secs());
    sandbox
        .apply(&in_place_restore(sandbox, &running.bucket, &kept)?)
        .await?;
    let restored = await_equal_restore(sandbox, "over", "c", &running.state).await?;

    await_replaced(sandbox, &restored).await?;
    let after = sandbox.await_members("c", 3).await?;
    ensure!(
        after.metadata.uid == running.before.metadata.uid,
        "the EtcdCluster was replaced"
    );
    ensure!(
        field(&after, "/spec") == field(&running.before, "/spec"),
        "its spec changed"
    );
    ensure!(restore_lock(&after).is_none(), "the claim is still there");
    ensure!(field(&after, "/status/clusterID") == field(&restored, "/status/clusterID"));
    ensure!(field(&after, "/status/clusterID") != field(&running.before, "/status/clusterID"));
    ensure_new_token(&running.before, &after)?;
    ensure!(
        service_uids(sandbox).await? == services,
        "a Service was replaced"
    );
    // Clients go on by themselves, at the same address.
    writer.await_more(10).await?;
    reader.await_more(10).await?;
    let tally = writer.finish_counting("restored in place").await?;
    ensure!(
        !tally.lost.is_empty(),
        "what was written before the restore is still there"
    );
    ensure!(tally.gap < MAX_DOWNTIME, "{tally}");
    // Invariant 17: first the old cluster answered, then the new one, each with every key.
    let readings = reader.finish(KEYS)?;
    ensure!(readings.clusters.len() == 2, "{readings:?}");
    ensure!(readings.gap < MAX_DOWNTIME, "{readings:?}");
    let answered: Vec<String> = readings
        .clusters
        .iter()
        .map(|id| format!("{id:x}"))
        .collect();
    ensure!(field(&running.before, "/status/clusterID") == answered[0].as_str());
    ensure!(field(&after, "/status/clusterID") == answered[1].as_str());

    let keys = Keyspace::of_cluster(&sandbox.env, &sandbox.namespace, "c").await?;
    ensure!(keys.verify("kept/", KEYS).await? >= running.state.revision);
    keys.verify("later/", 0)
        .await
        .context("keys newer than the backup")?;
    // The new cluster is complete, and the old volumes have their time.
    old_volumes_expire(sandbox, &after, old).await?;
    await_one_volume_per_member(sandbox, &ready_members(&after)).await
}

/// The volumes of what was replaced stay for as long as was asked for, and then go.
async fn old_volumes_expire(
    sandbox: &Sandbox,
    cluster: &DynamicObject,
    mut old: Vec<String>,
) -> Result<()> {
    let until = "/status/replaced/keepDataUntil";
    let kept = seconds_between(cluster, "/status/replaced/time", until)?;
    ensure!(
        u64::try_from(kept)? == KEEP_OLD_DATA.as_secs(),
        "kept for {kept} s"
    );
    let until = time(cluster, until)?;
    let of_cluster = "etcd_cluster=c";
    let claims = sandbox.api::<PersistentVolumeClaim>();
    let there = claims
        .list(&ListParams::default().labels(of_cluster))
        .await?;
    let observed_at = Timestamp::now();
    let stays = |name: &String| there.iter().any(|claim| claim.name_any() == *name);
    ensure!(
        old.len() == 3 && (old.iter().all(stays) || observed_at >= until),
        "{old:?} were to be kept until {until}, and at {observed_at} there are {:?}",
        there.iter().map(ResourceExt::name_any).collect::<Vec<_>>()
    );
    // On a machine so slow that their time was over before the new cluster was complete they may be gone.
    old.retain(stays);
    if old.is_empty() {
        return Ok(());
    }
    let since = there.metadata.resource_version.unwrap_or_default();
    let of_cluster = WatchParams::default().labels(of_cluster);
    let mut early = Vec::new();
    watch_until(&claims, &of_cluster, &since, DEADLINE, |change| {
        if let WatchEvent::Deleted(claim) = change {
            let name = claim.name_any();
            let deleted = claim.metadata.deletion_timestamp.map(|time| time.0);
            if deleted.is_none_or(|deleted| deleted < until) {
                early.push(format!("{name} at {deleted:?}"));
            }
            old.retain(|one| *one != name);
        }
        old.is_empty().then_some(())
    })
    .await
    .context("the old volumes go")?;
    ensure!(early.is_empty(), "before {until}: {early:?}");
    Ok(())
}

/// Each by itself.
async fn ensure_every_member_has(
    sandbox: &Sandbox,
    cluster: &DynamicObject,
    state: &StoreState,
) -> Result<()> {
    let members = ready_members(cluster);
    ensure!(members.len() == 3, "{members:?}");
    for member in members {
        let keys = Keyspace::of_pod(&sandbox.env, &sandbox.namespace, &member).await?;
        let is = StoreState::at(&keys, state.revision).await?;
        state.ensure_same(&is).context(member)?;
    }
    Ok(())
}

/// A client that goes on watching from a revision of the old history learns that it has missed changes.
async fn with_bumped_revision(sandbox: &Sandbox, running: &RunningCluster) -> Result<()> {
    let keys = Keyspace::of_cluster(&sandbox.env, &sandbox.namespace, "c").await?;
    keys.fill("later/", 50, |_| ()).await?;
    let seen = keys.revision().await?;
    let backed_up = running.state.revision;
    ensure!(seen > backed_up);
    drop(keys);
    let old = volumes(sandbox).await?;
    let bump = "  bumpRevision: 1000000\n  markCompacted: true\n  keepOldData: 24h\n";
    let manifest = in_place_restore_from(sandbox, "bump", &running.bucket, "etcd.backup", bump)?;
    sandbox.apply(&manifest).await?;
    let restored = await_complete(&sandbox.objects(Kind::EtcdRestore), "bump", DEADLINE).await?;
    let revision = field(&restored, "/status/restoredRevision").as_i64();
    ensure!(revision == Some(backed_up + 1_000_000), "{revision:?}");
    await_replaced(sandbox, &restored).await?;
    let is = sandbox.await_members("c", 3).await?;
    let keys = Keyspace::of_cluster(&sandbox.env, &sandbox.namespace, "c").await?;
    ensure!(Some(keys.verify("kept/", KEYS).await?) == revision);
    let compacted = keys.watch_from("kept/", seen).await?;
    ensure!(
        compacted > seen,
        "compacted up to {compacted}, and the watcher had seen {seen}"
    );
    // The volumes of what was replaced are kept as long as was asked for.
    let kept = volumes(sandbox).await?;
    ensure!(kept.len() == 6, "{kept:?}");
    // Values, revisions, versions and leases are those of the backup. The hash cannot be: by its definition it is of
    // the history since the compaction, which is thrown away here, and of the record with which etcdutl raises the
    // revision. What is compared instead is that every member has the same.
    let after = StoreState::now(&keys).await?;
    running.state.ensure_same_keys(&after)?;
    ensure_every_member_has(sandbox, &is, &after).await?;
    let before = StoreState::at(&keys, backed_up).await;
    let refused = before.err().context("the history is still there")?;
    ensure!(format!("{refused:#}").contains("compacted"), "{refused:#}");
    drop(keys);
    // Also when volumes of the new members go.
    sandbox.scale("c", 1).await?;
    sandbox.await_members("c", 1).await?;
    await_volumes(sandbox, old.len() + 1).await?;
    let kept = volumes(sandbox).await?;
    ensure!(
        old.iter().all(|volume| kept.contains(volume)),
        "{kept:?} are left, and {old:?} were to be kept"
    );
    Ok(())
}
