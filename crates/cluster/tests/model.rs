//! A model of Kubernetes and etcd (the world) in which the operator runs. In each round, the operator observes the
//! world and plans, and the model executes the writes of the plan. Between rounds, time passes in ticks of three
//! seconds.
//!
//! Faults are crashes between any two writes; lost, late and rejected writes; stale reads; an unavailable API server;
//! lost pods, disks and nodes; damaged data; and partitions. Users change the size, delete and edit objects, and
//! approve recoveries. A second operator may act concurrently. The model checks the invariants at every plan, every
//! write and every tick. The main check is that no acknowledged write is lost. After the faults stop, the cluster must
//! converge.
//!
//! A seed determines all events of a run, with the same result on every machine. If a run fails, the model leaves out
//! the events that the failure does not need, and prints the needed events in order (the story).
//! docs/contributing/testing.md describes the variables `MODEL_SEED`, `MODEL_ROUNDS` and `MODEL_FROM`.

#![allow(clippy::panic, clippy::unwrap_used)]

#[path = "model/authorities.rs"]
mod authorities;
#[path = "model/converge.rs"]
mod converge;
#[path = "model/deletion.rs"]
mod deletion;
#[path = "model/downgrade.rs"]
mod downgrade;
#[path = "model/etcd.rs"]
mod etcd_model;
#[path = "model/event.rs"]
mod event;
#[path = "model/faults.rs"]
mod faults;
#[path = "model/invariants.rs"]
mod invariants;
#[path = "model/joining.rs"]
mod joining;
#[path = "model/missteps.rs"]
mod missteps;
#[path = "model/mistakes.rs"]
mod mistakes;
#[path = "model/mutation.rs"]
mod mutation;
#[path = "model/others.rs"]
mod others;
#[path = "model/oversights.rs"]
mod oversights;
#[path = "model/owner.rs"]
mod owner;
#[path = "model/plans.rs"]
mod plans;
#[path = "model/read.rs"]
mod read;
#[path = "model/recovery.rs"]
mod recovery;
#[path = "model/removed.rs"]
mod removed;
#[path = "model/retained.rs"]
mod retained;
#[path = "model/run.rs"]
mod run;
#[path = "model/sent.rs"]
mod sent;
#[path = "model/served.rs"]
mod served;
#[path = "model/stale.rs"]
mod stale;
#[path = "model/story.rs"]
mod story;
#[path = "model/switch.rs"]
mod switch;
#[path = "model/time.rs"]
mod time;
#[path = "model/versions.rs"]
mod versions;
#[path = "model/volumes.rs"]
mod volumes;
#[path = "model/wishes.rs"]
mod wishes;
#[path = "model/world.rs"]
mod world;
#[path = "model/write.rs"]
mod write;
#[path = "model/writes.rs"]
mod writes;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use event::{Event, Setup};
use mutation::Mutation;
use story::{explore, hunt, play, play_seed, tell};

/// Number of rounds of the tests that call `check`, if `MODEL_ROUNDS` is not set.
const ROUNDS: usize = 120_000;
/// Number of rounds within which the model must detect each deliberate mistake.
const HUNT: usize = 600_000;

fn number<T: std::str::FromStr>(name: &str) -> Option<T> {
    std::env::var(name).ok()?.parse().ok()
}

fn check(two: bool) {
    if let Some(seed) = number("MODEL_SEED") {
        let told = tell(seed, two, None);
        println!("{told}");
        assert!(told.is_well(), "seed {seed} fails");
        return;
    }
    let (first, rounds) = (
        number("MODEL_FROM").unwrap_or(0),
        number("MODEL_ROUNDS").unwrap_or(ROUNDS),
    );
    let begun = Instant::now();
    match explore(first, two, rounds) {
        Ok((seeds, played)) => {
            println!(
                "{played} rounds of seeds {first} to {} in {:.1?}",
                first + seeds - 1,
                begun.elapsed()
            );
            assert!(played >= rounds);
        }
        Err(failure) => panic!("{failure}"),
    }
}

/// Checks invariants 1 to 8 and 10 while random faults affect the members, the nodes and the API server.
#[test]
fn cluster_keeps_invariants_and_converges_despite_faults() {
    check(false);
}

#[test]
fn invariant_11_holds_with_concurrent_operators() {
    check(true);
}

