//! Whether a restore does not go on.

use api::EtcdRestore;

/// Whether somebody deleted the EtcdRestore.
pub fn is_deleted(restore: &EtcdRestore) -> bool {
    restore.metadata.deletion_timestamp.is_some()
}

/// The restore does not go on: what was there before stays.
pub fn gives_up(restore: &EtcdRestore) -> bool {
    let status = restore.status.as_ref();
    is_deleted(restore) || status.is_some_and(|status| status.abandoned.is_some())
}
