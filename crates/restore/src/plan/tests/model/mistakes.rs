//! Deliberate mistakes of the operator, and the steps that reveal them. The model must detect every mistake.

use proptest::prelude::*;
use proptest::test_runner::{RngAlgorithm, TestRng, TestRunner};

use super::properties::steps;
use super::storage::{around_without_storage, without_storage};
use super::*;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mistake {
    /// Each reconcile chooses the backup again.
    ChoosesAgain,
    /// Each reconcile uses `bumpRevision` from the spec instead of the status.
    UsesBumpOfSpec,
    /// The operator assumes that every existing volume contains the restored data.
    TreatsVolumeAsData,
    /// The operator waits forever for the termination message of the seed's container `fetch`, although the kubelet has
    /// lost it.
    ExpectsReport,
    /// The operator never compares the seed's pod with the recorded backup.
    NeverCompares,
    /// The operator assumes that the data on a volume is from the backup in the arguments of the pod.
    OmitsOrigin,
    /// The second process creates the seed's pod although the cluster no longer needs a seed.
    CreatesDelayed,
    /// The second process makes the cutover although the seed was deleted after its observation.
    CutsOverDelayed,
    /// The restore is abandoned after the cutover, because storage is missing.
    AbandonsAfterCutover,
    /// The restore waits forever for storage.
    WaitsForStorage,
}

/// Random steps, which include changes by users if `people` is true. A step from `more` precedes about every sixth
/// step.
pub(super) fn with(more: &'static [Step], people: bool) -> impl Strategy<Value = Vec<Step>> {
    let often = prop::sample::select(vec![false, false, false, false, false, true]);
    let drawn = prop::collection::vec((often, prop::sample::select(more)), 120);
    (steps(people), drawn).prop_map(|(steps, drawn)| {
        let mut all = Vec::new();
        for (step, (is_drawn, other)) in steps.into_iter().zip(drawn) {
            all.extend(is_drawn.then_some(other));
            all.push(step);
        }
        all
    })
}

const LOSSES: &[Step] = &[Step::LoseVolume, Step::LoseOld];
/// Steps around the cutover, which random steps rarely reach.
const AROUND: &[Step] = &[
    Step::Reconcile,
    Step::Reconcile,
    Step::Reconcile,
    Step::Reconcile,
    Step::CrashAfter,
    Step::Kubelet,
    Step::Kubelet,
    Step::LoseVolume,
    Step::LoseOld,
    Step::LosePod,
    Step::EndPod,
    Step::LoseMessage,
];

pub(super) fn around() -> impl Strategy<Value = Vec<Step>> {
    prop::collection::vec(prop::sample::select(AROUND), 0..30)
}

/// Steps in which the second process executes an action long after its observation.
fn long_after() -> impl Strategy<Value = Vec<Step>> {
    let others = prop::collection::vec(prop::sample::select(AFTER), 0..30);
    (0..50_usize, 0..50_usize, others).prop_map(|(before, after, others)| {
        let mut all: Vec<Step> = quiet(before).collect();
        all.push(Step::ReadDelayed);
        all.extend(quiet(after).chain(others));
        all
    })
}

/// Steps in which the second process executes an action soon after its observation. The cluster operator writes nothing
/// between the observation and the action.
fn soon_after() -> impl Strategy<Value = Vec<Step>> {
    let others = prop::collection::vec(prop::sample::select(SOON_AFTER), 0..12);
    (15..50_usize, others).prop_map(|(before, others)| {
        let mut all: Vec<Step> = quiet(before).collect();
        all.push(Step::ReadDelayed);
        all.extend(others);
        all
    })
}

/// Returns `steps` steps without faults.
fn quiet(steps: usize) -> impl Iterator<Item = Step> {
    let all = [Step::Reconcile, Step::Kubelet, Step::ClusterOperator];
    all.into_iter().cycle().take(steps)
}

