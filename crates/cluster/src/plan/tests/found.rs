//! Regression tests for defects that the model (`crates/cluster/tests/model`) found.

use etcd::{ClusterId, Member, MemberId, Members};

use crate::clock::ApiServerClock;
use crate::plan::State;
use crate::plan::tests::scene::{self, CLUSTER, Scene};
use crate::plan::tests::writes::Write;
use crate::reason::Reason;
use crate::snapshot::{Cause, Kept, Seen};

fn three() -> Scene {
    Scene::formed(&["a", "b", "c"]).durable()
}

fn silent(mut scene: Scene) -> Scene {
    scene.observed.members = Seen::Unknown("no quorum".into());
    scene
}

fn touches(write: &Write, member: &str) -> bool {
    match write {
        Write::CreatePod(start) => start.member == member,
        Write::LabelDisk(label) | Write::LabelPod(label) => label.member == member,
        Write::DeletePod { member: of, .. } | Write::DeleteDisk { member: of, .. } => of == member,
        _ => false,
    }
}

#[test]
fn invariant_7_volume_of_another_cluster_stays_unchanged_without_quorum() {
    let mut scene = silent(three().without_pod("b").with_disk("z"));
    let disk = scene.observed.disks.get_mut("z").unwrap();
    (disk.owned, disk.cluster_id) = (false, Some(ClusterId(0xf00)));
    let writes = scene.writes();
    assert!(writes.iter().any(|write| scene::makes_pod(write, "b")));
    assert!(
        !writes.iter().any(|write| touches(write, "z")),
        "{writes:?}"
    );
}

/// Invariant 7: all objects must have the cluster ID before clients can write. If the status is lost later, any of
/// these objects proves that the cluster existed.
#[test]
fn client_service_gets_endpoints_after_objects_have_cluster_id() {
    let opens = |scene: &Scene| scene.writes().contains(&Write::ApplyClient { open: true });
    let mut scene = three();
    scene.observed.shared.client = Kept::AsMade(false);
    assert!(opens(&scene));
    scene.observed.disks.get_mut("c").unwrap().cluster_id = None;
    assert!(!opens(&scene));
    // A client Service that already has endpoints keeps them, even if a volume lacks the cluster ID.
    scene.observed.shared.client = Kept::AsMade(true);
    assert!(
        !scene
            .writes()
            .iter()
            .any(|write| matches!(write, Write::ApplyClient { .. }))
    );
}

/// Invariant 6: after the loss of the status, the remaining objects of an abandoned bootstrap do not show which members
/// have run.
#[test]
fn lost_status_and_missing_objects_restart_bootstrap() {
    let recorded = |scene: &Scene| {
        let record = |write| match write {
            Write::RecordIntent { intent, .. } => Some(intent.token),
            _ => None,
        };
        scene.writes().into_iter().find_map(record)
    };
    let mut remains = Scene::nothing(3).durable().with_disk("a");
    let disk = remains.observed.disks.get_mut("a").unwrap();
    disk.initial = ["a", "b", "c"].map(String::from).into();
    assert_eq!(recorded(&remains).as_deref(), Some("new"));
    let part = remains.clone().reserved("b");
    assert_eq!(recorded(&part).as_deref(), Some("new"));
    let all = remains.clone().reserved("b").reserved("c");
    assert_eq!(recorded(&all).as_deref(), Some("token"));
    // An object with the cluster ID proves that the cluster has formed, so the operator records the existing token.
    let disk = remains.observed.disks.get_mut("a").unwrap();
    disk.cluster_id = Some(CLUSTER);
    assert_eq!(recorded(&remains).as_deref(), Some("token"));
}

