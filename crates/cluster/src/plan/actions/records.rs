//! Records in the status that neither etcd nor another object can supply.
//!
//! Each field manager writes all its fields with the observed resourceVersion as precondition (invariants 10 and 11):
//! a field that it omits is removed. The report has its own field manager, so no report removes a record, however old
//! it is.

use api::cluster::{BootstrapStatus, DefragmentationStatus, TlsStatus};
use serde_json::{Value, json};

use super::Builder;
use crate::action::{Request, StatusRecord};
use crate::write::Write;

/// Field manager of the token, the first members, the cluster ID and the recovery.
const MANAGER_IDENTITY: &str = "etcd-operator-identity";
/// Field manager of the last defragmentation.
const MANAGER_UPKEEP: &str = "etcd-operator-upkeep";
/// Field manager of the TLS settings with which members are started.
const MANAGER_TLS: &str = "etcd-operator-tls";

impl Builder<'_> {
    /// Writes the identity of the cluster with the requested change.
    pub(super) fn identity(&self, write: &Write) -> Request {
        let observed = self.observed;
        let mut intent = observed.intent.as_ref();
        let mut cluster_id = observed.cluster_id;
        let mut recovery = observed.recovery.record.as_ref();
        let mut stale_approval = observed.recovery.stale_approval.as_ref();
        let mut over = &observed.resource_version;
        match write {
            Write::RecordIntent {
                intent: next,
                cluster_id: id,
                over: version,
            } => (intent, cluster_id, over) = (Some(next), *id, version),
            Write::RecordClusterId {
                cluster_id: id,
                over: version,
            } => (cluster_id, over) = (Some(*id), version),
            Write::RecordRecovery(record) => {
                if let Some((next, id)) = &record.formed {
                    (intent, cluster_id) = (Some(next), Some(*id));
                }
                recovery = record.recovery.as_ref();
                stale_approval = record.stale_approval.as_ref();
                over = &record.over;
            }
            _ => {}
        }
        let bootstrap = BootstrapStatus {
            token: intent
                .map(|intent| intent.token.clone())
                .unwrap_or_default(),
            members: intent
                .iter()
                .flat_map(|intent| intent.members.clone())
                .collect(),
        };
        let mut status = json!({ "bootstrap": bootstrap });
        if let Some(id) = cluster_id {
            status["clusterID"] = json!(id.to_string());
        }
        if let Some(recovery) = recovery {
            status["recovery"] = json!(recovery);
        }
        if let Some(approval) = stale_approval {
            status["staleApproval"] = json!(approval);
        }
        record(MANAGER_IDENTITY, status, over)
    }
}

pub(super) fn tls(status: &TlsStatus, over: &str) -> Request {
    record(MANAGER_TLS, json!({ "TLS": status }), over)
}

pub(super) fn defragmentation(status: &DefragmentationStatus, over: &str) -> Request {
    record(MANAGER_UPKEEP, json!({ "defragmentation": status }), over)
}

fn record(manager: &'static str, status: Value, over: &str) -> Request {
    Request::Record(StatusRecord {
        manager,
        status,
        over: over.to_owned(),
    })
}
