//! Finds the copies of a backup that cannot be read in the first store of its EtcdBackup.

use api::backup::copied_block;
use api::restore::{ChosenBackup, ChosenCopy};
use api::{EtcdBackup, EtcdRestore};

use super::stored::selected;
use super::{ObserveContext, read};
use crate::encryption;
use crate::plan::choice;
use crate::reason::{Reason, Trouble};

/// A copy of the backup.
pub(super) struct CopyCandidate {
    /// The name of the copy in `spec.copyTo` of the EtcdBackup.
    pub(super) name: String,
    /// The entry for `status.backup` if the restore uses this copy.
    pub(super) chosen: ChosenBackup,
    /// The end of a message, which says how to restore an older backup from the store of this copy. May be empty.
    pub(super) remedy: String,
}

/// The copies of the backup that the EtcdRestore names, in the order of `spec.copyTo`. `trouble` is the problem of the
/// backup in the first store. Empty if the problem is not in the store, or if there are no copies.
pub(super) async fn find(
    context: &ObserveContext<'_>,
    restore: &EtcdRestore,
    namespace: &str,
    trouble: &Trouble,
) -> Vec<CopyCandidate> {
    let is_in_store = matches!(
        trouble.reason,
        Reason::AccessDenied
            | Reason::BackupMissing
            | Reason::BucketMissing
            | Reason::NotSupported
            | Reason::SecretMissing
            | Reason::SnapshotUnreadable
            | Reason::StoreUnreachable
    );
    let reference = restore.spec.backup.as_ref().filter(|_| is_in_store);
    let Some(reference) = reference else {
        return Vec::new();
    };
    let found = read::<EtcdBackup>(context.client, namespace, &reference.name).await;
    match found {
        Ok(Some(backup)) => of_backup(restore, &backup, trouble),
        Ok(None) | Err(_) => Vec::new(),
    }
}

/// The copies that the restore may use.
///
/// Invariant 34: the SHA-256 in the status of the EtcdBackup identifies the backup in every store. Without it, no copy
/// is used.
fn of_backup(restore: &EtcdRestore, backup: &EtcdBackup, trouble: &Trouble) -> Vec<CopyCandidate> {
    let reference = restore.spec.backup.as_ref();
    let before = reference.and_then(|reference| reference.before.as_ref());
    let is_identified = |sha256: &String| !sha256.is_empty();
    let selected =
        selected(backup, before).filter(|stored| stored.sha256.as_ref().is_some_and(is_identified));
    let (Some(stored), Some(first)) = (selected, backup.spec.block()) else {
        return Vec::new();
    };
    let Ok(encryption) = encryption::by_name(restore, backup, &stored) else {
        return Vec::new();
    };
    let copies = backup.spec.copy_to.iter().filter_map(|copy| {
        let block = copied_block(&first, &stored.location, &copy.block()?)?;
        let chosen = choice::chosen_by_name(restore, block, &stored, encryption.clone());
        Some(CopyCandidate {
            name: copy.name.clone(),
            chosen: ChosenBackup {
                copy: Some(ChosenCopy {
                    name: copy.name.clone(),
                    reason: trouble.message.clone(),
                }),
                ..chosen
            },
            remedy: remedy(backup, &copy.name),
        })
    });
    copies.collect()
}

/// Names the newest backup in the store of this copy, according to the status of the EtcdBackup.
fn remedy(backup: &EtcdBackup, name: &str) -> String {
    let records = backup.status.iter().flat_map(|status| &status.copies);
    let mut of_copy = records.filter(|record| record.name == name);
    let newest = of_copy.find_map(|record| record.backup_time.as_ref());
    newest.map_or_else(String::new, |time| {
        let time = time.0;
        format!(" (the newest backup in this store is from {time}: to restore it, set spec.backup.before to {time})")
    })
}
