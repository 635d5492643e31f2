//! Pods that have ended for good while the data of their members is on volumes: evicted for want of memory or disk on
//! their node, ended with a node that was shut down in order, refused by a kubelet. Kubernetes starts no container of
//! theirs again and leaves the objects where they are, so they are deleted, and the members get new pods on their
//! volumes.
//!
//! Nothing is lost by it, whether a quorum answers or not: such a pod runs nothing and holds nothing.

use crate::plan::Draft;
use crate::snapshot::{Disk, Observed, Pod};
use crate::write::Write;

/// Makes room for new pods of these members.
pub(super) fn clear<'a>(
    observed: &Observed,
    members: impl IntoIterator<Item = &'a String>,
    draft: &mut Draft,
) {
    for name in members {
        let Some(pod) = observed.pods.get(name).filter(|pod| has_ended(pod)) else {
            continue;
        };
        let disk = observed.disks.get(name);
        if pod.durable && disk.is_some_and(Disk::stays) {
            delete(name, pod, draft);
        }
    }
}

/// The pod will not run again, and nobody has deleted it yet.
pub(super) fn has_ended(pod: &Pod) -> bool {
    pod.failed && !pod.terminating
}

pub(super) fn delete(name: &str, pod: &Pod, draft: &mut Draft) {
    draft.say(format!(
        "clear away the pod of {name}, which has ended for good"
    ));
    draft.write(Write::DeletePod {
        member: name.to_owned(),
        uid: pod.uid.clone(),
    });
}
