//! The reconcile of one EtcdRestore: observe, plan, execute, status.

use std::sync::Arc;
use std::time::{Duration, Instant};

use api::EtcdRestore;
use etcd::EtcdClient;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;
use kube::{Api, Client, ResourceExt};
use runtime::Done;
use runtime::controller::Reconcile;
use runtime::image::OwnImage;
use runtime::logs::in_stage;
use runtime::slots::Slots;
use store::grants::Grants;

use crate::execute::{ExecuteContext, execute, report};
use crate::observe::{ObserveContext, observe};
use crate::outcome::{Error, replan_without_storage};
use crate::plan::plan_at;
use crate::plan::write::write;
use crate::status;

/// Delay after a conflict, or after an observation that took too long.
const CONFLICT_RETRY: Duration = Duration::from_millis(200);

pub(crate) struct ReconcileContext {
    /// The Kubernetes client for reads.
    pub(crate) client: Client,
    /// The client for writes, which sends each write at most once (invariant 11), and the tasks that undo late writes.
    pub(crate) execute: ExecuteContext,
    /// The etcd client for clusters without TLS and authentication.
    pub(crate) etcd: EtcdClient,
    /// The image of seed pods.
    pub(crate) image: OwnImage,
    /// The storage locations that each namespace may use with the operator's own cloud identity.
    pub(crate) grants: Grants,
    /// Limits the number of concurrent reads of manifests.
    pub(crate) reads: Arc<Slots>,
}

impl Reconcile for ReconcileContext {
    type Object = EtcdRestore;
    type Error = Error;

    async fn reconcile(&self, object: Arc<EtcdRestore>) -> Result<Done, Error> {
        Box::pin(self.reconcile_since(&object, Instant::now())).await
    }
}

impl ReconcileContext {
    /// Reconciles an EtcdRestore. `since` is the start of the observation.
    async fn reconcile_since(&self, object: &EtcdRestore, since: Instant) -> Result<Done, Error> {
        let namespace = object.namespace().unwrap_or_default();
        let api: Api<EtcdRestore> = Api::namespaced(self.client.clone(), &namespace);
        // The EtcdRestore is read again, because the cached object may not contain the status that the previous
        // reconcile has written.
        let Some(restore) = api.get_opt(&object.name_any()).await.map_err(Error::Read)? else {
            return Ok(Done::default());
        };
        let context = ObserveContext {
            client: &self.client,
            etcd: &self.etcd,
            grants: &self.grants,
            reads: &self.reads,
            image: &self.image,
            fault: None,
        };
        let observation = in_stage("observe", Box::pin(observe(&context, &restore))).await;
        let now = now();
        let plan = plan_at(&restore, &observation.snapshot, now);
        let executed = match write(&restore, &observation, &plan.action, now) {
            Ok(requests) => {
                let failpoint = plan.action.failpoint();
                let executed = execute(&self.execute, &restore, failpoint, &requests, since);
                in_stage("execute", Box::pin(executed)).await
            }
            Err(why) => Err(Error::Missing(why)),
        };
        let snapshot = &observation.snapshot;
        let (plan, executed) = replan_without_storage(&restore, snapshot, (plan, executed), now);
        if plan.action.changes_object() {
            return match executed {
                Err(error) if error.is_outdated() => Ok(requeue(Some(CONFLICT_RETRY))),
                executed => executed.map(|()| requeue(plan.requeue)),
            };
        }
        let (trouble, now) = (executed.as_ref().err().map(Error::trouble), Time(now));
        let mut desired = status::compute(&restore, &plan, trouble.as_ref(), &now);
        status::set_progress(&mut desired, &snapshot.seed.pod);
        let written = report(&self.execute, &restore, &desired, &now);
        let written = in_stage("status", written).await;
        match executed.and(written) {
            // If the observation was too slow, the reconcile is repeated soon. This is no failure, so the controller
            // does not back off.
            Err(Error::TooOld) => Ok(requeue(Some(CONFLICT_RETRY))),
            Err(Error::Status(error)) if error.is_conflict() => Ok(requeue(Some(CONFLICT_RETRY))),
            Err(Error::Status(error)) if error.is_missing() => Ok(Done::default()),
            done => done.map(|()| Done {
                notices: status::notices(&restore, &plan),
                ..requeue(plan.requeue)
            }),
        }
    }
}

fn requeue(after: Option<Duration>) -> Done {
    Done {
        requeue: after,
        notices: Vec::new(),
    }
}

