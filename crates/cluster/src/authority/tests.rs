//! Issued certificates can be parsed, verified and renewed.

use api::names::CertificateUse;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use member::certificate::certificates;
use rustls_pki_types::{ServerName, UnixTime};
use webpki::{EndEntityCert, KeyUsage, anchor_from_trusted_cert};

use super::*;

fn now() -> Timestamp {
    "2026-11-21T12:00:00Z".parse().unwrap()
}

pub(crate) fn rule() -> Rule {
    Rule {
        namespace: "prod".into(),
        cluster: "db".into(),
        domain: String::new(),
        peers: true,
        clients: true,
        validity: Duration::from_hours(90 * 24),
        authority_validity: Duration::from_hours(3650 * 24),
        server_names: vec!["etcd.example.com".into(), "192.0.2.7".into()],
        proxy: None,
        rotate: None,
    }
}

fn made(used: CertificateUse, signer: &Made) -> Made {
    let rule = rule();
    let names = rule.names("db-aaaaaaaaaa", used);
    let request = Request {
        common_name: "db-aaaaaaaaaa",
        names: &names,
        used,
        validity: rule.validity,
    };
    let authority = certificates(&signer.certificate).unwrap().remove(0);
    leaf(&request, (&authority, &signer.key), now()).unwrap()
}

/// True if rustls verifies the certificate for this use with this CA as the trust anchor.
fn verifies(made: &Made, trusted: &Made, usage: KeyUsage, at: Timestamp) -> bool {
    let leaf = certificates(&made.certificate).unwrap().remove(0);
    let root = certificates(&trusted.certificate).unwrap().remove(0);
    let anchor = anchor_from_trusted_cert(&root.der).unwrap();
    let end = EndEntityCert::try_from(&leaf.der).unwrap();
    let seconds = u64::try_from(at.as_second()).unwrap();
    end.verify_for_usage(
        webpki::ALL_VERIFICATION_ALGS,
        &[anchor],
        &[],
        UnixTime::since_unix_epoch(Duration::from_secs(seconds)),
        usage,
        None,
        None,
    )
    .is_ok()
}

#[test]
fn certificate_verifies_only_against_its_issuer() {
    let peers = authority(CaScope::Peers, rule().authority_validity, now()).unwrap();
    let clients = authority(CaScope::Clients, rule().authority_validity, now()).unwrap();
    let peer = made(CertificateUse::Peer, &peers);
    assert!(verifies(&peer, &peers, KeyUsage::server_auth(), now()));
    assert!(verifies(&peer, &peers, KeyUsage::client_auth(), now()));
    assert!(!verifies(&peer, &clients, KeyUsage::client_auth(), now()));
}

#[test]
fn client_cert_is_rejected_for_server_auth() {
    let clients = authority(CaScope::Clients, rule().authority_validity, now()).unwrap();
    let client = made(CertificateUse::Client, &clients);
    assert!(verifies(&client, &clients, KeyUsage::client_auth(), now()));
    assert!(!verifies(&client, &clients, KeyUsage::server_auth(), now()));
}

#[test]
fn member_cert_has_all_addresses_and_no_wildcard() {
    let clients = authority(CaScope::Clients, rule().authority_validity, now()).unwrap();
    let server = made(CertificateUse::Server, &clients);
    let one = certificates(&server.certificate).unwrap().remove(0);
    for host in [
        "db-aaaaaaaaaa.prod.svc",
        "db-aaaaaaaaaa.prod.svc.cluster.local",
        "db-aaaaaaaaaa.db.prod.svc",
        "db-aaaaaaaaaa.db.prod.svc.cluster.local",
        "db-client",
        "db-client.prod",
        "db-client.prod.svc",
        "db-client.prod.svc.cluster.local",
        "localhost",
        "127.0.0.1",
        "::1",
        "etcd.example.com",
        "192.0.2.7",
    ] {
        assert!(one.covers(host), "{host}");
    }
    assert!(!one.covers("db-bbbbbbbbbb.prod.svc"));
    assert!(one.dns_names.iter().all(|name| !name.contains('*')));
    // rustls accepts a host name for which `covers` returns true.
    let end = EndEntityCert::try_from(&one.der).unwrap();
    let host = ServerName::try_from("db-client.prod.svc").unwrap();
    assert!(end.verify_is_valid_for_subject_name(&host).is_ok());
}

