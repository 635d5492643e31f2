//! Restores under another name, in another namespace, and of snapshots that no operator made.

use anyhow::{Context, Result, ensure};
use e2e::bucket::Bucket;
use e2e::kubectl::PortForward;
use e2e::manifests::{aws_secret, restore_with};
use e2e::objects::{Kind, await_complete, field};
use e2e::picture::Picture;
use e2e::{Keyspace, PATIENCE, Sandbox, scenario};
use tokio::process::Command;

use crate::backup_restore_s3::backup;
use crate::fixtures::{cluster, newest_version};
use crate::restore_sources::compare;

const KEYS: usize = 300;

async fn filled(sandbox: &Sandbox) -> Result<(Bucket, Keyspace, Picture)> {
    let bucket = Bucket::create(sandbox.env.s3()?, &sandbox.namespace).await?;
    sandbox.apply(&aws_secret(sandbox.env.s3()?, "aws")).await?;
    sandbox.apply(&cluster(&sandbox.env, "c", 1)?).await?;
    sandbox.await_members("c", 1).await?;
    let keys = Keyspace::of_cluster(&sandbox.env, &sandbox.namespace, "c").await?;
    keys.fill("kept/", KEYS, |_| ()).await?;
    keys.paint("painted/", 40).await?;
    let picture = Picture::now(&keys).await?;
    Ok((bucket, keys, picture))
}

async fn came_back(sandbox: &Sandbox, name: &str, size: usize, before: &Picture) -> Result<()> {
    compare(sandbox, "back", name, before).await?;
    sandbox.await_members(name, size).await?;
    let keys = Keyspace::of_cluster(&sandbox.env, &sandbox.namespace, name).await?;
    keys.verify("kept/", KEYS).await?;
    keys.fill("after/", 20, |_| ()).await.map(drop)
}

#[tokio::test]
async fn restore_new_name_makes_a_cluster_of_another_name() {
    scenario("restore_new_name", async |sandbox| {
        let (bucket, keys, before) = filled(sandbox).await?;
        sandbox
            .apply(&backup(sandbox, "first", &bucket.name, "etcd.backup")?)
            .await?;
        await_complete(&sandbox.objects(Kind::EtcdBackup), "first", PATIENCE).await?;
        let path = format!("{}/etcd.backup", bucket.name);
        let manifest = restore_with(sandbox.env.s3()?, "back", "{name: d}", &path, "");
        sandbox.apply(&manifest).await?;
        came_back(sandbox, "d", 1, &before).await?;
        // The first one is another cluster and knows nothing of it.
        before.is_of(&Picture::now(&keys).await?)?;
        let (c, d) = (
            sandbox.await_members("c", 1).await?,
            sandbox.await_members("d", 1).await?,
        );
        ensure!(field(&c, "/status/clusterID") != field(&d, "/status/clusterID"));
        Ok(())
    })
    .await;
}

#[tokio::test]
async fn restore_other_namespace_makes_a_cluster_there() {
    scenario("restore_other_namespace", async |sandbox| {
        let (bucket, keys, before) = filled(sandbox).await?;
        sandbox
            .apply(&backup(sandbox, "first", &bucket.name, "etcd.backup")?)
            .await?;
        await_complete(&sandbox.objects(Kind::EtcdBackup), "first", PATIENCE).await?;
        let other = Sandbox::create("restore_other_namespace_b").await?;
        let outcome = async {
            other.install_operators().await?;
            other.apply(&aws_secret(other.env.s3()?, "aws")).await?;
            let path = format!("{}/etcd.backup", bucket.name);
            let manifest = restore_with(other.env.s3()?, "back", "{name: c}", &path, "");
            other.apply(&manifest).await?;
            came_back(&other, "c", 1, &before).await?;
            // Its namesake, which the backup is of, is what it was.
            before.is_of(&Picture::now(&keys).await?)
        }
        .await;
        if outcome.is_err() {
            other.print_state().await;
        }
        other.delete().await;
        outcome
    })
    .await;
}

/// By `etcdctl snapshot save`. The testbed brings etcdctl along; a user who has none is given what it stores.
async fn save(sandbox: &Sandbox, keys: &Keyspace) -> Result<Vec<u8>> {
    if sandbox.env.xtask.is_none() {
        return keys.snapshot().await;
    }
    let (service, folder) = ("service/c-client", tempfile::tempdir()?);
    let forward = PortForward::open(&sandbox.env, &sandbox.namespace, service, 2379).await?;
    let file = folder.path().join("by-hand.db");
    let saved = Command::new("etcdctl")
        .arg(format!("--endpoints=http://127.0.0.1:{}", forward.port))
        .args(["snapshot", "save"])
        .arg(&file)
        .kill_on_drop(true)
        .output()
        .await
        .context("etcdctl cannot be started: is it on PATH?")?;
    let why = String::from_utf8_lossy(&saved.stderr);
    ensure!(saved.status.success(), "etcdctl: {why}");
    std::fs::read(&file).context("read what etcdctl has saved")
}

/// As a backup of the operator before: no manifest lies beside it.
#[tokio::test]
async fn restore_hand_made_snapshot_with_a_template() {
    scenario("restore_hand_made", async |sandbox| {
        let (bucket, keys, before) = filled(sandbox).await?;
        let saved = save(sandbox, &keys).await?;
        bucket.write("by-hand.db", saved).await?;
        let version = newest_version(&sandbox.env)?;
        let target =
            format!("{{name: d, template: {{spec: {{size: 3, version: \"{version}\"}}}}}}");
        let path = format!("{}/by-hand.db", bucket.name);
        let manifest = restore_with(sandbox.env.s3()?, "back", &target, &path, "");
        sandbox.apply(&manifest).await?;
        came_back(sandbox, "d", 3, &before).await
    })
    .await;
}
