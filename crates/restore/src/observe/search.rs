//! Reads the pod that searches recorded changes on a PersistentVolumeClaim (PVC).

use api::EtcdRestore;
use api::restore::{ChosenBackup, ChosenPoint, RestoreEncryption, RestorePoint};
use api::storage::{PvcSource, SecretName, StorageBlock};
use k8s_openapi::api::core::v1::{ContainerStateTerminated, ContainerStatus, Pod};
use k8s_openapi::jiff::{SignedDuration, Timestamp};
use kube::{Client, ResourceExt};
use runtime::clock;
use tokio::time::timeout;

use super::{ObserveContext, READ_TIMEOUT, bucket, point, read};
use crate::encryption::FIELD;
use crate::naming;
use crate::plan::search;
use crate::reason::{Reason, Trouble};
use crate::search::{FoundBase, SearchOrder, SearchReport};
use crate::snapshot::{Missing, SearchStep, takes_name};

/// A failed search is repeated after this time.
const RETRY: SignedDuration = SignedDuration::from_mins(5);

/// A found point that was not recorded within this time is searched again, because the agent of the continuous backup
/// may have recorded later changes and deleted the base.
const RESULT_LIFETIME: SignedDuration = SignedDuration::from_mins(2);

/// The result of a search, and the time at which its pod ended. The time is `None` if the pod has not ended.
type Judgment = (Result<FoundBase, Trouble>, Option<Timestamp>);

/// The point that the pod has found. If there is no pod, the error contains the pod to create. If the result of the pod
/// is old, the error contains the pod to delete.
pub(super) async fn find(
    context: &ObserveContext<'_>,
    restore: &EtcdRestore,
    pvc: &PvcSource,
    (directory, complete): (&StorageBlock, Option<i64>),
    encryption: Option<RestoreEncryption>,
) -> Result<ChosenBackup, Missing> {
    let namespace = restore.namespace().unwrap_or_default();
    let named = encryption.as_ref().map(|block| SecretName {
        field: FIELD,
        name: &block.secret,
    });
    // The pod mounts the Secret with the encryption keys. A missing Secret is reported here, because the pod would wait
    // for this volume without a report.
    bucket::secret(context, &namespace, named).await?;
    let at = restore.spec.continuous.as_ref().map(|block| &block.at);
    let order = SearchOrder {
        directory: directory.clone(),
        at: at.cloned().unwrap_or_default(),
        complete,
        encryption: encryption.as_ref().map(|block| block.secret.clone()),
    };
    let image = context.image.get().await;
    let image = image.map_err(|why| Trouble::new(Reason::StepFailed, why))?;
    let desired = search::pod(restore, &order, image);
    let name = desired.name_any();
    let found = read::<Pod>(context.client, &namespace, &name).await;
    let Some(pod) = found.map_err(|why| Trouble::new(Reason::StepFailed, why))? else {
        return Err(Missing::Search(SearchStep::Start(Box::new(desired))));
    };
    if takes_name(&pod, naming::uid(restore)) {
        let message = format!("waiting for the deletion of another pod {name}");
        return Err(Trouble::new(Reason::InProgress, message).into());
    }
    let (result, ended) = judge(&pod);
    let lifetime = if result.is_ok() {
        RESULT_LIFETIME
    } else {
        RETRY
    };
    if let Some(ended) = ended
        && has_expired(context.client, ended, lifetime).await
    {
        return Err(Missing::Search(SearchStep::End(Box::new(pod))));
    }
    let found = result?;
    if !names_point(&order.at, &found.point) {
        let message = format!(
            "the pod {name} reports another point than spec.continuous.at: the operator repeats the search after \
             {RESULT_LIFETIME:#}"
        );
        return Err(Trouble::new(Reason::StepFailed, message).into());
    }
    // Invariant 13: a user of the namespace could forge the report of the pod, so `chosen` accepts only a snapshot in
    // the directory of the recorded changes.
    let place = (directory, pvc.path.as_str());
    point::chosen(restore, place, found, encryption).map_err(Missing::from)
}

