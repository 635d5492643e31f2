//! The members of a formed cluster: dead ones out, pods back on their disks, learners in, voters promoted.
//!
//! At most one change a plan (invariant 2); each asks the quorum guard (invariant 3). What etcd's own
//! `mayAddMember`, `mayRemoveMember` and `mayPromoteMember` would refuse is waited for instead.

use etcd::ClusterId;
use jiff::Timestamp;

use crate::observed::{Desired, Intent, Observed, Pod, Role};
use crate::plan::quorum::quorum_of;
use crate::plan::view::{self, Data, Health, Seat, VersionRules, View};
use crate::plan::{BLIND, CONNECTED, Draft, SHORTLY, SOON, STEADY, objects};
use crate::write::{Change, Label, Order, Start, State, Write};

/// No trustworthy member list: nothing is removed, added or deleted (invariant 1). Pods go back on disks,
/// because a quorum of disks is a cluster (invariant 8).
pub(super) fn blind(
    (desired, observed, now): (&Desired, &Observed, Timestamp),
    intent: &Intent,
    cluster_id: ClusterId,
    why: &str,
    draft: &mut Draft,
) {
    own(observed, intent, cluster_id, draft);
    let initial: std::collections::BTreeSet<String> =
        observed.pods.keys().chain(observed.disks.keys()).cloned().collect();
    for name in &initial {
        let (pod, disk) = (observed.pods.get(name), observed.disks.get(name));
        let kept = disk.is_some_and(|disk| !disk.terminating);
        if kept || pod.is_some_and(Pod::stays) {
            objects::serve(name, observed.services.get(name), draft);
        }
        if kept && pod.is_none() {
            let start = Start {
                member: name.clone(),
                state: State::OnDisk,
                initial: initial.clone(),
                role: Role::Voter,
                durable: true,
                version: current_version(desired, observed),
                token: intent.token.clone(),
                cluster_id: Some(cluster_id),
            };
            draft.say(format!("start {name} again on its disk"));
            draft.order(objects::pod_on_disk(observed.services.get(name), start));
        }
    }
    objects::troubles(observed, &initial, now, draft);
    outlook(observed, why, draft);
}

/// Whether there is a way back without the user.
fn outlook(observed: &Observed, why: &str, draft: &mut Draft) {
    let keeps = |name: &&String| {
        let (pod, disk) = (observed.pods.get(*name), observed.disks.get(*name));
        view::data(pod, disk, observed.services.get(*name), true) == Data::There
    };
    let voters = &observed.reported_voters;
    let left: Vec<&str> = voters.iter().filter(keeps).map(String::as_str).collect();
    let needed = quorum_of(voters.len());
    if voters.is_empty() || left.len() >= needed {
        let soon = observed.pods.values().any(|pod| pod.running && !pod.terminating);
        let look_again = if soon { SHORTLY } else { BLIND };
        draft.wait("NoQuorum", format!("no quorum of the members answers ({why}); nothing is changed until it does"), look_again);
        return;
    }
    let names = if left.is_empty() { "none".to_owned() } else { left.join(", ") };
    let (left, all) = (left.len(), voters.len());
    draft.problem(
        "QuorumLost",
        format!(
            "the data of {left} of {all} voters is left ({names}) and a quorum needs {needed}: the cluster cannot \
             come back by itself; restore it from a backup with an EtcdRestore"
        ),
    );
}

/// Children that were left behind by a deleted object and carry this cluster's token become ours.
fn own(observed: &Observed, intent: &Intent, cluster_id: ClusterId, draft: &mut Draft) {
    let label = |name: &str, uid: &str| Label {
        member: name.to_owned(),
        uid: uid.to_owned(),
        role: None,
        token: intent.token.clone(),
        cluster_id: Some(cluster_id),
    };
    for (name, disk) in observed.disks.iter().filter(|(_, disk)| !disk.owned) {
        draft.order(Order::Writes(vec![Write::LabelDisk(label(name, &disk.uid))]));
    }
    for (name, pod) in observed.pods.iter().filter(|(_, pod)| !pod.owned) {
        draft.order(Order::Writes(vec![Write::LabelPod(label(name, &pod.uid))]));
    }
}

