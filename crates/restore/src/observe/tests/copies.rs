//! Tests from which store a restore with `spec.backup` reads the backup: from the first store, or from the store of a
//! copy. Both stores are buckets of a real S3 server.

use std::collections::BTreeMap;

use api::manifest::manifest_key;
use etcd::fake::FakeEtcd;
use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::Secret;
use serde_json::{Value, json};
use store::testing::{ACCESS_KEY, S3Server, SECRET_KEY};
use store::{S3Store, Store};

use super::*;
use crate::fake;

const SHA: &str = "aaaa";

/// The content of every stored backup.
const CONTENT: &[u8] = b"snapshot";

fn servers() -> S3Server {
    S3Server::start(&["first", "second"])
}

/// Stores a backup. Its manifest has this SHA-256; `None` stores no manifest.
async fn put(server: &S3Server, bucket: &str, sha256: Option<&str>) {
    let store = S3Store::new(server.config(bucket)).await.unwrap();
    store.put("etcd/b", CONTENT.into()).await.unwrap();
    if let Some(sha256) = sha256 {
        let manifest = json!({
            "formatVersion": 1, "etcdVersion": "3.6.16", "clusterID": "ab", "revision": 7, "size": CONTENT.len(),
            "sha256": sha256, "compression": "none", "createdAt": "2026-01-01T00:00:00Z",
        });
        let text = serde_json::to_vec(&manifest).unwrap();
        let key = manifest_key("etcd/b");
        store.put(&key, text.into()).await.unwrap();
    }
}

/// An EtcdBackup with a complete backup in the bucket `first`, and its copy in the bucket `second`.
fn etcd_backup(server: &S3Server, first: &str, sha256: Option<&str>) -> Value {
    let s3 = |bucket: &str, endpoint: &str| {
        json!({ "path": format!("{bucket}/etcd/b"), "awsSecret": "aws", "endpoint": endpoint,
                "forcePathStyle": true })
    };
    json!({
        "apiVersion": "etcd.database.coreos.com/v1beta2", "kind": "EtcdBackup", "metadata": { "name": "b" },
        "spec": {
            "etcdCluster": { "name": "main" }, "storageType": "S3", "s3": s3("first", first),
            "copyTo": [{ "name": "offsite", "storageType": "S3", "s3": s3("second", &server.endpoint) }],
        },
        "status": {
            "succeeded": true, "location": "s3://first/etcd/b", "sha256": sha256,
            "copies": [{ "name": "offsite", "location": "s3://second/etcd/b", "backupTime": "2026-01-01T00:00:00Z" }],
        },
    })
}

fn secret() -> Value {
    let keys = format!(
        "[default]\naws_access_key_id = {ACCESS_KEY}\naws_secret_access_key = {SECRET_KEY}\n"
    );
    let data = [
        ("credentials".to_owned(), ByteString(keys.into_bytes())),
        (
            "config".to_owned(),
            ByteString(b"[default]\nregion = us-east-1\n".to_vec()),
        ),
    ];
    serde_json::to_value(Secret {
        data: Some(BTreeMap::from(data)),
        ..Secret::default()
    })
    .unwrap()
}

/// An EtcdRestore that has recorded its seed. Its EtcdCluster does not exist.
fn restore_by_name() -> EtcdRestore {
    let mut restore = restore(json!({ "spec": { "size": 1, "version": "3.6.16" } }));
    restore.metadata.namespace = Some("prod".into());
    restore.metadata.uid = Some("restore-uid".into());
    let seed = naming::seed(&restore);
    restore.status.get_or_insert_default().seed = Some(seed);
    restore
}

async fn observed(restore: &EtcdRestore, backup: Value) -> Observation {
    let (client, _) = fake::server(move |what, _| match what {
        "GET etcdbackups" => (200, backup.clone()),
        "GET secrets" => (200, secret()),
        _ => (404, Value::Null),
    });
    let etcd = FakeEtcd::formed(7, &["seed"], |name| format!("http://{name}:2379"));
    observe_once(&client, &etcd, restore).await
}

