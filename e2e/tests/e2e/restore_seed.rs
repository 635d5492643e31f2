//! The pod of a restore's seed fails permanently before the cutover. The seed has no volume, so its data is lost, and
//! the operator recreates the seed.

use anyhow::{Context, Result, ensure};
use e2e::bucket::Bucket;
use e2e::manifests::backup_with;
use e2e::objects::{Kind, await_complete, await_object, field, has_condition};
use e2e::store_state::StoreState;
use e2e::{DEADLINE, Keyspace, Sandbox, scenario, step};

use crate::backup_schedule::suspend;
use crate::fixtures::cluster;
use crate::restore_crash::{
    await_crash, restart_with_env, restart_with_failpoint, seed_fails_for_good, start_operator,
    stop_operator,
};
use crate::restore_in_place::ensure_new_token;
use crate::restore_sources::{await_equal_restore, filled_cluster};

const API: &str = "apiVersion: etcd.database.coreos.com/v1beta2";
/// The failpoint after the operator has verified the seed.
const VERIFIED: &str = "restore-before-record-formed";

#[tokio::test]
async fn failed_seed_is_recreated_from_recorded_backup() {
    scenario("restore_seed", async |sandbox| {
        let plain = cluster(&sandbox.env, "c", 1)?;
        let (bucket, keys) = filled_cluster(sandbox, &plain, 1).await?;
        let newer = newer_backup_is_not_used(sandbox, &bucket, &keys);
        step("lose the seed of a new cluster", newer).await?;
        let in_place = in_place_restore_loses_seed(sandbox, keys);
        step("lose the seed of an in-place restore", in_place).await
    })
    .await;
}

/// Makes the seed's pod fail permanently while no operator runs.
async fn lose_seed(sandbox: &Sandbox, restore: &str) -> Result<()> {
    await_crash(sandbox, VERIFIED).await?;
    stop_operator(sandbox).await?;
    seed_fails_for_good(sandbox, restore).await
}

/// A restore records the newest backup when the restore starts. The restore must use the recorded backup for the
/// recreated seed, although a newer backup exists.
async fn newer_backup_is_not_used(
    sandbox: &Sandbox,
    bucket: &Bucket,
    keys: &Keyspace,
) -> Result<()> {
    let early = StoreState::now(keys).await?;
    let policy = "  backupPolicy: {backupIntervalInSecond: 5, maxBackups: 99}\n";
    let (s3, path) = (sandbox.env.s3()?, format!("{}/etcd", bucket.name));
    let often = backup_with(s3, "often", "c", &path, policy);
    sandbox.apply(&often).await?;
    let backups = sandbox.objects(Kind::EtcdBackup);
    await_complete(&backups, "often", DEADLINE).await?;
    suspend(sandbox, "often", true).await?;
    restart_with_failpoint(sandbox, VERIFIED).await?;
    let manifest = format!(
        "{API}\nkind: EtcdRestore\nmetadata: {{name: back}}\nspec:\n  etcdCluster: {{name: d}}\n  backup: {{name: often}}\n"
    );
    sandbox.apply(&manifest).await?;
    lose_seed(sandbox, "back").await?;
    let restores = sandbox.objects(Kind::EtcdRestore);
    let begun = restores.get("back").await?;
    ensure!(field(&begun, "/status/restoredRevision").as_i64() == Some(early.revision));
    let recorded = field(&begun, "/status/backup/location");

    keys.fill_mixed("more/", 20).await?;
    let late = keys.revision().await?;
    suspend(sandbox, "often", false).await?;
    await_object(&backups, "often", "a newer backup", DEADLINE, |object| {
        has_condition(object, "Complete", "True")
            && field(object, "/status/etcdRevision").as_i64() >= Some(late)
            && field(object, "/status/location") != recorded
    })
    .await?;
    suspend(sandbox, "often", true).await?;
    restart_with_env(sandbox, "FAILPOINTS-").await?;
    start_operator(sandbox).await?;
    let done = await_equal_restore(sandbox, "back", "d", &early).await?;
    ensure!(field(&done, "/status/backup") == field(&begun, "/status/backup"));
    ensure!(field(&done, "/status/backup/etcdBackup") == "often");
    ensure!(field(&done, "/status/backup/etcdRevision").as_i64() == Some(early.revision));
    Ok(())
}

/// The seed of a restore in place is lost. While no seed runs, the running cluster serves clients.
async fn in_place_restore_loses_seed(sandbox: &Sandbox, keys: Keyspace) -> Result<()> {
    let before = sandbox.await_members("c", 1).await?;
    let state = StoreState::now(&keys).await?;
    keys.fill("later/", 50, |_| ()).await?;
    restart_with_failpoint(sandbox, VERIFIED).await?;
    let manifest = format!(
        "{API}\nkind: EtcdRestore\nmetadata: {{name: over}}\nspec:\n  etcdCluster: {{name: c}}\n  overwrite: true\n  \
         backup: {{name: often}}\n"
    );
    sandbox.apply(&manifest).await?;
    lose_seed(sandbox, "over").await?;
    keys.verify("later/", 50).await?;
    drop(keys);
    restart_with_env(sandbox, "FAILPOINTS-").await?;
    start_operator(sandbox).await?;
    await_equal_restore(sandbox, "over", "c", &state).await?;
    let after = sandbox.await_members("c", 1).await?;
    ensure!(field(&after, "/status/clusterID") != field(&before, "/status/clusterID"));
    // The restored cluster must have the cluster token with which its seed was created. `status.TLS.token` contains
    // this token.
    let token = field(&after, "/status/bootstrap/token");
    ensure!(token.is_string() && token == field(&after, "/status/TLS/token"));
    ensure_new_token(&before, &after)?;
    let keys = Keyspace::of_cluster(&sandbox.env, &sandbox.namespace, "c").await?;
    keys.verify("later/", 0)
        .await
        .map(drop)
        .context("keys newer than the backup")
}
