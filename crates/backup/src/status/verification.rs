//! The part of the status that reports the verification of the newest backup. Performs no I/O.

use api::EtcdBackupStatus;
use api::backup::{VerificationStatus, VerifiedBackup};
use api::conditions::{ConditionStatus, ConditionType, Finding, set};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use runtime::Notice;

use crate::plan::{QUEUED, VerificationVerdict};
use crate::reason::Reason;
use crate::verification::Proof;

/// Separates the result of the last verification from the state of the next verification in the message of `Verified`.
const NEXT: &str = ". Next verification: ";

pub(super) fn record(
    status: &mut EtcdBackupStatus,
    verdict: &VerificationVerdict,
    generation: Option<i64>,
    now: &Time,
) {
    let finding = match verdict {
        VerificationVerdict::Off => {
            status.verification = None;
            status.last_verified = None;
            let verified = ConditionType::Verified;
            status
                .conditions
                .retain(|condition| condition.type_ != verified.as_str());
            return;
        }
        VerificationVerdict::Starting(location) => {
            start(status, location, now);
            // While the verification runs, the condition keeps the result of the previous verification.
            return;
        }
        VerificationVerdict::Waiting(why)
            if status.last_verified.is_none() && !is_failed(status) && !has_failures(status) =>
        {
            finding(ConditionStatus::Unknown, Reason::Verifying, why)
        }
        VerificationVerdict::Queued(location) => {
            queue(status, location, now);
            let waiting = VerificationVerdict::Waiting(QUEUED.to_owned());
            record(status, &waiting, generation, now);
            return;
        }
        // The condition keeps the result of the previous verification, and its message also contains the reason for the
        // wait.
        VerificationVerdict::Waiting(why) => {
            report_next(status, Some(why), generation);
            return;
        }
        VerificationVerdict::Unchanged => {
            // No verification is due. A queued verification without a failure is removed from the status, because a
            // change of the settings has made it unnecessary.
            let last = status.verification.take();
            status.verification =
                last.filter(|last| last.start_time.is_some() || last.failures.is_some());
            report_next(status, None, generation);
            return;
        }
        VerificationVerdict::Verified(proof) => {
            let begun = status.verification.take().unwrap_or_default();
            let seconds = begun
                .start_time
                .as_ref()
                .map(|start| now.0.duration_since(start.0).as_secs());
            let message = proven(&begun.location, proof);
            status.last_verified = Some(VerifiedBackup {
                location: begun.location,
                etcd_revision: Some(proof.revision),
                keys: proof.keys,
                keys_compared: proof.keys_compared,
                hash_compared: proof.hash_compared,
                backup_time: begun.backup_time,
                cluster_id: begun.cluster_id,
                time: Some(now.clone()),
                duration_seconds: seconds,
            });
            finding(ConditionStatus::True, Reason::BackupVerified, &message)
        }
        VerificationVerdict::Failed(failure) => {
            let begun = status.verification.take().unwrap_or_default();
            let message = failed(&begun.location, failure);
            let failures = begun.failures.unwrap_or_default().saturating_add(1);
            status.verification = Some(VerificationStatus {
                location: begun.location,
                backup_time: begun.backup_time,
                cluster_id: begun.cluster_id,
                due_time: begun.due_time,
                start_time: None,
                failures: Some(failures),
                last_failure_time: Some(now.clone()),
            });
            match (failure.damaged, is_failed(status)) {
                (true, _) => finding(ConditionStatus::False, Reason::VerificationFailed, &message),
                // This verification has no result, so the condition continues to report the backup that an earlier
                // verification could not restore.
                (false, true) => return,
                (false, false) => finding(
                    ConditionStatus::Unknown,
                    Reason::VerificationInconclusive,
                    &message,
                ),
            }
        }
    };
    set(&mut status.conditions, &finding, generation, now);
}

/// Records the start of the verification of the backup at `location`.
fn start(status: &mut EtcdBackupStatus, location: &str, now: &Time) {
    let last = status.verification.take().unwrap_or_default();
    status.verification = Some(VerificationStatus {
        location: location.to_owned(),
        // The time and the cluster ID of this backup are copied at the start. A newer backup may change both values in
        // the status before the verification ends.
        backup_time: status.last_success_date.clone(),
        cluster_id: status.cluster_id.clone(),
        due_time: last.due_time.or_else(|| Some(now.clone())),
        start_time: Some(now.clone()),
        failures: last.failures,
        last_failure_time: None,
    });
}

/// Records that the verification of the backup at `location` is due since `now`. This function keeps an earlier due
/// time. It also keeps the number of failures, which determines the delay of the next attempt.
fn queue(status: &mut EtcdBackupStatus, location: &str, now: &Time) {
    let queued = || VerificationStatus {
        location: location.to_owned(),
        ..VerificationStatus::default()
    };
    let record = status.verification.get_or_insert_with(queued);
    record.due_time.get_or_insert_with(|| now.clone());
}

