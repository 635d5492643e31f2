//! Reads the state and the report of the pod that mounts the PersistentVolumeClaim. Performs no I/O.

use k8s_openapi::api::core::v1::{ContainerState, Pod};
use runtime::apply::is_owned;

use super::order::{Order, Report};
use crate::reason::{Reason, Trouble};

#[derive(Clone, Debug, PartialEq)]
pub(crate) enum PodState {
    /// The pod is terminating.
    Terminating,
    /// The EtcdBackup of the order does not own the pod.
    Foreign,
    /// The container of the pod has not started. The text is the kubelet's message and may be empty.
    Starting(String),
    /// The container is running.
    Working,
    /// The pod cannot start, because of this problem.
    Stuck(Trouble),
    /// The pod has ended. Contains its report.
    Ended(Box<Report>),
}

/// Returns the state of `pod`, whose name belongs to `order`.
pub(crate) fn pod_state(pod: &Pod, order: &Order) -> PodState {
    if !is_owned(&pod.metadata, &order.uid) {
        return PodState::Foreign;
    }
    let status = pod.status.clone().unwrap_or_default();
    let containers = status.container_statuses.unwrap_or_default();
    let state = containers
        .first()
        .and_then(|container| container.state.clone());
    let deleting = pod.metadata.deletion_timestamp.is_some();
    match state.as_ref().and_then(ended) {
        // A report of success is always used. A failure report of a terminating pod is ignored, because the operator
        // has handled this report before it deleted the pod.
        Some(report) if !deleting || !matches!(report, Report::Failed { .. }) => {
            return PodState::Ended(Box::new(report));
        }
        _ if deleting => return PodState::Terminating,
        _ => {}
    }
    if matches!(status.phase.as_deref(), Some("Failed" | "Succeeded")) {
        let why = status.message.or(status.reason).unwrap_or_default();
        let trouble = Trouble::new(
            Reason::PodNotStarting,
            format!("the backup pod was stopped before it reported a result: {why}"),
        );
        return PodState::Ended(Box::new(Report::failed(trouble)));
    }
    let waiting = state.and_then(|state| state.waiting).map(|waiting| {
        let (reason, message) = (
            waiting.reason.unwrap_or_default(),
            waiting.message.unwrap_or_default(),
        );
        (reason, message)
    });
    let unscheduled = runtime::pod::unscheduled(status.conditions.as_deref());
    match (waiting, unscheduled) {
        (Some((reason, message)), _)
            if reason.starts_with("ErrImage") || reason.starts_with("ImagePull") =>
        {
            PodState::Stuck(Trouble::new(
                Reason::ImageNotFound,
                format!("the image of the backup pod cannot be pulled: {message}"),
            ))
        }
        (Some((reason, message)), _) if reason.starts_with("Create") => {
            PodState::Stuck(Trouble::new(
                Reason::PodNotStarting,
                format!("the backup pod cannot start: {message}"),
            ))
        }
        (_, Some(condition)) => PodState::Stuck(Trouble::new(
            Reason::PodNotStarting,
            format!(
                "spec.pvc.claimName: no node can run a pod that mounts PersistentVolumeClaim {}: {}",
                order.claim,
                condition.message.as_deref().unwrap_or_default()
            ),
        )),
        // The container waits, for example because its volume is attached to another node. Only an Event of the pod
        // contains this cause.
        (Some((_, message)), None) => PodState::Starting(message),
        (None, None) if status.phase.as_deref() == Some("Pending") => {
            PodState::Starting(String::new())
        }
        (None, None) => PodState::Working,
    }
}

