//! A backup to a real S3 server, the loss of the cluster, and its return with every key.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use e2e::bucket::Bucket;
use e2e::manifests::{self, aws_secret};
use e2e::objects::{
    Kind, await_complete, await_object, conditions_line, field, has_condition, has_failed_for,
    ready_members,
};
use e2e::{Keyspace, PATIENCE, Sandbox, scenario};
use kube::api::DynamicObject;
use tokio::time::timeout;

use crate::fixtures::{DURABLE, cluster, cluster_with};
use crate::member_loss::await_one_volume_a_member;
use crate::restore_in_place::pods_of;

const KEYS: usize = 2_000;

pub(crate) fn backup(sandbox: &Sandbox, name: &str, bucket: &str, key: &str) -> Result<String> {
    let s3 = sandbox.env.s3()?;
    Ok(manifests::backup(s3, name, "c", &format!("{bucket}/{key}")))
}

fn restore(sandbox: &Sandbox, name: &str, bucket: &str, key: &str) -> Result<String> {
    let s3 = sandbox.env.s3()?;
    Ok(manifests::restore(
        s3,
        name,
        "c",
        &format!("{bucket}/{key}"),
    ))
}

/// What is done says of which generation it speaks, when it began and ended, and no reason of a failure.
fn is_told_to_the_end(done: &DynamicObject, reason: &str) -> Result<()> {
    let generation = field(done, "/status/observedGeneration").as_i64();
    ensure!(generation.is_some() && generation == done.metadata.generation);
    let (began, ended) = (
        field(done, "/status/startTime").as_str(),
        field(done, "/status/completionTime").as_str(),
    );
    // Both in UTC, to the second.
    ensure!(
        began.is_some() && began <= ended,
        "began {began:?}, ended {ended:?}"
    );
    ensure!(field(done, reason).is_null(), "{}", field(done, reason));
    ensure!(has_condition(done, "Complete", "True") && has_condition(done, "Failed", "False"));
    Ok(())
}

async fn the_whole_way(sandbox: &Sandbox, manifest: &str) -> Result<()> {
    let bucket = Bucket::create(sandbox.env.s3()?, &sandbox.namespace).await?;
    sandbox.apply(manifest).await?;
    sandbox.apply(&aws_secret(sandbox.env.s3()?, "aws")).await?;
    let before = sandbox.await_members("c", 3).await?;
    let keys = Keyspace::of_cluster(&sandbox.env, &sandbox.namespace, "c").await?;
    let written = keys.fill("kept/", KEYS, |_| ()).await?;

    sandbox
        .apply(&backup(
            sandbox,
            "first",
            &bucket.name,
            "daily/etcd.backup",
        )?)
        .await?;
    let done = await_complete(&sandbox.objects(Kind::EtcdBackup), "first", PATIENCE).await?;
    ensure!(field(&done, "/status/succeeded") == true);
    ensure!(field(&done, "/status/etcdVersion") == field(&before, "/status/currentVersion"));
    ensure!(field(&done, "/status/clusterID") == field(&before, "/status/clusterID"));
    // The recorded revision is the snapshot's own: nothing wrote after the last key.
    ensure!(
        field(&done, "/status/etcdRevision") == written,
        "{} recorded",
        field(&done, "/status/etcdRevision")
    );

    // What the status says is what the bucket holds: the object and its manifest, nothing else, nothing unfinished.
    let objects = bucket.keys().await?;
    ensure!(
        objects == ["daily/etcd.backup", "daily/etcd.backup.manifest.json"],
        "{objects:?}"
    );
    ensure!(bucket.unfinished_uploads().await? == 0);
    let snapshot = bucket.read("daily/etcd.backup").await?;
    ensure!(field(&done, "/status/size") == snapshot.len());
    let recorded: serde_json::Value =
        serde_json::from_slice(&bucket.read("daily/etcd.backup.manifest.json").await?)?;
    ensure!(
        recorded["sha256"] == *field(&done, "/status/sha256"),
        "manifest: {recorded}"
    );

    ensure!(
        field(&done, "/status/location")
            == format!("s3://{}/daily/etcd.backup", bucket.name).as_str()
    );
    is_told_to_the_end(&done, "/status/Reason")?;
    let last = field(&done, "/status/lastSuccessDate").as_str();
    ensure!(last.is_some() && last <= field(&done, "/status/completionTime").as_str());

    // Written after the backup: must not be there after the restore.
    keys.fill("later/", 10, |_| ()).await?;
    drop(keys);
    sandbox.delete_cluster("c").await?;

    sandbox
        .apply(&restore(
            sandbox,
            "back",
            &bucket.name,
            "daily/etcd.backup",
        )?)
        .await?;
    let restored = await_complete(&sandbox.objects(Kind::EtcdRestore), "back", PATIENCE).await?;
    ensure!(field(&restored, "/status/succeeded") == true);
    ensure!(field(&restored, "/status/restoredRevision").as_i64() >= Some(written));
    is_told_to_the_end(&restored, "/status/reason")?;
    ensure!(field(&restored, "/status/phase") == "Complete");
    let after = sandbox.await_members("c", 3).await?;
    let seed = field(&restored, "/status/seed/member").as_str();
    ensure!(
        seed.is_some_and(|seed| ready_members(&after).iter().any(|name| name == seed)),
        "{seed:?} is no member"
    );
    ensure!(field(&restored, "/status/clusterID") == field(&after, "/status/clusterID"));
    ensure!(field(&after, "/spec/size") == field(&before, "/spec/size"));
    ensure!(
        field(&after, "/status/clusterID") != field(&before, "/status/clusterID"),
        "a restore is a new cluster"
    );
    let claim = after
        .metadata
        .annotations
        .as_ref()
        .and_then(|a| a.get("etcd.database.coreos.com/restore"));
    ensure!(claim.is_none(), "the restore's claim is still there");

    let keys = Keyspace::of_cluster(&sandbox.env, &sandbox.namespace, "c").await?;
    ensure!(keys.verify("kept/", KEYS).await? >= written);
    keys.verify("later/", 0)
        .await
        .context("keys newer than the backup")?;
    keys.fill("after/", 100, |_| ()).await?;
    ensure!(keys.revision().await? > written);
    Ok(())
}

