//! Validates an `EtcdRole` and an `EtcdUser`. Performs no I/O.

use std::collections::BTreeMap;

use super::{AccessDeletionPolicy, EtcdRole, EtcdUser, PermissionAccess};
use crate::cluster::ROOT_USER;
use crate::names::OPERATOR_USER;
use crate::problem::Problem;

/// Maximum length of the name of a role or a user.
pub const MAX_NAME: usize = 253;

/// The problems of an EtcdRole. The schema rejects most of them, but an object may be older than the schema.
pub fn validate_role(role: &EtcdRole) -> Vec<Problem> {
    let spec = &role.spec;
    let mut problems = Vec::new();
    problems.extend(reserved("spec.roleName", role.etcd_name(), &[ROOT_USER]));
    problems.extend(policy(spec.deletion_policy.as_ref()));
    let mut ranges = BTreeMap::new();
    for (index, permission) in spec.permissions.iter().enumerate() {
        let field = format!("spec.permissions[{index}]");
        if let PermissionAccess::Unknown(text) = &permission.access {
            let field = format!("{field}.access");
            problems.push(Problem::unknown(field, text, PermissionAccess::KNOWN));
        }
        let Some((key, end)) = permission.range() else {
            problems.push(Problem::new(
                field,
                "does not have exactly one of key, prefix and fromKey",
                "set one of them, and set rangeEnd only with key",
            ));
            continue;
        };
        let range_end = permission.range_end.as_ref();
        if key.is_empty() || range_end.is_some_and(|end| end.as_bytes() <= key.as_slice()) {
            problems.push(Problem::new(
                &field,
                "is an empty range",
                "set key to a text that is not empty, and rangeEnd to a greater text",
            ));
        }
        if let Some(first) = ranges.insert((key, end), index) {
            problems.push(Problem::new(
                field,
                format!("has the same keys as spec.permissions[{first}]"),
                "remove one of them, or use the access ReadWrite",
            ));
        }
    }
    problems
}

/// The problems of an EtcdUser. The schema rejects most of them, but an object may be older than the schema.
pub fn validate_user(user: &EtcdUser) -> Vec<Problem> {
    let spec = &user.spec;
    let mut problems = Vec::new();
    let names = [ROOT_USER, OPERATOR_USER];
    problems.extend(reserved("spec.userName", user.etcd_name(), &names));
    problems.extend(policy(spec.deletion_policy.as_ref()));
    match (&spec.password, spec.client_certificate) {
        (Some(_), true) => problems.push(Problem::new(
            "spec.clientCertificate",
            "is set together with spec.password",
            "remove one of the two fields",
        )),
        (None, false) => problems.push(Problem::new(
            "spec.password",
            "is missing",
            "set spec.password, or set spec.clientCertificate to true",
        )),
        _ => {}
    }
    problems
}

/// The problem of a name that is empty or too long, or that belongs to the operator. Invariant 43: neither an EtcdUser
/// nor an EtcdRole can name the users and the role with which the operators log in.
fn reserved(field: &str, name: &str, reserved: &[&str]) -> Option<Problem> {
    if name.is_empty() || name.len() > MAX_NAME {
        let problem = format!("has {} bytes", name.len());
        let remedy = format!("use a name of 1 to {MAX_NAME} bytes");
        return Some(Problem::new(field, problem, remedy));
    }
    reserved.contains(&name).then(|| {
        let problem = format!("is {name:?}, which belongs to the operator");
        Problem::new(field, problem, "choose another name")
    })
}

fn policy(policy: Option<&AccessDeletionPolicy>) -> Option<Problem> {
    let policy = policy.filter(|policy| !policy.is_known())?;
    let known = AccessDeletionPolicy::KNOWN;
    Some(Problem::unknown(
        "spec.deletionPolicy",
        policy.as_str(),
        known,
    ))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::problem::fields;

    fn role(name: &str, spec: &Value) -> Vec<Problem> {
        let mut whole = json!({ "etcdCluster": { "name": "main" } });
        let added = spec.as_object().unwrap().clone();
        whole.as_object_mut().unwrap().extend(added);
        validate_role(&EtcdRole::new(name, serde_json::from_value(whole).unwrap()))
    }

    fn user(name: &str, spec: &Value) -> Vec<Problem> {
        let mut whole = json!({ "etcdCluster": { "name": "main" } });
        let added = spec.as_object().unwrap().clone();
        whole.as_object_mut().unwrap().extend(added);
        validate_user(&EtcdUser::new(name, serde_json::from_value(whole).unwrap()))
    }

    /// Invariant 43: the users and the role of the operator cannot be changed through an object.
    #[test]
    fn invariant_43_user_and_role_names_of_operator_are_rejected() {
        let password = json!({ "secret": "s" });
        let named = |name: &str| user("app", &json!({ "password": password, "userName": name }));
        for name in ["root", "etcd-operator", ""] {
            assert_eq!(fields(&named(name)), ["spec.userName"], "{name}");
        }
        assert_eq!(named("app"), []);
        let own = user("root", &json!({ "password": password }));
        assert_eq!(fields(&own), ["spec.userName"]);
        let named = |name: &str| role("reader", &json!({ "roleName": name }));
        assert_eq!(fields(&named("root")), ["spec.roleName"]);
        assert_eq!(named("reader"), []);
        assert_eq!(fields(&role("root", &json!({}))), ["spec.roleName"]);
    }

    #[test]
    fn user_needs_exactly_one_of_password_and_certificate() {
        let password = json!({ "secret": "s" });
        assert_eq!(fields(&user("app", &json!({}))), ["spec.password"]);
        assert_eq!(user("app", &json!({ "clientCertificate": true })), []);
        let both = json!({ "password": password, "clientCertificate": true });
        assert_eq!(fields(&user("app", &both)), ["spec.clientCertificate"]);
    }

    #[test]
    fn invalid_permissions_and_deletion_policy_are_rejected() {
        let of = |permissions: Value| role("reader", &json!({ "permissions": permissions }));
        let first = "spec.permissions[0]";
        let second = "spec.permissions[1]";
        assert_eq!(
            fields(&of(json!([
                { "access": "Read", "prefix": "a" },
                { "access": "Write", "key": "a", "rangeEnd": "b" },
            ]))),
            [second],
            "the prefix `a` is the range from `a` to `b`"
        );
        for permission in [
            json!({ "access": "Read" }),
            json!({ "access": "Read", "key": "b", "rangeEnd": "a" }),
            json!({ "access": "Read", "key": "" }),
            // etcd treats this range end as `all keys from the key on`. The spec has `fromKey` for such a range, so
            // this permission is rejected.
            json!({ "access": "Read", "key": "a", "rangeEnd": "\u{0}" }),
        ] {
            assert_eq!(fields(&of(json!([permission]))), [first], "{permission}");
        }
        let unknown = of(json!([{ "access": "Own", "key": "a" }]));
        assert_eq!(fields(&unknown), ["spec.permissions[0].access"]);
        let policy = role("reader", &json!({ "deletionPolicy": "Keep" }));
        assert_eq!(fields(&policy), ["spec.deletionPolicy"]);
        assert_eq!(
            of(json!([
                { "access": "Read", "prefix": "" },
                { "access": "ReadWrite", "fromKey": "a" },
                { "access": "Write", "key": "a" },
            ])),
            []
        );
    }
}
