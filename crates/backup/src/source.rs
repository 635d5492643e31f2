//! From what a spec names, and what those objects hold, to a transfer that can run. No Secret's content leaves
//! this module but inside the store it opens (invariant 14).

use api::EtcdCluster;
use api::conditions::Reason;
use api::manifest::ManifestCluster;
use api::names::{ANNOTATION_RESTORE, Addresses};
use api::storage::StorageSource;
use runtime::member::Members;
use runtime::tls::ClusterTls;
use store::{Directories, Secrets};
pub(crate) use store::{SecretData, Target};

use crate::observed::Trouble;
use crate::transfer::in_store;

/// Opens the place of a spec with what the Secrets hold that it names.
pub(crate) async fn target(
    source: &StorageSource<'_>,
    credentials: Option<&SecretData>,
    ca: Option<&SecretData>,
    directories: &Directories,
) -> Result<Target, Trouble> {
    let opened = store::open(source, Secrets { credentials, ca }, directories).await;
    opened.map_err(|error| in_store(&error))
}

/// The client URLs of an EtcdCluster, and what the manifest says about it.
pub(crate) fn members_of(
    cluster: &EtcdCluster,
    namespace: &str,
    tls: &ClusterTls,
) -> Result<(Vec<String>, ManifestCluster), Trouble> {
    let name = cluster.metadata.name.clone().unwrap_or_default();
    let annotations = cluster.metadata.annotations.as_ref();
    if annotations.is_some_and(|all| all.contains_key(ANNOTATION_RESTORE)) {
        // What is in it now is nobody's data yet, and would push older backups out.
        return Err(Trouble::new(
            Reason::Restoring,
            format!("EtcdCluster {name} is being restored: it is backed up when that is done"),
        ));
    }
    if cluster.spec.hibernate {
        return Err(Trouble::new(
            Reason::Hibernated,
            format!(
                "EtcdCluster {name} hibernates (spec.hibernate): it is backed up when it has come back"
            ),
        ));
    }
    // By the form of address that the certificates are made for.
    let mut settled = cluster.clone();
    tls.settle(&mut settled.spec, (namespace, &name), None);
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
    let manifest = ManifestCluster {
        name,
        namespace: namespace.to_owned(),
        spec: cluster.spec.clone(),
    };
    Ok((urls, manifest))
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
pub(crate) fn endpoints(given: &[String], namespace: &str) -> Vec<String> {
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
