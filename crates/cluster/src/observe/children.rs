//! PVCs, Services and the PodDisruptionBudget, compared with the builders' objects. Pure.

use api::names;
use k8s_openapi::api::core::v1::{PersistentVolumeClaim, PersistentVolumeClaimCondition, Service};
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use kube::ResourceExt;
use member::{self, Members};
use serde::Serialize;
use serde_json::Value;

use crate::quantity::bytes;
use crate::snapshot::{self, Claim, Disk, Kept, Removal, Shared};

/// `Some(true)`: owned by the cluster. `Some(false)`: without owner, with a cluster token by which the cluster can
/// adopt it. `None`: another owner's object.
pub(super) fn belongs(metadata: &ObjectMeta, uid: &str) -> Option<bool> {
    match owner(metadata) {
        Some(owner) => (owner == uid).then_some(true),
        None => annotation(metadata, names::ANNOTATION_CLUSTER_TOKEN).map(|_| false),
    }
}

/// Whether an object with a name of the cluster belongs to another party: it has another owner, or has neither an owner
/// nor the cluster's label.
pub(crate) fn is_of_others(metadata: &ObjectMeta, cluster: &str, uid: &str) -> bool {
    let labels = metadata.labels.as_ref();
    let label = labels.and_then(|labels| labels.get(names::LABEL_CLUSTER));
    match owner(metadata) {
        Some(owner) => owner != uid,
        None => label.is_none_or(|of| of != cluster),
    }
}

fn owner(metadata: &ObjectMeta) -> Option<&str> {
    let owners = metadata.owner_references.as_deref().unwrap_or_default();
    owners
        .iter()
        .find(|owner| owner.controller == Some(true))
        .or(owners.first())
        .map(|owner| owner.uid.as_str())
}

/// The annotation, if present and not empty.
pub(super) fn annotation(metadata: &ObjectMeta, key: &str) -> Option<String> {
    metadata
        .annotations
        .as_ref()?
        .get(key)
        .filter(|value| !value.is_empty())
        .cloned()
}

/// A member's PVC. `owned`: it belongs to the cluster and carries its labels.
pub fn disk(claim: &PersistentVolumeClaim, owned: bool) -> Disk {
    Disk {
        uid: claim.uid().unwrap_or_default(),
        resource_version: claim.resource_version().unwrap_or_default(),
        removal: annotation(&claim.metadata, names::ANNOTATION_REMOVED)
            .as_deref()
            .map(Removal::read),
        owned,
        token: annotation(&claim.metadata, names::ANNOTATION_CLUSTER_TOKEN),
        cluster_id: annotation(&claim.metadata, names::ANNOTATION_CLUSTER_ID)
            .and_then(|id| id.parse().ok()),
        version: annotation(&claim.metadata, names::ANNOTATION_VERSION),
        initial: annotation(&claim.metadata, names::ANNOTATION_FIRST_MEMBERS)
            .map(|list| list.split(',').map(str::to_owned).collect())
            .unwrap_or_default(),
        terminating: claim.metadata.deletion_timestamp.is_some(),
        lost: is_lost(claim),
        claim: volume(claim),
    }
}

/// Whether the PVC lost its volume: its PersistentVolume does not exist, or belongs to another PVC (`syncBoundClaim` in
/// Kubernetes' `pkg/controller/volume/persistentvolume/pv_controller.go`). If a person restores the PersistentVolume,
/// the PVC is bound again. No other phase, nor a missing phase, indicates a loss.
fn is_lost(claim: &PersistentVolumeClaim) -> bool {
    let status = claim.status.as_ref();
    let phase = status.and_then(|status| status.phase.as_deref());
    phase == Some("Lost")
}

/// Requested and actual properties of a PVC.
fn volume(claim: &PersistentVolumeClaim) -> Claim {
    let spec = claim.spec.as_ref();
    let asked = spec
        .and_then(|spec| spec.resources.as_ref()?.requests.as_ref()?.get("storage"))
        .cloned();
    let status = claim.status.as_ref();
    let has = status.and_then(|status| status.capacity.as_ref()?.get("storage"));
    let told = |condition: &PersistentVolumeClaimCondition| {
        let message = condition.message.as_deref().unwrap_or_default();
        format!("{} {message}", condition.type_).trim().to_owned()
    };
    let resizing = status
        .and_then(|status| status.conditions.as_ref())
        .into_iter()
        .flatten()
        .filter(|condition| condition.status == "True")
        .map(told)
        .reduce(|all, next| format!("{all}; {next}"));
    Claim {
        class: spec.and_then(|spec| spec.storage_class_name.clone()),
        requested: asked.as_ref().and_then(bytes),
        text: asked.map(|asked| asked.0).unwrap_or_default(),
        capacity: has.and_then(bytes),
        resizing,
    }
}

