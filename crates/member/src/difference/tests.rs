//! Tests of the comparison of a pod with the spec.

use k8s_openapi::api::core::v1::{PodStatus, Toleration};

use super::*;
use crate::fixture::{Fixture, spec};
use crate::{Member, Role, Start};

const MEMORY: &str = r#"{"pod":{"resources":{"limits":{"memory":"1Gi"}}}}"#;

fn pod_for(json: &str) -> Pod {
    Fixture::with(json).pod()
}

fn differs(pod: &Pod, json: &str) -> Difference {
    difference(&spec(json), pod)
}

fn annotate(pod: &mut Pod, changes: &BTreeMap<String, Option<String>>) {
    let annotations = pod.metadata.annotations.get_or_insert_default();
    apply(annotations, changes);
}

fn apply(map: &mut BTreeMap<String, String>, changes: &BTreeMap<String, Option<String>>) {
    for (key, value) in changes {
        match value {
            Some(value) => drop(map.insert(key.clone(), value.clone())),
            None => drop(map.remove(key)),
        }
    }
}

/// The pod after the API server has applied the patch.
fn patched(mut pod: Pod, patch: &MetadataPatch) -> Pod {
    annotate(&mut pod, &patch.annotations);
    apply(pod.metadata.labels.get_or_insert_default(), &patch.labels);
    pod
}

fn set_condition(pod: &mut Pod, kind: &str, reason: &str) {
    let condition = PodCondition {
        type_: kind.into(),
        status: "True".into(),
        reason: Some(reason.into()),
        message: Some("message of the kubelet".into()),
        ..PodCondition::default()
    };
    pod.status = Some(PodStatus {
        conditions: Some(vec![condition]),
        ..PodStatus::default()
    });
}

#[test]
fn new_pod_matches_its_spec() {
    for json in [
        "{}",
        MEMORY,
        r#"{"pod":{"labels":{"team":"a"},"annotations":{"note":"b"},"etcdEnv":[{"name":"A","value":"1"}]}}"#,
    ] {
        assert_eq!(
            differs(&pod_for(json), json),
            Difference::default(),
            "{json}"
        );
    }
}

#[test]
fn different_start_flags_require_no_new_pod() {
    let starts = [
        Start::Join {
            initial_cluster: "a=b".into(),
        },
        Start::OnDisk,
    ];
    for start in starts {
        let fixture = Fixture::default().start(start);
        let learner = Member {
            role: Role::Learner,
            ..fixture.member()
        };
        let pod = crate::pod(&fixture.members(), &learner);
        assert_eq!(differs(&pod, "{}"), Difference::default());
    }
}

/// The API server sets defaults, and a webhook adds a container.
#[test]
fn api_server_defaults_and_webhook_changes_are_ignored() {
    let mut pod = pod_for(MEMORY);
    let inside = pod.spec.as_mut().unwrap();
    inside.dns_policy = Some("ClusterFirst".into());
    inside.termination_grace_period_seconds = Some(30);
    inside.tolerations = Some(vec![Toleration {
        key: Some("node.kubernetes.io/not-ready".into()),
        ..Toleration::default()
    }]);
    let resources = inside.containers[0].resources.get_or_insert_default();
    let more = serde_json::from_value(json!({ "cpu": "100m", "memory": "2Gi" })).unwrap();
    resources.requests = Some(more);
    let sidecar = inside.containers[0].clone();
    inside.containers.push(sidecar);
    let labels = pod.metadata.labels.as_mut().unwrap();
    labels.insert("injected".into(), "true".into());
    assert_eq!(differs(&pod, MEMORY), Difference::default());
}

