//! Members whose pods are not ready because of a sidecar that starts late or never.

use crate::plan::tests::scene::{self, Scene};
use crate::snapshot::{Cause, Ending};

/// Marks the pods of these members as never ready. etcd runs in every pod.
fn late(mut scene: Scene, members: &[&str]) -> Scene {
    for member in members {
        let pod = scene.observed.pods.get_mut(*member).unwrap();
        (pod.ready, pod.unready_since) = (false, Some(pod.created));
    }
    scene
}

#[test]
fn member_with_unready_sidecar_counts_as_healthy() {
    let three = || Scene::formed(&["a", "b", "c"]);
    for scene in [three(), three().durable()] {
        for members in [&["b"][..], &["a", "b", "c"]] {
            let scene = late(scene.clone(), members);
            assert_eq!(scene.changes(), [], "{members:?}");
            assert_eq!(scene.writes(), [], "{members:?}");
            assert!(scene.waits().is_empty(), "{members:?}");
        }
    }
}

/// The operator promotes a learner that has caught up, even if another container in its pod is not ready.
#[test]
fn learner_with_unready_sidecar_is_promoted() {
    let scene = Scene::formed(&["a", "b"]).size(3).aged().learner("d");
    assert_eq!(late(scene, &["d"]).changes(), [scene::promote("d")]);
}

/// The pod has not been ready for a long time because of its sidecar, but etcd has served in the meantime (see
/// `observe/sidecars.rs`).
#[test]
fn restarted_member_with_unready_sidecar_is_not_replaced() {
    let mut scene = Scene::formed(&["a", "b", "c"]).durable().not_running("b");
    let at = scene::at(990);
    scene.observed.pods.get_mut("b").unwrap().restarts = 7;
    for cause in [
        Cause::Failed("exit code 1".into()),
        Cause::Data("crc".into()),
    ] {
        let pod = scene.observed.pods.get_mut("b").unwrap();
        (pod.ending, pod.unready_since) = (Some(Ending { at, cause }), Some(at));
        assert_eq!(scene.changes(), []);
    }
}