/// The version new pods of a formed cluster get: the one it runs. Another `spec.version` is an upgrade.
pub(crate) fn current_version(desired: &Desired, observed: &Observed) -> String {
    let pods = observed.pods.values().filter_map(|pod| pod.version.clone());
    let disks = observed.disks.values().filter_map(|disk| disk.version.clone());
    let lowest = |versions: &mut dyn Iterator<Item = String>| {
        versions
            .filter_map(|text| semver::Version::parse(text.trim_start_matches('v')).ok())
            .min()
            .map(|version| version.to_string())
    };
    let reported = observed.reported_version.clone().filter(|version| !version.is_empty());
    let spec = || desired.version.trim_start_matches('v').to_owned();
    lowest(&mut { pods }).or_else(|| lowest(&mut { disks })).or(reported).unwrap_or_else(spec)
}

/// Pods for members that have none: back on their disk, or for the first time.
pub(super) fn start(
    desired: &Desired,
    observed: &Observed,
    view: &View,
    intent: &Intent,
    cluster_id: ClusterId,
    draft: &mut Draft,
) {
    // A member compares `--initial-cluster` with the list when it joins: all additions come before the pods.
    let adding = changes(draft).any(|write| matches!(write, Write::AddMember { .. }));
    let removed: Vec<String> = changes(draft)
        .filter_map(|write| if let Write::Remove { member, .. } = write { Some(member.clone()) } else { None })
        .collect();
    for seat in view.seats.iter().filter(|seat| seat.pod.is_none() && !removed.contains(&seat.name)) {
        let disk = seat.disk.filter(|disk| !disk.terminating);
        let start = Start {
            member: seat.name.clone(),
            state: if seat.joined() { State::OnDisk } else { State::Join },
            initial: view.names(),
            role: if seat.votes() { Role::Voter } else { Role::Learner },
            durable: disk.is_some() || desired.durable,
            version: current_version(desired, observed),
            token: intent.token.clone(),
            cluster_id: Some(cluster_id),
        };
        match (seat.data, seat.service, disk) {
            (Data::There, _, Some(_)) => {
                // Invariant 5: the disk is there, so the member gets its pod back and its membership stays.
                draft.say(format!("start {} again on its disk", seat.name));
                draft.order(objects::pod_on_disk(seat.service, start));
            }
            (Data::NeverMade, Some(service), None) if !adding => {
                let mut writes = vec![objects::mark(&seat.name, service)];
                writes.extend(objects::disk_and_pod(start));
                draft.say(format!("start new member {}", seat.name));
                draft.order(Order::Writes(writes));
            }
            _ => {}
        }
    }
}

fn changes(draft: &Draft) -> impl Iterator<Item = &Write> {
    draft.change.iter().flat_map(|change| &change.writes)
}

/// The next change of the members, or what it waits for.
pub(super) fn change((desired, observed, now): (&Desired, &Observed, Timestamp), view: &View, draft: &mut Draft) {
    let rules = VersionRules::new(observed, &current_version(desired, observed));
    let reserved = reserve(desired, observed, view, rules, draft);
    renew(view, draft);
    let _decided = settle_learners(view, draft)
        || remove_the_dead(view, draft)
        || shrink((desired, observed, now), view, draft)
        || promote(desired, observed, view, draft)
        || grow((desired, now), view, rules, &reserved, draft);
    for seat in view.seats.iter().filter(|seat| seat.votes()) {
        if let (Health::Unhealthy(why), Data::There | Data::Elsewhere) = (&seat.health, seat.data) {
            let look_again = if seat.pod.is_some_and(|pod| pod.running) { BLIND } else { STEADY };
            draft.wait("MemberUnhealthy", format!("{}: {why}", seat.name), look_again);
        }
    }
}

fn decide(view: &View, writes: Vec<Write>, without: Option<&Seat>, said: String, draft: &mut Draft) -> bool {
    let via = view.via(without.map(Seat::id));
    draft.say(said);
    draft.change = Some(Change { writes, via, planned_from: view.list.clone() });
    true
}

fn remove(view: &View, seat: &Seat, why: &str, draft: &mut Draft) -> bool {
    let write = Write::Remove { member: seat.name.clone(), id: seat.id() };
    decide(view, vec![write], Some(seat), format!("remove {} ({why})", seat.name), draft)
}

