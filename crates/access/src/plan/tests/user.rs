//! Tests of the authentication and the roles of a user.

use etcd::PasswordCheck;

use super::*;
use crate::plan::LoginRecord;

/// An EtcdUser whose authentication was checked `age` seconds ago, with the password version `recorded`.
fn checked(spec: &Value, recorded: Option<&str>, age: i64) -> EtcdUser {
    let mut user = user(spec, Owns::Confirmed);
    let status = user.status.as_mut().unwrap();
    status.password = recorded.map(version);
    status.checked = Some(Time(at(NOW - age)));
    user
}

fn certificate() -> Value {
    json!({ "clientCertificate": true })
}

/// The observation for a user with a client certificate.
fn certificate_seen(found: Option<&[&str]>) -> UserSnapshot {
    UserSnapshot {
        password: None,
        ..user_seen(found)
    }
}

fn login(resource_version: &str, is_verified: bool) -> LoginRecord {
    LoginRecord {
        password: Some(version(resource_version)),
        is_verified,
    }
}

#[test]
fn new_user_gets_roles_and_password_unless_it_uses_certificate() {
    let plan = planned_user(&user(&with_password(), Owns::Recorded), &user_seen(None));
    assert_eq!(
        calls(&plan),
        [
            Call::CreateUser {
                with_password: true
            },
            Call::GrantRole("reader".to_owned())
        ]
    );
    assert_eq!(plan.login, Some(login("7", true)));
    let plan = planned_user(
        &user(&certificate(), Owns::Recorded),
        &certificate_seen(None),
    );
    assert_eq!(
        calls(&plan)[0],
        Call::CreateUser {
            with_password: false
        }
    );
}

#[test]
fn password_is_checked_after_change_of_secret_and_periodically() {
    let seen = user_seen(Some(&["reader"]));
    for (recorded, age, asks) in [
        (Some("7"), 60, false),
        (Some("6"), 60, true),
        (None, 60, true),
        (Some("7"), 1800, true),
        (Some("7"), -60, true),
    ] {
        let plan = planned_user(&checked(&with_password(), recorded, age), &seen);
        assert_eq!(plan.asks, asks, "{recorded:?} {age}");
        assert_eq!(plan.steps, []);
    }
    let unchecked = user(&with_password(), Owns::Confirmed);
    assert!(planned_user(&unchecked, &seen).asks);
}

#[test]
fn password_is_set_only_if_etcd_does_not_accept_it() {
    let user = checked(&with_password(), Some("6"), 60);
    let mut seen = user_seen(Some(&["reader"]));
    seen.check = Some(PasswordCheck::Accepted);
    let plan = planned_user(&user, &seen);
    assert_eq!(
        (calls(&plan), plan.login),
        (Vec::new(), Some(login("7", true)))
    );
    seen.check = Some(PasswordCheck::Rejected);
    let plan = planned_user(&user, &seen);
    assert_eq!(calls(&plan), [Call::SetPassword]);
    assert_eq!(plan.login, Some(login("7", true)));
    // etcd cannot add a password to a user without a password, so the user is created again.
    seen.check = Some(PasswordCheck::NoPassword);
    let plan = planned_user(&user, &seen);
    let again = [
        Call::DeleteUser,
        Call::CreateUser {
            with_password: true,
        },
        Call::GrantRole("reader".to_owned()),
    ];
    assert_eq!(calls(&plan), again);
}

#[test]
fn changed_password_is_set_without_check_while_auth_is_disabled() {
    let mut seen = user_seen(Some(&["reader"]));
    seen.cluster = with_cluster(|facts| facts.etcd = Ok(EtcdFacts::default()));
    let plan = planned_user(&checked(&with_password(), Some("6"), 60), &seen);
    assert_eq!(calls(&plan), [Call::SetPassword]);
    // `is_verified` is false, so the status gets no time of a check. The operator therefore checks the password as soon
    // as authentication is enabled.
    assert_eq!(plan.login, Some(login("7", false)));
    let plan = planned_user(&checked(&with_password(), Some("7"), 9999), &seen);
    assert_eq!(
        (calls(&plan), plan.login, plan.asks),
        (Vec::new(), None, false)
    );
    assert!(plan.state.message.contains("Authentication is disabled"));
}

#[test]
fn password_is_removed_from_user_with_certificate() {
    let found: Option<&[&str]> = Some(&["reader"]);
    let mut seen = certificate_seen(found);
    assert!(planned_user(&checked(&certificate(), None, 1800), &seen).asks);
    let user = checked(&certificate(), None, 60);
    assert!(!planned_user(&user, &seen).asks);
    seen.check = Some(PasswordCheck::NoPassword);
    assert_eq!(calls(&planned_user(&user, &seen)), []);
    for check in [PasswordCheck::Rejected, PasswordCheck::Accepted] {
        seen.check = Some(check);
        let calls = calls(&planned_user(&user, &seen));
        let created = Call::CreateUser {
            with_password: false,
        };
        assert_eq!(calls[..2], [Call::DeleteUser, created]);
    }
    // The spec had a password before it had a client certificate. While authentication is disabled, etcd checks no
    // passwords, so only the status shows that the user has a password.
    let mut seen = certificate_seen(found);
    seen.cluster = with_cluster(|facts| facts.etcd = Ok(EtcdFacts::default()));
    let changed = planned_user(&checked(&certificate(), Some("7"), 60), &seen);
    assert_eq!(calls(&changed)[0], Call::DeleteUser);
}

