//! The CRDs of the six kinds.

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::{
    CustomResourceDefinition, JSON,
};
use kube::CustomResourceExt;
use serde_json::json;

use crate::{EtcdBackup, EtcdCluster, EtcdMirror, EtcdRestore, EtcdRole, EtcdUser};

/// All six CRDs.
pub fn all() -> Vec<CustomResourceDefinition> {
    let mut all = vec![
        EtcdCluster::crd(),
        EtcdBackup::crd(),
        EtcdRestore::crd(),
        EtcdMirror::crd(),
        EtcdRole::crd(),
        EtcdUser::crd(),
    ];
    all.iter_mut().for_each(default_status);
    all
}

/// Sets a default status whose generation never equals that of a spec. kstatus therefore does not consider a new object
/// ready before the operator has written the status.
fn default_status(definition: &mut CustomResourceDefinition) {
    for version in &mut definition.spec.versions {
        let schema = version.schema.as_mut();
        let properties =
            schema.and_then(|schema| schema.open_api_v3_schema.as_mut()?.properties.as_mut());
        if let Some(status) = properties.and_then(|properties| properties.get_mut("status")) {
            status.default = Some(JSON(json!({ "observedGeneration": -1 })));
        }
    }
}
