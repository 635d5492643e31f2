//! Plans the copies of the stored backups in the stores of `spec.copyTo`. Performs no I/O.
//!
//! The status counts an attempt before the attempt starts (invariant 10). The operator computes the pause before the
//! next attempt from this count. If an attempt crashes the operator, the next operator process therefore waits for the
//! pause.

use std::time::Duration;

use api::backup::{BackupCopy, CopyStatus, EtcdBackupSpec, name_suffix};
use api::conditions::{ConditionType, find};
use api::{EtcdBackup, EtcdBackupStatus};
use jiff::{SignedDuration, Timestamp};

use super::gone::is_gone;
use super::recorded::{has_finalizer, wants_finalizer};
use super::refusal::refusal;
use super::requeue::{INPUT_RETRY, input_retry, until};
use super::{Action, Plan, Verdict, clock, verification};
use crate::copies::{BackupToCopy, CopyJob, CopyRules};
use crate::reason::{Reason, Trouble};
use crate::retention::Rules;
use crate::snapshot::{Copied, CopyInputs, Snapshot, Work};

/// Pause after the first attempt. Each further attempt doubles the pause, up to [`MAX_RETRY`].
const RETRY: SignedDuration = SignedDuration::from_secs(30);
const MAX_RETRY: SignedDuration = SignedDuration::from_mins(10);

/// The action of the operator for one copy.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum CopyStep {
    /// The operator does nothing in this reconcile.
    #[default]
    Nothing,
    /// The operator starts to copy these backups, after the status was written.
    Copy(CopyJob),
    /// The operator starts to remove all copies of this EtcdBackup.
    Remove,
}

/// The state of one copy for the status.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum CopyVerdict {
    /// The status does not change.
    #[default]
    Unchanged,
    /// An attempt starts.
    Starting,
    /// The store of the copy now contains the newest backup.
    Copied(Box<Copied>),
    /// The attempt has failed.
    Failed(Trouble),
    /// The attempt cannot start. An attempt that cannot start counts as failed.
    Blocked(Trouble),
}

/// The next step of one copy.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct CopyPlan {
    /// The action of the operator in this reconcile.
    pub step: CopyStep,
    /// The state of the copy for the status.
    pub verdict: CopyVerdict,
}

/// The next steps of all copies.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct CopiesPlan {
    /// The plans for the entries of `spec.copyTo`, in their order.
    pub copies: Vec<CopyPlan>,
    /// True if the status reports a copy that the spec no longer contains.
    pub outdated: bool,
    /// Time until the next step; `None` waits for a change of the EtcdBackup.
    pub requeue: Option<Duration>,
}

impl CopiesPlan {
    /// True if the plan changes nothing that the status reports about copies.
    pub fn is_unchanged(&self) -> bool {
        let mut copies = self.copies.iter();
        !self.outdated && copies.all(|copy| copy.verdict == CopyVerdict::Unchanged)
    }
}

/// The data that the plan for one copy needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CopyNeed {
    /// The plan needs no further data.
    Nothing,
    /// The store of the backups, the store of the copy, and the input of the retention rules.
    Copy,
    /// The store of the copy.
    Removal,
}

/// The data that the plan for this copy needs at this time.
pub(crate) fn need(
    backup: &EtcdBackup,
    copy: &BackupCopy,
    inputs: &CopyInputs,
    now: Timestamp,
) -> CopyNeed {
    let idle = !inputs.work.work.is_active();
    if backup.metadata.deletion_timestamp.is_some() {
        let pending = has_finalizer(backup) && wants_finalizer(backup) && may_exist(backup, copy);
        let begins = idle && !is_removed(inputs) && inputs.removal.may_begin(now);
        return if pending && begins {
            CopyNeed::Removal
        } else {
            CopyNeed::Nothing
        };
    }
    let due = begin(backup, copy, now).is_some_and(|time| time <= now);
    if inputs.work.work == Work::Idle && due && refusal(backup).is_none() {
        CopyNeed::Copy
    } else {
        CopyNeed::Nothing
    }
}

