//! Reads the state of backups from the status and the finalizers of an EtcdBackup. Performs no I/O.

use api::backup::DeletionPolicy;
use api::conditions::{ConditionType, find};
use api::names::{FINALIZER_COREOS_PERIODIC, FINALIZER_STORED};
use api::{EtcdBackup, EtcdBackupStatus};
use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::ResourceExt;

use crate::reason::Reason;

/// True if the backup has succeeded, or has failed for this generation of the spec. Never true for a periodic
/// EtcdBackup.
pub(super) fn is_finished(backup: &EtcdBackup) -> bool {
    let Some(status) = backup
        .status
        .as_ref()
        .filter(|_| !backup.spec.is_periodic())
    else {
        return false;
    };
    // A complete backup stays finished after a change of the spec. A failed backup is finished only until the spec
    // changes.
    status.succeeded
        || failed_generation(backup).is_some_and(|failed| *failed == backup.metadata.generation)
}

/// The generation of the spec for which the backup has failed. `None` if the last backup has not failed, or if the
/// spec was rejected.
pub(super) fn failed_generation(backup: &EtcdBackup) -> Option<&Option<i64>> {
    let failed = find(&backup.status.as_ref()?.conditions, &ConditionType::Failed)?;
    (failed.status == "True" && !is_refusal(failed)).then_some(&failed.observed_generation)
}

/// True if the condition reports a rejected spec. Each reconcile checks a rejected spec again, because a later release
/// of the operator may accept the spec.
fn is_refusal(failed: &Condition) -> bool {
    Reason::parse(&failed.reason).is_some_and(Reason::is_refusal)
}

/// The start time of the backup in progress. `None` if no backup is in progress, or if the spec has changed since the
/// start.
pub fn intent(backup: &EtcdBackup) -> Option<Timestamp> {
    let status = backup.status.as_ref()?;
    let current = status.observed_generation == backup.metadata.generation;
    (current && is_open(status)).then(|| status.start_time.as_ref().map(|time| time.0))?
}

pub(super) fn is_open(status: &EtcdBackupStatus) -> bool {
    status.start_time.is_some() && status.completion_time.is_none()
}

/// True if the deletion of the EtcdBackup deletes its stored backups (`deletionPolicy: Delete`).
pub(super) fn wants_finalizer(backup: &EtcdBackup) -> bool {
    backup.spec.deletion_policy == Some(DeletionPolicy::Delete)
}

pub(super) fn has_finalizer(backup: &EtcdBackup) -> bool {
    backup
        .finalizers()
        .iter()
        .any(|one| one == FINALIZER_STORED)
}

/// True if a finalizer blocks the deletion of this EtcdBackup, and the operator may remove the finalizer.
pub(super) fn has_removable_finalizer(backup: &EtcdBackup) -> bool {
    let removable = removable_finalizers(backup);
    let mut finalizers = backup.finalizers().iter();
    finalizers.any(|one| removable.contains(&one.as_str()))
}

/// The finalizers that this operator may remove. While the EtcdBackup is being deleted, this includes the finalizer of
/// coreos/etcd-operator. Before the deletion, the finalizer of coreos/etcd-operator stays, because a running
/// coreos/etcd-operator would set it again.
pub fn removable_finalizers(backup: &EtcdBackup) -> &'static [&'static str] {
    match backup.metadata.deletion_timestamp {
        Some(_) => &[FINALIZER_STORED, FINALIZER_COREOS_PERIODIC],
        None => &[FINALIZER_STORED],
    }
}

/// True if the status reports a stored backup or an unfinished attempt, which may have stored a backup.
pub(super) fn has_stored(backup: &EtcdBackup) -> bool {
    backup.status.as_ref().is_some_and(|status| {
        status.location.is_some()
            || !status.backups.is_empty()
            || status.unfinished_attempts.is_some_and(|count| count > 0)
    })
}
