//! Scaling up and down, including changes of the size in the spec during the scaling.

use crate::plan::tests::scene::{self, Scene};
use crate::plan::tests::writes::Write;
use crate::reason::Reason;
use crate::snapshot::Claim;

#[test]
fn learners_join_concurrently_since_etcd_3_6() {
    let scene = Scene::formed(&["a"]).size(3).reserved("d").reserved("e");
    assert_eq!(scene.changes().len(), 2);
    let old = Scene::formed(&["a"])
        .size(3)
        .reserved("d")
        .version("3.5.35");
    assert_eq!(old.changes().len(), 1);
}

#[test]
fn members_join_as_voters_before_etcd_3_4() {
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
fn all_members_are_added_before_their_pods_are_created() {
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
fn members_are_added_after_voters_were_connected_for_five_seconds() {
    let scene = Scene::formed(&["a", "b"]).size(3).reserved("d").young("a");
    assert_eq!(scene.changes(), []);
    assert_eq!(scene.waits(), [Reason::VotersConnecting]);
    let alone = Scene::formed(&["a"]).size(2).reserved("d").young("a");
    assert_eq!(
        alone.changes().len(),
        1,
        "a single voter has no connection to wait for"
    );
}

#[test]
fn scale_down_removes_newest_member_except_leader() {
    let scene = Scene::formed(&["a", "b", "c"]).size(2).leader("c");
    assert_eq!(scene.changes(), [scene::remove("b")]);
}

#[test]
fn scale_down_removes_learner_or_unhealthy_member_first() {
    let unhealthy = Scene::formed(&["a", "b", "c", "d", "e"])
        .size(4)
        .leader("e")
        .down("a");
    assert_eq!(unhealthy.changes(), [scene::remove("a")]);
    let learner = Scene::formed(&["a", "b", "c"]).size(3).learner("d");
    assert_eq!(learner.changes(), [scene::remove("d")]);
}

#[test]
fn invariant_3_scale_down_waits_while_quorum_is_at_risk() {
    let scene = Scene::formed(&["a", "b", "c", "d"])
        .size(3)
        .down("b")
        .silent_voter("c")
        .down("d");
    assert_eq!(scene.changes(), []);
    assert!(scene.waits().contains(&Reason::QuorumAtRisk));
}

#[test]
fn size_reduced_during_scale_up_removes_learners() {
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
fn pod_of_removed_member_is_deleted() {
    let scene = Scene::formed(&["a", "b", "c"]).leftover("z");
    assert_eq!(scene.writes(), [scene::delete_pod("z")]);
}

#[test]
fn pod_with_id_of_another_cluster_is_kept_and_reported() {
    let mut scene = Scene::formed(&["a", "b", "c"]).leftover("z");
    scene.observed.pods.get_mut("z").unwrap().cluster_id = Some(etcd::ClusterId(7));
    assert_eq!(scene.writes(), []);
    assert_eq!(scene.plan().problems[0].reason, Reason::ForeignObjects);
}

#[test]
fn unused_member_service_is_deleted_if_cluster_has_full_size() {
    let scene = Scene::formed(&["a", "b", "c"]).reserved("d");
    assert!(matches!(&scene.writes()[..], [Write::DeleteService { member, .. }] if member == "d"));
}

// ---- bootstrap with a seed, and changes of the size ----

#[test]
fn bootstrap_mode_seed_adds_learners_up_to_desired_size() {
    let seed = |mut scene: Scene| {
        scene.desired.first = 1;
        scene.size(3)
    };
    // In the bootstrap mode `Seed`, the operator records and starts one member, which forms the cluster alone.
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
    // After both new members have Services, they join as learners in one step. With a single voter, etcd does not
    // require connections that are five seconds old.
    let alone = seed(Scene::formed(&["a"]).young("a"));
    assert_eq!(scene::reserved(&alone.plan().step.chains), [true, true]);
    let grows = seed(Scene::formed(&["a"]).young("a").reserved("d").reserved("e"));
    assert_eq!(grows.changes().len(), 2);
    // If the bootstrap of the seed fails, the operator starts another bootstrap with one member.
    let lost = seed(Scene::starting(&["a"]).without_pod("a"));
    let chains = lost.plan().step.chains;
    assert_eq!(scene::begun(&chains), Some((1, "1")));
    assert_eq!(chains.len(), 1);
}

#[test]
fn bootstrap_restarts_if_bootstrap_mode_changes() {
    let mut all = Scene::starting(&["a", "b", "c"])
        .not_running("a")
        .not_running("b")
        .not_running("c");
    assert_ne!(all.waits(), [Reason::BootstrapAbandoned]);
    all.desired.first = 1;
    assert_eq!(all.waits(), [Reason::BootstrapAbandoned]);
}

/// The StorageClass of a PVC cannot be changed, so the corrected class needs new PVCs and a new bootstrap. A bootstrap
/// with an existing volume continues, because the volume may contain data of a member that has started.
#[test]
fn bootstrap_restarts_if_storage_class_of_unbound_pvc_is_corrected() {
    let claim = |class: &str, capacity: Option<u64>| Claim {
        class: Some(class.to_owned()),
        requested: Some(1 << 30),
        text: "1Gi".to_owned(),
        capacity,
        resizing: None,
    };
    let scene = |wanted: &str, capacity| {
        let scene = Scene::starting(&["a", "b", "c"]).durable();
        let mut scene = scene.not_running("a").not_running("b").not_running("c");
        scene.desired.claim = Some(claim(wanted, None));
        for disk in scene.observed.disks.values_mut() {
            disk.claim = claim("missing", capacity);
        }
        scene
    };
    assert_eq!(
        scene("standard", None).waits(),
        [Reason::BootstrapAbandoned]
    );
    for kept in [scene("missing", None), scene("standard", Some(1 << 30))] {
        assert_ne!(kept.waits(), [Reason::BootstrapAbandoned]);
    }
    // The operator does not restart the bootstrap, because a quorum of the first members runs and may form a cluster at
    // any moment.
    let mut running = scene("standard", None);
    for member in ["a", "b"] {
        running.observed.pods.get_mut(member).unwrap().running = true;
    }
    assert_ne!(running.waits(), [Reason::BootstrapAbandoned]);
}

#[test]
fn size_below_number_of_voters_removes_learners_first() {
    let scene = Scene::formed(&["a", "b", "c", "e", "f"])
        .size(3)
        .learner("g")
        .reserved("h")
        .added("h");
    let [Write::Remove { member, .. }] = &scene.changes()[..] else {
        panic!("{:?}", scene.changes())
    };
    assert!(member == "g" || member == "h", "{member}");
    // The member to be removed gets no pod, because the cluster no longer needs the member.
    assert!(
        !scene
            .writes()
            .iter()
            .any(|write| scene::makes_pod(write, member))
    );
}

#[test]
fn cluster_scales_to_even_sizes() {
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
    // The operator removes neither of two members while one of them is down.
    let down = Scene::formed(&["a", "b"])
        .size(1)
        .leader("a")
        .silent_voter("a")
        .down("b");
    assert_eq!(down.changes(), []);
}

/// A joining member sends requests to the other members before it answers requests. Two members that start together
/// would wait for each other.
#[test]
fn services_of_joining_members_get_endpoints_after_first_requests() {
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
    // The containers run, but only an answer of etcd's health listener shows that a member has finished its first
    // requests.
    assert_eq!(opened(&scene), [false; 2]);
    let half = scene.clone().follows("d");
    assert_eq!(opened(&half), [false; 2]);
    assert_eq!(opened(&half.clone().follows("e")), [true; 2]);
    // The Service of learner `d` has no endpoints, so the operator does not promote `d`.
    let mut unfound = Scene::formed(&["a"]).size(3).learner("d").follows("d");
    unfound.observed.services.get_mut("d").unwrap().closed = true;
    assert_eq!(unfound.changes(), []);
    // If the operator cannot reach the health listeners, the Services get endpoints two seconds after the start of the
    // containers.
    let ran = |mut scene: Scene, seconds: i64| {
        for member in ["d", "e"] {
            let pod = scene.observed.pods.get_mut(member).unwrap();
            pod.running_since = Some(scene::at(1000 - seconds));
        }
        scene
    };
    assert_eq!(opened(&ran(scene.clone(), 1)), [false; 2]);
    assert_eq!(opened(&ran(scene.clone(), 2)), [true; 2]);
    // The pod of `e` does not start, and delays the endpoints of `d` only until the time limit.
    let half = half.not_running("e");
    assert_eq!(opened(&half), [false; 2]);
    assert_eq!(opened(&half.aged()), [true; 2]);
    // A member that joins alone has a Service with endpoints from the beginning, and so has every member that joins
    // several voters.
    for (voters, size) in [(&["a"][..], 2), (&["a", "b", "c"], 5)] {
        let chains = Scene::formed(voters).size(size).plan().step.chains;
        let reserved = scene::reserved(&chains);
        assert!(!reserved.is_empty() && !reserved.contains(&true));
    }
}