/// The current time in whole seconds, as Kubernetes stores it.
fn now() -> Timestamp {
    Timestamp::from_second(Timestamp::now().as_second()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use api::conditions::{self, ConditionType};
    use api::names::ANNOTATION_RESTORE;
    use api::names::FINALIZER_CLAIM;
    use etcd::Access;
    use serde_json::{Value, json};

    use super::*;
    use crate::execute::Undo;
    use crate::{fake, naming};

    fn context(client: Client, writer: Client) -> ReconcileContext {
        ReconcileContext {
            image: fake::image(&client),
            client,
            execute: ExecuteContext {
                client: writer,
                undo: Undo::default(),
            },
            etcd: EtcdClient::new(Access::default()),
            reads: crate::fake::reads(),
            grants: Grants {
                operator: "restore operator",
                own: "prod".into(),
                others: Vec::new(),
            },
        }
    }

    /// Invariant 11: a retry could send a write more than ten seconds after the observation.
    #[tokio::test]
    async fn restore_writes_use_client_without_retries() {
        let spec = json!({ "etcdCluster": { "name": "main" }, "backup": { "name": "b" } });
        let mut new = EtcdRestore::new("again", serde_json::from_value(spec).unwrap());
        new.metadata.namespace = Some("prod".into());
        new.metadata.uid = Some("restore-uid".into());
        let mut deleted = new.clone();
        deleted.metadata.finalizers = Some(vec![FINALIZER_CLAIM.to_owned()]);
        deleted.metadata.deletion_timestamp = Some(Time(now()));
        for (restore, written) in [
            (new, "PATCH etcdrestores/status"),
            (deleted, "PATCH etcdrestores"),
        ] {
            let object = json!(restore);
            let answer = move |request: &str, _: usize| match request {
                "GET etcdclusters" | "GET etcdbackups" => (404, Value::Null),
                _ => (200, object.clone()),
            };
            let (client, reads) = fake::server(answer.clone());
            let (writer, requests) = fake::server(answer);
            let context = context(client, writer);
            let reconciled = Box::pin(context.reconcile(Arc::new(restore))).await;
            reconciled.unwrap();
            let reads = reads.lock().unwrap();
            assert!(reads.iter().all(|one| one.starts_with("GET")), "{reads:?}");
            assert_eq!(*requests.lock().unwrap(), [written]);
        }
    }

    /// A deleted EtcdRestore with `overwrite: true`, its EtcdCluster, and the Service of its seed.
    fn aborted() -> (EtcdRestore, Value, Value) {
        let spec = json!({ "etcdCluster": { "name": "main" }, "backup": { "name": "b" }, "overwrite": true });
        let mut restore = EtcdRestore::new("again", serde_json::from_value(spec).unwrap());
        restore.metadata.namespace = Some("prod".into());
        restore.metadata.uid = Some("restore-uid".into());
        restore.metadata.resource_version = Some("7".into());
        restore.metadata.finalizers = Some(vec![FINALIZER_CLAIM.to_owned()]);
        restore.metadata.deletion_timestamp = Some(Time(now()));
        let seed = naming::seed(&restore);
        let status =
            json!({ "seed": seed, "replaces": { "uid": "cluster-uid", "clusterID": "aa" } });
        restore.status = serde_json::from_value(status).unwrap();
        let cluster = json!({
            "apiVersion": "etcd.database.coreos.com/v1beta2", "kind": "EtcdCluster",
            "metadata": { "name": "main", "namespace": "prod", "uid": "cluster-uid", "resourceVersion": "7",
                          "annotations": { ANNOTATION_RESTORE: "restore-uid" } },
            "spec": { "size": 3, "version": "3.6.16" }, "status": { "clusterID": "aa" },
        });
        let owner = json!({ "apiVersion": "v", "kind": "EtcdCluster", "name": "main", "uid": "cluster-uid" });
        let service = json!({
            "apiVersion": "v1", "kind": "Service",
            "metadata": { "name": seed.member, "namespace": "prod", "uid": "service", "ownerReferences": [owner] },
        });
        (restore, cluster, service)
    }

    /// A slow observation is no failure, so the controller must not back off.
    #[tokio::test]
    async fn outdated_observation_is_repeated_without_backoff() {
        for (age, too_old) in [(0, false), (11, true)] {
            let (restore, cluster, service) = aborted();
            let object = json!(restore);
            let (client, _) = fake::server(move |request, _| match request {
                "GET etcdrestores" => (200, object.clone()),
                "GET etcdclusters" => (200, cluster.clone()),
                "GET services" => (200, service.clone()),
                _ => (404, Value::Null),
            });
            let (written, object, cluster) = (
                Arc::<Mutex<Option<Value>>>::default(),
                json!(restore),
                aborted().1,
            );
            let recorded = Arc::clone(&written);
            let (writer, requests) = fake::server_with_body(move |request, body| match request {
                "PATCH etcdrestores/status" => {
                    *recorded.lock().unwrap() = Some(body.clone());
                    (200, object.clone())
                }
                "GET etcdclusters" => (200, cluster.clone()),
                _ => (200, fake::success()),
            });
            let since = Instant::now().checked_sub(Duration::from_secs(age));
            let context = context(client, writer);
            let reconcile = Box::pin(context.reconcile_since(&restore, since.unwrap()));
            let done = reconcile.await.unwrap();
            let deleted = requests
                .lock()
                .unwrap()
                .contains(&"DELETE services".to_owned());
            assert_eq!(deleted, !too_old);
            let written = written.lock().unwrap().take().unwrap();
            let status: api::restore::EtcdRestoreStatus =
                serde_json::from_value(written["status"].clone()).unwrap();
            for condition in &status.conditions {
                assert_ne!(condition.reason, "StepFailed", "{condition:?}");
            }
            let complete = conditions::find(&status.conditions, &ConditionType::Complete).unwrap();
            assert_eq!(complete.reason, "InProgress");
            assert_eq!(
                complete.message.contains("took longer than 10 seconds"),
                too_old,
                "{complete:?}"
            );
            if too_old {
                assert_eq!(done.requeue, Some(CONFLICT_RETRY));
                assert!(done.notices.is_empty(), "{:?}", done.notices);
            }
        }
    }
}
