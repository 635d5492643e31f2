//! Tests of copies of stored backups in other stores, with real store servers.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::collections::BTreeSet;
use std::sync::Arc;

use api::backup::{BackupPolicy, EncryptionKey};
use api::manifest::{BackupManifest, ManifestEncryption, manifest_key};
use backup::copies::{BackupToCopy, CopyJob, CopyRules, Copying};
use backup::reason::Reason;
use backup::retention::Rules;
use backup::snapshot::Copied;
use backup::transfer::Meter;
use bytes::Bytes;
use jiff::Timestamp;
use serde_json::json;
use sha2::{Digest, Sha256};
use store::compression::{Compressor, ZSTD};
use store::fake::{Call, FaultyStore};
use store::testing::{AzureServer, GoogleServer, S3Server, content, download, upload};
use store::{AbsStore, Error, GcsStore, LocalStore, S3Store, Store, Target};
use tokio_util::sync::CancellationToken;

const FIRST: &str = "deep/etcd";
const COPY: &str = "copies/etcd";
const NEWEST: &str = "_v9_2026-06-15-12:00:00";

fn sha256(content: &[u8]) -> String {
    hex::encode(Sha256::digest(content))
}

/// The manifest of a backup that is neither compressed nor encrypted.
fn manifest(snapshot: &[u8]) -> BackupManifest {
    serde_json::from_value(json!({
        "formatVersion": 1, "etcdVersion": "3.6.16", "clusterID": "ab", "revision": 9, "size": snapshot.len(),
        "sha256": sha256(snapshot), "compression": "none", "createdAt": "2026-06-15T12:00:05Z", "backupUID": "uid",
    }))
    .unwrap()
}

/// Stores an object and its manifest, as the backup operator does.
async fn put(store: &dyn Store, key: &str, object: &Bytes, manifest: &BackupManifest) {
    upload(store, key, object, 1 << 20).await.unwrap();
    let tag = store.head(key).await.unwrap().unwrap().tag;
    let manifest = BackupManifest {
        store_tag: tag,
        ..manifest.clone()
    };
    let text = serde_json::to_vec(&manifest).unwrap();
    store.put(&manifest_key(key), text.into()).await.unwrap();
}

async fn manifest_at(store: &dyn Store, key: &str) -> BackupManifest {
    let text = download(store, &manifest_key(key)).await.unwrap();
    serde_json::from_slice(&text).unwrap()
}

/// A task that copies these backups, newest first.
fn copying(from: &Arc<dyn Store>, to: &Arc<dyn Store>, suffixes: &[&str]) -> Copying {
    let target = |store: &Arc<dyn Store>, key: &str| Target {
        store: store.clone(),
        key: key.to_owned(),
    };
    let backups = suffixes.iter().map(|suffix| BackupToCopy {
        suffix: (*suffix).to_owned(),
        sha256: None,
    });
    Copying {
        from: target(from, FIRST),
        to: target(to, COPY),
        job: CopyJob {
            backups: backups.collect(),
            rules: CopyRules::KeepAll,
        },
        uid: "uid".to_owned(),
        since: Timestamp::now(),
    }
}

async fn run(task: &Copying) -> Result<Copied, backup::reason::Trouble> {
    let cancelled = CancellationToken::new();
    Box::pin(task.run(&Meter::default(), &cancelled)).await
}

fn local() -> (tempfile::TempDir, Arc<dyn Store>) {
    let dir = tempfile::tempdir().unwrap();
    let store: Arc<dyn Store> = Arc::new(LocalStore::new(dir.path()));
    (dir, store)
}

async fn keys(store: &dyn Store) -> Vec<String> {
    let listed = store.list("").await.unwrap();
    let mut keys: Vec<String> = listed.into_iter().map(|object| object.key).collect();
    keys.sort();
    keys
}

/// The objects and the manifests of three backups: not compressed, compressed, and encrypted.
fn objects() -> Vec<(Bytes, BackupManifest)> {
    let snapshot = content(20 << 20);
    let plain = manifest(&snapshot);
    let mut compressor = Compressor::new().unwrap();
    let mut compressed = Vec::new();
    compressor
        .push(&snapshot, |piece| compressed.extend_from_slice(piece))
        .unwrap();
    compressor
        .finish(|piece| compressed.extend_from_slice(piece))
        .unwrap();
    let zstd = BackupManifest {
        compression: ZSTD.to_owned(),
        stored_size: Some(i64::try_from(compressed.len()).unwrap()),
        ..plain.clone()
    };
    // `encrypted` is no valid ciphertext: the operator copies an encrypted object unchanged, and needs no key.
    let encrypted = content(7_000_001);
    let key = EncryptionKey {
        name: "2026".to_owned(),
        id: "a62e0f7753a4df18".to_owned(),
    };
    let secret = BackupManifest {
        stored_size: Some(7_000_001),
        stored_sha256: Some(sha256(&encrypted)),
        encryption: Some(ManifestEncryption {
            format: "x".to_owned(),
            key,
        }),
        ..plain.clone()
    };
    vec![
        (snapshot, plain),
        (compressed.into(), zstd),
        (encrypted, secret),
    ]
}

