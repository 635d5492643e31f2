//! A seed's pod that has ended: it was evicted, shut down with its node, or rejected by a kubelet. Kubernetes keeps the
//! Pod object but restarts none of its containers.
//!
//! The operator replaces the pod as long as no client can have written to the seed. For a new cluster, this is until
//! the cluster ID is recorded. For a restore in place, this is until the old members stop. A new pod continues with the
//! data on the volume, or restores the backup again if the seed has no volume. Later, the seed is a member, and the
//! cluster operator replaces its pod.

use super::{Action, Plan};
use crate::snapshot::{Life, PodFacts};

/// Deletes the ended pod, so that the next plan creates a new pod. Called only if no client can have written to the
/// seed, or if the data of the seed is on its volume (invariant 9). The pod is deleted even if its backup has a
/// problem, because the new pod reports the same problem.
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
