//! A cluster is backed up to an S3 server and deleted. A restore creates the cluster again with all keys of the backup.

use anyhow::{Context, Result, ensure};
use e2e::bucket::Bucket;
use e2e::manifests;
use e2e::metrics::Page;
use e2e::objects::{Kind, await_complete, field, has_condition, ready_members};
use e2e::store_state::StoreState;
use e2e::wait::Poll;
use e2e::{DEADLINE, Keyspace, Sandbox, scenario, step, until};
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use kube::api::DynamicObject;

use crate::all_pods_lost::same_members;
use crate::fixtures::{DURABLE, cluster_with};
use crate::member_loss::await_one_volume_per_member;
use crate::restore_sources::{await_equal_restore, filled_cluster, seconds_between};

const KEYS: usize = 2_000;
const KEY: &str = "daily/etcd.backup";
const MANIFEST: &str = "daily/etcd.backup.manifest.json";

pub(crate) fn backup(sandbox: &Sandbox, name: &str, bucket: &str, key: &str) -> Result<String> {
    let s3 = sandbox.env.s3()?;
    Ok(manifests::backup(s3, name, "c", &format!("{bucket}/{key}")))
}

/// Ensures that the status of a completed object has the current generation, a start and an end time, and no failure
/// reason.
fn ensure_final_status(done: &DynamicObject, reason: &str) -> Result<()> {
    let generation = field(done, "/status/observedGeneration").as_i64();
    ensure!(generation.is_some() && generation == done.metadata.generation);
    let (began, ended) = (
        field(done, "/status/startTime").as_str(),
        field(done, "/status/completionTime").as_str(),
    );
    // The two times can be compared as text, because both are in UTC and have the same precision.
    ensure!(
        began.is_some() && began <= ended,
        "began {began:?}, ended {ended:?}"
    );
    ensure!(field(done, reason).is_null(), "{}", field(done, reason));
    ensure!(has_condition(done, "Complete", "True") && has_condition(done, "Failed", "False"));
    Ok(())
}

/// The cluster before its deletion.
struct Before {
    cluster: DynamicObject,
    /// The data at the time of the backup.
    state: StoreState,
}

/// Invariant 12: the stored backup contains all data that etcd sent.
#[tokio::test]
async fn deleted_cluster_is_restored_from_its_s3_backup() {
    scenario("backup_restore_s3", async |sandbox| {
        let manifest = cluster_with(&sandbox.env, "c", 3, DURABLE)?;
        let (bucket, keys) = filled_cluster(sandbox, &manifest, 3).await?;
        keys.fill("kept/", KEYS, |_| ()).await?;
        let before = Before {
            cluster: sandbox.await_members("c", 3).await?,
            state: StoreState::now(&keys).await?,
        };
        let backed_up = is_backed_up(sandbox, &bucket, &before);
        step("back up", backed_up).await?;
        // The restored cluster must not contain these keys, because they are newer than the backup.
        keys.fill("later/", 10, |_| ()).await?;
        drop(keys);
        sandbox.delete_cluster("c").await?;
        let back = format!("{}/{KEY}", bucket.name);
        let back = manifests::restore(sandbox.env.s3()?, "back", "c", &back);
        sandbox.apply(&back).await?;
        let restored = step("restore", is_restored(sandbox, &before)).await?;
        let checked = check_events_and_metrics(sandbox, &restored);
        step("check Events and metrics", checked).await?;
        let served = serves_as_before(sandbox, &restored, &before);
        let is = step("check the cluster", served).await?;
        let again = seed_restarts_with_its_data(sandbox, &restored, &is, &before.state);
        step("lose the seed's pod", again).await
    })
    .await;
}

async fn is_backed_up(sandbox: &Sandbox, bucket: &Bucket, before: &Before) -> Result<()> {
    let manifest = backup(sandbox, "first", &bucket.name, KEY)?;
    sandbox.apply(&manifest).await?;
    let done = await_complete(&sandbox.objects(Kind::EtcdBackup), "first", DEADLINE).await?;
    ensure!(field(&done, "/status/succeeded") == true);
    let cluster = &before.cluster;
    ensure!(field(&done, "/status/etcdVersion") == field(cluster, "/status/currentVersion"));
    ensure!(field(&done, "/status/clusterID") == field(cluster, "/status/clusterID"));
    // The backup has the revision of the last key, because no client writes between this key and the snapshot.
    let revision = field(&done, "/status/etcdRevision");
    ensure!(
        *revision == before.state.revision,
        "the status has revision {revision}"
    );

    // The bucket must contain only the backup and its manifest.
    let objects = bucket.keys().await?;
    ensure!(objects == [KEY, MANIFEST], "{objects:?}");
    ensure!(bucket.unfinished_uploads().await? == 0);
    let snapshot = bucket.read(KEY).await?;
    ensure!(field(&done, "/status/size") == snapshot.len());
    let recorded: serde_json::Value = serde_json::from_slice(&bucket.read(MANIFEST).await?)?;
    ensure!(
        recorded["sha256"] == *field(&done, "/status/sha256"),
        "manifest: {recorded}"
    );
    ensure!(
        recorded["hash"] == before.state.hash.0,
        "the manifest's hash: {recorded}"
    );

    let location = format!("s3://{}/{KEY}", bucket.name);
    ensure!(*field(&done, "/status/location") == location);
    ensure_final_status(&done, "/status/Reason")?;
    let last = field(&done, "/status/lastSuccessDate").as_str();
    ensure!(last.is_some() && last <= field(&done, "/status/completionTime").as_str());
    Ok(())
}

