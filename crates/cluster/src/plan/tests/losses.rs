//! Members that are down although their volume exists: on a lost node, or unable to start on their data.

use std::time::Duration;

use crate::clock::ApiServerClock;
use crate::plan::STEADY;
use crate::plan::tests::scene::{self, Scene};
use crate::plan::tests::writes::Write;
use crate::reason::Reason;
use crate::snapshot::{Cause, Trouble};

fn three() -> Scene {
    Scene::formed(&["a", "b", "c"]).durable()
}

fn problem(scene: &Scene, reason: Reason) -> String {
    let problems = scene.plan().problems;
    let found = problems.iter().find(|problem| problem.reason == reason);
    found
        .unwrap_or_else(|| panic!("{problems:?}"))
        .message
        .clone()
}

fn is_wanted(scene: &Scene) -> bool {
    scene.changes().is_empty()
}

// ---- members on a lost node ----

/// Invariant 5: the operator replaces a member whose disk is unreachable only after the timeout in the spec.
#[test]
fn invariant_5_member_on_lost_node_is_kept_until_timeout() {
    let early = three().node_lost("b", 59);
    assert!(is_wanted(&early) && early.writes().is_empty());
    let plan = early.plan();
    assert_eq!(
        plan.requeue,
        Duration::from_secs(1),
        "the member must be removed exactly at the timeout"
    );
    let [wait] = &plan.waiting_for[..] else {
        panic!("{:?}", plan.waiting_for)
    };
    assert!(
        wait.message
            .contains("replaces this member if this lasts until 1970-01-01T00:16:41Z"),
        "{}",
        wait.message
    );
    let late = three().node_lost("b", 60);
    assert_eq!(late.changes(), [scene::remove("b")]);
    // The operator keeps the volume until etcd has removed the member. The plan writes only the Service of the
    // replacement.
    assert!(
        late.writes()
            .iter()
            .all(|write| scene::is_service(write, "n"))
    );
    assert_eq!(scene::reserved(&late.plan().step.chains), [false]);
}

#[test]
fn longer_timeout_in_spec_keeps_member_on_lost_node() {
    let mut patient = three().node_lost("b", 200);
    patient.desired.replace_after = Duration::from_mins(5);
    assert!(is_wanted(&patient));
    assert_eq!(
        patient.plan().requeue,
        STEADY,
        "the operator must reconcile at the usual interval during the timeout"
    );
}

#[test]
fn member_that_answers_on_lost_node_is_kept() {
    let mut scene = three().node_lost("b", 600);
    scene
        .observed
        .statuses
        .insert("b".into(), three().observed.statuses["b"].clone());
    assert!(is_wanted(&scene) && scene.waits().is_empty());
}

#[test]
fn member_with_pod_stuck_in_termination_is_replaced_after_timeout() {
    assert!(is_wanted(&three().stuck("b", 59)));
    assert_eq!(three().stuck("b", 60).changes(), [scene::remove("b")]);
}

/// If the operator's clock is 90 s ahead, a pod that was just deleted with 30 s grace period seems overdue by a minute.
#[test]
fn invariant_5_operator_clock_that_is_ahead_replaces_no_member() {
    let ahead = |mut scene: Scene, seconds: i64| {
        let clock = jiff::SignedDuration::from_secs(-seconds);
        scene.observed.clock = ApiServerClock(Some(clock));
        scene
    };
    let (ended, lost) = (three().stuck("b", 60), three().node_lost("b", 60));
    let fails = three().crashes("b", Cause::Failed("it".into()), 5, 60);
    for scene in [ended, lost, fails] {
        assert_eq!(scene.changes(), [scene::remove("b")]);
        let early = ahead(scene.clone(), 90);
        assert!(is_wanted(&early), "{:?}", early.changes());
        // By the API server's clock, the timeout has not ended yet. The operator must not requeue the cluster every
        // second until then.
        assert!(early.plan().requeue > Duration::from_secs(1));
        assert_eq!(ahead(scene.clone(), 0).changes(), [scene::remove("b")]);
        // An operator's clock that is behind must not extend the timeout.
        assert_eq!(ahead(scene, -90).changes(), [scene::remove("b")]);
    }
}

