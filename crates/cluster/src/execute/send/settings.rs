//! Changes of a running pod in place: its labels and annotations, its CPU and memory.

use std::collections::BTreeMap;

use api::names;
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use kube::api::{Patch, PatchParams};
use member::ResourcesPatch;
use serde_json::{Value, json};
use tracing::debug;

use super::patch::patched;
use crate::execute::{Actor, Error};
use crate::write::Write;

impl Actor<'_> {
    /// A write that changes what a running pod is made of, without ending it.
    pub(super) async fn change_in_place(&self, write: &Write) -> Result<Option<String>, Error> {
        match write {
            Write::PatchMetadata { member, uid, patch } => {
                self.annotate(member, uid, &patch.labels, &patch.annotations)
                    .await
            }
            Write::ResizePod { member, uid, patch } => self.resize(member, uid, patch).await,
            _ => Ok(None),
        }
    }

    async fn annotate(
        &self,
        member: &str,
        uid: &str,
        labels: &BTreeMap<String, Option<String>>,
        annotations: &BTreeMap<String, Option<String>>,
    ) -> Result<Option<String>, Error> {
        let metadata = json!({ "uid": uid, "labels": labels, "annotations": annotations });
        self.merge::<Pod>(member, metadata).await.map(|_| None)
    }

    /// The subresource came with Kubernetes 1.33; before, and where a change is not allowed in place, the API server
    /// says so. That is noted on the pod, which is then made anew.
    async fn resize(
        &self,
        member: &str,
        uid: &str,
        patch: &ResourcesPatch,
    ) -> Result<Option<String>, Error> {
        let body = resize_body(uid, &patch.resources);
        let params = PatchParams {
            field_manager: Some(names::MANAGER_CLUSTER.to_owned()),
            ..PatchParams::default()
        };
        let answer = self
            .api::<Pod>()
            .patch_subresource("resize", member, &params, &Patch::Strategic(&body))
            .await;
        let none = BTreeMap::new();
        match answer {
            Ok(_) => self.annotate(member, uid, &none, &patch.taken).await,
            Err(kube::Error::Api(status)) if is_refusal(status.code) => {
                let (cluster, why) = (self.cluster.name_any(), status.message);
                debug!(cluster, member, why, "not resized in place");
                self.annotate(member, uid, &none, &patch.refused).await
            }
            Err(source) => Err(patched("Pod", member, source)),
        }
    }
}

/// Not found: there is no such subresource, or no such pod any more, which the note finds out. Unprocessable: the pod
/// may not change so.
fn is_refusal(code: u16) -> bool {
    matches!(code, 404 | 422)
}

fn resize_body(uid: &str, resources: &Value) -> Value {
    let container = json!({ "name": names::CONTAINER_ETCD, "resources": resources });
    json!({ "metadata": { "uid": uid }, "spec": { "containers": [container] } })
}
