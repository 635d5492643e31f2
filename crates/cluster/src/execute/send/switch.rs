//! The record of what members are started with.

use api::cluster::TlsStatus;
use serde_json::json;

use crate::execute::{Actor, Error};

/// Field manager of that record. It is not that of the report, so that no report, however old, can take it out.
const MANAGER_TLS: &str = "etcd-operator-tls";

impl Actor<'_> {
    /// Invariant 11: written only over the version that was read.
    pub(super) async fn record_tls(
        &self,
        record: &TlsStatus,
        over: &str,
    ) -> Result<Option<String>, Error> {
        let status = json!({ "TLS": record });
        self.record_status(MANAGER_TLS, &status, over).await
    }
}
