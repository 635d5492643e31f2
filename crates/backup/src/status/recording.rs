//! The part of the status that reports the agent. Performs no I/O.

use api::backup::{ContinuousBase, ContinuousGap, ContinuousStatus};
use api::conditions::{ConditionStatus, ConditionType, Finding, is_true, set};
use api::{EtcdBackup, EtcdBackupStatus};
use continuous::{BaseProgress, Held, Missing, Progress};
use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use runtime::Notice;

use crate::plan::RecordingVerdict;
use crate::reason::{Reason, Trouble};
use crate::recording::AgentReport;

/// Maximum lag in seconds. With a longer lag, the condition `Recording` is False.
const MAX_LAG: i64 = 60;

const MICROS: i64 = 1_000_000;

const FIRST: &str = "the agent takes its first snapshot";
const RECORDS: &str = "all changes are stored without a long delay";

/// Writes the verdict to the status.
pub(super) fn record(
    status: &mut EtcdBackupStatus,
    verdict: &RecordingVerdict,
    generation: Option<i64>,
    now: &Time,
) {
    let finding = match verdict {
        RecordingVerdict::Unchanged => return,
        RecordingVerdict::Off => {
            status.continuous = None;
            let recording = ConditionType::Recording;
            status
                .conditions
                .retain(|condition| condition.type_ != recording.as_str());
            return;
        }
        RecordingVerdict::Waiting(trouble) => {
            let continuous = status.continuous.get_or_insert_default();
            checked(continuous, generation, now);
            wait(continuous, trouble, now);
            let kind = if is_expected(trouble) {
                ConditionStatus::Unknown
            } else {
                ConditionStatus::False
            };
            finding(kind, trouble.reason, &trouble.message)
        }
        RecordingVerdict::Reported {
            location,
            report,
            obstacle,
        } => {
            let continuous = status.continuous.get_or_insert_default();
            checked(continuous, generation, now);
            if location.is_some() {
                continuous.location.clone_from(location);
            }
            copy(continuous, report);
            let found = judge(continuous, &report.progress);
            let message = match obstacle {
                Some(trouble) => format!("{}; {}", found.message, not_applied(trouble)),
                None => found.message,
            };
            Finding { message, ..found }
        }
    };
    set(&mut status.conditions, &finding, generation, now);
}

/// The text about an agent that runs with the previous spec, because the operator cannot apply the current spec.
fn not_applied(trouble: &Trouble) -> String {
    let why = &trouble.message;
    format!(
        "the agent still runs with its previous settings, because the operator cannot apply the spec: {why}"
    )
}

/// True if the wait needs no attention: the agent starts, or the cluster hibernates.
fn is_expected(trouble: &Trouble) -> bool {
    matches!(trouble.reason, Reason::Pending | Reason::Hibernated)
}

fn finding(status: ConditionStatus, reason: Reason, message: &str) -> Finding {
    Finding::new(ConditionType::Recording, status, reason.into(), message)
}

fn checked(continuous: &mut ContinuousStatus, generation: Option<i64>, now: &Time) {
    continuous.observed_generation = generation;
    continuous.check_time = Some(now.clone());
}

/// Updates the lag while there is no report. A hibernated cluster has no changes, so it has no lag.
fn wait(continuous: &mut ContinuousStatus, trouble: &Trouble, now: &Time) {
    if trouble.reason == Reason::Hibernated {
        continuous.complete_time = None;
        continuous.lag_revisions = None;
    }
    let complete = continuous.complete_time.as_ref();
    continuous.lag_seconds = complete.map(|time| now.0.duration_since(time.0).as_secs().max(0));
}

/// Converts a time of the agent's clock to whole seconds.
fn time(micros: i64) -> Option<Time> {
    Timestamp::from_second(micros.div_euclid(MICROS))
        .ok()
        .map(Time)
}

fn number(count: u64) -> Option<i64> {
    i64::try_from(count).ok()
}

fn copy(continuous: &mut ContinuousStatus, report: &AgentReport) {
    let Progress {
        revision,
        revision_time,
        complete_time,
        etcd_revision,
        base,
        held,
        ..
    } = &report.progress;
    continuous.revision = *revision;
    continuous.revision_time = revision_time.and_then(time);
    // Directly after a restart, the agent reports no `complete_time`, so the status keeps the last known time.
    if let Some(complete) = complete_time {
        continuous.complete_time = time(*complete);
    }
    // The report is not trusted. Its numbers can have any value, so the subtractions saturate.
    let known = complete_time.map(|complete| report.now.saturating_sub(complete).max(0) / MICROS);
    let last = continuous.complete_time.as_ref();
    let since = |last: &Time| {
        (report.now / MICROS)
            .saturating_sub(last.0.as_second())
            .max(0)
    };
    continuous.lag_seconds = known.or_else(|| last.map(since));
    let newest = etcd_revision.zip(*revision);
    continuous.lag_revisions = newest.map(|(newest, stored)| newest.saturating_sub(stored).max(0));
    continuous.base = base.as_ref().map(base_of);
    if let Some(held) = held {
        hold(continuous, held);
    }
}

