//! Replaces a seed's pod that is active but unusable: its backup differs from the recorded backup, or its report is
//! lost. No client can have written to this pod. The delay before its replacement is the same as for an
//! [ended](super::ended) pod.
//!
//! The report is the termination message of the container `fetch`. The kubelet reads this message once, and may lose
//! it. The container does not run again after a success, so the data of the pod would stay unknown.

use super::{Action, Plan};
use crate::reason::{Reason, Trouble};
use crate::snapshot::{OtherBackup, PodFacts};

/// The plan that replaces an unusable pod before the cutover. `None` if the pod is usable. A seed with another backup
/// is deleted together with its volume.
pub(super) fn before_cutover(pod: &PodFacts) -> Option<Plan> {
    let Some(OtherBackup::Contains(backup)) = &pod.other_backup else {
        return pod_replacement(pod);
    };
    let text = format!(
        "the seed contains the backup {backup}: the operator deletes the seed and creates it again from the recorded backup"
    );
    Some(replaced(pod, Action::DiscardSeed, text))
}

/// The plan that replaces an unusable pod and keeps its volume. `None` if the pod is usable, or if it contains another
/// backup. The next pod reports the data on the volume.
pub(super) fn pod_replacement(pod: &PodFacts) -> Option<Plan> {
    let text = match &pod.other_backup {
        Some(OtherBackup::Fetches(backup)) => {
            format!("the seed's pod fetches the backup {backup}: the operator replaces the pod")
        }
        None if pod.report_lost => {
            "the report of the seed's pod is lost (the container fetch succeeded, but the termination message of this \
             container is missing): the operator replaces the pod"
                .to_owned()
        }
        Some(OtherBackup::Contains(_)) | None => return None,
    };
    Some(replaced(pod, Action::ReplacePod(text.clone()), text))
}

fn replaced(pod: &PodFacts, action: Action, text: String) -> Plan {
    let trouble = Trouble::new(Reason::SeedFailed, text);
    if pod.recent {
        return Plan::wait(trouble);
    }
    let mut plan = Plan::act(action, "");
    plan.state = super::PlanState::Working(trouble);
    plan
}
