//! Pods in phase `Failed` with data on volumes: evicted, ended by a graceful node shutdown, or rejected by a kubelet.
//! Kubernetes does not restart their containers, so the operator deletes these pods and creates new pods on the
//! volumes. The deletion loses no data, with or without a quorum.

use crate::plan::Draft;
use crate::plan::actions::{self, Builder};
use crate::snapshot::{Disk, Pod};

/// Deletes the failed pods of these members.
pub(super) fn clear<'a, 'm>(
    build: Builder<'a>,
    members: impl IntoIterator<Item = &'m String>,
) -> Draft<'a> {
    let mut draft = Draft::new(build);
    for name in members {
        let pod = build.observed.pods.get(name).filter(|pod| has_ended(pod));
        let disk = build.observed.disks.get(name);
        if let Some(pod) = pod.filter(|pod| pod.durable && disk.is_some_and(Disk::stays)) {
            delete(name, pod, &mut draft);
        }
    }
    draft
}

/// True if the pod will never run again, and no deletion has been requested yet.
pub(super) fn has_ended(pod: &Pod) -> bool {
    pod.failed && !pod.terminating
}

pub(super) fn delete(name: &str, pod: &Pod, draft: &mut Draft) {
    draft.say(format!(
        "delete the pod of {name}, because the pod has ended"
    ));
    draft.add(actions::delete_pod(name, &pod.uid));
}
