//! The rules that decide whether a member stays or is replaced.

use crate::plan::tests::scene::{Scene, at};
use crate::plan::{Fate, View};

/// For each member: its name, its fate, and true if its replacement joins first.
fn fates(scene: &Scene) -> Vec<(String, Fate, bool)> {
    let list = scene.observed.members.known().unwrap();
    let view = View::new(list, (&scene.desired, &scene.observed, at(1000)));
    let fates = view.members.into_iter();
    fates
        .map(|member| (member.name, member.fate, member.followed))
        .collect()
}

/// Three members without volumes whose pods must be recreated.
fn outdated() -> Scene {
    let mut scene = Scene::formed(&["a", "b", "c"]).aged();
    for pod in scene.observed.pods.values_mut() {
        pod.difference.pod = Some("another setting".into());
    }
    scene
}

#[test]
fn members_with_outdated_pods_are_replaced_one_by_one() {
    let fates = fates(&outdated());
    let followed = fates.iter().filter(|(.., followed)| *followed);
    let followed: Vec<&Fate> = followed.map(|(_, fate, _)| fate).collect();
    assert_eq!(followed, [&Fate::Leaves("another setting".into())]);
    let stays = fates.iter().filter(|(_, fate, _)| *fate == Fate::Stays);
    assert_eq!(stays.count(), 2);
}

#[test]
fn lost_member_is_replaced_before_outdated_members() {
    let mut scene = outdated();
    let pod = scene.observed.pods.get_mut("b").unwrap();
    pod.terminating = true;
    let fates = fates(&scene);
    assert!(fates.iter().all(|(.., followed)| !followed), "{fates:?}");
    let lost = fates
        .iter()
        .filter(|(_, fate, _)| matches!(fate, Fate::Lost(_)));
    let lost: Vec<&str> = lost.map(|(name, ..)| name.as_str()).collect();
    assert_eq!(lost, ["b"]);
}

/// The first rule that applies decides: the deleted PVC is reported, not its wrong StorageClass.
#[test]
fn deleted_pvc_takes_precedence_over_wrong_storage_class() {
    let mut scene = Scene::formed(&["a", "b", "c"]).durable().aged();
    scene.desired.claim = Some(crate::snapshot::Claim {
        class: Some("fast".into()),
        ..crate::snapshot::Claim::default()
    });
    scene.observed.disks.get_mut("b").unwrap().terminating = true;
    let fate = |name: &str| {
        let mut all = fates(&scene).into_iter();
        all.find(|(member, ..)| member == name).unwrap().1
    };
    let deleted = "the PersistentVolumeClaim of the member is being deleted";
    assert_eq!(fate("b"), Fate::Leaves(deleted.into()));
    assert!(matches!(fate("a"), Fate::Leaves(why) if why.contains("\"fast\"")));
}