#[tokio::test]
async fn a_backed_up_cluster_is_lost_and_comes_back() {
    scenario("backup_restore_s3", async |sandbox| {
        let manifest = cluster(&sandbox.env, "c", 3)?;
        the_whole_way(sandbox, &manifest).await
    })
    .await;
}

/// The restored seed uses the cluster's own storage.
#[tokio::test]
async fn a_durable_cluster_comes_back_on_volumes() {
    scenario("backup_restore_pvc", async |sandbox| {
        let manifest = cluster_with(&sandbox.env, "c", 3, DURABLE)?;
        the_whole_way(sandbox, &manifest).await?;
        let members = ready_members(&sandbox.await_members("c", 3).await?);
        await_one_volume_a_member(sandbox, &members).await
    })
    .await;
}

/// Invariant 9: a restore over a cluster that exists is refused, and the cluster is not touched.
#[tokio::test]
async fn a_restore_over_a_living_cluster_is_refused() {
    scenario("restore_refused", async |sandbox| {
        let bucket = Bucket::create(sandbox.env.s3()?, &sandbox.namespace).await?;
        sandbox.apply(&aws_secret(sandbox.env.s3()?, "aws")).await?;
        sandbox.apply(&cluster(&sandbox.env, "c", 1)?).await?;
        let before = sandbox.await_members("c", 1).await?;
        let pods = pods_of(sandbox).await?;
        let keys = Keyspace::of_cluster(&sandbox.env, &sandbox.namespace, "c").await?;
        keys.fill("kept/", 10, |_| ()).await?;
        sandbox
            .apply(&backup(sandbox, "first", &bucket.name, "etcd.backup")?)
            .await?;
        await_complete(&sandbox.objects(Kind::EtcdBackup), "first", PATIENCE).await?;
        sandbox
            .apply(&restore(sandbox, "over", &bucket.name, "etcd.backup")?)
            .await?;
        let refused = await_object(
            &sandbox.objects(Kind::EtcdRestore),
            "over",
            "a refusal",
            PATIENCE,
            |object| {
                has_condition(object, "Complete", "False")
                    && has_failed_for(object, "ClusterExists")
            },
        )
        .await?;
        let text = conditions_line(&refused);
        ensure!(text.contains("nothing was changed"), "{text}");
        ensure!(field(&refused, "/status/phase") == "Failed", "{text}");
        ensure!(field(&refused, "/status/succeeded") != true);
        let after = sandbox.await_members("c", 1).await?;
        ensure!(
            after.metadata.uid == before.metadata.uid,
            "the cluster was replaced"
        );
        ensure!(field(&after, "/status/clusterID") == field(&before, "/status/clusterID"));
        ensure!(field(&after, "/spec") == field(&before, "/spec"));
        let now = pods_of(sandbox).await?;
        ensure!(now == pods, "pods {now:?}, and there were {pods:?}");
        keys.verify("kept/", 10).await?;
        Ok(())
    })
    .await;
}

/// A damaged object never serves: it is found out before the data directory is in place.
#[tokio::test]
async fn a_damaged_backup_is_found_out_before_it_serves() {
    scenario("restore_damaged", async |sandbox| {
        let bucket = Bucket::create(sandbox.env.s3()?, &sandbox.namespace).await?;
        sandbox.apply(&aws_secret(sandbox.env.s3()?, "aws")).await?;
        sandbox.apply(&cluster(&sandbox.env, "c", 1)?).await?;
        sandbox.await_members("c", 1).await?;
        let keys = Keyspace::of_cluster(&sandbox.env, &sandbox.namespace, "c").await?;
        keys.fill("kept/", 200, |_| ()).await?;
        sandbox
            .apply(&backup(sandbox, "first", &bucket.name, "etcd.backup")?)
            .await?;
        await_complete(&sandbox.objects(Kind::EtcdBackup), "first", PATIENCE).await?;
        let mut content = bucket.read("etcd.backup").await?;
        let middle = content.len() / 2;
        content[middle] ^= 0xff;
        bucket.write("etcd.backup", content).await?;
        drop(keys);
        sandbox.delete_cluster("c").await?;

        sandbox
            .apply(&restore(sandbox, "back", &bucket.name, "etcd.backup")?)
            .await?;
        let found = await_object(
            &sandbox.objects(Kind::EtcdRestore),
            "back",
            "SnapshotUnreadable",
            PATIENCE,
            |object| has_failed_for(object, "SnapshotUnreadable"),
        )
        .await?;
        ensure!(field(&found, "/status/succeeded") != true);
        let served = Keyspace::of_cluster(&sandbox.env, &sandbox.namespace, "c");
        let served = timeout(Duration::from_secs(20), served).await;
        ensure!(
            !matches!(served, Ok(Ok(_))),
            "a damaged backup is being served"
        );
        Ok(())
    })
    .await;
}
