//! Scenarios for the planner. Each test builds an observed state in a few lines and checks the plan.

mod actions;
mod adoption;
mod backed_up;
mod by_hand;
mod deletion;
mod disks;
mod drain;
mod fate;
mod found;
mod identity;
mod issued;
mod joining;
mod kept_volumes;
mod log;
mod losses;
mod pinned;
mod recovered;
mod recovery;
mod replacing;
mod retained;
mod rollback;
mod rolling;
pub(crate) mod scene;
#[path = "../../tests/model/sent.rs"]
pub(crate) mod sent;
mod settings;
mod sidecars;
mod sizes;
mod switch;
mod tls;
mod under_way;
mod upkeep;
#[path = "../../tests/model/writes.rs"]
pub(crate) mod writes;

use std::time::Duration;

use crate::plan::STEADY;
use crate::plan::State;
use crate::plan::tests::writes::Write;
use crate::reason::Reason;
use crate::snapshot::{Kept, Trouble};

use scene::Scene;

// ---- bootstrap of a new cluster ----

#[test]
fn invariant_10_bootstrap_records_members_before_creating_objects() {
    let plan = Scene::nothing(3).plan();
    let chains = plan.step.chains.clone();
    assert_eq!(scene::begun(&chains), Some((3, "1")));
    assert_eq!(chains.len(), 1);
    assert_eq!(plan.step.change, None);
}

#[test]
fn bootstrap_mode_seed_records_one_member() {
    let mut scene = Scene::nothing(3);
    scene.desired.first = 1;
    let chains = scene.plan().step.chains;
    assert_eq!(scene::begun(&chains), Some((1, "1")));
    assert_eq!(chains.len(), 1);
}

