//! A seed's pod that is active but unusable: it has another backup than the recorded one, or its report is lost. The
//! pod is replaced as long as no client can have written to it. As with a pod that [has ended](super::ended), the pause
//! since its creation must have passed.
//!
//! A kubelet may lose the termination message of a container, which it reads once from a file on the node. The
//! container `fetch` has then succeeded and is not restarted, so the data of the pod would remain unknown.

use super::{Action, Plan};
use crate::reason::{Reason, Trouble};
use crate::snapshot::{Another, PodFacts};

/// The replacement of a pod before the cutover, when no client can have written to it. A seed with another backup is
/// deleted with its volume.
pub(super) fn before_the_turn(pod: &PodFacts) -> Option<Plan> {
    let Some(Another::Holds(what)) = &pod.another else {
        return another_pod(pod);
    };
    let text = format!("the seed is of {what}: it is removed, and made again of that");
    Some(replaced(pod, Action::DiscardSeed, text))
}

/// The replacement of a pod while old members run, or on a volume. The volume is kept, and the next pod reports its
/// data.
pub(super) fn another_pod(pod: &PodFacts) -> Option<Plan> {
    let text = match &pod.another {
        Some(Another::Fetches(what)) => {
            format!("the seed's pod fetches {what}: another one takes its place")
        }
        None if pod.silent => "what the seed's pod has fetched, and told, cannot be read (its container fetch ended \
                               well, and its termination message is lost): another one takes its place"
            .to_owned(),
        Some(Another::Holds(_)) | None => return None,
    };
    Some(replaced(pod, Action::ClearPod(text.clone()), text))
}

fn replaced(pod: &PodFacts, action: Action, text: String) -> Plan {
    let trouble = Trouble::new(Reason::SeedFailed, text);
    if pod.young {
        return Plan::wait(trouble);
    }
    let mut plan = Plan::act(action, "");
    plan.outlook = super::Outlook::Working(trouble);
    plan
}