fn base_of(base: &BaseProgress) -> ContinuousBase {
    ContinuousBase {
        revision: base.revision,
        time: time(base.created),
        cluster_id: Some(base.cluster_id.clone()),
        segments: number(base.segments),
        bytes: number(base.bytes),
    }
}

fn hold(continuous: &mut ContinuousStatus, held: &Held) {
    continuous.bases = number(held.bases);
    continuous.oldest_revision = Some(held.oldest_revision);
    continuous.oldest_time = time(held.oldest_time);
    continuous.gap_count = number(held.gap_count);
    continuous.gaps = held.gaps.iter().map(gap_of).collect();
}

fn gap_of(gap: &Missing) -> ContinuousGap {
    ContinuousGap {
        after_revision: gap.after,
        until_revision: gap.until,
        until_time: time(gap.until_time),
        cluster_changed: gap.cluster_changed,
    }
}

/// The condition after a report. The message contains no numbers that change with each report.
fn judge(continuous: &ContinuousStatus, progress: &Progress) -> Finding {
    match (continuous.lag_seconds, progress.problem.as_deref()) {
        (Some(lag), _) if lag <= MAX_LAG => {
            let gaps = continuous.gap_count.unwrap_or_default();
            let mut message = if gaps == 0 {
                RECORDS.to_owned()
            } else {
                format!("{RECORDS}; number of gaps in the store: {gaps} (status.continuous.gaps)")
            };
            if let Some(problem) = &progress.retention_problem {
                message = format!("{message}; {problem}");
            }
            finding(ConditionStatus::True, Reason::Recording, &message)
        }
        (None, None) => finding(ConditionStatus::Unknown, Reason::Pending, FIRST),
        (_, problem) => {
            let problem = problem.unwrap_or("the agent reports no problem; read its log");
            let message = format!("changes older than {MAX_LAG} s are not stored yet: {problem}");
            finding(ConditionStatus::False, Reason::RecordingDelayed, &message)
        }
    }
}

/// The Events about the agent. `after` is the status after this reconcile.
pub(super) fn notices(
    backup: &EtcdBackup,
    verdict: &RecordingVerdict,
    after: &EtcdBackupStatus,
) -> Vec<Notice> {
    const ACTION: &str = "Record";
    let (report, obstacle) = match verdict {
        RecordingVerdict::Unchanged | RecordingVerdict::Off => return Vec::new(),
        RecordingVerdict::Waiting(trouble) if is_expected(trouble) => return Vec::new(),
        RecordingVerdict::Waiting(trouble) => {
            let reason = trouble.reason.of_event().as_str();
            return vec![Notice::warning(reason, ACTION, trouble.message.clone())];
        }
        RecordingVerdict::Reported {
            report, obstacle, ..
        } => (report, obstacle),
    };
    let mut notices = Vec::new();
    if let Some(trouble) = obstacle {
        let reason = trouble.reason.of_event().as_str();
        notices.push(Notice::warning(reason, ACTION, not_applied(trouble)));
    }
    let recording = ConditionType::Recording;
    let found = api::conditions::find(&after.conditions, &recording);
    match found.map(|condition| condition.status.as_str()) {
        Some("True") if !is_true(backup.conditions(), &recording) => {
            notices.push(Notice::normal(Reason::Recording.as_str(), ACTION, RECORDS));
        }
        Some("False") => {
            let message = found.map(|condition| condition.message.clone());
            let reason = Reason::RecordingDelayed.as_str();
            notices.push(Notice::warning(reason, ACTION, message.unwrap_or_default()));
        }
        _ => {}
    }
    let known = backup
        .status
        .as_ref()
        .and_then(|status| status.continuous.as_ref());
    let known = known.map(|continuous| continuous.gaps.as_slice());
    let held = report.progress.held.as_ref();
    for gap in held.iter().flat_map(|held| &held.gaps) {
        let gap = gap_of(gap);
        if !known.unwrap_or_default().contains(&gap) {
            notices.push(Notice::warning(
                Reason::ChangesMissing.as_str(),
                ACTION,
                format!(
                    "changes after revision {} and before the base of revision {} are missing in the store{}",
                    gap.after_revision,
                    gap.until_revision,
                    if gap.cluster_changed {
                        ", because the cluster ID has changed"
                    } else {
                        ""
                    }
                ),
            ));
        }
    }
    notices
}

#[cfg(test)]
mod tests;
