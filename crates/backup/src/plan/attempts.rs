//! Limits the number of attempts that end together with the operator process, without a report. Performs no I/O.
//!
//! An attempt that fails reports its error, and its duration is limited (`deadline.rs`). An attempt that crashes the
//! operator, for example because it runs out of memory, reports nothing, and its time limit starts again in the next
//! process. Without a limit on the number, the operator would repeat such an attempt forever, and each crash would
//! interrupt all other transfers.
//!
//! The status therefore counts an attempt before its first byte is transferred. After the operator has observed the end
//! of the attempt, it reduces the count. A restart of the operator or a lost lease also interrupts attempts, so the
//! limit is high.

use api::EtcdBackup;

use crate::reason::{Reason, Trouble};
use crate::snapshot::{Stored, Work, WorkState};

/// Limit for attempts without an observed end. The kubelet restarts a crashing container after ten seconds at first,
/// and after five minutes later. Ten attempts therefore take about half an hour.
pub(super) const MAX_UNFINISHED: i32 = 10;

fn unfinished(backup: &EtcdBackup) -> i32 {
    let status = backup.status.as_ref();
    let count = status.and_then(|status| status.unfinished_attempts);
    count.unwrap_or_default().max(0)
}

/// The number of unfinished attempts, including the current attempt of this process. A process has at most one attempt
/// at a time.
pub(super) fn count_with_current(backup: &EtcdBackup, transfer: &WorkState<Stored>) -> i32 {
    let next = unfinished(backup).saturating_add(1);
    transfer.recorded_count.unwrap_or(next)
}

/// The number of unfinished attempts after the attempt of this process has ended. `None` if the status does not count
/// this attempt.
pub(super) fn count_without_current(transfer: &WorkState<Stored>) -> Option<i32> {
    transfer.recorded_count.map(|count| count.saturating_sub(1))
}

/// The problem to report if the limit is reached. `None` if this process has made an attempt, because the result of
/// that attempt is known.
pub(super) fn attempts_exhausted(backup: &EtcdBackup, work: &Work) -> Option<Trouble> {
    let unfinished = unfinished(backup);
    (*work == Work::Idle && unfinished >= MAX_UNFINISHED).then(|| {
        Trouble::new(
            Reason::AttemptsCutOff,
            format!(
                "{unfinished} attempts were cut off because the backup operator ended: check why the operator's \
                 container ended (kubectl describe pod). If it was OOMKilled, raise backupOperator.resources of the \
                 chart. Then create another EtcdBackup or change the spec. A periodic EtcdBackup needs neither: it \
                 tries again at its next scheduled time"
            ),
        )
    })
}
