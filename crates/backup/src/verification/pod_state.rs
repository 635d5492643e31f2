//! Determines the state of a verification from its pod. Performs no I/O.

use k8s_openapi::api::core::v1::{ContainerStatus, Pod};
use member::FETCH;
use member::verification::{ETCD, VERIFY};
use runtime::apply::is_owned;
use serde::{Deserialize, Serialize};

use crate::reason::Reason;

/// Exit code after SIGKILL, for example if the container used too much memory.
const KILLED: i32 = 128 + 9;

/// The result of a successful verification.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Proof {
    /// The revision of the backup.
    pub revision: i64,
    /// Number of keys that the restored etcd serves.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub keys: Option<i64>,
    /// True if the number of keys equals the number in the manifest. False if the numbers were not compared: the
    /// manifest has none, or an expired lease has deleted keys in the restored etcd.
    #[serde(default)]
    pub keys_compared: bool,
    /// True if the hash of the keys equals the hash in the manifest. False if the manifest has no hash.
    pub hash_compared: bool,
}

/// The report of the container `verify`, which is its termination message.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "result", rename_all = "camelCase")]
pub(super) enum Report {
    /// The restored data matches the manifest.
    Verified(Proof),
    /// The restored data does not match the manifest.
    Failed {
        /// The difference, as a message for users.
        message: String,
    },
}

/// The reason for a failed verification.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// True if the backup cannot be restored. False if the attempt had no result.
    pub damaged: bool,
    /// The cause and the remedy.
    pub message: String,
}

/// The state of the pod of a verification.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum PodState {
    /// The state was not read.
    #[default]
    NotRead,
    /// The operator cannot read the pod. Contains the cause.
    Unknown(String),
    /// The pod does not exist.
    Missing,
    /// The EtcdBackup does not own the pod of this name.
    Foreign,
    /// The pod has not started. Contains the message of the kubelet or the scheduler, or an empty text.
    Starting(String),
    /// The pod fetches, restores or compares the backup.
    Running,
    /// The verification has ended with this result.
    Ended(Result<Proof, Failure>),
}

/// The state of the pod. `uid` is the UID of the EtcdBackup.
pub(crate) fn state_of(pod: &Pod, uid: &str) -> PodState {
    if !is_owned(&pod.metadata, uid) {
        return PodState::Foreign;
    }
    let status = pod.status.clone().unwrap_or_default();
    let prepare = status.init_container_statuses.unwrap_or_default();
    let containers = status.container_statuses.unwrap_or_default();
    let of = |name: &str| {
        let mut all = prepare.iter().chain(&containers);
        all.find(|status| status.name == name)
    };
    // A report of the container `verify` is valid even if the pod was stopped after the report.
    if let Some(result) = of(VERIFY).and_then(reported) {
        return PodState::Ended(result);
    }
    if let Some(failure) = of(FETCH).and_then(fetch_failure) {
        return PodState::Ended(Err(failure));
    }
    if let Some(failure) = of(ETCD).and_then(etcd_failure) {
        return PodState::Ended(Err(failure));
    }
    if matches!(status.phase.as_deref(), Some("Failed" | "Succeeded")) {
        let why = status.message.or(status.reason).unwrap_or_default();
        return undetermined(format!(
            "the pod of the verification was stopped before it reported a result ({why}): raise \
             spec.verification.timeoutSeconds if the time limit has passed, or give the pod more resources"
        ));
    }
    if of(ETCD).is_some_and(is_running) || of(FETCH).is_some_and(is_running) {
        return PodState::Running;
    }
    let unscheduled = runtime::pod::unscheduled(status.conditions.as_deref())
        .and_then(|condition| condition.message.clone());
    let waiting = prepare.iter().chain(&containers).find_map(|status| {
        let waiting = status.state.as_ref()?.waiting.as_ref()?;
        let (reason, message) = (waiting.reason.as_deref()?, waiting.message.as_deref()?);
        Some(format!("container {}: {reason}: {message}", status.name))
    });
    PodState::Starting(unscheduled.or(waiting).unwrap_or_default())
}

