//! Selects a backup from the status of an EtcdBackup. Performs no I/O.

use api::EtcdBackup;
use api::backup::StoredBackup;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::ResourceExt;

use crate::reason::{Reason, Trouble};

/// The backup that `spec.backup` with this `before` selects from the status of the EtcdBackup. `None` without such a
/// backup.
pub(super) fn selected(backup: &EtcdBackup, before: Option<&Time>) -> Option<StoredBackup> {
    match before {
        None => newest(backup),
        Some(before) => newest_by(backup, before).ok().cloned(),
    }
}

/// The newest complete backup: its location, SHA-256 and encryption key in the status.
pub(super) fn newest(backup: &EtcdBackup) -> Option<StoredBackup> {
    let status = backup.status.as_ref()?;
    Some(StoredBackup {
        location: status.location.clone()?,
        sha256: status.sha256.clone(),
        encryption_key: status.encryption_key.clone(),
        ..StoredBackup::default()
    })
}

/// The newest backup in `status.backups` that was complete at `before`.
pub(super) fn newest_by<'a>(
    backup: &'a EtcdBackup,
    before: &Time,
) -> Result<&'a StoredBackup, Trouble> {
    let listed = backup.status.iter().flat_map(|status| &status.backups);
    let timed = listed.filter_map(|one| Some((one.completion_time.as_ref()?.0, one)));
    let newest = timed
        .filter(|(time, _)| *time <= before.0)
        .max_by_key(|(time, _)| *time);
    newest.map(|(_, one)| one).ok_or_else(|| {
        let message = format!(
            "spec.backup.before: status.backups of the EtcdBackup {} lists no backup that was complete at {}: set a \
             later time, or set the storage block of an older backup in the EtcdRestore itself",
            backup.name_any(),
            before.0
        );
        Trouble::new(Reason::BackupMissing, message)
    })
}
