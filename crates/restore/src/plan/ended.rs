//! A seed's pod that has ended: it was evicted, shut down with its node, or rejected by a kubelet. Kubernetes keeps the
//! Pod object but restarts none of its containers.
//!
//! The operator replaces the pod as long as no client can have written to the seed: in a new cluster until the cluster
//! ID is recorded, and in place until the old members stop. A new pod on the same volume finds the restored data there.
//! A new pod without a volume restores the backup again. Later, the seed is a member, and the cluster operator replaces
//! its pod.

use super::{Action, Plan};
use crate::snapshot::{Life, PodFacts};

/// Deletes the ended pod, so that a new pod can be created. Called only if no client can have written to the seed, or
/// if the data of the seed is on its volume (invariant 9). Even a problem of the backup does not prevent the deletion:
/// the new pod reports the same problem.
pub(super) fn replace(pod: &PodFacts) -> Plan {
    let why = pod.trouble.as_ref();
    let why = why.map_or("the seed's pod has ended and is not restarted", |why| {
        &why.message
    });
    if pod.life == Life::EndedRecently {
        return Plan::wait_for(format!("the next pod of the seed after a pause: {why}"));
    }
    let text = format!("{why}: the operator replaces the pod");
    Plan::act(Action::ReplacePod(text.clone()), &text)
}
