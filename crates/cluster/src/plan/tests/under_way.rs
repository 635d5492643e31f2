//! A recovery in progress: the operator creates the seed (the first member of the new cluster) while the old members
//! still exist. It records the new cluster when the seed serves.

use api::cluster::RecoveryPhase;
use etcd::{ClusterId, MemberId};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

use crate::plan::State;
use crate::plan::tests::recovery::{
    NEW, approved, at, begun, destroys, list, loss, one_left, problem, record, recorded,
};
use crate::plan::tests::scene::{self, CLUSTER, Scene, makes_pod};
use crate::plan::tests::writes::Write;
use crate::reason::Reason;
use crate::snapshot::{Intent, Kept, SeedAnswer, Seen};

pub(super) fn under_way() -> Scene {
    let mut scene = approved(one_left());
    scene.observed.recovery.record = Some(record(RecoveryPhase::InProgress));
    scene
}

/// A recovery with a running seed. The seed answers with this cluster ID and this revision.
fn answers(cluster_id: ClusterId, revision: i64) -> Scene {
    let mut scene = under_way().leftover("n");
    let pod = scene.observed.pods.get_mut("n").unwrap();
    (pod.token, pod.cluster_id) = (Some("new".into()), None);
    let Some(Seen::Known(status)) = scene.observed.statuses.get("a").cloned() else {
        panic!("the survivor does not answer");
    };
    let status = etcd::Status {
        cluster_id,
        leader: Some(MemberId(1)),
        revision,
        ..status
    };
    scene.observed.recovery.seed = Some(Seen::Known(SeedAnswer {
        list: list(cluster_id, &[("n", false)]),
        status,
    }));
    scene
}

/// Invariant 16: no client reaches the seed through the client Service.
#[test]
fn client_service_loses_endpoints_before_recovery_creates_seed() {
    let scene = under_way().asks_for_volumes();
    let writes = scene.writes();
    let closed = Write::ApplyClient { open: false };
    assert_eq!(writes[0], closed);
    let position = |what: &dyn Fn(&Write) -> bool| writes.iter().rposition(what).unwrap();
    let pod = position(&|write| makes_pod(write, "n"));
    let disk = position(&|write| matches!(write, Write::CreateDisk(start) if start.member == "n"));
    assert!(position(&|write| *write == closed) < disk && disk < pod);
    let Write::CreatePod(start) = &writes[pod] else {
        panic!()
    };
    assert_eq!(
        (start.state, start.token.as_str(), start.cluster_id),
        (State::FromSurvivor, "new", None)
    );
    assert!(!destroys(&writes));
}

/// Another operator process may have set the annotation `started`. That process could still remove the annotation, even
/// after the end of its lease.
#[test]
fn invariant_6_started_annotation_is_renewed_before_seed_pod() {
    let again = |write: &Write| matches!(write, Write::RenewMark { member, .. } if member == "n");
    let order = |scene: &Scene| {
        let writes = scene.writes();
        let at = writes.iter().position(again);
        let pod = writes.iter().position(|write| makes_pod(write, "n"));
        (at, pod.unwrap())
    };
    let marked = under_way().reserved("n").marked("n");
    let (at, pod) = order(&marked);
    assert!(at.is_some_and(|at| at < pod));
    // If the seed has a PVC, the operator starts the seed on this PVC and does not renew the annotation `started`.
    assert_eq!(order(&marked.with_disk("n")).0, None);
    assert_eq!(order(&under_way().reserved("n")).0, None);
    assert_eq!(order(&under_way()).0, None);
}

/// Invariants 9 and 16: a single write replaces the record of the old cluster by the record of the new cluster.
#[test]
fn recovery_completes_when_seed_serves_survivor_data() {
    for revision in [100, 1_000_000_100] {
        let record = recorded(&answers(NEW, revision)).unwrap();
        let intent = Intent {
            token: "new".into(),
            members: ["n".to_owned()].into(),
        };
        assert_eq!(record.formed, Some((intent, NEW)));
        let recovery = record.recovery.unwrap();
        assert_eq!(recovery.phase, RecoveryPhase::Complete);
        assert_eq!(recovery.to_cluster_id.as_deref(), Some("beef"));
        let text = recovery.message.unwrap();
        for part in ["b, c", "revision 100", "may be missing", "c0ffee", "beef"] {
            assert!(text.contains(part), "{part}: {text}");
        }
    }
    let older = answers(NEW, 99);
    assert_eq!(recorded(&older), None);
    assert!(problem(&older, Reason::RecoveryFailed).contains("99"));
    assert_eq!(
        recorded(&answers(CLUSTER, 100)),
        None,
        "an answer with the ID of the old cluster must not be recorded"
    );
}

