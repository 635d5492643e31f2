//! Opens the store that a storage block of a spec describes, such as `spec.s3`. The credentials come from the Secrets
//! that the block names, and only the store gets them (invariant 14).

use std::path::PathBuf;
use std::sync::Arc;

use api::storage::{ObjectPath, OssSource, S3Source, SecretName, StorageSource};

use crate::oss;
pub use crate::secret::SecretData;
use crate::{
    AbsAccess, AbsConfig, AbsStore, Error, GcsAccess, GcsConfig, GcsStore, LocalStore, S3Access,
    S3Config, S3Keys, S3Protection, S3Store, Store,
};

/// The key of the CA certificate in `caSecret`.
const CA_KEY: &str = "ca.crt";

/// An open store and the key of a backup.
#[derive(Clone)]
pub struct Target {
    /// The bucket, container or directory.
    pub store: Arc<dyn Store>,
    /// The key of the backup in the store.
    pub key: String,
}

/// The data of the Secrets that a storage block names.
#[derive(Clone, Copy, Default)]
pub struct Secrets<'a> {
    /// Data of the Secret [`credentials`](api::storage::SecretNames::credentials).
    pub credentials: Option<&'a SecretData>,
    /// Data of the Secret [`ca`](api::storage::SecretNames::ca).
    pub ca: Option<&'a SecretData>,
}

/// Directories of this process that can serve as stores.
#[derive(Clone, Debug, Default)]
pub struct Directories {
    /// For the storage type `Local`: the subdirectory of one namespace in the operator's directory.
    pub local: Option<LocalStore>,
    /// For the storage type `PVC`: the directory where the PersistentVolumeClaim is mounted.
    pub claim: Option<PathBuf>,
}

/// The bucket and the key that the storage block `source` accesses with the pod's own identity. `None` if the block
/// names a Secret or uses a directory. The caller must check that the namespace of the EtcdBackup or EtcdRestore may
/// use this identity.
pub fn ambient(source: &StorageSource<'_>) -> Option<ObjectPath> {
    let no_secret = source.has_bucket() && source.secrets().credentials.is_none();
    no_secret
        .then(|| ObjectPath::parse(source.path()).ok())
        .flatten()
}

/// Opens the store that a block describes. Sends no request.
///
/// # Errors
/// Fails if the configuration is invalid. [`Error::Invalid`] names the field of the spec, and [`Error::Secret`] the
/// field that names the Secret.
pub async fn open(
    source: &StorageSource<'_>,
    secrets: Secrets<'_>,
    directories: &Directories,
) -> Result<Target, Error> {
    let block = source.block();
    match source {
        StorageSource::Pvc(pvc) => {
            let root = directories.claim.as_ref().ok_or_else(|| {
                let claim = &pvc.claim_name;
                let problem = format!("the volume of PVC {claim} is not mounted in this process");
                invalid("spec.pvc.claimName", problem)
            })?;
            let named = LocalStore::named(root, format!("pvc://{}", pvc.claim_name));
            Ok(directory(named, &pvc.path))
        }
        StorageSource::Local(local) => {
            let store = directories.local.clone().ok_or_else(|| {
                let problem = "the operator has no directory for backups of the type Local: set its flag \
                    --local-directory (backups.localVolume of the chart), or set spec.storageType to PVC";
                invalid("spec.storageType", problem.to_owned())
            })?;
            Ok(directory(store, &local.path))
        }
        StorageSource::S3(_)
        | StorageSource::Abs(_)
        | StorageSource::Gcs(_)
        | StorageSource::Oss(_) => {
            let path = ObjectPath::parse(source.path()).map_err(|error| {
                invalid(
                    &format!("spec.{block}.path"),
                    format!("{:?}: {error}", source.path()),
                )
            })?;
            let store = bucket(source, path.bucket, secrets)
                .await
                .map_err(|error| in_spec(source, error))?;
            Ok(Target {
                store,
                key: path.key,
            })
        }
    }
}

fn directory(store: LocalStore, path: &str) -> Target {
    Target {
        store: Arc::new(store),
        key: path.to_owned(),
    }
}

