//! Tests: the Certificates that the operator writes, their problems, and the steps of a change of the CA.

use std::collections::BTreeMap;
use std::time::Duration;

use api::EtcdCluster;
use jiff::Timestamp;
use k8s_openapi::ByteString;
use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair, KeyUsagePurpose};
use serde_json::json;

use super::publish::SPREAD;
use super::*;
use crate::certificate::certificates;
use crate::tls::{Authorities, Slot};

mod build;

const TLS: &str = r#"{"issuerRef":{"name":"ca"},"clients":["app"]}"#;
const UID: &str = "uid";

struct Ca {
    issuer: Issuer<'static, KeyPair>,
    pem: String,
}

impl Ca {
    fn new(name: &str) -> Self {
        let mut own = CertificateParams::default();
        own.distinguished_name.push(DnType::CommonName, name);
        own.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        own.key_usages = vec![KeyUsagePurpose::KeyCertSign];
        let key = KeyPair::generate().unwrap();
        let pem = own.self_signed(&key).unwrap().pem();
        Self {
            issuer: Issuer::new(own, key),
            pem,
        }
    }

    fn identity(&self) -> String {
        certificates(self.pem.as_bytes()).unwrap()[0].identity()
    }

    /// The data that cert-manager writes to a Secret.
    fn issue(&self) -> BTreeMap<String, ByteString> {
        let key = KeyPair::generate().unwrap();
        let parameters = CertificateParams::new(vec!["db.example".to_owned()]).unwrap();
        let leaf = parameters.signed_by(&key, &self.issuer).unwrap();
        let values = [leaf.pem(), key.serialize_pem(), self.pem.clone()];
        let values = held::KEYS.iter().zip(values);
        values
            .map(|(key, value)| ((*key).to_owned(), ByteString(value.into_bytes())))
            .collect()
    }
}

fn cluster() -> EtcdCluster {
    let mut cluster = EtcdCluster::new("db", serde_json::from_str("{}").unwrap());
    cluster.metadata.namespace = Some("prod".to_owned());
    cluster.metadata.uid = Some(UID.to_owned());
    cluster
}

fn tls(text: &str) -> CertManagerTls {
    serde_json::from_str(text).unwrap()
}

/// The Certificates and Secrets of a cluster, which cert-manager and the operator write.
struct World {
    cluster: EtcdCluster,
    tls: CertManagerTls,
    certificates: Vec<DynamicObject>,
    secrets: BTreeMap<String, Secret>,
    /// The CAs with which each member was started; `None` if they are unknown.
    started: Vec<Option<Authorities>>,
    now: Timestamp,
    version: u32,
}

impl World {
    fn new() -> Self {
        let (cluster, tls) = (cluster(), tls(TLS));
        let members = Members::of(&cluster, "prod", "", None);
        let ready = json!([{ "type": "Ready", "status": "True", "message": "issued" }]);
        let needed = tls.certificates(false);
        let certificates = needed.iter().map(|of| {
            let mut one = certificate(&members, &tls, of);
            one.metadata.uid = Some(format!("{of:?}"));
            one.data["status"] = json!({ "conditions": ready });
            one
        });
        Self {
            certificates: certificates.collect(),
            secrets: BTreeMap::new(),
            started: Vec::new(),
            now: Timestamp::now(),
            version: 0,
            cluster,
            tls,
        }
    }

    fn put(&mut self, name: &str, mut secret: Secret) {
        self.version += 1;
        secret.metadata.name = Some(name.to_owned());
        secret.metadata.resource_version = Some(self.version.to_string());
        self.secrets.insert(name.to_owned(), secret);
    }

    /// cert-manager issues all certificates with this CA.
    fn issue(&mut self, ca: &Ca) {
        for of in self.tls.certificates(false) {
            let secret = Secret {
                data: Some(ca.issue()),
                ..Secret::default()
            };
            self.put(&of.certificate("db"), secret);
        }
    }

    fn issuance(&self) -> Issuance {
        let members = Members::of(&self.cluster, "prod", "", None);
        let secrets: Vec<Secret> = self.secrets.values().cloned().collect();
        Issuance::of(&members, &self.tls, Ok(&self.certificates), &secrets)
    }

    /// Publishes, as the operator does. Returns the number of written Secrets.
    fn publish(&mut self) -> usize {
        let cluster = self.cluster.clone();
        let members = Members::of(&cluster, "prod", "", None);
        let started: Vec<_> = self.started.iter().map(Option::as_ref).collect();
        let all = self.issuance().publications(&members, &started, self.now);
        let count = all.len();
        for one in all {
            let from = self.secrets[&one.from].clone();
            assert_eq!(
                from.metadata.resource_version.as_ref(),
                Some(&one.from_version)
            );
            let name = one.secret.name_any();
            let there = self.secrets.get(&name);
            let version = there.and_then(|there| there.metadata.resource_version.clone());
            assert_eq!(version, one.over);
            self.put(&name, one.with_keys(&from));
        }
        count
    }

