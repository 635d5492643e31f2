//! Patches of observed objects. Each contains the UID or the resourceVersion as its precondition.

use api::names;
use api::version::EtcdVersion;
use jiff::Timestamp;
use member::{MetadataPatch, ResourcesPatch};
use runtime::apply;
use serde_json::{Value, json};

use super::{Builder, start};
use crate::action::{Kind, Patch, PatchForm, Rejection, Request, Resize};
use crate::plan::Explanation;
use crate::reason::Reason;
use crate::snapshot::{Changed, Removal, Role};
use crate::write::Label;

/// Sets the mark that a pod may exist, or removes it without `started`.
pub(super) fn mark(member: &str, started: bool, over: Option<&str>) -> Request {
    Request::Patch(marked(member, started, over))
}

/// Removes a mark. The precondition is the resourceVersion of the Service with the mark.
pub(crate) fn unmark(member: &str, version: &str) -> Patch {
    marked(member, false, Some(version))
}

fn marked(member: &str, started: bool, over: Option<&str>) -> Patch {
    let value = if started { json!("true") } else { Value::Null };
    let mut metadata = json!({ "annotations": { names::ANNOTATION_STARTED: value } });
    if let Some(over) = over {
        metadata["resourceVersion"] = json!(over);
    }
    merge(Kind::Service, member, &metadata)
}

/// Uses a value that no earlier mark had: a patch without a change keeps the resourceVersion.
pub(super) fn mark_again(member: &str, over: &str, now: Timestamp) -> Request {
    let metadata = json!({
        "annotations": { names::ANNOTATION_STARTED: now.to_string() },
        "resourceVersion": over,
    });
    Request::Patch(merge(Kind::Service, member, &metadata))
}

pub(super) fn note_removal(member: &str, over: &str, removal: Option<Removal>) -> Request {
    let metadata = json!({
        "annotations": { names::ANNOTATION_REMOVED: removal.map(Removal::note) },
        "resourceVersion": over,
    });
    Request::Patch(merge(Kind::VolumeClaim, member, &metadata))
}

pub(super) fn note_version(member: &str, uid: &str, version: &str) -> Request {
    let annotations = json!({ names::ANNOTATION_VERSION: version });
    annotate(Kind::VolumeClaim, (member, uid), &annotations)
}

pub(super) fn settle_image(member: &str, uid: &str) -> Request {
    let annotations = json!({ names::ANNOTATION_CHANGED: Value::Null });
    annotate(Kind::Pod, (member, uid), &annotations)
}

/// Kubernetes rejects this patch unless the StorageClass allows volume expansion.
pub(super) fn grow(member: &str, uid: &str, size: &str) -> Request {
    Request::Patch(Patch {
        kind: Kind::VolumeClaim,
        name: member.to_owned(),
        body: json!({
            "metadata": { "uid": uid },
            "spec": { "resources": { "requests": { "storage": size } } },
        }),
        form: PatchForm::Merge,
        rejection: Some(Rejection {
            what: format!("the volume of {member} does not grow"),
            remedy: "set allowVolumeExpansion: true in its StorageClass, or give \
                     spec.pod.persistentVolumeClaimSpec another storageClassName, and members are replaced one by one",
            reason: Reason::VolumeNotGrown,
        }),
    })
}

pub(super) fn metadata(member: &str, uid: &str, patch: &MetadataPatch) -> Request {
    let MetadataPatch {
        labels,
        annotations,
    } = patch;
    let metadata = json!({ "uid": uid, "labels": labels, "annotations": annotations });
    Request::Patch(merge(Kind::Pod, member, &metadata))
}

