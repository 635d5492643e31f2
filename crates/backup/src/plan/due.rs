//! Computes when the next backup is due, and whether the retention rules must be applied before it. Performs no I/O.

use api::EtcdBackup;
use api::cluster::MAX_CLOCK_SKEW;
use jiff::{SignedDuration, Timestamp};

use super::clock::obstacle;
use super::recorded::{failed_generation, is_open};
use super::request;
use super::schedule::{Next, Schedule};
use crate::retention::Rules;
use crate::snapshot::{RemovalResult, Snapshot, Work};

/// Maximum delay of a due backup while the operator applies the retention rules to earlier backups.
const RETENTION_WAIT: SignedDuration = SignedDuration::from_mins(1);

/// The next run of an EtcdBackup without a backup in progress.
pub(super) fn next_run(backup: &EtcdBackup, now: Timestamp) -> Next {
    let policy = backup.spec.backup_policy.as_ref();
    let Some(Ok(Some(schedule))) = policy.map(Schedule::of) else {
        return Next::Due;
    };
    let status = backup.status.as_ref();
    // A backup that a change of the spec has interrupted is repeated at once. After a change of the spec, a failed
    // backup is repeated at once too.
    let is_repeated = status.is_some_and(is_open)
        || failed_generation(backup).is_some_and(|failed| *failed != backup.metadata.generation);
    if is_repeated {
        return Next::Due;
    }
    // `last_success_date` is used in addition to `start_time`, because coreos/etcd-operator recorded no start time.
    let last = status.and_then(|status| {
        let times = [
            status.start_time.as_ref(),
            status.last_success_date.as_ref(),
        ];
        let times = times.into_iter().flatten().map(|time| time.0);
        times
            .filter(|time| time.duration_since(now) <= MAX_CLOCK_SKEW)
            .max()
    });
    let created = backup.metadata.creation_timestamp.as_ref();
    let created = created.map_or(Timestamp::UNIX_EPOCH, |time| time.0);
    let seed = backup.metadata.uid.as_deref().unwrap_or_default();
    let planned = schedule.next(last, created, seed, now);
    match (request::due(backup, now), planned) {
        (Some(time), _) if time <= now => Next::Due,
        (Some(time), Next::At(planned)) => Next::At(planned.min(time)),
        (Some(time), Next::Never) => Next::At(time),
        (_, planned) => planned,
    }
}

pub(super) fn is_due(backup: &EtcdBackup, now: Timestamp) -> bool {
    !is_suspended(backup) && next_run(backup, now) == Next::Due
}

pub(super) fn is_suspended(backup: &EtcdBackup) -> bool {
    let policy = backup.spec.backup_policy.as_ref();
    policy.is_some_and(|policy| policy.suspend)
}

/// The retention rules of a periodic backup; `None` if the rules never remove a backup.
pub fn rules(backup: &EtcdBackup) -> Option<Rules> {
    let policy = backup
        .spec
        .backup_policy
        .as_ref()
        .filter(|policy| policy.is_periodic())?;
    Some(Rules::of(policy)).filter(Rules::delete)
}

/// True if the retention rules were not applied after the newest backup. In this case, the first entry of
/// `status.backups` is not the newest backup.
pub(super) fn is_retention_pending(backup: &EtcdBackup) -> bool {
    let Some(status) = backup.status.as_ref().filter(|status| status.succeeded) else {
        return false;
    };
    let listed = status
        .backups
        .first()
        .map(|newest| newest.location.as_str());
    rules(backup).is_some() && status.location.is_some() && listed != status.location.as_deref()
}

/// The result of the last removal. `None` if this removal has not succeeded, or has not listed the newest backup,
/// because it ran at the same time as that backup.
pub(super) fn retention_result<'a>(
    backup: &EtcdBackup,
    snapshot: &'a Snapshot,
) -> Option<&'a RemovalResult> {
    let Work::Ended(Ok(result)) = &snapshot.removal.work else {
        return None;
    };
    let newest = backup.status.as_ref()?.location.as_ref()?;
    let includes_newest = result.backups.iter().any(|one| &one.location == newest);
    // After a change of the path in the spec, the removal finds no backup, so an empty list is accepted too.
    (result.backups.is_empty() || includes_newest).then_some(result)
}

/// The time until which a due backup waits for the retention rules. `None` if it does not wait.
///
/// If each backup takes longer than the schedule's interval, the next backup is always due, and the rules would never
/// be applied. After [`RETENTION_WAIT`], the backup starts and the removal continues concurrently.
pub(super) fn retention_wait(
    backup: &EtcdBackup,
    snapshot: &Snapshot,
    now: Timestamp,
) -> Option<Timestamp> {
    let status = backup
        .status
        .as_ref()
        .filter(|_| is_retention_pending(backup))?;
    let ended = status.completion_time.as_ref()?.0;
    // If the clock was set back, `ended` may be in the future. The absolute difference limits the wait in both
    // directions.
    let is_recent = now.duration_since(ended).abs() < RETENTION_WAIT;
    let may_begin = snapshot.removal.may_begin(now) && obstacle(backup, snapshot, now).is_none();
    let waits = match &snapshot.removal.work {
        Work::Queued | Work::Ready | Work::Running(_) => is_recent,
        Work::Ended(Err(_)) => may_begin && is_recent,
        Work::Idle | Work::Ended(Ok(_)) => may_begin,
    };
    let until = ended.checked_add(RETENTION_WAIT).unwrap_or(now).max(now);
    waits.then_some(until)
}
