//! The objects that remain from a cluster that a restore has replaced. Their token differs from the recorded token,
//! because the restore operator records the token of the new cluster.

use jiff::Timestamp;

use crate::snapshot::{Observed, Pod};

/// True if an object with this token belongs to a former cluster.
pub(super) fn is_of_before(observed: &Observed, token: Option<&String>) -> bool {
    let ours = observed.intent.as_ref().map(|intent| &intent.token);
    observed.recovery.replaced.is_some() && token.is_some() && token != ours
}

/// Invariant 16: true if a member of the former cluster can still be an endpoint of a Service. A terminating pod that
/// is not ready is no endpoint, even if it stays on its node for a long time.
pub(super) fn may_serve(observed: &Observed) -> bool {
    let counts = |pod: &Pod| pod.ready || !pod.terminating;
    let mut pods = observed.pods.values();
    pods.any(|pod| is_of_before(observed, pod.token.as_ref()) && counts(pod))
}

/// True until `status.replaced.keepDataUntil`, up to which the user wants to keep the old volumes.
pub(super) fn is_kept(observed: &Observed, now: Timestamp) -> bool {
    let replaced = observed.recovery.replaced.as_ref();
    let until = replaced.and_then(|replaced| replaced.keep_data_until.as_ref());
    until.is_some_and(|until| until.0 > now)
}
