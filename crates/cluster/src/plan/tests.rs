//! Stories the planner has to get right. Each builds a world in a line or two and says what is done about it.

mod actions;
mod adoption;
mod by_hand;
mod disks;
mod drain;
mod fate;
mod found;
mod identity;
mod joining;
mod kept_volumes;
mod losses;
mod recovered;
mod recovery;
mod replacing;
mod rolling;
pub(crate) mod scene;
mod settings;
mod sidecars;
mod sizes;
mod switch;
mod tls;
mod under_way;
mod upkeep;

use std::time::Duration;

use crate::plan::STEADY;
use crate::reason::Reason;
use crate::snapshot::{Kept, Trouble};
use crate::write::{State, Write};

use scene::Scene;

// ---- beginnings ----

/// Invariant 10.
#[test]
fn records_the_first_members_before_anything_is_made() {
    let plan = Scene::nothing(3).plan();
    let chains = plan.step.chains.clone();
    assert_eq!(scene::begun(&chains), Some((3, "1")));
    assert_eq!(chains.len(), 1);
    assert_eq!(plan.step.change, None);
}

#[test]
fn a_seed_bootstrap_begins_with_one_member() {
    let mut scene = Scene::nothing(3);
    scene.desired.first = 1;
    let chains = scene.plan().step.chains;
    assert_eq!(scene::begun(&chains), Some((1, "1")));
    assert_eq!(chains.len(), 1);
}

#[test]
fn starts_all_first_members_at_once_each_after_its_service() {
    let plan = Scene::begun(&["a", "b", "c"]).plan();
    for member in ["a", "b", "c"] {
        let mut chains = plan.step.chains.iter();
        let chain = chains.find(|chain| scene::is_service(&chain[0], member));
        let Some(
            [
                Write::CreateService {
                    started: true,
                    closed: true,
                    ..
                },
                Write::CreatePod(start),
            ],
        ) = chain.map(Vec::as_slice)
        else {
            panic!("{member}: {chain:?}");
        };
        assert_eq!((start.state, start.initial.len()), (State::New, 3));
    }
}

#[test]
fn first_members_reach_each_other_once_one_of_them_runs() {
    let opened = |scene: &Scene| {
        let writes = scene.writes();
        ["a", "b", "c"].map(|member| {
            writes
                .iter()
                .any(|write| matches!(write, Write::OpenService { member: of, .. } if of == member))
        })
    };
    let mut scene = Scene::starting(&["a", "b", "c"]);
    for service in scene.observed.services.values_mut() {
        service.closed = true;
    }
    assert_eq!(opened(&scene), [true; 3]);
    let young = ["a", "b", "c"].into_iter().fold(scene, |scene, member| {
        scene.young(member).not_running(member)
    });
    assert_eq!(opened(&young), [false; 3]);
    // Whatever the pods do, the Services do not stay closed.
    let slow = young.aged();
    assert_eq!(opened(&slow), [true; 3]);
}

#[test]
fn keeps_clients_out_until_the_cluster_id_is_recorded() {
    let writes = Scene::begun(&["a", "b", "c"]).writes();
    assert!(writes.contains(&Write::ApplyClient { open: false }));
    let mut formed = Scene::formed(&["a", "b", "c"]);
    formed.observed.shared.client = Kept::AsMade(false);
    assert!(formed.writes().contains(&Write::ApplyClient { open: true }));
}

#[test]
fn records_the_cluster_id_as_soon_as_a_quorum_answers() {
    let mut scene = Scene::formed(&["a", "b", "c"]).without_pod("c");
    scene.observed.cluster_id = None;
    assert!(matches!(scene.writes()[0], Write::RecordClusterId { .. }));
}

/// Invariant 6.
#[test]
fn invariant_6_a_first_member_that_lost_its_disk_is_not_started_again() {
    let scene = Scene::starting(&["a", "b", "c"]).without_pod("a");
    assert!(
        !scene
            .writes()
            .iter()
            .any(|write| scene::makes_pod(write, "a"))
    );
    assert_eq!(scene.waits()[0], Reason::FirstMemberLost);
}

#[test]
fn a_bootstrap_without_a_quorum_of_disks_begins_again_under_new_names() {
    let scene = Scene::starting(&["a", "b", "c"])
        .without_pod("a")
        .without_pod("b");
    let chains = scene.plan().step.chains;
    assert_eq!(scene::begun(&chains), Some((3, "1")));
    assert_eq!(chains.len(), 1);
    assert_eq!(scene.waits(), [Reason::BootstrapAbandoned]);
}

#[test]
fn a_bootstrap_that_cannot_start_follows_a_corrected_spec() {
    let mut scene = Scene::starting(&["a", "b", "c"])
        .not_running("a")
        .not_running("b")
        .not_running("c");
    scene.desired.image = "etcd:v3.6.17".into();
    assert_eq!(scene.waits(), [Reason::BootstrapAbandoned]);
}

