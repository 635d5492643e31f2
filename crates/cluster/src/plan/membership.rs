//! The members of a formed cluster: removes dead members, recreates pods on their volumes, and chooses the next change
//! of the members.
//!
//! A plan has at most one change (invariant 2), and each change of the voters needs the consent of the quorum guard
//! (invariant 3).

use etcd::ClusterId;
use jiff::Timestamp;

use crate::clock::age;
use crate::plan::actions::{self, Builder};
use crate::plan::change::{remove, remove_voter};
use crate::plan::conflicts::Earlier;
use crate::plan::quorum::quorum_of;
use crate::plan::size::{
    comes_first, grow, promote, reserve, shrink, wait_for_connections, wait_for_voters,
};
use crate::plan::versions::{self, VersionRules, current_version};
use crate::plan::view::{Data, Fate, Health, MemberState, View};
use crate::plan::{
    BLIND, Draft, NewNames, SHORTLY, SOON, STEADY, Start, State, member_objects, roll,
};
use crate::reason::Reason;
use crate::snapshot::{Intent, Role};

/// Creates the pods of members that have none: on the existing volume, or for the first time.
pub(super) fn start<'a>(
    build: Builder<'a>,
    view: &View,
    (intent, cluster_id): (&Intent, ClusterId),
    earlier: &Earlier,
) -> Draft<'a> {
    let (desired, observed, _) = build.inputs();
    let mut draft = Draft::new(build);
    // While the plan adds members (`earlier.adds`), the pods of new members wait: each addition changes etcd's member
    // list, with which a joining member compares `--initial-cluster`.
    for member in view
        .members
        .iter()
        .filter(|member| member.pod.is_none() && !earlier.removed.contains(&member.name))
    {
        let disk = member.disk.filter(|disk| disk.stays());
        let start = Start {
            member: member.name.clone(),
            state: if member.joined() {
                State::OnDisk
            } else {
                State::Join
            },
            initial: view.names(),
            role: if member.votes() {
                Role::Voter
            } else {
                Role::Learner
            },
            durable: disk.is_some() || desired.durable,
            version: if member.data == Data::There {
                versions::noted(desired, observed, member.disk)
            } else {
                versions::joining(desired, observed, view)
            },
            token: intent.token.clone(),
            cluster_id: Some(cluster_id),
        };
        match (member.data, member.service, disk) {
            (Data::There, _, Some(_)) => {
                // Invariant 5: the volume of the member exists, so the member gets a new pod on this volume and stays
                // in etcd's member list.
                draft.say(format!("restart {} on its volume", member.name));
                member_objects::pod_on_disk(member.service, &start, &mut draft);
            }
            (Data::NeverMade, Some(service), None) if !earlier.adds => {
                draft.say(format!("start new member {}", member.name));
                let mark = actions::mark_service(&member.name, service);
                member_objects::start([mark], &start, &mut draft);
            }
            _ => {}
        }
    }
    draft
}

/// Requests the next addition, promotion or removal of a member, or reports why this request waits.
pub(super) fn change<'a>(build: Builder<'a>, view: &View, names: &mut NewNames) -> Draft<'a> {
    let (desired, observed, now) = build.inputs();
    let mut part = Draft::new(build);
    let draft = &mut part;
    let rules = VersionRules::new(observed, &current_version(desired, observed));
    let reserved = reserve(view, rules, names, draft);
    renew(view, draft);
    let decided = settle_learners(view, draft)
        || remove_the_dead(view, draft)
        || shrink(view, draft)
        || replace(view, draft)
        || promote(view, draft)
        || grow(view, rules, &reserved, draft);
    roll::next(view, decided, draft);
    foreigners(view, draft);
    joining_with_a_vote(view, rules, draft);
    for member in view.members.iter().filter(|member| member.votes()) {
        if let (Health::Unhealthy(why), Fate::Stays) = (&member.health, &member.fate) {
            unhealthy(member, why, observed.clock.earlier(now), draft);
        }
    }
    part
}

/// Reports a voter that does not serve, but is not being replaced and does not count as lost.
fn unhealthy(member: &MemberState, why: &str, now: Timestamp, draft: &mut Draft) {
    if let Some(at) = member.gone_at {
        let text = format!(
            "{}: {why}; the operator replaces this member if this lasts until {at}",
            member.name
        );
        let left = age(now, at);
        // The cluster is requeued for `at`, the time from which the member counts as lost.
        draft.wait(Reason::MemberUnhealthy, text, left.max(SOON));
        return;
    }
    if member.is_joining() {
        let text = format!("{} is a voter and does not serve clients yet", member.name);
        draft.wait(Reason::VoterStarting, text, SHORTLY);
        return;
    }
    let runs = member.pod.is_some_and(|pod| pod.running);
    let delay = if runs { BLIND } else { STEADY };
    let text = format!("{}: {why}", member.name);
    draft.wait(Reason::MemberUnhealthy, text, delay);
}