fn ended(state: &ContainerState) -> Option<Report> {
    let ended = state.terminated.as_ref()?;
    let report = ended
        .message
        .as_deref()
        .and_then(|text| serde_json::from_str(text).ok());
    Some(report.unwrap_or_else(|| {
        Report::failed(Trouble::new(
            Reason::StepFailed,
            format!(
                "the backup pod ended with exit code {} ({}) without a report",
                ended.exit_code,
                ended.reason.as_deref().unwrap_or_default()
            ),
        ))
    }))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn built() -> Pod {
        let owner = json!({ "apiVersion": "v", "kind": "EtcdBackup", "name": "nightly", "uid": "backup-uid" });
        serde_json::from_value(json!({ "metadata": { "name": "pod", "ownerReferences": [owner] } }))
            .unwrap()
    }

    fn state_of(status: serde_json::Value, deleting: bool) -> PodState {
        let mut pod = built();
        pod.status = Some(serde_json::from_value(status).unwrap());
        if deleting {
            pod.metadata.deletion_timestamp =
                Some(serde_json::from_value(json!("2026-01-01T00:00:00Z")).unwrap());
        }
        pod_state(&pod, &Order::example())
    }

    fn with_state(state: &serde_json::Value) -> serde_json::Value {
        json!({ "containerStatuses": [{ "name": "backups", "image": "", "imageID": "", "ready": false,
                "restartCount": 0, "state": state }] })
    }

    #[test]
    fn ended_backup_pod_yields_its_report_or_its_exit_reason() {
        let done = json!({ "terminated": { "exitCode": 0, "message": r#"{"result":"removed","deleted":2,"kept":[]}"# } });
        let report = Report::Removed {
            deleted: 2,
            kept: Vec::new(),
        };
        for deleting in [false, true] {
            assert_eq!(
                state_of(with_state(&done), deleting),
                PodState::Ended(Box::new(report.clone()))
            );
        }
        assert_eq!(
            state_of(json!({ "phase": "Running" }), true),
            PodState::Terminating
        );
        assert_eq!(
            state_of(json!({ "phase": "Running" }), false),
            PodState::Working
        );
        let killed = json!({ "terminated": { "exitCode": 137, "reason": "OOMKilled" } });
        let PodState::Ended(report) = state_of(with_state(&killed), false) else {
            panic!("the pod has not ended")
        };
        assert!(format!("{report:?}").contains("OOMKilled"));
        let PodState::Ended(_) = state_of(json!({ "phase": "Failed", "reason": "Evicted" }), false)
        else {
            panic!("the pod has not ended")
        };
    }

    #[test]
    fn reason_of_backup_pod_that_cannot_start_is_reported() {
        let missing = json!({ "phase": "Pending", "conditions": [{ "type": "PodScheduled", "status": "False",
            "message": "persistentvolumeclaim \"backups\" not found" }] });
        let PodState::Stuck(trouble) = state_of(missing, false) else {
            panic!("the pod is not stuck")
        };
        assert!(
            trouble.message.contains("spec.pvc.claimName") && trouble.message.contains("not found")
        );
        let pull =
            with_state(&json!({ "waiting": { "reason": "ImagePullBackOff", "message": "m" } }));
        let PodState::Stuck(trouble) = state_of(pull, false) else {
            panic!("the pod is not stuck")
        };
        assert_eq!(trouble.reason, Reason::ImageNotFound);
    }

    #[test]
    fn pod_counts_as_starting_until_its_container_runs() {
        let creating = json!({ "waiting": { "reason": "ContainerCreating" } });
        let mut mounting = with_state(&creating);
        mounting["phase"] = json!("Pending");
        for status in [mounting, json!({ "phase": "Pending" })] {
            assert_eq!(state_of(status, false), PodState::Starting(String::new()));
        }
        let running = json!({ "running": { "startedAt": "2026-01-01T00:00:00Z" } });
        assert_eq!(state_of(with_state(&running), false), PodState::Working);
    }

    #[test]
    fn backup_pod_of_another_owner_counts_as_foreign() {
        let mut pod = built();
        pod.metadata.owner_references = None;
        assert_eq!(pod_state(&pod, &Order::example()), PodState::Foreign);
    }
}