async fn bucket(
    source: &StorageSource<'_>,
    bucket: String,
    secrets: Secrets<'_>,
) -> Result<Arc<dyn Store>, Error> {
    Ok(match source {
        StorageSource::S3(s3) => Arc::new(S3Store::new(s3_config(s3, bucket, secrets)?).await?),
        StorageSource::Oss(oss) => Arc::new(S3Store::new(oss_config(oss, bucket, secrets)?).await?),
        StorageSource::Abs(abs) => {
            let store = AbsStore::new(&AbsConfig {
                container: bucket,
                endpoint: abs.endpoint.clone(),
                access: match secrets.credentials {
                    Some(data) => AbsAccess::from_secret(data)?,
                    None => AbsAccess::Ambient,
                },
            })?;
            Arc::new(store.with_lock(abs.object_lock.clone()))
        }
        StorageSource::Gcs(gcs) => {
            if let Some(data) = secrets.credentials {
                GcsAccess::check_endpoint(data, gcs.endpoint.as_deref())?;
            }
            let config = GcsConfig {
                bucket,
                endpoint: gcs.endpoint.clone(),
                access: match secrets.credentials {
                    Some(data) => GcsAccess::from_secret(data)?,
                    None => GcsAccess::Ambient,
                },
            };
            let store = GcsStore::new(config).await?;
            Arc::new(store.with_lock(gcs.object_lock.clone()))
        }
        StorageSource::Pvc(_) | StorageSource::Local(_) => {
            return Err(Error::Other("a directory is not a bucket".to_owned()));
        }
    })
}

fn s3_config(s3: &S3Source, bucket: String, secrets: Secrets<'_>) -> Result<S3Config, Error> {
    let access = match secrets.credentials {
        Some(data) => S3Access::Keys(S3Keys::from_secret(data)?),
        None => S3Access::Ambient,
    };
    let ca = match secrets.ca {
        Some(data) => Some(data.get(CA_KEY).cloned().ok_or_else(|| Error::Secret {
            key: CA_KEY.to_owned(),
            problem: "is missing: add the CA certificate of the store as ca.crt".to_owned(),
        })?),
        None => None,
    };
    Ok(S3Config {
        bucket,
        endpoint: s3.endpoint().map(str::to_owned),
        region: s3.region.clone().filter(|region| !region.is_empty()),
        force_path_style: s3.force_path_style,
        access,
        ca,
        insecure_skip_verify: s3.insecure_skip_verify,
        protection: S3Protection {
            encryption: s3.server_side_encryption.clone(),
            kms_key_id: s3.kms_key_id.clone(),
            lock: s3.object_lock.clone(),
        },
    })
}

/// Converts an OSS block to an S3 configuration.
pub(crate) fn oss_config(
    oss: &OssSource,
    bucket: String,
    secrets: Secrets<'_>,
) -> Result<S3Config, Error> {
    let Some(data) = secrets.credentials else {
        let problem = "is missing, and the operator cannot use a cloud identity with OSS: name a Secret with the keys \
                       accessKeyID and accessKeySecret";
        return Err(invalid("ossSecret", problem.to_owned()));
    };
    let settings = oss::settings(oss.endpoint.as_deref());
    Ok(S3Config {
        bucket,
        endpoint: Some(settings.endpoint),
        region: settings.region,
        force_path_style: settings.force_path_style,
        access: S3Access::Keys(oss::keys(data)?),
        ..S3Config::default()
    })
}

/// Adds the field of the spec to an error, so that users know what to correct.
fn in_spec(source: &StorageSource<'_>, error: Error) -> Error {
    let secrets = source.secrets();
    match error {
        Error::Secret { key, problem } => {
            let named = if key == CA_KEY {
                secrets.ca
            } else {
                secrets.credentials
            };
            let problem = match named {
                Some(SecretName { name, .. }) => format!("Secret {name}: the key {key} {problem}"),
                None => format!("the key {key} {problem}"),
            };
            Error::Secret {
                key: named.map_or(source.block(), |named| named.field).to_owned(),
                problem,
            }
        }
        Error::Invalid { field, problem } => Error::Invalid {
            field: format!("spec.{}.{field}", source.block()),
            problem,
        },
        error => error,
    }
}

fn invalid(field: &str, problem: String) -> Error {
    Error::Invalid {
        field: field.to_owned(),
        problem,
    }
}

#[cfg(test)]
mod tests {
    use api::storage::{LocalSource, PvcSource};

    use super::*;

