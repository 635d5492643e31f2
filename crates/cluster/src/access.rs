//! The planner's view of etcd's authentication and of the NetworkPolicy. Plain data without passwords (invariant 14).

use etcd::Login;
use runtime::credentials::Record;

use crate::seen::{Kept, Seen};

/// The authentication and the NetworkPolicy that the spec of the EtcdCluster requests.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AccessRule {
    /// `spec.auth.enabled`.
    pub auth: Option<bool>,
    /// `spec.auth.secret`.
    pub secret: Option<String>,
    /// True if the spec requests a NetworkPolicy.
    pub network: bool,
}

/// The observed state of etcd's authentication and of the cluster's NetworkPolicy.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Access {
    /// Why the operator cannot use the credentials in the Secret of `spec.auth`; `None` if it can use them.
    pub fault: Option<String>,
    /// True if the user in the Secret is root, which etcd requires for enabling authentication.
    pub is_root: bool,
    /// How the passwords in the operator's own Secret compare to the password in `spec.auth.secret`.
    pub record: Record,
    /// etcd's answer to a login with the credentials; `None` without credentials.
    pub login: Seen<Option<Login>>,
    /// The error of a member that denied the operator access; `None` if no member has denied access.
    pub refused: Option<String>,
    /// The NetworkPolicy, compared with the NetworkPolicy that the operator would build.
    pub network: Kept<()>,
    /// The UID of the NetworkPolicy, if the cluster owns one.
    pub network_uid: Option<String>,
}
