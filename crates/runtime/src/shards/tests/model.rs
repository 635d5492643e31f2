//! A model of several replicas that share, lose and hand over shards, with simulated time. Requests fail before or
//! after their effect. Processes crash, are partitioned or shut down. The number of shards changes.
//!
//! After each step, no object may be reconciled by two processes (invariant 40).

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use super::super::ring::{Beat, Join, Record, Replicas, Ring, Step};
use super::super::{Shards, Slot, State, Visit};

const LEASE: &str = "etcd-operator";
const CLUSTERS: usize = 24;
const STEPS: usize = 2000;
const SEEDS: u64 = 40;

/// A defect that the model must detect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mistake {
    /// A process that cannot renew its Leases continues.
    IgnoresDeadline,
    /// A process releases a Lease while a reconcile is running.
    ReleasesAtOnce,
}

/// The next request of a process.
enum Stage {
    /// Begin a beat.
    Begin,
    /// Read the operator's Lease.
    Read,
    /// Write the operator's Lease.
    Join(String, Replicas),
    /// Read the Leases of the shards.
    List,
    /// Write the Leases of the shards, from the last to the first.
    Write(Vec<(u16, Step, Option<Record>)>, Vec<Slot>, Vec<u16>, bool),
}

struct Process {
    name: String,
    ring: Ring,
    shards: Shards,
    stage: Stage,
    began: Instant,
    beat: Beat,
    rests_until: Instant,
    partitioned_until: Instant,
    leaving: bool,
    visits: Vec<(usize, Visit, Instant)>,
}

struct World {
    now: Instant,
    random: StdRng,
    leases: BTreeMap<String, Record>,
    versions: u64,
    started: usize,
    count: u16,
    processes: Vec<Process>,
    mistake: Option<Mistake>,
    faults: bool,
}

fn cluster(number: usize) -> String {
    format!("db-{number}")
}

impl World {
    fn new(seed: u64, mistake: Option<Mistake>) -> Self {
        Self {
            now: Instant::now(),
            random: StdRng::seed_from_u64(seed),
            leases: BTreeMap::new(),
            versions: 0,
            started: 0,
            count: 5,
            processes: Vec::new(),
            mistake,
            faults: true,
        }
    }

    fn chance(&mut self, percent: u32) -> bool {
        self.random.random_range(0..100) < percent
    }

    fn start(&mut self) {
        self.started += 1;
        let name = format!("pod-{}", self.started);
        self.processes.push(Process {
            ring: Ring::new(&name, LEASE, self.count),
            name,
            shards: Shards::divided(self.count),
            stage: Stage::Begin,
            began: self.now,
            beat: Beat::default(),
            rests_until: self.now,
            partitioned_until: self.now,
            leaving: false,
            visits: Vec::new(),
        });
    }

    /// Writes a Lease if its stored version is `version`. Returns whether the process learns that the write succeeded.
    fn write(&mut self, mut record: Record, version: &str) -> bool {
        if self.faults && self.chance(4) {
            return false;
        }
        let stored = self.leases.get(&record.name);
        if stored.map_or("", |stored| stored.version.as_str()) != version {
            return false;
        }
        self.versions += 1;
        record.version = self.versions.to_string();
        self.leases.insert(record.name.clone(), record);
        !(self.faults && self.chance(4))
    }

    fn ended(&mut self, index: usize) {
        self.processes.swap_remove(index);
    }

    /// Sends the next request of a process, and lets the process decide about the response.
    fn advance(&mut self, index: usize) {
        let mut process = self.processes.swap_remove(index);
        let is_reachable = process.partitioned_until <= self.now;
        let goes_on = is_reachable && !(self.faults && self.chance(3));
        let ended = if goes_on {
            self.send(&mut process)
        } else {
            process.rest(self.now);
            false
        };
        if !ended {
            self.processes.push(process);
        }
    }

