//! The caches of the child objects of EtcdClusters.

use api::{EtcdCluster, names};
use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Pod, Service};
use k8s_openapi::api::networking::v1::NetworkPolicy;
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use kube::api::ObjectList;
use kube::{Api, Client, ResourceExt};

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

    /// Reads the NetworkPolicy of a cluster regardless of its owner, and records the read.
    ///
    /// Sends no request if the spec requests no NetworkPolicy and the watch has delivered none, because the operator
    /// writes no NetworkPolicy in this case (invariant 33).
    ///
    /// # Errors
    /// Fails if the API server rejects the request or cannot be reached.
    pub async fn read_policy(
        &self,
        client: &Client,
        cluster: &EtcdCluster,
    ) -> Result<Option<NetworkPolicy>, kube::Error> {
        let (namespace, name) = (cluster.namespace().unwrap_or_default(), cluster.name_any());
        let of_cluster = (namespace.as_str(), name.as_str());
        let cached = self.policies.get(of_cluster);
        if !cluster.spec.has_network_policy() && cached.is_some_and(|all| all.is_empty()) {
            return Ok(None);
        }
        let policies = Api::<NetworkPolicy>::namespaced(client.clone(), &namespace);
        let policy = policies.get_opt(&names::network_policy(&name)).await?;
        self.policies.record_object(of_cluster, policy.as_ref());
        Ok(policy)
    }
}
