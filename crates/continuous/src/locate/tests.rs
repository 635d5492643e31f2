//! Tests of finding the revision for a time.
#![allow(clippy::unwrap_used)]

use std::time::Instant;

use store::LocalStore;
use tempfile::TempDir;

use super::*;
use crate::fixture::{base_of, limits, transaction};
use crate::record::{GapReason, LeaseEnd, Record, Transaction};
use crate::recorder::Recorder;
use crate::stored::{write_base, write_segment};

/// A chain of ten segments with three revisions each, from 11 to 40. Revision N has the time N seconds. A segment
/// without transactions follows each of the ten segments.
async fn stored(gap: bool) -> (TempDir, LocalStore) {
    let directory = tempfile::tempdir().unwrap();
    let store = LocalStore::new(directory.path());
    let base = base_of(7, 10);
    write_base(&store, "", &base).await.unwrap();
    let mut recorder = Recorder::new(&base, limits());
    let now = Instant::now();
    for first in (11..41).step_by(3) {
        let mut sealed = Vec::new();
        for revision in first..first + 3 {
            let next = Transaction {
                observed: revision * 1_000_000,
                ..transaction(revision)
            };
            recorder.push(Record::Transaction(next), now).unwrap();
        }
        sealed.extend(recorder.seal().unwrap());
        let end = Record::LeaseEnd(LeaseEnd { id: 9, seen: first });
        recorder.push(end, now).unwrap();
        sealed.extend(recorder.seal().unwrap());
        if gap && first == 38 {
            let ended = recorder.end(GapReason::Compacted, 50_000_000, now);
            sealed.extend(ended.unwrap());
        }
        for segment in &sealed {
            write_segment(&store, "", base.name, segment).await.unwrap();
        }
    }
    (directory, store)
}

async fn at(store: &LocalStore, time: i64) -> Option<(i64, i64, bool)> {
    let located = locate(store, "", time).await.unwrap();
    located.map(|(_, it)| (it.revision, it.observed, it.is_last))
}

#[tokio::test]
async fn newest_revision_up_to_requested_time_is_found() {
    let (_directory, store) = stored(false).await;
    assert_eq!(at(&store, 999).await, None);
    assert_eq!(at(&store, 1_000).await, Some((10, 1_000, false)));
    for revision in 11..40 {
        let time = revision * 1_000_000;
        for later in [0, 1, 999_999] {
            let found = at(&store, time + later).await;
            assert_eq!(found, Some((revision, time, false)));
        }
    }
    for later in [0, 1, i64::MAX / 2] {
        let found = at(&store, 40_000_000 + later).await;
        assert_eq!(found, Some((40, 40_000_000, true)));
    }
}

#[tokio::test]
async fn gap_before_requested_time_is_reported() {
    let (_directory, store) = stored(true).await;
    let (base, before) = locate(&store, "", 49_000_000).await.unwrap().unwrap();
    assert_eq!(base, base_of(7, 10));
    assert_eq!((before.revision, before.gap), (40, None));
    let (_, after) = locate(&store, "", 50_000_000).await.unwrap().unwrap();
    assert_eq!(after.revision, 40);
    assert_eq!(after.gap.unwrap().after, 40);
}