/// Plans the next steps of the copies of an EtcdBackup that is not being deleted.
pub(super) fn plan(backup: &EtcdBackup, inputs: &[CopyInputs], now: Timestamp) -> CopiesPlan {
    let outdated = is_outdated(backup);
    if backup.spec.copy_to.is_empty() || refusal(backup).is_some() {
        return CopiesPlan {
            outdated,
            ..CopiesPlan::default()
        };
    }
    let copies = backup.spec.copy_to.iter().zip(inputs);
    let planned = copies.map(|(copy, inputs)| plan_copy(backup, copy, inputs, now));
    let (copies, requeues): (Vec<CopyPlan>, Vec<Option<Duration>>) = planned.unzip();
    CopiesPlan {
        copies,
        outdated,
        requeue: requeues.into_iter().flatten().min(),
    }
}

fn plan_copy(
    backup: &EtcdBackup,
    copy: &BackupCopy,
    inputs: &CopyInputs,
    now: Timestamp,
) -> (CopyPlan, Option<Duration>) {
    let report = |verdict, step| (CopyPlan { step, verdict }, Some(Duration::ZERO));
    let wait = |requeue| (CopyPlan::default(), requeue);
    match &inputs.work.work {
        // No requeue is needed, because the worker triggers a reconcile when it ends.
        Work::Queued | Work::Ready | Work::Running(_) => wait(None),
        Work::Ended(Ok(copied)) => report(
            CopyVerdict::Copied(Box::new(copied.clone())),
            CopyStep::Nothing,
        ),
        Work::Ended(Err(trouble)) => {
            report(CopyVerdict::Failed(trouble.clone()), CopyStep::Nothing)
        }
        Work::Idle => match (begin(backup, copy, now), &inputs.opened) {
            (None, _) => wait(None),
            (Some(time), _) if time > now => wait(Some(until(time, now))),
            (Some(_), None) => wait(Some(INPUT_RETRY)),
            (Some(_), Some(Err(trouble))) => {
                report(CopyVerdict::Blocked(trouble.clone()), CopyStep::Nothing)
            }
            (Some(_), Some(Ok(()))) => match job(backup, copy, inputs, now) {
                Some(job) => report(CopyVerdict::Starting, CopyStep::Copy(job)),
                None => wait(None),
            },
        },
    }
}

/// The time from which the newest backup may be copied. `None` if the copy is complete, or if there is no backup.
fn begin(backup: &EtcdBackup, copy: &BackupCopy, now: Timestamp) -> Option<Timestamp> {
    let status = backup.status.as_ref()?;
    if has_newest(&backup.spec, status, copy)? {
        return None;
    }
    let retry = record(status, copy).and_then(|record| {
        let pause = pause(record.attempts?);
        record.last_attempt_time.as_ref()?.0.checked_add(pause).ok()
    });
    // A retry time more than MAX_RETRY in the future was computed with a wrong clock, and is ignored.
    let retry = retry.filter(|time| time.duration_since(now) <= MAX_RETRY);
    Some(retry.unwrap_or(Timestamp::UNIX_EPOCH))
}

fn pause(attempts: i32) -> SignedDuration {
    let doubled = u32::try_from(attempts.saturating_sub(1))
        .unwrap_or_default()
        .min(10);
    (RETRY * 2_i32.pow(doubled)).min(MAX_RETRY)
}

pub(crate) fn record<'a>(
    status: &'a EtcdBackupStatus,
    copy: &BackupCopy,
) -> Option<&'a CopyStatus> {
    status.copies.iter().find(|found| found.name == copy.name)
}

