//! The driver: observe, plan, act, status. It decides nothing itself.

use std::sync::Arc;
use std::time::{Duration, Instant};

use api::conditions::Reason;
use api::names::{ANNOTATION_RESTORE, MANAGER_RESTORE};
use api::{EtcdCluster, EtcdRestore};
use etcd::{Access, EtcdClient};
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;
use kube::runtime::controller::Controller;
use kube::runtime::reflector::{ObjectRef, Store};
use kube::runtime::watcher;
use kube::{Api, Client, ResourceExt};
use runtime::controller::{Guarded, Reconcile, controller, drive, watched};
use runtime::grants::{Grant, Grants};
use runtime::image::OwnImage;
use runtime::outcome::Failure;
use runtime::{Done, Operator, apply};

use crate::act::{self, Hands, act};
use crate::metrics::Measures;
use crate::observe::{Eyes, observe};
use crate::observed::Observed;
use crate::plan::refused::refused;
use crate::plan::{Plan, Step, plan_at};
use crate::{naming, status};

/// How soon to look again at what somebody else changed meanwhile.
const SOON: Option<Duration> = Some(Duration::from_millis(200));

/// Why a reconcile failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The EtcdRestore could not be read.
    #[error("the EtcdRestore cannot be read")]
    Read(#[source] kube::Error),
    /// The planned step was not made.
    #[error(transparent)]
    Act(#[from] act::Error),
    /// The status was not written.
    #[error("the status is not written")]
    Status(#[source] apply::Error),
}

impl Failure for Error {
    fn reason(&self) -> &'static str {
        match self {
            Self::Read(error) => apply::kube_reason(error),
            Self::Act(error) => error.reason(),
            Self::Status(error) => error.reason(),
        }
    }
}

/// Runs the restore operator until its shutdown. Without `image` that of the operator's own pod is used. `ambient` says
/// which namespaces may read what with the operator's own identity.
pub async fn run(operator: Operator, image: Option<String>, ambient: Vec<Grant>) {
    let controller = controller::<EtcdRestore>(&operator);
    operator.figures.collect(Measures {
        objects: controller.store(),
    });
    let restorer = Arc::new(Restorer {
        client: operator.client.clone(),
        writer: operator.once.clone(),
        etcd: EtcdClient::new(Access::default()),
        image: OwnImage::new(&operator, image),
        grants: Grants {
            operator: "restore operator",
            own: operator.namespace.clone(),
            others: ambient,
        },
    });
    let controller = watch_targets(&operator, controller);
    drive(&operator, controller, restorer).await;
}

/// What happens to a target, or to a seed's pod, is looked at once it is seen.
fn watch_targets(
    operator: &Operator,
    controller: Controller<Guarded<EtcdRestore>>,
) -> Controller<Guarded<EtcdRestore>> {
    let (of_cluster, of_pod) = (controller.store(), controller.store());
    let seeds = watcher::Config::default().labels(ANNOTATION_RESTORE);
    controller
        .watches(
            watched::<EtcdCluster>(operator),
            watcher::Config::default(),
            move |cluster| {
                let (namespace, name) = (cluster.namespace(), cluster.name_any());
                concerned(&of_cluster, |restore| {
                    restore.metadata.namespace == namespace && naming::target(restore) == name
                })
            },
        )
        .watches(watched::<Pod>(operator), seeds, move |pod| {
            let uid = pod.labels().get(ANNOTATION_RESTORE).cloned();
            concerned(&of_pod, |restore| restore.metadata.uid == uid)
        })
}

fn concerned(
    store: &Store<Guarded<EtcdRestore>>,
    is: impl Fn(&EtcdRestore) -> bool,
) -> Vec<ObjectRef<Guarded<EtcdRestore>>> {
    let restores = store.state();
    restores
        .iter()
        .filter(|restore| restore.0.as_ref().is_ok_and(&is))
        .map(|restore| ObjectRef::from_obj(restore.as_ref()))
        .collect()
}

struct Restorer {
    /// For what is read.
    client: Client,
    /// For steps and records, each sent once: nobody repeats one later (invariant 11).
    writer: Client,
    etcd: EtcdClient,
    image: OwnImage,
    grants: Grants,
}

impl Reconcile for Restorer {
    type Object = EtcdRestore;
    type Error = Error;

    async fn reconcile(&self, object: Arc<EtcdRestore>) -> Result<Done, Error> {
        Box::pin(self.round(object, Instant::now())).await
    }
}

impl Restorer {
    /// What is read is as old as `since`.
    async fn round(&self, object: Arc<EtcdRestore>, since: Instant) -> Result<Done, Error> {
        let namespace = object.namespace().unwrap_or_default();
        let api: Api<EtcdRestore> = Api::namespaced(self.client.clone(), &namespace);
        // The watch may lag behind our own last write; what was recorded must be seen.
        let Some(restore) = api.get_opt(&object.name_any()).await.map_err(Error::Read)? else {
            return Ok(Done::default());
        };
        let eyes = Eyes {
            client: &self.client,
            etcd: &self.etcd,
            grants: &self.grants,
            fault: None,
        };
        let seen = Box::pin(observe(&eyes, &restore)).await;
        let now = now();
        let plan = plan_at(&restore, &seen.observed, now.0);
        let hands = Hands {
            client: &self.writer,
            image: self.image.get().await,
            since,
        };
        let acted = act(&hands, &restore, &seen, &plan.step).await;
        let (plan, acted) = after(&restore, &seen.observed, (plan, acted), now.0);
        if let Step::Guard(_) | Step::Expire = plan.step {
            // The object is a new version, or gone.
            return match acted {
                Err(error) if matches!(error.reason(), "Conflict" | "NotFound") => {
                    Ok(requeue(SOON))
                }
                acted => Ok(acted.map(|()| requeue(plan.requeue))?),
            };
        }
        fail::fail_point!("restore-before-status");
        let api: Api<EtcdRestore> = Api::namespaced(self.writer.clone(), &namespace);
        let trouble = acted.as_ref().err().map(act::trouble);
        let mut desired = status::compute(&restore, &plan, trouble.as_ref(), &now);
        status::tell_progress(&mut desired, &seen.observed.seed.pod);
        let written = apply::status_if_unchanged(
            &api,
            MANAGER_RESTORE,
            &restore,
            restore.status.as_ref(),
            &desired,
        )
        .await;
        // It is said in the status, and nothing has failed: what was read took too long.
        if matches!(acted, Err(act::Error::TooOld)) {
            return Ok(requeue(SOON));
        }
        acted?;
        match written {
            Err(error) if error.reason() == apply::DEFINITION_OUTDATED => {
                // In what the definition knows.
                let told = status::of_an_outdated_definition(&restore, &error, &now);
                apply::status_if_unchanged(
                    &api,
                    MANAGER_RESTORE,
                    &restore,
                    restore.status.as_ref(),
                    &told,
                )
                .await
                .map_err(Error::Status)?;
                return Err(Error::Status(error));
            }
            // Changed since it was read: look again.
            Err(error) if error.reason() == "Conflict" => {
                return Ok(requeue(SOON));
            }
            Err(error) if error.reason() == "NotFound" => return Ok(Done::default()),
            other => other.map_err(Error::Status)?,
        };
        Ok(Done {
            notices: status::notices(&restore, &plan),
            ..requeue(plan.requeue)
        })
    }
}

/// What the API server refuses for want of storage is told with the remedy, and counts as no failure of the operator.
fn after(
    restore: &EtcdRestore,
    observed: &Observed,
    (plan, acted): (Plan, Result<(), act::Error>),
    now: Timestamp,
) -> (Plan, Result<(), act::Error>) {
    let trouble = acted.as_ref().err().map(act::trouble);
    match trouble.filter(|trouble| trouble.reason == Reason::StorageMissing) {
        Some(trouble) => (refused(restore, observed, trouble, now), Ok(())),
        None => (plan, acted),
    }
}

fn requeue(after: Option<Duration>) -> Done {
    Done {
        requeue: after,
        notices: Vec::new(),
    }
}

fn now() -> Time {
    let seconds = k8s_openapi::jiff::Timestamp::now().as_second();
    Time(k8s_openapi::jiff::Timestamp::from_second(seconds).unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use api::conditions::{self, ConditionType};
    use api::names::FINALIZER_CLAIM;
    use prometheus_client::registry::Registry;
    use runtime::controller::Scope;
    use serde_json::{Value, json};

    use super::*;
    use crate::fake;

    fn image(client: &Client) -> OwnImage {
        let operator = Operator::new(
            ("etcd-restore-operator", "restore"),
            (client.clone(), client.clone()),
            Scope::Cluster,
            ("prod".into(), "pod".into()),
            &mut Registry::default(),
        );
        OwnImage::new(&operator, Some("operator".to_owned()))
    }

    fn restorer(client: Client, writer: Client) -> Restorer {
        Restorer {
            image: image(&client),
            client,
            writer,
            etcd: EtcdClient::new(Access::default()),
            grants: Grants {
                operator: "restore operator",
                own: "prod".into(),
                others: Vec::new(),
            },
        }
    }

    /// Invariant 11: what repeats a request that was refused for now does so for minutes.
    #[tokio::test]
    async fn what_is_written_is_sent_by_who_sends_it_once() {
        let spec = json!({ "etcdCluster": { "name": "main" }, "backup": { "name": "b" } });
        let mut begins = EtcdRestore::new("again", serde_json::from_value(spec).unwrap());
        begins.metadata.namespace = Some("prod".into());
        begins.metadata.uid = Some("restore-uid".into());
        let mut ends = begins.clone();
        ends.metadata.finalizers = Some(vec![FINALIZER_CLAIM.to_owned()]);
        ends.metadata.deletion_timestamp = Some(now());
        for (restore, written) in [
            (begins, "PATCH etcdrestores/status"),
            (ends, "PATCH etcdrestores"),
        ] {
            let there = json!(restore);
            let answer = move |what: &str, _: usize| match what {
                "GET etcdclusters" | "GET etcdbackups" => (404, Value::Null),
                _ => (200, there.clone()),
            };
            let (client, read) = fake::server(answer.clone());
            let (writer, wrote) = fake::server(answer);
            let restorer = restorer(client, writer);
            let reconciled = Box::pin(restorer.reconcile(Arc::new(restore))).await;
            reconciled.unwrap();
            let read = read.lock().unwrap();
            assert!(read.iter().all(|one| one.starts_with("GET")), "{read:?}");
            assert_eq!(*wrote.lock().unwrap(), [written]);
        }
    }

    /// A restore over a living cluster that was deleted; of the seed its Service is left.
    fn given_up() -> (EtcdRestore, Value, Value) {
        let spec = json!({ "etcdCluster": { "name": "main" }, "backup": { "name": "b" }, "overwrite": true });
        let mut restore = EtcdRestore::new("again", serde_json::from_value(spec).unwrap());
        restore.metadata.namespace = Some("prod".into());
        restore.metadata.uid = Some("restore-uid".into());
        restore.metadata.resource_version = Some("7".into());
        restore.metadata.finalizers = Some(vec![FINALIZER_CLAIM.to_owned()]);
        restore.metadata.deletion_timestamp = Some(now());
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

    /// A failure would be counted, and waited out for longer each time.
    #[tokio::test]
    async fn a_look_that_took_too_long_is_no_failure_and_is_followed_by_another_soon() {
        for (age, late) in [(0, false), (11, true)] {
            let (restore, cluster, service) = given_up();
            let there = json!(restore);
            let (client, _) = fake::server(move |what, _| match what {
                "GET etcdrestores" => (200, there.clone()),
                "GET etcdclusters" => (200, cluster.clone()),
                "GET services" => (200, service.clone()),
                _ => (404, Value::Null),
            });
            let (told, there, claimed) = (
                Arc::<Mutex<Option<Value>>>::default(),
                json!(restore),
                given_up().1,
            );
            let kept = Arc::clone(&told);
            let (writer, wrote) = fake::told(move |what, body| match what {
                "PATCH etcdrestores/status" => {
                    *kept.lock().unwrap() = Some(body.clone());
                    (200, there.clone())
                }
                "GET etcdclusters" => (200, claimed.clone()),
                _ => (200, fake::success()),
            });
            let since = Instant::now().checked_sub(Duration::from_secs(age));
            let restorer = restorer(client, writer);
            let round = Box::pin(restorer.round(Arc::new(restore), since.unwrap()));
            let done = round.await.unwrap();
            let deleted = wrote
                .lock()
                .unwrap()
                .contains(&"DELETE services".to_owned());
            assert_eq!(deleted, !late);
            let status: api::restore::EtcdRestoreStatus =
                serde_json::from_value(told.lock().unwrap().take().unwrap()["status"].clone())
                    .unwrap();
            for condition in &status.conditions {
                assert_ne!(condition.reason, "StepFailed", "{condition:?}");
            }
            let complete = conditions::find(&status.conditions, &ConditionType::Complete).unwrap();
            assert_eq!(complete.reason, "InProgress");
            assert_eq!(
                complete.message.contains("took longer than 10 seconds"),
                late,
                "{complete:?}"
            );
            if late {
                assert_eq!(done.requeue, SOON);
                assert!(done.notices.is_empty(), "{:?}", done.notices);
            }
        }
    }
}
