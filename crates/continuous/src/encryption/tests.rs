//! Tests of encrypted chains.
#![allow(clippy::unwrap_used, clippy::panic)]

use store::LocalStore;
use store::compression::Compressor;
use store::encryption::{self as format, is_encrypted};
use tempfile::TempDir;

use super::*;
use crate::base::{Base, SnapshotObject, StoredBase};
use crate::fixture::{base, chain};
use crate::name::{SNAPSHOTS, snapshot_name};
use crate::point::{FoundPoint, Point, PointError, find_point};
use crate::segment::Sealed;
use crate::stored::{ReadError, Reader, base_key, segment_key, write_base, write_segment};

const PREFIX: &str = "p/";

fn first() -> Key {
    Key::parse("2026", b"AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=").unwrap()
}

fn second() -> Key {
    let text = "B".repeat(42) + "A=";
    Key::parse("2027", text.as_bytes()).unwrap()
}

fn keys(all: impl IntoIterator<Item = Key>) -> Keys {
    let mut keys = Keys::default();
    all.into_iter().for_each(|key| keys.add(key));
    keys
}

/// A base with this revision, whose time is `revision` seconds. `key` encrypts its snapshot.
fn base_at(revision: i64, key: Option<&Key>) -> StoredBase {
    let created = revision * 1_000_000;
    let base = Base {
        revision,
        created,
        snapshot: SnapshotObject {
            key: format!("{PREFIX}{SNAPSHOTS}{}", snapshot_name(created)),
            ..base().base.snapshot
        },
        encryption: key.map(described),
        ..base().base
    };
    base.encode().unwrap()
}

struct Recorded {
    directory: TempDir,
    local: LocalStore,
}

impl Recorded {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let local = LocalStore::new(directory.path());
        Self { directory, local }
    }

    async fn store(&self, base: &StoredBase, segments: &[Sealed], key: Option<Key>) {
        let encrypted = key.map(|key| EncryptedStore::new(&self.local, key.clone(), keys([key])));
        let store: &dyn Store = match &encrypted {
            Some(encrypted) => encrypted,
            None => &self.local,
        };
        write_base(store, PREFIX, base).await.unwrap();
        for segment in segments {
            let written = write_segment(store, PREFIX, base.name, segment);
            written.await.unwrap();
        }
    }

    fn raw(&self, key: &str) -> Vec<u8> {
        std::fs::read(self.directory.path().join(key)).unwrap()
    }

    /// Reads the chain until its end or the first error. Returns the last revision and the error.
    async fn read(&self, base: &StoredBase, keys: Option<Keys>) -> (i64, Option<ReadError>) {
        let store = EncryptedStore::for_reading(&self.local, keys);
        let mut reader = Reader::open(&store, PREFIX, base.name).await.unwrap();
        loop {
            match reader.next().await {
                Ok(Some(_)) => {}
                Ok(None) => return (reader.last(), None),
                Err(error) => return (reader.last(), Some(error)),
            }
        }
    }

    async fn find(&self, point: Point, keys: Option<Keys>) -> Result<FoundPoint, PointError> {
        let requires_encryption = keys.is_some();
        let store = EncryptedStore::for_reading(&self.local, keys);
        find_point(&store, PREFIX, point, None, requires_encryption).await
    }
}

/// The text of an encryption error. Panics if `error` is not an encryption error.
fn problem(error: Option<ReadError>) -> String {
    let Some(ReadError::Encryption { error, .. }) = error else {
        panic!("{error:?}");
    };
    error.to_string()
}

