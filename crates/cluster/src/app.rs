//! Connects the watches, the controller and the reconciler.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use api::EtcdCluster;
use etcd::{Access, Deadlines, Etcd, EtcdClient};
use k8s_openapi::NamespaceResourceScope;
use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Pod, Service};
use k8s_openapi::api::networking::v1::NetworkPolicy;
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use kube::core::PartialObjectMeta;
use kube::runtime::reflector::ObjectRef;
use kube::runtime::watcher;
use kube::{Resource, ResourceExt};
use member::Operators;
use runtime::Operator;
use runtime::controller::{Controllers, Guarded, drive};
use runtime::endpoints::{EndpointGrant, EndpointGrants, GrantedBy};
use runtime::image::OwnImage;

use crate::clients::Clients;
use crate::metrics::Metrics;
use crate::pod_deletions::PodDeletions;
use crate::reconcile::ClusterOperator;
use crate::snapshot_cache::SnapshotCache;

/// Deadlines of calls to members. Each reconcile reads the health of all members, so a member that hangs delays the
/// reconcile of its cluster by up to these times.
const DEADLINES: Deadlines = Deadlines {
    connect: Duration::from_secs(1),
    status: Duration::from_secs(1),
    call: Duration::from_secs(3),
    hedge: Duration::from_millis(300),
    defragment: Duration::from_mins(10),
    progress: Duration::from_secs(30),
    idle: Duration::from_mins(2),
};

/// Where an administrator permits endpoints of clusters to join: the flag of the cluster operator, and the value of the
/// Helm chart.
pub(crate) const JOINS: GrantedBy = GrantedBy {
    operator: "cluster operator",
    flag: "--join",
    value: "clusters.join",
};

/// Interval at which the operator drops the state of deleted clusters.
const FORGET_EVERY: Duration = Duration::from_mins(1);

/// Runs the operator until it shuts down. Every event of a child object triggers a reconcile of its cluster.
///
/// - `image`: the image with which seed members prepare their data; by default the image of the operator's own pod.
/// - `pods`: labels of pods in the operator's namespace that NetworkPolicies admit.
/// - `joins`: etcd endpoints that EtcdClusters of other namespaces may join.
pub async fn work(
    operator: Operator,
    image: Option<String>,
    pods: BTreeMap<String, String>,
    joins: Vec<EndpointGrant>,
) {
    let cache = Arc::new(SnapshotCache::default());
    let deletions = Arc::new(PodDeletions::default());
    let receivers = EventReceivers {
        cache: Arc::clone(&cache),
        deletions: Arc::clone(&deletions),
    };
    let controllers = Controllers::<EtcdCluster>::new(&operator).without_concurrency_limit();
    let controllers = children::<Pod>(controllers, &receivers);
    let controllers = children::<Service>(controllers, &receivers);
    let controllers = children::<PersistentVolumeClaim>(controllers, &receivers);
    let controllers = children::<PodDisruptionBudget>(controllers, &receivers);
    let controllers = children::<NetworkPolicy>(controllers, &receivers);
    let metrics = Metrics::default();
    let cache_of_clusters = controllers.cache();
    metrics.alive_with(move || {
        let clusters = cache_of_clusters.state();
        clusters.iter().filter_map(|one| one.uid()).collect()
    });
    operator.metrics.collect(metrics.clone());
    let plain = Arc::new(EtcdClient::with_deadlines(Access::default(), DEADLINES));
    let etcd = Clients::new(Arc::clone(&plain) as Arc<dyn Etcd>, DEADLINES);
    let image = OwnImage::new(&operator, image);
    let reconciler = ClusterOperator::new(operator.client.clone(), etcd, image, cache, metrics)
        .with_pod_deletions(deletions)
        .writing_by(operator.client_without_retry.clone())
        .joining(EndpointGrants::new(&operator.namespace, JOINS, joins))
        .of(Operators {
            namespace: operator.namespace.clone(),
            labels: pods,
        });
    let reconciler = Arc::new(reconciler);
    let forget = async {
        loop {
            tokio::time::sleep(FORGET_EVERY).await;
            reconciler.forget(Instant::now());
            plain.close_idle();
        }
    };
    tokio::select! {
        () = drive(&operator, controllers, Arc::clone(&reconciler)) => {}
        () = forget => {}
    }
}

/// The components that receive the events of child objects.
#[derive(Clone)]
struct EventReceivers {
    cache: Arc<SnapshotCache>,
    deletions: Arc<PodDeletions>,
}

impl EventReceivers {
    fn notify<K>(&self, uid: &str, child: &PartialObjectMeta<K>) {
        self.cache.invalidate(uid);
        // The last watch event of a deleted pod has a deletion timestamp. The observation in progress need not wait
        // for this pod.
        if child.metadata.deletion_timestamp.is_some() {
            self.deletions.notify(uid);
        }
    }
}

/// Watches the metadata of one kind of child object. The events only trigger reconciles.
fn children<K>(
    controllers: Controllers<EtcdCluster>,
    receivers: &EventReceivers,
) -> Controllers<EtcdCluster>
where
    K: Resource<DynamicType = (), Scope = NamespaceResourceScope>
        + Clone
        + std::fmt::Debug
        + Send
        + 'static,
{
    let receivers = receivers.clone();
    let config = watcher::Config::default().labels("app=etcd,etcd_cluster");
    controllers.watches(&config, move |child: PartialObjectMeta<K>| {
        let owner = owner(&child);
        if let Some((uid, _)) = &owner {
            receivers.notify(uid, &child);
        }
        owner.map(|(_, cluster)| cluster)
    })
}

/// The EtcdCluster that owns a child object: its UID and its reference.
fn owner<K>(child: &PartialObjectMeta<K>) -> Option<(String, ObjectRef<Guarded<EtcdCluster>>)> {
    let owners = child.metadata.owner_references.iter().flatten();
    let mut ours = owners.filter(|owner| {
        owner.kind == EtcdCluster::kind(&()) && owner.api_version == EtcdCluster::api_version(&())
    });
    let owner = ours.next()?;
    let namespace = child.metadata.namespace.as_deref()?;
    let cluster = ObjectRef::new(&owner.name).within(namespace);
    Some((owner.uid.clone(), cluster))
}

#[cfg(test)]
mod tests {
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;

    use super::*;

    fn child(kind: &str, api_version: &str) -> PartialObjectMeta<Pod> {
        let mut child = PartialObjectMeta::<Pod>::default();
        child.metadata.namespace = Some("prod".into());
        child.metadata.owner_references = Some(vec![OwnerReference {
            api_version: api_version.into(),
            kind: kind.into(),
            name: "db".into(),
            uid: "uid".into(),
            ..OwnerReference::default()
        }]);
        child
    }

    #[test]
    fn event_of_child_object_reconciles_its_cluster() {
        let (uid, cluster) =
            owner(&child("EtcdCluster", "etcd.database.coreos.com/v1beta2")).unwrap();
        assert_eq!((uid.as_str(), cluster.name.as_str()), ("uid", "db"));
        assert_eq!(cluster.namespace.as_deref(), Some("prod"));
        assert!(owner(&child("StatefulSet", "apps/v1")).is_none());
        assert!(owner(&child("EtcdCluster", "example.com/v1")).is_none());
    }
}
