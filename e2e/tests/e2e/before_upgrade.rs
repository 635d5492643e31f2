//! Changes that wait for a backup (`spec.backup.beforeChanges`): an upgrade requests a backup and starts after it. A
//! user waives the backup before members are removed.

use anyhow::{Result, ensure};
use e2e::bucket::Bucket;
use e2e::manifests::aws_secret;
use e2e::objects::{Kind, await_object, condition, field, has_condition};
use e2e::{DEADLINE, Sandbox, scenario, step};
use kube::api::DynamicObject;
use serde_json::json;

use crate::backup_schedule::location;
use crate::operator_crash::CrashingOperator;
use crate::upgrade::{await_version, change, manifest};

/// The failpoint before the record that requests the backup.
pub(crate) const CRASHES: &[&str] = &["before-record-before-change"];

/// A cluster without a backup. Its schedule starts no backup during the test.
fn guarded(sandbox: &Sandbox, bucket: &Bucket, version: &str) -> Result<String> {
    let s3 = sandbox.env.s3()?;
    let backup = format!(
        "  backup:\n    storageType: S3\n    backupPolicy: {{schedule: \"@yearly\"}}\n    beforeChanges: [Upgrade, Shrink]\n    \
         s3: {{path: {}/etcd, awsSecret: aws, endpoint: \"{}\", forcePathStyle: true}}\n",
        bucket.name, s3.endpoint
    );
    Ok(manifest("c", 3, version, &backup))
}

/// The operator crashes before it has requested the backup. The next process requests the backup, and the upgrade starts
/// after it.
async fn upgrade_waits(sandbox: &Sandbox, bucket: &Bucket, (old, new): (&str, &str)) -> Result<()> {
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
    ensure!(
        bucket.keys().await?.is_empty(),
        "no backup is requested yet"
    );
    ensure!(operator.run_without_failpoints().await? == CRASHES.len());
    let upgraded = await_version(sandbox, "c", 3, new).await?;
    let backup = sandbox.objects(Kind::EtcdBackup).get("c").await?;
    let record = field(&upgraded, "/status/beforeChange");
    ensure!(record["change"] == "Upgrade", "{record}");
    ensure!(
        record["backup"]["location"] == location(&backup).as_str(),
        "{record}"
    );
    ensure!(
        record["clusterID"] == *field(&backup, "/status/clusterID"),
        "{record}"
    );
    for words in [["BackupRequested", "Upgrade"], ["BackupPresent", "Upgrade"]] {
        sandbox.await_event(Kind::EtcdCluster, "c", &words).await?;
    }
    await_object(
        &clusters,
        "c",
        "the end of the change",
        DEADLINE,
        |object| field(object, "/status/beforeChange/completionTime").is_string(),
    )
    .await
    .map(drop)
}

/// While backups are suspended and the last one is too old, members are removed only after a user has waived the backup.
async fn waiver_counts_once(sandbox: &Sandbox) -> Result<()> {
    let clusters = sandbox.objects(Kind::EtcdCluster);
    let backup = json!({ "suspend": true, "beforeChangesMaxAge": "1s" });
    change(sandbox, "c", json!({ "size": 1, "backup": backup })).await?;
    let what = "the removal of members waits";
    let waits = |object: &DynamicObject| {
        condition(object, "Degraded").is_some_and(|found| found["reason"] == "NoRecentBackup")
            && field(object, "/status/beforeChange/change") == "Shrink"
    };
    let waiting = await_object(&clusters, "c", what, DEADLINE, waits).await?;
    ensure!(field(&waiting, "/status/size") == 3);
    let since = field(&waiting, "/status/beforeChange/startTime");
    let since = since.as_str().unwrap_or_default();
    let waiver = format!("etcd.database.coreos.com/skip-backup=Shrink/{since}");
    let annotate = ["annotate", "etcdcluster", "c", &waiver];
    sandbox.kubectl(&annotate).await?;
    let small = sandbox.await_members("c", 1).await?;
    ensure!(field(&small, "/status/beforeChange/waived") == true);
    ensure!(has_condition(&small, "Available", "True"));
    sandbox
        .await_event(Kind::EtcdCluster, "c", &["BackupWaived", "Shrink"])
        .await
}

/// This test runs only with `--full`: it has not passed on a testbed yet.
mod full {
    use super::*;

    #[tokio::test]
    async fn changes_wait_for_backup_or_waiver() {
        scenario("before_upgrade", async |sandbox| {
            let (old, new) = sandbox.env.oldest_and_newest_of("3.5")?;
            let bucket = Bucket::create(sandbox.env.s3()?, &sandbox.namespace).await?;
            sandbox.apply(&aws_secret(sandbox.env.s3()?, "aws")).await?;
            let cluster = guarded(sandbox, &bucket, &old)?;
            sandbox.apply(&cluster).await?;
            sandbox.await_members("c", 3).await?;
            let upgrade = upgrade_waits(sandbox, &bucket, (&old, &new));
            step("upgrade after a backup", upgrade).await?;
            step("waive a backup", waiver_counts_once(sandbox)).await
        })
        .await;
    }
}
