//! Tests of unusable seeds, and of an EtcdCluster that was created again or recovered.

use super::*;
use crate::snapshot::OtherBackup;

fn pod_with(edit: impl FnOnce(&mut PodFacts)) -> Pod {
    let mut pod = PodFacts {
        restored: Some(100),
        verified: true,
        ..PodFacts::default()
    };
    edit(&mut pod);
    Pod::Present(pod)
}

/// A seed's pod whose report is lost. The report is the termination message of the container `fetch`.
fn without_report() -> Pod {
    pod_with(|pod| (pod.restored, pod.verified, pod.report_lost) = (None, false, true))
}

fn recent(pod: &Pod) -> Pod {
    let Pod::Present(pod) = pod else {
        panic!("the snapshot contains no pod of the seed")
    };
    let mut pod = pod.clone();
    pod.recent = true;
    Pod::Present(pod)
}

fn check_pod_is_replaced(restore: &EtcdRestore, snapshot: &Snapshot) {
    let plan = plan(restore, snapshot);
    assert!(matches!(plan.action, Action::ReplacePod(_)), "{plan:?}");
}

/// The volume may be empty, because it was created again while the old members ran. The cluster operator cannot start a
/// member on an empty volume, so the restore creates the pod.
#[test]
fn seed_pod_is_recreated_on_existing_volume_before_handover() {
    let restore = verified_seed();
    let mut snapshot = durable(&cut_over(&[], Pod::Absent), Child::Present);
    check(&restore, &snapshot, &Action::CreatePod);
    snapshot.seed.service = Child::Absent;
    check(&restore, &snapshot, &Action::CreateService);
    snapshot.seed.pod = Pod::NameTaken;
    check(&restore, &snapshot, &Action::Nothing);
    snapshot.seed.pod = Pod::Present(ended(Life::Ended));
    check(&restore, &snapshot, &replace_pod());
    snapshot.seed.pod = Pod::Present(ended(Life::EndedRecently));
    check(&restore, &snapshot, &Action::Nothing);
    // A user who deletes the EtcdRestore accepts the current data of the seed, so the lock is removed.
    snapshot.seed.pod = Pod::Absent;
    check(&deleted(restore), &snapshot, &Action::ReleaseLock);
}

/// Invariant 9: the seed joins only if its report and its etcd both show the verified backup.
#[test]
fn seed_joins_only_with_verified_backup() {
    let other = |cluster_id: &str, revision| Serving::Serves {
        cluster_id: cluster_id.into(),
        revision,
    };
    for (serving, failed) in [
        (Serving::NotRead, false),
        (Serving::Unknown("timeout".into()), false),
        (other(OLD, 100), true),
        (other(ID, 99), true),
    ] {
        let mut snapshot = cut_over(&[], restored_pod());
        snapshot.serving = serving;
        let plan = check(&verified_seed(), &snapshot, &Action::Nothing);
        assert_eq!(
            matches!(plan.state, PlanState::Stuck(_)),
            failed,
            "{plan:?}"
        );
        if !failed {
            let text = |plan: &Plan| match &plan.state {
                PlanState::Working(trouble) => trouble.message.clone(),
                other => panic!("{other:?}"),
            };
            assert_eq!(
                plan.requeue,
                Some(POLL),
                "the seed's pod was not created recently, so the usual interval is enough"
            );
            assert!(text(&plan).contains("delete this EtcdRestore"), "{plan:?}");
            snapshot.seed.pod = recent(&snapshot.seed.pod);
            let plan = check(&verified_seed(), &snapshot, &Action::Nothing);
            assert_eq!(
                plan.requeue,
                Some(OUTAGE_POLL),
                "the seed's pod was created recently, and no member serves clients"
            );
            assert!(!text(&plan).contains("delete"), "{plan:?}");
        }
        check(&deleted(verified_seed()), &snapshot, &Action::Join);
    }
    // A failing sidecar does not stop etcd, so the seed joins.
    let with_sidecar_problem = pod_with(|pod| {
        pod.trouble = Some(Trouble::new(Reason::PodNotStarting, "a sidecar"));
    });
    check(
        &verified_seed(),
        &cut_over(&[], with_sidecar_problem.clone()),
        &Action::Join,
    );
    let mut not_serving = cut_over(&[], with_sidecar_problem);
    not_serving.serving = Serving::NotRead;
    let plan = check(&verified_seed(), &not_serving, &Action::Nothing);
    assert_eq!(reason(&plan), Reason::PodNotStarting);
    assert!(
        matches!(plan.state, PlanState::Working(ref it) if it.message.contains("delete this EtcdRestore")),
        "{plan:?}"
    );
}

