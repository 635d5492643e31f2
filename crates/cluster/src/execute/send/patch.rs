//! Marks and labels: patches of the metadata of an object that was seen.

use api::names;
use jiff::Timestamp;
use k8s_openapi::NamespaceResourceScope;
use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Pod, Service};
use kube::Resource;
use kube::ResourceExt;
use kube::api::{Patch, PatchParams};
use runtime::apply;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use std::fmt::Debug;

use super::build::role_of;
use super::failed;
use crate::execute::{Actor, Error};
use crate::snapshot::{Removal, Role};
use crate::write::Label;

impl Actor<'_> {
    pub(super) async fn mark(
        &self,
        member: &str,
        started: bool,
        over: Option<&str>,
    ) -> Result<Option<String>, Error> {
        let value = if started { json!("true") } else { Value::Null };
        let mut metadata = json!({ "annotations": { names::ANNOTATION_STARTED: value } });
        if let Some(over) = over {
            metadata["resourceVersion"] = json!(over);
        }
        self.merge::<Service>(member, metadata).await
    }

    /// With another value than any before: a patch that changes nothing leaves an object at its version.
    pub(super) async fn renew_mark(
        &self,
        member: &str,
        over: &str,
    ) -> Result<Option<String>, Error> {
        let now = Timestamp::now().to_string();
        let metadata = json!({
            "annotations": { names::ANNOTATION_STARTED: now },
            "resourceVersion": over,
        });
        self.merge::<Service>(member, metadata).await
    }

    pub(super) async fn note_removal(
        &self,
        member: &str,
        over: &str,
        removal: Option<Removal>,
    ) -> Result<Option<String>, Error> {
        let metadata = json!({
            "annotations": { names::ANNOTATION_REMOVED: removal.map(Removal::note) },
            "resourceVersion": over,
        });
        let noted = self.merge::<PersistentVolumeClaim>(member, metadata).await;
        noted.map(|_| None)
    }

    pub(super) async fn label<K>(&self, label: &Label) -> Result<Option<String>, Error>
    where
        K: Resource<DynamicType = (), Scope = NamespaceResourceScope>
            + DeserializeOwned
            + Clone
            + Debug,
    {
        let mut annotations = json!({ names::ANNOTATION_CLUSTER_TOKEN: label.token });
        if let Some(id) = label.cluster_id {
            annotations[names::ANNOTATION_CLUSTER_ID] = json!(id.to_string());
        }
        let mut metadata = json!({
            "uid": label.uid,
            "annotations": annotations,
            "ownerReferences": [apply::owner_reference(self.cluster)],
        });
        // Somebody may have taken them away; Services lead to pods by them.
        let member = names::member_labels(&self.cluster.name_any(), &label.member);
        metadata["labels"] = json!(member);
        if K::kind(&()) == Pod::kind(&()) {
            metadata["labels"][names::LABEL_TOKEN] = json!(names::token_label(&label.token));
        }
        if let Some(role) = label.role {
            let (label, since) = match role {
                Role::Busy { since } => (names::ROLE_BUSY, json!(since.to_string())),
                role => (role_of(role).label(), Value::Null),
            };
            metadata["labels"][names::LABEL_ROLE] = json!(label);
            metadata["annotations"][names::ANNOTATION_BUSY_SINCE] = since;
        }
        self.merge::<K>(&label.member, metadata).await.map(|_| None)
    }

    pub(super) async fn merge<K>(
        &self,
        name: &str,
        metadata: Value,
    ) -> Result<Option<String>, Error>
    where
        K: Resource<DynamicType = (), Scope = NamespaceResourceScope>
            + DeserializeOwned
            + Clone
            + Debug,
    {
        let params = PatchParams {
            field_manager: Some(names::MANAGER_CLUSTER.to_owned()),
            ..PatchParams::default()
        };
        let patch = json!({ "metadata": metadata });
        let patched_object = self
            .api::<K>()
            .patch(name, &params, &Patch::Merge(&patch))
            .await;
        patched_object
            .map(|object| object.resource_version())
            .map_err(|source| patched(&K::kind(&()), name, source))
    }
}

/// A patch over another version, or of another object of the same name, is a lost race.
pub(super) fn patched(kind: &str, name: &str, source: kube::Error) -> Error {
    match source {
        kube::Error::Api(status) if status.code == 409 || status.code == 404 => Error::Changed {
            what: format!("{kind} {name}"),
        },
        source => failed("patch", kind, name, source),
    }
}