async fn copies_are_equal(from: Arc<dyn Store>, to: Arc<dyn Store>) {
    for (object, manifest) in objects() {
        let (source, target) = (format!("{FIRST}{NEWEST}"), format!("{COPY}{NEWEST}"));
        put(from.as_ref(), &source, &object, &manifest).await;
        // The copy of the previous iteration is deleted, because the next copy would not replace it.
        to.delete(&target).await.unwrap();
        to.delete(&manifest_key(&target)).await.unwrap();
        let mut task = copying(&from, &to, &[NEWEST]);
        task.job.backups[0].sha256 = Some(manifest.sha256.clone());
        let copied = run(&task).await.unwrap();
        assert_eq!(copied.problem, None);
        let stored = copied.stored;
        assert_eq!(stored.location, format!("{}/{target}", to.location()));
        assert_eq!((stored.revision, &stored.sha256), (9, &manifest.sha256));
        assert!(download(to.as_ref(), &target).await.unwrap() == object);
        let copy = manifest_at(to.as_ref(), &target).await;
        let tag = to.head(&target).await.unwrap().unwrap().tag;
        assert_eq!(copy.store_tag, tag);
        let without_tag = |manifest: &BackupManifest| BackupManifest {
            store_tag: None,
            ..manifest.clone()
        };
        assert_eq!(without_tag(&copy), without_tag(&manifest));
        // The second run finds a complete copy, and does not write the object again.
        let again = run(&task).await.unwrap();
        assert_eq!(again.stored, stored);
        assert_eq!(to.head(&target).await.unwrap().unwrap().tag, tag);
        // A copy without a manifest is incomplete, so the third run writes it again.
        to.delete(&manifest_key(&target)).await.unwrap();
        assert_eq!(run(&task).await.unwrap().stored.sha256, manifest.sha256);
        assert_eq!(to.unfinished("").await.unwrap(), []);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn backup_in_s3_is_copied_to_gcs() {
    let (s3, gcs) = (
        S3Server::start(&["first"]),
        GoogleServer::start(&["second"]),
    );
    let from = S3Store::new(s3.config("first")).await.unwrap();
    let to = GcsStore::new(gcs.config("second")).await.unwrap();
    Box::pin(copies_are_equal(Arc::new(from), Arc::new(to))).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn backup_in_gcs_is_copied_to_abs() {
    let (gcs, abs) = (
        GoogleServer::start(&["first"]),
        AzureServer::start(&["second"]),
    );
    let from = GcsStore::new(gcs.config("first")).await.unwrap();
    let to = AbsStore::new(&abs.config("second")).unwrap();
    Box::pin(copies_are_equal(Arc::new(from), Arc::new(to))).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn backup_in_local_directory_is_copied_to_s3() {
    let (_dir, from) = local();
    let s3 = S3Server::start(&["second"]);
    let to = S3Store::new(s3.config("second")).await.unwrap();
    Box::pin(copies_are_equal(from, Arc::new(to))).await;
}

/// Invariant 12: a copy is complete only if its content matches the manifest of the backup.
#[tokio::test]
async fn invariant_12_damaged_or_replaced_backup_is_not_copied() {
    let (_first, from) = local();
    let s3 = S3Server::start(&["second"]);
    let to: Arc<dyn Store> = Arc::new(S3Store::new(s3.config("second")).await.unwrap());
    let source = format!("{FIRST}{NEWEST}");
    for (object, manifest) in objects() {
        let mut damaged = object.to_vec();
        damaged[5_000_000] ^= 1;
        put(from.as_ref(), &source, &damaged.into(), &manifest).await;
        let task = copying(&from, &to, &[NEWEST]);
        let trouble = run(&task).await.unwrap_err();
        assert_eq!(trouble.reason, Reason::ChecksumMismatch, "{trouble:?}");
        assert_eq!(keys(to.as_ref()).await, Vec::<String>::new());
        assert_eq!(s3.unfinished("second"), Vec::<std::path::PathBuf>::new());
        // The status of the EtcdBackup records another SHA-256 than the manifest in the first store.
        put(from.as_ref(), &source, &object, &manifest).await;
        let mut task = copying(&from, &to, &[NEWEST]);
        task.job.backups[0].sha256 = Some("ab".to_owned());
        let trouble = run(&task).await.unwrap_err();
        assert!(trouble.message.contains("was replaced"), "{trouble:?}");
        assert_eq!(keys(to.as_ref()).await, Vec::<String>::new());
    }
    // The first store no longer contains the newest backup.
    from.delete(&source).await.unwrap();
    let trouble = run(&copying(&from, &to, &[NEWEST])).await.unwrap_err();
    assert_eq!(trouble.reason, Reason::BackupMissing);
}

#[tokio::test]
async fn failed_request_leaves_no_complete_copy() {
    let (_first, from) = local();
    let object = content(3 << 20);
    let source = format!("{FIRST}{NEWEST}");
    put(from.as_ref(), &source, &object, &manifest(&object)).await;
    for call in [
        Call::Begin,
        Call::Write,
        Call::Commit,
        Call::CommitAnswer,
        Call::Put,
        Call::Get,
        Call::Head,
    ] {
        let dir = tempfile::tempdir().unwrap();
        let inner = LocalStore::new(dir.path());
        let faulty = FaultyStore::new(inner.clone());
        let to: Arc<dyn Store> = Arc::new(faulty.clone());
        let task = copying(&from, &to, &[NEWEST]);
        faulty.fail(call, Error::Timeout("second".to_owned()));
        let trouble = run(&task).await.unwrap_err();
        assert_eq!(trouble.reason, Reason::StoreUnreachable, "{call:?}");
        let manifest = manifest_key(&format!("{COPY}{NEWEST}"));
        assert_eq!(inner.head(&manifest).await.unwrap(), None, "{call:?}");
        // The retry copies the stored backup, and needs no new snapshot.
        let copied = run(&task).await.unwrap();
        assert_eq!(copied.problem, None, "{call:?}");
        assert!(inner.head(&manifest).await.unwrap().is_some());
    }
}

/// The periodic backups of the first store, newest first.
const SERIES: [&str; 4] = [
    "_v9_2026-06-15-12:00:00",
    "_v8_2026-06-15-11:00:00",
    "_v7_2026-06-15-10:00:00",
    "_v6_2026-06-15-09:00:00",
];

fn keeping(newest: i64) -> CopyRules {
    CopyRules::Apply {
        rules: Rules::of(&BackupPolicy {
            max_backups: Some(newest),
            ..BackupPolicy::default()
        }),
        others: BTreeSet::new(),
        now: "2026-06-15T12:30:00Z".parse().unwrap(),
    }
}

async fn put_series(store: &dyn Store) {
    for suffix in SERIES {
        let object = content(1000);
        put(
            store,
            &format!("{FIRST}{suffix}"),
            &object,
            &manifest(&object),
        )
        .await;
    }
}

/// The copies of [`SERIES`] with these indices, with their manifests.
fn expected(indices: &[usize]) -> Vec<String> {
    let keys = indices
        .iter()
        .map(|index| format!("{COPY}{}", SERIES[*index]));
    let mut keys: Vec<String> = keys.flat_map(|key| [manifest_key(&key), key]).collect();
    keys.sort();
    keys
}

#[tokio::test]
async fn older_backups_are_copied_after_an_outage() {
    let ((_first, from), (_second, to)) = (local(), local());
    put_series(from.as_ref()).await;
    let task = copying(&from, &to, &SERIES);
    assert_eq!(run(&task).await.unwrap().problem, None);
    assert_eq!(keys(to.as_ref()).await, expected(&[0, 1, 2, 3]));
}

#[tokio::test]
async fn retention_of_copy_does_not_affect_first_store() {
    let ((_first, from), (_second, to)) = (local(), local());
    put_series(from.as_ref()).await;
    let mut task = copying(&from, &to, &SERIES[2..]);
    run(&task).await.unwrap();
    let sibling = "copies/etcd_v2_v9_2019-01-01-00:00:00";
    to.put(sibling, "other".into()).await.unwrap();
    task = copying(&from, &to, &SERIES);
    task.job.rules = keeping(2);
    assert_eq!(run(&task).await.unwrap().problem, None);
    let mut left = expected(&[0, 1]);
    left.push(sibling.to_owned());
    left.sort();
    assert_eq!(keys(to.as_ref()).await, left);
    // The retention of the copy deletes nothing in the first store.
    assert_eq!(keys(from.as_ref()).await.len(), 2 * SERIES.len());
}

/// Invariant 9: nothing is removed if the rules cannot be applied, or if the newest backup is not copied.
#[tokio::test]
async fn invariant_9_copies_are_removed_only_after_newest_is_copied() {
    let (_first, from) = local();
    put_series(from.as_ref()).await;
    let dir = tempfile::tempdir().unwrap();
    let inner = LocalStore::new(dir.path());
    let faulty = FaultyStore::new(inner.clone());
    let to: Arc<dyn Store> = Arc::new(faulty.clone());
    run(&copying(&from, &to, &SERIES[1..])).await.unwrap();
    let mut task = copying(&from, &to, &SERIES);
    task.job.rules = keeping(1);
    faulty.fail(Call::Commit, Error::Timeout("second".to_owned()));
    run(&task).await.unwrap_err();
    assert_eq!(keys(&inner).await, expected(&[1, 2, 3]));
    let why = backup::reason::Trouble::new(Reason::ClocksDiffer, "the clocks differ");
    task.job.rules = CopyRules::Blocked(why.clone());
    assert_eq!(run(&task).await.unwrap().problem, Some(why));
    assert_eq!(keys(&inner).await, expected(&[0, 1, 2, 3]));
    task.job.rules = keeping(1);
    assert_eq!(run(&task).await.unwrap().problem, None);
    assert_eq!(keys(&inner).await, expected(&[0]));
}

#[tokio::test]
async fn failed_removal_of_old_copies_leaves_copy_complete() {
    let (_first, from) = local();
    put_series(from.as_ref()).await;
    let dir = tempfile::tempdir().unwrap();
    let faulty = FaultyStore::new(LocalStore::new(dir.path()));
    let to: Arc<dyn Store> = Arc::new(faulty.clone());
    run(&copying(&from, &to, &SERIES[1..])).await.unwrap();
    let mut task = copying(&from, &to, &SERIES);
    task.job.rules = keeping(1);
    faulty.fail(Call::Delete, Error::AccessDenied("locked".to_owned()));
    let copied = run(&task).await.unwrap();
    assert_eq!(
        copied.problem.map(|trouble| trouble.reason),
        Some(Reason::AccessDenied)
    );
    assert!(copied.stored.location.ends_with(SERIES[0]));
}

#[tokio::test]
async fn failed_older_copy_blocks_neither_other_copies_nor_retention() {
    let (_first, from) = local();
    put_series(from.as_ref()).await;
    let dir = tempfile::tempdir().unwrap();
    let inner = LocalStore::new(dir.path());
    let faulty = FaultyStore::new(inner.clone());
    let to: Arc<dyn Store> = Arc::new(faulty.clone());
    let mut task = copying(&from, &to, &SERIES);
    faulty.fail_after(Call::Commit, 1, Error::AccessDenied("locked".to_owned()));
    let problem = run(&task).await.unwrap().problem;
    let denied = Some(Reason::AccessDenied);
    assert_eq!(problem.map(|trouble| trouble.reason), denied);
    assert_eq!(keys(&inner).await, expected(&[0, 2, 3]));
    task.job.rules = keeping(2);
    faulty.fail(Call::Commit, Error::AccessDenied("locked".to_owned()));
    let problem = run(&task).await.unwrap().problem;
    assert_eq!(problem.map(|trouble| trouble.reason), denied);
    assert_eq!(keys(&inner).await, expected(&[0, 2]));
    assert_eq!(run(&task).await.unwrap().problem, None);
    assert_eq!(keys(&inner).await, expected(&[0, 1]));
}

#[tokio::test]
async fn copy_of_other_etcdbackup_is_replaced_only_by_single_backup() {
    let ((_first, from), (_second, to)) = (local(), local());
    let object = content(1000);
    let ours = manifest(&object);
    let theirs = BackupManifest {
        backup_uid: Some("other".to_owned()),
        ..ours.clone()
    };
    for (suffix, replaced) in [(NEWEST, false), ("", true)] {
        let (source, target) = (format!("{FIRST}{suffix}"), format!("{COPY}{suffix}"));
        put(from.as_ref(), &source, &object, &ours).await;
        put(to.as_ref(), &target, &object, &theirs).await;
        let copied = run(&copying(&from, &to, &[suffix])).await;
        assert_eq!(copied.is_ok(), replaced, "{copied:?}");
        let owner = manifest_at(to.as_ref(), &target).await.backup_uid;
        assert_eq!(owner.as_deref() == Some("uid"), replaced);
    }
}

#[tokio::test]
async fn canceled_copy_leaves_nothing() {
    let (_first, from) = local();
    let s3 = S3Server::start(&["second"]);
    let to: Arc<dyn Store> = Arc::new(S3Store::new(s3.config("second")).await.unwrap());
    let object = content(20 << 20);
    let source = format!("{FIRST}{NEWEST}");
    put(from.as_ref(), &source, &object, &manifest(&object)).await;
    let task = copying(&from, &to, &[NEWEST]);
    let cancelled = CancellationToken::new();
    cancelled.cancel();
    let ended = Box::pin(task.run(&Meter::default(), &cancelled)).await;
    assert_eq!(ended.unwrap_err().reason, Reason::StepFailed);
    assert_eq!(keys(to.as_ref()).await, Vec::<String>::new());
}