/// The backup of a seed that was created again is missing. No member serves clients, so the message contains the
/// remedy.
#[test]
fn seed_problem_is_reported_with_remedy_after_old_members_stopped() {
    let without_backup = pod_with(|pod| {
        (pod.restored, pod.verified) = (None, false);
        pod.trouble = Some(Trouble::new(Reason::BackupMissing, "the backup is missing"));
    });
    let names_remedy = |old_members: &[OldPod]| {
        let snapshot = durable(
            &cut_over(old_members, without_backup.clone()),
            Child::Present,
        );
        let plan = check(&verified_seed(), &snapshot, &Action::Nothing);
        assert_eq!(reason(&plan), Reason::BackupMissing);
        let PlanState::Stuck(trouble) = plan.state else {
            panic!("{plan:?}")
        };
        assert!(trouble.message.starts_with("the backup is missing"));
        trouble.message.contains("delete this EtcdRestore")
    };
    assert!(names_remedy(&[]));
    assert!(!names_remedy(&[old("a", false, true)]));
}

/// Invariant 9: the PersistentVolumeClaim is terminating or deleted, so the deletion of the pod would delete the data
/// too.
#[test]
fn seed_pod_on_terminating_volume_is_kept() {
    let bare = cut_over(&[], without_report());
    for pvc in [Child::NameTaken, Child::Absent] {
        let snapshot = durable(&bare, pvc);
        let plan = check(&verified_seed(), &snapshot, &Action::Nothing);
        assert!(matches!(plan.state, PlanState::Stuck(_)), "{plan:?}");
        let checked = pod_with(|pod| {
            (pod.restored, pod.verified) = (None, false);
            (pod.report_lost, pod.checks_sha256) = (true, true);
        });
        let checked = durable(&cut_over(&[], checked), snapshot.seed.pvc.clone());
        check(&verified_seed(), &checked, &Action::Nothing);
        let fetches = pod_with(|pod| {
            (pod.restored, pod.verified) = (None, false);
            pod.other_backup = Some(OtherBackup::Fetches("s3://b/2".into()));
        });
        let fetches = durable(&cut_over(&[], fetches), snapshot.seed.pvc);
        check(&verified_seed(), &fetches, &Action::Nothing);
    }
    // Invariant 1: the restore waits while the PersistentVolumeClaim cannot be read.
    let unknown = durable(&bare, Child::Unknown("timeout".into()));
    let plan = check(&verified_seed(), &unknown, &Action::Nothing);
    assert!(matches!(plan.state, PlanState::Working(_)), "{plan:?}");
}

/// Invariant 9: the seed's pod and volume were lost together with the old members. A new volume contains the restored
/// data only if a pod has reported it.
#[test]
fn recreated_volume_does_not_count_as_restored_data() {
    let restore = verified_seed();
    let on_volume = |pod| durable(&cut_over(&[], pod), Child::Present);
    // A new pod is created on the volume, and the cluster is handed over only after this pod has reported its data.
    check(&restore, &on_volume(Pod::Absent), &Action::CreatePod);
    let fetching = pod_with(|pod| (pod.restored, pod.verified) = (None, false));
    check(&restore, &on_volume(fetching), &Action::Nothing);
    // `--sha256` does not check data that an earlier pod has left on the volume, so a pod without a report is replaced.
    let unreported = pod_with(|pod| {
        (pod.restored, pod.verified) = (None, false);
        (pod.report_lost, pod.checks_sha256) = (true, true);
    });
    check_pod_is_replaced(&restore, &on_volume(unreported.clone()));
    for pvc in [Child::NameTaken, Child::Absent] {
        let snapshot = durable(&cut_over(&[], unreported.clone()), pvc);
        let plan = check(&restore, &snapshot, &Action::Nothing);
        let PlanState::Stuck(trouble) = &plan.state else {
            panic!("{plan:?}")
        };
        for part in ["the data of the seed is unknown", "delete this EtcdRestore"] {
            assert!(trouble.message.contains(part), "{trouble:?}");
        }
        // A user who deletes the EtcdRestore accepts the current data of the seed, so the seed joins.
        check(&deleted(restore.clone()), &snapshot, &Action::Join);
    }
    // Without a volume, the pod itself has fetched its data, so `--sha256` proves that the data is the recorded backup.
    check(&restore, &cut_over(&[], unreported), &Action::Join);
}

