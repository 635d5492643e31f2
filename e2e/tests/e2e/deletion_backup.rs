//! `spec.deletionPolicy: BackupThenDelete`: the data of a deleted cluster is backed up before its pods and volumes are
//! deleted. If no backup is possible, the deletion waits until a user waives the backup.

use anyhow::{Context, Result, ensure};
use e2e::bucket::Bucket;
use e2e::manifests::{aws_secret, restore_with};
use e2e::objects::{Kind, await_complete, await_object, field};
use e2e::wait::Poll;
use e2e::{DEADLINE, Keyspace, Sandbox, scenario, step, until};
use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use kube::ResourceExt;
use kube::api::ListParams;
use serde_json::json;

use crate::before_upgrade::{await_message, waive};
use crate::fixtures::{DURABLE, cluster_with, newest_version};
use crate::operator_crash::CrashingOperator;
use crate::upgrade::change;

/// The failpoint before the operator sets or removes the finalizer.
pub(crate) const CRASHES: &[&str] = &["before-set-finalizer"];
const FINALIZER: &str = "etcd.database.coreos.com/backup-before-deletion";
const POLICY: &str = "  deletionPolicy: BackupThenDelete\n";
const KEYS: usize = 100;

/// Lines under `spec` with volumes, and with backups that are made only on request, because the schedule is yearly.
/// `more` has further lines: first lines under `spec.backup`, indented by four spaces, then lines under `spec`.
fn lines(sandbox: &Sandbox, path: &str, more: &str) -> Result<String> {
    let endpoint = &sandbox.env.s3()?.endpoint;
    Ok(format!(
        "{DURABLE}  backup:\n    storageType: S3\n    backupPolicy: {{schedule: \"@yearly\"}}\n    \
         s3: {{path: {path}, awsSecret: aws, endpoint: \"{endpoint}\", forcePathStyle: true}}\n{more}"
    ))
}

pub(crate) async fn await_finalizer(sandbox: &Sandbox, name: &str) -> Result<()> {
    let clusters = sandbox.objects(Kind::EtcdCluster);
    await_object(&clusters, name, "the finalizer", DEADLINE, |object| {
        object.finalizers().iter().any(|one| one == FINALIZER)
    })
    .await
    .map(drop)
}

/// Waits until the EtcdCluster, its pods and its PVCs are deleted.
async fn await_deletion(sandbox: &Sandbox, name: &str) -> Result<()> {
    let of_cluster = ListParams::default().labels(&format!("etcd_cluster={name}"));
    let what = format!("the deletion of cluster {name}");
    until(&what, DEADLINE, async || {
        let clusters = sandbox.objects(Kind::EtcdCluster);
        let exists = clusters.get_opt(name).await?.is_some();
        let pods = sandbox.member_pods(name).await?.len();
        let claims = sandbox.api::<PersistentVolumeClaim>();
        let claims = claims.list(&of_cluster).await?.items.len();
        Ok(if !exists && pods + claims == 0 {
            Poll::Done(())
        } else {
            Poll::NotYet(format!(
                "EtcdCluster exists: {exists}; {pods} pods, {claims} PVCs"
            ))
        })
    })
    .await
}

/// The operator crashes before it sets the finalizer. The next process sets the finalizer.
async fn gets_finalizer(sandbox: &Sandbox) -> Result<()> {
    let mut operator = CrashingOperator {
        sandbox,
        crashes: 0,
    };
    operator
        .crash_at_each(CRASHES, async |times| {
            let policy = ["BackupThenDelete", "Delete"][times % 2];
            change(sandbox, "c", json!({ "deletionPolicy": policy })).await
        })
        .await?;
    let crashes = operator.run_without_failpoints().await?;
    ensure!(crashes == CRASHES.len(), "{crashes} crashes");
    await_finalizer(sandbox, "c").await
}

/// Writes keys, deletes the EtcdCluster, and waits until its pods and PVCs are deleted. Returns the path of the backup
/// in the Event `BackupPresent`.
async fn is_backed_up(sandbox: &Sandbox, cascade: &str) -> Result<String> {
    let keys = Keyspace::of_cluster(&sandbox.env, &sandbox.namespace, "c").await?;
    keys.fill("kept/", KEYS, |_| ()).await?;
    drop(keys);
    let delete = ["delete", "etcdcluster", "c", "--wait=false", cascade];
    sandbox.kubectl(&delete).await?;
    await_deletion(sandbox, "c").await?;
    for words in [
        ["BackupRequested", "Deletion"],
        ["BackupPresent", "Deletion"],
        ["DeletionContinues", "continue the deletion"],
    ] {
        sandbox.await_event(Kind::EtcdCluster, "c", &words).await?;
    }
    let events = sandbox.events(Kind::EtcdCluster, "c").await?;
    let present = events
        .iter()
        .filter(|event| event.contains("BackupPresent"));
    let mut words = present.flat_map(|event| event.split_whitespace());
    let path = words.find_map(|word| word.strip_prefix("s3://"));
    let path = path.context("no location in the Event BackupPresent")?;
    Ok(path.to_owned())
}

