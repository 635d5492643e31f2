//! Validates the annotation with the URLs of a cluster to join.

use super::{EtcdCluster, TlsPolicy};
use crate::names::ANNOTATION_JOIN;
use crate::problem::Problem;

/// The problem if the scheme of the URLs in the annotation, `http` or `https`, does not match `spec.TLS`. The
/// annotation has no effect on a cluster that has already bootstrapped.
pub(super) fn join_problem(cluster: &EtcdCluster) -> Option<Problem> {
    let urls = cluster
        .metadata
        .annotations
        .as_ref()?
        .get(ANNOTATION_JOIN)?;
    let status = cluster.status.as_ref();
    let bootstrap = status.and_then(|status| status.bootstrap.as_ref());
    if bootstrap.is_some_and(|bootstrap| !bootstrap.members.is_empty()) {
        return None;
    }
    let tls = cluster.spec.tls.as_ref();
    let scheme = if tls.is_some_and(TlsPolicy::encrypts_clients) {
        "https://"
    } else {
        "http://"
    };
    let urls = urls.split(',').map(str::trim).filter(|url| !url.is_empty());
    let other = { urls }.find(|url| !url.starts_with(scheme))?;
    let field = format!("metadata.annotations[{ANNOTATION_JOIN}]");
    let problem = format!("names {other}, but clients of this cluster use {scheme}");
    let remedy = "use client URLs with this scheme, and set spec.TLS to the TLS settings of the cluster to join, for \
                  clients and for peers. If that cluster no longer exists, remove the annotation";
    Some(Problem::new(field, problem, remedy))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn cluster(urls: &str, tls: &Value, first: &[&str]) -> EtcdCluster {
        serde_json::from_value(json!({
            "apiVersion": "etcd.database.coreos.com/v1beta2", "kind": "EtcdCluster",
            "metadata": { "name": "db", "annotations": { "etcd.database.coreos.com/join": urls } },
            "spec": { "size": 3, "version": "3.6.16", "TLS": tls },
            "status": { "bootstrap": { "token": "t", "members": first } },
        }))
        .unwrap()
    }

    #[test]
    fn join_urls_must_match_client_tls_of_spec() {
        let secrets =
            json!({ "static": { "member": { "serverSecret": "s" }, "operatorSecret": "o" } });
        let peers = json!({ "static": { "member": { "peerSecret": "p" } } });
        let plain = Value::Null;
        for (urls, tls, good) in [
            ("http://x:2379, http://y:2379", &plain, true),
            ("https://x:2379", &plain, false),
            ("x:2379", &plain, false),
            ("https://x:2379", &secrets, true),
            ("https://x:2379,http://y:2379", &secrets, false),
            // `peers` enables TLS only between members, so clients use http.
            ("http://x:2379", &peers, true),
        ] {
            let problem = join_problem(&cluster(urls, tls, &[]));
            assert_eq!(problem.is_none(), good, "{urls} {tls}: {problem:?}");
        }
        let bootstrapped = cluster("https://x:2379", &plain, &["db-a"]);
        assert_eq!(
            join_problem(&bootstrapped),
            None,
            "the annotation must be ignored after the bootstrap"
        );
    }
}
