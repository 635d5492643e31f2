//! The status of pods. Performs no I/O.

use k8s_openapi::api::core::v1::PodCondition;

/// The condition with which the scheduler reports that no node can run the pod. `None` if a node was found, or if the
/// scheduler has not reported.
pub fn unscheduled(conditions: Option<&[PodCondition]>) -> Option<&PodCondition> {
    let mut conditions = conditions.unwrap_or_default().iter();
    conditions.find(|condition| condition.type_ == "PodScheduled" && condition.status == "False")
}
