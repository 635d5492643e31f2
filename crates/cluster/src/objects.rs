//! The Kubernetes side of a cluster: the object as its user wrote it, its children and its Secrets. Nothing is
//! defaulted or decided here.

use api::EtcdCluster;
use api::cluster::MemberAddress;
use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Pod, Secret, Service};
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use member::tls::ClusterTls;

use crate::clock::ApiServerClock;
use crate::switch::Started;

/// The Kubernetes side of an observation.
pub struct Objects {
    /// The object as read now, not from a cache.
    pub cluster: EtcdCluster,
    /// Its pods.
    pub pods: Vec<Pod>,
    /// Its PVCs.
    pub claims: Vec<PersistentVolumeClaim>,
    /// Its Services.
    pub services: Vec<Service>,
    /// Its PodDisruptionBudget.
    pub budget: Option<PodDisruptionBudget>,
    /// The Secrets of generated certificates.
    pub secrets: Vec<Secret>,
    /// The certificates with which members start. In memory only.
    pub tls: ClusterTls,
    /// The certificates with which members start next during a TLS change. In memory only.
    pub next_tls: ClusterTls,
    /// The TLS settings with which members were started.
    pub started: Started,
    /// The form of address of running members.
    pub form: Option<MemberAddress>,
    /// The API server's clock.
    pub clock: ApiServerClock,
}