    /// The only member is restarted with the published trust bundles.
    fn restart(&mut self) {
        let identities = |of: IssuedCertificate| {
            let all = self.value(&of.secret("db"), held::KEYS[2]);
            let all = certificates(&all).unwrap();
            all.iter()
                .map(crate::certificate::Certificate::identity)
                .collect()
        };
        let started = Authorities {
            peer: identities(IssuedCertificate::Peer),
            server: identities(IssuedCertificate::Server),
        };
        self.started = vec![Some(started)];
    }

    fn value(&self, secret: &str, key: &str) -> Vec<u8> {
        self.secrets[secret].data.as_ref().unwrap()[key].0.clone()
    }

    fn serves(&self, of: &IssuedCertificate) -> bool {
        let of_cert_manager = self.value(&of.certificate("db"), held::KEYS[0]);
        self.value(&of.secret("db"), held::KEYS[0]) == of_cert_manager
    }

    fn bundle(&self, of: &IssuedCertificate) -> usize {
        let bundle = self.value(&of.secret("db"), held::KEYS[2]);
        certificates(&bundle).unwrap().len()
    }

    fn pass(&mut self, time: Duration) {
        self.now = self.now.checked_add(time).unwrap();
    }
}

#[test]
fn changed_certificate_is_distinguished_from_certificate_of_others() {
    let mut world = World::new();
    assert!(
        world
            .issuance()
            .pairs
            .iter()
            .all(|pair| pair.written == Written::AsMade)
    );
    world.certificates[0].data["spec"]["revisionHistoryLimit"] = json!(1);
    assert_eq!(world.issuance().pairs[0].written, Written::AsMade);
    world.certificates[0].data["spec"]["uris"] = json!(["spiffe://other"]);
    assert_eq!(world.issuance().pairs[0].written, Written::AsMade);
    world.certificates[0].data["spec"]["dnsNames"] = json!(["other.example"]);
    assert_eq!(world.issuance().pairs[0].written, Written::Drifted);
    world.certificates[0]
        .metadata
        .owner_references
        .as_mut()
        .unwrap()[0]
        .uid = "other".to_owned();
    assert_eq!(world.issuance().pairs[0].written, Written::Others);
}

#[test]
fn missing_certificate_is_reported_with_cause() {
    let mut world = World::new();
    let code = |issuance: &Issuance| issuance.pairs[0].problem.clone().unwrap();
    let members = Members::of(&world.cluster, "prod", "", None);
    for (denied, words) in [
        (Denied::NotServed, "install cert-manager"),
        (
            Denied::Forbidden("no".to_owned()),
            "certManager.enabled=true",
        ),
    ] {
        let issuance = Issuance::of(&members, &world.tls, Err(&denied), &[]);
        let (code, text) = code(&issuance);
        assert_eq!(code, FaultKind::CertManagerMissing);
        assert!(text.contains(words), "{text}");
        assert!(issuance.suspects(&world.tls).is_empty());
    }
    for one in &mut world.certificates {
        one.data["status"] = json!({ "conditions": [
            { "type": "Ready", "status": "False", "message": "Secret does not exist." }
        ] });
    }
    let mut issuance = world.issuance();
    let (kind, text) = code(&issuance);
    assert_eq!(kind, FaultKind::CertificateNotIssued);
    assert!(
        text.contains("Certificate db-peer-issued is not ready: Secret does not exist. For"),
        "{text}"
    );
    let issuers = issuance.suspects(&world.tls);
    assert_eq!(issuers, [&world.tls.issuer_ref]);
    issuance.blame(&world.tls, &world.tls.issuer_ref, None);
    let (kind, text) = code(&issuance);
    assert_eq!(kind, FaultKind::IssuerMissing);
    assert!(
        text.contains("the Issuer ca does not exist: create it"),
        "{text}"
    );
    let fault = |code| Fault {
        purpose: Purpose::Peer,
        code,
        message: "generic".to_owned(),
    };
    let mut all = ClusterTls {
        peer: Some(Slot {
            secret: "db-peer-certs".to_owned(),
            found: Err(fault(FaultKind::CertificateNotIssued)),
        }),
        ..ClusterTls::default()
    };
    issuance.explain(&mut all);
    let found = all.peer.unwrap().found.unwrap_err();
    assert_eq!((found.code, found.message), (kind, text));
}

