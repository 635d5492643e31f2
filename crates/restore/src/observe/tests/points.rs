//! Tests of the search for a point in recorded changes, with a real S3 server.

use std::collections::BTreeMap;
use std::time::Instant;

use bytes::Bytes;
use continuous::{
    Base, Limits, Record, Recorder, SnapshotObject, Transaction, write_base, write_segment,
};
use etcd::fake::FakeEtcd;
use etcd::{Change, ClusterId};
use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::Secret;
use serde_json::{Value, json};
use store::testing::{ACCESS_KEY, S3Server, SECRET_KEY};
use store::{S3Store, Store};

use super::*;
use crate::fake;
use crate::plan::{Action, plan};

pub(super) const PREFIX: &str = "etcd/b.continuous/backup-uid/";
pub(super) const SNAPSHOT: &str =
    "etcd/b.continuous/backup-uid/snapshots/00000000000010000000.snapshot";
const CONTENT: &[u8] = b"snapshot";
const SECOND: i64 = 1_000_000;

async fn s3(server: &S3Server) -> S3Store {
    S3Store::new(server.config("bucket")).await.unwrap()
}

/// A base whose snapshot has this key.
fn base_of(revision: i64, snapshot: &str) -> Base {
    Base {
        cluster_id: ClusterId(0xab),
        revision,
        snapshot: SnapshotObject {
            key: snapshot.to_owned(),
            size: CONTENT.len() as u64,
            sha256: "ab".repeat(32),
        },
        created: revision * SECOND,
        encryption: None,
    }
}

/// A bucket with a base of revision 10 and the revisions 11 to 20. Revision N was received N seconds after 1970.
async fn recorded() -> S3Server {
    let server = S3Server::start(&["bucket"]);
    fill(&s3(&server).await).await;
    server
}

/// Writes the objects of [`recorded`].
pub(super) async fn fill(store: &dyn Store) {
    store.put(SNAPSHOT, CONTENT.into()).await.unwrap();
    let base = base_of(10, SNAPSHOT).encode().unwrap();
    write_base(store, PREFIX, &base).await.unwrap();
    let mut recorder = Recorder::new(&base, Limits::default());
    for revision in 11..=20 {
        let deletion = Change {
            key: Bytes::from_static(b"key"),
            value: None,
        };
        let next = Transaction {
            revision,
            observed: revision * SECOND,
            changes: vec![deletion],
        };
        recorder
            .push(Record::Transaction(next), Instant::now())
            .unwrap();
        if let Some(sealed) = recorder.seal().unwrap() {
            let written = write_segment(store, PREFIX, base.name, &sealed).await;
            written.unwrap();
        }
    }
}

fn block(server: &S3Server, path: &str) -> Value {
    let endpoint = &server.endpoint;
    json!({ "path": path, "awsSecret": "aws", "endpoint": endpoint, "forcePathStyle": true })
}

pub(super) fn etcd_backup(spec: Value) -> Value {
    json!({
        "apiVersion": "etcd.database.coreos.com/v1beta2", "kind": "EtcdBackup",
        "metadata": { "name": "b", "uid": "backup-uid" }, "spec": spec,
    })
}

fn secret() -> Value {
    let keys = format!(
        "[default]\naws_access_key_id = {ACCESS_KEY}\naws_secret_access_key = {SECRET_KEY}\n"
    );
    let config = b"[default]\nregion = us-east-1\n".to_vec();
    let data = [
        ("credentials".to_owned(), ByteString(keys.into_bytes())),
        ("config".to_owned(), ByteString(config)),
    ];
    serde_json::to_value(Secret {
        data: Some(BTreeMap::from(data)),
        ..Secret::default()
    })
    .unwrap()
}

/// An EtcdRestore to a point. Its EtcdCluster does not exist. The fields of `source` are merged into the spec.
pub(super) fn restore_at(source: &Value, continuous: &Value, cluster: &Value) -> EtcdRestore {
    let mut spec = json!({
        "etcdCluster": { "name": "main", "template": { "spec": cluster } }, "continuous": continuous,
    });
    for (field, value) in source.as_object().unwrap() {
        spec[field] = value.clone();
    }
    let mut restore = EtcdRestore::new("again", serde_json::from_value(spec).unwrap());
    restore.metadata.namespace = Some("prod".into());
    restore.metadata.uid = Some("restore-uid".into());
    restore.metadata.generation = Some(1);
    restore
}

pub(super) fn with_seed(mut restore: EtcdRestore) -> EtcdRestore {
    let seed = naming::seed(&restore);
    restore.status.get_or_insert_default().seed = Some(seed);
    restore
}

