//! Executes a plan: starts and cancels workers, changes the EtcdBackup, and writes its status.

use std::sync::Arc;

use api::names::{FINALIZER_STORED, MANAGER_BACKUP};
use api::problem::Chain;
use api::{EtcdBackup, EtcdBackupStatus};
use jiff::Timestamp;
use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::core::v1::Pod;
use kube::runtime::reflector::ObjectRef;
use kube::{Api, Client, Resource, ResourceExt};
use runtime::apply::{self, is_owned};
use runtime::controller::Cache;
use tokio_util::sync::CancellationToken;

use crate::observe::Connections;
use crate::plan::{
    Action, Job, Plan, RecordingStep, Step, VerificationVerdict, removable_finalizers,
};
use crate::pvc::{Order, PodWorker, Report, StartTimes};
use crate::reason::{Reason, Trouble};
use crate::removal::Removal;
use crate::snapshot::{Copied, RemovalResult, Snapshot, Stored};
use crate::transfer::Transfer;
use crate::verification::Turns;
use crate::workers::{Owner, Workers};

mod copies;

pub(crate) use copies::start_copies;

pub(crate) struct ExecuteContext {
    pub(crate) client: Client,
    pub(crate) transfers: Arc<Workers<Stored>>,
    pub(crate) removals: Arc<Workers<RemovalResult>>,
    pub(crate) copies: Arc<Workers<Copied>>,
    /// The EtcdBackups whose backups are being verified.
    pub(crate) turns: Arc<Turns>,
    /// All EtcdBackups, from the watch.
    pub(crate) objects: Cache<EtcdBackup>,
    /// The time at which this process started.
    pub(crate) since: Timestamp,
    /// Canceled when this process shuts down.
    pub(crate) shutdown: CancellationToken,
}

impl ExecuteContext {
    /// The state of the workers of an EtcdBackup in this process.
    pub(crate) fn running(&self, backup: &EtcdBackup) -> Snapshot {
        let uid = backup.uid().unwrap_or_default();
        Snapshot {
            transfer: self.transfers.observe(&uid),
            removal: self.removals.observe(&uid),
            copies: copies::running(self, backup),
            since: Some(self.since),
            ..Snapshot::default()
        }
    }

    /// Waits until all workers have ended. The shutdown of the process cancels them.
    pub(crate) async fn join(&self) {
        tokio::join!(
            self.transfers.join(),
            self.removals.join(),
            self.copies.join()
        );
    }

    fn api(&self, backup: &EtcdBackup) -> Api<EtcdBackup> {
        let namespace = backup.namespace().unwrap_or_default();
        Api::namespaced(self.client.clone(), &namespace)
    }

    /// Deletes the results of the ended workers of an EtcdBackup from memory.
    fn forget(&self, uid: &str) {
        self.transfers.forget(uid);
        self.removals.forget(uid);
    }

    fn start_transfer(&self, backup: &EtcdBackup, job: Job, connections: Connections) {
        let uid = backup.uid().unwrap_or_default();
        let owner = (owner_of(backup), uid.as_str());
        let exists = self.exists(backup, false);
        match (job, connections) {
            (
                Job::Transfer {
                    endpoints,
                    name,
                    compress,
                    encrypt,
                    cluster,
                    limits,
                },
                Connections {
                    store: Some(store),
                    etcd: Some(etcd),
                    encryption,
                },
            ) if encrypt == encryption.is_some() => {
                let transfer = Transfer {
                    etcd,
                    endpoints,
                    store,
                    name,
                    compress,
                    encryption,
                    uid: uid.clone(),
                    cluster: cluster.map(|cluster| *cluster),
                    limits,
                    since: self.since,
                };
                self.transfers.enqueue(owner, transfer, exists);
            }
            (Job::InPod { pod, order }, _) => {
                let worker = self.pod_worker(*pod, order, Report::into_stored);
                self.transfers.enqueue(owner, worker, exists);
            }
            (Job::Transfer { .. } | Job::Removal { .. } | Job::LeftPod { .. }, _) => {}
        }
    }

