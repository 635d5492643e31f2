//! What of a running pod is not as it would be built for the same member today, and how it gets there: labels and
//! annotations in place, CPU and memory by the pod's subresource `resize`, everything else by a new pod.
//!
//! Pure. What the user said when the pod was made stands on it: a hash of what it cannot take while it runs
//! ([`spec_hash`]), and the words about what it can. Words are compared with words, never a built pod with a running
//! one; so what the API server, a webhook or a kubelet fills in is no difference, nor is what another release of the
//! operator builds otherwise, nor what a member is told at its first start. The image is compared by whoever plans
//! versions.

use std::collections::BTreeMap;

use api::cluster::{EtcdClusterSpec, PodPolicy};
use api::names;
use api::version::EtcdVersion;
use k8s_openapi::api::core::v1::{Pod, PodCondition, ResourceRequirements};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::hash::{is_resizable, said_only};
use super::{ANNOTATION_SPEC_HASH, spec_hash};

/// Annotation of a pod with what the user said of it that is changed in place: labels, annotations, CPU and memory.
/// It tells which keys to take away when the spec does not name them any more.
pub(super) const ANNOTATION_SAID: &str = "etcd.database.coreos.com/said";
/// Annotation of a pod with the CPU and memory the API server refused to give it in place.
const ANNOTATION_RESIZE_REFUSED: &str = "etcd.database.coreos.com/resize-refused";

/// What of a pod differs, and the remedy for each part. Nothing, where the pod is as it should be.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Difference {
    /// To be changed in place, without a restart.
    pub metadata: Option<MetadataPatch>,
    /// To be changed in place where the API server and the node allow it; never beside [`Difference::pod`].
    pub resources: Option<ResourcesPatch>,
    /// The pod has to be made anew, and this is why.
    pub pod: Option<String>,
    /// CPU and memory were asked for and the node has not given them yet.
    pub resizing: Option<Resizing>,
}

impl Difference {
    /// Nothing differs that concerns the pod's containers.
    pub fn is_settled(&self) -> bool {
        self.resources.is_none() && self.pod.is_none() && self.resizing.is_none()
    }
}

/// Labels and annotations to set; without a value to take away.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MetadataPatch {
    /// By key.
    pub labels: BTreeMap<String, Option<String>>,
    /// By key.
    pub annotations: BTreeMap<String, Option<String>>,
}

/// CPU and memory that a node has not given yet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Resizing {
    /// It will when something else on it has gone, nobody knows when.
    pub deferred: bool,
    /// The kubelet's words.
    pub words: String,
}

/// CPU and memory to set.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ResourcesPatch {
    /// The etcd container's `resources`; `null` takes away.
    pub resources: Value,
    /// Annotations to set when that was taken.
    pub taken: BTreeMap<String, Option<String>>,
    /// Annotations to set when that was refused for good.
    pub refused: BTreeMap<String, Option<String>>,
}

/// What the user said of a pod that is changed in place.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
struct Said {
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    labels: BTreeMap<String, String>,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    annotations: BTreeMap<String, String>,
    #[serde(skip_serializing_if = "Value::is_null")]
    resources: Value,
}

impl Said {
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
        serde_json::from_str(annotation(pod, ANNOTATION_SAID)?).ok()
    }

    fn text(&self) -> String {
        serde_json::to_string(self).unwrap_or_default()
    }
}

/// The annotations that tell what a pod was made for.
pub(super) fn record(spec: &EtcdClusterSpec) -> [(String, String); 3] {
    [
        (names::ANNOTATION_TLS.to_owned(), tls(spec)),
        (ANNOTATION_SPEC_HASH.to_owned(), spec_hash(spec)),
        (ANNOTATION_SAID.to_owned(), Said::of(spec).text()),
    ]
}

/// The image and the version a pod was made for, as its annotations say.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Notes {
    /// The image; without an annotation that can be true, that of the container.
    pub image: String,
    /// The version, if known.
    pub version: Option<String>,
}

