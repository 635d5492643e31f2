//! Corrects the token and the cluster ID in the status after a person has edited them. Each pod and PVC has both values
//! in its annotations as well.

use etcd::ClusterId;

use crate::plan::actions::Builder;
use crate::plan::{Draft, bootstrap};
use crate::snapshot::{Intent, Observed};

/// Invariant 26: corrects the status; `None` if the status is correct, or if the annotations contradict each other.
///
/// If one of the two values in the status equals the value in all annotations, the status and the annotations belong to
/// the same cluster, because a recovery or a restore replaces both values together. The other value in the status is
/// then wrong, and the annotations contain the correct value.
pub(super) fn correct<'a>(
    build: Builder<'a>,
    (intent, recorded): (&Intent, ClusterId),
) -> Option<Draft<'a>> {
    let (token, cluster_id) = marked(build.observed)?;
    let mut draft = Draft::new(build);
    let action = match (*token == intent.token, cluster_id == recorded) {
        (false, true) => {
            draft.say(format!(
                "record the token {token} again, because all pods and volumes have this token"
            ));
            let members = bootstrap::first_members(build.observed, token);
            let token = token.clone();
            let found = Intent { token, members };
            build.record_intent(&found, Some(cluster_id))
        }
        (true, false) => {
            draft.say(format!(
                "record cluster ID {cluster_id} again, because all pods and volumes have this ID"
            ));
            build.record_cluster_id(cluster_id)
        }
        _ => return None,
    };
    draft.add(action);
    Some(draft)
}

/// The token and the cluster ID in the annotations of the pods and volumes that have both. `None` if the annotations
/// contradict each other.
fn marked(observed: &Observed) -> Option<(&String, ClusterId)> {
    let pods = observed
        .pods
        .values()
        .filter(|pod| pod.owned && pod.stays());
    let pods = pods.map(|pod| (pod.token.as_ref(), pod.cluster_id));
    let disks = observed.disks.values();
    let disks = disks.filter(|disk| disk.owned && disk.stays() && !disk.is_evidence());
    let disks = disks.map(|disk| (disk.token.as_ref(), disk.cluster_id));
    let mut marks = pods.chain(disks).filter_map(|(token, id)| token.zip(id));
    let first = marks.next()?;
    marks.all(|mark| mark == first).then_some(first)
}
