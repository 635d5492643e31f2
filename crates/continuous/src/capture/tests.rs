//! A model of the capture: [`Capture::run`] records a simulated etcd in a simulated store.
//!
//! At random, etcd splits the events, ends watches, compacts or skips revisions, gives no answer, gets another cluster
//! ID, or loses data. Uploads fail, lose their answers or arrive late. The caller drops the capture, or only the future
//! of [`Capture::run`], at random awaits. The tests in `tests/etcd` run the same code with a real etcd.
#![allow(clippy::unwrap_used, clippy::panic)]

mod etcd_model;

use std::collections::BTreeSet;

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use tokio::task::yield_now;

use self::etcd_model::{CLUSTER, EtcdModel};
use super::*;
use crate::fixture::base;
use crate::fixture::memory::Memory;
use crate::recorder::Limits;
use crate::stored::{Reader, base_key, tip};

const PREFIX: &str = "p/";
const MEMBER: &str = "member";
const SEEDS: u64 = 300;
/// Number of processes that record the same chain one after the other.
const PROCESSES: usize = 5;
/// A process calls [`Capture::run`] fewer than this number of times.
const RUNS: usize = 8;
/// If nothing fails, at most this number of calls of [`Capture::run`] must record all changes.
const ATTEMPTS: usize = 20;

struct Model {
    etcd: EtcdModel,
    store: Memory,
    base: StoredBase,
    limits: Limits,
    rng: StdRng,
    /// The reason of the gap that [`Capture::run`] has returned.
    gap: Option<GapReason>,
    /// True if a process has found the end of the chain in the store.
    has_found_end: bool,
    /// The last revision that a process has reported as stored.
    reported: i64,
}

fn extras() -> Extras {
    Extras {
        hash_interval: Some(Duration::from_secs(1)),
        lease_interval: Duration::from_secs(1),
    }
}

fn text(error: &dyn std::error::Error) -> String {
    let cause = error.source().map(ToString::to_string);
    format!("{error}: {}", cause.unwrap_or_default())
}

/// Completes after `count` polls.
async fn polls(count: usize) {
    for _ in 0..count {
        yield_now().await;
    }
}

impl Model {
    fn new(seed: u64) -> Self {
        let mut rng = StdRng::seed_from_u64(seed);
        let (base, store) = (base(), Memory::default());
        let key = base_key(PREFIX, base.name);
        store.state().objects.insert(key, base.object.clone());
        store.state().random = Some(StdRng::seed_from_u64(seed + 1));
        // With an interval of 0, each batch completes a segment.
        let interval = Duration::from_secs(rng.random_range(0..2));
        Self {
            etcd: EtcdModel::new(base.base.revision, seed + 2),
            store,
            limits: Limits {
                interval,
                bytes: 1 << 20,
            },
            rng,
            gap: None,
            has_found_end: false,
            reported: base.base.revision,
            base,
        }
    }

    fn has_ended(&self) -> bool {
        self.gap.is_some() || self.has_found_end
    }

    fn capture(&self, recorder: Recorder) -> (Capture<'_>, Monitor) {
        let monitor = Monitor::default();
        monitor.begin(&self.base, (recorder.last(), 0), (0, 0));
        let base = self.base.clone();
        let capture = Capture::new(&self.etcd, &self.store, PREFIX, base, recorder, extras());
        (capture.with_spool(None, monitor.clone()), monitor)
    }

    /// The recorder of the next process. `None` if the chain has ended.
    async fn resumed(&self) -> Result<Option<Recorder>, String> {
        let found = tip(&self.store, PREFIX, self.base.name).await;
        let found = found.map_err(|error| text(&error))?;
        let Some(segment) = &found.segment else {
            return Ok(Some(Recorder::new(&self.base, self.limits)));
        };
        match Recorder::resume(&self.base, segment, self.limits) {
            Ok(recorder) => Ok(Some(recorder)),
            Err(RecorderError::Ended { .. }) => Ok(None),
            Err(error) => Err(text(&error)),
        }
    }

    /// Runs one process until a crash, or until the chain has ended.
    async fn process(&mut self) -> Result<(), String> {
        let Some(recorder) = self.resumed().await? else {
            self.has_found_end = true;
            return Ok(());
        };
        if recorder.last() < self.reported {
            return Err(format!("revision {} was reported as stored", self.reported));
        }
        let runs = self.rng.random_range(1..RUNS);
        let mut choices: Vec<(u32, usize)> = Vec::new();
        for _ in 0..runs {
            choices.push((self.rng.random_range(0..3), self.rng.random_range(0..60)));
        }
        let (mut capture, monitor) = self.capture(recorder);
        let mut gap = None;
        for (choice, count) in choices {
            self.etcd.change();
            let ended = if choice == 0 {
                let stop = self.etcd.drained();
                Some(Box::pin(capture.run(MEMBER, stop)).await)
            } else {
                // After `count` polls, the caller drops the future, and calls `run` again in the next iteration.
                tokio::select! {
                    biased;
                    ended = Box::pin(capture.run(MEMBER, std::future::pending())) => Some(ended),
                    () = polls(count) => None,
                }
            };
            match ended {
                Some(Ok(End::Gap(reason))) => {
                    gap = Some(reason);
                    break;
                }
                Some(Ok(End::Stopped)) => {
                    let stored = monitor.read().revision.unwrap_or_default();
                    if stored < capture.last() {
                        return Err(format!("revision {} is not stored", capture.last()));
                    }
                }
                Some(Err(CaptureError::Recorder(error))) => return Err(text(&error)),
                Some(Err(_)) => capture.pause(Duration::from_secs(1)).await,
                None => {}
            }
        }
        let reported = monitor.read().revision.unwrap_or_default();
        drop(capture);
        self.gap = gap;
        self.reported = self.reported.max(reported);
        Ok(())
    }

