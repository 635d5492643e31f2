//! The number of voters: reserves names, adds members, promotes learners, removes members.
//!
//! The operator waits instead of sending requests that etcd's `mayAddMember`, `mayRemoveMember` or `mayPromoteMember`
//! would refuse.

use jiff::Timestamp;

use crate::plan::age::age;
use crate::plan::change::{decide, remove_voter};
use crate::plan::joining::{self, has_caught_up};
use crate::plan::member_objects;
use crate::plan::quorum::Quorum;
use crate::plan::versions::VersionRules;
use crate::plan::view::{Data, MemberState, View};
use crate::plan::{BLIND, CONNECTED, Draft, SHORTLY, SOON, STEADY, actions, objects, together};
use crate::reason::Reason;
use crate::snapshot::{Desired, Observed};

/// Creates the Services of new members before the members, so that DNS never caches a missing name. The Services are
/// created while dead members are still being removed, so that no later step waits for them.
pub(super) fn reserve(
    desired: &Desired,
    observed: &Observed,
    view: &View,
    rules: VersionRules,
    draft: &mut Draft,
) -> Vec<String> {
    let stay = view.staying().count();
    let at_once = if rules.several_learners {
        usize::MAX
    } else {
        1
    };
    let needed = desired.size.saturating_sub(stay).min(at_once);
    let names = view.names();
    let mut reserved: Vec<String> = observed
        .services
        .keys()
        .filter(|name| !names.contains(*name) && member_objects::is_reserved(observed, name))
        .cloned()
        .collect();
    for name in reserved.split_off(needed.min(reserved.len())) {
        member_objects::discard(observed, &name, draft);
    }
    if reserved.len() < needed {
        let count = needed - reserved.len();
        draft.say(format!("make the Services of {count} new members"));
        let apart = together::begin_apart(view, needed);
        // The Services are independent of each other.
        for _ in 0..count {
            let member = draft.new_member();
            draft.add(draft.build.create_service(&member, false, apart));
        }
    }
    reserved
}

/// Whether the replacement joins before the old member is removed. This is so if the remaining voters would survive
/// no failure, and if only the pod of the old member is to blame. Otherwise larger clusters remove first: a node for
/// one more member may not exist.
/// node for one member more.
pub(super) fn comes_first(desired: &Desired, view: &View) -> bool {
    desired.size < 3 || view.seats.iter().any(|seat| seat.followed && seat.leaves())
}

/// Removes surplus members: members to be replaced first, then learners, unhealthy voters, the newest. The leader is
/// removed only if it must be replaced, after it has handed over the leadership.
pub(super) fn shrink(
    (desired, observed, now): (&Desired, &Observed, Timestamp),
    view: &View,
    draft: &mut Draft,
) -> bool {
    let (stay, size) = (view.staying().count(), desired.size);
    let all_vote = view.staying().filter(|seat| seat.votes()).count() >= size;
    // A member to be replaced stays until its replacements are voters, and as long as the quorum depends on it.
    let spared =
        |seat: &MemberState| !seat.votes() || view.quorum().unsafe_without(seat.id()).is_none();
    let replaced = view
        .seats
        .iter()
        .find(|seat| seat.leaves() && (all_vote || stay > size) && spared(seat));
    if stay <= size && replaced.is_none() {
        return false;
    }
    let Some(victim) = replaced.or_else(|| victim(view)) else {
        draft.wait(
            Reason::NoMemberToRemove,
            "every member left is the leader or not run by this operator",
            STEADY,
        );
        return true;
    };
    if victim.votes() {
        // Invariant 3.
        if let Some(risk) = view.quorum().unsafe_without(victim.id()) {
            draft.wait(
                Reason::QuorumAtRisk,
                format!("{} is not removed: {risk}", victim.name),
                SHORTLY,
            );
            return true;
        }
        // Invariant 2: the member that changed last is healthy before the next change.
        let waits = |draft: &mut Draft| {
            wait_for_voters(observed, view, "the cluster shrinks", draft)
                || wait_for_connections(view, now, draft)
        };
        if victim.is_healthy() && waits(draft) {
            return true;
        }
    }
    let why = match victim.why() {
        "" => "the cluster shrinks",
        why => why,
    };
    remove_voter(view, victim, why, draft)
}

