//! Compares a running pod with the spec. Labels, annotations, CPU and memory change in place. CPU and memory change
//! through the subresource `resize`. Every other change requires a new pod.
//!
//! The annotations of a pod record its spec: a hash of the fields that require a new pod ([`spec_hash`]), and the
//! values of the fields that change in place. This module compares the recorded values with the spec, and not a built
//! pod with the running pod. The comparison therefore ignores:
//! - values that the API server, a webhook or the kubelet has set,
//! - differences between pods of two operator releases,
//! - the flags of the first start of a member.
//!
//! The cluster operator compares the image. This module performs no I/O.

use std::collections::BTreeMap;

use api::cluster::{EtcdClusterSpec, PodPolicy};
use api::names;
use api::version::EtcdVersion;
use k8s_openapi::api::core::v1::{Pod, PodCondition, ResourceRequirements};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::hash::{is_resizable, without_empty};
use super::{ANNOTATION_SPEC_HASH, spec_hash};

/// Annotation with the applied values of the fields that change in place. If the spec no longer contains one of the
/// recorded keys, the operator removes this key from the object.
pub(super) const ANNOTATION_APPLIED_SPEC: &str = "etcd.database.coreos.com/said";
/// Annotation with the CPU and memory of a resize that the API server has rejected for this pod.
const ANNOTATION_RESIZE_REFUSED: &str = "etcd.database.coreos.com/resize-refused";

/// The differences between a pod and the spec. Each field is one kind of change.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Difference {
    /// Labels and annotations to change in place, without a restart.
    pub metadata: Option<MetadataPatch>,
    /// CPU and memory to change in place. The API server or the node may reject this change. `None` if
    /// [`Difference::pod`] is set.
    pub resources: Option<ResourcesPatch>,
    /// The reason why the pod must be replaced. `None` if it can stay.
    pub pod: Option<String>,
    /// A resize that the node has not completed yet.
    pub resizing: Option<Resizing>,
}

impl Difference {
    /// True if the containers of the pod match the spec. Labels and annotations may differ.
    pub fn is_settled(&self) -> bool {
        self.resources.is_none() && self.pod.is_none() && self.resizing.is_none()
    }
}

/// Labels and annotations to change.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MetadataPatch {
    /// The new values of labels. `None` deletes a label.
    pub labels: BTreeMap<String, Option<String>>,
    /// The new values of annotations. `None` deletes an annotation.
    pub annotations: BTreeMap<String, Option<String>>,
}

/// A resize that the node has not completed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Resizing {
    /// True if the node must free resources first, which may never happen.
    pub deferred: bool,
    /// The reason from the kubelet.
    pub message: String,
}

/// The CPU and memory to set.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ResourcesPatch {
    /// The patch for `resources` of the etcd container. `null` deletes a value.
    pub resources: Value,
    /// The annotations to set after the API server has accepted the resize.
    pub taken: BTreeMap<String, Option<String>>,
    /// The annotations to set after the API server has rejected the resize.
    pub refused: BTreeMap<String, Option<String>>,
}

/// The fields of the spec that change in place.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
struct AppliedSpec {
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    labels: BTreeMap<String, String>,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    annotations: BTreeMap<String, String>,
    #[serde(skip_serializing_if = "Value::is_null")]
    resources: Value,
}

impl AppliedSpec {
    fn of(spec: &EtcdClusterSpec) -> Self {
        let none = PodPolicy::default();
        let policy = spec.pod.as_ref().unwrap_or(&none);
        let users = |map: &BTreeMap<String, String>, is_reserved: fn(&str) -> bool| {
            let users = map.iter().filter(|(key, _)| !is_reserved(key));
            users.map(|(k, v)| (k.clone(), v.clone())).collect()
        };
        Self {
            labels: users(&policy.labels, names::is_reserved_label),
            annotations: users(&policy.annotations, names::is_reserved_annotation),
            resources: policy.resources.as_ref().map_or(Value::Null, resizable),
        }
    }

