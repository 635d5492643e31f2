//! Plans the next step of one EtcdBackup. A plan is a pure function: it uses no client, clock, randomness or log.
//!
//! Before the operator reads etcd or writes to the store, it records the start time of the backup in the status
//! (invariant 10). All later steps can be repeated: an interrupted transfer starts again, unless the store already
//! contains its complete backup. The start time of the last backup determines the time of the next backup. The list of
//! backups in the status shows whether the retention rules were applied after the newest backup.

use std::time::Duration;

use api::backup::DeletionPolicy;
use api::conditions::{ConditionType, find};
use api::names::FINALIZER_STORED;
use api::{EtcdBackup, EtcdBackupStatus};
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;

use crate::reason::{Reason, Trouble};
use crate::snapshot::{Destination, Moved, RemovalResult, Snapshot, Stored, Work};

mod attempts;
mod clock;
mod deadline;
mod due;
mod job;
mod pod;
mod refusal;
pub mod schedule;

use attempts::{attempts_exhausted, count_with_current, count_without_current};
use deadline::{cancel_overdue, deadline, deadline_exceeded, overdue};
pub use due::rules;
use due::{is_due, is_retention_pending, is_suspended, next_run, retention_result, retention_wait};
pub use job::Job;
pub use refusal::refusal;
use schedule::Next;

/// While a transfer runs, its progress is reported at this interval.
const PROGRESS_INTERVAL: Duration = Duration::from_secs(3);

/// First interval between checks for missing input, such as a Secret or a cluster. No watch reports the creation of the
/// input.
const INPUT_RETRY: Duration = Duration::from_secs(3);

/// Longest interval between checks for missing input.
const MAX_INPUT_RETRY: Duration = Duration::from_secs(30);

/// Maximum time between two reconciles, because a change of the clock may make a backup due.
const MAX_REQUEUE: Duration = Duration::from_mins(10);

/// How long a deletion waits for a missing Secret. If the whole namespace is being deleted, its Secrets are deleted
/// too.
const SECRET_WAIT: SignedDuration = SignedDuration::from_mins(5);

/// A recorded time may be this far in the future. If it is later, a wrong clock wrote it, and it is ignored.
const MAX_CLOCK_SKEW: SignedDuration = SignedDuration::from_hours(1);

/// The action of a reconcile, in addition to the status. A plan has one action.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Only write the status.
    Nothing,
    /// Record the start of this backup in the status. The same reconcile does nothing else.
    RecordIntent,
    /// Start the transfer of [`Plan::job`], or queue it.
    StartTransfer,
    /// Record the number of unfinished attempts. The transfer that is ready starts after this record.
    RecordAttempts(i32),
    /// Cancel the running or queued transfer.
    AbandonTransfer,
    /// Remove the backups that the retention rules do not keep. [`Plan::job`] contains the removal.
    RemoveSurplus,
    /// Set the finalizer (true), or remove it (false).
    SetFinalizer(bool),
    /// Remove all stored backups of this EtcdBackup. [`Plan::job`] contains the removal.
    RemoveAll,
    /// Delete the finished EtcdBackup.
    DeleteBackup,
}

impl Action {
    /// True if the action changes the EtcdBackup itself. The status is then written by the next reconcile, with the new
    /// resourceVersion.
    pub fn changes_object(self) -> bool {
        matches!(self, Self::SetFinalizer(_) | Self::DeleteBackup)
    }
}

/// What the status reports about the backup.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The status already reports the state.
    Unchanged,
    /// The spec is rejected.
    Refused(Trouble),
    /// The backup is starting.
    Starting,
    /// The transfer waits for other transfers to end.
    Queued,
    /// The transfer is running. Contains its progress.
    Running(Moved),
    /// An input is missing, or an attempt has failed. The operator retries.
    Waiting(Trouble),
    /// The backup is complete.
    Succeeded(Stored),
    /// The backup has failed and is not retried.
    Failed(Trouble),
    /// No backup is due now. Contains the time of the next backup, or `None` if the schedule has no further time.
    Scheduled(Option<Timestamp>),
    /// `spec.backupPolicy.suspend` is true.
    Suspended,
    /// The retention rules were applied.
    RetentionApplied(RemovalResult),
    /// The retention rules could not be applied.
    RetentionFailed(Trouble),
    /// The EtcdBackup is being deleted, and its stored backups cannot be removed yet.
    DeletionBlocked(Trouble),
}

