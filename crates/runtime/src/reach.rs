//! Reads the client certificate and the credentials of a cluster from the Secrets that its spec names.
//!
//! The certificate and the credentials are kept only in memory and never printed (invariant 14).

use std::time::Duration;

use api::EtcdCluster;
use api::cluster::TlsPolicy;
use etcd::Access;
use k8s_openapi::api::core::v1::Secret;
use kube::{Api, Client, ResourceExt};
use member::tls::{ClusterTls, Fault, Material, Purpose, Slot, data_of, material};

use crate::credentials::ClusterAuth;

/// Time limit for one read of a Secret.
const DEADLINE: Duration = Duration::from_secs(10);

/// Reads the Secrets that an operator needs to connect to the members of an EtcdCluster.
///
/// # Errors
/// Fails if a Secret cannot be used. The error names the field, the Secret and the remedy.
pub async fn of_cluster(client: &Client, cluster: &EtcdCluster) -> Result<Access, String> {
    let (namespace, name) = (cluster.namespace().unwrap_or_default(), cluster.name_any());
    let policy = cluster.spec.tls.as_ref();
    let (tls, auth) = tokio::join!(
        cluster_tls(client, (namespace.as_str(), name.as_str()), policy),
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

/// Reads the TLS Secrets of a cluster. A Secret that cannot be read becomes a fault in the result.
pub async fn cluster_tls(
    client: &Client,
    (namespace, cluster): (&str, &str),
    policy: Option<&TlsPolicy>,
) -> ClusterTls {
    let Some(policy) = policy else {
        return ClusterTls::default();
    };
    let secrets = Api::<Secret>::namespaced(client.clone(), namespace);
    let slot = async |purpose: Purpose, name: Option<String>| {
        let secret = name?;
        let found = tls_secret(&secrets, purpose, &secret).await;
        let found = found.map_err(|fault| fault.in_policy(Some(policy), &secret));
        Some(Slot { secret, found })
    };
    let (peer, server, operator) = tokio::join!(
        slot(Purpose::Peer, policy.shared_peer_secret(cluster)),
        slot(Purpose::Server, policy.shared_server_secret(cluster)),
        slot(Purpose::Operator, policy.operator_secret_of(cluster)),
    );
    ClusterTls {
        peer,
        server,
        operator,
    }
}

/// Reads one TLS Secret.
pub async fn tls_secret(
    secrets: &Api<Secret>,
    purpose: Purpose,
    name: &str,
) -> Result<Material, Fault> {
    let answer = tokio::time::timeout(DEADLINE, secrets.get_opt(name)).await;
    let secret = match answer {
        Ok(Ok(secret)) => secret,
        Ok(Err(error)) => return Err(Fault::unread(purpose, name, &error.to_string())),
        Err(_) => {
            return Err(Fault::unread(
                purpose,
                name,
                "the API server did not answer",
            ));
        }
    };
    material(purpose, name, secret.map(data_of).as_ref())
}
