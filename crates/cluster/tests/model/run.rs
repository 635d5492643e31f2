//! A run: events happen to the world, operators look, plan and write.

use std::collections::BTreeMap;

use cluster::observed::{Kept, Observed, Pod, Seen, Service};
use cluster::plan::{Plan, plan};
use cluster::write::{Write, chains};

use crate::etcd_model::Cluster;
use crate::invariants::{Witness, is_lost};
use crate::read::{list, seconds};
use crate::world::World;
use crate::write::Answer;

#[derive(Clone, Copy, Debug)]
pub(crate) struct Setup {
    pub(crate) size: usize,
    pub(crate) seed: bool,
    pub(crate) durable: bool,
    pub(crate) version: &'static str,
}

/// Numbers choose among what there is at that moment.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Event {
    /// The operator looks, plans and does the whole step.
    Round,
    /// Time passes: kubelets and members move.
    Tick,
    /// A round whose process dies after so many writes.
    Crash { after: u8 },
    /// A round in which one write is done and its answer is lost.
    LoseReply { after: u8 },
    /// A round in which the API server refuses one write for good.
    Refuse { after: u8 },
    /// A round whose writes come late: the world moves between plan and act.
    ActLate { ticks: u8, after: u8 },
    /// Somebody deletes a pod, gracefully.
    DeletePod(u8),
    /// A pod and what it holds are gone at once.
    LosePod(u8),
    /// A volume claim and its data are gone.
    LoseDisk(u8),
    /// The node of a pod is lost; what is on it stays where it is.
    LoseNode(u8),
    /// Somebody deletes a volume claim; it is held back as long as its pod lives.
    DeleteClaim(u8),
    /// What a member has on its disk cannot be read any more.
    Damage(u8),
    /// Nobody reaches a member.
    Isolate(u8),
    /// No node takes a pod.
    Hold(u8),
    /// All that is isolated, held or silent is as before.
    Heal,
    /// The user wants another size.
    Resize(usize),
    /// Somebody edits a member's Service.
    DriftService(u8),
    /// Somebody deletes the Services and the budget of the cluster.
    DeleteShared,
    /// etcd does not answer the operator.
    Deafen,
    /// The object is created again without its status.
    ForgetStatus,
    /// The second operator reads another part of the world; the third time it plans.
    SecondLooks,
    /// The second operator does one write of its step.
    SecondWrites(u8),
}

/// The second operator: what it has read so far, and what it still means to write.
#[derive(Default)]
struct Second {
    services: Option<BTreeMap<String, Service>>,
    pods: Option<BTreeMap<String, Pod>>,
    planned: Option<(Observed, Plan)>,
    chains: Vec<Vec<Write>>,
    marked: BTreeMap<String, u64>,
}

pub(crate) struct Run {
    world: World,
    second: Option<Second>,
    rounds: usize,
}

/// What goes wrong in a round.
#[derive(Clone, Copy, Default)]
struct Fault {
    crash_after: Option<usize>,
    lose_reply: Option<usize>,
    refuse: Option<usize>,
    stale: bool,
}

impl Run {
    pub(crate) fn new(setup: &Setup) -> Self {
        let world = World::new(setup.size, setup.seed, setup.durable, setup.version);
        Self {
            world,
            second: None,
            rounds: 0,
        }
    }

    pub(crate) fn two_operators(&mut self) {
        self.second = Some(Second::default());
        self.world.witness.a_second_operator_acts();
    }

    pub(crate) fn rounds(&self) -> usize {
        self.rounds
    }