impl Verdict {
    /// True if the reported work has ended, so that the process may forget it after the status is written.
    pub fn is_final(&self) -> bool {
        matches!(
            self,
            Self::Unchanged | Self::Succeeded(_) | Self::Failed(_) | Self::RetentionApplied(_)
        )
    }
}

/// The next step of an EtcdBackup.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    /// What the operator executes now.
    pub action: Action,
    /// The transfer or the removal that the action starts; `None` for other actions.
    pub job: Option<Job>,
    /// The state to report in the status.
    pub verdict: Verdict,
    /// Time until the next reconcile; `None` waits for a change of the EtcdBackup.
    pub requeue: Option<Duration>,
}

impl Plan {
    fn new(action: Action, verdict: Verdict, requeue: Option<Duration>) -> Self {
        Self {
            action,
            job: None,
            verdict,
            requeue,
        }
    }

    fn with(self, job: Option<Job>) -> Self {
        Self { job, ..self }
    }
}

/// True if the status reports that the backup for this generation of the spec has succeeded or failed. Never true for a
/// periodic EtcdBackup.
fn is_finished(backup: &EtcdBackup) -> bool {
    let Some(status) = backup
        .status
        .as_ref()
        .filter(|_| !backup.spec.is_periodic())
    else {
        return false;
    };
    // A stored backup stays complete after a change of the spec.
    status.succeeded
        || failed_generation(backup).is_some_and(|failed| *failed == backup.metadata.generation)
}

/// The generation of the spec for which the backup has failed; `None` if the last backup has not failed. A rejected
/// spec is not a failed backup.
fn failed_generation(backup: &EtcdBackup) -> Option<&Option<i64>> {
    let failed = find(&backup.status.as_ref()?.conditions, &ConditionType::Failed)?;
    (failed.status == "True" && !is_refusal(failed)).then_some(&failed.observed_generation)
}

/// True if the condition reports a rejected spec. Each reconcile checks the spec again, because a later release may
/// accept it.
fn is_refusal(failed: &Condition) -> bool {
    Reason::parse(&failed.reason).is_some_and(Reason::is_refusal)
}

/// The recorded start of the backup, if the backup is unfinished and belongs to this generation of the spec.
pub fn intent(backup: &EtcdBackup) -> Option<Timestamp> {
    let status = backup.status.as_ref()?;
    let current = status.observed_generation == backup.metadata.generation;
    (current && is_open(status)).then(|| status.start_time.as_ref().map(|time| time.0))?
}

fn is_open(status: &EtcdBackupStatus) -> bool {
    status.start_time.is_some() && status.completion_time.is_none()
}

/// The data that the plan needs. Data that cannot change the plan is not read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Need {
    /// No data.
    Nothing,
    /// The content of the store at the path, and the inputs of a transfer.
    Destination,
    /// The inputs of a removal by the retention rules.
    RemoveSurplus,
    /// The inputs of a removal of all stored backups.
    RemoveAll,
    /// Only the time of the API server.
    Clock,
}

/// The data that [`plan()`] needs at this time.
pub fn need(backup: &EtcdBackup, snapshot: &Snapshot, now: Timestamp) -> Need {
    if backup.metadata.deletion_timestamp.is_some() {
        let idle = !snapshot.transfer.work.is_active() && !all_removed(snapshot);
        let pending = idle && has_finalizer(backup) && wants_finalizer(backup);
        return need_if(Need::RemoveAll, pending && snapshot.removal.may_begin(now));
    }
    if is_finished(backup) {
        let expired = expiry(backup).is_some_and(|time| time <= now);
        return need_if(Need::Clock, expired && wants_finalizer(backup));
    }
    if refusal(backup).is_some() {
        return Need::Nothing;
    }
    if intent(backup).is_some() {
        let state = &snapshot.transfer;
        let ended = !state.work.is_active() && !matches!(state.work, Work::Ended(Ok(_)));
        // The content of the store shows whether an overdue backup is complete or has failed.
        let reads = state.may_begin(now) || overdue(backup, snapshot, now);
        return need_if(Need::Destination, ended && reads);
    }
    let startable = is_retention_pending(backup)
        && retention_result(backup, snapshot).is_none()
        && snapshot.removal.may_begin(now);
    let is_next = !is_due(backup, now) || retention_wait(backup, snapshot, now).is_some();
    need_if(Need::RemoveSurplus, startable && is_next)
}

fn need_if(need: Need, condition: bool) -> Need {
    if condition { need } else { Need::Nothing }
}

