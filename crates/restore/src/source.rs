//! From what a spec says about a place, and a Secret's content, to an open store. Used by the operator, which
//! reads the Secret, and by the seed's pod, which has it mounted.

use std::collections::BTreeMap;

use api::conditions::Reason;
use api::manifest::{BackupManifest, manifest_key};
use api::storage::{ObjectPath, S3Source};
use bytes::Bytes;
use futures::StreamExt;
use store::{S3Access, S3Config, S3Keys, S3Store, Store};

use crate::observed::Trouble;

/// The key of the certificate authority in `caSecret`.
pub const CA_KEY: &str = "ca.crt";

/// More than any manifest has: what is larger is something else.
const MANIFEST_LIMIT: u64 = 4 << 20;

/// A Secret's data, or what a mounted Secret's directory holds.
pub type SecretData = BTreeMap<String, Vec<u8>>;

/// The place of a backup, open.
pub struct Place {
    /// The bucket.
    pub store: S3Store,
    /// The backup's key in it.
    pub key: String,
}

/// Opens the bucket. `secret` and `ca` are the content of the Secrets the source names.
pub async fn open(
    source: &S3Source,
    secret: Option<&SecretData>,
    ca: Option<&SecretData>,
) -> Result<Place, Trouble> {
    let path = ObjectPath::parse(&source.path).map_err(|error| {
        Trouble::new(
            Reason::InvalidSpec,
            format!("s3.path is {:?}: {error}", source.path),
        )
    })?;
    let access = match secret {
        Some(data) => {
            S3Access::Keys(S3Keys::from_secret(data).map_err(|error| in_secret(source, &error))?)
        }
        None => S3Access::Ambient,
    };
    let ca = match ca {
        Some(data) => Some(data.get(CA_KEY).cloned().ok_or_else(|| no_ca(source))?),
        None => None,
    };
    let config = S3Config {
        bucket: path.bucket,
        endpoint: source
            .endpoint
            .clone()
            .filter(|endpoint| !endpoint.is_empty()),
        region: source.region.clone(),
        force_path_style: source.force_path_style,
        access,
        ca,
    };
    let store = S3Store::new(config)
        .await
        .map_err(|error| trouble(&error))?;
    Ok(Place {
        store,
        key: path.key,
    })
}

fn in_secret(source: &S3Source, error: &store::Error) -> Trouble {
    let name = source.aws_secret.as_deref().unwrap_or_default();
    Trouble::new(
        Reason::SecretMissing,
        format!("spec.s3.awsSecret: the Secret {name}: {error}"),
    )
}

fn no_ca(source: &S3Source) -> Trouble {
    let name = source.ca_secret.as_deref().unwrap_or_default();
    Trouble::new(
        Reason::SecretMissing,
        format!(
            "spec.s3.caSecret: the Secret {name} has no key {CA_KEY}: add the certificate authority under it"
        ),
    )
}

/// What a failure of the store means for the restore.
pub fn trouble(error: &store::Error) -> Trouble {
    let reason = match error {
        store::Error::NoSuchBucket { .. } => Reason::BucketMissing,
        store::Error::NoSuchObject { .. } => Reason::BackupMissing,
        store::Error::AccessDenied(_) | store::Error::ClockSkew(_) => Reason::AccessDenied,
        store::Error::Invalid { .. } => Reason::InvalidSpec,
        _ => Reason::StoreUnreachable,
    };
    Trouble::new(reason, error.to_string())
}

impl Place {
    /// The manifest beside the backup; `None` when there is none, as beside backups of the old operator.
    pub async fn manifest(&self) -> Result<Option<BackupManifest>, Trouble> {
        let key = manifest_key(&self.key);
        let mut object = match self.store.get(&key).await {
            Ok(object) => object,
            Err(store::Error::NoSuchObject { .. }) => return Ok(None),
            Err(error) => return Err(trouble(&error)),
        };
        if object.size > MANIFEST_LIMIT {
            return Err(unreadable_manifest(&key, "it is larger than 4 MiB"));
        }
        let mut content = Vec::new();
        while let Some(chunk) = object.chunks.next().await {
            let chunk: Bytes = chunk.map_err(|error| trouble(&error))?;
            content.extend_from_slice(&chunk);
        }
        let manifest: BackupManifest = serde_json::from_slice(&content)
            .map_err(|error| unreadable_manifest(&key, &error.to_string()))?;
        match manifest.compression.as_str() {
            "" | "none" => Ok(Some(manifest)),
            other => Err(Trouble::new(
                Reason::NotSupported,
                format!("the backup is compressed with {other:?}, which this release cannot read"),
            )),
        }
    }

    /// Whether the backup is there.
    pub async fn check(&self) -> Result<(), Trouble> {
        match self.store.head(&self.key).await {
            Ok(Some(_)) => Ok(()),
            Ok(None) => {
                let message = format!(
                    "there is no backup {:?} in {}: correct the path",
                    self.key,
                    self.store.location()
                );
                Err(Trouble::new(Reason::BackupMissing, message))
            }
            Err(error) => Err(trouble(&error)),
        }
    }
}

fn unreadable_manifest(key: &str, why: &str) -> Trouble {
    Trouble::new(
        Reason::SnapshotUnreadable,
        format!(
            "the manifest {key:?} beside the backup cannot be read: {why}; restore another backup, or remove that \
             object and give spec.etcdCluster.template"
        ),
    )
}
