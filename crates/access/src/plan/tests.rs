//! Tests of the plan. Each test describes the object, the EtcdCluster and etcd, and compares the planned changes.

mod deletion;
mod ownership;
mod role;
mod user;

use api::access::OwnedStatus;
use api::names::FINALIZER_ACCESS;
use api::version::EtcdVersion;
use api::{EtcdRole, EtcdUser};
use etcd::{KeyAccess, KeyPermission, PermissionRange};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;
use serde_json::{Value, json};

use super::{Call, Plan, Record, Step, plan_role, plan_user};
use crate::reason::{Reason, Trouble};
use crate::snapshot::{
    Cluster, ClusterFacts, EtcdFacts, RoleFacts, RoleSnapshot, RoleState, UserSnapshot,
};

fn at(second: i64) -> Timestamp {
    Timestamp::from_second(second).unwrap()
}

const NOW: i64 = 1_000_000;

/// The ownership in the status of an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Owns {
    Nothing,
    /// Recorded, but etcd has not confirmed the creation.
    Recorded,
    Confirmed,
    /// Confirmed in another etcd cluster, whose EtcdCluster had the same name.
    Former,
}

impl Owns {
    const ALL: [Self; 4] = [Self::Nothing, Self::Recorded, Self::Confirmed, Self::Former];

    fn record(self, name: &str) -> Option<OwnedStatus> {
        let (uid, id) = match self {
            Self::Nothing => return None,
            Self::Former => ("former", "ff"),
            Self::Recorded | Self::Confirmed => ("cluster-uid", "aa"),
        };
        Some(OwnedStatus {
            name: name.to_owned(),
            cluster: "main".to_owned(),
            cluster_uid: uid.to_owned(),
            cluster_id: id.to_owned(),
            created: self != Self::Recorded,
        })
    }
}

fn extended(base: Value, added: &Value) -> Value {
    let mut whole = base;
    let fields = added.as_object().unwrap().clone();
    whole.as_object_mut().unwrap().extend(fields);
    whole
}

/// An EtcdRole `reader` with a finalizer, which grants read access to the prefix `/app/`. `added` contains further
/// fields of its spec.
fn role(added: &Value, owns: Owns) -> EtcdRole {
    let base = json!({
        "etcdCluster": { "name": "main" },
        "permissions": [{ "access": "Read", "prefix": "/app/" }],
    });
    let spec = serde_json::from_value(extended(base, added)).unwrap();
    let mut role = EtcdRole::new("reader", spec);
    role.metadata.uid = Some("role-uid".to_owned());
    role.metadata.namespace = Some("prod".to_owned());
    role.metadata.creation_timestamp = Some(Time(at(100)));
    role.metadata.finalizers = Some(vec![FINALIZER_ACCESS.to_owned()]);
    let mut status = role.status.take().unwrap_or_default();
    status.owned = owns.record("reader");
    role.status = Some(status);
    role
}

/// An EtcdUser `app` with a finalizer and the EtcdRole `reader`. `added` contains the other fields of its spec.
fn user(added: &Value, owns: Owns) -> EtcdUser {
    let base = json!({ "etcdCluster": { "name": "main" }, "roles": ["reader"] });
    let spec = serde_json::from_value(extended(base, added)).unwrap();
    let mut user = EtcdUser::new("app", spec);
    user.metadata.uid = Some("user-uid".to_owned());
    user.metadata.namespace = Some("prod".to_owned());
    user.metadata.creation_timestamp = Some(Time(at(100)));
    user.metadata.finalizers = Some(vec![FINALIZER_ACCESS.to_owned()]);
    let mut status = user.status.take().unwrap_or_default();
    status.owned = owns.record("app");
    user.status = Some(status);
    user
}

fn with_password() -> Value {
    json!({ "password": { "secret": "app" } })
}

/// The EtcdCluster `main` with authentication, whose members answer.
fn facts() -> ClusterFacts {
    ClusterFacts {
        uid: "cluster-uid".to_owned(),
        cluster_id: Some("aa".to_owned()),
        is_deleting: false,
        is_paused: false,
        is_hibernated: false,
        is_restoring: false,
        has_auth: true,
        has_client_tls: true,
        version: Some(EtcdVersion::release(3, 6, 16)),
        etcd: Ok(EtcdFacts {
            is_auth_enabled: true,
            operator_user: Some("root".to_owned()),
        }),
    }
}

fn unreachable() -> Trouble {
    Trouble::new(Reason::EtcdUnreachable, "no member answers")
}

