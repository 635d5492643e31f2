//! What only the status can say: token, first members, cluster ID, recovery. Always written whole.

use api::EtcdCluster;
use api::cluster::{BootstrapStatus, RecoveryStatus};
use etcd::ClusterId;
use kube::api::{Patch, PatchParams};
use kube::{Resource, ResourceExt};
use serde_json::{Value, json};

use super::patch::patched;
use crate::execute::{Actor, Error};
use crate::snapshot::{Intent, Observed};
use crate::write::Write;

/// Field manager of what only the status can say: token, first members, cluster ID. It is not that of the
/// report, so that no report, however old, can take them out.
const MANAGER_IDENTITY: &str = "etcd-operator-identity";

/// What only the status can say.
struct Identity {
    intent: Intent,
    cluster_id: Option<ClusterId>,
    recovery: Option<RecoveryStatus>,
    stale_approval: Option<String>,
}

impl Actor<'_> {
    /// Writes what only the status can say.
    pub(super) async fn record(&self, write: &Write) -> Result<Option<String>, Error> {
        let mut identity = self.identity();
        let over = match write {
            Write::RecordIntent {
                intent,
                cluster_id,
                over,
            } => {
                identity.intent = intent.clone();
                identity.cluster_id = *cluster_id;
                over
            }
            Write::RecordClusterId { cluster_id, over } => {
                identity.cluster_id = Some(*cluster_id);
                over
            }
            Write::RecordRecovery(record) => {
                if let Some((intent, cluster_id)) = &record.formed {
                    identity.intent = intent.clone();
                    identity.cluster_id = Some(*cluster_id);
                }
                identity.recovery.clone_from(&record.recovery);
                identity.stale_approval.clone_from(&record.stale_approval);
                &record.over
            }
            _ => return Ok(None),
        };
        self.record_identity(identity, over).await
    }

    /// What is recorded now. A record is always written whole: what its manager leaves out is taken out.
    fn identity(&self) -> Identity {
        let Observed {
            intent,
            cluster_id,
            recovery,
            ..
        } = self.observed;
        Identity {
            intent: intent.clone().unwrap_or_else(no_intent),
            cluster_id: *cluster_id,
            recovery: recovery.record.clone(),
            stale_approval: recovery.stale_approval.clone(),
        }
    }

    /// Invariant 10, and invariant 11: written only over the version that was read.
    async fn record_identity(
        &self,
        identity: Identity,
        over: &str,
    ) -> Result<Option<String>, Error> {
        let Identity {
            intent,
            cluster_id,
            recovery,
            stale_approval,
        } = identity;
        let bootstrap = BootstrapStatus {
            token: intent.token,
            members: intent.members.into_iter().collect(),
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
        self.record_status(MANAGER_IDENTITY, &status, over).await
    }

    /// Writes what a manager of its own has to say in the status, whole, and only over the version that was read.
    pub(super) async fn record_status(
        &self,
        manager: &str,
        status: &Value,
        over: &str,
    ) -> Result<Option<String>, Error> {
        let name = self.cluster.name_any();
        let body = json!({
            "apiVersion": EtcdCluster::api_version(&()),
            "kind": EtcdCluster::kind(&()),
            "metadata": { "name": name, "uid": self.cluster.uid(), "resourceVersion": over },
            "status": status,
        });
        let params = PatchParams::apply(manager).force();
        let written = self
            .api::<EtcdCluster>()
            .patch_status(&name, &params, &Patch::Apply(&body))
            .await;
        written
            .map(|_| None)
            .map_err(|source| patched("EtcdCluster", &name, source))
    }
}

fn no_intent() -> Intent {
    Intent {
        token: String::new(),
        members: std::collections::BTreeSet::new(),
    }
}
