//! The state of the pod that mounts the PersistentVolumeClaim, and its report. Pure.

use k8s_openapi::api::core::v1::{ContainerState, Pod};
use runtime::apply::is_owned;

use super::order::{Order, Report};
use crate::reason::{Reason, Trouble};

/// The state of a pod.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum PodState {
    /// An earlier pod of the name is being deleted.
    Ending,
    /// Another object owns it.
    Foreign,
    /// It runs or is starting.
    Working,
    /// It has not started, and this is why.
    Stuck(Trouble),
    /// It has ended.
    Ended(Box<Report>),
}

/// The state of the pod that has the name of this work.
pub(crate) fn pod_state(pod: &Pod, order: &Order) -> PodState {
    if !is_owned(&pod.metadata, &order.uid) {
        return PodState::Foreign;
    }
    let status = pod.status.clone().unwrap_or_default();
    let containers = status.container_statuses.unwrap_or_default();
    let state = containers
        .first()
        .and_then(|container| container.state.clone());
    let gone = pod.metadata.deletion_timestamp.is_some();
    match state.as_ref().and_then(ended) {
        // An attempt that failed was reported, and another one is wanted. What was done counts.
        Some(report) if !gone || !matches!(report, Report::Failed { .. }) => {
            return PodState::Ended(Box::new(report));
        }
        _ if gone => return PodState::Ending,
        _ => {}
    }
    if matches!(status.phase.as_deref(), Some("Failed" | "Succeeded")) {
        let why = status.message.or(status.reason).unwrap_or_default();
        let trouble = Trouble::new(
            Reason::PodNotStarting,
            format!("the pod beside the claim has ended before its time: {why}"),
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
    let unscheduled = status
        .conditions
        .unwrap_or_default()
        .into_iter()
        .find(|condition| condition.type_ == "PodScheduled" && condition.status == "False");
    match (waiting, unscheduled) {
        (Some((reason, message)), _)
            if reason.starts_with("ErrImage") || reason.starts_with("ImagePull") =>
        {
            PodState::Stuck(Trouble::new(
                Reason::ImageNotFound,
                format!("the operator's image cannot be had beside the claim: {message}"),
            ))
        }
        (Some((reason, message)), _) if reason.starts_with("Create") => {
            PodState::Stuck(Trouble::new(
                Reason::PodNotStarting,
                format!("the pod beside the claim cannot start: {message}"),
            ))
        }
        (_, Some(condition)) => PodState::Stuck(Trouble::new(
            Reason::PodNotStarting,
            format!(
                "spec.pvc.claimName: no node can run a pod with the claim {}: {}",
                order.claim,
                condition.message.unwrap_or_default()
            ),
        )),
        _ => PodState::Working,
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
                "the pod beside the claim ended with {} ({}) and said nothing",
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

    fn standing_of(status: serde_json::Value, deleted: bool) -> PodState {
        let mut pod = built();
        pod.status = Some(serde_json::from_value(status).unwrap());
        if deleted {
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
    fn what_a_pod_reports_counts_also_when_it_goes() {
        let done = json!({ "terminated": { "exitCode": 0, "message": r#"{"result":"removed","deleted":2,"kept":[]}"# } });
        let report = Report::Removed {
            deleted: 2,
            kept: Vec::new(),
        };
        for deleted in [false, true] {
            assert_eq!(
                standing_of(with_state(&done), deleted),
                PodState::Ended(Box::new(report.clone()))
            );
        }
        assert_eq!(
            standing_of(json!({ "phase": "Running" }), true),
            PodState::Ending
        );
        assert_eq!(
            standing_of(json!({ "phase": "Running" }), false),
            PodState::Working
        );
        let killed = json!({ "terminated": { "exitCode": 137, "reason": "OOMKilled" } });
        let PodState::Ended(report) = standing_of(with_state(&killed), false) else {
            panic!("not ended")
        };
        assert!(format!("{report:?}").contains("OOMKilled"));
        let PodState::Ended(_) =
            standing_of(json!({ "phase": "Failed", "reason": "Evicted" }), false)
        else {
            panic!("not ended")
        };
    }

    #[test]
    fn what_keeps_a_pod_from_starting_is_said() {
        let missing = json!({ "phase": "Pending", "conditions": [{ "type": "PodScheduled", "status": "False",
            "message": "persistentvolumeclaim \"backups\" not found" }] });
        let PodState::Stuck(trouble) = standing_of(missing, false) else {
            panic!("not stuck")
        };
        assert!(
            trouble.message.contains("spec.pvc.claimName") && trouble.message.contains("not found")
        );
        let pull =
            with_state(&json!({ "waiting": { "reason": "ImagePullBackOff", "message": "m" } }));
        let PodState::Stuck(trouble) = standing_of(pull, false) else {
            panic!("not stuck")
        };
        assert_eq!(trouble.reason, Reason::ImageNotFound);
    }

    #[test]
    fn a_pod_of_the_name_that_is_somebody_elses_is_left_alone() {
        let mut pod = built();
        pod.metadata.owner_references = None;
        assert_eq!(pod_state(&pod, &Order::example()), PodState::Foreign);
    }
}