/// A gRPC proxy does not start if its client certificate has a common name.
#[test]
fn proxy_cert_has_names_of_service_and_no_common_name() {
    let clients = authority(CaScope::Clients, rule().authority_validity, now()).unwrap();
    let rule = Rule {
        proxy: Some("db-proxy".into()),
        ..rule()
    };
    let names = rule.names("db", CertificateUse::Proxy);
    let request = Request {
        common_name: "",
        names: &names,
        used: CertificateUse::Proxy,
        validity: rule.validity,
    };
    let signer = certificates(&clients.certificate).unwrap().remove(0);
    let proxy = leaf(&request, (&signer, &clients.key), now()).unwrap();
    let one = certificates(&proxy.certificate).unwrap().remove(0);
    assert_eq!(one.common_name, "");
    for host in [
        "db-proxy",
        "db-proxy.prod",
        "db-proxy.prod.svc",
        "db-proxy.prod.svc.cluster.local",
        "localhost",
        "::1",
        "etcd.example.com",
    ] {
        assert!(one.covers(host), "{host}");
    }
    assert!(!one.covers("db-client.prod.svc"));
    for usage in [KeyUsage::server_auth(), KeyUsage::client_auth()] {
        assert!(verifies(&proxy, &clients, usage, now()));
    }
}

#[test]
fn certificate_expires_no_later_than_issuer_and_is_renewed_after_two_thirds() {
    let short = Duration::from_hours(1);
    let clients = authority(CaScope::Clients, short, now()).unwrap();
    let server = made(CertificateUse::Server, &clients);
    let one = certificates(&server.certificate).unwrap().remove(0);
    assert_eq!(one.not_after, now() + short);
    assert!(one.not_before < now());
    let at = renewal(one.not_before, one.not_after);
    assert!(at > now() + short / 2 && at < now() + short * 3 / 4);
    assert!(!verifies(
        &server,
        &clients,
        KeyUsage::server_auth(),
        now() + short * 2
    ));
}

#[test]
fn certificates_have_unique_keys_and_serial_numbers() {
    let clients = authority(CaScope::Clients, rule().authority_validity, now()).unwrap();
    let read = |made: &Made| certificates(&made.certificate).unwrap().remove(0);
    let (a, b) = (
        read(&made(CertificateUse::Server, &clients)),
        read(&made(CertificateUse::Server, &clients)),
    );
    assert_ne!(a.serial, b.serial);
    assert_ne!(a.public_key, b.public_key);
    assert_eq!(a.issuer, read(&clients).subject);
    assert!(read(&clients).is_authority && !a.is_authority);
}

#[test]
fn invariant_14_planner_gets_no_private_key_of_secret() {
    let clients = authority(CaScope::Clients, rule().authority_validity, now()).unwrap();
    let server = made(CertificateUse::Server, &clients);
    let owner = OwnerReference {
        uid: "cluster-uid".into(),
        ..OwnerReference::default()
    };
    let trusted = clients.certificate.clone();
    let secret = leaf_secret(
        &rule(),
        ("db-aaaaaaaaaa", CertificateUse::Server),
        Some(owner),
        (server.clone(), trusted),
    );
    assert_eq!(
        secret.metadata.name.as_deref(),
        Some("db-aaaaaaaaaa-server-tls")
    );
    let seen = held(&secret, ("db", "cluster-uid"));
    assert!(seen.owned && seen.certificate.is_some());
    assert_eq!(seen.member.as_deref(), Some("db-aaaaaaaaaa"));
    let key = String::from_utf8(server.key).unwrap();
    let shown = format!("{seen:?}");
    assert!(!shown.contains("PRIVATE KEY"));
    assert!(!shown.contains(key.lines().nth(1).unwrap()));
}
