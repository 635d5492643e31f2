//! State after a recovery or a restore in place: the remains of the old cluster, and the endpoints of the client
//! Service.

use api::cluster::{RecoveryPhase, RecoveryStatus, ReplacedStatus};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

use crate::plan::tests::recovery::{
    NEW, approved, at, begun, destroys, leaderless, list, record, recorded,
};
use crate::plan::tests::scene::{self, CLUSTER, Scene, makes_pod};
use crate::plan::tests::writes::Write;
use crate::reason::Reason;
use crate::snapshot::{Intent, Kept, Seen};

/// The new cluster serves. The survivor of the old cluster still exists with its volume, and so does the volume of
/// another old member.
pub(super) fn recovered() -> Scene {
    let mut scene = Scene::formed(&["n"]).durable().size(3).leftover("a");
    scene = scene.with_disk("a").with_disk("b");
    let complete = RecoveryStatus {
        to_cluster_id: Some(NEW.to_string()),
        ..record(RecoveryPhase::Complete)
    };
    scene.observed.recovery.record = Some(complete);
    scene.observed.cluster_id = Some(NEW);
    scene.observed.intent = Some(Intent {
        token: "new".into(),
        members: ["n".to_owned()].into(),
    });
    scene.observed.members = Seen::Known(list(NEW, &[("n", false)]));
    if let Some(Seen::Known(status)) = scene.observed.statuses.get_mut("n") {
        status.cluster_id = NEW;
    }
    for (name, pod) in &mut scene.observed.pods {
        let (token, id) = if name == "n" {
            ("new", NEW)
        } else {
            ("token", CLUSTER)
        };
        (pod.token, pod.cluster_id) = (Some(token.into()), Some(id));
    }
    for (name, disk) in &mut scene.observed.disks {
        let (token, id) = if name == "n" {
            ("new", NEW)
        } else {
            ("token", CLUSTER)
        };
        (disk.token, disk.cluster_id) = (Some(token.into()), Some(id));
    }
    scene.observed.shared.client = Kept::AsMade(false);
    scene
}

/// Invariant 9: the old volumes stay until the new cluster has its full size, and for the time that the user has set.
#[test]
fn old_volumes_are_kept_until_recovered_cluster_is_complete() {
    let mut scene = recovered();
    let writes = scene.writes();
    assert!(writes.contains(&scene::delete_pod("a")));
    let deletes_disk = |writes: &[Write]| {
        writes
            .iter()
            .filter(|write| matches!(write, Write::DeleteDisk { .. }))
            .count()
    };
    assert_eq!(deletes_disk(&writes), 0);
    assert!(
        scene.plan().problems.is_empty(),
        "the objects of the old cluster must not be reported as foreign"
    );
    scene.desired.size = 1;
    assert_eq!(deletes_disk(&scene.writes()), 2);
    // The operator keeps the old volumes for the time in `spec.recovery.keepVolumes`, because the user may need the old
    // data after the recovery.
    for (completed, deleted) in [(995, 0), (900, 2)] {
        let mut scene = scene.clone();
        let record = scene.observed.recovery.record.as_mut().unwrap();
        record.completion_time = Some(Time(at(completed)));
        assert_eq!(deletes_disk(&scene.writes()), deleted, "{completed}");
    }
    // The operator keeps the old volumes while the new cluster is not complete: its member `n` serves on a lost volume.
    assert_eq!(deletes_disk(&scene.volume_lost("n").writes()), 0);
}

/// If the status is lost later, the cluster ID on the remaining objects must identify the new cluster. The operator
/// therefore writes this ID to the objects of the new cluster before it deletes the old cluster.
#[test]
fn objects_of_old_cluster_stay_until_recovered_cluster_is_labeled() {
    let mut scene = recovered();
    scene.observed.pods.get_mut("n").unwrap().cluster_id = None;
    let writes = scene.writes();
    assert!(!destroys(&writes));
    assert!(
        writes
            .iter()
            .any(|write| matches!(write, Write::LabelPod(_)))
    );
}

#[test]
fn invariant_16_recovered_cluster_gets_endpoints_when_old_pods_are_unready() {
    let open = Write::ApplyClient { open: true };
    let mut scene = recovered();
    assert!(!scene.writes().contains(&open));
    let old = scene.observed.pods.get_mut("a").unwrap();
    old.terminating = true;
    assert!(
        !scene.writes().contains(&open),
        "the Service must not get endpoints while the old pod is ready"
    );
    scene.observed.pods.get_mut("a").unwrap().ready = false;
    // The client Service gets its endpoints, because a terminating old pod that is not ready is no endpoint, even if
    // Kubernetes never deletes the pod.
    assert!(scene.writes().contains(&open));
    // While the pod of an abandoned seed runs, the client Service gets no endpoints.
    let mut given_up = scene.clone().leftover("x");
    let seed = given_up.observed.pods.get_mut("x").unwrap();
    (seed.token, seed.cluster_id) = (Some("given up".into()), None);
    assert!(!given_up.writes().contains(&open));
    assert!(given_up.writes().contains(&scene::delete_pod("x")));
    scene.observed.pods.remove("a");
    assert!(scene.writes().contains(&open));
}

