//! The search for a point in recorded changes on a PersistentVolumeClaim (PVC).
//!
//! Only pods in the namespace of a PVC can mount it, so the operator creates a pod with this program before the restore
//! changes anything. The pod has no service account token, no credentials of a store, and no access to the API server.
//! It reports the result in its termination message.

use api::backup::EncryptionKey;
use api::restore::{ChosenPoint, RestorePoint};
use api::storage::StorageBlock;
use serde::{Deserialize, Serialize};

use crate::reason::{Reason, Trouble};

mod program;

pub use program::{Search, run};

/// Directory at which the pod mounts the PVC.
pub const ROOT: &str = "/run/restore/claim";
/// Directory at which the pod mounts the Secret with the encryption keys.
pub const KEYS: &str = "/run/restore/encryption";

/// The order of a search: the recorded changes, and the point that the pod searches in them. The order contains no
/// credentials, because it is an argument of the pod (invariant 14).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SearchOrder {
    /// The storage block with the directory of the recorded changes.
    pub directory: StorageBlock,
    /// The point that the pod searches.
    pub at: RestorePoint,
    /// All changes before this time are in the store, in microseconds since the epoch. `None` if unknown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub complete: Option<i64>,
    /// The Secret with the keys, which the pod mounts. `None` if the changes must not be encrypted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub encryption: Option<String>,
}

/// The snapshot from which recorded changes are replayed (the base), and the point at which the replay ends.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct FoundBase {
    /// The key of the snapshot in the store.
    pub snapshot: String,
    /// The size of the stored snapshot in bytes.
    pub stored_size: i64,
    /// The SHA-256 of the snapshot, in hexadecimal.
    pub sha256: String,
    /// The name and the ID of the key that encrypts the snapshot. `None` if the snapshot is not encrypted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub encryption_key: Option<EncryptionKey>,
    /// The point at which the replay ends.
    pub point: ChosenPoint,
}

/// The result of a search, which is the termination message of the pod.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "result", rename_all = "camelCase")]
pub enum SearchReport {
    /// The recorded changes contain the point.
    Found(Box<FoundBase>),
    /// The search has failed.
    Failed {
        /// The reason for the condition of the EtcdRestore.
        reason: String,
        /// The message for users, with the cause and the remedy.
        message: String,
    },
}

impl SearchReport {
    /// The base and the point, or the problem in the report.
    pub(crate) fn result(self) -> Result<FoundBase, Trouble> {
        match self {
            Self::Found(found) => Ok(*found),
            Self::Failed { reason, message } => {
                let reason = Reason::parse(&reason).unwrap_or(Reason::StepFailed);
                Err(Trouble::new(reason, message))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn search_report_is_parsed_even_with_unknown_reason() {
        let failed = SearchReport::Failed {
            reason: Reason::PointNotRecorded.as_str().to_owned(),
            message: "set another point".to_owned(),
        };
        let text = serde_json::to_string(&failed).unwrap();
        let read: SearchReport = serde_json::from_str(&text).unwrap();
        let trouble = read.result().unwrap_err();
        assert_eq!(trouble.reason, Reason::PointNotRecorded);
        // A later release may report a reason that this release does not know. The reason is then `StepFailed`.
        let unknown = json!({ "result": "failed", "reason": "Tomorrow", "message": "why" });
        let read: SearchReport = serde_json::from_value(unknown).unwrap();
        assert_eq!(read.result().unwrap_err().reason, Reason::StepFailed);
    }
}