#[tokio::test]
async fn encrypted_chain_has_encrypted_segments_and_plain_base() {
    let recorded = Recorded::new();
    let base = base_at(10, Some(&first()));
    let segments = chain(&base, 4, 2, 0);
    recorded.store(&base, &segments, Some(first())).await;
    let object = recorded.raw(&base_key(PREFIX, base.name));
    assert_eq!(object, base.object);
    let decoded = StoredBase::decode(object.into()).unwrap();
    let encryption = decoded.base.encryption.unwrap();
    assert_eq!(encryption.key.id, first().id().to_string());
    for segment in &segments {
        let stored = recorded.raw(&segment_key(PREFIX, base.name, segment.name));
        assert!(is_encrypted(&stored));
        let size = format::stored_size(segment.object.len() as u64);
        assert_eq!(stored.len() as u64, size);
    }
    let (last, error) = recorded.read(&base, Some(keys([first()]))).await;
    assert!(error.is_none(), "{error:?}");
    assert_eq!(last, 18);
}

#[tokio::test]
async fn chain_after_key_rotation_is_readable_only_with_both_keys() {
    let recorded = Recorded::new();
    let base = base_at(10, Some(&first()));
    let segments = chain(&base, 4, 2, 0);
    recorded.store(&base, &segments[..2], Some(first())).await;
    recorded.store(&base, &segments[2..], Some(second())).await;
    let both = keys([first(), second()]);
    let (last, error) = recorded.read(&base, Some(both)).await;
    assert!(error.is_none(), "{error:?}");
    assert_eq!(last, 18);
    let (last, error) = recorded.read(&base, Some(keys([first()]))).await;
    assert_eq!(last, 14);
    let (problem, id) = (problem(error), second().id().to_string());
    assert!(problem.contains(&id), "{problem}");
}

#[tokio::test]
async fn error_of_read_without_keys_contains_id_of_missing_key() {
    let recorded = Recorded::new();
    let base = base_at(10, Some(&first()));
    let segments = chain(&base, 1, 2, 0);
    recorded.store(&base, &segments, Some(first())).await;
    let (_, error) = recorded.read(&base, None).await;
    let (problem, id) = (problem(error), first().id().to_string());
    assert!(problem.contains(&id), "{problem}");
}

/// Any writer to the store can replace an encrypted segment (invariant 34).
#[tokio::test]
async fn invariant_34_reader_with_keys_refuses_unencrypted_segment() {
    let recorded = Recorded::new();
    let base = base_at(10, Some(&first()));
    recorded.store(&base, &chain(&base, 1, 2, 0), None).await;
    let (_, error) = recorded.read(&base, Some(keys([first()]))).await;
    assert!(problem(error).contains("not encrypted"));
}

#[tokio::test]
async fn damaged_encrypted_segment_is_refused() {
    let recorded = Recorded::new();
    let base = base_at(10, Some(&first()));
    let segments = chain(&base, 1, 2, 0);
    recorded.store(&base, &segments, Some(first())).await;
    let key = segment_key(PREFIX, base.name, segments[0].name);
    let mut stored = recorded.raw(&key);
    *stored.last_mut().unwrap() ^= 1;
    recorded.local.put(&key, stored.into()).await.unwrap();
    let (_, error) = recorded.read(&base, Some(keys([first()]))).await;
    assert!(problem(error).contains("damaged"));
}

/// Snapshots and large segments are uploaded in several parts.
#[tokio::test]
async fn content_of_encrypted_upload_round_trips() {
    let recorded = Recorded::new();
    let store = EncryptedStore::new(&recorded.local, first(), keys([first()]));
    for size in [0, 1, 1 << 16, (1 << 16) + 1, 300_000] {
        let content = Bytes::from(vec![7; size]);
        let key = format!("{PREFIX}{SNAPSHOTS}{}", snapshot_name(1));
        let mut upload = store.begin(&key).await.unwrap();
        let mut rest = content.clone();
        while !rest.is_empty() {
            let chunk = rest.split_to(rest.len().min(100_000));
            upload.write(chunk).await.unwrap();
        }
        let committed = upload.commit().await.unwrap();
        assert_eq!(committed.size, format::stored_size(size as u64), "{size}");
        assert!(is_encrypted(&recorded.raw(&key)), "{size}");
        let read = crate::stored::read(&store, &key, size).await.unwrap();
        assert!(read == content, "{size}");
    }
}