/// Restores the backup to a cluster of one member, and checks that it has all keys.
async fn contains_all_keys(sandbox: &Sandbox, path: &str) -> Result<()> {
    let version = newest_version(&sandbox.env)?;
    let cluster = format!("{{name: r, template: {{spec: {{size: 1, version: \"{version}\"}}}}}}");
    let manifest = restore_with(sandbox.env.s3()?, "back", &cluster, path, "");
    sandbox.apply(&manifest).await?;
    await_complete(&sandbox.objects(Kind::EtcdRestore), "back", DEADLINE).await?;
    sandbox.await_members("r", 1).await?;
    let keys = Keyspace::of_cluster(&sandbox.env, &sandbox.namespace, "r").await?;
    keys.verify("kept/", KEYS).await.map(drop)
}

/// The bucket does not exist, so the deletion waits and the member keeps running. After the waiver, the deletion
/// continues.
async fn waits_for_store_until_waived(sandbox: &Sandbox) -> Result<()> {
    let clusters = sandbox.objects(Kind::EtcdCluster);
    let lines = lines(sandbox, "no-such-bucket/etcd", POLICY)?;
    let manifest = cluster_with(&sandbox.env, "w", 1, &lines)?;
    sandbox.apply(&manifest).await?;
    sandbox.await_members("w", 1).await?;
    await_finalizer(sandbox, "w").await?;
    let delete = ["delete", "etcdcluster", "w", "--wait=false"];
    sandbox.kubectl(&delete).await?;
    let awaiting = ("Progressing", "AwaitingBackup");
    let parts = [
        "the deletion needs a backup",
        "The backup operator reports:",
        "no-such-bucket",
        "does not exist",
        "skip-backup=Deletion/",
    ];
    let message = await_message((&clusters, "w"), awaiting, &parts).await?;
    let waiting = clusters.get("w").await?;
    ensure!(waiting.metadata.deletion_timestamp.is_some());
    let request = field(&waiting, "/status/backupRequest/message");
    let text = request.as_str().unwrap_or_default();
    ensure!(text.contains("does not exist"), "{request}");
    // While the deletion waits for the backup, the operator must create a deleted pod again, because the backup needs
    // the data.
    let pods = sandbox.member_pods("w").await?;
    let [pod] = &pods[..] else {
        anyhow::bail!("{} pods", pods.len());
    };
    let (name, uid) = (pod.name_any(), pod.uid());
    sandbox.kubectl(&["delete", "pod", &name]).await?;
    until("the pod is created again", DEADLINE, async || {
        let pods = sandbox.member_pods("w").await?;
        let again = pods.iter().any(|pod| pod.uid() != uid);
        Ok(if again {
            Poll::Done(())
        } else {
            Poll::NotYet(format!("{} pods", pods.len()))
        })
    })
    .await?;
    waive(sandbox, &message).await?;
    await_deletion(sandbox, "w").await?;
    let words = ["BackupWaived", "Deletion"];
    sandbox.await_event(Kind::EtcdCluster, "w", &words).await
}

#[tokio::test]
async fn deletion_waits_for_verified_backup_or_waiver() {
    scenario("deletion_backup", async |sandbox| {
        let bucket = Bucket::create(sandbox.env.s3()?, &sandbox.namespace).await?;
        sandbox.apply(&aws_secret(sandbox.env.s3()?, "aws")).await?;
        let path = format!("{}/etcd", bucket.name);
        let lines = lines(sandbox, &path, "    verification: {}\n")?;
        let manifest = cluster_with(&sandbox.env, "c", 3, &lines)?;
        sandbox.apply(&manifest).await?;
        sandbox.await_members("c", 3).await?;
        step("set the finalizer", gets_finalizer(sandbox)).await?;
        let deleted = is_backed_up(sandbox, "--cascade=background");
        let path = step("delete after a backup", deleted).await?;
        let verified = ["BackupVerified", "succeeded"];
        sandbox
            .await_event(Kind::EtcdBackup, "c", &verified)
            .await?;
        let restored = contains_all_keys(sandbox, &path);
        step("restore the backup", restored).await?;
        let waits = waits_for_store_until_waived(sandbox);
        step("wait for a store until the waiver", waits).await
    })
    .await;
}

mod full {
    use super::*;

    /// The garbage collector deletes the pods of the members at once. The PVCs stay, because they have no owner
    /// reference. The operator starts the members again for the backup.
    #[tokio::test]
    async fn foreground_deletion_is_backed_up_from_volumes() {
        scenario("deletion_backup_foreground", async |sandbox| {
            let bucket = Bucket::create(sandbox.env.s3()?, &sandbox.namespace).await?;
            sandbox.apply(&aws_secret(sandbox.env.s3()?, "aws")).await?;
            let path = format!("{}/etcd", bucket.name);
            let manifest = cluster_with(&sandbox.env, "c", 3, &lines(sandbox, &path, POLICY)?)?;
            sandbox.apply(&manifest).await?;
            sandbox.await_members("c", 3).await?;
            await_finalizer(sandbox, "c").await?;
            let deleted = is_backed_up(sandbox, "--cascade=foreground");
            let path = step("delete in the foreground", deleted).await?;
            step("restore the backup", contains_all_keys(sandbox, &path)).await
        })
        .await;
    }
}
