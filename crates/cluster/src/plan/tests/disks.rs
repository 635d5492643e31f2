//! Volumes that are to be larger, smaller or of another class, and hibernation.

use crate::plan::tests::scene::{self, Scene};
use crate::reason::Reason;
use crate::snapshot::{Claim, Seen};
use crate::write::Write;

const GI: u64 = 1 << 30;

fn claim(class: &str, gi: u64) -> Claim {
    Claim {
        class: Some(class.to_owned()),
        requested: Some(gi * GI),
        text: format!("{gi}Gi"),
        capacity: Some(gi * GI),
        resizing: None,
    }
}

/// Three members on 2 GiB of the class `fast` each, and what the spec asks for.
fn three(wanted: Claim) -> Scene {
    let mut scene = Scene::formed(&["a", "b", "c"]).durable();
    scene.desired.claim = Some(wanted);
    for disk in scene.observed.disks.values_mut() {
        disk.claim = claim("fast", 2);
    }
    scene
}

fn grown(scene: &Scene) -> Vec<String> {
    let writes = scene.writes().into_iter();
    let grown = writes.filter_map(|write| match write {
        Write::GrowDisk { member, size, .. } => Some(format!("{member} {size}")),
        _ => None,
    });
    grown.collect()
}

#[test]
fn volumes_that_are_as_the_spec_asks_for_are_left_alone() {
    let scene = three(claim("fast", 2));
    assert_eq!((scene.writes(), scene.changes()), (vec![], vec![]));
    let any = Claim {
        class: None,
        ..claim("", 2)
    };
    assert_eq!(three(any).changes(), [], "the class is Kubernetes' choice");
}

#[test]
fn a_larger_request_grows_every_volume_and_restarts_nobody() {
    let mut scene = three(claim("fast", 3));
    assert_eq!(grown(&scene), ["a 3Gi", "b 3Gi", "c 3Gi"]);
    assert_eq!(scene.changes(), []);
    for disk in scene.observed.disks.values_mut() {
        disk.claim.requested = Some(3 * GI);
        disk.claim.resizing = Some("FileSystemResizePending waiting for the node".into());
    }
    assert_eq!(scene.writes(), []);
    let waits = scene.plan().waiting_for;
    assert_eq!(waits.len(), 3);
    assert_eq!(waits[0].reason, Reason::VolumeGrowing);
    assert!(
        waits[0]
            .message
            .contains("from 2Gi to 3Gi: FileSystemResizePending")
    );
}

#[test]
fn another_class_or_a_smaller_size_replaces_members_one_by_one_the_leader_after_handing_over() {
    for wanted in [claim("slow", 2), claim("fast", 1)] {
        let scene = three(wanted.clone());
        assert!(matches!(&scene.changes()[..], [Write::MoveLeader { from, .. }] if from == "a"));
        let scene = scene.leader("c");
        assert_eq!(scene.changes(), [scene::remove("a")]);
        assert_eq!(grown(&scene), Vec::<String>::new());
        // The next waits for the one that follows.
        let mut joins = three(wanted.clone()).learner("d").size(4);
        joins
            .observed
            .disks
            .insert("d".into(), joins.observed.disks["a"].clone());
        joins.observed.disks.get_mut("d").unwrap().claim = wanted;
        assert_eq!(joins.changes(), [scene::promote("d")]);
    }
}

/// Invariant 3.
#[test]
fn invariant_3_no_volume_is_changed_for_another_while_a_member_is_down() {
    let scene = three(claim("slow", 2)).leader("c").down("b");
    assert_eq!(scene.changes(), []);
    assert!(scene.waits().contains(&Reason::QuorumAtRisk));
}

#[test]
fn a_member_without_a_volume_is_replaced_when_the_spec_asks_for_one() {
    let mut scene = Scene::formed(&["a", "b", "c"]).leader("c");
    scene.desired.durable = true;
    scene.desired.claim = Some(claim("fast", 2));
    assert_eq!(scene.changes(), [scene::remove("a")]);
}

// ---- hibernation ----

fn asleep(mut scene: Scene) -> Scene {
    scene.desired.hibernate = true;
    scene
}

fn stopped(scene: Scene) -> Scene {
    ["a", "b", "c"]
        .iter()
        .fold(scene, |scene, member| scene.without_pod(member))
        .silent()
}

#[test]
fn a_cluster_that_hibernates_has_its_pods_deleted_and_nothing_else() {
    let scene = asleep(three(claim("fast", 2)));
    let pods = ["a", "b", "c"].map(scene::delete_pod);
    assert_eq!(scene.writes(), pods);
    assert_eq!(
        (scene.changes(), scene.waits()),
        (vec![], vec![Reason::Hibernating])
    );
    let gone = stopped(scene);
    assert_eq!(gone.writes(), []);
    assert_eq!(gone.waits(), [Reason::Hibernated]);
    assert_eq!(gone.plan().problems, []);
}

/// Invariant 8.
#[test]
fn invariant_8_the_same_members_come_back_from_hibernation_on_their_disks() {
    let mut scene = stopped(asleep(three(claim("fast", 2))));
    scene.desired.hibernate = false;
    let writes = scene.writes();
    for member in ["a", "b", "c"] {
        let made = |write: &Write| scene::makes_pod(write, member);
        assert!(writes.iter().any(made), "{member}: {writes:?}");
    }
    assert!(
        !writes
            .iter()
            .any(|write| matches!(write, Write::CreateDisk(_)))
    );
}

/// Invariant 9.
#[test]
fn invariant_9_no_member_is_stopped_that_would_lose_its_data() {
    let plain = asleep(Scene::formed(&["a", "b", "c"]));
    assert_eq!(plain.writes(), []);
    assert_eq!(plain.plan().problems[0].reason, Reason::HibernationRefused);
    let going = asleep(three(claim("fast", 2)).claim_deleted("b"));
    assert_eq!(going.plan().problems[0].reason, Reason::HibernationRefused);
    assert_eq!(
        going.changes(),
        [scene::remove("b")],
        "it is replaced first"
    );
}

#[test]
fn a_cluster_that_was_never_formed_does_not_begin_while_it_hibernates() {
    let scene = asleep(Scene::nothing(3));
    assert_eq!(
        (scene.writes(), scene.waits()),
        (vec![], vec![Reason::Hibernated])
    );
    let begun = asleep(Scene::begun(&["a", "b", "c"]));
    assert_ne!(begun.writes(), [], "a bootstrap goes to its end first");
}

#[test]
fn nothing_is_stopped_while_the_cluster_is_paused_or_being_restored() {
    let mut paused = asleep(three(claim("fast", 2)));
    paused.desired.paused = true;
    assert_eq!(paused.writes(), []);
    let mut claimed = asleep(three(claim("fast", 2)));
    claimed.observed.claimed_by = Some("restore".into());
    assert_eq!(claimed.writes(), []);
    claimed.observed.members = Seen::Unknown("no quorum".into());
    assert_eq!(claimed.writes(), []);
}
