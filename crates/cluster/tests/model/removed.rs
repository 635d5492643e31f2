//! Other software or a person removes members from etcd's list: with etcdctl, one after another, or by starting a
//! member with `--force-new-cluster`. The volumes of the removed members are evidence (invariant 25).

use std::collections::BTreeMap;

use cluster::plan::Start;
use cluster::snapshot::{Observed, Removal};

use crate::etcd_model::{Member, Spot};
use crate::event::{Dice, Event, Setup, draw};
use crate::invariants::demand;
use crate::mutation::Mutation;
use crate::story::{find, play_drawn};
use crate::world::{World, tell};

/// A member that something other than the operator removed from etcd. Its volume exists.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Vanished {
    since: u64,
    /// True if a majority of the voters was removed together with this member.
    majority: bool,
}

/// The members that something other than the operator removed from etcd, by name.
pub(crate) type AllVanished = BTreeMap<String, Vanished>;

impl World {
    /// Records which volumes must not be deleted yet. `removed`: the members that were just removed.
    pub(crate) fn note_vanished(&mut self, removed: &[String], voters_left: usize) {
        for name in removed {
            let disk = self.disks.get(name);
            let pending = |removal: Option<Removal>| removal == Some(Removal::ByOperator);
            if disk.is_some_and(|disk| !disk.terminating && !pending(disk.removal)) {
                let (since, majority) = (self.now, false);
                let vanished = Vanished { since, majority };
                self.memory.vanished.insert(name.clone(), vanished);
            }
        }
        let gone = removed
            .iter()
            .filter(|name| self.memory.vanished.contains_key(*name))
            .count();
        if gone > voters_left {
            for name in removed {
                if let Some(vanished) = self.memory.vanished.get_mut(name) {
                    vanished.majority = true;
                }
            }
        }
    }

    /// Forgets volumes that were deleted or lost. Without them, the remaining removed members may be a minority.
    pub(crate) fn forget_deleted_evidence(&mut self) {
        let all = self.memory.vanished.len();
        let disks = &self.disks;
        let is_there = |name: &String| disks.get(name).is_some_and(|disk| !disk.terminating);
        self.memory.vanished.retain(|name, _| is_there(name));
        if self.memory.vanished.len() < all {
            for vanished in self.memory.vanished.values_mut() {
                vanished.majority = false;
            }
        }
    }

    /// Checks invariant 25 before a volume is deleted.
    pub(crate) fn judge_evidence(&mut self, member: &str) {
        let Some(vanished) = self.memory.vanished.get(member).copied() else {
            return;
        };
        if self.memory.writes_to.is_none() {
            // No client has written yet, so the volume may be deleted: until the client Service gets its first
            // endpoint, the operator may abandon a bootstrap and delete its volumes.
            return;
        }
        let listed = self
            .recorded()
            .is_some_and(|all| all.by_name(member).is_some());
        let whole = self.recorded().is_some_and(|all| {
            all.voters().count() >= self.size && all.voters().all(|(id, _)| all.is_up(*id))
        });
        demand!(
            self,
            listed || !vanished.majority,
            "invariant 25: the volume of {member} is deleted, and a majority was removed together with {member}"
        );
        demand!(
            self,
            listed || whole || !self.memory.fresh,
            "invariant 25: the volume of {member}, which other software removed, is deleted before the cluster is complete"
        );
        let over = self.now >= vanished.since + self.setup.patience;
        demand!(
            self,
            listed || over,
            "invariant 25: the volume of {member}, which other software removed, is deleted before the grace period ends"
        );
    }

    /// Checks invariant 25 before a pod is created.
    pub(crate) fn judge_start_on_evidence(&mut self, start: &Start) {
        let disk = self.disks.get(&start.member);
        let noted = disk.and_then(|disk| disk.removal);
        let evidence = matches!(noted, Some(Removal::ByOthers { .. }));
        let listed = self
            .recorded()
            .is_some_and(|all| all.by_name(&start.member).is_some());
        demand!(
            self,
            !evidence || listed || self.memory.second,
            "invariant 25: {} is started after other software removed it",
            start.member
        );
    }

