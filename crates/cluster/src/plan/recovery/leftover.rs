//! What the cluster before a recovery, or before a restore, has left.

use jiff::Timestamp;

use super::in_progress;
use crate::plan::replaced;
use crate::plan::view::{MemberState, View};
use crate::snapshot::{Desired, Observed};

/// What may be done with what a former cluster left, or a recovery that was given up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Leftover {
    /// It has nothing to do with a recovery.
    Ordinary,
    /// It stays for now.
    Stays,
    /// Its pod and Service go, its disk stays.
    KeepsDisk,
    /// All of it goes.
    Goes,
}

/// Judges an object that belongs to no member of the list.
pub(crate) fn leftover(
    (desired, observed, now): (&Desired, &Observed, Timestamp),
    view: &View,
    name: &str,
) -> Leftover {
    // It is cancelled first.
    if in_progress(observed).is_some_and(|record| record.member == name) {
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
    // Whoever finds the cluster again without its status must find the new one.
    let unlabelled = |seat: &MemberState| {
        let pod = seat.pod.filter(|pod| pod.stays());
        pod.is_some_and(|pod| pod.cluster_id != observed.cluster_id)
            || seat
                .disk
                .is_some_and(|disk| disk.cluster_id != observed.cluster_id)
    };
    if view.seats.iter().any(unlabelled) {
        return Leftover::Stays;
    }
    // Invariant 9: the old disks stay until the new cluster is at its size and healthy. Who is to be replaced, as for a
    // volume that is lost, is none of its size.
    if view.is_complete(desired.size) && !(replaced && replaced::is_kept(observed, now)) {
        Leftover::Goes
    } else {
        Leftover::KeepsDisk
    }
}
