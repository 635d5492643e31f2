//! What people and other tools do to a cluster behind the operator's back: labels and annotations taken away, pods that
//! ended for good, members changed with etcd's own tool, objects of the same name.

use etcd::{Member, MemberId, Members};

use crate::plan::tests::scene::{self, CLUSTER, Scene, at, delete_pod, makes_pod};
use crate::reason::Reason;
use crate::snapshot::{Kept, Seen};
use crate::write::Write;

fn three() -> Scene {
    Scene::formed(&["a", "b", "c"]).durable()
}

/// Evicted, ended with its node, or refused by a kubelet: the object stays, and nothing starts it again.
fn ended(mut scene: Scene, members: &[&str]) -> Scene {
    for member in members {
        scene = scene.not_running(member);
        scene.observed.pods.get_mut(*member).unwrap().failed = true;
    }
    scene
}

fn destroys(write: &Write) -> bool {
    matches!(
        write,
        Write::DeletePod { .. }
            | Write::DeleteDisk { .. }
            | Write::DeleteService { .. }
            | Write::DeleteBudget
    )
}

fn recovers(scene: &Scene) -> bool {
    scene::begins_recovery(scene)
}

// ---- pods that ended for good ----

/// Invariant 8: a node that is shut down in order leaves its pods behind, ended.
#[test]
fn pods_that_ended_for_good_make_room_for_new_ones_on_their_disks() {
    assert_eq!(ended(three(), &["b"]).writes(), [delete_pod("b")]);
    let all = ended(three().silent(), &["a", "b", "c"]);
    assert_eq!(all.writes(), ["a", "b", "c"].map(delete_pod));
    // They are being deleted already.
    let mut going = all.clone();
    for pod in going.observed.pods.values_mut() {
        pod.terminating = true;
    }
    assert_eq!(going.writes(), []);
    let gone = three().silent().without_pod("a");
    assert!(gone.writes().iter().any(|write| makes_pod(write, "a")));
}

/// Invariant 1: without a disk it may be all that tells of the member.
#[test]
fn a_pod_that_ended_for_good_without_a_disk_stays_while_no_quorum_answers() {
    let scene = ended(Scene::formed(&["a", "b", "c"]).silent(), &["a"]);
    assert!(!scene.writes().iter().any(destroys));
    let claim_goes = ended(three().silent().claim_deleted("a"), &["a"]);
    assert!(!claim_goes.writes().iter().any(destroys));
}

#[test]
fn a_first_member_whose_pod_ended_for_good_gets_another_on_its_disk() {
    let scene = ended(Scene::starting(&["a", "b", "c"]).durable(), &["b"]);
    assert!(scene.writes().contains(&delete_pod("b")));
}

// ---- labels and annotations ----

/// Invariant 16: only another token says that a disk is another cluster's.
#[test]
fn disks_whose_token_was_taken_away_are_not_lost() {
    let mut scene = three();
    for member in ["b", "c"] {
        scene = scene.without_pod(member);
        scene.observed.disks.get_mut(member).unwrap().token = None;
    }
    let mut scene = scene.silent_voter("a");
    scene.desired.recovery.automatic = true;
    scene.observed.members = Seen::Unknown("no quorum".into());
    scene.observed.recovery.unavailable_since = Some(at(0));
    assert!(!recovers(&scene));
    for member in ["b", "c"] {
        assert!(scene.writes().iter().any(|write| makes_pod(write, member)));
    }
}

#[test]
fn marks_that_were_taken_away_are_set_again() {
    let mut scene = three();
    scene.observed.pods.get_mut("a").unwrap().token = None;
    scene.observed.pods.get_mut("b").unwrap().owned = false;
    scene.observed.disks.get_mut("c").unwrap().owned = false;
    let marked: Vec<String> = scene
        .writes()
        .into_iter()
        .filter_map(|write| match write {
            Write::LabelPod(label) | Write::LabelDisk(label) => Some(label.member),
            _ => None,
        })
        .collect();
    assert_eq!(marked, ["a", "b", "c"]);
}

// ---- etcdctl ----

/// With `etcdctl member update`.
fn moved(mut scene: Scene, member: &str, url: &str) -> Scene {
    if let Seen::Known(list) = &mut scene.observed.members {
        let found = list.members.iter_mut().find(|one| one.name == member);
        found.unwrap().peer_urls = vec![url.to_owned()];
    }
    scene
}

