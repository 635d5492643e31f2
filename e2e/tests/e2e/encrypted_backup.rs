//! Encrypted backups: stored objects reveal no data, backups with an old and a new key are restored, and restores of
//! backups with a missing key or without encryption are rejected.

use anyhow::{Context, Result, ensure};
use e2e::bucket::Bucket;
use e2e::leaks::scenario_without_leaks;
use e2e::manifests::{backup_with, restore_with};
use e2e::objects::{
    Kind, await_complete, await_object, condition, field, has_condition, has_failed_for,
};
use e2e::store_state::StoreState;
use e2e::{DEADLINE, Keyspace, Sandbox, step};
use kube::api::DynamicObject;

use crate::backup_pvc::{BACKUP_PVC, pvc_backup};
use crate::bad_input::await_waiting;
use crate::fixtures::cluster;
use crate::restore_sources::{await_equal_restore, filled_cluster};

/// A value of the cluster that must not occur in an encrypted backup.
const MARK: &str = "a value that must not occur in the store";
const OLD_KEY: &str = "AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=";
const OLD_ID: &str = "a62e0f7753a4df18";
const NEW_KEY: &str = "QkJCQkJCQkJCQkJCQkJCQkJCQkJCQkJCQkJCQkJCQkI=";

#[tokio::test]
async fn encrypted_backups_reveal_no_data_and_are_restored() {
    scenario_without_leaks("encrypted_backup", async |sandbox| {
        let manifest = cluster(&sandbox.env, "c", 1)?;
        let (bucket, keys) = filled_cluster(sandbox, &manifest, 1).await?;
        keys.write("mark", MARK.into()).await?;
        let before = StoreState::now(&keys).await?;
        let stored = are_encrypted(sandbox, &bucket);
        step("encrypt with an old and a new key", stored).await?;
        let restored = are_restored(sandbox, &bucket, &before);
        step("restore backups of both keys", restored).await?;
        step("back up to a PVC", on_a_pvc(sandbox)).await?;
        let missing = missing_key_is_reported(sandbox, &bucket, &before);
        step("restore without the key", missing).await?;
        let replaced = replaced_backup_is_rejected(sandbox, &bucket);
        step("restore a backup without encryption", replaced).await
    })
    .await;
}

fn keys_secret(name: &str, entries: &[(&str, &str)]) -> String {
    let entries: Vec<String> = entries
        .iter()
        .map(|(name, key)| format!("  \"{name}\": {key}\n"))
        .collect();
    format!(
        "apiVersion: v1\nkind: Secret\nmetadata: {{name: {name}}}\nstringData:\n{}",
        entries.concat()
    )
}

fn occurs(text: &str, bytes: &[u8]) -> bool {
    bytes
        .windows(text.len())
        .any(|window| window == text.as_bytes())
}

async fn back_up(
    sandbox: &Sandbox,
    bucket: &Bucket,
    name: &str,
    more: &str,
) -> Result<DynamicObject> {
    let path = format!("{}/etcd/{name}", bucket.name);
    let manifest = backup_with(sandbox.env.s3()?, name, "c", &path, more);
    sandbox.apply(&manifest).await?;
    await_complete(&sandbox.objects(Kind::EtcdBackup), name, DEADLINE).await
}

