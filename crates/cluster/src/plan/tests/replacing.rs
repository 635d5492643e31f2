//! Members that serve and are to be replaced, leaders that go, members nobody started.

use crate::plan::tests::scene::{self, Scene};
use crate::reason::Reason;
use crate::snapshot::Seen;
use crate::write::Write;

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

// ---- a volume claim that somebody deleted ----

#[test]
fn deleting_the_claim_of_a_member_replaces_it() {
    assert_eq!(three().claim_deleted("b").changes(), [scene::remove("b")]);
    // Removed, it is cleared away, and the next one joins.
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
fn claims_deleted_together_are_replaced_one_after_the_other() {
    let both = three().claim_deleted("b").claim_deleted("c");
    assert_eq!(both.changes(), [scene::remove("b")]);
    // The second waits until the first is replaced, with a vote.
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
        "the first is followed before the second goes"
    );
}

/// Invariant 3.
#[test]
fn invariant_3_a_deleted_claim_waits_while_another_member_is_down() {
    let scene = three().claim_deleted("b").down("c");
    assert_eq!(scene.changes(), []);
    assert!(scene.waits().contains(&Reason::QuorumAtRisk));
    let text = &scene.plan().waiting_for[0].message;
    assert!(text.contains("its volume claim is being deleted"), "{text}");
}

#[test]
fn the_only_member_is_followed_before_it_goes() {
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
fn two_members_that_both_go_are_followed_by_two() {
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
fn a_member_whose_claim_is_gone_while_its_pod_waits_is_replaced() {
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
fn claims_that_vanish_under_serving_members_cost_no_quorum() {
    let scene = three()
        .without_claim("a")
        .without_claim("b")
        .without_claim("c");
    assert_eq!(
        hands_over(&scene).map(|(from, _)| from),
        Some("a".into()),
        "one at a time, none of them lost yet"
    );
    assert_eq!(scene.leader("c").changes(), [scene::remove("a")]);
}

#[test]
fn a_volume_left_by_a_removed_member_is_deleted_and_never_used_again() {
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
    // The Service of the next member is made under a name that was never used.
    assert!(
        scene
            .writes()
            .iter()
            .any(|write| scene::is_service(write, "n"))
    );
}

// ---- leaders ----

#[test]
fn no_leader_is_removed_before_it_has_handed_over() {
    let cases: [(&str, Scene); 4] = [
        ("its claim is deleted", three().claim_deleted("a")),
        ("its claim is gone", three().without_claim("a")),
        (
            "its pod ends",
            Scene::formed(&["a", "b", "c"]).terminating("a"),
        ),
        (
            "all others end as well",
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
fn leadership_goes_to_a_member_that_stays() {
    let scene = three().claim_deleted("a").claim_deleted("b");
    assert_eq!(hands_over(&scene), Some(("a".into(), "c".into())));
}

// ---- members that never started ----

/// Invariant 3: it has a vote that nobody uses.
#[test]
fn a_foreign_member_that_never_started_is_named_with_the_remedy() {
    let scene = three().added_with_vote("elsewhere");
    assert!(!scene.changes().contains(&scene::remove("elsewhere")));
    let problems = scene.plan().problems;
    let foreign = problems
        .iter()
        .find(|problem| problem.reason == Reason::ForeignMember)
        .unwrap();
    for part in ["etcdctl member remove 65", "10.0.0.7", "it has a vote"] {
        assert!(foreign.message.contains(part), "{}", foreign.message);
    }
}

#[test]
fn an_own_member_that_was_added_and_never_started_is_settled() {
    // Its Service is there: it is started. Its Service is gone: it is removed, vote or not.
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
fn before_3_4_it_is_said_what_a_joining_voter_risks() {
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
            .contains("1 of 2 voters serve and a quorum needs 2"),
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

fn told(scene: Scene, member: &str, joins: bool) -> Scene {
    let mut scene = scene.added_with_vote(member).starts(member).down(member);
    let pod = scene.observed.pods.get_mut(member).unwrap();
    pod.ready = false;
    (pod.restarts, pod.joins, pod.initial) =
        (2, joins, ["a".to_owned(), "d".into(), "z".into()].into());
    scene
}

#[test]
fn a_joining_member_that_was_told_an_older_list_begins_anew_and_a_first_member_does_not() {
    let joining = Scene::formed(&["a", "b", "c"])
        .size(4)
        .reserved("d")
        .marked("d");
    assert_eq!(
        told(joining.clone(), "d", true).changes(),
        [scene::remove("d")]
    );
    assert_eq!(told(joining, "d", false).changes(), []);
    let durable = three().size(4).reserved("d").marked("d").with_disk("d");
    let mut durable = told(durable, "d", true);
    durable.observed.pods.get_mut("d").unwrap().durable = true;
    assert!(
        durable.writes().contains(&scene::delete_pod("d")),
        "made again on its disk"
    );
}
