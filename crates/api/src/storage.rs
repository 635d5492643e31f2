//! The storage locations of backups: types of stores, fields of the spec, and paths.

mod block;

pub use block::{SecretName, SecretNames};

use kube::KubeSchema;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::problem::Problem;
use crate::schema::{is_false, object_name, optional_object_name};
use crate::text::text_enum;

text_enum! {
    /// Type of a store.
    StorageType {
        /// Amazon S3 or an S3-compatible store.
        S3 = "S3",
        /// Azure Blob Storage.
        Abs = "ABS",
        /// Google Cloud Storage.
        Gcs = "GCS",
        /// Alibaba Cloud OSS, through its S3 endpoint.
        Oss = "OSS",
        /// A PersistentVolumeClaim in the namespace of the object.
        Pvc = "PVC",
        /// A directory in the operator's pod.
        Local = "Local",
    }
}

text_enum! {
    /// Server-side encryption of objects in S3.
    ServerSideEncryption {
        /// Encryption with keys of the store.
        Aes256 = "AES256",
        /// Encryption with a key of AWS KMS.
        Kms = "aws:kms",
        /// Two layers of encryption with a key of AWS KMS.
        KmsDsse = "aws:kms:dsse",
    }
}

text_enum! {
    /// Protection level of an object lock.
    ObjectLockMode {
        /// Users with a special permission may shorten the lock. In S3, this is `s3:BypassGovernanceRetention`. Google
        /// Cloud Storage and Azure call this mode unlocked.
        Governance = "GOVERNANCE",
        /// No user may shorten the lock. Google Cloud Storage and Azure call this mode locked.
        Compliance = "COMPLIANCE",
    }
}

/// A location in S3 or in an S3-compatible store.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = (
    "self.path.matches('^[^/]+/.*[^/]$')",
    "path must be <bucket>/<key>, such as my-bucket/etcd/backup: use a bucket, a slash and a key that does not end in a slash"
))]
#[x_kube(validation = (
    "!has(self.kmsKeyId) || (has(self.serverSideEncryption) && self.serverSideEncryption.startsWith('aws:kms'))",
    "kmsKeyId is used with serverSideEncryption aws:kms or aws:kms:dsse only: set serverSideEncryption or remove kmsKeyId"
))]
pub struct S3Source {
    /// Bucket and key of the backup: `<bucket>/<key>`. For scheduled backups, the operator appends
    /// `_v<revision>_<time>` to the key.
    #[schemars(length(min = 1, max = 1024))]
    pub path: String,
    /// Name of the Secret with the keys `credentials` and `config`, which are AWS ini files with the profile
    /// `default`. If not set, each pod uses its own cloud identity (IRSA or instance profile).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "optional_object_name")]
    pub aws_secret: Option<String>,
    /// URL of an S3-compatible store. If empty, the store is AWS.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 2048))]
    pub endpoint: Option<String>,
    /// If true, the bucket is in the path of URLs instead of the host name. Most S3-compatible stores require this.
    #[serde(default, skip_serializing_if = "is_false")]
    pub force_path_style: bool,
    /// Region of the bucket. If not set, the operator uses the region in the key `config` of the Secret, or
    /// `us-east-1`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 64))]
    pub region: Option<String>,
    /// Name of the Secret with the key `ca.crt`, which contains the CA certificate of the endpoint.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "object_name")]
    pub ca_secret: Option<String>,
    /// If true, the certificate of the endpoint is not verified. For tests only.
    #[serde(default, skip_serializing_if = "is_false")]
    pub insecure_skip_verify: bool,
    /// Server-side encryption of the object.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub server_side_encryption: Option<ServerSideEncryption>,
    /// ID of a key of AWS KMS. Requires `serverSideEncryption: aws:kms` or `aws:kms:dsse`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 2048))]
    pub kms_key_id: Option<String>,
    /// Lock of the object against deletion. The bucket must have been created with object lock.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub object_lock: Option<ObjectLock>,
}

/// A lock of an object against deletion.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ObjectLock {
    /// Protection level. `GOVERNANCE`: users with a special permission may shorten the lock. `COMPLIANCE`: no user may
    /// shorten the lock.
    pub mode: ObjectLockMode,
    /// Duration of the lock, in days after the upload.
    #[schemars(range(min = 1, max = 36500))]
    pub days: i32,
}

