//! Mistakes made on purpose, from outside of the planner, each of which the model must find. And the worlds that are
//! needed for that: in which volumes and members are lost by nobody's fault, and in which a second operator is late.

use proptest::prelude::*;
use proptest::test_runner::{RngAlgorithm, TestRng, TestRunner};

use super::properties::fates;
use super::storage::{around_without_storage, without_storage};
use super::*;

/// A mistake made on purpose.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mistake {
    /// The backup is chosen anew at each look.
    ChoosesAnew,
    /// By how much the revision is raised is asked of the spec at each look.
    AsksTheSpec,
    /// A volume that is there is taken for what should be on it.
    TakesTheVolumeForData,
    /// What a pod was to tell is waited for, whatever became of it.
    TrustsTheMessage,
    /// A seed's pod is never compared with the record.
    NeverCompares,
    /// What a pod has found on its volume is taken for what it was told to fetch.
    SaysNothing,
    /// A seed's pod that is made late is not taken back.
    CreatesLate,
    /// The turn is made for a seed that has gone since.
    TurnsLate,
    /// Without storage it is given up whenever that is seen.
    GivesUpLate,
    /// Without storage it is waited for some.
    WaitsForStorage,
}

/// What else may happen, now and then.
pub(super) fn with(more: &'static [Fate], people: bool) -> impl Strategy<Value = Vec<Fate>> {
    let often = prop::sample::select(vec![false, false, false, false, false, true]);
    let drawn = prop::collection::vec((often, prop::sample::select(more)), 120);
    (fates(people), drawn).prop_map(|(fates, drawn)| {
        let mut all = Vec::new();
        for (fate, (is_drawn, other)) in fates.into_iter().zip(drawn) {
            all.extend(is_drawn.then_some(other));
            all.push(fate);
        }
        all
    })
}

const LOSSES: &[Fate] = &[Fate::LoseVolume, Fate::LoseOld];
/// Around the turn, which is soon over.
const AROUND: &[Fate] = &[
    Fate::Reconcile,
    Fate::Reconcile,
    Fate::Reconcile,
    Fate::Reconcile,
    Fate::CrashAfter,
    Fate::Kubelet,
    Fate::Kubelet,
    Fate::LoseVolume,
    Fate::LoseOld,
    Fate::LosePod,
    Fate::EndPod,
    Fate::LoseMessage,
];

pub(super) fn around() -> impl Strategy<Value = Vec<Fate>> {
    prop::collection::vec(prop::sample::select(AROUND), 0..30)
}

/// A step that was planned at some moment, and comes at another, long after it.
fn late() -> impl Strategy<Value = Vec<Fate>> {
    let others = prop::collection::vec(prop::sample::select(AFTER), 0..30);
    (0..50_usize, 0..50_usize, others).prop_map(|(before, after, others)| {
        let mut all: Vec<Fate> = quiet(before).collect();
        all.push(Fate::ReadLate);
        all.extend(quiet(after).chain(others));
        all
    })
}

/// One that comes soon after it was planned, while the cluster operator writes nothing.
fn soon() -> impl Strategy<Value = Vec<Fate>> {
    let others = prop::collection::vec(prop::sample::select(SOON_AFTER), 0..12);
    (15..50_usize, others).prop_map(|(before, others)| {
        let mut all: Vec<Fate> = quiet(before).collect();
        all.push(Fate::ReadLate);
        all.extend(others);
        all
    })
}

/// Nothing goes wrong.
fn quiet(fates: usize) -> impl Iterator<Item = Fate> {
    let all = [Fate::Reconcile, Fate::Kubelet, Fate::ClusterOperator];
    all.into_iter().cycle().take(fates)
}

/// Another backup is chosen after the look of an operator that is late, and pods are lost.
fn choosing() -> impl Strategy<Value = Vec<Fate>> {
    let others = prop::collection::vec(prop::sample::select(CHOOSING), 0..60);
    (0..6_usize, others).prop_map(|(before, others)| {
        let mut all = vec![Fate::Reconcile; before];
        all.extend([Fate::ReadLate, Fate::ChangeBump]);
        all.extend(others);
        all
    })
}

impl World {
    /// Until the turn is made.
    fn turn(&mut self) {
        while !self.cluster.as_ref().is_some_and(ModelCluster::has_turned) {
            self.happen(Fate::Reconcile);
            self.happen(Fate::Kubelet);
        }
    }
}
const AFTER: &[Fate] = &[
    Fate::Reconcile,
    Fate::Kubelet,
    Fate::Kubelet,
    Fate::Kubelet,
    Fate::ClusterOperator,
    Fate::ClientWrites,
    Fate::LosePod,
    Fate::EndPod,
    Fate::DeleteRestore,
    Fate::WriteLate,
    Fate::WriteLate,
];
const SOON_AFTER: &[Fate] = &[
    Fate::Reconcile,
    Fate::Kubelet,
    Fate::LosePod,
    Fate::DeleteRestore,
    Fate::WriteLate,
    Fate::WriteLate,
];
const CHOOSING: &[Fate] = &[
    Fate::Reconcile,
    Fate::Reconcile,
    Fate::Kubelet,
    Fate::Kubelet,
    Fate::ActLate,
    Fate::WriteLate,
    Fate::LosePod,
];
const LATE: &[Fate] = &[
    Fate::ReadLate,
    Fate::ActLate,
    Fate::ActLate,
    Fate::WriteLate,
    Fate::WriteLate,
    Fate::ChangeBump,
];

fn config() -> ProptestConfig {
    ProptestConfig {
        cases: 3000,
        ..ProptestConfig::default()
    }
}

