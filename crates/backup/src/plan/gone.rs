//! Decides whether the deletion of an EtcdBackup waits for the backups in a store. Performs no I/O.

use jiff::{SignedDuration, Timestamp};

use crate::reason::{Reason, Trouble};

/// Time limit of the wait for a missing Secret. If the namespace is being deleted, no user can create the Secret again.
const SECRET_WAIT: SignedDuration = SignedDuration::from_mins(5);

/// True if the operator deletes the EtcdBackup without removing the backups in the store that has this problem.
pub(super) fn is_gone(trouble: &Trouble, since: Timestamp, now: Timestamp) -> bool {
    match trouble.reason {
        // A bucket that does not exist contains no backups, so nothing needs to be removed.
        Reason::BucketMissing => true,
        // In a namespace that is being deleted, no user can create the missing Secret again. A deletion that waits for
        // the Secret would wait forever, so the deletion continues after SECRET_WAIT.
        Reason::SecretMissing => now.duration_since(since) > SECRET_WAIT,
        _ => false,
    }
}