/// A location in Azure Blob Storage.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = (
    "self.path.matches('^[^/]+/.*[^/]$')",
    "path must be <container>/<key>, such as my-container/etcd/backup: use a container, a slash and a key that does not end in a slash"
))]
pub struct AbsSource {
    /// Container and key of the backup: `<container>/<key>`.
    #[schemars(length(min = 1, max = 1024))]
    pub path: String,
    /// Name of the Secret with the keys `storage-account`, `storage-key` and `cloud`. If not set, each pod uses its
    /// own cloud identity (workload identity).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "optional_object_name")]
    pub abs_secret: Option<String>,
    /// URL of the blob service. Required without `absSecret`. With `absSecret`, the default is Azure's public service.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 2048))]
    pub endpoint: Option<String>,
    /// Lock of the object against deletion. The container must have support for version-level immutability.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub object_lock: Option<ObjectLock>,
}

/// A location in Google Cloud Storage.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = (
    "self.path.matches('^[^/]+/.*[^/]$')",
    "path must be <bucket>/<key>, such as my-bucket/etcd/backup: use a bucket, a slash and a key that does not end in a slash"
))]
pub struct GcsSource {
    /// Bucket and key of the backup: `<bucket>/<key>`.
    #[schemars(length(min = 1, max = 1024))]
    pub path: String,
    /// Name of the Secret with the key `credentials.json` or `access-token`. If not set, each pod uses its own cloud
    /// identity (workload identity).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "optional_object_name")]
    pub gcp_secret: Option<String>,
    /// URL of the storage service. The default is Google's public service.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 2048))]
    pub endpoint: Option<String>,
    /// Lock of the object against deletion. The bucket must have object retention turned on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub object_lock: Option<ObjectLock>,
}

/// A location in Alibaba Cloud OSS.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = (
    "self.path.matches('^[^/]+/.*[^/]$')",
    "path must be <bucket>/<key>, such as my-bucket/etcd/backup: use a bucket, a slash and a key that does not end in a slash"
))]
pub struct OssSource {
    /// Bucket and key of the backup: `<bucket>/<key>`.
    #[schemars(length(min = 1, max = 1024))]
    pub path: String,
    /// Name of the Secret with the keys `accessKeyID` and `accessKeySecret`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "optional_object_name")]
    pub oss_secret: Option<String>,
    /// URL of the OSS region. If empty, the operator uses `https://oss-cn-hangzhou.aliyuncs.com`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 2048))]
    pub endpoint: Option<String>,
}

/// A location on a PersistentVolumeClaim.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = (
    "!self.path.startsWith('/') && !self.path.endsWith('/') && !self.path.contains('..')",
    "path must be relative to the volume's root, such as etcd/backup: remove '..' and any slash at the start or the end"
))]
pub struct PvcSource {
    /// Name of the PersistentVolumeClaim, in the namespace of the object.
    #[schemars(schema_with = "object_name")]
    pub claim_name: String,
    /// Path of the backup, relative to the root of the volume.
    #[schemars(length(min = 1, max = 1024))]
    pub path: String,
}

/// A location in the operator's directory for local backups.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = (
    "!self.path.startsWith('/') && !self.path.endsWith('/') && !self.path.contains('..')",
    "path must be relative to the operator's directory, such as etcd/backup: remove '..' and any slash at the start or the end"
))]
pub struct LocalSource {
    /// Path of the backup, relative to the operator's directory for local backups.
    #[schemars(length(min = 1, max = 1024))]
    pub path: String,
}

/// The storage locations of a spec. Exactly one must be set: the location for the storage type.
#[derive(Clone, Copy, Debug)]
pub struct Blocks<'a> {
    /// `spec.s3`.
    pub s3: Option<&'a S3Source>,
    /// `spec.abs`.
    pub abs: Option<&'a AbsSource>,
    /// `spec.gcs`.
    pub gcs: Option<&'a GcsSource>,
    /// `spec.oss`.
    pub oss: Option<&'a OssSource>,
    /// `spec.pvc`.
    pub pvc: Option<&'a PvcSource>,
    /// `spec.local`.
    pub local: Option<&'a LocalSource>,
}

