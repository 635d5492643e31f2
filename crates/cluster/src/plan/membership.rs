//! The members of a formed cluster: dead ones out, pods back on their disks, and whose turn it is.
//!
//! At most one change a plan (invariant 2); each asks the quorum guard (invariant 3).

use etcd::ClusterId;
use jiff::Timestamp;

use crate::observed::{Desired, Intent, Observed, Role};
use crate::plan::size::{grow, promote, reserve, shrink};
use crate::plan::view::{Data, Health, Seat, VersionRules, View};
use crate::plan::{BLIND, Draft, SHORTLY, STEADY, objects};
use crate::write::{Change, Order, Start, State, Write};

/// The version new pods of a formed cluster get: the one it runs. Another `spec.version` is an upgrade.
pub(crate) fn current_version(desired: &Desired, observed: &Observed) -> String {
    let pods = observed.pods.values().filter_map(|pod| pod.version.clone());
    let disks = observed
        .disks
        .values()
        .filter_map(|disk| disk.version.clone());
    let lowest = |versions: &mut dyn Iterator<Item = String>| {
        versions
            .filter_map(|text| semver::Version::parse(text.trim_start_matches('v')).ok())
            .min()
            .map(|version| version.to_string())
    };
    let reported = observed
        .reported_version
        .clone()
        .filter(|version| !version.is_empty());
    let spec = || desired.version.trim_start_matches('v').to_owned();
    lowest(&mut { pods })
        .or_else(|| lowest(&mut { disks }))
        .or(reported)
        .unwrap_or_else(spec)
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
        .filter_map(|write| {
            if let Write::Remove { member, .. } = write {
                Some(member.clone())
            } else {
                None
            }
        })
        .collect();
    for seat in view
        .seats
        .iter()
        .filter(|seat| seat.pod.is_none() && !removed.contains(&seat.name))
    {
        let disk = seat.disk.filter(|disk| !disk.terminating);
        let start = Start {
            member: seat.name.clone(),
            state: if seat.joined() {
                State::OnDisk
            } else {
                State::Join
            },
            initial: view.names(),
            role: if seat.votes() {
                Role::Voter
            } else {
                Role::Learner
            },
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
pub(super) fn change(
    (desired, observed, now): (&Desired, &Observed, Timestamp),
    view: &View,
    draft: &mut Draft,
) {
    let rules = VersionRules::new(observed, &current_version(desired, observed));
    let reserved = reserve(desired, observed, view, rules, draft);
    renew(view, draft);
    let _decided = settle_learners(view, draft)
        || remove_the_dead(view, draft)
        || shrink((desired, observed, now), view, draft)
        || promote((desired, observed, now), view, draft)
        || grow((desired, now), view, rules, &reserved, draft);
    for seat in view.seats.iter().filter(|seat| seat.votes()) {
        if let (Health::Unhealthy(why), Data::There | Data::Elsewhere) = (&seat.health, seat.data) {
            let look_again = if seat.pod.is_some_and(|pod| pod.running) {
                BLIND
            } else {
                STEADY
            };
            draft.wait(
                "MemberUnhealthy",
                format!("{}: {why}", seat.name),
                look_again,
            );
        }
    }
}

pub(super) fn decide(
    view: &View,
    writes: Vec<Write>,
    without: Option<&Seat>,
    said: String,
    draft: &mut Draft,
) -> bool {
    let via = view.via(without.map(Seat::id));
    draft.say(said);
    draft.change = Some(Change {
        writes,
        via,
        planned_from: view.list.clone(),
    });
    true
}

pub(super) fn remove(view: &View, seat: &Seat, why: &str, draft: &mut Draft) -> bool {
    let write = Write::Remove {
        member: seat.name.clone(),
        id: seat.id(),
    };
    decide(
        view,
        vec![write],
        Some(seat),
        format!("remove {} ({why})", seat.name),
        draft,
    )
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
    for seat in view
        .seats
        .iter()
        .filter(|seat| seat.disk.is_some() && seat.cannot_join(&names))
    {
        if let Some(pod) = seat.pod.filter(|pod| pod.durable && pod.stays()) {
            draft.say(format!(
                "make the pod of {} again for the current list of members",
                seat.name
            ));
            let write = Write::DeletePod {
                member: seat.name.clone(),
                uid: pod.uid.clone(),
            };
            draft.order(Order::Writes(vec![write]));
        }
    }
}

/// Invariant 5: a voter whose disk is gone is removed before its replacement is added.
fn remove_the_dead(view: &View, draft: &mut Draft) -> bool {
    let Some(dead) = view.voters().find(|seat| seat.data == Data::Gone) else {
        return false;
    };
    // Invariant 3.
    if let Some(risk) = view.quorum().unsafe_without(dead.id()) {
        draft.wait(
            "QuorumAtRisk",
            format!("{} lost its disk and is not removed: {risk}", dead.name),
            SHORTLY,
        );
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
    let write = Write::MoveLeader {
        from: from.name.clone(),
        to: to.name.clone(),
        id: to.id(),
    };
    let said = format!("hand leadership from {} to {}", from.name, to.name);
    decide(view, vec![write], None, said, draft)
}