/// Services for members to come, made before the members: a name that is never absent leaves nothing for a
/// DNS cache to get wrong. Already while the dead are being removed, so that nothing waits for it.
fn reserve(desired: &Desired, observed: &Observed, view: &View, rules: VersionRules, draft: &mut Draft) -> Vec<String> {
    let stay = view.seats.iter().filter(|seat| seat.data != Data::Gone).count();
    let at_once = if rules.several_learners { usize::MAX } else { 1 };
    let needed = desired.size.saturating_sub(stay).min(at_once);
    let names = view.names();
    let mut reserved: Vec<String> = observed
        .services
        .keys()
        .filter(|name| !names.contains(*name) && objects::is_reserved(observed, name))
        .cloned()
        .collect();
    for name in reserved.split_off(needed.min(reserved.len())) {
        objects::discard(observed, &name, draft);
    }
    if reserved.len() < needed {
        let count = needed - reserved.len();
        draft.say(format!("make the Services of {count} new members"));
        draft.order(Order::Reserve { count });
    }
    reserved
}

/// Learners that will never catch up: they have no vote, so nothing is asked before they go.
fn settle_learners(view: &View, draft: &mut Draft) -> bool {
    let lost = view.learners().find(|seat| seat.data == Data::Gone);
    lost.is_some_and(|seat| remove(view, seat, "a learner without a disk", draft))
}

/// A pod made for an older list of members, whose etcd has refused it, is made again on its disk. Without a
/// disk of its own the member counts as gone.
fn renew(view: &View, draft: &mut Draft) {
    let names = view.names();
    for seat in view.seats.iter().filter(|seat| seat.disk.is_some() && seat.cannot_join(&names)) {
        if let Some(pod) = seat.pod.filter(|pod| pod.durable && pod.stays()) {
            draft.say(format!("make the pod of {} again for the current list of members", seat.name));
            let write = Write::DeletePod { member: seat.name.clone(), uid: pod.uid.clone() };
            draft.order(Order::Writes(vec![write]));
        }
    }
}

/// Invariant 5: a voter whose disk is gone is removed before its replacement is added.
fn remove_the_dead(view: &View, draft: &mut Draft) -> bool {
    let Some(dead) = view.voters().find(|seat| seat.data == Data::Gone) else { return false };
    // Invariant 3.
    if let Some(risk) = view.quorum().unsafe_without(dead.id()) {
        draft.wait("QuorumAtRisk", format!("{} lost its disk and is not removed: {risk}", dead.name), SHORTLY);
        return true;
    }
    if view.leader == Some(dead.id())
        && let Some(next) = view.voters().find(|seat| seat.is_healthy())
    {
        return move_leader(view, dead, next, draft);
    }
    remove(view, dead, "its disk is gone", draft)
}

fn move_leader(view: &View, from: &Seat, to: &Seat, draft: &mut Draft) -> bool {
    let write = Write::MoveLeader { from: from.name.clone(), to: to.name.clone(), id: to.id() };
    let said = format!("hand leadership from {} to {}", from.name, to.name);
    decide(view, vec![write], None, said, draft)
}

/// More members than wanted: learners first, then unhealthy voters, then the newest, the leader never.
fn shrink((desired, observed, now): (&Desired, &Observed, Timestamp), view: &View, draft: &mut Draft) -> bool {
    if view.seats.len() <= desired.size {
        return false;
    }
    let Some(victim) = victim(view) else {
        draft.wait("NoMemberToRemove", "every member left is the leader or not run by this operator", STEADY);
        return true;
    };
    if victim.votes() {
        // Invariant 3.
        if let Some(risk) = view.quorum().unsafe_without(victim.id()) {
            draft.wait("QuorumAtRisk", format!("{} is not removed: {risk}", victim.name), SHORTLY);
            return true;
        }
        // Invariant 2: what was changed last is healthy before the next change.
        let waits = |draft: &mut Draft| {
            wait_for_voters(observed, view, "the cluster shrinks", draft) || wait_for_connections(view, now, draft)
        };
        if victim.is_healthy() && waits(draft) {
            return true;
        }
    }
    remove(view, victim, "the cluster shrinks", draft)
}

fn victim<'v, 'a>(view: &'v View<'a>) -> Option<&'v Seat<'a>> {
    let may_go = |seat: &&Seat| seat.data != Data::Elsewhere && Some(seat.id()) != view.leader;
    let age = |seat: &Seat| seat.service.map(|service| service.created).or(seat.pod.map(|pod| pod.created));
    let first = |seat: &&Seat| (seat.votes(), seat.is_healthy(), std::cmp::Reverse(age(seat)), seat.id());
    view.seats.iter().filter(may_go).min_by_key(first)
}