    fn read(pod: &Pod) -> Option<Self> {
        serde_json::from_str(annotation(pod, ANNOTATION_APPLIED_SPEC)?).ok()
    }

    fn text(&self) -> String {
        serde_json::to_string(self).unwrap_or_default()
    }
}

/// The annotations that record the spec of a new pod.
pub(super) fn record(spec: &EtcdClusterSpec) -> [(String, String); 3] {
    [
        (names::ANNOTATION_TLS.to_owned(), tls(spec)),
        (ANNOTATION_SPEC_HASH.to_owned(), spec_hash(spec)),
        (
            ANNOTATION_APPLIED_SPEC.to_owned(),
            AppliedSpec::of(spec).text(),
        ),
    ]
}

/// The image and the etcd version of a pod, from its annotations.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Notes {
    /// The image in the annotation. If the annotation is missing, or has another tag or digest than the container, the
    /// image of the container.
    pub image: String,
    /// The etcd version, or `None` if it is unknown.
    pub version: Option<String>,
}

impl Notes {
    /// Reads the image and the version in the annotations of a pod. The image in the annotation is the requested image,
    /// because a webhook may replace the registry in the container. If the annotation and the container have different
    /// tags or digests, a user has changed the annotation, and the operator ignores it.
    ///
    /// If the requested image has a digest, its tag has no effect, so the version is the version in the annotation.
    pub fn of(pod: &Pod) -> Self {
        let image = image(pod);
        let version = annotation(pod, names::ANNOTATION_VERSION).cloned();
        let noted = annotation(pod, names::ANNOTATION_IMAGE).cloned();
        let noted = noted.filter(|noted| {
            let pinned = digest(noted);
            pinned.is_none() || pinned == digest(&image)
        });
        let is_pinned = noted
            .as_deref()
            .is_some_and(|noted| digest(noted).is_some());
        let Some(tag) = tag(&image).filter(|_| !is_pinned) else {
            return Self {
                image: noted.unwrap_or(image),
                version,
            };
        };
        let of_tag = || {
            EtcdVersion::parse(tag)
                .ok()
                .map(|version| version.to_string())
        };
        let is_of_tag = |version: &String| tag.trim_start_matches('v') == version;
        Self {
            version: version.filter(is_of_tag).or_else(of_tag),
            image: noted
                .filter(|noted| self::tag(noted) == Some(tag))
                .unwrap_or(image),
        }
    }

    /// The annotations that are missing or wrong, with their correct values.
    fn missing(&self, pod: &Pod) -> BTreeMap<String, Option<String>> {
        let version = self.version.clone();
        let notes = [
            (names::ANNOTATION_IMAGE, Some(self.image.clone())),
            (names::ANNOTATION_VERSION, version),
        ];
        let missing = notes
            .into_iter()
            .filter(|(key, value)| value.is_some() && annotation(pod, key) != value.as_ref());
        missing
            .map(|(key, value)| (key.to_owned(), value))
            .collect()
    }
}

fn image(pod: &Pod) -> String {
    let containers = pod.spec.iter().flat_map(|spec| &spec.containers);
    let etcd = { containers }.find(|one| one.name == names::CONTAINER_ETCD);
    etcd.and_then(|one| one.image.clone()).unwrap_or_default()
}

/// The tag of an image, if it has one.
fn tag(image: &str) -> Option<&str> {
    let name = image.split('@').next()?.rsplit('/').next()?;
    name.split_once(':').map(|(_, tag)| tag)
}

/// The digest of an image, if it has one.
fn digest(image: &str) -> Option<&str> {
    image.split_once('@').map(|(_, digest)| digest)
}

/// The TLS settings of a pod, as text for its annotation.
fn tls(spec: &EtcdClusterSpec) -> String {
    serde_json::to_string(&spec.tls).unwrap_or_default()
}

