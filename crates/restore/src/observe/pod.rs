//! Reads the state of the seed from its pod. Performs no I/O.

use api::names::{CONTAINER_ETCD, LABEL_CLUSTER};
use k8s_openapi::api::core::v1::{ContainerStatus, Pod};
use kube::ResourceExt;
use member::{Contents, FETCH, Report, is_image_failure};
use store::progress::Moved;

use crate::reason::{Reason, Trouble};
use crate::snapshot::{Life, PodFacts};

mod life;
mod storage;

pub(super) use life::{is_recent, life};
pub(super) use storage::no_storage;

/// Returns the facts that depend only on the pod. [`life`] adds facts that depend on the time, and
/// [provenance](super::provenance) adds facts that depend on the recorded backup.
pub(super) fn facts(pod: &Pod) -> PodFacts {
    let status = pod.status.clone().unwrap_or_default();
    let ended = life::ended(pod);
    let prepare = status.init_container_statuses.unwrap_or_default();
    let containers = status.container_statuses.unwrap_or_default();
    let trouble = prepare
        .iter()
        .chain(&containers)
        .find_map(container_trouble);
    let unscheduled = runtime::pod::unscheduled(status.conditions.as_deref());
    let unscheduled = unscheduled.map(|condition| {
        let why = condition.message.as_deref().unwrap_or_default();
        Trouble::new(
            Reason::PodNotStarting,
            format!("no node can run the seed's pod: {why}"),
        )
    });
    let fetch = prepare.iter().find(|status| status.name == FETCH);
    let report = fetch.and_then(reported);
    let serves = containers
        .iter()
        .any(|status| status.name == CONTAINER_ETCD && status.ready);
    PodFacts {
        life: Life::default(),
        recent: false,
        report_lost: report.is_none() && fetch.is_some_and(ended_well),
        other_backup: None,
        checks_sha256: false,
        replays: false,
        joined: pod.labels().contains_key(LABEL_CLUSTER),
        trouble: ended.or(trouble).or(unscheduled),
        fetching: prepare.iter().any(|status| {
            status.name == FETCH
                && status
                    .state
                    .as_ref()
                    .is_some_and(|state| state.running.is_some())
        }),
        progress: complete_progress(&prepare),
        restored: report.as_ref().map(|contents| contents.revision),
        verified: report.is_some() && serves,
        hash: report.as_ref().and_then(|contents| contents.hash),
        origin: report.as_ref().and_then(|contents| contents.origin.clone()),
        sha256: report.map(|contents| contents.sha256),
    }
}

/// The progress of a completed download, from the report of the container `fetch`.
fn complete_progress(prepare: &[ContainerStatus]) -> Option<Moved> {
    let fetch = prepare.iter().find(|status| status.name == FETCH)?;
    let bytes = reported(fetch)?.size;
    Some(Moved {
        bytes,
        total: Some(bytes),
    })
}

/// The report of a container that has succeeded. `None` for any other container, or without a report.
fn reported(status: &ContainerStatus) -> Option<Contents> {
    let ended = status.state.as_ref()?.terminated.as_ref()?;
    match Report::read(ended.message.as_deref()?)? {
        Report::Done(contents) if ended.exit_code == 0 => Some(contents),
        _ => None,
    }
}

/// True if the container has succeeded. The kubelet normally does not run this container again, so a missing report
/// stays missing.
fn ended_well(status: &ContainerStatus) -> bool {
    let ended = status.state.as_ref();
    let ended = ended.and_then(|state| state.terminated.as_ref());
    ended.is_some_and(|ended| ended.exit_code == 0)
}

/// True if the container `etcd` runs. Before its start, no process listens at the address of the pod.
pub(super) fn etcd_runs(pod: &Pod) -> bool {
    let status = pod.status.as_ref();
    let containers = status.and_then(|status| status.container_statuses.as_ref());
    containers.into_iter().flatten().any(|status| {
        let state = status.state.as_ref();
        status.name == CONTAINER_ETCD && state.is_some_and(|state| state.running.is_some())
    })
}

/// The problem of a container that has failed or cannot start.
fn container_trouble(status: &ContainerStatus) -> Option<Trouble> {
    let state = status.state.clone().unwrap_or_default();
    if let Some(waiting) = &state.waiting {
        let reason = waiting.reason.as_deref().unwrap_or_default();
        let message = waiting.message.as_deref().unwrap_or_default();
        if is_image_failure(reason) {
            let text = format!(
                "the image {} of the seed's pod cannot be pulled: {message}",
                status.image
            );
            return Some(Trouble::new(Reason::ImageNotFound, text));
        }
        if matches!(
            reason,
            "CreateContainerConfigError" | "CreateContainerError" | "RunContainerError"
        ) {
            let text = format!(
                "container {} of the seed's pod cannot start: {message}",
                status.name
            );
            return Some(Trouble::new(Reason::PodNotStarting, text));
        }
    }
    let ended = match (
        state.terminated,
        status.last_state.clone().and_then(|last| last.terminated),
    ) {
        (Some(ended), _) => ended,
        // The container is not running: after the exit `last`, the kubelet waits before it restarts the container.
        (None, Some(last)) if state.running.is_none() => last,
        _ => return None,
    };
    if ended.exit_code == 0 {
        return None;
    }
    Some(match ended.message.as_deref().and_then(Report::read) {
        Some(Report::Failed { reason, message }) => Trouble::new(
            Reason::parse(&reason).unwrap_or(Reason::StepFailed),
            message,
        ),
        // A container that has written no report was killed or could not start. The kubelet restarts it.
        _ => Trouble::new(
            Reason::PodNotStarting,
            format!(
                "container {} of the seed's pod ended with exit code {} ({}): see its log",
                status.name,
                ended.exit_code,
                ended.reason.unwrap_or_default()
            ),
        ),
    })
}

#[cfg(test)]
mod tests;
