//! Restores in place while clients read and write, and with a raised revision.

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
/// How long the old volumes are kept, which is longer than the restore takes.
const KEEP_OLD_DATA: Duration = Duration::from_secs(40);
/// The maximum downtime. A busy machine needs much more time than an idle machine.
const MAX_DOWNTIME: Duration = Duration::from_mins(2);

/// A running cluster with a backup. Some of its keys are newer than the backup.
pub(crate) struct RunningCluster {
    pub(crate) bucket: Bucket,
    pub(crate) before: DynamicObject,
    pub(crate) keys: Keyspace,
    /// The data in the backup.
    pub(crate) state: StoreState,
}

/// Creates the cluster `c` with three members and volumes, and its backup `etcd.backup` in the bucket.
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

/// The manifest of a restore in place from the backup `etcd.backup`.
pub(crate) fn in_place_restore(sandbox: &Sandbox, bucket: &Bucket, more: &str) -> Result<String> {
    in_place_restore_from(sandbox, "over", bucket, "etcd.backup", more)
}

/// Like [`in_place_restore`], with another name of the EtcdRestore, and another object key of the backup in the bucket.
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

/// Ensures that the restored cluster has a new cluster token, which separates it from the old members.
pub(crate) fn ensure_new_token(before: &DynamicObject, after: &DynamicObject) -> Result<()> {
    let token = "/status/bootstrap/token";
    let (before, after) = (field(before, token), field(after, token));
    ensure!(before.is_string() && after.is_string() && before != after);
    Ok(())
}

/// Waits until the status describes the restored cluster, and no restore lock exists. After a restore, the status
/// describes the old cluster until the operator reconciles the EtcdCluster.
pub(crate) async fn await_replaced(sandbox: &Sandbox, restored: &DynamicObject) -> Result<()> {
    let clusters = sandbox.objects(Kind::EtcdCluster);
    let id = field(restored, "/status/clusterID");
    ensure!(id.is_string(), "no cluster ID is recorded");
    await_object(&clusters, "c", "the restored cluster", DEADLINE, |object| {
        field(object, "/status/clusterID") == id && restore_lock(object).is_none()
    })
    .await
    .map(drop)
}

/// Waits until the EtcdRestore does not exist any more.
pub(crate) async fn await_restore_deleted(sandbox: &Sandbox, restore: &str) -> Result<()> {
    let restores = sandbox.objects(Kind::EtcdRestore);
    until("the EtcdRestore is deleted", DEADLINE, async || {
        Ok(match restores.get_opt(restore).await? {
            None => Poll::Done(()),
            Some(object) => Poll::NotYet(conditions_line(&object)),
        })
    })
    .await
}

/// The name, UID and restarts of each pod of the cluster `c`.
pub(crate) async fn restarts_of(sandbox: &Sandbox) -> Result<Vec<(String, Option<String>, i32)>> {
    restarts_of_cluster(sandbox, "c").await
}

/// Like [`restarts_of`], for the cluster `cluster`.
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

/// The Services stay, so clients keep their address. No client reaches the old cluster after it has reached the new
/// cluster. The old volumes stay for the time `keepOldData` of the EtcdRestore.
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
        "the EtcdCluster was recreated"
    );
    ensure!(
        field(&after, "/spec") == field(&running.before, "/spec"),
        "the spec changed"
    );
    ensure!(
        restore_lock(&after).is_none(),
        "the restore lock still exists"
    );
    ensure!(field(&after, "/status/clusterID") == field(&restored, "/status/clusterID"));
    ensure!(field(&after, "/status/clusterID") != field(&running.before, "/status/clusterID"));
    ensure_new_token(&running.before, &after)?;
    ensure!(
        service_uids(sandbox).await? == services,
        "a Service was recreated"
    );
    // Clients can reconnect, because the Services are the same.
    writer.await_more(10).await?;
    reader.await_more(10).await?;
    let tally = writer.finish_counting("in-place restore").await?;
    ensure!(
        !tally.lost.is_empty(),
        "writes that are newer than the backup still exist"
    );
    ensure!(tally.gap < MAX_DOWNTIME, "{tally}");
    // Invariant 17: the old cluster answers no read after the first response of the new cluster. Every response
    // contains all keys.
    let summary = reader.finish(KEYS)?;
    ensure!(summary.clusters.len() == 2, "{summary:?}");
    ensure!(summary.gap < MAX_DOWNTIME, "{summary:?}");
    let answered: Vec<String> = summary
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
    // The new cluster is complete, so the time for which the operator keeps old volumes has started.
    old_volumes_expire(sandbox, &after, old).await?;
    await_one_volume_per_member(sandbox, &ready_members(&after)).await
}

/// Ensures that the old volumes are kept for the requested time, and then deleted.
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
        "{old:?} must be kept until {until}; at {observed_at} the PVCs are {:?}",
        there.iter().map(ResourceExt::name_any).collect::<Vec<_>>()
    );
    // On a slow machine, the time may have ended before this check, and the operator may have deleted some of the
    // volumes. The test does not check these volumes.
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
    .context("wait for the deletion of old volumes")?;
    ensure!(
        early.is_empty(),
        "volumes were deleted before {until}: {early:?}"
    );
    Ok(())
}

/// Reads from each member, and ensures that every member has all keys.
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

/// A client resumes a watch at a revision of the old cluster. etcd must cancel this watch, so that the client notices
/// the missed changes.
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
        "etcd has compacted only up to {compacted}, but the client had seen revision {seen}"
    );
    // The old volumes must exist, because `keepOldData` is one day.
    let kept = volumes(sandbox).await?;
    ensure!(kept.len() == 6, "{kept:?}");
    // The restored keys and leases must equal the backup. The hashes of the members are only compared with each
    // other, because a hash covers the history since the last compaction, and the restore changes this history when
    // it raises the revision.
    let after = StoreState::now(&keys).await?;
    running.state.ensure_same_keys(&after)?;
    ensure_every_member_has(sandbox, &is, &after).await?;
    let before = StoreState::at(&keys, backed_up).await;
    let error = before.err().context("the old history still exists")?;
    ensure!(format!("{error:#}").contains("compacted"), "{error:#}");
    drop(keys);
    // When the operator removes members, it must not delete the old volumes.
    sandbox.scale("c", 1).await?;
    sandbox.await_members("c", 1).await?;
    await_volumes(sandbox, old.len() + 1).await?;
    let kept = volumes(sandbox).await?;
    ensure!(
        old.iter().all(|volume| kept.contains(volume)),
        "the PVCs {kept:?} remain, expected {old:?}"
    );
    Ok(())
}