/// For each deliberate mistake, finds a seed whose run fails with the mistake and passes without it.
#[test]
fn model_detects_every_deliberate_mistake() {
    let next = AtomicUsize::new(0);
    let worker = || {
        let mut missed = Vec::new();
        while let Some(mutation) = Mutation::ALL.get(next.fetch_add(1, Ordering::Relaxed)) {
            let Some((seed, rounds, broken)) = hunt(*mutation, HUNT) else {
                missed.push(*mutation);
                continue;
            };
            println!("{mutation:?}: {rounds} rounds, seed {seed}: {broken:.120}");
            let without = play_seed(seed, mutation.needs_two(), None);
            assert_eq!(
                without.broken, None,
                "seed {seed} must pass without {mutation:?}"
            );
        }
        missed
    };
    let missed: Vec<Mutation> = std::thread::scope(|scope| {
        let workers = [scope.spawn(worker), scope.spawn(worker)];
        let missed = workers.into_iter().map(|worker| worker.join().unwrap());
        missed.flatten().collect()
    });
    assert!(
        missed.is_empty(),
        "the model did not detect these mistakes in {HUNT} rounds: {missed:?}"
    );
}

#[test]
fn failing_model_run_is_shortened_and_reproducible() {
    let mutation = Mutation::LetsClientsInEarly;
    let (seed, ..) = hunt(mutation, HUNT).unwrap();
    let story = || tell(seed, false, Some(mutation)).to_string();
    let told = story();
    assert_eq!(told, story());
    assert!(
        told.starts_with(&format!("seed {seed}: an acknowledged write is lost")),
        "{told}"
    );
    for words in [
        "round 1: the operator plans to",
        "ApplyClient { open: true }",
        "repeat this run: MODEL_SEED=",
    ] {
        assert!(told.contains(words), "{told}");
    }
    assert!(told.lines().count() < 150, "{told}");
}

fn quiet(size: usize, durable: bool, version: &'static str) -> Setup {
    Setup {
        size,
        seed: false,
        durable,
        local: false,
        version,
        nodes: 5,
        evicts: 10,
        patience: 4,
        slow: 0,
        automatic: false,
        two: false,
        begun: others::Begun::Here,
        silent: false,
        tls: None,
        authorities: false,
        retains: false,
        backs_up: false,
    }
}

#[test]
fn cluster_of_every_size_forms_within_nine_rounds() {
    for size in 1..=7 {
        for durable in [false, true] {
            let played = play(&quiet(size, durable, "3.6.16"), &[], None, false);
            assert_eq!(played.broken, None);
            assert!(played.rounds <= 9, "{size}: {} rounds", played.rounds);
        }
    }
}

#[test]
fn etcd_before_3_4_scales_up_without_learners() {
    let events = [
        [Event::Round, Event::Tick].repeat(9),
        vec![Event::Resize(3)],
    ]
    .concat();
    let played = play(&quiet(1, false, "3.3.27"), &events, None, false);
    assert_eq!(played.broken, None);
}

/// With etcd 3.3, a suspended process tries to remove the annotation `started` of the second member. This fails,
/// because the process that continues the start renews the annotation. With the mistake, that process renews nothing.
#[test]
fn invariant_6_suspended_operator_removes_no_renewed_started_annotation() {
    let pass = |rounds: usize| [Event::Round, Event::Tick].repeat(rounds);
    let mistake = Mutation::TrustsMarksOfOthers;
    let mut found = false;
    for (before, writes) in (0..12).flat_map(|before| (0..4).map(move |writes| (before, writes))) {
        let too_old = Event::ActLate {
            ticks: 2,
            after: 128 + writes,
        };
        let events = [
            pass(9),
            vec![Event::Resize(2)],
            pass(before),
            vec![too_old, Event::Round],
            pass(6),
        ]
        .concat();
        let setup = quiet(1, false, "3.3.27");
        assert_eq!(play(&setup, &events, None, false).broken, None);
        let broken = play(&setup, &events, Some(mistake), false).broken;
        found |= broken
            .is_some_and(|broken| broken.starts_with("invariant 6: the annotation `started` of"));
    }
    assert!(found, "the model did not detect {mistake:?}");
}

#[test]
fn cluster_reaches_every_size_even_if_size_changes_midway() {
    let sizes = || 1..=7_usize;
    let modes = sizes()
        .flat_map(|from| sizes().flat_map(move |via| sizes().map(move |to| (from, via, to))));
    for (from, via, to) in modes {
        let version = ["3.6.16", "3.5.35", "3.3.27"][from % 3];
        let pass = |rounds: usize| [Event::Round, Event::Tick].repeat(rounds);
        // The spec requests the size `via` during `midway`, and then `to`. The number of rounds in `midway` differs
        // between cases.
        let midway = pass((from + via + to) % 9);
        let events = [
            pass(9),
            vec![Event::Resize(via)],
            midway,
            vec![Event::Resize(to)],
        ]
        .concat();
        let played = play(&quiet(from, via % 2 == 0, version), &events, None, false);
        assert_eq!(
            played.broken, None,
            "{from} to {via} to {to}, etcd {version}"
        );
    }
}