#[test]
fn bootstrap_creates_service_before_pod_of_each_member() {
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
fn bootstrap_services_get_endpoints_when_pods_run_or_after_time_limit() {
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
    // After a time limit, the operator lets the Services select their pods, even if no etcd container runs yet.
    let slow = young.aged();
    assert_eq!(opened(&slow), [true; 3]);
}

#[test]
fn client_service_gets_endpoints_after_cluster_id_is_recorded() {
    let writes = Scene::begun(&["a", "b", "c"]).writes();
    assert!(writes.contains(&Write::ApplyClient { open: false }));
    let mut formed = Scene::formed(&["a", "b", "c"]);
    formed.observed.shared.client = Kept::AsMade(false);
    assert!(formed.writes().contains(&Write::ApplyClient { open: true }));
}

#[test]
fn cluster_id_is_recorded_when_quorum_answers() {
    let mut scene = Scene::formed(&["a", "b", "c"]).without_pod("c");
    scene.observed.cluster_id = None;
    assert!(matches!(scene.writes()[0], Write::RecordClusterId { .. }));
}

#[test]
fn invariant_6_bootstrap_member_without_data_is_not_restarted() {
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
fn bootstrap_that_lost_quorum_restarts_with_new_names() {
    let scene = Scene::starting(&["a", "b", "c"])
        .without_pod("a")
        .without_pod("b");
    let chains = scene.plan().step.chains;
    assert_eq!(scene::begun(&chains), Some((3, "1")));
    assert_eq!(chains.len(), 1);
    assert_eq!(scene.waits(), [Reason::BootstrapAbandoned]);
}

#[test]
fn stuck_bootstrap_restarts_if_spec_names_another_image() {
    let mut scene = Scene::starting(&["a", "b", "c"])
        .not_running("a")
        .not_running("b")
        .not_running("c");
    scene.desired.image = "etcd:v3.6.17".into();
    assert_eq!(scene.waits(), [Reason::BootstrapAbandoned]);
}

#[test]
fn pods_of_abandoned_bootstrap_are_deleted() {
    let mut scene = Scene::starting(&["a", "b", "c"]);
    scene.observed.intent.as_mut().unwrap().members = ["x".into(), "y".into(), "z".into()].into();
    for pod in scene.observed.pods.values_mut() {
        pod.token = Some("older".into());
    }
    assert!(scene.writes().contains(&scene::delete_pod("a")));
}

#[test]
fn invariant_7_lost_status_is_restored_from_existing_objects() {
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

#[test]
fn invariant_7_pods_of_another_owner_prevent_bootstrap() {
    let mut scene = Scene::nothing(3);
    scene.observed.strangers.push("pod db-older".into());
    assert!(scene.plan().step.is_empty());
    assert_eq!(scene.waits(), [Reason::StrangersPresent]);
}

#[test]
fn invariant_7_formed_cluster_without_pods_is_not_bootstrapped() {
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

/// Invariant 5: the operator removes a dead member from etcd before it adds another member.
#[test]
fn dead_member_is_removed_before_replacement_is_added() {
    let scene = Scene::formed(&["a", "b", "c"]).without_pod("b");
    assert_eq!(scene.changes(), [scene::remove("b")]);
    // The operator creates the Service of the replacement before etcd has removed the dead member.
    assert_eq!(scene::reserved(&scene.plan().step.chains), [false]);
}

#[test]
fn member_with_terminating_pod_and_no_volume_is_removed() {
    let scene = Scene::formed(&["a", "b", "c"]).terminating("b");
    assert_eq!(scene.changes(), [scene::remove("b")]);
}

#[test]
fn leadership_moves_before_terminating_leader_is_removed() {
    let scene = Scene::formed(&["a", "b", "c"]).leader("b").terminating("b");
    let [Write::MoveLeader { from, .. }] = &scene.changes()[..] else {
        panic!("{:?}", scene.changes())
    };
    assert_eq!(from, "b");
}

#[test]
fn replacement_of_removed_member_joins_as_learner() {
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
fn joining_member_starts_with_complete_member_list() {
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
fn never_started_member_without_service_is_removed() {
    let scene = Scene::formed(&["a", "b", "c"])
        .size(4)
        .added("db-pppppppppp");
    assert_eq!(scene.changes(), [scene::remove("db-pppppppppp")]);
}

#[test]
fn member_added_by_other_software_is_not_removed() {
    let scene = Scene::formed(&["a", "b", "c"]).size(3).added("elsewhere");
    assert_eq!(
        scene.changes(),
        [],
        "the operator must remove neither the external member nor another member"
    );
}

#[test]
fn joining_member_without_pod_and_volume_is_removed() {
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

#[test]
fn invariant_4_learner_is_promoted_only_after_catching_up() {
    let learner = Scene::formed(&["a", "b"]).size(3).learner("d");
    assert_eq!(learner.changes(), [scene::promote("d")]);
    let behind = Scene::formed(&["a", "b"]).size(3).learner("d").behind("d");
    assert_eq!(behind.changes(), []);
    assert_eq!(behind.waits(), [Reason::LearnerCatchingUp]);
    assert!(behind.plan().requeue <= Duration::from_millis(100));
}

#[test]
fn invariant_2_learner_is_not_promoted_while_voter_is_unhealthy() {
    let scene = Scene::formed(&["a", "b", "c", "e"])
        .size(5)
        .learner("d")
        .down("b");
    assert_eq!(scene.changes(), []);
    assert!(scene.waits().contains(&Reason::VoterNotHealthy));
}

#[test]
fn invariant_5_lost_pod_is_recreated_on_its_volume() {
    let scene = Scene::formed(&["a", "b", "c"]).durable().without_pod("b");
    assert_eq!(scene.changes(), []);
    let [Write::CreatePod(start)] = &scene.writes()[..] else {
        panic!("{:?}", scene.writes())
    };
    assert_eq!((start.member.as_str(), start.state), ("b", State::OnDisk));
}

#[test]
fn terminating_pod_is_not_recreated_before_it_is_deleted() {
    let scene = Scene::formed(&["a", "b", "c"]).durable().terminating("b");
    assert!(scene.plan().step.is_empty(), "{:?}", scene.plan().step);
}

#[test]
fn invariant_8_all_lost_pods_are_recreated_on_their_volumes() {
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

#[test]
fn invariant_1_nothing_is_deleted_without_member_list() {
    let scene = Scene::formed(&["a", "b", "c"])
        .without_pod("b")
        .leftover("z")
        .silent();
    assert!(scene.plan().step.is_empty(), "{:?}", scene.plan().step);
    assert_eq!(scene.waits(), [Reason::NoQuorum]);
}

#[test]
fn invariant_1_answers_of_another_cluster_change_nothing() {
    let mut scene = Scene::formed(&["a", "b", "c"]).without_pod("b");
    let other = Some(etcd::ClusterId(7));
    scene.observed.cluster_id = other;
    let pods = scene.observed.pods.values_mut();
    pods.for_each(|pod| pod.cluster_id = other);
    assert!(scene.plan().step.is_empty());
    assert_eq!(scene.plan().problems[0].reason, Reason::ForeignCluster);
}

#[test]
fn invariant_3_member_with_terminating_pod_is_kept_while_another_is_down() {
    let scene = Scene::formed(&["a", "b", "c"]).terminating("b").down("c");
    assert_eq!(scene.changes(), []);
    assert!(scene.waits().contains(&Reason::QuorumAtRisk));
}

// ---- Services and PodDisruptionBudget ----

#[test]
fn converged_cluster_needs_no_action() {
    let plan = Scene::formed(&["a", "b", "c"]).plan();
    assert!(
        plan.step.is_empty() && plan.waiting_for.is_empty() && plan.problems.is_empty(),
        "{plan:?}"
    );
    assert_eq!((plan.next, plan.requeue), (None, STEADY));
}

#[test]
fn missing_or_drifted_services_and_budget_are_repaired() {
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
fn disruption_budget_is_deleted_if_spec_disables_it() {
    let mut scene = Scene::formed(&["a", "b", "c"]);
    scene.desired.budget = false;
    assert_eq!(scene.writes(), [Write::DeleteBudget]);
    scene.observed.shared.budget = Kept::Missing;
    assert_eq!(scene.writes(), []);
}

#[test]
fn pod_label_is_corrected_to_role_in_etcd() {
    let mut scene = Scene::formed(&["a", "b", "c"]);
    scene.observed.pods.get_mut("b").unwrap().role = Some(crate::snapshot::Role::Learner);
    assert!(matches!(&scene.writes()[..], [Write::LabelPod(label)] if label.member == "b"));
}

#[test]
fn pending_pod_does_not_delay_removal_of_dead_member() {
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
fn unschedulable_pod_is_reported_after_a_minute() {
    let mut scene = Scene::starting(&["a", "b", "c"]).not_running("a");
    let now = scene::at(1000);
    let pod = scene.observed.pods.get_mut("a").unwrap();
    pod.trouble = Some(Trouble::Unschedulable("no node has 64 cores".into()));
    pod.created = now - Duration::from_secs(30);
    assert_eq!(
        scene.plan().problems,
        [],
        "no problem may be reported yet, because an autoscaler may still be adding a node"
    );
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
fn pods_that_do_not_start_are_reported() {
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
fn missing_image_is_reported_with_spec_field() {
    let mut scene = Scene::starting(&["a", "b", "c"]).not_running("a");
    scene.observed.pods.get_mut("a").unwrap().trouble =
        Some(Trouble::Image("ErrImagePull: not found".into()));
    let problem = |scene: &Scene| scene.plan().problems[0].clone();
    let tagged = problem(&scene);
    assert_eq!(tagged.reason, Reason::ImageNotAvailable);
    let remedy = "correct spec.version or spec.repository";
    assert!(tagged.message.contains(remedy), "{}", tagged.message);
    scene.desired.object.spec.image = Some("etcd@sha256:ab".to_owned());
    let pinned = problem(&scene).message;
    let remedy = "correct spec.version or spec.image";
    assert!(pinned.contains(remedy), "{pinned}");
}

// ---- clusters that the operator must not change ----

#[test]
fn paused_restoring_invalid_or_deleting_cluster_is_not_changed() {
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
fn field_not_yet_in_effect_prevents_bootstrap_but_not_repair() {
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
        "a running cluster must still be repaired"
    );
}
