//! The token or the cluster ID in the status is wrong, for example because a person edited it (invariant 26).

use etcd::ClusterId;

use super::scene::Scene;
use crate::plan::tests::writes::Write;

fn scene() -> Scene {
    Scene::formed(&["a", "b", "c"]).durable()
}

#[test]
fn invariant_26_wrong_token_in_status_is_corrected_from_objects() {
    let mut scene = scene();
    let recorded = scene.observed.cluster_id;
    if let Some(intent) = &mut scene.observed.intent {
        intent.token = "another".into();
    }
    let writes = scene.writes();
    let [
        Write::RecordIntent {
            intent, cluster_id, ..
        },
    ] = writes.as_slice()
    else {
        panic!("{writes:?}");
    };
    assert_eq!((intent.token.as_str(), *cluster_id), ("token", recorded));
    assert_eq!(scene.plan().problems, []);
}

#[test]
fn invariant_26_wrong_cluster_id_in_status_is_corrected_from_objects() {
    let mut scene = scene();
    let marked = scene.observed.cluster_id.unwrap();
    scene.observed.cluster_id = Some(ClusterId(7));
    let writes = scene.writes();
    let [Write::RecordClusterId { cluster_id, .. }] = writes.as_slice() else {
        panic!("{writes:?}");
    };
    assert_eq!(*cluster_id, marked);
}

/// If the annotations of the objects contradict each other, the correct value is unknown. If both the token and the ID
/// in the status differ from the annotations, the objects may belong to another cluster.
#[test]
fn invariant_26_status_is_not_corrected_from_ambiguous_objects() {
    let corrects = |scene: &Scene| {
        let is_record = |write: &Write| {
            matches!(
                write,
                Write::RecordIntent { .. } | Write::RecordClusterId { .. }
            )
        };
        scene.writes().iter().any(is_record)
    };
    let mut differ = scene();
    if let Some(intent) = &mut differ.observed.intent {
        intent.token = "another".into();
    }
    assert!(corrects(&differ));
    differ.observed.pods.get_mut("a").unwrap().token = Some("third".into());
    assert!(!corrects(&differ));

    let mut unrelated = scene();
    unrelated.observed.cluster_id = Some(ClusterId(7));
    assert!(corrects(&unrelated));
    if let Some(intent) = &mut unrelated.observed.intent {
        intent.token = "another".into();
    }
    assert!(!corrects(&unrelated));
}

#[test]
fn invariant_26_wrong_annotations_of_listed_members_are_corrected() {
    let mut scene = scene();
    scene.observed.pods.get_mut("a").unwrap().token = Some("another".into());
    scene.observed.disks.get_mut("b").unwrap().token = Some("another".into());
    scene.observed.disks.get_mut("c").unwrap().version = Some("3.5.1".into());
    let writes = scene.writes();
    let is_done = |is: &dyn Fn(&Write) -> bool| writes.iter().any(is);
    assert!(is_done(
        &|write| matches!(write, Write::LabelPod(label) if label.member == "a")
    ));
    assert!(is_done(
        &|write| matches!(write, Write::LabelDisk(label) if label.member == "b")
    ));
    assert!(is_done(&|write| {
        matches!(write, Write::NoteVersion { member, version, .. } if member == "c" && version == "3.6.16")
    }));
    assert_eq!(writes.len(), 3, "{writes:?}");
}
