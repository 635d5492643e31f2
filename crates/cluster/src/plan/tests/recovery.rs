//! Recovery from a lost quorum: the reports, the waiting times, and the approval of a new cluster with the data of a
//! surviving member.

use api::cluster::{RecoveryApproval, RecoveryPhase, RecoveryStatus};
use etcd::{ClusterId, Member, MemberId, Members};
use jiff::Timestamp;

use crate::plan::tests::recovered::recovered;
use crate::plan::tests::scene::{CLUSTER, Scene, makes_pod};
use crate::plan::tests::writes::{RecoveryRecord, Write};
use crate::reason::Reason;
use crate::snapshot::Seen;

pub(super) const NEW: ClusterId = ClusterId(0xbeef);

pub(super) fn at(seconds: i64) -> Timestamp {
    Timestamp::from_second(seconds).unwrap()
}

/// A cluster of the members `all`. Only the members in `left` still exist, and they know no leader. The quorum has been
/// lost for longer than `spec.recovery.after`.
pub(super) fn loss(all: &[&str], left: &[&str]) -> Scene {
    let mut scene = Scene::formed(all);
    for member in all.iter().filter(|member| !left.contains(member)) {
        scene = scene.without_pod(member);
    }
    leaderless(scene)
}

pub(super) fn leaderless(mut scene: Scene) -> Scene {
    for seen in scene.observed.statuses.values_mut() {
        if let Seen::Known(status) = seen {
            status.leader = None;
        }
    }
    scene.observed.members = Seen::Unknown("no quorum".into());
    scene.observed.recovery.unavailable_since = Some(at(900));
    scene
}

pub(super) fn one_left() -> Scene {
    loss(&["a", "b", "c"], &["a"])
}

pub(super) fn approved(mut scene: Scene) -> Scene {
    scene.observed.recovery.approval = Some(CLUSTER.to_string());
    scene
}

fn automatic(mut scene: Scene) -> Scene {
    scene.desired.recovery.automatic = true;
    scene
}

fn index(mut scene: Scene, member: &str, index: u64) -> Scene {
    if let Some(Seen::Known(status)) = scene.observed.statuses.get_mut(member) {
        (status.raft_index, status.revision) = (index, i64::try_from(index).unwrap());
    }
    scene
}

/// The member list on a member's disk. For each member, `members` contains the name, and true for a learner.
pub(super) fn list(id: ClusterId, members: &[(&str, bool)]) -> Members {
    let members = members.iter().map(|(name, is_learner)| Member {
        id: MemberId(u64::from(name.as_bytes()[0])),
        name: (*name).to_owned(),
        peer_urls: vec![format!("http://{name}.ns.svc:2380")],
        client_urls: vec![format!("http://{name}.ns.svc:2379")],
        is_learner: *is_learner,
    });
    Members {
        cluster_id: id,
        members: members.collect(),
    }
}

pub(super) fn begun(scene: &Scene) -> Option<RecoveryStatus> {
    let known = scene.observed.recovery.record.as_ref();
    scene.writes().into_iter().find_map(|write| match write {
        Write::RecordRecovery(record) if record.begins(known) => record.recovery,
        _ => None,
    })
}

pub(super) fn recorded(scene: &Scene) -> Option<RecoveryRecord> {
    scene.writes().into_iter().find_map(|write| match write {
        Write::RecordRecovery(record) => Some(*record),
        _ => None,
    })
}

pub(super) fn problem(scene: &Scene, reason: Reason) -> String {
    let problems = scene.plan().problems;
    let found = problems.iter().find(|problem| problem.reason == reason);
    let found = found.map(|problem| problem.message.clone());
    found.unwrap_or_else(|| panic!("no {reason} in {problems:?}"))
}

pub(super) fn destroys(writes: &[Write]) -> bool {
    writes.iter().any(|write| {
        matches!(
            write,
            Write::DeletePod { .. } | Write::DeleteDisk { .. } | Write::DeleteService { .. }
        )
    })
}

// ---- reports of a lost quorum, and approvals ----