    /// Starts a removal. If the EtcdBackup is deleted, a removal by the retention rules is canceled, and a removal of
    /// all stored backups continues.
    fn start_removal(&self, backup: &EtcdBackup, plan: &Plan, job: Job, connections: Connections) {
        let uid = backup.uid().unwrap_or_default();
        let owner = (owner_of(backup), uid.as_str());
        let exists = self.exists(backup, plan.action == Action::RemoveAll);
        match (job, connections.store) {
            (Job::Removal { path, scope }, Some(store)) => {
                let removal = Removal {
                    store,
                    path,
                    uid: uid.clone(),
                    scope,
                };
                self.removals.enqueue(owner, removal, exists);
            }
            (Job::InPod { pod, order }, _) => {
                let worker = self.pod_worker(*pod, order, Report::into_removal_result);
                self.removals.enqueue(owner, worker, exists);
            }
            (Job::Transfer { .. } | Job::Removal { .. } | Job::LeftPod { .. }, _) => {}
        }
    }

    fn pod_worker<T>(
        &self,
        pod: Pod,
        order: Order,
        read: fn(Report, &Order) -> Result<T, Trouble>,
    ) -> PodWorker<T> {
        PodWorker {
            client: self.client.clone(),
            pod,
            order,
            shutdown: self.shutdown.clone(),
            read,
            times: StartTimes::default(),
        }
    }

    /// Returns a function that checks whether an EtcdBackup with the name and the UID of `backup` exists. If
    /// `or_deleting` is false, the function returns false as soon as the EtcdBackup is being deleted.
    fn exists(
        &self,
        backup: &EtcdBackup,
        or_deleting: bool,
    ) -> impl Fn() -> bool + Send + Sync + use<> {
        let owner = owner_of(backup);
        let (objects, uid) = (self.objects.clone(), backup.uid());
        move || {
            objects.get(&owner).is_some_and(|object| {
                object.uid() == uid && (or_deleting || object.meta().deletion_timestamp.is_none())
            })
        }
    }
}

fn owner_of(backup: &EtcdBackup) -> Owner {
    ObjectRef::new(&backup.name_any()).within(&backup.namespace().unwrap_or_default())
}

/// Executes the planned action. The function [`report`] executes actions that only write the status.
pub(crate) async fn execute(
    context: &ExecuteContext,
    backup: &EtcdBackup,
    plan: &Plan,
    connections: Connections,
) -> Result<(), apply::Error> {
    let uid = backup.uid().unwrap_or_default();
    if let Some(Job::LeftPod { name }) = &plan.job {
        delete_left_pod(&context.client, backup, name).await?;
    }
    step_verification(context, backup, plan).await?;
    match (plan.action, plan.job.clone()) {
        (Action::StartTransfer, Some(job)) => context.start_transfer(backup, job, connections),
        (Action::RemoveSurplus | Action::RemoveAll, Some(job)) => {
            context.start_removal(backup, plan, job, connections);
        }
        (Action::AbandonTransfer, _) => context.transfers.abandon(&uid),
        // The plan records the start of a new backup. The result of an earlier transfer is discarded, because it is not
        // a result of the new backup.
        (Action::RecordIntent, _) => context.forget(&uid),
        (Action::SetFinalizer(set), _) => {
            let api = context.api(backup);
            let names: &[&str] = if set {
                &[FINALIZER_STORED]
            } else {
                removable_finalizers(backup)
            };
            apply::set_finalizers(&api, MANAGER_BACKUP, backup, names, set).await?;
            if !set {
                context.forget(&uid);
                copies::forget(context, backup);
            }
        }
        (Action::DeleteBackup, _) => {
            apply::delete(&context.api(backup), backup, None).await?;
        }
        (
            Action::StartTransfer
            | Action::RemoveSurplus
            | Action::RemoveAll
            | Action::RecordAttempts(_)
            | Action::Nothing,
            _,
        ) => {}
    }
    Ok(())
}

/// Creates or deletes the pod that verifies a backup. After the verification, other EtcdBackups may start their
/// verifications.
async fn step_verification(
    context: &ExecuteContext,
    backup: &EtcdBackup,
    plan: &Plan,
) -> Result<(), apply::Error> {
    let namespace = backup.namespace().unwrap_or_default();
    match &plan.verification.step {
        Step::Nothing => {}
        Step::Create(pod) => {
            fail::fail_point!("backup-before-verification-pod");
            let pods = Api::<Pod>::namespaced(context.client.clone(), &namespace);
            apply::create(&pods, MANAGER_BACKUP, pod.as_ref()).await?;
        }
        Step::Delete(name) => {
            delete_left_pod(&context.client, backup, name).await?;
            fail::fail_point!("backup-after-verification-pod");
        }
    }
    if matches!(
        plan.verification.verdict,
        VerificationVerdict::Verified(_)
            | VerificationVerdict::Failed(_)
            | VerificationVerdict::Off
    ) {
        let uid = backup.uid().unwrap_or_default();
        context.turns.end(&namespace, &uid);
    }
    Ok(())
}

