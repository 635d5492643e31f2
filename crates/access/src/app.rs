//! Starts the watches. A change of an EtcdCluster or of an EtcdRole triggers reconciles of the objects that name it.
//!
//! Secrets are not watched, because the operator would need the right to list all Secrets. Each EtcdUser is reconciled
//! once a minute instead.

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

/// Interval at which the state of deleted EtcdClusters is dropped.
const FORGET_EVERY: Duration = Duration::from_mins(1);

/// Requests reconciles of EtcdUsers.
type UserRequests = mpsc::UnboundedSender<ObjectRef<Guarded<EtcdUser>>>;

/// Runs the controllers of EtcdRoles and EtcdUsers until the shutdown. With `create_crds`, first creates or updates
/// their CRDs if RBAC allows it. Until both CRDs exist, only waits, so that an operator with older CRDs still runs
/// clusters.
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
        // Controllers end before the shutdown only because of a defect. This function then returns.
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

/// The operator for one kind. Its objects are counted separately, so that the metric of managed objects contains only
/// EtcdClusters.
fn without_count(operator: &Operator) -> Operator {
    Operator {
        objects: Objects::default(),
        ..operator.clone()
    }
}

/// Waits until the CRD exists. The readiness of the process does not depend on it.
async fn await_crd<K: AccessObject + CustomResourceExt>(operator: &Operator, create: bool) {
    let make: &(dyn Fn() -> CustomResourceDefinition + Sync) = &K::crd;
    let kind = ApiResource::erase::<K>(&());
    let create = create.then_some(make);
    let (client, scope) = (&operator.client, &operator.scope);
    let available = crd::available(client, &kind, create, scope).boxed();
    available.await;
}

/// Reconciles the EtcdRoles and requests the EtcdUsers that name a changed EtcdCluster.
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
        // Most EtcdClusters have neither roles nor users. Their changes are not compared, because this takes time.
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

/// Requests the EtcdUsers that name a changed EtcdRole. The cache of EtcdRoles contains the change before the request.
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

/// Whether the object names the EtcdCluster, or its deletion depends on the EtcdCluster.
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
