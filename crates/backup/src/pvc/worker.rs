//! Creates the pod of an order or finds it, waits for its report, and deletes it.

use std::time::{Duration, Instant};

use api::names::MANAGER_BACKUP;
use futures::FutureExt;
use futures::future::BoxFuture;
use k8s_openapi::api::core::v1::Pod;
use kube::{Api, Client, ResourceExt};
use runtime::apply;
use store::progress;
use tokio_util::sync::CancellationToken;

use super::order::{Order, Report};
use super::pod_state::{PodState, pod_state};
use crate::reason::{Reason, Trouble};
use crate::transfer::Meter;
use crate::workers::Worker;

/// Interval between two reads of the pod.
const POLL: Duration = Duration::from_secs(1);
/// How long a pod may fail to start, for example until its volume is attached or its image pulled.
const START_TIMEOUT: Duration = Duration::from_mins(1);
/// How long requests to the API server may fail.
const API_TIMEOUT: Duration = Duration::from_mins(1);

/// The worker of an order that a pod carries out.
pub(crate) struct PodWorker<T> {
    pub(crate) client: Client,
    /// The pod, in the namespace of the EtcdBackup.
    pub(crate) pod: Pod,
    /// The order of the pod.
    pub(crate) order: Order,
    /// Canceled when this process shuts down. The pod is then kept, because the next process waits for it.
    pub(crate) shutdown: CancellationToken,
    /// Converts the report to the result.
    pub(crate) read: fn(Report, &Order) -> Result<T, Trouble>,
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
        meter: &'a Meter,
        cancelled: &'a CancellationToken,
    ) -> BoxFuture<'a, Result<T, Trouble>> {
        async {
            let outcome = tokio::select! {
                report = self.wait_for_report(meter) => report.and_then(|report| (self.read)(report, &self.order)),
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
    fn pods(&self) -> Api<Pod> {
        let namespace = self.pod.namespace().unwrap_or_default();
        Api::namespaced(self.client.clone(), &namespace)
    }

    /// Creates the pod if it is missing, and waits for its report.
    async fn wait_for_report(&self, meter: &Meter) -> Result<Report, Trouble> {
        let (pods, name) = (self.pods(), self.pod.name_any());
        let (mut answered, mut stuck_since, mut created) = (Instant::now(), None, false);
        loop {
            match pods.get_opt(&name).await {
                Err(error) if answered.elapsed() > API_TIMEOUT => return Err(in_api(&error)),
                Err(_) => {}
                Ok(None) if created => {
                    let message = "the backup pod was deleted before it reported";
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
                            if since.elapsed() > START_TIMEOUT {
                                return Err(trouble);
                            }
                        }
                        PodState::Working => {
                            stuck_since = None;
                            update_progress(&pod, meter).await;
                        }
                    }
                }
            }
            tokio::time::sleep(POLL).await;
        }
    }

    async fn create(&self, pods: &Api<Pod>) -> Result<(), Trouble> {
        let created = apply::create(pods, MANAGER_BACKUP, &self.pod).await;
        created.map(drop).map_err(|error| {
            let cause = runtime::outcome::Chain(&error).to_string();
            Trouble::new(
                Reason::StepFailed,
                format!("the backup pod cannot be created: {cause}"),
            )
        })
    }

    /// Deletes the pod of this order. If that fails, garbage collection deletes the pod together with the EtcdBackup.
    async fn remove(&self) {
        let pods = self.pods();
        let found = pods.get_opt(&self.pod.name_any()).await;
        if let Ok(Some(pod)) = found
            && pod_state(&pod, &self.order) != PodState::Foreign
            && let Err(error) = apply::delete(&pods, &pod, None).await
        {
            let pod = self.pod.name_any();
            tracing::warn!(error = %runtime::outcome::Chain(&error), pod, "cannot delete the backup pod");
        }
    }
}

/// Reads the progress from the pod, for display only.
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
        format!("this EtcdBackup does not own pod {name} in its namespace: delete the pod"),
    )
}

fn in_api(error: &kube::Error) -> Trouble {
    let cause = runtime::outcome::Chain(error).to_string();
    Trouble::new(
        Reason::StepFailed,
        format!("the backup pod cannot be read: {cause}"),
    )
}