async fn are_encrypted(sandbox: &Sandbox, bucket: &Bucket) -> Result<()> {
    // The EtcdBackup `old` waits until its Secret exists.
    let path = format!("{}/etcd/old", bucket.name);
    let old = "  encryption: {secret: keys}\n  verification: {}\n";
    let manifest = backup_with(sandbox.env.s3()?, "old", "c", &path, old);
    sandbox.apply(&manifest).await?;
    let message = ["spec.encryption.secret", "no Secret keys"];
    await_waiting(sandbox, "old", "SecretMissing", &message).await?;
    let one = keys_secret("keys", &[("2026", OLD_KEY)]);
    sandbox.apply(&one).await?;
    let backups = sandbox.objects(Kind::EtcdBackup);
    let done = await_complete(&backups, "old", DEADLINE).await?;
    let key = field(&done, "/status/encryptionKey");
    ensure!(key["name"] == "2026" && key["id"] == OLD_ID, "{key}");
    await_object(&backups, "old", "Verified=True", DEADLINE, |object| {
        has_condition(object, "Verified", "True")
    })
    .await?;

    // The Secret keeps the old key and gets the new key. An EtcdBackup that selects no key of this Secret must wait.
    let two = keys_secret("keys", &[("2026", OLD_KEY), ("2027", NEW_KEY)]);
    sandbox.apply(&two).await?;
    let path = format!("{}/etcd/ambiguous", bucket.name);
    let ambiguous = "  encryption: {secret: keys}\n";
    let manifest = backup_with(sandbox.env.s3()?, "ambiguous", "c", &path, ambiguous);
    sandbox.apply(&manifest).await?;
    let message = ["2026, 2027", "encryption.key"];
    await_waiting(sandbox, "ambiguous", "SecretMissing", &message).await?;
    sandbox
        .kubectl(&["delete", "etcdbackup", "ambiguous"])
        .await?;
    let new = "  encryption: {secret: keys, key: \"2027\"}\n  compression: zstd\n";
    let done = back_up(sandbox, bucket, "new", new).await?;
    ensure!(field(&done, "/status/encryptionKey/name") == "2027");

    back_up(sandbox, bucket, "plain", "").await?;
    let plain = bucket.read("etcd/plain").await?;
    ensure!(occurs(MARK, &plain), "the search does not find the value");
    for name in ["old", "new"] {
        let object = bucket.read(&format!("etcd/{name}")).await?;
        ensure!(object.starts_with(b"EtcdEnc1"), "{name} is not encrypted");
        ensure!(!occurs(MARK, &object), "{name} contains the value");
        let manifest = bucket.read(&format!("etcd/{name}.manifest.json")).await?;
        ensure!(!occurs(MARK, &manifest) && !occurs(OLD_KEY, &manifest));
    }
    Ok(())
}

async fn are_restored(sandbox: &Sandbox, bucket: &Bucket, before: &StoreState) -> Result<()> {
    // `from-old` has no `encryption`, so the restore operator uses the Secret that the EtcdBackup `old` names.
    let by_name = "apiVersion: etcd.database.coreos.com/v1beta2\nkind: EtcdRestore\nmetadata: {name: from-old}\nspec:\n  \
                   etcdCluster: {name: from-old}\n  backup: {name: old}\n";
    let path = format!("{}/etcd/new", bucket.name);
    let keys = "  encryption: {secret: keys}\n";
    let by_path = restore_with(
        sandbox.env.s3()?,
        "from-new",
        "{name: from-new}",
        &path,
        keys,
    );
    sandbox.apply(&format!("{by_name}---\n{by_path}")).await?;
    for name in ["from-old", "from-new"] {
        await_equal_restore(sandbox, name, name, before).await?;
        sandbox.delete_cluster(name).await?;
    }
    Ok(())
}

/// Makes and verifies an encrypted backup on a PVC. The backup pod and the verification pod mount the Secret with the
/// keys.
async fn on_a_pvc(sandbox: &Sandbox) -> Result<()> {
    sandbox.apply(BACKUP_PVC).await?;
    let more =
        "  encryption: {secret: keys, key: \"2027\"}\n  compression: zstd\n  verification: {}\n";
    sandbox.apply(&pvc_backup("claimed", more)).await?;
    let backups = sandbox.objects(Kind::EtcdBackup);
    let done = await_complete(&backups, "claimed", DEADLINE).await?;
    ensure!(field(&done, "/status/encryptionKey/name") == "2027");
    await_object(&backups, "claimed", "Verified=True", DEADLINE, |object| {
        has_condition(object, "Verified", "True")
    })
    .await
    .map(drop)
}

/// Waits until the EtcdRestore has failed for this reason, and ensures that the message contains all fragments.
async fn await_problem(
    sandbox: &Sandbox,
    name: &str,
    reason: &str,
    fragments: &[&str],
) -> Result<()> {
    let restores = sandbox.objects(Kind::EtcdRestore);
    let what = format!("the problem {reason}");
    let object = await_object(&restores, name, &what, DEADLINE, |object| {
        has_failed_for(object, reason)
    })
    .await?;
    let found = condition(&object, "Failed").context("no condition Failed")?;
    let message = found["message"].as_str().unwrap_or_default();
    for fragment in fragments {
        ensure!(message.contains(fragment), "{fragment}: {message}");
    }
    Ok(())
}

