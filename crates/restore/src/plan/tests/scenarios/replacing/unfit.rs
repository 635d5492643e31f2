//! Seeds with another backup, without a report, or on an existing volume; and an EtcdCluster that was recreated or
//! recovered.

use super::*;
use crate::snapshot::Another;

fn alive(edit: impl FnOnce(&mut PodFacts)) -> Pod {
    let mut pod = PodFacts {
        restored: Some(100),
        verified: true,
        ..PodFacts::default()
    };
    edit(&mut pod);
    Pod::Present(pod)
}

/// A seed's pod whose report is lost.
fn silent() -> Pod {
    alive(|pod| (pod.restored, pod.verified, pod.silent) = (None, false, true))
}

fn young(pod: &Pod) -> Pod {
    let Pod::Present(pod) = pod else {
        panic!("it is there")
    };
    let mut pod = pod.clone();
    pod.young = true;
    Pod::Present(pod)
}

fn clears(restore: &EtcdRestore, snapshot: &Snapshot) {
    let plan = plan(restore, snapshot);
    assert!(matches!(plan.action, Action::ClearPod(_)), "{plan:?}");
}

/// On an empty volume, which was created again while the old members ran, no member would ever start.
#[test]
fn seed_pod_verifies_existing_volume_before_handover() {
    let restore = verified_seed();
    let mut snapshot = durable(&turned(&[], Pod::Absent), Child::Present);
    check(&restore, &snapshot, &Action::CreatePod);
    snapshot.seed.service = Child::Absent;
    check(&restore, &snapshot, &Action::CreateService);
    snapshot.seed.pod = Pod::InTheWay;
    check(&restore, &snapshot, &Action::Nothing);
    snapshot.seed.pod = Pod::Present(ended(Life::Ended));
    check(&restore, &snapshot, &clear());
    snapshot.seed.pod = Pod::Present(ended(Life::EndedAtOnce));
    check(&restore, &snapshot, &Action::Nothing);
    // A user who deletes the restore accepts the current data of the seed.
    snapshot.seed.pod = Pod::Absent;
    check(&deleted(restore), &snapshot, &Action::ReleaseClaim);
}

/// Invariant 9: a fetched snapshot shows neither that the data directory exists nor which cluster the seed belongs to.
#[test]
fn seed_joins_only_with_verified_backup() {
    let other = |cluster_id: &str, revision| Serving::Serves {
        cluster_id: cluster_id.into(),
        revision,
    };
    for (serving, failed) in [
        (Serving::NotAsked, false),
        (Serving::Unknown("timeout".into()), false),
        (other(OLD, 100), true),
        (other(ID, 99), true),
    ] {
        let mut snapshot = turned(&[], restored_pod());
        snapshot.serving = serving;
        let told = check(&verified_seed(), &snapshot, &Action::Nothing);
        assert_eq!(
            matches!(told.outlook, Outlook::Stuck(_)),
            failed,
            "{told:?}"
        );
        if !failed {
            let text = |plan: &Plan| match &plan.outlook {
                Outlook::Working(trouble) => trouble.message.clone(),
                other => panic!("{other:?}"),
            };
            assert_eq!(told.requeue, Some(SOON), "it has lasted");
            assert!(text(&told).contains("delete this EtcdRestore"), "{told:?}");
            snapshot.seed.pod = young(&snapshot.seed.pod);
            let told = check(&verified_seed(), &snapshot, &Action::Nothing);
            assert_eq!(told.requeue, Some(PROMPTLY), "nobody is served");
            assert!(!text(&told).contains("delete"), "{told:?}");
        }
        check(&deleted(verified_seed()), &snapshot, &Action::Join);
    }
    // A problem of a sidecar is not a problem of etcd.
    let beside = alive(|pod| {
        pod.trouble = Some(Trouble::new(Reason::PodNotStarting, "a sidecar"));
    });
    check(
        &verified_seed(),
        &turned(&[], beside.clone()),
        &Action::Join,
    );
    let mut waits = turned(&[], beside);
    waits.serving = Serving::NotAsked;
    let told = check(&verified_seed(), &waits, &Action::Nothing);
    assert_eq!(reason(&told), Reason::PodNotStarting);
    assert!(
        matches!(told.outlook, Outlook::Working(ref it) if it.message.contains("delete this EtcdRestore")),
        "{told:?}"
    );
}

/// The seed is created again on its volume, but its backup is missing. No member serves clients, so the message
/// contains the remedy.
#[test]
fn reports_seed_problem_with_remedy_after_old_members_stopped() {
    let gone = alive(|pod| {
        (pod.restored, pod.verified) = (None, false);
        pod.trouble = Some(Trouble::new(Reason::BackupMissing, "the backup is gone"));
    });
    let told = |former: &[FormerPod]| {
        let snapshot = durable(&turned(former, gone.clone()), Child::Present);
        let told = check(&verified_seed(), &snapshot, &Action::Nothing);
        assert_eq!(reason(&told), Reason::BackupMissing);
        let Outlook::Stuck(trouble) = told.outlook else {
            panic!("{told:?}")
        };
        assert!(trouble.message.starts_with("the backup is gone"));
        trouble.message.contains("delete this EtcdRestore")
    };
    assert!(told(&[]));
    assert!(!told(&[old("a", false, true)]));
}

