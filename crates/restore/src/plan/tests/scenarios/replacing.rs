//! Tests of single plans of a restore in place.

use api::restore::AbandonedStatus;

use super::*;

mod storage;
mod unfit;

const OLD: &str = "cd";

fn before() -> ReplacesStatus {
    ReplacesStatus {
        uid: "cluster-uid".into(),
        cluster_id: Some(OLD.into()),
    }
}

fn overwriting(edit: impl FnOnce(&mut EtcdRestore)) -> EtcdRestore {
    with_finalizer(restore(|restore| {
        restore.spec.overwrite = true;
        edit(restore);
    }))
}

fn without_finalizer(mut restore: EtcdRestore) -> EtcdRestore {
    restore.metadata.finalizers = None;
    restore
}

fn recorded() -> EtcdRestore {
    overwriting(|restore| {
        let (seed, backup) = (naming::seed(restore), chosen(restore, 1));
        let status = restore.status.get_or_insert_default();
        (status.seed, status.replaces) = (Some(seed), Some(before()));
        status.backup = Some(backup);
    })
}

fn verified_seed() -> EtcdRestore {
    let mut restore = recorded();
    let status = restore.status.get_or_insert_default();
    (status.cluster_id, status.restored_revision) = (Some(ID.into()), Some(100));
    restore
}

fn abandoned() -> EtcdRestore {
    let mut restore = recorded();
    restore.status.get_or_insert_default().abandoned = Some(AbandonedStatus {
        reason: "SnapshotUnreadable".into(),
        message: "sha256 differs".into(),
    });
    restore
}

fn existing(locked: bool) -> ClusterFacts {
    ClusterFacts {
        uid: "cluster-uid".into(),
        lock: locked.then(|| UID.to_owned()),
        cluster_id: Some(OLD.into()),
        available: true,
        ..ClusterFacts::default()
    }
}

/// A locked cluster whose old members serve, with this seed.
fn preparing(pod: Pod, serving: Serving) -> Snapshot {
    let mut snapshot = locked_with(pod, serving);
    snapshot.cluster = Cluster::Present(Box::new(existing(true)));
    snapshot
}

/// A snapshot after the cutover, with these old members and this pod of the seed.
fn cut_over(old_members: &[OldPod], pod: Pod) -> Snapshot {
    let mut snapshot = preparing(pod, serves(100));
    snapshot.cluster = Cluster::Present(Box::new(ClusterFacts {
        cluster_id: Some(ID.into()),
        ..existing(true)
    }));
    snapshot.old_members = OldMembers::Known(old_members.to_vec());
    snapshot
}

fn old(name: &str, terminating: bool, ready: bool) -> OldPod {
    OldPod {
        name: name.into(),
        uid: format!("uid-{name}"),
        terminating,
        ready,
    }
}

fn deleted(mut restore: EtcdRestore) -> EtcdRestore {
    restore.metadata.deletion_timestamp =
        Some(k8s_openapi::apimachinery::pkg::apis::meta::v1::Time(
            k8s_openapi::jiff::Timestamp::UNIX_EPOCH,
        ));
    restore
}

/// Invariants 9 and 10: all problems that can be detected without a change are reported before the lock is set.
#[test]
fn cluster_is_locked_only_after_backup_and_seed_are_recorded() {
    let mut snapshot = present(existing(false));
    let fresh = overwriting(|_| {});
    snapshot.source = Source::Unavailable(Trouble::new(Reason::BackupMissing, "no object"));
    let plan = check(&fresh, &snapshot, &Action::Nothing);
    assert_eq!(reason(&plan), Reason::BackupMissing);
    snapshot.source = Source::Ready(Box::default());
    let record = Action::RecordIntent {
        seed: naming::seed(&fresh),
        replaces: Some(before()),
    };
    check(&fresh, &snapshot, &record);
    let mut unrecorded = without_finalizer(recorded());
    unrecorded.status.get_or_insert_default().backup = None;
    check(&unrecorded, &snapshot, &Action::Nothing);
    snapshot.found = Some(chosen(&unrecorded, 1));
    let record = Action::RecordBackup(Box::new(chosen(&unrecorded, 1)));
    check(&unrecorded, &snapshot, &record);
    check(
        &without_finalizer(recorded()),
        &snapshot,
        &Action::SetFinalizer(true),
    );
    check(&recorded(), &snapshot, &Action::Lock);
}

