//! Replaces a seed's pod that has ended: it was evicted, shut down with its node, or rejected by a kubelet. Kubernetes
//! does not restart such a pod.
//!
//! The pod is replaced only while no client can have written to the seed. This time ends for a new cluster when the
//! cluster ID is recorded, and for a restore in place when the old members stop. Afterwards, the cluster operator
//! replaces the pod.

use super::{Action, Plan};
use crate::snapshot::{Life, PodFacts};

/// Deletes the ended pod, so that the next reconcile creates another pod. No client can have written to the seed, or
/// its data is on a volume (invariant 9). A problem of the backup does not matter here, because the new pod reports it
/// again.
pub(super) fn replace(pod: &PodFacts) -> Plan {
    let why = pod.trouble.as_ref();
    let why = why.map_or("the seed's pod has ended and is not restarted", |why| {
        &why.message
    });
    if pod.life == Life::EndedRecently {
        return Plan::wait_for(format!(
            "{why}: after a pause, the operator creates the next pod of the seed"
        ));
    }
    let text = format!("{why}: the operator replaces the pod");
    Plan::act(Action::ReplacePod(text.clone()), &text)
}
