//! What to do next for one EtcdBackup. Pure: no client, clock, randomness or logging, and an answer to everything.
//!
//! The intent, when the backup began, is in the status before anything is read from etcd or written to the store
//! (invariant 10). Everything after it can be repeated: a transfer whose operator died is begun again, and one
//! that was complete is found in the store and adopted.

use std::time::Duration;

use api::conditions::{ConditionType, Reason, find};
use api::problem::{Problem, summary};
use api::{EtcdBackup, EtcdBackupStatus};
use jiff::{SignedDuration, Timestamp};

use crate::observed::{Moved, Observed, Place, Stored, Trouble, Work};

/// How long a backup may take when nobody says: this, and a second for each MiB of the database.
const LEAST_LIMIT: SignedDuration = SignedDuration::from_mins(10);

/// How often a running transfer is looked at and its progress written.
const PROGRESS: Duration = Duration::from_secs(3);

/// How often missing input (a Secret, a cluster) is looked for.
const MISSING: Duration = Duration::from_secs(3);

/// One step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Nothing is to be done but to say so.
    Nothing,
    /// The status says when this backup began; nothing else happens in the same round.
    RecordIntent,
    /// A transfer is started.
    Begin,
    /// The transfer that runs is given up.
    Abandon,
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
    /// Bytes are moving.
    Running(Moved),
    /// Something is missing or failed; it is tried again.
    Waiting(Trouble),
    /// It is complete.
    Succeeded(Stored),
    /// It has failed for good.
    Failed(Trouble),
}

/// What happens in this round.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// The one step.
    pub step: Step,
    /// What the status will say.
    pub verdict: Verdict,
    /// When to look again; `None` waits for a change of the object.
    pub requeue: Option<Duration>,
}

/// Whether the status says that this generation of the spec is done with, and how.
fn settled(backup: &EtcdBackup) -> bool {
    let Some(status) = &backup.status else {
        return false;
    };
    // What is complete stays complete: it lies in the store, whatever became of the spec.
    if status.succeeded {
        return true;
    }
    let failed = find(&status.conditions, &ConditionType::Failed);
    failed.is_some_and(|failed| {
        failed.status == "True"
            && !is_refusal(&failed.reason)
            && failed.observed_generation == backup.metadata.generation
    })
}

/// A refusal is judged anew each time: an operator of a later release may take what this one refuses.
fn is_refusal(reason: &str) -> bool {
    [Reason::InvalidSpec, Reason::NotSupported]
        .iter()
        .any(|refusal| refusal.as_str() == reason)
}

/// When this generation of the spec began to be worked on, if the status says so.
pub fn intent(backup: &EtcdBackup) -> Option<Timestamp> {
    let status = backup.status.as_ref()?;
    let current = status.observed_generation == backup.metadata.generation;
    let open = status.completion_time.is_none();
    (current && open).then(|| status.start_time.as_ref().map(|time| time.0))?
}

/// Why the spec is not worked on, if it is not.
pub fn refusal(backup: &EtcdBackup) -> Option<Trouble> {
    let problems = api::backup::validate(backup);
    if !problems.is_empty() {
        return Some(Trouble::new(Reason::InvalidSpec, summary(&problems)));
    }
    let mut problems = api::backup::unsafe_to_ignore(&backup.spec);
    if backup
        .spec
        .etcd_endpoints
        .iter()
        .any(|endpoint| endpoint.starts_with("https://"))
    {
        problems.push(Problem::new(
            "spec.etcdEndpoints",
            "names an https URL, and TLS to etcd is not in effect in this release",
            "back up a cluster without TLS, or wait for the release that brings it",
        ));
    }
    (!problems.is_empty()).then(|| Trouble::new(Reason::NotSupported, summary(&problems)))
}

