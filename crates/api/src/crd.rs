//! The CustomResourceDefinitions of the three kinds.

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::CustomResourceExt;

use crate::{EtcdBackup, EtcdCluster, EtcdRestore};

/// All three definitions.
pub fn all() -> Vec<CustomResourceDefinition> {
    let all = [EtcdCluster::crd(), EtcdBackup::crd(), EtcdRestore::crd()];
    all.into_iter().map(pruning).collect()
}

/// The definition, saying what is true of it anyway: unknown fields are not kept. One that was made with
/// `apiextensions.k8s.io/v1beta1`, as those of coreos/etcd-operator were, says the opposite, and as long as it does the
/// API server refuses a schema with defaults.
pub fn pruning(mut definition: CustomResourceDefinition) -> CustomResourceDefinition {
    definition.spec.preserve_unknown_fields = Some(false);
    definition
}
