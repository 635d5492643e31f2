//! The Kubernetes objects of a cluster, as read: the EtcdCluster, its child objects and its Secrets.

use api::EtcdCluster;
use api::cluster::MemberAddress;
use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Pod, Secret, Service};
use k8s_openapi::api::networking::v1::NetworkPolicy;
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use member::issued::Issuance;
use member::tls::ClusterTls;

use crate::clock::ApiServerClock;
use crate::switch::Started;

/// The Kubernetes objects that one observation of a cluster has read.
pub struct Objects {
    /// The EtcdCluster. The operator plans writes only for an EtcdCluster read from the API server, not from a cache
    /// (invariant 33).
    pub cluster: EtcdCluster,
    /// The pods of all members, including a recovery's seed.
    pub pods: Vec<Pod>,
    /// The PVCs of the cluster.
    pub claims: Vec<PersistentVolumeClaim>,
    /// The Services of the whole cluster and of all members.
    pub services: Vec<Service>,
    /// The PodDisruptionBudget of the cluster.
    pub budget: Option<PodDisruptionBudget>,
    /// The NetworkPolicy with the cluster's name, even if another object owns the NetworkPolicy.
    pub policy: Option<NetworkPolicy>,
    /// The Secrets of generated certificates.
    pub secrets: Vec<Secret>,
    /// The certificates with which members start. They are kept in memory only.
    pub tls: ClusterTls,
    /// The certificates with which members start after the next step of a TLS change. They are kept in memory only.
    pub next_tls: ClusterTls,
    /// The certificates that cert-manager issues; `None` without `spec.TLS.certManager`.
    pub issuance: Option<Issuance>,
    /// The TLS settings with which the running members were started.
    pub started: Started,
    /// The form of the addresses that the running members use; `None` if no member runs.
    pub form: Option<MemberAddress>,
    /// The API server's clock, compared with the operator's clock.
    pub clock: ApiServerClock,
}
