//! `spec.backup.beforeChanges`: an upgrade, a recovery, a removal of members and a restore in place wait for a backup.
//! A condition names the reason and the remedy. Each change starts after a backup that is proven to restore, or after a
//! waiver.

use anyhow::{Context, Result, ensure};
use e2e::bucket::Bucket;
use e2e::manifests::{aws_secret, restore_with};
use e2e::objects::{
    Kind, await_complete, await_object, condition, field, follower, has_condition, ready_members,
};
use e2e::{DEADLINE, Keyspace, Sandbox, kubectl, plugin, scenario, step};
use kube::Api;
use kube::api::DynamicObject;
use serde_json::json;

use crate::backup_schedule::location;
use crate::operator_crash::CrashingOperator;
use crate::quorum_loss::{approve, await_loss, lose};
use crate::restore_in_place::{await_replaced, restore_lock};
use crate::upgrade::{await_version, change, manifest};

/// The failpoint before the operator records its request for a backup.
pub(crate) const CRASHES: &[&str] = &["before-record-before-change"];
const KEYS: usize = 100;

/// The manifest of a cluster that makes no backup by itself, because its backups are suspended and its schedule is
/// yearly. Each change needs a new backup, because `beforeChangesMaxAge` is 0.
fn guarded(sandbox: &Sandbox, bucket: &Bucket, version: &str) -> Result<String> {
    let s3 = sandbox.env.s3()?;
    let backup = format!(
        "  backup:\n    storageType: S3\n    suspend: true\n    verification: {{}}\n    \
         backupPolicy: {{schedule: \"@yearly\"}}\n    beforeChanges: [Upgrade, Recovery, Restore, Shrink]\n    \
         beforeChangesMaxAge: 0s\n    \
         s3: {{path: {}/etcd, awsSecret: aws, endpoint: \"{}\", forcePathStyle: true}}\n",
        bucket.name, s3.endpoint
    );
    Ok(manifest("c", 3, version, &backup))
}

/// Waits until the condition has this reason and all `parts` in its message, and returns the message.
pub(crate) async fn await_message(
    (objects, name): (&Api<DynamicObject>, &str),
    (kind, reason): (&str, &str),
    parts: &[&str],
) -> Result<String> {
    let message = |object: &DynamicObject| -> Option<String> {
        let found = condition(object, kind).filter(|found| found["reason"] == reason)?;
        Some(found["message"].as_str()?.to_owned())
    };
    let what = format!("{kind} because of {reason}, with {parts:?}");
    let object = await_object(objects, name, &what, DEADLINE, |object| {
        message(object).is_some_and(|text| parts.iter().all(|part| text.contains(part)))
    })
    .await?;
    message(&object).context(what)
}

/// Runs the command in `message` that waives the backup.
pub(crate) async fn waive(sandbox: &Sandbox, message: &str) -> Result<()> {
    let mut commands = message.split('`').skip(1).step_by(2);
    let command = commands.find(|command| command.contains("skip-backup="));
    let command = command.with_context(|| format!("no command in: {message}"))?;
    let words: Vec<&str> = command.split_whitespace().collect();
    ensure!(words.first() == Some(&"kubectl"), "{command}");
    kubectl::run(&sandbox.env, &words[1..]).await.map(drop)
}

/// Makes a backup with `kubectl etcd backup`, which the messages recommend. Returns the EtcdBackup after its
/// verification.
async fn back_up(sandbox: &Sandbox, name: &str) -> Result<DynamicObject> {
    plugin::run(sandbox, &["backup", "c", "--name", name, "--yes"]).await?;
    let backups = sandbox.objects(Kind::EtcdBackup);
    let what = "the backup is proven to restore";
    await_object(&backups, name, what, DEADLINE, |object| {
        field(object, "/status/lastVerified").is_object()
    })
    .await
}

/// Ensures that the cluster has exactly `count` keys with the prefix.
async fn has_keys(sandbox: &Sandbox, prefix: &str, count: usize) -> Result<()> {
    let keys = Keyspace::of_cluster(&sandbox.env, &sandbox.namespace, "c").await?;
    keys.verify(prefix, count).await.map(drop)
}

