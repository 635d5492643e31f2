//! Plans the EtcdBackup that belongs to an EtcdCluster, and computes the cluster's `status.lastBackup`,
//! `status.backupForChanges` and `status.backupRequest`. Performs no I/O.

use api::backup::{ClusterReference, EtcdBackupSpec};
use api::cluster::{BackupRequestStatus, ClusterBackup, ClusterChange, LastBackup};
use api::conditions::{ConditionType, find};
use api::names::{
    ANNOTATION_BACKUP_REQUESTED, ANNOTATION_SCOPE, APP, FINALIZER_FOREGROUND, LABEL_APP,
    LABEL_CLUSTER,
};
use api::{EtcdBackup, EtcdCluster};
use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::{Resource, ResourceExt};
use runtime::Notice;
use runtime::apply::is_owned;

use crate::reason::Reason;

/// The planned change of the EtcdBackup with the name of a cluster.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Action {
    /// No change: the EtcdBackup is as desired, or `spec.backup` is not set.
    Nothing,
    /// Create or change the EtcdBackup.
    Apply(Box<EtcdBackup>),
    /// Delete the EtcdBackup, because `spec.backup` was removed.
    Delete(Box<EtcdBackup>),
    /// No change: the cluster does not own the EtcdBackup with the name of the cluster.
    Taken,
}

/// Plans the change for an EtcdCluster. `existing` is the EtcdBackup with the name of the EtcdCluster.
pub(super) fn plan(cluster: &EtcdCluster, existing: Option<&EtcdBackup>) -> Action {
    if cluster.meta().deletion_timestamp.is_some() && !deletion_waits(cluster) {
        return Action::Nothing;
    }
    let owned = |backup: &EtcdBackup| belongs(cluster, backup);
    match (&cluster.spec.backup, existing) {
        (None, Some(backup)) if owned(backup) && backup.meta().deletion_timestamp.is_none() => {
            Action::Delete(Box::new(backup.clone()))
        }
        (None, _) => Action::Nothing,
        (Some(_), Some(backup)) if !owned(backup) => Action::Taken,
        (Some(settings), existing) => {
            let desired = desired(cluster, settings);
            let requested = desired.annotations().get(ANNOTATION_BACKUP_REQUESTED);
            let same = existing.is_some_and(|backup| {
                let annotations = backup.annotations();
                // If the EtcdCluster requests no backup, the EtcdBackup may keep the annotation of an earlier request.
                let has_request = requested.is_none()
                    || annotations.get(ANNOTATION_BACKUP_REQUESTED) == requested;
                backup.spec == desired.spec
                    && annotations.get(ANNOTATION_SCOPE)
                        == desired.annotations().get(ANNOTATION_SCOPE)
                    && has_request
            });
            if same {
                Action::Nothing
            } else {
                Action::Apply(Box::new(desired))
            }
        }
    }
}

/// True if the cluster owns the EtcdBackup.
fn belongs(cluster: &EtcdCluster, backup: &EtcdBackup) -> bool {
    let uid = cluster.meta().uid.as_deref();
    uid.is_some_and(|uid| is_owned(&backup.metadata, uid))
}

/// Invariant 41: true if the deletion of the EtcdCluster waits for a backup. False for a foreground deletion, in which
/// the garbage collector deletes the EtcdBackup before the EtcdCluster, and would also delete a new EtcdBackup.
fn deletion_waits(cluster: &EtcdCluster) -> bool {
    let status = cluster.status.as_ref();
    let record = status.and_then(|status| status.before_change.as_ref());
    let is_deletion = record.is_some_and(|record| record.change == ClusterChange::Deletion);
    let mut finalizers = cluster.finalizers().iter();
    is_deletion && requested(cluster).is_some() && finalizers.all(|one| one != FINALIZER_FOREGROUND)
}

fn desired(cluster: &EtcdCluster, settings: &ClusterBackup) -> EtcdBackup {
    let name = cluster.name_any();
    let mut policy = settings.backup_policy.clone();
    // A hibernated cluster has no running members, so its backups are suspended.
    policy.suspend |= settings.suspend || cluster.spec.hibernate;
    let spec = EtcdBackupSpec {
        etcd_endpoints: Vec::new(),
        etcd_cluster: Some(ClusterReference { name: name.clone() }),
        client_tls_secret: None,
        auth_secret: None,
        backup_policy: Some(policy),
        storage_type: settings.storage_type.clone(),
        s3: settings.s3.clone(),
        abs: settings.abs.clone(),
        gcs: settings.gcs.clone(),
        oss: settings.oss.clone(),
        pvc: settings.pvc.clone(),
        local: settings.local.clone(),
        compression: settings.compression.clone(),
        encryption: settings.encryption.clone(),
        verification: settings.verification.clone(),
        copy_to: settings.copy_to.clone(),
        continuous: None,
        ttl_seconds_after_finished: None,
        deletion_policy: None,
    };
    let mut backup = EtcdBackup::new(&name, spec);
    backup.metadata.namespace = cluster.namespace();
    backup.metadata.owner_references = cluster.controller_owner_ref(&()).map(|owner| vec![owner]);
    let labels = [(LABEL_APP, APP), (LABEL_CLUSTER, name.as_str())];
    backup.metadata.labels = Some(
        labels
            .map(|(key, value)| (key.to_owned(), value.to_owned()))
            .into(),
    );
    let scope = cluster.annotations().get(ANNOTATION_SCOPE).cloned();
    let annotations = [
        (ANNOTATION_SCOPE, scope),
        (
            ANNOTATION_BACKUP_REQUESTED,
            requested(cluster).map(|time| time.0.to_string()),
        ),
    ];
    let annotations = annotations.into_iter();
    let annotations = annotations.filter_map(|(key, value)| Some((key.to_owned(), value?)));
    backup.metadata.annotations = Some(annotations.collect());
    backup
}

