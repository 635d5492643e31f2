//! Whose an object is.

use kube::{Resource, ResourceExt};

/// On its way out, or not a child of this EtcdCluster but of an earlier one of its name.
pub(crate) fn is_in_the_way<K: Resource>(object: &K, owner: &str) -> bool {
    let is_child = object
        .owner_references()
        .iter()
        .any(|reference| reference.uid == owner);
    object.meta().deletion_timestamp.is_some() || !is_child
}