#[test]
fn changed_labels_and_annotations_are_patched_in_place() {
    let pod = pod_for(r#"{"pod":{"labels":{"team":"a","tier":"1"},"annotations":{"note":"b"}}}"#);
    let desired = r#"{"pod":{"labels":{"team":"c"},"annotations":{"other":"d"}}}"#;
    let found = differs(&pod, desired);
    assert!(found.is_settled());
    let patch = found.metadata.unwrap();
    let labels = BTreeMap::from([("team".into(), Some("c".into())), ("tier".into(), None)]);
    assert_eq!(patch.labels, labels);
    assert_eq!(patch.annotations["note"], None);
    assert_eq!(patch.annotations["other"], Some("d".into()));
    let pod = patched(pod, &patch);
    assert_eq!(differs(&pod, desired), Difference::default());
    assert_eq!(pod.metadata.labels.unwrap()["app"], "etcd");
}

#[test]
fn changes_of_reserved_labels_and_annotations_are_ignored() {
    let pod = pod_for("{}");
    let desired =
        r#"{"pod":{"labels":{"app":"x","etcd_node":"x"},"annotations":{"etcd.version":"9"}}}"#;
    assert_eq!(differs(&pod, desired), Difference::default());
}

#[test]
fn only_spec_changes_that_cannot_be_applied_in_place_require_new_pod() {
    let pod = pod_for("{}");
    for json in [
        r#"{"pod":{"etcdEnv":[{"name":"A","value":"1"}]}}"#,
        r#"{"pod":{"resources":{"limits":{"ephemeral-storage":"1Gi"}}}}"#,
        r#"{"etcd":{"snapshotCount":5000}}"#,
    ] {
        assert!(differs(&pod, json).pod.is_some(), "{json}");
    }
    // A new version or repository is no difference, because the cluster operator compares the image separately.
    for json in [
        r#"{"version":"3.5.35"}"#,
        r#"{"repository":"registry.local/etcd"}"#,
    ] {
        assert_eq!(differs(&pod, json), Difference::default(), "{json}");
    }
}

#[test]
fn image_annotation_is_used_unless_its_tag_or_digest_differs() {
    let tagged = "quay.io/coreos/etcd:v3.6.16";
    let pinned = "quay.io/coreos/etcd@sha256:01";
    let odd = "registry.local/etcd:stable@sha256:01";
    // The columns: the image in the annotation, the image of the container, and the expected image.
    for (noted, container, expected) in [
        (tagged, "mirror.local/etcd:v3.6.16", tagged),
        (tagged, "mirror.local/etcd@sha256:01", tagged),
        (tagged, "mirror.local/etcd:v3.6.16@sha256:01", tagged),
        (
            tagged,
            "mirror.local/etcd:v3.6.17",
            "mirror.local/etcd:v3.6.17",
        ),
        (pinned, "mirror.local/etcd@sha256:01", pinned),
        (
            pinned,
            "mirror.local/etcd@sha256:02",
            "mirror.local/etcd@sha256:02",
        ),
        (pinned, tagged, tagged),
        (odd, odd, odd),
    ] {
        let mut pod = pod_for("{}");
        crate::set_image(&mut pod, noted.to_owned());
        let etcd = &mut pod.spec.as_mut().unwrap().containers[0];
        etcd.image = Some(container.to_owned());
        let notes = Notes::of(&pod);
        assert_eq!(notes.image, expected, "{noted} {container}");
        // The version comes from the tag. For an image with a digest, the version is 3.6.16, from the annotation.
        let version = if expected.ends_with("v3.6.17") {
            "3.6.17"
        } else {
            "3.6.16"
        };
        assert_eq!(
            notes.version.as_deref(),
            Some(version),
            "{noted} {container}"
        );
    }
}

#[test]
fn changed_cpu_and_memory_are_patched_in_place_with_default_requests() {
    let pod = pod_for(MEMORY);
    let desired = r#"{"pod":{"resources":{"limits":{"memory":"2Gi"},"requests":{"cpu":"100m"}}}}"#;
    let found = differs(&pod, desired);
    assert_eq!((found.metadata, found.pod), (None, None));
    let patch = found.resources.unwrap();
    assert_eq!(
        patch.resources,
        json!({ "requests": { "cpu": "100m", "memory": "2Gi" }, "limits": { "memory": "2Gi" } })
    );
    let mut pod = pod;
    annotate(&mut pod, &patch.taken);
    assert_eq!(differs(&pod, desired), Difference::default());
    let back = differs(&pod, MEMORY).resources.unwrap();
    assert_eq!(
        back.resources,
        json!({ "requests": { "cpu": null, "memory": "1Gi" }, "limits": { "memory": "1Gi" } })
    );
}

#[test]
fn rejected_resize_requires_new_pod() {
    let mut pod = pod_for("{}");
    let patch = differs(&pod, MEMORY).resources.unwrap();
    annotate(&mut pod, &patch.refused);
    let found = differs(&pod, MEMORY);
    assert!(found.pod.is_some() && found.resources.is_none());
    assert_eq!(
        differs(&pod, "{}"),
        Difference::default(),
        "the spec was reverted"
    );
    let other = r#"{"pod":{"resources":{"limits":{"memory":"3Gi"}}}}"#;
    assert!(differs(&pod, other).resources.is_some());
}

#[test]
fn infeasible_resize_requires_new_pod_but_deferred_resize_waits() {
    let mut pod = pod_for(MEMORY);
    set_condition(&mut pod, "PodResizePending", "Infeasible");
    assert!(
        differs(&pod, MEMORY)
            .pod
            .unwrap()
            .contains("message of the kubelet")
    );
    assert!(
        differs(&pod, "{}").resources.is_some(),
        "reverting the spec resizes the pod in place"
    );
    for (kind, reason) in [
        ("PodResizePending", "Deferred"),
        ("PodResizeInProgress", "Error"),
    ] {
        set_condition(&mut pod, kind, reason);
        let found = differs(&pod, MEMORY);
        let resizing = found.resizing.unwrap();
        assert_eq!(resizing.deferred, reason == "Deferred");
        assert!(found.pod.is_none(), "{kind}");
    }
}

#[test]
fn metadata_patch_does_not_hide_resource_change() {
    let pod = pod_for("{}");
    let desired = r#"{"pod":{"labels":{"team":"a"},"resources":{"limits":{"memory":"1Gi"}}}}"#;
    let found = differs(&pod, desired);
    assert!(found.resources.is_some());
    let pod = patched(pod, &found.metadata.unwrap());
    let found = differs(&pod, desired);
    assert!(found.metadata.is_none() && found.resources.is_some());
}

#[test]
fn pod_of_another_operator_is_replaced() {
    let mut pod = pod_for("{}");
    let annotations = pod.metadata.annotations.as_mut().unwrap();
    annotations.remove(ANNOTATION_SPEC_HASH);
    annotations.remove(ANNOTATION_APPLIED_SPEC);
    assert!(
        differs(&pod, "{}")
            .pod
            .unwrap()
            .contains("another operator")
    );
}