fn victim<'v, 'a>(view: &'v View<'a>) -> Option<&'v MemberState<'a>> {
    let may_go =
        |seat: &&MemberState| seat.data != Data::Elsewhere && Some(seat.id()) != view.leader;
    let age = |seat: &MemberState| {
        seat.service
            .map(|service| service.created)
            .or(seat.pod.map(|pod| pod.created))
    };
    let first = |seat: &&MemberState| {
        (
            seat.votes(),
            seat.is_healthy(),
            std::cmp::Reverse(age(seat)),
            seat.id(),
        )
    };
    view.seats.iter().filter(may_go).min_by_key(first)
}

/// Whether a change of the voters must wait for one of the voters.
pub(super) fn wait_for_voters(
    observed: &Observed,
    view: &View,
    what: &str,
    draft: &mut Draft,
) -> bool {
    let healthy = |seat: &MemberState| seat.is_healthy();
    wait_for_all(observed, view, &healthy, what, draft)
}

fn wait_for_all(
    observed: &Observed,
    view: &View,
    counts: &dyn Fn(&MemberState) -> bool,
    what: &str,
    draft: &mut Draft,
) -> bool {
    let Some(seat) = view.voters().find(|seat| !counts(seat)) else {
        return false;
    };
    let starts = observed.pods.get(&seat.name).is_some_and(|pod| pod.running);
    let look_again = if starts { SHORTLY } else { STEADY };
    draft.wait(
        Reason::VoterNotHealthy,
        format!("{what} when {} is healthy", seat.name),
        look_again,
    );
    true
}

/// Waits as long as etcd's rule of five seconds would refuse the change. A single voter is connected to itself.
pub(super) fn wait_for_connections(view: &View, now: Timestamp, draft: &mut Draft) -> bool {
    if view.voters().count() == 1 {
        return false;
    }
    let young = |seat: &&MemberState| {
        seat.pod
            .and_then(|pod| pod.running_since)
            .is_some_and(|since| age(since, now) < CONNECTED)
    };
    let Some(seat) = view.voters().find(young) else {
        return false;
    };
    let text = format!(
        "etcd takes the next change when all voters have been connected for 5 s; {} is new",
        seat.name
    );
    draft.wait(Reason::VotersConnecting, text, SHORTLY);
    true
}

/// Invariant 4: promotes learners that have caught up, one at a time (invariant 2).
pub(super) fn promote(
    (desired, observed, now): (&Desired, &Observed, Timestamp),
    view: &View,
    draft: &mut Draft,
) -> bool {
    let newest = |seat: &&MemberState| {
        observed
            .statuses
            .get(&seat.name)
            .and_then(|seen| seen.known())
            .map(|s| s.raft_index)
    };
    let committed = view
        .voters()
        .filter_map(|seat| newest(&seat))
        .max()
        .unwrap_or(u64::MAX);
    let mut ready: Option<&MemberState> = None;
    for seat in view.learners().filter(|seat| seat.data != Data::Elsewhere) {
        let has = observed
            .statuses
            .get(&seat.name)
            .and_then(|seen| seen.known())
            .map(|s| s.raft_applied_index)
            .or(seat.follows)
            // The planner assumes that a voter without a reported start was added as a voter (`second`).
            .filter(|_| seat.joined() && !together::begins_apart(seat));
        match has {
            // Invariant 24.
            Some(_) if joining::is_cut_off(seat, observed) => {
                let text = format!("{} is not connected with the leader", seat.name);
                draft.wait(Reason::LearnerCutOff, text, SHORTLY);
            }
            Some(has) if joining::takes_part(seat, committed) && has_caught_up(has, committed) => {
                // A learner that serves is promoted first.
                ready = ready.filter(|first| first.serves() || !seat.serves());
                ready = ready.or(Some(seat));
            }
            Some(has) => {
                let text = format!("{} has applied {has} of {committed} log entries", seat.name);
                draft.wait(Reason::LearnerCatchingUp, text, SOON);
            }
            None => wait_for_start(seat, now, draft),
        }
    }
    let voters = view
        .voters()
        .filter(|seat| !seat.leaves() && seat.data != Data::Elsewhere)
        .count();
    let Some(seat) = ready.filter(|_| voters < desired.size) else {
        return false;
    };
    // Invariants 2 and 24.
    let takes_part = |seat: &MemberState| joining::takes_part(seat, committed);
    let what = format!("{} becomes a voter", seat.name);
    if wait_for_all(observed, view, &takes_part, &what, draft) {
        return false;
    }
    let voters = view.voters().map(|seat| (seat.id(), takes_part(seat)));
    if let Some(risk) = Quorum::new(voters).unsafe_with_one_more() {
        draft.wait(
            Reason::QuorumAtRisk,
            format!("{} is not promoted: {risk}", seat.name),
            SHORTLY,
        );
        return false;
    }
    let promotion = actions::promote(&seat.name, seat.id());
    let said = format!("make {} a voter", seat.name);
    decide(view, vec![promotion], None, said, draft)
}

