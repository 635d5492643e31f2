//! The reasons of conditions and Events of EtcdRoles and EtcdUsers.

use api::readiness::Readiness;

/// A problem of an EtcdRole or an EtcdUser, or the reason why it waits.
pub type Trouble = runtime::Trouble<Reason>;

api::reasons! {
    /// Reason of a condition or an Event.
    pub enum Reason {
        /// A role or a user of this name exists in etcd, and this object does not own it.
        AlreadyExists,
        /// The role or the user in etcd matches the spec.
        AsDesired,
        /// The EtcdCluster has no `spec.auth`.
        AuthNotConfigured,
        /// A Secret with the certificate or the credentials of the operators cannot be used.
        AuthSecret,
        /// The EtcdCluster is being deleted.
        ClusterDeleting,
        /// The EtcdCluster does not exist.
        ClusterMissing,
        /// The EtcdCluster has not formed, or its members cannot be identified.
        ClusterNotReady,
        /// The EtcdCluster cannot be read.
        ClusterUnreadable,
        /// etcd denies the operator access.
        EtcdAccessDenied,
        /// No member of the EtcdCluster answers.
        EtcdUnreachable,
        /// The members of the EtcdCluster are stopped.
        Hibernated,
        /// The operator is working on the object.
        InProgress,
        /// The spec is rejected.
        InvalidSpec,
        /// The name or the EtcdCluster in the spec was changed.
        NameChanged,
        /// Another object names the same role or user in etcd.
        NameConflict,
        /// The EtcdCluster does not check client certificates.
        NoClientTls,
        /// The etcd version lacks a required feature.
        NotSupported,
        /// The operator has changed a password in etcd.
        PasswordChanged,
        /// `spec.paused` of the EtcdCluster is true.
        Paused,
        /// An EtcdRestore has locked the EtcdCluster.
        Restoring,
        /// The operator has changed a role in etcd.
        RoleChanged,
        /// The operator has created a role in etcd.
        RoleCreated,
        /// The operator has deleted a role in etcd.
        RoleDeleted,
        /// An EtcdRole in `spec.roles` does not exist, or belongs to another EtcdCluster.
        RoleMissing,
        /// An EtcdRole in `spec.roles` has no role in etcd yet.
        RoleNotReady,
        /// The existing user in etcd has the role `root`, so the operator does not take it over.
        RootUser,
        /// The Secret with the password, or its key, is missing.
        SecretMissing,
        /// A step failed; the message names the cause.
        StepFailed,
        /// The operator has changed the roles of a user in etcd.
        UserChanged,
        /// The operator has created a user in etcd.
        UserCreated,
        /// The operator has deleted a user in etcd.
        UserDeleted,
    }
}

impl Reason {
    /// The readiness of an object with this reason: `Stalled` if an administrator must act before the operator can
    /// continue.
    pub fn readiness(self) -> Readiness {
        match self {
            Self::AsDesired => Readiness::Ready,
            Self::ClusterDeleting
            | Self::ClusterNotReady
            | Self::ClusterUnreadable
            | Self::EtcdUnreachable
            | Self::InProgress
            | Self::Restoring
            | Self::RoleNotReady
            | Self::StepFailed => Readiness::Reconciling,
            _ => Readiness::Stalled,
        }
    }
}
