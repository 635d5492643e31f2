//! What is left of the cluster that a restore replaced by this one.
//!
//! The restore operator records the new cluster and what it replaces in one write, stops the old members and lets go
//! of the object; what they leave is removed here. Whatever belongs to this object and carries another token than the
//! recorded one is of a cluster before.

use jiff::Timestamp;

use crate::snapshot::{Observed, Pod};

/// Whether an object with this token is of a cluster before.
pub(super) fn is_of_before(observed: &Observed, token: Option<&String>) -> bool {
    let ours = observed.intent.as_ref().map(|intent| &intent.token);
    observed.recovery.replaced.is_some() && token.is_some() && token != ours
}

/// Whether a member of the cluster before could still be an endpoint (invariant 16). One that is ending and not ready
/// is none, however long its node holds it.
pub(super) fn may_serve(observed: &Observed) -> bool {
    let counts = |pod: &Pod| pod.ready || !pod.terminating;
    let mut pods = observed.pods.values();
    pods.any(|pod| is_of_before(observed, pod.token.as_ref()) && counts(pod))
}

/// Whether the user wants its volumes kept for now.
pub(super) fn is_kept(observed: &Observed, now: Timestamp) -> bool {
    let replaced = observed.recovery.replaced.as_ref();
    let until = replaced.and_then(|replaced| replaced.keep_data_until.as_ref());
    until.is_some_and(|until| until.0 > now)
}