#[test]
fn what_an_abandoned_bootstrap_left_is_deleted() {
    let mut scene = Scene::starting(&["a", "b", "c"]);
    scene.observed.intent.as_mut().unwrap().members = ["x".into(), "y".into(), "z".into()].into();
    for pod in scene.observed.pods.values_mut() {
        pod.token = Some("older".into());
    }
    assert!(scene.writes().contains(&scene::delete_pod("a")));
}

/// Invariant 7.
#[test]
fn invariant_7_a_cluster_whose_object_lost_its_status_is_found_again() {
    let mut scene = Scene::formed(&["a", "b", "c"]);
    scene.observed.intent = None;
    scene.observed.cluster_id = None;
    let [
        Write::RecordIntent {
            intent, cluster_id, ..
        },
    ] = &scene.writes()[..]
    else {
        panic!("{:?}", scene.writes())
    };
    assert_eq!(intent.token, "token");
    assert_eq!(*cluster_id, Some(scene::CLUSTER));
}

/// Invariant 7.
#[test]
fn invariant_7_nothing_is_bootstrapped_beside_pods_of_another_object() {
    let mut scene = Scene::nothing(3);
    scene.observed.strangers.push("pod db-older".into());
    assert!(scene.plan().step.is_empty());
    assert_eq!(scene.waits(), [Reason::StrangersPresent]);
}

/// Invariant 7.
#[test]
fn invariant_7_no_pods_does_not_mean_no_cluster() {
    let mut scene = Scene::formed(&["a", "b", "c"]);
    for member in ["a", "b", "c"] {
        scene = scene.without_pod(member);
    }
    let scene = scene.silent();
    assert!(scene.plan().step.is_empty(), "{:?}", scene.plan().step);
    let problem = &scene.plan().problems[0];
    assert_eq!(problem.reason, Reason::QuorumLost);
    assert!(
        problem.message.contains("0 of 3") && problem.message.contains("EtcdRestore"),
        "{}",
        problem.message
    );
}

// ---- lost members ----

/// Invariant 5.
#[test]
fn removes_the_dead_member_before_adding_one() {
    let scene = Scene::formed(&["a", "b", "c"]).without_pod("b");
    assert_eq!(scene.changes(), [scene::remove("b")]);
    // The new member's Service is made meanwhile.
    assert_eq!(scene::reserved(&scene.plan().step.chains), [false]);
}

#[test]
fn a_pod_that_is_being_deleted_is_lost_already() {
    let scene = Scene::formed(&["a", "b", "c"]).terminating("b");
    assert_eq!(scene.changes(), [scene::remove("b")]);
}

#[test]
fn leadership_is_moved_before_a_dying_leader_is_removed() {
    let scene = Scene::formed(&["a", "b", "c"]).leader("b").terminating("b");
    let [Write::MoveLeader { from, .. }] = &scene.changes()[..] else {
        panic!("{:?}", scene.changes())
    };
    assert_eq!(from, "b");
}

#[test]
fn adds_a_learner_once_the_dead_member_is_removed() {
    let scene = Scene::formed(&["a", "c"]).size(3).reserved("d");
    assert_eq!(
        scene.changes(),
        [Write::AddMember {
            member: "d".into(),
            learner: true
        }]
    );
}

#[test]
fn starts_an_added_member_with_the_whole_list() {
    let scene = Scene::formed(&["a", "c"]).size(3).reserved("d").added("d");
    let writes = scene.writes();
    let at = writes
        .iter()
        .position(|write| scene::makes_pod(write, "d"))
        .unwrap();
    let Write::CreatePod(start) = &writes[at] else {
        unreachable!()
    };
    assert_eq!(start.state, State::Join);
    assert_eq!(
        start.initial,
        ["a".to_owned(), "c".into(), "d".into()].into()
    );
    assert!(matches!(
        &writes[at - 1],
        Write::MarkService {
            started: true,
            over: Some(_),
            ..
        }
    ));
}

#[test]
fn a_phantom_whose_service_is_gone_is_removed_and_not_started() {
    let scene = Scene::formed(&["a", "b", "c"])
        .size(4)
        .added("db-pppppppppp");
    assert_eq!(scene.changes(), [scene::remove("db-pppppppppp")]);
}

#[test]
fn a_member_this_operator_does_not_run_is_left_alone() {
    let scene = Scene::formed(&["a", "b", "c"]).size(3).added("elsewhere");
    assert_eq!(scene.changes(), [], "none of its own leaves for it");
}

#[test]
fn a_joining_member_whose_pod_was_lost_is_removed_and_not_started_again() {
    let scene = Scene::formed(&["a", "b", "c"])
        .size(4)
        .reserved("d")
        .added("d")
        .marked("d");
    assert_eq!(scene.changes(), [scene::remove("d")]);
    assert!(
        !scene
            .writes()
            .iter()
            .any(|write| scene::makes_pod(write, "d"))
    );
}

