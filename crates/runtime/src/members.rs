//! The client URLs of an EtcdCluster's members, and how an operator may connect to the endpoints in a spec (invariant
//! 28).

use api::EtcdCluster;
use api::names::Addresses;
use api::problem::Chain;
use etcd::{Access, ClusterId};
use futures::future::join_all;
use k8s_openapi::api::core::v1::{Pod, Secret};
use kube::{Api, Client, ResourceExt};
use member::Members;
use member::tls::{self, Purpose};

use crate::endpoints::{EndpointRule, clusters_named};
use crate::reach;

/// Why the members of an EtcdCluster are not known. The texts name the field or the EtcdCluster, and the remedy.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MembersError {
    /// The EtcdCluster does not exist or cannot be read.
    #[error("{0}")]
    Missing(String),
    /// No address of a member is known.
    #[error("{0}")]
    Unreachable(String),
}

/// The permission to connect to an endpoint in a spec (invariant 28).
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EndpointReach {
    /// The operator connects to the URL, because the URL needs no grant or has a grant.
    Direct,
    /// The URL names an EtcdCluster of the namespace, so the operator connects to the pods of this cluster.
    Pods(MemberPods),
    /// The operator must not connect to the URL. Contains the reason.
    NotGranted(String),
}

/// The members of an EtcdCluster, at the addresses of their pods. Users control the DNS names of their namespace, for
/// example with a Service of type ExternalName, but not the addresses of pods.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemberPods {
    /// The client URLs of the members.
    pub urls: Vec<String>,
    /// The cluster ID in the status of the EtcdCluster. Answers of other clusters are ignored, because another pod may
    /// get the address of a deleted pod.
    pub cluster_id: ClusterId,
}

/// Returns how the operator may connect to a URL of a spec: directly, only at the addresses of pods, or not at all
/// (invariant 28). `field` is the field with the URL, for messages.
///
/// Fails if the EtcdCluster of the URL or its pods cannot be read, or if no address of a pod is known.
pub async fn reach(
    client: &Client,
    namespace: &str,
    (field, url): (&str, &str),
    rule: &EndpointRule,
) -> Result<EndpointReach, MembersError> {
    let Err(why) = rule.check(url) else {
        return Ok(EndpointReach::Direct);
    };
    for name in clusters_named(url, namespace) {
        if let Some(cluster) = found(client, namespace, &name, field).await? {
            let forms = address_forms(client, &cluster).await;
            let scheme = |form| Addresses {
                client_tls: url.starts_with("https://"),
                ..form
            };
            let form = forms.into_iter().next().map(scheme);
            let pods = pods_of(client, &cluster, form.as_slice()).await?;
            return Ok(EndpointReach::Pods(pods));
        }
    }
    Ok(EndpointReach::NotGranted(why))
}

