//! Sends the planned requests in their order.
//!
//! Each request is sent at most once, and has a precondition (invariant 11): a resourceVersion, a UID, or an
//! observation of the last ten seconds.

use std::time::Instant;

use api::EtcdRestore;
use api::names::{ANNOTATION_RESTORE, FINALIZER_CLAIM, MANAGER_RESTORE};
use api::restore::EtcdRestoreStatus;
use futures::future::join_all;
use k8s_openapi::NamespaceResourceScope;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::{Api, Client, Resource, ResourceExt};
use runtime::apply::{self, Created, Deleted};
use serde_json::{Value, json};

use crate::outcome::Error;
use crate::plan::{Object, Request};
use crate::status::outdated_definition;
use crate::{naming, observe};

mod checks;
mod undo;

pub use undo::Undo;

/// Grace period of the old members in seconds. The period is short, because no member serves during it, and the data of
/// the old members is not needed.
const STOP_SECONDS: u32 = 1;

/// The client for writes, and the tasks that undo writes.
#[derive(Clone)]
pub struct ExecuteContext {
    /// A client that does not retry requests. A retry could be sent more than ten seconds after the observation.
    pub client: Client,
    /// The tasks that undo writes that arrived too late.
    pub undo: Undo,
}

/// Sends the requests of a plan. `since` is the start of the observation for this plan.
///
/// # Errors
/// Stops at the first request that fails. A request fails if the API server rejects it, if a precondition is not met,
/// or if the observation is older than ten seconds.
pub async fn execute(
    context: &ExecuteContext,
    restore: &EtcdRestore,
    failpoint: &'static str,
    requests: &[Request],
    mut since: Instant,
) -> Result<(), Error> {
    tracing::debug!(failpoint, "action");
    fail::fail_point!(failpoint);
    for request in requests {
        match request {
            Request::Confirm(check) => {
                since = checks::confirm(context, restore, check, since).await?;
            }
            Request::DeleteUnchanged(pod) => {
                if !context.delete_unchanged(pod, restore, since).await? {
                    return Ok(());
                }
            }
            request => context.send(restore, request, since).await?,
        }
    }
    Ok(())
}

/// Writes the status with the observed resourceVersion as precondition. If the CustomResourceDefinition does not
/// contain the fields for the columns of `kubectl get`, these fields are left out. If the CustomResourceDefinition
/// lacks any other field, the status reports only this problem.
///
/// # Errors
///
/// Fails if the status cannot be written, or if the CustomResourceDefinition is outdated.
pub async fn report(
    context: &ExecuteContext,
    restore: &EtcdRestore,
    desired: &EtcdRestoreStatus,
    now: &Time,
) -> Result<(), Error> {
    fail::fail_point!("restore-before-status");
    let mut written = context.write_status(restore, desired).await;
    let reduced = desired.without_display();
    if matches!(written, Err(apply::Error::Definition { .. })) && reduced != *desired {
        written = context.write_status(restore, &reduced).await;
    }
    match written {
        Err(error @ apply::Error::Definition { .. }) => {
            let status = outdated_definition(restore, &error, now);
            let written = context.write_status(restore, &status).await;
            written.map_err(Error::Status)?;
            Err(Error::Status(error))
        }
        written => written.map_err(Error::Status),
    }
}

impl ExecuteContext {
    async fn send(
        &self,
        restore: &EtcdRestore,
        request: &Request,
        since: Instant,
    ) -> Result<(), Error> {
        let namespace = restore.namespace().unwrap_or_default();
        match request {
            Request::SetFinalizer(set) => {
                let api = self.api(&namespace);
                apply::set_finalizers(&api, MANAGER_RESTORE, restore, &[FINALIZER_CLAIM], *set)
                    .await?;
            }
            Request::Create(object) => {
                in_time(since)?;
                match object {
                    Object::Cluster(it) => drop(self.create(&namespace, it.as_ref()).await?),
                    Object::Service(it) => drop(self.create(&namespace, it.as_ref()).await?),
                    Object::Pvc(it) => drop(self.create(&namespace, it.as_ref()).await?),
                    Object::Pod(it) => drop(self.create(&namespace, it.as_ref()).await?),
                }
            }
            Request::CreateSeed {
                pod,
                cluster,
                after_cutover,
            } => {
                in_time(since)?;
                // If the pod exists already, another operator process has created it. The next reconcile checks that
                // pod.
                if let Created::New(created) = self.create(&namespace, pod.as_ref()).await? {
                    undo::delayed_seed(self, restore, cluster, (created, *after_cutover));
                }
            }
            Request::Lock(cluster) => {
                let lock = json!({ "annotations": { ANNOTATION_RESTORE: naming::uid(restore) } });
                let locked = self.patch(&namespace, cluster.as_ref(), &lock).await;
                // A failed request may have set the lock nevertheless. Only a conflict proves that the lock was not
                // set.
                if !locked.as_ref().is_err_and(apply::Error::is_conflict) {
                    undo::delayed_lock(self, restore, cluster);
                }
                locked?;
            }
            Request::Patch(object, metadata) => match object {
                Object::Cluster(it) => self.patch(&namespace, it.as_ref(), metadata).await?,
                Object::Service(it) => self.patch(&namespace, it.as_ref(), metadata).await?,
                Object::Pvc(it) => self.patch(&namespace, it.as_ref(), metadata).await?,
                Object::Pod(it) => self.patch(&namespace, it.as_ref(), metadata).await?,
            },
            Request::Record(cluster, status) => {
                let api = self.api(&namespace);
                let (cluster, status) = (cluster.as_ref(), status.as_ref());
                apply::status_if_unchanged(&api, MANAGER_RESTORE, cluster, None, status).await?;
            }
            Request::Delete(object) => {
                in_time(since)?;
                match object {
                    Object::Cluster(it) => self.delete(&namespace, it.as_ref()).await?,
                    Object::Service(it) => self.delete(&namespace, it.as_ref()).await?,
                    Object::Pvc(it) => self.delete(&namespace, it.as_ref()).await?,
                    Object::Pod(it) => self.delete(&namespace, it.as_ref()).await?,
                }
            }
            Request::DeletePods(pods) => self.delete_pods(&namespace, pods).await?,
            Request::DeleteRestore => {
                in_time(since)?;
                self.delete(&namespace, restore).await?;
            }
            Request::Confirm(_) | Request::DeleteUnchanged(_) => {}
        }
        Ok(())
    }

