//! Tests of single plans. `check` compares the planned action with the expected action.

use api::names::FINALIZER_CLAIM;
use api::problem::Problem;

use super::*;
use crate::snapshot::{OldMembers, Seed};

mod replacing;

const UID: &str = "restore-uid";
const ID: &str = "ab";

fn restore(edit: impl FnOnce(&mut EtcdRestore)) -> EtcdRestore {
    let spec = r#"{"etcdCluster":{"name":"main"},"backupStorageType":"S3","s3":{"path":"b/k","awsSecret":"aws"}}"#;
    let mut restore = EtcdRestore::new("again", serde_json::from_str(spec).unwrap());
    restore.metadata.uid = Some(UID.into());
    restore.metadata.generation = Some(1);
    edit(&mut restore);
    restore
}

fn with_finalizer(mut restore: EtcdRestore) -> EtcdRestore {
    restore.metadata.finalizers = Some(vec![FINALIZER_CLAIM.into()]);
    restore
}

fn intended() -> EtcdRestore {
    restore(|r| {
        let (seed, backup) = (Some(naming::seed(r)), Some(chosen(r, 1)));
        let status = r.status.get_or_insert_default();
        (status.seed, status.backup) = (seed, backup);
    })
}

/// The backup with this number. Higher numbers are newer backups.
fn chosen(restore: &EtcdRestore, number: u32) -> ChosenBackup {
    let block = format!(r#"{{"s3":{{"path":"b/k_v{number}_2026-01-01-00:00:00"}}}}"#);
    choice::chosen_from(restore, serde_json::from_str(&block).unwrap())
}

fn seed_verified() -> EtcdRestore {
    let mut restore = intended();
    let status = restore.status.get_or_insert_default();
    status.cluster_id = Some(ID.into());
    status.restored_revision = Some(100);
    restore
}

fn absent(source: Source) -> Snapshot {
    Snapshot {
        source,
        ..Snapshot::not_read()
    }
}

fn present(facts: ClusterFacts) -> Snapshot {
    Snapshot {
        cluster: Cluster::Present(Box::new(facts)),
        ..absent(Source::NotRead)
    }
}

fn locked() -> ClusterFacts {
    ClusterFacts {
        lock: Some(UID.into()),
        ..ClusterFacts::default()
    }
}

fn locked_with(pod: Pod, serving: Serving) -> Snapshot {
    let mut snapshot = present(locked());
    snapshot.seed = Seed {
        service: Child::Present,
        pvc: Child::Absent,
        pod,
    };
    snapshot.serving = serving;
    snapshot
}

fn serves(revision: i64) -> Serving {
    Serving::Serves {
        cluster_id: ID.into(),
        revision,
    }
}

fn restored_pod() -> Pod {
    Pod::Present(PodFacts {
        restored: Some(100),
        verified: true,
        ..PodFacts::default()
    })
}

fn check(restore: &EtcdRestore, snapshot: &Snapshot, action: &Action) -> Plan {
    let plan = plan(restore, snapshot);
    assert_eq!(plan.action, *action, "{:?}", plan.state);
    plan
}

fn reason(plan: &Plan) -> Reason {
    match &plan.state {
        PlanState::Working(trouble) | PlanState::Stuck(trouble) | PlanState::Halted(trouble) => {
            trouble.reason
        }
        PlanState::Complete => Reason::Succeeded,
    }
}

/// Invariant 10: the seed's name is recorded before its objects are created.
#[test]
fn restore_records_seed_name_before_creating_objects() {
    let restore = restore(|_| {});
    let record = Action::RecordIntent {
        seed: naming::seed(&restore),
        replaces: None,
    };
    check(&restore, &absent(Source::NotRead), &record);
    check(&restore, &present(locked()), &record);
}

#[test]
fn restore_creates_cluster_only_if_backup_was_found() {
    let missing = Trouble::new(Reason::BackupMissing, "no object");
    let plan = check(
        &intended(),
        &absent(Source::Unavailable(missing)),
        &Action::Nothing,
    );
    assert_eq!(reason(&plan), Reason::BackupMissing);
    let spec = Box::new(EtcdClusterSpec::default());
    check(
        &intended(),
        &absent(Source::Ready(spec.clone())),
        &Action::CreateCluster(spec),
    );
}

/// Invariant 1: a cluster that cannot be read is not assumed to be missing.
#[test]
fn restore_waits_while_cluster_cannot_be_read() {
    let mut snapshot = absent(Source::Ready(Box::default()));
    snapshot.cluster = Cluster::Unknown("timeout".into());
    check(&intended(), &snapshot, &Action::Nothing);
    snapshot.cluster = Cluster::Terminating;
    check(&intended(), &snapshot, &Action::Nothing);
}

/// Invariant 9. Defect 2 of coreos/etcd-operator: it deleted the existing cluster before it restored the backup.
#[test]
fn restore_rejects_existing_cluster_without_changing_it() {
    for lock in [None, Some("another-restore".to_owned())] {
        let snapshot = present(ClusterFacts {
            lock,
            ..ClusterFacts::default()
        });
        let plan = check(&intended(), &snapshot, &Action::Nothing);
        assert_eq!(reason(&plan), Reason::ClusterExists);
        assert!(
            matches!(plan.state, PlanState::Halted(ref t) if t.message.contains("nothing was changed"))
        );
    }
}

#[test]
fn rejected_restore_does_not_start_after_cluster_deletion() {
    let mut restore = intended();
    let refused = conditions::Finding::new(
        ConditionType::Failed,
        true,
        Reason::ClusterExists.into(),
        "exists",
    );
    let now = k8s_openapi::apimachinery::pkg::apis::meta::v1::Time(
        k8s_openapi::jiff::Timestamp::UNIX_EPOCH,
    );
    conditions::set(
        &mut restore.status.get_or_insert_default().conditions,
        &refused,
        Some(1),
        &now,
    );
    let plan = check(
        &restore,
        &absent(Source::Ready(Box::default())),
        &Action::Nothing,
    );
    assert_eq!(reason(&plan), Reason::ClusterExists);
    restore.metadata.generation = Some(2);
    // After a change of the spec, the rejection no longer applies, and the restore starts with the backup in the
    // changed spec.
    let mut snapshot = absent(Source::Ready(Box::default()));
    let other = chosen(&restore, 2);
    snapshot.found = Some(other.clone());
    let record = Action::RecordBackup(Box::new(other.clone()));
    check(&restore, &snapshot, &record);
    restore.status.get_or_insert_default().backup = Some(other);
    check(&restore, &snapshot, &Action::CreateCluster(Box::default()));
}

/// Invariant 10: the backup is recorded before it is used.
#[test]
fn restore_records_backup_before_using_it() {
    let mut restore = intended();
    restore.status.get_or_insert_default().backup = None;
    let mut snapshot = absent(Source::Ready(Box::default()));
    snapshot.found = Some(chosen(&restore, 1));
    let record = Action::RecordBackup(Box::new(chosen(&restore, 1)));
    check(&restore, &snapshot, &record);
    // A newer backup (2) exists now. The restore continues with the recorded backup (1).
    let create = Action::CreateCluster(Box::default());
    snapshot.found = Some(chosen(&restore, 2));
    check(&intended(), &snapshot, &create);
}

/// A user deletes the recorded backup from the status while the restore holds the lock.
#[test]
fn restore_records_backup_again_after_user_deletes_it_from_status() {
    let mut restore = intended();
    restore.status.get_or_insert_default().backup = None;
    for pod in [Pod::Absent, restored_pod()] {
        let mut snapshot = locked_with(pod, serves(100));
        check(&restore, &snapshot, &Action::Nothing);
        snapshot.found = Some(chosen(&restore, 1));
        let record = Action::RecordBackup(Box::new(chosen(&restore, 1)));
        check(&restore, &snapshot, &record);
    }
}

#[test]
fn restore_prepares_seed_one_object_at_a_time() {
    let mut snapshot = present(locked());
    check(&intended(), &snapshot, &Action::CreateService);
    snapshot.seed.service = Child::Present;
    check(&intended(), &snapshot, &Action::CreatePod);
    snapshot.cluster = Cluster::Present(Box::new(ClusterFacts {
        durable: true,
        ..locked()
    }));
    // With volumes (`durable`), the PersistentVolumeClaim is created before the pod. The seeds of coreos/etcd-operator
    // never used the volumes of the cluster (defect 7 in docs/conformance.md).
    check(&intended(), &snapshot, &Action::CreatePvc);
    snapshot.seed.pvc = Child::Present;
    check(&intended(), &snapshot, &Action::CreatePod);
}

#[test]
fn restore_waits_for_deletion_of_objects_with_seed_name() {
    let mut snapshot = present(locked());
    snapshot.seed.service = Child::NameTaken;
    check(&intended(), &snapshot, &Action::Nothing);
    snapshot.seed.service = Child::Present;
    snapshot.seed.pod = Pod::NameTaken;
    check(&intended(), &snapshot, &Action::Nothing);
}

/// Invariant 9: an answer at the seed's address is ignored until the pod has reported a verified backup.
#[test]
fn cluster_id_of_seed_is_recorded_only_after_data_is_verified() {
    let running = Pod::Present(PodFacts::default());
    check(
        &intended(),
        &locked_with(running, serves(100)),
        &Action::Nothing,
    );
    check(
        &intended(),
        &locked_with(restored_pod(), Serving::Unknown("refused".into())),
        &Action::Nothing,
    );
    let record = Action::RecordRestored {
        cluster_id: ID.into(),
        revision: 100,
        sha256: None,
    };
    check(
        &intended(),
        &locked_with(restored_pod(), serves(100)),
        &record,
    );
}

#[test]
fn cluster_id_of_seed_with_lower_revision_is_not_recorded() {
    let plan = check(
        &intended(),
        &locked_with(restored_pod(), serves(99)),
        &Action::Nothing,
    );
    assert_eq!(reason(&plan), Reason::SeedFailed);
}

#[test]
fn restore_reports_unreadable_snapshot() {
    let pod = Pod::Present(PodFacts {
        trouble: Some(Trouble::new(Reason::SnapshotUnreadable, "sha256 differs")),
        ..PodFacts::default()
    });
    let plan = check(
        &intended(),
        &locked_with(pod, Serving::NotRead),
        &Action::Nothing,
    );
    assert_eq!(reason(&plan), Reason::SnapshotUnreadable);
    assert!(plan.requeue.is_some());
}

#[test]
fn restore_records_new_cluster_before_releasing_lock() {
    let id = || Some(ID.to_owned());
    let snapshot = locked_with(restored_pod(), serves(100));
    // The finalizer is set before the cutover, so that a deletion of the EtcdRestore waits for the handover.
    check(&seed_verified(), &snapshot, &Action::SetFinalizer(true));
    check(
        &with_finalizer(seed_verified()),
        &snapshot,
        &Action::RecordFormed {
            cluster_id: ID.into(),
        },
    );
    let formed = present(ClusterFacts {
        cluster_id: id(),
        ..locked()
    });
    check(&seed_verified(), &formed, &Action::ReleaseLock);
    let released = present(ClusterFacts {
        cluster_id: id(),
        ..ClusterFacts::default()
    });
    check(
        &with_finalizer(seed_verified()),
        &released,
        &Action::SetFinalizer(false),
    );
    check(&seed_verified(), &released, &Action::Nothing);
}

#[test]
fn restore_recreates_seed_lost_before_handover() {
    let snapshot = locked_with(Pod::Absent, Serving::NotRead);
    check(&seed_verified(), &snapshot, &Action::CreatePod);
}

fn ended(life: Life) -> PodFacts {
    let evicted = "the seed's pod has ended and is not restarted (Evicted: DiskPressure)";
    PodFacts {
        life,
        trouble: Some(Trouble::new(Reason::PodNotStarting, evicted)),
        ..PodFacts::default()
    }
}

fn replace_pod() -> Action {
    let why = "the seed's pod has ended and is not restarted (Evicted: DiskPressure): the operator replaces the pod";
    Action::ReplacePod(why.into())
}

/// Two pods that have ended: one before and one after its container `fetch` has reported the restored backup.
fn ended_pods() -> [PodFacts; 2] {
    let fetched = PodFacts {
        restored: Some(100),
        ..ended(Life::Ended)
    };
    [ended(Life::Ended), fetched]
}

/// The pod is replaced, because no client can have written to the seed. The next pod uses the data on the volume, or
/// restores the backup again.
#[test]
fn ended_seed_pod_is_replaced_before_cutover() {
    let with_finalizer = || with_finalizer(seed_verified());
    for restore in [
        intended as fn() -> EtcdRestore,
        seed_verified,
        with_finalizer,
    ] {
        let restore = restore();
        for (durable, pod) in [false, true].into_iter().zip(ended_pods()) {
            let mut snapshot = locked_with(Pod::Present(pod), serves(100));
            snapshot.seed.pvc = Child::Present;
            snapshot.cluster = Cluster::Present(Box::new(ClusterFacts {
                durable,
                ..locked()
            }));
            check(&restore, &snapshot, &replace_pod());
            // Until the kubelet confirms the deletion, the object of the deleted pod exists, and the restore waits.
            snapshot.seed.pod = Pod::NameTaken;
            check(&restore, &snapshot, &Action::Nothing);
            snapshot.seed.pod = Pod::Absent;
            check(&restore, &snapshot, &Action::CreatePod);
        }
    }
}

#[test]
fn restore_pauses_before_replacing_recently_ended_seed_pod() {
    let snapshot = locked_with(Pod::Present(ended(Life::EndedRecently)), Serving::NotRead);
    let plan = check(&intended(), &snapshot, &Action::Nothing);
    assert_eq!(plan.requeue, Some(POLL));
    assert!(
        matches!(plan.state, PlanState::Working(ref it) if it.message.contains("DiskPressure")),
        "{plan:?}"
    );
}

/// Invariant 9: after the cluster ID is recorded, the seed is a member, and only the cluster operator replaces its
/// pod.
#[test]
fn cluster_is_handed_over_even_if_seed_pod_has_ended() {
    for pod in ended_pods() {
        let mut snapshot = locked_with(Pod::Present(pod), Serving::NotRead);
        for lock in [Some(UID.to_owned()), None] {
            let action = match &lock {
                Some(_) => Action::ReleaseLock,
                None => Action::Nothing,
            };
            snapshot.cluster = Cluster::Present(Box::new(ClusterFacts {
                cluster_id: Some(ID.into()),
                lock,
                ..ClusterFacts::default()
            }));
            check(&seed_verified(), &snapshot, &action);
        }
    }
}

/// Clients may write after the cluster ID is recorded, so a lost seed must not be restored from the backup.
#[test]
fn restore_creates_no_pod_after_cluster_id_is_recorded() {
    let mut snapshot = present(ClusterFacts {
        cluster_id: Some(ID.into()),
        ..locked()
    });
    snapshot.seed.service = Child::Present;
    check(&seed_verified(), &snapshot, &Action::ReleaseLock);
}

#[test]
fn seed_with_other_cluster_id_halts_restore() {
    let snapshot = present(ClusterFacts {
        cluster_id: Some("ff".into()),
        ..locked()
    });
    for restore in [intended(), seed_verified()] {
        assert_eq!(
            reason(&check(&restore, &snapshot, &Action::Nothing)),
            Reason::SeedFailed
        );
    }
}

/// Defect 1 of coreos/etcd-operator: its status always reported success.
#[test]
fn restore_succeeds_only_if_cluster_serves_backup_revision() {
    let facts = |available| ClusterFacts {
        cluster_id: Some(ID.into()),
        available,
        ..ClusterFacts::default()
    };
    let with = |available, serving| {
        let mut snapshot = present(facts(available));
        snapshot.serving = serving;
        plan(&seed_verified(), &snapshot).state == PlanState::Complete
    };
    let other = Serving::Serves {
        cluster_id: "ff".into(),
        revision: 200,
    };
    assert!(!with(false, serves(100)));
    assert!(!with(true, Serving::Unknown("refused".into())));
    assert!(!with(true, serves(99)));
    assert!(!with(true, other));
    assert!(with(true, serves(100)));
    assert!(with(true, serves(200)));
}

#[test]
fn cluster_deleted_after_handover_is_reported() {
    let plan = check(
        &seed_verified(),
        &absent(Source::Ready(Box::default())),
        &Action::Nothing,
    );
    assert_eq!(reason(&plan), Reason::ClusterMissing);
}

#[test]
fn invalid_restore_is_rejected_without_observation() {
    let tape = restore(|r| r.spec.backup_storage_type = Some("Tape".into()));
    let plan = check(&tape, &absent(Source::NotRead), &Action::Nothing);
    assert_eq!(reason(&plan), Reason::InvalidSpec);
    assert!(
        matches!(plan.state, PlanState::Halted(ref t) if t.message.contains("spec.backupStorageType"))
    );
    let long = restore(|r| r.spec.etcd_cluster.name = "x".repeat(53));
    assert_eq!(
        reason(&check(&long, &absent(Source::NotRead), &Action::Nothing)),
        Reason::InvalidSpec
    );
}

/// Invariant 9: the hash of the seed's keys is compared with the manifest before the cluster ID is recorded.
#[test]
fn cluster_id_of_seed_with_different_key_hash_is_not_recorded() {
    let differs = Serving::Differs {
        expected: 1,
        found: 2,
    };
    let plan = check(
        &intended(),
        &locked_with(restored_pod(), differs),
        &Action::Nothing,
    );
    assert_eq!(reason(&plan), Reason::SeedFailed);
    assert!(matches!(plan.state, PlanState::Stuck(ref t) if t.message.contains("00000002")));
}

#[test]
fn seed_is_not_created_while_cluster_spec_is_invalid() {
    let snapshot = present(ClusterFacts {
        problems: vec![Problem::new("spec.TLS", "is not in effect", "remove it")],
        ..locked()
    });
    assert_eq!(
        reason(&check(&intended(), &snapshot, &Action::Nothing)),
        Reason::InvalidSpec
    );
}

#[test]
fn finished_restore_remains_complete() {
    let mut restore = seed_verified();
    restore.status.get_or_insert_default().succeeded = true;
    assert_eq!(
        plan(&restore, &absent(Source::NotRead)).state,
        PlanState::Complete
    );
}

#[test]
fn temporary_problems_are_not_reported_as_failed_restore() {
    for (reason, failure) in [
        (Reason::PodNotStarting, false),
        (Reason::StoreUnreachable, false),
        (Reason::SecretMissing, true),
        (Reason::BackupMissing, true),
    ] {
        let source = Source::Unavailable(Trouble::new(reason, "x"));
        let plan = check(&intended(), &absent(source), &Action::Nothing);
        assert_eq!(matches!(plan.state, PlanState::Stuck(_)), failure);
        assert!(
            plan.requeue.is_some(),
            "the plan requests no further reconcile"
        );
    }
}

#[test]
fn deleted_restore_is_finalized_before_cutover_or_after_handover() {
    let deleted = |mut restore: EtcdRestore| {
        restore.metadata.deletion_timestamp =
            Some(k8s_openapi::apimachinery::pkg::apis::meta::v1::Time(
                k8s_openapi::jiff::Timestamp::UNIX_EPOCH,
            ));
        restore
    };
    let nothing = absent(Source::Ready(Box::default()));
    let preparing = locked_with(restored_pod(), serves(100));
    for snapshot in [&nothing, &preparing] {
        check(
            &with_finalizer(deleted(intended())),
            snapshot,
            &Action::SetFinalizer(false),
        );
    }
    // After the cutover, the restore completes the handover, and only then removes the finalizer of the deleted
    // EtcdRestore.
    let formed = present(ClusterFacts {
        cluster_id: Some(ID.to_owned()),
        ..locked()
    });
    check(
        &with_finalizer(deleted(seed_verified())),
        &formed,
        &Action::ReleaseLock,
    );
    let released = present(ClusterFacts {
        cluster_id: Some(ID.to_owned()),
        ..ClusterFacts::default()
    });
    check(
        &with_finalizer(deleted(seed_verified())),
        &released,
        &Action::SetFinalizer(false),
    );
    let canceled = check(&deleted(intended()), &nothing, &Action::Nothing);
    assert_eq!(reason(&canceled), Reason::Cancelled);
}
