//! Growing and shrinking, also when the target changes midway.

use crate::plan::tests::scene::{self, Scene};
use crate::write::Write;

#[test]
fn several_learners_join_at_once_from_3_6_on() {
    let scene = Scene::formed(&["a"]).size(3).reserved("d").reserved("e");
    assert_eq!(scene.changes().len(), 2);
    let old = Scene::formed(&["a"])
        .size(3)
        .reserved("d")
        .version("3.5.35");
    assert_eq!(old.changes().len(), 1);
}

#[test]
fn before_3_4_members_join_with_a_vote() {
    let scene = Scene::formed(&["a"])
        .size(2)
        .reserved("d")
        .version("3.3.27");
    assert_eq!(
        scene.changes(),
        [Write::AddMember {
            member: "d".into(),
            learner: false
        }]
    );
}

#[test]
fn additions_come_before_the_pods_of_those_added() {
    let scene = Scene::formed(&["a"])
        .size(3)
        .reserved("d")
        .added("d")
        .reserved("e");
    assert_eq!(
        scene.changes(),
        [Write::AddMember {
            member: "e".into(),
            learner: true
        }]
    );
    assert!(
        !scene
            .writes()
            .iter()
            .any(|write| scene::makes_pod(write, "d"))
    );
}

#[test]
fn waits_for_etcds_five_seconds_instead_of_running_into_them() {
    let scene = Scene::formed(&["a", "b"]).size(3).reserved("d").young("a");
    assert_eq!(scene.changes(), []);
    assert_eq!(scene.waits(), ["VotersConnecting"]);
    let alone = Scene::formed(&["a"]).size(2).reserved("d").young("a");
    assert_eq!(alone.changes().len(), 1, "a voter alone waits for nobody");
}

#[test]
fn shrinking_takes_the_newest_and_never_the_leader() {
    let scene = Scene::formed(&["a", "b", "c"]).size(2).leader("c");
    assert_eq!(scene.changes(), [scene::remove("b")]);
}

#[test]
fn shrinking_prefers_an_unhealthy_member_and_a_learner_before_all() {
    let unhealthy = Scene::formed(&["a", "b", "c", "d", "e"])
        .size(4)
        .leader("e")
        .down("a");
    assert_eq!(unhealthy.changes(), [scene::remove("a")]);
    let learner = Scene::formed(&["a", "b", "c"]).size(3).learner("d");
    assert_eq!(learner.changes(), [scene::remove("d")]);
}

/// Invariant 3.
#[test]
fn invariant_3_shrinking_stops_while_quorum_is_at_risk() {
    let scene = Scene::formed(&["a", "b", "c", "d"])
        .size(3)
        .down("b")
        .silent_voter("c")
        .down("d");
    assert_eq!(scene.changes(), []);
    assert!(scene.waits().contains(&"QuorumAtRisk"));
}

#[test]
fn a_target_that_changes_midway_takes_learners_back() {
    let scene = Scene::formed(&["a", "b", "c"])
        .size(3)
        .reserved("d")
        .added("d")
        .learner("e");
    assert_eq!(scene.changes().len(), 1);
    assert!(
        matches!(&scene.changes()[0], Write::Remove { member, .. } if member == "d" || member == "e")
    );
}

#[test]
fn what_is_left_of_a_removed_member_is_deleted() {
    let scene = Scene::formed(&["a", "b", "c"]).leftover("z");
    assert_eq!(scene.writes(), [scene::delete_pod("z")]);
}

#[test]
fn what_carries_the_id_of_another_cluster_is_left_alone() {
    let mut scene = Scene::formed(&["a", "b", "c"]).leftover("z");
    scene.observed.pods.get_mut("z").unwrap().cluster_id = Some(etcd::ClusterId(7));
    assert_eq!(scene.writes(), []);
    assert_eq!(scene.plan().problems[0].code, "ForeignObjects");
}

#[test]
fn a_service_that_is_not_needed_any_more_goes() {
    let scene = Scene::formed(&["a", "b", "c"]).reserved("d");
    assert!(matches!(&scene.writes()[..], [Write::DeleteService { member, .. }] if member == "d"));
}