#[test]
fn recreated_cluster_is_recorded_again_before_lock() {
    let mut snapshot = present(ClusterFacts {
        uid: "another-uid".into(),
        ..existing(false)
    });
    snapshot.source = Source::Ready(Box::default());
    let plan = plan(&recorded(), &snapshot);
    assert!(
        matches!(plan.action, Action::RecordIntent { .. }),
        "{plan:?}"
    );
}

#[test]
fn paused_or_invalid_cluster_is_not_locked() {
    let paused = ClusterFacts {
        paused: true,
        ..existing(false)
    };
    let broken = ClusterFacts {
        problems: vec![Problem::new("spec.size", "is 9", "use 1 to 7")],
        ..existing(false)
    };
    for (facts, expected) in [(paused, Reason::Paused), (broken, Reason::InvalidSpec)] {
        let mut snapshot = present(facts);
        snapshot.source = Source::Ready(Box::default());
        let plan = check(&recorded(), &snapshot, &Action::Nothing);
        assert_eq!(reason(&plan), expected);
    }
}

#[test]
fn restore_of_cluster_locked_by_another_restore_is_rejected() {
    let mut snapshot = present(ClusterFacts {
        lock: Some("another-restore".into()),
        ..existing(false)
    });
    snapshot.source = Source::Ready(Box::default());
    let rejection = |restore: EtcdRestore| {
        // The rejected restore may have set its finalizer, because it was about to set the lock. It removes the
        // finalizer first.
        check(
            &with_finalizer(restore.clone()),
            &snapshot,
            &Action::SetFinalizer(false),
        );
        let refused = check(&without_finalizer(restore), &snapshot, &Action::Nothing);
        let PlanState::Halted(trouble) = refused.state else {
            panic!("{refused:?}")
        };
        assert_eq!(trouble.reason, Reason::ClusterExists);
        trouble.message
    };
    let begun = rejection(recorded());
    assert!(begun.contains("nothing was changed"), "{begun}");
    // The spec already contains `overwrite: true`, so the message does not ask for it, but says when a new EtcdRestore
    // can start.
    let remedy = "after the other EtcdRestore has ended";
    assert!(begun.contains(remedy), "{begun}");
    // This restore had already handed its cluster over when another restore locked the cluster, so the message must not
    // claim that nothing was changed.
    let handed_over = rejection(verified_seed());
    assert!(
        !handed_over.contains("nothing was changed"),
        "{handed_over}"
    );
    assert!(handed_over.contains("another EtcdRestore"), "{handed_over}");
}

#[test]
fn finalizer_is_removed_from_rejected_restore() {
    let mut snapshot = present(existing(false));
    snapshot.source = Source::Ready(Box::default());
    // A user sets `overwrite` to false before the lock is set, so the finalizer is removed.
    let mut restore = recorded();
    restore.spec.overwrite = false;
    check(&restore, &snapshot, &Action::SetFinalizer(false));
    let refused = check(
        &without_finalizer(restore.clone()),
        &snapshot,
        &Action::Nothing,
    );
    assert_eq!(reason(&refused), Reason::ClusterExists);
    // The finalizer is also removed if the condition Failed already reports the rejection.
    let failed = conditions::Finding::new(
        ConditionType::Failed,
        true,
        Reason::ClusterExists.into(),
        "exists",
    );
    let now = k8s_openapi::apimachinery::pkg::apis::meta::v1::Time(
        k8s_openapi::jiff::Timestamp::UNIX_EPOCH,
    );
    let status = restore.status.get_or_insert_default();
    conditions::set(&mut status.conditions, &failed, Some(1), &now);
    check(
        &restore,
        &Snapshot::not_read(),
        &Action::SetFinalizer(false),
    );
    let ended = check(
        &without_finalizer(restore),
        &Snapshot::not_read(),
        &Action::Nothing,
    );
    assert_eq!(reason(&ended), Reason::ClusterExists);
}

