//! Plans for an EtcdBackup without a backup in progress: the next backup, or the removal by the retention rules.
//! Performs no I/O.

use std::time::Duration;

use api::EtcdBackup;
use api::conditions::{ConditionType, find};
use jiff::Timestamp;

use super::clock::obstacle;
use super::due::{
    is_due, is_retention_pending, is_suspended, next_run, retention_result, retention_wait,
};
use super::requeue::{INPUT_RETRY, until};
use super::schedule::Next;
use super::{Action, Plan, Verdict, job};
use crate::reason::{Reason, Trouble};
use crate::snapshot::Snapshot;

pub(super) fn plan_idle(backup: &EtcdBackup, snapshot: &Snapshot, now: Timestamp) -> Plan {
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
            // The failed removal is reported before the next backup starts. Without this plan, the status would never
            // report the failure of an EtcdBackup whose next backup is always due.
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
    let next_run = match (next_run(backup, now), waits) {
        _ if is_suspended(backup) => None,
        (Next::At(time), _) | (Next::Due, Some(time)) => Some(time),
        (Next::Due | Next::Never, _) => None,
    };
    let idle = if is_suspended(backup) {
        Verdict::Suspended
    } else {
        Verdict::Scheduled(next_run)
    };
    let requeue = next_run.map(|time| until(time, now));
    let planned = |action, verdict, requeue| Plan {
        next_run,
        ..Plan::new(action, verdict, requeue)
    };
    if !is_retention_pending(backup) {
        return planned(Action::Nothing, idle, requeue);
    }
    let retry = requeue.map_or(INPUT_RETRY, |requeue| requeue.min(INPUT_RETRY));
    // Invariant 9: a removal starts only after `is_retention_pending` has found the newest complete backup in the
    // status.
    let begin = snapshot.removal.may_begin(now) && obstacle.is_none();
    let verdict = failed.map_or(idle, Verdict::RetentionFailed);
    if !begin {
        return planned(Action::Nothing, verdict, Some(retry));
    }
    planned(Action::RemoveSurplus, verdict, Some(retry)).with(job::surplus(backup, snapshot, now))
}

/// True if the condition `RetentionApplied` reports the problem.
fn is_reported(backup: &EtcdBackup, trouble: &Trouble) -> bool {
    let conditions = backup.status.as_ref().map(|status| &status.conditions);
    let applied = conditions.and_then(|all| find(all, &ConditionType::RetentionApplied));
    applied.is_some_and(|found| {
        found.status == "False" && Reason::parse(&found.reason) == Some(trouble.reason)
    })
}
