//! Creates the pod of an order, waits for its report, and deletes the pod. If the pod already exists, waits for its
//! report.

use std::time::{Duration, Instant};

use api::names::MANAGER_BACKUP;
use futures::FutureExt;
use futures::future::BoxFuture;
use k8s_openapi::NamespaceResourceScope;
use k8s_openapi::api::core::v1::{Event, Pod};
use kube::api::ListParams;
use kube::{Api, Client, ResourceExt};
use runtime::apply;
use store::progress::{self, Meter};
use tokio_util::sync::CancellationToken;

use super::order::{Order, Report};
use super::pod_state::{PodState, pod_state};
use crate::reason::{Reason, Trouble};
use crate::workers::{Progress, Worker};

/// Time limits for the start of a pod.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StartTimes {
    /// Delay between two reads of the pod.
    poll: Duration,
    /// A pod that has not started after this time is reported. A pod that cannot start (`Stuck`) is replaced after
    /// this time.
    report: Duration,
    /// A pod that has not started after this time is replaced, because another node may be able to start it.
    /// Kubernetes needs six minutes to detach a volume from a lost node.
    replace: Duration,
    /// Delay between two reads of the pod's Events.
    events: Duration,
}

impl Default for StartTimes {
    fn default() -> Self {
        Self {
            poll: Duration::from_secs(1),
            report: Duration::from_mins(1),
            replace: Duration::from_mins(10),
            events: Duration::from_secs(15),
        }
    }
}

/// An attempt fails after requests to the API server have failed for this time.
const API_TIMEOUT: Duration = Duration::from_mins(1);

/// A worker that creates a pod for an order.
pub(crate) struct PodWorker<T> {
    pub(crate) client: Client,
    /// The pod to create, in the namespace of the EtcdBackup.
    pub(crate) pod: Pod,
    /// The order that the pod carries out.
    pub(crate) order: Order,
    /// Canceled when this process shuts down. After a shutdown, the worker keeps the pod, so that the next operator
    /// process can wait for it.
    pub(crate) shutdown: CancellationToken,
    /// Converts the report of the pod into the result of the worker.
    pub(crate) read: fn(Report, &Order) -> Result<T, Trouble>,
    pub(crate) times: StartTimes,
}

impl<T: Clone + Send + 'static> Worker for PodWorker<T> {
    type Output = T;

    fn store(&self) -> String {
        let namespace = self.pod.namespace().unwrap_or_default();
        format!("pvc://{namespace}/{}", self.order.claim)
    }

    fn runs_in_pod(&self) -> bool {
        true
    }

    fn run<'a>(
        &'a self,
        progress: &'a Progress,
        cancelled: &'a CancellationToken,
    ) -> BoxFuture<'a, Result<T, Trouble>> {
        async {
            let outcome = tokio::select! {
                report = self.wait_for_report(progress) => report.and_then(|report| (self.read)(report, &self.order)),
                () = cancelled.cancelled() => Err(Trouble::new(Reason::StepFailed, "the task of the backup pod was canceled")),
            };
            fail::fail_point!("backup-before-pod-removal");
            if !self.shutdown.is_cancelled() {
                self.remove().await;
            }
            outcome
        }
        .boxed()
    }
}

impl<T> PodWorker<T> {
    fn api<K>(&self) -> Api<K>
    where
        K: kube::Resource<Scope = NamespaceResourceScope, DynamicType = ()>,
    {
        let namespace = self.pod.namespace().unwrap_or_default();
        Api::namespaced(self.client.clone(), &namespace)
    }

    /// Creates the pod if it is missing, and waits for its report.
    async fn wait_for_report(&self, progress: &Progress) -> Result<Report, Trouble> {
        let (pods, name) = (self.api::<Pod>(), self.pod.name_any());
        let (mut answered, mut stuck_since, mut created) = (Instant::now(), None, false);
        let mut start: Option<Start> = None;
        loop {
            match pods.get_opt(&name).await {
                Err(error) if answered.elapsed() > API_TIMEOUT => return Err(in_api(&error)),
                Err(_) => {}
                Ok(None) if created => {
                    let message = "the backup pod was deleted before it reported a result";
                    return Err(Trouble::new(Reason::StepFailed, message));
                }
                Ok(None) => {
                    answered = Instant::now();
                    fail::fail_point!("backup-before-create-pod");
                    self.create(&pods).await?;
                    created = true;
                }
                Ok(Some(pod)) => {
                    answered = Instant::now();
                    match pod_state(&pod, &self.order) {
                        PodState::Ended(report) => return Ok(*report),
                        PodState::Foreign => return Err(foreign(&name)),
                        PodState::Terminating => created = false,
                        PodState::Stuck(trouble) => {
                            let since = *stuck_since.get_or_insert_with(Instant::now);
                            if since.elapsed() > self.times.report {
                                return Err(trouble);
                            }
                        }
                        PodState::Starting(message) => {
                            stuck_since = None;
                            let start = start.get_or_insert_with(Start::new);
                            self.check_start(&pod, message, start, progress).await?;
                        }
                        PodState::Working => {
                            (stuck_since, start) = (None, None);
                            progress.report(None);
                            update_progress(&pod, &progress.meter).await;
                        }
                    }
                }
            }
            tokio::time::sleep(self.times.poll).await;
        }
    }

