//! Computes the status and the Events from the plan. Performs no I/O.

use api::backup::{Progress, StoredBackup, not_in_effect};
use api::conditions::{self, ConditionStatus, ConditionType, Finding, find, is_true, set};
use api::display;
use api::duration::DurationText;
use api::readiness::{Readiness, set_readiness};
use api::{EtcdBackup, EtcdBackupStatus};
use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use runtime::Notice;

use crate::plan::{Action, Plan, RecordingVerdict, Verdict, VerificationVerdict, rules};
use crate::reason::Reason;
use crate::snapshot::{RemovalResult, Stored};

mod copies;
mod recording;
mod verification;

/// Maximum number of entries in `status.backups`.
const LISTED: usize = 10;

/// Computes the complete status after this reconcile.
pub fn status(backup: &EtcdBackup, plan: &Plan, now: Timestamp) -> EtcdBackupStatus {
    let mut status = backup.status.clone().unwrap_or_default();
    // The time is rounded down, because Kubernetes stores the times in the status in whole seconds.
    let now = Time(Timestamp::from_second(now.as_second()).unwrap_or(now));
    match plan.action {
        Action::RecordIntent => {
            status.start_time = Some(now.clone());
            status.completion_time = None;
            status.progress = None;
            status.unfinished_attempts = None;
        }
        Action::RecordAttempts(count) => {
            status.unfinished_attempts = Some(count).filter(|count| *count > 0);
        }
        _ => {}
    }
    let generation = backup.metadata.generation;
    verification::record(&mut status, &plan.verification.verdict, generation, &now);
    copies::record(backup, &mut status, &plan.copies, &now);
    recording::record(&mut status, &plan.recording.verdict, generation, &now);
    if plan.verdict == Verdict::Unchanged && is_complete(backup) {
        observe_generation(backup, &mut status, &now);
    }
    match &plan.verdict {
        Verdict::Unchanged
            if plan.verification.verdict == VerificationVerdict::Unchanged
                && plan.copies.is_unchanged()
                && plan.recording.verdict == RecordingVerdict::Unchanged =>
        {
            return status;
        }
        Verdict::Refused(trouble) => {
            status.succeeded = false;
            status.reason = Some(trouble.message.clone());
            status.progress = None;
            discard_start(&mut status);
        }
        Verdict::Starting | Verdict::Queued => status.reason = None,
        Verdict::Unchanged | Verdict::Scheduled(_) | Verdict::RetentionFailed(_) => {}
        Verdict::Suspended => discard_start(&mut status),
        Verdict::RetentionApplied(result) => status.backups = listed(&status, result),
        Verdict::Running(moved) => {
            status.reason = None;
            // Until this attempt reports the size of the database, the status keeps the last known size, because the
            // deadline depends on the size.
            let known = status
                .progress
                .as_ref()
                .and_then(|progress| progress.total_bytes);
            let signed = |bytes| i64::try_from(bytes).unwrap_or(i64::MAX);
            let total = moved.total.map(signed).or(known);
            status.progress = Some(Progress::new(signed(moved.bytes), total));
        }
        Verdict::Waiting(trouble) | Verdict::DeletionBlocked(trouble) => {
            status.reason = Some(trouble.message.clone());
        }
        Verdict::Succeeded(stored) => succeed(backup, &mut status, stored, &now),
        Verdict::Failed(trouble) => {
            status.succeeded = false;
            status.reason = Some(trouble.message.clone());
            status.completion_time = Some(now.clone());
            status.unfinished_attempts = None;
        }
    }
    status.cluster = backup.spec.cluster_text();
    status.schedule = backup.spec.schedule_text();
    if !matches!(plan.verdict, Verdict::RetentionApplied(_)) {
        status.next_backup_time = plan.next_run.map(Time);
    }
    if plan.verdict != Verdict::Unchanged {
        status.observed_generation = generation;
    }
    for finding in findings(backup, &status, &plan.verdict) {
        set(&mut status.conditions, &finding, generation, &now);
    }
    let (readiness, reason, message) = readiness(backup, &status.conditions, &plan.verdict);
    let text = (reason, message.as_str());
    set_readiness(&mut status.conditions, readiness, text, generation, &now);
    status
}

