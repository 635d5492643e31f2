//! The model with missing storage: Kubernetes creates no volumes, or the API server rejects PVCs.

use proptest::prelude::*;

use super::mistakes::{around, with};
use super::properties::steps;
use super::*;

const STORAGE: &[Step] = &[
    Step::NoStorage,
    Step::NoQuota,
    Step::Storage,
    Step::LoseVolume,
];

/// Random steps after a first step that takes away the storage.
pub(super) fn without_storage() -> impl Strategy<Value = Vec<Step>> {
    let none = prop::sample::select(vec![Step::NoStorage, Step::NoQuota]);
    (none, steps(false)).prop_map(|(none, steps)| {
        let mut all = vec![none];
        all.extend(steps);
        all
    })
}

/// Steps around the cutover, while Kubernetes creates no volumes.
pub(super) fn around_without_storage() -> impl Strategy<Value = Vec<Step>> {
    around().prop_map(|around| {
        let mut all = vec![Step::NoStorage];
        all.extend(around);
        all
    })
}

impl World {
    /// The problem of a durable seed whose PVC has no volume; `None` while the pod is `recent`.
    pub(super) fn no_storage(&self, cluster: &ModelCluster, recent: bool) -> Option<Trouble> {
        let waits = self.durable && cluster.volume.is_some() && cluster.bound != cluster.volume;
        (waits && !self.storage && !recent)
            .then(|| Trouble::new(Reason::StorageMissing, "the StorageClass nowhere"))
    }

    pub(super) fn mistake_about_storage(&self, snapshot: &Snapshot, plan: &mut Plan) {
        let missing = |it: &Trouble| it.reason == Reason::StorageMissing;
        let observed = match &snapshot.seed.pod {
            Pod::Present(pod) => pod.trouble.clone().filter(missing),
            _ => None,
        };
        match (self.mistake, observed) {
            (Some(Mistake::AbandonsAfterCutover), Some(why)) => plan.action = Action::Abandon(why),
            (Some(Mistake::WaitsForStorage), _) => {
                if matches!(&plan.action, Action::Abandon(why) if missing(why)) {
                    *plan = Plan::wait_for("storage");
                }
            }
            _ => {}
        }
    }

    fn has_failed_for_storage(&self) -> bool {
        let failed = conditions::find(self.restore.conditions(), &ConditionType::Failed);
        failed.is_some_and(|it| it.status == "True" && it.reason == "StorageMissing")
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 3000, ..ProptestConfig::default() })]

    /// Storage may be missing at any time. At the end, one cluster is complete, and no cluster is locked.
    #[test]
    fn restore_in_place_without_storage_leaves_complete_cluster(steps in with(STORAGE, false)) {
        let mut world = World::replacing(true, true);
        for step in steps {
            world.happen(step);
        }
        world.end_faults();
        let cluster = world.cluster.clone().unwrap();
        prop_assert!(!cluster.lock, "{:?} {cluster:?}", world.restore.status);
        prop_assert!(world.restore.metadata.finalizers.is_none());
        prop_assert!(world.succeeded() || cluster.has_cut_over() || cluster.is_old_complete());
    }

    /// Without storage, a restore in place is abandoned, and reports the reason.
    #[test]
    fn restore_in_place_that_never_has_storage_is_abandoned(
        steps in without_storage(),
    ) {
        let mut world = World::replacing(true, true);
        for step in steps {
            world.happen(step);
        }
        world.store_up = true;
        world.run_to_end();
        let cluster = world.cluster.clone().unwrap();
        prop_assert!(cluster.is_old_complete() && !cluster.lock, "{cluster:?}");
        prop_assert!(cluster.pod.is_none() && cluster.volume.is_none() && cluster.service.is_none());
        prop_assert!(world.has_failed_for_storage(), "{:?}", world.restore.status);
    }

    /// A restore into a new cluster reports missing storage, and continues when storage is available.
    #[test]
    fn restore_into_new_cluster_waits_for_storage_and_completes(
        steps in without_storage(),
    ) {
        let mut world = World::new(true, true);
        for step in steps {
            world.happen(step);
        }
        world.store_up = true;
        world.run_to_end();
        prop_assert!(world.has_failed_for_storage(), "{:?}", world.restore.status);
        world.end_faults();
        prop_assert!(world.succeeded(), "{:?} {:?}", world.restore.status, world.cluster);
    }
}