/// Whether the result of a search is older than its lifetime, by the clock of the operator and by the clock of the API
/// server. If only the operator's clock counted, and it was ahead, each result would expire at once.
pub(super) async fn has_expired(
    client: &Client,
    ended: Timestamp,
    lifetime: SignedDuration,
) -> bool {
    let is_old = |now: Timestamp| now.duration_since(ended) > lifetime;
    let now = Timestamp::now();
    if !is_old(now) {
        return false;
    }
    let difference = timeout(READ_TIMEOUT, clock::difference(client)).await;
    let difference = difference.ok().and_then(Result::ok).flatten();
    is_old(clock::earlier(now, difference))
}

/// Whether a found point can be the requested point.
fn names_point(at: &RestorePoint, found: &ChosenPoint) -> bool {
    let is_revision = at
        .revision
        .is_none_or(|revision| found.revision == revision);
    let is_time = at.time.as_ref().is_none_or(|time| found.time.0 <= time.0);
    is_revision && is_time && found.base_revision <= found.revision
}

fn container(pod: &Pod) -> Option<&ContainerStatus> {
    let status = pod.status.as_ref()?;
    status.container_statuses.as_ref()?.first()
}

fn terminated(pod: &Pod) -> Option<&ContainerStateTerminated> {
    container(pod)?.state.as_ref()?.terminated.as_ref()
}

/// Reads the result of a search from its pod. Performs no I/O.
fn judge(pod: &Pod) -> Judgment {
    let name = pod.name_any();
    let created = pod.creation_timestamp().map(|created| created.0);
    if let Some(ended) = terminated(pod) {
        // `finished_at` comes from the clock of the node, which may be behind. The container cannot have ended before
        // the creation of the pod, whose time comes from the API server.
        let at = ended.finished_at.as_ref().map(|time| time.0).max(created);
        let message = ended.message.as_deref().unwrap_or_default();
        let report = serde_json::from_str::<SearchReport>(message);
        let result = report.map_or_else(
            |_| {
                let message = format!(
                    "the pod {name} that searches the recorded changes ended with exit code {} and without a report: \
                     see its log. The operator repeats the search after {RETRY:#}",
                    ended.exit_code
                );
                Err(Trouble::new(Reason::StepFailed, message))
            },
            SearchReport::result,
        );
        return (result, at);
    }
    let status = pod.status.clone().unwrap_or_default();
    if status.phase.as_deref() == Some("Failed") {
        let (reason, message) = (
            status.reason.unwrap_or_default(),
            status.message.unwrap_or_default(),
        );
        let message = format!(
            "the pod {name} that searches the recorded changes has failed ({reason}): {message}"
        );
        let trouble = Trouble::new(Reason::PodNotStarting, message);
        let conditions = status.conditions.unwrap_or_default().into_iter();
        let changes = conditions.filter_map(|condition| Some(condition.last_transition_time?.0));
        return (Err(trouble), changes.max().max(created));
    }
    (Err(waiting(pod, &name)), None)
}

/// Why the pod has not ended yet.
fn waiting(pod: &Pod, name: &str) -> Trouble {
    let conditions = pod.status.as_ref().and_then(|it| it.conditions.as_deref());
    if let Some(condition) = runtime::pod::unscheduled(conditions) {
        let why = condition.message.as_deref().unwrap_or_default();
        let message =
            format!("no node can run the pod {name} that searches the recorded changes: {why}");
        return Trouble::new(Reason::PodNotStarting, message);
    }
    let state = container(pod).and_then(|container| container.state.as_ref());
    let waiting = state.and_then(|state| state.waiting.as_ref());
    let problem = waiting.and_then(|waiting| waiting.message.as_deref());
    if let Some(problem) = problem.filter(|problem| !problem.is_empty()) {
        let message =
            format!("the pod {name} that searches the recorded changes cannot start: {problem}");
        return Trouble::new(Reason::PodNotStarting, message);
    }
    let message = format!("the pod {name} searches the recorded changes");
    Trouble::new(Reason::InProgress, message)
}