    async fn write_status(
        &self,
        restore: &EtcdRestore,
        status: &EtcdRestoreStatus,
    ) -> Result<(), apply::Error> {
        let api = self.api(&restore.namespace().unwrap_or_default());
        let current = restore.status.as_ref();
        apply::status_if_unchanged(&api, MANAGER_RESTORE, restore, current, status)
            .await
            .map(drop)
    }

    fn api<K>(&self, namespace: &str) -> Api<K>
    where
        K: Resource<DynamicType = (), Scope = NamespaceResourceScope>,
    {
        Api::namespaced(self.client.clone(), namespace)
    }

    async fn read<K>(&self, namespace: &str, name: &str) -> Result<Option<K>, Error>
    where
        K: Resource<DynamicType = (), Scope = NamespaceResourceScope>
            + Clone
            + std::fmt::Debug
            + serde::de::DeserializeOwned,
    {
        let found = observe::read(&self.client, namespace, name).await;
        found.map_err(Error::Missing)
    }

    async fn create<K>(&self, namespace: &str, object: &K) -> Result<Created<K>, apply::Error>
    where
        K: Resource<DynamicType = (), Scope = NamespaceResourceScope>
            + Clone
            + std::fmt::Debug
            + serde::Serialize
            + serde::de::DeserializeOwned,
    {
        apply::create(&self.api(namespace), MANAGER_RESTORE, object).await
    }

    async fn patch<K>(
        &self,
        namespace: &str,
        object: &K,
        metadata: &Value,
    ) -> Result<(), apply::Error>
    where
        K: Resource<DynamicType = (), Scope = NamespaceResourceScope>
            + Clone
            + std::fmt::Debug
            + serde::de::DeserializeOwned,
    {
        let api = self.api(namespace);
        apply::merge_metadata(&api, MANAGER_RESTORE, object, metadata.clone()).await
    }

    async fn delete<K>(&self, namespace: &str, object: &K) -> Result<(), apply::Error>
    where
        K: Resource<DynamicType = (), Scope = NamespaceResourceScope>
            + Clone
            + std::fmt::Debug
            + serde::de::DeserializeOwned,
    {
        apply::delete(&self.api(namespace), object, None)
            .await
            .map(drop)
    }

    /// Deletes a pod if it is unchanged. Returns true if the deletion was accepted, or if no pod of this name exists.
    async fn delete_unchanged(
        &self,
        pod: &Pod,
        restore: &EtcdRestore,
        since: Instant,
    ) -> Result<bool, Error> {
        let namespace = restore.namespace().unwrap_or_default();
        in_time(since)?;
        match apply::delete_if_unchanged(&self.api::<Pod>(&namespace), pod).await? {
            Deleted::Accepted => Ok(true),
            Deleted::Changed => Ok(false),
            // Invariant 11: the observed pod no longer exists. Another operator process may have created a new pod of
            // this name, so the operator reads this name again.
            Deleted::Gone => {
                let next: Option<Pod> = self.read(&namespace, &pod.name_any()).await?;
                Ok(next.is_none())
            }
        }
    }

    async fn delete_pods(&self, namespace: &str, pods: &[Pod]) -> Result<(), apply::Error> {
        let api: Api<Pod> = self.api(namespace);
        let deletions = pods
            .iter()
            .map(|pod| apply::delete(&api, pod, Some(STOP_SECONDS)));
        let deleted = join_all(deletions).await;
        deleted.into_iter().collect::<Result<Vec<_>, _>>().map(drop)
    }
}

/// Fails if the observation is older than ten seconds. After a longer pause, the process may have lost its lease
/// (invariant 11).
fn in_time(since: Instant) -> Result<(), Error> {
    if apply::is_fresh(since) {
        return Ok(());
    }
    Err(Error::TooOld)
}

#[cfg(test)]
mod tests;
