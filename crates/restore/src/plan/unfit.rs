//! A seed's pod that lives and is of no use: it is of another backup than the recorded one, or what it was to tell is
//! lost. Another pod takes its place as long as no client can have written to it, a little after it was made at the
//! earliest, as with one that [has ended](super::ended).
//!
//! A kubelet may lose the message of a container: it is read from a file on the node, once. The container that fetches has
//! ended well then and is not started again, so nobody would ever say what the pod holds.

use super::{Action, Plan};
use crate::reason::{Reason, Trouble};
use crate::snapshot::{Another, PodFacts};

/// Before the turn, where nobody can have written to it: what is of another backup goes with its volume.
pub(super) fn before_the_turn(pod: &PodFacts) -> Option<Plan> {
    let Some(Another::Holds(what)) = &pod.another else {
        return another_pod(pod);
    };
    let text = format!("the seed is of {what}: it is removed, and made again of that");
    Some(replaced(pod, Action::DiscardSeed, text))
}

/// Beside members that run, or on a volume: what lies there stays, and the next pod says what that is.
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
