//! Members that join concurrently: they do not reach each other while they start.
//!
//! A joining member asks every other member for its list, its version, and whether a downgrade is in progress. It
//! asks one after another and waits 10 s, 7 s and 7 s for each (`bootstrapExistingClusterNoWAL` and
//! `isCompatibleWithCluster` in etcd's `server/etcdserver`). It listens from its first moment, but answers only after
//! it has asked: two members that start together wait for each other the full time. If connections are refused, no
//! member waits.

use std::time::Duration;

use jiff::Timestamp;

use crate::plan::age::age;
use crate::plan::view::{MemberState, View};
use crate::snapshot::{Observed, Pod};

/// How long a member's Service has no endpoints because other members have not started.
const CLOSED: Duration = Duration::from_secs(5);

/// Time that a running member gets for its questions: 0.1 s is common. The kubelet reports whole seconds.
const ASKING: Duration = Duration::from_secs(2);

/// Whether new members start behind Services without endpoints: several members that join one voter. They need its
/// snapshot, as after a restore, and wait for their own entries longer than for the Service. A member that joins
/// several voters may get all entries from the log over its own connections. A Service that opens late would cost it
/// that.
pub(super) fn begin_apart(view: &View, count: usize) -> bool {
    count > 1 && view.voters().count() == 1
}

/// Whether the member's Service gets its endpoints: all members behind closed Services have asked, or a time limit
/// has passed, so that no member depends on the pod of another.
pub(super) fn may_be_reached(
    (observed, now): (&Observed, Timestamp),
    view: &View,
    member: &MemberState,
) -> bool {
    let is_old = |pod: &Pod| age(pod.created, now) >= CLOSED;
    // A voter is reachable: only learners start apart, and first members, of which enough run by now.
    member.votes() || member.pod.is_none_or(is_old) || { view.members.iter() }
        .filter(|member| begins_apart(member) && !member.votes())
        .all(|member| has_asked((observed, now), member))
}

/// Whether the member's Service still has no endpoints.
pub(super) fn begins_apart(member: &MemberState) -> bool {
    member.service.is_some_and(|service| service.closed)
}

/// Whether the member has asked the others. A running container proves nothing: a slow one may still be asking. A
/// learner that has asked answers about downgrades only after it has received the leader's snapshot. etcd's health
/// listener opens after the questions (`StartEtcd` in etcd's `server/embed/etcd.go`). If the operator cannot use that
/// listener, a fixed time has to do.
fn has_asked((observed, now): (&Observed, Timestamp), member: &MemberState) -> bool {
    let heard = observed.pulses.contains_key(&member.name) || member.serves();
    let has_had_time = |pod: &Pod| {
        // By a clock that is behind, the container has not started yet.
        let runs = |since| since > now || age(since, now) >= ASKING;
        pod.restarts > 0 || pod.running_since.is_some_and(runs)
    };
    heard || member.pod.is_some_and(has_had_time)
}
