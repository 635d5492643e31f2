//! The small JSON object beside each backup, at `<key>.manifest.json`: what the backup holds.
//!
//! Written by the backup operator, read by the restore operator, readable by people.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use serde::{Deserialize, Serialize};

use crate::cluster::EtcdClusterSpec;

/// What is appended to a backup's key to get its manifest's key.
pub const MANIFEST_SUFFIX: &str = ".manifest.json";

/// The key of the manifest of the backup at `key`.
pub fn manifest_key(key: &str) -> String {
    format!("{key}{MANIFEST_SUFFIX}")
}

/// What is known about a stored backup. Unknown fields are ignored, so that newer manifests can be read.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct BackupManifest {
    /// Form of this manifest: 1.
    pub format_version: u32,
    /// Version of the etcd server the snapshot came from.
    pub etcd_version: String,
    /// Cluster ID, in hexadecimal without leading zeros.
    #[serde(rename = "clusterID")]
    pub cluster_id: String,
    /// Revision of the snapshot itself.
    pub revision: i64,
    /// Size of the snapshot as etcd sent it, its trailing hash included, in bytes, uncompressed.
    pub size: i64,
    /// SHA-256 of the snapshot as etcd sent it, its trailing hash included, in hexadecimal: what `sha256sum` says of
    /// the stored object when that is not compressed.
    pub sha256: String,
    /// etcd's own hash of the keys at that revision (`HashKV`), which a restore compares. Large databases have none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hash: Option<u32>,
    /// How the stored object is compressed: `none` or `zstd`.
    pub compression: String,
    /// Size of the stored object in bytes, where that is not `size`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stored_size: Option<i64>,
    /// What the store called this writing of the object (an entity tag, a generation). An operator that crashed knows
    /// its own work by it; nothing else asks for it, since a copy of the object has another one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub store_tag: Option<String>,
    /// When the snapshot was taken.
    pub created_at: Time,
    /// UID of the EtcdBackup it was taken for: an operator that crashed before it wrote the status knows its own work.
    #[serde(rename = "backupUID", default, skip_serializing_if = "Option::is_none")]
    pub backup_uid: Option<String>,
    /// The EtcdCluster the backup was taken of, where it is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cluster: Option<ManifestCluster>,
}

/// The EtcdCluster a backup was taken of.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ManifestCluster {
    /// Its name.
    pub name: String,
    /// Its namespace.
    pub namespace: String,
    /// Its spec at that time.
    pub spec: EtcdClusterSpec,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_manifest_lies_beside_the_backup() {
        assert_eq!(manifest_key("etcd/backup"), "etcd/backup.manifest.json");
    }
}
