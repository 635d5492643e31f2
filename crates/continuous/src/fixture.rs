//! Chains for the tests of this crate.
#![allow(clippy::unwrap_used)]

pub(crate) mod memory;

use std::time::{Duration, Instant};

use bytes::Bytes;
use etcd::{Change, ClusterId, KeyHash, Value};

use crate::base::{Base, SnapshotObject, StoredBase};
use crate::record::{Hash, Lease, LeaseEnd, Record, Transaction};
use crate::recorder::{Limits, Recorder};
use crate::segment::Sealed;

pub(crate) const BASE_REVISION: i64 = 10;

pub(crate) fn base_of(cluster: u64, revision: i64) -> StoredBase {
    let base = Base {
        cluster_id: ClusterId(cluster),
        revision,
        snapshot: SnapshotObject {
            key: "snapshot".to_owned(),
            size: 1,
            sha256: "00".repeat(32),
        },
        created: 1_000,
        encryption: None,
    };
    base.encode().unwrap()
}

pub(crate) fn base() -> StoredBase {
    base_of(7, BASE_REVISION)
}

pub(crate) fn put(key: &'static [u8], content: &'static [u8], lease: i64) -> Change {
    Change {
        key: Bytes::from_static(key),
        value: Some(Value {
            content: Bytes::from_static(content),
            lease,
            version: 3,
            create_revision: 5,
        }),
    }
}

pub(crate) fn deletion(key: &'static [u8]) -> Change {
    Change {
        key: Bytes::from_static(key),
        value: None,
    }
}

pub(crate) fn transaction(revision: i64) -> Transaction {
    Transaction {
        revision,
        observed: 2_000 + revision,
        changes: vec![
            put(b"key", b"value", 0),
            put(b"\0\xff", b"", 9),
            deletion(b"other"),
        ],
    }
}

/// Records of all kinds except a gap.
pub(crate) fn records(revision: i64) -> Vec<Record> {
    vec![
        Record::Lease(Lease {
            id: 9,
            ttl: Some(60),
            seen: revision,
        }),
        Record::Transaction(transaction(revision)),
        Record::Hash(Hash {
            revision,
            hash: KeyHash {
                hash: u32::MAX,
                compacted: 4,
            },
            observed: 2_000 + revision,
        }),
        Record::LeaseEnd(LeaseEnd {
            id: -9,
            seen: revision,
        }),
    ]
}

pub(crate) fn limits() -> Limits {
    Limits {
        interval: Duration::from_secs(1),
        bytes: 1 << 20,
    }
}

/// Records `count` segments with `length` transactions each. `tag` makes the content unique.
pub(crate) fn chain(base: &StoredBase, count: usize, length: usize, tag: i64) -> Vec<Sealed> {
    let mut recorder = Recorder::new(base, limits());
    (0..count)
        .map(|_| {
            for _ in 0..length {
                let next = Transaction {
                    observed: 5_000_000 + tag,
                    ..transaction(recorder.last() + 1)
                };
                let full = recorder.push(Record::Transaction(next), Instant::now());
                assert_eq!(full.unwrap(), None);
            }
            recorder.seal().unwrap().unwrap()
        })
        .collect()
}
