//! Stops the seed of an abandoned recovery. A recovery is abandoned, for example, if the volume of its seed was lost.
//!
//! Clients can reach the seed through the headless Service, but their writes are lost, because no recovery continues
//! with the data of this seed. The operator stops the seed before the next recovery starts, because the record of that
//! recovery no longer names this seed.
//!
//! Invariant 9: the operator stops the seed only if its survivor answers, because the data from which the seed started
//! then still exists. If the survivor does not answer, the running seed may have the last copy. The PVC of the seed
//! stays until a quorum answers.

use api::cluster::RecoveryPhase;

use crate::plan::evidence::Evidence;
use crate::plan::{Draft, actions};
use crate::snapshot::Pod;

/// Deletes the pod of the abandoned recovery's seed. Returns true if this plan deletes it.
pub(super) fn stop(evidence: &Evidence, draft: &mut Draft) -> bool {
    let observed = draft.build.observed;
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
        "stop {}, the seed of the canceled recovery",
        record.member
    ));
    draft.add(actions::delete_pod(&record.member, &pod.uid));
    true
}
