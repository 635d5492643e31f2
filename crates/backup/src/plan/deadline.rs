//! Computes the deadline of a backup, and the problem to report after it. Performs no I/O.
//!
//! The time limit excludes the time in the queue and the time without a running operator. A backup without an error
//! must not fail because of a long queue or a stopped operator.

use api::cluster::MAX_CLOCK_SKEW;
use api::conditions::{ConditionType, find};
use api::{EtcdBackup, EtcdBackupStatus};
use jiff::{SignedDuration, Timestamp};

use super::recorded::intent;
use crate::reason::{Reason, Trouble};
use crate::snapshot::{Moved, Snapshot, Stored, Work, WorkState};

/// Default time limit of a backup of a small database. Each MiB of the database adds one second.
const BASE_LIMIT: SignedDuration = SignedDuration::from_mins(10);

/// Maximum time limit. It also applies to `timeoutInSecond: 0`. All namespaces share the transfer slots, so no transfer
/// may use a slot forever.
const MAX_LIMIT: SignedDuration = SignedDuration::from_hours(48);

/// Time limit for the end of a transfer that was canceled at the deadline. After this time, the operator reports the
/// failure even if the transfer hangs.
const CANCEL_LIMIT: SignedDuration = SignedDuration::from_mins(2);

fn limit(backup: &EtcdBackup, moved: Option<Moved>) -> SignedDuration {
    let policy = backup.spec.backup_policy.as_ref();
    let limit = match policy.and_then(|policy| policy.timeout_in_second) {
        Some(0) => MAX_LIMIT,
        Some(seconds) => SignedDuration::from_secs(seconds),
        None => {
            let recorded = backup
                .status
                .as_ref()
                .and_then(|status| status.progress.as_ref())
                .and_then(|progress| progress.total_bytes);
            let running = moved.and_then(|moved| i64::try_from(moved.total?).ok());
            let mebibytes = running.or(recorded).unwrap_or_default().max(0) >> 20;
            BASE_LIMIT.saturating_add(SignedDuration::from_secs(mebibytes))
        }
    };
    limit.min(MAX_LIMIT)
}

/// The deadline of the backup in progress; `None` if no backup is in progress.
pub(super) fn deadline(
    backup: &EtcdBackup,
    snapshot: &Snapshot,
    now: Timestamp,
) -> Option<Timestamp> {
    let moved = match snapshot.transfer.work {
        Work::Running(moved) => Some(moved),
        _ => None,
    };
    let is_plausible = |time: &Timestamp| time.duration_since(now) <= MAX_CLOCK_SKEW;
    let since = snapshot.since.filter(is_plausible);
    let begun = Some(intent(backup)?).filter(is_plausible);
    // A start time in the future was recorded with a wrong clock. `begun` then becomes the start of this process
    // (`since`), or the creation of the EtcdBackup if the creation is later. If `since` is unknown or in the future
    // too, `begun` becomes the current time.
    let begun = begun.unwrap_or_else(|| {
        let created = backup.metadata.creation_timestamp.as_ref();
        let created = created.map(|time| time.0).filter(is_plausible);
        since.map_or(now, |since| created.map_or(since, |time| time.max(since)))
    });
    let worked_on = since.map_or(begun, |since| since.max(begun));
    let queue_time = snapshot.transfer.queue_time;
    let queue_time = SignedDuration::try_from(queue_time).unwrap_or(SignedDuration::MAX);
    let limit = limit(backup, moved).saturating_add(queue_time);
    worked_on.checked_add(limit).ok()
}

/// True if the deadline has passed. A queued transfer is never overdue.
pub(super) fn overdue(backup: &EtcdBackup, snapshot: &Snapshot, now: Timestamp) -> bool {
    snapshot.transfer.work != Work::Queued
        && deadline(backup, snapshot, now).is_some_and(|deadline| now >= deadline)
}

/// True if [`CANCEL_LIMIT`] has passed since the deadline, at which the operator cancels the transfer.
pub(super) fn cancel_overdue(backup: &EtcdBackup, snapshot: &Snapshot, now: Timestamp) -> bool {
    let deadline = deadline(backup, snapshot, now);
    deadline.is_some_and(|deadline| now.duration_since(deadline) >= CANCEL_LIMIT)
}

/// The problem to report after the deadline. The message contains the last known failure of an attempt, because a
/// canceled attempt reports no failure.
pub(super) fn deadline_exceeded(backup: &EtcdBackup, transfer: &WorkState<Stored>) -> Trouble {
    if let Some(reported) = reported_deadline(backup.status.as_ref()) {
        return Trouble::new(Reason::DeadlineExceeded, reported);
    }
    let known = transfer.problem().or(transfer.last_failure.as_ref());
    let known = known.map(|trouble| trouble.message.clone());
    let last = known.or_else(|| reported_failure(backup.status.as_ref()));
    let last = last.map_or_else(String::new, |message| format!("; last failure: {message}"));
    Trouble::new(
        Reason::DeadlineExceeded,
        format!(
            "the backup was not complete before its deadline: raise spec.backupPolicy.timeoutInSecond, or use 0 for \
             the maximum of 48 hours{last}"
        ),
    )
}

/// The deadline message for this backup in the status. `None` if the status does not report that this backup has
/// exceeded its deadline.
fn reported_deadline(status: Option<&EtcdBackupStatus>) -> Option<String> {
    let status = status.filter(|status| status.completion_time.is_none())?;
    let complete = find(&status.conditions, &ConditionType::Complete)?;
    let reports =
        complete.status == "False" && complete.reason == Reason::DeadlineExceeded.as_str();
    // `status.reason` is the message about the current backup. In a periodic EtcdBackup, the condition may still be
    // about the previous backup. The condition then has another message, and is ignored.
    let is_current = status.reason.as_deref() == Some(complete.message.as_str());
    (reports && is_current).then(|| complete.message.clone())
}

fn reported_failure(status: Option<&EtcdBackupStatus>) -> Option<String> {
    let complete = find(&status?.conditions, &ConditionType::Complete)?;
    let is_progress = matches!(
        Reason::parse(&complete.reason),
        Some(Reason::InProgress | Reason::Pending)
    );
    let is_failure = !complete.message.is_empty() && !is_progress;
    is_failure.then(|| complete.message.clone())
}