/// Invariant 9: the operator creates another seed only if the survivor answers. If the survivor is lost, the pod of the
/// first seed may have the last copy of the data.
#[test]
fn recovery_with_lost_seed_volume_is_abandoned_if_survivor_answers() {
    let scene = answers(NEW, 100).with_disk("n").volume_lost("n");
    let given_up = recorded(&scene).unwrap();
    assert_eq!(given_up.formed, None);
    assert_eq!(given_up.recovery.unwrap().phase, RecoveryPhase::Cancelled);
    assert!(!destroys(&scene.writes()));
    let gone = scene.down("a");
    assert_eq!(recorded(&gone), None);
    assert!(!destroys(&gone.writes()));
}

/// Invariant 16: clients of the headless Service could write to the abandoned seed, and these writes would be lost.
/// Invariant 9: the operator stops the seed only if the survivor answers, because the survivor then still has the
/// original data.
#[test]
fn abandoned_seed_is_stopped_before_next_recovery() {
    let mut scene = answers(NEW, 100).with_disk("n").volume_lost("n");
    let given_up = recorded(&scene).unwrap().recovery;
    scene.observed.recovery.record = given_up;
    let stops = |scene: &Scene| scene.writes().contains(&scene::delete_pod("n"));
    let keeps_claim = |scene: &Scene| !scene.writes().contains(&scene::delete_disk("n"));
    // The operator stops the abandoned seed whether or not the next recovery has an approval.
    let mut unwanted = scene.clone();
    unwanted.observed.recovery.approval = None;
    for scene in [&scene, &unwanted] {
        assert!(stops(scene) && keeps_claim(scene));
        assert_eq!(begun(scene), None);
        problem(scene, Reason::QuorumLost);
    }
    // The operator keeps the seed if survivor `a`, from which the seed copied its data, does not answer, even if
    // another survivor answers.
    let five = ["a", "b", "c", "d", "e"];
    let silent = approved(loss(&five, &["a", "b"])).down("a");
    let mut other = scene.clone();
    other.observed.pods.extend(silent.observed.pods);
    other.observed.statuses = silent.observed.statuses;
    assert!(!destroys(&other.writes()));
    // The operator does not stop a pod with another token, because this pod is not the seed of this recovery.
    let mut another = scene.clone();
    another.observed.pods.get_mut("n").unwrap().token = Some("another".into());
    assert!(!stops(&another));
    // The next recovery begins as soon as the pod of the seed is terminating, even if the kubelet never confirms the
    // deletion.
    let ending = scene.terminating("n");
    assert!(!destroys(&ending.writes()));
    assert_eq!(begun(&ending).unwrap().survivor, "a");
}

#[test]
fn recovery_is_canceled_if_quorum_returns() {
    let back = Scene::formed(&["a", "b", "c"]);
    let mut scene = answers(NEW, 100);
    scene.observed.members = back.observed.members;
    scene.observed.statuses = back.observed.statuses;
    scene.observed.shared.client = Kept::AsMade(false);
    let writes = scene.writes();
    assert!(!destroys(&writes) && !writes.contains(&Write::ApplyClient { open: true }));
    let cancelled = recorded(&scene).unwrap();
    assert_eq!(cancelled.formed, None);
    assert_eq!(cancelled.stale_approval.as_deref(), Some("c0ffee"));
    let recovery = cancelled.recovery.unwrap();
    assert_eq!(recovery.phase, RecoveryPhase::Cancelled);

    // After the cancellation, the operator deletes the seed. The client Service then gets its endpoints again.
    scene.observed.recovery.record = Some(recovery);
    scene.observed.recovery.stale_approval = cancelled.stale_approval;
    let writes = scene.writes();
    assert!(writes.contains(&scene::delete_pod("n")));
    assert!(!writes.contains(&Write::ApplyClient { open: true }));
    scene.observed.pods.remove("n");
    assert!(scene.writes().contains(&Write::ApplyClient { open: true }));
}

#[test]
fn recovery_selects_another_survivor_if_first_is_lost() {
    let five = ["a", "b", "c", "d", "e"];
    let mut scene = approved(loss(&five, &["b"]));
    scene.observed.recovery.record = Some(record(RecoveryPhase::InProgress));
    let cancelled = recorded(&scene).unwrap().recovery.unwrap();
    assert_eq!(cancelled.phase, RecoveryPhase::Cancelled);
    scene.observed.recovery.record = Some(cancelled);
    assert_eq!(begun(&scene).unwrap().survivor, "b");

    // If the survivor has not answered before the timeout, the operator cancels the recovery. The next recovery selects
    // another survivor.
    let mut silent = approved(loss(&five, &["a", "b"]).down("a"));
    let mut record_of = record(RecoveryPhase::InProgress);
    for (began, given_up) in [(990, false), (900, true)] {
        record_of.start_time = Some(Time(at(began)));
        silent.observed.recovery.record = Some(record_of.clone());
        assert_eq!(recorded(&silent).is_some(), given_up, "{began}");
    }

    // Without another survivor, the recovery continues, because the seed may have the last copy of the data.
    let mut last = approved(loss(&five, &[]));
    last.observed.recovery.record = Some(record(RecoveryPhase::InProgress));
    assert_eq!(recorded(&last), None);
    assert!(problem(&last, Reason::SurvivorLost).contains("EtcdRestore"));
}