fn wait_for_start(seat: &MemberState, now: Timestamp, draft: &mut Draft) {
    let soon = seat
        .pod
        .is_some_and(|pod| objects::is_about_to_answer(pod, now));
    let look_again = if soon { SOON } else { BLIND };
    let what = if seat.serves() {
        "has not told the list that it has started"
    } else {
        "is not running yet"
    };
    let text = format!("{} {what}", seat.name);
    draft.wait(Reason::LearnerStarting, text, look_again);
}

/// Adds members that are missing. Invariant 4: they join as learners if the version of etcd has learners.
pub(super) fn grow(
    (desired, now): (&Desired, Timestamp),
    view: &View,
    rules: VersionRules,
    reserved: &[String],
    draft: &mut Draft,
) -> bool {
    let there = if comes_first(desired, view) {
        view.staying().count()
    } else {
        let ours = |seat: &&MemberState| seat.data != Data::Elsewhere;
        view.seats.iter().filter(ours).count()
    };
    let missing = desired.size.saturating_sub(there);
    let count = if rules.several_learners {
        missing
    } else {
        missing.min(1)
    };
    let names: Vec<&String> = reserved.iter().take(count).collect();
    if names.is_empty() {
        return false;
    }
    if names.len() < count {
        return false; // The other Services are not created yet; all members join together.
    }
    // etcd refuses an addition unless every voter has been connected for 5 s.
    if let Some(seat) = view.voters().find(|seat| !seat.is_healthy()) {
        draft.wait(
            Reason::VoterNotHealthy,
            format!("a member is added when {} is healthy", seat.name),
            BLIND,
        );
        return true;
    }
    if wait_for_connections(view, now, draft) {
        return true;
    }
    let joining = |seat: &&MemberState| {
        !seat.joined()
            && seat
                .pod
                .is_some_and(|pod| pod.trouble.is_none() && pod.restarts == 0)
    };
    if let Some(seat) = view.seats.iter().find(joining) {
        draft.wait(
            Reason::MemberJoining,
            format!("a member is added when {} has joined", seat.name),
            SHORTLY,
        );
        return true;
    }
    if !rules.several_learners && view.learners().next().is_some() {
        draft.wait(
            Reason::OneLearnerAtATime,
            "etcd before 3.6 takes one learner at a time",
            SHORTLY,
        );
        return true;
    }
    let additions = names
        .iter()
        .map(|name| draft.build.add_member(name, rules.learners))
        .collect();
    let text = names
        .iter()
        .map(|name| name.as_str())
        .collect::<Vec<_>>()
        .join(", ");
    let how = if rules.learners {
        ""
    } else {
        " with a vote, because etcd before 3.4 has no learners: a quorum needs one more before it runs"
    };
    decide(view, additions, None, format!("add {text}{how}"), draft)
}