/// The operator crashes before it requests the backup. The next process requests the backup, which waits because
/// backups are suspended. Returns the location of the backup after which the upgrade starts.
async fn upgrade_waits(sandbox: &Sandbox, (old, new): (&str, &str)) -> Result<String> {
    let clusters = sandbox.objects(Kind::EtcdCluster);
    let mut operator = CrashingOperator {
        sandbox,
        crashes: 0,
    };
    operator
        .crash_at_each(CRASHES, async |times| {
            let version = if times % 2 == 0 { new } else { old };
            change(sandbox, "c", json!({ "version": version })).await
        })
        .await?;
    let crashed = clusters.get("c").await?;
    ensure!(field(&crashed, "/status/beforeChange").is_null());
    ensure!(operator.run_without_failpoints().await? == CRASHES.len());
    let suspended = ("Degraded", "NoRecentBackup");
    let parts = [new, "suspend to false", "skip-backup=Upgrade/"];
    await_message((&clusters, "c"), suspended, &parts).await?;
    let waiting = clusters.get("c").await?;
    ensure!(field(&waiting, "/status/currentVersion") == old);

    change(sandbox, "c", json!({ "backup": { "suspend": false } })).await?;
    let upgraded = await_version(sandbox, "c", 3, new).await?;
    let backup = sandbox.objects(Kind::EtcdBackup).get("c").await?;
    let record = field(&upgraded, "/status/beforeChange");
    ensure!(record["change"] == "Upgrade", "{record}");
    ensure!(
        record["backup"]["location"] == *field(&backup, "/status/lastVerified/location"),
        "{record}"
    );
    ensure!(
        record["clusterID"] == *field(&backup, "/status/clusterID"),
        "{record}"
    );
    for words in [["BackupRequested", "Upgrade"], ["BackupPresent", "Upgrade"]] {
        sandbox.await_event(Kind::EtcdCluster, "c", &words).await?;
    }
    let what = "the end of the change";
    await_object(&clusters, "c", what, DEADLINE, |object| {
        field(object, "/status/beforeChange/completionTime").is_string()
    })
    .await?;
    has_keys(sandbox, "kept/", KEYS).await?;
    Ok(location(&backup))
}

/// A majority is lost, and the recovery is approved. The recovery waits, because the last backup is older than the
/// loss. After a backup of the survivor, the recovery starts.
async fn recovery_waits(sandbox: &Sandbox) -> Result<()> {
    let clusters = sandbox.objects(Kind::EtcdCluster);
    let before = sandbox.await_members("c", 3).await?;
    let survivor = follower(&before)?;
    let mut lost = ready_members(&before);
    lost.retain(|name| *name != survivor);
    let id = field(&before, "/status/clusterID").as_str();
    let id = id.context("no cluster ID")?;
    lose(sandbox, &["pod"], &lost).await?;
    await_loss(sandbox, &[id, survivor.as_str()]).await?;
    approve(sandbox, id).await?;
    let parts = [
        "the recovery is approved",
        "the recovery needs a backup",
        "kubectl etcd -n",
        "skip-backup=Recovery/",
    ];
    await_message((&clusters, "c"), ("Degraded", "QuorumLost"), &parts).await?;
    let waiting = clusters.get("c").await?;
    ensure!(field(&waiting, "/status/recovery").is_null());
    let waits = field(&waiting, "/status/waitingFor");
    let waits = waits.as_str().unwrap_or_default();
    ensure!(waits.contains("NoRecentBackup"), "{waits}");

    let backup = back_up(sandbox, "survivor").await?;
    let what = "the recovery is complete";
    let recovered = await_object(&clusters, "c", what, DEADLINE, |object| {
        field(object, "/status/recovery/phase") == "Complete"
    })
    .await?;
    let record = field(&recovered, "/status/recovery");
    ensure!(record["survivor"] == *survivor, "{record}");
    ensure!(record["fromClusterID"] == *field(&backup, "/status/clusterID"));
    // The recovery continues with exactly the data of the backup.
    ensure!(record["revision"] == *field(&backup, "/status/etcdRevision"));
    sandbox.await_members("c", 3).await?;
    has_keys(sandbox, "kept/", KEYS).await
}

/// Scales the backup operator to `count` replicas.
async fn scale_backup_operator(sandbox: &Sandbox, count: usize) -> Result<()> {
    let replicas = format!("--replicas={count}");
    let scale = ["scale", "deployment/etcd-backup-operator", &replicas];
    sandbox.kubectl(&scale).await?;
    sandbox
        .await_operator_pods("etcd-backup-operator", count)
        .await
}

