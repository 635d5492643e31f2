//! The snapshot of the Raft log before an upgrade to etcd 3.7.

use super::rolling::towards;
use super::scene::Scene;
use crate::plan::tests::writes::Write;
use crate::snapshot::Seen;

/// The writes of the change of the first member, in order.
fn first_change(scene: &Scene) -> Vec<Write> {
    let writes = scene.drained().writes().into_iter();
    let of_change = |write: &Write| {
        matches!(
            write,
            Write::AppendEntries { .. } | Write::NoteVersion { .. } | Write::PatchImage { .. }
        )
    };
    writes.filter(of_change).collect()
}

/// Invariant 29 (snapshot of the log before etcd 3.7).
#[test]
fn invariant_29_raft_log_snapshot_precedes_upgrade_to_etcd_3_7() {
    let counts = [(None, 10_000), (Some(0), 10_000), (Some(500), 500)];
    for (snapshot_count, count) in counts {
        let mut scene = towards("3.6.16", "3.7.3");
        for pod in scene.observed.pods.values_mut() {
            pod.snapshot_count = snapshot_count;
        }
        let scene = scene.lags("b");
        let mut scene = scene.compared();
        if let Some(Seen::Known(status)) = scene.observed.statuses.get_mut("b") {
            status.raft_applied_index = 9_990;
        }
        let [
            Write::AppendEntries { member, until },
            ..,
            Write::PatchImage { .. },
        ] = &first_change(&scene)[..]
        else {
            panic!("{:?}", first_change(&scene));
        };
        assert_eq!((member.as_str(), *until), ("b", 10_000 + count + 1));
    }
    for (from, to) in [
        ("3.5.35", "3.6.16"),
        ("3.7.2", "3.7.3"),
        ("3.6.15", "3.6.16"),
    ] {
        let changes = first_change(&towards(from, to).compared());
        let appends = |write: &Write| matches!(write, Write::AppendEntries { .. });
        assert!(
            !changes.is_empty() && !changes.iter().any(appends),
            "{from}"
        );
    }
}