/// True if the stored backups are deleted together with the EtcdBackup.
fn wants_finalizer(backup: &EtcdBackup) -> bool {
    backup.spec.deletion_policy == Some(DeletionPolicy::Delete)
}

fn has_finalizer(backup: &EtcdBackup) -> bool {
    let finalizers = backup.metadata.finalizers.as_deref().unwrap_or_default();
    finalizers
        .iter()
        .any(|finalizer| finalizer == FINALIZER_STORED)
}

/// True if the status reports a stored backup, or an attempt that may have stored one.
fn has_stored(backup: &EtcdBackup) -> bool {
    backup.status.as_ref().is_some_and(|status| {
        status.location.is_some()
            || !status.backups.is_empty()
            || status.unfinished_attempts.is_some_and(|count| count > 0)
    })
}

/// True if a removal of all stored backups is complete. A removal by the retention rules is not enough.
fn all_removed(snapshot: &Snapshot) -> bool {
    matches!(&snapshot.removal.work, Work::Ended(Ok(result)) if result.everything)
}

/// The time at which `ttlSecondsAfterFinished` of a finished EtcdBackup has passed; `None` if the setting does not
/// apply.
fn expiry(backup: &EtcdBackup) -> Option<Timestamp> {
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

fn until(time: Timestamp, now: Timestamp) -> Duration {
    Duration::try_from(time.duration_since(now))
        .unwrap_or(INPUT_RETRY)
        .min(MAX_REQUEUE)
}

/// The interval between checks for missing input: a tenth of the time that the operator has waited so far. New input is
/// therefore found after a delay that is small compared with the waiting time.
fn input_retry(waits_since: Timestamp, now: Timestamp) -> Duration {
    let waited = Duration::try_from(now.duration_since(waits_since)).unwrap_or_default();
    (waited / 10).clamp(INPUT_RETRY, MAX_INPUT_RETRY)
}

/// Plans the next step of an EtcdBackup.
pub fn plan(backup: &EtcdBackup, snapshot: &Snapshot, now: Timestamp) -> Plan {
    let active = snapshot.transfer.work.is_active();
    if backup.metadata.deletion_timestamp.is_some() {
        return if active {
            abandon(active, Verdict::Unchanged)
        } else {
            plan_deletion(backup, snapshot, now)
        };
    }
    let finalizer = |set| {
        Plan::new(
            Action::SetFinalizer(set),
            Verdict::Unchanged,
            Some(Duration::ZERO),
        )
    };
    match (wants_finalizer(backup), has_finalizer(backup)) {
        (false, true) => return finalizer(false),
        (true, false) if active || has_stored(backup) => return finalizer(true),
        _ => {}
    }
    let next = plan_step(backup, snapshot, now);
    // The finalizer is set just before the first backup is stored. If the operator is uninstalled, an EtcdBackup
    // without stored backups must not block the deletion of its namespace.
    let stores =
        next.action == Action::StartTransfer || matches!(next.verdict, Verdict::Succeeded(_));
    if stores && wants_finalizer(backup) && !has_finalizer(backup) {
        return finalizer(true);
    }
    if active || next.job.is_some() {
        return next;
    }
    // A pod that an earlier process left must be deleted. Otherwise it could make its backup after the status has
    // reported the end of the attempt.
    let left = job::left_pod(backup, &next);
    next.with(left)
}

/// Plans the next step of an EtcdBackup that is not being deleted.
fn plan_step(backup: &EtcdBackup, snapshot: &Snapshot, now: Timestamp) -> Plan {
    let active = snapshot.transfer.work.is_active();
    let abandon = |verdict| abandon(active, verdict);
    if is_finished(backup) {
        return match expiry(backup) {
            _ if active => abandon(Verdict::Unchanged),
            Some(time) if time <= now => plan_expiry(backup, snapshot, now),
            expiry => Plan::new(
                Action::Nothing,
                Verdict::Unchanged,
                expiry.map(|time| until(time, now)),
            ),
        };
    }
    if let Some(trouble) = refusal(backup) {
        return abandon(Verdict::Refused(trouble));
    }
    let Some(begun) = intent(backup) else {
        if active {
            // Invariant 10: the running transfer belongs to an earlier spec. The start for the new spec is recorded
            // before its work begins.
            return Plan::new(
                Action::AbandonTransfer,
                Verdict::Unchanged,
                Some(Duration::ZERO),
            );
        }
        return plan_idle(backup, snapshot, now);
    };
    if let Work::Ended(Ok(stored)) = &snapshot.transfer.work {
        return abandon(Verdict::Succeeded(stored.clone()));
    }
    // A complete backup is a success, even if the operator finds it after the deadline.
    if let Destination::Complete(stored) = &snapshot.destination {
        return abandon(Verdict::Succeeded(stored.clone()));
    }
    if overdue(backup, snapshot, now) {
        let trouble = deadline_exceeded(backup, &snapshot.transfer);
        // The canceled transfer may have stored its whole backup, so the operator reads the store after the transfer
        // has ended.
        if active && !cancel_overdue(backup, snapshot, now) {
            let verdict = Verdict::Waiting(trouble);
            return Plan::new(Action::AbandonTransfer, verdict, Some(PROGRESS_INTERVAL));
        }
        return abandon(Verdict::Failed(trouble));
    }
    let next = plan_attempt(backup, begun, snapshot, now);
    // The next reconcile must happen at the deadline or earlier.
    let remaining = deadline(backup, snapshot, now).map(|deadline| until(deadline, now));
    let requeue = next.requeue.into_iter().chain(remaining).min();
    Plan { requeue, ..next }
}

/// Plans the deletion of an expired EtcdBackup. If the deletion also removes its stored backups, the clocks must agree
/// (invariant 9).
fn plan_expiry(backup: &EtcdBackup, snapshot: &Snapshot, now: Timestamp) -> Plan {
    let retry = Some(INPUT_RETRY);
    let by_both_clocks = || {
        let time = clock::agreed_time(snapshot, now)?;
        expiry(backup).map(|expiry| expiry <= time)
    };
    if !wants_finalizer(backup) || by_both_clocks() == Some(true) {
        return Plan::new(Action::DeleteBackup, Verdict::Unchanged, retry);
    }
    let verdict = obstacle(backup, snapshot, now);
    let verdict = verdict.map_or(Verdict::Unchanged, Verdict::RetentionFailed);
    Plan::new(Action::Nothing, verdict, retry)
}

/// Reports `verdict`, and cancels the transfer if it is active.
fn abandon(active: bool, verdict: Verdict) -> Plan {
    let action = if active {
        Action::AbandonTransfer
    } else {
        Action::Nothing
    };
    Plan::new(action, verdict, None)
}

/// Plans for an EtcdBackup without a backup in progress: the next backup, or the removal by the retention rules after
/// the last backup.
fn plan_idle(backup: &EtcdBackup, snapshot: &Snapshot, now: Timestamp) -> Plan {
    let result = retention_result(backup, snapshot);
    if let Some(result) = result.filter(|_| is_retention_pending(backup)) {
        let verdict = Verdict::RetentionApplied(result.clone());
        return Plan::new(Action::Nothing, verdict, Some(Duration::ZERO));
    }
    let waits = retention_wait(backup, snapshot, now);
    let obstacle = obstacle(backup, snapshot, now);
    let failed = obstacle
        .as_ref()
        .or_else(|| snapshot.removal.problem())
        .filter(|_| is_retention_pending(backup))
        .cloned();
    if is_due(backup, now) && waits.is_none() {
        return match failed {
            // The failure is reported first. Otherwise it might never be reported, because the next backup may be due
            // in every reconcile.
            Some(trouble) if !is_reported(backup, &trouble) => Plan::new(
                Action::Nothing,
                Verdict::RetentionFailed(trouble),
                Some(Duration::ZERO),
            ),
            _ => Plan::new(
                Action::RecordIntent,
                Verdict::Starting,
                Some(Duration::ZERO),
            ),
        };
    }
    let (idle, requeue) = match (next_run(backup, now), waits) {
        _ if is_suspended(backup) => (Verdict::Suspended, None),
        (Next::At(time), _) | (Next::Due, Some(time)) => {
            (Verdict::Scheduled(Some(time)), Some(until(time, now)))
        }
        (Next::Due | Next::Never, _) => (Verdict::Scheduled(None), None),
    };
    if !is_retention_pending(backup) {
        return Plan::new(Action::Nothing, idle, requeue);
    }
    let retry = requeue.map_or(INPUT_RETRY, |requeue| requeue.min(INPUT_RETRY));
    // Invariant 9: the removal starts only after the status reports that a newer backup is complete.
    let begin = snapshot.removal.may_begin(now) && obstacle.is_none();
    let verdict = failed.map_or(idle, Verdict::RetentionFailed);
    if !begin {
        return Plan::new(Action::Nothing, verdict, Some(retry));
    }
    Plan::new(Action::RemoveSurplus, verdict, Some(retry)).with(job::surplus(backup, snapshot, now))
}

/// Why a removal cannot start, or `None` if it can start.
fn obstacle(backup: &EtcdBackup, snapshot: &Snapshot, now: Timestamp) -> Option<Trouble> {
    let unread = snapshot.obstacle.clone();
    unread.or_else(|| clock::disagreement(backup, snapshot, now))
}

/// True if the condition `RetentionApplied` already reports the problem.
fn is_reported(backup: &EtcdBackup, trouble: &Trouble) -> bool {
    let conditions = backup.status.as_ref().map(|status| &status.conditions);
    let applied = conditions.and_then(|all| find(all, &ConditionType::RetentionApplied));
    applied.is_some_and(|found| {
        found.status == "False" && Reason::parse(&found.reason) == Some(trouble.reason)
    })
}

/// Plans the removal of all stored backups. The EtcdBackup is being deleted, and no transfer is active.
fn plan_deletion(backup: &EtcdBackup, snapshot: &Snapshot, now: Timestamp) -> Plan {
    if !has_finalizer(backup) {
        return Plan::new(Action::Nothing, Verdict::Unchanged, None);
    }
    if !wants_finalizer(backup) || all_removed(snapshot) {
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
        // A bucket that does not exist contains no backups.
        Some(trouble) if trouble.reason == Reason::BucketMissing => {
            return Plan::new(Action::SetFinalizer(false), Verdict::Unchanged, None);
        }
        // If the whole namespace is being deleted, no user creates the missing Secret again.
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

/// Plans the next attempt of a backup whose deadline has not passed.
fn plan_attempt(
    backup: &EtcdBackup,
    begun: Timestamp,
    snapshot: &Snapshot,
    now: Timestamp,
) -> Plan {
    let wait = |verdict, requeue| Plan::new(Action::Nothing, verdict, Some(requeue));
    let work = &snapshot.transfer.work;
    if *work == Work::Queued {
        return wait(Verdict::Queued, PROGRESS_INTERVAL);
    }
    if *work == Work::Ready {
        // Invariant 10: the attempt may crash this process, so it is recorded before its first byte is transferred.
        let action = Action::RecordAttempts(count_with_current(backup, &snapshot.transfer));
        return Plan::new(action, Verdict::Starting, Some(PROGRESS_INTERVAL));
    }
    if let Work::Running(moved) = *work {
        let obstacle = snapshot.transfer.obstacle.clone();
        let verdict = obstacle.map_or(Verdict::Running(moved), Verdict::Waiting);
        return wait(verdict, PROGRESS_INTERVAL);
    }
    // An attempt whose failure was observed no longer counts as unfinished.
    let uncount = || match work {
        Work::Ended(Err(_)) => count_without_current(&snapshot.transfer),
        _ => None,
    };
    let uncount = || uncount().map_or(Action::Nothing, Action::RecordAttempts);
    let early = snapshot.transfer.not_before.filter(|time| *time > now);
    if let (Work::Ended(Err(trouble)), Some(time)) = (work, early) {
        let verdict = Verdict::Waiting(trouble.clone());
        return Plan::new(uncount(), verdict, Some(until(time, now)));
    }
    let wait_for = |trouble| {
        let verdict = Verdict::Waiting(trouble);
        Plan::new(uncount(), verdict, Some(input_retry(begun, now)))
    };
    match &snapshot.destination {
        // Invariant 1: the content of the store is unknown, so the operator writes nothing to it.
        Destination::Unknown(trouble) => wait_for(trouble.clone()),
        Destination::NotRead => wait(Verdict::Starting, Duration::ZERO),
        Destination::Free | Destination::Complete(_) => {
            let job = match job::transfer(backup, &snapshot.inputs, begun) {
                Ok(job) => job,
                Err(trouble) => return wait_for(trouble),
            };
            if let Some(trouble) = attempts_exhausted(backup, work) {
                return Plan::new(Action::Nothing, Verdict::Failed(trouble), None);
            }
            // Until the retry has a result, the status shows the last failure.
            let verdict = match work {
                Work::Ended(Err(trouble)) => Verdict::Waiting(trouble.clone()),
                _ => Verdict::Starting,
            };
            Plan::new(Action::StartTransfer, verdict, Some(PROGRESS_INTERVAL)).with(job)
        }
    }
}

#[cfg(test)]
mod tests;
