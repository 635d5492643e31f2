//! Rounds of plan and act on a model of Kubernetes and etcd: crashes between any two writes, lost replies, stale
//! reads, lost pods and disks, partitions, sizes that change, a second operator at once. The invariants are
//! checked at every write and every tick; when the faults stop, the cluster must converge.
//!
//! Steps are taken apart into the same primitive writes that the real operator sends. A failing case prints its
//! events: they are the whole story and replay it. `PROPTEST_CASES=20000 cargo test -p cluster --test model` runs
//! longer.

#![allow(clippy::panic, clippy::unwrap_used)]

#[path = "model/etcd.rs"]
mod etcd_model;
#[path = "model/invariants.rs"]
mod invariants;
#[path = "model/read.rs"]
mod read;
#[path = "model/run.rs"]
mod run;
#[path = "model/world.rs"]
mod world;
#[path = "model/write.rs"]
mod write;

use proptest::collection::vec;
use proptest::prelude::*;

use run::{Event, Run, Setup};

fn setup() -> impl Strategy<Value = Setup> {
    let versions = prop_oneof![5 => Just("3.6.16"), 2 => Just("3.5.35"), 1 => Just("3.3.27")];
    (
        1..=7_usize,
        prop::bool::weighted(0.2),
        any::<bool>(),
        versions,
    )
        .prop_map(|(size, seed, durable, version)| Setup {
            size,
            seed,
            durable,
            version,
        })
}

/// Faults of one operator's world.
fn event() -> impl Strategy<Value = Event> {
    prop_oneof![
        8 => Just(Event::Round),
        6 => Just(Event::Tick),
        3 => (any::<u8>()).prop_map(|after| Event::Crash { after }),
        2 => (any::<u8>()).prop_map(|after| Event::LoseReply { after }),
        1 => (any::<u8>()).prop_map(|after| Event::Refuse { after }),
        2 => (any::<u8>(), any::<u8>()).prop_map(|(ticks, after)| Event::ActLate { ticks: ticks % 3, after }),
        2 => any::<u8>().prop_map(Event::DeletePod),
        1 => any::<u8>().prop_map(Event::LosePod),
        1 => any::<u8>().prop_map(Event::LoseDisk),
        1 => any::<u8>().prop_map(Event::LoseNode),
        1 => any::<u8>().prop_map(Event::DeleteClaim),
        1 => any::<u8>().prop_map(Event::Damage),
        1 => any::<u8>().prop_map(Event::Isolate),
        1 => any::<u8>().prop_map(Event::Hold),
        2 => Just(Event::Heal),
        2 => (1..=7_usize).prop_map(Event::Resize),
        1 => any::<u8>().prop_map(Event::DriftService),
        1 => Just(Event::DeleteShared),
        1 => Just(Event::Deafen),
        1 => Just(Event::ForgetStatus),
    ]
}

/// The same with a second operator whose looks and writes come at any moment.
fn event_of_two() -> impl Strategy<Value = Event> {
    prop_oneof![
        // A status lost while two act, and once more, leaves nothing to tell the clusters apart by.
        6 => event().prop_map(|event| if matches!(event, Event::ForgetStatus) { Event::Round } else { event }),
        3 => Just(Event::SecondLooks),
        4 => any::<u8>().prop_map(Event::SecondWrites),
    ]
}

fn cases(default: u32) -> ProptestConfig {
    let cases = std::env::var("PROPTEST_CASES")
        .ok()
        .and_then(|text| text.parse().ok())
        .unwrap_or(default);
    ProptestConfig {
        cases,
        max_shrink_iters: 4000,
        failure_persistence: None,
        ..ProptestConfig::default()
    }
}

proptest! {
    #![proptest_config(cases(5000))]

    /// Invariants 1 to 8 and 10.
    #[test]
    fn no_fault_breaks_an_invariant_and_the_cluster_converges(setup in setup(), events in vec(event(), 1..60)) {
        let mut run = Run::new(&setup);
        for event in events {
            run.event(event);
        }
        run.converges();
    }

    /// Invariant 11.
    #[test]
    fn invariant_11_two_operators_at_once_do_no_harm(setup in setup(), events in vec(event_of_two(), 1..60)) {
        let mut run = Run::new(&setup);
        run.two_operators();
        for event in events {
            run.event(event);
        }
        run.converges();
    }
}

#[test]
fn a_cluster_forms_in_a_few_rounds_without_faults() {
    for size in 1..=7 {
        for durable in [false, true] {
            let mut run = Run::new(&Setup {
                size,
                seed: false,
                durable,
                version: "3.6.16",
            });
            run.converges();
            assert!(run.rounds() <= 8, "{size}: {} rounds", run.rounds());
        }
    }
}

#[test]
fn old_etcd_grows_with_voters() {
    let mut run = Run::new(&Setup {
        size: 1,
        seed: false,
        durable: false,
        version: "3.3.27",
    });
    run.converges();
    run.event(Event::Resize(3));
    run.converges();
}

#[test]
fn sizes_are_reached_from_every_size_also_when_the_target_changes_midway() {
    for (from, via, to) in
        (1..=7).flat_map(|from| (1..=7).flat_map(move |via| (1..=7).map(move |to| (from, via, to))))
    {
        let (durable, seed) = (via % 2 == 0, to % 2 == 0);
        let version = ["3.6.16", "3.5.35", "3.3.27"][from % 3];
        let mut run = Run::new(&Setup {
            size: from,
            seed,
            durable,
            version,
        });
        run.converges();
        run.event(Event::Resize(via));
        // The target changes at another moment of the way each time.
        for _ in 0..(from + via + to) % 9 {
            run.event(Event::Round);
            run.event(Event::Tick);
        }
        run.event(Event::Resize(to));
        run.converges();
    }
}