/// The [`spec_hash`] in the annotation of a pod. `None` if another operator has created the pod.
pub fn recorded_hash(pod: &Pod) -> Option<String> {
    annotation(pod, ANNOTATION_SPEC_HASH).cloned()
}

/// Compares a pod with the current spec.
pub fn difference(spec: &EtcdClusterSpec, pod: &Pod) -> Difference {
    let desired = AppliedSpec::of(spec);
    let recorded = recorded_hash(pod);
    let before = AppliedSpec::read(pod);
    let is_same = recorded.as_deref() == Some(&spec_hash(spec));
    let tls = is_same.then(|| tls(spec));
    let metadata = metadata(&desired, before.as_ref(), tls, pod);
    if !is_same {
        let why = if recorded.is_none() {
            "the pod was created by another operator"
        } else {
            "spec.pod, spec.etcd, spec.memberAddress or spec.TLS changed after the pod was created"
        };
        return Difference {
            metadata,
            pod: Some(why.to_owned()),
            ..Difference::default()
        };
    }
    let mut found = Difference {
        metadata,
        ..Difference::default()
    };
    resources(&desired, before.as_ref(), pod, &mut found);
    found
}

fn metadata(
    desired: &AppliedSpec,
    before: Option<&AppliedSpec>,
    tls: Option<String>,
    pod: &Pod,
) -> Option<MetadataPatch> {
    let none = AppliedSpec::default();
    let known = before.unwrap_or(&none);
    let same = known.labels == desired.labels && known.annotations == desired.annotations;
    let mut notes = Notes::of(pod).missing(pod);
    // `tls` is `Some` only if the pod has the hash of the current spec. An annotation with another value than `tls` was
    // then changed by a user, so this patch corrects the annotation without a new pod.
    if let Some(tls) = tls
        && annotation(pod, names::ANNOTATION_TLS) != Some(&tls)
    {
        notes.insert(names::ANNOTATION_TLS.to_owned(), Some(tls));
    }
    if same && before.is_some() {
        return (!notes.is_empty()).then(|| MetadataPatch {
            labels: BTreeMap::new(),
            annotations: notes,
        });
    }
    let change = |desired: &BTreeMap<String, String>, known: &BTreeMap<String, String>| {
        let removed = known.keys().filter(|key| !desired.contains_key(*key));
        let removed = removed.map(|key| (key.clone(), None));
        let set = desired.iter().map(|(k, v)| (k.clone(), Some(v.clone())));
        removed.chain(set).collect::<BTreeMap<_, _>>()
    };
    let mut annotations = change(&desired.annotations, &known.annotations);
    // The recorded CPU and memory stay, because this patch changes only metadata.
    let applied = AppliedSpec {
        resources: known.resources.clone(),
        ..desired.clone()
    };
    annotations.insert(ANNOTATION_APPLIED_SPEC.to_owned(), Some(applied.text()));
    annotations.extend(notes);
    Some(MetadataPatch {
        labels: change(&desired.labels, &known.labels),
        annotations,
    })
}

fn resources(
    desired: &AppliedSpec,
    before: Option<&AppliedSpec>,
    pod: &Pod,
    found: &mut Difference,
) {
    let known = before.map_or(&Value::Null, |applied| &applied.resources);
    let refused = annotation(pod, ANNOTATION_RESIZE_REFUSED);
    if *known == desired.resources {
        match resize(pod) {
            Some(Resize::Infeasible(message)) => {
                found.pod = Some(format!(
                    "the node of the pod cannot provide spec.pod.resources: {message}"
                ));
            }
            Some(Resize::Pending(resizing)) => found.resizing = Some(resizing),
            None => {}
        }
        return;
    }
    let requested = desired.resources.to_string();
    if refused == Some(&requested) {
        let why = "the API server rejects the change of spec.pod.resources in the running pod";
        found.pod = Some(why.to_owned());
        return;
    }
    let applied = AppliedSpec {
        resources: desired.resources.clone(),
        ..before.cloned().unwrap_or_default()
    };
    let one = |key: &str, value: Option<String>| BTreeMap::from([(key.to_owned(), value)]);
    let mut taken = one(ANNOTATION_APPLIED_SPEC, Some(applied.text()));
    taken.insert(ANNOTATION_RESIZE_REFUSED.to_owned(), None);
    found.resources = Some(ResourcesPatch {
        resources: patch(known, &desired.resources),
        taken,
        refused: one(ANNOTATION_RESIZE_REFUSED, Some(requested)),
    });
}

