//! Tests of backup, adoption and retention with a real server for every type of store.
#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::sync::Arc;

use api::backup::BackupPolicy;
use api::backup::name;
use api::manifest::{BackupManifest, manifest_key};
use backup::removal::{Removal, RemovalScope};
use backup::retention::Rules;
use backup::snapshot::EndpointLimits;
use backup::transfer::{EarlierAttempt, Meter, ObjectName, Owner, Transfer, earlier_attempt};
use etcd::testing::{EtcdProcess, Programs, Start};
use etcd::{Access, EtcdClient, Inspector};
use jiff::{SignedDuration, Timestamp};
use store::testing::{AzureServer, GoogleServer, S3Server, download};
use store::{AbsStore, GcsStore, LocalStore, S3Store, Store};
use tokio_util::sync::CancellationToken;

const PATH: &str = "deep/etcd";

const OWNER: Owner<'_> = Owner {
    uid: "uid",
    cluster: None,
    encrypted: false,
    verify_content: true,
};

async fn backs_up_adopts_and_removes(store: Arc<dyn Store>, scheme: &str) {
    let etcd = EtcdProcess::start(&Programs::find("3.6"), &Start::default()).await;
    let mut client = etcd_client::Client::connect([&etcd.client_url], None)
        .await
        .unwrap();
    let first: Timestamp = "2026-06-15T12:00:00Z".parse().unwrap();
    let mut locations = Vec::new();
    for run in 0..3 {
        for index in 0..80 {
            let key = format!("/{run}/{index}");
            client.put(key, vec![b'v'; 1 << 18], None).await.unwrap();
        }
        let time = first + SignedDuration::from_hours(run);
        let name = ObjectName::Numbered {
            path: PATH.to_owned(),
            time,
            leftover: None,
        };
        let transfer = Transfer {
            etcd: Arc::new(EtcdClient::new(Access::default())),
            endpoints: vec![etcd.client_url.clone()],
            store: store.clone(),
            name: name.clone(),
            compress: run == 1,
            encryption: None,
            uid: "uid".to_owned(),
            cluster: None,
            limits: EndpointLimits::default(),
            since: Timestamp::now(),
        };
        let stored = transfer
            .run(&Meter::default(), &CancellationToken::new())
            .await
            .unwrap();
        assert!(stored.location.starts_with(scheme), "{}", stored.location);
        let found = earlier_attempt(store.as_ref(), name, OWNER, time).await;
        assert_eq!(found.unwrap(), EarlierAttempt::Complete(stored.clone()));
        locations.push((stored, time));
    }
    let (newest, _) = locations.last().unwrap();
    let key = newest
        .location
        .strip_prefix(&format!("{}/", store.location()))
        .unwrap();
    let content = download(store.as_ref(), key).await.unwrap();
    let mut inspector = Inspector::new();
    inspector.push(&content);
    let inspected = inspector.finish().unwrap();
    assert!(inspected.trailer);
    assert_eq!(inspected.store_revision(), newest.revision);
    let manifest = download(store.as_ref(), &manifest_key(key)).await.unwrap();
    let manifest: BackupManifest = serde_json::from_slice(&manifest).unwrap();
    assert_eq!(manifest.sha256, newest.sha256);
    // `store_tag` is the ETag of the upload. A directory (`file://`) has no ETags, so the manifest has no `store_tag`.
    assert_eq!(manifest.store_tag.is_some(), scheme != "file://");

    // Retention keeps the newest backup, and ignores the object of the other path `deep/etcd_v2`.
    let sibling = "deep/etcd_v2_v9_2019-01-01-00:00:00";
    store.put(sibling, "other".into()).await.unwrap();
    let policy = BackupPolicy {
        max_backups: Some(1),
        ..BackupPolicy::default()
    };
    let removal = Removal {
        store: store.clone(),
        path: PATH.to_owned(),
        uid: "uid".to_owned(),
        scope: RemovalScope::Surplus {
            rules: Rules::of(&policy),
            newest: newest.location.clone(),
            others: std::collections::BTreeSet::new(),
            now: Timestamp::now(),
        },
    };
    assert_eq!(removal.run().await.unwrap().deleted, 2);
    let mut left: Vec<String> = store
        .list("deep/")
        .await
        .unwrap()
        .into_iter()
        .map(|object| object.key)
        .collect();
    left.sort();
    let mut expected = vec![key.to_owned(), manifest_key(key), sibling.to_owned()];
    expected.sort();
    assert_eq!(left, expected);
    let parts = name::parse(PATH, key).unwrap();

    // In a store with ETags, another writer replaces the object of the backup with an object of the same size. The
    // backup is then incomplete.
    if manifest.store_tag.is_some() {
        let other = vec![7; content.len()];
        store.put(key, other.into()).await.unwrap();
        let name = |leftover| ObjectName::Numbered {
            path: PATH.to_owned(),
            time: parts.time,
            leftover,
        };
        let found = earlier_attempt(store.as_ref(), name(None), OWNER, parts.time).await;
        assert_eq!(
            found.unwrap(),
            EarlierAttempt::Incomplete(name(Some(key.to_owned())))
        );
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn s3_backups_are_taken_adopted_and_removed() {
    let server = S3Server::start(&["bucket"]);
    let store = S3Store::new(server.config("bucket")).await.unwrap();
    Box::pin(backs_up_adopts_and_removes(Arc::new(store), "s3://bucket/")).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn gcs_backups_are_taken_adopted_and_removed() {
    let server = GoogleServer::start(&["bucket"]);
    let store = GcsStore::new(server.config("bucket")).await.unwrap();
    Box::pin(backs_up_adopts_and_removes(Arc::new(store), "gs://bucket/")).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn abs_backups_are_taken_adopted_and_removed() {
    let server = AzureServer::start(&["bucket"]);
    let store = AbsStore::new(&server.config("bucket")).unwrap();
    Box::pin(backs_up_adopts_and_removes(Arc::new(store), "")).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn local_backups_are_taken_adopted_and_removed() {
    let dir = tempfile::tempdir().unwrap();
    Box::pin(backs_up_adopts_and_removes(
        Arc::new(LocalStore::new(dir.path())),
        "file://",
    ))
    .await;
}