/// True if the status of the copy names the newest backup and no error. `None` if the status of the EtcdBackup names no
/// backup at the path of the spec.
pub(crate) fn has_newest(
    spec: &EtcdBackupSpec,
    status: &EtcdBackupStatus,
    copy: &BackupCopy,
) -> Option<bool> {
    let newest = name_suffix(&spec.block()?, status.location.as_deref()?)?;
    let block = copy.block()?;
    Some(record(status, copy).is_some_and(|record| {
        let location = record.location.as_deref();
        let copied = location.and_then(|location| name_suffix(&block, location));
        let is_same = sha256(status).is_none_or(|sha256| {
            let copied = record.sha256.as_ref();
            copied.is_some_and(|copied| copied.eq_ignore_ascii_case(sha256))
        });
        record.error.is_none() && copied == Some(newest) && is_same
    }))
}

/// The SHA-256 of the newest backup in the status, if the status contains it.
fn sha256(status: &EtcdBackupStatus) -> Option<&str> {
    let sha256 = status.sha256.as_deref();
    sha256.filter(|sha256| !sha256.is_empty())
}

/// True if a store of `spec.copyTo` does not contain the newest backup. While this is true, a finished EtcdBackup does
/// not expire.
pub(super) fn are_pending(backup: &EtcdBackup) -> bool {
    let Some(status) = backup.status.as_ref().filter(|status| status.succeeded) else {
        return false;
    };
    let mut copies = backup.spec.copy_to.iter();
    copies.any(|copy| has_newest(&backup.spec, status, copy) == Some(false))
}

/// True if the status reports a copy that the spec no longer contains.
fn is_outdated(backup: &EtcdBackup) -> bool {
    let Some(status) = &backup.status else {
        return false;
    };
    let is_left = |name: &str| !backup.spec.copy_to.iter().any(|copy| copy.name == name);
    let has_condition = find(&status.conditions, &ConditionType::Copied).is_some();
    status.copies.iter().any(|record| is_left(&record.name))
        || (backup.spec.copy_to.is_empty() && has_condition)
}

/// The retention rules of a copy; `None` if the rules never remove a copy.
pub(crate) fn copy_rules(backup: &EtcdBackup, copy: &BackupCopy) -> Option<Rules> {
    let rules = Some(Rules::of(&copy.policy())).filter(Rules::delete);
    rules.filter(|_| backup.spec.is_periodic())
}

/// The task that copies the newest backup, and the older backups that the status lists.
fn job(
    backup: &EtcdBackup,
    copy: &BackupCopy,
    inputs: &CopyInputs,
    now: Timestamp,
) -> Option<CopyJob> {
    let status = backup.status.as_ref()?;
    let first = backup.spec.block()?;
    let suffix = |location: &str| name_suffix(&first, location).map(str::to_owned);
    let newest = BackupToCopy {
        suffix: suffix(status.location.as_deref()?)?,
        sha256: sha256(status).map(str::to_owned),
    };
    let listed = status.backups.iter().filter_map(|stored| {
        Some(BackupToCopy {
            suffix: suffix(&stored.location)?,
            sha256: stored.sha256.clone().filter(|sha256| !sha256.is_empty()),
        })
    });
    let older = listed.filter(|one| one.suffix != newest.suffix && !one.suffix.is_empty());
    let mut backups: Vec<BackupToCopy> = older.filter(|_| backup.spec.is_periodic()).collect();
    backups.insert(0, newest);
    let rules = match &inputs.retention {
        None => CopyRules::KeepAll,
        Some(Err(trouble)) => CopyRules::Blocked(trouble.clone()),
        Some(Ok(retention)) => {
            let clocks = Snapshot {
                clock_difference: Some(retention.clock_difference),
                ..Snapshot::default()
            };
            // Invariant 9: while the clocks of the operator and of the API server differ too much, no copy is removed.
            match clock::agreed_time(&clocks, now) {
                Some(now) => CopyRules::Apply {
                    // Invariant 31: the copy of the newest verified backup is kept.
                    rules: copy_rules(backup, copy)
                        .unwrap_or_default()
                        .keeping(verification::verified(backup)),
                    others: retention.others.clone(),
                    now,
                },
                None => CopyRules::Blocked(
                    clock::disagreement(backup, &clocks, now)
                        .unwrap_or_else(|| Trouble::new(Reason::ClocksDiffer, "the clocks differ")),
                ),
            }
        }
    };
    Some(CopyJob { backups, rules })
}

