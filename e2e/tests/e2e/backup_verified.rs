//! Verification of backups: a pod restores the backup, and the EtcdBackup reports the result. A damaged backup is
//! reported as not restorable.

use anyhow::{Context, Result, ensure};
use e2e::bucket::Bucket;
use e2e::manifests::backup_with;
use e2e::objects::{
    Kind, await_complete, await_object, condition, conditions_line, field, has_condition,
};
use e2e::wait::Poll;
use e2e::{DEADLINE, Keyspace, Sandbox, scenario, step, until};
use k8s_openapi::api::core::v1::Pod;
use kube::api::{DynamicObject, ListParams};

use crate::backup_schedule::location;
use crate::fixtures::cluster;
use crate::restore_sources::filled_cluster;

const KEYS: usize = 300;
const KEY: &str = "etcd/damaged";

#[tokio::test]
async fn intact_backup_is_verified_and_damaged_backup_is_reported() {
    scenario("backup_verified", async |sandbox| {
        let manifest = cluster(&sandbox.env, "c", 1)?;
        let (bucket, keys) = filled_cluster(sandbox, &manifest, 1).await?;
        keys.fill("kept/", KEYS, |_| ()).await?;
        step("verify a backup", is_verified(sandbox, &bucket, &keys)).await?;
        let damage = backup_verification_finds_damage(sandbox, &bucket);
        step("verify a damaged backup", damage).await
    })
    .await;
}

/// Waits until the condition `Verified` has this status.
async fn await_verified(sandbox: &Sandbox, name: &str, status: &str) -> Result<DynamicObject> {
    let backups = sandbox.objects(Kind::EtcdBackup);
    let what = format!("Verified={status}");
    await_object(&backups, name, &what, DEADLINE, |object| {
        has_condition(object, "Verified", status)
    })
    .await
}

async fn is_verified(sandbox: &Sandbox, bucket: &Bucket, keys: &Keyspace) -> Result<()> {
    let path = format!("{}/etcd/proven", bucket.name);
    let proven = backup_with(
        sandbox.env.s3()?,
        "proven",
        "c",
        &path,
        "  verification: {}\n",
    );
    sandbox.apply(&proven).await?;
    let object = await_verified(sandbox, "proven", "True").await?;
    let verified = field(&object, "/status/lastVerified");
    ensure!(
        verified["location"] == location(&object).as_str(),
        "{verified}"
    );
    ensure!(verified["hashCompared"] == true, "{verified}");
    ensure!(
        verified["etcdRevision"] == *field(&object, "/status/etcdRevision"),
        "{verified}"
    );
    let found = verified["keys"].as_u64().context("no number of keys")?;
    ensure!(found >= KEYS as u64, "{verified}");
    // The backup operator counted the keys of the cluster, and the verification pod counted the keys after its
    // restore.
    ensure!(verified["keysCompared"] == true, "{verified}");
    let recorded = field(&object, "/status/keys");
    ensure!(*recorded == verified["keys"], "{recorded}, {verified}");
    ensure!(
        has_condition(&object, "Ready", "True"),
        "{}",
        conditions_line(&object)
    );
    sandbox
        .await_event(Kind::EtcdBackup, "proven", &["BackupVerified", "succeeded"])
        .await?;
    // The cluster must serve clients after the verification, and the operator must delete the verification pod.
    keys.fill("later/", 1, |_| ()).await?;
    let ours = ListParams::default().labels("app.kubernetes.io/name=etcd-backup-verification");
    until(
        "the pod of the verification is deleted",
        DEADLINE,
        async || {
            let pods = sandbox.api::<Pod>().list(&ours).await?.items;
            Ok(if pods.is_empty() {
                Poll::Done(())
            } else {
                Poll::NotYet(format!("{} pods", pods.len()))
            })
        },
    )
    .await
}

/// Changes one byte of a stored backup, and ensures that the verification fails. Then stores the original backup, and
/// ensures that the next verification succeeds.
async fn backup_verification_finds_damage(sandbox: &Sandbox, bucket: &Bucket) -> Result<()> {
    let path = format!("{}/{KEY}", bucket.name);
    let manifest = backup_with(sandbox.env.s3()?, "damaged", "c", &path, "");
    sandbox.apply(&manifest).await?;
    await_complete(&sandbox.objects(Kind::EtcdBackup), "damaged", DEADLINE).await?;
    let whole = bucket.read(KEY).await?;
    let mut damaged = whole.clone();
    let middle = damaged.len() / 2;
    damaged[middle] ^= 1;
    bucket.write(KEY, damaged).await?;
    verify(sandbox, "{}").await?;
    let object = await_verified(sandbox, "damaged", "False").await?;
    let found = condition(&object, "Verified").context("no condition")?;
    ensure!(found["reason"] == "VerificationFailed", "{found}");
    let message = found["message"].as_str().unwrap_or_default();
    ensure!(message.contains("cannot be restored"), "{message}");
    ensure!(
        has_condition(&object, "Ready", "False"),
        "{}",
        conditions_line(&object)
    );
    ensure!(field(&object, "/status/lastVerified").is_null());
    sandbox
        .await_event(Kind::EtcdBackup, "damaged", &["VerificationFailed"])
        .await?;
    bucket.write(KEY, whole).await?;
    // Without `spec.verification`, the status contains no result of a verification. When the field is set again, a
    // verification must start at once.
    verify(sandbox, "null").await?;
    let backups = sandbox.objects(Kind::EtcdBackup);
    await_object(
        &backups,
        "damaged",
        "no report of a verification",
        DEADLINE,
        |object| condition(object, "Verified").is_none(),
    )
    .await?;
    verify(sandbox, "{}").await?;
    await_verified(sandbox, "damaged", "True").await.map(drop)
}

async fn verify(sandbox: &Sandbox, settings: &str) -> Result<()> {
    let patch = format!(r#"{{"spec":{{"verification":{settings}}}}}"#);
    let patch = [
        "patch",
        "etcdbackup",
        "damaged",
        "--type=merge",
        "-p",
        &patch,
    ];
    sandbox.kubectl(&patch).await.map(drop)
}