/// The time since which a change of the cluster waits for a backup. `None` if no change waits.
fn requested(cluster: &EtcdCluster) -> Option<&Time> {
    let status = cluster.status.as_ref()?;
    let (record, id) = (status.before_change.as_ref()?, status.cluster_id.as_ref()?);
    record.requests_backup(id).then_some(&record.start_time)
}

/// The state of the backup for which a change of the cluster waits. `None` if no change waits. `existing` is the
/// EtcdBackup with the name of the EtcdCluster.
pub(super) fn backup_request(
    cluster: &EtcdCluster,
    existing: Option<&EtcdBackup>,
) -> Option<BackupRequestStatus> {
    let start_time = requested(cluster)?;
    let message = match existing {
        None => "the EtcdBackup does not exist yet".to_owned(),
        Some(backup) if !belongs(cluster, backup) => {
            "the EtcdBackup does not belong to this EtcdCluster: delete it, or create it again with another name"
                .to_owned()
        }
        Some(backup) => state_of(backup, start_time.0),
    };
    Some(BackupRequestStatus {
        start_time: start_time.clone(),
        message,
    })
}

/// The state of an EtcdBackup that was asked for a backup at the time `requested`.
fn state_of(backup: &EtcdBackup, requested: Timestamp) -> String {
    let status = backup.status.as_ref();
    let complete = status.and_then(|status| status.last_success_date.as_ref());
    let is_complete = complete.is_some_and(|time| time.0 >= requested);
    match find(backup.conditions(), &ConditionType::Ready) {
        // If `Ready` is True, its message names no problem. This arm names the missing verification.
        Some(ready)
            if ready.status == "True" && is_complete && backup.spec.verification.is_some() =>
        {
            "the backup is complete, but not verified yet".to_owned()
        }
        Some(ready) => ready.message.clone(),
        None => "the EtcdBackup has no status yet".to_owned(),
    }
}

/// The newest of these backups: `status.lastBackup` of the cluster, and the backups in the status of its EtcdBackups.
pub(super) fn last_backup(cluster: &EtcdCluster, backups: &[&EtcdBackup]) -> Option<LastBackup> {
    let reported = of_cluster(cluster, backups).filter_map(newest);
    let recorded = cluster
        .status
        .as_ref()
        .and_then(|status| status.last_backup.clone());
    reported
        .chain(recorded)
        .max_by_key(|last| last.time.as_ref().map(|time| time.0))
}

/// The newest backup that satisfies `spec.backup.beforeChanges` and `spec.deletionPolicy: BackupThenDelete`. `None` if
/// the spec has neither field, or if no backup satisfies them.
///
/// Invariants 32 and 41: the backup has the cluster ID of this cluster. If the spec asks for verifications, a
/// verification has restored the backup.
pub(super) fn backup_for_changes(
    cluster: &EtcdCluster,
    backups: &[&EtcdBackup],
) -> Option<LastBackup> {
    let settings = cluster.spec.backup.as_ref();
    let settings = settings.filter(|_| cluster.spec.has_changes_after_backup())?;
    let id = cluster.status.as_ref()?.cluster_id.as_ref()?;
    let found = if settings.verification.is_some() {
        proven
    } else {
        newest
    };
    // An EtcdBackup that is being deleted is ignored, because its stored backups may be deleted too.
    let live = |backup: &&EtcdBackup| backup.meta().deletion_timestamp.is_none();
    of_cluster(cluster, backups)
        .filter(live)
        .filter_map(found)
        .filter(|backup| backup.cluster_id.as_ref() == Some(id))
        .max_by_key(|backup| backup.time.as_ref().map(|time| time.0))
}

/// The EtcdBackups that name this cluster.
fn of_cluster<'a>(
    cluster: &EtcdCluster,
    backups: &[&'a EtcdBackup],
) -> impl Iterator<Item = &'a EtcdBackup> {
    let name = cluster.name_any();
    backups.iter().copied().filter(move |backup| {
        let reference = backup.spec.etcd_cluster.as_ref();
        reference.is_some_and(|reference| reference.name == name)
    })
}

/// The newest complete backup of an EtcdBackup.
fn newest(backup: &EtcdBackup) -> Option<LastBackup> {
    let status = backup.status.as_ref()?;
    Some(LastBackup {
        name: backup.name_any(),
        time: Some(status.last_success_date.clone()?),
        revision: status.etcd_revision,
        location: status.location.clone(),
        cluster_id: status.cluster_id.clone(),
    })
}

/// The newest verified backup of an EtcdBackup.
fn proven(backup: &EtcdBackup) -> Option<LastBackup> {
    let verified = backup.status.as_ref()?.last_verified.as_ref()?;
    Some(LastBackup {
        name: backup.name_any(),
        time: Some(verified.backup_time.clone()?),
        revision: verified.etcd_revision,
        location: Some(verified.location.clone()),
        cluster_id: verified.cluster_id.clone(),
    })
}

/// The Event that reports that the EtcdBackup with the cluster's name does not belong to the cluster.
pub(super) fn taken(cluster: &EtcdCluster) -> Notice {
    let name = cluster.name_any();
    Notice::warning(
        Reason::NameTaken.as_str(),
        "Backup",
        format!(
            "spec.backup is not in effect, because an EtcdBackup {name} exists and does not belong to this \
             EtcdCluster: delete it, or create it again with another name"
        ),
    )
}

#[cfg(test)]
mod tests;
