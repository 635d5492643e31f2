//! Token and cluster ID: recorded in the status, and marked on each pod and volume. A record that contradicts all
//! marks was edited by hand and is corrected.

use etcd::ClusterId;

use crate::plan::actions::Builder;
use crate::plan::{Draft, bootstrap};
use crate::snapshot::{Intent, Observed};

/// Invariant 26. Corrects the record; `None` if it is right.
///
/// Token and cluster ID are always recorded and marked together: a recovery or a restore replaces both. So a record
/// and a mark that agree on one of them belong to the same cluster. The marks, which are many and unanimous, are then
/// right about the other.
pub(super) fn correct<'a>(
    build: Builder<'a>,
    (intent, recorded): (&Intent, ClusterId),
) -> Option<Draft<'a>> {
    let (token, cluster_id) = marked(build.observed)?;
    let mut draft = Draft::new(build);
    let action = match (*token == intent.token, cluster_id == recorded) {
        (false, true) => {
            draft.say(format!(
                "record the token {token} again, which all pods and volumes carry"
            ));
            let members = bootstrap::first_members(build.observed, token);
            let token = token.clone();
            let found = Intent { token, members };
            build.record_intent(&found, Some(cluster_id))
        }
        (true, false) => {
            draft.say(format!(
                "record cluster ID {cluster_id} again, which all pods and volumes carry"
            ));
            build.record_cluster_id(cluster_id)
        }
        _ => return None,
    };
    draft.add(action);
    Some(draft)
}

/// The token and the cluster ID on all pods and volumes that carry both; `None` if they differ.
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