/// A reference to the storage location that a spec selects.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum StorageSource<'a> {
    /// S3 or an S3-compatible store.
    S3(&'a S3Source),
    /// Azure Blob Storage.
    Abs(&'a AbsSource),
    /// Google Cloud Storage.
    Gcs(&'a GcsSource),
    /// Alibaba Cloud OSS.
    Oss(&'a OssSource),
    /// A PersistentVolumeClaim.
    Pvc(&'a PvcSource),
    /// The operator's directory.
    Local(&'a LocalSource),
}

/// A storage location. Its JSON has one key, such as `s3`. Operators store it in statuses and pass it to programs in
/// pods. It names Secrets, but contains no credentials.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum StorageBlock {
    /// S3 or an S3-compatible store.
    S3(S3Source),
    /// Azure Blob Storage.
    Abs(AbsSource),
    /// Google Cloud Storage.
    Gcs(GcsSource),
    /// Alibaba Cloud OSS.
    Oss(OssSource),
    /// A PersistentVolumeClaim.
    Pvc(PvcSource),
    /// The operator's directory.
    Local(LocalSource),
}

impl StorageBlock {
    /// The location as a reference.
    pub fn source(&self) -> StorageSource<'_> {
        match self {
            Self::S3(block) => StorageSource::S3(block),
            Self::Abs(block) => StorageSource::Abs(block),
            Self::Gcs(block) => StorageSource::Gcs(block),
            Self::Oss(block) => StorageSource::Oss(block),
            Self::Pvc(block) => StorageSource::Pvc(block),
            Self::Local(block) => StorageSource::Local(block),
        }
    }

    /// The same location with another path.
    #[must_use]
    pub fn at(mut self, path: String) -> Self {
        match &mut self {
            Self::S3(block) => block.path = path,
            Self::Abs(block) => block.path = path,
            Self::Gcs(block) => block.path = path,
            Self::Oss(block) => block.path = path,
            Self::Pvc(block) => block.path = path,
            Self::Local(block) => block.path = path,
        }
        self
    }
}

impl From<StorageSource<'_>> for StorageBlock {
    fn from(source: StorageSource<'_>) -> Self {
        match source {
            StorageSource::S3(block) => Self::S3(block.clone()),
            StorageSource::Abs(block) => Self::Abs(block.clone()),
            StorageSource::Gcs(block) => Self::Gcs(block.clone()),
            StorageSource::Oss(block) => Self::Oss(block.clone()),
            StorageSource::Pvc(block) => Self::Pvc(block.clone()),
            StorageSource::Local(block) => Self::Local(block.clone()),
        }
    }
}

impl<'a> Blocks<'a> {
    /// The location for the storage type. `prefix` and `type_field` are field names for the error, such as `spec` and
    /// `storageType`.
    ///
    /// # Errors
    /// Fails if the storage type is unknown, or if its location is missing.
    pub fn select(
        &self,
        storage_type: &StorageType,
        prefix: &str,
        type_field: &str,
    ) -> Result<StorageSource<'a>, Problem> {
        let missing = |block: &str| {
            Problem::new(
                format!("{prefix}.{block}"),
                format!("is missing, but {prefix}.{type_field} is {storage_type}"),
                format!("add the block {prefix}.{block}, or correct {prefix}.{type_field}"),
            )
        };
        match storage_type {
            StorageType::S3 => self.s3.map(StorageSource::S3).ok_or_else(|| missing("s3")),
            StorageType::Abs => self
                .abs
                .map(StorageSource::Abs)
                .ok_or_else(|| missing("abs")),
            StorageType::Gcs => self
                .gcs
                .map(StorageSource::Gcs)
                .ok_or_else(|| missing("gcs")),
            StorageType::Oss => self
                .oss
                .map(StorageSource::Oss)
                .ok_or_else(|| missing("oss")),
            StorageType::Pvc => self
                .pvc
                .map(StorageSource::Pvc)
                .ok_or_else(|| missing("pvc")),
            StorageType::Local => self
                .local
                .map(StorageSource::Local)
                .ok_or_else(|| missing("local")),
            StorageType::Unknown(text) => Err(unknown_storage_type(text, prefix, type_field)),
        }
    }

    /// True if at least one location is set.
    pub fn any(&self) -> bool {
        self.s3.is_some()
            || self.abs.is_some()
            || self.gcs.is_some()
            || self.oss.is_some()
            || self.pvc.is_some()
            || self.local.is_some()
    }

    /// The problems of the storage type, of the location, and of its path.
    pub fn problems(
        &self,
        storage_type: &StorageType,
        prefix: &str,
        type_field: &str,
    ) -> Vec<Problem> {
        match self.select(storage_type, prefix, type_field) {
            Err(problem) => vec![problem],
            Ok(source) => source.path_problem(prefix).into_iter().collect(),
        }
    }
}

fn unknown_storage_type(text: &str, prefix: &str, type_field: &str) -> Problem {
    Problem::new(
        format!("{prefix}.{type_field}"),
        format!("has the unknown value {text:?}"),
        format!("use one of {}", StorageType::KNOWN.join(", ")),
    )
}

impl StorageSource<'_> {
    /// The key of the location in JSON.
    pub fn block(&self) -> &'static str {
        match self {
            Self::S3(_) => "s3",
            Self::Abs(_) => "abs",
            Self::Gcs(_) => "gcs",
            Self::Oss(_) => "oss",
            Self::Pvc(_) => "pvc",
            Self::Local(_) => "local",
        }
    }

    /// The path of the location.
    pub fn path(&self) -> &str {
        match self {
            Self::S3(source) => &source.path,
            Self::Abs(source) => &source.path,
            Self::Gcs(source) => &source.path,
            Self::Oss(source) => &source.path,
            Self::Pvc(source) => &source.path,
            Self::Local(source) => &source.path,
        }
    }

    /// True if the path starts with a bucket or a container.
    pub fn has_bucket(&self) -> bool {
        !matches!(self, Self::Pvc(_) | Self::Local(_))
    }

    fn path_problem(&self, prefix: &str) -> Option<Problem> {
        let field = format!("{prefix}.{}.path", self.block());
        let path = self.path();
        if self.has_bucket() {
            let error = ObjectPath::parse(path).err()?;
            Some(Problem::new(
                field,
                format!("is {path:?}: {error}"),
                "use <bucket>/<key>, such as my-bucket/etcd/backup",
            ))
        } else {
            let bad = path.is_empty()
                || path.starts_with('/')
                || path.ends_with('/')
                || path.contains("..");
            bad.then(|| {
                Problem::new(
                    field,
                    format!("is {path:?}"),
                    "use a relative path such as etcd/backup: remove '..' and any slash at the start or the end",
                )
            })
        }
    }
}

