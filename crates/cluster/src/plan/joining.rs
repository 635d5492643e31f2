//! Members that follow the leader and do not serve clients yet.
//!
//! A member takes part in Raft seconds before it serves clients: it first applies its own entry, for which it may
//! wait 7 s (docs/benchmarks.md). During that time it reports its ID, its leader, its connections and its applied
//! index on its health listener. This report contains more than the planner requires of a serving member. The process
//! itself gives it, during the current reconcile.
//!
//! Invariant 24: such a member counts for promotions only. It is not healthy: it receives no requests and no
//! leadership, no removal counts on it, and it is in no client Service until it serves.

use std::time::Duration;

use etcd::{Member, MemberId, Pulse};
use jiff::Timestamp;

use crate::plan::age::age;
use crate::plan::view::{Data, Health, MemberState};
use crate::snapshot::{Observed, Pod, Role, Seen};

/// Maximum time in which a voter may not serve before the operator reports a problem: etcd waits 7 s for its own
/// entry.
const LATE: Duration = Duration::from_secs(30);

/// Returns the applied index of a member that follows the leader and does not serve yet. Only for a member that has
/// not served before: a learner, or a voter that has been out of the client Service since its promotion, for a
/// limited time.
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
    // Invariant 19: the defragmentation is the reason for its silence.
    if observed.upkeep.defragmenting() == Some(name) {
        return None;
    }
    // The member's own entry, with its client URLs, is committed.
    let joined = !member.client_urls.is_empty();
    let silent = matches!(observed.statuses.get(name), Some(Seen::Unknown(_)));
    let pulse = observed.pulses.get(name).filter(|_| joined && silent)?;
    // A learner never gives up its leader: without a connection to that leader, the reported leader is stale.
    let connected = is_connected(pulse, observed.leader()?);
    let follows = pulse.member_id == member.id && pulse.has_leader && connected;
    follows.then_some(pulse.raft_applied_index)
}

fn is_connected(pulse: &Pulse, leader: MemberId) -> bool {
    leader == pulse.member_id || pulse.peers.contains(&leader)
}

/// Whether a learner reports that it is not connected to the leader: all its answers to clients are stale then,
/// including the leader it names. A learner that is not asked for its health reports nothing.
pub(super) fn is_cut_off(member: &MemberState, observed: &Observed) -> bool {
    let pulse = observed.pulses.get(&member.name);
    let pulse = pulse.filter(|pulse| pulse.member_id == member.id());
    pulse
        .zip(observed.leader())
        .is_some_and(|(pulse, leader)| !is_connected(pulse, leader))
}

/// Whether the member would already serve if it were only joining.
pub(crate) fn is_late_to_serve(pod: &Pod, now: Timestamp) -> bool {
    let since = match pod.role {
        Some(Role::Busy { since }) => Some(since),
        Some(Role::Learner) => pod.running_since,
        Some(Role::Voter) | None => None,
    };
    since.is_some_and(|since| age(since, now) >= LATE)
}

/// Whether etcd would promote the member: it needs nine tenths of the committed entries (`isLearnerReady` in etcd's
/// `server/etcdserver/server.go`).
pub(super) fn has_caught_up(applied: u64, committed: u64) -> bool {
    applied >= committed - committed / 10
}

/// Invariant 24: a member counts for a promotion as soon as it follows the leader.
pub(super) fn takes_part(member: &MemberState, committed: u64) -> bool {
    let follows = member.follows.filter(|_| member.is_joining());
    member.is_healthy() || follows.is_some_and(|applied| has_caught_up(applied, committed))
}

/// A voter that has not served yet stays out of the client Service: its pod may become ready earlier.
pub(super) fn is_yet_to_serve(member: &MemberState) -> bool {
    let ours = member.data != Data::Elsewhere && member.votes();
    ours && !member.serves() && member.health != Health::Busy
}
