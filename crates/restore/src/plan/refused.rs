//! The API server refuses the seed's volume claim for want of storage: a quota, or a limit of the namespace. The claim is
//! not there then, and nothing but the answer to the step says why.
//!
//! It is told as a failure, and asked for again. What was used up may be free in a moment, as when somebody deletes the
//! claim to have it made anew; and of two operators at once the second may be refused what the first has. Over a living
//! cluster, before the turn, the restore is given up when that was told for a while; since when stands in the
//! EtcdRestore's status (invariant 10).

use api::EtcdRestore;
use api::conditions::{self, ConditionType, Reason};
use k8s_openapi::jiff::{SignedDuration, Timestamp};

use super::{Plan, in_place};
use crate::observed::{Cluster, Observed, Trouble};

/// For how long it is told before the restore is given up.
const PATIENCE: SignedDuration = SignedDuration::from_secs(30);

/// What becomes of the plan.
pub fn refused(
    restore: &EtcdRestore,
    observed: &Observed,
    trouble: Trouble,
    now: Timestamp,
) -> Plan {
    // Invariant 9: after the turn nothing is given up, for the old members may stop at any moment.
    let serves = in_place::replaces(restore).is_some()
        && matches!(&observed.cluster, Cluster::Present(it) if !in_place::has_turned(restore, it));
    if !serves {
        return Plan::stuck(trouble);
    }
    if told_since(restore).is_some_and(|since| now.duration_since(since) >= PATIENCE) {
        return in_place::abandon(trouble);
    }
    let message = format!(
        "{}; if that stays so the restore is given up, and the cluster that is there left as it is",
        trouble.message
    );
    Plan::stuck(Trouble { message, ..trouble })
}

fn told_since(restore: &EtcdRestore) -> Option<Timestamp> {
    let failed = conditions::find(restore.conditions(), &ConditionType::Failed)?;
    let is = failed.status == "True" && failed.reason == Reason::StorageMissing.as_str();
    is.then_some(failed.last_transition_time.0)
}
