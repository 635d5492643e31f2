//! Types of the users and roles of etcd's authentication. Performs no I/O.

/// The access that a permission grants.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum KeyAccess {
    /// Reading and watching keys.
    Read,
    /// Writing and deleting keys.
    Write,
    /// Reading, watching, writing and deleting keys.
    ReadWrite,
}

/// A range of keys as etcd stores it in a permission. Unlike a [`KeyRange`](crate::KeyRange), an empty end means one
/// key.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PermissionRange {
    /// The first key.
    pub key: Vec<u8>,
    /// The end of the range, which the range does not contain. Empty for one key. One zero byte for all keys from `key`
    /// on.
    pub end: Vec<u8>,
}

/// A permission of a role. A role has at most one permission for each range.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct KeyPermission {
    /// The keys.
    pub range: PermissionRange,
    /// The access to these keys.
    pub access: KeyAccess,
}

/// The answer of etcd to a password of a user.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PasswordCheck {
    /// etcd accepts the password.
    Accepted,
    /// etcd rejects the password, or the user does not exist.
    Rejected,
    /// The user has no password.
    NoPassword,
    /// Authentication is disabled, so etcd checks no passwords.
    Off,
}
