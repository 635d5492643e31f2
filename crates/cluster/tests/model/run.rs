//! A run: events change the world, and operators observe, plan and write.

use std::collections::{BTreeMap, BTreeSet};

use crate::writes::{Change, Write};
use cluster::action::StartPart;
use cluster::certificates::CertificateWrite;
use cluster::plan::{Explanation, plan};
use cluster::snapshot::{Observed, Pod, Service};

use crate::event::Event;
pub(crate) use crate::event::Setup;
use crate::mutation::Mutation;
use crate::others::is_elsewhere;
use crate::read::seconds;
use crate::sent;
use crate::world::{Late, World, tell};
use crate::write::{Answer, is_for_etcd};
use crate::writes::Plan;

/// The second operator: its reads so far, its plan, and the writes that it has not sent yet.
#[derive(Default)]
pub(crate) struct Second {
    services: Option<BTreeMap<String, Service>>,
    pods: Option<BTreeMap<String, Pod>>,
    planned: Option<(Observed, Plan)>,
    chains: Vec<Vec<Write>>,
    marked: BTreeMap<String, u64>,
    /// The highest UID that existed when the second operator read the world.
    seen: u64,
    /// How often the EtcdCluster had been deleted when the second operator read the world. If the number has changed,
    /// the second operator drops its reads.
    lives: u64,
}

pub(crate) struct Run {
    pub(crate) world: World,
    pub(crate) second: Option<Second>,
    /// The objects in the operator's watch caches; `None` if the operator has no caches.
    pub(crate) cache: Option<Box<World>>,
    pub(crate) mutation: Option<Mutation>,
    pub(crate) rounds: usize,
}

/// The faults of a round. A `usize` is the number of writes before the fault; a `u8` is a number of ticks.
#[derive(Clone, Copy, Default)]
pub(crate) struct Fault {
    crash_after: Option<usize>,
    lose_reply: Option<usize>,
    delay: Option<(usize, u8)>,
    refuse: Option<usize>,
    api_fails: Option<(usize, u8)>,
    /// Number of ticks between the reads of one observation.
    slow_look: u8,
    /// Number of ticks between the plan and its first write.
    slow_act: Option<u8>,
    /// The number of writes after which the observation is too old, and the number of ticks until the operator removes
    /// the annotations `started`.
    too_old: Option<(usize, u8)>,
}

/// The result of the operator's attempt to send one write.
#[derive(PartialEq, Eq)]
enum Sent {
    Done,
    Failed,
}

impl Run {
    pub(crate) fn new(setup: &Setup, mutation: Option<Mutation>, telling: bool) -> Self {
        let mut world = World::new(setup);
        world.telling = telling;
        world.begin_elsewhere();
        world.memory.second = setup.two;
        let second = setup.two.then(Second::default);
        Self {
            world,
            second,
            cache: None,
            mutation,
            rounds: 0,
        }
    }

    pub(crate) fn rounds(&self) -> usize {
        self.rounds
    }

    /// The first violation of an invariant, if any.
    pub(crate) fn broken(&self) -> Option<&str> {
        self.world.memory.broken.as_deref()
    }

    pub(crate) fn event(&mut self, event: Event) {
        let none = Fault::default();
        let at = |after: u8| Some(usize::from(after));
        match event {
            Event::Tick => self.world.tick(),
            Event::Round => drop(self.round(none)),
            Event::WatchEvents(kinds) => self.watch(kinds),
            Event::CachedRound => drop(self.cached_round()),
            Event::Crash { after } => drop(self.round(Fault {
                crash_after: at(after),
                ..none
            })),
            Event::DieTogether { after, ticks } => {
                self.round(Fault {
                    crash_after: at(after),
                    ..none
                });
                let ours = self
                    .world
                    .pods
                    .iter()
                    .filter(|(name, _)| !is_elsewhere(name));
                let newest = ours.max_by_key(|(_, pod)| pod.uid);
                let newest = newest.map(|(name, _)| name.clone());
                self.ticks(ticks);
                if let Some(name) = newest {
                    self.world.lose_pod(&name);
                }
            }
            Event::LoseReply { after } => drop(self.round(Fault {
                lose_reply: at(after),
                ..none
            })),
            Event::Refuse { after } => drop(self.round(Fault {
                refuse: at(after),
                ..none
            })),
            Event::Delay { after, ticks } => {
                self.round(Fault {
                    delay: Some((usize::from(after), ticks)),
                    ..none
                });
            }
            Event::ApiFails { after, ticks } => {
                self.round(Fault {
                    api_fails: Some((usize::from(after), ticks)),
                    ..none
                });
            }
            // If `after` is 128 or more, the observation becomes too old while the operator executes the step.
            Event::ActLate { ticks, after } => {
                let too_old = after.checked_sub(128).map(|after| after % 16);
                self.round(Fault {
                    crash_after: at(after),
                    slow_act: Some(ticks),
                    too_old: too_old.map(|after| (usize::from(after), ticks)),
                    ..none
                });
            }
            Event::LookSlowly { ticks } => drop(self.round(Fault {
                slow_look: ticks,
                ..none
            })),
            Event::SecondLooks => self.second_looks(),
            Event::SecondWrites(which) => self.second_writes(usize::from(which)),
            Event::ForgetStatus => {
                // The second operator begins a new observation, because a real cluster cannot form and then lose its
                // status within one observation.
                if let Some(second) = &mut self.second {
                    (second.services, second.pods) = (None, None);
                }
                self.world.strike(event);
            }
            _ => self.world.strike(event),
        }
    }

