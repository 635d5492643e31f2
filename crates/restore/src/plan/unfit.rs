//! A seed's pod that is active but unusable: its backup differs from the recorded backup, or its report is lost. The
//! operator replaces the pod as long as no client can have written to it. The operator waits for the same pause as
//! before the replacement of an [ended](super::ended) pod.
//!
//! The report is the termination message of the container `fetch`. The kubelet reads this message once from a file on
//! the node, and may lose it. A container that has succeeded does not run again, so the operator would never know the
//! data of the pod.

use super::{Action, Plan};
use crate::reason::{Reason, Trouble};
use crate::snapshot::{OtherBackup, PodFacts};

/// Plans the replacement of a pod before the cutover, while no client can have written to it. `None` if the pod is
/// usable. A seed that contains another backup is deleted together with its volume.
pub(super) fn before_cutover(pod: &PodFacts) -> Option<Plan> {
    let Some(OtherBackup::Contains(backup)) = &pod.other_backup else {
        return pod_replacement(pod);
    };
    let text = format!(
        "the seed contains the backup {backup}: the operator deletes the seed and creates it again from the recorded backup"
    );
    Some(replaced(pod, Action::DiscardSeed, text))
}

/// Plans the replacement of a pod while old members run, or if the seed has a volume. `None` if the pod is usable, or
/// if it contains another backup. The volume is kept, and the next pod reports its data.
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
