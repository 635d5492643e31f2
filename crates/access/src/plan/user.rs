//! Plans the changes of a user: its creation, its password, its roles, and its deletion.

use std::collections::BTreeSet;

use api::EtcdUser;
use api::access::PasswordStatus;
use api::cluster::ROOT_USER;
use etcd::PasswordCheck;
use k8s_openapi::jiff::Timestamp;

use super::gate::{Entry, admit, deletion};
use super::{Call, LoginRecord, PASSWORD_CHECK_SECONDS, Plan};
use crate::reason::{Reason, Trouble};
use crate::snapshot::{ClusterFacts, EtcdFacts, RoleState, UserSnapshot};

pub(crate) fn plan_user(user: &EtcdUser, seen: &UserSnapshot, now: Timestamp) -> Plan {
    let roles = Roles::of(user, seen);
    let entry = match &seen.found {
        Err(trouble) => Err(trouble),
        Ok(None) => Ok(Entry::Missing),
        Ok(Some(found)) => Ok(Entry::Exists {
            is_partial: found
                .iter()
                .all(|role| role != ROOT_USER && roles.includes(role)),
            is_root: found.iter().any(|role| role == ROOT_USER),
        }),
    };
    let target = (&seen.cluster, seen.rivals.as_slice());
    if user.metadata.deletion_timestamp.is_some() {
        return deletion(user, target, entry, Call::DeleteUser);
    }
    let refuses = |facts: &ClusterFacts, etcd: &EtcdFacts| {
        refusal(user, facts, etcd)
            .or_else(|| roles.unreadable.clone())
            .or_else(|| missing_password(seen))
    };
    let admitted = match admit(user, target, entry, refuses) {
        Ok(admitted) => admitted,
        Err(plan) => return *plan,
    };
    let mut plan = Plan::new(as_desired(user, &roles, admitted.etcd));
    plan.record = admitted.record;
    let password = match &seen.password {
        // If the operator cannot read the password from the Secret, it reports this, and corrects only the roles of an
        // existing user.
        Some(Err(trouble)) => {
            plan.report(trouble.clone());
            None
        }
        Some(Ok(version)) => Some(Some(version)),
        None => Some(None),
    };
    let found = seen.found.as_ref().ok().and_then(Option::as_deref);
    let exists = match (found, password) {
        (None, None) => return plan,
        (None, Some(password)) => {
            create(&mut plan, password);
            false
        }
        (Some(_), None) => true,
        (Some(_), Some(password)) => {
            let off = Some(PasswordCheck::Off).filter(|_| !admitted.etcd.is_auth_enabled);
            let check = off.or(seen.check);
            if check.is_none() && is_check_due(user, password, now) {
                plan.asks = true;
                return plan;
            }
            match check {
                Some(check) => !authenticate(&mut plan, user, password, check),
                None => true,
            }
        }
    };
    let found = found.filter(|_| exists).unwrap_or_default();
    for role in roles.granted.iter().filter(|role| !found.contains(*role)) {
        plan.call(Call::GrantRole(role.clone()));
    }
    for role in found.iter().filter(|role| !roles.includes(role)) {
        plan.call(Call::RevokeRole(role.clone()));
    }
    for problem in roles.problems {
        plan.report(problem);
    }
    plan
}

/// The roles of the user in etcd according to its spec.
struct Roles {
    /// The roles that the operator grants.
    granted: BTreeSet<String>,
    /// Roles whose EtcdRole does not own them yet. The operator neither grants nor revokes them (invariant 43).
    unknown: BTreeSet<String>,
    /// The problem of an EtcdRole that cannot be read. The name of its role in etcd is unknown, so the operator must
    /// not revoke any role (invariant 1).
    unreadable: Option<Trouble>,
    problems: Vec<Trouble>,
}

impl Roles {
    fn of(user: &EtcdUser, seen: &UserSnapshot) -> Self {
        let mut roles = Self {
            granted: BTreeSet::new(),
            unknown: BTreeSet::new(),
            unreadable: None,
            problems: Vec::new(),
        };
        let mut waits = Vec::new();
        for role in &seen.roles {
            let name = &role.name;
            let missing = |text: String| Trouble::new(Reason::RoleMissing, text);
            match &role.state {
                RoleState::Ready(role) => {
                    roles.granted.insert(role.clone());
                }
                RoleState::NotReady(role) => {
                    roles.unknown.insert(role.clone());
                    let text = format!("EtcdRole {name} has no role in etcd yet: see its status");
                    waits.push(Trouble::new(Reason::RoleNotReady, text));
                }
                RoleState::Unreadable(why) => {
                    let text = format!("EtcdRole {name} cannot be read: {why}");
                    roles.unreadable = Some(Trouble::new(Reason::RoleNotReady, text));
                }
                RoleState::Missing => roles.problems.push(missing(format!(
                    "spec.roles: there is no EtcdRole {name} in this namespace: create it or correct the name"
                ))),
                RoleState::OtherCluster(other) => roles.problems.push(missing(format!(
                    "spec.roles: EtcdRole {name} belongs to EtcdCluster {other}, not to EtcdCluster {}: name another \
                     EtcdRole",
                    user.spec.etcd_cluster.name
                ))),
            }
        }
        roles.problems.append(&mut waits);
        roles
    }

