//! The CustomResourceDefinitions of the three kinds.

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::CustomResourceExt;

use crate::{EtcdBackup, EtcdCluster, EtcdRestore};

/// All three definitions.
pub fn all() -> Vec<CustomResourceDefinition> {
    vec![EtcdCluster::crd(), EtcdBackup::crd(), EtcdRestore::crd()]
}
