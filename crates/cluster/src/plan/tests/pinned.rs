//! Tests of an image with a digest in `spec.image`: only a running member shows which version of etcd the image
//! contains.

use super::rolling::{one, patched, towards};
use super::scene::{Scene, delete_pod};
use crate::action::{Object, Request};
use crate::plan::tests::writes::Write;
use crate::reason::Reason;
use crate::snapshot::Changed;

const OLD: &str = "registry.local/etcd@sha256:01";
const NEW: &str = "registry.local/etcd@sha256:02";
const OTHER: &str = "registry.local/etcd@sha256:03";

impl Scene {
    /// Sets the image of the pods of these members.
    fn with_image(mut self, members: &[&str], image: &str) -> Self {
        for member in members {
            let pod = self.observed.pods.get_mut(*member).unwrap();
            image.clone_into(&mut pod.image);
        }
        self
    }

    /// Sets the image and the version in the spec.
    fn pins(mut self, image: &str, version: &str) -> Self {
        self = self.wants(version);
        image.clone_into(&mut self.desired.image);
        let spec = &mut self.desired.object.spec;
        spec.image = Some(image.to_owned());
        version.clone_into(&mut spec.version);
        self
    }
}

/// A cluster with the image `OLD` of etcd `from`. The spec has the image `NEW` of etcd `to`.
fn pinned(from: &str, to: &str) -> Scene {
    let scene = towards(from, to).compared();
    scene.with_image(&["a", "b", "c"], OLD).pins(NEW, to)
}

/// The patches of the plan: the images in patches of pods, and the images in annotations of pods and PVCs.
fn images(scene: &Scene) -> (Vec<String>, Vec<String>) {
    let plan = scene.drained().built();
    let actions = plan.step.chains.iter().flatten();
    let (mut set, mut noted) = (Vec::new(), Vec::new());
    for action in actions {
        let Request::Patch(patch) = &action.request else {
            continue;
        };
        let image = &patch.body["spec"]["containers"][0]["image"];
        set.extend(image.as_str().map(str::to_owned));
        let note = &patch.body["metadata"]["annotations"]["etcd.database.coreos.com/image"];
        noted.extend(note.as_str().map(str::to_owned));
    }
    (set, noted)
}

/// The versions that the plan sets in the annotations of pods. The pods are not restarted.
fn corrected(scene: &Scene) -> Vec<(String, String)> {
    let writes = scene.writes().into_iter();
    let corrected = writes.filter_map(|write| match write {
        Write::PatchMetadata { member, patch, .. } => {
            let version = patch.annotations.get("etcd.version")?.clone()?;
            Some((member, version))
        }
        _ => None,
    });
    corrected.collect()
}

#[test]
fn invariant_18_changed_digest_restarts_followers_one_by_one() {
    let scene = pinned("3.6.16", "3.6.16");
    assert_eq!(patched(&scene), one("b", "3.6.16"));
    assert_eq!(images(&scene).0, [NEW]);
    let changed = scene.changed("b", "3.6.16", "3.6.16");
    assert_eq!(patched(&changed.with_image(&["b"], NEW)), []);
    let next = pinned("3.6.16", "3.6.16").with_image(&["b"], NEW);
    assert_eq!(patched(&next), one("c", "3.6.16"));
    let done = pinned("3.6.16", "3.6.16").with_image(&["a", "b", "c"], NEW);
    assert_eq!(patched(&done), []);
    assert_eq!(done.problems(), []);
}

#[test]
fn change_from_tag_to_digest_and_back_restarts_members() {
    let tagged = towards("3.6.16", "3.6.16").compared();
    let to_digest = tagged.clone().pins(NEW, "3.6.16");
    assert_eq!(patched(&to_digest), one("b", "3.6.16"));
    let to_tag = tagged.with_image(&["a", "b", "c"], OLD);
    assert_eq!(patched(&to_tag), one("b", "3.6.16"));
    assert_eq!(images(&to_tag).0, ["etcd:v3.6.16"]);
}

#[test]
fn upgrade_records_image_and_version_before_change() {
    let scene = pinned("3.5.35", "3.6.16");
    assert_eq!(patched(&scene), one("b", "3.6.16"));
    let writes = scene.drained().writes().into_iter();
    let changes = writes.filter_map(|write| match write {
        Write::PatchImage { changed, .. } => Some(changed),
        _ => None,
    });
    let changes: Vec<Changed> = changes.collect();
    assert_eq!(changes[0].before(), format!("3.5.35 (image {OLD})"));
}