/// Applies or deletes the Deployment of the agent. After a failure, for example because of a quota, the caller
/// continues the reconcile, so that the failure does not prevent backups.
///
/// # Errors
/// Fails if the API server rejects the request or cannot be reached.
pub(crate) async fn step_recording(
    context: &ExecuteContext,
    backup: &EtcdBackup,
    step: &RecordingStep,
) -> Result<(), Trouble> {
    let namespace = backup.namespace().unwrap_or_default();
    let deployments = Api::<Deployment>::namespaced(context.client.clone(), &namespace);
    let done = match step {
        RecordingStep::Nothing => Ok(()),
        RecordingStep::Apply(deployment) => {
            let applied = apply::apply(&deployments, MANAGER_BACKUP, deployment.as_ref());
            applied.await.map(drop)
        }
        RecordingStep::Delete(deployment) => {
            let deleted = apply::delete(&deployments, deployment.as_ref(), None);
            deleted.await.map(drop)
        }
    };
    done.map_err(|error| {
        let message = format!(
            "the Deployment of the agent cannot be changed: {}",
            Chain(&error)
        );
        Trouble::new(Reason::StepFailed, message)
    })
}

/// Deletes the pod with this name if the EtcdBackup owns the pod. An earlier operator process may have created this
/// pod. The pod is deleted before the status reports the end of the attempt.
async fn delete_left_pod(
    client: &Client,
    backup: &EtcdBackup,
    name: &str,
) -> Result<(), apply::Error> {
    let namespace = backup.namespace().unwrap_or_default();
    let pods = Api::<Pod>::namespaced(client.clone(), &namespace);
    let found = pods.get_opt(name).await;
    let found = found.map_err(|source| apply::Error::Api {
        verb: "read",
        kind: "Pod".to_owned(),
        name: name.to_owned(),
        source: Box::new(source),
    })?;
    match found {
        Some(pod) if is_owned(&pod.metadata, &backup.uid().unwrap_or_default()) => {
            apply::delete(&pods, &pod, None).await.map(drop)
        }
        _ => Ok(()),
    }
}

/// Writes the status. If the plan counts an attempt, the transfer of this attempt starts after the write. If the plan
/// has a final result, the results of the workers are deleted from memory.
pub(crate) async fn report(
    context: &ExecuteContext,
    backup: &EtcdBackup,
    plan: &Plan,
    desired: EtcdBackupStatus,
) -> Result<(), apply::Error> {
    fail::fail_point!("backup-before-status");
    write_over(&context.api(backup), backup, desired).await?;
    let uid = backup.uid().unwrap_or_default();
    if let Action::RecordAttempts(count) = plan.action {
        context.transfers.start(&uid, count);
    }
    if plan.verdict.is_final() {
        context.forget(&uid);
    }
    Ok(())
}