#[test]
fn invariant_3_no_member_is_replaced_while_three_of_five_are_down() {
    let scene = Scene::formed(&["a", "b", "c", "d", "e"])
        .durable()
        .node_lost("b", 600)
        .node_lost("c", 600)
        .down("d");
    assert!(is_wanted(&scene));
    assert!(scene.waits().contains(&Reason::QuorumAtRisk));
    let wait = &scene.plan().waiting_for[0].message;
    assert!(
        wait.contains("the node of the member has been lost since"),
        "{wait}"
    );
}

#[test]
fn members_on_two_lost_nodes_of_five_are_replaced_one_by_one() {
    let scene = Scene::formed(&["a", "b", "c", "d", "e"])
        .durable()
        .node_lost("b", 600)
        .node_lost("c", 600);
    assert_eq!(scene.changes(), [scene::remove("b")]);
}

#[test]
fn pod_of_removed_member_on_lost_node_is_not_force_deleted() {
    // Member `b` was already removed from etcd, but its pod and its PVC still exist. While their node is reachable, the
    // operator deletes both.
    let removed = Scene::formed(&["a", "c"])
        .durable()
        .size(3)
        .leftover("b")
        .with_leftover_disk("b")
        .reserved("d");
    let gone = removed.writes();
    assert!(
        gone.contains(&scene::delete_pod("b")) && gone.contains(&scene::delete_disk("b")),
        "{gone:?}"
    );
    // After the loss of the node, the pod stays until the kubelet confirms its deletion, and the PVC stays with the
    // pod. The next member joins nevertheless.
    let stuck = removed.stuck("b", 600).claim_deleted("b");
    assert_eq!(
        stuck.changes(),
        [Write::AddMember {
            member: "d".into(),
            learner: true
        }]
    );
    assert!(stuck.writes().is_empty(), "{:?}", stuck.writes());
}

#[test]
fn learner_on_lost_node_is_removed_after_timeout() {
    let learner = |seconds| {
        Scene::formed(&["a", "b"])
            .size(3)
            .learner("d")
            .node_lost("d", seconds)
    };
    assert!(is_wanted(&learner(59)));
    assert_eq!(learner(60).changes(), [scene::remove("d")]);
}

#[test]
fn lost_node_timeout_applies_to_members_without_volumes() {
    let scene = |seconds| Scene::formed(&["a", "b", "c"]).node_lost("b", seconds);
    assert!(is_wanted(&scene(59)));
    assert_eq!(scene(60).changes(), [scene::remove("b")]);
}

// ---- volumes of PVCs in phase `Lost` ----

#[test]
fn serving_member_with_lost_volume_is_replaced() {
    let serves = three().leader("b").volume_lost("b");
    let hands_over = |write: &Write| matches!(write, Write::MoveLeader { from, .. } if from == "b");
    assert!(matches!(serves.changes().as_slice(), [one] if hands_over(one)));
    let follows = three().leader("a").volume_lost("b");
    assert_eq!(follows.changes(), [scene::remove("b")]);
    let said = follows.plan().next.unwrap();
    assert!(said.contains("the volume of the member is lost"), "{said}");
}

/// Invariants 3 and 5: the data of a stopped member with a lost volume is lost, so the operator removes the member if
/// the other voters form a quorum.
#[test]
fn stopped_member_with_lost_volume_is_removed_if_quorum_remains() {
    let gone = three().without_pod("b").volume_lost("b");
    assert_eq!(gone.changes(), [scene::remove("b")]);
    let starts = |scene: &Scene| {
        let mut writes = scene.writes().into_iter();
        writes.any(|write| scene::makes_pod(&write, "b"))
    };
    assert!(!starts(&gone));
    let starting = three().not_running("b").volume_lost("b");
    assert_eq!(starting.changes(), [scene::remove("b")]);
    let at_risk = gone.clone().down("c");
    assert!(is_wanted(&at_risk) && !starts(&at_risk));
    assert!(at_risk.waits().contains(&Reason::QuorumAtRisk));
    // After a person has restored the volume of `b`, the operator starts `b` again.
    let mut back = gone;
    back.observed.disks.get_mut("b").unwrap().lost = false;
    assert!(is_wanted(&back) && starts(&back));
}

#[test]
fn hibernation_is_refused_while_volume_is_lost() {
    let mut scene = three().volume_lost("b");
    scene.desired.hibernate = true;
    assert!(problem(&scene, Reason::HibernationRefused).contains('b'));
    let stops = |write: &Write| matches!(write, Write::DeletePod { .. });
    assert!(!scene.writes().iter().any(stops));
}