    /// Ends the faults. All changes must be recorded, unless the chain ends with a gap.
    async fn settle(&mut self) -> Result<(), String> {
        self.etcd.end_faults();
        self.store.state().random = None;
        let Some(recorder) = self.resumed().await? else {
            self.has_found_end = true;
            return Ok(());
        };
        let (mut capture, _) = self.capture(recorder);
        let mut gap = None;
        for _ in 0..ATTEMPTS {
            let stop = self.etcd.drained();
            let ended = Box::pin(capture.run(MEMBER, stop)).await;
            match ended {
                Ok(End::Gap(reason)) => {
                    gap = Some(reason);
                    break;
                }
                Ok(End::Stopped) if capture.last() == self.etcd.revision() => return Ok(()),
                Ok(End::Stopped) => {}
                Err(error) => return Err(text(&error)),
            }
        }
        drop(capture);
        self.gap = gap;
        match gap {
            Some(_) => Ok(()),
            None => Err("the capture does not record all changes".to_owned()),
        }
    }

    /// Reads the chain, and compares it with the history of etcd. If `late` is true, the store has received a delayed
    /// segment of an earlier process, and the chain may end with segments of that process.
    async fn check(&self, late: bool) -> Result<(), String> {
        let failed = |error: crate::stored::ReadError| text(&error);
        let opened = Reader::open(&self.store, PREFIX, self.base.name).await;
        let mut reader = opened.map_err(failed)?;
        if !reader.chain().faults.is_empty() {
            return Err(format!("{:?}", reader.chain().faults));
        }
        let (mut leases, mut gap) = (BTreeSet::new(), None);
        while let Some(segment) = reader.next().await.map_err(failed)? {
            for record in segment.records {
                match record {
                    Record::Lease(it) => {
                        leases.insert(it.id);
                    }
                    Record::LeaseEnd(it) => {
                        leases.remove(&it.id);
                    }
                    Record::Hash(_) => {}
                    Record::Gap(it) => gap = Some(it),
                    Record::Transaction(it) => {
                        if Some(&it.changes) != self.etcd.changes(it.revision).as_ref() {
                            return Err(format!("revision {} has other changes", it.revision));
                        }
                        let values = it.changes.iter().filter_map(|it| it.value.as_ref());
                        let mut used = values.map(|value| value.lease).filter(|it| *it != 0);
                        if let Some(lease) = used.find(|lease| !leases.contains(lease)) {
                            return Err(format!("lease {lease} is not recorded"));
                        }
                    }
                }
            }
        }
        if reader.last() < self.reported {
            return Err(format!("revision {} was reported as stored", self.reported));
        }
        let Some(gap) = gap else {
            let is_complete = reader.last() == self.etcd.revision() && !self.has_ended();
            return if is_complete || late {
                Ok(())
            } else {
                Err(format!("the chain ends at revision {}", reader.last()))
            };
        };
        if !self.etcd.explains(gap.reason, gap.after) {
            return Err(format!("{gap:?} has no cause"));
        }
        let is_returned = late || self.gap.is_none_or(|reason| reason == gap.reason);
        if gap.after == reader.last() && is_returned && self.has_ended() {
            Ok(())
        } else {
            Err(format!("{gap:?} is not the end of the chain"))
        }
    }
}

async fn run(seed: u64, ignores_failures: bool) -> Result<Option<GapReason>, String> {
    let mut model = Model::new(seed);
    model.store.state().ignores_failures = ignores_failures;
    for _ in 0..PROCESSES {
        if !model.has_ended() {
            model.process().await?;
        }
    }
    if !model.has_ended() {
        model.settle().await?;
    }
    model.check(false).await?;
    // A write that has timed out can store its object at any later time.
    while !model.store.state().late.is_empty() {
        model.store.state().write_late_object(0);
        model.check(true).await?;
    }
    Ok(model.gap)
}

#[tokio::test(start_paused = true)]
async fn capture_records_all_changes_or_a_gap_with_its_cause() {
    let mut seen = Vec::new();
    for seed in 0..SEEDS {
        match Box::pin(run(seed, false)).await {
            Ok(gap) if !seen.contains(&gap) => seen.push(gap),
            Ok(_) => {}
            Err(problem) => panic!("seed {seed}: {problem}"),
        }
    }
    for expected in [
        None,
        Some(GapReason::Compacted),
        Some(GapReason::ClusterChanged),
        Some(GapReason::RevisionMissing),
        Some(GapReason::RevisionReset),
    ] {
        assert!(seen.contains(&expected), "{expected:?} never happens");
    }
}

#[tokio::test(start_paused = true)]
async fn capture_model_detects_lost_uploads() {
    for seed in 0..SEEDS {
        if Box::pin(run(seed, true)).await.is_err() {
            return;
        }
    }
    panic!("no lost segment is detected");
}

#[test]
fn simulated_etcd_has_cluster_id_of_base() {
    assert_eq!(CLUSTER, base().base.cluster_id.0);
}
