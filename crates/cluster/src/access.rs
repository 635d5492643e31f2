//! Access control: the planner's view of etcd's authentication and of the NetworkPolicy. Plain
//! data without passwords (invariant 14).

use etcd::Login;
use runtime::credentials::Record;

use crate::seen::{Kept, Seen};

/// The desired access control.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AccessRule {
    /// `spec.auth.enabled`.
    pub auth: Option<bool>,
    /// `spec.auth.secret`.
    pub secret: Option<String>,
    /// Whether the cluster has a NetworkPolicy.
    pub network: bool,
}

/// The observed access control.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Access {
    /// Why the credentials of the spec are not available.
    pub fault: Option<String>,
    /// The user is root, which etcd requires when authentication is enabled.
    pub is_root: bool,
    /// Whether the operator's record of passwords contains the desired password.
    pub record: Record,
    /// How etcd answers the credentials; `None` without credentials.
    pub login: Seen<Option<Login>>,
    /// The answer of a member that rejected a call without credentials.
    pub refused: Option<String>,
    /// The NetworkPolicy.
    pub network: Kept<()>,
    /// The UID of the NetworkPolicy.
    pub network_uid: Option<String>,
}

impl Default for Access {
    fn default() -> Self {
        Self {
            fault: None,
            is_root: false,
            record: Record::None,
            login: Seen::Known(None),
            refused: None,
            network: Kept::Missing,
            network_uid: None,
        }
    }
}
