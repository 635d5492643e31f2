//! Patches of observed objects. Each patch contains the UID or the resourceVersion of its object as precondition.

use api::names;
use api::version::EtcdVersion;
use etcd::ClusterId;
use member::tls::Authorities;
use member::{MetadataPatch, ResourcesPatch};
use runtime::apply;
use serde_json::{Value, json};

use super::{Builder, Event, action, start};
use crate::action::{Action, Kind, Patch, PatchForm, Rejection, Request, Resize};
use crate::plan::Explanation;
use crate::reason::Reason;
use crate::snapshot::{Changed, Disk, Removal, RetentionNotes, Role};

/// The role, token and cluster ID for the labels and annotations of a pod or PVC.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Label {
    /// The member whose pod and PVC are labeled.
    pub member: String,
    /// UID precondition: the patch does not change another object of the same name.
    pub uid: String,
    /// The role label; `None` leaves the label unchanged.
    pub role: Option<Role>,
    /// The cluster token.
    pub token: String,
    /// The cluster ID; `None` until etcd has reported it.
    pub cluster_id: Option<ClusterId>,
    /// The voters and the TLS settings, which a retained PVC records for a later EtcdCluster of the same name; `None`
    /// leaves the annotations unchanged.
    pub retention: Option<RetentionNotes>,
}

/// Records on a member's PVC that the operator or other software removed the member from etcd. `None` deletes the
/// record.
pub(crate) fn note_removal(member: &str, disk: &Disk, removal: Option<Removal>) -> Action {
    let metadata = json!({
        "annotations": { names::ANNOTATION_REMOVED: removal.map(Removal::note) },
        "resourceVersion": disk.resource_version,
    });
    let event: Event = match removal {
        Some(Removal::ByOthers { .. }) => Some((Reason::VolumeKept, "Keep")),
        _ => None,
    };
    let text = match removal {
        Some(Removal::ByOperator) => {
            format!(
                "record on the PersistentVolumeClaim of {member} that the operator removes the member"
            )
        }
        Some(Removal::ByOthers { .. }) => format!(
            "keep the PersistentVolumeClaim of {member}: the member was removed from etcd, but not by the operator"
        ),
        None => format!(
            "delete the record on the PersistentVolumeClaim of {member} that the member was removed: etcd still lists \
             the member"
        ),
    };
    let patch = merge(Kind::VolumeClaim, member, &metadata);
    action("before-note-removal", event, text, Request::Patch(patch))
}

/// Records on the PVC of a member the version with which the member starts next, and its image if the image has a
/// digest. `served`: the version that last served the data, if it differs from `version` (invariant 30). One request
/// sets all annotations, so that they always match.
pub(crate) fn note_version(
    (member, uid): (&str, &str),
    (version, image): (&str, Option<&str>),
    served: Option<&str>,
) -> Action {
    let annotations = json!({
        names::ANNOTATION_VERSION: version,
        names::ANNOTATION_IMAGE: image,
        names::ANNOTATION_SERVED: served,
    });
    action(
        "before-note-version",
        None,
        format!("record the etcd version {version} on the PersistentVolumeClaim of {member}"),
        annotate(Kind::VolumeClaim, (member, uid), &annotations),
    )
}

/// Deletes the annotation about an image change, because the member is healthy with the new image.
pub(crate) fn clear_image_change(member: &str, uid: &str) -> Action {
    let annotations = json!({ names::ANNOTATION_CHANGED: Value::Null });
    action(
        "before-settle-image",
        None,
        format!("remove from the pod of {member} the annotation about its image change"),
        annotate(Kind::Pod, (member, uid), &annotations),
    )
}

/// Requests a larger volume. Kubernetes rejects the patch unless the StorageClass allows volume expansion.
pub(crate) fn grow_volume(member: &str, uid: &str, size: &str) -> Action {
    let patch = Patch {
        body: json!({
            "metadata": { "uid": uid },
            "spec": { "resources": { "requests": { "storage": size } } },
        }),
        rejection: Some(Rejection {
            what: format!("the volume of {member} does not grow"),
            remedy: "set allowVolumeExpansion: true in its StorageClass. Or set another storageClassName in spec.pod.persistentVolumeClaimSpec: the operator then replaces the members one by one",
            reason: Reason::VolumeNotGrown,
        }),
        ..merge(Kind::VolumeClaim, member, &Value::Null)
    };
    action(
        "before-grow-disk",
        Some((Reason::VolumeClaimGrown, "Patch")),
        format!("request {size} for the volume of {member}"),
        Request::Patch(patch),
    )
}

pub(crate) fn change_metadata(member: &str, uid: &str, patch: &MetadataPatch) -> Action {
    let MetadataPatch {
        labels,
        annotations,
    } = patch;
    let metadata = json!({ "uid": uid, "labels": labels, "annotations": annotations });
    action(
        "before-patch-metadata",
        Some((Reason::PodPatched, "Patch")),
        format!("change labels and annotations of the pod of {member}"),
        Request::Patch(merge(Kind::Pod, member, &metadata)),
    )
}

