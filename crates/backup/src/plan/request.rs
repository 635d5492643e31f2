//! A backup that is requested by an annotation of a periodic EtcdBackup. The annotation contains the time of the
//! request. Performs no I/O.
//!
//! The operator sets this annotation on the EtcdBackup of an EtcdCluster (`spec.backup`) if a change of the cluster
//! waits for a backup.

use api::EtcdBackup;
use api::cluster::MAX_CLOCK_SKEW;
use api::names::ANNOTATION_BACKUP_REQUESTED;
use jiff::{SignedDuration, Timestamp};
use kube::ResourceExt;

/// Delay between a failed backup and the next backup for the same request.
const RETRY: SignedDuration = SignedDuration::from_mins(1);

/// The time of the request, or `None` if the annotation is missing or invalid.
fn requested(backup: &EtcdBackup) -> Option<Timestamp> {
    let text = backup.annotations().get(ANNOTATION_BACKUP_REQUESTED)?;
    text.parse().ok()
}

/// The time at which the requested backup must start. `None` without a request, or if a backup was completed after the
/// request.
pub(super) fn due(backup: &EtcdBackup, now: Timestamp) -> Option<Timestamp> {
    // A requested time more than MAX_CLOCK_SKEW in the future was written with a wrong clock, and is ignored.
    let requested = requested(backup).filter(|time| time.duration_since(now) <= MAX_CLOCK_SKEW)?;
    let status = backup.status.as_ref();
    let complete = status.and_then(|status| status.last_success_date.as_ref());
    if complete.is_some_and(|complete| complete.0 >= requested) {
        return None;
    }
    let ended = status.and_then(|status| status.completion_time.as_ref());
    let failed = ended
        .map(|ended| ended.0)
        .filter(|ended| *ended >= requested);
    failed.map_or(Some(requested), |failed| failed.checked_add(RETRY).ok())
}

/// True if a backup was completed after the request, and no backup from after the request was verified yet. The
/// verification does not wait for its schedule in this case.
pub(super) fn wants_verification(backup: &EtcdBackup) -> bool {
    let (Some(requested), Some(status)) = (requested(backup), backup.status.as_ref()) else {
        return false;
    };
    let is_since = |time: Option<Timestamp>| time.is_some_and(|time| time >= requested);
    let complete = status.last_success_date.as_ref().map(|time| time.0);
    let proven = status.last_verified.as_ref();
    let proven = proven.and_then(|proven| proven.backup_time.as_ref());
    is_since(complete) && !is_since(proven.map(|time| time.0))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    const NOW: &str = "2026-11-27T12:00:00Z";

    fn at(text: &str) -> Timestamp {
        text.parse().unwrap()
    }

    fn backup(requested: &str, status: &Value) -> EtcdBackup {
        serde_json::from_value(json!({
            "apiVersion": "etcd.database.coreos.com/v1beta2",
            "kind": "EtcdBackup",
            "metadata": { "name": "main", "annotations": { ANNOTATION_BACKUP_REQUESTED: requested } },
            "spec": { "etcdCluster": { "name": "main" }, "storageType": "S3", "s3": { "path": "b/k" },
                      "backupPolicy": { "schedule": "@daily" } },
            "status": status,
        }))
        .unwrap()
    }

    #[test]
    fn requested_backup_is_due_until_complete() {
        let none = json!({ "succeeded": false });
        let due = |requested: &str, status: &Value| super::due(&backup(requested, status), at(NOW));
        assert_eq!(due(NOW, &none), Some(at(NOW)));
        let older = json!({ "succeeded": true, "lastSuccessDate": "2026-11-27T11:59:59Z" });
        assert_eq!(due(NOW, &older), Some(at(NOW)));
        let newer = json!({ "succeeded": true, "lastSuccessDate": NOW });
        assert_eq!(due(NOW, &newer), None);
        for ignored in ["soon", "2026-11-27T13:00:01Z"] {
            assert_eq!(due(ignored, &none), None, "{ignored}");
        }
    }

    #[test]
    fn failed_requested_backup_is_repeated_after_pause() {
        let failed = |ended: &str| {
            let status = json!({ "succeeded": false, "startTime": ended, "completionTime": ended });
            due(&backup("2026-11-27T11:00:00Z", &status), at(NOW))
        };
        assert_eq!(
            failed("2026-11-27T11:50:00Z"),
            Some(at("2026-11-27T11:51:00Z"))
        );
        let before_request = failed("2026-11-27T10:00:00Z");
        assert_eq!(before_request, Some(at("2026-11-27T11:00:00Z")));
    }

    #[test]
    fn requested_backup_is_due_for_verification_until_verified() {
        let status = |proven: Option<&str>| {
            let verified = proven.map(|time| json!({ "location": "s3://b/k", "backupTime": time }));
            json!({ "succeeded": true, "location": "s3://b/l", "lastSuccessDate": NOW, "lastVerified": verified })
        };
        let wants =
            |requested: &str, proven| wants_verification(&backup(requested, &status(proven)));
        assert!(wants("2026-11-27T11:00:00Z", None));
        assert!(wants("2026-11-27T11:00:00Z", Some("2026-11-27T10:59:59Z")));
        assert!(!wants("2026-11-27T11:00:00Z", Some("2026-11-27T11:30:00Z")));
        assert!(
            !wants("2026-11-27T12:00:01Z", None),
            "no backup is newer than this request, so no backup is verified for it"
        );
    }
}
