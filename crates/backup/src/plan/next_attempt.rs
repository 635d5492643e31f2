//! Plans the next attempt of a backup in progress. Performs no I/O.

use std::time::Duration;

use api::EtcdBackup;
use jiff::Timestamp;

use super::attempts::{attempts_exhausted, count_with_current, count_without_current};
use super::requeue::{PROGRESS_INTERVAL, input_retry, until};
use super::{Action, Plan, Verdict, job};
use crate::snapshot::{Destination, Snapshot, Work};

/// Plans the next attempt of a backup whose deadline has not passed.
pub(super) fn plan_attempt(
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
        // Invariant 10: the attempt is recorded before its transfer starts, because the transfer may crash this
        // process.
        let action = Action::RecordAttempts(count_with_current(backup, &snapshot.transfer));
        return Plan::new(action, Verdict::Starting, Some(PROGRESS_INTERVAL));
    }
    if let Work::Running(moved) = *work {
        let obstacle = snapshot.transfer.obstacle.clone();
        let verdict = obstacle.map_or(Verdict::Running(moved), Verdict::Waiting);
        return wait(verdict, PROGRESS_INTERVAL);
    }
    // An attempt that has reported its failure no longer counts as unfinished, so the count in the status is reduced.
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
            // While the operator retries, the status shows the last failure.
            let verdict = match work {
                Work::Ended(Err(trouble)) => Verdict::Waiting(trouble.clone()),
                _ => Verdict::Starting,
            };
            Plan::new(Action::StartTransfer, verdict, Some(PROGRESS_INTERVAL)).with(job)
        }
    }
}
