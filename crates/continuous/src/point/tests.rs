//! Tests of the search for a requested point.
#![allow(clippy::unwrap_used)]

use std::ops::RangeInclusive;
use std::time::Instant;

use store::LocalStore;
use tempfile::TempDir;

use super::*;
use crate::base::{Base, BaseError, SnapshotObject};
use crate::fixture::{base_of, limits, transaction};
use crate::name::{SNAPSHOTS, snapshot_name};
use crate::record::{GapReason, Record, Transaction};
use crate::recorder::Recorder;
use crate::stored::{base_key, segment_key, write_base, write_segment};

const SECOND: i64 = 1_000_000;

/// A store with chains. If not stated otherwise, the recorder has received revision N at the time of N seconds.
struct Recorded {
    store: LocalStore,
    _directory: TempDir,
}

impl Recorded {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        Self {
            store: LocalStore::new(directory.path()),
            _directory: directory,
        }
    }

    /// Stores a base with this revision. Its time is `revision + delay` in seconds.
    async fn base(&self, cluster: u64, revision: i64, delay: i64) -> StoredBase {
        let created = (revision + delay) * SECOND;
        let key = format!("{SNAPSHOTS}{}", snapshot_name(created));
        let base = Base {
            created,
            ..base_with(cluster, revision, &key)
        };
        let base = base.encode().unwrap();
        write_base(&self.store, "", &base).await.unwrap();
        base
    }

    /// Stores segments with two revisions each. Returns their names.
    async fn record(
        &self,
        base: &StoredBase,
        revisions: RangeInclusive<i64>,
        delay: i64,
        gap: Option<i64>,
    ) -> Vec<SegmentName> {
        let gap = gap.map(|seconds| (seconds, GapReason::Compacted));
        self.record_until(base, revisions, delay, gap).await
    }

    async fn record_until(
        &self,
        base: &StoredBase,
        revisions: RangeInclusive<i64>,
        delay: i64,
        gap: Option<(i64, GapReason)>,
    ) -> Vec<SegmentName> {
        let mut recorder = Recorder::new(base, limits());
        let (mut sealed, now) = (Vec::new(), Instant::now());
        for revision in revisions {
            let next = Transaction {
                observed: (revision + delay) * SECOND,
                ..transaction(revision)
            };
            recorder.push(Record::Transaction(next), now).unwrap();
            if revision % 2 == 0 {
                sealed.extend(recorder.seal().unwrap());
            }
        }
        if let Some((seconds, reason)) = gap {
            let ended = recorder.end(reason, seconds * SECOND, now);
            sealed.extend(ended.unwrap());
        }
        for segment in &sealed {
            let written = write_segment(&self.store, "", base.name, segment).await;
            written.unwrap();
        }
        sealed.iter().map(|segment| segment.name).collect()
    }

    async fn find(&self, point: Point) -> Result<FoundPoint, PointError> {
        find_point(&self.store, "", point, None, false).await
    }

    async fn at(&self, seconds: i64) -> Result<FoundPoint, PointError> {
        self.find(Point::Time(seconds * SECOND)).await
    }
}

/// A base whose snapshot has this key.
fn base_with(cluster: u64, revision: i64, key: &str) -> Base {
    Base {
        snapshot: SnapshotObject {
            key: key.to_owned(),
            size: 1,
            sha256: "00".repeat(32),
        },
        ..base_of(cluster, revision).base
    }
}

/// The revision of the base, the revision of the point, and its time in seconds.
fn summary(found: &FoundPoint) -> (i64, i64, i64) {
    let base = found.base.base.revision;
    (base, found.at.revision, found.at.time / SECOND)
}

fn moment(revision: i64, seconds: i64) -> Moment {
    Moment {
        revision,
        time: seconds * SECOND,
    }
}

/// Two chains of one cluster without a gap: the revisions 11 to 20 after base 10, and 19 to 30 after base 18.
async fn two_chains() -> Recorded {
    let recorded = Recorded::new();
    let first = recorded.base(7, 10, 0).await;
    recorded.record(&first, 11..=20, 0, None).await;
    let second = recorded.base(7, 18, 0).await;
    recorded.record(&second, 19..=30, 0, None).await;
    recorded
}

#[tokio::test]
async fn points_are_found_in_newest_chain_that_contains_them() {
    let recorded = two_chains().await;
    for revision in 10..30 {
        let base = if revision < 18 { 10 } else { 18 };
        let by_time = recorded.at(revision).await.unwrap();
        assert_eq!(summary(&by_time), (base, revision, revision));
        let by_revision = recorded.find(Point::Revision(revision)).await.unwrap();
        assert_eq!(by_revision, by_time);
        let segments = u64::try_from((revision - base + 1) / 2).unwrap();
        assert_eq!(by_time.segments, segments);
        assert_eq!(by_time.bytes > 0, segments > 0);
    }
    let latest = recorded.find(Point::Latest).await.unwrap();
    assert_eq!(summary(&latest), (18, 30, 30));
    let last = recorded.find(Point::Revision(30)).await.unwrap();
    assert_eq!(last, latest);
}