/// Steps in which a user changes `bumpRevision` after the observation of the second process, and pods are lost.
fn choosing() -> impl Strategy<Value = Vec<Step>> {
    let others = prop::collection::vec(prop::sample::select(CHOOSING), 0..60);
    (0..6_usize, others).prop_map(|(before, others)| {
        let mut all = vec![Step::Reconcile; before];
        all.extend([Step::ReadDelayed, Step::ChangeBump]);
        all.extend(others);
        all
    })
}

impl World {
    /// Runs steps without faults until the cutover.
    fn cut_over(&mut self) {
        while !self
            .cluster
            .as_ref()
            .is_some_and(ModelCluster::has_cut_over)
        {
            self.happen(Step::Reconcile);
            self.happen(Step::Kubelet);
        }
    }
}
const AFTER: &[Step] = &[
    Step::Reconcile,
    Step::Kubelet,
    Step::Kubelet,
    Step::Kubelet,
    Step::ClusterOperator,
    Step::ClientWrites,
    Step::LosePod,
    Step::EndPod,
    Step::DeleteRestore,
    Step::WriteDelayed,
    Step::WriteDelayed,
];
const SOON_AFTER: &[Step] = &[
    Step::Reconcile,
    Step::Kubelet,
    Step::LosePod,
    Step::DeleteRestore,
    Step::WriteDelayed,
    Step::WriteDelayed,
];
const CHOOSING: &[Step] = &[
    Step::Reconcile,
    Step::Reconcile,
    Step::Kubelet,
    Step::Kubelet,
    Step::ActDelayed,
    Step::WriteDelayed,
    Step::LosePod,
];
const DELAYS: &[Step] = &[
    Step::ReadDelayed,
    Step::ActDelayed,
    Step::ActDelayed,
    Step::WriteDelayed,
    Step::WriteDelayed,
    Step::ChangeBump,
];

fn config() -> ProptestConfig {
    ProptestConfig {
        cases: 3000,
        ..ProptestConfig::default()
    }
}

proptest! {
    #![proptest_config(config())]

    /// Lost objects are created again, or their loss is reported. The lock is removed, and no cluster without data is
    /// handed over.
    #[test]
    fn restore_in_place_releases_lock_after_any_loss(
        steps in with(LOSSES, false),
        around in around(),
        cut_over: bool,
    ) {
        let mut world = World::replacing(true, true);
        if cut_over {
            world.cut_over();
        }
        for step in if cut_over { around } else { steps } {
            world.happen(step);
        }
        world.end_faults();
        let cluster = world.cluster.as_ref().unwrap();
        prop_assert!(!cluster.lock, "{:?} {cluster:?}", world.restore.status);
        prop_assert!(world.restore.metadata.finalizers.is_none());
    }

    /// Invariant 11: actions of the second process change no outcome. A cluster is handed over only with the recorded
    /// backup, and a deleted EtcdRestore leaves no lock.
    #[test]
    fn invariant_11_delayed_operator_process_changes_no_outcome(
        durable: bool,
        in_place: bool,
        manifests: bool,
        steps in with(DELAYS, true),
    ) {
        let mut world = if in_place {
            World::replacing(durable, true)
        } else {
            World::new(durable, true)
        };
        world.manifests = manifests;
        for step in steps {
            if !(in_place && matches!(step, Step::CreateForeign)) {
                world.happen(step);
            }
        }
        world.end_faults();
        if world.deleted {
            prop_assert!(world.cluster.is_none_or(|cluster| !cluster.lock));
        }
    }

    /// Invariant 11: a delayed action changes no outcome, even if clients wrote to the cluster before the action.
    #[test]
    fn invariant_11_action_from_old_observation_changes_no_outcome(
        durable: bool,
        in_place: bool,
        manifests: bool,
        steps in prop_oneof![long_after(), soon_after(), choosing()],
    ) {
        let mut world = if in_place {
            World::replacing(durable, true)
        } else {
            World::new(durable, true)
        };
        world.manifests = manifests;
        for step in steps {
            world.happen(step);
        }
        world.end_faults();
        if world.deleted {
            prop_assert!(world.cluster.is_none_or(|cluster| !cluster.lock));
        }
    }

    #[test]
    fn restore_completes_despite_delayed_operator(
        in_place: bool,
        manifests: bool,
        steps in with(DELAYS, false),
    ) {
        let mut world = if in_place {
            World::replacing(true, true)
        } else {
            World::new(true, true)
        };
        world.manifests = manifests;
        for step in steps {
            world.happen(step);
        }
        world.end_faults();
        prop_assert!(world.succeeded(), "{:?} {:?}", world.restore.status, world.cluster);
    }
}

