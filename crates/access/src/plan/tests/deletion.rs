//! Tests of the deletion: the operator deletes only roles and users that the deleted object owns, and the finalizer
//! does not block the deletion permanently.

use super::*;
use crate::snapshot::Rival;

fn deleted(mut role: EtcdRole) -> EtcdRole {
    role.metadata.deletion_timestamp = Some(Time(at(NOW)));
    role
}

const RELEASED: [Step; 1] = [Step::SetFinalizer(false)];

#[test]
fn invariant_43_only_owned_role_is_deleted() {
    let foreign = vec![permission("/other", "", KeyAccess::Read)];
    for (owns, found, deletes) in [
        (Owns::Confirmed, Some(foreign.clone()), true),
        (Owns::Confirmed, None, false),
        (Owns::Recorded, Some(vec![wanted()]), true),
        (Owns::Recorded, Some(foreign.clone()), false),
        (Owns::Nothing, Some(foreign.clone()), false),
        (Owns::Former, Some(foreign), false),
    ] {
        let role = deleted(role(&json!({}), owns));
        let plan = plan_role(&role, &role_seen(found));
        let delete = deletes.then_some(Step::Call(Call::DeleteRole));
        let expected: Vec<Step> = delete.into_iter().chain(RELEASED).collect();
        assert_eq!(plan.steps, expected, "{owns:?}");
    }
}

#[test]
fn finalizer_is_removed_if_cluster_is_deleted_or_replaced() {
    let clusters = [
        Cluster::Missing,
        with_cluster(|facts| facts.is_deleting = true),
        // A new EtcdCluster with the same name. Its cluster ID differs, so its etcd has none of the old data.
        with_cluster(|facts| {
            facts.uid = "new-uid".to_owned();
            facts.cluster_id = Some("bb".to_owned());
            facts.etcd = Err(unreachable());
        }),
    ];
    for cluster in clusters {
        let mut seen = role_seen(Some(vec![wanted()]));
        seen.cluster = cluster;
        seen.found = Err(unreachable());
        let role = deleted(role(&json!({}), Owns::Confirmed));
        assert_eq!(plan_role(&role, &seen).steps, RELEASED);
    }
}

/// Invariant 1: if etcd has not answered, the role may exist, so the deletion waits. `deletionPolicy: Retain` ends the
/// wait.
#[test]
fn deletion_waits_for_etcd_unless_policy_is_retain() {
    let clusters = [
        Cluster::Unknown("the API server does not answer".to_owned()),
        with_cluster(|facts| facts.etcd = Err(unreachable())),
        // A new EtcdCluster with the same name. Its cluster ID is not known yet, so its volumes may contain the role.
        with_cluster(|facts| {
            facts.uid = "new-uid".to_owned();
            facts.cluster_id = None;
            facts.etcd = Err(unreachable());
        }),
        with_cluster(|facts| facts.is_paused = true),
        with_cluster(|facts| facts.is_hibernated = true),
        with_cluster(|facts| facts.is_restoring = true),
        Cluster::Present(facts()),
    ];
    for cluster in clusters {
        let mut seen = role_seen(None);
        seen.cluster = cluster;
        seen.found = Err(unreachable());
        let waiting = deleted(role(&json!({}), Owns::Confirmed));
        let plan = plan_role(&waiting, &seen);
        assert_eq!(plan.steps, []);
        assert!(plan.state.message.contains("Retain"), "{plan:?}");
        let spec = json!({ "deletionPolicy": "Retain" });
        let retained = deleted(role(&spec, Owns::Confirmed));
        assert_eq!(plan_role(&retained, &seen).steps, RELEASED);
    }
}

#[test]
fn role_is_not_deleted_if_another_etcdrole_owns_it() {
    let mut seen = role_seen(Some(vec![wanted()]));
    let role = deleted(role(&json!({}), Owns::Confirmed));
    for (owns, released) in [(true, true), (false, false)] {
        seen.rivals = vec![Rival {
            name: "other".to_owned(),
            created: Some(at(1)),
            owns,
        }];
        assert_eq!(plan_role(&role, &seen).steps == RELEASED, released);
    }
}

/// Invariant 43: the Secret in spec.auth may name a user that an EtcdUser has created before.
#[test]
fn invariant_43_operator_user_and_role_root_are_not_deleted() {
    let mut user = user(&with_password(), Owns::Confirmed);
    user.metadata.deletion_timestamp = Some(Time(at(NOW)));
    let mut seen = user_seen(Some(&["reader"]));
    for (operator_user, released) in [("root", false), ("app", true)] {
        seen.cluster = with_cluster(|facts| {
            facts.etcd = Ok(EtcdFacts {
                is_auth_enabled: true,
                operator_user: Some(operator_user.to_owned()),
            });
        });
        let plan = planned_user(&user, &seen);
        assert_eq!(plan.steps == RELEASED, released, "{plan:?}");
    }
    // The role `root` is not deleted, even if the status has recorded it.
    let mut role = deleted(role(&json!({}), Owns::Confirmed));
    let mut status = role.status.take().unwrap_or_default();
    status.owned = Owns::Confirmed.record("root");
    role.status = Some(status);
    let plan = plan_role(&role, &role_seen(Some(vec![wanted()])));
    assert_eq!(plan.steps, RELEASED);
}

#[test]
fn deletion_waits_while_deletion_policy_is_invalid() {
    let spec = json!({ "deletionPolicy": "Keep" });
    let role = deleted(role(&spec, Owns::Confirmed));
    let plan = plan_role(&role, &role_seen(Some(vec![wanted()])));
    assert_eq!(plan.state.reason, Reason::InvalidSpec);
    assert_eq!(plan.steps, []);
}

#[test]
fn deletion_uses_name_recorded_in_status() {
    let mut user = user(
        &extended(with_password(), &json!({ "userName": "renamed" })),
        Owns::Confirmed,
    );
    user.metadata.deletion_timestamp = Some(Time(at(NOW)));
    let plan = planned_user(&user, &user_seen(Some(&["reader"])));
    assert_eq!(calls(&plan), [Call::DeleteUser]);
    assert_eq!(crate::object::AccessObject::entry(&user), "app");
}

#[test]
fn deleted_etcdrole_without_operator_finalizer_is_ignored() {
    let mut role = deleted(role(&json!({}), Owns::Confirmed));
    role.metadata.finalizers = Some(vec!["example.com/other".to_owned()]);
    let plan = plan_role(&role, &role_seen(Some(vec![wanted()])));
    assert_eq!(plan.steps, []);
}
