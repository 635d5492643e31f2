//! Missing storage for the seed. A restore in place reports it for a while before it is abandoned, and only before the
//! cutover. The start of the problem is recorded in the status of the EtcdRestore (invariant 10).
//!
//! There are two cases:
//!
//! - The API server rejects the seed's PersistentVolumeClaim (PVC) because of a quota or limit range. Only that answer
//!   names the cause, so the request is repeated. The quota may be free again soon, for example after the deletion of
//!   another PVC. Of two concurrent operator processes, the second may be rejected because of the first.
//! - The PVC exists, but no volume is created for it. The cause may be temporary, such as a new node whose driver does
//!   not run yet, or a restart of the controller of Kubernetes.

use api::EtcdRestore;
use api::conditions::{self, ConditionType};
use k8s_openapi::jiff::{SignedDuration, Timestamp};

use super::{Action, Plan, in_place};
use crate::reason::{Reason, Trouble};
use crate::snapshot::{Cluster, Pod, Snapshot};

/// How long a rejected PVC is reported before the restore is abandoned.
const REFUSED: SignedDuration = SignedDuration::from_secs(30);
/// How long a PVC without a volume is reported before the restore is abandoned.
const SEEN: SignedDuration = SignedDuration::from_mins(3);

/// The plan after the API server has rejected the PVC.
pub fn refused(
    restore: &EtcdRestore,
    snapshot: &Snapshot,
    trouble: Trouble,
    now: Timestamp,
) -> Plan {
    // Invariant 9: after the cutover the restore is not abandoned, because the old members may stop at any time.
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

/// Delays the end of a restore that would be abandoned because of an unbound PVC.
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