fn undetermined(message: String) -> PodState {
    PodState::Ended(Err(Failure {
        damaged: false,
        message,
    }))
}

fn is_running(status: &ContainerStatus) -> bool {
    let state = status.state.as_ref();
    state.is_some_and(|state| state.running.is_some())
}

/// The reason that the program of the restore operator reports if the content of the backup is not a valid snapshot.
const UNREADABLE: &str = "SnapshotUnreadable";

/// The exit code and the termination message of a container that has ended.
fn ended(status: &ContainerStatus) -> Option<(i32, &str)> {
    let terminated = status.state.as_ref()?.terminated.as_ref()?;
    let message = terminated.message.as_deref().unwrap_or_default();
    let killed = terminated.reason.as_deref() == Some("OOMKilled");
    let code = if killed { KILLED } else { terminated.exit_code };
    Some((code, message))
}

fn reported(status: &ContainerStatus) -> Option<Result<Proof, Failure>> {
    let (_, message) = ended(status)?;
    Some(match serde_json::from_str(message) {
        Ok(Report::Verified(proof)) => Ok(proof),
        Ok(Report::Failed { message }) => Err(Failure {
            damaged: true,
            message,
        }),
        Err(_) => Err(Failure {
            damaged: false,
            message: "the container verify ended without a report".to_owned(),
        }),
    })
}

/// The failure of the container that fetches the backup.
fn fetch_failure(status: &ContainerStatus) -> Option<Failure> {
    let (code, message) = ended(status).filter(|(code, _)| *code != 0)?;
    let Some(member::Report::Failed { reason, message }) = member::Report::read(message) else {
        return Some(killed_or(code, "fetch", message, false));
    };
    // The container `fetch` runs the program of the restore operator, which reports its own reasons. For
    // `BackupMissing` and `BucketMissing`, the backup operator uses the same names.
    let damaged = [
        UNREADABLE,
        Reason::BackupMissing.as_str(),
        Reason::BucketMissing.as_str(),
    ];
    Some(Failure {
        damaged: damaged.contains(&reason.as_str()),
        message,
    })
}

/// The failure of the container `etcd`, which first restores the data directory and then runs etcd.
fn etcd_failure(status: &ContainerStatus) -> Option<Failure> {
    let (code, message) = ended(status)?;
    let (message, damaged) = match member::Report::read(message) {
        // A report with a reason other than UNREADABLE means that the backup was not tested, for example because the
        // image contains no etcdutl.
        Some(member::Report::Failed { reason, message }) => (message, reason == UNREADABLE),
        Some(member::Report::Done(_)) | None => (message.to_owned(), true),
    };
    if message.contains("no space left on device") {
        return Some(Failure {
            damaged: false,
            message: format!(
                "the scratch volume is full: set a larger volume in spec.verification.scratch ({message})"
            ),
        });
    }
    Some(killed_or(code, "etcd", &message, damaged))
}