/// Whether the store has to be asked before a plan can be made. Reading is spared while it would change nothing.
pub fn needs_place(backup: &EtcdBackup, observed: &Observed, now: Timestamp) -> bool {
    let attempt_due = match observed.work {
        Work::Queued | Work::Running(_) | Work::Ended(Ok(_)) => false,
        Work::Idle | Work::Ended(Err(_)) => observed.not_before.is_none_or(|time| time <= now),
    };
    let wanted = backup.metadata.deletion_timestamp.is_none()
        && !settled(backup)
        && refusal(backup).is_none()
        && intent(backup).is_some();
    wanted && attempt_due && !overdue(backup, observed, now)
}

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

fn overdue(backup: &EtcdBackup, observed: &Observed, now: Timestamp) -> bool {
    let moved = match observed.work {
        Work::Running(moved) => Some(moved),
        _ => None,
    };
    match (intent(backup), limit(backup, moved)) {
        (Some(begun), Some(limit)) => now.duration_since(begun) > limit,
        _ => false,
    }
}

/// Makes the plan.
pub fn plan(backup: &EtcdBackup, observed: &Observed, now: Timestamp) -> Plan {
    let active = matches!(observed.work, Work::Queued | Work::Running(_));
    // Work that is no longer wanted is given up before anything else.
    let leave = |verdict| Plan {
        step: if active { Step::Abandon } else { Step::Nothing },
        verdict,
        requeue: None,
    };
    if backup.metadata.deletion_timestamp.is_some() || settled(backup) {
        return leave(Verdict::Settled);
    }
    if let Some(trouble) = refusal(backup) {
        return leave(Verdict::Refused(trouble));
    }
    if intent(backup).is_none() {
        // Invariant 10: what is running belongs to an earlier spec, and the new one is recorded first.
        return Plan {
            step: if active {
                Step::Abandon
            } else {
                Step::RecordIntent
            },
            verdict: if active {
                Verdict::Settled
            } else {
                Verdict::Begun
            },
            requeue: Some(Duration::ZERO),
        };
    }
    if let Work::Ended(Ok(stored)) = &observed.work {
        return leave(Verdict::Succeeded(stored.clone()));
    }
    // What is complete counts, also when it was found too late.
    if let Place::Written(stored) = &observed.place {
        return leave(Verdict::Succeeded(stored.clone()));
    }
    if overdue(backup, observed, now) {
        return leave(Verdict::Failed(too_late(backup, &observed.work)));
    }
    attempt(observed, now)
}

/// The next attempt, within the time there is.
fn attempt(observed: &Observed, now: Timestamp) -> Plan {
    let wait = |verdict, requeue| Plan {
        step: Step::Nothing,
        verdict,
        requeue: Some(requeue),
    };
    if observed.work == Work::Queued {
        return wait(Verdict::Begun, PROGRESS);
    }
    if let Work::Running(moved) = observed.work {
        return wait(Verdict::Running(moved), PROGRESS);
    }
    let early = observed.not_before.filter(|time| *time > now);
    if let (Work::Ended(Err(trouble)), Some(time)) = (&observed.work, early) {
        let left = Duration::try_from(time.duration_since(now)).unwrap_or(MISSING);
        return wait(Verdict::Waiting(trouble.clone()), left);
    }
    match &observed.place {
        // Invariant 1: what the store holds is unknown, so nothing is written to it.
        Place::Unknown(trouble) => wait(Verdict::Waiting(trouble.clone()), MISSING),
        Place::NotAsked => wait(Verdict::Begun, Duration::ZERO),
        Place::Free | Place::Written(_) => Plan {
            step: Step::Begin,
            // A failure that is being tried again goes on being shown.
            verdict: match &observed.work {
                Work::Ended(Err(trouble)) => Verdict::Waiting(trouble.clone()),
                _ => Verdict::Begun,
            },
            requeue: Some(PROGRESS),
        },
    }
}

fn too_late(backup: &EtcdBackup, work: &Work) -> Trouble {
    let last = match work {
        Work::Ended(Err(trouble)) => Some(trouble.message.clone()),
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
    let said = !complete.message.is_empty()
        && ![Reason::InProgress, Reason::Pending]
            .iter()
            .any(|reason| reason.as_str() == complete.reason);
    said.then(|| complete.message.clone())
}

#[cfg(test)]
mod model;
#[cfg(test)]
mod tests;