/// The decompression of a forged object could need much memory (invariant 15).
#[tokio::test]
async fn invariant_15_compressed_object_is_not_decompressed() {
    let recorded = Recorded::new();
    let content = b"content".repeat(1_000);
    let mut compressed = Vec::new();
    let mut compressor = Compressor::new().unwrap();
    let pushed = compressor.push(&content, |piece| compressed.extend_from_slice(piece));
    pushed.unwrap();
    let finished = compressor.finish(|piece| compressed.extend_from_slice(piece));
    finished.unwrap();
    let key = format!("{PREFIX}{SNAPSHOTS}{}", snapshot_name(1));
    let object = Bytes::from(compressed);
    recorded.local.put(&key, object.clone()).await.unwrap();
    let store = EncryptedStore::for_reading(&recorded.local, None);
    let read = crate::stored::read(&store, &key, content.len()).await;
    assert!(read.unwrap() == object);
}

#[tokio::test]
async fn store_opened_for_reading_rejects_writes() {
    let recorded = Recorded::new();
    for keys in [None, Some(keys([first()]))] {
        let store = EncryptedStore::for_reading(&recorded.local, keys);
        let key = format!("{PREFIX}{SNAPSHOTS}{}", snapshot_name(1));
        assert!(store.put(&key, Bytes::from_static(b"x")).await.is_err());
        assert!(store.begin(&key).await.is_err());
    }
    assert!(recorded.local.list("").await.unwrap().is_empty());
}

/// The recorder took the first base without encryption, and the second base after encryption was turned on.
#[tokio::test]
async fn search_finds_encrypted_points_with_keys_and_plain_points_without() {
    let recorded = Recorded::new();
    let plain = base_at(10, None);
    recorded.store(&plain, &chain(&plain, 4, 2, 0), None).await;
    let encrypted = base_at(18, Some(&first()));
    let segments = chain(&encrypted, 4, 2, 0);
    recorded.store(&encrypted, &segments, Some(first())).await;
    let with_keys = || Some(keys([first()]));
    for (point, expected) in [(Point::Latest, 26), (Point::Revision(20), 20)] {
        let found = recorded.find(point, with_keys()).await.unwrap();
        assert_eq!(found.at.revision, expected);
        assert_eq!(found.base.name, encrypted.name);
        let error = recorded.find(point, None).await.unwrap_err();
        let PointError::Read(error) = error else {
            panic!("{error:?}");
        };
        assert!(problem(Some(error)).contains(&first().id().to_string()));
    }
    // A restore to revision 18 needs only the snapshot of the second base, which is encrypted.
    let error = recorded.find(Point::Revision(18), None).await;
    let error = error.unwrap_err();
    assert!(
        error.to_string().contains(&first().id().to_string()),
        "{error}"
    );
    let found = recorded.find(Point::Revision(12), None).await.unwrap();
    assert_eq!(found.base.name, plain.name);
    let error = recorded.find(Point::Revision(12), with_keys()).await;
    assert!(matches!(error, Err(PointError::BeforeOldest(_))));
}

/// Any writer to the store can add a later base without encryption (invariant 34).
#[tokio::test]
async fn invariant_34_search_with_keys_refuses_later_unencrypted_base() {
    let recorded = Recorded::new();
    let encrypted = base_at(10, Some(&first()));
    let segments = chain(&encrypted, 4, 2, 0);
    recorded.store(&encrypted, &segments, Some(first())).await;
    recorded.store(&base_at(18, None), &[], None).await;
    let with_keys = || Some(keys([first()]));
    let error = recorded.find(Point::Latest, with_keys()).await;
    assert!(matches!(error, Err(PointError::NotEncrypted(_))));
    let found = recorded.find(Point::Revision(17), with_keys()).await;
    assert_eq!(found.unwrap().base.name, encrypted.name);
}
