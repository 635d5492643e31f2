//! The status of pods. Performs no I/O.

use k8s_openapi::api::core::v1::PodCondition;

/// The condition of a pod that no node can run, among the conditions of its status.
pub fn unscheduled(conditions: Option<&[PodCondition]>) -> Option<&PodCondition> {
    let mut conditions = conditions.unwrap_or_default().iter();
    conditions.find(|condition| condition.type_ == "PodScheduled" && condition.status == "False")
}