/// Changes CPU and memory of a running pod, and records the API server's response on the pod. If the API server
/// rejects the resize, the operator recreates the pod later.
pub(crate) fn resize_pod(member: &str, uid: &str, patch: &ResourcesPatch) -> Action {
    let container = json!({ "name": names::CONTAINER_ETCD, "resources": patch.resources });
    let note = |annotations: &Value| {
        let metadata = json!({ "uid": uid, "annotations": annotations });
        merge(Kind::Pod, member, &metadata)
    };
    let resize = Resize {
        patch: Patch {
            body: json!({ "metadata": { "uid": uid }, "spec": { "containers": [container] } }),
            form: PatchForm::Strategic,
            ..merge(Kind::Pod, member, &Value::Null)
        },
        accepted: note(&json!(patch.taken)),
        rejected: note(&json!(patch.refused)),
    };
    action(
        "before-resize-pod",
        Some((Reason::PodResized, "Resize")),
        format!("change CPU and memory of the pod of {member}"),
        Request::Resize(Box::new(resize)),
    )
}

/// Annotates a pod with a digest of its certificates, so that the kubelet updates the mounted Secrets at once instead
/// of within a minute. `trust` and `authorities` set the annotations about the CAs with which the pod was started;
/// `None` leaves an annotation unchanged.
pub(crate) fn notify_pod(
    (member, uid): (&str, &str),
    (trust, authorities): (Option<&String>, Option<&Authorities>),
    certificates: &str,
) -> Action {
    let mut annotations = json!({ names::ANNOTATION_CERTIFICATES: certificates });
    if let Some(trust) = trust {
        annotations[names::ANNOTATION_TRUST] = json!(trust);
    }
    if let Some(authorities) = authorities {
        annotations[names::ANNOTATION_AUTHORITIES] = json!(authorities.to_string());
    }
    let text = format!("annotate the pod of {member} with the digest of its new certificates");
    let request = annotate(Kind::Pod, (member, uid), &annotations);
    action("before-tell-certificates", None, text, request)
}

impl Builder<'_> {
    /// Changes the image of a running pod; the kubelet then restarts the container in place. One request changes the
    /// image and the annotations, so that the annotations always match the running version.
    pub(crate) fn change_image(
        &self,
        (member, uid): (&str, &str),
        version: &str,
        changed: &Changed,
    ) -> Result<Action, Explanation> {
        let parsed = EtcdVersion::parse(version);
        let parsed = parsed.map_err(|error| start::no_version(member, &error))?;
        let image = self.desired.object.spec.image_of(&parsed);
        let patch = Patch {
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
        };
        // `changed.from` is the version that the member last ran. It equals `version` if only the repository or the
        // digest changes, or if a rollback returns to this version before the newer version ran.
        let text = if changed.from == version {
            format!("set the image of {member} to {image}")
        } else {
            format!("change {member} from etcd {} to {version}", changed.from)
        };
        Ok(action(
            "before-patch-image",
            Some((Reason::MemberVersionChanged, "Upgrade")),
            text,
            Request::Patch(patch),
        ))
    }

    /// Sets owner, role and cluster ID of a pod.
    pub(crate) fn label_pod(&self, label: &Label) -> Action {
        action(
            "before-label-pod",
            None,
            format!("label the pod of {}", label.member),
            self.label(Kind::Pod, label),
        )
    }

    /// Sets owner and cluster ID of a PVC.
    pub(crate) fn label_volume(&self, label: &Label) -> Action {
        action(
            "before-label-disk",
            None,
            format!("label the PersistentVolumeClaim of {}", label.member),
            self.label(Kind::VolumeClaim, label),
        )
    }

    /// Sets owner, labels and identity of a pod or a PVC.
    fn label(&self, kind: Kind, label: &Label) -> Request {
        let mut annotations = json!({ names::ANNOTATION_CLUSTER_TOKEN: label.token });
        if let Some(id) = label.cluster_id {
            annotations[names::ANNOTATION_CLUSTER_ID] = json!(id.to_string());
        }
        // The patch restores labels that other software has removed, because Services select the pod by these labels.
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
        if let Some(RetentionNotes { voters, tls }) = &label.retention {
            let list: Vec<&str> = voters.iter().map(String::as_str).collect();
            let list = (!list.is_empty()).then(|| list.join(","));
            annotations[names::ANNOTATION_VOTERS] = json!(list);
            annotations[names::ANNOTATION_TLS] = json!(tls);
        }
        // Invariant 35: a retained PVC gets no owner, because garbage collection deletes a PVC whose owner is deleted.
        let retained = kind == Kind::VolumeClaim && self.desired.object.spec.retains_volumes();
        let owner = apply::owner_reference(&self.desired.object).filter(|_| !retained);
        let metadata = json!({
            "uid": label.uid,
            "labels": labels,
            "annotations": annotations,
            "ownerReferences": owner.map(|owner| [owner]),
        });
        Request::Patch(merge(kind, &label.member, &metadata))
    }
}

fn annotate(kind: Kind, (name, uid): (&str, &str), annotations: &Value) -> Request {
    let metadata = json!({ "uid": uid, "annotations": annotations });
    Request::Patch(merge(kind, name, &metadata))
}

pub(super) fn merge(kind: Kind, name: &str, metadata: &Value) -> Patch {
    Patch {
        kind,
        name: name.to_owned(),
        body: json!({ "metadata": metadata }),
        form: PatchForm::Merge,
        rejection: None,
    }
}
