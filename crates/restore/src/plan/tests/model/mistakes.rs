//! Deliberate mistakes outside of the planner, which the model must detect. Also the steps that this needs: losses of
//! volumes and members, and a delayed second operator process.

use proptest::prelude::*;
use proptest::test_runner::{RngAlgorithm, TestRng, TestRunner};

use super::properties::fates;
use super::storage::{around_without_storage, without_storage};
use super::*;

/// A deliberate mistake.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mistake {
    /// The backup is chosen again in each reconcile.
    ChoosesAnew,
    /// The increase of the revision comes from the spec in each reconcile.
    AsksTheSpec,
    /// An existing volume is assumed to contain the right data.
    TakesTheVolumeForData,
    /// A lost report is waited for.
    TrustsTheMessage,
    /// A seed's pod is never compared with the record.
    NeverCompares,
    /// The data on a volume is assumed to come from the backup in the arguments of the pod.
    SaysNothing,
    /// A seed's pod whose creation was delayed is not deleted.
    CreatesLate,
    /// The cutover is made to a seed that was deleted after the observation.
    TurnsLate,
    /// Without storage the restore is abandoned at any time.
    GivesUpLate,
    /// Without storage the restore waits.
    WaitsForStorage,
}

/// Steps with occasional additional steps.
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
/// Steps around the cutover, which is short.
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

/// Steps with an action that is executed long after it was planned.
fn late() -> impl Strategy<Value = Vec<Fate>> {
    let others = prop::collection::vec(prop::sample::select(AFTER), 0..30);
    (0..50_usize, 0..50_usize, others).prop_map(|(before, after, others)| {
        let mut all: Vec<Fate> = quiet(before).collect();
        all.push(Fate::ReadLate);
        all.extend(quiet(after).chain(others));
        all
    })
}

/// Steps with an action that is executed soon after it was planned, without writes of the cluster operator.
fn soon() -> impl Strategy<Value = Vec<Fate>> {
    let others = prop::collection::vec(prop::sample::select(SOON_AFTER), 0..12);
    (15..50_usize, others).prop_map(|(before, others)| {
        let mut all: Vec<Fate> = quiet(before).collect();
        all.push(Fate::ReadLate);
        all.extend(others);
        all
    })
}

/// Steps without faults.
fn quiet(fates: usize) -> impl Iterator<Item = Fate> {
    let all = [Fate::Reconcile, Fate::Kubelet, Fate::ClusterOperator];
    all.into_iter().cycle().take(fates)
}

/// Steps with another choice of the backup after the observation of a delayed process, and with lost pods.
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
    /// Runs until the cutover.
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

    /// Lost objects are created again, or the loss is reported. The lock is released, and no cluster without data is
    /// handed over.
    #[test]
    fn restore_in_place_ends_after_any_loss(
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
        world.end_faults();
        let cluster = world.cluster.as_ref().unwrap();
        prop_assert!(!cluster.claim, "{:?} {cluster:?}", world.restore.status);
        prop_assert!(world.restore.metadata.finalizers.is_none());
    }

    /// Invariant 11: only the recorded backup is handed over, regardless of the process, and the lock is released.
    #[test]
    fn invariant_11_delayed_operator_does_no_harm(
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
        world.end_faults();
        if world.gone {
            prop_assert!(world.cluster.is_none_or(|cluster| !cluster.claim));
        }
    }

    /// Invariant 11: the same holds long after the handover, when clients have written to the cluster.
    #[test]
    fn invariant_11_action_long_after_plan_does_no_harm(
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
        world.end_faults();
        if world.gone {
            prop_assert!(world.cluster.is_none_or(|cluster| !cluster.claim));
        }
    }

    #[test]
    fn restore_completes_after_delays_end(
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
        world.end_faults();
        prop_assert!(world.succeeded(), "{:?} {:?}", world.restore.status, world.cluster);
    }
}

/// The report of the model on a mistake; empty if the model does not detect it.
fn found(mistake: Mistake, fates: impl Strategy<Value = Vec<Fate>>) -> String {
    let quiet = ProptestConfig {
        // Many times the number that the rarest mistake needs, about 500.
        cases: 20_000,
        max_shrink_iters: 0,
        failure_persistence: None,
        ..config()
    };
    // A fixed seed makes the test deterministic.
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
            world.end_faults();
        }
        let claimed = world.cluster.as_ref().is_some_and(|it| it.claim);
        let waits = claimed && (for_storage || mistake == Mistake::TrustsTheMessage);
        prop_assert!(!waits, "it waits for ever");
        Ok(())
    });
    played.map_or_else(|found| format!("{found:?}"), |()| String::new())
}

/// The checks of the model work.
#[test]
fn model_detects_every_mistake_of_restore() {
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