/// The kubelet may lose the report of a container that has succeeded. The container does not run again, so the pod is
/// replaced while no client can have written to it.
#[test]
fn seed_without_report_is_replaced_before_client_writes() {
    let running = [old("a", false, true)];
    for restore in [recorded(), verified_seed()] {
        let snapshot = preparing(without_report(), serves(100));
        check_pod_is_replaced(&restore, &snapshot);
        let early = preparing(recent(&without_report()), serves(100));
        let plan = check(&restore, &early, &Action::Nothing);
        assert_eq!(reason(&plan), Reason::SeedFailed);
    }
    check_pod_is_replaced(&verified_seed(), &cut_over(&running, without_report()));
    check_pod_is_replaced(&intended(), &locked_with(without_report(), serves(100)));
    let plan = check(
        &verified_seed(),
        &cut_over(&running, recent(&without_report())),
        &Action::Nothing,
    );
    assert!(matches!(plan.state, PlanState::Working(_)), "{plan:?}");
}

/// With a volume, the next pod reports the data. Without a volume, the pod has the only copy, so it joins only if its
/// arguments contain the recorded SHA-256.
#[test]
fn seed_without_report_joins_only_with_checked_sha256() {
    let bare = cut_over(&[], without_report());
    check_pod_is_replaced(&verified_seed(), &durable(&bare, Child::Present));
    let plan = check(&verified_seed(), &bare, &Action::Nothing);
    assert!(
        matches!(plan.state, PlanState::Stuck(ref it) if it.message.contains("delete this EtcdRestore")),
        "{plan:?}"
    );
    check(&deleted(verified_seed()), &bare, &Action::Join);
    let Pod::Present(mut checked) = without_report() else {
        panic!("the snapshot contains no pod of the seed")
    };
    checked.checks_sha256 = true;
    let mut snapshot = cut_over(&[], Pod::Present(checked));
    check(&verified_seed(), &snapshot, &Action::Join);
    snapshot.serving = Serving::Unknown("timeout".into());
    check(&verified_seed(), &snapshot, &Action::Nothing);
}

/// An old member is found after the seed has joined. The seed had served the verified backup before, so its lost
/// report does not matter.
#[test]
fn old_member_stops_after_seed_without_report_has_joined() {
    let Pod::Present(mut joined) = without_report() else {
        panic!("the snapshot contains no pod of the seed")
    };
    joined.joined = true;
    let late = [old("late", false, true)];
    let snapshot = cut_over(&late, Pod::Present(joined));
    check(
        &verified_seed(),
        &snapshot,
        &Action::StopOldMembers(late.to_vec()),
    );
}

/// Invariant 17: clients can connect to both clusters, so the old member must stop, even if the seed is faulty. The
/// seed may contain writes of clients.
#[test]
fn old_member_stops_even_if_joined_seed_is_faulty() {
    let late = [old("late", false, true)];
    let other = |cluster_id: &str, revision| Serving::Serves {
        cluster_id: cluster_id.into(),
        revision,
    };
    let joined = |edit: fn(&mut PodFacts)| {
        pod_with(|pod| {
            pod.joined = true;
            edit(pod);
        })
    };
    let stops = Action::StopOldMembers(late.to_vec());
    for (pod, serving) in [
        (
            joined(|pod| {
                pod.trouble = Some(Trouble::new(Reason::PodNotStarting, "a sidecar"));
            }),
            serves(100),
        ),
        (
            joined(|pod| pod.other_backup = Some(OtherBackup::Contains("s3://b/2".into()))),
            serves(100),
        ),
        (joined(|pod| pod.restored = Some(101)), serves(101)),
        (joined(|_| {}), serves(99)),
        (joined(|_| {}), other(OLD, 100)),
    ] {
        let mut snapshot = cut_over(&late, pod);
        snapshot.serving = serving;
        check(&verified_seed(), &snapshot, &stops);
        for unanswered in [Serving::NotRead, Serving::Unknown("timeout".into())] {
            snapshot.serving = unanswered;
            check(&verified_seed(), &snapshot, &Action::Nothing);
        }
    }
    // If the pod of a seed that has not joined reports a problem, the old members are not stopped.
    let with_sidecar_problem = pod_with(|pod| {
        pod.trouble = Some(Trouble::new(Reason::PodNotStarting, "a sidecar"));
    });
    check(
        &verified_seed(),
        &cut_over(&late, with_sidecar_problem),
        &Action::Nothing,
    );
}

