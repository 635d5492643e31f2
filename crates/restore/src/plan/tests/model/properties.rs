//! Properties that hold after each step, and the outcome after the faults have ended.

use proptest::prelude::*;

use super::*;

pub(super) fn steps(people: bool) -> impl Strategy<Value = Vec<Step>> {
    let one = prop_oneof![
        12 => Just(Step::Reconcile),
        3 => Just(Step::CrashBefore),
        4 => Just(Step::CrashAfter),
        4 => any::<u8>().prop_map(Step::Blind),
        8 => Just(Step::Kubelet),
        4 => Just(Step::ClusterOperator),
        3 => Just(Step::ClientWrites),
        1 => Just(Step::StoreDown),
        2 => Just(Step::StoreUp),
        2 => Just(Step::LosePod),
        2 => Just(Step::EndPod),
        2 => Just(Step::NewerBackup),
        1 => Just(Step::ChangeBump),
        2 => Just(Step::LoseMessage),
        1 => Just(Step::Retention),
        1 => Just(Step::DeleteCluster),
        1 => Just(Step::CreateForeign),
        1 => Just(Step::DeleteRestore),
    ];
    let allowed = move |step| match step {
        Step::DeleteCluster | Step::CreateForeign | Step::DeleteRestore | Step::Retention
            if !people =>
        {
            Step::Reconcile
        }
        step => step,
    };
    prop::collection::vec(one.prop_map(allowed), 0..120)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 3000, ..ProptestConfig::default() })]

    /// Invariants 1, 9, 10 and 11 hold after every step.
    #[test]
    fn invariant_9_restore_destroys_no_data(durable: bool, good: bool, steps in steps(true)) {
        let mut world = World::new(durable, good);
        for step in steps {
            world.happen(step);
        }
        world.end_faults();
    }

    /// With a volume and without changes by users, the restore completes.
    #[test]
    fn restore_with_volume_completes_after_faults(steps in steps(false)) {
        let mut world = World::new(true, true);
        for step in steps {
            world.happen(step);
        }
        world.end_faults();
        prop_assert!(world.succeeded(), "{:?} {:?}", world.restore.status, world.cluster);
    }

    /// Without a volume, the restore completes unless the seed's pod is lost or ends after the cutover.
    #[test]
    fn restore_without_volumes_completes_unless_seed_is_lost(steps in steps(false)) {
        let mut world = World::new(false, true);
        let mut lost = false;
        for step in steps {
            let formed = world.cluster.as_ref().is_some_and(ModelCluster::has_cut_over);
            lost |= matches!(step, Step::LosePod | Step::EndPod) && formed;
            world.happen(step);
        }
        world.end_faults();
        prop_assert!(world.succeeded() || lost, "{:?} {:?}", world.restore.status, world.cluster);
    }

    /// A restore of an unreadable backup never completes, and hands over no cluster.
    #[test]
    fn restore_of_unreadable_backup_never_succeeds(durable: bool, steps in steps(true)) {
        let mut world = World::new(durable, false);
        for step in steps {
            world.happen(step);
        }
        world.end_faults();
        prop_assert!(!world.succeeded());
    }

    /// At any time, the old cluster is complete or the new cluster is verified, and clients can connect to only one of
    /// them.
    #[test]
    fn invariant_9_old_cluster_is_complete_until_cutover(
        durable: bool,
        good: bool,
        steps in steps(true),
    ) {
        let mut world = World::replacing(durable, good);
        for step in steps {
            // `CreateForeign` is left out: the restore has `overwrite: true`, so it may replace the cluster that this
            // step creates.
            if !matches!(step, Step::CreateForeign) {
                world.happen(step);
            }
        }
        world.end_faults();
    }

    /// The restore completes although the operator may crash between any two writes.
    #[test]
    fn restore_in_place_completes_after_faults(steps in steps(false)) {
        let mut world = World::replacing(true, true);
        for step in steps {
            world.happen(step);
        }
        world.end_faults();
        prop_assert!(world.succeeded(), "{:?} {:?}", world.restore.status, world.cluster);
        let cluster = world.cluster.unwrap();
        prop_assert!(!cluster.lock && cluster.has_cut_over());
        prop_assert!(world.restore.metadata.finalizers.is_none());
    }

    /// The chosen backup is deleted during the restore. Before the cutover, this abandons the restore. After the
    /// cutover, the backup is not needed.
    #[test]
    fn deleted_backup_leaves_one_complete_cluster(
        before in steps(false),
        after in steps(false),
    ) {
        let mut world = World::replacing(true, true);
        for step in before {
            world.happen(step);
        }
        world.happen(Step::NewerBackup);
        world.happen(Step::Retention);
        for step in after {
            world.happen(step);
        }
        world.end_faults();
        let cluster = world.cluster.clone().unwrap();
        prop_assert!(!cluster.lock);
        if world.succeeded() {
            prop_assert!(cluster.has_cut_over());
        } else {
            prop_assert!(cluster.is_old_complete() && cluster.cluster_id.as_deref() == Some(OLD));
            let conditions = world.restore.conditions();
            let failed = conditions::find(conditions, &ConditionType::Failed).unwrap();
            prop_assert_eq!((failed.status.as_str(), failed.reason.as_str()), ("True", "BackupMissing"));
        }
    }

    /// After a restore in place of an unreadable backup, the old cluster is unchanged and not locked.
    #[test]
    fn unreadable_backup_leaves_old_cluster_unchanged(durable: bool, steps in steps(false)) {
        let mut world = World::replacing(durable, false);
        for step in steps {
            world.happen(step);
        }
        world.end_faults();
        let cluster = world.cluster.clone().unwrap();
        prop_assert!(cluster.is_old_complete() && !cluster.lock && cluster.cluster_id.as_deref() == Some(OLD));
        prop_assert!(cluster.pod.is_none() && cluster.volume.is_none() && cluster.service.is_none());
        prop_assert!(world.restore.metadata.finalizers.is_none());
        let status = world.restore.status.unwrap();
        prop_assert_eq!(status.abandoned.unwrap().reason, "SnapshotUnreadable");
        prop_assert!(!status.succeeded);
    }

    /// A user may delete the EtcdRestore at any time. Afterwards, either the old or the new cluster is complete and
    /// not locked.
    #[test]
    fn deleted_restore_leaves_one_complete_cluster(
        good: bool,
        before in steps(false),
        after in steps(false),
    ) {
        let mut world = World::replacing(true, good);
        for step in before {
            world.happen(step);
        }
        world.happen(Step::DeleteRestore);
        for step in after {
            world.happen(step);
        }
        world.end_faults();
        prop_assert!(world.deleted, "{:?}", world.restore.metadata);
        let cluster = world.cluster.unwrap();
        prop_assert!(!cluster.lock);
        let serves = cluster.pod.as_ref().is_some_and(|pod| pod.serving && pod.joined);
        let complete = if cluster.has_cut_over() { serves } else { cluster.is_old_complete() };
        prop_assert!(complete);
    }
}

#[test]
fn restore_without_faults_completes_in_few_reconciles() {
    let mut world = World::new(true, true);
    let mut rounds = 0;
    while !world.succeeded() {
        rounds += 1;
        assert!(rounds < 16, "{:?}", world.restore.status);
        world.happen(Step::Reconcile);
        world.happen(Step::Kubelet);
        world.happen(Step::ClusterOperator);
    }
}
