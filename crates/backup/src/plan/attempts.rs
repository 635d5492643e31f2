//! How often a backup is tried whose attempts end with their operator. Pure.
//!
//! An attempt that fails says so, and has its time (`deadline.rs`). One that takes its operator with it, for example
//! because there is too little memory, says nothing, and its time begins anew with the next process: without a count
//! it would be made for ever, and whatever else runs would end with it each time. So the status counts an attempt before
//! it moves its first byte, and no longer when it was seen to end. An operator that is replaced or loses its lease cuts
//! attempts off, too, so there may be many of them.

use api::EtcdBackup;

use crate::reason::{Reason, Trouble};
use crate::snapshot::{Pace, Stored, Work};

/// So many. A container that crashes is started again after ten seconds at first and five minutes in the end, so these
/// take about half an hour.
pub(super) const MOST: i32 = 10;

fn unfinished(backup: &EtcdBackup) -> i32 {
    let status = backup.status.as_ref();
    let count = status.and_then(|status| status.unfinished_attempts);
    count.unwrap_or_default().max(0)
}

/// The count with the attempt of this process, which has one at a time.
pub(super) fn with_ours(backup: &EtcdBackup, transfer: &Pace<Stored>) -> i32 {
    let next = unfinished(backup).saturating_add(1);
    transfer.counted.unwrap_or(next)
}

/// The count when the attempt of this process has ended, if it was counted.
pub(super) fn without_ours(transfer: &Pace<Stored>) -> Option<i32> {
    transfer.counted.map(|count| count.saturating_sub(1))
}

/// Why this process makes no attempt, if it has made none and enough of them have ended with others.
pub(super) fn cut_off(backup: &EtcdBackup, work: &Work) -> Option<Trouble> {
    let unfinished = unfinished(backup);
    (*work == Work::Idle && unfinished >= MOST).then(|| {
        Trouble::new(
            Reason::AttemptsCutOff,
            format!(
                "{unfinished} attempts ended with the backup operator that made them: see why its container ended \
                 (kubectl describe pod), and raise backupOperator.resources of the chart if it was OOMKilled; a backup \
                 that is made once then needs another EtcdBackup or a changed spec"
            ),
        )
    })
}