/// Sets or removes the state of the next verification in the message of the condition `Verified`.
fn report_next(status: &mut EtcdBackupStatus, next: Option<&str>, generation: Option<i64>) {
    let verified = ConditionType::Verified;
    let mut conditions = status.conditions.iter_mut();
    let Some(condition) = conditions.find(|found| found.type_ == verified.as_str()) else {
        return;
    };
    let last = condition.message.split(NEXT).next().unwrap_or_default();
    let message = match next {
        Some(next) => format!("{last}{NEXT}{next}"),
        None => last.to_owned(),
    };
    if condition.message != message {
        condition.message = message;
        condition.observed_generation = generation;
    }
}

/// The message about a successful verification.
fn proven(location: &str, proof: &Proof) -> String {
    let compared = match (proof.keys_compared, proof.hash_compared) {
        (true, true) => " with the number of keys and the hash in the manifest",
        (true, false) => " with the number of keys in the manifest",
        (false, true) => " with the hash in the manifest",
        (false, false) => "",
    };
    let revision = proof.revision;
    format!(
        "a test restore of the backup {location} succeeded: etcd served revision {revision}{compared}"
    )
}

fn finding(status: ConditionStatus, reason: Reason, message: &str) -> Finding {
    Finding::new(ConditionType::Verified, status, reason.into(), message)
}

/// True if the last verification has failed.
fn has_failures(status: &EtcdBackupStatus) -> bool {
    let record = status.verification.as_ref();
    record.is_some_and(|record| record.failures.is_some())
}

/// True if the condition `Verified` reports that a backup cannot be restored.
fn is_failed(status: &EtcdBackupStatus) -> bool {
    let found = api::conditions::find(&status.conditions, &ConditionType::Verified);
    found.is_some_and(|condition| condition.status == "False")
}

fn failed(location: &str, failure: &crate::verification::Failure) -> String {
    if failure.damaged {
        format!(
            "the backup {location} cannot be restored: {}. Make a new backup, and check the store",
            failure.message
        )
    } else {
        format!(
            "the verification of the backup {location} has no result: {}",
            failure.message
        )
    }
}

/// The Event of a verification that has ended.
pub(super) fn notice(
    status: Option<&EtcdBackupStatus>,
    verdict: &VerificationVerdict,
) -> Option<Notice> {
    const ACTION: &str = "Verify";
    let location = status
        .and_then(|status| status.verification.as_ref())
        .map_or("", |record| record.location.as_str());
    match verdict {
        VerificationVerdict::Verified(proof) => Some(Notice::normal(
            Reason::BackupVerified.as_str(),
            ACTION,
            proven(location, proof),
        )),
        VerificationVerdict::Failed(failure) => {
            let reason = if failure.damaged {
                Reason::VerificationFailed
            } else {
                Reason::VerificationInconclusive
            };
            Some(Notice::warning(
                reason.as_str(),
                ACTION,
                failed(location, failure),
            ))
        }
        VerificationVerdict::Unchanged
        | VerificationVerdict::Off
        | VerificationVerdict::Starting(_)
        | VerificationVerdict::Queued(_)
        | VerificationVerdict::Waiting(_) => None,
    }
}

#[cfg(test)]
mod tests {
    use jiff::{SignedDuration, Timestamp};
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;

    use super::*;
    use crate::verification::Failure;

    fn after(seconds: i64) -> Time {
        Time(Timestamp::UNIX_EPOCH + SignedDuration::from_secs(seconds))
    }

    /// The status after these verdicts, one per minute.
    fn after_verdicts(verdicts: &[VerificationVerdict]) -> EtcdBackupStatus {
        let mut status = EtcdBackupStatus::default();
        for (minute, verdict) in (0..).zip(verdicts) {
            record(&mut status, verdict, Some(1), &after(60 * minute));
        }
        status
    }

    fn starting(location: &str) -> VerificationVerdict {
        VerificationVerdict::Starting(location.to_owned())
    }

    fn verified() -> VerificationVerdict {
        VerificationVerdict::Verified(Proof {
            revision: 7,
            keys: Some(2),
            keys_compared: true,
            hash_compared: true,
        })
    }

    fn failed(damaged: bool) -> VerificationVerdict {
        VerificationVerdict::Failed(Failure {
            damaged,
            message: "why".to_owned(),
        })
    }

    fn condition(status: &EtcdBackupStatus) -> Option<(&str, &str)> {
        let found: Option<&Condition> =
            api::conditions::find(&status.conditions, &ConditionType::Verified);
        found.map(|found| (found.status.as_str(), found.reason.as_str()))
    }

    #[test]
    fn verified_backup_is_recorded_with_duration() {
        let status = after_verdicts(&[starting("s3://b/1"), verified()]);
        assert_eq!(condition(&status), Some(("True", "BackupVerified")));
        let last = status.last_verified.unwrap();
        assert_eq!(
            (last.location.as_str(), last.duration_seconds),
            ("s3://b/1", Some(60))
        );
        assert_eq!(status.verification, None);
    }

