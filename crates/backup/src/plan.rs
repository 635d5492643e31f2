//! Plans the next step of one EtcdBackup. A plan is a pure function: it uses no client, clock, randomness or log.
//!
//! The operator records the start time of a backup in the status before it reads etcd or writes to the store
//! (invariant 10). After an interruption, the transfer starts again, unless the store already contains the complete
//! backup.

use std::time::Duration;

use api::EtcdBackup;
use jiff::Timestamp;

use crate::reason::Trouble;
use crate::snapshot::{Destination, Moved, RemovalResult, Snapshot, Stored, Work};

mod attempts;
mod clock;
pub(crate) mod copies;
mod deadline;
mod deletion;
mod due;
mod gone;
mod idle;
mod job;
mod need;
mod next_attempt;
mod pod;
mod recorded;
pub(crate) mod recording;
mod refusal;
mod request;
mod requeue;
pub mod schedule;
pub(crate) mod verification;

pub use copies::{CopiesPlan, CopyPlan, CopyStep, CopyVerdict};
use deadline::{cancel_overdue, deadline, deadline_exceeded, overdue};
use deletion::{expiry, plan_deletion, plan_expiry};
pub use due::rules;
use idle::plan_idle;
pub use job::Job;
pub use need::{Need, need};
use next_attempt::plan_attempt;
use recorded::{has_finalizer, has_stored, is_finished, wants_finalizer};
pub use recorded::{intent, removable_finalizers};
pub use recording::{RecordingPlan, RecordingStep, RecordingVerdict};
pub use refusal::refusal;
use requeue::{PROGRESS_INTERVAL, until};
pub(crate) use verification::QUEUED;
pub use verification::{Step, VerificationPlan, VerificationVerdict};

/// The action of a reconcile in addition to writing the status.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Only write the status.
    Nothing,
    /// Record the start of this backup in the status. The transfer starts in a later reconcile.
    RecordIntent,
    /// Start the transfer of [`Plan::job`], or queue it.
    StartTransfer,
    /// Write this number to `status.unfinishedAttempts`. The operator counts an attempt before its transfer starts, and
    /// subtracts the attempt after it has failed.
    RecordAttempts(i32),
    /// Cancel the running or queued transfer.
    AbandonTransfer,
    /// Remove the backups that the retention rules do not keep. [`Plan::job`] contains the removal.
    RemoveSurplus,
    /// Add the finalizer if true. If false, remove [`removable_finalizers`].
    SetFinalizer(bool),
    /// Remove all stored backups of this EtcdBackup. [`Plan::job`] contains the removal.
    RemoveAll,
    /// Delete the finished EtcdBackup.
    DeleteBackup,
}

impl Action {
    /// True if the action changes the EtcdBackup itself. After such a change, the next reconcile writes the status,
    /// because the resourceVersion has changed.
    pub fn changes_object(self) -> bool {
        matches!(self, Self::SetFinalizer(_) | Self::DeleteBackup)
    }
}

/// The state of the backup for the status.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The status reports the current state of the backup, and does not change.
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
    /// True if the result of the work is in the status, so that the process can delete the result from memory.
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
    /// The action of this reconcile.
    pub action: Action,
    /// The transfer or the removal that the action starts; `None` for other actions.
    pub job: Option<Job>,
    /// The state to report in the status.
    pub verdict: Verdict,
    /// The next step of the verification of the newest backup. This step does not depend on the other fields of the
    /// plan.
    pub verification: VerificationPlan,
    /// The next steps of the copies. These steps do not depend on the other fields of the plan.
    pub copies: CopiesPlan,
    /// The next step of the agent that records all changes. This step does not depend on the other fields of the plan.
    pub recording: RecordingPlan,
    /// Time until the next reconcile; `None` waits for a change of the EtcdBackup.
    pub requeue: Option<Duration>,
    /// The time of the next backup. `None` while a backup is due or in progress, or if no further backup is planned.
    pub next_run: Option<Timestamp>,
}