/// A restore without the key reports the ID of the missing key. If the EtcdRestore names a Secret, the restore
/// continues when this Secret gets the key under any name.
async fn missing_key_is_reported(
    sandbox: &Sandbox,
    bucket: &Bucket,
    before: &StoreState,
) -> Result<()> {
    let other = keys_secret("other", &[("only", NEW_KEY)]);
    let path = format!("{}/etcd/old", bucket.name);
    let s3 = sandbox.env.s3()?;
    let none = restore_with(s3, "no-keys", "{name: no-keys}", &path, "");
    let encryption = "  encryption: {secret: other}\n";
    let wrong = restore_with(s3, "late-key", "{name: late-key}", &path, encryption);
    sandbox.apply(&[other, none, wrong].join("---\n")).await?;
    let expected = ["spec.encryption.secret", OLD_ID];
    await_problem(sandbox, "no-keys", "InvalidSpec", &expected).await?;
    let expected = ["Secret other", OLD_ID, "only (ID"];
    await_problem(sandbox, "late-key", "SecretMissing", &expected).await?;
    let both = keys_secret("other", &[("only", NEW_KEY), ("renamed", OLD_KEY)]);
    sandbox.apply(&both).await?;
    let what = "the restore continues with the added key";
    let restores = sandbox.objects(Kind::EtcdRestore);
    await_object(&restores, "late-key", what, DEADLINE, |object| {
        condition(object, "Failed").is_none_or(|found| found["status"] != "True")
    })
    .await?;
    await_equal_restore(sandbox, "late-key", "late-key", before).await?;
    sandbox.delete_cluster("late-key").await?;
    let keys = Keyspace::of_cluster(&sandbox.env, &sandbox.namespace, "c").await?;
    ensure!(keys.revision().await? >= before.revision);
    Ok(())
}

/// Replaces the backup `new` and its manifest by the backup `by` and its manifest, like an attacker with write access
/// to the bucket.
async fn replace(bucket: &Bucket, by: &str) -> Result<()> {
    for suffix in ["", ".manifest.json"] {
        let content = bucket.read(&format!("etcd/{by}{suffix}")).await?;
        bucket.write(&format!("etcd/new{suffix}"), content).await?;
    }
    Ok(())
}

/// Invariant 34: a restore by the name of an EtcdBackup rejects an older encrypted backup under the same path, even if
/// the Secret has the key of the older backup. A restore by name, and a restore by path with keys, reject a backup that
/// is not encrypted.
async fn replaced_backup_is_rejected(sandbox: &Sandbox, bucket: &Bucket) -> Result<()> {
    let by_name = |name: &str| {
        format!(
            "apiVersion: etcd.database.coreos.com/v1beta2\nkind: EtcdRestore\nmetadata: {{name: {name}}}\nspec:\n  \
             etcdCluster: {{name: {name}}}\n  backup: {{name: new}}\n"
        )
    };
    let differs = ["EtcdBackup new", "another writer"];
    replace(bucket, "old").await?;
    sandbox.apply(&by_name("older")).await?;
    await_problem(sandbox, "older", "SnapshotUnreadable", &differs).await?;
    replace(bucket, "plain").await?;
    let path = format!("{}/etcd/new", bucket.name);
    let keys = "  encryption: {secret: keys}\n";
    let by_path = restore_with(
        sandbox.env.s3()?,
        "replaced",
        "{name: replaced}",
        &path,
        keys,
    );
    sandbox
        .apply(&format!("{}---\n{by_path}", by_name("by-name")))
        .await?;
    await_problem(sandbox, "by-name", "SnapshotUnreadable", &differs).await?;
    let expected = ["is not encrypted", "another writer"];
    await_problem(sandbox, "replaced", "SnapshotUnreadable", &expected).await
}
