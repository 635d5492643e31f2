//! The progress of a transfer, and the list of stored backups in a status.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::EncryptionKey;

/// Progress of a transfer.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Progress {
    /// Number of transferred bytes.
    pub bytes: i64,
    /// Total number of bytes. Not set if unknown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub total_bytes: Option<i64>,
    /// Progress as text: a percentage such as `45%`, or the transferred bytes if the total is unknown. For display
    /// only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub text: Option<String>,
}

/// A stored backup.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct StoredBackup {
    /// Location, such as `s3://bucket/key`.
    pub location: String,
    /// Revision of the backup.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub etcd_revision: Option<i64>,
    /// Size of the snapshot in bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub size: Option<i64>,
    /// SHA-256 of the snapshot, in hexadecimal.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sha256: Option<String>,
    /// The key that encrypts the backup. Not set for a backup that is not encrypted, and for a backup that the
    /// operator found in the store.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub encryption_key: Option<EncryptionKey>,
    /// Time at which the backup completed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub completion_time: Option<Time>,
}