/// Whether a change of the voters has to wait for one of them.
fn wait_for_voters(observed: &Observed, view: &View, what: &str, draft: &mut Draft) -> bool {
    let Some(seat) = view.voters().find(|seat| !seat.is_healthy()) else { return false };
    let starts = observed.pods.get(&seat.name).is_some_and(|pod| pod.running);
    let look_again = if starts { SHORTLY } else { STEADY };
    draft.wait("VoterNotHealthy", format!("{what} when {} is healthy", seat.name), look_again);
    true
}

/// What etcd's own rule of five seconds would refuse is waited for.
fn wait_for_connections(view: &View, now: Timestamp, draft: &mut Draft) -> bool {
    let young = |seat: &&Seat| seat.pod.and_then(|pod| pod.running_since).is_some_and(|since| objects::age(since, now) < CONNECTED);
    let Some(seat) = view.voters().find(young) else { return false };
    let text = format!("etcd takes the next change when all voters have been connected for 5 s; {} is new", seat.name);
    draft.wait("VotersConnecting", text, SHORTLY);
    true
}

/// Invariant 4: a learner that has caught up becomes a voter, one after the other (invariant 2).
fn promote(desired: &Desired, observed: &Observed, view: &View, draft: &mut Draft) -> bool {
    let newest = |seat: &&Seat| observed.statuses.get(&seat.name).and_then(|seen| seen.known()).map(|s| s.raft_index);
    let committed = view.voters().filter_map(|seat| newest(&seat)).max().unwrap_or(u64::MAX);
    let mut ready = None;
    for seat in view.learners() {
        let has = observed.statuses.get(&seat.name).and_then(|seen| seen.known()).map(|s| s.raft_applied_index);
        match has {
            // etcd promotes a learner that has nine tenths of the leader's log.
            Some(has) if seat.is_healthy() && has >= committed - committed / 10 => ready = ready.or(Some(seat)),
            Some(has) => {
                let text = format!("{} has applied {has} of {committed} log entries", seat.name);
                draft.wait("LearnerCatchingUp", text, SOON);
            }
            None => {
                let stuck = seat.pod.is_some_and(|pod| pod.trouble.is_some());
                let running = seat.pod.is_some_and(|pod| pod.running);
                let look_again = if running { SOON } else if stuck { STEADY } else { BLIND };
                draft.wait("LearnerStarting", format!("{} is not running yet", seat.name), look_again);
            }
        }
    }
    let Some(seat) = ready.filter(|_| view.voters().count() < desired.size) else { return false };
    if wait_for_voters(observed, view, &format!("{} becomes a voter", seat.name), draft) {
        return false;
    }
    if let Some(risk) = view.quorum().unsafe_with_one_more() {
        draft.wait("QuorumAtRisk", format!("{} is not promoted: {risk}", seat.name), SHORTLY);
        return false;
    }
    let write = Write::Promote { member: seat.name.clone(), id: seat.id() };
    decide(view, vec![write], None, format!("make {} a voter", seat.name), draft)
}

/// Fewer members than wanted. Invariant 4: they join as learners where etcd has them.
fn grow((desired, now): (&Desired, Timestamp), view: &View, rules: VersionRules, reserved: &[String], draft: &mut Draft) -> bool {
    let missing = desired.size.saturating_sub(view.seats.len());
    let count = if rules.several_learners { missing } else { missing.min(1) };
    let names: Vec<&String> = reserved.iter().take(count).collect();
    if names.is_empty() {
        return false;
    }
    if names.len() < count {
        return false; // The other Services are being made; all join together.
    }
    // etcd refuses an addition unless every voter has been connected for 5 s.
    if let Some(seat) = view.voters().find(|seat| !seat.is_healthy()) {
        draft.wait("VoterNotHealthy", format!("a member is added when {} is healthy", seat.name), BLIND);
        return true;
    }
    if wait_for_connections(view, now, draft) {
        return true;
    }
    let joining = |seat: &&Seat| {
        !seat.joined() && seat.pod.is_some_and(|pod| pod.trouble.is_none() && pod.restarts == 0)
    };
    if let Some(seat) = view.seats.iter().find(joining) {
        draft.wait("MemberJoining", format!("a member is added when {} has joined", seat.name), SHORTLY);
        return true;
    }
    if !rules.several_learners && view.learners().next().is_some() {
        draft.wait("OneLearnerAtATime", "etcd before 3.6 takes one learner at a time", SHORTLY);
        return true;
    }
    let writes = names.iter().map(|name| Write::AddMember { member: (*name).clone(), learner: rules.learners }).collect();
    let text = names.iter().map(|name| name.as_str()).collect::<Vec<_>>().join(", ");
    decide(view, writes, None, format!("add {text}"), draft)
}