/// True if a backup that is not periodic is complete. A later change of its spec starts no new backup.
fn is_complete(backup: &EtcdBackup) -> bool {
    let succeeded = backup.status.as_ref().is_some_and(|it| it.succeeded);
    succeeded && !backup.spec.is_periodic() && backup.metadata.deletion_timestamp.is_none()
}

/// Reports that the operator has processed the changed spec. Without this report, `kubectl wait` would wait for this
/// generation forever.
fn observe_generation(backup: &EtcdBackup, status: &mut EtcdBackupStatus, now: &Time) {
    let generation = backup.metadata.generation;
    if status.observed_generation == generation {
        return;
    }
    status.observed_generation = generation;
    for condition in &mut status.conditions {
        condition.observed_generation = generation;
    }
    set(&mut status.conditions, &in_effect(backup), generation, now);
}

/// Computes the condition `Ready` from `conditions`. A periodic EtcdBackup is ready before and during its first backup.
fn readiness(
    backup: &EtcdBackup,
    conditions: &[Condition],
    verdict: &Verdict,
) -> (Readiness, conditions::Reason, String) {
    let holds = |kind: ConditionType, status_text: &str| {
        let found = find(conditions, &kind);
        let found = found.filter(|condition| condition.status == status_text);
        found.map(|condition| {
            let reason = conditions::Reason::from(condition.reason.as_str());
            (reason, condition.message.clone())
        })
    };
    let periodic = backup.spec.is_periodic();
    if let Some((reason, message)) = holds(ConditionType::Failed, "True") {
        // A periodic EtcdBackup is not stalled after a failed backup, because its next backup is a retry. With a
        // rejected spec, it is stalled until a user corrects the spec.
        let retries = periodic && !matches!(verdict, Verdict::Refused(_));
        let readiness = if retries {
            Readiness::Reconciling
        } else {
            Readiness::Stalled
        };
        return (readiness, reason, message);
    }
    if let Verdict::Waiting(trouble) = verdict {
        return (
            Readiness::Reconciling,
            trouble.reason.into(),
            trouble.message.clone(),
        );
    }
    if let Some((reason, message)) = holds(ConditionType::Verified, "False") {
        return (Readiness::Stalled, reason, message);
    }
    if let Some((reason, message)) = holds(ConditionType::Recording, "False") {
        return (Readiness::Reconciling, reason, message);
    }
    let retention = holds(ConditionType::RetentionApplied, "False");
    if let Some((reason, message)) = retention.or_else(|| holds(ConditionType::Copied, "False")) {
        return (Readiness::Reconciling, reason, message);
    }
    let complete = holds(ConditionType::Complete, "True");
    if periodic {
        // `Progressing` reports whether a backup runs, is queued or is scheduled. Directly after a backup, the reason
        // of `Progressing` is `AsDesired`, and `Ready` gets the message of `Complete`.
        let progress = find(conditions, &ConditionType::Progressing)
            .filter(|condition| condition.reason != Reason::AsDesired.as_str())
            .map(|condition| {
                let reason = conditions::Reason::from(condition.reason.as_str());
                (reason, condition.message.clone())
            });
        let (reason, message) = progress
            .or(complete)
            .unwrap_or_else(|| (Reason::Pending.into(), STARTING.to_owned()));
        return (Readiness::Ready, reason, message);
    }
    match (complete, holds(ConditionType::Complete, "False")) {
        (Some((reason, message)), _) => (Readiness::Ready, reason, message),
        (None, Some((reason, message))) => (Readiness::Reconciling, reason, message),
        (None, None) => (
            Readiness::Reconciling,
            Reason::Pending.into(),
            STARTING.to_owned(),
        ),
    }
}

