//! Changes of the size or the class of volumes, and hibernation.

use std::time::Duration;

use crate::plan::tests::scene::{self, Scene};
use crate::plan::tests::writes::Write;
use crate::reason::Reason;
use crate::snapshot::{Claim, Seen, Trouble};

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

/// Three members, each with a volume of 2 GiB of the class `fast`. The spec contains the PVC `wanted`.
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
fn volumes_that_match_spec_are_unchanged() {
    let scene = three(claim("fast", 2));
    assert_eq!((scene.writes(), scene.changes()), (vec![], vec![]));
    let any = Claim {
        class: None,
        ..claim("", 2)
    };
    assert_eq!(
        three(any).changes(),
        [],
        "without a StorageClass in the spec, every class must match"
    );
}

#[test]
fn larger_storage_request_expands_all_volumes_in_place() {
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
fn new_storage_class_or_smaller_request_replaces_members() {
    for wanted in [claim("slow", 2), claim("fast", 1)] {
        let scene = three(wanted.clone());
        assert!(matches!(&scene.changes()[..], [Write::MoveLeader { from, .. }] if from == "a"));
        let scene = scene.leader("c");
        assert_eq!(scene.changes(), [scene::remove("a")]);
        assert_eq!(grown(&scene), Vec::<String>::new());
        // The replacement `d` is still a learner. The operator promotes `d` before it replaces the next member.
        let mut joins = three(wanted.clone()).learner("d").size(4);
        joins
            .observed
            .disks
            .insert("d".into(), joins.observed.disks["a"].clone());
        joins.observed.disks.get_mut("d").unwrap().claim = wanted;
        assert_eq!(joins.changes(), [scene::promote("d")]);
    }
}

#[test]
fn invariant_3_no_volume_is_replaced_while_member_is_down() {
    let scene = three(claim("slow", 2)).leader("c").down("b");
    assert_eq!(scene.changes(), []);
    assert!(scene.waits().contains(&Reason::QuorumAtRisk));
}

#[test]
fn member_without_volume_is_replaced_if_spec_requests_volumes() {
    let mut scene = Scene::formed(&["a", "b", "c"]).leader("c");
    scene = scene.asks_for_volumes();
    scene.desired.claim = Some(claim("fast", 2));
    assert_eq!(scene.changes(), [scene::remove("a")]);
}

/// Kubernetes needs some seconds for each new volume, so the operator reports no problem in the first minute.
#[test]
fn volume_that_is_not_created_is_reported_after_a_minute() {
    let text = "0/3 nodes are available: pod has unbound immediate PersistentVolumeClaims";
    let after = |seconds: u64, class: Option<&str>| {
        let members = ["a", "b", "c"];
        let scene = Scene::starting(&members).durable();
        let mut scene = members.into_iter().fold(scene, Scene::not_running);
        let requested = Claim {
            class: class.map(str::to_owned),
            capacity: None,
            ..claim("", 2)
        };
        scene.desired.claim = Some(requested.clone());
        for pod in scene.observed.pods.values_mut() {
            pod.trouble = Some(Trouble::Unschedulable(text.into()));
            pod.created = scene::at(1000) - Duration::from_secs(seconds);
        }
        for disk in scene.observed.disks.values_mut() {
            disk.claim = requested.clone();
        }
        let plan = scene.plan();
        let warns = plan.waiting_for.iter().any(|it| it.reason.warns_of_wait());
        assert!(!warns, "{:?}", plan.waiting_for);
        plan.problems
    };
    assert_eq!(after(30, Some("fast")), []);
    for (class, part) in [
        (Some("fast"), "StorageClass fast does not exist"),
        (None, "has no StorageClass"),
    ] {
        let problems = after(90, class);
        assert_eq!(problems[0].reason, Reason::StorageMissing);
        assert!(problems[0].message.contains(part), "{problems:?}");
    }
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
fn hibernation_deletes_only_pods() {
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

#[test]
fn invariant_8_members_return_from_hibernation_on_their_volumes() {
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

#[test]
fn invariant_9_hibernation_is_refused_if_member_would_lose_data() {
    let plain = asleep(Scene::formed(&["a", "b", "c"]));
    assert_eq!(plain.writes(), []);
    assert_eq!(plain.plan().problems[0].reason, Reason::HibernationRefused);
    let going = asleep(three(claim("fast", 2)).claim_deleted("b"));
    assert_eq!(going.plan().problems[0].reason, Reason::HibernationRefused);
    assert_eq!(
        going.changes(),
        [scene::remove("b")],
        "the operator must replace the member with the deleted PVC before the hibernation"
    );
}

#[test]
fn hibernating_cluster_does_not_begin_bootstrap() {
    let scene = asleep(Scene::nothing(3));
    assert_eq!(
        (scene.writes(), scene.waits()),
        (vec![], vec![Reason::Hibernated])
    );
    let begun = asleep(Scene::begun(&["a", "b", "c"]));
    assert_ne!(
        begun.writes(),
        [],
        "a recorded bootstrap must be completed before the hibernation"
    );
}

#[test]
fn paused_or_restoring_cluster_does_not_hibernate() {
    let mut paused = asleep(three(claim("fast", 2)));
    paused.desired.paused = true;
    assert_eq!(paused.writes(), []);
    let mut claimed = asleep(three(claim("fast", 2)));
    claimed.observed.claimed_by = Some("restore".into());
    assert_eq!(claimed.writes(), []);
    claimed.observed.members = Seen::Unknown("no quorum".into());
    assert_eq!(claimed.writes(), []);
}
