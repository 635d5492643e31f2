//! The base of a chain: a snapshot, and the revision of an etcd that is restored from it. Performs no I/O.

use bytes::Bytes;
use etcd::ClusterId;
use serde::{Deserialize, Serialize};
use store::encryption;

use crate::digest::Digest;
use crate::name::{BaseName, SNAPSHOTS, is_snapshot};

const FORMAT: &str = "etcd-continuous";
const VERSION: u32 = 1;

/// Maximum length of the object that describes a base, in bytes.
pub const MAX_BASE: usize = 64 << 10;

/// The snapshot of a base.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SnapshotObject {
    /// The key of the snapshot in the store.
    pub key: String,
    /// Size in bytes, before the encryption.
    pub size: u64,
    /// The SHA-256 of the snapshot before the encryption, in hexadecimal digits.
    pub sha256: String,
}

/// The encryption of a base's snapshot. The segments after an encrypted base are encrypted too, each with the key whose
/// ID is in its own header.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BaseEncryption {
    /// The name of the encryption format.
    pub format: String,
    /// The key of the snapshot.
    pub key: BaseKey,
}

/// The key of a snapshot.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BaseKey {
    /// The name of the key when the snapshot was taken.
    pub name: String,
    /// The ID of the key, in hexadecimal digits.
    pub id: String,
}

/// The description of a base.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Base {
    /// The ID of the etcd cluster.
    pub cluster_id: ClusterId,
    /// The revision of an etcd that is restored from the snapshot.
    pub revision: i64,
    /// The snapshot.
    pub snapshot: SnapshotObject,
    /// The time at which the recorder wrote the base, in microseconds since the epoch.
    pub created: i64,
    /// The encryption of the snapshot. `None` if the snapshot and the segments are not encrypted.
    pub encryption: Option<BaseEncryption>,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Content {
    format: String,
    version: u32,
    #[serde(rename = "clusterID")]
    cluster_id: String,
    revision: i64,
    snapshot: SnapshotObject,
    created_unix_micros: i64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    encryption: Option<BaseEncryption>,
}

/// Why the object that describes a base is not valid.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BaseError {
    /// The object does not describe a base.
    #[error("the object is not the base of a continuous backup: {0}")]
    Invalid(String),
    /// The object has a later version of the format.
    #[error("the base has version {0}: use a later release to read it")]
    UnknownVersion(u32),
    /// The snapshot has an unknown encryption.
    #[error("the base is encrypted with the format {0:?}: use a later release to read it")]
    UnknownEncryption(String),
    /// The snapshot is not in the directory `snapshots/` next to the base, or its name is not valid.
    #[error(
        "its snapshot is not in the directory snapshots/ of the same prefix, or has no valid name"
    )]
    ForeignSnapshot,
}

/// A base, with its object in the store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredBase {
    /// The decoded description of the base.
    pub base: Base,
    /// The name of the base's directory.
    pub name: BaseName,
    /// The SHA-256 of the object.
    pub digest: Digest,
    /// The object that describes the base.
    pub object: Bytes,
}

impl Base {
    /// The size of the snapshot's object in the store, in bytes.
    pub fn stored_size(&self) -> u64 {
        match &self.encryption {
            Some(_) => encryption::stored_size(self.snapshot.size),
            None => self.snapshot.size,
        }
    }

    /// Encodes the base.
    ///
    /// # Errors
    /// Fails if the revision is not positive.
    pub fn encode(self) -> Result<StoredBase, BaseError> {
        let invalid = |text: &str| BaseError::Invalid(text.to_owned());
        if !(1..i64::MAX).contains(&self.revision) {
            return Err(invalid("the revision is not positive"));
        }
        let content = Content {
            format: FORMAT.to_owned(),
            version: VERSION,
            cluster_id: format!("{:016x}", self.cluster_id.0),
            revision: self.revision,
            snapshot: self.snapshot.clone(),
            created_unix_micros: self.created,
            encryption: self.encryption.clone(),
        };
        let object = serde_json::to_vec_pretty(&content)
            .map_err(|error| BaseError::Invalid(format!("the base cannot be encoded: {error}")))?;
        Ok(StoredBase::new(self, object.into()))
    }
}

impl StoredBase {
    fn new(base: Base, object: Bytes) -> Self {
        let digest = Digest::of(&object);
        Self {
            name: BaseName {
                revision: base.revision,
                digest: digest.short(),
            },
            base,
            digest,
            object,
        }
    }

    /// Decodes the object that describes a base.
    ///
    /// # Errors
    /// Fails if the object does not follow the format.
    pub fn decode(object: Bytes) -> Result<Self, BaseError> {
        if object.len() > MAX_BASE {
            return Err(BaseError::Invalid(format!(
                "it has more than {MAX_BASE} bytes"
            )));
        }
        let content: Content = serde_json::from_slice(&object)
            .map_err(|error| BaseError::Invalid(error.to_string()))?;
        if content.format != FORMAT {
            return Err(BaseError::Invalid("its format has another name".to_owned()));
        }
        if content.version != VERSION {
            return Err(BaseError::UnknownVersion(content.version));
        }
        if let Some(found) = &content.encryption
            && found.format != encryption::FORMAT
        {
            return Err(BaseError::UnknownEncryption(found.format.clone()));
        }
        let cluster_id = content.cluster_id.parse().map_err(|_| {
            BaseError::Invalid("its cluster ID is not a hexadecimal number".to_owned())
        })?;
        if !(1..i64::MAX).contains(&content.revision) {
            return Err(BaseError::Invalid(
                "its revision is not positive".to_owned(),
            ));
        }
        let base = Base {
            cluster_id,
            revision: content.revision,
            snapshot: content.snapshot,
            created: content.created_unix_micros,
            encryption: content.encryption,
        };
        Ok(Self::new(base, object))
    }

    /// Fails unless the snapshot is a snapshot under `prefix`, which is empty or ends with a slash.
    ///
    /// A forged base could name any object of the bucket as its snapshot (invariant 13).
    pub(crate) fn check_snapshot(&self, prefix: &str) -> Result<(), BaseError> {
        let key = self.base.snapshot.key.strip_prefix(prefix);
        let name = key.and_then(|key| key.strip_prefix(SNAPSHOTS));
        if name.is_some_and(is_snapshot) {
            Ok(())
        } else {
            Err(BaseError::ForeignSnapshot)
        }
    }
}