/// No write is acknowledged before the cluster has formed. The operator may therefore abandon the bootstrap, and does
/// not wait for members that may never return.
#[test]
fn bootstrap_is_abandoned_without_quorum_of_usable_volumes() {
    let begins = |scene: &Scene| scene.waits().contains(&Reason::BootstrapAbandoned);
    let starting = || {
        let scene = Scene::starting(&["a", "b", "c"]).durable();
        scene.not_running("a").not_running("b").not_running("c")
    };
    let damaged = |scene: Scene, member| scene.crashes(member, Cause::Data("crc".into()), 3, 100);
    assert!(!begins(&starting().node_lost("b", 600)));
    assert!(begins(&starting().node_lost("b", 600).node_lost("c", 600)));
    assert!(!begins(&starting().node_lost("b", 600).node_lost("c", 1)));
    // The operator's clock is 590 s ahead. By the API server's clock, the nodes have been lost for only 10 s, so the
    // operator does not abandon the bootstrap yet.
    let mut ahead = starting().node_lost("b", 600).node_lost("c", 600);
    ahead.observed.clock = ApiServerClock(Some(jiff::SignedDuration::from_secs(-590)));
    assert!(!begins(&ahead));
    assert!(begins(&damaged(damaged(starting(), "b"), "c")));
    // The operator abandons the bootstrap if the volumes of `b` and `c` were lost before their pods mounted these
    // volumes. A pod that has already mounted its volume continues to run.
    let bare = || starting().volume_lost("b").volume_lost("c");
    assert!(begins(&bare()));
    let mut open = bare();
    open.observed.pods.get_mut("c").unwrap().running = true;
    assert!(!begins(&open));
}

/// The only voter must be replaced, and the cluster has too many members. Neither change may wait for the other
/// forever.
#[test]
fn learner_is_promoted_before_sole_voter_is_replaced() {
    let scene = Scene::formed(&["a"]).durable().claim_deleted("a");
    let crowded = scene.clone().learner("b").learner("c").size(1);
    assert_eq!(crowded.changes(), [scene::remove("c")]);
    assert_eq!(scene.learner("b").size(1).changes(), [scene::promote("b")]);
}

/// Before etcd 3.4, the second member joins as a voter. From its addition until it runs, the cluster has no quorum.
#[test]
fn second_voter_starts_with_member_list_of_first_voter() {
    let entry = |id, name: &str, joined| Member {
        id: MemberId(id),
        name: name.into(),
        peer_urls: vec![format!("http://{name}.ns.svc:2380")],
        client_urls: if joined {
            vec!["http://x:2379".into()]
        } else {
            vec![]
        },
        is_learner: false,
    };
    let mut scene = silent(
        Scene::formed(&["a"])
            .version("3.3.27")
            .reserved("b")
            .size(3),
    );
    assert!(
        !scene
            .writes()
            .iter()
            .any(|write| scene::makes_pod(write, "b"))
    );
    let members = vec![entry(97, "a", true), entry(98, "b", false)];
    scene.observed.recovery.local = vec![Members {
        cluster_id: CLUSTER,
        members,
    }];
    let writes = scene.writes();
    let marked = |write: &Write| matches!(write, Write::MarkService { member, started: true, .. } if member == "b");
    let joins = |write: &Write| matches!(write, Write::CreatePod(start) if start.member == "b" && start.state == State::Join);
    let (mark, start) = (
        writes.iter().position(marked),
        writes.iter().position(joins),
    );
    assert!(mark.is_some() && mark < start, "{writes:?}");
    // The Service of `b` has the annotation `started`, so `b` may have run, and the operator does not start `b` again
    // without data. The module `second` describes the only exception.
    let marked = scene.marked("b").reserved("c");
    assert!(
        !marked
            .writes()
            .iter()
            .any(|write| scene::makes_pod(write, "b"))
    );
}

/// A delayed write of another process must not recreate a deleted Service.
#[test]
fn service_repair_has_uid_precondition() {
    let mut scene = three();
    let service = scene.observed.services.get_mut("b").unwrap();
    (service.drifted, service.uid) = (true, "seen".into());
    let repair = Write::RepairService {
        member: "b".into(),
        uid: "seen".into(),
    };
    assert!(scene.writes().contains(&repair));
}