/// The EtcdCluster is deleted, so the restore takes the spec from the manifest of the backup.
async fn is_restored(sandbox: &Sandbox, before: &Before) -> Result<DynamicObject> {
    let restored = await_equal_restore(sandbox, "back", "c", &before.state).await?;
    ensure!(field(&restored, "/status/succeeded") == true);
    ensure_final_status(&restored, "/status/reason")?;
    ensure!(field(&restored, "/status/phase") == "Complete");
    let (bytes, total) = ("/status/progress/bytes", "/status/progress/totalBytes");
    ensure!(
        field(&restored, bytes).as_i64() > Some(0),
        "the status has no progress"
    );
    ensure!(field(&restored, bytes) == field(&restored, total));
    Ok(restored)
}

/// The restored cluster has the spec of the deleted cluster, new volumes, and exactly the keys of the backup. The
/// cluster accepts writes.
async fn serves_as_before(
    sandbox: &Sandbox,
    restored: &DynamicObject,
    before: &Before,
) -> Result<DynamicObject> {
    let after = sandbox.await_members("c", 3).await?;
    let members = ready_members(&after);
    let seed = field(restored, "/status/seed/member").as_str();
    ensure!(
        seed.is_some_and(|seed| members.iter().any(|name| name == seed)),
        "{seed:?} is not a member"
    );
    ensure!(field(restored, "/status/clusterID") == field(&after, "/status/clusterID"));
    ensure!(field(&after, "/spec") == field(&before.cluster, "/spec"));
    ensure!(
        field(&after, "/status/clusterID") != field(&before.cluster, "/status/clusterID"),
        "the restored cluster has the old cluster ID"
    );
    let lock = after.annotations().get("etcd.database.coreos.com/restore");
    ensure!(lock.is_none(), "the EtcdCluster still has the restore lock");
    await_one_volume_per_member(sandbox, &members).await?;

    let written = before.state.revision;
    let keys = Keyspace::of_cluster(&sandbox.env, &sandbox.namespace, "c").await?;
    ensure!(keys.verify("kept/", KEYS).await? >= written);
    keys.verify("later/", 0)
        .await
        .context("keys newer than the backup")?;
    keys.fill("after/", 100, |_| ()).await?;
    ensure!(keys.revision().await? > written);
    Ok(after)
}

/// Deletes the Secret for the download, and then the pod of the seed. The seed must restart with its data, and must not
/// download the backup again. The test reads the data from the seed itself.
async fn seed_restarts_with_its_data(
    sandbox: &Sandbox,
    done: &DynamicObject,
    cluster: &DynamicObject,
    before: &StoreState,
) -> Result<()> {
    let seed = field(done, "/status/seed/member").as_str();
    let seed = seed.context("no seed is recorded")?;
    let pods = sandbox.api::<Pod>();
    let lost = pods.get(seed).await?.metadata.uid;
    sandbox.kubectl(&["delete", "secret", "aws"]).await?;
    sandbox.lose_pod("c", seed).await?;
    let is = sandbox.await_members("c", 3).await?;
    same_members(cluster, &is)?;
    ensure!(pods.get(seed).await?.metadata.uid != lost);
    let keys = Keyspace::of_pod(&sandbox.env, &sandbox.namespace, seed).await?;
    before.ensure_same(&StoreState::at(&keys, before.revision).await?)
}

/// Ensures that Events report the steps of the restore, and that the metrics report its duration and size.
async fn check_events_and_metrics(sandbox: &Sandbox, done: &DynamicObject) -> Result<()> {
    let name = done.name_any();
    for reason in [
        "ClusterCreated",
        "SeedStarted",
        "SeedServes",
        "HandedOver",
        "RestoreComplete",
    ] {
        let words = ["Normal", reason];
        let kind = Kind::EtcdRestore;
        sandbox.await_event(kind, &name, &words).await?;
    }
    let namespace = &sandbox.namespace;
    let of_it = format!("namespace=\"{namespace}\",cluster=\"c\",name=\"{name}\"");
    let bytes = field(done, "/status/progress/bytes").as_i64();
    let bytes = bytes.context("the status has no progress")?;
    let took = seconds_between(done, "/status/startTime", "/status/completionTime")?;
    // The operator exports these metrics as integers.
    let expected = [
        ("size_bytes", bytes),
        ("progress_bytes", bytes),
        ("duration_seconds", took),
        ("throughput_bytes_per_second", bytes / took.max(1)),
        ("failed", 0),
    ];
    until(
        "the metrics of the restore are complete",
        DEADLINE,
        async || {
            let page = Page::of_operator(sandbox, "etcd-restore-operator").await?;
            // The sum of no numbers is -0 in Rust, and adding 0 changes it to 0.
            let measured =
                |what: &str| page.sum(&format!("etcd_operator_restore_{what}"), &of_it) + 0.0;
            let found = expected.map(|(what, _)| (what, measured(what).to_string()));
            Ok(
                if found == expected.map(|(what, it)| (what, it.to_string())) {
                    Poll::Done(())
                } else {
                    Poll::NotYet(format!("{found:?}, expected {expected:?}"))
                },
            )
        },
    )
    .await
}
