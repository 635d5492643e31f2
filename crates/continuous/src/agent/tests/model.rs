//! A model of how the agent stores changes, with random crashes, failed and late uploads, lost answers, compactions and
//! new bases.
//!
//! The model runs the real recorder, outbox, search of the stored chain, reader and retention, and simulates etcd and
//! the store. It repeats the steps of `Agent::record` one by one, and does not run the capture. The model in
//! `capture/tests.rs` runs the capture, with a simulated watch.
#![allow(clippy::unwrap_used, clippy::panic)]

use std::collections::BTreeSet;

use bytes::Bytes;
use etcd::{Access, Change, ClusterId};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use super::*;
use crate::base::{Base, SnapshotObject};
use crate::fixture::limits;
use crate::fixture::memory::{Answer, Memory};
use crate::name::BaseName;
use crate::outbox::Outbox;
use crate::record::{GapReason, Record, Transaction};
use crate::segment::Segment;
use crate::stored::{Reader, write_base};

const PREFIX: &str = "p/";
const SEEDS: u64 = 300;
const STEPS: usize = 120;

/// A deliberate mistake, which the model must detect.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Mistake {
    /// A failed upload counts as stored.
    FailureIsIgnored,
    /// The next chain begins before the old chain contains the revision of the next base.
    SwitchIsEarly,
    /// The next base is taken before the gap is stored.
    GapIsNotStored,
}

/// The process of an agent. A crash drops it.
struct Process<'a> {
    base: StoredBase,
    recorder: Recorder,
    outbox: Outbox<'a>,
    monitor: Monitor,
    next: Option<StoredBase>,
    has_gap: bool,
}

struct World<'a> {
    store: &'a Memory,
    agent: Agent<'a>,
    rng: StdRng,
    mistake: Option<Mistake>,
    has_faults: bool,
    /// etcd's revision. `compacted` is its compaction revision.
    revision: i64,
    compacted: i64,
    bases: i64,
    process: Option<Process<'a>>,
    /// The revisions that a process has reported as stored.
    reported: BTreeSet<i64>,
    /// The revisions that may be missing: those between a gap or a crash and the next base.
    excused: BTreeSet<i64>,
    /// If the next process takes a new base, revisions between this revision and the new base may be missing.
    excused_after: Option<i64>,
    /// The bases whose chains have ended with a gap.
    ended: Vec<BaseName>,
}

/// The transaction with this revision, which is the same in every process.
fn transaction(revision: i64) -> Transaction {
    let change = Change {
        key: Bytes::from(revision.to_string()),
        value: None,
    };
    Transaction {
        revision,
        observed: revision,
        changes: vec![change],
    }
}