    async fn opened(source: &StorageSource<'_>, secrets: Secrets<'_>) -> String {
        match open(source, secrets, &Directories::default()).await {
            Ok(target) => format!("{} {}", target.store.location(), target.key),
            Err(error) => error.to_string(),
        }
    }

    #[tokio::test]
    async fn invalid_secret_or_endpoint_is_reported_with_its_spec_field() {
        let s3 = S3Source {
            path: "bucket/key".to_owned(),
            aws_secret: Some("aws".to_owned()),
            ca_secret: Some("authority".to_owned()),
            endpoint: Some("http://127.0.0.1:1".to_owned()),
            ..S3Source::default()
        };
        let source = StorageSource::S3(&s3);
        let good = SecretData::from([(
            "credentials".to_owned(),
            b"[default]\naws_access_key_id=a\naws_secret_access_key=b".to_vec(),
        )]);
        let empty = SecretData::new();
        let nonsense = SecretData::from([("ca.crt".to_owned(), b"nonsense".to_vec())]);
        let cases = [
            (
                &empty,
                None,
                "spec.s3.awsSecret: Secret aws: the key credentials is missing",
            ),
            (
                &good,
                Some(&empty),
                "spec.s3.caSecret: Secret authority: the key ca.crt is missing",
            ),
            (
                &good,
                Some(&nonsense),
                "spec.s3.caSecret: Secret authority: the key ca.crt has no certificate",
            ),
            (&good, None, "s3://bucket key"),
        ];
        for (credentials, ca, expected) in cases {
            let secrets = Secrets {
                credentials: Some(credentials),
                ca,
            };
            let text = opened(&source, secrets).await;
            assert!(text.starts_with(expected), "{text}");
        }
        let no_scheme = S3Source {
            endpoint: Some("minio:9000".to_owned()),
            ..s3.clone()
        };
        let secrets = Secrets {
            credentials: Some(&good),
            ca: None,
        };
        let text = opened(&StorageSource::S3(&no_scheme), secrets).await;
        assert!(text.starts_with("spec.s3.endpoint: "), "{text}");
    }

    #[tokio::test]
    async fn local_and_pvc_need_mounted_directory_and_oss_needs_secret() {
        let local = LocalSource {
            path: "etcd/backup".to_owned(),
        };
        let pvc = PvcSource {
            claim_name: "backups".to_owned(),
            path: "etcd/backup".to_owned(),
        };
        let nothing = Secrets::default();
        assert_eq!(
            opened(&StorageSource::Pvc(&pvc), nothing).await,
            "spec.pvc.claimName: the volume of PVC backups is not mounted in this process"
        );
        let text = opened(&StorageSource::Local(&local), nothing).await;
        assert!(text.contains("has no directory for backups"), "{text}");
        let mounted = Directories {
            local: Some(LocalStore::new("/local")),
            claim: Some("/claim".into()),
        };
        for (source, expected) in [
            (StorageSource::Local(&local), "file:///local"),
            (StorageSource::Pvc(&pvc), "pvc://backups"),
        ] {
            let target = open(&source, nothing, &mounted).await.unwrap();
            assert_eq!(target.store.location(), expected);
            assert_eq!(target.key, "etcd/backup");
        }
        let oss = OssSource {
            path: "bucket/key".to_owned(),
            ..OssSource::default()
        };
        let text = opened(&StorageSource::Oss(&oss), nothing).await;
        assert!(text.starts_with("spec.oss.ossSecret: is missing"), "{text}");
    }

    #[test]
    fn only_bucket_without_secret_uses_pod_identity() {
        let mut s3 = S3Source {
            path: "bucket/etcd/key".to_owned(),
            ..S3Source::default()
        };
        let reached = ambient(&StorageSource::S3(&s3)).unwrap();
        assert_eq!(
            (reached.bucket.as_str(), reached.key.as_str()),
            ("bucket", "etcd/key")
        );
        s3.aws_secret = Some(String::new());
        assert!(ambient(&StorageSource::S3(&s3)).is_some());
        s3.aws_secret = Some("aws".to_owned());
        assert_eq!(ambient(&StorageSource::S3(&s3)), None);
        let local = LocalSource {
            path: "etcd/backup".to_owned(),
        };
        assert_eq!(ambient(&StorageSource::Local(&local)), None);
    }
}
