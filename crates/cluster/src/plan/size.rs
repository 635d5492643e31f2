//! Changes the number of voters: reserves names, adds members, promotes learners and removes members.
//!
//! The operator sends a request only when etcd would accept it, by etcd's rules `mayAddMember`, `mayRemoveMember` and
//! `mayPromoteMember`.

use api::cluster::ClusterChange;
use jiff::Timestamp;

use crate::clock::age;
use crate::plan::change::{decide, remove_voter};
use crate::plan::joining::{self, has_caught_up};
use crate::plan::quorum::Quorum;
use crate::plan::versions::{self, VersionRules};
use crate::plan::view::{Data, MemberState, View};
use crate::plan::{
    BLIND, CONNECTED, Draft, NewNames, SHORTLY, SOON, STEADY, actions, backed_up, concurrent_join,
    member_objects, objects,
};
use crate::reason::Reason;
use crate::snapshot::Desired;

/// Creates the Services of new members before the members, so that DNS never caches a missing name. Returns the
/// members' names.
pub(super) fn reserve(
    view: &View,
    rules: VersionRules,
    new_names: &mut NewNames,
    draft: &mut Draft,
) -> Vec<String> {
    let (desired, observed, _) = draft.build.inputs();
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
        member_objects::discard(&name, draft);
    }
    if reserved.len() < needed {
        let count = needed - reserved.len();
        draft.say(format!("create the Services of {count} new members"));
        let apart = concurrent_join::begin_apart(view, needed);
        // Each Service is created in its own chain, because the Services of new members do not depend on each other.
        for _ in 0..count {
            let member = new_names.member();
            draft.add(draft.build.create_service(&member, false, apart));
        }
    }
    reserved
}

/// True if the replacement joins before the old member is removed: in clusters of one or two members, or if a member to
/// be replaced is marked [`MemberState::followed`]. Larger clusters remove the old member first, because no node may be
/// free for an additional member.
pub(super) fn comes_first(desired: &Desired, view: &View) -> bool {
    desired.size < 3
        || view
            .members
            .iter()
            .any(|member| member.followed && member.leaves())
}

