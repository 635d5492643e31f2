//! Tests: the Certificates that the operator writes, and those that it deletes.

use api::cluster::IssuedCertificate;
use serde_json::json;

use super::{TLS, UID, World, cluster, tls};
use crate::Members;
use crate::issued::{Written, certificate};

#[test]
fn certificate_has_names_of_all_members_and_services() {
    let (cluster, tls) = (
        cluster(),
        tls(r#"{"issuerRef":{"name":"ca"},"serverNames":["etcd.example","10.0.0.9"]}"#),
    );
    let members = Members::of(&cluster, "prod", "", None);
    let made = certificate(&members, &tls, &IssuedCertificate::Server);
    let spec = &made.data["spec"];
    for name in [
        "*.prod.svc",
        "*.db.prod.svc.cluster.local",
        "db-client.prod.svc",
        "db-client",
        "localhost",
        "etcd.example",
    ] {
        let names = spec["dnsNames"].as_array().unwrap();
        assert!(names.iter().any(|one| one == name), "{name} in {names:?}");
    }
    assert_eq!(spec["ipAddresses"], json!(["127.0.0.1", "::1", "10.0.0.9"]));
    assert_eq!(spec["secretName"], "db-server-issued");
    assert_eq!(
        spec["issuerRef"],
        json!({ "name": "ca", "kind": "Issuer", "group": "cert-manager.io" })
    );
    let key = json!({ "algorithm": "ECDSA", "encoding": "PKCS8", "rotationPolicy": "Always" });
    assert_eq!(spec["privateKey"], key);
    assert_eq!(spec.get("duration"), None);
    assert_eq!(made.metadata.owner_references.unwrap()[0].uid, UID);
}

#[test]
fn operators_certificate_has_name_of_etcd_user_and_no_dns_name() {
    let (cluster, tls) = (
        cluster(),
        tls(r#"{"issuerRef":{"name":"ca"},"duration":"24h","renewBefore":"90m"}"#),
    );
    let members = Members::of(&cluster, "prod", "", None);
    let made = certificate(&members, &tls, &IssuedCertificate::Operator);
    let spec = &made.data["spec"];
    assert_eq!(spec["commonName"], "etcd-operator");
    assert_eq!(spec.get("dnsNames"), None);
    assert_eq!(spec["duration"], "24h0m0s");
    assert_eq!(spec["renewBefore"], "1h30m0s");
    let usages = spec["usages"].as_array().unwrap();
    assert!(!usages.iter().any(|usage| usage == "server auth"));
}

/// etcd does not start a proxy whose client certificate has a common name.
#[test]
fn certificate_of_proxies_has_names_of_their_service_and_no_common_name() {
    let (mut cluster, tls) = (cluster(), tls(TLS));
    cluster.spec = serde_json::from_str(r#"{"grpcProxy":{"serviceName":"front"}}"#).unwrap();
    let members = Members::of(&cluster, "prod", "", None);
    let made = certificate(&members, &tls, &IssuedCertificate::Proxy);
    let spec = &made.data["spec"];
    assert_eq!(spec.get("commonName"), None);
    let names = spec["dnsNames"].as_array().unwrap();
    for name in ["front.prod.svc", "front.prod.svc.cluster.local", "front"] {
        assert!(names.iter().any(|one| one == name), "{name} in {names:?}");
    }
    assert!(!names.iter().any(|one| one == "*.prod.svc"));
    let usages = [
        "digital signature",
        "key encipherment",
        "client auth",
        "server auth",
    ];
    assert_eq!(spec["usages"], json!(usages));
    assert_eq!(spec["secretName"], "db-proxy-issued");
}

#[test]
fn certificate_of_removed_proxies_is_discarded() {
    let mut world = World::new();
    world.cluster.spec = serde_json::from_str(r#"{"grpcProxy":{}}"#).unwrap();
    let members = Members::of(&world.cluster, "prod", "", None);
    let made = certificate(&members, &world.tls, &IssuedCertificate::Proxy);
    world.certificates.push(made);
    let issuance = world.issuance();
    assert_eq!((issuance.pairs.len(), issuance.discarded.len()), (5, 0));
    assert_eq!(issuance.pairs[4].written, Written::AsMade);
    world.cluster.spec.grpc_proxy = None;
    let issuance = world.issuance();
    assert_eq!(issuance.pairs.len(), 4);
    assert_eq!(issuance.discarded[0].0, "db-proxy-issued");
}

#[test]
fn certificate_of_removed_client_is_discarded() {
    let mut world = World::new();
    world.tls.clients.clear();
    let issuance = world.issuance();
    let names: Vec<_> = issuance
        .discarded
        .iter()
        .map(|(name, _)| name.as_str())
        .collect();
    assert_eq!(names, ["db-client-app-issued"]);
    assert_eq!(issuance.pairs.len(), 3);
}
