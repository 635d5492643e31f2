//! A restore with `spec.continuous.dryRun` only reports the revision of the point.

use api::EtcdRestore;

use super::{Plan, choice, in_place, is_verified, search};
use crate::naming;
use crate::reason::{Reason, Trouble};
use crate::snapshot::{Cluster, Snapshot, Source};

/// Whether the restore is a dry run. A restore that has started is no longer a dry run, because later changes of the
/// spec have no effect.
pub fn is_dry_run(restore: &EtcdRestore) -> bool {
    restore.spec.is_dry_run()
        && !is_verified(restore)
        && !in_place::is_aborted(restore)
        && !in_place::has_finalizer(restore)
}

/// Whether this restore holds the lock of the cluster.
pub(super) fn has_lock(restore: &EtcdRestore, cluster: &Cluster) -> bool {
    let uid = naming::uid(restore);
    matches!(cluster, Cluster::Present(cluster) if cluster.lock.as_deref() == Some(uid))
}

/// Records the point, and then reports it. Changes nothing else, except that a pod searches recorded changes on a PVC.
pub(super) fn report(restore: &EtcdRestore, snapshot: &Snapshot) -> Plan {
    match &snapshot.source {
        Source::Unavailable(trouble) => return Plan::trouble(trouble),
        Source::Search(step) => return search::plan(step),
        Source::NotRead | Source::Ready(_) => {}
    }
    if let Some(plan) = choice::to_record(restore, snapshot, false) {
        return plan;
    }
    let point = choice::recorded(restore).and_then(|chosen| chosen.continuous.as_ref());
    let Some(point) = point else {
        return Plan::wait_for("waiting for the search of the point");
    };
    let message = format!(
        "spec.continuous.at is revision {} of cluster {}, received at {}. The restore needs the base with revision {} \
         and {} segments with {} bytes. Nothing was changed: set spec.continuous.dryRun to false to restore this point",
        point.revision,
        point.cluster_id,
        point.time.0,
        point.base_revision,
        point.segments,
        point.segment_bytes,
    );
    Plan {
        requeue: None,
        ..Plan::wait(Trouble::new(Reason::DryRun, message))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::plan::{Action, PlanState, plan};
    use crate::snapshot::ClusterFacts;

    fn restore(dry_run: bool) -> EtcdRestore {
        let spec = json!({
            "etcdCluster": { "name": "main" }, "backup": { "name": "nightly" }, "overwrite": true,
            "continuous": { "at": { "revision": 17 }, "dryRun": dry_run },
        });
        let mut restore = EtcdRestore::new("again", serde_json::from_value(spec).unwrap());
        restore.metadata.uid = Some("restore-uid".into());
        restore.metadata.generation = Some(1);
        restore
    }

    fn record(restore: &EtcdRestore) -> api::restore::ChosenBackup {
        let block = json!({ "s3": { "path": "b/uid/snapshots/1.snapshot" } });
        let point = json!({
            "revision": 17, "time": "2026-11-28T01:02:03.000004Z", "base": "10-ab", "baseRevision": 10,
            "baseTime": "2026-11-28T00:00:00.000000Z", "clusterID": "ab", "segments": 2, "segmentBytes": 300,
            "prefix": "uid/",
        });
        api::restore::ChosenBackup {
            continuous: Some(serde_json::from_value(point).unwrap()),
            ..choice::chosen_from(restore, serde_json::from_value(block).unwrap())
        }
    }

    fn recorded(dry_run: bool) -> EtcdRestore {
        let mut restore = restore(dry_run);
        let chosen = record(&restore);
        restore.status.get_or_insert_default().backup = Some(chosen);
        restore
    }

    fn snapshots(lock: Option<&str>) -> [Snapshot; 2] {
        let facts = ClusterFacts {
            uid: "cluster-uid".into(),
            lock: lock.map(str::to_owned),
            ..ClusterFacts::default()
        };
        let present = Snapshot {
            cluster: Cluster::Present(Box::new(facts)),
            ..Snapshot::not_read()
        };
        [Snapshot::not_read(), present]
    }

    #[test]
    fn dry_run_records_point_and_changes_nothing_else() {
        for snapshot in snapshots(None).into_iter().chain(snapshots(Some("other"))) {
            let begun = restore(true);
            assert_eq!(plan(&begun, &snapshot).action, Action::Nothing);
            let chosen = record(&begun);
            let found = Snapshot {
                found: Some(chosen.clone()),
                ..snapshot.clone()
            };
            let action = plan(&begun, &found).action;
            assert_eq!(action, Action::RecordBackup(Box::new(chosen)));
            let reported = plan(&recorded(true), &snapshot);
            assert_eq!(reported.action, Action::Nothing);
            let PlanState::Working(trouble) = reported.state else {
                panic!("{reported:?}");
            };
            assert_eq!(trouble.reason, Reason::DryRun);
            for part in [
                "revision 17 of cluster ab",
                "2026-11-28T01:02:03.000004Z",
                "2 segments with 300 bytes",
                "spec.continuous.dryRun",
            ] {
                assert!(trouble.message.contains(part), "{}", trouble.message);
            }
            let missing = Trouble::new(Reason::PointNotRecorded, "x");
            let unavailable = Snapshot {
                source: Source::Unavailable(missing.clone()),
                ..snapshot
            };
            let refused = plan(&begun, &unavailable);
            assert_eq!(refused.state, PlanState::Stuck(missing));
        }
    }

    #[test]
    fn restore_that_has_started_ignores_dry_run() {
        let [absent, locked] = snapshots(Some("restore-uid"));
        let mut started = recorded(true);
        let seed = naming::seed(&started);
        started.status.get_or_insert_default().seed = Some(seed);
        assert!(has_lock(&started, &locked.cluster));
        assert_eq!(plan(&started, &locked).action, Action::CreateService);
        started.metadata.finalizers = Some(vec![api::names::FINALIZER_CLAIM.into()]);
        assert!(!is_dry_run(&started));
        // With `dryRun: false`, the restore starts with the backup that the dry run has recorded. The first action
        // records the names of the seed's objects.
        let ready = Snapshot {
            source: Source::Ready(Box::default()),
            ..absent
        };
        let next = plan(&recorded(false), &ready).action;
        assert!(matches!(next, Action::RecordIntent { .. }), "{next:?}");
    }
}
