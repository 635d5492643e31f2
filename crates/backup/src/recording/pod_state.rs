//! Reads the state of the agent's Deployment and pod. Performs no I/O.

use std::net::IpAddr;

use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::core::v1::{ContainerStatus, Pod};

use crate::reason::{Reason, Trouble};

/// The newest pod that is not terminating.
pub(crate) fn newest(pods: &[Pod]) -> Option<&Pod> {
    let live = pods
        .iter()
        .filter(|pod| pod.metadata.deletion_timestamp.is_none());
    live.max_by_key(|pod| pod.metadata.creation_timestamp.as_ref().map(|time| time.0))
}

/// The address of the pod. `None` if the container does not run.
pub(crate) fn address(pod: &Pod) -> Option<IpAddr> {
    let state = container(pod)?.state.as_ref()?;
    state.running.as_ref()?;
    pod.status.as_ref()?.pod_ip.as_ref()?.parse().ok()
}

fn container(pod: &Pod) -> Option<&ContainerStatus> {
    let status = pod.status.as_ref()?;
    status.container_statuses.as_ref()?.first()
}

/// Why the pod does not run. `None` while it starts without a problem.
pub(crate) fn problem(pod: &Pod) -> Option<Trouble> {
    let conditions = pod.status.as_ref()?.conditions.as_deref();
    if let Some(condition) = runtime::pod::unscheduled(conditions) {
        let why = condition.message.as_deref().unwrap_or_default();
        let message = format!("no node can run the pod of the agent: {why}");
        return Some(Trouble::new(Reason::PodNotStarting, message));
    }
    let container = container(pod)?;
    let last = container.last_state.as_ref();
    let ended = last.and_then(|state| state.terminated.as_ref());
    let waiting = container.state.as_ref()?.waiting.as_ref()?;
    let reason = waiting.reason.as_deref().unwrap_or_default();
    let message = waiting.message.as_deref().unwrap_or_default();
    if reason.starts_with("ErrImage") || reason.starts_with("ImagePull") {
        let message = format!("the image of the agent cannot be pulled: {message}");
        return Some(Trouble::new(Reason::ImageNotFound, message));
    }
    // The termination message is the end of the log of the ended container. It contains the problem of the agent.
    if let Some(ended) = ended {
        let log = ended.message.as_deref().unwrap_or_default().trim();
        let message = format!("the agent ended with exit code {}: {log}", ended.exit_code);
        return Some(Trouble::new(Reason::PodNotStarting, message));
    }
    let is_problem = reason.starts_with("Create") || !message.is_empty();
    is_problem.then(|| {
        let message = format!("the agent cannot start: {message}");
        Trouble::new(Reason::PodNotStarting, message)
    })
}

/// Why the pod of the Deployment cannot be created, for example because of a quota or of Pod Security admission. `None`
/// if Kubernetes reports no failure.
pub(crate) fn creation_failure(deployment: &Deployment) -> Option<Trouble> {
    let conditions = deployment.status.as_ref()?.conditions.as_ref()?;
    let failed = conditions
        .iter()
        .find(|condition| condition.type_ == "ReplicaFailure" && condition.status == "True")?;
    let reason = failed.reason.as_deref().unwrap_or("ReplicaFailure");
    let message = failed.message.as_deref().unwrap_or_default();
    let message = format!("the pod of the agent cannot be created ({reason}): {message}");
    Some(Trouble::new(Reason::PodNotStarting, message))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn pod(status: &Value) -> Pod {
        serde_json::from_value(json!({ "metadata": { "name": "agent" }, "status": status }))
            .unwrap()
    }

    fn with_container(container: &Value) -> Pod {
        let mut status = json!({ "name": "agent", "image": "", "imageID": "", "ready": false,
                                 "restartCount": 0, "lastState": {}, "state": {} });
        for (key, value) in container.as_object().unwrap() {
            status[key] = value.clone();
        }
        pod(&json!({ "podIP": "10.0.0.7", "containerStatuses": [status] }))
    }

    #[test]
    fn only_running_agent_container_has_an_address() {
        let running = with_container(&json!({ "state": { "running": {} } }));
        assert_eq!(address(&running), Some("10.0.0.7".parse().unwrap()));
        assert_eq!(problem(&running), None);
        let waiting =
            with_container(&json!({ "state": { "waiting": { "reason": "ContainerCreating" } } }));
        assert_eq!(address(&waiting), None);
        assert_eq!(problem(&waiting), None);
    }

    #[test]
    fn problem_of_agent_pod_contains_message_of_kubelet_or_log_or_scheduler() {
        let image = json!({ "waiting": { "reason": "ErrImagePull", "message": "not found" } });
        let image = with_container(&json!({ "state": image }));
        let crashed = with_container(&json!({
            "state": { "waiting": { "reason": "CrashLoopBackOff", "message": "back-off" } },
            "lastState": { "terminated": { "exitCode": 1, "message": "spec.s3: access denied\n" } },
        }));
        let condition =
            json!({ "type": "PodScheduled", "status": "False", "message": "0/3 nodes" });
        let unscheduled = pod(&json!({ "conditions": [condition] }));
        for (pod, reason, part) in [
            (image, Reason::ImageNotFound, "not found"),
            (crashed, Reason::PodNotStarting, "access denied"),
            (unscheduled, Reason::PodNotStarting, "0/3 nodes"),
        ] {
            let trouble = problem(&pod).unwrap();
            assert_eq!(trouble.reason, reason);
            assert!(trouble.message.contains(part), "{trouble:?}");
        }
    }

    #[test]
    fn rejected_creation_of_agent_pod_is_reported() {
        let deployment = |status: &str| -> Deployment {
            let message = "pods \"agent-1\" is forbidden: exceeded quota: small";
            let conditions = json!([
                { "type": "Progressing", "status": "True", "reason": "NewReplicaSetCreated" },
                { "type": "ReplicaFailure", "status": status, "reason": "FailedCreate", "message": message },
            ]);
            serde_json::from_value(
                json!({ "metadata": {}, "status": { "conditions": conditions } }),
            )
            .unwrap()
        };
        let trouble = creation_failure(&deployment("True")).unwrap();
        assert_eq!(trouble.reason, Reason::PodNotStarting);
        for part in ["FailedCreate", "exceeded quota: small"] {
            assert!(trouble.message.contains(part), "{trouble:?}");
        }
        assert_eq!(creation_failure(&deployment("False")), None);
        assert_eq!(creation_failure(&Deployment::default()), None);
    }

    #[test]
    fn newest_agent_pod_is_never_a_terminating_pod() {
        let pod = |name: &str, time: &str, deleted: bool| -> Pod {
            let mut metadata = json!({ "name": name, "creationTimestamp": time });
            if deleted {
                metadata["deletionTimestamp"] = json!(time);
            }
            serde_json::from_value(json!({ "metadata": metadata })).unwrap()
        };
        let pods = [
            pod("old", "2026-01-01T00:00:00Z", false),
            pod("new", "2026-01-02T00:00:00Z", false),
            pod("ended", "2026-01-03T00:00:00Z", true),
        ];
        let found = newest(&pods).unwrap();
        assert_eq!(found.metadata.name.as_deref(), Some("new"));
    }
}