#[test]
fn missing_issuer_is_reported_while_published_certificate_is_valid() {
    let mut world = World::new();
    world.issue(&Ca::new("one"));
    world.publish();
    let issuance = world.issuance();
    assert!(issuance.suspects(&world.tls).is_empty());
    let renewal = json!({ "type": "Issuing", "status": "True", "message": "Renewing certificate" });
    let status = &mut world.certificates[1].data["status"]["conditions"];
    status.as_array_mut().unwrap().push(renewal);
    let mut issuance = world.issuance();
    assert_eq!(issuance.suspects(&world.tls), [&world.tls.issuer_ref]);
    issuance.blame(&world.tls, &world.tls.issuer_ref, None);
    let problems = issuance.pairs.iter().map(|pair| pair.problem.is_some());
    assert_eq!(problems.collect::<Vec<_>>(), [false, true, false, false]);
}

#[test]
fn first_certificates_are_published_with_their_authority() {
    let mut world = World::new();
    assert_eq!(world.publish(), 0);
    let ca = Ca::new("one");
    world.issue(&ca);
    assert!(
        world
            .issuance()
            .pairs
            .iter()
            .all(|pair| pair.problem.is_none())
    );
    assert_eq!(world.publish(), 4);
    assert_eq!(world.publish(), 0);
    for of in world.tls.certificates(false) {
        assert!(world.serves(&of) && world.bundle(&of) == 1, "{of:?}");
    }
    let client = &world.secrets["db-client-app-certs"].metadata;
    let owner = &client.owner_references.as_ref().unwrap()[0];
    assert_eq!(
        (owner.kind.as_str(), owner.name.as_str()),
        ("Certificate", "db-client-app-issued")
    );
}

#[test]
fn renewed_certificates_of_same_authority_are_published_at_once() {
    let mut world = World::new();
    let ca = Ca::new("one");
    world.issue(&ca);
    world.publish();
    world.restart();
    world.issue(&ca);
    assert_eq!(world.publish(), 4);
    assert!(
        world
            .tls
            .certificates(false)
            .iter()
            .all(|of| world.serves(of))
    );
    assert_eq!(world.publish(), 0);
}

#[test]
fn invariant_20_new_authority_is_published_in_steps() {
    let peer = IssuedCertificate::Peer;
    let mut world = World::new();
    let (old, new) = (Ca::new("one"), Ca::new("two"));
    world.issue(&old);
    world.publish();
    world.restart();
    let before = world.value("db-peer-certs", held::KEYS[0]);
    world.issue(&new);
    // Step 1: the trust bundles have both CAs, and the certificates are still those of the old CA.
    assert_eq!(world.publish(), 4);
    assert_eq!(world.bundle(&peer), 2);
    assert_eq!(world.value("db-peer-certs", held::KEYS[0]), before);
    world.pass(SPREAD);
    assert_eq!(
        world.publish(),
        0,
        "the member does not trust the new CA yet"
    );
    // Step 2: after the member was restarted with both CAs, the certificates of the new CA are published.
    world.restart();
    assert_eq!(world.publish(), 4);
    assert!(world.serves(&peer) && world.bundle(&peer) == 2);
    world.pass(Duration::from_hours(24));
    assert_eq!(
        world.publish(),
        0,
        "clients need time to read the new trust bundle"
    );
    // A renewal by the new CA does not delay step 3.
    world.issue(&new);
    assert_eq!(world.publish(), 4);
    assert!(world.serves(&peer) && world.bundle(&peer) == 2);
    // Step 3: the former CA is removed from the trust bundles.
    world.pass(Duration::from_hours(29 * 24));
    assert_eq!(world.publish(), 4);
    assert_eq!(world.bundle(&peer), 1);
    world.restart();
    let started = world.started[0].as_ref().unwrap();
    assert!(started.peer.contains(&new.identity()) && started.peer.len() == 1);
    assert_eq!(world.publish(), 0);
}

/// The default of cert-manager is a new private key at each renewal, also for a CA that is a Certificate.
#[test]
fn invariant_20_new_key_of_authority_is_published_in_steps() {
    let mut world = World::new();
    world.issue(&Ca::new("one"));
    world.publish();
    world.restart();
    world.issue(&Ca::new("one"));
    assert_eq!(world.publish(), 4);
    world.restart();
    assert_eq!(world.publish(), 0, "clients need the new trust bundle");
    world.pass(SPREAD);
    assert_eq!(world.publish(), 4);
    assert!(world.serves(&IssuedCertificate::Server));
}

