//! Scenarios of a restore in place.

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
    held(restore(|restore| {
        restore.spec.overwrite = true;
        edit(restore);
    }))
}

fn let_go(mut restore: EtcdRestore) -> EtcdRestore {
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

fn there(claim: bool) -> ClusterFacts {
    ClusterFacts {
        uid: "cluster-uid".into(),
        claim: claim.then(|| UID.to_owned()),
        cluster_id: Some(OLD.into()),
        available: true,
        ..ClusterFacts::default()
    }
}

/// A seed next to the old cluster, which is locked.
fn beside(pod: Pod, serving: Serving) -> Snapshot {
    let mut snapshot = claimed_with(pod, serving);
    snapshot.cluster = Cluster::Present(Box::new(there(true)));
    snapshot
}

/// The state after the cutover.
fn turned(former: &[FormerPod], pod: Pod) -> Snapshot {
    let mut snapshot = beside(pod, serves(100));
    snapshot.cluster = Cluster::Present(Box::new(ClusterFacts {
        cluster_id: Some(ID.into()),
        ..there(true)
    }));
    snapshot.former = Former::Known(former.to_vec());
    snapshot
}

fn old(name: &str, terminating: bool, ready: bool) -> FormerPod {
    FormerPod {
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

/// Invariants 9 and 10: all problems that can be detected early are reported before the lock.
#[test]
fn locks_only_after_backup_check_and_records() {
    let mut snapshot = present(there(false));
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
    let mut unrecorded = let_go(recorded());
    unrecorded.status.get_or_insert_default().backup = None;
    check(&unrecorded, &snapshot, &Action::Nothing);
    snapshot.found = Some(chosen(&unrecorded, 1));
    let record = Action::RecordBackup(Box::new(chosen(&unrecorded, 1)));
    check(&unrecorded, &snapshot, &record);
    check(&let_go(recorded()), &snapshot, &Action::Guard(true));
    check(&recorded(), &snapshot, &Action::Claim);
}

#[test]
fn records_recreated_cluster_again() {
    let mut snapshot = present(ClusterFacts {
        uid: "another-uid".into(),
        ..there(false)
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
        ..there(false)
    };
    let broken = ClusterFacts {
        problems: vec![Problem::new("spec.size", "is 9", "use 1 to 7")],
        ..there(false)
    };
    for (facts, expected) in [(paused, Reason::Paused), (broken, Reason::InvalidSpec)] {
        let mut snapshot = present(facts);
        snapshot.source = Source::Ready(Box::default());
        let plan = check(&recorded(), &snapshot, &Action::Nothing);
        assert_eq!(reason(&plan), expected);
    }
}

#[test]
fn cluster_of_another_restore_is_rejected() {
    let mut snapshot = present(ClusterFacts {
        claim: Some("another-restore".into()),
        ..there(false)
    });
    snapshot.source = Source::Ready(Box::default());
    let told = |restore: EtcdRestore| {
        // The restore was about to lock the cluster too. It has no cleanup.
        check(&held(restore.clone()), &snapshot, &Action::Guard(false));
        let refused = check(&let_go(restore), &snapshot, &Action::Nothing);
        let Outlook::Halted(trouble) = refused.outlook else {
            panic!("{refused:?}")
        };
        assert_eq!(trouble.reason, Reason::ClusterExists);
        trouble.message
    };
    let begun = told(recorded());
    assert!(begun.contains("nothing was changed"), "{begun}");
    // The spec already has `overwrite: true`, so the message says when that helps.
    assert!(begun.contains("when that one has ended"), "{begun}");
    // This restore has handed the cluster over, but is not complete.
    let late = told(verified_seed());
    assert!(!late.contains("nothing was changed"), "{late}");
    assert!(late.contains("another EtcdRestore"), "{late}");
}

#[test]
fn rejected_restore_has_no_finalizer() {
    let mut snapshot = present(there(false));
    snapshot.source = Source::Ready(Box::default());
    // The user has reverted `overwrite` before the lock.
    let mut restore = recorded();
    restore.spec.overwrite = false;
    check(&restore, &snapshot, &Action::Guard(false));
    let refused = check(&let_go(restore.clone()), &snapshot, &Action::Nothing);
    assert_eq!(reason(&refused), Reason::ClusterExists);
    // The failure may be recorded before the finalizer is removed.
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
    check(&restore, &Snapshot::not_asked(), &Action::Guard(false));
    let settled = check(&let_go(restore), &Snapshot::not_asked(), &Action::Nothing);
    assert_eq!(reason(&settled), Reason::ClusterExists);
}

/// Invariant 9: a seed that answers but never becomes ready leaves the old cluster complete.
#[test]
fn verifies_seed_while_old_cluster_serves() {
    let preparing = beside(Pod::Absent, Serving::NotAsked);
    check(&recorded(), &preparing, &Action::CreatePod);
    // While the restore holds the lock, it always has the finalizer.
    check(&let_go(recorded()), &preparing, &Action::Guard(true));
    let unverified = Pod::Present(PodFacts::default());
    check(
        &recorded(),
        &beside(unverified, serves(100)),
        &Action::Nothing,
    );
    let record = Action::RecordRestored {
        cluster_id: ID.into(),
        revision: 100,
        sha256: None,
    };
    check(&recorded(), &beside(restored_pod(), serves(100)), &record);
    let Pod::Present(mut waking) = restored_pod() else {
        panic!("the seed's pod is there")
    };
    waking.verified = false;
    let waking = beside(Pod::Present(waking), serves(100));
    check(&verified_seed(), &waking, &Action::Nothing);
    let turn = Action::RecordFormed {
        cluster_id: ID.into(),
    };
    check(
        &verified_seed(),
        &beside(restored_pod(), serves(100)),
        &turn,
    );
}

/// Invariant 9: a failure before the cutover leaves the old cluster unchanged.
#[test]
fn unreadable_backup_abandons_and_releases_lock() {
    let trouble = Trouble::new(Reason::SnapshotUnreadable, "sha256 differs");
    let failed = Pod::Present(PodFacts {
        trouble: Some(trouble.clone()),
        ..PodFacts::default()
    });
    check(
        &recorded(),
        &beside(failed.clone(), Serving::NotAsked),
        &Action::Abandon(Trouble {
            message: "sha256 differs; the cluster that was there is left as it was".into(),
            ..trouble
        }),
    );
    check(
        &abandoned(),
        &beside(failed, Serving::NotAsked),
        &Action::DiscardSeed,
    );
    let mut gone = beside(Pod::InTheWay, Serving::NotAsked);
    gone.seed.service = Child::Absent;
    check(&abandoned(), &gone, &Action::ReleaseClaim);
    check(&abandoned(), &present(there(false)), &Action::Guard(false));
    let end = check(
        &let_go(abandoned()),
        &present(there(false)),
        &Action::Nothing,
    );
    assert_eq!(reason(&end), Reason::SnapshotUnreadable);
    assert!(matches!(end.outlook, Outlook::Halted(_)));
}

/// Invariant 1.
#[test]
fn unknown_seed_keeps_lock() {
    let unknown = beside(Pod::Unknown("timeout".into()), Serving::NotAsked);
    check(&abandoned(), &unknown, &Action::Nothing);
}

#[test]
fn temporary_problems_do_not_abandon() {
    for reason in [Reason::PodNotStarting, Reason::StoreUnreachable] {
        let pod = Pod::Present(PodFacts {
            trouble: Some(Trouble::new(reason, "for now")),
            ..PodFacts::default()
        });
        check(
            &recorded(),
            &beside(pod, Serving::NotAsked),
            &Action::Nothing,
        );
    }
}

/// Invariants 9 and 17: the old members stop, the seed joins, and the lock is released, in this order.
#[test]
fn seed_joins_after_old_members_have_stopped() {
    let restore = verified_seed();
    let running = [old("a", false, true), old("b", false, false)];
    check(
        &restore,
        &turned(&running, restored_pod()),
        &Action::StopFormer(running.to_vec()),
    );
    let stopping = [old("a", true, true), old("b", true, false)];
    check(
        &restore,
        &turned(&stopping, restored_pod()),
        &Action::Nothing,
    );
    let stopped = [old("a", true, false)];
    check(&restore, &turned(&stopped, restored_pod()), &Action::Join);
    let joined = Pod::Present(PodFacts {
        restored: Some(100),
        joined: true,
        ..PodFacts::default()
    });
    check(&restore, &turned(&[], joined), &Action::ReleaseClaim);
}

/// Invariant 1.
#[test]
fn seed_does_not_join_while_old_members_are_unknown() {
    let mut snapshot = turned(&[], restored_pod());
    for former in [Former::NotAsked, Former::Unknown("timeout".into())] {
        snapshot.former = former;
        check(&verified_seed(), &snapshot, &Action::Nothing);
    }
}

/// Invariant 9: the old members keep their data and do not stop without the verified seed.
#[test]
fn recreates_seed_lost_at_cutover() {
    let restore = verified_seed();
    let running = [old("a", false, true)];
    check(&restore, &turned(&running, Pod::Absent), &Action::CreatePod);
    let again = Pod::Present(PodFacts::default());
    check(&restore, &turned(&running, again), &Action::Nothing);
    // After the old members have stopped, clients may have reached the seed, so its pod is created only on its volume.
    let on_its_volume = durable(&turned(&[], Pod::Absent), Child::Present);
    check(&restore, &on_its_volume, &Action::CreatePod);
}

fn durable(snapshot: &Snapshot, claim: Child) -> Snapshot {
    let mut snapshot = snapshot.clone();
    if let Cluster::Present(facts) = &mut snapshot.cluster {
        facts.durable = true;
    }
    snapshot.seed.claim = claim;
    snapshot
}

/// The cluster operator gets a cluster without data, and reports it. The restore fails and reports it too.
#[test]
fn lost_seed_after_cutover_fails_with_remedy() {
    let ended = |joined| {
        Pod::Present(PodFacts {
            joined,
            ..ended(Life::Ended)
        })
    };
    for pod in [Pod::Absent, Pod::InTheWay, ended(false), ended(true)] {
        let bare = turned(&[old("a", true, false)], pod.clone());
        for snapshot in [
            bare.clone(),
            durable(&bare, Child::Absent),
            durable(&bare, Child::InTheWay),
        ] {
            let action = plan(&verified_seed(), &snapshot).action;
            let Action::Abandon(trouble) = action else {
                panic!("{action:?}");
            };
            assert!(trouble.message.contains("spec.overwrite: true"));
            // After the record the cluster is handed over.
            let mut failed = verified_seed();
            failed.status.as_mut().unwrap().abandoned = Some(AbandonedStatus {
                reason: "SeedFailed".into(),
                message: trouble.message,
            });
            let action = match &pod {
                Pod::Present(pod) if !pod.joined => Action::Join,
                _ => Action::ReleaseClaim,
            };
            check(&failed, &snapshot, &action);
            check(&failed, &present(there(false)), &Action::Guard(false));
            let told = plan(&let_go(failed), &present(there(false)));
            assert!(matches!(told.outlook, Outlook::Halted(_)));
            // A user who deletes the restore accepts the loss.
            check(&deleted(verified_seed()), &snapshot, &action);
        }
        let unknown = durable(&bare, Child::Unknown("timeout".into()));
        check(&verified_seed(), &unknown, &Action::Nothing);
    }
}

/// Invariant 9: the seed was created again, while a user stopped the last old members.
#[test]
fn seed_with_unverified_data_does_not_join() {
    for restored in [None, Some(99), Some(101)] {
        let pod = Pod::Present(PodFacts {
            restored,
            ..PodFacts::default()
        });
        let snapshot = turned(&[], pod);
        check(&verified_seed(), &snapshot, &Action::Nothing);
        check(&deleted(verified_seed()), &snapshot, &Action::Join);
        let told = plan(&verified_seed(), &snapshot);
        assert_eq!(
            matches!(told.outlook, Outlook::Stuck(_)),
            restored.is_some()
        );
    }
}

/// Invariant 9: the location may contain another backup, and changed addresses lead to another cluster ID.
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
        (restored_pod(), Serving::NotAsked),
        (restored_pod(), Serving::Unknown("timeout".into())),
    ] {
        let mut snapshot = turned(&[old("a", false, true)], pod);
        snapshot.serving = serving;
        check(&verified_seed(), &snapshot, &Action::Nothing);
    }
}

/// The old members serve before the cutover and until they stop, so no client can have written to the seed.
#[test]
fn replaces_ended_pod_while_old_members_run() {
    let running = [old("a", false, true), old("b", true, true)];
    for durable in [false, true] {
        for pod in ended_pods() {
            let pod = Pod::Present(pod);
            let mut preparing = beside(pod.clone(), serves(100));
            let mut turned = turned(&running, pod);
            for snapshot in [&mut preparing, &mut turned] {
                snapshot.seed.claim = Child::Present;
                if let Cluster::Present(facts) = &mut snapshot.cluster {
                    facts.durable = durable;
                }
                check(&verified_seed(), snapshot, &clear());
            }
            check(&recorded(), &preparing, &clear());
            check(&deleted(verified_seed()), &turned, &clear());
            check(&abandoned(), &preparing, &Action::DiscardSeed);
        }
        let refused = turned(&running, Pod::Present(ended(Life::EndedAtOnce)));
        check(&verified_seed(), &refused, &Action::Nothing);
    }
}

/// Invariant 9: with the labels, clients may have written to the seed. Their writes are on its volume, or lost.
#[test]
fn joined_seed_is_not_restored_again() {
    let late = [old("late", false, false)];
    let joined = PodFacts {
        joined: true,
        ..ended(Life::Ended)
    };
    let mut snapshot = turned(&late, Pod::Present(joined.clone()));
    check(&verified_seed(), &snapshot, &Action::Nothing);
    snapshot.seed.claim = Child::Present;
    snapshot.cluster = Cluster::Present(Box::new(ClusterFacts {
        cluster_id: Some(ID.into()),
        durable: true,
        ..there(true)
    }));
    check(&verified_seed(), &snapshot, &clear());
    // After the old members have stopped, the seed is a member, which the cluster operator manages.
    for durable in [false, true] {
        let mut snapshot = turned(&[], Pod::Present(joined.clone()));
        if let Cluster::Present(facts) = &mut snapshot.cluster {
            facts.durable = durable;
        }
        snapshot.seed.claim = Child::Present;
        if durable {
            check(&verified_seed(), &snapshot, &Action::ReleaseClaim);
            snapshot.seed.pod = Pod::Present(ended(Life::Ended));
            check(&verified_seed(), &snapshot, &clear());
        }
        let failed = |plan: Plan| matches!(plan.action, Action::Abandon(_));
        assert_eq!(failed(plan(&verified_seed(), &snapshot)), !durable);
    }
}

#[test]
fn deleted_restore_in_place_ends_with_old_or_new_cluster() {
    let preparing = beside(restored_pod(), serves(100));
    check(&deleted(recorded()), &preparing, &Action::DiscardSeed);
    check(&deleted(verified_seed()), &preparing, &Action::DiscardSeed);
    let running = [old("a", false, true)];
    check(
        &deleted(verified_seed()),
        &turned(&running, restored_pod()),
        &Action::StopFormer(running.to_vec()),
    );
    check(
        &deleted(recorded()),
        &present(there(false)),
        &Action::Guard(false),
    );
}

#[test]
fn changed_cluster_id_abandons_restore() {
    let mut snapshot = beside(restored_pod(), serves(100));
    snapshot.cluster = Cluster::Present(Box::new(ClusterFacts {
        cluster_id: Some("ff".into()),
        ..there(true)
    }));
    let plan = plan(&recorded(), &snapshot);
    assert!(matches!(plan.action, Action::Abandon(_)), "{plan:?}");
}
