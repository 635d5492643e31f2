//! The snapshot of the Raft log before an upgrade to etcd 3.7.

use super::rolling::towards;
use super::scene::{CLUSTER, Scene};
use crate::plan::tests::writes::Write;
use crate::snapshot::Seen;
use crate::upkeep::raft_log_record;

/// The index of the newest log entry in these scenes.
const NEWEST: u64 = 10_000;

/// The writes with which the plan changes the next member, in order.
fn change(scene: &Scene) -> Vec<Write> {
    let mut writes = scene.drained().writes();
    writes.retain(|write| {
        matches!(
            write,
            Write::RecordRaftLog { .. }
                | Write::AppendEntries { .. }
                | Write::NoteVersion { .. }
                | Write::PatchImage { .. }
        )
    });
    writes
}

fn recorded(mut scene: Scene, cluster_id: &str, index: i64) -> Scene {
    let record = raft_log_record(cluster_id.to_owned(), index);
    scene.observed.upkeep.raft_log = Some(record);
    scene
}

fn upgrade() -> Scene {
    recorded(towards("3.6.16", "3.7.3"), &CLUSTER.to_string(), 10_000)
}

/// Makes all members report this index as their newest and applied entry.
fn applied(mut scene: Scene, index: u64) -> Scene {
    for seen in scene.observed.statuses.values_mut() {
        let Seen::Known(status) = seen else {
            continue;
        };
        (status.raft_index, status.raft_applied_index) = (index, index);
    }
    scene
}

/// Makes all members report logs that are prepared for an upgrade to etcd 3.7.
pub(super) fn prepared(scene: Scene) -> Scene {
    applied(recorded(scene, &CLUSTER.to_string(), 10_000), 25_000)
}

fn patches_first(writes: &[Write]) -> bool {
    let patches = matches!(writes.last(), Some(Write::PatchImage { .. }));
    let prepares = |write: &Write| {
        matches!(
            write,
            Write::AppendEntries { .. } | Write::RecordRaftLog { .. }
        )
    };
    patches && !writes.iter().any(prepares)
}

/// Invariant 29: the operator records the index of the Raft log before it appends the first entry.
#[test]
fn invariant_29_raft_log_index_is_recorded_before_entries_are_appended() {
    let missing = towards("3.6.16", "3.7.3");
    let of_other_cluster = recorded(towards("3.6.16", "3.7.3"), "1", 10_000_000);
    for scene in [missing, of_other_cluster] {
        assert_records_newest(&applied(scene, NEWEST).compared(), NEWEST);
    }
}

/// Asserts that the plan changes no member, and only records the index `newest`.
fn assert_records_newest(scene: &Scene, newest: u64) {
    let writes = change(scene);
    let [
        Write::RecordRaftLog {
            record: Some(record),
            ..
        },
    ] = &*writes
    else {
        panic!("{writes:?}");
    };
    let index = i64::try_from(newest).unwrap();
    assert_eq!(*record, raft_log_record(CLUSTER.to_string(), index));
}

/// Invariant 29: a person has edited the index in the record. The checksum reveals the edit, so the operator records
/// the newest index.
#[test]
fn invariant_29_edited_raft_log_record_is_replaced() {
    let applied_index = NEWEST + 5_000;
    for index in [1, 4_000, -1, 20_000, i64::MAX] {
        let mut scene = applied(upgrade(), applied_index);
        let record = scene.observed.upkeep.raft_log.as_mut().unwrap();
        record.index = index;
        assert_records_newest(&scene.compared(), applied_index);
    }
    // The operator also replaces a record without a checksum, and a record of another cluster in which a person has put
    // the ID of this cluster.
    let mut without = applied(upgrade(), applied_index);
    let record = without.observed.upkeep.raft_log.as_mut().unwrap();
    record.checksum = None;
    assert_records_newest(&without.compared(), applied_index);
    let mut other = applied(recorded(towards("3.6.16", "3.7.3"), "1", 1), applied_index);
    let record = other.observed.upkeep.raft_log.as_mut().unwrap();
    record.cluster_id = CLUSTER.to_string();
    assert_records_newest(&other.compared(), applied_index);
}

/// Invariant 29: every member saves a snapshot of its Raft log before the first member is upgraded to etcd 3.7.
#[test]
fn invariant_29_raft_log_snapshot_precedes_upgrade_to_etcd_3_7() {
    let counts = [(None, 10_000), (Some(0), 10_000), (Some(500), 500)];
    for (snapshot_count, count) in counts {
        let until = NEWEST + count + 1;
        let with_count = |mut scene: Scene| {
            for pod in scene.observed.pods.values_mut() {
                pod.snapshot_count = snapshot_count;
            }
            scene
        };
        let mut scene = with_count(applied(upgrade(), until - 1)).compared();
        if let Some(Seen::Known(status)) = scene.observed.statuses.get_mut("b") {
            status.raft_applied_index -= 10;
        }
        let member = "b".to_owned();
        assert_eq!(change(&scene), [Write::AppendEntries { member, until }]);
        let scene = with_count(applied(upgrade(), until)).compared();
        let writes = change(&scene);
        assert!(patches_first(&writes), "{writes:?}");
    }
}

/// All members have the same log, so the entries that were appended for one member count for every member.
#[test]
fn raft_log_is_prepared_once_for_all_members() {
    let scene = applied(upgrade(), 25_000).runs("b", "3.7.3").compared();
    let writes = change(&scene);
    assert!(patches_first(&writes), "{writes:?}");
    // Member `c` was recreated with a larger snapshot count, so its etcd writes a snapshot only after more entries.
    let mut scene = applied(upgrade(), 25_000);
    scene.observed.pods.get_mut("c").unwrap().snapshot_count = Some(100_000);
    let writes = change(&scene.compared());
    let member = "c".to_owned();
    let until = 110_001;
    assert_eq!(writes, [Write::AppendEntries { member, until }]);
}

#[test]
fn only_upgrade_from_etcd_3_6_to_3_7_prepares_raft_log() {
    for (from, to) in [
        ("3.5.35", "3.6.16"),
        ("3.7.2", "3.7.3"),
        ("3.6.15", "3.6.16"),
    ] {
        let writes = change(&towards(from, to).compared());
        assert!(patches_first(&writes), "{from}: {writes:?}");
    }
}

/// After a downgrade to 3.5, later entries may be requests of the API v2, so the record would be wrong.
#[test]
fn invariant_29_raft_log_record_is_removed_without_upgrade_to_etcd_3_7() {
    let removes = |scene: Scene| {
        let writes = scene.writes();
        writes
            .iter()
            .any(|write| matches!(write, Write::RecordRaftLog { record: None, .. }))
    };
    let with_record = |from: &str, to: &str| recorded(towards(from, to), &CLUSTER.to_string(), 5);
    assert!(removes(with_record("3.6.16", "3.6.16")));
    assert!(removes(with_record("3.6.16", "3.5.35")));
    assert!(removes(with_record("3.7.3", "3.7.3")));
    assert!(!removes(with_record("3.6.16", "3.7.3")));
    assert!(!removes(towards("3.6.16", "3.6.16")));
}
