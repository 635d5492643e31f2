//! The seed of a recovery that was given up, as one is whose volume was lost.
//!
//! It is a cluster of its own, and nobody will go on with it. The client Service never led to it; whoever finds members
//! by the headless Service may, and what it acknowledges to such a client is thrown away. So it is stopped, and before
//! that no other recovery begins: its record is the only one that tells whose pod that is.
//!
//! Invariant 9: what it began with has to be where it came from, so its survivor has to answer. Otherwise its process may
//! hold the last copy, for a person to take a snapshot of. Its claim stays until a quorum answers, in any case.

use api::cluster::RecoveryPhase;

use crate::plan::Draft;
use crate::plan::evidence::Evidence;
use crate::snapshot::{Observed, Pod};
use crate::write::Write;

/// Ends its pod. Whether that is still to be done.
pub(super) fn stop(observed: &Observed, evidence: &Evidence, draft: &mut Draft) -> bool {
    let record = observed.recovery.record.as_ref();
    let Some(record) = record.filter(|record| record.phase == RecoveryPhase::Cancelled) else {
        return false;
    };
    let its = |pod: &&Pod| pod.token.as_ref() == Some(&record.token) && pod.stays();
    let Some(pod) = observed.pods.get(&record.member).filter(its) else {
        return false;
    };
    if !evidence.survives(&record.survivor) {
        return false;
    }
    draft.say(format!(
        "stop {}, with which the recovery that was given up began",
        record.member
    ));
    draft.write(Write::DeletePod {
        member: record.member.clone(),
        uid: pod.uid.clone(),
    });
    true
}