/// Deletes the recorded start of an unfinished backup. After the user has corrected the spec or resumed the backups,
/// the operator records a new start.
fn discard_start(status: &mut EtcdBackupStatus) {
    if status.completion_time.is_none() {
        status.start_time = None;
        status.unfinished_attempts = None;
    }
}

fn succeed(backup: &EtcdBackup, status: &mut EtcdBackupStatus, stored: &Stored, now: &Time) {
    status.succeeded = true;
    status.reason = None;
    status.etcd_version = Some(stored.etcd_version.clone());
    status.etcd_revision = Some(stored.revision);
    status.cluster_id = Some(stored.cluster_id.clone());
    status.location = Some(stored.location.clone());
    status.size = Some(stored.size);
    status.size_text = u64::try_from(stored.size).ok().map(display::bytes);
    status.duration = status.start_time.as_ref().map(|begun| {
        let took = now.0.duration_since(begun.0);
        DurationText(display::duration(took.as_secs()))
    });
    status.sha256 = Some(stored.sha256.clone());
    status.keys = stored.keys;
    status.encryption_key.clone_from(&stored.encryption_key);
    status.last_success_date = Some(Time(stored.created_at));
    status.completion_time = Some(now.clone());
    status.unfinished_attempts = None;
    status.progress = Some(Progress::new(stored.size, Some(stored.size)));
    if !backup.spec.is_periodic() {
        status.backups = vec![newest(status)];
    } else if rules(backup).is_none() {
        // Without retention rules, no removal writes `status.backups`, so this function adds the new backup.
        let newest = newest(status);
        status
            .backups
            .retain(|kept| kept.location != newest.location);
        status.backups.insert(0, newest);
        status.backups.truncate(LISTED);
    }
}

fn newest(status: &EtcdBackupStatus) -> StoredBackup {
    StoredBackup {
        location: status.location.clone().unwrap_or_default(),
        etcd_revision: status.etcd_revision,
        size: status.size,
        sha256: status.sha256.clone(),
        encryption_key: status.encryption_key.clone(),
        completion_time: status.last_success_date.clone(),
    }
}

/// The newest backup, followed by the kept backups from the store. The entry of a backup in the status is kept, because
/// it contains more than the name of the object.
fn listed(status: &EtcdBackupStatus, result: &RemovalResult) -> Vec<StoredBackup> {
    let newest = newest(status);
    let mut listed = vec![newest.clone()];
    for found in &result.backups {
        let known = status
            .backups
            .iter()
            .find(|known| known.location == found.location);
        let backup = known.cloned().unwrap_or_else(|| StoredBackup {
            location: found.location.clone(),
            etcd_revision: i64::try_from(found.parts.revision).ok(),
            completion_time: Some(Time(found.parts.time)),
            ..StoredBackup::default()
        });
        if backup.location != newest.location && listed.len() < LISTED {
            listed.push(backup);
        }
    }
    listed
}

const IN_PROGRESS: &str = "a backup is in progress";

const STARTING: &str = "the backup is starting";

const QUEUED: &str = "the backup is queued: a limit of concurrent transfers is reached (the total limit, or the limit for \
                      this namespace or this store). The administrator sets the limits with backups.transfers of the \
                      chart";

