//! Replacement of serving members, removal of leaders, and members that never started.

use crate::plan::tests::scene::{self, Scene};
use crate::plan::tests::writes::Write;
use crate::reason::Reason;
use crate::snapshot::Seen;

fn three() -> Scene {
    Scene::formed(&["a", "b", "c"]).durable()
}

fn add(member: &str) -> Write {
    Write::AddMember {
        member: member.into(),
        learner: true,
    }
}

fn hands_over(scene: &Scene) -> Option<(String, String)> {
    match &scene.changes()[..] {
        [Write::MoveLeader { from, to, .. }] => Some((from.clone(), to.clone())),
        _ => None,
    }
}

// ---- members with deleted PVCs ----

#[test]
fn member_with_deleted_pvc_is_replaced() {
    assert_eq!(three().claim_deleted("b").changes(), [scene::remove("b")]);
    // After etcd has removed the member, the operator deletes the objects of the member, and the replacement joins.
    let removed = Scene::formed(&["a", "c"])
        .durable()
        .size(3)
        .leftover("b")
        .with_disk("b")
        .claim_deleted("b")
        .reserved("d");
    assert_eq!(removed.writes(), [scene::delete_pod("b")]);
    assert_eq!(removed.changes(), [add("d")]);
}

#[test]
fn members_with_deleted_pvcs_are_replaced_one_by_one() {
    let both = three().claim_deleted("b").claim_deleted("c");
    assert_eq!(both.changes(), [scene::remove("b")]);
    // The operator removes the second member only after the replacement of the first member has become a voter.
    let learner = Scene::formed(&["a", "c"])
        .durable()
        .size(3)
        .learner("d")
        .claim_deleted("c");
    assert_eq!(learner.changes(), [scene::promote("d")]);
    let missing = Scene::formed(&["a", "c"])
        .durable()
        .size(3)
        .claim_deleted("c")
        .reserved("d");
    assert_eq!(
        missing.changes(),
        [add("d")],
        "the first replacement must be complete before the second removal"
    );
}

#[test]
fn invariant_3_member_with_deleted_pvc_stays_while_another_is_down() {
    let scene = three().claim_deleted("b").down("c");
    assert_eq!(scene.changes(), []);
    assert!(scene.waits().contains(&Reason::QuorumAtRisk));
    let text = &scene.plan().waiting_for[0].message;
    assert!(
        text.contains("the PersistentVolumeClaim of the member is being deleted"),
        "{text}"
    );
}

#[test]
fn replacement_joins_before_sole_member_is_removed() {
    let alone = Scene::formed(&["a"])
        .durable()
        .claim_deleted("a")
        .reserved("d");
    assert_eq!(alone.changes(), [add("d")]);
    let caught_up = Scene::formed(&["a"])
        .durable()
        .claim_deleted("a")
        .learner("d");
    assert_eq!(caught_up.changes(), [scene::promote("d")]);
    let followed = Scene::formed(&["a", "d"])
        .durable()
        .size(1)
        .claim_deleted("a");
    assert_eq!(hands_over(&followed), Some(("a".into(), "d".into())));
    assert_eq!(followed.leader("d").changes(), [scene::remove("a")]);
}

#[test]
fn two_members_are_replaced_after_both_replacements_vote() {
    let both = Scene::formed(&["a", "b"])
        .durable()
        .claim_deleted("a")
        .claim_deleted("b");
    assert_eq!(
        both.clone().reserved("d").reserved("e").changes(),
        [add("d"), add("e")]
    );
    let one_votes = Scene::formed(&["a", "b", "d"])
        .durable()
        .size(2)
        .learner("e")
        .claim_deleted("a")
        .claim_deleted("b");
    assert_eq!(one_votes.changes(), [scene::promote("e")]);
    let all_vote = Scene::formed(&["a", "b", "d", "e"])
        .durable()
        .size(2)
        .claim_deleted("a")
        .claim_deleted("b");
    assert_eq!(
        hands_over(&all_vote).map(|(from, to)| (from, to == "d" || to == "e")),
        Some(("a".into(), true))
    );
    assert_eq!(all_vote.leader("d").changes(), [scene::remove("a")]);
}

#[test]
fn member_with_pending_pod_and_no_pvc_is_replaced() {
    let scene = three().not_running("b").without_claim("b");
    assert_eq!(scene.changes(), [scene::remove("b")]);
    assert!(
        !scene
            .writes()
            .iter()
            .any(|write| matches!(write, Write::CreateDisk(_)))
    );
}

#[test]
fn serving_members_without_pvcs_are_replaced_one_by_one() {
    let scene = three()
        .without_claim("a")
        .without_claim("b")
        .without_claim("c");
    assert_eq!(
        hands_over(&scene).map(|(from, _)| from),
        Some("a".into()),
        "members that serve must be replaced one at a time"
    );
    assert_eq!(scene.leader("c").changes(), [scene::remove("a")]);
}