/// The message of the check that detects the mistake, or an empty text.
fn found(mistake: Mistake, steps: impl Strategy<Value = Vec<Step>>) -> String {
    let quiet = ProptestConfig {
        // The rarest mistake is found after about 500 cases.
        cases: 20_000,
        max_shrink_iters: 0,
        failure_persistence: None,
        ..config()
    };
    // A fixed seed of the random numbers makes the test deterministic.
    let drawn = TestRng::deterministic_rng(RngAlgorithm::ChaCha);
    let result = TestRunner::new_with_rng(quiet, drawn).run(&steps, |steps| {
        let mut world = match mistake {
            Mistake::CreatesDelayed => World::new(false, true),
            _ => World::replacing(true, true),
        };
        world.manifests = mistake != Mistake::OmitsOrigin;
        world.mistake = Some(mistake);
        if matches!(
            mistake,
            Mistake::TreatsVolumeAsData | Mistake::AbandonsAfterCutover
        ) {
            world.cut_over();
        }
        for step in steps {
            if !matches!(step, Step::CreateForeign) {
                world.happen(step);
            }
        }
        let for_storage = mistake == Mistake::WaitsForStorage;
        if for_storage {
            world.run_to_end();
        } else {
            world.end_faults();
        }
        let locked = world.cluster.as_ref().is_some_and(|it| it.lock);
        let waits = locked && (for_storage || mistake == Mistake::ExpectsReport);
        prop_assert!(!waits, "the restore waits indefinitely");
        Ok(())
    });
    result.map_or_else(|found| format!("{found:?}"), |()| String::new())
}

/// For each deliberate mistake, the expected check fails.
#[test]
fn restore_model_detects_each_deliberate_mistake() {
    for (mistake, report) in [
        (Mistake::ChoosesAgain, "seeds from different backups"),
        (Mistake::UsesBumpOfSpec, "seeds from different backups"),
        (Mistake::TreatsVolumeAsData, "an empty volume"),
        (Mistake::ExpectsReport, "the restore waits indefinitely"),
        (Mistake::NeverCompares, "not from the recorded backup"),
        (Mistake::OmitsOrigin, "not from the recorded backup"),
        (
            Mistake::CreatesDelayed,
            "acknowledged writes were overwritten",
        ),
        (Mistake::CutsOverDelayed, "recorded without verified data"),
        (Mistake::AbandonsAfterCutover, "abandoned after the cutover"),
        (Mistake::WaitsForStorage, "the restore waits indefinitely"),
    ] {
        let found = match mistake {
            Mistake::TreatsVolumeAsData => found(mistake, around()),
            Mistake::NeverCompares => found(mistake, with(DELAYS, false)),
            Mistake::OmitsOrigin => found(mistake, choosing()),
            Mistake::CreatesDelayed => found(mistake, long_after()),
            Mistake::CutsOverDelayed => found(mistake, soon_after()),
            Mistake::AbandonsAfterCutover => found(mistake, around_without_storage()),
            Mistake::WaitsForStorage => found(mistake, without_storage()),
            _ => found(mistake, steps(false)),
        };
        assert!(found.contains(report), "{mistake:?}: {found:?}");
    }
}
