//! What to do next for one EtcdBackup. Pure: no client, clock, randomness or logging, and an answer to everything.
//!
//! The intent, when the backup began, is in the status before anything is read from etcd or written to the store
//! (invariant 10). Everything after it can be repeated: a transfer whose operator died is begun again, and one
//! that was complete is found in the store and adopted. Whether the next of a periodic backup is due follows from
//! when the last began, and whether old ones are still to be removed from what the status says is kept.

use std::time::Duration;

use api::backup::DeletionPolicy;
use api::conditions::{ConditionType, find};
use api::names::FINALIZER_STORED;
use api::{EtcdBackup, EtcdBackupStatus};
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;

use crate::reason::{Reason, Trouble};
use crate::snapshot::{Kept, Moved, Place, Snapshot, Stored, Work};

mod attempts;
mod deadline;
mod due;
mod job;
mod pod;
mod refusal;
pub mod schedule;

use attempts::{cut_off, with_ours, without_ours};
use deadline::{deadline, overdue, too_late};
pub use due::rules;
use due::{agenda, is_due, is_suspended, tidied, tidies_first, to_tidy};
pub use job::Job;
pub use refusal::refusal;
use schedule::Next;

/// How often a running transfer is looked at and its progress written.
const PROGRESS: Duration = Duration::from_secs(3);

/// How often missing input (a Secret, a cluster) is looked for at first.
const MISSING: Duration = Duration::from_secs(3);

/// How often it is looked for in the end. Nothing that is watched tells when it comes.
const LONG_MISSING: Duration = Duration::from_secs(30);

/// The longest time without a look: a clock that is set changes what is due.
const AT_LEAST: Duration = Duration::from_mins(10);

/// How long a deletion waits for a Secret that is gone, as it is when a namespace is deleted.
const GIVE_UP: SignedDuration = SignedDuration::from_mins(5);

/// A run that is further in the future than this was begun by a clock that was wrong, and does not count.
const AHEAD: SignedDuration = SignedDuration::from_hours(1);

/// The one action of a reconcile, besides the status.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Write the status alone.
    Nothing,
    /// Record in the status when this backup began; nothing else happens in the same reconcile.
    RecordIntent,
    /// Start the transfer of [`Plan::job`], or queue it.
    StartTransfer,
    /// Record how many attempts have started and not ended. The transfer whose turn it is runs after that.
    RecordAttempts(i32),
    /// Cancel the transfer that runs.
    AbandonTransfer,
    /// Remove the backups that the policy does not keep, by [`Plan::job`].
    RemoveSurplus,
    /// Set the finalizer, or remove it.
    SetFinalizer(bool),
    /// Remove everything that this EtcdBackup has stored, by [`Plan::job`].
    RemoveAll,
    /// Delete the EtcdBackup itself, which has finished.
    DeleteBackup,
}

impl Action {
    /// Whether it changes the EtcdBackup itself: the next reconcile, of the new version, writes the status.
    pub fn changes_object(self) -> bool {
        matches!(self, Self::SetFinalizer(_) | Self::DeleteBackup)
    }
}

/// What is to be said about the backup.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// All was said before.
    Settled,
    /// The spec is refused.
    Refused(Trouble),
    /// It has begun or is about to.
    Begun,
    /// As many others are being transferred as may.
    Queued,
    /// Bytes are moving.
    Running(Moved),
    /// Something is missing or failed; it is tried again.
    Waiting(Trouble),
    /// It is complete.
    Succeeded(Stored),
    /// It has failed for good.
    Failed(Trouble),
    /// The next one comes then, or never.
    Scheduled(Option<Timestamp>),
    /// No new ones are made.
    Suspended,
    /// What the policy does not keep is gone.
    Tidied(Kept),
    /// It could not be removed.
    Untidy(Trouble),
    /// The stored backups cannot be removed yet.
    Ending(Trouble),
}

impl Verdict {
    /// Whether the work that it reports has ended, so that the process may forget it once the status is written.
    pub fn is_final(&self) -> bool {
        matches!(
            self,
            Self::Settled | Self::Succeeded(_) | Self::Failed(_) | Self::Tidied(_)
        )
    }
}

/// What happens in this reconcile.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    /// The one action.
    pub action: Action,
    /// The transfer or removal that the action starts.
    pub job: Option<Job>,
    /// What the status will say.
    pub verdict: Verdict,
    /// When to reconcile again at the latest; `None` waits for a change of the object.
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

