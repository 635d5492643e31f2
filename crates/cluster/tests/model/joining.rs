//! Members that follow the leader and do not serve clients yet: etcd answers only on its health listener.
//!
//! This file also contains the deliberate mistakes about members that do not serve clients yet. The checks in this
//! file, or the checks of promotions in `plans.rs`, must detect each mistake.

use std::collections::BTreeSet;

use crate::writes::{Change, Write};
use cluster::plan::Label;
use cluster::plan::{Fate, MemberState, Quorum, View};
use cluster::snapshot::{Observed, Role, Seen};
use etcd::{MemberId, Pulse};

use crate::etcd_model::Cluster;
use crate::event::{Dice, Event, Setup, draw};
use crate::invariants::{demand, is_lost};
use crate::mutation::Mutation;
use crate::others::is_elsewhere;
use crate::story::{find, play_drawn};
use crate::world::{World, WorldPod, tell};
use crate::writes::Plan;

/// For how many ticks a joining member does not serve clients. The UID of its pod selects a value. etcd waits up to 7 s
/// for the log entry with its own client URLs, which is two or three ticks. A larger number means that the client
/// listener is slow or broken.
const SILENT: [u64; 8] = [0, 2, 3, 6, 3, 0, 15, 2];

/// The time from which the etcd of a pod that starts now serves clients. `silent`: true if joining members do not serve
/// at once.
pub(crate) fn serves_from(pod: &WorldPod, silent: bool, now: u64) -> u64 {
    let joins = silent && pod.start.state == cluster::plan::State::Join;
    let at = usize::try_from(pod.uid).unwrap() % SILENT.len();
    now + if joins { SILENT[at] } else { 0 }
}

impl World {
    /// True if the member's client listener answers.
    pub(crate) fn serves_clients(&self, name: &str) -> bool {
        let pod = self.pods.get(name);
        pod.is_some_and(|pod| self.now >= pod.serves_from)
    }

    /// Reads the health listeners of learners and of members that are drained from the client Service.
    pub(crate) fn ask_health(&self, token: &str, observed: &mut Observed) {
        let joins = |name: &String| {
            let role = observed.pods[name].role;
            matches!(role, Some(Role::Learner | Role::Busy { .. }))
        };
        let asked = observed.statuses.keys().filter(|name| joins(name));
        let pulses = asked.filter_map(|name| Some((name.clone(), self.pulse(token, name)?)));
        observed.pulses = pulses.collect();
    }

    /// True if the operators reach the member. They use the address of its pod, so the member needs no endpoints.
    pub(crate) fn is_heard(&self, name: &str) -> bool {
        let faults = &self.faults;
        let heard = !faults.deaf && !faults.operator_secret && !faults.hidden.contains(name);
        heard && self.group_it_dials(name) == 0
    }

    fn pulse(&self, token: &str, name: &str) -> Option<Pulse> {
        let cluster = self.clusters.get(token)?;
        let data = self.data(name).filter(|_| self.is_heard(name))?;
        let process = cluster.running.get(&data.member);
        let process = process.filter(|process| process.name == name)?;
        let learner = cluster.configs[data.config].get(&data.member);
        // Without a connection, a learner reports its last known leader, because it never becomes a candidate.
        let once = learner.is_some_and(|member| member.learner) && data.last.index > 0;
        let others = cluster.running.iter();
        let others = others.filter(|(id, one)| **id != data.member && one.group == process.group);
        Some(Pulse {
            member_id: MemberId(data.member),
            has_leader: once || cluster.leader(process.group).is_some(),
            raft_applied_index: data.last.index,
            peers: others.map(|(id, _)| MemberId(*id)).collect(),
        })
    }

    /// Applies a fault to the newest member that runs and does not serve clients yet.
    pub(crate) fn strike_joining(&mut self, how: u8) {
        let waits = |(_, pod): &(&String, &WorldPod)| pod.running && self.now < pod.serves_from;
        let newest = self.pods.iter().filter(waits);
        let Some((name, node)) = newest
            .max_by_key(|(_, pod)| pod.uid)
            .map(|(name, pod)| (name.clone(), pod.node))
        else {
            return;
        };
        tell!(self, "a fault hits {name} before it serves clients");
        match (how % 9, node) {
            (0, Some(node)) => self.node_off(node),
            (1, _) => {
                if let Some(data) = self.data_mut(&name) {
                    data.corrupt = true;
                }
            }
            (2, _) => {
                self.disks.remove(&name);
                self.lose_pod(&name);
            }
            (3 | 4, _) => drop(self.faults.lagging.insert(name)),
            (5, _) => drop(self.services.remove(&name)),
            (6 | 7, _) => {
                let voters = self.recorded().into_iter().flat_map(Cluster::voters);
                let mut others = voters.map(|(_, one)| one.name.clone());
                let other = others.find(|other| *other != name && !is_elsewhere(other));
                drop(others);
                if let Some(other) = other {
                    self.disks.remove(&other);
                    self.lose_pod(&other);
                }
            }
            _ => self.lose_pod(&name),
        }
    }