/// The last backup is recent, but belongs to the cluster ID before the recovery, and no backup operator runs. So the
/// removal of members starts only after a waiver.
async fn shrink_waits(sandbox: &Sandbox) -> Result<()> {
    let clusters = sandbox.objects(Kind::EtcdCluster);
    scale_backup_operator(sandbox, 0).await?;
    let spec = json!({ "size": 1, "backup": { "beforeChangesMaxAge": null } });
    change(sandbox, "c", spec).await?;
    let awaiting = ("Progressing", "AwaitingBackup");
    let parts = [
        "the removal of surplus members needs a backup",
        "one was requested",
        "skip-backup=Shrink/",
    ];
    let message = await_message((&clusters, "c"), awaiting, &parts).await?;
    let waiting = clusters.get("c").await?;
    ensure!(field(&waiting, "/status/size") == 3);

    waive(sandbox, &message).await?;
    let small = sandbox.await_members("c", 1).await?;
    ensure!(field(&small, "/status/beforeChange/waived") == true);
    ensure!(has_condition(&small, "Available", "True"));
    sandbox
        .await_event(Kind::EtcdCluster, "c", &["BackupWaived", "Shrink"])
        .await?;
    has_keys(sandbox, "kept/", KEYS).await?;
    scale_backup_operator(sandbox, 1).await
}

/// The restore locks the cluster only after a backup of the cluster's current data.
async fn restore_waits(sandbox: &Sandbox, path: &str) -> Result<()> {
    let keys = Keyspace::of_cluster(&sandbox.env, &sandbox.namespace, "c").await?;
    let newest = keys.fill("later/", KEYS, |_| ()).await?;
    drop(keys);
    let restores = sandbox.objects(Kind::EtcdRestore);
    let s3 = sandbox.env.s3()?;
    let over = restore_with(s3, "over", "{name: c}", path, "  overwrite: true\n");
    sandbox.apply(&over).await?;
    let waits = ("Complete", "NoRecentBackup");
    let parts = [
        "before the data of the cluster is replaced",
        "kubectl etcd -n",
        "skip-backup=Restore",
    ];
    await_message((&restores, "over"), waits, &parts).await?;
    let waiting = sandbox.objects(Kind::EtcdCluster).get("c").await?;
    ensure!(restore_lock(&waiting).is_none(), "the cluster is locked");

    let backup = back_up(sandbox, "replaced").await?;
    let revision = field(&backup, "/status/etcdRevision").as_i64();
    ensure!(revision >= Some(newest), "{revision:?} is before {newest}");
    let done = await_complete(&restores, "over", DEADLINE).await?;
    await_replaced(sandbox, &done).await?;
    sandbox.await_members("c", 1).await?;
    has_keys(sandbox, "kept/", KEYS).await?;
    has_keys(sandbox, "later/", 0).await?;
    sandbox
        .await_event(
            Kind::EtcdRestore,
            "over",
            &["RestoreWaits", "NoRecentBackup"],
        )
        .await
}

#[tokio::test]
async fn changes_wait_for_backup_or_waiver() {
    scenario("before_upgrade", async |sandbox| {
        // `old` is the newest 3.5 release, because the verification of a backup needs an image with etcdutl. The older
        // 3.5 release on the nodes has an image without etcdutl.
        let (old, new) = (sandbox.env.newest_of("3.5")?, sandbox.env.newest_of("3.6")?);
        let bucket = Bucket::create(sandbox.env.s3()?, &sandbox.namespace).await?;
        sandbox.apply(&aws_secret(sandbox.env.s3()?, "aws")).await?;
        let cluster = guarded(sandbox, &bucket, &old)?;
        sandbox.apply(&cluster).await?;
        sandbox.await_members("c", 3).await?;
        let keys = Keyspace::of_cluster(&sandbox.env, &sandbox.namespace, "c").await?;
        keys.fill("kept/", KEYS, |_| ()).await?;
        drop(keys);
        let upgrade = upgrade_waits(sandbox, (&old, &new));
        let location = step("upgrade after a backup", upgrade).await?;
        step(
            "recover after a backup of the survivor",
            recovery_waits(sandbox),
        )
        .await?;
        step("remove members after a waiver", shrink_waits(sandbox)).await?;
        let path = location.strip_prefix("s3://").context("no S3 location")?;
        step("restore after a backup", restore_waits(sandbox, path)).await
    })
    .await;
}
