//! How the operators reach a cluster: its client certificate and its credentials, from the Secrets it names.
//!
//! Kept in memory only; nothing of it is printed (invariant 14).

use api::EtcdCluster;
use etcd::Access;
use kube::{Client, ResourceExt};

use crate::credentials::ClusterAuth;
use crate::tls::ClusterTls;

/// The way to the members of an EtcdCluster, or why there is none: field, Secret and remedy.
pub async fn of_cluster(client: &Client, cluster: &EtcdCluster) -> Result<Access, String> {
    let (namespace, name) = (cluster.namespace().unwrap_or_default(), cluster.name_any());
    let policy = cluster.spec.tls.as_ref();
    let (tls, auth) = tokio::join!(
        ClusterTls::read(client, (namespace.as_str(), name.as_str()), policy),
        ClusterAuth::read(client, cluster)
    );
    let access = tls.access().map_err(|fault| fault.message)?;
    let credentials = auth.credentials();
    match (auth.fault(), credentials) {
        (Some(fault), None) => Err(fault.to_owned()),
        (_, credentials) => Ok(Access {
            credentials,
            ..access
        }),
    }
}