    /// Sends the next request of the process. Returns true if the process ends.
    fn send(&mut self, process: &mut Process) -> bool {
        if self.faults && self.chance(10) {
            // The next request is delayed, in a few cases for longer than a Lease is valid without a renewal.
            let most = if self.chance(20) { 40_000 } else { 4000 };
            let latency = self.random.random_range(0..most);
            process.rests_until = self.now + Duration::from_millis(latency);
        }
        let stage = std::mem::replace(&mut process.stage, Stage::Begin);
        match stage {
            Stage::Begin => {
                process.began = self.now;
                process.beat = Beat {
                    leaving: process.leaving,
                    renews: process.ring.must_renew(self.now),
                };
                process.stage = Stage::Read;
            }
            Stage::Read => return self.read(process),
            Stage::Join(version, replicas) => {
                let record = Record {
                    name: LEASE.to_owned(),
                    holder: Some(process.ring.group()),
                    replicas,
                    ..Record::default()
                };
                if self.write(record, &version) {
                    process.stage = Stage::List;
                } else {
                    let pause = self.random.random_range(100..500);
                    process.rests_until = self.now + Duration::from_millis(pause);
                }
            }
            Stage::List => {
                let shards = self.leases.values().filter(|one| one.name != LEASE);
                let shards: Vec<Record> = shards.cloned().collect();
                let slots = process.shards.all();
                let ring = &mut process.ring;
                let Ok(steps) = ring.steps(&shards, &slots, process.beat, self.now) else {
                    return true;
                };
                let lease = |shard| {
                    let name = ring.lease_of(shard);
                    shards.iter().find(|one| one.name == name).cloned()
                };
                let writes = steps
                    .into_iter()
                    .map(|(shard, step)| (shard, step, lease(shard)));
                process.stage = Stage::Write(writes.collect(), slots, Vec::new(), true);
            }
            Stage::Write(mut steps, slots, mut taken, mut complete) => {
                let Some((shard, step, lease)) = steps.pop() else {
                    if complete && process.beat.renews {
                        process.ring.renewed(process.began);
                    }
                    let may_hold = process.ring.may_hold(self.now);
                    for shard in taken.into_iter().filter(|_| may_hold) {
                        process.shards.hold(shard);
                    }
                    process.rest(self.now);
                    return false;
                };
                if !self.carry_out(process, shard, step, lease) {
                    complete &= slots[usize::from(shard)].state == State::Free;
                } else if step == Step::Take {
                    taken.push(shard);
                }
                process.stage = Stage::Write(steps, slots, taken, complete);
            }
        }
        false
    }

    fn read(&mut self, process: &mut Process) -> bool {
        let lease = self.leases.get(LEASE).cloned().unwrap_or(Record {
            name: LEASE.to_owned(),
            ..Record::default()
        });
        if process.beat.leaving && process.visits.is_empty() {
            self.release_all(process, lease);
            return true;
        }
        let slots = process.shards.all();
        let join = process.ring.join(&lease, &slots, process.beat, self.now);
        match join {
            Join::Wait if process.ring.deadline(&slots).is_some() => return true,
            Join::Wait => process.rest(self.now),
            Join::Rest => process.stage = Stage::List,
            Join::List(replicas) => process.stage = Stage::Join(lease.version, replicas),
        }
        false
    }

    /// Mirrors `Keeper::step`.
    fn carry_out(
        &mut self,
        process: &Process,
        shard: u16,
        step: Step,
        lease: Option<Record>,
    ) -> bool {
        let at_once = self.mistake == Some(Mistake::ReleasesAtOnce);
        let holder = match step {
            Step::Take | Step::Renew => Some(process.name.clone()),
            Step::Release if process.shards.leave(shard) || at_once => None,
            Step::Release if process.beat.renews => Some(process.name.clone()),
            Step::Release => return true,
            Step::Forget => {
                process.shards.free(shard);
                return true;
            }
        };
        let version = lease.map(|lease| lease.version).unwrap_or_default();
        let record = Record {
            name: process.ring.lease_of(shard),
            holder: holder.clone(),
            ..Record::default()
        };
        let written = self.write(record, &version);
        if written && holder.is_none() {
            process.shards.free(shard);
        }
        written
    }

    /// Mirrors `Keeper::release`. The process ends even if a write fails.
    fn release_all(&mut self, process: &mut Process, lease: Record) {
        let own = self.leases.values().cloned();
        let own = own.filter(|one| one.holder.as_ref() == Some(&process.name));
        for one in own.collect::<Vec<_>>() {
            let version = one.version.clone();
            if !self.write(
                Record {
                    holder: None,
                    ..one
                },
                &version,
            ) {
                return;
            }
        }
        let Some(replicas) = process.ring.without_me(&lease, self.now) else {
            return;
        };
        let holder = lease.holder.filter(|_| !replicas.is_empty());
        let record = Record {
            name: LEASE.to_owned(),
            holder,
            replicas,
            ..Record::default()
        };
        self.write(record, &lease.version);
    }

