//! `spec.deletionPolicy: BackupThenDelete` (invariant 41).

use api::cluster::{ClusterChange, ClusterDeletionPolicy};
use api::names::FINALIZER_BACKUP;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use serde_json::json;

use crate::plan::tests::recovery::problem;
use crate::plan::tests::rolling::{patched, towards};
use crate::plan::tests::scene::{Scene, at, makes_pod};
use crate::plan::tests::writes::Write;
use crate::reason::Reason;
use crate::snapshot::RetentionNotes;

/// The annotation that waives the backup in the scenes below, whose EtcdCluster was deleted at 990 s (Unix time).
const WAIVER: &str = "Deletion/1970-01-01T00:16:30Z";

/// Sets the deletion policy `BackupThenDelete`, and the voters and TLS settings that each retained PVC records.
fn guarded(mut scene: Scene) -> Scene {
    let backup = json!({
        "storageType": "S3", "s3": { "path": "b/k" }, "backupPolicy": { "schedule": "@daily" },
    });
    let spec = &mut scene.desired.object.spec;
    spec.backup = Some(serde_json::from_value(backup).unwrap());
    spec.deletion_policy = Some(ClusterDeletionPolicy::BackupThenDelete);
    for disk in scene.observed.disks.values_mut() {
        disk.retention = RetentionNotes {
            voters: ["a", "b", "c"].map(String::from).into(),
            tls: Some("null".to_owned()),
        };
    }
    scene
}

fn three() -> Scene {
    guarded(Scene::formed(&["a", "b", "c"]).durable())
}

fn with_finalizers(mut scene: Scene, finalizers: &[&str]) -> Scene {
    let finalizers = finalizers.iter().map(|one| (*one).to_owned());
    scene.desired.object.metadata.finalizers = Some(finalizers.collect());
    scene
}

/// The user has deleted the EtcdCluster, which has the operator's finalizer.
fn deleted(scene: Scene) -> Scene {
    let mut scene = with_finalizers(scene, &[FINALIZER_BACKUP]);
    scene.observed.deleting = true;
    scene.desired.object.metadata.deletion_timestamp = Some(Time(at(990)));
    scene
}

/// A deleted EtcdCluster that waits for the requested backup.
fn waiting(scene: Scene) -> Scene {
    deleted(scene).recorded(ClusterChange::Deletion, |record| {
        record.revision = Some(100);
    })
}

/// A deleted EtcdCluster with the spec in effect after the backup (`plan/effective.rs`).
fn backed_up(scene: Scene) -> Scene {
    let mut scene = deleted(scene);
    scene.desired.object.spec.deletion_policy = Some(ClusterDeletionPolicy::Delete);
    scene
}

/// True if the plan sets the finalizer, false if the plan removes it.
fn finalizer(scene: &Scene) -> Option<bool> {
    scene.writes().into_iter().find_map(|write| match write {
        Write::SetFinalizer { set, over } => {
            assert_eq!(over, scene.observed.resource_version);
            Some(set)
        }
        _ => None,
    })
}

fn recreates(scene: &Scene, member: &str) -> bool {
    scene.writes().iter().any(|write| makes_pod(write, member))
}

fn waits_for(scene: &Scene, reason: Reason) -> String {
    let plan = scene.plan();
    let mut waits = plan.waiting_for.into_iter();
    let found = waits.find(|wait| wait.reason == reason);
    found.map(|wait| wait.message).unwrap_or_default()
}

#[test]
fn backup_finalizer_follows_deletion_policy_while_cluster_is_idle() {
    assert_eq!(finalizer(&three()), Some(true));
    assert_eq!(
        finalizer(&with_finalizers(three(), &[FINALIZER_BACKUP])),
        None
    );
    let other = with_finalizers(Scene::formed(&["a"]), &[FINALIZER_BACKUP]);
    assert_eq!(finalizer(&other), Some(false));
    assert_eq!(finalizer(&Scene::formed(&["a"])), None);
    let busy = three().without_pod("b");
    assert!(recreates(&busy, "b"));
    assert_eq!(finalizer(&busy), None);
}