#[test]
fn user_certificate_needs_client_tls_and_supported_version() {
    for (cluster, reason) in [
        (
            with_cluster(|facts| facts.has_client_tls = false),
            Reason::NoClientTls,
        ),
        (
            with_cluster(|facts| facts.version = Some(EtcdVersion::release(3, 3, 27))),
            Reason::NotSupported,
        ),
        (
            with_cluster(|facts| facts.version = None),
            Reason::ClusterNotReady,
        ),
    ] {
        let mut seen = certificate_seen(None);
        seen.cluster = cluster.clone();
        let plan = planned_user(&user(&certificate(), Owns::Recorded), &seen);
        assert_eq!((plan.state.reason, plan.steps), (reason, Vec::new()));
        let mut seen = user_seen(None);
        seen.cluster = cluster;
        let plan = planned_user(&user(&with_password(), Owns::Recorded), &seen);
        assert_eq!(plan.state.reason, Reason::AsDesired);
    }
}

/// Invariant 43: an EtcdUser must not change the password with which the operators log in.
#[test]
fn invariant_43_operator_user_is_not_changed() {
    let mut seen = user_seen(Some(&["root"]));
    seen.cluster = with_cluster(|facts| {
        facts.etcd = Ok(EtcdFacts {
            is_auth_enabled: true,
            operator_user: Some("app".to_owned()),
        });
    });
    for owns in Owns::ALL {
        let spec = extended(with_password(), &json!({ "adopt": true }));
        let plan = planned_user(&user(&spec, owns), &seen);
        assert_eq!(plan.state.reason, Reason::InvalidSpec, "{owns:?}");
        assert_eq!((plan.steps, plan.record), (Vec::new(), Record::Keep));
    }
}

#[test]
fn missing_password_secret_is_reported_while_roles_are_corrected() {
    let why = || Trouble::new(Reason::SecretMissing, "create the Secret app");
    let mut seen = user_seen(Some(&["other"]));
    seen.password = Some(Err(why()));
    let plan = planned_user(&user(&with_password(), Owns::Confirmed), &seen);
    assert_eq!(plan.state, why());
    assert_eq!(
        calls(&plan),
        [
            Call::GrantRole("reader".to_owned()),
            Call::RevokeRole("other".to_owned())
        ]
    );
    seen.found = Ok(None);
    // A user that does not exist is neither created nor recorded without its password.
    for owns in [Owns::Nothing, Owns::Recorded] {
        let plan = planned_user(&user(&with_password(), owns), &seen);
        assert_eq!((plan.state, plan.steps), (why(), Vec::new()), "{owns:?}");
        assert_eq!(plan.record, Record::Keep, "{owns:?}");
    }
}

#[test]
fn drift_of_user_roles_is_corrected_including_role_root() {
    let seen = user_seen(Some(&["other", "root"]));
    let user = checked(&with_password(), Some("7"), 60);
    let plan = planned_user(&user, &seen);
    assert_eq!(
        calls(&plan),
        [
            Call::GrantRole("reader".to_owned()),
            Call::RevokeRole("other".to_owned()),
            Call::RevokeRole("root".to_owned())
        ]
    );
    assert_eq!(plan.state.reason, Reason::AsDesired);
}

#[test]
fn role_is_granted_only_if_its_etcdrole_owns_it() {
    let user = checked(&with_password(), Some("7"), 60);
    for (state, reason, revoked) in [
        (RoleState::Missing, Reason::RoleMissing, true),
        (
            RoleState::OtherCluster("other".to_owned()),
            Reason::RoleMissing,
            true,
        ),
        // Invariant 1: an unreadable EtcdRole may own each role in etcd, because its `spec.roleName` is unknown. No
        // role is revoked.
        (
            RoleState::Unreadable("the API server does not answer".to_owned()),
            Reason::RoleNotReady,
            false,
        ),
        // The operator neither grants nor revokes a role that its EtcdRole does not own yet.
        (
            RoleState::NotReady("reader".to_owned()),
            Reason::RoleNotReady,
            false,
        ),
    ] {
        let mut seen = user_seen(Some(&[]));
        seen.roles = vec![role_fact("reader", state.clone())];
        let plan = planned_user(&user, &seen);
        assert_eq!(plan.state.reason, reason, "{state:?}");
        assert_eq!(calls(&plan), []);
        seen.found = Ok(Some(vec!["reader".to_owned()]));
        let expected = revoked.then(|| Call::RevokeRole("reader".to_owned()));
        let found = calls(&planned_user(&user, &seen));
        assert_eq!(found, Vec::from_iter(expected), "{state:?}");
    }
}
