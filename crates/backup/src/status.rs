//! The status from what was found and decided. Pure; the time is passed in.

use api::backup::{Progress, StoredBackup, not_in_effect};
use api::conditions::{ConditionStatus, ConditionType, Finding, Reason, set};
use api::{EtcdBackup, EtcdBackupStatus};
use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use runtime::Notice;

use crate::observed::{Moved, Stored, Trouble};
use crate::plan::{Plan, Step, Verdict};

/// The whole status after this round.
pub fn status(backup: &EtcdBackup, plan: &Plan, now: Timestamp) -> EtcdBackupStatus {
    let mut status = backup.status.clone().unwrap_or_default();
    // An object keeps times to the second.
    let now = Time(Timestamp::from_second(now.as_second()).unwrap_or(now));
    if plan.step == Step::RecordIntent {
        status.start_time = Some(now.clone());
        status.completion_time = None;
        status.progress = None;
    }
    match &plan.verdict {
        Verdict::Settled => return status,
        Verdict::Refused(trouble) => {
            status.succeeded = false;
            status.reason = Some(trouble.message.clone());
            status.progress = None;
        }
        Verdict::Begun => status.reason = None,
        Verdict::Running(moved) => {
            status.reason = None;
            status.progress = Some(progress(*moved));
        }
        Verdict::Waiting(trouble) => status.reason = Some(trouble.message.clone()),
        Verdict::Succeeded(stored) => succeed(&mut status, stored, &now),
        Verdict::Failed(trouble) => {
            status.succeeded = false;
            status.reason = Some(trouble.message.clone());
            status.completion_time = Some(now.clone());
        }
    }
    status.observed_generation = backup.metadata.generation;
    for finding in findings(backup, &plan.verdict) {
        set(
            &mut status.conditions,
            &finding,
            backup.metadata.generation,
            &now,
        );
    }
    status
}

fn progress(moved: Moved) -> Progress {
    let signed = |bytes| i64::try_from(bytes).unwrap_or(i64::MAX);
    Progress {
        bytes: signed(moved.bytes),
        total_bytes: moved.total.map(signed),
    }
}

fn succeed(status: &mut EtcdBackupStatus, stored: &Stored, now: &Time) {
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
    status.progress = Some(Progress {
        bytes: stored.size,
        total_bytes: Some(stored.size),
    });
    status.backups = vec![StoredBackup {
        location: stored.location.clone(),
        etcd_revision: Some(stored.revision),
        size: Some(stored.size),
        sha256: Some(stored.sha256.clone()),
        completion_time: Some(Time(stored.created_at)),
    }];
}

fn findings(backup: &EtcdBackup, verdict: &Verdict) -> Vec<Finding> {
    let complete = |holds: bool, reason, message: String| {
        Finding::new(ConditionType::Complete, holds, reason, message)
    };
    let failed = |holds: bool, reason, message: String| {
        Finding::new(ConditionType::Failed, holds, reason, message)
    };
    let going_on = || failed(false, Reason::InProgress, String::new());
    let mut findings = match verdict {
        Verdict::Settled => return Vec::new(),
        Verdict::Begun => vec![complete(false, Reason::Pending, String::new()), going_on()],
        Verdict::Running(_) => vec![
            complete(false, Reason::InProgress, String::new()),
            going_on(),
        ],
        Verdict::Waiting(trouble) => vec![
            complete(false, trouble.reason.clone(), trouble.message.clone()),
            going_on(),
        ],
        Verdict::Succeeded(stored) => {
            let message = format!("revision {} lies at {}", stored.revision, stored.location);
            vec![
                complete(true, Reason::Succeeded, message),
                failed(false, Reason::Succeeded, String::new()),
            ]
        }
        Verdict::Refused(trouble) | Verdict::Failed(trouble) => vec![
            complete(false, trouble.reason.clone(), trouble.message.clone()),
            failed(true, trouble.reason.clone(), trouble.message.clone()),
        ],
    };
    findings.push(in_effect(backup));
    findings
}

fn in_effect(backup: &EtcdBackup) -> Finding {
    let ignored = not_in_effect(&backup.spec);
    if ignored.is_empty() {
        return Finding::new(ConditionType::FieldsInEffect, true, Reason::AllInEffect, "");
    }
    let mut message = format!("not in effect in this release: {}", ignored.join(", "));
    if backup.spec.is_periodic() {
        message.push_str("; one backup is made now, and it is not repeated");
    }
    Finding::new(
        ConditionType::FieldsInEffect,
        ConditionStatus::False,
        Reason::NotYetInEffect,
        message,
    )
}

/// What the user is told in Events about this round.
pub fn notices(backup: &EtcdBackup, plan: &Plan) -> Vec<Notice> {
    const ACTION: &str = "Backup";
    let mut notices = Vec::new();
    if plan.step == Step::RecordIntent {
        let effect = in_effect(backup);
        if effect.status == ConditionStatus::False {
            notices.push(Notice::warning("NotYetInEffect", ACTION, effect.message));
        }
    }
    match &plan.verdict {
        Verdict::Begun if plan.step == Step::Begin => notices.push(Notice::normal(
            "BackupBegun",
            ACTION,
            "the backup has begun",
        )),
        Verdict::Settled | Verdict::Running(_) | Verdict::Begun => {}
        Verdict::Waiting(trouble) | Verdict::Refused(trouble) | Verdict::Failed(trouble) => {
            notices.push(Notice::warning(
                named(&trouble.reason),
                ACTION,
                trouble.message.clone(),
            ));
        }
        Verdict::Succeeded(stored) => notices.push(Notice::normal(
            "BackupSucceeded",
            ACTION,
            format!(
                "revision {} ({} bytes) lies at {}",
                stored.revision, stored.size, stored.location
            ),
        )),
    }
    notices
}

/// The reasons a backup can have trouble for: few, since they label metrics.
fn named(reason: &Reason) -> &'static str {
    match reason {
        Reason::InvalidSpec => "InvalidSpec",
        Reason::NotSupported => "NotSupported",
        Reason::SecretMissing => "SecretMissing",
        Reason::BucketMissing => "BucketMissing",
        Reason::AccessDenied => "AccessDenied",
        Reason::StoreUnreachable => "StoreUnreachable",
        Reason::EtcdUnreachable => "EtcdUnreachable",
        Reason::ClusterMissing => "ClusterMissing",
        Reason::ChecksumMismatch => "ChecksumMismatch",
        Reason::SnapshotUnreadable => "SnapshotUnreadable",
        Reason::DeadlineExceeded => "DeadlineExceeded",
        _ => "StepFailed",
    }
}

/// The trouble of a round that could not be finished, for the object's own Event.
pub fn trouble_of(plan: &Plan) -> Option<&Trouble> {
    match &plan.verdict {
        Verdict::Waiting(trouble) | Verdict::Refused(trouble) | Verdict::Failed(trouble) => {
            Some(trouble)
        }
        _ => None,
    }
}
