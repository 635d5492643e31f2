//! Runs the window with a simulated etcd that reorders requests and answers.

use std::collections::{BTreeMap, BTreeSet};

use etcd::{Change, Value};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use super::*;

const KEYS: u8 = 6;

fn key(index: u8) -> Bytes {
    Bytes::from(vec![b'k', index])
}

fn change(index: u8, is_put: bool) -> Change {
    Change {
        key: key(index),
        value: is_put.then(Value::default),
    }
}

fn transaction(revision: i64, changes: Vec<Change>) -> Arc<Transaction> {
    Arc::new(Transaction {
        revision,
        observed: 0,
        changes,
    })
}

/// The transactions of the revisions 2 to `count` + 1. Only existing keys are deleted, as in a real chain.
fn history(rng: &mut StdRng, count: i64, share_of_deletions: f64) -> Vec<Arc<Transaction>> {
    let mut existing = BTreeSet::new();
    let mut all = Vec::new();
    for revision in 2..count + 2 {
        let first = rng.random_range(0..KEYS);
        let length: u8 = rng.random_range(1..4);
        let mut changes = Vec::new();
        for index in first..(first + length).min(KEYS) {
            if existing.contains(&index) && rng.random_bool(share_of_deletions) {
                existing.remove(&index);
                changes.push(change(index, false));
            } else {
                existing.insert(index);
                changes.push(change(index, true));
            }
        }
        all.push(transaction(revision, changes));
    }
    all
}

/// An etcd with the modification revisions of its keys. It processes the requests in the order that the test chooses.
struct SimulatedEtcd {
    revision: i64,
    /// The modification revisions of all keys.
    keys: BTreeMap<Bytes, i64>,
    /// Requests that etcd has received and not processed.
    requests: Vec<Attempt>,
    /// Answers that the replay has not received.
    answers: Vec<(i64, Answer)>,
    processed: usize,
}

impl SimulatedEtcd {
    fn new() -> Self {
        Self {
            revision: 1,
            keys: BTreeMap::new(),
            requests: Vec::new(),
            answers: Vec::new(),
            processed: 0,
        }
    }

    fn in_flight(&self) -> usize {
        self.requests.len() + self.answers.len()
    }

    fn process(&mut self, index: usize) {
        let Attempt { transaction, guard } = self.requests.remove(index);
        let applied = match &guard {
            None => true,
            Some(Guard::Modified { key, revision }) => self.keys.get(key) == Some(revision),
            Some(Guard::Deleted { key }) => !self.keys.contains_key(key),
        };
        if applied {
            self.revision += 1;
            for change in &transaction.changes {
                if change.value.is_some() {
                    self.keys.insert(change.key.clone(), self.revision);
                } else {
                    self.keys.remove(&change.key);
                }
            }
        }
        self.processed += 1;
        let revision = self.revision;
        let answer = Answer { applied, revision };
        self.answers.push((transaction.revision, answer));
    }

    /// A write of another client.
    fn foreign_write(&mut self) {
        self.revision += 1;
        self.keys.insert("foreign".into(), self.revision);
    }
}

/// A replay of `history` with random delays.
struct Simulation {
    rng: StdRng,
    etcd: SimulatedEtcd,
    window: Window,
    /// A request or an answer overtakes fewer than this number of earlier ones. 1 means no disorder.
    disorder: usize,
    most_in_flight: usize,
}

impl Simulation {
    fn new(rng: StdRng, disorder: usize) -> Self {
        Self {
            rng,
            etcd: SimulatedEtcd::new(),
            window: Window::new(1),
            disorder,
            most_in_flight: 0,
        }
    }

    fn pick(&mut self, length: usize) -> usize {
        self.rng.random_range(0..length.min(self.disorder))
    }

    /// Sends all transactions and waits for all answers. `step` is called at the start of each iteration.
    fn run(
        &mut self,
        history: &[Arc<Transaction>],
        mut step: impl FnMut(&mut SimulatedEtcd),
    ) -> Result<(), Drift> {
        let mut next = history.iter().peekable();
        loop {
            step(&mut self.etcd);
            self.most_in_flight = self.most_in_flight.max(self.etcd.in_flight());
            let choice = self.rng.random_range(0..4);
            if choice < 2
                && let Some(transaction) = next.peek()
                && let Some(attempt) = self.window.admit(transaction)
            {
                next.next();
                self.etcd.requests.push(attempt);
            } else if choice < 3 && !self.etcd.requests.is_empty() {
                let index = self.pick(self.etcd.requests.len());
                self.etcd.process(index);
            } else if !self.etcd.answers.is_empty() {
                let index = self.pick(self.etcd.answers.len());
                let (revision, answer) = self.etcd.answers.remove(index);
                let again = self.window.answer(revision, answer)?;
                self.etcd.requests.extend(again);
            } else if self.etcd.requests.is_empty() && next.peek().is_none() {
                return Ok(());
            }
        }
    }
}

/// Invariant 38: etcd applies each transaction at exactly the recorded revision.
#[test]
fn transactions_processed_out_of_order_keep_their_revisions() {
    for seed in 0..300 {
        let mut rng = StdRng::seed_from_u64(seed);
        let share = rng.random_range(0.0..1.0);
        let history = history(&mut rng, 200, share);
        let disorder = [1, 2, 3, 8, 64][rng.random_range(0..5)];
        let mut simulation = Simulation::new(rng, disorder);
        let mut expected = SimulatedEtcd::new();
        for transaction in &history {
            expected.requests.push(Attempt {
                transaction: transaction.clone(),
                guard: None,
            });
            expected.process(0);
        }
        simulation.run(&history, |_| ()).unwrap();
        assert_eq!(simulation.etcd.revision, 201, "seed {seed}");
        assert_eq!(simulation.etcd.keys, expected.keys, "seed {seed}");
        assert_eq!(simulation.window.sent(), 201);
        assert!(simulation.most_in_flight <= MAX_IN_FLIGHT);
        let repeated = usize::try_from(simulation.window.repeated()).unwrap();
        assert_eq!(simulation.etcd.processed, 200 + repeated, "seed {seed}");
    }
}