/// Invariant 5: whoever is a member keeps its pod and its disk.
#[test]
fn a_member_whose_peer_urls_somebody_changed_is_not_taken_for_a_leftover() {
    for url in [
        "http://etcd-1.example.com:2380",
        "http://c.elsewhere:2380",
        "http://10.0.0.7:2380",
    ] {
        let scene = moved(three(), "b", url);
        assert_eq!(scene.writes(), [], "{url}");
        assert_eq!(scene.changes(), [], "{url}");
        let down = moved(three(), "b", url).not_running("b");
        assert!(!down.writes().iter().any(destroys), "{url}");
    }
    // Nor is one that answers as a member, whatever it is called.
    let mut scene = moved(three(), "b", "http://etcd-1.example.com:2380");
    if let Seen::Known(list) = &mut scene.observed.members {
        list.members[1].name = "another".to_owned();
    }
    assert!(!scene.writes().iter().any(destroys));
}

/// Invariant 3: whoever tries something with etcd's own tool costs the cluster none of its members.
#[test]
fn no_member_leaves_for_one_that_somebody_added_and_never_started() {
    let three = || Scene::formed(&["a", "b", "c"]).aged();
    assert_eq!(three().added("elsewhere").changes(), []);
    assert_eq!(three().added_with_vote("elsewhere").changes(), []);
    // One of ours that is lost is replaced all the same.
    let lost = three().without_pod("b").added("elsewhere");
    assert_eq!(lost.changes(), [scene::remove("b")]);
    let two = Scene::formed(&["a", "b"]).aged().size(3).reserved("n");
    let added = two.added("elsewhere").changes();
    assert!(matches!(&added[..], [Write::AddMember { member, .. }] if member == "n"));
}

fn voter(name: &str, id: u64, url: &str) -> Member {
    Member {
        id: MemberId(id),
        name: name.to_owned(),
        peer_urls: vec![url.to_owned()],
        client_urls: vec!["http://vm:2379".to_owned()],
        is_learner: false,
    }
}

/// Invariant 16: of a member that somebody else runs nothing is in Kubernetes, and it may be in a quorum that serves.
#[test]
fn members_that_somebody_else_runs_are_never_lost_for_sure() {
    let mut scene = Scene::formed(&["a"]).silent_voter("a");
    scene.desired.recovery.automatic = true;
    scene.observed.recovery.unavailable_since = Some(at(0));
    scene.observed.reported_voters = ["a", "x", "y"].map(String::from).into();
    scene.observed.recovery.local = vec![Members {
        cluster_id: CLUSTER,
        members: vec![
            voter("a", 97, "http://a.ns.svc:2380"),
            voter("x", 1, "http://x.example.com:2380"),
            voter("y", 2, "http://y.example.com:2380"),
        ],
    }];
    scene.observed.members = Seen::Unknown("no quorum".into());
    assert!(!recovers(&scene));
    // A person may know that they are gone.
    scene.observed.recovery.approval = Some(CLUSTER.to_string());
    assert!(recovers(&scene));
}

/// The same for a pod that belongs to another object by now, and may run.
#[test]
fn a_pod_that_belongs_to_another_object_is_not_lost_for_sure() {
    let mut scene = Scene::formed(&["a", "b", "c"]).silent_voter("a");
    scene.desired.recovery.automatic = true;
    scene.observed.recovery.unavailable_since = Some(at(0));
    scene = scene.without_pod("b").without_pod("c");
    scene.observed.members = Seen::Unknown("no quorum".into());
    assert!(recovers(&scene));
    scene.observed.strangers = vec!["pod b".to_owned()];
    assert!(!recovers(&scene));
}

// ---- names ----

/// Another cluster may live by it: the headless Service of `db-client` is called like the client Service of `db`.
#[test]
fn objects_of_others_are_neither_changed_nor_deleted() {
    let mut scene = three();
    scene.observed.shared.headless = Kept::Others;
    scene.observed.shared.client = Kept::Others;
    scene.observed.shared.budget = Kept::Others;
    assert_eq!(scene.writes(), []);
    let problems = scene.plan().problems;
    let taken = problems
        .iter()
        .filter(|problem| problem.reason == Reason::NameTaken);
    assert_eq!(taken.count(), 3);
    // Who wants no budget may have one of their own under this name.
    scene.desired.budget = false;
    assert_eq!(scene.writes(), []);
    let mut begins = Scene::begun(&["a", "b", "c"]);
    begins.observed.shared = scene.observed.shared;
    let applies = |write: &Write| {
        matches!(
            write,
            Write::ApplyHeadless | Write::ApplyClient { .. } | Write::ApplyBudget { .. }
        )
    };
    assert!(!begins.writes().iter().any(applies));
}

/// Invariant 7: what a bootstrap made carries its token.
#[test]
fn a_bootstrap_clears_away_nothing_that_another_operator_made() {
    let mut scene = Scene::begun(&["a"]).starts("z");
    scene.observed.pods.get_mut("z").unwrap().token = Some("given up".to_owned());
    assert!(scene.writes().contains(&scene::delete_pod("z")));
    scene.observed.pods.get_mut("z").unwrap().token = None;
    assert!(!scene.writes().iter().any(destroys));
    assert_eq!(scene.plan().problems[0].reason, Reason::ForeignObjects);
}