/// Invariant 9: a PersistentVolumeClaim that is being deleted is lost with the pod that uses it, together with its
/// data.
#[test]
fn keeps_seed_pod_on_terminating_volume() {
    let bare = turned(&[], silent());
    for claim in [Child::InTheWay, Child::Absent] {
        let snapshot = durable(&bare, claim);
        let told = check(&verified_seed(), &snapshot, &Action::Nothing);
        assert!(matches!(told.outlook, Outlook::Stuck(_)), "{told:?}");
        let vouched = alive(|pod| {
            (pod.restored, pod.verified) = (None, false);
            (pod.silent, pod.vouched) = (true, true);
        });
        let mut vouched = turned(&[], vouched);
        vouched = durable(&vouched, snapshot.seed.claim.clone());
        check(&verified_seed(), &vouched, &Action::Join);
        let fetches = alive(|pod| {
            (pod.restored, pod.verified) = (None, false);
            pod.another = Some(Another::Fetches("s3://b/2".into()));
        });
        let fetches = durable(&turned(&[], fetches), snapshot.seed.claim);
        check(&verified_seed(), &fetches, &Action::Nothing);
    }
    // Invariant 1.
    let unknown = durable(&bare, Child::Unknown("timeout".into()));
    let told = check(&verified_seed(), &unknown, &Action::Nothing);
    assert!(matches!(told.outlook, Outlook::Working(_)), "{told:?}");
}

/// A kubelet may lose the report, and a container that has succeeded is not restarted.
#[test]
fn replaces_seed_without_report_before_client_writes() {
    let running = [old("a", false, true)];
    for restore in [recorded(), verified_seed()] {
        let snapshot = beside(silent(), serves(100));
        clears(&restore, &snapshot);
        let early = beside(young(&silent()), serves(100));
        let told = check(&restore, &early, &Action::Nothing);
        assert_eq!(reason(&told), Reason::SeedFailed);
    }
    clears(&verified_seed(), &turned(&running, silent()));
    clears(&intended(), &claimed_with(silent(), serves(100)));
    let told = check(
        &verified_seed(),
        &turned(&running, young(&silent())),
        &Action::Nothing,
    );
    assert!(matches!(told.outlook, Outlook::Working(_)), "{told:?}");
}

/// On a volume the next pod reports the data. Without a volume the pod has the only copy, and joins only if it cannot
/// have another backup.
#[test]
fn seed_without_report_joins_only_with_checked_sha256() {
    let bare = turned(&[], silent());
    clears(&verified_seed(), &durable(&bare, Child::Present));
    let told = check(&verified_seed(), &bare, &Action::Nothing);
    assert!(
        matches!(told.outlook, Outlook::Stuck(ref it) if it.message.contains("delete this EtcdRestore")),
        "{told:?}"
    );
    check(&deleted(verified_seed()), &bare, &Action::Join);
    let Pod::Present(mut vouched) = silent() else {
        panic!("it is there")
    };
    vouched.vouched = true;
    let mut snapshot = turned(&[], Pod::Present(vouched));
    check(&verified_seed(), &snapshot, &Action::Join);
    snapshot.serving = Serving::Unknown("timeout".into());
    check(&verified_seed(), &snapshot, &Action::Nothing);
}

/// A joined seed has served the verified backup. A late member of the old cluster stops, regardless of the report of
/// the seed.
#[test]
fn late_member_stops_for_joined_seed_without_report() {
    let Pod::Present(mut joined) = silent() else {
        panic!("it is there")
    };
    joined.joined = true;
    let late = [old("late", false, true)];
    let snapshot = turned(&late, Pod::Present(joined));
    check(
        &verified_seed(),
        &snapshot,
        &Action::StopFormer(late.to_vec()),
    );
}

