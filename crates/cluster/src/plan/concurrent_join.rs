//! Members that join a single voter at the same time. While they start, their Services have no endpoints, so that they
//! cannot connect to each other.
//!
//! At its start, a joining member calls the other members one after another, with timeouts of 7 to 10 s
//! (`bootstrapExistingClusterNoWAL` and `isCompatibleWithCluster` in etcd's `server/etcdserver`). A joining member
//! accepts connections at once, but answers only after its own calls are done. Two members that start together would
//! therefore wait for each other until the timeouts. A refused connection does not delay a member.

use std::time::Duration;

use jiff::Timestamp;

use crate::clock::age;
use crate::plan::view::{MemberState, View};
use crate::snapshot::{Observed, Pod};

/// A member's Service gets endpoints at the latest this long after the creation of the member's pod, even if another
/// joining member has not completed its requests.
const CLOSED: Duration = Duration::from_secs(5);

/// A joining member has certainly completed its requests to the other members this long after its container started.
/// The requests usually take 0.1 s, but the kubelet reports the start of a container in whole seconds.
const ASKING: Duration = Duration::from_secs(2);

/// True if the new members start behind Services without endpoints: if several members join a single voter, for example
/// after a restore. Members that join several voters start faster with endpoints, because they may need no snapshot.
pub(super) fn begin_apart(view: &View, count: usize) -> bool {
    count > 1 && view.voters().count() == 1
}

/// True if the member's Service may have endpoints: the requests of all members behind Services without endpoints are
/// done, or the time limit has passed.
pub(super) fn may_be_reached(
    (observed, now): (&Observed, Timestamp),
    view: &View,
    member: &MemberState,
) -> bool {
    let is_old = |pod: &Pod| age(pod.created, now) >= CLOSED;
    // The Service of a voter may always have endpoints: after the cluster has formed, only the Services of learners
    // have no endpoints at first.
    member.votes() || member.pod.is_none_or(is_old) || { view.members.iter() }
        .filter(|member| begins_apart(member) && !member.votes())
        .all(|member| has_asked((observed, now), member))
}

/// True if the member's Service has no endpoints yet.
pub(super) fn begins_apart(member: &MemberState) -> bool {
    member.service.is_some_and(|service| service.closed)
}

/// True if the member's requests to the other members are done.
///
/// etcd opens its health listener after these requests (`StartEtcd` in etcd's `server/embed/etcd.go`). If the operator
/// cannot reach that listener, it waits for a fixed time.
fn has_asked((observed, now): (&Observed, Timestamp), member: &MemberState) -> bool {
    let heard = observed.pulses.contains_key(&member.name) || member.serves();
    let has_had_time = |pod: &Pod| {
        // If the clock of the operator is behind, the container seems to start in the future (`since > now`). The
        // requests of the member then count as done.
        let runs = |since| since > now || age(since, now) >= ASKING;
        pod.restarts > 0 || pod.running_since.is_some_and(runs)
    };
    heard || member.pod.is_some_and(has_had_time)
}