    fn ticks(&mut self, ticks: u8) {
        (0..ticks).for_each(|_| self.world.tick());
    }

    /// One round of the first operator.
    pub(crate) fn round(&mut self, fault: Fault) -> Option<Plan> {
        self.rounds += 1;
        if self.world.api_is_away() {
            tell!(
                self.world,
                "round {}: the API server does not answer",
                self.rounds
            );
            return None;
        }
        let lives = self.world.lives;
        let services = self.world.read_services();
        self.ticks(fault.slow_look);
        let pods = self.world.read_pods();
        self.ticks(fault.slow_look);
        // The round ends if the EtcdCluster was deleted and created again during the observation, because the operator
        // first waits until the children of the deleted EtcdCluster no longer exist.
        if self.world.api_is_away() || self.world.lives != lives {
            return None;
        }
        let mut observed = self.world.observe(services, pods);
        let seen = self.world.counter;
        if let Some(mutation) = self.mutation {
            mutation.read(&self.world, &mut observed);
        }
        let plan = self.plan(&observed, fault.slow_look == 0);
        self.ticks(fault.slow_act.unwrap_or_default());
        if self.world.lives != lives {
            return None;
        }
        self.world.memory.seen = seen;
        self.world.memory.fresh =
            fault.slow_act.is_none() && fault.slow_look == 0 && self.second.is_none();
        let survived = self.act(fault, &observed, &plan);
        self.world.memory.fresh = false;
        if survived && !self.world.api_is_away() {
            self.report(&observed);
        }
        Some(plan)
    }

    /// Sends the chains of a plan. To simulate concurrency, the model sends one write of each chain in turn, and each
    /// round starts with a different chain. Returns false if the operator process has crashed.
    pub(crate) fn act(&mut self, fault: Fault, observed: &Observed, plan: &Plan) -> bool {
        let mut chains = self.take_apart(plan);
        let turn = self.rounds % chains.len().max(1);
        chains.rotate_left(turn);
        let mut marked = BTreeMap::new();
        let mut written = 0;
        while chains.iter().any(|chain| !chain.is_empty()) {
            for chain in &mut chains {
                let Some(write) = (!chain.is_empty()).then(|| chain.remove(0)) else {
                    continue;
                };
                if let Some((_, ticks)) = fault.too_old.filter(|(after, _)| *after <= written) {
                    tell!(self.world, "   the observation is too old to {write}");
                    self.take_back(&write, &marked, ticks);
                    chain.clear();
                    continue;
                }
                if fault.crash_after == Some(written) {
                    self.world.forget_call();
                    tell!(self.world, "   the operator crashes before: {write}");
                    return false;
                }
                if let Some((_, ticks)) = fault.api_fails.filter(|(after, _)| *after == written) {
                    self.world.lose_api(ticks);
                }
                let sent = self.send(&write, observed, plan, &mut marked, (fault, written));
                if sent == Sent::Failed {
                    chain.clear();
                }
                written += 1;
            }
        }
        true
    }

    /// Sends one write, with the faults of the round.
    fn send(
        &mut self,
        write: &Write,
        observed: &Observed,
        plan: &Plan,
        marked: &mut BTreeMap<String, u64>,
        (fault, at): (Fault, usize),
    ) -> Sent {
        if fault.refuse == Some(at) && !is_for_etcd(write) {
            tell!(self.world, "   the API server refuses to {write}");
            self.take_back(write, marked, 0);
            return Sent::Failed;
        }
        self.world.send_as(observed);
        if let Some((_, ticks)) = fault.delay.filter(|(after, _)| *after == at) {
            let via = via(plan, write);
            if self.is_still_true(write, plan) {
                tell!(
                    self.world,
                    "   no answer to: {write} (it arrives {ticks} ticks later)"
                );
                let arrives = self.world.now + u64::from(ticks);
                let seen = self.world.memory.seen;
                self.world.late.push(Late {
                    arrives,
                    write: write.clone(),
                    via,
                    seen,
                    sender: self.world.switch.sender.clone(),
                });
            }
            return Sent::Failed;
        }
        let sent = self.do_write(write, observed, plan, marked);
        if sent == Sent::Done && fault.lose_reply == Some(at) {
            tell!(self.world, "   the answer is lost");
            if self.mutation == Some(Mutation::TakesMarksBackBlindly) {
                self.take_back(write, marked, 0);
            }
            return Sent::Failed;
        }
        sent
    }

