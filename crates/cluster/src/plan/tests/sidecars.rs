//! Members whose pods are not ready because of another container: a sidecar that starts late, or never.

use crate::plan::tests::scene::{self, Scene};
use crate::snapshot::{Cause, Ending};

/// Etcd runs in every pod; the pods of these have not been ready for as long as they are there.
fn late(mut scene: Scene, members: &[&str]) -> Scene {
    for member in members {
        let pod = scene.observed.pods.get_mut(*member).unwrap();
        (pod.ready, pod.unready_since) = (false, Some(pod.created));
    }
    scene
}

#[test]
fn a_member_whose_sidecar_is_late_counts_and_is_not_lost() {
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

/// Who has caught up votes; a quorum is not kept waiting by a container that is not etcd's.
#[test]
fn a_learner_whose_sidecar_is_late_gets_its_vote() {
    let scene = Scene::formed(&["a", "b"]).size(3).aged().learner("d");
    assert_eq!(late(scene, &["d"]).changes(), [scene::promote("d")]);
}

/// The pod has not been ready since long before, but its etcd was: see `observe/company.rs`.
#[test]
fn a_member_that_is_started_again_beside_a_late_sidecar_is_not_lost() {
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
