//! Tests of a restore in place without storage for its seed. The restore is abandoned only before the cutover.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::{SignedDuration, Timestamp};

use super::*;
use crate::plan::missing_storage::pvc_rejected;

fn none() -> Trouble {
    Trouble::new(Reason::StorageMissing, "the StorageClass nowhere")
}

/// A seed's pod that waits for its volume.
fn unbound_pod() -> Pod {
    Pod::Present(PodFacts {
        trouble: Some(none()),
        ..PodFacts::default()
    })
}

#[test]
fn restore_into_new_cluster_reports_missing_storage_and_continues() {
    let plan = check(
        &intended(),
        &locked_with(unbound_pod(), Serving::NotRead),
        &Action::Nothing,
    );
    assert_eq!(plan.state, PlanState::Stuck(none()));
    assert_eq!(plan.requeue, Some(PROBLEM_POLL));
    let bound = locked_with(Pod::Present(PodFacts::default()), Serving::NotRead);
    let plan = check(&intended(), &bound, &Action::Nothing);
    assert_eq!(reason(&plan), Reason::InProgress);
}

#[test]
fn missing_storage_abandons_restore_only_before_cutover() {
    let abandons = plan(&recorded(), &preparing(unbound_pod(), Serving::NotRead));
    let Action::Abandon(trouble) = &abandons.action else {
        panic!("{abandons:?}")
    };
    assert_eq!(trouble.reason, Reason::StorageMissing);
    for part in ["nowhere", "existing cluster is unchanged"] {
        assert!(trouble.message.contains(part), "{}", trouble.message);
    }
    // After the cutover, a user deletes the seed's PersistentVolumeClaim, and no volume is provided for the new one.
    // The restore reports the missing storage, but is not abandoned.
    for old_members in [&[old("a", false, true)][..], &[]] {
        let mut snapshot = cut_over(old_members, unbound_pod());
        snapshot.seed.pvc = Child::Present;
        let plan = check(&verified_seed(), &snapshot, &Action::Nothing);
        let PlanState::Stuck(trouble) = &plan.state else {
            panic!("{plan:?}")
        };
        assert_eq!(trouble.reason, Reason::StorageMissing);
    }
}

/// An EtcdRestore whose condition `kind` has this reason.
fn reporting(mut restore: EtcdRestore, kind: &ConditionType, why: Reason) -> EtcdRestore {
    let failed = conditions::Finding::new(kind.clone(), true, why.into(), "no");
    let status = restore.status.get_or_insert_default();
    let at = Time(Timestamp::UNIX_EPOCH);
    conditions::set(&mut status.conditions, &failed, Some(1), &at);
    restore
}

#[test]
fn rejected_pvc_is_retried_before_restore_is_abandoned() {
    let snapshot = preparing(Pod::Absent, Serving::NotRead);
    let after = |restore: &EtcdRestore, snapshot: &Snapshot, seconds: i64| {
        let now = Timestamp::UNIX_EPOCH + SignedDuration::from_secs(seconds);
        pvc_rejected(restore, snapshot, none(), now)
    };
    let (failed, complete) = (ConditionType::Failed, ConditionType::Complete);
    let missing = Reason::StorageMissing;
    let since = reporting(recorded(), &failed, missing);
    let without_report = recorded();
    let other_reason = reporting(recorded(), &failed, Reason::BackupMissing);
    let other_condition = reporting(recorded(), &complete, missing);
    let others = [&without_report, &other_reason, &other_condition];
    for (restore, seconds) in others
        .map(|it| (it, 86_400))
        .into_iter()
        .chain([(&since, 29)])
    {
        let plan = after(restore, &snapshot, seconds);
        assert_eq!(plan.action, Action::Nothing, "{plan:?}");
        assert!(matches!(&plan.state, PlanState::Stuck(it) if it.message.contains("is abandoned")));
    }
    let plan = after(&since, &snapshot, 30);
    assert!(matches!(plan.action, Action::Abandon(_)), "{plan:?}");
    // Two restores wait for storage, and are not abandoned: a restore into a new cluster, and a restore in place after
    // its cutover (invariant 9).
    let new = reporting(intended(), &failed, missing);
    let created = locked_with(Pod::Absent, Serving::NotRead);
    let verified = reporting(verified_seed(), &failed, missing);
    let after_cutover = cut_over(&[old("a", false, true)], Pod::Absent);
    for (restore, snapshot) in [(&new, &created), (&verified, &after_cutover)] {
        let plan = after(restore, snapshot, 86_400);
        assert_eq!(plan.action, Action::Nothing);
        assert_eq!(plan.state, PlanState::Stuck(none()));
    }
}

/// Missing storage may be temporary, for example while a controller of Kubernetes restarts.
#[test]
fn unbound_pvc_is_reported_before_restore_is_abandoned() {
    let snapshot = preparing(unbound_pod(), Serving::NotRead);
    let after = |restore: &EtcdRestore, snapshot: &Snapshot, seconds: i64| {
        let now = Timestamp::UNIX_EPOCH + SignedDuration::from_secs(seconds);
        plan_at(restore, snapshot, now)
    };
    let failed = ConditionType::Failed;
    let since = reporting(recorded(), &failed, Reason::StorageMissing);
    let other = reporting(recorded(), &failed, Reason::BackupMissing);
    for (restore, seconds) in [(&recorded(), 86_400), (&other, 86_400), (&since, 179)] {
        let plan = after(restore, &snapshot, seconds);
        assert_eq!(plan.action, Action::Nothing, "{plan:?}");
        assert_eq!(plan.requeue, Some(PROBLEM_POLL));
        let PlanState::Stuck(trouble) = &plan.state else {
            panic!("{plan:?}")
        };
        assert_eq!(trouble.reason, Reason::StorageMissing);
        for part in ["nowhere", "if the problem remains"] {
            assert!(trouble.message.contains(part), "{}", trouble.message);
        }
    }
    let plan = after(&since, &snapshot, 180);
    let Action::Abandon(trouble) = &plan.action else {
        panic!("{plan:?}")
    };
    assert!(
        !trouble.message.contains("if the problem remains"),
        "{trouble:?}"
    );
    // For a problem other than missing storage, the restore is abandoned at once.
    let missing = Pod::Present(PodFacts {
        trouble: Some(Trouble::new(Reason::BackupMissing, "no such key")),
        ..PodFacts::default()
    });
    let plan = after(&recorded(), &preparing(missing, Serving::NotRead), 0);
    assert!(matches!(plan.action, Action::Abandon(_)), "{plan:?}");
    let bound = preparing(Pod::Present(PodFacts::default()), Serving::NotRead);
    let plan = after(&since, &bound, 86_400);
    assert!(matches!(plan.state, PlanState::Working(_)), "{plan:?}");
}