    pub(crate) fn event(&mut self, event: Event) {
        match event {
            Event::Round => drop(self.round(Fault::default(), 0)),
            Event::Tick => self.world.tick(),
            Event::Crash { after } => {
                self.round(
                    Fault {
                        crash_after: Some(usize::from(after % 12)),
                        ..Fault::default()
                    },
                    0,
                );
            }
            Event::LoseReply { after } => {
                self.round(
                    Fault {
                        lose_reply: Some(usize::from(after % 12)),
                        ..Fault::default()
                    },
                    0,
                );
            }
            Event::Refuse { after } => {
                self.round(
                    Fault {
                        refuse: Some(usize::from(after % 12)),
                        ..Fault::default()
                    },
                    0,
                );
            }
            Event::ActLate { ticks, after } => {
                let fault = Fault {
                    crash_after: Some(usize::from(after)),
                    stale: true,
                    ..Fault::default()
                };
                self.round(fault, ticks);
            }
            Event::SecondLooks => self.second_looks(),
            Event::SecondWrites(which) => self.second_writes(usize::from(which)),
            Event::Resize(size) => self.world.size = size,
            Event::Heal => self.heal(),
            Event::Deafen => self.world.deaf = true,
            Event::ForgetStatus => self.forget_status(),
            Event::DeleteShared => {
                self.world.shared.headless = Kept::Missing;
                self.world.shared.client = Kept::Missing;
                self.world.shared.budget = Kept::Missing;
            }
            Event::DeletePod(_)
            | Event::LosePod(_)
            | Event::LoseDisk(_)
            | Event::LoseNode(_)
            | Event::DeleteClaim(_)
            | Event::Damage(_)
            | Event::Isolate(_)
            | Event::Hold(_)
            | Event::DriftService(_) => self.strike(event),
        }
    }

    fn strike(&mut self, event: Event) {
        let world = &mut self.world;
        let pick = |names: Vec<String>, which: u8| {
            let at = usize::from(which).checked_rem(names.len());
            at.map(|at| names[at].clone())
        };
        let pods = world.pods.keys().cloned().collect::<Vec<_>>();
        match event {
            Event::DeletePod(which) => {
                if let Some(pod) = pick(pods, which).and_then(|name| world.pods.get_mut(&name)) {
                    pod.ends_in = pod.ends_in.or(Some(1 + which % 3));
                }
            }
            Event::LosePod(which) => {
                if let Some(name) = pick(pods, which) {
                    world.pods.remove(&name);
                }
            }
            Event::LoseDisk(which) => {
                if let Some(name) = pick(world.disks.keys().cloned().collect(), which) {
                    // The data is gone with the volume; the container that had it open is ended.
                    world.disks.remove(&name);
                    world.pods.remove(&name);
                }
            }
            Event::LoseNode(which) => {
                if let Some(name) = pick(pods, which) {
                    let now = world.now;
                    world.lost.entry(name).or_insert(now);
                }
            }
            Event::DeleteClaim(which) => {
                if let Some(name) = pick(world.disks.keys().cloned().collect(), which) {
                    world.delete_claim(&name);
                }
            }
            Event::Damage(which) => {
                let started = pods.into_iter().filter(|name| world.data(name).is_some());
                if let Some(name) = pick(started.collect(), which) {
                    world.damage(&name);
                }
            }
            Event::Isolate(which) => world.isolated.extend(pick(pods, which)),
            Event::Hold(which) => world.held.extend(pick(pods, which)),
            Event::DriftService(which) => {
                let name = pick(world.services.keys().cloned().collect(), which);
                if let Some(service) = name.and_then(|name| world.services.get_mut(&name)) {
                    (service.drifted, service.version) = (true, service.version + 1_000_000);
                }
            }
            _ => unreachable!(),
        }
    }

    fn heal(&mut self) {
        self.world.isolated.clear();
        self.world.held.clear();
        self.world.deaf = false;
    }

    /// Only where the cluster can be told from what is left: one token, or one that carries the cluster ID.
    fn forget_status(&mut self) {
        let world = &mut self.world;
        let pods = world
            .pods
            .values()
            .map(|pod| (&pod.start.token, pod.cluster_id));
        let disks = world
            .disks
            .values()
            .map(|disk| (&disk.token, disk.cluster_id));
        let mut tokens: Vec<_> = pods.chain(disks).collect();
        tokens.sort();
        tokens.dedup_by_key(|(token, _)| (*token).clone());
        let current = world.intent.as_ref().map(|intent| &intent.token);
        if tokens.len() > 1
            || tokens
                .first()
                .is_some_and(|(token, _)| Some(*token) != current)
        {
            return;
        }
        if tokens.iter().all(|(_, cluster_id)| cluster_id.is_none()) {
            // Then nobody can know that the cluster ID was recorded a moment ago.
            world.witness.forget();
        }
        world.intent = None;
        world.cluster_id = None;
        world.object_version += 1;
    }