/// Invariant 17: clients reach both. The data of the joined seed then contains their writes.
#[test]
fn late_member_stops_for_joined_seed_with_problems() {
    let late = [old("late", false, true)];
    let other = |cluster_id: &str, revision| Serving::Serves {
        cluster_id: cluster_id.into(),
        revision,
    };
    let joined = |edit: fn(&mut PodFacts)| {
        alive(|pod| {
            pod.joined = true;
            edit(pod);
        })
    };
    let stops = Action::StopFormer(late.to_vec());
    for (pod, serving) in [
        (
            joined(|pod| {
                pod.trouble = Some(Trouble::new(Reason::PodNotStarting, "a sidecar"));
            }),
            serves(100),
        ),
        (
            joined(|pod| pod.another = Some(Another::Holds("s3://b/2".into()))),
            serves(100),
        ),
        (joined(|pod| pod.restored = Some(101)), serves(101)),
        (joined(|_| {}), serves(99)),
        (joined(|_| {}), other(OLD, 100)),
    ] {
        let mut snapshot = turned(&late, pod);
        snapshot.serving = serving;
        check(&verified_seed(), &snapshot, &stops);
        for silent in [Serving::NotAsked, Serving::Unknown("timeout".into())] {
            snapshot.serving = silent;
            check(&verified_seed(), &snapshot, &Action::Nothing);
        }
    }
    // Old members keep running next to a seed that has not joined.
    let beside = alive(|pod| {
        pod.trouble = Some(Trouble::new(Reason::PodNotStarting, "a sidecar"));
    });
    check(&verified_seed(), &turned(&late, beside), &Action::Nothing);
}

/// Another operator process may create the pod late, from a backup that it has read before another one was recorded.
#[test]
fn deletes_seed_with_other_backup_before_cutover() {
    let fetches = alive(|pod| {
        (pod.restored, pod.verified) = (None, false);
        pod.another = Some(Another::Fetches(
            "s3://b/2, and recorded is s3://b/1".into(),
        ));
        // The missing backup is not the recorded one.
        pod.trouble = Some(Trouble::new(Reason::BackupMissing, "gone"));
    });
    let holds = alive(|pod| pod.another = Some(Another::Holds("s3://b/2".into())));
    for restore in [recorded(), verified_seed()] {
        clears(&restore, &beside(fetches.clone(), Serving::NotAsked));
        let snapshot = beside(holds.clone(), serves(100));
        let told = check(&restore, &snapshot, &Action::DiscardSeed);
        assert!(
            matches!(told.outlook, Outlook::Working(ref it) if it.message.contains("s3://b/2")),
            "{told:?}"
        );
        let early = beside(young(&holds), serves(100));
        check(&restore, &early, &Action::Nothing);
    }
    let made = claimed_with(holds.clone(), serves(100));
    check(&held(seed_verified()), &made, &Action::DiscardSeed);
    // After the cutover the volume is kept: only the pod is created again, or a user must act.
    let running = [old("a", false, true)];
    clears(&verified_seed(), &turned(&running, fetches.clone()));
    let told = check(
        &verified_seed(),
        &turned(&running, holds.clone()),
        &Action::Nothing,
    );
    assert!(matches!(told.outlook, Outlook::Stuck(_)), "{told:?}");
    let told = check(&verified_seed(), &turned(&[], holds), &Action::Nothing);
    assert!(matches!(told.outlook, Outlook::Stuck(_)), "{told:?}");
    clears(
        &verified_seed(),
        &durable(&turned(&[], fetches), Child::Present),
    );
}

/// Invariant 9: after the handover the quorum was lost and recovered as another cluster, whose data is newer than the
/// backup. Or a user has created the EtcdCluster again.
#[test]
fn cluster_changed_after_handover_is_not_replaced_again() {
    let source = |facts: ClusterFacts| {
        let mut snapshot = present(facts);
        snapshot.source = Source::Ready(Box::default());
        snapshot
    };
    let recovered = ClusterFacts {
        cluster_id: Some("ef".into()),
        ..there(false)
    };
    let anew = ClusterFacts {
        uid: "another-uid".into(),
        cluster_id: None,
        ..there(false)
    };
    let of_none = |restore: &EtcdRestore| {
        let mut restore = restore.clone();
        restore.status.as_mut().unwrap().replaces = None;
        restore
    };
    for facts in [recovered, anew] {
        for restore in [verified_seed(), of_none(&verified_seed())] {
            let told = check(&let_go(restore), &source(facts.clone()), &Action::Nothing);
            assert_eq!(reason(&told), Reason::ClusterExists);
            // The restore has changed the cluster, and its spec already has `overwrite: true`.
            let Outlook::Halted(trouble) = told.outlook else {
                panic!("{told:?}")
            };
            assert!(trouble.message.contains("create a new EtcdRestore"));
            assert!(!trouble.message.contains("nothing was changed"));
        }
    }
    // A user has removed the lock manually. Nothing else has changed.
    check(&verified_seed(), &source(there(false)), &Action::Claim);
}

/// At this point the spec no longer counts. After the cutover, no member would serve clients if the restore stopped.
#[test]
fn invalid_spec_change_does_not_stop_started_restore() {
    let mut restore = verified_seed();
    restore.spec.backup_storage_type = Some("Tape".into());
    check(&restore, &turned(&[], restored_pod()), &Action::Join);
    let mut fresh = super::super::restore(|_| {});
    fresh.spec.backup_storage_type = Some("Tape".into());
    let told = check(&fresh, &present(there(false)), &Action::Nothing);
    assert_eq!(reason(&told), Reason::InvalidSpec);
}
