//! The etcd cluster that is backed up: its endpoints, and the client for them. The content of Secrets leaves this module
//! only inside the client (invariant 14).

use std::sync::Arc;

use api::backup::EtcdBackupSpec;
use api::manifest::ManifestCluster;
use api::names::{ANNOTATION_RESTORE, Addresses};
use api::{EtcdBackup, EtcdCluster};
use etcd::{Access, Etcd, EtcdClient};
use k8s_openapi::api::core::v1::Secret;
use kube::{Api, Client, ResourceExt};
use member::Members;
use member::tls::{self, ClusterTls, Purpose};

use super::ObserveContext;
use crate::reason::{Reason, Trouble};
use crate::snapshot::Source;

/// The endpoints from `spec.etcdEndpoints` or from the EtcdCluster.
pub(super) async fn source(
    context: &ObserveContext,
    backup: &EtcdBackup,
) -> Result<Source, Trouble> {
    let namespace = backup.namespace().unwrap_or_default();
    let Some(reference) = &backup.spec.etcd_cluster else {
        let endpoints = endpoints(&backup.spec.etcd_endpoints, &namespace);
        return Ok(Source::Endpoints(endpoints));
    };
    let cluster = cluster(&context.client, &namespace, &reference.name).await?;
    let policy = cluster.spec.tls.as_ref();
    let tls =
        runtime::reach::cluster_tls(&context.client, (&namespace, &reference.name), policy).await;
    Ok(members_of(&cluster, &namespace, &tls))
}

/// The client URLs of an EtcdCluster, and its record for the manifest.
fn members_of(cluster: &EtcdCluster, namespace: &str, tls: &ClusterTls) -> Source {
    let name = cluster.name_any();
    // The form of the addresses depends on the certificates.
    let mut effective = cluster.clone();
    tls.complete_spec(&mut effective.spec, (namespace, &name), None);
    let addresses = Members::of(&effective, namespace, "", None).addresses();
    let mut urls = urls_of(cluster, &addresses);
    if effective
        .spec
        .tls
        .is_some_and(|tls| tls.accepts_plaintext())
    {
        // During the TLS switch a member may accept only one of both schemes, so both URLs are tried.
        let with_tls = Addresses {
            client_tls: true,
            ..addresses
        };
        urls.extend(urls_of(cluster, &with_tls));
    }
    let annotations = cluster.annotations();
    Source::Cluster {
        endpoints: urls,
        recorded: Box::new(ManifestCluster {
            name,
            namespace: namespace.to_owned(),
            spec: cluster.spec.clone(),
        }),
        restoring: annotations.contains_key(ANNOTATION_RESTORE),
    }
}

/// The client for the etcd cluster, with the Secrets that the EtcdCluster or the EtcdBackup names.
pub(super) async fn client(
    context: &ObserveContext,
    backup: &EtcdBackup,
) -> Result<Arc<dyn Etcd>, Trouble> {
    let namespace = backup.namespace().unwrap_or_default();
    let spec = &backup.spec;
    let access = match (&spec.etcd_cluster, &spec.auth_secret) {
        (Some(reference), _) => {
            let cluster = cluster(&context.client, &namespace, &reference.name).await?;
            runtime::reach::of_cluster(&context.client, &cluster).await
        }
        (None, secret) => {
            let tls = tls_access(&context.client, &namespace, spec).await?;
            match secret {
                None => Ok(tls),
                Some(secret) => {
                    let field = "spec.authSecret";
                    let of_secret = runtime::credentials::of_secret;
                    let found = of_secret(&context.client, &namespace, secret, field).await;
                    found.map(|credentials| Access {
                        credentials: Some(credentials),
                        ..tls
                    })
                }
            }
        }
    };
    let access = access.map_err(|why| Trouble::new(Reason::SecretMissing, why))?;
    if access == Access::default() {
        return Ok(context.etcd.clone());
    }
    let client = EtcdClient::new(access);
    Ok(Arc::new(client.with_max_snapshot(context.max_snapshot)))
}

/// The access by the client certificate of `spec.clientTLSSecret`.
async fn tls_access(
    client: &Client,
    namespace: &str,
    spec: &EtcdBackupSpec,
) -> Result<Access, Trouble> {
    let Some(name) = spec.client_tls_secret() else {
        return Ok(Access::default());
    };
    let secrets = Api::<Secret>::namespaced(client.clone(), namespace);
    let read = runtime::reach::tls_secret(&secrets, Purpose::Client, name).await;
    read.map(|material| tls::access(&material))
        .map_err(|fault| Trouble::new(Reason::SecretMissing, fault.message))
}

async fn cluster(client: &Client, namespace: &str, name: &str) -> Result<EtcdCluster, Trouble> {
    let clusters = Api::<EtcdCluster>::namespaced(client.clone(), namespace);
    match clusters.get_opt(name).await {
        Ok(Some(cluster)) => Ok(cluster),
        Ok(None) => Err(Trouble::new(
            Reason::ClusterMissing,
            format!(
                "spec.etcdCluster.name: there is no EtcdCluster {name} in this namespace: create it or correct the name"
            ),
        )),
        Err(error) => Err(Trouble::new(
            Reason::ClusterMissing,
            format!("spec.etcdCluster.name: EtcdCluster {name} cannot be read: {error}"),
        )),
    }
}

/// The URLs of the members in `status.memberDetails`, and of the client Service.
fn urls_of(cluster: &EtcdCluster, addresses: &Addresses) -> Vec<String> {
    let details = cluster
        .status
        .iter()
        .flat_map(|status| &status.member_details);
    let members = details.map(|member| addresses.client_url(&member.name));
    members.chain([addresses.service_url()]).collect()
}

/// The endpoints of a spec with resolvable host names. Old manifests name a Service without its namespace, which is the
/// namespace of the EtcdBackup; the operator may run in another one.
fn endpoints(given: &[String], namespace: &str) -> Vec<String> {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn resolves_bare_service_name_in_own_namespace() {
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
            ("http://localhost:2379", "http://localhost:2379"),
            ("http://plain", "http://plain.prod.svc"),
        ];
        for (given, expected) in cases {
            assert_eq!(endpoint(given, "prod"), expected);
        }
    }
}
