//! The record of what members are started with.

use api::EtcdCluster;
use api::cluster::TlsStatus;
use kube::api::{Patch, PatchParams};
use kube::{Resource, ResourceExt};
use serde_json::json;

use super::patch::patched;
use crate::act::{Actor, Error};

/// Field manager of that record. It is not that of the report, so that no report, however old, can take it out.
const MANAGER_TLS: &str = "etcd-operator-tls";

impl Actor<'_> {
    /// Invariant 11: written only over the version that was read.
    pub(super) async fn record_tls(
        &self,
        record: &TlsStatus,
        over: &str,
    ) -> Result<Option<String>, Error> {
        let name = self.cluster.name_any();
        let body = json!({
            "apiVersion": EtcdCluster::api_version(&()),
            "kind": EtcdCluster::kind(&()),
            "metadata": { "name": name, "uid": self.cluster.uid(), "resourceVersion": over },
            "status": { "TLS": record },
        });
        let params = PatchParams::apply(MANAGER_TLS).force();
        let written = self
            .api::<EtcdCluster>()
            .patch_status(&name, &params, &Patch::Apply(&body))
            .await;
        written
            .map(|_| None)
            .map_err(|source| patched("EtcdCluster", &name, source))
    }
}
