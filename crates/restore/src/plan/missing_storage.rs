//! Handles missing storage for the seed. Before the cutover, a restore in place reports the problem for some time, and
//! is then abandoned. A condition of the EtcdRestore records the start of the problem (invariant 10).
//!
//! There are two cases:
//!
//! - The API server rejects the seed's PersistentVolumeClaim (PVC) because of a quota or a limit range. The request is
//!   repeated, because the quota may allow the PVC later, and because another operator process may have created it.
//! - The PVC has no volume. The cause may be temporary, for example if the CSI driver is not running on a new node yet.

use api::EtcdRestore;
use api::conditions::{self, ConditionType};
use k8s_openapi::jiff::{SignedDuration, Timestamp};

use super::{Action, Plan, in_place};
use crate::reason::{Reason, Trouble};
use crate::snapshot::{Cluster, Pod, Snapshot};

/// If the API server rejects the PVC for this time, the restore is abandoned.
const REJECTED_PVC_TIMEOUT: SignedDuration = SignedDuration::from_secs(30);
/// If the restore has reported a PVC without a volume for this time, the restore is abandoned.
const UNBOUND_PVC_TIMEOUT: SignedDuration = SignedDuration::from_mins(3);

/// The plan after the API server has rejected the PVC.
pub fn pvc_rejected(
    restore: &EtcdRestore,
    snapshot: &Snapshot,
    trouble: Trouble,
    now: Timestamp,
) -> Plan {
    // Invariant 9: after the cutover, the restore is not abandoned, because the old members may already be stopped. A
    // restore into a new cluster has no old members, so it also waits for storage.
    let old_members_serve = in_place::replaces(restore).is_some()
        && matches!(&snapshot.cluster, Cluster::Present(it) if !in_place::has_cut_over(restore, it));
    if !old_members_serve {
        return Plan::stuck(trouble);
    }
    if is_reported_for(restore, REJECTED_PVC_TIMEOUT, now) {
        return in_place::abandon(&trouble);
    }
    report(&trouble)
}

/// Reports an unbound PVC until [`UNBOUND_PVC_TIMEOUT`] has passed, and delays the abandonment of the restore until
/// then.
#[must_use]
pub fn delay_abandonment(
    plan: Plan,
    restore: &EtcdRestore,
    snapshot: &Snapshot,
    now: Timestamp,
) -> Plan {
    let observed = match &snapshot.seed.pod {
        Pod::Present(pod) => pod.trouble.as_ref(),
        _ => None,
    };
    let missing = |why: &Trouble| why.reason == Reason::StorageMissing;
    match (&plan.action, observed.filter(|why| missing(why))) {
        (Action::Abandon(why), Some(observed))
            if missing(why) && !is_reported_for(restore, UNBOUND_PVC_TIMEOUT, now) =>
        {
            report(observed)
        }
        _ => plan,
    }
}

fn report(trouble: &Trouble) -> Plan {
    let message = format!(
        "{}; if the problem remains, the restore is abandoned and the existing cluster stays unchanged",
        trouble.message
    );
    Plan::stuck(Trouble::new(trouble.reason, message))
}

fn is_reported_for(restore: &EtcdRestore, time: SignedDuration, now: Timestamp) -> bool {
    let failed = conditions::find(restore.conditions(), &ConditionType::Failed);
    failed.is_some_and(|it| {
        it.status == "True"
            && Reason::parse(&it.reason) == Some(Reason::StorageMissing)
            && now.duration_since(it.last_transition_time.0) >= time
    })
}