/// Whether the status says that this generation of the spec is done with, and how. A periodic backup never is.
fn settled(backup: &EtcdBackup) -> bool {
    let Some(status) = backup
        .status
        .as_ref()
        .filter(|_| !backup.spec.is_periodic())
    else {
        return false;
    };
    // What is complete stays complete: it lies in the store, whatever became of the spec.
    status.succeeded
        || failed_of(backup).is_some_and(|failed| *failed == backup.metadata.generation)
}

/// The generation of the spec that failed for good, if the last one did.
fn failed_of(backup: &EtcdBackup) -> Option<&Option<i64>> {
    let failed = find(&backup.status.as_ref()?.conditions, &ConditionType::Failed)?;
    (failed.status == "True" && !is_refusal(failed)).then_some(&failed.observed_generation)
}

/// A refusal is judged anew each time: an operator of a later release may take what this one refuses.
fn is_refusal(failed: &Condition) -> bool {
    Reason::parse(&failed.reason).is_some_and(Reason::is_refusal)
}

/// When this generation of the spec began to be worked on, if the status says so and it has not ended.
pub fn intent(backup: &EtcdBackup) -> Option<Timestamp> {
    let status = backup.status.as_ref()?;
    let current = status.observed_generation == backup.metadata.generation;
    (current && is_open(status)).then(|| status.start_time.as_ref().map(|time| time.0))?
}

fn is_open(status: &EtcdBackupStatus) -> bool {
    status.start_time.is_some() && status.completion_time.is_none()
}

/// What observe has to read before a plan can be made. Nothing is read that would not change the plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Need {
    /// Nothing.
    Nothing,
    /// The content of the store at the path, and the inputs of a transfer.
    Place,
    /// The inputs of a removal of what the policy does not keep.
    RemoveSurplus,
    /// The inputs of a removal of everything that was stored.
    RemoveAll,
}

/// See [`Need`].
pub fn need(backup: &EtcdBackup, snapshot: &Snapshot, now: Timestamp) -> Need {
    if backup.metadata.deletion_timestamp.is_some() {
        let idle = !snapshot.transfer.work.is_active() && !purged(snapshot);
        let wanted = idle && is_guarded(backup) && wants_guard(backup);
        return need_if(Need::RemoveAll, wanted && snapshot.removal.may_begin(now));
    }
    if settled(backup) || refusal(backup).is_some() {
        return Need::Nothing;
    }
    if intent(backup).is_some() {
        let pace = &snapshot.transfer;
        let fresh = !matches!(pace.work, Work::Ended(Ok(_))) && pace.may_begin(now);
        return need_if(Need::Place, fresh && !overdue(backup, snapshot, now));
    }
    let wanted =
        to_tidy(backup) && tidied(backup, snapshot).is_none() && snapshot.removal.may_begin(now);
    let turn = !is_due(backup, now) || tidies_first(backup, snapshot, now).is_some();
    need_if(Need::RemoveSurplus, wanted && turn)
}

fn need_if(need: Need, wanted: bool) -> Need {
    if wanted { need } else { Need::Nothing }
}

/// Whether the stored backups go with the object.
fn wants_guard(backup: &EtcdBackup) -> bool {
    backup.spec.deletion_policy == Some(DeletionPolicy::Delete)
}

fn is_guarded(backup: &EtcdBackup) -> bool {
    let finalizers = backup.metadata.finalizers.as_deref().unwrap_or_default();
    finalizers
        .iter()
        .any(|finalizer| finalizer == FINALIZER_STORED)
}

/// Whether all that was stored is gone. A removal of what a policy does not keep says nothing of that.
fn purged(snapshot: &Snapshot) -> bool {
    matches!(&snapshot.removal.work, Work::Ended(Ok(kept)) if kept.everything)
}

/// When a finished object goes, if it does.
fn expiry(backup: &EtcdBackup) -> Option<Timestamp> {
    let seconds = backup.spec.ttl_seconds_after_finished?;
    let status = backup.status.as_ref().filter(|_| settled(backup))?;
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
        .unwrap_or(MISSING)
        .min(AT_LEAST)
}

/// How soon to look again for what is missing: after a tenth of the time it was waited for, so that who comes late has
/// waited little longer for it.
fn look(waits_since: Timestamp, now: Timestamp) -> Duration {
    let waited = Duration::try_from(now.duration_since(waits_since)).unwrap_or_default();
    (waited / 10).clamp(MISSING, LONG_MISSING)
}

