//! A seed's pod that has ended for good: evicted for want of memory or disk on its node, ended with a node that was shut
//! down in order, refused by a kubelet. Kubernetes starts no container of it again and leaves the object where it is.
//!
//! Another pod takes its place as long as no client can have written to the seed: before the cluster ID is recorded, and
//! over a living cluster until its members stop. On a volume it finds what the one before made, the same claim; without
//! a volume it makes it from the backup again. From then on the seed is a member, and the cluster operator decides.

use super::{Action, Plan};
use crate::snapshot::{Life, PodFacts};

/// Makes room for another pod. Only for a seed that nobody can have written to, or whose data is on its volume
/// (invariant 9). Whatever the pod said before: where that was the backup's fault, the next one says it too.
pub(super) fn clear(pod: &PodFacts) -> Plan {
    let why = pod.trouble.as_ref();
    let why = why.map_or("the seed's pod has ended for good", |why| &why.message);
    if pod.life == Life::EndedAtOnce {
        return Plan::wait_for(format!("another pod of the seed, a little later: {why}"));
    }
    let text = format!("{why}: another one takes its place");
    Plan::act(Action::ClearPod(text.clone()), &text)
}
