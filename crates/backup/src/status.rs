//! The status from what was found and decided. Pure; the time is passed in.

use api::backup::{Progress, StoredBackup, not_in_effect};
use api::conditions::{ConditionStatus, ConditionType, Finding, find, set};
use api::{EtcdBackup, EtcdBackupStatus};
use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use runtime::Notice;

use crate::plan::{Action, Plan, Verdict, rules};
use crate::reason::Reason;
use crate::snapshot::{Kept, Moved, Stored};

/// As many kept backups as the status lists.
const LISTED: usize = 10;

/// The whole status after this round.
pub fn status(backup: &EtcdBackup, plan: &Plan, now: Timestamp) -> EtcdBackupStatus {
    let mut status = backup.status.clone().unwrap_or_default();
    // An object keeps times to the second.
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
    match &plan.verdict {
        Verdict::Settled => return status,
        Verdict::Refused(trouble) => {
            status.succeeded = false;
            status.reason = Some(trouble.message.clone());
            status.progress = None;
            take_back(&mut status);
        }
        Verdict::Begun | Verdict::Queued => status.reason = None,
        Verdict::Scheduled(_) | Verdict::Untidy(_) => {}
        Verdict::Suspended => take_back(&mut status),
        Verdict::Tidied(kept) => status.backups = listed(&status, kept),
        Verdict::Running(moved) => {
            status.reason = None;
            // Until the member has said it again: by it the time allowed is known.
            let known = status
                .progress
                .as_ref()
                .and_then(|before| before.total_bytes);
            let moved = progress(*moved);
            status.progress = Some(Progress {
                total_bytes: moved.total_bytes.or(known),
                ..moved
            });
        }
        Verdict::Waiting(trouble) | Verdict::Ending(trouble) => {
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
    status.observed_generation = backup.metadata.generation;
    for finding in findings(backup, &status, &plan.verdict) {
        set(
            &mut status.conditions,
            &finding,
            backup.metadata.generation,
            &now,
        );
    }
    status
}

/// What had begun with another spec is not what begins once this one is put right or resumed.
fn take_back(status: &mut EtcdBackupStatus) {
    if status.completion_time.is_none() {
        status.start_time = None;
        status.unfinished_attempts = None;
    }
}

fn progress(moved: Moved) -> Progress {
    let signed = |bytes| i64::try_from(bytes).unwrap_or(i64::MAX);
    Progress {
        bytes: signed(moved.bytes),
        total_bytes: moved.total.map(signed),
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
    status.sha256 = Some(stored.sha256.clone());
    status.last_success_date = Some(Time(stored.created_at));
    status.completion_time = Some(now.clone());
    status.unfinished_attempts = None;
    status.progress = Some(Progress {
        bytes: stored.size,
        total_bytes: Some(stored.size),
    });
    if !backup.spec.is_periodic() {
        status.backups = vec![newest(status)];
    } else if rules(backup).is_none() {
        // Nothing is ever removed. With rules the list is written when they have been applied, and by that it is
        // known that they were.
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
        completion_time: status.last_success_date.clone(),
    }
}

/// The newest as the status has it, and what the store holds beside it. A name tells less than a manifest: what was
/// known before is kept.
fn listed(status: &EtcdBackupStatus, kept: &Kept) -> Vec<StoredBackup> {
    let newest = newest(status);
    let mut listed = vec![newest.clone()];
    for found in &kept.backups {
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

/// What is said while a backup is being made.
const MADE: &str = "a backup is being made";

/// What is said while it is not its turn.
const QUEUED: &str =
    "the backup waits for its turn: as many others are being transferred as may at a time";

fn findings(backup: &EtcdBackup, status: &EtcdBackupStatus, verdict: &Verdict) -> Vec<Finding> {
    let complete = |holds: bool, reason: Reason, message: String| {
        Finding::new(ConditionType::Complete, holds, reason.into(), message)
    };
    let failed = |holds: bool, reason: Reason, message: String| {
        Finding::new(ConditionType::Failed, holds, reason.into(), message)
    };
    let nothing_failed = |reason| failed(false, reason, "nothing has failed".to_owned());
    let going_on = || nothing_failed(Reason::InProgress);
    let tidy = |holds: bool, reason: Reason, message: String| {
        let kind = ConditionType::RetentionApplied;
        Finding::new(kind, holds, reason.into(), message)
    };
    // Of a periodic backup the conditions say how the last one went until the next one has ended.
    let told =
        backup.spec.is_periodic() && find(&status.conditions, &ConditionType::Complete).is_some();
    let shown = backup.spec.is_periodic()
        || find(&status.conditions, &ConditionType::Progressing).is_some();
    let mut findings = match verdict {
        Verdict::Settled => return Vec::new(),
        Verdict::Begun | Verdict::Queued | Verdict::Running(_) if told => Vec::new(),
        Verdict::Scheduled(time) => vec![match time {
            Some(time) => {
                let message = format!("the next backup is due at {time}");
                progressing(false, Reason::Scheduled, &message)
            }
            None => progressing(
                false,
                Reason::Scheduled,
                "the schedule names no time to come",
            ),
        }],
        Verdict::Suspended => vec![progressing(
            false,
            Reason::Suspended,
            "no new backups are made while spec.backupPolicy.suspend is true",
        )],
        Verdict::Tidied(kept) => {
            let message = format!("{} backups are kept", kept.backups.len());
            vec![tidy(true, Reason::AsDesired, message)]
        }
        Verdict::Untidy(trouble) => {
            vec![tidy(false, trouble.reason, trouble.message.clone())]
        }
        Verdict::Ending(trouble) => {
            let message = format!(
                "the stored backups cannot be removed yet: {}; or set spec.deletionPolicy to Retain",
                trouble.message
            );
            vec![tidy(false, trouble.reason, message)]
        }
        Verdict::Queued => vec![
            complete(false, Reason::Pending, QUEUED.to_owned()),
            going_on(),
        ],
        Verdict::Begun => vec![
            complete(false, Reason::Pending, "the backup begins".to_owned()),
            going_on(),
        ],
        Verdict::Running(_) => vec![
            complete(false, Reason::InProgress, MADE.to_owned()),
            going_on(),
        ],
        Verdict::Waiting(trouble) => {
            let waits = complete(false, trouble.reason, trouble.message.clone());
            // Whether the last one failed is said until the next one has ended.
            let others = (!told).then(going_on);
            [waits].into_iter().chain(others).collect()
        }
        Verdict::Succeeded(stored) => {
            let message = format!("revision {} lies at {}", stored.revision, stored.location);
            vec![
                complete(true, Reason::Succeeded, message),
                nothing_failed(Reason::Succeeded),
            ]
        }
        Verdict::Refused(trouble) | Verdict::Failed(trouble) => vec![
            complete(false, trouble.reason, trouble.message.clone()),
            failed(true, trouble.reason, trouble.message.clone()),
        ],
    };
    match verdict {
        Verdict::Queued if shown => {
            findings.push(progressing(true, Reason::Pending, QUEUED));
        }
        Verdict::Begun | Verdict::Running(_) | Verdict::Waiting(_) if shown => {
            findings.push(progressing(true, Reason::InProgress, MADE));
        }
        Verdict::Succeeded(_) | Verdict::Refused(_) | Verdict::Failed(_) if shown => {
            findings.push(progressing(
                false,
                Reason::AsDesired,
                "nothing is being done",
            ));
        }
        _ => {}
    }
    findings.push(in_effect(backup));
    findings
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

/// What is said of a store whose certificate is not checked.
const UNCHECKED: &str = "spec.s3.insecureSkipVerify: whoever sits between the operator and the store can read the \
                         credentials' requests and change what is stored; set caSecret instead";

/// What the user is told in Events about this round.
pub fn notices(backup: &EtcdBackup, plan: &Plan) -> Vec<Notice> {
    const ACTION: &str = "Backup";
    let mut notices = Vec::new();
    if plan.action == Action::RecordIntent {
        let effect = in_effect(backup);
        if effect.status == ConditionStatus::False {
            notices.push(Notice::warning(
                Reason::NotYetInEffect.as_str(),
                ACTION,
                effect.message,
            ));
        }
        if backup
            .spec
            .s3
            .as_ref()
            .is_some_and(|s3| s3.insecure_skip_verify)
        {
            notices.push(Notice::warning(
                Reason::CertificateNotChecked.as_str(),
                ACTION,
                UNCHECKED,
            ));
        }
    }
    match &plan.verdict {
        Verdict::Begun if plan.action == Action::StartTransfer => notices.push(Notice::normal(
            Reason::BackupBegun.as_str(),
            ACTION,
            "the backup has begun",
        )),
        Verdict::Tidied(kept) if kept.deleted > 0 => notices.push(Notice::normal(
            Reason::BackupsRemoved.as_str(),
            ACTION,
            format!(
                "{} old backups were removed, {} are kept",
                kept.deleted,
                kept.backups.len()
            ),
        )),
        Verdict::Settled
        | Verdict::Running(_)
        | Verdict::Begun
        | Verdict::Queued
        | Verdict::Scheduled(_)
        | Verdict::Suspended
        | Verdict::Tidied(_) => {}
        Verdict::Untidy(trouble) | Verdict::Ending(trouble) => notices.push(Notice::warning(
            Reason::RemovalFailed.as_str(),
            ACTION,
            format!("stored backups cannot be removed: {}", trouble.message),
        )),
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
                "revision {} ({} bytes) lies at {}",
                stored.revision, stored.size, stored.location
            ),
        )),
    }
    notices
}
