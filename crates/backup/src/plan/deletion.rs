//! Plans the deletion of an expired EtcdBackup, and the removal of the stored backups of an EtcdBackup that is being
//! deleted. Performs no I/O.

use api::EtcdBackup;
use jiff::{SignedDuration, Timestamp};

use super::gone::is_gone;
use super::recorded::{has_finalizer, has_removable_finalizer, is_finished, wants_finalizer};
use super::requeue::{INPUT_RETRY, input_retry};
use super::{Action, Plan, Verdict, clock, copies, job};
use crate::reason::Reason;
use crate::snapshot::{Snapshot, Work};

/// The time at which a finished EtcdBackup expires. `None` without `ttlSecondsAfterFinished`, or if the backup is
/// unfinished or not yet copied to each store.
pub(super) fn expiry(backup: &EtcdBackup) -> Option<Timestamp> {
    let seconds = backup.spec.ttl_seconds_after_finished?;
    if copies::are_pending(backup) {
        return None;
    }
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

/// Plans the deletion of an expired EtcdBackup. If the deletion removes stored backups, it starts only when both
/// clocks, of the operator and of the API server, have passed the time of expiry (invariant 9).
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

/// Plans the removal of all stored backups of an EtcdBackup that is being deleted. The caller has checked that no
/// transfer is active.
pub(super) fn plan_deletion(backup: &EtcdBackup, snapshot: &Snapshot, now: Timestamp) -> Plan {
    if !has_removable_finalizer(backup) {
        return Plan::new(Action::Nothing, Verdict::Unchanged, None);
    }
    if !has_finalizer(backup) || !wants_finalizer(backup) {
        return Plan::new(Action::SetFinalizer(false), Verdict::Unchanged, None);
    }
    let since = backup
        .metadata
        .deletion_timestamp
        .as_ref()
        .map_or(now, |time| time.0);
    // The copies are removed first, because the removal of the backups in the first store ends with the removal of the
    // finalizer. Without the status of the EtcdBackup, the operator cannot find the copies.
    if let Some(plan) = copies::plan_removal(backup, &snapshot.copies, since, now) {
        return plan;
    }
    if all_removed(snapshot) {
        return Plan::new(Action::SetFinalizer(false), Verdict::Unchanged, None);
    }
    let obstacle = snapshot.obstacle.as_ref();
    let failed = obstacle.or_else(|| snapshot.removal.problem());
    if let Some(trouble) = failed.filter(|trouble| is_gone(trouble, since, now)) {
        let verdict = match trouble.reason {
            Reason::BucketMissing => Verdict::Unchanged,
            _ => Verdict::DeletionBlocked(trouble.clone()),
        };
        return Plan::new(Action::SetFinalizer(false), verdict, None);
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
