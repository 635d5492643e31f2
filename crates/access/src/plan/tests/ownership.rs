//! Tests of the ownership: which roles and users the operator may change (invariant 43).

use super::*;
use crate::snapshot::Rival;

#[test]
fn finalizer_and_ownership_record_precede_role_creation() {
    let mut role = role(&json!({}), Owns::Nothing);
    role.metadata.finalizers = None;
    let seen = role_seen(None);
    assert_eq!(plan_role(&role, &seen).steps, [Step::SetFinalizer(true)]);
    role.metadata.finalizers = Some(vec![FINALIZER_ACCESS.to_owned()]);
    let plan = plan_role(&role, &seen);
    assert_eq!(plan.steps, []);
    assert_eq!(
        plan.record,
        Record::Owned(Owns::Recorded.record("reader").unwrap())
    );
    let recorded = super::role(&json!({}), Owns::Recorded);
    let plan = plan_role(&recorded, &seen);
    assert_eq!(
        calls(&plan),
        [Call::CreateRole, Call::GrantPermission(wanted())]
    );
    assert_eq!(plan.state.reason, Reason::AsDesired);
}

/// Invariant 43: in every combination of the recorded ownership, the role or user in etcd and `spec.adopt`, the plan
/// changes etcd only if the status has recorded the ownership for this etcd cluster.
#[test]
fn invariant_43_only_recorded_roles_and_users_are_changed() {
    let roles = [
        None,
        Some(Vec::new()),
        Some(vec![permission("/other", "", KeyAccess::Read)]),
    ];
    let users: [Option<&[&str]>; 4] = [None, Some(&[]), Some(&["other"]), Some(&["root"])];
    for owns in Owns::ALL {
        let may_change = matches!(owns, Owns::Recorded | Owns::Confirmed);
        for adopt in [false, true] {
            for found in &roles {
                let role = role(&json!({ "adopt": adopt }), owns);
                let plan = plan_role(&role, &role_seen(found.clone()));
                assert!(calls(&plan).is_empty() || may_change, "{owns:?} {plan:?}");
            }
            for found in users {
                let spec = extended(with_password(), &json!({ "adopt": adopt }));
                let plan = planned_user(&user(&spec, owns), &user_seen(found));
                assert!(calls(&plan).is_empty() || may_change, "{owns:?} {plan:?}");
                assert!(!plan.asks || may_change, "{owns:?}");
            }
        }
    }
}

#[test]
fn invariant_43_existing_role_is_taken_over_only_with_spec_adopt() {
    let found = Some(vec![permission("/other", "", KeyAccess::Read)]);
    for owns in [Owns::Nothing, Owns::Former] {
        let plan = plan_role(&role(&json!({}), owns), &role_seen(found.clone()));
        assert_eq!(plan.state.reason, Reason::AlreadyExists, "{owns:?}");
        assert!(plan.state.message.contains("spec.adopt"), "{plan:?}");
        let adopting = role(&json!({ "adopt": true }), owns);
        let plan = plan_role(&adopting, &role_seen(found.clone()));
        assert!(is_record(&plan, true), "{plan:?}");
    }
}

#[test]
fn invariant_43_user_with_role_root_is_never_taken_over() {
    for owns in [Owns::Nothing, Owns::Recorded, Owns::Former] {
        let spec = extended(with_password(), &json!({ "adopt": true }));
        let plan = planned_user(&user(&spec, owns), &user_seen(Some(&["root"])));
        assert_eq!(plan.state.reason, Reason::RootUser, "{owns:?}");
        assert_eq!((calls(&plan), plan.record), (Vec::new(), Record::Keep));
    }
}

/// The operator may have stopped after it created the role, and before it recorded the creation. Another program may
/// also have created the role after the status recorded the ownership.
#[test]
fn role_after_interrupted_creation_is_kept_only_if_it_matches_spec() {
    let role = role(&json!({}), Owns::Recorded);
    for found in [Vec::new(), vec![wanted()]] {
        let plan = plan_role(&role, &role_seen(Some(found)));
        assert!(is_record(&plan, true), "{plan:?}");
    }
    let foreign = vec![wanted(), permission("/other", "", KeyAccess::Read)];
    let plan = plan_role(&role, &role_seen(Some(foreign)));
    assert_eq!(plan.state.reason, Reason::AlreadyExists);
    assert_eq!(plan.record, Record::Forget);
}

