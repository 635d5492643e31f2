//! The properties of the model during faults, and its outcome after the faults stop.

use proptest::prelude::*;

use super::*;

pub(super) fn fates(people: bool) -> impl Strategy<Value = Vec<Fate>> {
    let one = prop_oneof![
        12 => Just(Fate::Reconcile),
        3 => Just(Fate::CrashBefore),
        4 => Just(Fate::CrashAfter),
        4 => any::<u8>().prop_map(Fate::Blind),
        8 => Just(Fate::Kubelet),
        4 => Just(Fate::ClusterOperator),
        3 => Just(Fate::ClientWrites),
        1 => Just(Fate::StoreDown),
        2 => Just(Fate::StoreUp),
        2 => Just(Fate::LosePod),
        2 => Just(Fate::EndPod),
        2 => Just(Fate::NewerBackup),
        1 => Just(Fate::ChangeBump),
        2 => Just(Fate::LoseMessage),
        1 => Just(Fate::Retention),
        1 => Just(Fate::DeleteCluster),
        1 => Just(Fate::StrangerCreates),
        1 => Just(Fate::DeleteRestore),
    ];
    let kept = move |fate| match fate {
        Fate::DeleteCluster | Fate::StrangerCreates | Fate::DeleteRestore | Fate::Retention
            if !people =>
        {
            Fate::Reconcile
        }
        fate => fate,
    };
    prop::collection::vec(one.prop_map(kept), 0..120)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 3000, ..ProptestConfig::default() })]

    /// Invariants 1, 9, 10 and 11 hold after every step.
    #[test]
    fn invariant_9_restore_destroys_no_data(durable: bool, good: bool, fates in fates(true)) {
        let mut world = World::new(durable, good);
        for fate in fates {
            world.happen(fate);
        }
        world.end_faults();
    }

    /// The restore completes without interfering users, if the data survives the pod.
    #[test]
    fn durable_restore_completes_after_faults(fates in fates(false)) {
        let mut world = World::new(true, true);
        for fate in fates {
            world.happen(fate);
        }
        world.end_faults();
        prop_assert!(world.succeeded(), "{:?} {:?}", world.restore.status, world.cluster);
    }

    /// A restore without volumes completes if the seed is not lost after the start of the handover.
    #[test]
    fn restore_without_volumes_completes_unless_seed_is_lost(fates in fates(false)) {
        let mut world = World::new(false, true);
        let mut lost = false;
        for fate in fates {
            let formed = world.cluster.as_ref().is_some_and(ModelCluster::has_turned);
            lost |= matches!(fate, Fate::LosePod | Fate::EndPod) && formed;
            world.happen(fate);
        }
        world.end_faults();
        prop_assert!(world.succeeded() || lost, "{:?} {:?}", world.restore.status, world.cluster);
    }

    /// A restore of an unreadable backup never completes and hands no cluster over.
    #[test]
    fn restore_of_unreadable_backup_never_succeeds(durable: bool, fates in fates(true)) {
        let mut world = World::new(durable, false);
        for fate in fates {
            world.happen(fate);
        }
        world.end_faults();
        prop_assert!(!world.succeeded());
    }

    /// At all times the old cluster is complete or the new one verified, and clients can reach at most one of them.
    #[test]
    fn invariant_9_old_cluster_is_complete_until_cutover(
        durable: bool,
        good: bool,
        fates in fates(true),
    ) {
        let mut world = World::replacing(durable, good);
        for fate in fates {
            // With `overwrite`, a cluster that a user creates meanwhile is replaced too.
            if !matches!(fate, Fate::StrangerCreates) {
                world.happen(fate);
            }
        }
        world.end_faults();
    }

    /// An operator that is killed between any two writes completes the restore.
    #[test]
    fn restore_in_place_completes_after_faults(fates in fates(false)) {
        let mut world = World::replacing(true, true);
        for fate in fates {
            world.happen(fate);
        }
        world.end_faults();
        prop_assert!(world.succeeded(), "{:?} {:?}", world.restore.status, world.cluster);
        let cluster = world.cluster.unwrap();
        prop_assert!(!cluster.claim && cluster.has_turned());
        prop_assert!(world.restore.metadata.finalizers.is_none());
    }

    /// The chosen backup is deleted midway. Before the cutover the restore is abandoned with that reason; after the
    /// cutover the backup is not needed.
    #[test]
    fn deleted_backup_leaves_one_complete_cluster(
        before in fates(false),
        after in fates(false),
    ) {
        let mut world = World::replacing(true, true);
        for fate in before {
            world.happen(fate);
        }
        world.happen(Fate::NewerBackup);
        world.happen(Fate::Retention);
        for fate in after {
            world.happen(fate);
        }
        world.end_faults();
        let cluster = world.cluster.clone().unwrap();
        prop_assert!(!cluster.claim);
        if world.succeeded() {
            prop_assert!(cluster.has_turned());
        } else {
            prop_assert!(cluster.is_old_complete() && cluster.cluster_id.as_deref() == Some(OLD));
            let conditions = world.restore.conditions();
            let failed = conditions::find(conditions, &ConditionType::Failed).unwrap();
            prop_assert_eq!((failed.status.as_str(), failed.reason.as_str()), ("True", "BackupMissing"));
        }
    }

    /// A failure leaves the old cluster unchanged, is reported, and releases the lock.
    #[test]
    fn bad_backup_leaves_old_cluster_unchanged(durable: bool, fates in fates(false)) {
        let mut world = World::replacing(durable, false);
        for fate in fates {
            world.happen(fate);
        }
        world.end_faults();
        let cluster = world.cluster.clone().unwrap();
        prop_assert!(cluster.is_old_complete() && !cluster.claim && cluster.cluster_id.as_deref() == Some(OLD));
        prop_assert!(cluster.pod.is_none() && cluster.volume.is_none() && cluster.service.is_none());
        prop_assert!(world.restore.metadata.finalizers.is_none());
        let status = world.restore.status.unwrap();
        prop_assert_eq!(status.abandoned.unwrap().reason, "SnapshotUnreadable");
        prop_assert!(!status.succeeded);
    }

    /// After a deletion of the EtcdRestore at any time, the old or the new cluster is complete and not locked.
    #[test]
    fn deleted_restore_leaves_one_complete_cluster(
        good: bool,
        before in fates(false),
        after in fates(false),
    ) {
        let mut world = World::replacing(true, good);
        for fate in before {
            world.happen(fate);
        }
        world.happen(Fate::DeleteRestore);
        for fate in after {
            world.happen(fate);
        }
        world.end_faults();
        prop_assert!(world.gone, "{:?}", world.restore.metadata);
        let cluster = world.cluster.unwrap();
        prop_assert!(!cluster.claim);
        let serves = cluster.pod.as_ref().is_some_and(|pod| pod.serving && pod.joined);
        let whole = if cluster.has_turned() { serves } else { cluster.is_old_complete() };
        prop_assert!(whole);
    }
}

#[test]
fn restore_without_faults_completes_in_few_rounds() {
    let mut world = World::new(true, true);
    let mut rounds = 0;
    while !world.succeeded() {
        rounds += 1;
        assert!(rounds < 16, "{:?}", world.restore.status);
        world.happen(Fate::Reconcile);
        world.happen(Fate::Kubelet);
        world.happen(Fate::ClusterOperator);
    }
}
