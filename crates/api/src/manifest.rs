//! The manifest of a stored backup: a JSON object with the key `<key>.manifest.json`.
//!
//! The backup operator writes the manifest, the restore operator reads it.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use serde::{Deserialize, Serialize};

use crate::backup::EncryptionKey;
use crate::cluster::EtcdClusterSpec;

/// The suffix of the keys of manifests.
pub const MANIFEST_SUFFIX: &str = ".manifest.json";

/// The key of the manifest for the backup with this key.
pub fn manifest_key(key: &str) -> String {
    format!("{key}{MANIFEST_SUFFIX}")
}

/// The manifest of a stored backup. Unknown fields are ignored, so that newer manifests can be read.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct BackupManifest {
    /// Version of the format, which is 1.
    pub format_version: u32,
    /// Version of etcd that sent the snapshot.
    pub etcd_version: String,
    /// Cluster ID, in hexadecimal without leading zeros.
    #[serde(rename = "clusterID")]
    pub cluster_id: String,
    /// Revision of the snapshot, which may be later than the revision at the start of the transfer.
    pub revision: i64,
    /// Size in bytes of the snapshot before compression and encryption, including etcd's hash at its end.
    pub size: i64,
    /// SHA-256 of the snapshot before compression and encryption, including etcd's hash at its end, in hexadecimal.
    pub sha256: String,
    /// Hash of all keys at this revision (`HashKV`). A restore compares this hash with the hash of the restored keys.
    /// `None` for large databases.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hash: Option<u32>,
    /// Number of keys at this revision. A verification compares it with the number of restored keys. `None` if
    /// unknown, for example for very large databases.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub keys: Option<i64>,
    /// Compression of the stored object: `none` or `zstd`.
    pub compression: String,
    /// Size of the stored object in bytes. `None` if it equals `size`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stored_size: Option<i64>,
    /// Encryption of the stored object, which is compressed before it is encrypted. `None` without encryption.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub encryption: Option<ManifestEncryption>,
    /// SHA-256 of the encrypted object in hexadecimal, so that programs without the key can check the object. `None`
    /// without encryption.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stored_sha256: Option<String>,
    /// The store's identifier of the upload, such as an ETag. After a crash, the operator uses it to recognize its own
    /// upload. No other code compares it, because a copy of the object has another identifier.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub store_tag: Option<String>,
    /// Time of the snapshot.
    pub created_at: Time,
    /// UID of the EtcdBackup. If an operator crashes before it writes the status, its next process recognizes the
    /// backup by this UID.
    #[serde(rename = "backupUID", default, skip_serializing_if = "Option::is_none")]
    pub backup_uid: Option<String>,
    /// The EtcdCluster of the backup. `None` if unknown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cluster: Option<ManifestCluster>,
}

/// The encryption of a stored object. The header of the object also contains the ID of the key.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ManifestEncryption {
    /// Name of the encryption format.
    pub format: String,
    /// The key that encrypts the object.
    pub key: EncryptionKey,
}

/// The EtcdCluster of a backup.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ManifestCluster {
    /// Name of the EtcdCluster.
    pub name: String,
    /// Namespace of the EtcdCluster.
    pub namespace: String,
    /// Spec of the EtcdCluster at the time of the backup.
    pub spec: EtcdClusterSpec,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn manifest_key_is_backup_key_with_suffix() {
        assert_eq!(manifest_key("etcd/backup"), "etcd/backup.manifest.json");
    }

    #[test]
    fn manifest_without_number_of_keys_is_read() {
        let old = r#"{"formatVersion":1,"etcdVersion":"3.6.16","clusterID":"1","revision":7,"size":1,"sha256":"",
            "compression":"none","createdAt":"2026-01-01T00:00:00Z"}"#;
        let manifest: BackupManifest = serde_json::from_str(old).unwrap();
        assert_eq!(manifest.keys, None);
        assert!(!serde_json::to_string(&manifest).unwrap().contains("keys"));
        let new = old.replace(r#""size""#, r#""keys":3,"size""#);
        let manifest: BackupManifest = serde_json::from_str(&new).unwrap();
        assert_eq!(manifest.keys, Some(3));
        assert!(
            serde_json::to_string(&manifest)
                .unwrap()
                .contains(r#""keys":3"#)
        );
    }
}