/// Invariant 4.
#[test]
fn invariant_4_a_learner_is_promoted_when_it_has_caught_up() {
    let learner = Scene::formed(&["a", "b"]).size(3).learner("d");
    assert_eq!(learner.changes(), [scene::promote("d")]);
    let behind = Scene::formed(&["a", "b"]).size(3).learner("d").behind("d");
    assert_eq!(behind.changes(), []);
    assert_eq!(behind.waits(), [Reason::LearnerCatchingUp]);
    assert!(behind.plan().requeue <= Duration::from_millis(100));
}

/// Invariant 2.
#[test]
fn invariant_2_nobody_is_promoted_while_a_voter_is_not_healthy() {
    let scene = Scene::formed(&["a", "b", "c", "e"])
        .size(5)
        .learner("d")
        .down("b");
    assert_eq!(scene.changes(), []);
    assert!(scene.waits().contains(&Reason::VoterNotHealthy));
}

/// Invariant 5.
#[test]
fn invariant_5_a_member_whose_disk_exists_gets_its_pod_back_and_stays_a_member() {
    let scene = Scene::formed(&["a", "b", "c"]).durable().without_pod("b");
    assert_eq!(scene.changes(), []);
    let [Write::CreatePod(start)] = &scene.writes()[..] else {
        panic!("{:?}", scene.writes())
    };
    assert_eq!((start.member.as_str(), start.state), ("b", State::OnDisk));
}

#[test]
fn waits_until_the_old_pod_of_a_durable_member_is_gone() {
    let scene = Scene::formed(&["a", "b", "c"]).durable().terminating("b");
    assert!(scene.plan().step.is_empty(), "{:?}", scene.plan().step);
}

/// Invariant 8.
#[test]
fn invariant_8_all_pods_come_back_on_their_disks_when_nothing_answers() {
    let mut scene = Scene::formed(&["a", "b", "c"]).durable();
    for member in ["a", "b", "c"] {
        scene = scene.without_pod(member);
    }
    let scene = scene.silent();
    assert_eq!(
        scene
            .writes()
            .iter()
            .filter(|write| matches!(write, Write::CreatePod(_)))
            .count(),
        3
    );
    assert_eq!(scene.plan().problems, []);
}

/// Invariant 1.
#[test]
fn invariant_1_without_a_list_nobody_is_removed_and_nothing_deleted() {
    let scene = Scene::formed(&["a", "b", "c"])
        .without_pod("b")
        .leftover("z")
        .silent();
    assert!(scene.plan().step.is_empty(), "{:?}", scene.plan().step);
    assert_eq!(scene.waits(), [Reason::NoQuorum]);
}

/// Invariant 1.
#[test]
fn invariant_1_the_answer_of_another_cluster_is_no_answer() {
    let mut scene = Scene::formed(&["a", "b", "c"]).without_pod("b");
    let other = Some(etcd::ClusterId(7));
    scene.observed.cluster_id = other;
    let pods = scene.observed.pods.values_mut();
    pods.for_each(|pod| pod.cluster_id = other);
    assert!(scene.plan().step.is_empty());
    assert_eq!(scene.plan().problems[0].reason, Reason::ForeignCluster);
}

/// Invariant 3.
#[test]
fn invariant_3_a_dying_member_is_not_removed_when_another_is_down() {
    let scene = Scene::formed(&["a", "b", "c"]).terminating("b").down("c");
    assert_eq!(scene.changes(), []);
    assert!(scene.waits().contains(&Reason::QuorumAtRisk));
}

// ---- what is kept ----

#[test]
fn nothing_is_done_when_all_is_as_desired() {
    let plan = Scene::formed(&["a", "b", "c"]).plan();
    assert!(
        plan.step.is_empty() && plan.waiting_for.is_empty() && plan.problems.is_empty(),
        "{plan:?}"
    );
    assert_eq!((plan.next, plan.requeue), (None, STEADY));
}

#[test]
fn deleted_services_and_the_budget_come_back() {
    let mut scene = Scene::formed(&["a", "b", "c"]);
    scene.observed.shared.headless = Kept::Missing;
    scene.observed.shared.client = Kept::Drifted;
    scene.observed.shared.budget = Kept::AsMade(1);
    scene.observed.services.remove("b");
    let writes = scene.writes();
    for write in [
        Write::ApplyHeadless,
        Write::ApplyClient { open: true },
        Write::ApplyBudget { quorum: 2 },
        Write::CreateService {
            member: "b".into(),
            started: true,
            closed: false,
        },
    ] {
        assert!(writes.contains(&write), "{write:?} in {writes:?}");
    }
}

