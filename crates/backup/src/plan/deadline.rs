//! By when a backup has to be complete, and what is said when it is not. Pure.
//!
//! What counts is the time somebody could work on it: not the time it waited for its turn behind others, which may be
//! many, and not the time in which no operator ran. Otherwise a queue, or a restart that takes long, would end backups
//! that nothing is wrong with, and one that lies whole in the store would be called a failure unseen.

use api::conditions::{ConditionType, find};
use api::{EtcdBackup, EtcdBackupStatus};
use jiff::{SignedDuration, Timestamp};

use super::{AHEAD, intent};
use crate::reason::{Reason, Trouble};
use crate::snapshot::{Moved, Pace, Snapshot, Stored, Work};

/// How long a backup may take when nobody says: this, and a second for each MiB of the database.
const LEAST_LIMIT: SignedDuration = SignedDuration::from_mins(10);

/// How long this backup may take; `None` is as long as it needs.
fn limit(backup: &EtcdBackup, moved: Option<Moved>) -> Option<SignedDuration> {
    let policy = backup.spec.backup_policy.as_ref();
    match policy.and_then(|policy| policy.timeout_in_second) {
        Some(0) => None,
        Some(seconds) => Some(SignedDuration::from_secs(seconds)),
        None => {
            let recorded = backup
                .status
                .as_ref()
                .and_then(|status| status.progress.as_ref())
                .and_then(|progress| progress.total_bytes);
            let running = moved.and_then(|moved| i64::try_from(moved.total?).ok());
            let mebibytes = running.or(recorded).unwrap_or_default().max(0) >> 20;
            Some(LEAST_LIMIT.saturating_add(SignedDuration::from_secs(mebibytes)))
        }
    }
}

/// By when the backup that is under way has to be complete, if it has a limit.
pub(super) fn deadline(
    backup: &EtcdBackup,
    snapshot: &Snapshot,
    now: Timestamp,
) -> Option<Timestamp> {
    let moved = match snapshot.transfer.work {
        Work::Running(moved) => Some(moved),
        _ => None,
    };
    let is_told_rightly = |time: &Timestamp| time.duration_since(now) <= AHEAD;
    let since = snapshot.since.filter(is_told_rightly);
    let begun = Some(intent(backup)?).filter(is_told_rightly);
    // What a clock that was ahead has begun was begun at some time since this process, or the object, is there.
    let begun = begun.unwrap_or_else(|| {
        let created = backup.metadata.creation_timestamp.as_ref();
        let created = created.map(|time| time.0).filter(is_told_rightly);
        since.map_or(now, |since| created.map_or(since, |time| time.max(since)))
    });
    let worked_on = since.map_or(begun, |since| since.max(begun));
    let waited = SignedDuration::try_from(snapshot.transfer.waited).unwrap_or(SignedDuration::MAX);
    let limit = limit(backup, moved)?.saturating_add(waited);
    worked_on.checked_add(limit).ok()
}

/// Whether it is not complete by then. Whoever waits for its turn is not late by that.
pub(super) fn overdue(backup: &EtcdBackup, snapshot: &Snapshot, now: Timestamp) -> bool {
    snapshot.transfer.work != Work::Queued
        && deadline(backup, snapshot, now).is_some_and(|deadline| now >= deadline)
}

pub(super) fn too_late(backup: &EtcdBackup, transfer: &Pace<Stored>) -> Trouble {
    let last = match (&transfer.work, &transfer.before) {
        // The attempt that is cut off now has said nothing yet; the one before it has.
        (Work::Ended(Err(trouble)), _) | (_, Some(trouble)) => Some(trouble.message.clone()),
        _ => last_said(backup.status.as_ref()),
    };
    let last = last.map_or_else(String::new, |message| format!("; last: {message}"));
    Trouble::new(
        Reason::DeadlineExceeded,
        format!(
            "the backup was not complete in the time allowed: raise spec.backupPolicy.timeoutInSecond or use 0 for no \
             limit{last}"
        ),
    )
}

fn last_said(status: Option<&EtcdBackupStatus>) -> Option<String> {
    let complete = find(&status?.conditions, &ConditionType::Complete)?;
    let is_progress = matches!(
        Reason::parse(&complete.reason),
        Some(Reason::InProgress | Reason::Pending)
    );
    let said = !complete.message.is_empty() && !is_progress;
    said.then(|| complete.message.clone())
}