    /// A person starts a member with `--force-new-cluster`. The member continues alone with its data, and the other
    /// members learn from it that they were removed.
    pub(crate) fn force_new_cluster(&mut self, which: u8) {
        let recorded = self.intent.as_ref().filter(|_| self.cluster_id.is_some());
        let Some(token) = recorded.map(|intent| intent.token.clone()) else {
            return;
        };
        let Some(mut cluster) = self.clusters.remove(&token) else {
            return;
        };
        let members = cluster.members().clone();
        let running: Vec<u64> = { members.iter() }
            .filter(|(id, one)| !one.learner && one.joined && cluster.running.contains_key(id))
            .map(|(id, _)| *id)
            .collect();
        let at = usize::from(which).checked_rem(running.len());
        let Some(kept) = at.map(|at| running[at]) else {
            self.clusters.insert(token, cluster);
            return;
        };
        let name = members[&kept].name.clone();
        tell!(self, "a person starts {name} with --force-new-cluster");
        let alone: BTreeMap<u64, Member> = [(kept, members[&kept].clone())].into();
        cluster.configs.push(alone);
        let newest = cluster.configs.len() - 1;
        let term = cluster.terms.len();
        let mut last = Spot::default();
        for (id, data) in self.logs(&token) {
            if id == kept {
                cluster.terms.push(data.last);
                data.last = Spot {
                    term,
                    index: data.last.index + 1,
                };
                (data.term, data.config) = (term, newest);
                last = data.last;
            }
        }
        let all = self
            .disks
            .values_mut()
            .filter_map(|disk| disk.data.as_mut());
        let all = all.chain(self.pods.values_mut().filter_map(|pod| pod.data.as_mut()));
        for data in all.filter(|data| data.token == token && data.member != kept) {
            data.removed = true;
        }
        for process in cluster.running.values_mut() {
            process.leads = None;
        }
        if let Some(process) = cluster.running.get_mut(&kept) {
            process.leads = Some(term);
        }
        cluster.running.retain(|id, _| *id == kept);
        // The acknowledged writes that `kept` lacks do not count as lost, because the person who removed the other
        // members accepts this loss.
        if cluster
            .acknowledged
            .is_some_and(|acknowledged| !cluster.contains(last, acknowledged))
        {
            cluster.acknowledged = Some(last);
        }
        self.clusters.insert(token, cluster);
        let removed: Vec<String> = { members.into_iter() }
            .filter(|(id, _)| *id != kept)
            .map(|(_, one)| one.name)
            .collect();
        self.note_vanished(&removed, 1);
    }
}

impl Mutation {
    /// Deliberate mistakes: the planner gets wrong input about removals.
    pub(crate) fn mistakes_a_removal(self, observed: &mut Observed) {
        let disks = observed.disks.values_mut();
        match self {
            Self::TakesEvidenceForLeftovers => {
                disks.for_each(|disk| disk.removal = Some(Removal::ByOperator));
            }
            Self::ForgetsTheMajority => disks.for_each(|disk| {
                if let Some(Removal::ByOthers { majority, .. }) = &mut disk.removal {
                    *majority = false;
                }
            }),
            Self::StartsEvidence => {
                let silent = observed.members.known().is_none();
                disks
                    .filter(|_| silent)
                    .for_each(|disk| disk.removal = None);
            }
            _ => {}
        }
    }
}

/// Generates a run from the seed: an ordinary run on volumes, after which other software or a person removes members.
fn drawn(seed: u64) -> (Setup, Vec<Event>) {
    let (mut setup, mut events) = draw(4 * seed + 1, false);
    setup.durable = true;
    let mut dice = Dice::new(seed ^ 0x25_0025);
    events.truncate(usize::from(dice.small(30)));
    let pass = |dice: &mut Dice, most: u8| {
        [Event::Round, Event::Tick].repeat(usize::from(dice.small(most)))
    };
    events.push(Event::Heal);
    events.extend(pass(&mut dice, 40));
    for _ in 0..=dice.small(3) {
        if dice.below(3) == 0 {
            events.push(Event::ForceNewCluster(dice.byte()));
        } else {
            events.push(Event::RemoveByHand(dice.byte()));
        }
        events.extend(pass(&mut dice, 5));
        if dice.below(4) == 0 {
            events.push(Event::DeletePods);
            events.extend(pass(&mut dice, 4));
        }
        if dice.below(4) == 0 {
            events.push(Event::Deafen);
            events.extend(pass(&mut dice, 4));
            events.push(Event::Heal);
        }
    }
    (setup, events)
}

const ROUNDS: usize = 20_000;

#[test]
fn invariant_25_holds_if_other_software_removes_members() {
    play_drawn(drawn, ROUNDS);
}

#[test]
fn model_detects_every_mistake_about_removed_members() {
    let mistakes = [
        Mutation::TakesEvidenceForLeftovers,
        Mutation::ForgetsTheMajority,
        Mutation::StartsEvidence,
    ];
    find(&mistakes, drawn, ROUNDS);
}