fn permission(key: &str, end: &str, access: KeyAccess) -> KeyPermission {
    KeyPermission {
        range: PermissionRange {
            key: key.as_bytes().to_vec(),
            end: end.as_bytes().to_vec(),
        },
        access,
    }
}

/// The permission in the spec of [`role`].
fn wanted() -> KeyPermission {
    permission("/app/", "/app0", KeyAccess::Read)
}

fn role_seen(found: Option<Vec<KeyPermission>>) -> RoleSnapshot {
    RoleSnapshot {
        cluster: Cluster::Present(facts()),
        rivals: Vec::new(),
        found: Ok(found),
    }
}

fn user_seen(found: Option<&[&str]>) -> UserSnapshot {
    let found = found.map(|roles| roles.iter().map(|one| (*one).to_owned()).collect());
    UserSnapshot {
        cluster: Cluster::Present(facts()),
        rivals: Vec::new(),
        found: Ok(found),
        roles: vec![role_fact("reader", RoleState::Ready("reader".to_owned()))],
        password: Some(Ok(version("7"))),
        check: None,
    }
}

fn role_fact(name: &str, state: RoleState) -> RoleFacts {
    RoleFacts {
        name: name.to_owned(),
        state,
    }
}

/// A version of the Secret `app`.
fn version(resource_version: &str) -> api::access::PasswordStatus {
    api::access::PasswordStatus {
        secret: "app".to_owned(),
        key: "password".to_owned(),
        uid: "secret-uid".to_owned(),
        resource_version: resource_version.to_owned(),
    }
}

fn calls(plan: &Plan) -> Vec<Call> {
    let calls = plan.steps.iter().filter_map(|step| match step {
        Step::Call(call) => Some(call.clone()),
        Step::SetFinalizer(_) => None,
    });
    calls.collect()
}

fn planned_user(user: &EtcdUser, seen: &UserSnapshot) -> Plan {
    plan_user(user, seen, at(NOW))
}

fn is_record(plan: &Plan, created: bool) -> bool {
    matches!(&plan.record, Record::Owned(owned) if owned.created == created)
}

fn with_cluster(change: impl Fn(&mut ClusterFacts)) -> Cluster {
    let mut facts = facts();
    change(&mut facts);
    Cluster::Present(facts)
}

#[test]
fn missing_or_unready_cluster_is_reported_and_nothing_changes() {
    type Change = fn(&mut ClusterFacts);
    let changes: [(Change, Reason); 7] = [
        (|facts| facts.is_deleting = true, Reason::ClusterDeleting),
        (|facts| facts.has_auth = false, Reason::AuthNotConfigured),
        (|facts| facts.is_paused = true, Reason::Paused),
        (|facts| facts.is_hibernated = true, Reason::Hibernated),
        (|facts| facts.is_restoring = true, Reason::Restoring),
        (
            |facts| facts.etcd = Err(unreachable()),
            Reason::EtcdUnreachable,
        ),
        (
            |facts| facts.etcd = Err(Trouble::new(Reason::EtcdAccessDenied, "denied")),
            Reason::EtcdAccessDenied,
        ),
    ];
    let mut clusters: Vec<(Cluster, Reason)> = changes
        .iter()
        .map(|(change, reason)| (with_cluster(change), *reason))
        .collect();
    let unknown = Cluster::Unknown("the API server does not answer".to_owned());
    clusters.push((unknown, Reason::ClusterUnreadable));
    clusters.push((Cluster::Missing, Reason::ClusterMissing));
    for (cluster, reason) in clusters {
        for owns in [Owns::Nothing, Owns::Confirmed] {
            let mut seen = role_seen(None);
            seen.cluster = cluster.clone();
            let plan = plan_role(&role(&json!({}), owns), &seen);
            assert_eq!(plan.state.reason, reason, "{owns:?}");
            assert_eq!(plan.steps, [], "{reason}");
            assert_eq!(plan.record, Record::Keep, "{reason}");
            let mut seen = user_seen(None);
            seen.cluster = cluster.clone();
            let plan = planned_user(&user(&with_password(), owns), &seen);
            assert_eq!(plan.state.reason, reason, "{owns:?}");
            assert_eq!(plan.steps, [], "{reason}");
            assert!(!plan.asks, "{reason}");
        }
    }
}

#[test]
fn invalid_spec_is_reported_before_missing_cluster() {
    let mut seen = role_seen(None);
    seen.cluster = Cluster::Missing;
    let named = role(&json!({ "roleName": "root" }), Owns::Nothing);
    let plan = plan_role(&named, &seen);
    assert_eq!(plan.state.reason, Reason::InvalidSpec);
    assert!(plan.state.message.contains("spec.roleName"), "{plan:?}");
}
