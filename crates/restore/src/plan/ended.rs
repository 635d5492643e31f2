//! A seed's pod that has ended: it was evicted, shut down with its node, or rejected by a kubelet. Kubernetes restarts
//! none of its containers and keeps the object.
//!
//! The pod is replaced as long as no client can have written to the seed: before the cluster ID is recorded, and in
//! place until the old members stop. On a volume the next pod finds the data of the first one; without a volume it
//! restores the backup again. Later the seed is a member, and the cluster operator replaces its pod.

use super::{Action, Plan};
use crate::snapshot::{Life, PodFacts};

/// Deletes the ended pod, so that another one can be created. Allowed only if no client can have written to the seed,
/// or if its data is on its volume (invariant 9). A problem of the backup does not count, because the next pod reports
/// it too.
pub(super) fn replace(pod: &PodFacts) -> Plan {
    let why = pod.trouble.as_ref();
    let why = why.map_or("the seed's pod has ended and is not restarted", |why| {
        &why.message
    });
    if pod.life == Life::EndedRecently {
        return Plan::wait_for(format!("the next pod of the seed after a pause: {why}"));
    }
    let text = format!("{why}: it is replaced");
    Plan::act(Action::ReplacePod(text.clone()), &text)
}