/// Invariant 7: the old volumes belong to the cluster before the recovery.
#[test]
fn no_pod_is_created_on_volume_of_old_cluster() {
    let mut scene = recovered();
    scene.observed.members = Seen::Unknown("no answer".into());
    scene.observed.pods.remove("a");
    let writes = scene.writes();
    assert!(!writes.iter().any(|write| makes_pod(write, "a")));
    assert!(!destroys(&writes));
}

/// The annotation that approved the recovery still exists. It names the ID of the old cluster, so it approves no
/// further recovery.
#[test]
fn used_recovery_approval_starts_no_second_recovery() {
    let scene = approved(recovered());
    assert_eq!((begun(&scene), recorded(&scene)), (None, None));
    let mut lost = leaderless(scene).without_pod("n");
    lost.observed.disks.remove("n");
    lost.observed.reported_voters = ["n".to_owned()].into();
    assert_eq!((begun(&lost), recorded(&lost)), (None, None));
    let codes: Vec<_> = lost.plan().problems.iter().map(|one| one.reason).collect();
    assert_eq!(
        codes,
        [Reason::QuorumLost],
        "the old approval must not be reported as wrong"
    );
}

// ---- old members after a restore ----

/// The seed of a restore in place serves. The former members are stopped, and their volumes exist.
fn replaced(keep_until: Option<i64>) -> Scene {
    let mut scene = recovered();
    scene.observed.recovery.record = None;
    scene.observed.recovery.replaced = Some(ReplacedStatus {
        restore: "again".into(),
        from_cluster_id: Some(CLUSTER.to_string()),
        members: vec!["a".into(), "b".into()],
        time: Some(Time(at(990))),
        keep_data_until: keep_until.map(|until| Time(at(until))),
    });
    scene
}

/// Invariant 9: the volumes of the replaced cluster stay until the new cluster is complete and `keepOldData` has
/// passed.
#[test]
fn old_volumes_are_kept_until_restored_cluster_is_complete() {
    let deletes_disk = |scene: &Scene| {
        let writes = scene.writes();
        let disks = writes.iter();
        disks
            .filter(|write| matches!(write, Write::DeleteDisk { .. }))
            .count()
    };
    for (size, keep_until, gone) in [
        (3, None, 0),
        (1, None, 2),
        (1, Some(1001), 0),
        (1, Some(999), 2),
    ] {
        let mut scene = replaced(keep_until);
        scene.desired.size = size;
        assert!(scene.writes().contains(&scene::delete_pod("a")));
        assert_eq!(
            deletes_disk(&scene),
            gone,
            "size {size}, kept until {keep_until:?}"
        );
        assert!(
            scene.plan().problems.is_empty(),
            "the objects of the old cluster must not be reported as foreign"
        );
    }
}

#[test]
fn invariant_16_restored_cluster_gets_endpoints_when_old_pods_are_unready() {
    let open = Write::ApplyClient { open: true };
    let mut scene = replaced(None);
    assert!(!scene.writes().contains(&open));
    let old = scene.observed.pods.get_mut("a").unwrap();
    (old.terminating, old.ready) = (true, false);
    assert!(scene.writes().contains(&open));
}

/// Invariant 1: the voters in the status are those of the replaced cluster.
#[test]
fn voters_in_status_of_replaced_cluster_do_not_count_as_lost() {
    let mut scene = leaderless(replaced(None));
    scene.observed.statuses.clear();
    scene.observed.reported_voters = ["a".to_owned(), "b".to_owned()].into();
    let plan = scene.plan();
    assert!(
        plan.problems
            .iter()
            .all(|problem| problem.reason != Reason::QuorumLost),
        "{plan:?}"
    );
    assert!(!destroys(&scene.writes()));
}

/// The remaining pods and volumes of the old cluster record another version than those of the new cluster.
#[test]
fn version_of_replaced_cluster_is_ignored() {
    let mut scene = replaced(None);
    scene.observed.pods.get_mut("n").unwrap().version = Some("3.6.16".into());
    scene.observed.pods.get_mut("a").unwrap().version = Some("3.5.35".into());
    let version = crate::plan::current_version(&scene.desired, &scene.observed);
    assert_eq!(version, "3.6.16");
}
