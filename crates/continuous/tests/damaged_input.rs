//! Parses damaged segments, bases and names of objects.
#![allow(clippy::unwrap_used, clippy::panic)]

#[path = "../../api/tests/damaged/mod.rs"]
mod damaged;

use std::sync::LazyLock;
use std::time::{Duration, Instant};

use bytes::Bytes;
use continuous::{
    Base, BaseName, Digest, GapReason, HEADER, Hash, Lease, LeaseEnd, Limits, Record, Recorder,
    Segment, SegmentName, SnapshotObject, StoredBase, Transaction,
};
use damaged::{assert_little_memory, bounded, cases, damaged, damaged_text};
use etcd::{Change, ClusterId, KeyHash, Value};
use proptest::prelude::*;

/// Offsets of fields in the header.
const STORED: usize = 96;
const SHA256: usize = 104;
const CHECKSUM: usize = 136;

fn base() -> StoredBase {
    let base = Base {
        cluster_id: ClusterId(0x8e9e_05c5_2164_694d),
        revision: 100,
        snapshot: SnapshotObject {
            key: "backups/snapshot".to_owned(),
            size: 20_480,
            sha256: "5f".repeat(32),
        },
        created: 1_700_000_000_000_000,
        encryption: None,
    };
    base.encode().unwrap()
}

fn transaction(revision: i64) -> Record {
    let changes = (0..=revision % 7).map(|index| Change {
        key: format!("/registry/pods/{index}").into(),
        value: (index % 3 != 2).then(|| Value {
            content: Bytes::from(vec![b'x'; 200]),
            lease: 77,
            version: index + 1,
            create_revision: revision,
        }),
    });
    Record::Transaction(Transaction {
        revision,
        observed: 1_700_000_000_000_000 + revision,
        changes: changes.collect(),
    })
}

/// A chain of two segments with records of all kinds.
fn segments() -> Vec<Bytes> {
    let limits = Limits {
        interval: Duration::from_secs(1),
        bytes: 1 << 20,
    };
    let mut recorder = Recorder::new(&base(), limits);
    let now = Instant::now();
    let mut sealed = Vec::new();
    for revision in 101..140 {
        let lease = Record::Lease(Lease {
            id: 77,
            ttl: Some(60),
            seen: revision,
        });
        let hash = Record::Hash(Hash {
            revision,
            hash: KeyHash {
                hash: 0x1234_5678,
                compacted: 50,
            },
            observed: 0,
        });
        let end = Record::LeaseEnd(LeaseEnd {
            id: 77,
            seen: revision,
        });
        for record in [lease, transaction(revision), hash, end] {
            sealed.extend(recorder.push(record, now).unwrap());
        }
        if revision == 120 {
            sealed.extend(recorder.seal().unwrap());
        }
    }
    sealed.extend(recorder.end(GapReason::Compacted, 0, now).unwrap());
    sealed.into_iter().map(|sealed| sealed.object).collect()
}

static SEGMENTS: LazyLock<Vec<Bytes>> = LazyLock::new(segments);

fn samples() -> Vec<&'static [u8]> {
    SEGMENTS.iter().map(Bytes::as_ref).collect()
}

/// Sets the length and the checksums of a damaged object, so that the reader parses its damaged parts.
fn with_checksums(mut object: Vec<u8>) -> Vec<u8> {
    if object.len() >= HEADER {
        let (header, body) = object.split_at_mut(HEADER);
        let length = u64::try_from(body.len()).unwrap();
        header[STORED..SHA256].copy_from_slice(&length.to_be_bytes());
        header[SHA256..CHECKSUM].copy_from_slice(&Digest::of(body).0);
        let checksum = crc32c::crc32c(&header[..CHECKSUM]);
        header[CHECKSUM..].copy_from_slice(&checksum.to_be_bytes());
    }
    object
}

#[test]
fn undamaged_segments_are_read() {
    assert_eq!(SEGMENTS.len(), 2);
    for segment in SEGMENTS.iter() {
        assert!(Segment::decode(segment).is_ok());
        let same = with_checksums(segment.to_vec());
        assert!(same == segment.to_vec());
    }
}

proptest! {
    #![proptest_config(cases(256))]

    #[test]
    fn damaged_segments_are_rejected(object in damaged(&samples())) {
        let decoded = bounded(|| Segment::decode(&object));
        let is_whole = SEGMENTS.iter().any(|segment| *segment == object);
        prop_assert_eq!(decoded.is_ok(), is_whole);
        assert_little_memory();
    }

    #[test]
    fn damaged_content_with_valid_checksums_is_parsed_without_panic(object in damaged(&samples())) {
        let object = with_checksums(object);
        if let Ok(segment) = bounded(|| Segment::decode(&object)) {
            let transactions = segment.records.iter().filter(|record| {
                matches!(record, Record::Transaction(_))
            });
            let length = segment.header.last - segment.header.first + 1;
            prop_assert_eq!(i64::try_from(transactions.count()).unwrap(), length);
        }
        assert_little_memory();
    }

    #[test]
    fn damaged_bases_are_read_or_rejected_without_panic(
        object in damaged(&[base().object.as_ref()]),
    ) {
        if let Ok(decoded) = bounded(|| StoredBase::decode(object.into())) {
            let again = decoded.base.clone().encode().unwrap();
            prop_assert_eq!(again.base, decoded.base);
        }
    }

    #[test]
    fn damaged_names_are_read_or_rejected_without_panic(
        name in damaged_text(&[
            "00000000000000000101-00000000000000000120-5f6e7d8c9bafbecd-0123456789abcdef.segment",
            "00000000000000000100-5f6e7d8c9bafbecd",
        ]),
    ) {
        if let Some(segment) = bounded(|| SegmentName::parse(&name)) {
            prop_assert_eq!(segment.to_string(), name.clone());
            prop_assert!(segment.first >= 1 && segment.last >= segment.first - 1);
        }
        if let Some(base) = bounded(|| BaseName::parse(&name)) {
            prop_assert_eq!(base.to_string(), name);
        }
    }
}
