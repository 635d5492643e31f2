//! Members that follow the leader and do not serve clients yet.
//!
//! A member takes part in Raft seconds before it serves clients: it first applies the entry with its own client URLs,
//! for which it may wait 7 s (docs/benchmarks.md). During that time, the operator reads the member's state from its
//! health listener.
//!
//! Invariant 24: a joining member does not count as healthy, except for promotions. The operator sends it no requests,
//! transfers no leadership to it, and does not rely on it for a removal. The client Service does not select it.

use std::time::Duration;

use etcd::{Member, MemberId, Pulse};
use jiff::Timestamp;

use crate::clock::age;
use crate::plan::view::{Data, Health, MemberState};
use crate::snapshot::{Observed, Pod, Role, Seen};

/// Time after which the operator reports a voter that does not serve yet. etcd waits up to 7 s for the entry with the
/// member's client URLs.
const LATE: Duration = Duration::from_secs(30);

/// The applied index of a member that follows the leader and does not serve clients yet: a learner, or a voter shortly
/// after its promotion. `None` for every other member.
pub(super) fn applied(
    member: &Member,
    (name, pod): (&str, Option<&Pod>),
    observed: &Observed,
    now: Timestamp,
) -> Option<u64> {
    let is_new = |pod: &&Pod| match pod.role {
        Some(Role::Learner) => true,
        Some(Role::Busy { .. }) => !is_late_to_serve(pod, now),
        Some(Role::Voter) | None => false,
    };
    let _ = pod.filter(|pod| pod.stays()).filter(is_new)?;
    // Invariant 19: a member that is being defragmented does not answer, but does not count as a joining member.
    if observed.upkeep.defragmenting() == Some(name) {
        return None;
    }
    // True if etcd has committed the entry that publishes the client URLs of the member.
    let joined = !member.client_urls.is_empty();
    let silent = matches!(observed.statuses.get(name), Some(Seen::Unknown(_)));
    let pulse = observed.pulses.get(name).filter(|_| joined && silent)?;
    // The connection to the leader is checked too, because a learner without this connection still reports the last
    // known leader.
    let connected = is_connected(pulse, observed.leader()?);
    let follows = pulse.member_id == member.id && pulse.has_leader && connected;
    follows.then_some(pulse.raft_applied_index)
}

fn is_connected(pulse: &Pulse, leader: MemberId) -> bool {
    leader == pulse.member_id || pulse.peers.contains(&leader)
}

/// True if a learner's health listener reports no connection to the leader. The learner's other answers are then stale.
/// False if the operator has not called that listener.
pub(super) fn is_cut_off(member: &MemberState, observed: &Observed) -> bool {
    let pulse = observed.pulses.get(&member.name);
    let pulse = pulse.filter(|pulse| pulse.member_id == member.id());
    pulse
        .zip(observed.leader())
        .is_some_and(|(pulse, leader)| !is_connected(pulse, leader))
}

/// Called for a member that does not serve. True if [`LATE`] has passed since the start of a learner's container, or
/// since a voter has been outside of the client Service ([`Role::Busy`]).
pub(crate) fn is_late_to_serve(pod: &Pod, now: Timestamp) -> bool {
    let since = match pod.role {
        Some(Role::Busy { since }) => Some(since),
        Some(Role::Learner) => pod.running_since,
        Some(Role::Voter) | None => None,
    };
    since.is_some_and(|since| age(since, now) >= LATE)
}

/// True if etcd would promote the member: etcd requires nine tenths of the committed entries (`isLearnerReady` in
/// etcd's `server/etcdserver/server.go`).
pub(super) fn has_caught_up(applied: u64, committed: u64) -> bool {
    applied >= committed - committed / 10
}

/// Invariant 24: for a promotion, a joining member counts as healthy when it follows the leader and has caught up.
pub(super) fn takes_part(member: &MemberState, committed: u64) -> bool {
    let follows = member.follows.filter(|_| member.is_joining());
    member.is_healthy() || follows.is_some_and(|applied| has_caught_up(applied, committed))
}

/// True for a voter that does not serve, such as a new voter: the client Service must not select it, although its pod
/// may be ready.
pub(super) fn is_yet_to_serve(member: &MemberState) -> bool {
    let ours = member.data != Data::Elsewhere && member.votes();
    ours && !member.serves() && member.health != Health::Busy
}
