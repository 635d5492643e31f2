//! Members that join together: while they start, they do not find each other.
//!
//! A member that joins asks every other one for its list, its version, and whether a downgrade is under way, one after
//! the other and with 10 s, 7 s and 7 s of patience for each (`bootstrapExistingClusterNoWAL` and
//! `isCompatibleWithCluster` in etcd's `server/etcdserver`). It listens from its first moment and answers when it has
//! asked: two that start together wait for each other, all of it. Where connections are refused nobody waits.

use std::time::Duration;

use jiff::Timestamp;

use crate::plan::age::age;
use crate::plan::view::{MemberState, View};
use crate::snapshot::{Observed, Pod};

/// How long a member's Service stays without endpoints for the sake of others that have not started.
const CLOSED: Duration = Duration::from_secs(5);

/// For how long a member that runs is given to ask: a tenth of a second is common. The kubelet tells whole seconds.
const ASKING: Duration = Duration::from_secs(2);

/// Whether members to come begin behind Services without endpoints: several, beside one voter. There they need its
/// snapshot, as after a restore, and wait for their own entries longer than for the Service. A member that joins several
/// voters may get all it needs from the log over its own connections, and a Service that opens late would cost it that.
pub(super) fn begin_apart(view: &View, count: usize) -> bool {
    count > 1 && view.voters().count() == 1
}

/// Whether the member's Service gets its endpoints: all that begin behind closed ones have asked; and after a moment in
/// any case, so that nothing depends on another's pod.
pub(super) fn may_be_reached(
    (observed, now): (&Observed, Timestamp),
    view: &View,
    seat: &MemberState,
) -> bool {
    let is_old = |pod: &Pod| age(pod.created, now) >= CLOSED;
    // Who votes is found: only learners begin apart, and first members, of which enough run by now.
    seat.votes() || seat.pod.is_none_or(is_old) || { view.seats.iter() }
        .filter(|seat| begins_apart(seat) && !seat.votes())
        .all(|seat| has_asked((observed, now), seat))
}

/// Whether nobody finds the member yet.
pub(super) fn begins_apart(seat: &MemberState) -> bool {
    seat.service.is_some_and(|service| service.closed)
}

/// That its container runs says nothing: one that is slow to ask is still asking then, and a learner that has asked
/// answers whether a downgrade is under way only when it has the leader's snapshot. etcd's listener for health opens
/// after it has asked (`StartEtcd` in etcd's `server/embed/etcd.go`); where it is closed to us, a moment has to do.
fn has_asked((observed, now): (&Observed, Timestamp), seat: &MemberState) -> bool {
    let heard = observed.pulses.contains_key(&seat.name) || seat.serves();
    let has_had_time = |pod: &Pod| {
        // By a clock that is behind it has not begun yet.
        let runs = |since| since > now || age(since, now) >= ASKING;
        pod.restarts > 0 || pod.running_since.is_some_and(runs)
    };
    heard || seat.pod.is_some_and(has_had_time)
}