#[test]
fn invariant_20_second_change_of_authority_during_first_waits_for_members() {
    let peer = IssuedCertificate::Peer;
    let mut world = World::new();
    let (second, third) = (Ca::new("two"), Ca::new("three"));
    world.issue(&Ca::new("one"));
    world.publish();
    world.restart();
    world.issue(&second);
    world.publish();
    world.restart();
    world.issue(&third);
    world.pass(SPREAD);
    assert_eq!(world.publish(), 4);
    assert!(!world.serves(&peer) && world.bundle(&peer) == 3);
    world.pass(SPREAD);
    assert_eq!(world.publish(), 0);
    world.restart();
    assert_eq!(world.publish(), 4);
    assert!(world.serves(&peer));
}

#[test]
fn invariant_20_trust_bundle_precedes_certificate_without_running_members() {
    let mut world = World::new();
    world.issue(&Ca::new("one"));
    world.publish();
    world.issue(&Ca::new("two"));
    world.pass(Duration::from_hours(1));
    let peer = IssuedCertificate::Peer;
    assert_eq!(world.publish(), 4);
    assert!(!world.serves(&peer) && world.bundle(&peer) == 2);
    world.pass(SPREAD);
    assert_eq!(world.publish(), 4);
    assert!(world.serves(&peer));
}

/// A restore creates the pod of its seed without the annotation with the CAs, so the CAs of this member are unknown.
#[test]
fn invariant_20_member_with_unknown_authorities_blocks_only_new_authority() {
    let mut world = World::new();
    let (old, new) = (Ca::new("one"), Ca::new("two"));
    world.started = vec![None];
    world.issue(&old);
    assert_eq!(world.publish(), 4);
    world.issue(&old);
    assert_eq!(world.publish(), 4);
    world.issue(&new);
    assert_eq!(world.publish(), 4);
    world.pass(SPREAD);
    assert_eq!(world.publish(), 0);
    assert_eq!(world.bundle(&IssuedCertificate::Peer), 2);
    world.restart();
    assert_eq!(world.publish(), 4);
}

#[test]
fn invariant_20_one_renewed_certificate_of_new_authority_waits_for_members() {
    let mut world = World::new();
    let (old, new) = (Ca::new("one"), Ca::new("two"));
    world.issue(&old);
    world.publish();
    world.restart();
    // cert-manager renews each certificate at a different time. Here, it has renewed only the server certificate.
    let server = IssuedCertificate::Server;
    let secret = Secret {
        data: Some(new.issue()),
        ..Secret::default()
    };
    world.put(&server.certificate("db"), secret);
    // The bundles of the server, of the operators and of the client change, and the peer Secret stays.
    assert_eq!(world.publish(), 3);
    assert!(!world.serves(&server) && world.bundle(&IssuedCertificate::Operator) == 2);
    assert_eq!(world.bundle(&IssuedCertificate::Peer), 1);
}

#[test]
fn damaged_published_secret_is_written_again() {
    let mut world = World::new();
    let ca = Ca::new("one");
    world.issue(&ca);
    world.publish();
    world.restart();
    let peer = world.secrets.get_mut("db-peer-certs").unwrap();
    peer.data.as_mut().unwrap().clear();
    assert_eq!(world.publish(), 1);
    assert!(world.serves(&IssuedCertificate::Peer));
    world.secrets.remove("db-server-certs");
    assert_eq!(world.publish(), 1);
    let operator = world.secrets.get_mut("db-operator-certs").unwrap();
    operator.metadata.labels = None;
    assert_eq!(world.publish(), 1);
    assert_eq!(world.publish(), 0);
}

#[test]
fn secret_of_another_owner_is_not_replaced() {
    let mut world = World::new();
    let ca = Ca::new("one");
    world.issue(&ca);
    world.put("db-peer-certs", Secret::default());
    assert_eq!(world.publish(), 3);
    let pair = &world.issuance().pairs[0];
    assert!(pair.is_of_others());
    let (_, text) = pair.problem.clone().unwrap();
    assert!(
        text.contains("Secret db-peer-certs belongs to another owner"),
        "{text}"
    );
}

#[test]
fn cert_manager_settings_of_current_and_next_tls_step_are_merged() {
    let policy = |text: &str| -> TlsPolicy { serde_json::from_str(text).unwrap() };
    let issued = policy(r#"{"certManager":{"issuerRef":{"name":"a"},"client":false}}"#);
    let next = policy(r#"{"certManager":{"issuerRef":{"name":"b"},"peer":false}}"#);
    assert_eq!(settings(None, Some(&policy(r#"{"generated":{}}"#))), None);
    let both = settings(Some(&issued), Some(&next)).unwrap();
    assert!(both.peer() && both.client() && both.issuer_ref.name == "b");
    let leaving = settings(Some(&issued), None).unwrap();
    assert_eq!(Some(leaving), issued.cert_manager);
}
