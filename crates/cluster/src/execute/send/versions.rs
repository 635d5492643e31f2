//! Changes of a member's version: its image, and the notes about it.

use api::names;
use api::version::EtcdVersion;
use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Pod};
use kube::api::{Patch, PatchParams};
use serde_json::{Value, json};

use super::patch::patched;
use crate::execute::{Actor, Error};
use crate::write::Write;

impl Actor<'_> {
    pub(super) async fn change_version(&self, write: &Write) -> Result<Option<String>, Error> {
        let done = match write {
            Write::PatchImage { .. } => self.patch_image(write).await,
            Write::SettleImage { member, uid } => {
                let annotations = json!({ names::ANNOTATION_CHANGED: Value::Null });
                let metadata = json!({ "uid": uid, "annotations": annotations });
                self.merge::<Pod>(member, metadata).await
            }
            Write::NoteVersion {
                member,
                uid,
                version,
            } => {
                let annotations = json!({ names::ANNOTATION_VERSION: version });
                let metadata = json!({ "uid": uid, "annotations": annotations });
                self.merge::<PersistentVolumeClaim>(member, metadata).await
            }
            _ => Ok(None),
        };
        done.map(|_| None)
    }

    /// Image and notes in one request: there is no moment in which the pod says something else than it runs. The UID
    /// is a precondition; another pod of this name refuses it.
    async fn patch_image(&self, write: &Write) -> Result<Option<String>, Error> {
        let Write::PatchImage {
            member,
            uid,
            version,
            changed,
        } = write
        else {
            return Ok(None);
        };
        let parsed = EtcdVersion::parse(version).map_err(|source| Error::Version {
            member: member.clone(),
            source,
        })?;
        let image = parsed.image(&self.cluster.spec.repository);
        let body = json!({
            "metadata": {
                "uid": uid,
                "annotations": {
                    names::ANNOTATION_VERSION: version,
                    names::ANNOTATION_IMAGE: image,
                    names::ANNOTATION_CHANGED: changed.note(),
                },
            },
            "spec": { "containers": [{ "name": names::CONTAINER_ETCD, "image": image }] },
        });
        let params = PatchParams {
            field_manager: Some(names::MANAGER_CLUSTER.to_owned()),
            ..PatchParams::default()
        };
        let answer = self
            .api::<Pod>()
            .patch(member, &params, &Patch::Strategic(body))
            .await;
        answer
            .map(|_| None)
            .map_err(|source| patched("Pod", member, source))
    }
}
