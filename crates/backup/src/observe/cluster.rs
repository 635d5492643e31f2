//! The etcd cluster that is backed up: its endpoints, and how the operator reaches them. No content of a Secret leaves
//! this module but inside the client that it makes (invariant 14).

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

/// The endpoints of the spec or of its EtcdCluster.
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

/// The client URLs of an EtcdCluster, and what the manifest records of it.
fn members_of(cluster: &EtcdCluster, namespace: &str, tls: &ClusterTls) -> Source {
    let name = cluster.name_any();
    // By the form of address that the certificates are made for.
    let mut settled = cluster.clone();
    tls.complete_spec(&mut settled.spec, (namespace, &name), None);
    let addresses = Members::of(&settled, namespace, "", None).addresses();
    let mut urls = urls_of(cluster, &addresses);
    if settled.spec.tls.is_some_and(|tls| tls.accepts_plaintext()) {
        // Members on the way there may not take both yet: whoever answers is asked.
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

/// The client for it, with the Secrets that the EtcdCluster or the EtcdBackup names.
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
            let tls = certified(&context.client, &namespace, spec).await?;
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
    Ok(Arc::new(EtcdClient::new(access)))
}

/// How endpoints are reached that a Secret of client certificates is for.
async fn certified(
    client: &Client,
    namespace: &str,
    spec: &EtcdBackupSpec,
) -> Result<Access, Trouble> {
    let Some(name) = spec.client_tls_secret() else {
        return Ok(Access::default());
    };
    let secrets = Api::<Secret>::namespaced(client.clone(), namespace);
    let held = runtime::reach::tls_secret(&secrets, Purpose::Client, name).await;
    held.map(|material| tls::access(&material))
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

/// Those of the members that were seen last, and that of the client Service.
fn urls_of(cluster: &EtcdCluster, addresses: &Addresses) -> Vec<String> {
    let known = cluster
        .status
        .iter()
        .flat_map(|status| &status.member_details);
    let members = known.map(|member| addresses.client_url(&member.name));
    members.chain([addresses.service_url()]).collect()
}

/// The endpoints of a spec as this operator can resolve them: a bare Service name, which old manifests have, is
/// meant in the namespace of the object, and the operator may be in another one.
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
    fn a_bare_service_name_is_meant_in_the_objects_namespace() {
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
