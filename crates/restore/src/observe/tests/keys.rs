//! Which Secret has the keys for the backup, and what is reported if the Secret is missing.

use etcd::fake::FakeEtcd;
use serde_json::{Value, json};

use super::*;
use crate::fake;

/// An EtcdBackup whose Secret with the keys has this name, with a complete backup.
fn etcd_backup(secret: Option<&str>) -> Value {
    let mut backup =
        serde_json::to_value(backup(json!({ "succeeded": true, "location": "s3://b/k" }))).unwrap();
    if let Some(secret) = secret {
        backup["spec"]["encryption"] = json!({ "secret": secret, "key": "2026" });
    }
    backup
}

/// Observes a restore of a deleted cluster.
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
async fn restore_uses_own_keys_or_those_of_etcdbackup() {
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
async fn missing_secret_with_keys_is_reported_before_anything_is_created() {
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
