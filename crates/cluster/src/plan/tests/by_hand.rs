//! Changes by people and other software: removed labels and annotations, failed pods, membership changes with
//! `etcdctl`, and objects of other owners with the same names.

use etcd::{Member, MemberId, Members};

use crate::plan::tests::scene::{self, CLUSTER, Scene, at, delete_pod, makes_pod};
use crate::plan::tests::writes::Write;
use crate::reason::Reason;
use crate::snapshot::{Kept, Seen};

fn three() -> Scene {
    Scene::formed(&["a", "b", "c"]).durable()
}

/// Sets the pods of these members to the phase `Failed`, as after an eviction, a node shutdown, or a rejection by the
/// kubelet. The pod object remains, and its containers never restart.
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

// ---- failed pods ----

/// Invariant 8: a graceful node shutdown leaves failed pods.
#[test]
fn failed_pods_with_volumes_are_recreated() {
    assert_eq!(ended(three(), &["b"]).writes(), [delete_pod("b")]);
    let all = ended(three().silent(), &["a", "b", "c"]);
    assert_eq!(all.writes(), ["a", "b", "c"].map(delete_pod));
    // A pod that is already being deleted gets no second deletion request.
    let mut going = all.clone();
    for pod in going.observed.pods.values_mut() {
        pod.terminating = true;
    }
    assert_eq!(going.writes(), []);
    let gone = three().silent().without_pod("a");
    assert!(gone.writes().iter().any(|write| makes_pod(write, "a")));
}

/// Invariant 1: without a volume, the pod may be the only evidence that the member existed.
#[test]
fn failed_pod_without_volume_is_kept_without_quorum() {
    let scene = ended(Scene::formed(&["a", "b", "c"]).silent(), &["a"]);
    assert!(!scene.writes().iter().any(destroys));
    let claim_goes = ended(three().silent().claim_deleted("a"), &["a"]);
    assert!(!claim_goes.writes().iter().any(destroys));
}

#[test]
fn failed_pod_is_recreated_on_its_volume_during_bootstrap() {
    let scene = ended(Scene::starting(&["a", "b", "c"]).durable(), &["b"]);
    assert!(scene.writes().contains(&delete_pod("b")));
}

// ---- removed labels and annotations ----

/// Invariant 16: only a different token proves that a volume belongs to another cluster.
#[test]
fn volume_without_token_counts_as_volume_of_its_member() {
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
fn removed_labels_of_pods_and_pvcs_are_restored() {
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

// ---- changes with etcdctl ----

/// Changes the member's peer URL in etcd's list, as a person does with `etcdctl member update`.
fn moved(mut scene: Scene, member: &str, url: &str) -> Scene {
    if let Seen::Known(list) = &mut scene.observed.members {
        let found = list.members.iter_mut().find(|one| one.name == member);
        found.unwrap().peer_urls = vec![url.to_owned()];
    }
    scene
}

/// Invariant 5: every member keeps its pod and its volume.
#[test]
fn member_with_externally_changed_peer_urls_is_kept() {
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
    // A pod stays if its etcd reports the ID of a listed member, even if the list has another name for this member.
    let mut scene = moved(three(), "b", "http://etcd-1.example.com:2380");
    if let Seen::Known(list) = &mut scene.observed.members {
        list.members[1].name = "another".to_owned();
    }
    assert!(!scene.writes().iter().any(destroys));
}

/// Invariant 3: if a person adds a member with `etcdctl`, the operator does not remove another member for that reason.
#[test]
fn unstarted_external_member_causes_no_removal() {
    let three = || Scene::formed(&["a", "b", "c"]).aged();
    assert_eq!(three().added("elsewhere").changes(), []);
    assert_eq!(three().added_with_vote("elsewhere").changes(), []);
    // The external member does not prevent the replacement of a lost member of this cluster.
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

/// Invariant 16: a member that other software runs has no Kubernetes object, and may be part of a serving quorum.
#[test]
fn external_members_prevent_automatic_recovery() {
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
    // With an approval, the recovery starts: the person who approves may know that the external members are lost.
    scene.observed.recovery.approval = Some(CLUSTER.to_string());
    assert!(recovers(&scene));
}

/// Invariant 16: a pod whose owner is another object may still run a member of this cluster.
#[test]
fn pod_of_another_owner_prevents_automatic_recovery() {
    let mut scene = Scene::formed(&["a", "b", "c"]).silent_voter("a");
    scene.desired.recovery.automatic = true;
    scene.observed.recovery.unavailable_since = Some(at(0));
    scene = scene.without_pod("b").without_pod("c");
    scene.observed.members = Seen::Unknown("no quorum".into());
    assert!(recovers(&scene));
    scene.observed.strangers = vec!["pod b".to_owned()];
    assert!(!recovers(&scene));
}

// ---- objects of other owners with the same name ----

/// Another cluster may need an object of the same name: the headless Service of a cluster `db-client` has the name of
/// the client Service of `db`.
#[test]
fn objects_of_other_owners_are_reported_and_unchanged() {
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
    // If the spec disables the operator's PodDisruptionBudget, a user may create another budget with this name. The
    // operator leaves that budget unchanged.
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

/// Invariant 7: only objects with a token belong to a bootstrap.
#[test]
fn bootstrap_keeps_pods_without_token() {
    let mut scene = Scene::begun(&["a"]).starts("z");
    scene.observed.pods.get_mut("z").unwrap().token = Some("given up".to_owned());
    assert!(scene.writes().contains(&scene::delete_pod("z")));
    scene.observed.pods.get_mut("z").unwrap().token = None;
    assert!(!scene.writes().iter().any(destroys));
    assert_eq!(scene.plan().problems[0].reason, Reason::ForeignObjects);
}