/// True if the store of the copy may contain a copy.
fn may_exist(backup: &EtcdBackup, copy: &BackupCopy) -> bool {
    let status = backup.status.as_ref();
    let record = status.and_then(|status| record(status, copy));
    record.is_some_and(|record| record.location.is_some() || record.attempts.is_some())
}

fn is_removed(inputs: &CopyInputs) -> bool {
    matches!(&inputs.removal.work, Work::Ended(Ok(result)) if result.everything)
}

/// The next step of the removal of one copy.
enum Removing {
    /// No copy is left to remove.
    Done,
    /// The removal runs, or waits because of this problem.
    Waiting(Option<Trouble>),
    /// The removal may start. Contains the failure of the previous removal.
    Start(Option<Trouble>),
}

fn removing(
    backup: &EtcdBackup,
    copy: &BackupCopy,
    inputs: &CopyInputs,
    (since, now): (Timestamp, Timestamp),
) -> Removing {
    // The deletion has canceled the worker that copies. An active worker may write a manifest until it ends, so the
    // removal waits for its end.
    if inputs.work.work.is_active() {
        return Removing::Waiting(None);
    }
    if !may_exist(backup, copy) || is_removed(inputs) {
        return Removing::Done;
    }
    let unopened = inputs
        .opened
        .as_ref()
        .and_then(|opened| opened.as_ref().err());
    match unopened.or_else(|| inputs.removal.problem()) {
        Some(trouble) if is_gone(trouble, since, now) => Removing::Done,
        trouble if inputs.removal.may_begin(now) && inputs.opened == Some(Ok(())) => {
            Removing::Start(trouble.cloned())
        }
        trouble => Removing::Waiting(trouble.cloned()),
    }
}

/// Plans the removal of the copies of an EtcdBackup that is being deleted. `None` if no copy is left to remove. `since`
/// is the start of the deletion.
pub(super) fn plan_removal(
    backup: &EtcdBackup,
    inputs: &[CopyInputs],
    since: Timestamp,
    now: Timestamp,
) -> Option<Plan> {
    let mut is_done = true;
    let mut blocked = None;
    let mut copies = Vec::new();
    for (index, copy) in backup.spec.copy_to.iter().enumerate() {
        let state = match inputs.get(index) {
            Some(inputs) => removing(backup, copy, inputs, (since, now)),
            // Invariant 1: if a copy was not observed, the operator waits.
            None => Removing::Waiting(None),
        };
        let (step, trouble) = match state {
            Removing::Done => {
                copies.push(CopyPlan::default());
                continue;
            }
            Removing::Waiting(trouble) => (CopyStep::Nothing, trouble),
            Removing::Start(trouble) => (CopyStep::Remove, trouble),
        };
        is_done = false;
        let name = &copy.name;
        let trouble = trouble.map(|trouble| {
            Trouble::new(trouble.reason, format!("copy {name}: {}", trouble.message))
        });
        blocked = blocked.or(trouble);
        copies.push(CopyPlan {
            step,
            ..CopyPlan::default()
        });
    }
    if is_done {
        return None;
    }
    let verdict = blocked.map_or(Verdict::Unchanged, Verdict::DeletionBlocked);
    let copies = CopiesPlan {
        copies,
        ..CopiesPlan::default()
    };
    Some(Plan {
        copies,
        ..Plan::new(Action::Nothing, verdict, Some(input_retry(since, now)))
    })
}

#[cfg(test)]
mod tests;
