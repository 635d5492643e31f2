//! Who gets in: what the planner sees of etcd's authentication and of the NetworkPolicy, and the writes for both.
//! Plain data; no password is in any of it (invariant 14).

use std::fmt;

use etcd::Login;
use runtime::credentials::Record;

use crate::seen::{Kept, Seen};

/// What the spec asks for.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AccessRule {
    /// `spec.auth.enabled`.
    pub auth: Option<bool>,
    /// `spec.auth.secret`.
    pub secret: Option<String>,
    /// Whether there is a NetworkPolicy.
    pub network: bool,
}

/// What was observed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Access {
    /// Why the credentials of the spec cannot be had.
    pub fault: Option<String>,
    /// Their user is the one etcd asks for when its authentication is turned on.
    pub is_root: bool,
    /// How the operator's own record of passwords stands to the wanted one.
    pub record: Record,
    /// How etcd takes the credentials; `None` where there are none.
    pub login: Seen<Option<Login>>,
    /// What a member said that refused to answer for want of credentials.
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

/// A write about who gets in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AccessWrite {
    /// Records the wanted password, in the operator's own Secret.
    Record {
        /// And keeps those that may be etcd's still.
        others: bool,
    },
    /// Deletes that Secret.
    Forget,
    /// Makes root and turns authentication on.
    Enable,
    /// Turns it off.
    Disable,
    /// Sets the wanted password in etcd.
    ChangePassword,
    /// Applies the NetworkPolicy.
    ApplyNetwork,
    /// Deletes it.
    DeleteNetwork,
}

impl fmt::Display for AccessWrite {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Record { .. } => "record the password that is to be etcd's",
            Self::Forget => "delete the record of etcd's password",
            Self::Enable => "turn etcd's authentication on",
            Self::Disable => "turn etcd's authentication off",
            Self::ChangePassword => "change the password of etcd's user to that of the Secret",
            Self::ApplyNetwork => "apply the NetworkPolicy",
            Self::DeleteNetwork => "delete the NetworkPolicy",
        })
    }
}