#[test]
fn invariant_16_quorum_loss_is_reported_and_recovery_awaits_approval() {
    let scene = one_left();
    let text = problem(&scene, Reason::QuorumLost);
    for part in [
        "1 of 3 voters",
        "a at revision 100",
        "no backup is known",
        "kubectl -n ",
        "etcd.database.coreos.com/recover=c0ffee",
        "are lost",
        "EtcdRestore",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
    assert_eq!(begun(&scene), None);
    assert!(!destroys(&scene.writes()));
}

/// Invariant 8: a person may still restore a lost volume, so the operator waits for an approval.
#[test]
fn lost_volumes_require_approval_for_recovery() {
    let mut scene = Scene::formed(&["a", "b", "c"]).durable();
    for member in ["b", "c"] {
        scene = scene.without_pod(member).volume_lost(member);
    }
    let scene = leaderless(scene);
    let text = problem(&scene, Reason::QuorumLost);
    for part in [
        "1 of 3 voters",
        "the PersistentVolumeClaims of b, c",
        "restore the PersistentVolumes",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
    for scene in [scene.clone(), automatic(scene.clone())] {
        assert_eq!(begun(&scene), None);
        assert!(!destroys(&scene.writes()));
        let starts = |write: &Write| matches!(write, Write::CreatePod(_));
        assert!(!scene.writes().iter().any(starts));
    }
    assert_eq!(begun(&approved(scene.clone())).unwrap().survivor, "a");
    // Until `spec.recovery.after` has passed, even an approved recovery waits for volumes that a person may restore.
    let mut soon = approved(scene.clone());
    soon.observed.recovery.unavailable_since = Some(at(999));
    assert_eq!(begun(&soon), None);
    assert!(
        problem(&soon, Reason::QuorumLost).contains("b (the volume of the member is lost: restore")
    );
    // A person has restored the volume of `b`, so the operator starts `b` and begins no recovery.
    let mut back = automatic(scene);
    back.observed.disks.get_mut("b").unwrap().lost = false;
    assert!(back.waits().contains(&Reason::NoQuorum));
    assert_eq!(begun(&back), None);
    assert!(back.writes().iter().any(|write| makes_pod(write, "b")));
    // In the next scene, the operator keeps all pods, because members whose lost volumes are still mounted are
    // survivors.
    let mut open = Scene::formed(&["a", "b", "c"]).durable();
    for member in ["a", "b", "c"] {
        open = open.volume_lost(member);
    }
    let open = leaderless(open);
    assert!(open.waits().contains(&Reason::NoQuorum) && !destroys(&open.writes()));
    // In the next scene, `b` and `c` have no data, because their pods in phase Pending have never mounted the lost
    // volumes.
    let mut waiting = Scene::formed(&["a", "b", "c"]).durable();
    for member in ["b", "c"] {
        waiting = waiting.volume_lost(member).down(member);
        let pod = waiting.observed.pods.get_mut(member).unwrap();
        pod.addressed = false;
    }
    let waiting = leaderless(waiting);
    assert!(problem(&waiting, Reason::QuorumLost).contains("the PersistentVolumeClaims of b, c"));
    assert!(!destroys(&waiting.writes()));
}

/// Invariants 10 and 16: the step records the decision, and contains no other action.
#[test]
fn approved_recovery_is_recorded_before_objects_are_created() {
    let scene = approved(one_left());
    let record = begun(&scene).unwrap();
    assert_eq!(record.phase, RecoveryPhase::InProgress);
    assert_eq!(record.approved_by, RecoveryApproval::Annotation);
    assert_eq!(record.from_cluster_id, "c0ffee");
    assert_eq!(
        (
            record.survivor.as_str(),
            record.revision,
            record.lost_members
        ),
        ("a", 100, vec!["b".to_owned(), "c".to_owned()])
    );
    let writes = scene.writes();
    let [Write::RecordRecovery(drawn)] = &writes[..] else {
        panic!("{writes:?}")
    };
    let drawn = drawn.recovery.clone().unwrap();
    assert_eq!((drawn.member.as_str(), drawn.token.as_str()), ("n", "new"));
}

#[test]
fn approval_with_wrong_cluster_id_is_reported() {
    for text in ["beef", "c0ffe", "yes", ""] {
        let mut scene = one_left();
        scene.observed.recovery.approval = Some(text.to_owned());
        assert_eq!(begun(&scene), None, "{text}");
        assert!(problem(&scene, Reason::RecoveryRefused).contains("c0ffee"));
    }
    let mut padded = one_left();
    padded.observed.recovery.approval = Some("0000000000c0ffee".to_owned());
    assert!(
        begun(&padded).is_some(),
        "an approval may contain the cluster ID with leading zeros"
    );
}

/// An approval that was set before the loss of the quorum is not accepted.
#[test]
fn approval_given_before_quorum_loss_starts_no_recovery() {
    let mut early = approved(Scene::formed(&["a", "b", "c"]));
    let record = recorded(&early).unwrap();
    assert_eq!(record.stale_approval.as_deref(), Some("c0ffee"));
    early.observed.recovery.stale_approval = record.stale_approval;
    assert_eq!(
        recorded(&early),
        None,
        "the stale approval must not be recorded again"
    );

    let mut scene = approved(one_left());
    scene.observed.recovery.stale_approval = Some("c0ffee".into());
    assert_eq!(begun(&scene), None);
    assert!(problem(&scene, Reason::RecoveryRefused).contains("set it again"));
    // After the user has removed the approval, the operator clears its record of the stale approval.
    scene.observed.recovery.approval = None;
    assert_eq!(recorded(&scene).unwrap().stale_approval, None);
}

#[test]
fn automatic_recovery_waits_for_configured_time() {
    let scene = automatic(one_left());
    assert_eq!(begun(&scene).unwrap().approved_by, RecoveryApproval::Policy);
    for since in [Some(at(990)), None] {
        let mut early = automatic(one_left());
        early.observed.recovery.unavailable_since = since;
        assert_eq!(begun(&early), None);
        assert!(problem(&early, Reason::QuorumLost).contains("60 s"));
        // An approved recovery starts at once: in this scene, the lost members cannot return.
        assert!(begun(&approved(early)).is_some());
    }
}

#[test]
fn automatic_recovery_waits_for_deletion_of_terminating_pods() {
    let mut ending = Scene::formed(&["a", "b", "c"])
        .terminating("b")
        .without_pod("c");
    ending = automatic(leaderless(ending));
    assert_eq!(begun(&ending), None);
    assert!(problem(&ending, Reason::QuorumLost).contains("may still run"));
    assert!(begun(&approved(ending)).is_some());
}

#[test]
fn recovery_requires_approval_if_quorum_of_volumes_exists() {
    let on_disks = Scene::formed(&["a", "b", "c"]).durable();
    let scene = leaderless(on_disks.without_pod("b").without_pod("c"));
    let scene = automatic(scene);
    assert_eq!(begun(&scene), None);
    let writes = scene.writes();
    assert!(writes.iter().any(|write| makes_pod(write, "b")));
    assert!(writes.iter().any(|write| makes_pod(write, "c")));
    let waits = scene.plan().waiting_for;
    assert!(waits[0].message.contains("If b, c are lost permanently"));

    // An approved recovery first waits for members that may return, and then starts, because the person who approves
    // may know that the nodes are destroyed.
    assert!(begun(&approved(scene.clone())).is_some());
    let mut early = approved(scene);
    early.observed.recovery.unavailable_since = Some(at(990));
    assert_eq!(begun(&early), None);
}

#[test]
fn answering_quorum_or_known_leader_prevents_recovery() {
    let scene = approved(leaderless(Scene::formed(&["a", "b", "c"])));
    assert_eq!(
        begun(&scene),
        None,
        "a quorum answers, so no recovery starts"
    );
    let mut scene = approved(one_left());
    if let Some(Seen::Known(status)) = scene.observed.statuses.get_mut("a") {
        status.leader = Some(MemberId(98));
    }
    assert_eq!(
        begun(&scene),
        None,
        "a survivor knows a leader, so no recovery may start"
    );
    assert_eq!(scene.waits(), [Reason::NoQuorum]);
}

#[test]
fn recovery_requires_survivor_that_answers_with_recorded_cluster_id() {
    let silent = approved(one_left().down("a"));
    assert_eq!(begun(&silent), None);
    assert!(
        problem(&silent, Reason::QuorumLost).contains("one surviving member, but none answers")
    );
    let mut foreign = approved(one_left());
    if let Some(Seen::Known(status)) = foreign.observed.statuses.get_mut("a") {
        status.cluster_id = NEW;
    }
    assert_eq!(begun(&foreign), None);
}

#[test]
fn loss_of_all_members_requires_restore_from_backup() {
    let mut scene = approved(automatic(loss(&["a", "b", "c"], &[])));
    scene.observed.recovery.last_backup = Some("s3://b/k at revision 7".into());
    assert_eq!(begun(&scene), None);
    let text = problem(&scene, Reason::QuorumLost);
    for part in ["0 of 3 voters of cluster c0ffee", "EtcdRestore", "s3://b/k"] {
        assert!(text.contains(part), "{part}: {text}");
    }
    assert!(scene.writes().is_empty());
}

// ---- selection of the survivor for a recovery ----

#[test]
fn recovery_selects_survivor_with_highest_committed_index() {
    let five = ["a", "b", "c", "d", "e"];
    let scene = approved(loss(&five, &["a", "b"]));
    assert_eq!(
        begun(&scene).unwrap().survivor,
        "a",
        "of equal survivors, the first must be selected"
    );
    let scene = index(scene, "b", 120);
    let record = begun(&scene).unwrap();
    assert_eq!((record.survivor.as_str(), record.revision), ("b", 120));
}

/// Invariant 1: a member that does not answer yet may have newer data.
#[test]
fn recovery_waits_for_silent_survivor_then_starts_without_it() {
    let five = ["a", "b", "c", "d", "e"];
    let mut scene = approved(loss(&five, &["a", "b"]).down("b"));
    scene.observed.recovery.unavailable_since = Some(at(990));
    assert_eq!(begun(&scene), None);
    assert!(problem(&scene, Reason::QuorumLost).contains("b (connection refused)"));
    scene.observed.recovery.unavailable_since = Some(at(900));
    let record = begun(&scene).unwrap();
    assert_eq!(record.silent_members, ["b"]);
    // Without an approval, no recovery starts while a survivor is silent.
    scene.observed.recovery.approval = None;
    assert_eq!(begun(&automatic(scene)), None);
}

// ---- proof that the quorum is lost ----

/// Invariant 1: without any member list, the voters are unknown.
#[test]
fn recovery_requires_known_list_of_voters() {
    let mut scene = automatic(approved(one_left()));
    scene.observed.reported_voters.clear();
    assert_eq!(begun(&scene), None);
    assert_eq!(scene.waits(), [Reason::NoQuorum]);
    // The survivor's own member list names the voters, so the recovery starts.
    let all = [("a", false), ("b", false), ("c", false)];
    scene.observed.recovery.local = vec![list(CLUSTER, &all)];
    assert!(begun(&scene).is_some());
    // A member list of another cluster proves nothing, so no recovery starts.
    scene.observed.recovery.local = vec![list(NEW, &all)];
    assert_eq!(begun(&scene), None);
}

/// Each list of voters may be stale, so an automatic recovery requires that all lists confirm the loss.
#[test]
fn contradicting_member_lists_prevent_automatic_recovery() {
    let four = Scene::formed(&["a", "b", "c", "d"]).durable();
    let mut scene = leaderless(four.without_pod("b").without_pod("c").down("d"));
    scene.observed.disks.remove("b");
    scene.observed.disks.remove("c");
    // The lists of voters differ: the status names a, c and d, and the outdated list of `a` names a, b and c.
    scene.observed.reported_voters = ["a", "c", "d"].map(str::to_owned).into();
    let behind = [("a", false), ("b", false), ("c", false)];
    scene.observed.recovery.local = vec![list(CLUSTER, &behind)];
    assert_eq!(begun(&automatic(scene)), None);
}

/// The status still lists the voters of the old cluster. Their loss is no loss of the new cluster.
#[test]
fn recovered_cluster_with_stale_status_is_not_recovered_again() {
    for answers in [false, true] {
        let mut scene = automatic(approved(leaderless(recovered())));
        scene.observed.reported_voters = ["a", "b", "c"].map(str::to_owned).into();
        if answers {
            scene.observed.recovery.local = vec![list(NEW, &[("n", false)])];
        } else {
            let silent = Seen::Unknown("slow".into());
            scene.observed.statuses.insert("n".into(), silent);
        }
        assert_eq!(begun(&scene), None);
        assert_eq!(scene.waits(), [Reason::NoQuorum]);
    }
}

pub(super) fn record(phase: RecoveryPhase) -> RecoveryStatus {
    RecoveryStatus {
        phase,
        approved_by: RecoveryApproval::Annotation,
        from_cluster_id: CLUSTER.to_string(),
        from_token: "token".into(),
        survivor: "a".into(),
        revision: 100,
        lost_members: vec!["b".into(), "c".into()],
        silent_members: Vec::new(),
        member: "n".into(),
        token: "new".into(),
        to_cluster_id: None,
        start_time: None,
        completion_time: None,
        message: None,
    }
}