#[tokio::test]
async fn points_outside_of_recorded_history_are_refused() {
    let recorded = two_chains().await;
    for point in [Point::Time(10 * SECOND - 1), Point::Revision(9)] {
        let error = recorded.find(point).await.unwrap_err();
        assert!(matches!(error, PointError::BeforeOldest(at) if at == moment(10, 10)));
    }
    // The chains end with revision 30 at 30 s. They do not prove that no further change was made at 30 s.
    for point in [Point::Time(30 * SECOND), Point::Revision(31)] {
        let error = recorded.find(point).await.unwrap_err();
        assert!(matches!(error, PointError::AfterNewest(at) if at == moment(30, 30)));
    }
    let time = Point::Time(40 * SECOND);
    let complete = find_point(&recorded.store, "", time, Some(40 * SECOND), false).await;
    assert_eq!(summary(&complete.unwrap()), (18, 30, 30));
    let early = find_point(&recorded.store, "", time, Some(39 * SECOND), false).await;
    assert!(matches!(early, Err(PointError::AfterNewest(_))));
    let empty = Recorded::new();
    for point in [Point::Time(1), Point::Revision(1), Point::Latest] {
        let error = empty.find(point).await.unwrap_err();
        assert!(matches!(error, PointError::NoBase));
    }
}

#[tokio::test]
async fn point_in_gap_is_refused_with_nearest_points_around_gap() {
    let recorded = Recorded::new();
    let first = recorded.base(7, 10, 0).await;
    recorded.record(&first, 11..=20, 0, Some(22)).await;
    let second = recorded.base(7, 30, 0).await;
    recorded.record(&second, 31..=40, 0, None).await;
    let gap = |error: &PointError| match error {
        PointError::InGap { before, after } => Some((*before, *after)),
        _ => None,
    };
    for point in [
        Point::Time(20 * SECOND),
        Point::Time(25 * SECOND),
        Point::Time(30 * SECOND - 1),
        Point::Revision(21),
        Point::Revision(29),
    ] {
        let error = recorded.find(point).await.unwrap_err();
        assert_eq!(gap(&error), Some((moment(20, 20), moment(30, 30))));
    }
    assert_eq!(summary(&recorded.at(19).await.unwrap()), (10, 19, 19));
    assert_eq!(summary(&recorded.at(30).await.unwrap()), (30, 30, 30));
    // If the chain ends with a gap, later times are refused, even if the agent reports that all changes are stored.
    let recorded = Recorded::new();
    let only = recorded.base(7, 10, 0).await;
    recorded.record(&only, 11..=20, 0, Some(22)).await;
    let point = Point::Time(23 * SECOND);
    let error = find_point(&recorded.store, "", point, Some(24 * SECOND), false).await;
    assert!(matches!(error, Err(PointError::AfterNewest(_))));
}

/// The agent was stopped, and nothing has changed before the next base.
#[tokio::test]
async fn revision_for_time_between_chains_is_found_if_nothing_changed() {
    let recorded = Recorded::new();
    let first = recorded.base(7, 10, 0).await;
    recorded.record(&first, 11..=20, 0, None).await;
    recorded.base(7, 20, 20).await;
    assert_eq!(summary(&recorded.at(35).await.unwrap()), (10, 20, 20));
    // A base of another cluster with the same revision does not prove that nothing changed.
    let recorded = Recorded::new();
    let first = recorded.base(7, 10, 0).await;
    recorded.record(&first, 11..=20, 0, None).await;
    recorded.base(8, 20, 20).await;
    let error = recorded.at(35).await.unwrap_err();
    assert!(matches!(error, PointError::InGap { .. }));
}

/// While the snapshot of a base is taken, the old chain records further changes. The new chain records the same changes
/// later.
#[tokio::test]
async fn later_time_never_has_earlier_revision() {
    let recorded = Recorded::new();
    let first = recorded.base(7, 10, 0).await;
    recorded.record(&first, 11..=20, 0, None).await;
    // The second base has revision 16, and its time is 18 s. In the chain of this base, revision 17 has the time 20 s.
    let second = recorded.base(7, 16, 2).await;
    recorded.record(&second, 17..=30, 3, None).await;
    let mut last = 0;
    for seconds in 10..33 {
        let found = recorded.at(seconds).await.unwrap();
        assert!(found.at.revision >= last, "{seconds}: {:?}", found.at);
        last = found.at.revision;
    }
    assert_eq!(summary(&recorded.at(17).await.unwrap()), (10, 17, 17));
    assert_eq!(summary(&recorded.at(18).await.unwrap()), (16, 18, 18));
}