impl World<'_> {
    fn begin(&mut self, base: StoredBase, recorder: Recorder) {
        if let Some(after) = self.excused_after.take() {
            self.excused.extend(after + 1..base.base.revision);
        }
        let monitor = Monitor::default();
        monitor.begin(&base, (recorder.last(), 0), (0, 0));
        let outbox = Outbox::new(self.store, PREFIX, base.name);
        self.process = Some(Process {
            outbox: outbox.with(None, monitor.clone()),
            base,
            recorder,
            monitor,
            next: None,
            has_gap: false,
        });
    }

    fn crash(&mut self) {
        let Some(process) = self.process.take() else {
            return;
        };
        let reported = process.monitor.read().revision.unwrap_or_default();
        let after = self.excused_after.map_or(reported, |it| it.min(reported));
        self.excused_after = Some(after);
    }

    /// Starts a process. It continues the newest chain, or takes a base.
    async fn start(&mut self) -> Result<(), String> {
        let found = self.agent.stored().await;
        if let Some(begun) = found.map_err(|error| format!("{error:?}"))? {
            self.begin(begun.base, begun.recorder);
            return Ok(());
        }
        self.excused_after.get_or_insert(self.revision);
        if let Some(base) = self.take_base().await {
            let recorder = Recorder::new(&base, limits());
            self.begin(base, recorder);
        }
        Ok(())
    }

    fn expect_write(&mut self, ignores_failures: bool) {
        let answer = match self.rng.random_range(0..8) {
            0 if self.has_faults => Answer::Lost,
            1 if self.has_faults => Answer::Rejected,
            2 if self.has_faults => Answer::Late,
            _ => Answer::Stored,
        };
        let mut state = self.store.state();
        (state.answer, state.ignores_failures) = (answer, ignores_failures);
    }

    async fn take_base(&mut self) -> Option<StoredBase> {
        self.expect_write(false);
        self.bases += 1;
        let base = Base {
            cluster_id: ClusterId(7),
            revision: self.revision,
            snapshot: SnapshotObject {
                key: "snapshot".to_owned(),
                size: 1,
                sha256: String::new(),
            },
            created: self.bases,
            encryption: None,
        };
        let base = base.encode().unwrap();
        let written = write_base(self.store, PREFIX, &base).await;
        written.ok().map(|()| base)
    }

    fn receive(&mut self, count: usize) {
        for _ in 0..count {
            let Some(process) = self.process.as_mut().filter(|it| !it.has_gap) else {
                return;
            };
            let next = process.recorder.last() + 1;
            let now = Instant::now();
            if next > self.revision {
                return;
            }
            let complete = if next <= self.compacted {
                process.has_gap = true;
                process.recorder.end(GapReason::Compacted, 0, now).unwrap()
            } else {
                let record = Record::Transaction(transaction(next));
                let full = process.recorder.push(record, now).unwrap();
                full.into_iter().collect()
            };
            for sealed in complete {
                process.outbox.push(sealed, 0);
            }
        }
    }

    fn seal(&mut self) {
        if let Some(process) = &mut self.process
            && let Some(sealed) = process.recorder.seal().unwrap()
        {
            process.outbox.push(sealed, 0);
        }
    }

    async fn upload(&mut self) {
        self.expect_write(self.mistake == Some(Mistake::FailureIsIgnored));
        let waiting = self.process.as_mut().filter(|it| !it.outbox.is_empty());
        if let Some(process) = waiting {
            process.outbox.step().await;
            process.outbox.retry_now();
            let stored = process.monitor.read().revision.unwrap_or_default();
            self.reported.extend(process.base.base.revision..=stored);
        }
    }

    /// Takes the next base while the chain continues.
    async fn renew(&mut self) {
        let may_renew = |it: &Process| !it.has_gap && it.next.is_none();
        if self.process.as_ref().is_some_and(may_renew) {
            let next = self.take_base().await;
            if let Some(process) = &mut self.process {
                process.next = next;
            }
        }
    }

    /// Begins the next chain if the old chain is complete. With a [`Mistake`], this can happen too early.
    async fn advance(&mut self) {
        let Some(process) = &mut self.process else {
            return;
        };
        let (name, last, has_gap) = (process.base.name, process.recorder.last(), process.has_gap);
        let is_stored = process.outbox.is_empty() && process.recorder.deadline().is_none();
        let reached = process.next.as_ref().map(|next| last >= next.base.revision);
        let (is_complete, mistake) = match reached {
            _ if has_gap => (true, Mistake::GapIsNotStored),
            Some(reached) => (reached, Mistake::SwitchIsEarly),
            None => return,
        };
        let may_switch = (is_complete && is_stored) || self.mistake == Some(mistake);
        if !may_switch {
            return;
        }
        let mut next = process.next.take();
        if has_gap {
            self.excused_after = Some(last);
            if next.is_none() {
                next = self.take_base().await;
            }
        }
        if let Some(next) = next {
            self.ended.extend(has_gap.then_some(name));
            let recorder = Recorder::new(&next, limits());
            self.begin(next, recorder);
        }
    }

    fn write_late_object(&mut self) {
        let mut state = self.store.state();
        if !state.late.is_empty() {
            let index = self.rng.random_range(0..state.late.len());
            state.write_late_object(index);
        }
    }

    async fn step(&mut self) -> Result<(), String> {
        match self.rng.random_range(0..100) {
            0..20 => self.revision += self.rng.random_range(1..4),
            20..40 => self.receive(3),
            40..52 => self.seal(),
            52..76 => self.upload().await,
            76..80 => self.renew().await,
            80..90 => self.advance().await,
            90..92 => self.compacted = self.rng.random_range(self.compacted..=self.revision),
            92..96 => self.write_late_object(),
            _ => {
                self.crash();
                self.recorded().await?;
            }
        }
        if self.process.is_none() && self.rng.random_range(0..3) == 0 {
            self.start().await?;
        }
        Ok(())
    }

    /// Stops the faults, and runs the agent until it has recorded all revisions. Fails if this takes too many steps.
    async fn settle(&mut self) -> Result<(), String> {
        self.has_faults = false;
        for _ in 0..50 {
            if self.process.is_none() {
                self.start().await?;
            }
            self.receive(usize::MAX);
            self.seal();
            while self
                .process
                .as_ref()
                .is_some_and(|it| !it.outbox.is_empty())
            {
                self.upload().await;
            }
            self.advance().await;
            let is_done = |it: &Process| {
                let complete = it.outbox.is_empty() && it.recorder.last() == self.revision;
                complete && !it.has_gap && it.next.is_none()
            };
            if self.process.as_ref().is_some_and(is_done) {
                return Ok(());
            }
        }
        Err("the agent does not record all revisions".to_owned())
    }

    /// The revisions that the store contains. Fails if a chain is not valid, or if a revision is missing that a process
    /// has reported as stored.
    async fn recorded(&self) -> Result<BTreeSet<i64>, String> {
        let text = |error: ReadError| format!("{error:?}");
        let mut recorded = BTreeSet::new();
        for name in bases(self.store, PREFIX).await.map_err(text)? {
            recorded.insert(name.revision);
            let opened = Reader::open(self.store, PREFIX, name).await;
            let mut reader = opened.map_err(text)?;
            while let Some(segment) = reader.next().await.map_err(text)? {
                for record in segment.records {
                    if let Record::Transaction(it) = record {
                        assert_eq!(it.changes, transaction(it.revision).changes);
                        recorded.insert(it.revision);
                    }
                }
            }
        }
        let lost: Vec<i64> = self.reported.difference(&recorded).copied().collect();
        if lost.is_empty() {
            Ok(recorded)
        } else {
            Err(format!(
                "revisions {lost:?} were reported as stored, but are missing"
            ))
        }
    }

    /// True if a segment of this base contains the record of a gap.
    fn has_gap_record(&self, base: BaseName) -> bool {
        let directory = format!("{PREFIX}{base}/");
        let state = self.store.state();
        let mut found = state.objects.iter();
        found.any(|(key, content)| {
            let is_gap = |record: &Record| matches!(record, Record::Gap(_));
            key.starts_with(&directory)
                && Segment::decode(content).unwrap().records.iter().any(is_gap)
        })
    }

    /// Checks that each missing revision is in `excused` and in a reported gap, and that no other gap is reported.
    async fn check(&self) -> Result<(), String> {
        let recorded = self.recorded().await?;
        let first = recorded.first().copied().unwrap_or_default();
        let monitor = Monitor::default();
        let tidied = tidy(self.store, PREFIX, Duration::MAX, 0, &monitor).await;
        tidied.map_err(|error| format!("{error:?}"))?;
        let held = monitor.read().held.unwrap_or_default();
        for revision in (first..=self.revision).filter(|it| !recorded.contains(it)) {
            let is_in_gap = held
                .gaps
                .iter()
                .any(|it| it.after < revision && revision < it.until);
            // `held.gaps` lists only the newest gaps, and `held.gap_count` counts all gaps.
            let is_reported = is_in_gap || held.gap_count > held.gaps.len() as u64;
            if !self.excused.contains(&revision) || !is_reported {
                return Err(format!(
                    "revision {revision} is missing without a reason or a reported gap"
                ));
            }
        }
        let mut gaps = held.gaps.iter();
        if let Some(gap) = gaps.find(|it| (it.after + 1..it.until).all(|it| recorded.contains(&it)))
        {
            return Err(format!("{gap:?} is reported, but no revision is missing"));
        }
        match self.ended.iter().find(|base| !self.has_gap_record(**base)) {
            Some(base) => Err(format!(
                "the chain of {base} has ended without a record of a gap"
            )),
            None => Ok(()),
        }
    }
}

