//! The manifest: the JSON object at `<key>.manifest.json` that describes the backup at `<key>`.
//!
//! The backup operator writes the manifest, the restore operator reads it.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use serde::{Deserialize, Serialize};

use crate::backup::EncryptionKey;
use crate::cluster::EtcdClusterSpec;

/// Suffix that is appended to the key of a backup to get the key of its manifest.
pub const MANIFEST_SUFFIX: &str = ".manifest.json";

/// The key of the manifest of the backup at `key`.
pub fn manifest_key(key: &str) -> String {
    format!("{key}{MANIFEST_SUFFIX}")
}

/// The description of a stored backup. Unknown fields are ignored, so newer manifests can be read.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct BackupManifest {
    /// Version of the manifest's format, which is 1.
    pub format_version: u32,
    /// Version of the etcd server that sent the snapshot.
    pub etcd_version: String,
    /// Cluster ID, in hexadecimal without leading zeros.
    #[serde(rename = "clusterID")]
    pub cluster_id: String,
    /// Revision of the snapshot itself, not the revision at the start of the stream.
    pub revision: i64,
    /// Size in bytes of the snapshot as etcd sent it: uncompressed, with the hash at its end.
    pub size: i64,
    /// SHA-256, in hexadecimal, of the snapshot as etcd sent it, with the hash at its end. If the stored object is neither
    /// compressed nor encrypted, `sha256sum` of the object prints the same value.
    pub sha256: String,
    /// etcd's own hash of the keys at that revision (`HashKV`), with which a restore compares its keys. `None` for
    /// large databases.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hash: Option<u32>,
    /// Number of keys at that revision, with which a verification compares the restored keys. `None` if unknown, for
    /// example for very large databases.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub keys: Option<i64>,
    /// How the stored object is compressed: `none` or `zstd`.
    pub compression: String,
    /// Size of the stored object in bytes. `None` if it equals `size`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stored_size: Option<i64>,
    /// How the stored object is encrypted. `None` if it is not encrypted. The object is compressed before it is encrypted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub encryption: Option<ManifestEncryption>,
    /// SHA-256, in hexadecimal, of the stored object, as `sha256sum` prints it. Only set if the object is encrypted, so that
    /// a program without the key can check the object.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stored_sha256: Option<String>,
    /// The store's identifier of this upload, such as an entity tag or a generation. After a crash, the operator
    /// recognizes its own upload by this identifier. No other check uses it, because a copy of the object has another
    /// identifier.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub store_tag: Option<String>,
    /// Time at which the snapshot was taken.
    pub created_at: Time,
    /// UID of the EtcdBackup. If an operator crashed before it wrote the status, the next process recognizes the backup
    /// by this UID.
    #[serde(rename = "backupUID", default, skip_serializing_if = "Option::is_none")]
    pub backup_uid: Option<String>,
    /// The EtcdCluster that was backed up. `None` if unknown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cluster: Option<ManifestCluster>,
}

/// How a stored object is encrypted. The header of the object also contains the ID of the key.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ManifestEncryption {
    /// Name of the format.
    pub format: String,
    /// Key with which the object is encrypted.
    pub key: EncryptionKey,
}

/// The EtcdCluster that was backed up.
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
