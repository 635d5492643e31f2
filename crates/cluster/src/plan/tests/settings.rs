//! Settings of the spec that the operator applies to running pods in place.

use std::collections::BTreeMap;

use member::{Difference, MetadataPatch, Resizing, ResourcesPatch};
use serde_json::json;

use crate::plan::tests::scene::Scene;
use crate::plan::tests::writes::Write;
use crate::reason::Reason;

fn metadata() -> Difference {
    Difference {
        metadata: Some(MetadataPatch::default()),
        ..Difference::default()
    }
}

fn resources() -> Difference {
    Difference {
        resources: Some(ResourcesPatch {
            resources: json!({}),
            taken: BTreeMap::new(),
            refused: BTreeMap::new(),
        }),
        ..Difference::default()
    }
}

fn differ(mut scene: Scene, members: &[&str], difference: &Difference) -> Scene {
    for member in members {
        let pod = scene.observed.pods.get_mut(*member).unwrap();
        pod.difference = difference.clone();
    }
    scene
}

impl Scene {
    pub(super) fn resized(self, member: &str) -> Self {
        differ(self, &[member], &resources())
    }
}

fn three() -> Scene {
    Scene::formed(&["a", "b", "c"]).durable().aged()
}

fn resized(scene: &Scene) -> Vec<String> {
    let writes = scene.writes().into_iter();
    let resized = writes.filter_map(|write| match write {
        Write::ResizePod { member, .. } => Some(member),
        _ => None,
    });
    resized.collect()
}

fn patched(scene: &Scene) -> usize {
    let writes = scene.writes().into_iter();
    writes
        .filter(|write| matches!(write, Write::PatchMetadata { .. }))
        .count()
}

fn ends_pods(scene: &Scene) -> bool {
    let mut writes = scene.writes().into_iter();
    writes.any(|write| matches!(write, Write::DeletePod { .. })) || !scene.changes().is_empty()
}

#[test]
fn changed_labels_and_annotations_need_no_restart() {
    let scene = differ(three(), &["a", "b", "c"], &metadata());
    assert_eq!(patched(&scene), 3);
    assert!(!ends_pods(&scene));
    // The operator makes this change although two members are down, because it restarts no container.
    assert_eq!(patched(&scene.down("b").down("c")), 3);
}

#[test]
fn invariant_18_members_are_resized_one_by_one_and_leader_last() {
    let all = differ(three(), &["a", "b", "c"], &resources());
    assert_eq!(resized(&all), ["b"]);
    assert!(!ends_pods(&all));
    assert_eq!(resized(&differ(three(), &["a"], &resources())), ["a"]);
    let busy = Difference {
        resizing: Some(Resizing {
            deferred: false,
            message: "PodResizeInProgress".into(),
        }),
        ..Difference::default()
    };
    let scene = differ(differ(three(), &["a", "c"], &resources()), &["b"], &busy);
    assert!(resized(&scene).is_empty());
    assert!(scene.waits().contains(&Reason::Resizing));
}

#[test]
fn deferred_resize_is_reported_and_does_not_delay_other_members() {
    let deferred = Difference {
        resizing: Some(Resizing {
            deferred: true,
            message: "Node didn't have enough memory".into(),
        }),
        ..Difference::default()
    };
    let scene = differ(
        differ(three(), &["a", "c"], &resources()),
        &["b"],
        &deferred,
    );
    assert_eq!(resized(&scene), ["c"]);
    assert!(scene.waits().contains(&Reason::ResizeDeferred));
}

#[test]
fn invariant_18_while_a_member_is_down_only_that_member_is_resized() {
    let scene = differ(three(), &["a", "b", "c"], &resources());
    assert_eq!(
        resized(&scene.clone().down("c")),
        ["c"],
        "too little memory may be the cause of the failure, so the pod must be resized"
    );
    let served = differ(three().down("c"), &["a", "b"], &resources());
    assert!(resized(&served).is_empty());
    assert!(served.waits().contains(&Reason::VoterNotHealthy));
}

#[test]
fn invariant_18_one_plan_never_both_resizes_and_recreates_pods() {
    let anew = Difference {
        pod: Some("its pod was made for another spec.etcd".into()),
        ..Difference::default()
    };
    let both = |scene: Scene| differ(differ(scene, &["b"], &resources()), &["c"], &anew);
    let (scene, shrinks) = (both(three()), both(three()).size(1));
    for scene in [scene, shrinks] {
        assert!(!ends_pods(&scene) || resized(&scene).is_empty());
    }
}