#[test]
fn volume_and_name_of_removed_member_are_never_reused() {
    let scene = Scene::formed(&["a", "c"])
        .durable()
        .size(3)
        .with_leftover_disk("b");
    assert_eq!(scene.writes()[0], scene::delete_disk("b"));
    assert!(
        !scene
            .writes()
            .iter()
            .any(|write| scene::makes_pod(write, "b"))
    );
    // The Service of the next member gets a name that no member has used before.
    assert!(
        scene
            .writes()
            .iter()
            .any(|write| scene::is_service(write, "n"))
    );
}

// ---- leadership transfer before a removal ----

#[test]
fn leadership_moves_before_leader_is_removed() {
    let cases: [(&str, Scene); 4] = [
        ("its PVC is being deleted", three().claim_deleted("a")),
        ("its PVC was deleted", three().without_claim("a")),
        (
            "its pod is terminating",
            Scene::formed(&["a", "b", "c"]).terminating("a"),
        ),
        (
            "all other pods are terminating too",
            Scene::formed(&["a", "b", "c", "d", "e"])
                .terminating("a")
                .terminating("b"),
        ),
    ];
    for (name, scene) in cases {
        let (from, to) =
            hands_over(&scene).unwrap_or_else(|| panic!("{name}: {:?}", scene.changes()));
        assert_eq!(from, "a", "{name}");
        assert!(
            to != "a" && scene.observed.pods[&to].stays(),
            "{name}: {to}"
        );
    }
}

#[test]
fn leadership_moves_to_member_that_is_not_replaced() {
    let scene = three().claim_deleted("a").claim_deleted("b");
    assert_eq!(hands_over(&scene), Some(("a".into(), "c".into())));
}

// ---- members that never started ----

/// Invariant 3: a voter that was never started raises the number of voters that a quorum needs, but never answers.
#[test]
fn unstarted_external_voter_is_reported_with_etcdctl_command() {
    let scene = three().added_with_vote("elsewhere");
    assert!(!scene.changes().contains(&scene::remove("elsewhere")));
    let problems = scene.plan().problems;
    let foreign = problems
        .iter()
        .find(|problem| problem.reason == Reason::ForeignMember)
        .unwrap();
    for part in ["etcdctl member remove 65", "10.0.0.7", "It is a voter"] {
        assert!(foreign.message.contains(part), "{}", foreign.message);
    }
}

#[test]
fn unstarted_member_without_service_is_removed_instead_of_started() {
    // The operator starts a member that has a Service. It removes a member without a Service, whether the member is a
    // voter or a learner.
    let started = three().size(4).reserved("d").added("d");
    assert!(
        started
            .writes()
            .iter()
            .any(|write| scene::makes_pod(write, "d"))
    );
    let voter = three().size(4).added_with_vote("db-pppppppppp");
    assert_eq!(voter.changes(), [scene::remove("db-pppppppppp")]);
    let learner = three().size(4).added("db-pppppppppp");
    assert_eq!(learner.changes(), [scene::remove("db-pppppppppp")]);
}

#[test]
fn quorum_risk_of_joining_voter_is_reported_for_etcd_before_3_4() {
    let scene = Scene::formed(&["a"])
        .size(2)
        .version("3.3.27")
        .reserved("d")
        .added_with_vote("d")
        .marked("d");
    let mut scene = scene.starts("d");
    scene
        .observed
        .statuses
        .insert("d".into(), Seen::Unknown("connection refused".into()));
    let problems = scene.plan().problems;
    let risk = problems
        .iter()
        .find(|problem| problem.reason == Reason::JoinsWithVote)
        .unwrap();
    assert!(
        risk.message
            .contains("1 of 2 voters serve, and a quorum needs 2"),
        "{}",
        risk.message
    );
    let next = Scene::formed(&["a"])
        .size(2)
        .version("3.3.27")
        .reserved("d")
        .plan()
        .next
        .unwrap();
    assert!(next.contains("with a vote"), "{next}");
}

fn failing(scene: Scene, member: &str, joins: bool) -> Scene {
    let mut scene = scene.added_with_vote(member).starts(member).down(member);
    let pod = scene.observed.pods.get_mut(member).unwrap();
    pod.ready = false;
    (pod.restarts, pod.joins, pod.initial) =
        (2, joins, ["a".to_owned(), "d".into(), "z".into()].into());
    scene
}

#[test]
fn joining_member_with_stale_list_is_removed_or_recreated_on_its_volume() {
    let joining = Scene::formed(&["a", "b", "c"])
        .size(4)
        .reserved("d")
        .marked("d");
    assert_eq!(
        failing(joining.clone(), "d", true).changes(),
        [scene::remove("d")]
    );
    assert_eq!(failing(joining, "d", false).changes(), []);
    let durable = three().size(4).reserved("d").marked("d").with_disk("d");
    let mut durable = failing(durable, "d", true);
    durable.observed.pods.get_mut("d").unwrap().durable = true;
    assert!(
        durable.writes().contains(&scene::delete_pod("d")),
        "the pod must be deleted, so that it is created again on its volume"
    );
}
