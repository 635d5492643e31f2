//! Opens the store of the backup, and reads the manifest and the size of the backup. The operator and the program in
//! the seed's pod both use this module.

use std::path::Path;

use api::manifest::{BackupManifest, manifest_key};
use api::storage::StorageBlock;
use bytes::Bytes;
use futures::StreamExt;
pub use store::SecretData;
use store::compression::ZSTD;
use store::encryption::FORMAT;
use store::{Directories, Secrets, Target};

use crate::reason::{Reason, Trouble};

/// Maximum size of a manifest in bytes.
const MANIFEST_LIMIT: u64 = 4 << 20;

/// The opened store, and the key of the backup.
pub struct OpenedSource(pub Target);

/// Opens the store of the backup. `claim` is the directory of the mounted PersistentVolumeClaim. `secret` and `ca` are
/// the contents of the Secrets with the credentials and with the CA certificate.
///
/// # Errors
///
/// Fails if the storage block or a Secret is invalid, or if the store cannot be opened.
pub async fn open(
    source: &StorageBlock,
    secret: Option<&SecretData>,
    ca: Option<&SecretData>,
    claim: Option<&Path>,
) -> Result<OpenedSource, Trouble> {
    let secrets = Secrets {
        credentials: secret,
        ca,
    };
    let directories = Directories {
        local: None,
        claim: claim.map(Path::to_owned),
    };
    store::open(&source.source(), secrets, &directories)
        .await
        .map(OpenedSource)
        .map_err(|error| trouble(&error))
}

/// Converts an error of the store.
pub fn trouble(error: &store::Error) -> Trouble {
    let reason = match error {
        store::Error::NoSuchBucket { .. } => Reason::BucketMissing,
        store::Error::NoSuchObject { .. } => Reason::BackupMissing,
        store::Error::AccessDenied(_)
        | store::Error::NoIdentity(_)
        | store::Error::ClockSkew(_) => Reason::AccessDenied,
        store::Error::Secret { .. } => Reason::SecretMissing,
        store::Error::Invalid { .. } => Reason::InvalidSpec,
        _ => Reason::StoreUnreachable,
    };
    Trouble::new(reason, error.to_string())
}

impl OpenedSource {
    /// The manifest of the backup. `None` if it does not exist, as for backups of coreos/etcd-operator.
    ///
    /// # Errors
    ///
    /// Fails if the store fails, if the manifest is invalid, or if it names an unknown compression or encryption.
    pub async fn manifest(&self) -> Result<Option<BackupManifest>, Trouble> {
        let key = manifest_key(&self.0.key);
        let mut object = match self.0.store.get(&key).await {
            Ok(object) => object,
            Err(store::Error::NoSuchObject { .. }) => return Ok(None),
            Err(error) => return Err(trouble(&error)),
        };
        if object.size > MANIFEST_LIMIT {
            return Err(unreadable_manifest(
                &key,
                "the manifest is larger than 4 MiB",
            ));
        }
        let mut content = Vec::new();
        while let Some(chunk) = object.chunks.next().await {
            let chunk: Bytes = chunk.map_err(|error| trouble(&error))?;
            content.extend_from_slice(&chunk);
        }
        let manifest: BackupManifest = serde_json::from_slice(&content)
            .map_err(|error| unreadable_manifest(&key, &error.to_string()))?;
        let unknown = |how: &str, name: &str| {
            let message =
                format!("the backup is {how} with {name:?}, which this release cannot read");
            Err(Trouble::new(Reason::NotSupported, message))
        };
        let encryption = manifest.encryption.as_ref();
        match (manifest.compression.as_str(), encryption) {
            (_, Some(found)) if found.format != FORMAT => unknown("encrypted", &found.format),
            ("" | "none" | ZSTD, _) => Ok(Some(manifest)),
            (other, _) => unknown("compressed", other),
        }
    }

    /// The size of the stored backup in bytes.
    ///
    /// # Errors
    ///
    /// Fails if the backup does not exist or the store fails.
    pub async fn check(&self) -> Result<u64, Trouble> {
        match self.0.store.head(&self.0.key).await {
            Ok(Some(object)) => Ok(object.size),
            Ok(None) => {
                let message = format!(
                    "there is no backup {:?} in {}: correct the path",
                    self.0.key,
                    self.0.store.location()
                );
                Err(Trouble::new(Reason::BackupMissing, message))
            }
            Err(error) => Err(trouble(&error)),
        }
    }
}

/// Compares the size of the stored backup with its manifest, to detect a truncated or replaced backup before the
/// restore changes anything.
///
/// # Errors
///
/// Fails if the sizes differ.
pub fn fits(manifest: Option<&BackupManifest>, stored: u64) -> Result<(), Trouble> {
    let Some(manifest) = manifest else {
        return Ok(());
    };
    let is_snapshot = manifest.compression != ZSTD && manifest.encryption.is_none();
    let plain = is_snapshot.then_some(manifest.size);
    match manifest.stored_size.or(plain) {
        Some(recorded) if u64::try_from(recorded).ok() != Some(stored) => Err(Trouble::new(
            Reason::SnapshotUnreadable,
            format!(
                "the backup has {stored} bytes, but its manifest records {recorded} bytes: the backup was truncated \
                 or replaced; restore another backup"
            ),
        )),
        _ => Ok(()),
    }
}

fn unreadable_manifest(key: &str, why: &str) -> Trouble {
    Trouble::new(
        Reason::SnapshotUnreadable,
        format!(
            "the manifest {key:?} of the backup cannot be read: {why}; restore another backup, or delete the manifest and \
             set spec.etcdCluster.template"
        ),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn backup_with_unexpected_size_is_rejected_before_fetch() {
        let manifest = |compression: &str, stored: &str| -> BackupManifest {
            let text = format!(
                r#"{{"formatVersion":1,"etcdVersion":"3.7.3","clusterID":"1","revision":7,"size":100,"sha256":"",
                    "compression":"{compression}","createdAt":"2026-01-01T00:00:00Z"{stored}}}"#
            );
            serde_json::from_str(&text).unwrap()
        };
        let accepted = |manifest: &BackupManifest, stored| fits(Some(manifest), stored).is_ok();
        let plain = manifest("none", "");
        assert!(accepted(&plain, 100) && !accepted(&plain, 99));
        let compressed = manifest("zstd", r#","storedSize":40"#);
        assert!(accepted(&compressed, 40) && !accepted(&compressed, 39));
        // Without a stored size in the manifest, every size is accepted.
        assert!(accepted(&manifest("zstd", ""), 7));
        let encryption =
            r#","encryption":{"format":"aes256gcm-chunks-v1","key":{"name":"k","id":"ab"}}"#;
        assert!(accepted(&manifest("none", encryption), 7));
        assert!(fits(None, 1).is_ok());
        let trouble = fits(Some(&plain), 1).unwrap_err();
        assert_eq!(trouble.reason, Reason::SnapshotUnreadable);
    }
}