/// A resize that the kubelet has not completed, from the conditions `PodResizePending` and `PodResizeInProgress`.
enum Resize {
    Infeasible(String),
    Pending(Resizing),
}

fn resize(pod: &Pod) -> Option<Resize> {
    let conditions = pod.status.as_ref()?.conditions.as_deref();
    let conditions = conditions.unwrap_or_default();
    let condition = |kind: &str| {
        let is_true = |one: &&PodCondition| one.type_ == kind && one.status == "True";
        conditions.iter().find(is_true)
    };
    let message = |one: &PodCondition| {
        one.message
            .clone()
            .or(one.reason.clone())
            .unwrap_or_default()
    };
    if let Some(pending) = condition("PodResizePending") {
        return Some(match pending.reason.as_deref() {
            Some("Infeasible") => Resize::Infeasible(message(pending)),
            _ => Resize::Pending(Resizing {
                deferred: true,
                message: message(pending),
            }),
        });
    }
    let in_progress = |message: String| {
        Resize::Pending(Resizing {
            deferred: false,
            message,
        })
    };
    // `observed_generation` (since Kubernetes 1.33) is the newest generation of the pod that the kubelet has observed.
    let seen = pod.status.as_ref()?.observed_generation;
    let unseen = seen.is_some_and(|seen| seen > 0 && pod.metadata.generation > Some(seen));
    if unseen {
        return Some(in_progress(
            "the kubelet has not observed the change yet".to_owned(),
        ));
    }
    condition("PodResizeInProgress").map(|one| in_progress(message(one)))
}

/// The CPU and memory in the resources. Other resources cannot change in place, so they are part of the hash.
fn resizable(resources: &ResourceRequirements) -> Value {
    let pick = |side: &Option<BTreeMap<String, _>>| {
        let all = side.iter().flatten();
        let all = all.filter(|(name, _)| is_resizable(name));
        all.map(|(name, quantity)| (name.clone(), json!(quantity)))
            .collect::<serde_json::Map<_, _>>()
    };
    let set = without_empty(json!({
        "requests": pick(&resources.requests),
        "limits": pick(&resources.limits),
    }));
    match &set {
        Value::Object(sides) if sides.is_empty() => Value::Null,
        _ => set,
    }
}

/// The patch from the applied to the desired resources. As in Kubernetes, a request that is not set equals the limit.
fn patch(applied: &Value, desired: &Value) -> Value {
    let part = |of: &Value, side: &str| of[side].as_object().cloned().unwrap_or_default();
    let requests = |of: &Value| {
        let mut all = part(of, "limits");
        all.extend(part(of, "requests"));
        all
    };
    let change = |old: serde_json::Map<String, Value>, new: serde_json::Map<String, Value>| {
        let removed = old.into_iter().map(|(name, _)| (name, Value::Null));
        removed.chain(new).collect::<serde_json::Map<_, _>>()
    };
    json!({
        "requests": change(requests(applied), requests(desired)),
        "limits": change(part(applied, "limits"), part(desired, "limits")),
    })
}

fn annotation<'a>(pod: &'a Pod, key: &str) -> Option<&'a String> {
    pod.metadata.annotations.as_ref()?.get(key)
}

#[cfg(test)]
mod tests;