#[test]
fn failed_digest_stops_rollout_and_can_be_rolled_back() {
    let scene = pinned("3.6.16", "3.6.16");
    let scene = scene.changed("b", "3.6.16", "3.6.16").image_missing("b");
    let mut scene = scene.with_image(&["b"], NEW);
    let pod = scene.observed.pods.get_mut("b").unwrap();
    pod.changed.as_mut().unwrap().image = Some(OLD.to_owned());
    assert_eq!(patched(&scene), []);
    let problems = scene.plan().problems;
    let stopped = problems
        .iter()
        .find(|problem| problem.reason == Reason::UpgradeStopped);
    let message = &stopped.unwrap().message;
    let remedy = format!("set spec.version to 3.6.16 (image {OLD}) to roll back");
    assert!(message.contains(&remedy), "{message}");
    let back = scene.pins(OLD, "3.6.16");
    assert_eq!(patched(&back), one("b", "3.6.16"));
    assert_eq!(images(&back).0, [OLD]);
}

/// A cluster of etcd 3.5.35 in which `b` has the new image. The image contains 3.6.15, but the spec says 3.6.16.
fn mislabeled() -> Scene {
    let scene = pinned("3.5.35", "3.6.16").made_for("b", "3.6.16");
    scene.with_image(&["b"], NEW).answers_as("b", "3.6.15")
}

#[test]
fn invariant_39_wrong_version_of_image_stops_rollout() {
    let scene = mislabeled();
    assert_eq!(patched(&scene), []);
    assert_eq!(corrected(&scene), one("b", "3.6.15"));
    assert_eq!(scene.problems(), [Reason::VersionMismatch]);
    let noted = mislabeled().made_for("b", "3.6.15");
    let noted = noted.with_image(&["b"], NEW);
    assert_eq!((patched(&noted), corrected(&noted)), (vec![], vec![]));
    assert_eq!(noted.problems(), [Reason::VersionMismatch]);
    // The user can correct the version or the image.
    let version = noted.clone().pins(NEW, "3.6.15");
    assert_eq!(patched(&version), one("c", "3.6.15"));
    assert_eq!(version.problems(), []);
    let image = noted.pins(OTHER, "3.6.16");
    assert_eq!(patched(&image), one("b", "3.6.16"));
    assert_eq!(image.problems(), []);
}

#[test]
fn invariant_39_new_version_without_new_image_is_reported() {
    let scene = pinned("3.6.16", "3.6.16").pins(OLD, "3.6.17");
    assert_eq!(patched(&scene), []);
    assert_eq!(corrected(&scene), []);
    assert_eq!(scene.problems(), [Reason::VersionMismatch]);
}

#[test]
fn invariant_39_version_answer_of_old_container_is_ignored() {
    let mut scene = mislabeled().answers_as("b", "3.5.35");
    scene.observed.pods.get_mut("b").unwrap().changed = Some(Changed {
        from: "3.5.35".to_owned(),
        restarts: 0,
        unreadable: false,
        image: Some(OLD.to_owned()),
    });
    assert_eq!((patched(&scene), corrected(&scene)), (vec![], vec![]));
    assert_eq!(scene.problems(), []);
}

#[test]
fn recreated_pod_has_recorded_image_of_its_version() {
    let scene = Scene::formed(&["a", "b", "c"]).durable();
    let scene = scene.all_run("3.5.35").with_image(&["a", "b", "c"], OLD);
    let mut scene = scene.pins(NEW, "3.6.16").without_pod("b");
    let image_of_b = |scene: &Scene| {
        let plan = scene.built();
        let pods = plan.step.chains.iter().flatten().filter_map(|action| {
            let Request::Create(Object::Pod(pod)) = &action.request else {
                return None;
            };
            pod.spec.as_ref()?.containers.first()?.image.clone()
        });
        pods.collect::<Vec<String>>()
    };
    // Without an image recorded on its PVC, `b` gets the image of the other members with its version.
    assert_eq!(image_of_b(&scene), [OLD]);
    let disk = scene.observed.disks.get_mut("b").unwrap();
    disk.image = Some(OTHER.to_owned());
    assert_eq!(image_of_b(&scene), [OTHER]);
    // A new pod with the version of the spec gets the image of the spec.
    let disk = scene.observed.disks.get_mut("b").unwrap();
    (disk.version, disk.image) = (Some("3.6.16".to_owned()), None);
    assert_eq!(image_of_b(&scene), [NEW]);
    // Invariant 26: for the version of the spec, the image recorded on the PVC counts only if a ready pod has it.
    let disk = scene.observed.disks.get_mut("b").unwrap();
    disk.image = Some(OTHER.to_owned());
    assert_eq!(image_of_b(&scene), [NEW]);
    let mut stopped = scene.clone().with_image(&["a"], OTHER);
    assert_eq!(image_of_b(&stopped), [OTHER]);
    stopped.observed.pods.get_mut("a").unwrap().ready = false;
    assert_eq!(image_of_b(&stopped), [NEW]);
    // After a failed upgrade, the spec names the former version, and only the PVC names the image of the later version.
    assert_eq!(image_of_b(&scene.pins(OLD, "3.5.35")), [OTHER]);
}