/// Removes surplus members in this order: members to be replaced, learners, unhealthy voters, and the newest members.
/// The leader is removed only if it must be replaced, and only after it has transferred the leadership.
pub(super) fn shrink(view: &View, draft: &mut Draft) -> bool {
    let (stay, size) = (view.staying().count(), draft.build.desired.size);
    let all_vote = view.staying().filter(|member| member.votes()).count() >= size;
    // True if the quorum does not need the member: it is a learner, or a quorum of the other voters is healthy.
    let spared = |member: &MemberState| {
        !member.votes() || view.quorum().unsafe_without(member.id()).is_none()
    };
    let replaced = view
        .members
        .iter()
        .find(|member| member.leaves() && (all_vote || stay > size) && spared(member));
    if stay <= size {
        backed_up::end(&ClusterChange::Shrink, draft);
    }
    if stay <= size && replaced.is_none() {
        return false;
    }
    let Some(victim) = replaced.or_else(|| victim(view)) else {
        let text = "the cluster has too many members, but none can be removed now: each is the leader or an external member";
        draft.wait(Reason::NoMemberToRemove, text, STEADY);
        return true;
    };
    // Invariant 32: the removal of surplus members may need a recent backup. A replacement needs none.
    let what = "the removal of surplus members";
    if replaced.is_none() && !backed_up::is_backed_up(&ClusterChange::Shrink, what, draft) {
        return true;
    }
    if victim.votes() {
        // Invariant 3: the operator removes a voter only if a quorum of the remaining voters is healthy.
        if let Some(risk) = view.quorum().unsafe_without(victim.id()) {
            let text = format!(
                "the operator does not remove {} yet: after the removal, only {risk}",
                victim.name
            );
            draft.wait(Reason::QuorumAtRisk, text, SHORTLY);
            return true;
        }
        // Invariant 2: a healthy voter is removed only while all voters are healthy and connected.
        let waits = |draft: &mut Draft| {
            wait_for_voters(view, "the cluster shrinks", draft) || wait_for_connections(view, draft)
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
        |member: &&MemberState| member.data != Data::Elsewhere && Some(member.id()) != view.leader;
    let age = |member: &MemberState| {
        member
            .service
            .map(|service| service.created)
            .or(member.pod.map(|pod| pod.created))
    };
    let first = |member: &&MemberState| {
        (
            member.votes(),
            member.is_healthy(),
            std::cmp::Reverse(age(member)),
            member.id(),
        )
    };
    view.members.iter().filter(may_go).min_by_key(first)
}

/// Returns true, and reports the wait, if a voter is not healthy. `what` describes the change that waits.
pub(super) fn wait_for_voters(view: &View, what: &str, draft: &mut Draft) -> bool {
    let healthy = |member: &MemberState| member.is_healthy();
    wait_for_all(view, &healthy, what, draft)
}

fn wait_for_all(
    view: &View,
    counts: &dyn Fn(&MemberState) -> bool,
    what: &str,
    draft: &mut Draft,
) -> bool {
    let Some(member) = view.voters().find(|member| !counts(member)) else {
        return false;
    };
    let pod = draft.build.observed.pods.get(&member.name);
    let starts = pod.is_some_and(|pod| pod.running);
    let delay = if starts { SHORTLY } else { STEADY };
    let text = format!("{what} when {} is healthy", member.name);
    draft.wait(Reason::VoterNotHealthy, text, delay);
    true
}

/// Waits while etcd would reject the change, because not all voters have been connected for five seconds. A single
/// voter needs no wait.
pub(super) fn wait_for_connections(view: &View, draft: &mut Draft) -> bool {
    let now = draft.build.now;
    if view.voters().count() == 1 {
        return false;
    }
    let young = |member: &&MemberState| {
        member
            .pod
            .and_then(|pod| pod.running_since)
            .is_some_and(|since| age(since, now) < CONNECTED)
    };
    let Some(member) = view.voters().find(young) else {
        return false;
    };
    let text = format!(
        "etcd accepts the next change when all voters have been connected for 5 s; {} has just started",
        member.name
    );
    draft.wait(Reason::VotersConnecting, text, SHORTLY);
    true
}

/// Invariant 4: promotes learners that have caught up, one at a time (invariant 2).
pub(super) fn promote(view: &View, draft: &mut Draft) -> bool {
    let (desired, observed, now) = draft.build.inputs();
    let index = |member: &MemberState| Some(observed.answer(&member.name)?.raft_index);
    let committed = view.voters().filter_map(index).max().unwrap_or(u64::MAX);
    let mut ready: Option<&MemberState> = None;
    for member in view
        .learners()
        .filter(|member| member.data != Data::Elsewhere)
    {
        let answer = observed.answer(&member.name);
        let has = answer
            .map(|status| status.raft_applied_index)
            .or(member.follows)
            // A learner is promoted only after its Service has endpoints and its client URLs are published: the module
            // `second` takes a voter without client URLs for a member that was added as a voter.
            .filter(|_| member.joined() && !concurrent_join::begins_apart(member));
        match has {
            // Invariant 24: a learner without a connection to the leader is not promoted.
            Some(_) if joining::is_cut_off(member, observed) => {
                let text = format!("{} is not connected to the leader", member.name);
                draft.wait(Reason::LearnerCutOff, text, SHORTLY);
            }
            Some(has)
                if joining::takes_part(member, committed) && has_caught_up(has, committed) =>
            {
                // A learner that already serves clients is promoted before other learners.
                ready = ready.filter(|first| first.serves() || !member.serves());
                ready = ready.or(Some(member));
            }
            Some(has) => {
                let text = format!(
                    "{} has applied {has} of {committed} log entries",
                    member.name
                );
                draft.wait(Reason::LearnerCatchingUp, text, SOON);
            }
            None => wait_for_start(member, now, draft),
        }
    }
    let voters = view
        .voters()
        .filter(|member| !member.leaves() && member.data != Data::Elsewhere)
        .count();
    let Some(member) = ready.filter(|_| voters < desired.size) else {
        return false;
    };
    // Invariants 2 and 24: the set of voters changes only while all voters take part in consensus. A voter that follows
    // the leader takes part, even if it does not serve clients yet.
    let takes_part = |member: &MemberState| joining::takes_part(member, committed);
    let what = format!("{} becomes a voter", member.name);
    if wait_for_all(view, &takes_part, &what, draft) {
        return false;
    }
    let voters = view
        .voters()
        .map(|member| (member.id(), takes_part(member)));
    if let Some(risk) = Quorum::new(voters).unsafe_with_one_more() {
        let text = format!(
            "the operator does not promote {} yet: after the promotion, only {risk}",
            member.name
        );
        draft.wait(Reason::QuorumAtRisk, text, SHORTLY);
        return false;
    }
    let promotion = actions::promote(&member.name, member.id());
    let said = format!("promote {} to voter", member.name);
    decide(view, vec![promotion], None, said, draft)
}

fn wait_for_start(member: &MemberState, now: Timestamp, draft: &mut Draft) {
    let soon = member
        .pod
        .is_some_and(|pod| objects::is_about_to_answer(pod, now));
    let delay = if soon { SOON } else { BLIND };
    let what = if member.serves() {
        "has not published its client URLs yet"
    } else {
        "is not running yet"
    };
    let text = format!("{} {what}", member.name);
    draft.wait(Reason::LearnerStarting, text, delay);
}

/// Adds missing members. Invariant 4: they join as learners, if etcd's version supports learners.
pub(super) fn grow(
    view: &View,
    rules: VersionRules,
    reserved: &[String],
    draft: &mut Draft,
) -> bool {
    let desired = draft.build.desired;
    let there = if comes_first(desired, view) {
        view.staying().count()
    } else {
        let ours = |member: &&MemberState| member.data != Data::Elsewhere;
        view.members.iter().filter(ours).count()
    };
    let missing = desired.size.saturating_sub(there);
    let count = if rules.several_learners {
        missing
    } else {
        missing.min(1)
    };
    let names = reserved.get(..count).unwrap_or(reserved);
    // The Services of all new members must exist first, so that one plan adds all members.
    if names.is_empty() || names.len() < count {
        return false;
    }
    // The addition waits, because etcd rejects an addition while any voter is not connected.
    if let Some(member) = view.voters().find(|member| !member.is_healthy()) {
        let text = format!("the operator adds a member when {} is healthy", member.name);
        draft.wait(Reason::VoterNotHealthy, text, BLIND);
        return true;
    }
    if wait_for_connections(view, draft) {
        return true;
    }
    // etcd rejects new members during a downgrade (`allowedVersionRange` in `cluster_util.go`).
    if versions::enabled_downgrade(draft.build.observed).is_some() {
        let said = "cancel the downgrade of etcd, because it rejects new members".to_owned();
        return decide(view, vec![actions::downgrade(None)], None, said, draft);
    }
    let joining = |member: &&MemberState| {
        !member.joined()
            && member
                .pod
                .is_some_and(|pod| pod.trouble.is_none() && pod.restarts == 0)
    };
    if let Some(member) = view.members.iter().find(joining) {
        let text = format!("the operator adds a member when {} has joined", member.name);
        draft.wait(Reason::MemberJoining, text, SHORTLY);
        return true;
    }
    if !rules.several_learners && view.learners().next().is_some() {
        let text = "etcd before 3.6 accepts one learner at a time";
        draft.wait(Reason::OneLearnerAtATime, text, SHORTLY);
        return true;
    }
    let additions = names
        .iter()
        .map(|name| draft.build.add_member(name, rules.learners))
        .collect();
    let text = names.join(", ");
    let how = if rules.learners {
        ""
    } else {
        " with a vote, because etcd before 3.4 has no learners: the voter counts for the quorum even before it runs"
    };
    decide(view, additions, None, format!("add {text}{how}"), draft)
}
