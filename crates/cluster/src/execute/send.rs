//! Sends one action as one request. Only a resize needs a second request, which records the API server's response on
//! the pod.

use std::fmt::Debug;

use api::EtcdCluster;
use api::names;
use k8s_openapi::NamespaceResourceScope;
use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Pod, Secret, Service};
use k8s_openapi::api::networking::v1::NetworkPolicy;
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use kube::api::{self as kube_api, PatchParams};
use kube::{Api, Resource, ResourceExt};
use runtime::apply::{self, Created, Deleted};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::json;
use tracing::debug;

use crate::action::{
    Action, Kind, Object, Patch, PatchForm, Reference, Request, Resize, StatusRecord,
};
use crate::execute::{Error, ExecuteContext};

/// The traits of all object types that actions send.
pub(super) trait Sent:
    Resource<DynamicType = (), Scope = NamespaceResourceScope>
    + Serialize
    + DeserializeOwned
    + Clone
    + Debug
    + Default
{
}

impl<K> Sent for K where
    K: Resource<DynamicType = (), Scope = NamespaceResourceScope>
        + Serialize
        + DeserializeOwned
        + Clone
        + Debug
        + Default
{
}

impl ExecuteContext<'_> {
    /// Sends one action. `via` contains the client URLs of the members to which a call is sent. Returns the new
    /// resourceVersion of the object, if the response contains it.
    pub(super) async fn send(
        &self,
        action: &Action,
        via: &[String],
    ) -> Result<Option<String>, Error> {
        // Invariant 11: no write is sent if the observation is too old.
        if !apply::is_fresh(self.since) {
            return Err(Error::TooOld);
        }
        match &action.request {
            Request::Create(object) => match object {
                Object::Service(it) => self.create(it.as_ref()).await,
                Object::VolumeClaim(it) => self.create(it.as_ref()).await,
                Object::Pod(it) => self.create(it.as_ref()).await,
                Object::DisruptionBudget(it) => self.create(it.as_ref()).await,
                Object::NetworkPolicy(it) => self.create(it.as_ref()).await,
            },
            Request::Apply(object) => match object {
                Object::Service(it) => self.apply(it.as_ref()).await,
                Object::VolumeClaim(it) => self.apply(it.as_ref()).await,
                Object::Pod(it) => self.apply(it.as_ref()).await,
                Object::DisruptionBudget(it) => self.apply(it.as_ref()).await,
                Object::NetworkPolicy(it) => self.apply(it.as_ref()).await,
            },
            Request::Patch(patch) => self.patch(patch).await,
            Request::Resize(resize) => self.resize(resize).await,
            Request::Delete(reference) => self.delete(reference).await,
            Request::Record(record) => self.record(record).await,
            Request::Finalizer(set) => {
                let (api, finalizer) = (self.api::<EtcdCluster>(), [names::FINALIZER_BACKUP]);
                let manager = names::MANAGER_CLUSTER;
                apply::set_finalizers(&api, manager, self.cluster, &finalizer, *set).await?;
                Ok(None)
            }
            Request::Etcd(call) => self.call(call, via, &action.text).await.map(|()| None),
            Request::Certificate(write) => self.certificate(write).await,
            Request::Issued(write) => self.issued(write).await,
            Request::Passwords(write) => self.passwords(*write).await,
        }
    }

    pub(super) fn api<K>(&self) -> Api<K>
    where
        K: Resource<DynamicType = (), Scope = NamespaceResourceScope>,
    {
        let namespace = self.cluster.namespace().unwrap_or_default();
        Api::namespaced(self.client.clone(), &namespace)
    }

    pub(super) async fn create<K: Sent>(&self, object: &K) -> Result<Option<String>, Error> {
        match apply::create(&self.api(), names::MANAGER_CLUSTER, object).await? {
            Created::New(created) => Ok(created.resource_version()),
            Created::Exists => Err(Error::Exists {
                what: format!("{} {}", K::kind(&()), object.name_any()),
            }),
        }
    }

    async fn apply<K: Sent>(&self, object: &K) -> Result<Option<String>, Error> {
        let applied = apply::apply(&self.api(), names::MANAGER_CLUSTER, object).await?;
        Ok(applied.resource_version())
    }

    /// Sends a patch. Does not check the age of the observation: the annotation `started` must be removable even if the
    /// observation is too old.
    pub(super) async fn patch(&self, patch: &Patch) -> Result<Option<String>, Error> {
        match patch.kind {
            Kind::Service => self.patch_of::<Service>(patch).await,
            Kind::VolumeClaim => self.patch_of::<PersistentVolumeClaim>(patch).await,
            Kind::Pod => self.patch_of::<Pod>(patch).await,
            Kind::DisruptionBudget => self.patch_of::<PodDisruptionBudget>(patch).await,
            Kind::NetworkPolicy => self.patch_of::<NetworkPolicy>(patch).await,
            Kind::Secret => self.patch_of::<Secret>(patch).await,
        }
    }

    async fn patch_of<K: Sent>(&self, patch: &Patch) -> Result<Option<String>, Error> {
        let body = match patch.form {
            PatchForm::Merge => kube_api::Patch::Merge(&patch.body),
            PatchForm::Strategic => kube_api::Patch::Strategic(&patch.body),
        };
        let answer = self.api::<K>().patch(&patch.name, &params(), &body).await;
        match (answer, &patch.rejection) {
            (Ok(object), _) => Ok(object.resource_version()),
            (Err(kube::Error::Api(status)), Some(rejection))
                if status.code == 403 || status.code == 422 =>
            {
                Err(Error::Rejected {
                    rejection: rejection.clone(),
                    why: status.message.clone(),
                })
            }
            (Err(source), _) => Err(patched(&K::kind(&()), &patch.name, source)),
        }
    }

    async fn resize(&self, resize: &Resize) -> Result<Option<String>, Error> {
        let Patch { name, body, .. } = &resize.patch;
        let body = kube_api::Patch::Strategic(body);
        let pods = self.api::<Pod>();
        let answer = pods
            .patch_subresource("resize", name, &params(), &body)
            .await;
        match answer {
            Ok(_) => self.patch(&resize.accepted).await,
            Err(kube::Error::Api(status)) if is_rejection(status.code) => {
                let (cluster, why) = (self.cluster.name_any(), &status.message);
                debug!(cluster, member = name, why, "pod is not resized in place");
                self.patch(&resize.rejected).await
            }
            Err(source) => Err(patched("Pod", name, source)),
        }
    }

    async fn delete(&self, reference: &Reference) -> Result<Option<String>, Error> {
        match reference.kind {
            Kind::Service => self.delete_of::<Service>(reference).await,
            Kind::VolumeClaim => self.delete_of::<PersistentVolumeClaim>(reference).await,
            Kind::Pod => self.delete_of::<Pod>(reference).await,
            Kind::DisruptionBudget => self.delete_of::<PodDisruptionBudget>(reference).await,
            Kind::NetworkPolicy => self.delete_of::<NetworkPolicy>(reference).await,
            Kind::Secret => self.delete_of::<Secret>(reference).await,
        }
    }

    pub(super) async fn delete_of<K: Sent>(
        &self,
        reference: &Reference,
    ) -> Result<Option<String>, Error> {
        let mut seen = K::default();
        seen.meta_mut().name = Some(reference.name.clone());
        seen.meta_mut().uid = Some(reference.uid.clone());
        match apply::delete(&self.api::<K>(), &seen, None).await? {
            Deleted::Accepted | Deleted::Gone => Ok(None),
            Deleted::Changed => Err(Error::Changed {
                what: format!("{} {}", K::kind(&()), reference.name),
            }),
        }
    }

    /// Invariants 10 and 11: the write has the observed resourceVersion as precondition.
    async fn record(&self, record: &StatusRecord) -> Result<Option<String>, Error> {
        let name = self.cluster.name_any();
        let body = json!({
            "apiVersion": EtcdCluster::api_version(&()),
            "kind": EtcdCluster::kind(&()),
            "metadata": {
                "name": name, "uid": self.cluster.uid(), "resourceVersion": record.over,
            },
            "status": record.status,
        });
        let params = PatchParams::apply(record.manager).force();
        let clusters = self.api::<EtcdCluster>();
        let body = kube_api::Patch::Apply(&body);
        match clusters.patch_status(&name, &params, &body).await {
            Ok(_) => Ok(None),
            Err(source) => Err(patched("EtcdCluster", &name, source)),
        }
    }
}

/// True for 404 (the pod or the subresource does not exist) and for 422 (the resources of this pod cannot change in
/// this way). The executor then sends `Resize::rejected`, which fails if the pod does not exist.
fn is_rejection(code: u16) -> bool {
    matches!(code, 404 | 422)
}

fn params() -> PatchParams {
    PatchParams {
        field_manager: Some(names::MANAGER_CLUSTER.to_owned()),
        ..PatchParams::default()
    }
}

/// Converts the error of a patch. A failed precondition means that another process changed the object first.
pub(super) fn patched(kind: &str, name: &str, source: kube::Error) -> Error {
    match source {
        kube::Error::Api(status) if status.code == 409 || status.code == 404 => Error::Changed {
            what: format!("{kind} {name}"),
        },
        source => failed("patch", kind, name, source),
    }
}

pub(super) fn failed(verb: &'static str, kind: &str, name: &str, source: kube::Error) -> Error {
    Error::Api(apply::Error::Api {
        verb,
        kind: kind.to_owned(),
        name: name.to_owned(),
        source: Box::new(source),
    })
}