/// A restore of the recorded cluster sets the revision back.
#[tokio::test]
async fn revision_recorded_from_two_clusters_is_ambiguous() {
    let recorded = Recorded::new();
    let first = recorded.base(7, 10, 0).await;
    recorded.record(&first, 11..=30, 0, None).await;
    let second = recorded.base(8, 15, 25).await;
    recorded.record(&second, 16..=20, 30, None).await;
    let error = recorded.find(Point::Revision(17)).await.unwrap_err();
    assert!(
        matches!(
            error,
            PointError::Ambiguous { first, second, .. } if first.0 != second.0
        ),
        "{error:?}"
    );
    for (point, cluster, expected) in [
        (Point::Revision(12), 7, (10, 12, 12)),
        (Point::Revision(25), 7, (10, 25, 25)),
        (Point::Time(47 * SECOND), 8, (15, 17, 47)),
        (Point::Time(29 * SECOND), 7, (10, 29, 29)),
        (Point::Latest, 8, (15, 20, 50)),
    ] {
        let found = recorded.find(point).await.unwrap();
        assert_eq!(summary(&found), expected, "{point:?}");
        assert_eq!(found.base.base.cluster_id.0, cluster);
    }
}

#[tokio::test]
async fn missing_segment_is_reported_for_points_after_it() {
    let recorded = Recorded::new();
    let base = recorded.base(7, 10, 0).await;
    let names = recorded.record(&base, 11..=20, 0, None).await;
    // This segment contains the revisions 15 and 16.
    let key = segment_key("", base.name, names[2]);
    recorded.store.delete(&key).await.unwrap();
    for point in [
        Point::Time(17 * SECOND),
        Point::Revision(15),
        Point::Revision(20),
        Point::Latest,
    ] {
        let error = recorded.find(point).await.unwrap_err();
        let PointError::Broken { last, faults } = error else {
            panic!("{error:?}");
        };
        assert_eq!(last, moment(14, 14));
        let (after, next) = (14, 17);
        assert_eq!(faults, [ChainFault::Missing { after, next }]);
    }
    assert_eq!(summary(&recorded.at(13).await.unwrap()), (10, 13, 13));
    let found = recorded.find(Point::Revision(14)).await.unwrap();
    assert_eq!(summary(&found), (10, 14, 14));
}

/// The agent has stopped after it had written a new base, and before it wrote a segment of this base.
#[tokio::test]
async fn latest_revision_is_found_in_older_chain() {
    let recorded = Recorded::new();
    let first = recorded.base(7, 10, 0).await;
    recorded.record(&first, 11..=20, 0, None).await;
    recorded.base(7, 18, 1).await;
    let found = recorded.find(Point::Latest).await.unwrap();
    assert_eq!(summary(&found), (10, 20, 20));
    let found = recorded.find(Point::Revision(20)).await.unwrap();
    assert_eq!(summary(&found), (10, 20, 20));
}

#[tokio::test]
async fn chain_recorded_before_restore_is_ignored() {
    let recorded = Recorded::new();
    let first = recorded.base(7, 10, 0).await;
    let reset = Some((31, GapReason::RevisionReset));
    recorded.record_until(&first, 11..=30, 0, reset).await;
    // etcd's data was restored to revision 15, and the next base is taken at second 35.
    let second = recorded.base(7, 15, 20).await;
    recorded.record(&second, 16..=20, 20, None).await;
    let latest = recorded.find(Point::Latest).await.unwrap();
    assert_eq!(summary(&latest), (15, 20, 40));
    let at = recorded.at(38).await.unwrap();
    assert_eq!(summary(&at), (15, 18, 38));
}

/// A forged base can name any object of the bucket as its snapshot (invariant 13). The search fails even if the point
/// does not need this base.
#[tokio::test]
async fn invariant_13_base_with_foreign_snapshot_is_refused() {
    let recorded = two_chains().await;
    let name = snapshot_name(1);
    for key in [
        "team-b/backup".to_owned(),
        format!("team-b/{SNAPSHOTS}{name}"),
        format!("{SNAPSHOTS}../team-b/{SNAPSHOTS}{name}"),
        format!("{SNAPSHOTS}1.snapshot"),
        name,
    ] {
        let forged = base_with(7, 40, &key).encode().unwrap();
        write_base(&recorded.store, "", &forged).await.unwrap();
        for point in [Point::Revision(12), Point::Latest] {
            let error = recorded.find(point).await.unwrap_err();
            let is_refused = matches!(
                &error,
                PointError::Read(ReadError::Base {
                    error: BaseError::ForeignSnapshot,
                    ..
                })
            );
            assert!(is_refused, "{key}: {error:?}");
        }
        let object = base_key("", forged.name);
        recorded.store.delete(&object).await.unwrap();
    }
    let found = recorded.find(Point::Revision(12)).await.unwrap();
    assert_eq!(summary(&found), (10, 12, 12));
}

/// A tenant can store any number of bases (invariant 15). A search therefore fails above a limit.
#[tokio::test]
async fn invariant_15_search_limits_number_of_bases() {
    let recorded = Recorded::new();
    let mut expected = Vec::new();
    // The store has more bases than are read concurrently, and later bases have lower revisions.
    for number in 0..40 {
        let base = recorded.base(7, 100 - number, 2 * number).await;
        expected.push(base.name);
    }
    let known = known_bases(&recorded.store, "", 40, false).await.unwrap();
    let names: Vec<BaseName> = known.iter().map(|base| base.name).collect();
    assert_eq!(names, expected);
    let error = known_bases(&recorded.store, "", 39, false)
        .await
        .unwrap_err();
    assert!(matches!(error, PointError::TooManyBases { limit: 39 }));
}