    /// Reports a pod that has not started in time. Fails if the pod must be replaced.
    async fn check_start(
        &self,
        pod: &Pod,
        message: String,
        start: &mut Start,
        progress: &Progress,
    ) -> Result<(), Trouble> {
        if start.since.elapsed() <= self.times.report {
            return Ok(());
        }
        if start
            .reported
            .is_none_or(|at| at.elapsed() > self.times.events)
        {
            let reason = self.reason_of_kubelet(pod, message).await;
            progress.report(Some(self.not_started(&reason)));
            start.reported = Some(Instant::now());
            start.reason = reason;
        }
        if start.since.elapsed() > self.times.replace {
            return Err(self.not_started(&start.reason));
        }
        Ok(())
    }

    fn not_started(&self, reason: &str) -> Trouble {
        let (pod, claim) = (self.pod.name_any(), &self.order.claim);
        Trouble::new(
            Reason::PodNotStarting,
            format!(
                "spec.pvc.claimName: backup pod {pod} mounts PersistentVolumeClaim {claim}. The pod has a node, but \
                 its container has not started within a minute: {reason}"
            ),
        )
    }

    /// The newest warning Event of the pod. Without such an Event, returns `message`. If `message` is empty, returns
    /// the command that shows Events.
    async fn reason_of_kubelet(&self, pod: &Pod, message: String) -> String {
        let events: Api<Event> = self.api();
        let uid = pod.uid().unwrap_or_default();
        let about = ListParams::default()
            .fields(&format!("involvedObject.uid={uid}"))
            .limit(100);
        let found = events.list(&about).await.map(|list| list.items);
        let warnings = found.unwrap_or_default().into_iter();
        let newest = warnings
            .filter(|event| event.type_.as_deref() == Some("Warning"))
            .max_by_key(|event| {
                let last = event.last_timestamp.as_ref().map(|time| time.0);
                last.or_else(|| event.event_time.as_ref().map(|time| time.0))
            });
        match newest {
            Some(event) => {
                let text = event.message.unwrap_or_default();
                format!("{}: {text}", event.reason.unwrap_or_default())
            }
            None if message.is_empty() => format!(
                "the kubelet has reported no reason: run kubectl describe pod {}",
                self.pod.name_any()
            ),
            None => message,
        }
    }

    async fn create(&self, pods: &Api<Pod>) -> Result<(), Trouble> {
        let created = apply::create(pods, MANAGER_BACKUP, &self.pod).await;
        created.map(drop).map_err(|error| {
            let cause = api::problem::Chain(&error).to_string();
            Trouble::new(
                Reason::StepFailed,
                format!("the backup pod cannot be created: {cause}"),
            )
        })
    }

    /// Deletes the pod of the order. If this fails, Kubernetes deletes the pod later, together with the EtcdBackup
    /// that owns it.
    async fn remove(&self) {
        let pods: Api<Pod> = self.api();
        let found = pods.get_opt(&self.pod.name_any()).await;
        if let Ok(Some(pod)) = found
            && pod_state(&pod, &self.order) != PodState::Foreign
            && let Err(error) = apply::delete(&pods, &pod, None).await
        {
            let pod = self.pod.name_any();
            tracing::warn!(error = %api::problem::Chain(&error), pod, "cannot delete the backup pod");
        }
    }
}

/// The wait for the start of the pod's container: the beginning of the wait, and the time and the reason of the last
/// report.
struct Start {
    since: Instant,
    reported: Option<Instant>,
    reason: String,
}

impl Start {
    fn new() -> Self {
        Self {
            since: Instant::now(),
            reported: None,
            reason: String::new(),
        }
    }
}

/// Reads the progress from the pod, for the status.
async fn update_progress(pod: &Pod, meter: &Meter) {
    let status = pod.status.as_ref();
    let address = status.and_then(|status| status.pod_ip.as_ref()?.parse().ok());
    if let Some(address) = address
        && let Some(moved) = progress::read(address).await
    {
        meter.set(moved);
    }
}

fn foreign(name: &str) -> Trouble {
    Trouble::new(
        Reason::StepFailed,
        format!("pod {name} exists, but does not belong to this EtcdBackup: delete the pod"),
    )
}