    #[test]
    fn damaged_backup_stays_reported_until_a_verification_succeeds() {
        let mut verdicts = vec![starting("s3://b/1"), failed(true)];
        let reported = Some(("False", "VerificationFailed"));
        assert_eq!(condition(&after_verdicts(&verdicts)), reported);
        // The verification of `s3://b/2` has no result, so the condition continues to report the damaged backup
        // `s3://b/1`.
        verdicts.extend([starting("s3://b/2"), failed(false)]);
        let status = after_verdicts(&verdicts);
        assert_eq!(condition(&status), reported);
        assert_eq!(status.verification.unwrap().failures, Some(2));
        verdicts.extend([starting("s3://b/3"), verified()]);
        let status = after_verdicts(&verdicts);
        assert_eq!(condition(&status), Some(("True", "BackupVerified")));
        assert_eq!(status.verification, None);
    }

    #[test]
    fn verification_without_result_is_reported_as_unknown() {
        let status = after_verdicts(&[starting("s3://b/1"), failed(false)]);
        assert_eq!(
            condition(&status),
            Some(("Unknown", "VerificationInconclusive"))
        );
        assert_eq!(status.last_verified, None);
    }

    fn message(status: &EtcdBackupStatus) -> &str {
        let found = api::conditions::find(&status.conditions, &ConditionType::Verified);
        found.map_or("", |found| found.message.as_str())
    }

    #[test]
    fn condition_keeps_last_result_while_next_verification_waits() {
        let waiting = |why: &str| VerificationVerdict::Waiting(why.to_owned());
        // Before the first result, the condition contains only the reason for the wait.
        let first = after_verdicts(&[waiting("the window opens at 22:00")]);
        assert_eq!(condition(&first), Some(("Unknown", "Verifying")));
        assert_eq!(message(&first), "the window opens at 22:00");
        for (result, reported) in [
            (verified(), ("True", "BackupVerified")),
            (failed(true), ("False", "VerificationFailed")),
            (failed(false), ("Unknown", "VerificationInconclusive")),
        ] {
            let ended = [starting("s3://b/1"), result];
            let last = message(&after_verdicts(&ended)).to_owned();
            let then = |more: &[VerificationVerdict]| after_verdicts(&[&ended[..], more].concat());
            let waits = then(&[
                waiting("in the queue"),
                waiting("the window opens at 22:00"),
            ]);
            assert_eq!(condition(&waits), Some(reported));
            assert_eq!(
                message(&waits),
                format!("{last}. Next verification: the window opens at 22:00")
            );
            // When the wait has ended, the message no longer contains the reason for the wait.
            let unchanged = then(&[waiting("in the queue"), VerificationVerdict::Unchanged]);
            assert_eq!(message(&unchanged), last);
            let again = then(&[waiting("in the queue"), starting("s3://b/2"), verified()]);
            assert!(!message(&again).contains("queue"), "{again:?}");
        }
    }

    /// The alert EtcdBackupNotVerified depends on `dueTime`.
    #[test]
    fn due_time_is_kept_until_a_verification_succeeds() {
        let queued = || VerificationVerdict::Queued("s3://b/1".to_owned());
        let due = |verdicts: &[VerificationVerdict]| {
            let record = after_verdicts(verdicts).verification;
            record.and_then(|record| record.due_time)
        };
        assert_eq!(due(&[queued(), queued()]), Some(after(0)));
        let status = after_verdicts(&[queued()]);
        assert!(
            message(&status).contains("spec.verification.allowConcurrent"),
            "{status:?}"
        );
        let mut verdicts = vec![queued(), starting("s3://b/1"), failed(false)];
        assert_eq!(due(&verdicts), Some(after(0)));
        // Between two attempts, the status keeps the number of failures.
        verdicts.extend([VerificationVerdict::Unchanged, queued()]);
        let status = after_verdicts(&verdicts);
        assert_eq!(status.verification.unwrap().failures, Some(1));
        assert_eq!(due(&verdicts), Some(after(0)));
        verdicts.extend([starting("s3://b/2"), verified()]);
        assert_eq!(after_verdicts(&verdicts).verification, None);
        // A verification that is no longer due has no due time.
        assert_eq!(due(&[queued(), VerificationVerdict::Unchanged]), None);
        // A verification that waits for its window has no due time before it starts.
        let window = VerificationVerdict::Waiting("the window opens at 22:00".to_owned());
        assert_eq!(due(&[window, starting("s3://b/1")]), Some(after(60)));
    }

    #[test]
    fn message_of_verified_backup_names_compared_keys_and_hash() {
        let report = |keys_compared, hash_compared| {
            let proof = Proof {
                revision: 7,
                keys: Some(2),
                keys_compared,
                hash_compared,
            };
            proven("s3://b/1", &proof)
        };
        for (keys, hash, expected) in [
            (
                true,
                true,
                "revision 7 with the number of keys and the hash in the manifest",
            ),
            (
                true,
                false,
                "revision 7 with the number of keys in the manifest",
            ),
            (false, true, "revision 7 with the hash in the manifest"),
            (false, false, "revision 7"),
        ] {
            assert!(report(keys, hash).ends_with(expected), "{keys} {hash}");
        }
    }

    #[test]
    fn removal_of_verification_settings_clears_status() {
        let status = after_verdicts(&[starting("s3://b/1"), verified(), VerificationVerdict::Off]);
        assert_eq!(status, EtcdBackupStatus::default());
    }
}
