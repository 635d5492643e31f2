//! Runs the controllers of EtcdRoles and EtcdUsers. A change of an EtcdCluster or of an EtcdRole triggers reconciles of
//! the objects that name it.
//!
//! The operator does not watch Secrets, because a watch needs the right to list all Secrets. Instead, each EtcdUser is
//! reconciled once a minute, and the reconcile reads its Secret.

use std::sync::Arc;
use std::time::{Duration, Instant};

use api::{EtcdCluster, EtcdRole, EtcdUser};
use futures::FutureExt;
use futures::future::select;
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::core::ApiResource;
use kube::runtime::reflector::ObjectRef;
use kube::runtime::watcher;
use kube::{CustomResourceExt, Resource, ResourceExt};
use runtime::controller::{Cache, Controllers, Guarded, drive};
use runtime::process::Objects;
use runtime::{Operator, crd};
use tokio::sync::mpsc;

use crate::object::AccessObject;
use crate::observe::{Clusters, ObserveContext};
use crate::reconcile::{RoleReconciler, UserReconciler};
use crate::triggers::ClusterChanges;

/// Interval of the checks for observations of EtcdClusters that are no longer used.
const FORGET_EVERY: Duration = Duration::from_mins(1);

/// Requests reconciles of EtcdUsers.
type UserRequests = mpsc::UnboundedSender<ObjectRef<Guarded<EtcdUser>>>;

/// Runs the controllers of EtcdRoles and EtcdUsers until the shutdown. With `create_crds`, first creates or updates
/// their CRDs if RBAC allows it. The controllers wait until both CRDs exist, and the other controllers of the process
/// do not wait for these CRDs.
pub async fn run(operator: Operator, create_crds: bool) {
    let ready = async {
        await_crd::<EtcdRole>(&operator, create_crds).await;
        await_crd::<EtcdUser>(&operator, create_crds).await;
    };
    tokio::select! {
        () = ready => {}
        () = operator.shutdown.cancelled() => return,
    }
    let clusters = Arc::new(Clusters::new(operator.client_without_retry.clone()));
    let users = Controllers::<EtcdUser>::new(&operator);
    let (requests, requested) = mpsc::unbounded_channel();
    let notify = users_of_role(users.cache(), requests.clone());
    let roles = Controllers::<EtcdRole>::with_changes(&operator, notify);
    let context = Arc::new(ObserveContext {
        client: operator.client_without_retry.clone(),
        clusters: Arc::clone(&clusters),
        roles: roles.cache(),
        users: users.cache(),
    });
    let roles = watch_clusters(roles, users.cache(), Arc::clone(&clusters), requests);
    let users = users.reconcile_on(requested);
    let (for_roles, for_users) = (without_count(&operator), without_count(&operator));
    let role_reconciler = Arc::new(RoleReconciler(Arc::clone(&context)));
    let roles = drive(&for_roles, roles, role_reconciler).boxed();
    let users = drive(&for_users, users, Arc::new(UserReconciler(context))).boxed();
    let work = async {
        // Only a defect ends a controller before the shutdown. Then this function returns and does not wait for the
        // second controller.
        let ((), rest) = select(roles, users).await.factor_first();
        if operator.shutdown.is_cancelled() {
            rest.await;
        }
    };
    let forget = async {
        loop {
            tokio::time::sleep(FORGET_EVERY).await;
            clusters.forget(Instant::now());
        }
    };
    tokio::select! {
        () = work => {}
        () = forget => {}
    }
}

/// A copy of the operator with a separate count of managed objects, because the metric of the process counts only
/// EtcdClusters.
fn without_count(operator: &Operator) -> Operator {
    Operator {
        objects: Objects::default(),
        ..operator.clone()
    }
}

/// Waits until the CRD exists. The readiness of the process does not depend on the CRD.
async fn await_crd<K: AccessObject + CustomResourceExt>(operator: &Operator, create: bool) {
    let make: &(dyn Fn() -> CustomResourceDefinition + Sync) = &K::crd;
    let kind = ApiResource::erase::<K>(&());
    let create = create.then_some(make);
    let (client, scope) = (&operator.client, &operator.scope);
    let available = crd::available(client, &kind, create, scope).boxed();
    available.await;
}

/// If an EtcdCluster changes, reconciles the EtcdRoles that name it, and requests reconciles of the EtcdUsers that name
/// it.
fn watch_clusters(
    controllers: Controllers<EtcdRole>,
    users: Cache<EtcdUser>,
    clusters: Arc<Clusters>,
    requests: UserRequests,
) -> Controllers<EtcdRole> {
    let roles = controllers.cache();
    let changes = Arc::new(ClusterChanges::default());
    let config = watcher::Config::default();
    controllers.watches(&config, move |cluster: Guarded<EtcdCluster>| {
        let name = cluster.name_any();
        let namespace = cluster.meta().namespace.as_deref();
        let roles = matching(&roles, namespace, |role: &EtcdRole| names(role, &name));
        let users = matching(&users, namespace, |user: &EtcdUser| names(user, &name));
        // `is_relevant` hashes the whole object, which takes time. It is not called for an EtcdCluster that no EtcdRole
        // and no EtcdUser names.
        if (roles.is_empty() && users.is_empty()) || !changes.is_relevant(&cluster) {
            return Vec::new();
        }
        clusters.invalidate(namespace.unwrap_or_default(), &name);
        for user in users {
            let _ = requests.send(user);
        }
        roles
    })
}

/// Requests reconciles of the EtcdUsers that name a changed EtcdRole. The controller of EtcdRoles calls the returned
/// function after its cache contains the change.
fn users_of_role(
    users: Cache<EtcdUser>,
    requests: UserRequests,
) -> impl Fn(&Guarded<EtcdRole>) + Clone + Send + 'static {
    move |role: &Guarded<EtcdRole>| {
        let (namespace, name) = (role.meta().namespace.as_deref(), role.name_any());
        let named = |user: &EtcdUser| user.spec.roles.contains(&name);
        for user in matching(&users, namespace, named) {
            let _ = requests.send(user);
        }
    }
}

/// True if the spec of the object names the EtcdCluster, or if the object is being deleted and its status names the
/// EtcdCluster.
fn names<K: AccessObject>(object: &K, cluster: &str) -> bool {
    object.cluster() == cluster || object.target() == cluster
}

fn matching<K: AccessObject>(
    cache: &Cache<K>,
    namespace: Option<&str>,
    matches: impl Fn(&K) -> bool,
) -> Vec<ObjectRef<Guarded<K>>> {
    let found = cache.select(|object| {
        object.meta().namespace.as_deref() == namespace && object.0.as_ref().is_ok_and(&matches)
    });
    let references = found
        .iter()
        .map(|object| ObjectRef::from_obj(object.as_ref()));
    references.collect()
}
