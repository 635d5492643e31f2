//! Tests of the Secret with the keys of the backup. With `spec.backup`, the status of the EtcdBackup describes the
//! backup (invariant 34).

use api::backup::EncryptionKey;
use etcd::fake::FakeEtcd;
use serde_json::{Value, json};

use super::*;
use crate::fake;

const ID: &str = "a62e0f7753a4df18";

/// An EtcdBackup with a complete backup. `secret` is the Secret with its encryption keys.
fn etcd_backup(secret: Option<&str>) -> Value {
    with_status(secret, json!({ "succeeded": true, "location": "s3://b/k" }))
}

fn with_status(secret: Option<&str>, status: Value) -> Value {
    let mut backup = serde_json::to_value(backup(status)).unwrap();
    if let Some(secret) = secret {
        backup["spec"]["encryption"] = json!({ "secret": secret, "key": "2026" });
    }
    backup
}

/// Observes a restore whose EtcdCluster does not exist.
async fn observed(restore: &EtcdRestore, backup: Value) -> Observation {
    let (client, _) = fake::server(move |what, _| match what {
        "GET etcdbackups" => (200, backup.clone()),
        _ => (404, Value::Null),
    });
    let etcd = FakeEtcd::formed(7, &["seed"], |name| format!("http://{name}:2379"));
    observe_once(&client, &etcd, restore).await
}

fn with_keys(secret: Option<&str>) -> EtcdRestore {
    let mut restore = fake::restore_in_place();
    let encryption = secret.map(|secret| json!({ "secret": secret }));
    restore.spec.encryption = serde_json::from_value(json!(encryption)).unwrap();
    restore
}

#[tokio::test]
async fn restore_uses_keys_of_its_spec_or_of_etcdbackup() {
    for (own, of_backup, expected) in [
        (None, None, None),
        (None, Some("theirs"), Some("theirs")),
        (Some("ours"), None, Some("ours")),
        (Some("ours"), Some("theirs"), Some("ours")),
    ] {
        let observation = observed(&with_keys(own), etcd_backup(of_backup)).await;
        let chosen = observation.objects.backup.unwrap();
        assert_eq!(choice::encryption_secret(&chosen), expected);
    }
}

#[tokio::test]
async fn missing_encryption_secret_is_reported_before_objects_are_created() {
    let mut restore = with_keys(None);
    let seed = naming::seed(&restore);
    restore.status.get_or_insert_default().seed = Some(seed);
    let observation = observed(&restore, etcd_backup(Some("theirs"))).await;
    let Source::Unavailable(trouble) = observation.snapshot.source else {
        panic!("{:?}", observation.snapshot.source)
    };
    assert_eq!(trouble.reason, Reason::SecretMissing);
    for part in ["spec.encryption.secret", "no Secret theirs"] {
        assert!(trouble.message.contains(part), "{}", trouble.message);
    }
}

/// The status of an EtcdBackup with two backups: one from before `spec.encryption` was set, and one from after it.
fn status_across_change() -> Value {
    let plain = json!({ "location": "s3://b/k_v1_2026-01-01-00:00:00", "sha256": "AA",
                        "completionTime": "2026-01-01T00:00:00Z" });
    let encrypted = json!({ "location": "s3://b/k_v2_2026-01-02-00:00:00", "sha256": "BB",
                            "encryptionKey": { "name": "2026", "id": ID }, "completionTime": "2026-01-02T00:00:00Z" });
    let mut status = encrypted.clone();
    status["backups"] = json!([encrypted, plain]);
    status
}

#[tokio::test]
async fn invariant_34_restore_by_name_takes_sha256_and_key_from_status() {
    let key = || {
        let (name, id) = ("2026".to_owned(), ID.to_owned());
        Some(EncryptionKey { name, id })
    };
    for (before, own, sha256, secret, key) in [
        (None, None, "bb", Some("theirs"), key()),
        (None, Some("ours"), "bb", Some("ours"), key()),
        // The newest backup before 12:00 was made before the EtcdBackup required encryption, so no Secret is used.
        (Some("2026-01-01T12:00:00Z"), None, "aa", None, None),
    ] {
        let mut restore = with_keys(own);
        let reference = restore.spec.backup.as_mut().unwrap();
        reference.before = serde_json::from_value(json!(before)).unwrap();
        let backup = with_status(Some("theirs"), status_across_change());
        let chosen = observed(&restore, backup).await.objects.backup.unwrap();
        assert_eq!(chosen.sha256.as_deref(), Some(sha256));
        assert_eq!(choice::encryption_secret(&chosen), secret);
        assert_eq!(chosen.encryption_key, key);
    }
}

#[tokio::test]
async fn encrypted_backup_is_reported_if_no_spec_contains_encryption() {
    let backup = || with_status(None, status_across_change());
    let observation = observed(&with_keys(None), backup()).await;
    let trouble = observation.objects.backup.unwrap_err();
    assert_eq!(trouble.reason, Reason::InvalidSpec);
    for part in ["set spec.encryption.secret of the EtcdRestore", ID] {
        assert!(trouble.message.contains(part), "{}", trouble.message);
    }
    let observation = observed(&with_keys(Some("ours")), backup()).await;
    let chosen = observation.objects.backup.unwrap();
    assert_eq!(choice::encryption_secret(&chosen), Some("ours"));
}