#[test]
fn invariant_41_deletion_requests_backup_and_keeps_members() {
    let scene = deleted(three());
    let record = scene.record_written().unwrap();
    assert_eq!(record.change, ClusterChange::Deletion);
    assert_eq!(record.start_time, Time(at(990)));
    assert_eq!(record.revision, Some(100));
    assert!(!record.has_passed());
    assert_eq!(finalizer(&scene), None);

    let scene = waiting(three().without_pod("b"));
    assert_eq!(scene.record_written(), None);
    assert_eq!(finalizer(&scene), None);
    assert!(recreates(&scene, "b"), "the backup needs the members");
    let text = waits_for(&scene, Reason::AwaitingBackup);
    let waive = format!("skip-backup={WAIVER}");
    for part in [
        "newer than the request",
        "EtcdBackup db",
        "No report yet",
        waive.as_str(),
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
}

#[test]
fn invariant_41_deletion_needs_newer_backup_with_all_revisions() {
    let with = |seconds, revision| {
        let mut scene = waiting(three()).backed_up(seconds);
        let backup = scene.observed.before_change.backup.as_mut().unwrap();
        backup.revision = Some(revision);
        scene
    };
    assert_eq!(with(989, 100).record_written(), None, "the backup is old");
    let again = with(995, 99).record_written().unwrap();
    assert!(!again.has_passed(), "the backup lacks a revision");
    assert_eq!(
        again.start_time,
        Time(at(1000)),
        "the backup must be requested again"
    );
    // The next request must be later than this backup, so the operator waits for the next second.
    assert_eq!(with(1000, 99).record_written(), None);
    let mut other = with(995, 100);
    let backup = other.observed.before_change.backup.as_mut().unwrap();
    backup.cluster_id = Some("beef".to_owned());
    assert_eq!(other.record_written(), None, "another cluster");
    let record = with(995, 100).record_written().unwrap();
    assert!(record.backup.is_some());
    assert_eq!(
        finalizer(&with(995, 100)),
        None,
        "the backup must be recorded first"
    );
}

#[test]
fn invariant_41_backup_is_requested_only_while_quorum_answers() {
    let scene = deleted(three().silent().without_pod("b"));
    assert_eq!(scene.record_written(), None);
    assert!(recreates(&scene, "b"), "a quorum may return");
    let text = waits_for(&scene, Reason::AwaitingBackup);
    assert!(text.contains("no quorum"), "{text}");
    assert!(text.contains(WAIVER), "{text}");
    assert_eq!(scene.clone().backed_up(995).record_written(), None);
    let record = scene.waived(WAIVER).record_written().unwrap();
    assert!(record.waived && record.has_passed());
    let other = deleted(three()).waived("Deletion/1970-01-01T00:16:31Z");
    assert!(!other.record_written().unwrap().waived);
}

#[test]
fn invariant_41_volumes_get_owner_before_deletion_continues() {
    let mut scene = backed_up(three().without_pod("b"));
    for disk in scene.observed.disks.values_mut() {
        disk.owned = false;
    }
    let labels = scene.writes();
    assert_eq!(labels.len(), 3, "{labels:?}");
    let is_label = |write: &Write| matches!(write, Write::LabelDisk(_));
    assert!(labels.iter().all(is_label), "{labels:?}");
    let scene = backed_up(three().without_pod("b"));
    assert_eq!(finalizer(&scene), Some(false));
    assert_eq!(scene.writes().len(), 1, "no member is recreated");
    // The PVCs of a cluster that has never formed get their owner reference too.
    let mut forming = backed_up(Scene::starting(&["a"]).durable());
    forming.observed.disks.get_mut("a").unwrap().owned = false;
    let writes = forming.writes();
    let [Write::LabelDisk(label)] = writes.as_slice() else {
        panic!("{writes:?}");
    };
    assert_eq!(label.cluster_id, None);
}

#[test]
fn upgrade_waits_while_deletion_waits_for_backup() {
    let mut scene = guarded(towards("3.6.15", "3.6.16").compared());
    let backup = scene.desired.object.spec.backup.as_mut().unwrap();
    backup.before_changes = vec![ClusterChange::Upgrade];
    let scene = waiting(scene);
    assert_eq!(patched(&scene), []);
    assert_eq!(scene.record_written(), None);
}

#[test]
fn spec_that_prevents_backup_before_deletion_is_reported() {
    let mut suspended = waiting(three());
    let backup = suspended.desired.object.spec.backup.as_mut().unwrap();
    backup.suspend = true;
    let text = problem(&suspended, Reason::NoRecentBackup);
    assert!(
        text.contains("suspend to false") && text.contains(WAIVER),
        "{text}"
    );
    let mut hibernated = waiting(three());
    hibernated.desired.object.spec.hibernate = true;
    let text = problem(&hibernated, Reason::NoRecentBackup);
    assert!(text.contains("spec.hibernate"), "{text}");
    let mut missing = waiting(three());
    missing.desired.object.spec.backup = None;
    let text = problem(&missing, Reason::NoRecentBackup);
    assert!(text.contains("spec.backup is not set"), "{text}");
}

#[test]
fn foreground_deletion_waits_for_garbage_collector() {
    let finalizers = [FINALIZER_BACKUP, "foregroundDeletion"];
    let scene = with_finalizers(waiting(three().without_pod("b")), &finalizers);
    assert!(!recreates(&scene, "b"));
    assert_eq!(finalizer(&scene), None);
    let text = waits_for(&scene, Reason::Deleting);
    assert!(text.contains("starts the members again"), "{text}");
}

#[test]
fn deletion_continues_if_it_destroys_no_data() {
    let orphan = with_finalizers(deleted(three()), &[FINALIZER_BACKUP, "orphan"]);
    let mut orphaned = deleted(three());
    for pod in orphaned.observed.pods.values_mut() {
        pod.owned = false;
    }
    for service in orphaned.observed.services.values_mut() {
        service.owned = false;
    }
    let lost = deleted(guarded(Scene::formed(&["a"]).terminating("a")));
    let ended = deleted(three().without_pod("a").without_pod("b").without_pod("c"));
    let left = ended.clone();
    let ended = ended
        .claim_deleted("a")
        .claim_deleted("b")
        .claim_deleted("c");
    for scene in [orphan, orphaned, lost, ended] {
        assert_eq!(finalizer(&scene), Some(false));
        assert_eq!(scene.writes().len(), 1);
    }
    assert_eq!(finalizer(&left), None, "the volumes contain the data");
}

#[test]
fn deletion_of_paused_cluster_requests_backup_but_repairs_nothing() {
    let mut scene = deleted(three().without_pod("b"));
    scene.desired.paused = true;
    assert!(scene.record_written().is_some());
    let mut scene = waiting(three().without_pod("b"));
    scene.desired.paused = true;
    assert!(scene.plan().step.is_empty());
}
