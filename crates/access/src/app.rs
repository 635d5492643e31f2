//! Starts the watches. A change of an EtcdCluster or of an EtcdRole triggers reconciles of the objects that name it.
//!
//! Secrets are not watched, because the operator would need the right to list all Secrets. Each EtcdUser is reconciled
//! once a minute instead.

use std::sync::Arc;
use std::time::{Duration, Instant};

use api::{EtcdCluster, EtcdRole, EtcdUser};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::core::ApiResource;
use kube::runtime::reflector::ObjectRef;
use kube::runtime::watcher;
use kube::{CustomResourceExt, ResourceExt};
use runtime::admin::Readiness;
use runtime::controller::{Cache, Controllers, Guarded, drive};
use runtime::process::Objects;
use runtime::{Operator, crd};

use crate::object::AccessObject;
use crate::observe::{Clusters, ObserveContext};
use crate::reconcile::{RoleReconciler, UserReconciler};
use crate::triggers::ClusterChanges;

/// Interval at which the state of deleted EtcdClusters is dropped.
const FORGET_EVERY: Duration = Duration::from_mins(1);

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
    let roles = Controllers::<EtcdRole>::new(&operator);
    let users = Controllers::<EtcdUser>::new(&operator);
    let context = Arc::new(ObserveContext {
        client: operator.client_without_retry.clone(),
        clusters: Arc::clone(&clusters),
        roles: roles.cache(),
        users: users.cache(),
    });
    let roles = watch_clusters(roles, &clusters);
    let users = watch_roles(watch_clusters(users, &clusters), &context.users);
    let (for_roles, for_users) = (without_count(&operator), without_count(&operator));
    let work = async {
        tokio::join!(
            drive(
                &for_roles,
                roles,
                Arc::new(RoleReconciler(Arc::clone(&context)))
            ),
            drive(
                &for_users,
                users,
                Arc::new(UserReconciler(Arc::clone(&context)))
            ),
        );
    };
    let forget = async {
        loop {
            tokio::time::sleep(FORGET_EVERY).await;
            clusters.forget(Instant::now());
        }
    };
    tokio::select! {
        () = Box::pin(work) => {}
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
    let readiness = Readiness::default();
    Box::pin(crd::ready(client, &kind, create, scope, &readiness)).await;
}

/// Reconciles the objects that name a changed EtcdCluster.
fn watch_clusters<K: AccessObject>(
    controllers: Controllers<K>,
    clusters: &Arc<Clusters>,
) -> Controllers<K> {
    let objects = controllers.cache();
    let (clusters, changes) = (Arc::clone(clusters), Arc::new(ClusterChanges::default()));
    controllers.watches(
        &watcher::Config::default(),
        move |cluster: Guarded<EtcdCluster>| {
            if !changes.is_relevant(&cluster) {
                return Vec::new();
            }
            let (namespace, name) = (cluster.namespace(), cluster.name_any());
            clusters.invalidate(namespace.as_deref().unwrap_or_default(), &name);
            matching(&objects, namespace.as_deref(), |object: &K| {
                object.cluster() == name || object.target() == name
            })
        },
    )
}

/// Reconciles the EtcdUsers that name a changed EtcdRole.
fn watch_roles(
    controllers: Controllers<EtcdUser>,
    users: &Cache<EtcdUser>,
) -> Controllers<EtcdUser> {
    let users = users.clone();
    controllers.watches(
        &watcher::Config::default(),
        move |role: Guarded<EtcdRole>| {
            let (namespace, name) = (role.namespace(), role.name_any());
            matching(&users, namespace.as_deref(), |user: &EtcdUser| {
                user.spec.roles.contains(&name)
            })
        },
    )
}

fn matching<K: AccessObject>(
    cache: &Cache<K>,
    namespace: Option<&str>,
    matches: impl Fn(&K) -> bool,
) -> Vec<ObjectRef<Guarded<K>>> {
    let found = cache.select(|object| {
        object.namespace().as_deref() == namespace && object.0.as_ref().is_ok_and(&matches)
    });
    let references = found
        .iter()
        .map(|object| ObjectRef::from_obj(object.as_ref()));
    references.collect()
}
