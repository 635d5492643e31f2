//! Members that follow the leader and do not serve clients yet.
//!
//! A member's vote is Raft's affair alone, and Raft begins seconds before clients are served: a member serves them when it
//! has applied its own entry, for which it may wait 7 s (docs/benchmarks.md). In that time it tells on its listener for
//! health who it is, that it knows a leader, whom it is connected with, and what it has applied. That is more than the
//! planner asks of a member that serves; like that answer it is given by the process itself, in this very look.
//!
//! Invariant 24: it counts for promotions and for nothing else. Such a member is not healthy: nothing is asked of it, no
//! leadership is handed to it, no removal counts on it, and it is in no client Service until it serves.

use std::time::Duration;

use etcd::{Member, MemberId, Pulse};
use jiff::Timestamp;

use crate::plan::age::age;
use crate::plan::view::{Data, Health, MemberState};
use crate::snapshot::{Observed, Pod, Role, Seen};

/// For how long a voter may not serve before something is wrong with it: etcd waits 7 s for its own entry.
const LATE: Duration = Duration::from_secs(30);

/// What a member has applied that follows the leader and does not serve yet. Only of one that has not been seen serving:
/// a learner, or a voter that the client Service has passed by since, for a while.
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
    // Invariant 19: that is why it is silent.
    if observed.upkeep.defragmenting() == Some(name) {
        return None;
    }
    // Its own entry, with its client URLs, is committed.
    let joined = !member.client_urls.is_empty();
    let silent = matches!(observed.statuses.get(name), Some(Seen::Unknown(_)));
    let pulse = observed.pulses.get(name).filter(|_| joined && silent)?;
    // A learner never gives up a leader: that it knows one is of the past where it is not connected with it.
    let connected = is_connected(pulse, observed.leader()?);
    let follows = pulse.member_id == member.id && pulse.has_leader && connected;
    follows.then_some(pulse.raft_applied_index)
}

fn is_connected(pulse: &Pulse, leader: MemberId) -> bool {
    leader == pulse.member_id || pulse.peers.contains(&leader)
}

/// Whether a learner says itself that it is not connected with the leader: whatever it answers clients is of the past then,
/// the leader that it names too. One that is not asked for its health says nothing.
pub(super) fn is_cut_off(seat: &MemberState, observed: &Observed) -> bool {
    let pulse = observed.pulses.get(&seat.name);
    let pulse = pulse.filter(|pulse| pulse.member_id == seat.id());
    pulse
        .zip(observed.leader())
        .is_some_and(|(pulse, leader)| !is_connected(pulse, leader))
}

/// Whether a member would serve by now if it were only joining.
pub(crate) fn is_late_to_serve(pod: &Pod, now: Timestamp) -> bool {
    let since = match pod.role {
        Some(Role::Busy { since }) => Some(since),
        Some(Role::Learner) => pod.running_since,
        Some(Role::Voter) | None => None,
    };
    since.is_some_and(|since| age(since, now) >= LATE)
}

/// Whether the member has so much of what is committed that etcd gives it a vote: nine tenths (`isLearnerReady` in etcd's
/// `server/etcdserver/server.go`).
pub(super) fn has_caught_up(applied: u64, committed: u64) -> bool {
    applied >= committed - committed / 10
}

/// Invariant 24: for a promotion a member counts as soon as it follows the leader.
pub(super) fn takes_part(seat: &MemberState, committed: u64) -> bool {
    let follows = seat.follows.filter(|_| seat.is_joining());
    seat.is_healthy() || follows.is_some_and(|applied| has_caught_up(applied, committed))
}

/// A voter that has not served yet stays out of the client Service: its pod may be ready before.
pub(super) fn is_yet_to_serve(seat: &MemberState) -> bool {
    let ours = seat.data != Data::Elsewhere && seat.votes();
    ours && !seat.serves() && seat.health != Health::Busy
}