    /// One round of the first operator; returns whether its plan had anything to do.
    fn round(&mut self, fault: Fault, ticks: u8) -> Plan {
        self.rounds += 1;
        let world = &self.world;
        let observed = world.observe(world.read_services(), world.read_pods());
        let plan = self.plan(&observed);
        (0..ticks).for_each(|_| self.world.tick());
        let mut written = 0;
        let fresh = !fault.stale && self.second.is_none();
        let mut chains = self.take_apart(&plan);
        // Chains run beside each other: one write of each in turn, from another end each round.
        let turn = self.rounds % chains.len().max(1);
        chains.rotate_left(turn);
        let mut marked = BTreeMap::new();
        while chains.iter().any(|chain| !chain.is_empty()) {
            for chain in &mut chains {
                let Some(write) = (!chain.is_empty()).then(|| chain.remove(0)) else {
                    continue;
                };
                if fault.crash_after == Some(written) {
                    return plan;
                }
                let refused = fault.refuse == Some(written);
                let done = self.write(&write, &observed, &plan, &mut marked, fresh, refused);
                if !done || fault.lose_reply == Some(written) {
                    chain.clear();
                }
                written += 1;
            }
        }
        self.report(&observed);
        plan
    }

    fn plan(&mut self, observed: &Observed) -> Plan {
        let plan = plan(&self.world.desired(), observed, seconds(self.world.now));
        Witness::plan_is_careful(observed, &plan, &self.world);
        plan
    }

    fn take_apart(&mut self, plan: &Plan) -> Vec<Vec<Write>> {
        let mut all: Vec<Vec<Write>> = Vec::new();
        for order in &plan.step.orders {
            all.extend(chains(order, &mut self.world));
        }
        all.extend(plan.step.change.iter().map(|change| change.writes.clone()));
        all
    }

    /// As `act` does it: the change is checked against its list, a mark is taken back after a refusal.
    fn write(
        &mut self,
        write: &Write,
        observed: &Observed,
        plan: &Plan,
        marked: &mut BTreeMap<String, u64>,
        fresh: bool,
        refused: bool,
    ) -> bool {
        if let Some(change) = plan
            .step
            .change
            .as_ref()
            .filter(|change| change.writes.contains(write))
        {
            let now = self
                .world
                .recorded()
                .filter(|cluster| cluster.serves() && !self.world.deaf)
                .map(list);
            let first = change.writes.first() == Some(write);
            if first && now.as_ref() != Some(&change.planned_from) {
                return false;
            }
        }
        if refused {
            if let Some(Write::MarkService {
                member, started, ..
            }) = write.after_refusal()
            {
                let over = marked.get(&member).map(u64::to_string);
                self.world.write(&Write::MarkService {
                    member,
                    started,
                    over,
                });
            }
            return false;
        }
        let mut witness = std::mem::take(&mut self.world.witness);
        witness.judge(
            write,
            &self.world,
            fresh && observed.resource_version == self.world.object_version.to_string(),
        );
        self.world.witness = witness;
        match self.world.write(write) {
            Answer::Done(version) => {
                if let (
                    Some(version),
                    Write::CreateService { member, .. } | Write::MarkService { member, .. },
                ) = (version, write)
                {
                    marked.insert(member.clone(), version);
                }
                true
            }
            Answer::Failed => false,
        }
    }

    /// The part of the status that is read back.
    fn report(&mut self, observed: &Observed) {
        if let Seen::Known(list) = &observed.members {
            let voters = list.members.iter().filter(|member| !member.is_learner);
            let names = voters.filter_map(|member| api::names::member_of_url(&member.peer_urls[0]));
            self.world.reported_voters = names.map(str::to_owned).collect();
            self.world.object_version += 1;
        }
    }

    fn second_looks(&mut self) {
        let Some(second) = &mut self.second else {
            return;
        };
        match (&second.services, &second.pods) {
            (None, _) => second.services = Some(self.world.read_services()),
            (_, None) => second.pods = Some(self.world.read_pods()),
            (Some(services), Some(pods)) => {
                let observed = self.world.observe(services.clone(), pods.clone());
                let plan = self.plan(&observed);
                let chains = self.take_apart(&plan);
                let planned = Some((observed, plan));
                self.second = Some(Second {
                    planned,
                    chains,
                    ..Second::default()
                });
            }
        }
    }

