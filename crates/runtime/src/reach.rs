//! Reads the client certificate and the credentials of a cluster from the Secrets that its spec names, and the client
//! URLs of its members.
//!
//! Certificates and credentials are kept only in memory and never printed (invariant 14).

use std::time::Duration;

use api::EtcdCluster;
use api::cluster::TlsPolicy;
use api::names::Addresses;
use etcd::Access;
use futures::future::join_all;
use k8s_openapi::api::core::v1::{Pod, Secret};
use kube::{Api, Client, ResourceExt};
use member::Members;
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
        Some(Slot { secret, found })
    };
    let (peer, server, operator) = tokio::join!(
        slot(Purpose::Peer, policy.peer_secret().map(str::to_owned)),
        slot(Purpose::Server, policy.server_secret().map(str::to_owned)),
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

/// The URL formats of the members of an EtcdCluster. They depend on its certificates.
pub async fn address_forms(client: &Client, cluster: &EtcdCluster) -> Vec<Addresses> {
    let (namespace, name) = (cluster.namespace().unwrap_or_default(), cluster.name_any());
    let policy = cluster.spec.tls.as_ref();
    let tls = cluster_tls(client, (namespace.as_str(), name.as_str()), policy).await;
    let mut effective = cluster.clone();
    tls.complete_spec(&mut effective.spec, (&namespace, &name), None);
    let addresses = Members::of(&effective, &namespace, "", None).addresses();
    // During a TLS switch, a member may accept only http or only https, so the operator tries the URLs of both schemes.
    let policy = effective.spec.tls;
    let with_tls = policy.is_some_and(|tls| tls.accepts_plaintext());
    let with_tls = with_tls.then(|| Addresses {
        client_tls: true,
        ..addresses.clone()
    });
    [addresses].into_iter().chain(with_tls).collect()
}

/// The client URLs of an EtcdCluster's members, at the addresses of their pods. Users cannot change these addresses:
/// the cluster operator writes the member names, and the kubelet writes the pod addresses. A pod in the host network
/// is left out, because its address is the address of the node.
///
/// # Errors
/// Fails if a pod cannot be read.
pub async fn urls_at_pods(
    client: &Client,
    cluster: &EtcdCluster,
    forms: &[Addresses],
) -> Result<Vec<String>, kube::Error> {
    let namespace = cluster.namespace().unwrap_or_default();
    let status = cluster.status.as_ref();
    let pods = Api::<Pod>::namespaced(client.clone(), &namespace);
    let details = status.iter().flat_map(|status| &status.member_details);
    let reads = join_all(details.map(|member| pods.get_opt(&member.name))).await;
    let mut urls = Vec::new();
    for read in reads {
        if let Some(pod) = read? {
            urls.extend(forms.iter().filter_map(|form| url_at(&pod, form)));
        }
    }
    Ok(urls)
}

fn url_at(pod: &Pod, form: &Addresses) -> Option<String> {
    let of_node = pod.spec.as_ref().and_then(|spec| spec.host_network);
    let address = pod.status.as_ref()?.pod_ip.as_ref()?.parse().ok()?;
    (of_node != Some(true)).then(|| form.client_url_at(address, &pod.name_any()))
}
