//! The worker of a pod: creates the pod or finds it, waits for its report, and deletes it.

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

/// How often the pod is read.
const POLL: Duration = Duration::from_secs(1);
/// How long a pod may not start before the attempt counts as failed: volumes and images come late.
const UNSTARTED: Duration = Duration::from_mins(1);
/// How long the API server may be silent.
const SILENT: Duration = Duration::from_mins(1);

/// Waits for the work of a pod on a PersistentVolumeClaim.
pub(crate) struct PodWorker<T> {
    /// Talks to the API server.
    pub(crate) client: Client,
    /// The pod, in the namespace of the EtcdBackup.
    pub(crate) pod: Pod,
    /// The order that the pod carries.
    pub(crate) order: Order,
    /// The end of this process, which is not the end of the work: the next one waits for the same pod.
    pub(crate) shutdown: CancellationToken,
    /// What a report means.
    pub(crate) read: fn(Report, &Order) -> Result<T, Trouble>,
}

impl<T: Clone + Send + 'static> Worker for PodWorker<T> {
    type Product = T;

    fn store(&self) -> String {
        let namespace = self.pod.namespace().unwrap_or_default();
        format!("pvc://{namespace}/{}", self.order.claim)
    }

    fn is_elsewhere(&self) -> bool {
        true
    }

    fn run<'a>(
        &'a self,
        meter: &'a Meter,
        cancelled: &'a CancellationToken,
    ) -> BoxFuture<'a, Result<T, Trouble>> {
        async {
            let outcome = tokio::select! {
                report = self.attend(meter) => report.and_then(|report| (self.read)(report, &self.order)),
                () = cancelled.cancelled() => Err(Trouble::new(Reason::StepFailed, "it was given up")),
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

    /// Waits for the report of the pod, which is made if it is not there.
    async fn attend(&self, meter: &Meter) -> Result<Report, Trouble> {
        let (pods, name) = (self.pods(), self.pod.name_any());
        let (mut answered, mut began, mut made) = (Instant::now(), None, false);
        loop {
            match pods.get_opt(&name).await {
                Err(error) if answered.elapsed() > SILENT => return Err(in_api(&error)),
                Err(_) => {}
                Ok(None) if made => {
                    let message = "the pod beside the claim is gone before it has reported";
                    return Err(Trouble::new(Reason::StepFailed, message));
                }
                Ok(None) => {
                    answered = Instant::now();
                    fail::fail_point!("backup-before-create-pod");
                    self.create(&pods).await?;
                    made = true;
                }
                Ok(Some(pod)) => {
                    answered = Instant::now();
                    match pod_state(&pod, &self.order) {
                        PodState::Ended(report) => return Ok(*report),
                        PodState::Foreign => return Err(foreign(&name)),
                        PodState::Ending => made = false,
                        PodState::Stuck(trouble) => {
                            let began = *began.get_or_insert_with(Instant::now);
                            if began.elapsed() > UNSTARTED {
                                return Err(trouble);
                            }
                        }
                        PodState::Working => {
                            began = None;
                            tell(&pod, meter).await;
                        }
                    }
                }
            }
            tokio::time::sleep(POLL).await;
        }
    }

    async fn create(&self, pods: &Api<Pod>) -> Result<(), Trouble> {
        let made = apply::create(pods, MANAGER_BACKUP, &self.pod).await;
        made.map(drop).map_err(|error| {
            let cause = runtime::outcome::Chain(&error).to_string();
            Trouble::new(
                Reason::StepFailed,
                format!("a pod beside the claim cannot be made: {cause}"),
            )
        })
    }

    /// Exactly the pod of this work. What cannot be removed goes with its EtcdBackup.
    async fn remove(&self) {
        let pods = self.pods();
        let found = pods.get_opt(&self.pod.name_any()).await;
        if let Ok(Some(pod)) = found
            && pod_state(&pod, &self.order) != PodState::Foreign
            && let Err(error) = apply::delete(&pods, &pod, None).await
        {
            tracing::warn!(error = %runtime::outcome::Chain(&error), "the pod beside the claim stays");
        }
    }
}

/// How far it is, for display.
async fn tell(pod: &Pod, meter: &Meter) {
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
        format!("there is a pod {name} in this namespace that is not this EtcdBackup's: remove it"),
    )
}

fn in_api(error: &kube::Error) -> Trouble {
    let cause = runtime::outcome::Chain(error).to_string();
    Trouble::new(
        Reason::StepFailed,
        format!("the pod beside the claim cannot be looked at: {cause}"),
    )
}
