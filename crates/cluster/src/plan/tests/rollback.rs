//! Rolling updates that fail: rollbacks, and members that no image can start.

use super::rolling::{one, patched, towards};
use super::scene::{self, Scene};
use crate::plan::tests::writes::Write;
use crate::reason::Reason;
use crate::snapshot::{Cause, Changed};

/// Regression: the user rolled back after the old container had ended and before the new container started. The kubelet
/// counted no restart, so the operator never completed the rollback.
#[test]
fn rollback_before_first_start_records_lower_restart_count() {
    let scene = towards("3.6.16", "3.6.16").changed("b", "3.6.16", "3.7.3");
    let writes = scene.writes();
    let back = writes.iter().find_map(|write| match write {
        Write::PatchImage { changed, .. } => Some(changed.restarts),
        _ => None,
    });
    assert_eq!(back, Some(-1));
}

/// Regression: the broken member blocks all other steps, so the operator must roll it back first.
#[test]
fn broken_member_is_rolled_back_before_scale_up() {
    let scene = Scene::formed(&["a", "b", "c"])
        .all_run("3.5.35")
        .wants("3.5.35");
    let scene = scene.changed("b", "3.5.35", "3.6.99").image_missing("b");
    let scene = scene.size(4).reserved("d");
    assert!(
        scene.waits().contains(&Reason::VoterNotHealthy),
        "{:?}",
        scene.waits()
    );
    assert_eq!(patched(&scene), one("b", "3.5.35"));
    let step = scene.drained().built().step;
    let changes = step.change.iter().flat_map(|change| &change.chain);
    let mut actions = step.chains.iter().flatten().chain(changes);
    assert!(actions.any(|action| action.text == "set the image of b to etcd:v3.5.35"));
}

/// Regression: the spec required the replacement of a member that was down, but the operator replaces no member while a
/// member is down. The rollback of the image ends this deadlock.
#[test]
fn broken_member_is_rolled_back_before_volume_replacement() {
    let scene = towards("3.5.35", "3.5.35").compared().durable();
    let mut scene = scene.changed("b", "3.5.35", "3.6.99").image_missing("b");
    let slow = crate::snapshot::Claim {
        class: Some("slow".into()),
        requested: Some(1),
        text: "1".into(),
        capacity: Some(1),
        resizing: None,
    };
    for disk in scene.observed.disks.values_mut() {
        disk.claim.class = Some("fast".into());
    }
    scene.desired.claim = Some(slow);
    assert!(
        scene.waits().contains(&Reason::QuorumAtRisk),
        "{:?}",
        scene.waits()
    );
    assert_eq!(patched(&scene), one("b", "3.5.35"));
}

/// Regression: the operator waited forever for a member with data that no image of its minor release can read.
#[test]
fn member_with_data_unreadable_by_its_minor_release_is_replaced() {
    let broken = |from: &str| {
        let scene = towards("3.6.16", "3.6.16").changed("b", from, "3.6.16");
        scene.crashes("b", Cause::Data("walpb: crc mismatch".into()), 2, 20)
    };
    assert_eq!(
        broken("3.5.35").changes(),
        [],
        "the member must be kept, because the previous minor release may read its data"
    );
    // The operator replaces the member, because all patch releases of etcd 3.6 use the same data format: if one release
    // cannot read the data, no other can.
    assert_eq!(broken("3.6.9").changes(), [scene::remove("b")]);
    assert_eq!(broken("3.6.16").changes(), [scene::remove("b")]);
}

/// Regression: the operator waited forever for a member whose data was damaged before its rollback to the minor release
/// of the other members.
#[test]
fn member_with_data_unreadable_by_both_minor_releases_is_replaced() {
    let damaged = || Cause::Data("walpb: crc mismatch".into());
    let scene = towards("3.5.35", "3.5.35").runs("b", "3.6.16");
    let scene = scene.crashes("b", damaged(), 1, 20);
    // The operator first corrects the image, because the image may be the reason why the data is unreadable.
    assert_eq!(patched(&scene), one("b", "3.5.35"));
    let noted = |scene: &Scene| {
        let writes = scene.writes();
        writes.iter().find_map(|write| match write {
            Write::PatchImage { changed, .. } => Some(changed.unreadable),
            _ => None,
        })
    };
    assert_eq!(noted(&scene), Some(true));
    let failed = |cause: Cause| {
        let scene = towards("3.5.35", "3.5.35").runs("b", "3.6.16");
        noted(&scene.crashes("b", cause, 1, 20))
    };
    assert_eq!(failed(Cause::Failed("exit code 1".into())), Some(false));
    let set_back = |unreadable: bool, restarts: i32| {
        let mut scene = towards("3.5.35", "3.5.35").changed("b", "3.6.16", "3.5.35");
        let pod = scene.observed.pods.get_mut("b").unwrap();
        let changed = pod.changed.as_mut().unwrap();
        (changed.restarts, changed.unreadable) = (1, unreadable);
        scene.crashes("b", damaged(), restarts, 20).changes()
    };
    assert_eq!(
        set_back(true, 4),
        [],
        "the member must be kept, because the new image has tried to read its data at most twice"
    );
    assert_eq!(set_back(true, 5), [scene::remove("b")]);
    assert_eq!(
        set_back(false, 9),
        [],
        "the member must be kept, because the previous image could read the data"
    );
}

