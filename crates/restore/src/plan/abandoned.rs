//! Determines whether a restore was aborted.

use api::EtcdRestore;

/// True if the EtcdRestore was deleted.
pub fn is_deleted(restore: &EtcdRestore) -> bool {
    restore.metadata.deletion_timestamp.is_some()
}

/// True if the EtcdRestore was deleted or abandoned. If a restore in place is aborted before the cutover, the old
/// cluster continues.
pub fn is_aborted(restore: &EtcdRestore) -> bool {
    let status = restore.status.as_ref();
    is_deleted(restore) || status.is_some_and(|status| status.abandoned.is_some())
}
