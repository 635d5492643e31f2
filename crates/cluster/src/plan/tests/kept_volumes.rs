//! Volumes of members that other software removed from etcd (invariant 25).

use etcd::KeyHash;

use crate::plan::tests::scene::{self, Scene, at, makes_pod};
use crate::plan::tests::writes::Write;
use crate::reason::Reason;
use crate::snapshot::{Removal, Seen};

fn three() -> Scene {
    Scene::formed(&["a", "b", "c"]).durable().aged()
}

/// Removes members from etcd's list. Their pods and volumes still exist.
fn vanished(mut scene: Scene, members: &[&str]) -> Scene {
    if let Seen::Known(list) = &mut scene.observed.members {
        list.members
            .retain(|one| !members.contains(&one.name.as_str()));
    }
    for member in members {
        scene.observed.statuses.remove(*member);
    }
    scene
}

fn noted(mut scene: Scene, member: &str, removal: Removal) -> Scene {
    scene.observed.disks.get_mut(member).unwrap().removal = Some(removal);
    scene
}

fn since(seconds: i64, majority: bool) -> Removal {
    Removal::ByOthers {
        since: at(1000 - seconds),
        majority,
    }
}

fn hashed(mut scene: Scene, of: impl Fn(&str) -> u32) -> Scene {
    for member in scene.observed.pods.keys() {
        let hash = KeyHash {
            hash: of(member),
            compacted: 1,
        };
        let seen = Seen::Known(Some(hash));
        scene.observed.hashes.insert(member.clone(), seen);
    }
    scene
}

fn deleted_volumes(scene: &Scene) -> Vec<String> {
    let deleted = |write| match write {
        Write::DeleteDisk { member, .. } => Some(member),
        _ => None,
    };
    scene.writes().into_iter().filter_map(deleted).collect()
}

fn notes(scene: &Scene) -> Vec<(String, Option<Removal>)> {
    let noted = |write| match write {
        Write::NoteRemoval {
            member, removal, ..
        } => Some((member, removal)),
        _ => None,
    };
    scene.writes().into_iter().filter_map(noted).collect()
}

fn problem(scene: &Scene) -> Option<String> {
    let problems = scene.plan().problems.into_iter();
    let mut kept = problems.filter(|problem| problem.reason == Reason::VolumesKept);
    kept.next().map(|problem| problem.message)
}

/// A person ran `etcdctl member remove` by mistake.
#[test]
fn invariant_25_volume_of_externally_removed_member_is_kept() {
    let scene = vanished(three(), &["c"]);
    assert_eq!(deleted_volumes(&scene), Vec::<String>::new());
    assert_eq!(notes(&scene), [("c".to_owned(), Some(since(0, false)))]);
    assert!(problem(&scene).unwrap().contains("kubectl delete pvc c"));
    // The operator deletes the pod of the removed member `c`, and the replacement `n` joins.
    assert!(scene.writes().contains(&scene::delete_pod("c")));
    let reserved = scene.clone().without_pod("c").reserved("n");
    assert!(matches!(&reserved.changes()[..], [Write::AddMember { member, .. }] if member == "n"));
}

/// A person started a member with `--force-new-cluster`.
#[test]
fn invariant_25_volumes_of_externally_removed_majority_are_kept() {
    let scene = vanished(three(), &["b", "c"]);
    assert_eq!(deleted_volumes(&scene), Vec::<String>::new());
    let expected = ["b", "c"].map(|name| (name.to_owned(), Some(since(0, true))));
    assert_eq!(notes(&scene), expected);
    // The cluster has its full size again, and the grace period has passed. The operator nevertheless keeps the
    // volumes.
    let mut whole = Scene::formed(&["a", "d", "e"]).durable().aged();
    for member in ["b", "c"] {
        whole = noted(whole.with_disk(member), member, since(900_000, true));
    }
    let whole = hashed(whole, |_| 7);
    assert_eq!(whole.writes(), []);
    assert!(problem(&whole).unwrap().contains("kubectl delete pvc b c"));
    // After a person has deleted the PVCs, the operator no longer reports them.
    let decided = whole.without_claim("b").without_claim("c");
    assert_eq!(problem(&decided), None);
}

