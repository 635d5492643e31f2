//! Upkeep: what is asked of etcd beside its member list, its record, and larger volumes.

use futures::FutureExt;
use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use kube::ResourceExt;
use kube::api::{Patch, PatchParams};
use serde_json::json;
use std::sync::Arc;

use super::patch::patched;
use crate::execute::{Actor, Error};
use crate::write::Write;

/// Field manager of the record of the last defragmentation. It is not that of the report, so that no report,
/// however old, can take it out.
const MANAGER_UPKEEP: &str = "etcd-operator-upkeep";

impl Actor<'_> {
    /// Sends a write of this kind.
    pub(super) async fn keep_up(&self, write: &Write) -> Result<Option<String>, Error> {
        let urls = |via: &[String]| -> Vec<String> {
            via.iter().map(|name| self.client_url(name)).collect()
        };
        let answer = match write {
            Write::RecordDefragmentation { record, over } => {
                let status = json!({ "defragmentation": record });
                return self.record_status(MANAGER_UPKEEP, &status, over).await;
            }
            Write::GrowDisk { member, uid, size } => {
                return self.grow_disk(member, uid, size).await.map(|()| None);
            }
            Write::Defragment { member, recorded } => {
                // It may take minutes: nobody waits for it here, and the next observation tells of it.
                let (etcd, url) = (Arc::clone(self.etcd), self.client_url(member));
                let call = async move { etcd.defragment(&url).await };
                let cluster = self.cluster.uid().unwrap_or_default();
                let what = (member.clone(), *recorded);
                self.calls.begin(&cluster, what, call.boxed());
                Ok(())
            }
            Write::Compact { revision, via } => self.etcd.compact(&urls(via), *revision).await,
            Write::Disarm { alarm, via } => self.etcd.disarm(&urls(via), *alarm).await,
            _ => Ok(()),
        };
        answer.map(|()| None).map_err(|source| Error::Etcd {
            what: write.to_string(),
            source,
        })
    }

    /// Kubernetes refuses it unless the storage class lets volumes grow.
    async fn grow_disk(&self, member: &str, uid: &str, size: &str) -> Result<(), Error> {
        let patch = json!({
            "metadata": { "uid": uid },
            "spec": { "resources": { "requests": { "storage": size } } },
        });
        let params = PatchParams {
            field_manager: Some(api::names::MANAGER_CLUSTER.to_owned()),
            ..PatchParams::default()
        };
        let claims = self.api::<PersistentVolumeClaim>();
        match claims.patch(member, &params, &Patch::Merge(&patch)).await {
            Ok(_) => Ok(()),
            Err(kube::Error::Api(status)) if status.code == 403 || status.code == 422 => {
                Err(Error::NotGrown {
                    member: member.to_owned(),
                    why: status.message.clone(),
                })
            }
            Err(source) => Err(patched("PersistentVolumeClaim", member, source)),
        }
    }
}