fn in_api(error: &kube::Error) -> Trouble {
    let cause = api::problem::Chain(error).to_string();
    Trouble::new(
        Reason::StepFailed,
        format!("the backup pod cannot be read: {cause}"),
    )
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use http::{Method, Request, Response};
    use kube::client::Body;
    use serde_json::{Value, json};
    use tower::service_fn;

    use super::*;
    use crate::snapshot::RemovalResult;

    const MULTI_ATTACH: &str = "Multi-Attach error for volume \"pvc-1\": already used by pod other";

    /// A fake API server with a pod whose volume is attached to another node.
    fn api_server(may_list_events: bool) -> Client {
        let service = service_fn(move |request: Request<Body>| async move {
            let path = request.uri().path().to_owned();
            let (code, answer) = match (request.method(), path.as_str()) {
                (&Method::GET, "/api/v1/namespaces/prod/pods/pod") => (200, pod()),
                (&Method::GET, "/api/v1/namespaces/prod/events") if may_list_events => {
                    let query = request.uri().query().unwrap_or_default();
                    assert!(query.contains("involvedObject.uid%3Dpod-uid"), "{query}");
                    (200, events())
                }
                (&Method::DELETE, _) => (200, json!({ "kind": "Status", "status": "Success" })),
                _ => {
                    let status = json!({ "kind": "Status", "status": "Failure", "reason": "Forbidden", "code": 403 });
                    (403, status)
                }
            };
            let body = Body::from(answer.to_string().into_bytes());
            Ok::<_, Infallible>(Response::builder().status(code).body(body).unwrap())
        });
        Client::new(service, "prod")
    }

    fn pod() -> Value {
        let owner = json!({ "apiVersion": "v", "kind": "EtcdBackup", "name": "nightly", "uid": "backup-uid" });
        json!({
            "apiVersion": "v1", "kind": "Pod",
            "metadata": { "name": "pod", "namespace": "prod", "uid": "pod-uid", "ownerReferences": [owner] },
            "status": {
                "phase": "Pending",
                "containerStatuses": [{ "name": "backups", "image": "", "imageID": "", "ready": false,
                    "restartCount": 0, "state": { "waiting": { "reason": "ContainerCreating" } } }],
            },
        })
    }

    fn events() -> Value {
        let event = |name: &str, kind: &str, reason: &str, message: &str, time: &str| {
            json!({ "metadata": { "name": name, "namespace": "prod" }, "involvedObject": { "uid": "pod-uid" },
                    "type": kind, "reason": reason, "message": message, "lastTimestamp": time })
        };
        json!({ "kind": "EventList", "apiVersion": "v1", "metadata": {}, "items": [
            event("old", "Warning", "FailedMount", "an older problem", "2026-01-01T00:00:00Z"),
            event("new", "Warning", "FailedAttachVolume", MULTI_ATTACH, "2026-01-01T00:01:00Z"),
            event("other", "Normal", "Scheduled", "assigned", "2026-01-01T00:02:00Z"),
        ]})
    }

    fn worker(client: Client, replace: Duration) -> PodWorker<RemovalResult> {
        PodWorker {
            client,
            pod: serde_json::from_value(pod()).unwrap(),
            order: Order::example(),
            shutdown: CancellationToken::new(),
            read: Report::into_removal_result,
            times: StartTimes {
                poll: Duration::from_millis(5),
                report: Duration::from_millis(50),
                replace,
                events: Duration::from_millis(20),
            },
        }
    }

    #[tokio::test]
    async fn waiting_backup_pod_is_reported_with_reason_of_kubelet() {
        let worker = worker(api_server(true), Duration::from_mins(10));
        let (progress, cancelled) = (Progress::default(), CancellationToken::new());
        let watched = async {
            loop {
                if let Some(trouble) = progress.obstacle() {
                    return trouble;
                }
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        let trouble = tokio::select! {
            trouble = tokio::time::timeout(Duration::from_secs(30), watched) => trouble.unwrap(),
            ended = worker.run(&progress, &cancelled) => panic!("the pod is replaced too early: {ended:?}"),
        };
        assert_eq!(trouble.reason, Reason::PodNotStarting);
        for part in ["spec.pvc.claimName", "FailedAttachVolume", MULTI_ATTACH] {
            assert!(trouble.message.contains(part), "{trouble:?}");
        }
    }

    #[tokio::test]
    async fn backup_pod_that_does_not_start_fails_with_reason_of_kubelet() {
        for (may_list_events, expected) in [(true, MULTI_ATTACH), (false, "kubectl describe pod")] {
            let worker = worker(api_server(may_list_events), Duration::from_millis(200));
            let (progress, cancelled) = (Progress::default(), CancellationToken::new());
            let ended = worker.run(&progress, &cancelled);
            let ended = tokio::time::timeout(Duration::from_secs(30), ended).await;
            let trouble = ended.unwrap().unwrap_err();
            assert_eq!(trouble.reason, Reason::PodNotStarting);
            assert!(trouble.message.contains(expected), "{trouble:?}");
        }
    }
}