proptest! {
    #![proptest_config(config())]

    /// What was lost is made again, or said to be lost: no claim stays, and nothing is handed over that was never there.
    #[test]
    fn a_restore_in_place_comes_to_an_end_whatever_is_lost(
        fates in with(LOSSES, false),
        around in around(),
        turn: bool,
    ) {
        let mut world = World::replacing(true, true);
        if turn {
            world.turn();
        }
        for fate in if turn { around } else { fates } {
            world.happen(fate);
        }
        world.calm_down();
        let cluster = world.cluster.as_ref().unwrap();
        prop_assert!(!cluster.claim, "{:?} {cluster:?}", world.restore.status);
        prop_assert!(world.restore.metadata.finalizers.is_none());
    }

    /// Invariant 11: nothing of another backup than the recorded one is handed over, whoever made it, and no claim stays.
    #[test]
    fn invariant_11_an_operator_that_is_late_does_no_harm(
        durable: bool,
        in_place: bool,
        manifests: bool,
        fates in with(LATE, true),
    ) {
        let mut world = if in_place {
            World::replacing(durable, true)
        } else {
            World::new(durable, true)
        };
        world.manifests = manifests;
        for fate in fates {
            if !(in_place && matches!(fate, Fate::StrangerCreates)) {
                world.happen(fate);
            }
        }
        world.calm_down();
        if world.gone {
            prop_assert!(world.cluster.is_none_or(|cluster| !cluster.claim));
        }
    }

    /// Invariant 11: also not when the cluster was handed over long ago, and clients have written to it.
    #[test]
    fn invariant_11_a_step_that_comes_long_after_it_was_planned_does_no_harm(
        durable: bool,
        in_place: bool,
        manifests: bool,
        fates in prop_oneof![late(), soon(), choosing()],
    ) {
        let mut world = if in_place {
            World::replacing(durable, true)
        } else {
            World::new(durable, true)
        };
        world.manifests = manifests;
        for fate in fates {
            world.happen(fate);
        }
        world.calm_down();
        if world.gone {
            prop_assert!(world.cluster.is_none_or(|cluster| !cluster.claim));
        }
    }

    #[test]
    fn a_restore_completes_when_nobody_is_late_any_more(
        in_place: bool,
        manifests: bool,
        fates in with(LATE, false),
    ) {
        let mut world = if in_place {
            World::replacing(true, true)
        } else {
            World::new(true, true)
        };
        world.manifests = manifests;
        for fate in fates {
            world.happen(fate);
        }
        world.calm_down();
        prop_assert!(world.succeeded(), "{:?} {:?}", world.restore.status, world.cluster);
    }
}

/// What the model says of a mistake, and nothing where it overlooks it.
fn found(mistake: Mistake, fates: impl Strategy<Value = Vec<Fate>>) -> String {
    let quiet = ProptestConfig {
        // Many times what the rarest of them takes, some 500.
        cases: 20_000,
        max_shrink_iters: 0,
        failure_persistence: None,
        ..config()
    };
    // The same rounds each time: what is found today is found tomorrow.
    let drawn = TestRng::deterministic_rng(RngAlgorithm::ChaCha);
    let played = TestRunner::new_with_rng(quiet, drawn).run(&fates, |fates| {
        let mut world = match mistake {
            Mistake::CreatesLate => World::new(false, true),
            _ => World::replacing(true, true),
        };
        world.manifests = mistake != Mistake::SaysNothing;
        world.mistake = Some(mistake);
        if matches!(
            mistake,
            Mistake::TakesTheVolumeForData | Mistake::GivesUpLate
        ) {
            world.turn();
        }
        for fate in fates {
            if !matches!(fate, Fate::StrangerCreates) {
                world.happen(fate);
            }
        }
        let for_storage = mistake == Mistake::WaitsForStorage;
        if for_storage {
            world.go_on();
        } else {
            world.calm_down();
        }
        let claimed = world.cluster.as_ref().is_some_and(|it| it.claim);
        let waits = claimed && (for_storage || mistake == Mistake::TrustsTheMessage);
        prop_assert!(!waits, "it waits for ever");
        Ok(())
    });
    played.map_or_else(|found| format!("{found:?}"), |()| String::new())
}

/// The model's judge is not asleep.
#[test]
fn every_mistake_of_a_restore_is_found() {
    for (mistake, said) in [
        (Mistake::ChoosesAnew, "several backups"),
        (Mistake::AsksTheSpec, "several backups"),
        (
            Mistake::TakesTheVolumeForData,
            "a volume that nothing is on",
        ),
        (Mistake::TrustsTheMessage, "it waits for ever"),
        (
            Mistake::NeverCompares,
            "another backup than the recorded one",
        ),
        (Mistake::SaysNothing, "another backup than the recorded one"),
        (
            Mistake::CreatesLate,
            "acknowledged writes were restored over",
        ),
        (Mistake::TurnsLate, "recorded without verified data"),
        (Mistake::GivesUpLate, "given up after the turn"),
        (Mistake::WaitsForStorage, "it waits for ever"),
    ] {
        let found = match mistake {
            Mistake::TakesTheVolumeForData => found(mistake, around()),
            Mistake::NeverCompares => found(mistake, with(LATE, false)),
            Mistake::SaysNothing => found(mistake, choosing()),
            Mistake::CreatesLate => found(mistake, late()),
            Mistake::TurnsLate => found(mistake, soon()),
            Mistake::GivesUpLate => found(mistake, around_without_storage()),
            Mistake::WaitsForStorage => found(mistake, without_storage()),
            _ => found(mistake, fates(false)),
        };
        assert!(found.contains(said), "{mistake:?}: {found:?}");
    }
}
