//! `EtcdRole` and `EtcdUser`: roles and users of etcd's authentication.

mod check;
mod role;
mod user;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

pub use check::{MAX_NAME, validate_role, validate_user};
pub use role::{EtcdRole, EtcdRoleSpec, EtcdRoleStatus, Permission, PermissionAccess};
pub use user::{EtcdUser, EtcdUserSpec, EtcdUserStatus, PasswordSource, PasswordStatus};

use crate::schema::is_false;
use crate::text::text_enum;

text_enum! {
    /// What happens to the role or the user in etcd after the deletion of its object.
    AccessDeletionPolicy {
        /// The operator deletes the role or the user in etcd.
        Delete = "Delete",
        /// The role or the user stays in etcd.
        Retain = "Retain",
    }
}

/// A role or a user in etcd that an object owns. The operator records it before it creates the role or the user, and
/// changes no other role or user.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct OwnedStatus {
    /// Name of the role or the user in etcd.
    #[serde(default)]
    pub name: String,
    /// Name of the EtcdCluster.
    #[serde(default)]
    pub cluster: String,
    /// UID of the EtcdCluster.
    #[serde(default, rename = "clusterUID")]
    pub cluster_uid: String,
    /// Cluster ID of etcd, in hexadecimal without leading zeros.
    #[serde(default, rename = "clusterID")]
    pub cluster_id: String,
    /// True after etcd has confirmed that the role or the user exists. Until then, the operator deletes it only if it
    /// has no permissions or roles that are not in the spec.
    #[serde(default, skip_serializing_if = "is_false")]
    pub created: bool,
}
