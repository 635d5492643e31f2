//! The connections of a mirror to its source and its destination.

use api::cluster::EtcdOptions;
use api::mirror::validate;
use api::problem::{Problem, summary};
use api::{EtcdCluster, EtcdMirror};
use etcd::{Access, ClusterId};
use kube::{Client, ResourceExt};
use runtime::endpoints::{EndpointGrants, EndpointRule};
use runtime::members::{self, EndpointReach, MembersError};

use crate::reason::{Reason, Trouble};
use crate::step::Limits;

/// The connection to one cluster.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct End {
    /// The client URLs. A mirror uses one of them at a time.
    pub endpoints: Vec<String>,
    /// The TLS material and the credentials.
    pub access: Access,
    /// The cluster ID in the status of the EtcdCluster. `None` if the endpoints are not those of an EtcdCluster.
    pub cluster_id: Option<ClusterId>,
}

/// The connections of a mirror.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ends {
    /// The cluster whose keys are copied.
    pub source: End,
    /// The cluster to which the keys are copied.
    pub destination: End,
    /// The limits of transactions of the destination.
    pub limits: Limits,
    /// The source that a user has approved: the value of the annotation `ANNOTATION_ACCEPT_SOURCE`.
    pub accepted: Option<String>,
}

/// The problem for which the operator rejects the spec. `None` if it accepts the spec.
pub(crate) fn refusal(mirror: &EtcdMirror) -> Option<Trouble> {
    let mut problems = validate(mirror);
    let source = &mirror.spec.source;
    let mut urls = source.etcd_endpoints.iter();
    // Invariant 20: without a CA certificate, the operator cannot verify the members, so https URLs are rejected.
    if urls.any(|url| url.starts_with("https://")) && source.client_tls_secret.is_none() {
        problems.push(Problem::new(
            "spec.source.etcdEndpoints",
            "has an https URL, but the spec names no CA certificate to verify the server",
            "name a Secret in spec.source.clientTLSSecret",
        ));
    }
    let namespace = mirror.namespace().unwrap_or_default();
    if source.auth_secret.is_some()
        && let Some(exposed) = members::exposed(&source.etcd_endpoints, &namespace)
    {
        problems.push(Problem::new(
            "spec.source.authSecret",
            format!(
                "would send a password without TLS to {exposed}, which is outside of this namespace"
            ),
            "set an https URL in spec.source.etcdEndpoints, and set spec.source.clientTLSSecret. Or name a Service of \
             this namespace, such as http://example-client:2379",
        ));
    }
    (!problems.is_empty()).then(|| Trouble::new(Reason::InvalidSpec, summary(&problems)))
}

/// Reads the connections from the EtcdClusters and the Secrets that the spec names.
pub(crate) async fn read(
    client: &Client,
    grants: &EndpointGrants,
    mirror: &EtcdMirror,
) -> Result<Ends, Trouble> {
    let namespace = mirror.namespace().unwrap_or_default();
    let source = Box::pin(source(client, mirror, &grants.of(&namespace))).await?;
    let Some(cluster) = destination_cluster(client, mirror).await? else {
        let name = &mirror.spec.destination.etcd_cluster.name;
        return Err(Trouble::new(
            Reason::ClusterMissing,
            format!(
                "spec.destination.etcdCluster.name: there is no EtcdCluster {name} in this namespace: create it"
            ),
        ));
    };
    let destination = of_cluster(client, &cluster, Reason::DestinationUnreachable);
    let destination = Box::pin(destination).await?;
    let annotations = mirror.annotations();
    Ok(Ends {
        source,
        destination,
        limits: limits(cluster.spec.etcd.as_ref()),
        accepted: annotations
            .get(api::names::ANNOTATION_ACCEPT_SOURCE)
            .cloned(),
    })
}

fn limits(options: Option<&EtcdOptions>) -> Limits {
    let max_txn_ops = options.and_then(|options| options.max_txn_ops);
    let max_request_bytes = options.and_then(|options| options.max_request_bytes);
    Limits::of_destination(max_txn_ops, max_request_bytes)
}