impl Plan {
    fn new(action: Action, verdict: Verdict, requeue: Option<Duration>) -> Self {
        Self {
            action,
            job: None,
            verdict,
            verification: VerificationPlan::default(),
            copies: CopiesPlan::default(),
            recording: RecordingPlan::default(),
            requeue,
            next_run: None,
        }
    }

    fn with(self, job: Option<Job>) -> Self {
        Self { job, ..self }
    }
}

/// Plans the next step of an EtcdBackup, of the verification of its newest backup, of its copies, and of its agent.
pub fn plan(backup: &EtcdBackup, snapshot: &Snapshot, now: Timestamp) -> Plan {
    let recording = recording::plan(backup, &snapshot.recording, now);
    if recording::delays_deletion(backup, &snapshot.recording) {
        // The deletion of the EtcdBackup waits until the agent has ended. A running agent would write further objects
        // after the removal of all objects.
        let obstacle = recording::deletion_obstacle(backup, &snapshot.recording, now);
        let verdict = obstacle.map_or(Verdict::Unchanged, Verdict::DeletionBlocked);
        let wait = Plan::new(Action::Nothing, verdict, recording.requeue);
        return Plan { recording, ..wait };
    }
    let next = plan_backup(backup, snapshot, now);
    if next.action.changes_object() || backup.metadata.deletion_timestamp.is_some() {
        return next;
    }
    let verification = verification::plan(backup, &snapshot.verification, now);
    let copies = copies::plan(backup, &snapshot.copies, now);
    let requeues = [
        next.requeue,
        verification.requeue,
        copies.requeue,
        recording.requeue,
    ];
    Plan {
        requeue: requeues.into_iter().flatten().min(),
        verification,
        copies,
        recording,
        ..next
    }
}

/// Plans everything except the verification, the copies and the agent.
fn plan_backup(backup: &EtcdBackup, snapshot: &Snapshot, now: Timestamp) -> Plan {
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
        (true, false) if active || has_stored(backup) || recording::records(backup) => {
            return finalizer(true);
        }
        _ => {}
    }
    let next = plan_step(backup, snapshot, now);
    // Without `spec.continuous`, the finalizer is added just before the first backup is stored, and not earlier: after
    // the operator is uninstalled, a finalizer would block the deletion of the namespace.
    let stores =
        next.action == Action::StartTransfer || matches!(next.verdict, Verdict::Succeeded(_));
    if stores && wants_finalizer(backup) && !has_finalizer(backup) {
        return finalizer(true);
    }
    if active || next.job.is_some() {
        return next;
    }
    // The job `left` deletes a backup pod that an earlier operator process has left. Without this deletion, the pod
    // could store its backup after the status has reported the end of the attempt.
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
            // Invariant 10: the running transfer belongs to an earlier spec, so it is canceled. The new transfer begins
            // only after the start of its backup is recorded.
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
    // A complete backup is a success, even after the deadline.
    if let Destination::Complete(stored) = &snapshot.destination {
        return abandon(Verdict::Succeeded(stored.clone()));
    }
    if overdue(backup, snapshot, now) {
        let trouble = deadline_exceeded(backup, &snapshot.transfer);
        // The transfer is canceled, but may have stored the whole backup. The backup therefore fails only after the
        // transfer has ended and the store was read again.
        if active && !cancel_overdue(backup, snapshot, now) {
            let verdict = Verdict::Waiting(trouble);
            return Plan::new(Action::AbandonTransfer, verdict, Some(PROGRESS_INTERVAL));
        }
        return abandon(Verdict::Failed(trouble));
    }
    let next = plan_attempt(backup, begun, snapshot, now);
    // The next reconcile starts no later than the deadline of the backup.
    let remaining = deadline(backup, snapshot, now).map(|deadline| until(deadline, now));
    let requeue = next.requeue.into_iter().chain(remaining).min();
    Plan { requeue, ..next }
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

#[cfg(test)]
mod tests;
