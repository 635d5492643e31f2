//! Converts the errors of a transfer into reasons and messages. Performs no I/O.

use etcd::InspectError;

use crate::reason::{Reason, Trouble};

pub(super) fn canceled() -> Trouble {
    Trouble::new(Reason::StepFailed, "the backup was canceled")
}

pub(super) fn in_compression(error: &std::io::Error) -> Trouble {
    Trouble::new(
        Reason::StepFailed,
        format!("the snapshot cannot be compressed: {error}"),
    )
}

pub(super) fn in_encryption(error: &store::encryption::Error) -> Trouble {
    Trouble::new(
        Reason::StepFailed,
        format!("the snapshot cannot be encrypted: {error}"),
    )
}

pub(super) fn in_etcd(error: &etcd::Error) -> Trouble {
    let (reason, remedy) = match error {
        etcd::Error::AccessDenied(_) => (
            Reason::AccessDenied,
            "; name the Secret of a user with the role root in spec.authSecret (with spec.etcdEndpoints) or in \
             spec.auth.secret of the EtcdCluster (with spec.etcdCluster)",
        ),
        _ => (Reason::EtcdUnreachable, ""),
    };
    Trouble::new(reason, format!("no snapshot from etcd: {error}{remedy}"))
}

/// Converts an error of the store.
pub fn in_store(error: &store::Error) -> Trouble {
    let reason = match error {
        store::Error::NoSuchBucket { .. } => Reason::BucketMissing,
        store::Error::AccessDenied(_)
        | store::Error::NoIdentity(_)
        | store::Error::ClockSkew(_) => Reason::AccessDenied,
        store::Error::Invalid { .. } => Reason::InvalidSpec,
        store::Error::Secret { .. } => Reason::SecretMissing,
        _ => Reason::StoreUnreachable,
    };
    Trouble::new(reason, error.to_string())
}

pub(super) fn unreadable(member: &str, error: InspectError) -> Trouble {
    let reason = match error {
        InspectError::ChecksumMismatch | InspectError::Truncated { .. } => Reason::ChecksumMismatch,
        InspectError::NotADatabase | InspectError::Broken { .. } => Reason::SnapshotUnreadable,
    };
    Trouble::new(reason, format!("the snapshot of {member}: {error}"))
}