async fn run(seed: u64, mistake: Option<Mistake>) -> Result<(), String> {
    let (store, client) = (Memory::default(), EtcdClient::new(Access::default()));
    let settings = Settings {
        prefix: PREFIX.to_owned(),
        limits: limits(),
        extras: Extras::default(),
        max_age: Duration::MAX,
        max_bytes: u64::MAX,
        window: Duration::MAX,
        spool: None,
    };
    let mut world = World {
        store: &store,
        agent: Agent::new(&client, Vec::new(), &store, settings),
        rng: StdRng::seed_from_u64(seed),
        mistake,
        has_faults: true,
        revision: 10,
        compacted: 0,
        bases: 0,
        process: None,
        reported: BTreeSet::new(),
        excused: BTreeSet::new(),
        excused_after: None,
        ended: Vec::new(),
    };
    for _ in 0..STEPS {
        world.step().await?;
    }
    world.settle().await?;
    world.check().await?;
    // A write that has timed out can store its object at any later time.
    while !store.state().late.is_empty() {
        world.write_late_object();
        world.check().await?;
    }
    Ok(())
}

#[tokio::test]
async fn crashes_and_lost_uploads_leave_only_reported_gaps() {
    for seed in 0..SEEDS {
        let ended = Box::pin(run(seed, None)).await;
        assert_eq!(ended, Ok(()), "seed {seed}");
    }
}

#[tokio::test]
async fn model_detects_every_deliberate_mistake() {
    for mistake in [
        Mistake::FailureIsIgnored,
        Mistake::SwitchIsEarly,
        Mistake::GapIsNotStored,
    ] {
        let mut seeds = 0..SEEDS;
        let mut ended = Ok(());
        while ended.is_ok() {
            let seed = seeds.next().unwrap_or_else(|| panic!("{mistake:?}"));
            ended = Box::pin(run(seed, Some(mistake))).await;
        }
    }
}
