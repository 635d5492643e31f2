//! Access to the members of a cluster: the client certificate and the credentials, from the Secrets that the spec
//! names.
//!
//! Kept in memory only, never printed (invariant 14).

use api::EtcdCluster;
use etcd::Access;
use kube::{Client, ResourceExt};

use crate::credentials::ClusterAuth;
use crate::tls::ClusterTls;

/// Reads what an operator needs to connect to the members of an EtcdCluster.
///
/// # Errors
/// If a Secret cannot be used. The text has the field, the Secret and the remedy.
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