/// Invariant 9: if the seed answers but never becomes ready, the old cluster stays complete.
#[test]
fn seed_is_verified_while_old_cluster_serves() {
    let without_pod = preparing(Pod::Absent, Serving::NotRead);
    check(&recorded(), &without_pod, &Action::CreatePod);
    // A missing finalizer is set again while the restore holds the lock.
    check(
        &without_finalizer(recorded()),
        &without_pod,
        &Action::SetFinalizer(true),
    );
    let unverified = Pod::Present(PodFacts::default());
    check(
        &recorded(),
        &preparing(unverified, serves(100)),
        &Action::Nothing,
    );
    let record = Action::RecordRestored {
        cluster_id: ID.into(),
        revision: 100,
        sha256: None,
    };
    check(
        &recorded(),
        &preparing(restored_pod(), serves(100)),
        &record,
    );
    let Pod::Present(mut not_ready) = restored_pod() else {
        panic!("the seed's pod is missing")
    };
    not_ready.verified = false;
    let not_ready = preparing(Pod::Present(not_ready), serves(100));
    check(&verified_seed(), &not_ready, &Action::Nothing);
    let record = Action::RecordFormed {
        cluster_id: ID.into(),
    };
    check(
        &verified_seed(),
        &preparing(restored_pod(), serves(100)),
        &record,
    );
}

/// Invariant 9: a failure before the cutover leaves the old cluster unchanged.
#[test]
fn unreadable_backup_abandons_restore_and_releases_lock() {
    let trouble = Trouble::new(Reason::SnapshotUnreadable, "sha256 differs");
    let failed = Pod::Present(PodFacts {
        trouble: Some(trouble.clone()),
        ..PodFacts::default()
    });
    check(
        &recorded(),
        &preparing(failed.clone(), Serving::NotRead),
        &Action::Abandon(Trouble {
            message: "sha256 differs; the existing cluster is unchanged".into(),
            ..trouble
        }),
    );
    check(
        &abandoned(),
        &preparing(failed, Serving::NotRead),
        &Action::DiscardSeed,
    );
    let mut discarded = preparing(Pod::NameTaken, Serving::NotRead);
    discarded.seed.service = Child::Absent;
    check(&abandoned(), &discarded, &Action::ReleaseLock);
    check(
        &abandoned(),
        &present(existing(false)),
        &Action::SetFinalizer(false),
    );
    let end = check(
        &without_finalizer(abandoned()),
        &present(existing(false)),
        &Action::Nothing,
    );
    assert_eq!(reason(&end), Reason::SnapshotUnreadable);
    assert!(matches!(end.state, PlanState::Halted(_)));
}

/// Invariant 1: a seed that cannot be read is not assumed to be missing.
#[test]
fn restore_lock_is_kept_while_seed_cannot_be_read() {
    let unknown = preparing(Pod::Unknown("timeout".into()), Serving::NotRead);
    check(&abandoned(), &unknown, &Action::Nothing);
}

#[test]
fn temporary_problems_before_cutover_do_not_abandon_restore() {
    for reason in [Reason::PodNotStarting, Reason::StoreUnreachable] {
        let pod = Pod::Present(PodFacts {
            trouble: Some(Trouble::new(reason, "for now")),
            ..PodFacts::default()
        });
        check(
            &recorded(),
            &preparing(pod, Serving::NotRead),
            &Action::Nothing,
        );
    }
}

/// Invariants 9 and 17: first the old members stop, then the seed joins, and then the lock is removed.
#[test]
fn seed_joins_after_old_members_have_stopped() {
    let restore = verified_seed();
    let running = [old("a", false, true), old("b", false, false)];
    check(
        &restore,
        &cut_over(&running, restored_pod()),
        &Action::StopOldMembers(running.to_vec()),
    );
    let stopping = [old("a", true, true), old("b", true, false)];
    check(
        &restore,
        &cut_over(&stopping, restored_pod()),
        &Action::Nothing,
    );
    let stopped = [old("a", true, false)];
    check(&restore, &cut_over(&stopped, restored_pod()), &Action::Join);
    let joined = Pod::Present(PodFacts {
        restored: Some(100),
        joined: true,
        ..PodFacts::default()
    });
    check(&restore, &cut_over(&[], joined), &Action::ReleaseLock);
}