    /// One step of the time, of a process, and of the faults.
    fn step(&mut self) -> Result<(), String> {
        self.now += Duration::from_millis(self.random.random_range(10..400));
        for index in (0..self.processes.len()).rev() {
            let process = &mut self.processes[index];
            process.visits.retain(|(_, _, until)| *until > self.now);
            let deadline = process.ring.deadline(&process.shards.all());
            let is_over = deadline.is_some_and(|deadline| deadline <= self.now);
            if is_over && self.mistake != Some(Mistake::IgnoresDeadline) {
                self.ended(index);
            }
        }
        if self.faults {
            self.fault();
        }
        for index in (0..self.processes.len()).rev() {
            if self.processes[index].rests_until <= self.now {
                self.advance(index);
            }
        }
        self.reconcile();
        self.check()
    }

    fn fault(&mut self) {
        let running = self.processes.len();
        if running < 2 || (running < 5 && self.chance(3)) {
            self.start();
        }
        let index = self.random.random_range(0..self.processes.len());
        match self.random.random_range(0..400) {
            0 => self.ended(index),
            1..=3 => self.processes[index].leaving = true,
            4..=6 => {
                let until = self.now + Duration::from_secs(self.random.random_range(5..40));
                self.processes[index].partitioned_until = until;
            }
            // Each process that starts from now on has another number of shards.
            7 => self.count = if self.count == 5 { 3 } else { 5 },
            _ => {}
        }
    }

    fn reconcile(&mut self) {
        for _ in 0..3 {
            if self.processes.is_empty() {
                return;
            }
            let index = self.random.random_range(0..self.processes.len());
            let number = self.random.random_range(0..CLUSTERS);
            let until = self.now + Duration::from_millis(self.random.random_range(50..12_000));
            let process = &mut self.processes[index];
            if let Some(visit) = process.shards.enter("prod", &cluster(number)) {
                process.visits.push((number, visit, until));
            }
        }
    }

    fn check(&self) -> Result<(), String> {
        for number in 0..CLUSTERS {
            let reconciles = |process: &&Process| process.visits.iter().any(|one| one.0 == number);
            let owners = self.processes.iter().filter(reconciles);
            let owners: Vec<&str> = owners.map(|process| process.name.as_str()).collect();
            if owners.len() > 1 {
                return Err(format!("{} is reconciled by {owners:?}", cluster(number)));
            }
        }
        Ok(())
    }

    /// Stops the faults. After that, the replicas with the current number of shards must share all shards.
    fn settle(&mut self) -> Result<(), String> {
        self.faults = false;
        for _ in 0..3 {
            self.start();
        }
        for process in &mut self.processes {
            process.leaving = process.shards.count() != self.count;
        }
        let end = self.now + Duration::from_mins(4);
        while self.now < end {
            self.step()?;
        }
        let held = |process: &Process| {
            let slots = process.shards.all();
            slots
                .iter()
                .filter(|slot| slot.state == State::Held)
                .count()
        };
        let counts: Vec<usize> = self.processes.iter().map(held).collect();
        let (least, most) = (counts.iter().min(), counts.iter().max());
        let (least, most) = (least.copied().unwrap_or(0), most.copied().unwrap_or(0));
        let all = counts.iter().sum::<usize>() == usize::from(self.count);
        if all && most - least <= 1 {
            Ok(())
        } else {
            Err(format!("{} shards, held: {counts:?}", self.count))
        }
    }
}

impl Process {
    fn rest(&mut self, now: Instant) {
        self.stage = Stage::Begin;
        self.rests_until = now + Duration::from_secs(2);
    }
}

fn run(seed: u64, mistake: Option<Mistake>) -> Result<(), String> {
    let mut world = World::new(seed, mistake);
    for _ in 0..STEPS {
        world.step()?;
    }
    world.settle()
}

#[test]
fn invariant_40_no_object_has_two_owners() {
    for seed in 0..SEEDS {
        let result = run(seed, None);
        assert_eq!(result, Ok(()), "seed {seed}");
    }
}

#[test]
fn model_detects_deliberate_mistakes() {
    for mistake in [Mistake::IgnoresDeadline, Mistake::ReleasesAtOnce] {
        let detected = (0..SEEDS).any(|seed| run(seed, Some(mistake)).is_err());
        assert!(detected, "{mistake:?}");
    }
}
