//! Missing storage for the seed: a restore in place is abandoned before the cutover, and never after it.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::{SignedDuration, Timestamp};

use super::*;
use crate::plan::refused::refused;

fn none() -> Trouble {
    Trouble::new(Reason::StorageMissing, "the StorageClass nowhere")
}

/// The seed's pod, which waits for its volume.
fn waits() -> Pod {
    Pod::Present(PodFacts {
        trouble: Some(none()),
        ..PodFacts::default()
    })
}

#[test]
fn new_cluster_reports_missing_storage_and_continues() {
    let plan = check(
        &intended(),
        &claimed_with(waits(), Serving::NotAsked),
        &Action::Nothing,
    );
    assert_eq!(plan.outlook, Outlook::Stuck(none()));
    assert_eq!(plan.requeue, Some(LATER));
    let bound = claimed_with(Pod::Present(PodFacts::default()), Serving::NotAsked);
    let plan = check(&intended(), &bound, &Action::Nothing);
    assert_eq!(reason(&plan), Reason::InProgress);
}

/// Invariant 9.
#[test]
fn missing_storage_abandons_only_before_cutover() {
    let given_up = plan(&recorded(), &beside(waits(), Serving::NotAsked));
    let Action::Abandon(trouble) = &given_up.action else {
        panic!("{given_up:?}")
    };
    assert_eq!(trouble.reason, Reason::StorageMissing);
    for said in ["nowhere", "left as it was"] {
        assert!(trouble.message.contains(said), "{}", trouble.message);
    }
    // After the cutover the seed's volume was deleted.
    for former in [&[old("a", false, true)][..], &[]] {
        let mut snapshot = turned(former, waits());
        snapshot.seed.claim = Child::Present;
        let plan = check(&verified_seed(), &snapshot, &Action::Nothing);
        let Outlook::Stuck(trouble) = &plan.outlook else {
            panic!("{plan:?}")
        };
        assert_eq!(trouble.reason, Reason::StorageMissing);
    }
}

/// A restore with a reported problem.
fn told(mut restore: EtcdRestore, kind: &ConditionType, why: Reason) -> EtcdRestore {
    let failed = conditions::Finding::new(kind.clone(), true, why.into(), "no");
    let status = restore.status.get_or_insert_default();
    let at = Time(Timestamp::UNIX_EPOCH);
    conditions::set(&mut status.conditions, &failed, Some(1), &at);
    restore
}

#[test]
fn rejected_pvc_is_retried_before_restore_is_abandoned() {
    let snapshot = beside(Pod::Absent, Serving::NotAsked);
    let after = |restore: &EtcdRestore, snapshot: &Snapshot, seconds: i64| {
        let now = Timestamp::UNIX_EPOCH + SignedDuration::from_secs(seconds);
        refused(restore, snapshot, none(), now)
    };
    let (failed, complete) = (ConditionType::Failed, ConditionType::Complete);
    let missing = Reason::StorageMissing;
    let since = told(recorded(), &failed, missing);
    let others = [
        recorded(),
        told(recorded(), &failed, Reason::BackupMissing),
        told(recorded(), &complete, missing),
    ];
    for (restore, seconds) in others.iter().map(|it| (it, 86_400)).chain([(&since, 29)]) {
        let plan = after(restore, &snapshot, seconds);
        assert_eq!(plan.action, Action::Nothing, "{plan:?}");
        assert!(matches!(&plan.outlook, Outlook::Stuck(it) if it.message.contains("given up")));
    }
    let plan = after(&since, &snapshot, 30);
    assert!(matches!(plan.action, Action::Abandon(_)), "{plan:?}");
    // A new cluster continues when storage is available. After the cutover the restore is not abandoned (invariant 9).
    let new = told(intended(), &failed, missing);
    let made = claimed_with(Pod::Absent, Serving::NotAsked);
    let turned_since = told(verified_seed(), &failed, missing);
    let turned = turned(&[old("a", false, true)], Pod::Absent);
    for (restore, snapshot) in [(&new, &made), (&turned_since, &turned)] {
        let plan = after(restore, snapshot, 86_400);
        assert_eq!(plan.action, Action::Nothing);
        assert_eq!(plan.outlook, Outlook::Stuck(none()));
    }
}

/// The next attempt to create the volume may be in flight, or a controller of Kubernetes may be restarting.
#[test]
fn unbound_pvc_is_reported_before_restore_is_abandoned() {
    let snapshot = beside(waits(), Serving::NotAsked);
    let after = |restore: &EtcdRestore, snapshot: &Snapshot, seconds: i64| {
        let now = Timestamp::UNIX_EPOCH + SignedDuration::from_secs(seconds);
        plan_at(restore, snapshot, now)
    };
    let failed = ConditionType::Failed;
    let since = told(recorded(), &failed, Reason::StorageMissing);
    let other = told(recorded(), &failed, Reason::BackupMissing);
    for (restore, seconds) in [(&recorded(), 86_400), (&other, 86_400), (&since, 179)] {
        let plan = after(restore, &snapshot, seconds);
        assert_eq!(plan.action, Action::Nothing, "{plan:?}");
        assert_eq!(plan.requeue, Some(LATER));
        let Outlook::Stuck(trouble) = &plan.outlook else {
            panic!("{plan:?}")
        };
        assert_eq!(trouble.reason, Reason::StorageMissing);
        for said in ["nowhere", "if that stays so"] {
            assert!(trouble.message.contains(said), "{}", trouble.message);
        }
    }
    let plan = after(&since, &snapshot, 180);
    let Action::Abandon(trouble) = &plan.action else {
        panic!("{plan:?}")
    };
    assert!(!trouble.message.contains("if that stays so"), "{trouble:?}");
    // Other problems abandon the restore at once, and a bound volume ends the problem.
    let missing = Pod::Present(PodFacts {
        trouble: Some(Trouble::new(Reason::BackupMissing, "no such key")),
        ..PodFacts::default()
    });
    let plan = after(&recorded(), &beside(missing, Serving::NotAsked), 0);
    assert!(matches!(plan.action, Action::Abandon(_)), "{plan:?}");
    let bound = beside(Pod::Present(PodFacts::default()), Serving::NotAsked);
    let plan = after(&since, &bound, 86_400);
    assert!(matches!(plan.outlook, Outlook::Working(_)), "{plan:?}");
}