/// Makes the plan.
pub fn plan(backup: &EtcdBackup, snapshot: &Snapshot, now: Timestamp) -> Plan {
    let active = snapshot.transfer.work.is_active();
    // Work that is no longer wanted is given up before anything else.
    let leave = |verdict| {
        let action = if active {
            Action::AbandonTransfer
        } else {
            Action::Nothing
        };
        Plan::new(action, verdict, None)
    };
    if backup.metadata.deletion_timestamp.is_some() {
        return if active {
            leave(Verdict::Settled)
        } else {
            ending(backup, snapshot, now)
        };
    }
    if wants_guard(backup) != is_guarded(backup) {
        // Before anything is stored that would have to be removed.
        return Plan::new(
            Action::SetFinalizer(wants_guard(backup)),
            Verdict::Settled,
            Some(Duration::ZERO),
        );
    }
    if settled(backup) {
        return match expiry(backup) {
            _ if active => leave(Verdict::Settled),
            Some(time) if time <= now => {
                Plan::new(Action::DeleteBackup, Verdict::Settled, Some(MISSING))
            }
            expiry => Plan::new(
                Action::Nothing,
                Verdict::Settled,
                expiry.map(|time| until(time, now)),
            ),
        };
    }
    if let Some(trouble) = refusal(backup) {
        return leave(Verdict::Refused(trouble));
    }
    let Some(begun) = intent(backup) else {
        if active {
            // Invariant 10: what is running belongs to an earlier spec, and the new one is recorded first.
            return Plan::new(
                Action::AbandonTransfer,
                Verdict::Settled,
                Some(Duration::ZERO),
            );
        }
        return between(backup, snapshot, now);
    };
    if let Work::Ended(Ok(stored)) = &snapshot.transfer.work {
        return leave(Verdict::Succeeded(stored.clone()));
    }
    // What is complete counts, also when it was found too late.
    if let Place::Written(stored) = &snapshot.place {
        return leave(Verdict::Succeeded(stored.clone()));
    }
    if overdue(backup, snapshot, now) {
        return leave(Verdict::Failed(too_late(backup, &snapshot.transfer)));
    }
    let next = attempt(backup, begun, snapshot, now);
    // Nothing that is waited for is waited for longer than the backup may take.
    let left = deadline(backup, snapshot, now).map(|deadline| until(deadline, now));
    let requeue = next.requeue.into_iter().chain(left).min();
    Plan { requeue, ..next }
}

/// No backup is under way: the next one, or what the last one left to do.
fn between(backup: &EtcdBackup, snapshot: &Snapshot, now: Timestamp) -> Plan {
    if let Some(kept) = tidied(backup, snapshot).filter(|_| to_tidy(backup)) {
        let verdict = Verdict::Tidied(kept.clone());
        return Plan::new(Action::Nothing, verdict, Some(Duration::ZERO));
    }
    let waits = tidies_first(backup, snapshot, now);
    let failed = match (&snapshot.obstacle, &snapshot.removal.work) {
        _ if !to_tidy(backup) => None,
        (Some(trouble), _) | (None, Work::Ended(Err(trouble))) => Some(trouble.clone()),
        (None, _) => None,
    };
    if is_due(backup, now) && waits.is_none() {
        return match failed {
            // Nobody would hear of it where the next one is always due.
            Some(trouble) if !is_shown(backup, &trouble) => Plan::new(
                Action::Nothing,
                Verdict::Untidy(trouble),
                Some(Duration::ZERO),
            ),
            _ => Plan::new(Action::RecordIntent, Verdict::Begun, Some(Duration::ZERO)),
        };
    }
    let (rest, requeue) = match (agenda(backup, now), waits) {
        _ if is_suspended(backup) => (Verdict::Suspended, None),
        (Next::At(time), _) | (Next::Due, Some(time)) => {
            (Verdict::Scheduled(Some(time)), Some(until(time, now)))
        }
        (Next::Due | Next::Never, _) => (Verdict::Scheduled(None), None),
    };
    if !to_tidy(backup) {
        return Plan::new(Action::Nothing, rest, requeue);
    }
    let soon = requeue.map_or(MISSING, |requeue| requeue.min(MISSING));
    // Invariant 9: this begins only after the status says that a newer one is complete.
    let begin = snapshot.removal.may_begin(now) && snapshot.obstacle.is_none();
    let verdict = failed.map_or(rest, Verdict::Untidy);
    if !begin {
        return Plan::new(Action::Nothing, verdict, Some(soon));
    }
    Plan::new(Action::RemoveSurplus, verdict, Some(soon)).with(job::surplus(backup, snapshot, now))
}