/// Invariant 1: old members that cannot be read may be running.
#[test]
fn seed_does_not_join_while_old_members_cannot_be_read() {
    let mut snapshot = cut_over(&[], restored_pod());
    for old_members in [OldMembers::NotRead, OldMembers::Unknown("timeout".into())] {
        snapshot.old_members = old_members;
        check(&verified_seed(), &snapshot, &Action::Nothing);
    }
}

/// Invariant 9: the old members run and keep their data until the verified seed exists again.
#[test]
fn restore_recreates_seed_lost_at_cutover() {
    let restore = verified_seed();
    let running = [old("a", false, true)];
    check(
        &restore,
        &cut_over(&running, Pod::Absent),
        &Action::CreatePod,
    );
    let recreated = Pod::Present(PodFacts::default());
    check(&restore, &cut_over(&running, recreated), &Action::Nothing);
    // After the old members have stopped, clients may have written to the seed, so its pod is created again only on its
    // existing volume.
    let on_volume = durable(&cut_over(&[], Pod::Absent), Child::Present);
    check(&restore, &on_volume, &Action::CreatePod);
}

fn durable(snapshot: &Snapshot, pvc: Child) -> Snapshot {
    let mut snapshot = snapshot.clone();
    if let Cluster::Present(facts) = &mut snapshot.cluster {
        facts.durable = true;
    }
    snapshot.seed.pvc = pvc;
    snapshot
}

/// The seed and its data are lost, so the restore fails. The cluster operator then manages a cluster without data, and
/// also reports the loss.
#[test]
fn seed_loss_after_cutover_fails_restore_with_remedy() {
    let ended = |joined| {
        Pod::Present(PodFacts {
            joined,
            ..ended(Life::Ended)
        })
    };
    for pod in [Pod::Absent, Pod::NameTaken, ended(false), ended(true)] {
        let bare = cut_over(&[old("a", true, false)], pod.clone());
        for snapshot in [
            bare.clone(),
            durable(&bare, Child::Absent),
            durable(&bare, Child::NameTaken),
        ] {
            let action = plan(&verified_seed(), &snapshot).action;
            let Action::Abandon(trouble) = action else {
                panic!("{action:?}");
            };
            assert!(trouble.message.contains("spec.overwrite: true"));
            // After the status records the failure, the cluster is handed over. A seed's pod that has not joined joins
            // first.
            let mut failed = verified_seed();
            failed.status.as_mut().unwrap().abandoned = Some(AbandonedStatus {
                reason: "SeedFailed".into(),
                message: trouble.message,
            });
            let action = match &pod {
                Pod::Present(pod) if !pod.joined => Action::Join,
                _ => Action::ReleaseLock,
            };
            check(&failed, &snapshot, &action);
            check(
                &failed,
                &present(existing(false)),
                &Action::SetFinalizer(false),
            );
            let ended = plan(&without_finalizer(failed), &present(existing(false)));
            assert!(matches!(ended.state, PlanState::Halted(_)));
            // A user who deletes the EtcdRestore accepts the loss, so the cluster is handed over.
            check(&deleted(verified_seed()), &snapshot, &action);
        }
        let unknown = durable(&bare, Child::Unknown("timeout".into()));
        check(&verified_seed(), &unknown, &Action::Nothing);
    }
}

/// Invariant 9: the seed was created again after a user had stopped the last old members. It joins only with verified
/// data, or if a user deletes the EtcdRestore.
#[test]
fn seed_with_unverified_data_does_not_join() {
    for restored in [None, Some(99), Some(101)] {
        let pod = Pod::Present(PodFacts {
            restored,
            ..PodFacts::default()
        });
        let snapshot = cut_over(&[], pod);
        check(&verified_seed(), &snapshot, &Action::Nothing);
        check(&deleted(verified_seed()), &snapshot, &Action::Join);
        let plan = plan(&verified_seed(), &snapshot);
        assert_eq!(
            matches!(plan.state, PlanState::Stuck(_)),
            restored.is_some()
        );
    }
}

