//! Converts PVCs, and the Services of members, to the planner's types. Performs no I/O.

use std::collections::BTreeSet;

use api::EtcdCluster;
use api::names;
use etcd::ClusterId;
use k8s_openapi::api::core::v1::{PersistentVolumeClaim, PersistentVolumeClaimCondition, Service};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::ResourceExt;
use member::{self, Members};

use crate::ownership::owner;
use crate::quantity::bytes;
use crate::snapshot::{self, Claim, Disk, Removal, RetentionNotes};

/// `Some(true)`: the EtcdCluster with this UID owns the object. `Some(false)`: the object has no owner, but has a
/// cluster token, so the cluster may adopt it. `None`: the object belongs to another owner, or has no token.
pub(super) fn belongs(metadata: &ObjectMeta, uid: &str) -> Option<bool> {
    match owner(metadata) {
        Some(owner) => (owner == uid).then_some(true),
        None => annotation(metadata, names::ANNOTATION_CLUSTER_TOKEN).map(|_| false),
    }
}

/// Like [`belongs`], for a PVC of the EtcdCluster.
///
/// Invariant 26: without an owner and without a token, a retained PVC (invariant 35) belongs to the EtcdCluster if the
/// status names its member. The operator then writes the token again. The PVC belongs to no other cluster, because the
/// name of a member is random and never used again. A PVC with another cluster ID does not belong to the EtcdCluster:
/// it is from before a restore.
pub(super) fn claim_belongs(metadata: &ObjectMeta, cluster: &EtcdCluster) -> Option<bool> {
    let uid = cluster.metadata.uid.as_deref().unwrap_or_default();
    let belongs = belongs(metadata, uid);
    if belongs.is_some() || owner(metadata).is_some() || !cluster.spec.retains_volumes() {
        return belongs;
    }
    let (status, name) = (cluster.status.as_ref()?, metadata.name.as_ref()?);
    let first = &status.bootstrap.as_ref()?.members;
    // The first members count only until the status lists the members, because a first member may be removed later.
    let listed = &status.member_details;
    let is_member = if listed.is_empty() {
        first.contains(name)
    } else {
        listed.iter().any(|member| member.name == *name)
    };
    let is_random = names::cluster_of_member(name) == cluster.metadata.name.as_deref();
    let id = |text: String| text.parse::<ClusterId>().ok();
    let noted = annotation(metadata, names::ANNOTATION_CLUSTER_ID).and_then(id);
    let is_same = noted.is_none() || noted == status.cluster_id.clone().and_then(id);
    (is_member && is_random && is_same).then_some(false)
}

/// The value of an annotation; `None` if it is missing or empty.
pub(super) fn annotation(metadata: &ObjectMeta, key: &str) -> Option<String> {
    metadata
        .annotations
        .as_ref()?
        .get(key)
        .filter(|value| !value.is_empty())
        .cloned()
}

/// Converts a member's PVC. `owned`: the PVC has the owner and the labels that the EtcdCluster requires.
pub fn disk(claim: &PersistentVolumeClaim, owned: bool) -> Disk {
    let members = |key: &str| -> BTreeSet<String> {
        let list = annotation(&claim.metadata, key);
        list.map(|list| list.split(',').map(str::to_owned).collect())
            .unwrap_or_default()
    };
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
        image: annotation(&claim.metadata, names::ANNOTATION_IMAGE),
        served: annotation(&claim.metadata, names::ANNOTATION_SERVED),
        initial: members(names::ANNOTATION_FIRST_MEMBERS),
        retention: RetentionNotes {
            voters: members(names::ANNOTATION_VOTERS),
            tls: annotation(&claim.metadata, names::ANNOTATION_TLS),
        },
        terminating: claim.metadata.deletion_timestamp.is_some(),
        lost: is_lost(claim),
        claim: volume(claim),
    }
}

/// True if the PVC has lost its volume: the PersistentVolume does not exist, or belongs to another PVC
/// (`syncBoundClaim` in Kubernetes' `pkg/controller/volume/persistentvolume/pv_controller.go`). If a person restores
/// the PersistentVolume, Kubernetes binds the PVC again.
fn is_lost(claim: &PersistentVolumeClaim) -> bool {
    let status = claim.status.as_ref();
    let phase = status.and_then(|status| status.phase.as_deref());
    phase == Some("Lost")
}

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

/// Converts the Service of a member; `None` for the Services of the whole cluster and for Services of other owners.
pub fn member_service(
    members: &Members,
    service: &Service,
    uid: &str,
) -> Option<snapshot::Service> {
    let name = service.name_any();
    // The name identifies the Service of a member, even if other software has changed the member label.
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
        drifted: !member::contains(service, &member::member_service(members, &name)),
        closed: member::is_closed(service),
        created: service
            .creation_timestamp()
            .map_or(jiff::Timestamp::UNIX_EPOCH, |time| time.0),
    })
}