/// Reports members that other software added and that never started. The operator does not remove them, because a
/// person may still need them.
fn foreigners(view: &View, draft: &mut Draft) {
    let unstarted = |member: &&MemberState| member.data == Data::Elsewhere && !member.joined();
    for member in view.members.iter().filter(unstarted) {
        let (id, urls) = (member.id(), member.listed.peer_urls.join(", "));
        let counts = if member.votes() {
            ". It is a voter, so the quorum depends on it, and no member can be added before it runs"
        } else {
            ""
        };
        let text = format!(
            "member {id} ({urls}) was not added by the operator and has never started{counts}: start it, or remove \
             it with: etcdctl member remove {id}"
        );
        draft.problem(Reason::ForeignMember, text);
    }
}

/// Before etcd 3.4, reports voters that have not joined yet. A new member is a voter at once, so the quorum depends on
/// it before it runs.
fn joining_with_a_vote(view: &View, rules: VersionRules, draft: &mut Draft) {
    let joins = |member: &&MemberState| !member.joined() && member.fate == Fate::Stays;
    if rules.learners {
        return;
    }
    for member in view.voters().filter(joins) {
        let (serving, voters) = (view.quorum().healthy(), view.quorum().voters());
        let text = format!(
            "{} joins with a vote, because etcd before 3.4 has no learners: until it runs, {serving} of {voters} voters serve, and a quorum needs {}; the loss of another voter may stop the cluster",
            member.name,
            quorum_of(voters)
        );
        draft.problem(Reason::JoinsWithVote, text);
    }
}

/// Removes a learner that is lost or must be replaced. Learners have no vote, so the quorum guard is not needed.
fn settle_learners(view: &View, draft: &mut Draft) -> bool {
    let lost = view.learners().find(|member| member.fate != Fate::Stays);
    lost.is_some_and(|member| remove(view, member, member.why(), draft))
}

/// Recreates a pod on its volume if etcd exited because the pod's `--initial-cluster` is outdated. A member without a
/// volume counts as lost in this case.
fn renew(view: &View, draft: &mut Draft) {
    let names = view.names();
    for member in view
        .members
        .iter()
        .filter(|member| member.disk.is_some() && member.cannot_join(&names))
    {
        if let Some(pod) = member.pod.filter(|pod| pod.durable && pod.stays()) {
            draft.say(format!(
                "recreate the pod of {} with the current member list",
                member.name
            ));
            draft.add(actions::delete_pod(&member.name, &pod.uid));
        }
    }
}

/// Invariant 5: a voter whose volume is lost, unreachable or unreadable is removed before its replacement is added.
fn remove_the_dead(view: &View, draft: &mut Draft) -> bool {
    let Some(dead) = view.voters().find(|member| member.is_lost()) else {
        return false;
    };
    // Invariant 3: the operator removes a dead member only if a quorum of the remaining voters is healthy.
    if let Some(risk) = view.quorum().unsafe_without(dead.id()) {
        let text = format!(
            "{} must be removed ({}), but the operator waits: after the removal, only {risk}",
            dead.name,
            dead.why()
        );
        draft.wait(Reason::QuorumAtRisk, text, SHORTLY);
        return true;
    }
    remove_voter(view, dead, dead.why(), draft)
}

/// Removes a serving voter that must be replaced, if the other voters form a quorum without it. If `comes_first` is
/// true, this function does nothing: `grow` adds the replacement, and then `shrink` removes the old member.
fn replace(view: &View, draft: &mut Draft) -> bool {
    let desired = draft.build.desired;
    let Some(old) = view.voters().find(|member| member.leaves()) else {
        return false;
    };
    // Members are replaced one at a time: a replacement must be a voter before the operator replaces the next member.
    let complete = view.members.len() >= desired.size && view.learners().next().is_none();
    if comes_first(desired, view) || !complete {
        return false;
    }
    // Invariant 3: the operator replaces a member only if a quorum of the remaining voters is healthy.
    if let Some(risk) = view.quorum().unsafe_without(old.id()) {
        let text = format!(
            "{} must be replaced ({}), but the operator waits: after its removal, only {risk}",
            old.name,
            old.why()
        );
        draft.wait(Reason::QuorumAtRisk, text, SHORTLY);
        return true;
    }
    // Invariant 2: the set of voters changes only while all voters are healthy and connected.
    let what = format!("{} is replaced", old.name);
    if wait_for_voters(view, &what, draft) || wait_for_connections(view, draft) {
        return true;
    }
    remove_voter(view, old, old.why(), draft)
}
