//! Decides by owner references and labels to which cluster an object belongs.

use api::names;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

/// True if the object is not an object of this cluster: its owner is another object, or it has neither an owner nor the
/// cluster's label.
pub(crate) fn is_of_others(metadata: &ObjectMeta, cluster: &str, uid: &str) -> bool {
    let labels = metadata.labels.as_ref();
    let label = labels.and_then(|labels| labels.get(names::LABEL_CLUSTER));
    match owner(metadata) {
        Some(owner) => owner != uid,
        None => label.is_none_or(|of| of != cluster),
    }
}

/// The UID of the controller or, without a controller, of the first owner.
pub(crate) fn owner(metadata: &ObjectMeta) -> Option<&str> {
    let owners = metadata.owner_references.as_deref().unwrap_or_default();
    owners
        .iter()
        .find(|owner| owner.controller == Some(true))
        .or(owners.first())
        .map(|owner| owner.uid.as_str())
}
