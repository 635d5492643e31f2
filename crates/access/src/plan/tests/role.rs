//! Tests of the permissions of a role.

use super::*;

fn planned(spec: &Value, found: Vec<KeyPermission>) -> Vec<Call> {
    let plan = plan_role(&role(spec, Owns::Confirmed), &role_seen(Some(found)));
    assert_eq!(plan.state.reason, Reason::AsDesired, "{plan:?}");
    calls(&plan)
}

#[test]
fn unchanged_role_needs_no_etcd_call() {
    assert_eq!(planned(&json!({}), vec![wanted()]), []);
}

#[test]
fn drift_of_permissions_is_corrected() {
    let other = permission("/other", "", KeyAccess::ReadWrite);
    // New permissions are granted before old permissions are revoked.
    assert_eq!(
        planned(&json!({}), vec![other.clone()]),
        [
            Call::GrantPermission(wanted()),
            Call::RevokePermission(other.range.clone())
        ]
    );
    // A grant replaces a permission for the same range, so the range is not revoked.
    let wrong = permission("/app/", "/app0", KeyAccess::ReadWrite);
    assert_eq!(
        planned(&json!({}), vec![wrong]),
        [Call::GrantPermission(wanted())]
    );
    assert_eq!(
        planned(&json!({ "permissions": [] }), vec![other.clone()]),
        [Call::RevokePermission(other.range)]
    );
}

#[test]
fn role_missing_in_etcd_is_created_again() {
    let role = role(&json!({}), Owns::Confirmed);
    let plan = plan_role(&role, &role_seen(None));
    assert_eq!(
        calls(&plan),
        [Call::CreateRole, Call::GrantPermission(wanted())]
    );
}

#[test]
fn each_permission_selector_becomes_etcd_key_range() {
    let spec = json!({ "permissions": [
        { "access": "Read", "key": "/a" },
        { "access": "Write", "key": "/a", "rangeEnd": "/c" },
        { "access": "ReadWrite", "prefix": "" },
        { "access": "Read", "fromKey": "/z" },
    ] });
    let expected = [
        permission("\0", "\0", KeyAccess::ReadWrite),
        permission("/a", "", KeyAccess::Read),
        permission("/a", "/c", KeyAccess::Write),
        permission("/z", "\0", KeyAccess::Read),
    ];
    assert_eq!(
        planned(&spec, Vec::new()),
        expected.map(Call::GrantPermission)
    );
}

#[test]
fn descriptions_of_permission_changes_name_access_and_keys() {
    for (call, expected) in [
        (
            Call::GrantPermission(wanted()),
            "granted read access to keys from \"/app/\" to \"/app0\"",
        ),
        (
            Call::RevokePermission(permission("/a", "", KeyAccess::Read).range),
            "revoked access to key \"/a\"",
        ),
        (
            Call::GrantPermission(permission("\0", "\0", KeyAccess::ReadWrite)),
            "granted read and write access to all keys",
        ),
        (
            Call::GrantPermission(permission("m", "\0", KeyAccess::Write)),
            "granted write access to keys from \"m\" on",
        ),
    ] {
        assert_eq!(call.to_string(), expected);
    }
}