/// An EtcdCluster that is created again on its volumes has another UID. A restore in place changes the cluster ID.
#[test]
fn ownership_survives_new_cluster_uid_or_cluster_id() {
    let role = role(&json!({}), Owns::Confirmed);
    for (uid, id) in [("new-uid", "aa"), ("cluster-uid", "bb")] {
        let mut seen = role_seen(Some(vec![wanted()]));
        seen.cluster = with_cluster(|facts| {
            facts.uid = uid.to_owned();
            facts.cluster_id = Some(id.to_owned());
        });
        let plan = plan_role(&role, &seen);
        assert_eq!(plan.state.reason, Reason::AsDesired);
        let Record::Owned(owned) = &plan.record else {
            panic!("{plan:?}");
        };
        assert_eq!(
            (owned.cluster_uid.as_str(), owned.cluster_id.as_str()),
            (uid, id)
        );
        assert!(owned.created);
    }
}

/// After an EtcdCluster is created again, its cluster ID is unknown for a time. During this time, an older object does
/// not replace the object whose status has recorded the role.
#[test]
fn ownership_record_is_kept_while_cluster_id_is_unknown() {
    let mut seen = role_seen(None);
    seen.cluster = with_cluster(|facts| {
        facts.uid = "new-uid".to_owned();
        facts.cluster_id = None;
        facts.etcd = Err(unreachable());
    });
    seen.rivals = vec![Rival {
        name: "older".to_owned(),
        created: Some(at(1)),
        owns: false,
    }];
    let plan = plan_role(&role(&json!({}), Owns::Confirmed), &seen);
    assert_eq!(plan.state.reason, Reason::EtcdUnreachable);
    assert_eq!((plan.steps, plan.record), (Vec::new(), Record::Keep));
}

#[test]
fn owner_or_else_oldest_etcduser_manages_user() {
    let rival = |name: &str, second: i64, owns: bool| Rival {
        name: name.to_owned(),
        created: Some(at(second)),
        owns,
    };
    // The EtcdUser under test is `app`, created at second 100. `owns` is the ownership in its status.
    for (rival, owns, conflicts) in [
        (rival("older", 99, false), Owns::Nothing, true),
        (rival("younger", 101, false), Owns::Nothing, false),
        (rival("aaa", 100, false), Owns::Nothing, true),
        (rival("zzz", 100, false), Owns::Nothing, false),
        (rival("older", 99, false), Owns::Confirmed, false),
        (rival("younger", 101, true), Owns::Nothing, true),
        (rival("older", 99, true), Owns::Confirmed, true),
        (rival("younger", 101, true), Owns::Confirmed, false),
    ] {
        let mut seen = user_seen(None);
        seen.rivals = vec![rival.clone()];
        let plan = planned_user(&user(&with_password(), owns), &seen);
        let reported = plan.state.reason == Reason::NameConflict;
        assert_eq!(reported, conflicts, "{rival:?} {owns:?}");
        if conflicts {
            assert!(plan.state.message.contains(&rival.name), "{plan:?}");
            assert_eq!((calls(&plan), plan.record), (Vec::new(), Record::Forget));
        }
    }
}

#[test]
fn owned_role_cannot_change_name_or_cluster() {
    let renamed = role(&json!({ "roleName": "writer" }), Owns::Confirmed);
    let moved = role(
        &json!({ "etcdCluster": { "name": "other" } }),
        Owns::Confirmed,
    );
    for (role, field) in [(renamed, "spec.roleName"), (moved, "spec.etcdCluster.name")] {
        let plan = plan_role(&role, &role_seen(None));
        assert_eq!(plan.state.reason, Reason::NameChanged);
        assert!(plan.state.message.contains(field), "{plan:?}");
        assert_eq!((plan.steps, plan.record), (Vec::new(), Record::Keep));
    }
    // While the status has recorded no role, `spec.roleName` may change: the operator records the new name.
    let renamed = role(&json!({ "roleName": "writer" }), Owns::Nothing);
    assert!(is_record(&plan_role(&renamed, &role_seen(None)), false));
}
