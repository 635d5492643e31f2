//! The driver: observe, plan, act, status.

use std::sync::Arc;
use std::time::Duration;

use api::{EtcdBackup, EtcdBackupStatus, names};
use jiff::Timestamp;
use kube::{Api, ResourceExt};
use runtime::{Done, Failure, Reconcile, apply};

use crate::act::{Beside, act};
use crate::named::named;
use crate::observe::{Means, observe};
use crate::observed::Observed;
use crate::plan::{Plan, Step, Verdict, plan};
use crate::status::{notices, status};

/// The shortest pause before another look.
const SOON: Duration = Duration::from_millis(300);

/// What a reconcile works with.
pub(crate) struct BackupOperator {
    pub(crate) means: Means,
    pub(crate) beside: Beside,
}

impl Reconcile for BackupOperator {
    type Object = EtcdBackup;
    type Error = apply::Error;

    async fn reconcile(&self, backup: Arc<EtcdBackup>) -> Result<Done, apply::Error> {
        let (now, uid) = (Timestamp::now(), backup.uid().unwrap_or_default());
        let running = Observed {
            since: Some(self.means.since),
            ..self.beside.observe(&uid)
        };
        let (observed, ready) = observe(&self.means, &backup, running, now).await;
        let observed = named(&backup, observed);
        let plan = plan(&backup, &observed, now);
        let done = act(&self.means.client, &self.beside, &backup, plan.step, ready).await;
        // A finalizer that was set is seen, with a new version of the object, in another round.
        if matches!(plan.step, Step::Guard(_) | Step::Expire) || done.is_err() {
            return again(done, &backup, &plan);
        }
        let desired = status(&backup, &plan, now);
        fail::fail_point!("backup-before-status");
        let api = Api::<EtcdBackup>::namespaced(
            self.means.client.clone(),
            &backup.namespace().unwrap_or_default(),
        );
        let written = write(&api, &backup, desired).await;
        if written.is_err() {
            return again(written, &backup, &plan);
        }
        if let Step::RecordAttempts(count) = plan.step {
            self.beside.start(&uid, count);
        }
        if is_told(&plan.verdict) {
            self.beside.forget(&uid);
        }
        // A status that was just written comes back as an event of the object itself.
        let requeue = plan.requeue.map(|after| after.max(SOON));
        Ok(Done {
            requeue,
            notices: notices(&backup, &plan),
        })
    }
}

/// A status is written only over the one it was made from: what is read here may be out of date, and must not take back
/// what was said since (invariant 11). Where the definition is of an earlier release and knows no count of attempts,
/// none is kept: no backup is left out for it.
async fn write(
    api: &Api<EtcdBackup>,
    backup: &EtcdBackup,
    desired: EtcdBackupStatus,
) -> Result<(), apply::Error> {
    let (manager, current) = (names::MANAGER_BACKUP, backup.status.as_ref());
    let written = apply::status_if_unchanged(api, manager, backup, current, &desired).await;
    match written {
        Err(apply::Error::Definition { .. }) if desired.unfinished_attempts.is_some() => {
            let uncounted = EtcdBackupStatus {
                unfinished_attempts: None,
                ..desired
            };
            apply::status_if_unchanged(api, manager, backup, current, &uncounted)
                .await
                .map(drop)
        }
        written => written.map(drop),
    }
}

/// Ends a round without a status; a conflict is only another look.
fn again(
    done: Result<(), apply::Error>,
    backup: &EtcdBackup,
    plan: &Plan,
) -> Result<Done, apply::Error> {
    match done {
        Err(error) if error.reason() == "Conflict" => Ok(Done {
            requeue: Some(SOON),
            notices: Vec::new(),
        }),
        done => done.map(|()| Done {
            requeue: plan.requeue.map(|after| after.max(SOON)),
            notices: notices(backup, plan),
        }),
    }
}

/// What ended is forgotten once it is in the status.
fn is_told(verdict: &Verdict) -> bool {
    matches!(
        verdict,
        Verdict::Settled | Verdict::Succeeded(_) | Verdict::Failed(_) | Verdict::Tidied(_)
    )
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;
    use std::sync::Mutex;

    use http::{Request, Response};
    use kube::Client;
    use kube::client::Body;
    use serde_json::{Value, json};
    use tower::service_fn;

    use super::*;

    /// An API server whose definition may be of a release that did not count attempts, and the statuses it was sent.
    fn server(counts: bool) -> (Client, Arc<Mutex<Vec<Value>>>) {
        let sent = Arc::<Mutex<Vec<Value>>>::default();
        let kept = sent.clone();
        let service = service_fn(move |request: Request<Body>| {
            let kept = kept.clone();
            async move {
                let body = request.into_body().collect_bytes().await.unwrap();
                let object: Value = serde_json::from_slice(&body).unwrap();
                let status = object["status"].clone();
                let refused = !counts && status.get("unfinishedAttempts").is_some();
                kept.lock().unwrap().push(status);
                let (code, answer) = if refused {
                    let message = "failed to create typed patch object (n/b; etcd.database.coreos.com/v1beta2, \
                                   Kind=EtcdBackup): .status.unfinishedAttempts: field not declared in schema";
                    let answer = json!({ "kind": "Status", "apiVersion": "v1", "status": "Failure", "code": 500,
                                         "reason": "InternalError", "message": message });
                    (500, answer)
                } else {
                    (200, json!(object_of(&object["status"])))
                };
                let body = Body::from(serde_json::to_vec(&answer).unwrap());
                Ok::<_, Infallible>(Response::builder().status(code).body(body).unwrap())
            }
        });
        (Client::new(service, "n"), sent)
    }

    fn object_of(status: &Value) -> EtcdBackup {
        serde_json::from_value(json!({
            "apiVersion": "etcd.database.coreos.com/v1beta2", "kind": "EtcdBackup",
            "metadata": { "name": "b", "namespace": "n", "uid": "u", "resourceVersion": "1" },
            "spec": { "etcdCluster": { "name": "c" }, "storageType": "S3", "s3": { "path": "bucket/etcd" } },
            "status": status,
        }))
        .unwrap()
    }

    #[tokio::test]
    async fn no_backup_is_left_out_where_the_definition_knows_no_count_of_attempts() {
        for counts in [true, false] {
            let (client, sent) = server(counts);
            let api = Api::<EtcdBackup>::namespaced(client, "n");
            let desired = EtcdBackupStatus {
                reason: Some("why".to_owned()),
                unfinished_attempts: Some(1),
                ..EtcdBackupStatus::default()
            };
            write(&api, &object_of(&json!({})), desired).await.unwrap();
            let sent = sent.lock().unwrap();
            assert_eq!(sent[0]["unfinishedAttempts"], 1);
            assert_eq!(sent.len(), if counts { 1 } else { 2 });
            if let Some(uncounted) = sent.get(1) {
                assert_eq!(uncounted["Reason"], "why");
                assert_eq!(uncounted.get("unfinishedAttempts"), None);
            }
        }
    }
}