/// The URL formats of the members of an EtcdCluster. They depend on the certificates of the cluster.
pub async fn address_forms(client: &Client, cluster: &EtcdCluster) -> Vec<Addresses> {
    let (namespace, name) = (cluster.namespace().unwrap_or_default(), cluster.name_any());
    let policy = cluster.spec.tls.as_ref();
    let tls = reach::cluster_tls(client, (namespace.as_str(), name.as_str()), policy).await;
    let mut effective = cluster.clone();
    tls.complete_spec(&mut effective.spec, (&namespace, &name), None);
    let addresses = Members::of(&effective, &namespace, "", None).addresses();
    // With `acceptPlaintext`, a rolling update may be in progress: a member may accept only http or only https, so the
    // operator tries the URLs of both schemes.
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
/// Fails if the cluster has not formed, or if no pod has an address.
pub async fn pods_of(
    client: &Client,
    cluster: &EtcdCluster,
    forms: &[Addresses],
) -> Result<MemberPods, MembersError> {
    let (name, namespace) = (cluster.name_any(), cluster.namespace().unwrap_or_default());
    let status = cluster.status.as_ref();
    let cluster_id = status.and_then(|status| status.cluster_id.as_ref()?.parse().ok());
    let Some(cluster_id) = cluster_id else {
        return Err(MembersError::Unreachable(format!(
            "EtcdCluster {name} has no cluster ID yet: wait until the cluster has formed"
        )));
    };
    let pods = Api::<Pod>::namespaced(client.clone(), &namespace);
    let details = status.iter().flat_map(|status| &status.member_details);
    let reads = join_all(details.map(|member| pods.get_opt(&member.name))).await;
    let mut urls = Vec::new();
    for read in reads {
        let pod = read.map_err(|error| {
            MembersError::Unreachable(format!(
                "a pod of EtcdCluster {name} cannot be read: {}",
                Chain(&error)
            ))
        })?;
        if let Some(pod) = pod {
            urls.extend(forms.iter().filter_map(|form| url_at(&pod, form)));
        }
    }
    if urls.is_empty() {
        return Err(MembersError::Unreachable(format!(
            "no pod of EtcdCluster {name} has an address yet"
        )));
    }
    Ok(MemberPods { urls, cluster_id })
}

fn url_at(pod: &Pod, form: &Addresses) -> Option<String> {
    let of_node = pod.spec.as_ref().and_then(|spec| spec.host_network);
    let address = pod.status.as_ref()?.pod_ip.as_ref()?.parse().ok()?;
    (of_node != Some(true)).then(|| form.client_url_at(address, &pod.name_any()))
}

/// Reads the client certificate in a Secret. Without a Secret, the access has no TLS material.
///
/// # Errors
/// Fails if the Secret cannot be used. The error names the Secret and the remedy.
pub async fn tls_access(
    client: &Client,
    namespace: &str,
    secret: Option<&str>,
) -> Result<Access, String> {
    let Some(name) = secret else {
        return Ok(Access::default());
    };
    let secrets = Api::<Secret>::namespaced(client.clone(), namespace);
    let read = reach::tls_secret(&secrets, Purpose::Client, name).await;
    read.map(|material| tls::access(&material))
        .map_err(|fault| fault.message)
}

/// Reads the EtcdCluster that the field `field` of an object names.
///
/// # Errors
/// Fails if the EtcdCluster does not exist or cannot be read.
pub async fn cluster(
    client: &Client,
    namespace: &str,
    name: &str,
    field: &str,
) -> Result<EtcdCluster, MembersError> {
    found(client, namespace, name, field).await?.ok_or_else(|| {
        MembersError::Missing(format!(
            "{field}: there is no EtcdCluster {name} in this namespace: create it or correct the name"
        ))
    })
}

/// Like [`cluster`], but returns `None` if the EtcdCluster does not exist.
///
/// # Errors
/// Fails if the EtcdCluster cannot be read.
pub async fn found(
    client: &Client,
    namespace: &str,
    name: &str,
    field: &str,
) -> Result<Option<EtcdCluster>, MembersError> {
    let clusters = Api::<EtcdCluster>::namespaced(client.clone(), namespace);
    clusters.get_opt(name).await.map_err(|error| {
        MembersError::Missing(format!(
            "{field}: EtcdCluster {name} cannot be read: {}",
            Chain(&error)
        ))
    })
}

/// The endpoints of a spec with complete host names. A Service name without a namespace, as in manifests for
/// coreos/etcd-operator, means a Service in the namespace of the object.
pub fn completed(given: &[String], namespace: &str) -> Vec<String> {
    given.iter().map(|url| endpoint(url, namespace)).collect()
}

fn endpoint(url: &str, namespace: &str) -> String {
    let (scheme, rest) = url.split_once("://").unwrap_or(("http", url));
    let rest = rest.trim_end_matches('/');
    let (host, port) = match rest.rsplit_once(':') {
        Some((host, port)) if port.bytes().all(|byte| byte.is_ascii_digit()) => (host, Some(port)),
        _ => (rest, None),
    };
    let bare = !host.is_empty() && !host.contains(['.', ':', '[']) && host != "localhost";
    let host = if bare {
        format!("{host}.{namespace}.svc")
    } else {
        host.to_owned()
    };
    match port {
        Some(port) => format!("{scheme}://{host}:{port}"),
        None => format!("{scheme}://{host}"),
    }
}

/// The first endpoint to which a password would be sent without TLS, outside of the namespace of the object. A user who
/// may create objects must not gain the password of a Secret. Passwords are therefore sent over TLS with a CA from a
/// Secret, or to Services and pods of the namespace.
pub fn exposed<'a>(endpoints: &'a [String], namespace: &str) -> Option<&'a str> {
    let mut endpoints = endpoints.iter().map(String::as_str);
    endpoints.find(|url| !url.starts_with("https://") && !is_in_namespace(url, namespace))
}

/// True if the URL names a Service of the namespace, or a pod of such a Service. Hosts with other characters than
/// letters, digits, dots and hyphens are rejected, because clients may parse them differently.
fn is_in_namespace(url: &str, namespace: &str) -> bool {
    let address = url.strip_prefix("http://").unwrap_or(url);
    let address = address.strip_suffix('/').unwrap_or(address);
    let (host, port) = address.split_once(':').unwrap_or((address, "2379"));
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'-');
    if !host.bytes().all(is_plain) || !port.bytes().all(|byte| byte.is_ascii_digit()) {
        return false;
    }
    let labels: Vec<&str> = host.split('.').collect();
    match labels.as_slice() {
        // A name without dots is a Service in the namespace of the object, because the operator appends this
        // namespace.
        [service] => !service.is_empty() && *service != "localhost",
        [_, of, "svc"] | [_, _, of, "svc"] => *of == namespace,
        [_, of, "svc", "cluster", "local"] | [_, _, of, "svc", "cluster", "local"] => {
            *of == namespace
        }
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bare_service_name_resolves_in_namespace_of_object() {
        let cases = [
            (
                "http://example-client:2379",
                "http://example-client.prod.svc:2379",
            ),
            ("example-client:2379", "http://example-client.prod.svc:2379"),
            (
                "http://example-client:2379/",
                "http://example-client.prod.svc:2379",
            ),
            ("http://a.other.svc:2379", "http://a.other.svc:2379"),
            ("http://10.0.0.1:2379", "http://10.0.0.1:2379"),
            ("http://[fd00::1]:2379", "http://[fd00::1]:2379"),
            ("[fd00::1]:2379/", "http://[fd00::1]:2379"),
            ("https://[fd00::1]", "https://[fd00::1]"),
            ("http://[::1]:2379", "http://[::1]:2379"),
            ("http://localhost:2379", "http://localhost:2379"),
            ("http://plain", "http://plain.prod.svc"),
        ];
        for (given, expected) in cases {
            assert_eq!(endpoint(given, "prod"), expected);
        }
    }
}