/// A member's own Service; `None` for the Services of the whole cluster and for other owners' Services.
pub fn member_service(
    members: &Members,
    service: &Service,
    uid: &str,
) -> Option<snapshot::Service> {
    let name = service.name_any();
    // By its name if the label was changed by hand.
    let is_named = names::cluster_of_member(&name) == Some(members.cluster);
    let is_labelled = service.labels().get(names::LABEL_MEMBER) == Some(&name);
    let owner = owner(&service.metadata);
    if !(is_named || is_labelled) || owner.is_some_and(|owner| owner != uid) {
        return None;
    }
    let mark = annotation(&service.metadata, names::ANNOTATION_STARTED);
    Some(snapshot::Service {
        uid: service.uid().unwrap_or_default(),
        resource_version: service.resource_version().unwrap_or_default(),
        owned: owner == Some(uid),
        started: mark.is_some(),
        renewed: mark.is_some_and(|mark| mark != "true"),
        drifted: drifted(&member::member_service(members, &name), service),
        closed: member::is_closed(service),
        created: service
            .creation_timestamp()
            .map_or(jiff::Timestamp::UNIX_EPOCH, |time| time.0),
    })
}

pub(super) fn shared(
    members: &Members,
    services: &[Service],
    budget: Option<&PodDisruptionBudget>,
    uid: &str,
) -> Shared {
    let named = |name: &str| services.iter().find(|service| service.name_any() == name);
    let others = |service: &Service| is_of_others(&service.metadata, members.cluster, uid);
    let headless = member::headless_service(members);
    let headless = match named(&headless.name_any()) {
        None => Kept::Missing,
        Some(service) if others(service) => Kept::Others,
        Some(service) if drifted(&headless, service) => Kept::Drifted,
        Some(_) => Kept::AsMade(()),
    };
    let client = |open: bool| {
        let mut members = members.clone();
        members.cluster_id = open.then_some("");
        member::client_service(&members)
    };
    let selector = |service: &Service| service.spec.as_ref().and_then(|spec| spec.selector.clone());
    let client = match named(&client(true).name_any()) {
        None => Kept::Missing,
        Some(service) if others(service) => Kept::Others,
        // The complete selector is compared: an extra label in it would remove the endpoints.
        Some(service) => match [true, false]
            .into_iter()
            .find(|open| selector(&client(*open)) == selector(service))
        {
            Some(open)
                if !drifted(&client(open), service)
                    && member::has_same_policy(&client(open), service) =>
            {
                Kept::AsMade(open)
            }
            _ => Kept::Drifted,
        },
    };
    Shared {
        headless,
        client,
        budget: match budget {
            Some(one) if is_of_others(&one.metadata, members.cluster, uid) => Kept::Others,
            budget => budget_kept(members, budget),
        },
        budget_uid: budget.and_then(ResourceExt::uid),
    }
}

fn budget_kept(members: &Members, budget: Option<&PodDisruptionBudget>) -> Kept<usize> {
    let Some(budget) = budget else {
        return Kept::Missing;
    };
    let Some(IntOrString::Int(min)) = budget
        .spec
        .as_ref()
        .and_then(|spec| spec.min_available.clone())
    else {
        return Kept::Drifted;
    };
    let min = usize::try_from(min).unwrap_or_default();
    // The smallest number of voters with this quorum: only `minAvailable` depends on it.
    let made = member::disruption_budget(members, (min * 2).saturating_sub(1));
    if drifted(&made, budget) {
        Kept::Drifted
    } else {
        Kept::AsMade(min)
    }
}

/// Whether a field that the builder sets is missing or different in the object. Additions by others (defaults, further
/// annotations) are no difference.
pub(super) fn drifted<K: Serialize>(made: &K, there: &K) -> bool {
    let (Ok(mut made), Ok(there)) = (serde_json::to_value(made), serde_json::to_value(there))
    else {
        return true;
    };
    if let Some(metadata) = made.get_mut("metadata").and_then(Value::as_object_mut) {
        metadata
            .retain(|key, _| matches!(key.as_str(), "labels" | "annotations" | "ownerReferences"));
    }
    !contains(&there, &made)
}

fn contains(there: &Value, made: &Value) -> bool {
    match (there, made) {
        (Value::Object(there), Value::Object(made)) => made
            .iter()
            .all(|(key, value)| contains(there.get(key).unwrap_or(&Value::Null), value)),
        (Value::Array(there), Value::Array(made)) => {
            there.len() == made.len()
                && there
                    .iter()
                    .zip(made)
                    .all(|(there, made)| contains(there, made))
        }
        (there, made) => there == made || made.is_null(),
    }
}
