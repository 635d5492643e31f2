//! No storage for the seed: for how long that is told before a restore over a living cluster is given up, before the turn.
//! Since when it is told stands in the EtcdRestore's status (invariant 10).
//!
//! The API server refuses the seed's volume claim, by a quota or a limit of the namespace: the claim is not there then, and
//! nothing but the answer to the step says why. It is asked for again. What was used up may be free in a moment, as when
//! somebody deletes the claim to have it made anew; and of two operators at once the second may be refused what the first
//! has.
//!
//! Or the claim is there, and it and the pod tell that nobody makes a volume. That may be of one attempt, and the next one
//! under way, as on a node that has just come and whose driver does not run yet; or Kubernetes' controller is being replaced.

use api::EtcdRestore;
use api::conditions::{self, ConditionType};
use k8s_openapi::jiff::{SignedDuration, Timestamp};

use super::{Action, Plan, in_place};
use crate::reason::{Reason, Trouble};
use crate::snapshot::{Cluster, Pod, Snapshot};

/// For how long a refusal is told before the restore is given up.
const REFUSED: SignedDuration = SignedDuration::from_secs(30);
/// For how long what the claim and the pod tell is.
const SEEN: SignedDuration = SignedDuration::from_mins(3);

/// What becomes of the plan when the API server refuses the claim.
pub fn refused(
    restore: &EtcdRestore,
    snapshot: &Snapshot,
    trouble: Trouble,
    now: Timestamp,
) -> Plan {
    // Invariant 9: after the turn nothing is given up, for the old members may stop at any moment.
    let serves = in_place::replaces(restore).is_some()
        && matches!(&snapshot.cluster, Cluster::Present(it) if !in_place::has_turned(restore, it));
    if !serves {
        return Plan::stuck(trouble);
    }
    if is_told_for(restore, REFUSED, now) {
        return in_place::abandon(&trouble);
    }
    told(&trouble)
}

/// What becomes of a plan that gives the restore up for what was seen.
#[must_use]
pub fn lasting(plan: Plan, restore: &EtcdRestore, snapshot: &Snapshot, now: Timestamp) -> Plan {
    let seen = match &snapshot.seed.pod {
        Pod::Present(pod) => pod.trouble.as_ref(),
        _ => None,
    };
    let missing = |why: &Trouble| why.reason == Reason::StorageMissing;
    match (&plan.action, seen.filter(|why| missing(why))) {
        (Action::Abandon(why), Some(seen)) if missing(why) && !is_told_for(restore, SEEN, now) => {
            told(seen)
        }
        _ => plan,
    }
}

fn told(trouble: &Trouble) -> Plan {
    let message = format!(
        "{}; if that stays so the restore is given up, and the cluster that is there left as it is",
        trouble.message
    );
    Plan::stuck(Trouble::new(trouble.reason, message))
}

fn is_told_for(restore: &EtcdRestore, long: SignedDuration, now: Timestamp) -> bool {
    let failed = conditions::find(restore.conditions(), &ConditionType::Failed);
    failed.is_some_and(|it| {
        it.status == "True"
            && Reason::parse(&it.reason) == Some(Reason::StorageMissing)
            && now.duration_since(it.last_transition_time.0) >= long
    })
}