#[test]
fn changed_image_is_recorded_on_volume_before_restart() {
    let scene = Scene::formed(&["a", "b", "c"]).durable().compared();
    let scene = scene.with_image(&["a", "b", "c"], OLD).pins(NEW, "3.6.16");
    // The plan sets the new image in the pod once, and records it on the PVC and on the pod.
    let (set, noted) = images(&scene);
    assert_eq!((set.len(), noted), (1, vec![NEW.to_owned(); 2]));
}

/// The images that the plan records on PVCs; `None` for the removal of a record.
fn recorded(scene: &Scene) -> Vec<Option<String>> {
    let plan = scene.built();
    let actions = plan.step.chains.iter().flatten();
    let records = actions.filter_map(|action| {
        let Request::Patch(patch) = &action.request else {
            return None;
        };
        let notes = patch.body["metadata"]["annotations"].as_object()?;
        let image = notes.get("etcd.database.coreos.com/image")?;
        let is_of_pvc = patch.body["spec"].is_null();
        is_of_pvc.then(|| image.as_str().map(str::to_owned))
    });
    records.collect()
}

/// The operator recorded the image `NEW` on the PVC of `b`, but the API server rejected the patch of the pod. Then the
/// user set the image in the spec back to `OLD`.
#[test]
fn invariant_26_image_of_interrupted_change_is_corrected_on_volume() {
    let scene = Scene::formed(&["a", "b", "c"]).durable().compared();
    let tagged = scene.clone();
    let mut scene = scene.with_image(&["a", "b", "c"], OLD).pins(OLD, "3.6.16");
    for disk in scene.observed.disks.values_mut() {
        disk.image = Some(OLD.to_owned());
    }
    assert_eq!(recorded(&scene), []);
    let with_record = |mut scene: Scene, image: &str| {
        let disk = scene.observed.disks.get_mut("b").unwrap();
        disk.image = Some(image.to_owned());
        scene
    };
    let reverted = with_record(scene, NEW);
    assert_eq!(recorded(&reverted), [Some(OLD.to_owned())]);
    // Until the pod has the image of the spec, only the rolling update changes the record.
    let retried = reverted.pins(NEW, "3.6.16");
    assert_eq!(images(&retried).0, [NEW]);
    assert_eq!(recorded(&retried.drained()), []);
    // Without `spec.image`, the operator removes the recorded image from the PVC.
    assert_eq!(recorded(&with_record(tagged, OTHER)), [None]);
}

/// The spec has an image only for a version that the members cannot run, and the pod of `b` must be recreated.
#[test]
fn recreated_pod_keeps_its_image_while_version_is_refused() {
    let scene = Scene::formed(&["a", "b", "c"]).durable().compared();
    let scene = scene.all_run("3.5.35").with_image(&["a", "b", "c"], OLD);
    let mut scene = scene.pins(NEW, "3.7.3");
    let pod = scene.observed.pods.get_mut("b").unwrap();
    pod.difference.pod = Some("its pod was made for another spec.etcd".to_owned());
    for version in ["3.5.35", "3.5.34"] {
        let disk = scene.observed.disks.get_mut("b").unwrap();
        (disk.version, disk.image) = (Some(version.to_owned()), Some(OTHER.to_owned()));
        let drained = scene.drained();
        assert!(drained.writes().contains(&delete_pod("b")));
        let recorded = recorded(&drained);
        assert!(!recorded.is_empty());
        let is_old = |image: &Option<String>| image.as_deref() == Some(OLD);
        assert!(recorded.iter().all(is_old), "{version}: {recorded:?}");
    }
}