/// A person removes a second member before the first removed member is replaced. Together, the two members are a
/// majority.
#[test]
fn second_external_removal_records_majority_loss_on_both_volumes() {
    let scene = vanished(three(), &["b", "c"]);
    let scene = noted(scene, "b", since(40, false));
    let expected = [
        ("b".to_owned(), Some(since(40, true))),
        ("c".to_owned(), Some(since(0, true))),
    ];
    assert_eq!(notes(&scene), expected);
}

#[test]
fn invariant_9_kept_volume_is_deleted_after_comparison_and_grace_period() {
    let whole = |seconds| {
        let scene = Scene::formed(&["a", "b", "d"]).durable().aged();
        noted(scene.with_disk("c"), "c", since(seconds, false))
    };
    assert_eq!(deleted_volumes(&hashed(whole(301), |_| 7)), ["c"]);
    assert_eq!(problem(&hashed(whole(301), |_| 7)), None);
    // The plan requests the hashes of the members' data only after the grace period.
    assert_eq!(whole(301).plan().asks, Some(100));
    assert_eq!(whole(200).plan().asks, None);
    for kept in [
        whole(301),
        hashed(whole(200), |_| 7),
        hashed(whole(301), |member| u32::from(member == "d")),
        hashed(whole(301).down("d"), |_| 7),
        hashed(whole(301).size(5), |_| 7),
    ] {
        assert_eq!(deleted_volumes(&kept), Vec::<String>::new());
        assert!(problem(&kept).is_some());
    }
}

#[test]
fn removal_is_recorded_on_pvc_before_member_is_removed() {
    let scene = three().without_pod("b").claim_deleted("b");
    // The PVC of `b` is already being deleted by a person, so the operator records no removal on it.
    assert_eq!(scene.all_changes(), [scene::remove("b")]);
    let shrinks = three().size(1).leader("a");
    let changes = shrinks.all_changes();
    let [
        Write::NoteRemoval {
            member, removal, ..
        },
        Write::Remove {
            member: removed, ..
        },
    ] = &changes[..]
    else {
        panic!("{changes:?}");
    };
    assert_eq!((member, removal), (removed, &Some(Removal::ByOperator)));
    // The removal is already recorded on the PVC, so the operator does not record it again.
    let again = noted(three().size(1), removed, Removal::ByOperator);
    assert_eq!(again.all_changes(), [scene::remove(removed)]);
    // The operator deletes the volume of a member if the operator itself has removed the member.
    let left = noted(
        vanished(three(), &["c"]).without_pod("c"),
        "c",
        Removal::ByOperator,
    );
    assert_eq!(deleted_volumes(&left), ["c"]);
}

#[test]
fn removal_record_of_listed_member_is_cleared() {
    for removal in [Removal::ByOperator, since(10, true)] {
        let scene = noted(three(), "b", removal);
        assert_eq!(notes(&scene), [("b".to_owned(), None)]);
    }
    // While the operator is about to remove the member, the record stays on the PVC.
    let shrinks = noted(three().size(1), "c", Removal::ByOperator);
    assert_eq!(notes(&shrinks), []);
}

/// With pods on the kept volumes, two clusters could serve clients: the old cluster, and the cluster that continued
/// without these members.
#[test]
fn invariant_25_no_pod_starts_on_kept_volumes_without_quorum() {
    let scene = three().without_pod("b").without_pod("c").silent();
    assert!(scene.writes().iter().any(|write| makes_pod(write, "b")));
    let mut kept = scene;
    for member in ["b", "c"] {
        kept = noted(kept, member, since(10, true));
    }
    let starts = |write: &Write| matches!(write, Write::CreatePod(_));
    assert!(!kept.writes().iter().any(starts), "{:?}", kept.writes());
}

#[test]
fn leftover_volume_with_another_token_is_deleted() {
    let mut scene = three().with_disk("z");
    let disk = scene.observed.disks.get_mut("z").unwrap();
    disk.token = Some("another".to_owned());
    disk.cluster_id = None;
    assert_eq!(deleted_volumes(&scene), ["z"]);
    assert_eq!(problem(&scene), None);
}