/// Writes the status with the resourceVersion of the observed object as precondition (invariant 11). The CRD of an
/// earlier release may reject the status. The function then retries without `unfinishedAttempts`, `continuous` and the
/// fields for the columns of `kubectl get`.
async fn write_over(
    api: &Api<EtcdBackup>,
    backup: &EtcdBackup,
    desired: EtcdBackupStatus,
) -> Result<(), apply::Error> {
    let (manager, current) = (MANAGER_BACKUP, backup.status.as_ref());
    let written = apply::status_if_unchanged(api, manager, backup, current, &desired).await;
    match written {
        Err(apply::Error::Definition { .. }) => {
            let reduced = EtcdBackupStatus {
                unfinished_attempts: None,
                continuous: None,
                ..desired.without_display()
            };
            if reduced == desired {
                return written.map(drop);
            }
            apply::status_if_unchanged(api, manager, backup, current, &reduced)
                .await
                .map(drop)
        }
        written => written.map(drop),
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;
    use std::sync::{Arc, Mutex};

    use http::{Request, Response};
    use kube::client::Body;
    use serde_json::{Value, json};
    use tower::service_fn;

    use super::*;

    /// A fake API server that records each status. If `has_field` is false, its CRD does not contain
    /// `unfinishedAttempts`.
    fn server(has_field: bool) -> (Client, Arc<Mutex<Vec<Value>>>) {
        let sent = Arc::<Mutex<Vec<Value>>>::default();
        let recorded = sent.clone();
        let service = service_fn(move |request: Request<Body>| {
            let recorded = recorded.clone();
            async move {
                let body = request.into_body().collect_bytes().await.unwrap();
                let object: Value = serde_json::from_slice(&body).unwrap();
                let status = object["status"].clone();
                let rejected = !has_field && status.get("unfinishedAttempts").is_some();
                recorded.lock().unwrap().push(status);
                let (code, answer) = if rejected {
                    let message = "failed to create typed patch object (n/b; etcd.database.coreos.com/v1beta2, \
                                   Kind=EtcdBackup): .status.unfinishedAttempts: field not declared in schema";
                    let answer = json!({ "kind": "Status", "apiVersion": "v1", "status": "Failure", "code": 500,
                                         "reason": "InternalError", "message": message });
                    (500, answer)
                } else {
                    (200, json!(backup_with(&object["status"])))
                };
                let body = Body::from(serde_json::to_vec(&answer).unwrap());
                Ok::<_, Infallible>(Response::builder().status(code).body(body).unwrap())
            }
        });
        (Client::new(service, "n"), sent)
    }

    fn backup_with(status: &Value) -> EtcdBackup {
        serde_json::from_value(json!({
            "apiVersion": "etcd.database.coreos.com/v1beta2", "kind": "EtcdBackup",
            "metadata": { "name": "b", "namespace": "n", "uid": "u", "resourceVersion": "1" },
            "spec": { "etcdCluster": { "name": "c" }, "storageType": "S3", "s3": { "path": "bucket/etcd" } },
            "status": status,
        }))
        .unwrap()
    }

    /// A fake API server with one pod that `owner` owns. It records all requests.
    fn server_with_pod(owner: &'static str) -> (Client, Arc<Mutex<Vec<String>>>) {
        let sent = Arc::<Mutex<Vec<String>>>::default();
        let recorded = sent.clone();
        let service = service_fn(move |request: Request<Body>| {
            let recorded = recorded.clone();
            async move {
                let text = format!("{} {}", request.method(), request.uri().path());
                let body = request.into_body().collect_bytes().await.unwrap();
                let body = String::from_utf8_lossy(&body).into_owned();
                recorded.lock().unwrap().push(format!("{text} {body}"));
                let pod = json!({ "apiVersion": "v1", "kind": "Pod", "metadata": {
                    "name": "etcd-backup-1", "namespace": "n", "uid": "pod-uid",
                    "ownerReferences": [{ "apiVersion": "v", "kind": "EtcdBackup", "name": "b", "uid": owner }],
                } });
                let body = Body::from(serde_json::to_vec(&pod).unwrap());
                Ok::<_, Infallible>(Response::new(body))
            }
        });
        (Client::new(service, "n"), sent)
    }

    /// Invariant 11: the deletion request contains the UID of the observed pod as precondition.
    #[tokio::test]
    async fn leftover_pod_is_deleted_only_if_owned_by_etcdbackup() {
        for (owner, requests) in [("u", 2), ("another", 1)] {
            let (client, sent) = server_with_pod(owner);
            let backup = backup_with(&json!({}));
            delete_left_pod(&client, &backup, "etcd-backup-1")
                .await
                .unwrap();
            let sent = sent.lock().unwrap();
            assert_eq!(sent.len(), requests, "{sent:?}");
            let path = "/api/v1/namespaces/n/pods/etcd-backup-1";
            assert!(sent[0].starts_with(&format!("GET {path}")), "{sent:?}");
            if let Some(deletion) = sent.get(1) {
                assert!(deletion.starts_with(&format!("DELETE {path}")), "{sent:?}");
                assert!(deletion.contains("pod-uid"), "{sent:?}");
            }
        }
    }

    #[tokio::test]
    async fn status_write_is_repeated_without_fields_that_older_crd_lacks() {
        for has_field in [true, false] {
            let (client, sent) = server(has_field);
            let api = Api::<EtcdBackup>::namespaced(client, "n");
            let desired = EtcdBackupStatus {
                reason: Some("why".to_owned()),
                unfinished_attempts: Some(1),
                cluster: Some("c".to_owned()),
                ..EtcdBackupStatus::default()
            };
            write_over(&api, &backup_with(&json!({})), desired)
                .await
                .unwrap();
            let sent = sent.lock().unwrap();
            assert_eq!(sent[0]["unfinishedAttempts"], 1);
            assert_eq!(sent.len(), if has_field { 1 } else { 2 });
            if let Some(uncounted) = sent.get(1) {
                assert_eq!(uncounted["Reason"], "why");
                assert_eq!(uncounted.get("unfinishedAttempts"), None);
                assert_eq!(uncounted.get("cluster"), None);
            }
        }
    }
}