fn killed_or(code: i32, container: &str, message: &str, damaged: bool) -> Failure {
    if code == KILLED {
        return Failure {
            damaged: false,
            message: format!(
                "container {container} was killed: give it more memory in spec.verification.resources"
            ),
        };
    }
    Failure {
        damaged,
        message: format!("container {container} ended with exit code {code}: {message}"),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn state(status: &Value) -> PodState {
        let pod = json!({
            "metadata": { "name": "p", "ownerReferences": [
                { "apiVersion": "v", "kind": "EtcdBackup", "name": "b", "uid": "uid" }] },
            "status": status,
        });
        state_of(&serde_json::from_value(pod).unwrap(), "uid")
    }

    fn ended_as(name: &str, code: i32, message: &Value) -> Value {
        let text = message
            .as_str()
            .map_or_else(|| message.to_string(), str::to_owned);
        let terminated = json!({ "exitCode": code, "message": text });
        json!([{ "name": name, "image": "", "imageID": "", "ready": false, "restartCount": 0,
                 "state": { "terminated": terminated } }])
    }

    #[test]
    fn report_of_verify_container_ends_verification() {
        let report = json!({ "result": "verified", "revision": 7, "keys": 2,
            "keysCompared": true, "hashCompared": true });
        let status = json!({ "containerStatuses": ended_as("verify", 0, &report) });
        let proof = Proof {
            revision: 7,
            keys: Some(2),
            keys_compared: true,
            hash_compared: true,
        };
        assert_eq!(state(&status), PodState::Ended(Ok(proof)));
        let report = json!({ "result": "failed", "message": "different" });
        let status = json!({ "containerStatuses": ended_as("verify", 1, &report) });
        let PodState::Ended(Err(failure)) = state(&status) else {
            panic!("{status}");
        };
        assert!(failure.damaged && failure.message == "different");
    }

    #[test]
    fn only_unreadable_or_missing_backup_is_reported_as_damage() {
        for (reason, damaged) in [
            ("SnapshotUnreadable", true),
            ("BackupMissing", true),
            ("StoreUnreachable", false),
            ("SecretMissing", false),
            ("AccessDenied", false),
        ] {
            let report = json!({ "result": "failed", "reason": reason, "message": "why" });
            let status = json!({ "initContainerStatuses": ended_as("fetch", 1, &report) });
            let PodState::Ended(Err(failure)) = state(&status) else {
                panic!("{reason}");
            };
            assert_eq!(
                (failure.damaged, failure.message.as_str()),
                (damaged, "why"),
                "{reason}"
            );
        }
    }

    #[test]
    fn verification_fails_if_etcd_exits_before_verify_reports() {
        for (code, message, damaged, part) in [
            (1, "panic: corrupted page", true, "corrupted page"),
            (
                1,
                "write: no space left on device",
                false,
                "spec.verification.scratch",
            ),
            (137, "", false, "spec.verification.resources"),
        ] {
            let status = json!({ "containerStatuses": ended_as("etcd", code, &json!(message)) });
            let PodState::Ended(Err(failure)) = state(&status) else {
                panic!("{message}");
            };
            assert_eq!(failure.damaged, damaged, "{failure:?}");
            assert!(failure.message.contains(part), "{failure:?}");
        }
    }

    #[test]
    fn failed_restore_is_reported_as_damage_only_if_backup_is_unreadable() {
        for (reason, damaged) in [("SnapshotUnreadable", true), ("SeedFailed", false)] {
            let report = json!({ "result": "failed", "reason": reason, "message": "why" });
            let status = json!({ "containerStatuses": ended_as("etcd", 1, &report) });
            let PodState::Ended(Err(failure)) = state(&status) else {
                panic!("{reason}");
            };
            assert_eq!(failure.damaged, damaged, "{reason}: {failure:?}");
        }
    }

    #[test]
    fn failure_message_at_time_limit_contains_timeout_field() {
        let status = json!({ "phase": "Failed", "reason": "DeadlineExceeded" });
        let PodState::Ended(Err(failure)) = state(&status) else {
            panic!("{status}");
        };
        assert!(!failure.damaged);
        assert!(failure.message.contains("timeoutSeconds"), "{failure:?}");
    }

    #[test]
    fn state_of_waiting_pod_contains_message_of_kubelet() {
        let waiting = json!({ "reason": "ImagePullBackOff", "message": "no such image" });
        let containers = json!([{ "name": "etcd", "image": "", "imageID": "", "ready": false, "restartCount": 0,
                                  "state": { "waiting": waiting } }]);
        let found = state(&json!({ "phase": "Pending", "containerStatuses": containers }));
        let text = "container etcd: ImagePullBackOff: no such image".to_owned();
        assert_eq!(found, PodState::Starting(text));
        assert_eq!(state(&json!({})), PodState::Starting(String::new()));
    }
}