/// Kubernetes reports the last exit of the old container until the new container has exited.
#[test]
fn exit_of_container_with_previous_image_replaces_no_member() {
    let damaged = || Cause::Data("the database file cannot be read".into());
    let scene = towards("3.5.35", "3.5.35").runs("b", "3.6.16");
    let scene = scene.crashes("b", damaged(), 1, 20);
    let writes = scene.writes();
    let noted = writes.iter().find_map(|write| match write {
        Write::PatchImage { changed, .. } => Some(changed.clone()),
        _ => None,
    });
    let noted = noted.unwrap();
    assert!(noted.unreadable);
    let started = |restarts: i32| {
        let scene = towards("3.5.35", "3.5.35").changed("b", "3.6.16", "3.5.35");
        let mut scene = scene.crashes("b", damaged(), restarts, 20);
        let pod = scene.observed.pods.get_mut("b").unwrap();
        pod.changed = Some(noted.clone());
        (pod.running, pod.trouble) = (true, None);
        scene.changes()
    };
    assert_eq!(
        started(2),
        [],
        "the first start of the new image may still succeed"
    );
    // The kubelet may have restarted the container with the old image before it noticed the new image. Restart 3 is
    // then the first start of the new image.
    assert_eq!(
        started(3),
        [],
        "the first start of the new image may still succeed"
    );
    assert_eq!(started(4), [scene::remove("b")]);
}

/// One plan must not both clear the record of the last image change and write the next record: the operator would send
/// these two writes to the same annotation concurrently, so either could take effect last.
#[test]
fn image_change_record_is_cleared_before_next_image_change() {
    let noted = |changed: Option<Changed>| {
        let mut scene = towards("3.5.35", "3.5.30").compared().drained();
        let pod = scene.observed.pods.get_mut("b").unwrap();
        (pod.restarts, pod.changed) = (4, changed);
        scene
    };
    let scene = noted(Some(Changed {
        from: "3.6.16".into(),
        restarts: 1,
        unreadable: true,
        image: None,
    }));
    let writes = scene.writes();
    let settles =
        |write: &Write| matches!(write, Write::SettleImage { member, .. } if member == "b");
    assert!(writes.iter().any(settles), "{writes:?}");
    assert_eq!(patched(&scene), []);
    assert_eq!(patched(&noted(None)), one("b", "3.5.30"));
}

/// The old image served this data, so `unreadable` stays false if only the new image cannot read it.
#[test]
fn data_unreadable_only_by_new_image_is_not_recorded_as_unreadable() {
    let damaged = Cause::Data("walpb: crc mismatch".into());
    let scene = towards("3.5.35", "3.6.17").changed("b", "3.5.35", "3.6.16");
    let scene = scene.crashes("b", damaged, 2, 20);
    let writes = scene.writes();
    let noted = writes.iter().find_map(|write| match write {
        Write::PatchImage {
            version, changed, ..
        } => Some((version.as_str(), changed.unreadable)),
        _ => None,
    });
    assert_eq!(noted, Some(("3.6.17", false)));
}

/// Regression: the operator changes the image of a learner only after the learner has failed. If the learner fails
/// again, the operator must replace it instead of waiting for another image.
#[test]
fn learner_that_fails_with_both_images_is_replaced() {
    let failed = |scene: Scene, member: &str, seconds: i64| {
        let cause = Cause::Failed("exit code 1".into());
        scene.crashes(member, cause, 5, seconds).changes()
    };
    let learner = |from: &str| {
        let scene = towards("3.5.25", "3.5.35").size(4).learner("d");
        scene.changed("d", from, "3.5.35")
    };
    assert_eq!(failed(learner("3.5.25"), "d", 59), []);
    assert_eq!(failed(learner("3.5.25"), "d", 60), [scene::remove("d")]);
    // The failing learner is not replaced: no voter runs its former version 3.5.26, so that version may be the cause.
    assert_eq!(failed(learner("3.5.26"), "d", 60), []);
    // The operator does not replace a voter after a failed image change, because the voter can return to its former
    // version.
    let voter = towards("3.5.25", "3.5.35").changed("b", "3.5.25", "3.5.35");
    assert_eq!(failed(voter, "b", 60), []);
}