#[test]
fn the_budget_goes_when_it_is_not_wanted() {
    let mut scene = Scene::formed(&["a", "b", "c"]);
    scene.desired.budget = false;
    assert_eq!(scene.writes(), [Write::DeleteBudget]);
    scene.observed.shared.budget = Kept::Missing;
    assert_eq!(scene.writes(), []);
}

#[test]
fn labels_follow_the_membership() {
    let mut scene = Scene::formed(&["a", "b", "c"]);
    scene.observed.pods.get_mut("b").unwrap().role = Some(crate::snapshot::Role::Learner);
    assert!(matches!(&scene.writes()[..], [Write::LabelPod(label)] if label.member == "b"));
}

#[test]
fn one_pending_pod_stops_nothing_else() {
    let mut scene = Scene::formed(&["a", "b", "c", "d", "e"])
        .not_running("a")
        .without_pod("b");
    scene.observed.pods.get_mut("a").unwrap().trouble =
        Some(Trouble::Unschedulable("no node has 64 cores".into()));
    assert_eq!(scene.changes(), [scene::remove("b")]);
    let waiting = scene.plan().waiting_for;
    assert!(
        waiting
            .iter()
            .any(|reason| reason.message.contains("no node has 64 cores")),
        "{waiting:?}"
    );
}

#[test]
fn a_pod_that_no_node_takes_is_a_problem_after_a_minute() {
    let mut scene = Scene::starting(&["a", "b", "c"]).not_running("a");
    let now = scene::at(1000);
    let pod = scene.observed.pods.get_mut("a").unwrap();
    pod.trouble = Some(Trouble::Unschedulable("no node has 64 cores".into()));
    pod.created = now - Duration::from_secs(30);
    assert_eq!(scene.plan().problems, [], "a node may be on its way");
    scene.observed.pods.get_mut("a").unwrap().created = now - Duration::from_secs(90);
    let problem = &scene.plan().problems[0];
    assert_eq!(problem.reason, Reason::Unschedulable);
    assert!(
        problem.message.contains("correct spec.pod"),
        "{}",
        problem.message
    );
}

#[test]
fn a_pod_that_takes_long_to_start_is_worth_a_word() {
    let mut scene = Scene::starting(&["a", "b", "c"])
        .not_running("a")
        .not_running("b");
    for pod in scene.observed.pods.values_mut() {
        pod.node = Some("node-0".into());
    }
    let problems = scene.plan().problems;
    assert_eq!(problems.len(), 1);
    assert_eq!(problems[0].reason, Reason::PodNotStarting);
    assert!(
        problems[0].message.starts_with("a, b: "),
        "{}",
        problems[0].message
    );
}

#[test]
fn an_image_that_does_not_exist_names_the_field() {
    let mut scene = Scene::starting(&["a", "b", "c"]).not_running("a");
    scene.observed.pods.get_mut("a").unwrap().trouble =
        Some(Trouble::Image("ErrImagePull: not found".into()));
    let problem = &scene.plan().problems[0];
    assert_eq!(problem.reason, Reason::ImageNotAvailable);
    assert!(
        problem.message.contains("spec.version"),
        "{}",
        problem.message
    );
}

// ---- hands off ----

#[test]
fn nothing_is_changed_while_paused_claimed_refused_or_deleted() {
    type Mend = fn(&mut Scene);
    let cases: [(&str, Mend); 4] = [
        ("paused", |scene| scene.desired.paused = true),
        ("claimed", |scene| {
            scene.observed.claimed_by = Some("uid".into());
        }),
        ("invalid", |scene| {
            scene.desired.invalid = Some("spec.size is 9: use 1 to 7".into());
        }),
        ("deleting", |scene| scene.observed.deleting = true),
    ];
    for (name, mend) in cases {
        for mut scene in [
            Scene::nothing(3),
            Scene::formed(&["a", "b", "c"]).without_pod("b"),
        ] {
            mend(&mut scene);
            let plan = scene.plan();
            assert!(plan.step.is_empty(), "{name}: {:?}", plan.step);
            assert!(
                !plan.waiting_for.is_empty() || !plan.problems.is_empty(),
                "{name}"
            );
        }
    }
}

#[test]
fn nothing_is_started_under_a_field_that_must_not_be_ignored() {
    for mut scene in [Scene::nothing(3), Scene::begun(&["a", "b", "c"])] {
        scene.desired.refused = Some("spec.TLS is not in effect".into());
        assert!(scene.plan().step.is_empty());
        assert_eq!(scene.plan().problems[0].reason, Reason::NotYetInEffect);
    }
    let mut running = Scene::formed(&["a", "b", "c"]).without_pod("b");
    running.desired.refused = Some("spec.TLS is not in effect".into());
    assert_eq!(
        running.changes(),
        [scene::remove("b")],
        "a cluster that runs is kept as it is"
    );
}
