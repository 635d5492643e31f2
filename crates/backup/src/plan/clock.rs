//! The second clock for removals: the API server's. Pure.
//!
//! A clock that is ahead makes every backup old, and it names new backups after a time at which no backup was made. All
//! retention rules compare such times, so none of them is applied while the clocks differ (invariant 9).

use api::EtcdBackup;
use api::conditions::{ConditionType, find};
use jiff::{SignedDuration, Timestamp};

use crate::reason::{Reason, Trouble};
use crate::snapshot::Snapshot;

/// Largest difference between the clocks of the operator and of the API server at which backups are removed.
const MAX_DIFFERENCE: SignedDuration = SignedDuration::from_hours(1);

/// Why no backup may be removed; `None` if the clocks agree, or if they were not compared.
pub(super) fn disagreement(
    backup: &EtcdBackup,
    snapshot: &Snapshot,
    now: Timestamp,
) -> Option<Trouble> {
    let difference = snapshot.clock_difference?;
    if difference.abs() <= MAX_DIFFERENCE {
        return None;
    }
    // The times in the message do not advance. Otherwise each reconcile would change the status.
    let message = reported(backup).unwrap_or_else(|| {
        let second = |time: Timestamp| Timestamp::from_second(time.as_second()).unwrap_or(time);
        let theirs = now.checked_add(difference).unwrap_or(now);
        format!(
            "the operator's clock was at {} when the API server's clock was at {}: no stored backup is removed while they \
             differ by more than an hour; correct the clock of the operator's node or of the control plane",
            second(now),
            second(theirs)
        )
    });
    Some(Trouble::new(Reason::ClocksDiffer, message))
}

/// The message of the condition that already reports the disagreement.
fn reported(backup: &EtcdBackup) -> Option<String> {
    let conditions = &backup.status.as_ref()?.conditions;
    let applied = find(conditions, &ConditionType::RetentionApplied)?;
    let reports = applied.status == "False" && applied.reason == Reason::ClocksDiffer.as_str();
    reports.then(|| applied.message.clone())
}

/// The time from which the age of a backup is computed: the earlier of both clocks. `None` if they were not compared or
/// do not agree.
pub(super) fn agreed_time(snapshot: &Snapshot, now: Timestamp) -> Option<Timestamp> {
    let difference = snapshot.clock_difference?;
    let theirs = now.checked_add(difference).ok()?;
    (difference.abs() <= MAX_DIFFERENCE).then(|| now.min(theirs))
}