async fn source(client: &Client, mirror: &EtcdMirror, rule: &EndpointRule) -> Result<End, Trouble> {
    let namespace = mirror.namespace().unwrap_or_default();
    let spec = &mirror.spec.source;
    if let Some(reference) = &spec.etcd_cluster {
        let field = "spec.source.etcdCluster.name";
        let found = members::cluster(client, &namespace, &reference.name, field).await;
        let cluster = found.map_err(trouble)?;
        return Box::pin(of_cluster(client, &cluster, Reason::SourceUnreachable)).await;
    }
    let field = "spec.source.etcdEndpoints";
    let mut end = End::default();
    for url in members::completed(&spec.etcd_endpoints, &namespace) {
        let named = (field, url.as_str());
        let reach = Box::pin(members::reach(client, &namespace, named, rule)).await;
        // Invariant 28: `reach` decides whether the operator connects to the URL, to the pods of an EtcdCluster of this
        // namespace, or not at all.
        match reach.map_err(trouble)? {
            EndpointReach::Direct => end.endpoints.push(url),
            EndpointReach::Pods(pods) => {
                if end.cluster_id.is_some_and(|known| known != pods.cluster_id) {
                    return Err(Trouble::new(
                        Reason::InvalidSpec,
                        format!("{field} names different EtcdClusters: name one EtcdCluster"),
                    ));
                }
                end.cluster_id = Some(pods.cluster_id);
                end.endpoints.extend(pods.urls);
            }
            EndpointReach::NotGranted(why) => {
                return Err(Trouble::new(
                    Reason::EndpointNotGranted,
                    format!(
                        "{field}: {url} names no EtcdCluster of this namespace and {why}. Or set \
                         spec.source.etcdCluster.name"
                    ),
                ));
            }
        }
    }
    let of_secret = |why| Trouble::new(Reason::SecretMissing, why);
    let tls = members::tls_access(client, &namespace, spec.client_tls_secret.as_deref()).await;
    end.access = tls.map_err(of_secret)?;
    if let Some(secret) = &spec.auth_secret {
        let read = runtime::credentials::of_secret;
        let found = read(client, &namespace, secret, "spec.source.authSecret").await;
        end.access.credentials = Some(found.map_err(of_secret)?);
    }
    Ok(end)
}

/// Reads the connection to the destination of a deleted mirror. `None` if the destination contains no checkpoint,
/// because its EtcdCluster does not exist or has never formed.
pub(crate) async fn released(client: &Client, mirror: &EtcdMirror) -> Result<Option<End>, Trouble> {
    let Some(cluster) = destination_cluster(client, mirror).await? else {
        return Ok(None);
    };
    let status = cluster.status.as_ref();
    if status.is_none_or(|status| status.cluster_id.is_none()) {
        return Ok(None);
    }
    let end = of_cluster(client, &cluster, Reason::DestinationUnreachable);
    Box::pin(end).await.map(Some)
}

async fn destination_cluster(
    client: &Client,
    mirror: &EtcdMirror,
) -> Result<Option<EtcdCluster>, Trouble> {
    let namespace = mirror.namespace().unwrap_or_default();
    let name = &mirror.spec.destination.etcd_cluster.name;
    let field = "spec.destination.etcdCluster.name";
    let found = members::found(client, &namespace, name, field).await;
    found.map_err(trouble)
}

/// The connection to the pods of an EtcdCluster. The operator connects to the addresses of pods and not to Services,
/// because users can change the Services of their namespace (invariant 28).
async fn of_cluster(
    client: &Client,
    cluster: &EtcdCluster,
    reason: Reason,
) -> Result<End, Trouble> {
    let forms = members::address_forms(client, cluster).await;
    let pods = members::pods_of(client, cluster, &forms).await;
    let pods = pods.map_err(|error| Trouble::new(reason, error.to_string()))?;
    let access = runtime::reach::of_cluster(client, cluster).await;
    Ok(End {
        endpoints: pods.urls,
        access: access.map_err(|why| Trouble::new(Reason::SecretMissing, why))?,
        cluster_id: Some(pods.cluster_id),
    })
}

fn trouble(error: MembersError) -> Trouble {
    match error {
        MembersError::Missing(message) => Trouble::new(Reason::ClusterMissing, message),
        MembersError::Unreachable(message) => Trouble::new(Reason::SourceUnreachable, message),
    }
}