fn findings(backup: &EtcdBackup, status: &EtcdBackupStatus, verdict: &Verdict) -> Vec<Finding> {
    let complete = |holds: bool, reason: Reason, message: String| {
        Finding::new(ConditionType::Complete, holds, reason.into(), message)
    };
    let failed = |holds: bool, reason: Reason, message: String| {
        Finding::new(ConditionType::Failed, holds, reason.into(), message)
    };
    let not_failed = |reason| failed(false, reason, "the backup has not failed".to_owned());
    let in_progress = || not_failed(Reason::InProgress);
    let retention = |holds: bool, reason: Reason, message: String| {
        let kind = ConditionType::RetentionApplied;
        Finding::new(kind, holds, reason.into(), message)
    };
    // While the next backup of a periodic EtcdBackup runs, `Complete` and `Failed` keep the result of the previous
    // backup. If neither condition is True, there is no previous result.
    let has_outcome = backup.spec.is_periodic()
        && [ConditionType::Complete, ConditionType::Failed]
            .iter()
            .any(|kind| is_true(&status.conditions, kind));
    let has_progressing = backup.spec.is_periodic()
        || find(&status.conditions, &ConditionType::Progressing).is_some();
    let mut findings = match verdict {
        Verdict::Unchanged => return Vec::new(),
        Verdict::Starting | Verdict::Queued | Verdict::Running(_) if has_outcome => Vec::new(),
        Verdict::Scheduled(time) => {
            let never = "spec.backupPolicy.schedule has no time in the future".to_owned();
            let message = time.map_or(never, |time| format!("the next backup is due at {time}"));
            vec![progressing(false, Reason::Scheduled, &message)]
        }
        Verdict::Suspended => vec![progressing(
            false,
            Reason::Suspended,
            "the operator takes no backups while spec.backupPolicy.suspend is true",
        )],
        Verdict::RetentionApplied(result) => {
            let message = format!("{} backups are kept", result.backups.len());
            vec![retention(true, Reason::AsDesired, message)]
        }
        Verdict::RetentionFailed(trouble) => {
            vec![retention(false, trouble.reason, trouble.message.clone())]
        }
        Verdict::DeletionBlocked(trouble) => {
            let message = format!(
                "the stored backups cannot be removed yet: {}. To keep the backups, set spec.deletionPolicy to Retain",
                trouble.message
            );
            vec![retention(false, trouble.reason, message)]
        }
        Verdict::Queued => vec![
            complete(false, Reason::Pending, QUEUED.to_owned()),
            in_progress(),
        ],
        Verdict::Starting => vec![
            complete(false, Reason::Pending, STARTING.to_owned()),
            in_progress(),
        ],
        Verdict::Running(_) => vec![
            complete(false, Reason::InProgress, IN_PROGRESS.to_owned()),
            in_progress(),
        ],
        Verdict::Waiting(trouble) => {
            let waits = complete(false, trouble.reason, trouble.message.clone());
            let others = (!has_outcome).then(in_progress);
            [waits].into_iter().chain(others).collect()
        }
        Verdict::Succeeded(stored) => {
            let message = format!(
                "revision {} is stored at {}",
                stored.revision, stored.location
            );
            vec![
                complete(true, Reason::Succeeded, message),
                not_failed(Reason::Succeeded),
            ]
        }
        Verdict::Refused(trouble) | Verdict::Failed(trouble) => vec![
            complete(false, trouble.reason, trouble.message.clone()),
            failed(true, trouble.reason, trouble.message.clone()),
        ],
    };
    findings.extend(progress_of(status, verdict).filter(|_| has_progressing));
    findings.push(in_effect(backup));
    findings
}

/// The condition `Progressing` for the backup in progress, or after its end. `None` if the verdict is not about a
/// backup.
fn progress_of(status: &EtcdBackupStatus, verdict: &Verdict) -> Option<Finding> {
    Some(match verdict {
        Verdict::Queued => progressing(true, Reason::Pending, QUEUED),
        Verdict::Starting => progressing(true, Reason::Pending, STARTING),
        Verdict::Running(_) => progressing(true, Reason::InProgress, IN_PROGRESS),
        Verdict::Waiting(trouble) => {
            let newest = match &status.last_success_date {
                Some(time) => format!("the newest backup is from {}", time.0),
                None => "no backup exists yet".to_owned(),
            };
            let message = format!("{}; {newest}", trouble.message);
            progressing(true, trouble.reason, &message)
        }
        Verdict::Succeeded(_) | Verdict::Refused(_) | Verdict::Failed(_) => {
            progressing(false, Reason::AsDesired, "no backup is in progress")
        }
        _ => return None,
    })
}

