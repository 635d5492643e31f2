//! When the next backup is due, and when the removal after the last one is. Pure.

use api::EtcdBackup;
use jiff::{SignedDuration, Timestamp};

use super::schedule::{Next, Schedule};
use super::{AHEAD, failed_of, is_open};
use crate::retention::Rules;
use crate::snapshot::{Kept, Snapshot, Work};

/// How long a backup that is due waits for the removal after the last one.
const TIDY_FIRST: SignedDuration = SignedDuration::from_mins(1);

/// When the next backup is due, of one that is not under way.
pub(super) fn agenda(backup: &EtcdBackup, now: Timestamp) -> Next {
    let policy = backup.spec.backup_policy.as_ref();
    let Some(Ok(Some(schedule))) = policy.map(Schedule::of) else {
        return Next::Due;
    };
    let status = backup.status.as_ref();
    // A backup that was under way when its spec was changed, and one that failed with another spec, have waited.
    let waited = status.is_some_and(is_open)
        || failed_of(backup).is_some_and(|failed| *failed != backup.metadata.generation);
    if waited {
        return Next::Due;
    }
    // v1beta2's operator recorded successes alone.
    let last = status.and_then(|status| {
        let times = [
            status.start_time.as_ref(),
            status.last_success_date.as_ref(),
        ];
        let times = times.into_iter().flatten().map(|time| time.0);
        times.filter(|time| time.duration_since(now) <= AHEAD).max()
    });
    let created = backup.metadata.creation_timestamp.as_ref();
    let created = created.map_or(Timestamp::UNIX_EPOCH, |time| time.0);
    let seed = backup.metadata.uid.as_deref().unwrap_or_default();
    schedule.next(last, created, seed, now)
}

pub(super) fn is_due(backup: &EtcdBackup, now: Timestamp) -> bool {
    !is_suspended(backup) && agenda(backup, now) == Next::Due
}

pub(super) fn is_suspended(backup: &EtcdBackup) -> bool {
    let policy = backup.spec.backup_policy.as_ref();
    policy.is_some_and(|policy| policy.suspend)
}

/// What is kept of a periodic backup, if anything is ever removed.
pub fn rules(backup: &EtcdBackup) -> Option<Rules> {
    let policy = backup
        .spec
        .backup_policy
        .as_ref()
        .filter(|policy| policy.is_periodic())?;
    Some(Rules::of(policy)).filter(Rules::delete)
}

/// Whether old backups are still to be removed after the newest: the list of the kept ones begins with another.
pub(super) fn to_tidy(backup: &EtcdBackup) -> bool {
    let Some(status) = backup.status.as_ref().filter(|status| status.succeeded) else {
        return false;
    };
    let listed = status
        .backups
        .first()
        .map(|newest| newest.location.as_str());
    rules(backup).is_some() && status.location.is_some() && listed != status.location.as_deref()
}

/// What the removal after the newest backup came to. One that ran while that backup was made says nothing of it.
pub(super) fn tidied<'a>(backup: &EtcdBackup, snapshot: &'a Snapshot) -> Option<&'a Kept> {
    let Work::Ended(Ok(kept)) = &snapshot.removal.work else {
        return None;
    };
    let newest = backup.status.as_ref()?.location.as_ref()?;
    let knows = kept.backups.iter().any(|one| &one.location == newest);
    // Where the newest lies elsewhere since the spec was changed, nothing was looked at.
    (kept.backups.is_empty() || knows).then_some(kept)
}

/// Until when a backup that is due waits for the removal after the last one, if it does. Where a backup takes longer
/// than the pause between two, the next is always due, and nothing would ever be removed: so the removal begins first.
/// A store that removes slowly or not at all holds up no backup for longer than [`TIDY_FIRST`]; what it has begun to
/// remove it goes on removing.
pub(super) fn tidies_first(
    backup: &EtcdBackup,
    snapshot: &Snapshot,
    now: Timestamp,
) -> Option<Timestamp> {
    let status = backup.status.as_ref().filter(|_| to_tidy(backup))?;
    let ended = status.completion_time.as_ref()?.0;
    // A clock that was set back makes no long wait.
    let soon = now.duration_since(ended).abs() < TIDY_FIRST;
    let begins = snapshot.removal.may_begin(now) && snapshot.obstacle.is_none();
    let waits = match &snapshot.removal.work {
        Work::Queued | Work::Called | Work::Running(_) => soon,
        Work::Ended(Err(_)) => begins && soon,
        Work::Idle | Work::Ended(Ok(_)) => begins,
    };
    let by = ended.checked_add(TIDY_FIRST).unwrap_or(now).max(now);
    waits.then_some(by)
}
