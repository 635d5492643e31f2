//! Plans the deletion of an expired EtcdBackup, and the removal of the stored backups of an EtcdBackup that is being
//! deleted. Performs no I/O.

use api::EtcdBackup;
use jiff::{SignedDuration, Timestamp};

use super::recorded::{has_finalizer, has_removable_finalizer, is_finished, wants_finalizer};
use super::requeue::{INPUT_RETRY, input_retry};
use super::{Action, Plan, Verdict, clock, job};
use crate::reason::Reason;
use crate::snapshot::{Snapshot, Work};

/// Time limit of the wait for a missing Secret. If the namespace is being deleted, the Secret never exists again.
const SECRET_WAIT: SignedDuration = SignedDuration::from_mins(5);

/// The time at which a finished EtcdBackup expires. `None` without `ttlSecondsAfterFinished`, or if the backup is
/// unfinished.
pub(super) fn expiry(backup: &EtcdBackup) -> Option<Timestamp> {
    let seconds = backup.spec.ttl_seconds_after_finished?;
    let status = backup.status.as_ref().filter(|_| is_finished(backup))?;
    let finished = status
        .completion_time
        .as_ref()
        .or(status.last_success_date.as_ref())?;
    finished
        .0
        .checked_add(SignedDuration::from_secs(i64::from(seconds)))
        .ok()
}

/// Plans the deletion of an expired EtcdBackup. If its stored backups are deleted too, both clocks must have passed
/// the time of expiry (invariant 9).
pub(super) fn plan_expiry(backup: &EtcdBackup, snapshot: &Snapshot, now: Timestamp) -> Plan {
    let retry = Some(INPUT_RETRY);
    let by_both_clocks = || {
        let time = clock::agreed_time(snapshot, now)?;
        expiry(backup).map(|expiry| expiry <= time)
    };
    if !wants_finalizer(backup) || by_both_clocks() == Some(true) {
        return Plan::new(Action::DeleteBackup, Verdict::Unchanged, retry);
    }
    let verdict = clock::obstacle(backup, snapshot, now);
    let verdict = verdict.map_or(Verdict::Unchanged, Verdict::RetentionFailed);
    Plan::new(Action::Nothing, verdict, retry)
}

/// True if a removal has deleted all stored backups. A removal by the retention rules deletes only some of them.
pub(super) fn all_removed(snapshot: &Snapshot) -> bool {
    matches!(&snapshot.removal.work, Work::Ended(Ok(result)) if result.everything)
}

/// Plans the removal of all stored backups of an EtcdBackup that is being deleted. No transfer is active.
pub(super) fn plan_deletion(backup: &EtcdBackup, snapshot: &Snapshot, now: Timestamp) -> Plan {
    if !has_removable_finalizer(backup) {
        return Plan::new(Action::Nothing, Verdict::Unchanged, None);
    }
    if !has_finalizer(backup) || !wants_finalizer(backup) || all_removed(snapshot) {
        return Plan::new(Action::SetFinalizer(false), Verdict::Unchanged, None);
    }
    let obstacle = snapshot.obstacle.as_ref();
    let failed = obstacle.or_else(|| snapshot.removal.problem());
    let since = backup
        .metadata
        .deletion_timestamp
        .as_ref()
        .map_or(now, |time| time.0);
    match failed {
        // A bucket that does not exist contains no backups, so nothing needs to be removed.
        Some(trouble) if trouble.reason == Reason::BucketMissing => {
            return Plan::new(Action::SetFinalizer(false), Verdict::Unchanged, None);
        }
        // After SECRET_WAIT, the finalizer is removed although the Secret is missing. In a namespace that is being
        // deleted, no user can create the Secret again, so the deletion would otherwise wait forever.
        Some(trouble)
            if trouble.reason == Reason::SecretMissing
                && now.duration_since(since) > SECRET_WAIT =>
        {
            return Plan::new(
                Action::SetFinalizer(false),
                Verdict::DeletionBlocked(trouble.clone()),
                None,
            );
        }
        _ => {}
    }
    let begin = snapshot.removal.may_begin(now) && snapshot.obstacle.is_none();
    let verdict = failed
        .cloned()
        .map_or(Verdict::Unchanged, Verdict::DeletionBlocked);
    let requeue = Some(input_retry(since, now));
    if !begin {
        return Plan::new(Action::Nothing, verdict, requeue);
    }
    Plan::new(Action::RemoveAll, verdict, requeue).with(job::everything(backup, snapshot))
}
