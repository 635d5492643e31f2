//! Tests of stored chains, with missing and damaged objects.
#![allow(clippy::unwrap_used)]

use std::fs;
use std::path::PathBuf;

use store::LocalStore;
use store::fake::{Call, FaultyStore};
use tempfile::TempDir;

use super::*;
use crate::chain::ChainFault;
use crate::error::SegmentError;
use crate::fixture::{BASE_REVISION, base, base_of, chain};

const PREFIX: &str = "backups/one/";

struct Stored {
    directory: TempDir,
    store: LocalStore,
    segments: Vec<Sealed>,
}

impl Stored {
    /// Stores a chain of four segments with two transactions each.
    async fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let store = LocalStore::new(directory.path());
        write_base(&store, PREFIX, &base()).await.unwrap();
        let segments = chain(&base(), 4, 2, 0);
        for segment in &segments {
            let written = write_segment(&store, PREFIX, base().name, segment);
            written.await.unwrap();
        }
        Self {
            directory,
            store,
            segments,
        }
    }

    fn path(&self, index: usize) -> PathBuf {
        let key = segment_key(PREFIX, base().name, self.segments[index].name);
        self.directory.path().join(key)
    }

    async fn reader(&self) -> Reader<'_> {
        let opened = Reader::open(&self.store, PREFIX, base().name).await;
        opened.unwrap()
    }

    /// Reads the chain until its end or the first error. Returns the last revision and the error.
    async fn read(&self) -> (i64, Option<ReadError>) {
        let mut reader = self.reader().await;
        loop {
            match reader.next().await {
                Ok(Some(_)) => {}
                Ok(None) => return (reader.last(), None),
                Err(error) => return (reader.last(), Some(error)),
            }
        }
    }
}

#[tokio::test]
async fn stored_chain_is_read_despite_rewrites_and_foreign_objects() {
    let stored = Stored::new().await;
    // A second write of the same base or segment changes nothing. The reader ignores an object that is no segment.
    write_base(&stored.store, PREFIX, &base()).await.unwrap();
    let again = write_segment(&stored.store, PREFIX, base().name, &stored.segments[1]);
    again.await.unwrap();
    let other = format!("{PREFIX}{}/notes.txt", base().name);
    stored.store.put(&other, "x".into()).await.unwrap();
    let (last, error) = stored.read().await;
    assert_eq!(last, BASE_REVISION + 8);
    assert!(error.is_none(), "{error:?}");
    let reader = stored.reader().await;
    assert_eq!(reader.base(), &base());
    assert_eq!(reader.chain().faults, []);
}

#[tokio::test]
async fn bases_are_listed_in_order_of_revision() {
    let stored = Stored::new().await;
    let bases_before = [base_of(7, 1_000), base_of(7, 9)];
    for other in &bases_before {
        write_base(&stored.store, PREFIX, other).await.unwrap();
    }
    let listed = bases(&stored.store, PREFIX).await.unwrap();
    let revisions: Vec<i64> = listed.iter().map(|base| base.revision).collect();
    assert_eq!(revisions, [9, BASE_REVISION, 1_000]);
    assert_eq!(bases(&stored.store, "backups/").await.unwrap(), []);
}

#[tokio::test]
async fn missing_segment_is_reported() {
    let stored = Stored::new().await;
    fs::remove_file(stored.path(2)).unwrap();
    let (last, error) = stored.read().await;
    assert_eq!(last, 14);
    assert!(error.is_none(), "{error:?}");
    let fault = ChainFault::Missing {
        after: 14,
        next: 17,
    };
    assert_eq!(stored.reader().await.chain().faults, [fault]);
}

#[tokio::test]
async fn read_of_chain_ends_before_damaged_segment() {
    let stored = Stored::new().await;
    let content = fs::read(stored.path(1)).unwrap();
    let mut flipped = content.clone();
    flipped[150] ^= 1;
    for damaged in [
        content[..content.len() - 1].to_vec(),
        Vec::new(),
        flipped,
        [content.as_slice(), b"x"].concat(),
    ] {
        fs::write(stored.path(1), damaged).unwrap();
        let (last, error) = stored.read().await;
        assert_eq!(last, 12);
        let error = error.unwrap();
        assert!(
            matches!(error, ReadError::Chain(VerifyError::Invalid { .. })),
            "{error:?}"
        );
    }
    fs::write(stored.path(1), &content).unwrap();
    assert!(stored.read().await.1.is_none());
}

#[tokio::test]
async fn swapped_segments_are_reported() {
    let stored = Stored::new().await;
    let (one, two) = (stored.path(1), stored.path(2));
    let other = fs::read(&one).unwrap();
    fs::rename(&two, &one).unwrap();
    fs::write(&two, other).unwrap();
    let (last, error) = stored.read().await;
    assert_eq!(last, 12);
    let error = error.unwrap();
    assert!(
        matches!(error, ReadError::Chain(VerifyError::Misnamed { .. })),
        "{error:?}"
    );
}

#[tokio::test]
async fn damaged_foreign_or_oversized_base_is_rejected() {
    let stored = Stored::new().await;
    let path = stored.directory.path().join(base_key(PREFIX, base().name));
    for (content, expected) in [
        (b"{}".to_vec(), "cannot be used"),
        (base_of(8, BASE_REVISION).object.to_vec(), "another base"),
        (vec![b' '; MAX_BASE + 1], "has more than"),
    ] {
        fs::write(&path, content).unwrap();
        let error = Reader::open(&stored.store, PREFIX, base().name).await;
        let error = error.map(|_| ()).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
}

#[tokio::test]
async fn read_of_segment_can_be_repeated_after_store_failure() {
    let stored = Stored::new().await;
    let faulty = FaultyStore::new(stored.store.clone());
    let mut reader = Reader::open(&faulty, PREFIX, base().name).await.unwrap();
    reader.next().await.unwrap().unwrap();
    faulty.fail(Call::Get, store::Error::Timeout("get".to_owned()));
    assert!(matches!(reader.next().await, Err(ReadError::Store { .. })));
    let segment = reader.next().await.unwrap().unwrap();
    assert_eq!(segment.header.first, 13);
}

#[tokio::test]
async fn object_of_another_format_is_rejected_as_segment() {
    let stored = Stored::new().await;
    fs::write(stored.path(0), b"etcd").unwrap();
    let (_, error) = stored.read().await;
    assert!(matches!(
        error,
        Some(ReadError::Chain(VerifyError::Invalid {
            error: SegmentError::NotASegment,
            ..
        }))
    ));
}

/// An object above the limit of one request is written in parts.
#[tokio::test]
async fn large_segment_is_written_in_parts() {
    let stored = Stored::new().await;
    let object = Bytes::from(vec![7; ONE_REQUEST * 2 + 5]);
    let large = Sealed {
        object: object.clone(),
        ..stored.segments[0].clone()
    };
    let written = write_segment(&stored.store, PREFIX, base().name, &large);
    written.await.unwrap();
    assert!(fs::read(stored.path(0)).unwrap() == object);
}
