//! Decides which data `observe` must read for the plan. Performs no I/O.

use api::EtcdBackup;
use jiff::Timestamp;

use super::deadline::overdue;
use super::deletion::{all_removed, expiry};
use super::due::{is_due, is_retention_pending, retention_result, retention_wait};
use super::recorded::{has_finalizer, intent, is_finished, wants_finalizer};
use super::refusal::refusal;
use crate::snapshot::{Snapshot, Work};

/// The data that the plan needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Need {
    /// The plan needs no additional data.
    Nothing,
    /// The objects in the store at the path of the spec, and the inputs of a transfer.
    Destination,
    /// The inputs of a removal by the retention rules.
    RemoveSurplus,
    /// The inputs of a removal of all stored backups.
    RemoveAll,
    /// Only the time of the API server.
    Clock,
}

/// The data that [`super::plan()`] needs at this time.
pub fn need(backup: &EtcdBackup, snapshot: &Snapshot, now: Timestamp) -> Need {
    if backup.metadata.deletion_timestamp.is_some() {
        let idle = !snapshot.transfer.work.is_active() && !all_removed(snapshot);
        let pending = idle && has_finalizer(backup) && wants_finalizer(backup);
        return need_if(Need::RemoveAll, pending && snapshot.removal.may_begin(now));
    }
    if is_finished(backup) {
        let expired = expiry(backup).is_some_and(|time| time <= now);
        return need_if(Need::Clock, expired && wants_finalizer(backup));
    }
    if refusal(backup).is_some() {
        return Need::Nothing;
    }
    if intent(backup).is_some() {
        let state = &snapshot.transfer;
        let ended = !state.work.is_active() && !matches!(state.work, Work::Ended(Ok(_)));
        // For an overdue backup, the store is read even during a back-off. Only the store shows whether the backup is
        // complete or has failed.
        let reads = state.may_begin(now) || overdue(backup, snapshot, now);
        return need_if(Need::Destination, ended && reads);
    }
    let startable = is_retention_pending(backup)
        && retention_result(backup, snapshot).is_none()
        && snapshot.removal.may_begin(now);
    let is_next = !is_due(backup, now) || retention_wait(backup, snapshot, now).is_some();
    need_if(Need::RemoveSurplus, startable && is_next)
}

fn need_if(need: Need, condition: bool) -> Need {
    if condition { need } else { Need::Nothing }
}