pub(super) fn plain() -> Value {
    json!({ "size": 1, "version": "3.6.16" })
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

fn problem(observation: &Observation) -> &Trouble {
    match &observation.snapshot.source {
        Source::Unavailable(trouble) => trouble,
        source => panic!("{source:?}"),
    }
}

#[tokio::test]
async fn point_is_found_by_etcdbackup_name_and_by_path() {
    let server = recorded().await;
    let by_name = json!({ "backup": { "name": "b" } });
    let directory = PREFIX.trim_end_matches('/');
    let path = block(&server, &format!("bucket/{directory}"));
    let by_path = json!({ "backupStorageType": "S3", "s3": path });
    let backup = etcd_backup(json!({
        "etcdCluster": { "name": "main" }, "storageType": "S3", "s3": block(&server, "bucket/etcd/b"),
    }));
    for (source, name) in [(by_name, Some("b")), (by_path, None)] {
        for (at, revision) in [
            (json!({ "revision": 13 }), 13),
            (json!({ "time": "1970-01-01T00:00:15.5Z" }), 15),
            (json!({ "latest": true }), 20),
        ] {
            let restore = with_seed(restore_at(&source, &json!({ "at": at }), &plain()));
            let observation = observed(&restore, backup.clone()).await;
            let ready = &observation.snapshot.source;
            assert!(matches!(ready, Source::Ready(_)), "{ready:?}");
            let chosen = observation.snapshot.found.unwrap();
            assert_eq!(chosen.source.source().path(), format!("bucket/{SNAPSHOT}"));
            assert_eq!(chosen.etcd_backup.as_deref(), name);
            let point = chosen.continuous.unwrap();
            assert_eq!((point.revision, point.base_revision), (revision, 10));
            assert_eq!(point.segments, revision - 10);
            assert_eq!(point.prefix, PREFIX);
        }
    }
}

#[tokio::test]
async fn dry_run_finds_point_without_recorded_seed() {
    let server = recorded().await;
    let backup = etcd_backup(json!({
        "etcdCluster": { "name": "main" }, "storageType": "S3", "s3": block(&server, "bucket/etcd/b"),
    }));
    let source = json!({ "backup": { "name": "b" } });
    let dry_run = json!({ "at": { "revision": 13 }, "dryRun": true });
    let restore = restore_at(&source, &dry_run, &plain());
    let observation = observed(&restore, backup.clone()).await;
    let planned = plan(&restore, &observation.snapshot);
    let Action::RecordBackup(chosen) = planned.action else {
        panic!("{planned:?}");
    };
    assert_eq!(chosen.continuous.unwrap().revision, 13);
    // The recorded changes end at revision 20. The dry run reports that revision 21 is not recorded.
    let future = json!({ "at": { "revision": 21 }, "dryRun": true });
    let restore = restore_at(&source, &future, &plain());
    let observation = observed(&restore, backup).await;
    let trouble = problem(&observation);
    assert_eq!(trouble.reason, Reason::PointNotRecorded);
    let newest = "revision 20 (1970-01-01T00:00:20Z)";
    assert!(trouble.message.contains(newest), "{}", trouble.message);
}

/// Invariant 38: the restore refuses the point before it creates anything.
#[tokio::test]
async fn invariant_38_point_that_cannot_be_restored_exactly_is_refused() {
    let server = recorded().await;
    let source = json!({ "backup": { "name": "b" } });
    let s3_block = block(&server, "bucket/etcd/b");
    let copy =
        json!([{ "name": "offsite", "storageType": "S3", "s3": block(&server, "bucket/copy") }]);
    let mut backup = etcd_backup(json!({
        "etcdCluster": { "name": "main" }, "storageType": "S3", "s3": s3_block, "copyTo": copy,
    }));
    // The status lists a copy of a backup. A restore to a point never uses this copy instead of the recorded changes.
    backup["status"] = json!({
        "succeeded": true, "location": "s3://bucket/etcd/b", "sha256": "aaaa",
        "copies": [{ "name": "offsite", "location": "s3://bucket/copy", "backupTime": "2026-01-01T00:00:00Z" }],
    });
    let at = |at: Value| json!({ "at": at });
    let refused = async |continuous: Value, cluster: Value| {
        let restore = with_seed(restore_at(&source, &continuous, &cluster));
        let observation = observed(&restore, backup.clone()).await;
        problem(&observation).clone()
    };
    for (point, reason, part) in [
        (
            json!({ "revision": 9 }),
            Reason::PointNotRecorded,
            "revision 10",
        ),
        (
            json!({ "time": "1970-01-01T00:00:20Z" }),
            Reason::PointNotRecorded,
            "latest: true",
        ),
    ] {
        let trouble = refused(at(point), plain()).await;
        assert_eq!(trouble.reason, reason, "{}", trouble.message);
        assert!(trouble.message.contains(part), "{}", trouble.message);
    }
    let auth = json!({ "size": 1, "version": "3.6.16", "auth": { "secret": "root" } });
    let latest = || at(json!({ "latest": true }));
    let trouble = refused(latest(), auth).await;
    assert_eq!(trouble.reason, Reason::NotSupported, "{}", trouble.message);
    let store = s3(&server).await;
    store.put(SNAPSHOT, "other".into()).await.unwrap();
    let trouble = refused(latest(), plain()).await;
    assert_eq!(trouble.reason, Reason::SnapshotUnreadable);
    store.delete(SNAPSHOT).await.unwrap();
    let trouble = refused(latest(), plain()).await;
    assert_eq!(trouble.reason, Reason::SnapshotUnreadable);
    assert!(
        trouble.message.contains("is missing"),
        "{}",
        trouble.message
    );
}

/// Invariant 13: the message does not depend on the object of the other namespace, because the operator does not
/// request the object.
#[tokio::test]
async fn invariant_13_foreign_snapshot_is_not_requested() {
    const OTHER: &str = "etcd/team-b";
    let server = recorded().await;
    let store = s3(&server).await;
    let forged = base_of(30, OTHER).encode().unwrap();
    write_base(&store, PREFIX, &forged).await.unwrap();
    let backup = etcd_backup(json!({
        "etcdCluster": { "name": "main" }, "storageType": "S3", "s3": block(&server, "bucket/etcd/b"),
    }));
    let source = json!({ "backup": { "name": "b" } });
    let latest = json!({ "at": { "latest": true } });
    let restore = with_seed(restore_at(&source, &latest, &plain()));
    let refused = async || {
        let observation = observed(&restore, backup.clone()).await;
        problem(&observation).clone()
    };
    let missing = refused().await;
    assert_eq!(missing.reason, Reason::SnapshotUnreadable);
    let cause = "its snapshot is not in the directory";
    assert!(missing.message.contains(cause), "{}", missing.message);
    for content in [CONTENT, b"other"] {
        store.put(OTHER, content.into()).await.unwrap();
        assert_eq!(refused().await.message, missing.message);
    }
}
