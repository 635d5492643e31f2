//! The Secrets that a storage block names, and the path in the location of a stored backup.

use super::{StorageBlock, StorageSource};

/// A Secret that a storage block names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SecretName<'a> {
    /// The field of the spec that names the Secret, for messages.
    pub field: &'static str,
    /// The Secret that the spec names.
    pub name: &'a str,
}

/// The Secrets that a storage block names.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SecretNames<'a> {
    /// The Secret with the credentials. If this is `None`, the process uses the identity of its pod. A PVC and a local
    /// directory need neither.
    pub credentials: Option<SecretName<'a>>,
    /// The Secret with the CA certificate of the endpoint.
    pub ca: Option<SecretName<'a>>,
}

impl<'a> StorageSource<'a> {
    /// The Secrets that the block names.
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

impl StorageBlock {
    /// The path of a location such as `s3://bucket/etcd/main`, in the form of the paths in storage blocks. `None` if
    /// the location has no scheme, or if it is in another PVC than the one of this block.
    pub fn path_in<'a>(&self, location: &'a str) -> Option<&'a str> {
        let (_, path) = location.split_once("://")?;
        match self {
            // The path in a PVC's block does not contain the name of the PVC, but the location does.
            Self::Pvc(pvc) => path.strip_prefix(&pvc.claim_name)?.strip_prefix('/'),
            _ => Some(path),
        }
    }
}