    fn includes(&self, role: &str) -> bool {
        self.granted.contains(role) || self.unknown.contains(role)
    }
}

fn as_desired(user: &EtcdUser, roles: &Roles, etcd: &EtcdFacts) -> Trouble {
    let (name, cluster) = (user.etcd_name(), &user.spec.etcd_cluster.name);
    let mut message = format!(
        "the user {name} of EtcdCluster {cluster} is up to date (roles: {})",
        roles.granted.len()
    );
    if !etcd.is_auth_enabled {
        message.push_str(
            ". Authentication is disabled, so etcd checks no users: set spec.auth.enabled of the EtcdCluster to true",
        );
    }
    Trouble::new(Reason::AsDesired, message)
}

/// Why the cluster cannot have this user.
fn refusal(user: &EtcdUser, facts: &ClusterFacts, etcd: &EtcdFacts) -> Option<Trouble> {
    let (name, cluster) = (user.etcd_name(), &user.spec.etcd_cluster.name);
    // Invariant 43: no EtcdUser changes the user with which the operators log in.
    if etcd.operator_user.as_deref() == Some(name) {
        let text = format!(
            "spec.userName: the operators log in to EtcdCluster {cluster} as {name} (spec.auth.secret): choose another \
             name"
        );
        return Some(Trouble::new(Reason::InvalidSpec, text));
    }
    if !user.spec.client_certificate {
        return None;
    }
    if !facts.has_client_tls {
        let text = format!(
            "spec.clientCertificate needs members that check client certificates: set spec.TLS of EtcdCluster \
             {cluster}, without acceptPlaintext"
        );
        return Some(Trouble::new(Reason::NoClientTls, text));
    }
    // etcd before 3.4 ignores the request for a user without a password, and creates the user with an empty password.
    let Some(version) = &facts.version else {
        let text = format!(
            "the status of EtcdCluster {cluster} has no version yet, and spec.clientCertificate needs etcd 3.4 or \
             later: wait until the members serve"
        );
        return Some(Trouble::new(Reason::ClusterNotReady, text));
    };
    if version.minor() < (3, 4) {
        let text = format!(
            "spec.clientCertificate needs etcd 3.4 or later, and the version of EtcdCluster {cluster} is {version}: \
             upgrade it, or set spec.password"
        );
        return Some(Trouble::new(Reason::NotSupported, text));
    }
    None
}

/// The problem of the password of a user that etcd does not have. The operator records such a user in the status only
/// after it has read the password. An earlier record would claim a user of this name that another program creates in
/// the meantime.
fn missing_password(seen: &UserSnapshot) -> Option<Trouble> {
    match (&seen.found, &seen.password) {
        (Ok(None), Some(Err(trouble))) => Some(trouble.clone()),
        _ => None,
    }
}

fn create(plan: &mut Plan, password: Option<&PasswordStatus>) {
    plan.call(Call::CreateUser {
        with_password: password.is_some(),
    });
    plan.login = Some(LoginRecord {
        password: password.cloned(),
        is_verified: true,
    });
}

/// Brings the authentication of an existing user into agreement with the spec. etcd can neither add a password to a
/// user without a password, nor remove a password. In these cases, the user is created again and loses its roles, and
/// the function returns true.
fn authenticate(
    plan: &mut Plan,
    user: &EtcdUser,
    password: Option<&PasswordStatus>,
    check: PasswordCheck,
) -> bool {
    let status = user.status.as_ref();
    let recorded = status.and_then(|status| status.password.as_ref());
    let is_replaced = match (password, check) {
        (Some(_), PasswordCheck::NoPassword)
        | (None, PasswordCheck::Accepted | PasswordCheck::Rejected) => true,
        (None, PasswordCheck::Off) => recorded.is_some(),
        _ => false,
    };
    if is_replaced {
        plan.call(Call::DeleteUser);
        create(plan, password);
        return true;
    }
    let is_verified = check != PasswordCheck::Off;
    let is_set = match check {
        PasswordCheck::Rejected => password.is_some(),
        PasswordCheck::Off => password.is_some() && recorded != password,
        PasswordCheck::Accepted | PasswordCheck::NoPassword => false,
    };
    if is_set {
        plan.call(Call::SetPassword);
    }
    if is_verified || is_set {
        plan.login = Some(LoginRecord {
            password: password.cloned(),
            is_verified,
        });
    }
    false
}

fn is_check_due(user: &EtcdUser, password: Option<&PasswordStatus>, now: Timestamp) -> bool {
    let Some(status) = &user.status else {
        return true;
    };
    let Some(checked) = &status.checked else {
        return true;
    };
    let age = now.duration_since(checked.0).as_secs();
    // A `checked` time in the future comes from a wrong clock, so the check is due.
    status.password.as_ref() != password || !(0..PASSWORD_CHECK_SECONDS).contains(&age)
}
