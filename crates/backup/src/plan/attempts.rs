//! Limits the number of attempts that crash the operator process. Performs no I/O.
//!
//! An attempt can crash the operator, for example if the process runs out of memory. Such an attempt reports no error,
//! and each crash interrupts all other transfers. Without a limit, the operator would repeat this attempt forever.
//!
//! The status counts an attempt as unfinished before its transfer starts. The operator subtracts the attempt after the
//! attempt has ended. A restart of the operator or a lost lease leaves an unfinished attempt without a crash, so the
//! limit is high.

use api::EtcdBackup;

use crate::reason::{Reason, Trouble};
use crate::snapshot::{Stored, Work, WorkState};

/// Maximum number of unfinished attempts. The kubelet restarts a crashing container with a back-off of up to five
/// minutes, so ten attempts take about half an hour.
pub(super) const MAX_UNFINISHED: i32 = 10;

fn unfinished(backup: &EtcdBackup) -> i32 {
    let status = backup.status.as_ref();
    let count = status.and_then(|status| status.unfinished_attempts);
    count.unwrap_or_default().max(0)
}

/// The number of unfinished attempts, including the attempt that this process runs or is about to start.
pub(super) fn count_with_current(backup: &EtcdBackup, transfer: &WorkState<Stored>) -> i32 {
    let next = unfinished(backup).saturating_add(1);
    transfer.recorded_count.unwrap_or(next)
}

/// The number of unfinished attempts without the attempt of this process, which has ended. `None` if the status does
/// not count that attempt.
pub(super) fn count_without_current(transfer: &WorkState<Stored>) -> Option<i32> {
    transfer.recorded_count.map(|count| count.saturating_sub(1))
}

/// The problem to report if the limit is reached. `None` if this process has made an attempt, because the process has
/// survived that attempt.
pub(super) fn attempts_exhausted(backup: &EtcdBackup, work: &Work) -> Option<Trouble> {
    let unfinished = unfinished(backup);
    (*work == Work::Idle && unfinished >= MAX_UNFINISHED).then(|| {
        Trouble::new(
            Reason::AttemptsCutOff,
            format!(
                "{unfinished} attempts were cut off because the backup operator ended: check why the operator's \
                 container ended (kubectl describe pod). If it was OOMKilled, raise backupOperator.resources of the \
                 chart. Then create another EtcdBackup or change the spec. For a periodic EtcdBackup, this last step is \
                 not needed: the operator tries again at its next scheduled time"
            ),
        )
    })
}
