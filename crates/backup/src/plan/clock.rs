//! Compares the operator's clock with the clock of the API server before removals. Performs no I/O.
//!
//! If the operator's clock is ahead, all backups seem old, and new backups get names with times in the future.
//! Retention rules compare such times, so no rule is applied while the clocks differ (invariant 9).

use api::EtcdBackup;
use api::conditions::{ConditionType, find};
use jiff::{SignedDuration, Timestamp};

use crate::reason::{Reason, Trouble};
use crate::snapshot::Snapshot;

/// Maximum difference between the clocks of the operator and the API server. If they differ by more, no backup is
/// removed.
const MAX_DIFFERENCE: SignedDuration = SignedDuration::from_hours(1);

/// The problem that prevents a removal, or `None` if the removal may start.
pub(super) fn obstacle(
    backup: &EtcdBackup,
    snapshot: &Snapshot,
    now: Timestamp,
) -> Option<Trouble> {
    let unread = snapshot.obstacle.clone();
    unread.or_else(|| disagreement(backup, snapshot, now))
}

/// The problem if the two clocks differ by more than [`MAX_DIFFERENCE`]. `None` if the clocks agree or were not
/// compared.
pub(super) fn disagreement(
    backup: &EtcdBackup,
    snapshot: &Snapshot,
    now: Timestamp,
) -> Option<Trouble> {
    let difference = snapshot.clock_difference?;
    if difference.abs() <= MAX_DIFFERENCE {
        return None;
    }
    // The message keeps the times of the first report. With the current times, each reconcile would change the status.
    let message = reported(backup).unwrap_or_else(|| {
        let second = |time: Timestamp| Timestamp::from_second(time.as_second()).unwrap_or(time);
        let theirs = now.checked_add(difference).unwrap_or(now);
        format!(
            "the operator's clock was at {} when the API server's clock was at {}: the operator removes no stored backup while the clocks differ by more than an hour; correct the clock of the operator's node or of the control plane",
            second(now),
            second(theirs)
        )
    });
    Some(Trouble::new(Reason::ClocksDiffer, message))
}

/// The message of the condition `RetentionApplied`, if this condition reports that the clocks differ.
fn reported(backup: &EtcdBackup) -> Option<String> {
    let conditions = &backup.status.as_ref()?.conditions;
    let applied = find(conditions, &ConditionType::RetentionApplied)?;
    let reports = applied.status == "False" && applied.reason == Reason::ClocksDiffer.as_str();
    reports.then(|| applied.message.clone())
}

/// The earlier of the operator's time and the API server's time. The operator computes the ages of backups from this
/// time. `None` if the clocks differ or were not compared.
pub(super) fn agreed_time(snapshot: &Snapshot, now: Timestamp) -> Option<Timestamp> {
    let difference = snapshot.clock_difference?;
    (difference.abs() <= MAX_DIFFERENCE).then(|| runtime::clock::earlier(now, Some(difference)))
}