    /// Removes an annotation `started` as `execute` does, after a rejection or when the observation becomes too old. If
    /// the observation is too old, `ticks` pass before the removal, and another process may hold the lease by then.
    fn take_back(&mut self, write: &Write, marked: &BTreeMap<String, u64>, ticks: u8) {
        let version = |member: &str| marked.get(member).map(u64::to_string);
        let undo = match self.mutation {
            Some(mutation) => mutation.takes_back(write, version),
            None => taken_back(write, version),
        };
        let Some(write) = undo else {
            return;
        };
        if ticks == 0 {
            self.world.write(&write, &[]);
            return;
        }
        let (arrives, seen) = (self.world.now + u64::from(ticks), self.world.memory.seen);
        self.world.late.push(Late {
            arrives,
            write,
            via: Vec::new(),
            seen,
            sender: self.world.switch.sender.clone(),
        });
    }

    /// Invariant 11: a membership change is sent only while the member list equals the list in the plan.
    fn is_still_true(&self, write: &Write, plan: &Plan) -> bool {
        let change = plan
            .step
            .change
            .as_ref()
            .filter(|change| change.chain.contains(write));
        let Some(change) = change.filter(|change| change.chain.first() == Some(write)) else {
            return true;
        };
        if self.mutation == Some(Mutation::ActsOnAChangedList) {
            return true;
        }
        let token = self
            .world
            .intent
            .as_ref()
            .map(|intent| intent.token.clone())
            .unwrap_or_default();
        let now = match self.mutation {
            Some(Mutation::ReadsALocalList) => self.world.local_list(&token, &change.via),
            _ => self.world.read_list(&token, &change.via),
        };
        now.as_ref() == Some(&change.planned_from)
    }

    fn do_write(
        &mut self,
        write: &Write,
        observed: &Observed,
        plan: &Plan,
        marked: &mut BTreeMap<String, u64>,
    ) -> Sent {
        if !self.is_still_true(write, plan) {
            tell!(self.world, "   the member list has changed");
            return Sent::Failed;
        }
        let first = |change: &&Change| change.chain.first() == Some(write);
        if let Some(change) = plan.step.change.as_ref().filter(first) {
            self.world.judge_change(change);
        }
        self.world.send_as(observed);
        let fresh = observed.resource_version == self.world.object_version.to_string();
        self.world.memory.fresh &= fresh;
        let write = self
            .mutation
            .map_or_else(|| write.clone(), |one| one.write(&self.world, write));
        tell!(self.world, "   the operator does: {write}");
        match self.world.write(&write, &via(plan, &write)) {
            Answer::Done(version) => {
                let start = write.start();
                let member = start.as_ref().and_then(StartPart::marks);
                if let (Some(version), Some(member)) = (version, member) {
                    marked.insert(member.to_owned(), version);
                }
                Sent::Done
            }
            Answer::Failed => {
                tell!(self.world, "   which fails");
                Sent::Failed
            }
        }
    }

    fn plan(&mut self, observed: &Observed, atomic: bool) -> Plan {
        self.world.notice_silence();
        let (desired, now) = (self.world.desired(), seconds(self.world.now));
        let plan = if let Some(mutation) = self.mutation {
            mutation.plan(&mut self.world, &desired, observed, now)
        } else {
            let names = self.world.unused_names();
            let sent = plan(&desired, observed, &names, now);
            self.world.use_names(&names);
            sent::read(sent, &desired, observed)
        };
        let codes = |all: &[Explanation]| {
            let all: Vec<&str> = all.iter().map(|one| one.reason.as_str()).collect();
            if all.is_empty() {
                String::new()
            } else {
                format!(" ({})", all.join(", "))
            }
        };
        let next = plan.next.as_deref().unwrap_or(if plan.step.is_empty() {
            "wait"
        } else {
            "go on"
        });
        let (waits, problems) = (codes(&plan.waiting_for), codes(&plan.problems));
        tell!(
            self.world,
            "round {}: the operator plans to {next}{waits}{problems}",
            self.rounds
        );
        self.world.judge_plan(observed, &plan, atomic);
        plan
    }

