//! Growing and shrinking, also when the target changes midway.

use crate::plan::tests::scene::{self, Scene};
use crate::reason::Reason;
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
    assert_eq!(scene.waits(), [Reason::VotersConnecting]);
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
    assert!(scene.waits().contains(&Reason::QuorumAtRisk));
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
    assert_eq!(scene.plan().problems[0].reason, Reason::ForeignObjects);
}

#[test]
fn a_service_that_is_not_needed_any_more_goes() {
    let scene = Scene::formed(&["a", "b", "c"]).reserved("d");
    assert!(matches!(&scene.writes()[..], [Write::DeleteService { member, .. }] if member == "d"));
}

// ---- a seed, and all the ways from one size to another ----

#[test]
fn a_seed_grows_by_learners_to_the_size_that_is_wanted() {
    let seed = |mut scene: Scene| {
        scene.desired.first = 1;
        scene.size(3)
    };
    // One member is recorded, started alone, and forms the cluster.
    let begun = seed(Scene::begun(&["a"]));
    let starts = begun.writes().into_iter().filter_map(|write| match write {
        Write::CreatePod(start) => Some(start),
        _ => None,
    });
    let starts: Vec<_> = starts.collect();
    assert_eq!((starts.len(), starts[0].initial.len()), (1, 1));
    let mut formed = Scene::formed(&["a"]);
    formed.observed.cluster_id = None;
    assert!(matches!(
        seed(formed).writes()[0],
        Write::RecordClusterId { .. }
    ));
    // Then the others: Services first, both as learners at once, and nobody waits for a connection of the only voter.
    let alone = seed(Scene::formed(&["a"]).young("a"));
    assert_eq!(scene::reserved(&alone.plan().step.chains), [true, true]);
    let grows = seed(Scene::formed(&["a"]).young("a").reserved("d").reserved("e"));
    assert_eq!(grows.changes().len(), 2);
    // A seed whose first attempt came to nothing is begun again as a seed.
    let lost = seed(Scene::starting(&["a"]).without_pod("a"));
    let chains = lost.plan().step.chains;
    assert_eq!(scene::begun(&chains), Some((1, "1")));
    assert_eq!(chains.len(), 1);
}

#[test]
fn a_bootstrap_of_all_and_one_of_a_seed_are_told_apart_before_anything_runs() {
    let mut all = Scene::starting(&["a", "b", "c"])
        .not_running("a")
        .not_running("b")
        .not_running("c");
    assert_ne!(all.waits(), [Reason::BootstrapAbandoned]);
    all.desired.first = 1;
    assert_eq!(all.waits(), [Reason::BootstrapAbandoned]);
}

/// Voters, learners and a target: what comes next.
#[test]
fn a_target_below_the_voters_takes_all_learners_back_first() {
    let scene = Scene::formed(&["a", "b", "c", "e", "f"])
        .size(3)
        .learner("g")
        .reserved("h")
        .added("h");
    let [Write::Remove { member, .. }] = &scene.changes()[..] else {
        panic!("{:?}", scene.changes())
    };
    assert!(member == "g" || member == "h", "{member}");
    // Nobody is started who is about to be removed or is not wanted any more.
    assert!(
        !scene
            .writes()
            .iter()
            .any(|write| scene::makes_pod(write, member))
    );
}

#[test]
fn even_sizes_are_reached_and_left_like_odd_ones() {
    assert_eq!(
        Scene::formed(&["a", "b", "c"])
            .size(4)
            .reserved("d")
            .changes()
            .len(),
        1
    );
    assert_eq!(
        Scene::formed(&["a", "b", "c", "d"]).size(2).changes(),
        [scene::remove("d")]
    );
    assert_eq!(
        Scene::formed(&["a", "b", "c"]).size(2).changes(),
        [scene::remove("c")]
    );
    assert_eq!(
        Scene::formed(&["a", "b"]).size(1).changes(),
        [scene::remove("b")]
    );
    // Of two, none is removed while the other is down.
    let down = Scene::formed(&["a", "b"])
        .size(1)
        .leader("a")
        .silent_voter("a")
        .down("b");
    assert_eq!(down.changes(), []);
}

/// A member that joins asks the others before it answers them: two that start together would wait for each other.
#[test]
fn members_that_join_one_voter_together_are_found_once_all_of_them_have_asked() {
    let opened = |scene: &Scene| {
        let writes = scene.writes();
        ["d", "e"].map(|member| {
            let opens = |write: &Write| matches!(write, Write::OpenService { member: of, .. } if of == member);
            writes.iter().any(opens)
        })
    };
    let mut scene = Scene::formed(&["a"]).size(3);
    for member in ["d", "e"] {
        scene = scene.added(member).leftover(member).young(member);
        scene.observed.services.get_mut(member).unwrap().closed = true;
    }
    // Their containers run; whether their etcds have asked only they can tell.
    assert_eq!(opened(&scene), [false; 2]);
    let half = scene.clone().follows("d");
    assert_eq!(opened(&half), [false; 2]);
    assert_eq!(opened(&half.clone().follows("e")), [true; 2]);
    // Nobody is promoted whom nobody finds.
    let mut unfound = Scene::formed(&["a"]).size(3).learner("d").follows("d");
    unfound.observed.services.get_mut("d").unwrap().closed = true;
    assert_eq!(unfound.changes(), []);
    // Where their listeners for health are closed to us.
    let ran = |mut scene: Scene, seconds: i64| {
        for member in ["d", "e"] {
            let pod = scene.observed.pods.get_mut(member).unwrap();
            pod.running_since = Some(scene::at(1000 - seconds));
        }
        scene
    };
    assert_eq!(opened(&ran(scene.clone(), 1)), [false; 2]);
    assert_eq!(opened(&ran(scene.clone(), 2)), [true; 2]);
    // Nothing depends on another's pod for long.
    let half = half.not_running("e");
    assert_eq!(opened(&half), [false; 2]);
    assert_eq!(opened(&half.aged()), [true; 2]);
    // Beside several voters, or alone, a member is found from the beginning.
    for (voters, size) in [(&["a"][..], 2), (&["a", "b", "c"], 5)] {
        let chains = Scene::formed(voters).size(size).plan().step.chains;
        let reserved = scene::reserved(&chains);
        assert!(!reserved.is_empty() && !reserved.contains(&true));
    }
}