// ---- members with unreadable data ----

fn damaged(restarts: i32) -> Scene {
    three().crashes("b", Cause::Data("walpb: crc mismatch".into()), restarts, 20)
}

#[test]
fn member_is_replaced_after_second_exit_with_damaged_data() {
    assert!(is_wanted(&damaged(1)));
    assert_eq!(damaged(2).changes(), [scene::remove("b")]);
    let said = damaged(2).plan().next.unwrap();
    assert!(said.contains("walpb: crc mismatch"), "{said}");
}

#[test]
fn invariant_3_member_with_damaged_data_is_kept_if_quorum_needs_it() {
    let scene = damaged(9).down("c");
    assert!(is_wanted(&scene));
    assert!(scene.waits().contains(&Reason::QuorumAtRisk));
    let alone = Scene::formed(&["a"])
        .durable()
        .crashes("a", Cause::Data("crc".into()), 9, 600);
    assert!(is_wanted(&alone));
}

#[test]
fn member_is_kept_if_its_pod_was_ready_until_last_exit() {
    // The pod was ready until its container ended, so etcd had started successfully, and this exit is no failed start.
    let mut scene = damaged(9);
    scene.observed.pods.get_mut("b").unwrap().unready_since =
        scene.observed.pods["b"].ending.as_ref().map(|end| end.at);
    assert!(is_wanted(&scene));
}

fn failing(restarts: i32, seconds: i64) -> Scene {
    three().crashes("b", Cause::Failed("exit code 1".into()), restarts, seconds)
}

#[test]
fn member_that_fails_for_unknown_reason_is_replaced_after_timeout() {
    assert!(is_wanted(&failing(4, 600)));
    assert!(is_wanted(&failing(5, 59)));
    assert_eq!(failing(5, 59).plan().requeue, Duration::from_secs(1));
    assert_eq!(failing(5, 60).changes(), [scene::remove("b")]);
}

#[test]
fn member_is_kept_if_settings_may_cause_its_failure() {
    // Voter `c` is unhealthy too, so a setting of both members may be the cause. The operator replaces neither member.
    assert!(is_wanted(
        &Scene::formed(&["a", "b", "c", "d", "e"])
            .durable()
            .crashes("b", Cause::Failed("exit code 1".into()), 9, 600)
            .down("c")
    ));
    // Only member `b` has these settings or this image, so the settings or the image may be the cause of the failure.
    let mut settings = failing(9, 600);
    settings.observed.pods.get_mut("b").unwrap().spec_hash = Some("newer".into());
    assert!(is_wanted(&settings));
    let mut image = failing(9, 600);
    image.observed.pods.get_mut("b").unwrap().image = "etcd:v3.6.17".into();
    assert!(is_wanted(&image));
}

#[test]
fn member_is_kept_after_out_of_memory_full_disk_or_signal() {
    for cause in [
        Cause::Memory,
        Cause::Surroundings("no space left on device".into()),
        Cause::Ended,
    ] {
        assert!(
            is_wanted(&three().crashes("b", cause.clone(), 99, 6000)),
            "{cause:?}"
        );
    }
    let image = three().not_running("b");
    assert!(is_wanted(&image));
}

#[test]
fn out_of_memory_exit_of_etcd_is_reported_with_spec_field() {
    let scene = three().crashes("b", Cause::Memory, 3, 60);
    let text = problem(&scene, Reason::OutOfMemory);
    assert!(text.contains("spec.pod.resources.limits.memory"), "{text}");
}

#[test]
fn learner_with_damaged_data_is_replaced() {
    let scene = Scene::formed(&["a", "b"]).size(3).learner("d").crashes(
        "d",
        Cause::Data("invalid database".into()),
        2,
        30,
    );
    assert_eq!(scene.changes(), [scene::remove("d")]);
}

#[test]
fn crash_loop_of_member_is_reported_before_replacement() {
    let mut scene = failing(3, 30);
    scene.observed.pods.get_mut("b").unwrap().trouble =
        Some(Trouble::Failing("container etcd: CrashLoopBackOff".into()));
    assert!(problem(&scene, Reason::ContainerFailing).contains("CrashLoopBackOff"));
}
