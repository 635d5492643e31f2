//! What is read of a cluster from Kubernetes: the object as its user wrote it, its children and its Secrets. Nothing is
//! completed or decided here.

use api::EtcdCluster;
use api::cluster::MemberAddress;
use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Pod, Secret, Service};
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use member::tls::ClusterTls;

use crate::clock::ApiServerClock;
use crate::switch::Started;

/// The Kubernetes side of an observation.
pub struct Objects {
    /// The object as it is now, not as a cache has it.
    pub cluster: EtcdCluster,
    /// Its pods.
    pub pods: Vec<Pod>,
    /// Its volume claims.
    pub claims: Vec<PersistentVolumeClaim>,
    /// Its Services.
    pub services: Vec<Service>,
    /// Its disruption budget.
    pub budget: Option<PodDisruptionBudget>,
    /// The Secrets of generated certificates.
    pub secrets: Vec<Secret>,
    /// The certificates that members are started with. In memory only.
    pub tls: ClusterTls,
    /// The certificates that members are to be started with next, while TLS is being changed. In memory only.
    pub next_tls: ClusterTls,
    /// What members were started with.
    pub started: Started,
    /// The form of address that a running member has.
    pub form: Option<MemberAddress>,
    /// The API server's clock.
    pub clock: ApiServerClock,
}
