//! Invariant 32: if `spec.backup.beforeChanges` contains `Restore`, the EtcdCluster is locked only after a recent
//! backup of its data, or after a user has waived this backup.
//!
//! The backup to restore is recorded before this check, so a newer backup is never restored. The operator does not
//! request a backup, because retention could then delete the backup to restore.

use api::cluster::{ClusterChange, earliest_backup, how_to_waive_backup};
use api::names::ANNOTATION_SKIP_BACKUP;
use api::{EtcdRestore, command};
use k8s_openapi::jiff::Timestamp;
use kube::ResourceExt;

use super::action::{Action, PROBLEM_POLL, Plan};
use crate::naming;
use crate::reason::{Reason, Trouble};
use crate::snapshot::{Cluster, Snapshot};

/// Delays the lock of an existing cluster until a recent backup of it exists.
#[must_use]
pub(super) fn hold(plan: Plan, restore: &EtcdRestore, snapshot: &Snapshot, now: Timestamp) -> Plan {
    let Cluster::Present(cluster) = &snapshot.cluster else {
        return plan;
    };
    // Without `max_backup_age`, no backup is required. A cluster without a cluster ID has never formed, so it has no
    // data to back up.
    let (Some(age), Some(id)) = (cluster.max_backup_age, &cluster.cluster_id) else {
        return plan;
    };
    if plan.action != Action::Lock || is_waived(restore) {
        return plan;
    }
    // An unavailable cluster accepts no writes, so the backup only needs to be recent at the time when the cluster
    // became unavailable.
    let since = earliest_backup(cluster.unavailable_since.unwrap_or(now), age);
    let backup = cluster.backup.as_ref();
    if backup.is_some_and(|backup| backup.covers(id, since, now)) {
        return plan;
    }
    let name = naming::target(restore);
    let namespace = restore.namespace().unwrap_or_default();
    let make = command::backup(&namespace, name);
    // A member can send a snapshot even if the cluster has lost its quorum.
    let remedy = if cluster.unavailable_since.is_some() {
        format!("The cluster is not available. If one of its members still runs, run {make}")
    } else {
        format!("To make a backup, run {make}")
    };
    let waive = how_to_waive_backup(
        "etcdrestore",
        &restore.metadata,
        ClusterChange::Restore.as_str(),
    );
    let message = format!(
        "spec.backup.beforeChanges of the EtcdCluster {name} requires {} before the data of the cluster is replaced. No \
         such backup exists, and nothing was changed. {remedy}. {waive}",
        cluster.needed_backup
    );
    let mut plan = Plan::wait(Trouble::new(Reason::NoRecentBackup, message));
    plan.requeue = Some(PROBLEM_POLL);
    plan
}

/// True if an annotation of the EtcdRestore waives the backup. The annotation contains no time, because an EtcdRestore
/// replaces data only once.
fn is_waived(restore: &EtcdRestore) -> bool {
    let waiver = restore.annotations().get(ANNOTATION_SKIP_BACKUP);
    waiver.is_some_and(|waiver| waiver == ClusterChange::Restore.as_str())
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use api::cluster::LastBackup;
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

    use super::*;
    use crate::plan::PlanState;
    use crate::snapshot::ClusterFacts;

    fn at(seconds: i64) -> Timestamp {
        Timestamp::from_second(seconds).unwrap()
    }

    fn restore(waiver: Option<&str>) -> EtcdRestore {
        let spec = r#"{"etcdCluster":{"name":"main"},"overwrite":true,"backupStorageType":"S3","s3":{"path":"b/k"}}"#;
        let mut restore = EtcdRestore::new("again", serde_json::from_str(spec).unwrap());
        restore.metadata.namespace = Some("prod".into());
        if let Some(waiver) = waiver {
            let waiver = (ANNOTATION_SKIP_BACKUP.to_owned(), waiver.to_owned());
            restore.metadata.annotations = Some([waiver].into());
        }
        restore
    }

    /// A cluster whose newest backup was complete at second 800. Its backup may be at most 100 s old when the cluster
    /// is locked.
    fn cluster() -> ClusterFacts {
        ClusterFacts {
            cluster_id: Some("ab".into()),
            max_backup_age: Some(Duration::from_secs(100)),
            needed_backup: "a backup that is at most 100 s old".into(),
            backup: Some(LastBackup {
                cluster_id: Some("ab".into()),
                time: Some(Time(at(800))),
                ..LastBackup::default()
            }),
            ..ClusterFacts::default()
        }
    }

    /// The result of [`hold`] at second `now` for a plan that locks the cluster.
    fn held(restore: &EtcdRestore, cluster: ClusterFacts, now: i64) -> Plan {
        let snapshot = Snapshot {
            cluster: Cluster::Present(Box::new(cluster)),
            ..Snapshot::not_read()
        };
        hold(
            Plan::act(Action::Lock, "locking"),
            restore,
            &snapshot,
            at(now),
        )
    }

    #[test]
    fn invariant_32_cluster_is_locked_only_after_recent_backup() {
        let plan = held(&restore(None), cluster(), 901);
        assert_eq!(plan.action, Action::Nothing);
        let PlanState::Working(trouble) = plan.state else {
            panic!("{:?}", plan.state);
        };
        assert_eq!(trouble.reason, Reason::NoRecentBackup);
        for part in [
            "main",
            "100 s",
            "`kubectl etcd -n prod backup main`",
            "`kubectl -n prod annotate etcdrestore again etcd.database.coreos.com/skip-backup=Restore --overwrite`",
        ] {
            assert!(
                trouble.message.contains(part),
                "{part}: {}",
                trouble.message
            );
        }
        assert_eq!(held(&restore(None), cluster(), 900).action, Action::Lock);
        let mut other = cluster();
        other.cluster_id = Some("cd".into());
        assert_eq!(held(&restore(None), other, 900).action, Action::Nothing);
    }

    #[test]
    fn backup_age_is_measured_at_loss_of_quorum() {
        let lost = |since: i64| ClusterFacts {
            unavailable_since: Some(at(since)),
            ..cluster()
        };
        assert_eq!(held(&restore(None), lost(900), 9000).action, Action::Lock);
        let plan = held(&restore(None), lost(901), 9000);
        assert_eq!(plan.action, Action::Nothing);
        let PlanState::Working(trouble) = plan.state else {
            panic!("{:?}", plan.state);
        };
        let part = "If one of its members still runs";
        assert!(trouble.message.contains(part), "{}", trouble.message);
    }

    #[test]
    fn restore_with_waiver_or_without_rule_needs_no_recent_backup() {
        let with = |waiver| held(&restore(Some(waiver)), cluster(), 9000).action;
        assert_eq!(with("Restore"), Action::Lock);
        assert_eq!(with("Upgrade"), Action::Nothing);
        for free in [
            ClusterFacts {
                max_backup_age: None,
                ..cluster()
            },
            ClusterFacts {
                cluster_id: None,
                ..cluster()
            },
        ] {
            assert_eq!(held(&restore(None), free, 9000).action, Action::Lock);
        }
    }

    #[test]
    fn restore_does_not_wait_for_backup_after_locking() {
        let snapshot = Snapshot {
            cluster: Cluster::Present(Box::new(cluster())),
            ..Snapshot::not_read()
        };
        let plan = Plan::act(Action::CreatePod, "starting");
        assert_eq!(
            hold(plan.clone(), &restore(None), &snapshot, at(9000)),
            plan
        );
    }
}