fn progressing(holds: bool, reason: Reason, message: &str) -> Finding {
    Finding::new(ConditionType::Progressing, holds, reason.into(), message)
}

fn in_effect(backup: &EtcdBackup) -> Finding {
    let ignored = not_in_effect(&backup.spec);
    if ignored.is_empty() {
        let message = "every field of the spec is in effect";
        return Finding::new(
            ConditionType::FieldsInEffect,
            true,
            Reason::AllInEffect.into(),
            message,
        );
    }
    let message = format!("not in effect: {}", ignored.join(", "));
    Finding::new(
        ConditionType::FieldsInEffect,
        ConditionStatus::False,
        Reason::NotYetInEffect.into(),
        message,
    )
}

const UNVERIFIED: &str = "spec.s3.insecureSkipVerify: the certificate of the store is not verified, so an attacker on \
                          the network can read requests and change stored backups; set spec.s3.caSecret instead";

/// The Events of this reconcile.
pub fn notices(backup: &EtcdBackup, plan: &Plan) -> Vec<Notice> {
    const ACTION: &str = "Backup";
    let mut notices = Vec::new();
    notices.extend(verification::notice(
        backup.status.as_ref(),
        &plan.verification.verdict,
    ));
    notices.extend(copies::notices(backup, &plan.copies));
    if plan.recording.verdict != RecordingVerdict::Unchanged {
        // The notices do not contain the time, so the computation of this status can use any time.
        let after = status(backup, plan, Timestamp::UNIX_EPOCH);
        notices.extend(recording::notices(backup, &plan.recording.verdict, &after));
    }
    if plan.action == Action::RecordIntent {
        let effect = in_effect(backup);
        if effect.status == ConditionStatus::False {
            notices.push(Notice::warning(
                Reason::NotYetInEffect.as_str(),
                ACTION,
                effect.message,
            ));
        }
        let copies = backup.spec.copy_to.iter().map(|copy| &copy.s3);
        let mut stores = copies.chain([&backup.spec.s3]).flatten();
        if stores.any(|s3| s3.insecure_skip_verify) {
            notices.push(Notice::warning(
                Reason::CertificateNotChecked.as_str(),
                ACTION,
                UNVERIFIED,
            ));
        }
    }
    match &plan.verdict {
        Verdict::Starting if plan.action == Action::StartTransfer => notices.push(Notice::normal(
            Reason::BackupBegun.as_str(),
            ACTION,
            "the backup has started",
        )),
        Verdict::RetentionApplied(result) if result.deleted > 0 => notices.push(Notice::normal(
            Reason::BackupsRemoved.as_str(),
            ACTION,
            format!(
                "{} old backups were removed, {} are kept",
                result.deleted,
                result.backups.len()
            ),
        )),
        Verdict::Unchanged
        | Verdict::Running(_)
        | Verdict::Starting
        | Verdict::Queued
        | Verdict::Scheduled(_)
        | Verdict::Suspended
        | Verdict::RetentionApplied(_) => {}
        Verdict::RetentionFailed(trouble) | Verdict::DeletionBlocked(trouble) => {
            notices.push(Notice::warning(
                Reason::RemovalFailed.as_str(),
                ACTION,
                format!("stored backups cannot be removed: {}", trouble.message),
            ));
        }
        Verdict::Waiting(trouble) | Verdict::Refused(trouble) | Verdict::Failed(trouble) => {
            notices.push(Notice::warning(
                trouble.reason.of_event().as_str(),
                ACTION,
                trouble.message.clone(),
            ));
        }
        Verdict::Succeeded(stored) => notices.push(Notice::normal(
            Reason::BackupSucceeded.as_str(),
            ACTION,
            format!(
                "revision {} ({} bytes) is stored at {}",
                stored.revision, stored.size, stored.location
            ),
        )),
    }
    notices
}