/// Whether the status says already why old backups are not removed.
fn is_shown(backup: &EtcdBackup, trouble: &Trouble) -> bool {
    let conditions = backup.status.as_ref().map(|status| &status.conditions);
    let applied = conditions.and_then(|all| find(all, &ConditionType::RetentionApplied));
    applied.is_some_and(|found| {
        found.status == "False" && Reason::parse(&found.reason) == Some(trouble.reason)
    })
}

/// The object is being deleted, and nothing is under way.
fn ending(backup: &EtcdBackup, snapshot: &Snapshot, now: Timestamp) -> Plan {
    if !is_guarded(backup) {
        return Plan::new(Action::Nothing, Verdict::Settled, None);
    }
    if !wants_guard(backup) || purged(snapshot) {
        return Plan::new(Action::SetFinalizer(false), Verdict::Settled, None);
    }
    let failed = match (&snapshot.obstacle, &snapshot.removal.work) {
        (Some(trouble), _) | (None, Work::Ended(Err(trouble))) => Some(trouble),
        _ => None,
    };
    let since = backup
        .metadata
        .deletion_timestamp
        .as_ref()
        .map_or(now, |time| time.0);
    match failed {
        // A bucket that is gone holds nothing.
        Some(trouble) if trouble.reason == Reason::BucketMissing => {
            return Plan::new(Action::SetFinalizer(false), Verdict::Settled, None);
        }
        // A Secret that is gone does not come back where a whole namespace goes.
        Some(trouble)
            if trouble.reason == Reason::SecretMissing && now.duration_since(since) > GIVE_UP =>
        {
            return Plan::new(
                Action::SetFinalizer(false),
                Verdict::Ending(trouble.clone()),
                None,
            );
        }
        _ => {}
    }
    let begin = snapshot.removal.may_begin(now) && snapshot.obstacle.is_none();
    let verdict = failed.cloned().map_or(Verdict::Settled, Verdict::Ending);
    let requeue = Some(look(since, now));
    if !begin {
        return Plan::new(Action::Nothing, verdict, requeue);
    }
    Plan::new(Action::RemoveAll, verdict, requeue).with(job::everything(backup, snapshot, now))
}

/// The next attempt, within the time there is.
fn attempt(backup: &EtcdBackup, begun: Timestamp, snapshot: &Snapshot, now: Timestamp) -> Plan {
    let wait = |verdict, requeue| Plan::new(Action::Nothing, verdict, Some(requeue));
    let work = &snapshot.transfer.work;
    if *work == Work::Queued {
        return wait(Verdict::Queued, PROGRESS);
    }
    if *work == Work::Called {
        // Invariant 10: before its first byte, so that it is known also when it takes this process with it.
        let action = Action::RecordAttempts(with_ours(backup, &snapshot.transfer));
        return Plan::new(action, Verdict::Begun, Some(PROGRESS));
    }
    if let Work::Running(moved) = *work {
        return wait(Verdict::Running(moved), PROGRESS);
    }
    // One that is seen to have ended.
    let uncount = || match work {
        Work::Ended(Err(_)) => without_ours(&snapshot.transfer),
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
        Plan::new(uncount(), verdict, Some(look(begun, now)))
    };
    match &snapshot.place {
        // Invariant 1: what the store holds is unknown, so nothing is written to it.
        Place::Unknown(trouble) => wait_for(trouble.clone()),
        Place::NotAsked => wait(Verdict::Begun, Duration::ZERO),
        Place::Free | Place::Written(_) => {
            let job = match job::transfer(backup, &snapshot.inputs, begun) {
                Ok(job) => job,
                Err(trouble) => return wait_for(trouble),
            };
            if let Some(trouble) = cut_off(backup, work) {
                return Plan::new(Action::Nothing, Verdict::Failed(trouble), None);
            }
            // A failure that is being tried again goes on being shown.
            let verdict = match work {
                Work::Ended(Err(trouble)) => Verdict::Waiting(trouble.clone()),
                _ => Verdict::Begun,
            };
            Plan::new(Action::StartTransfer, verdict, Some(PROGRESS)).with(job)
        }
    }
}

#[cfg(test)]
mod tests;
