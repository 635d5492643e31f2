//! The types that the observation returns. They contain no password (invariant 14).

use api::access::{OwnedStatus, PasswordStatus};
use api::version::EtcdVersion;
use etcd::{KeyPermission, PasswordCheck};
use k8s_openapi::jiff::Timestamp;

use crate::reason::Trouble;

/// The EtcdCluster that an object names.
#[derive(Clone, Debug, PartialEq)]
pub enum Cluster {
    /// The API server did not return the EtcdCluster. The text is the cause.
    Unknown(String),
    /// The EtcdCluster does not exist.
    Missing,
    /// The EtcdCluster exists.
    Present(ClusterFacts),
}

/// The state of an EtcdCluster.
#[derive(Clone, Debug, PartialEq)]
#[expect(
    clippy::struct_excessive_bools,
    reason = "each field is one property of the EtcdCluster"
)]
pub struct ClusterFacts {
    /// The UID of the EtcdCluster.
    pub uid: String,
    /// `status.clusterID`. `None` until the cluster has formed.
    pub cluster_id: Option<String>,
    /// True if the EtcdCluster is being deleted.
    pub is_deleting: bool,
    /// `spec.paused`.
    pub is_paused: bool,
    /// `spec.hibernate`.
    pub is_hibernated: bool,
    /// True if an EtcdRestore has locked the EtcdCluster.
    pub is_restoring: bool,
    /// True if `spec.auth` is set.
    pub has_auth: bool,
    /// True if the members check client certificates.
    pub has_client_tls: bool,
    /// `status.currentVersion`. `None` if it is not known.
    pub version: Option<EtcdVersion>,
    /// The state of authentication in etcd, or the reason why the operator does not know it.
    pub etcd: Result<EtcdFacts, Trouble>,
}

impl ClusterFacts {
    /// Whether the recorded ownership belongs to the etcd cluster of this EtcdCluster: the UID or the cluster ID must
    /// match. An EtcdCluster that is created again on its retained volumes has another UID. After a restore in place,
    /// etcd has another cluster ID.
    ///
    /// Invariant 1: while the cluster ID is not known, the ownership may belong to this etcd cluster, so the result is
    /// true.
    pub fn matches(&self, owned: &OwnedStatus) -> bool {
        let id = self.cluster_id.as_deref();
        owned.cluster_uid == self.uid || id.is_none_or(|id| id == owned.cluster_id)
    }
}

/// The state of authentication in etcd.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EtcdFacts {
    /// True if etcd requires a login.
    pub is_auth_enabled: bool,
    /// The user with which the operators log in.
    pub operator_user: Option<String>,
}

/// Another object of the same kind that names the same role or user in etcd.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rival {
    /// The name of the object.
    pub name: String,
    /// The creation time of the object.
    pub created: Option<Timestamp>,
    /// True if its status has recorded the role or the user.
    pub owns: bool,
}

/// The observation for an EtcdRole.
#[derive(Clone, Debug, PartialEq)]
pub struct RoleSnapshot {
    /// The EtcdCluster.
    pub cluster: Cluster,
    /// Other EtcdRoles that name the same role, without those that are being deleted.
    pub rivals: Vec<Rival>,
    /// The permissions of the role in etcd; `None` if etcd has no such role. The error is the reason why the operator
    /// does not know the permissions.
    pub found: Result<Option<Vec<KeyPermission>>, Trouble>,
}

/// The observation for an EtcdUser.
#[derive(Clone, Debug, PartialEq)]
pub struct UserSnapshot {
    /// The EtcdCluster.
    pub cluster: Cluster,
    /// Other EtcdUsers that name the same user, without those that are being deleted.
    pub rivals: Vec<Rival>,
    /// The roles of the user in etcd; `None` if etcd has no such user. The error is the reason why the operator does
    /// not know the roles.
    pub found: Result<Option<Vec<String>>, Trouble>,
    /// The EtcdRoles in `spec.roles`, in the same order.
    pub roles: Vec<RoleFacts>,
    /// The version of the Secret with the password; `None` without `spec.password`. The error is the reason why the
    /// operator cannot use the Secret.
    pub password: Option<Result<PasswordStatus, Trouble>>,
    /// Whether etcd accepts the password. `None` if no plan has asked for this check (`Plan::asks`).
    pub check: Option<PasswordCheck>,
}

/// An EtcdRole that an EtcdUser names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RoleFacts {
    /// The name of the EtcdRole.
    pub name: String,
    /// The state of the EtcdRole.
    pub state: RoleState,
}

/// The state of an EtcdRole that an EtcdUser names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RoleState {
    /// The EtcdRole does not exist or is being deleted.
    Missing,
    /// The operator cannot read the EtcdRole. The text is the cause.
    Unreadable(String),
    /// The EtcdRole belongs to the EtcdCluster of this name.
    OtherCluster(String),
    /// The EtcdRole does not own its role in etcd yet. The text is the name of the role in etcd.
    NotReady(String),
    /// The EtcdRole owns the role with this name in etcd.
    Ready(String),
}
