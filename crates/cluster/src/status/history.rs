//! `status.lastErrors`: a short history of problems, for a person who looks at the cluster afterwards.

use api::cluster::{EtcdClusterStatus, LastError};
use api::conditions::{ConditionStatus, ConditionType, Finding, find};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

use crate::reason::Reason;

/// Maximum number of problems in `status.lastErrors`.
const KEPT: usize = 10;

/// The history with the problem of this report, newest first. A problem is added only when it begins. A member that is
/// down is not added, because each planned restart causes this state for some seconds.
pub(super) fn last_errors(
    before: &EtcdClusterStatus,
    degraded: &Finding,
    now: &Time,
) -> Vec<LastError> {
    let mut errors = before.last_errors.clone();
    let reason = degraded.reason.as_str();
    let old = find(&before.conditions, &ConditionType::Degraded);
    let persists = old.is_some_and(|old| old.status == "True" && old.reason == reason);
    let is_error =
        degraded.status == ConditionStatus::True && reason != Reason::MemberDown.as_str();
    if !is_error || persists {
        return errors;
    }
    let same = errors.iter().position(|error| error.reason == reason);
    let count = same.map_or(0, |index| errors.remove(index).count);
    errors.insert(
        0,
        LastError {
            time: now.clone(),
            reason: reason.to_owned(),
            message: degraded.message.clone(),
            step: before.next_step.clone(),
            count: count.saturating_add(1),
        },
    );
    errors.truncate(KEPT);
    errors
}
