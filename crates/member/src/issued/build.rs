//! Builds the Certificates of a cluster.

use std::net::IpAddr;

use api::cluster::{CertManagerTls, IssuedCertificate};
use api::duration::DurationText;
use api::names::{self, CertificateUse};
use kube::core::{DynamicObject, TypeMeta};
use serde_json::json;

use super::GROUP;
use crate::Members;
use crate::hash::without_empty;

/// The DNS names and addresses in a certificate of members. The first parameter contains the namespace, the name of the
/// cluster and its DNS domain. `member` is the name of a member, or `*` for a certificate that all members share.
pub fn subject_names(
    (namespace, cluster, domain): (&str, &str, &str),
    member: &str,
    used: CertificateUse,
    more: &[String],
) -> Vec<String> {
    let services = [
        names::client_service(cluster),
        names::headless_service(cluster),
    ];
    let of_member = [
        format!("{member}.{namespace}.svc"),
        format!("{member}.{cluster}.{namespace}.svc"),
    ];
    match used {
        CertificateUse::Peer => in_domain(&of_member, domain),
        CertificateUse::Server => {
            let mut all = in_domain(&of_member, domain);
            all.extend(service_names((namespace, domain), &services, more));
            all
        }
        // The names in the certificate of the proxies come from [`service_names`], and not from this function.
        CertificateUse::Proxy | CertificateUse::Operator | CertificateUse::Client => Vec::new(),
    }
}

/// The names under which clients reach these Services, the local names, and `more`.
pub fn service_names(
    (namespace, domain): (&str, &str),
    services: &[String],
    more: &[String],
) -> Vec<String> {
    let complete = services.iter();
    let complete: Vec<String> = complete
        .map(|service| format!("{service}.{namespace}.svc"))
        .collect();
    let mut all = in_domain(&complete, domain);
    for service in services {
        all.extend([format!("{service}.{namespace}"), service.clone()]);
    }
    all.extend(["localhost", "127.0.0.1", "::1"].map(str::to_owned));
    all.extend(more.iter().cloned());
    all
}

/// Each name with and without the cluster domain. Without a domain in the spec, the domain is `cluster.local`.
fn in_domain(names: &[String], domain: &str) -> Vec<String> {
    let domain = match domain {
        "" => "cluster.local",
        given => given,
    };
    let names = names.iter();
    names
        .flat_map(|name| [name.clone(), format!("{name}.{domain}")])
        .collect()
}

/// Builds a Certificate.
pub fn certificate(
    members: &Members<'_>,
    tls: &CertManagerTls,
    of: &IssuedCertificate,
) -> DynamicObject {
    let cluster = members.cluster;
    let (used, common_name) = match of {
        IssuedCertificate::Peer => (CertificateUse::Peer, cluster),
        IssuedCertificate::Server => (CertificateUse::Server, cluster),
        // With authentication, etcd uses the common name of a client certificate as the user name.
        IssuedCertificate::Operator => (CertificateUse::Operator, names::OPERATOR_USER),
        IssuedCertificate::Client(name) => (CertificateUse::Client, name.as_str()),
        // etcd's gRPC proxy does not start if its client certificate has a common name.
        IssuedCertificate::Proxy => (CertificateUse::Proxy, ""),
    };
    let domain = members.spec.cluster_domain().trim_matches('.');
    let place = (members.namespace, cluster, domain);
    let all = match (of, &members.spec.grpc_proxy) {
        (IssuedCertificate::Proxy, Some(proxy)) => {
            let service = [proxy.service_name(cluster)];
            service_names((members.namespace, domain), &service, &tls.server_names)
        }
        // All members share one certificate with wildcards, so that a new member can start while cert-manager does not
        // run.
        _ => subject_names(place, "*", used, &tls.server_names),
    };
    let is_address = |name: &String| name.parse::<IpAddr>().is_ok();
    let (addresses, hosts): (Vec<String>, Vec<String>) = all.into_iter().partition(is_address);
    let mut usages = vec!["digital signature", "key encipherment", "client auth"];
    if !matches!(used, CertificateUse::Operator | CertificateUse::Client) {
        usages.push("server auth");
    }
    let (issuer, key) = (
        tls.issuer_of(of),
        tls.private_key.clone().unwrap_or_default(),
    );
    let name = of.certificate(cluster);
    let spec = json!({
        "secretName": name,
        "secretTemplate": { "labels": names::cluster_labels(cluster) },
        "commonName": Some(common_name).filter(|name| !name.is_empty()),
        "dnsNames": hosts,
        "ipAddresses": addresses,
        "usages": usages,
        "duration": tls.duration.as_ref().and_then(go_duration),
        "renewBefore": tls.renew_before.as_ref().and_then(go_duration),
        "privateKey": {
            "algorithm": key.algorithm(),
            "encoding": "PKCS8",
            "rotationPolicy": "Always",
            "size": key.size,
        },
        "issuerRef": { "name": issuer.name, "kind": issuer.kind(), "group": issuer.group() },
    });
    DynamicObject {
        types: Some(TypeMeta {
            api_version: format!("{GROUP}/v1"),
            kind: "Certificate".to_owned(),
        }),
        metadata: members.metadata(name, names::cluster_labels(cluster)),
        data: json!({ "spec": without_empty(spec) }),
    }
}

/// The duration as Go formats it, so that the Certificate does not differ after Go software, such as cert-manager, has
/// written it.
fn go_duration(text: &DurationText) -> Option<String> {
    let seconds = text.parse()?.as_secs();
    let (hours, minutes, seconds) = (seconds / 3600, seconds / 60 % 60, seconds % 60);
    let rest = format!("{minutes}m{seconds}s");
    Some(if hours > 0 {
        format!("{hours}h{rest}")
    } else {
        rest
    })
}
