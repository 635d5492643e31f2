//! The part of the status that reports the copies of the stored backups. Performs no I/O.

use api::backup::{BackupCopy, CopyStatus, EtcdBackupSpec};
use api::conditions::{ConditionStatus, ConditionType, Finding, find, set};
use api::{EtcdBackup, EtcdBackupStatus};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use runtime::Notice;

use crate::plan::copies::{has_newest, record as record_of};
use crate::plan::{CopiesPlan, CopyVerdict};
use crate::reason::{Reason, Trouble};
use crate::snapshot::Copied;

/// Writes the verdicts to the status.
pub(super) fn record(
    backup: &EtcdBackup,
    status: &mut EtcdBackupStatus,
    plan: &CopiesPlan,
    now: &Time,
) {
    if plan.is_unchanged() {
        return;
    }
    let spec = &backup.spec;
    status
        .copies
        .retain(|record| spec.copy_to.iter().any(|copy| copy.name == record.name));
    for (copy, planned) in spec.copy_to.iter().zip(&plan.copies) {
        let record = match &planned.verdict {
            CopyVerdict::Unchanged => continue,
            verdict => recorded(record_of(status, copy), copy, verdict, now),
        };
        status.copies.retain(|old| old.name != copy.name);
        status.copies.push(record);
    }
    let place = |record: &CopyStatus| {
        spec.copy_to
            .iter()
            .position(|copy| copy.name == record.name)
    };
    status.copies.sort_by_key(place);
    let generation = backup.metadata.generation;
    match finding(spec, status) {
        Some(finding) => {
            set(&mut status.conditions, &finding, generation, now);
        }
        None if spec.copy_to.is_empty() => {
            let copied = ConditionType::Copied;
            status
                .conditions
                .retain(|condition| condition.type_ != copied.as_str());
        }
        None => {}
    }
}

/// The entry of `status.copies` for `copy`, after the verdict.
fn recorded(
    old: Option<&CopyStatus>,
    copy: &BackupCopy,
    verdict: &CopyVerdict,
    now: &Time,
) -> CopyStatus {
    let old = old.cloned().unwrap_or_else(|| CopyStatus {
        name: copy.name.clone(),
        ..CopyStatus::default()
    });
    let next = old.attempts.unwrap_or_default().saturating_add(1);
    let now = Some(now.clone());
    match verdict {
        CopyVerdict::Unchanged => old,
        CopyVerdict::Starting => CopyStatus {
            attempts: Some(next),
            last_attempt_time: now,
            ..old
        },
        CopyVerdict::Blocked(trouble) => CopyStatus {
            error: Some(trouble.message.clone()),
            attempts: Some(next),
            last_attempt_time: now,
            ..old
        },
        CopyVerdict::Failed(trouble) => CopyStatus {
            error: Some(trouble.message.clone()),
            last_attempt_time: now,
            ..old
        },
        CopyVerdict::Copied(copied) => {
            let Copied { stored, problem } = copied.as_ref();
            let is_known = old.location.as_deref() == Some(stored.location.as_str())
                && old.sha256.as_deref() == Some(stored.sha256.as_str());
            // After a problem, the operator retries, so the status keeps the number of attempts.
            let failed = problem.is_some();
            CopyStatus {
                location: Some(stored.location.clone()),
                etcd_revision: Some(stored.revision),
                sha256: Some(stored.sha256.clone()),
                backup_time: Some(Time(stored.created_at)),
                completion_time: old.completion_time.filter(|_| is_known).or(now.clone()),
                error: problem.as_ref().map(|trouble| trouble.message.clone()),
                attempts: old.attempts.filter(|_| failed),
                last_attempt_time: now.filter(|_| failed),
                name: old.name,
            }
        }
    }
}

/// The condition `Copied`. `None` if the condition does not change: while the next backup is copied, the condition
/// reports the previous backup.
fn finding(spec: &EtcdBackupSpec, status: &EtcdBackupStatus) -> Option<Finding> {
    if spec.copy_to.is_empty() {
        return None;
    }
    let finding = |status: ConditionStatus, reason: Reason, message: String| {
        Finding::new(ConditionType::Copied, status, reason.into(), message)
    };
    let failed: Vec<String> = status
        .copies
        .iter()
        .filter_map(|record| Some(format!("copy {}: {}", record.name, record.error.as_ref()?)))
        .collect();
    if !failed.is_empty() {
        let message = failed.join("; ");
        return Some(finding(ConditionStatus::False, Reason::CopyFailed, message));
    }
    let is_complete = |copy: &BackupCopy| has_newest(spec, status, copy) == Some(true);
    if spec.copy_to.iter().all(is_complete) {
        let places: Vec<&str> = status
            .copies
            .iter()
            .filter_map(|record| record.location.as_deref())
            .collect();
        let revision = status.etcd_revision.unwrap_or_default();
        let message = format!("revision {revision} is copied to {}", places.join(", "));
        return Some(finding(
            ConditionStatus::True,
            Reason::BackupCopied,
            message,
        ));
    }
    let old = find(&status.conditions, &ConditionType::Copied);
    // No copy has a problem, but a store lacks the newest backup. A condition `Copied` that is True or Unknown stays
    // unchanged. If the condition is False or missing, it becomes Unknown.
    if old.is_some_and(|old| old.status != "False") {
        return None;
    }
    let missing = spec.copy_to.iter().filter(|copy| !is_complete(copy));
    let names: Vec<&str> = missing.map(|copy| copy.name.as_str()).collect();
    let message = format!(
        "the newest backup is not copied yet to: {}",
        names.join(", ")
    );
    Some(finding(ConditionStatus::Unknown, Reason::Copying, message))
}

/// The Events of copies that have ended.
pub(super) fn notices(backup: &EtcdBackup, plan: &CopiesPlan) -> Vec<Notice> {
    let copies = backup.spec.copy_to.iter().zip(&plan.copies);
    let notices = copies.filter_map(|(copy, planned)| match &planned.verdict {
        CopyVerdict::Unchanged | CopyVerdict::Starting => None,
        CopyVerdict::Failed(trouble) | CopyVerdict::Blocked(trouble) => Some(failed(copy, trouble)),
        CopyVerdict::Copied(result) => match &result.problem {
            Some(trouble) => Some(failed(copy, trouble)),
            None => Some(Notice::normal(
                Reason::BackupCopied.as_str(),
                ACTION,
                format!(
                    "copy {}: revision {} is stored at {}",
                    copy.name, result.stored.revision, result.stored.location
                ),
            )),
        },
    });
    notices.collect()
}

const ACTION: &str = "Copy";

fn failed(copy: &BackupCopy, trouble: &Trouble) -> Notice {
    let message = format!("copy {}: {}", copy.name, trouble.message);
    Notice::warning(Reason::CopyFailed.as_str(), ACTION, message)
}