#[test]
fn transactions_processed_in_order_are_sent_once() {
    let mut rng = StdRng::seed_from_u64(1);
    let history = history(&mut rng, 2_000, 0.0);
    let mut simulation = Simulation::new(rng, 1);
    simulation.run(&history, |_| ()).unwrap();
    assert_eq!(simulation.window.repeated(), 0);
    assert_eq!(simulation.window.limit.current, MAX_IN_FLIGHT);
    assert!(simulation.most_in_flight > 4);
}

#[test]
fn reordering_shrinks_window_and_at_most_doubles_requests() {
    let mut rng = StdRng::seed_from_u64(2);
    let history = history(&mut rng, 2_000, 0.2);
    let mut simulation = Simulation::new(rng, 64);
    simulation.run(&history, |_| ()).unwrap();
    assert!(simulation.window.repeated() > 0);
    assert!(simulation.etcd.processed <= 2 * history.len());
    assert!(simulation.window.limit.current < MAX_IN_FLIGHT);
}

#[test]
fn small_window_is_probed_at_maximum_size_after_probe_interval() {
    let mut limit = Limit::new();
    while limit.current > 1 {
        limit.count(false);
    }
    let mut applied = 0;
    while limit.current < MAX_IN_FLIGHT {
        // Half of the attempts are rejected, so the window stays small until the probe.
        limit.count(false);
        limit.count(true);
        applied += 1;
        assert!(limit.current <= 2 || limit.current == MAX_IN_FLIGHT);
    }
    assert!(
        (PROBE_INTERVAL..PROBE_INTERVAL + 8).contains(&applied),
        "{applied}"
    );
}

/// Invariant 38: a replay that does not reproduce each revision fails.
#[test]
fn write_of_another_client_ends_replay() {
    for seed in 0..300 {
        let mut rng = StdRng::seed_from_u64(seed);
        let history = history(&mut rng, 100, 0.4);
        let at = rng.random_range(1..90);
        let disorder = [1, 3, 64][rng.random_range(0..3)];
        let mut simulation = Simulation::new(rng, disorder);
        let mut is_disturbed = false;
        let result = simulation.run(&history, |etcd| {
            if etcd.revision >= at && !is_disturbed {
                etcd.foreign_write();
                is_disturbed = true;
            }
        });
        let drift = result.unwrap_err();
        assert_eq!(drift.found, drift.expected + 1, "seed {seed}");
    }
}

/// A key that a transaction in flight creates is missing before this transaction. A guard that expects the deletion of
/// the key would therefore be true too early.
#[test]
fn transaction_after_deletion_waits_for_creation_of_key() {
    let mut window = Window::new(1);
    let put = window
        .admit(&transaction(2, vec![change(0, true)]))
        .unwrap();
    assert_eq!(put.guard, None);
    let deletion = transaction(3, vec![change(0, false)]);
    let expected = Guard::Modified {
        key: key(0),
        revision: 2,
    };
    assert_eq!(window.admit(&deletion).unwrap().guard, Some(expected));
    let next = transaction(4, vec![change(1, true)]);
    assert!(window.admit(&next).is_none());
    let applied = |revision| Answer {
        applied: true,
        revision,
    };
    assert!(window.answer(2, applied(2)).unwrap().is_none());
    let expected = Guard::Deleted { key: key(0) };
    assert_eq!(window.admit(&next).unwrap().guard, Some(expected));
}

#[test]
fn rejected_transactions_are_sent_again_in_order() {
    let mut window = Window::new(1);
    for revision in 2..5 {
        let next = transaction(revision, vec![change(0, true)]);
        assert!(window.admit(&next).is_some());
    }
    let rejected = Answer {
        applied: false,
        revision: 1,
    };
    assert!(window.answer(4, rejected).unwrap().is_none());
    assert!(window.answer(3, rejected).unwrap().is_none());
    let next = transaction(5, vec![change(0, true)]);
    assert!(window.admit(&next).is_none());
    let applied = |revision| Answer {
        applied: true,
        revision,
    };
    for revision in 2..4 {
        let again = window.answer(revision, applied(revision)).unwrap();
        assert_eq!(again.unwrap().transaction.revision, revision + 1);
    }
    assert!(window.answer(4, applied(4)).unwrap().is_none());
    assert_eq!(window.repeated(), 2);
    assert!(window.admit(&next).is_some());
}

#[test]
fn large_transaction_is_sent_alone() {
    let mut window = Window::new(1);
    let small = transaction(2, vec![change(0, true)]);
    assert!(window.admit(&small).is_some());
    let mut large = change(1, true);
    large.value = Some(Value {
        content: vec![0; MAX_CONTENT].into(),
        ..Value::default()
    });
    let large = transaction(3, vec![large]);
    assert!(window.admit(&large).is_none());
    let applied = |revision| Answer {
        applied: true,
        revision,
    };
    window.answer(2, applied(2)).unwrap();
    assert!(window.admit(&large).is_some());
    assert!(
        window
            .admit(&transaction(4, vec![change(0, true)]))
            .is_none()
    );
    window.answer(3, applied(3)).unwrap();
    let many = (0..=MAX_CHANGES).map(|_| change(0, true)).collect();
    assert!(window.admit(&transaction(4, many)).is_some());
    assert!(
        window
            .admit(&transaction(5, vec![change(0, true)]))
            .is_none()
    );
}