/// A suspended operator process may create the pod with another backup than the recorded backup.
#[test]
fn seed_with_other_backup_is_deleted_before_cutover() {
    let fetches = pod_with(|pod| {
        (pod.restored, pod.verified) = (None, false);
        pod.other_backup = Some(OtherBackup::Fetches("s3://b/2 (recorded: s3://b/1)".into()));
        // The backup that the pod fetches (`s3://b/2`) does not exist.
        pod.trouble = Some(Trouble::new(Reason::BackupMissing, "missing"));
    });
    let contains =
        pod_with(|pod| pod.other_backup = Some(OtherBackup::Contains("s3://b/2".into())));
    for restore in [recorded(), verified_seed()] {
        check_pod_is_replaced(&restore, &preparing(fetches.clone(), Serving::NotRead));
        let snapshot = preparing(contains.clone(), serves(100));
        let plan = check(&restore, &snapshot, &Action::DiscardSeed);
        assert!(
            matches!(plan.state, PlanState::Working(ref it) if it.message.contains("s3://b/2")),
            "{plan:?}"
        );
        let early = preparing(recent(&contains), serves(100));
        check(&restore, &early, &Action::Nothing);
    }
    let locked = locked_with(contains.clone(), serves(100));
    check(
        &with_finalizer(seed_verified()),
        &locked,
        &Action::DiscardSeed,
    );
    // After the cutover, the volume of the seed is kept. A pod that fetches another backup is replaced. A pod whose
    // data is another backup is only reported.
    let running = [old("a", false, true)];
    check_pod_is_replaced(&verified_seed(), &cut_over(&running, fetches.clone()));
    let plan = check(
        &verified_seed(),
        &cut_over(&running, contains.clone()),
        &Action::Nothing,
    );
    assert!(matches!(plan.state, PlanState::Stuck(_)), "{plan:?}");
    let plan = check(&verified_seed(), &cut_over(&[], contains), &Action::Nothing);
    assert!(matches!(plan.state, PlanState::Stuck(_)), "{plan:?}");
    check_pod_is_replaced(
        &verified_seed(),
        &durable(&cut_over(&[], fetches), Child::Present),
    );
}

/// Invariant 9: after the handover, the data may be newer than the backup. The quorum was lost and recovered with a
/// new cluster ID, or a user has created the EtcdCluster again.
#[test]
fn cluster_changed_after_handover_is_not_replaced_again() {
    let source = |facts: ClusterFacts| {
        let mut snapshot = present(facts);
        snapshot.source = Source::Ready(Box::default());
        snapshot
    };
    let recovered = ClusterFacts {
        cluster_id: Some("ef".into()),
        ..existing(false)
    };
    let recreated = ClusterFacts {
        uid: "another-uid".into(),
        cluster_id: None,
        ..existing(false)
    };
    let without_record = |restore: &EtcdRestore| {
        let mut restore = restore.clone();
        restore.status.as_mut().unwrap().replaces = None;
        restore
    };
    for facts in [recovered, recreated] {
        for restore in [verified_seed(), without_record(&verified_seed())] {
            let plan = check(
                &without_finalizer(restore),
                &source(facts.clone()),
                &Action::Nothing,
            );
            assert_eq!(reason(&plan), Reason::ClusterExists);
            // This restore has already changed the cluster, and its spec already contains `overwrite: true`, so the
            // message asks for a new EtcdRestore.
            let PlanState::Halted(trouble) = plan.state else {
                panic!("{plan:?}")
            };
            assert!(trouble.message.contains("create a new EtcdRestore"));
            assert!(!trouble.message.contains("nothing was changed"));
        }
    }
    // If a user has removed the lock, the restore sets the lock again.
    check(&verified_seed(), &source(existing(false)), &Action::Lock);
}

/// An invalid spec does not stop a started restore, because no member may serve clients after the cutover.
#[test]
fn invalid_spec_change_does_not_stop_started_restore() {
    let mut restore = verified_seed();
    restore.spec.backup_storage_type = Some("Tape".into());
    check(&restore, &cut_over(&[], restored_pod()), &Action::Join);
    let mut fresh = super::super::restore(|_| {});
    fresh.spec.backup_storage_type = Some("Tape".into());
    let plan = check(&fresh, &present(existing(false)), &Action::Nothing);
    assert_eq!(reason(&plan), Reason::InvalidSpec);
}
