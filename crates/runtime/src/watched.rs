//! The caches of the child objects of EtcdClusters.

use api::EtcdCluster;
use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Pod, Service};
use k8s_openapi::api::networking::v1::NetworkPolicy;
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use kube::ResourceExt;
use kube::api::ObjectList;

use crate::watch_cache::WatchCache;

/// The caches of the child objects that the operator watches, grouped by cluster.
#[derive(Clone, Debug, Default)]
pub struct Watched {
    /// Contains only the resource versions of the last reads, for [`WatchCache::is_outdated`]. The controller's cache
    /// contains the EtcdClusters themselves.
    pub clusters: WatchCache<EtcdCluster>,
    /// The pods of all members.
    pub pods: WatchCache<Pod>,
    /// The Services of clusters and members.
    pub services: WatchCache<Service>,
    /// The PVCs of all members.
    pub claims: WatchCache<PersistentVolumeClaim>,
    /// The PodDisruptionBudget of each cluster.
    pub budgets: WatchCache<PodDisruptionBudget>,
    /// The NetworkPolicy of each cluster.
    pub policies: WatchCache<NetworkPolicy>,
}

impl Watched {
    /// Records a read of a cluster's objects from the API server. After this, the caches return no older objects.
    pub fn record(
        &self,
        cluster: &EtcdCluster,
        (services, pods, claims): (
            &ObjectList<Service>,
            &ObjectList<Pod>,
            &ObjectList<PersistentVolumeClaim>,
        ),
        budget: Option<&PodDisruptionBudget>,
    ) {
        let (namespace, name) = (cluster.namespace().unwrap_or_default(), cluster.name_any());
        let of_cluster = (namespace.as_str(), name.as_str());
        self.clusters.record_object(of_cluster, Some(cluster));
        self.services.record_list(of_cluster, services);
        self.pods.record_list(of_cluster, pods);
        self.claims.record_list(of_cluster, claims);
        self.budgets.record_object(of_cluster, budget);
    }
}
