//! The remains of the cluster that a restore replaced by this cluster.
//!
//! The restore operator records the new cluster and the replaced one in one write, stops the old members and releases
//! the object. This operator removes their remains. An object that belongs to this EtcdCluster and carries another
//! token than the recorded one belongs to a former cluster.

use jiff::Timestamp;

use crate::snapshot::{Observed, Pod};

/// Whether an object with this token belongs to a former cluster.
pub(super) fn is_of_before(observed: &Observed, token: Option<&String>) -> bool {
    let ours = observed.intent.as_ref().map(|intent| &intent.token);
    observed.recovery.replaced.is_some() && token.is_some() && token != ours
}

/// Whether a member of the former cluster can still be an endpoint (invariant 16). A pod that is terminating and not
/// ready is not an endpoint, however long it stays on its node.
pub(super) fn may_serve(observed: &Observed) -> bool {
    let counts = |pod: &Pod| pod.ready || !pod.terminating;
    let mut pods = observed.pods.values();
    pods.any(|pod| is_of_before(observed, pod.token.as_ref()) && counts(pod))
}

/// Whether the user wants to keep the old volumes for now.
pub(super) fn is_kept(observed: &Observed, now: Timestamp) -> bool {
    let replaced = observed.recovery.replaced.as_ref();
    let until = replaced.and_then(|replaced| replaced.keep_data_until.as_ref());
    until.is_some_and(|until| until.0 > now)
}