/// The path of the backup that the restore uses, and the name of the copy.
fn used(observation: Observation) -> (String, Option<String>) {
    let source = &observation.snapshot.source;
    assert!(matches!(source, Source::Ready(_)), "{source:?}");
    let chosen = observation.objects.backup.unwrap();
    assert_eq!(observation.snapshot.found.as_ref(), Some(&chosen));
    let copy = chosen.copy.map(|copy| copy.name);
    (chosen.source.source().path().to_owned(), copy)
}

fn problem(observation: &Observation) -> &Trouble {
    match &observation.snapshot.source {
        Source::Unavailable(trouble) => trouble,
        source => panic!("{source:?}"),
    }
}

#[tokio::test]
async fn backup_in_first_store_is_preferred() {
    let server = servers();
    put(&server, "first", Some(SHA)).await;
    put(&server, "second", Some(SHA)).await;
    let backup = etcd_backup(&server, &server.endpoint, Some(SHA));
    let observation = observed(&restore_by_name(), backup).await;
    assert_eq!(used(observation), ("first/etcd/b".to_owned(), None));
}

#[tokio::test]
async fn copy_is_used_if_first_store_lost_backup_or_is_unreachable() {
    let server = servers();
    put(&server, "second", Some(SHA)).await;
    let offsite = ("second/etcd/b".to_owned(), Some("offsite".to_owned()));
    let lost = etcd_backup(&server, &server.endpoint, Some(SHA));
    let observation = observed(&restore_by_name(), lost.clone()).await;
    assert_eq!(used(observation), offsite);
    let unreachable = etcd_backup(&server, "http://127.0.0.1:1", Some(SHA));
    let observation = observed(&restore_by_name(), unreachable).await;
    assert_eq!(used(observation), offsite);
    // The first store contains a backup with another SHA-256 now, because another writer has replaced the backup.
    put(&server, "first", Some("bbbb")).await;
    let observation = observed(&restore_by_name(), lost).await;
    let chosen = observation.objects.backup.as_ref().unwrap();
    let reason = chosen.copy.as_ref().map_or("", |copy| copy.reason.as_str());
    assert!(reason.contains("another writer"), "{reason}");
    assert_eq!(used(observation), offsite);
}

#[tokio::test]
async fn invariant_34_copy_must_have_sha256_of_status() {
    for (recorded, stored) in [
        (Some(SHA), Some("bbbb")),
        // In this case, the copy has no manifest, so it is incomplete.
        (Some(SHA), None),
        // If the status of the EtcdBackup records no SHA-256, no copy can be verified.
        (None, Some(SHA)),
    ] {
        let server = servers();
        put(&server, "second", stored).await;
        let backup = etcd_backup(&server, &server.endpoint, recorded);
        let observation = observed(&restore_by_name(), backup).await;
        let trouble = problem(&observation);
        assert_eq!(trouble.reason, Reason::BackupMissing, "{trouble:?}");
        let names_copy = trouble.message.contains("copy offsite");
        assert_eq!(names_copy, recorded.is_some(), "{trouble:?}");
        if names_copy {
            let remedy = "set spec.backup.before to 2026-01-01T00:00:00Z";
            assert!(trouble.message.contains(remedy), "{trouble:?}");
        }
    }
}

/// The seed may already use the recorded backup.
#[tokio::test]
async fn recorded_backup_is_not_replaced_by_copy() {
    let server = servers();
    put(&server, "second", Some(SHA)).await;
    let backup = etcd_backup(&server, &server.endpoint, Some(SHA));
    let mut restore = restore_by_name();
    let first = serde_json::from_value(json!({ "s3": backup["spec"]["s3"] })).unwrap();
    let chosen = choice::chosen_from(&restore, first);
    restore.status.get_or_insert_default().backup = Some(chosen);
    let observation = observed(&restore, backup).await;
    let trouble = problem(&observation);
    assert_eq!(trouble.reason, Reason::BackupMissing);
    assert!(!trouble.message.contains("offsite"), "{trouble:?}");
}