    fn take_apart(&self, plan: &Plan) -> Vec<Vec<Write>> {
        let mut all = plan.step.chains.clone();
        all.extend(plan.step.change.iter().map(|change| change.chain.clone()));
        match self.mutation {
            Some(mutation) => mutation.chains(all),
            None => all,
        }
    }

    /// Writes the part of the status that later observations read.
    fn report(&mut self, observed: &Observed) {
        let since = self.world.recovery.unavailable_since;
        let unavailable = self.world.is_unavailable(observed);
        self.world.recovery.unavailable_since =
            unavailable.then(|| since.unwrap_or(self.world.now));
        if let Some(voters) = listed_voters(observed) {
            self.world.reported_voters = voters;
            self.world.object_version += 1;
        }
    }

    /// Takes the second operator out of `self` for one event. If the EtcdCluster was deleted, this operator drops its
    /// earlier reads.
    fn take_second(&mut self) -> Option<Second> {
        let second = self.second.take()?;
        let lives = self.world.lives;
        let fresh = || Second {
            lives,
            ..Second::default()
        };
        Some(if second.lives == lives {
            second
        } else {
            fresh()
        })
    }

    fn second_looks(&mut self) {
        let Some(mut second) = self.take_second() else {
            return;
        };
        if self.world.api_is_away() {
            second = Second::default();
        } else if second.services.is_none() {
            second.services = Some(self.world.read_services());
        } else if second.pods.is_none() {
            second.pods = Some(self.world.read_pods());
        } else if let (Some(services), Some(pods)) = (second.services.take(), second.pods.take()) {
            self.rounds += 1;
            tell!(self.world, "the second operator has observed the cluster");
            let mut observed = self.world.observe(services, pods);
            let seen = self.world.counter;
            if let Some(mutation) = self.mutation {
                mutation.read(&self.world, &mut observed);
            }
            let plan = self.plan(&observed, false);
            let chains = self.take_apart(&plan);
            let planned = Some((observed, plan));
            second = Second {
                planned,
                chains,
                seen,
                lives: second.lives,
                ..Second::default()
            };
        }
        self.second = Some(second);
    }

    fn second_writes(&mut self, which: usize) {
        let Some(mut second) = self.take_second() else {
            return;
        };
        second.chains.retain(|chain| !chain.is_empty());
        if let (Some((observed, plan)), Some(at)) =
            (&second.planned, which.checked_rem(second.chains.len()))
        {
            let write = second.chains[at].remove(0);
            self.world.memory.seen = second.seen;
            tell!(self.world, "the second operator continues its step");
            if self.do_write(&write, observed, plan, &mut second.marked) == Sent::Failed {
                second.chains[at].clear();
            }
        }
        self.second = Some(second);
    }
}

/// The voters in the member list; `None` if the list is unknown.
pub(crate) fn listed_voters(observed: &Observed) -> Option<BTreeSet<String>> {
    let list = observed.members.known()?;
    let voters = list.members.iter().filter(|member| !member.is_learner);
    let names = voters.filter_map(|member| api::names::member_of_url(&member.peer_urls[0]));
    Some(names.map(str::to_owned).collect())
}

/// The write that removes the annotation `started` after a write that certainly had no effect.
pub(crate) fn taken_back(
    write: &Write,
    marked: impl FnOnce(&str) -> Option<String>,
) -> Option<Write> {
    if !write.start()?.is_undone(true) {
        return None;
    }
    let member = match write {
        Write::CreateDisk(start) | Write::CreatePod(start) => &start.member,
        Write::Certificate(CertificateWrite::Issue { owner, .. }) => owner,
        _ => return None,
    };
    let over = marked(member)?;
    Some(Write::MarkService {
        member: member.clone(),
        started: false,
        over: Some(over),
    })
}

fn via(plan: &Plan, write: &Write) -> Vec<String> {
    match &plan.step.change {
        Some(change) if is_for_etcd(write) => change.via.clone(),
        _ => Vec::new(),
    }
}

/// The plan as text in a few lines.
pub(crate) fn said(plan: &Plan) -> String {
    let Plan {
        next,
        waiting_for,
        problems,
        ..
    } = plan;
    let reasons = |all: &[Explanation]| {
        let all: Vec<String> = all
            .iter()
            .map(|one| format!("{} ({})", one.reason, one.message))
            .collect();
        all.join("; ")
    };
    let next = next.as_deref().unwrap_or("nothing");
    format!(
        "next {next}, waits for [{}], problems [{}]",
        reasons(waiting_for),
        reasons(problems)
    )
}