    // ---- checks of invariant 24 ----

    /// Checks that a membership change relies only on members that serve clients. Promotions are exempt.
    pub(crate) fn judge_joining(&mut self, change: &Change, cluster: &Cluster) {
        let serves = |name: &String| self.serves_clients(name);
        if let Some(name) = change.via.iter().find(|name| !serves(name)).cloned() {
            demand!(
                self,
                false,
                "invariant 24: a change is requested from {name}, which does not serve yet"
            );
        }
        for write in &change.chain {
            match write {
                Write::MoveLeader { to, .. } => {
                    let serves = self.serves_clients(to);
                    demand!(
                        self,
                        serves,
                        "invariant 24: leadership is transferred to {to}, which does not serve yet"
                    );
                }
                Write::Remove { id, member } => {
                    let left = || cluster.voters().filter(|(other, _)| **other != id.0);
                    let counts = |(other, one): &(&u64, &crate::etcd_model::Member)| {
                        cluster.is_up(**other)
                            && self.serves_clients(&one.name)
                            && !is_lost(self, &one.name)
                    };
                    let had_a_vote = cluster.members().get(&id.0).is_some_and(|one| !one.learner);
                    let (serve, voters) = (left().filter(counts).count(), left().count());
                    demand!(
                        self,
                        !had_a_vote || serve > voters / 2,
                        "invariant 24: {member} is removed, and only {serve} of the remaining {voters} voters serve"
                    );
                }
                _ => {}
            }
        }
    }

    /// Checks that a voter becomes an endpoint of the client Service only after it serves clients.
    pub(crate) fn judge_let_in(&mut self, label: &Label) {
        let Some(pod) = self.pods.get(&label.member) else {
            return;
        };
        let (name, was) = (&label.member, pod.role);
        let comes = label.role == Some(Role::Voter) && was != Role::Voter && pod.running;
        // While no other member serves clients, a member may become an endpoint before it serves clients, because it
        // takes no client from a serving member.
        let voters = self.recorded().into_iter().flat_map(|cluster| {
            let up = cluster.voters().filter(|(id, _)| cluster.is_up(**id));
            up.map(|(_, member)| &member.name)
        });
        let other = { voters }.any(|other| {
            other != name
                && !is_elsewhere(other)
                && self.serves_clients(other)
                && self.operator_reaches(other)
                && self.pods.get(other).is_some_and(|pod| {
                    pod.shown.ready && pod.ends_in.is_none() && pod.role == Role::Voter
                })
        });
        let early = comes && other && !self.serves_clients(name);
        demand!(
            self,
            !early || !self.memory.fresh || self.memory.second,
            "invariant 24: {name} becomes an endpoint of the client Service before it serves"
        );
    }
}

impl Mutation {
    /// Deliberate mistakes: the operator misreads the health reports of members that do not serve clients.
    pub(crate) fn misreads_a_pulse(self, observed: &mut Observed) {
        let Seen::Known(list) = &observed.members else {
            return;
        };
        let everybody: BTreeSet<MemberId> = list.members.iter().map(|one| one.id).collect();
        let silent = |name: &String| matches!(observed.statuses.get(name), Some(Seen::Unknown(_)));
        let learners = list.members.iter().filter(|member| member.is_learner);
        let learners: Vec<(String, MemberId)> = learners
            .filter_map(|member| Some((named(&member.peer_urls)?, member.id)))
            .filter(|(name, _)| silent(name))
            .collect();
        let answers = observed.statuses.values().find_map(Seen::known);
        let newest = answers.map_or(0, |status| status.raft_applied_index);
        let pulse = |member_id, raft_applied_index| Pulse {
            member_id,
            has_leader: true,
            raft_applied_index,
            peers: everybody.clone(),
        };
        match self {
            Self::PromotesByThePast => {
                for (name, id) in learners {
                    if observed.pods.get(&name).is_some_and(|pod| pod.running) {
                        observed.pulses.entry(name).or_insert(pulse(id, u64::MAX));
                    }
                }
            }
            Self::PromotesBehind => {
                for pulse in observed.pulses.values_mut() {
                    pulse.raft_applied_index = u64::MAX;
                }
            }
            Self::PromotesTheCutOff => {
                for pulse in observed.pulses.values_mut() {
                    pulse.peers.clone_from(&everybody);
                }
            }
            Self::TakesAnothersPulse => {
                for (name, id) in learners {
                    observed.pulses.insert(name, pulse(id, newest));
                }
            }
            _ => {}
        }
    }