    fn second_writes(&mut self, which: usize) {
        let Some(mut second) = self.second.take() else {
            return;
        };
        second.chains.retain(|chain| !chain.is_empty());
        if let (Some((observed, plan)), Some(at)) =
            (&second.planned, which.checked_rem(second.chains.len()))
        {
            let write = second.chains[at].remove(0);
            if !self.write(&write, observed, plan, &mut second.marked, false, false) {
                second.chains[at].clear();
            }
        }
        self.second = Some(second);
    }

    /// The faults stop, one operator is left: the cluster becomes what the spec asks for, or says why not.
    pub(crate) fn converges(&mut self) {
        self.heal();
        if let Some(second) = &mut self.second {
            *second = Second::default();
        }
        // Lost nodes and damaged disks are survived as they are by a cluster that serves without them.
        let serves = |world: &World| {
            world.cluster_id.is_some() && world.recorded().is_some_and(Cluster::serves)
        };
        let mut last = None;
        for round in 0..200 {
            if round == 0 && !serves(&self.world) || round == 100 {
                self.world.mend();
            }
            let plan = self.round(Fault::default(), 0);
            if plan.step.is_empty() && self.is_converged() {
                return;
            }
            let rests = self
                .world
                .recorded()
                .is_none_or(|cluster| !cluster.serves());
            if plan.step.is_empty() && rests && self.is_lost() {
                let problems: Vec<_> = plan.problems.iter().map(|problem| problem.code).collect();
                assert!(
                    problems.contains(&"QuorumLost") || self.knows_no_voters(),
                    "{}\n{}",
                    said(&plan),
                    self.world
                );
                return;
            }
            last = Some(plan);
            self.world.tick();
        }
        panic!(
            "does not converge: {}\n{}",
            last.as_ref().map(said).unwrap_or_default(),
            self.world
        );
    }

    /// Nothing was ever reported, so nobody can say how many voters there were.
    fn knows_no_voters(&self) -> bool {
        let reported = &self.world.reported_voters;
        reported
            .iter()
            .filter(|name| !is_lost(&self.world, name))
            .count()
            > reported.len() / 2
            || reported.is_empty()
    }

    fn is_converged(&self) -> bool {
        let world = &self.world;
        let Some(cluster) = world.recorded() else {
            return false;
        };
        let names = cluster.names();
        // What is stuck on a lost node stays there, deleted and waiting for its kubelet.
        let stuck = |name: &String| {
            world.lost.contains_key(name)
                && world
                    .pods
                    .get(name)
                    .is_some_and(|pod| pod.ends_in.is_some())
        };
        let belongs = |name: &String| names.contains(name) || stuck(name);
        world.cluster_id.is_some()
            && cluster.members.len() == world.size
            && cluster
                .members
                .values()
                .all(|member| !member.learner && member.up_since.is_some())
            && names
                .iter()
                .all(|name| world.pods.contains_key(name) && world.services.contains_key(name))
            && world.pods.keys().chain(world.services.keys()).all(belongs)
            && world.disks.keys().all(belongs)
            && names
                .iter()
                .all(|name| world.disks.get(name).is_none_or(|disk| !disk.terminating))
            && world.shared.client == Kept::AsMade(true)
            && world.shared.headless == Kept::AsMade(())
            && world.shared.budget == Kept::AsMade(world.size / 2 + 1)
    }

    /// A recorded cluster whose voters' disks are gone, so that no quorum can come back.
    fn is_lost(&self) -> bool {
        let world = &self.world;
        let Some(cluster) = world.recorded().filter(|_| world.cluster_id.is_some()) else {
            return false;
        };
        let left = cluster.voters().filter(|(_, member)| {
            !is_lost(world, &member.name) && world.data(&member.name).is_some()
        });
        left.count() < cluster.quorum()
    }
}

/// A plan in a few lines.
pub(crate) fn said(plan: &Plan) -> String {
    format!(
        "next: {:?}\nwaits: {:?}\nproblems: {:?}",
        plan.next, plan.waiting_for, plan.problems
    )
}