/// A bucket and a key in an object store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ObjectPath {
    /// The bucket or container.
    pub bucket: String,
    /// The key.
    pub key: String,
}

/// The reason why a path is not `<bucket>/<key>`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum PathError {
    /// The path has no slash.
    #[error("the slash between bucket and key is missing")]
    NoSlash,
    /// The path begins with a slash, so the bucket is missing.
    #[error("the bucket is missing")]
    NoBucket,
    /// The path ends with its first slash, so the key is missing.
    #[error("the key is missing")]
    NoKey,
    /// The key ends with a slash, like the name of a directory.
    #[error("the key ends in a slash")]
    EndsInSlash,
}

impl ObjectPath {
    /// Splits `<bucket>/<key>` at the first slash.
    ///
    /// # Errors
    /// Fails if the bucket or the key is missing, or if the key ends with a slash.
    pub fn parse(path: &str) -> Result<Self, PathError> {
        let (bucket, key) = path.split_once('/').ok_or(PathError::NoSlash)?;
        if bucket.is_empty() {
            return Err(PathError::NoBucket);
        }
        if key.is_empty() {
            return Err(PathError::NoKey);
        }
        if key.ends_with('/') {
            return Err(PathError::EndsInSlash);
        }
        Ok(Self {
            bucket: bucket.to_owned(),
            key: key.to_owned(),
        })
    }
}

#[cfg(test)]
mod tests;
