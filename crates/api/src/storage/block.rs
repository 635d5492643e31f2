//! The Secrets of a storage location, and the path in the location of a stored backup.

use super::{S3Source, StorageBlock, StorageSource};
use crate::schema::given;

/// A Secret that a storage location names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SecretName<'a> {
    /// The field of the spec that names the Secret, as messages show it.
    pub field: &'static str,
    /// The name of the Secret.
    pub name: &'a str,
}

/// The Secrets that a storage location names.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SecretNames<'a> {
    /// The Secret with the credentials. Without it, the process uses the cloud identity of its pod. A PVC and a local
    /// directory need no credentials.
    pub credentials: Option<SecretName<'a>>,
    /// The Secret with the CA certificate of the endpoint.
    pub ca: Option<SecretName<'a>>,
}

impl<'a> StorageSource<'a> {
    /// The Secrets that the location names.
    pub fn secrets(&self) -> SecretNames<'a> {
        fn named<'a>(field: &'static str, name: Option<&'a String>) -> Option<SecretName<'a>> {
            name.filter(|name| !name.is_empty())
                .map(|name| SecretName { field, name })
        }
        let (credentials, ca) = match self {
            Self::S3(s3) => (
                named("spec.s3.awsSecret", s3.aws_secret.as_ref()),
                named("spec.s3.caSecret", s3.ca_secret.as_ref()),
            ),
            Self::Abs(abs) => (named("spec.abs.absSecret", abs.abs_secret.as_ref()), None),
            Self::Gcs(gcs) => (named("spec.gcs.gcpSecret", gcs.gcp_secret.as_ref()), None),
            Self::Oss(oss) => (named("spec.oss.ossSecret", oss.oss_secret.as_ref()), None),
            Self::Pvc(_) | Self::Local(_) => (None, None),
        };
        SecretNames { credentials, ca }
    }
}

impl S3Source {
    /// The name of the Secret with the credentials. `None` if the field is missing or empty.
    pub fn aws_secret(&self) -> Option<&str> {
        given(self.aws_secret.as_ref())
    }

    /// The URL of the endpoint. `None` if the field is missing or empty, which means AWS.
    pub fn endpoint(&self) -> Option<&str> {
        given(self.endpoint.as_ref())
    }
}

impl StorageBlock {
    /// The path in a URL such as `s3://bucket/etcd/main`, in the form of `path` of this storage location. `None` if
    /// the URL has no scheme, or names another PVC.
    pub fn path_in<'a>(&self, location: &'a str) -> Option<&'a str> {
        let (_, path) = location.split_once("://")?;
        match self {
            // The URL of a PVC starts with the name of the PVC (`claim_name`), but the field `path` does not contain
            // this name.
            Self::Pvc(pvc) => path.strip_prefix(&pvc.claim_name)?.strip_prefix('/'),
            _ => Some(path),
        }
    }
}