    /// Deliberate mistakes: plans that rely on members that do not serve yet.
    pub(crate) fn counts_on_joining(self, view: &View, planned: &mut Plan) {
        let joining = || view.voters().filter(|member| member.is_joining());
        let counts = |member: &MemberState| member.is_healthy() || member.is_joining();
        let write = match (self, joining().next()) {
            (Self::AsksJoining, Some(member)) => {
                if let Some(change) = &mut planned.step.change {
                    change.via.insert(0, member.name.clone());
                }
                return;
            }
            (Self::LeadsByJoining, Some(member)) => {
                let leader = view
                    .voters()
                    .find(|member| Some(member.id()) == view.leader);
                leader.map(|from| Write::MoveLeader {
                    from: from.name.clone(),
                    to: member.name.clone(),
                    id: member.id(),
                })
            }
            (Self::RemovesByJoining, Some(_)) => {
                let lost = |member: &&MemberState| matches!(member.fate, Fate::Lost(_));
                let quorum = Quorum::new(view.voters().map(|member| (member.id(), counts(member))));
                let lost = view.voters().find(lost);
                let lost = lost.filter(|member| quorum.unsafe_without(member.id()).is_none());
                lost.map(|member| Write::Remove {
                    member: member.name.clone(),
                    id: member.id(),
                })
            }
            _ => None,
        };
        if let Some(write) = write {
            planned.step.change = Some(Change {
                chain: vec![write],
                via: view.via(None),
                planned_from: view.list.clone(),
            });
        }
    }

    /// A deliberate mistake: a new voter gets its label as if it served clients.
    pub(crate) fn lets_joining_in(self, world: &World, label: &mut Label) {
        let was = world.pods.get(&label.member).map(|pod| pod.role);
        if self == Self::LetsJoiningIn && was == Some(Role::Learner) {
            label.role = label.role.map(|role| match role {
                Role::Busy { .. } => Role::Voter,
                role => role,
            });
        }
    }
}

fn named(urls: &[String]) -> Option<String> {
    { urls }
        .iter()
        .find_map(|url| api::names::member_of_url(url))
        .map(str::to_owned)
}

/// Generates a run from the seed: first an ordinary run; then the cluster grows and shrinks while faults affect joining
/// members.
fn drawn(seed: u64, two: bool) -> (Setup, Vec<Event>) {
    let (mut setup, mut events) = draw(seed, two);
    setup.silent = true;
    let mut dice = Dice::new(seed ^ 0x7_0141);
    events.truncate(usize::from(dice.small(20)));
    let pass = |times: u8| [Event::Round, Event::Tick].repeat(usize::from(times));
    events.push(Event::Heal);
    for _ in 0..=dice.small(3) {
        events.push(Event::Resize(1 + usize::from(dice.small(3))));
        events.extend(pass(4 + dice.small(12)));
        events.push(Event::Resize(2 + usize::from(dice.small(4))));
        for _ in 0..4 + dice.small(24) {
            let event = match dice.small(12) {
                0..5 => Event::Round,
                5..8 => Event::Tick,
                8 | 9 if two => Event::SecondLooks,
                10 if two => Event::SecondWrites(dice.byte()),
                8 => strike(&mut dice),
                _ => {
                    events.push(Event::StrikeJoining(dice.byte()));
                    Event::Tick
                }
            };
            events.push(event);
        }
        if dice.small(3) > 0 {
            events.push(Event::Heal);
        }
    }
    (setup, events)
}

fn strike(dice: &mut Dice) -> Event {
    match dice.small(8) {
        0 => Event::Crash {
            after: dice.small(6),
        },
        1 => Event::LoseReply {
            after: dice.small(6),
        },
        2 => Event::LosePod(dice.byte()),
        3 => Event::DeletePod(dice.byte()),
        4 => Event::MoveLeader(dice.byte()),
        5 => Event::Lag(dice.byte()),
        6 => Event::Hide(dice.byte()),
        _ => Event::LookSlowly {
            ticks: 1 + dice.small(2),
        },
    }
}

/// Number of rounds of the test with one operator. The test with two operators has half as many.
const ROUNDS: usize = 30_000;

#[test]
fn invariant_24_holds_despite_faults_of_joining_members() {
    play_drawn(|seed| drawn(seed, false), ROUNDS);
}

/// Invariants 11 and 24: a second operator process, which may be suspended at any time, manages the same cluster.
#[test]
fn concurrent_operators_with_joining_members_keep_invariants() {
    play_drawn(|seed| drawn(seed, true), ROUNDS / 2);
}

#[test]
fn model_detects_every_mistake_about_joining_members() {
    let mistakes = [
        Mutation::PromotesByThePast,
        Mutation::PromotesBehind,
        Mutation::PromotesTheCutOff,
        Mutation::TakesAnothersPulse,
        Mutation::AsksJoining,
        Mutation::LeadsByJoining,
        Mutation::RemovesByJoining,
        Mutation::LetsJoiningIn,
    ];
    find(&mistakes, |seed| drawn(seed, false), ROUNDS);
}