impl Notes {
    /// Reads the annotations of a pod. A webhook may have put another registry in front of the image, which is no change
    /// of what was asked for. An annotation with another tag than the container was changed by hand: then the container
    /// says what runs.
    pub fn of(pod: &Pod) -> Self {
        let image = image(pod);
        let version = annotation(pod, names::ANNOTATION_VERSION).cloned();
        let noted = annotation(pod, names::ANNOTATION_IMAGE).cloned();
        let Some(tag) = tag(&image) else {
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

    /// The annotations that are missing or wrong, with their values.
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

/// The image of a pod's etcd.
fn image(pod: &Pod) -> String {
    let containers = pod.spec.iter().flat_map(|spec| &spec.containers);
    let etcd = { containers }.find(|one| one.name == names::CONTAINER_ETCD);
    etcd.and_then(|one| one.image.clone()).unwrap_or_default()
}

/// The tag of an image; one by digest alone has none.
fn tag(image: &str) -> Option<&str> {
    let name = image.split('@').next()?.rsplit('/').next()?;
    name.split_once(':').map(|(_, tag)| tag)
}

/// The TLS a pod is started with, as its annotation says it.
fn tls(spec: &EtcdClusterSpec) -> String {
    serde_json::to_string(&spec.tls).unwrap_or_default()
}

/// The recorded [`spec_hash`] of the spec a pod was made for. `None` if another operator made the pod.
pub fn recorded_hash(pod: &Pod) -> Option<String> {
    annotation(pod, ANNOTATION_SPEC_HASH).cloned()
}

/// Compares a pod, as read from the API server, with what the spec says today.
pub fn difference(spec: &EtcdClusterSpec, pod: &Pod) -> Difference {
    let wanted = Said::of(spec);
    let recorded = recorded_hash(pod);
    let before = Said::read(pod);
    let is_same = recorded.as_deref() == Some(&spec_hash(spec));
    let tls = is_same.then(|| tls(spec));
    let metadata = metadata(&wanted, before.as_ref(), tls, pod);
    if !is_same {
        let why = if recorded.is_none() {
            "its pod was made by another operator"
        } else {
            "its pod was made for another spec.pod, spec.etcd, spec.memberAddress or spec.TLS"
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
    resources(&wanted, before.as_ref(), pod, &mut found);
    found
}

fn metadata(
    wanted: &Said,
    before: Option<&Said>,
    tls: Option<String>,
    pod: &Pod,
) -> Option<MetadataPatch> {
    let none = Said::default();
    let known = before.unwrap_or(&none);
    let same = known.labels == wanted.labels && known.annotations == wanted.annotations;
    let mut notes = Notes::of(pod).missing(pod);
    // TLS that the hash counts as the same is no other pod; the words may have been changed by hand.
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
    let change = |wanted: &BTreeMap<String, String>, known: &BTreeMap<String, String>| {
        let gone = known.keys().filter(|key| !wanted.contains_key(*key));
        let gone = gone.map(|key| (key.clone(), None));
        let set = wanted.iter().map(|(k, v)| (k.clone(), Some(v.clone())));
        gone.chain(set).collect::<BTreeMap<_, _>>()
    };
    let mut annotations = change(&wanted.annotations, &known.annotations);
    // What was given of CPU and memory is not changed by this.
    let said = Said {
        resources: known.resources.clone(),
        ..wanted.clone()
    };
    annotations.insert(ANNOTATION_SAID.to_owned(), Some(said.text()));
    annotations.extend(notes);
    Some(MetadataPatch {
        labels: change(&wanted.labels, &known.labels),
        annotations,
    })
}

fn resources(wanted: &Said, before: Option<&Said>, pod: &Pod, found: &mut Difference) {
    let known = before.map_or(&Value::Null, |said| &said.resources);
    let refused = annotation(pod, ANNOTATION_RESIZE_REFUSED);
    if *known == wanted.resources {
        match resize(pod) {
            Some(Resize::Infeasible(words)) => {
                found.pod = Some(format!(
                    "its node cannot give it spec.pod.resources: {words}"
                ));
            }
            Some(Resize::Pending(resizing)) => found.resizing = Some(resizing),
            None => {}
        }
        return;
    }
    let words = wanted.resources.to_string();
    if refused == Some(&words) {
        let why = "spec.pod.resources cannot be changed in a running pod";
        found.pod = Some(why.to_owned());
        return;
    }
    let said = Said {
        resources: wanted.resources.clone(),
        ..before.cloned().unwrap_or_default()
    };
    let one = |key: &str, value: Option<String>| BTreeMap::from([(key.to_owned(), value)]);
    let mut taken = one(ANNOTATION_SAID, Some(said.text()));
    taken.insert(ANNOTATION_RESIZE_REFUSED.to_owned(), None);
    found.resources = Some(ResourcesPatch {
        resources: patch(known, &wanted.resources),
        taken,
        refused: one(ANNOTATION_RESIZE_REFUSED, Some(words)),
    });
}

/// What the kubelet says of a resize that it has not done (`PodResizePending` and `PodResizeInProgress`).
enum Resize {
    Infeasible(String),
    Pending(Resizing),
}

fn resize(pod: &Pod) -> Option<Resize> {
    let conditions = pod.status.as_ref()?.conditions.as_deref();
    let conditions = conditions.unwrap_or_default();
    let says = |kind: &str| {
        let is_true = |one: &&PodCondition| one.type_ == kind && one.status == "True";
        conditions.iter().find(is_true)
    };
    let words = |one: &PodCondition| {
        one.message
            .clone()
            .or(one.reason.clone())
            .unwrap_or_default()
    };
    if let Some(pending) = says("PodResizePending") {
        return Some(match pending.reason.as_deref() {
            Some("Infeasible") => Resize::Infeasible(words(pending)),
            _ => Resize::Pending(Resizing {
                deferred: true,
                words: words(pending),
            }),
        });
    }
    let under_way = |words: String| {
        Resize::Pending(Resizing {
            deferred: false,
            words,
        })
    };
    // Kubernetes counts a pod's changes from 1.33 on, and the kubelet says which it has seen.
    let seen = pod.status.as_ref()?.observed_generation;
    let unseen = seen.is_some_and(|seen| seen > 0 && pod.metadata.generation > Some(seen));
    if unseen {
        return Some(under_way(
            "the kubelet has not seen the change yet".to_owned(),
        ));
    }
    says("PodResizeInProgress").map(|one| under_way(words(one)))
}

/// CPU and memory of what was said; the rest cannot be changed in place and is hashed.
fn resizable(resources: &ResourceRequirements) -> Value {
    let pick = |side: &Option<BTreeMap<String, _>>| {
        let all = side.iter().flatten();
        let all = all.filter(|(name, _)| is_resizable(name));
        all.map(|(name, quantity)| (name.clone(), json!(quantity)))
            .collect::<serde_json::Map<_, _>>()
    };
    let said = said_only(json!({
        "requests": pick(&resources.requests),
        "limits": pick(&resources.limits),
    }));
    match &said {
        Value::Object(sides) if sides.is_empty() => Value::Null,
        _ => said,
    }
}

/// From what was said to what is said. As in a pod that is made, a limit is also the request where none is said.
fn patch(known: &Value, wanted: &Value) -> Value {
    let said = |of: &Value, side: &str| of[side].as_object().cloned().unwrap_or_default();
    let requests = |of: &Value| {
        let mut all = said(of, "limits");
        all.extend(said(of, "requests"));
        all
    };
    let change = |known: serde_json::Map<String, Value>, wanted: serde_json::Map<String, Value>| {
        let gone = known.into_iter().map(|(name, _)| (name, Value::Null));
        gone.chain(wanted).collect::<serde_json::Map<_, _>>()
    };
    json!({
        "requests": change(requests(known), requests(wanted)),
        "limits": change(said(known, "limits"), said(wanted, "limits")),
    })
}

fn annotation<'a>(pod: &'a Pod, key: &str) -> Option<&'a String> {
    pod.metadata.annotations.as_ref()?.get(key)
}

#[cfg(test)]
mod tests;