/// Invariant 9: a seed that was created again may have another backup or another cluster ID than the verified seed.
#[test]
fn old_members_stop_only_for_verified_seed() {
    let newer = Pod::Present(PodFacts {
        restored: Some(101),
        verified: true,
        ..PodFacts::default()
    });
    let other = Serving::Serves {
        cluster_id: OLD.into(),
        revision: 100,
    };
    for (pod, serving) in [
        (newer, serves(101)),
        (restored_pod(), other),
        (restored_pod(), serves(99)),
        (restored_pod(), Serving::NotRead),
        (restored_pod(), Serving::Unknown("timeout".into())),
    ] {
        let mut snapshot = cut_over(&[old("a", false, true)], pod);
        snapshot.serving = serving;
        check(&verified_seed(), &snapshot, &Action::Nothing);
    }
}

/// After the cutover, the old members serve until they are stopped, so no client has written to the seed yet.
#[test]
fn ended_seed_pod_is_replaced_while_old_members_run() {
    let running = [old("a", false, true), old("b", true, true)];
    for durable in [false, true] {
        for pod in ended_pods() {
            let pod = Pod::Present(pod);
            let mut before = preparing(pod.clone(), serves(100));
            let mut after = cut_over(&running, pod);
            for snapshot in [&mut before, &mut after] {
                snapshot.seed.pvc = Child::Present;
                if let Cluster::Present(facts) = &mut snapshot.cluster {
                    facts.durable = durable;
                }
                check(&verified_seed(), snapshot, &replace_pod());
            }
            check(&recorded(), &before, &replace_pod());
            check(&deleted(verified_seed()), &after, &replace_pod());
            check(&abandoned(), &before, &Action::DiscardSeed);
        }
        let recent = cut_over(&running, Pod::Present(ended(Life::EndedRecently)));
        check(&verified_seed(), &recent, &Action::Nothing);
    }
}

/// Invariant 9: clients may have written to a seed that has joined, so the backup must not be restored again.
#[test]
fn joined_seed_is_not_restored_again() {
    let late = [old("late", false, false)];
    let joined = PodFacts {
        joined: true,
        ..ended(Life::Ended)
    };
    let mut snapshot = cut_over(&late, Pod::Present(joined.clone()));
    check(&verified_seed(), &snapshot, &Action::Nothing);
    snapshot.seed.pvc = Child::Present;
    snapshot.cluster = Cluster::Present(Box::new(ClusterFacts {
        cluster_id: Some(ID.into()),
        durable: true,
        ..existing(true)
    }));
    check(&verified_seed(), &snapshot, &replace_pod());
    // After the old members have stopped, the restore replaces an ended pod only if the pod has not joined and its data
    // is on a volume. The cluster operator replaces a pod that has joined. Without a volume, the restore fails.
    for durable in [false, true] {
        let mut snapshot = cut_over(&[], Pod::Present(joined.clone()));
        if let Cluster::Present(facts) = &mut snapshot.cluster {
            facts.durable = durable;
        }
        snapshot.seed.pvc = Child::Present;
        if durable {
            check(&verified_seed(), &snapshot, &Action::ReleaseLock);
            snapshot.seed.pod = Pod::Present(ended(Life::Ended));
            check(&verified_seed(), &snapshot, &replace_pod());
        }
        let failed = |plan: Plan| matches!(plan.action, Action::Abandon(_));
        assert_eq!(failed(plan(&verified_seed(), &snapshot)), !durable);
    }
}

#[test]
fn seed_of_deleted_restore_is_discarded_only_before_cutover() {
    let before = preparing(restored_pod(), serves(100));
    check(&deleted(recorded()), &before, &Action::DiscardSeed);
    check(&deleted(verified_seed()), &before, &Action::DiscardSeed);
    let running = [old("a", false, true)];
    check(
        &deleted(verified_seed()),
        &cut_over(&running, restored_pod()),
        &Action::StopOldMembers(running.to_vec()),
    );
    check(
        &deleted(recorded()),
        &present(existing(false)),
        &Action::SetFinalizer(false),
    );
}

#[test]
fn changed_cluster_id_abandons_restore() {
    let mut snapshot = preparing(restored_pod(), serves(100));
    snapshot.cluster = Cluster::Present(Box::new(ClusterFacts {
        cluster_id: Some("ff".into()),
        ..existing(true)
    }));
    let plan = plan(&recorded(), &snapshot);
    assert!(matches!(plan.action, Action::Abandon(_)), "{plan:?}");
}