/// The response of the API server is recorded on the pod. A pod whose resize is rejected is recreated later.
pub(super) fn resize(member: &str, uid: &str, patch: &ResourcesPatch) -> Request {
    let container = json!({ "name": names::CONTAINER_ETCD, "resources": patch.resources });
    let note = |annotations: &Value| {
        let metadata = json!({ "uid": uid, "annotations": annotations });
        merge(Kind::Pod, member, &metadata)
    };
    Request::Resize(Box::new(Resize {
        patch: Patch {
            body: json!({ "metadata": { "uid": uid }, "spec": { "containers": [container] } }),
            form: PatchForm::Strategic,
            ..merge(Kind::Pod, member, &Value::Null)
        },
        accepted: note(&json!(patch.taken)),
        rejected: note(&json!(patch.refused)),
    }))
}

/// Sets annotations that make the kubelet reload the Secrets of a pod at once, instead of within a minute.
pub(super) fn tell(
    (member, uid): (&str, &str),
    (trust, authorities): (&Option<String>, &Option<String>),
    certificates: &str,
) -> Request {
    let mut annotations = json!({ names::ANNOTATION_CERTIFICATES: certificates });
    if let Some(trust) = trust {
        annotations[names::ANNOTATION_TRUST] = json!(trust);
    }
    if let Some(authorities) = authorities {
        annotations[names::ANNOTATION_AUTHORITIES] = json!(authorities);
    }
    annotate(Kind::Pod, (member, uid), &annotations)
}

impl Builder<'_> {
    /// Changes image and annotations in one request, so that the annotations always match the running version.
    pub(super) fn patch_image(
        &self,
        (member, uid): (&str, &str),
        version: &str,
        changed: &Changed,
    ) -> Result<Request, Explanation> {
        let parsed = EtcdVersion::parse(version);
        let parsed = parsed.map_err(|error| start::no_version(member, &error))?;
        let image = parsed.image(&self.desired.object.spec.repository);
        Ok(Request::Patch(Patch {
            body: json!({
                "metadata": {
                    "uid": uid,
                    "annotations": {
                        names::ANNOTATION_VERSION: version,
                        names::ANNOTATION_IMAGE: image,
                        names::ANNOTATION_CHANGED: changed.note(),
                    },
                },
                "spec": { "containers": [{ "name": names::CONTAINER_ETCD, "image": image }] },
            }),
            form: PatchForm::Strategic,
            ..merge(Kind::Pod, member, &Value::Null)
        }))
    }

    /// Sets owner, labels and identity of a pod or a PVC.
    pub(super) fn label(&self, kind: Kind, label: &Label) -> Request {
        let mut annotations = json!({ names::ANNOTATION_CLUSTER_TOKEN: label.token });
        if let Some(id) = label.cluster_id {
            annotations[names::ANNOTATION_CLUSTER_ID] = json!(id.to_string());
        }
        // The labels by which Services select pods may have been removed.
        let mut labels = json!(names::member_labels(&self.observed.cluster, &label.member));
        if kind == Kind::Pod {
            labels[names::LABEL_TOKEN] = json!(names::token_label(&label.token));
        }
        if let Some(role) = label.role {
            let (role, since) = match role {
                Role::Busy { since } => (names::ROLE_BUSY, json!(since.to_string())),
                role => (start::role_of(role).label(), Value::Null),
            };
            labels[names::LABEL_ROLE] = json!(role);
            annotations[names::ANNOTATION_BUSY_SINCE] = since;
        }
        let metadata = json!({
            "uid": label.uid,
            "labels": labels,
            "annotations": annotations,
            "ownerReferences": [apply::owner_reference(&self.desired.object)],
        });
        Request::Patch(merge(kind, &label.member, &metadata))
    }
}

fn annotate(kind: Kind, (name, uid): (&str, &str), annotations: &Value) -> Request {
    let metadata = json!({ "uid": uid, "annotations": annotations });
    Request::Patch(merge(kind, name, &metadata))
}

fn merge(kind: Kind, name: &str, metadata: &Value) -> Patch {
    Patch {
        kind,
        name: name.to_owned(),
        body: json!({ "metadata": metadata }),
        form: PatchForm::Merge,
        rejection: None,
    }
}
