//! Decides how to bring a role or a user in etcd into agreement with its object. Performs no I/O, and sees no password
//! (invariant 14).

mod gate;
mod role;
#[cfg(test)]
mod tests;
mod user;

use std::fmt;
use std::time::Duration;

use api::access::{OwnedStatus, PasswordStatus};
use etcd::{KeyAccess, KeyPermission, PermissionRange};

pub(crate) use role::plan_role;
pub(crate) use user::plan_user;

use crate::reason::{Reason, Trouble};

/// Interval of the checks for changes in etcd and for a new password in the Secret.
pub(crate) const RESYNC: Duration = Duration::from_mins(1);
/// Interval of the reconciles of an object that waits for another object or for etcd.
const WAIT: Duration = Duration::from_secs(10);
/// Interval of the checks whether etcd still accepts the password, in seconds. Each check costs etcd a slow password
/// hash.
const PASSWORD_CHECK_SECONDS: i64 = 30 * 60;

/// The changes for one object.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Plan {
    /// The changes in their order. If a change fails, the changes after it are not sent.
    pub(crate) steps: Vec<Step>,
    /// The change of the ownership in the status, written after the steps.
    pub(crate) record: Record,
    /// How the user authenticates after all steps have succeeded. `None` if `status.password` does not change.
    pub(crate) login: Option<LoginRecord>,
    /// True if the plan depends on whether etcd accepts the password. Such a plan has no steps.
    pub(crate) asks: bool,
    /// The state of the object after all steps have succeeded.
    pub(crate) state: Trouble,
}

/// A change of the ownership in the status.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Record {
    /// The ownership does not change.
    Keep,
    /// The object owns this role or user.
    Owned(OwnedStatus),
    /// The object owns nothing.
    Forget,
}

/// How a user authenticates.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct LoginRecord {
    /// The version of the password; `None` for a client certificate.
    pub(crate) password: Option<PasswordStatus>,
    /// False if etcd cannot check the password, because authentication is disabled. The status then gets no time of a
    /// check, so that the operator checks the password when authentication is enabled.
    pub(crate) is_verified: bool,
}

/// One change.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// Sets or removes the finalizer of the object.
    SetFinalizer(bool),
    /// Changes etcd.
    Call(Call),
}

/// A change in etcd. The executor adds the name of the role or the user, and the password.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Call {
    CreateRole,
    DeleteRole,
    GrantPermission(KeyPermission),
    RevokePermission(PermissionRange),
    /// Creates the user with the password, or without a password for a client certificate.
    CreateUser {
        with_password: bool,
    },
    DeleteUser,
    SetPassword,
    GrantRole(String),
    RevokeRole(String),
}

impl Call {
    /// The reason of the Event.
    pub(crate) fn reason(&self) -> Reason {
        match self {
            Self::CreateRole => Reason::RoleCreated,
            Self::DeleteRole => Reason::RoleDeleted,
            Self::GrantPermission(_) | Self::RevokePermission(_) => Reason::RoleChanged,
            Self::CreateUser { .. } => Reason::UserCreated,
            Self::DeleteUser => Reason::UserDeleted,
            Self::SetPassword => Reason::PasswordChanged,
            Self::GrantRole(_) | Self::RevokeRole(_) => Reason::UserChanged,
        }
    }

    /// True if the call creates the role or the user.
    pub(crate) fn creates(&self) -> bool {
        matches!(self, Self::CreateRole | Self::CreateUser { .. })
    }
}

impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::CreateRole => f.write_str("created the role"),
            Self::DeleteRole => f.write_str("deleted the role"),
            Self::GrantPermission(KeyPermission { range, access }) => {
                let access = match access {
                    KeyAccess::Read => "read",
                    KeyAccess::Write => "write",
                    KeyAccess::ReadWrite => "read and write",
                };
                write!(f, "granted {access} access to {}", Keys(range))
            }
            Self::RevokePermission(range) => write!(f, "revoked access to {}", Keys(range)),
            Self::CreateUser {
                with_password: true,
            } => f.write_str("created the user with the password of the Secret"),
            Self::CreateUser {
                with_password: false,
            } => f.write_str("created the user without a password"),
            Self::DeleteUser => f.write_str("deleted the user"),
            Self::SetPassword => f.write_str("set the password of the Secret"),
            Self::GrantRole(role) => write!(f, "granted the role {role}"),
            Self::RevokeRole(role) => write!(f, "revoked the role {role}"),
        }
    }
}

/// A range of keys in the text of an Event.
struct Keys<'a>(&'a PermissionRange);

impl fmt::Display for Keys<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let PermissionRange { key, end } = self.0;
        let key = String::from_utf8_lossy(key);
        match end.as_slice() {
            [] => write!(f, "key {key:?}"),
            [0] if key == "\0" => f.write_str("all keys"),
            [0] => write!(f, "keys from {key:?} on"),
            end => write!(f, "keys from {key:?} to {:?}", String::from_utf8_lossy(end)),
        }
    }
}

impl Plan {
    fn new(state: Trouble) -> Self {
        Self {
            steps: Vec::new(),
            record: Record::Keep,
            login: None,
            asks: false,
            state,
        }
    }

    fn waits(reason: Reason, message: impl Into<String>) -> Self {
        Self::new(Trouble::new(reason, message))
    }

    fn step(step: Step, message: &str) -> Self {
        let mut plan = Self::waits(Reason::InProgress, message);
        plan.steps.push(step);
        plan
    }

    fn call(&mut self, call: Call) {
        self.steps.push(Step::Call(call));
    }

    /// Reports a problem, unless the plan already reports another problem.
    fn report(&mut self, trouble: Trouble) {
        if self.state.reason == Reason::AsDesired {
            self.state = trouble;
        }
    }

    /// The time until the next reconcile, if no event triggers it earlier.
    pub(crate) fn requeue(&self) -> Duration {
        match self.state.reason.readiness() {
            api::readiness::Readiness::Reconciling => WAIT,
            _ => RESYNC,
        }
    }
}
