//! The objects that remain of a cluster after a recovery or a restore replaced it.

use jiff::Timestamp;

use crate::clock::age;
use crate::plan::replaced;
use crate::plan::view::{MemberState, View};
use crate::snapshot::{Desired, Observed};

/// What the operator does with the objects of a former cluster or of an abandoned recovery.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Leftover {
    /// The object is unrelated to a recovery or a restore: the ordinary rules apply.
    Ordinary,
    /// The pod, the Service and the volume stay for now.
    Stays,
    /// The pod and the Service are deleted. The volume stays.
    KeepsDisk,
    /// The pod, the Service and the volume are deleted.
    Goes,
}

/// Classifies an object that belongs to no listed member.
pub(crate) fn leftover(
    (desired, observed, now): (&Desired, &Observed, Timestamp),
    view: &View,
    name: &str,
) -> Leftover {
    // The seed of a recovery stays until the recovery is complete or canceled.
    let recovery = observed.recovery.in_progress();
    if recovery.is_some_and(|record| record.member == name) {
        return Leftover::Stays;
    }
    let (pod, disk) = (observed.pods.get(name), observed.disks.get(name));
    let token = pod
        .and_then(|pod| pod.token.as_ref())
        .or(disk.and_then(|disk| disk.token.as_ref()));
    let id = pod
        .and_then(|pod| pod.cluster_id)
        .or(disk.and_then(|disk| disk.cluster_id));
    let former = observed.recovery.former().is_some_and(|record| {
        token == Some(&record.from_token)
            || id.is_some_and(|id| id.to_string() == record.from_cluster_id)
    });
    let replaced = replaced::is_of_before(observed, token);
    if !former && !replaced {
        return Leftover::Ordinary;
    }
    // The operator deletes no leftover until the pods and PVCs of all members have the ID of the new cluster. If the
    // status is lost later, the IDs on these objects identify the new cluster.
    let unlabelled = |member: &MemberState| {
        let pod = member.pod.filter(|pod| pod.stays());
        pod.is_some_and(|pod| pod.cluster_id != observed.cluster_id)
            || member
                .disk
                .is_some_and(|disk| disk.cluster_id != observed.cluster_id)
    };
    if view.members.iter().any(unlabelled) {
        return Leftover::Stays;
    }
    // Invariant 9: the old volumes stay until the new cluster is healthy at its full size, and the time for which the
    // user keeps them has passed. Members that the operator is about to replace do not count for this size.
    let is_kept = (replaced && replaced::is_kept(observed, now))
        || (former && is_kept_after_recovery(desired, observed, now));
    if view.is_complete(desired.size) && !is_kept {
        Leftover::Goes
    } else {
        Leftover::KeepsDisk
    }
}

/// True if `spec.recovery.keepVolumes` has not passed since the recovery. Until then, users can read from an old volume
/// the writes that the new cluster lacks.
fn is_kept_after_recovery(desired: &Desired, observed: &Observed, now: Timestamp) -> bool {
    let record = observed.recovery.former();
    let completed = record.and_then(|record| record.completion_time.as_ref());
    let now = observed.clock.earlier(now);
    completed.is_some_and(|at| age(at.0, now) < desired.recovery.keep_volumes)
}
