//! Tests of the checks of certificates: valid certificates have no fault, and each problem is reported.

use std::collections::BTreeMap;
use std::time::Duration;

use api::cluster::KeyNames;
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose,
};

use super::*;

const SERVICE: &str = "*.prod.svc";
const POD: &str = "*.db.prod.svc";

/// An authority that signs certificates.
struct Authority {
    issuer: Issuer<'static, KeyPair>,
    pem: String,
}

impl Authority {
    fn new(name: &str) -> Self {
        Self::with(name, CertificateParams::default())
    }

    fn expired(name: &str) -> Self {
        let mut own = CertificateParams::default();
        own.not_after = rcgen::date_time_ymd(2020, 1, 1);
        Self::with(name, own)
    }

    fn with(name: &str, mut own: CertificateParams) -> Self {
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

    /// A certificate and its key. `from` and `to` limit its validity, in days from now.
    fn sign(
        &self,
        names: &[&str],
        usages: &[ExtendedKeyUsagePurpose],
        (from, to): (i64, i64),
    ) -> (String, String) {
        let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
        let mut parameters = CertificateParams::new(names).unwrap();
        parameters.extended_key_usages = usages.to_vec();
        let day = |days: i64| {
            let now = jiff::Timestamp::now().as_second();
            rcgen::date_time_ymd(1970, 1, 1)
                + Duration::from_secs(u64::try_from(now + days * 86400).unwrap())
        };
        (parameters.not_before, parameters.not_after) = (day(from), day(to));
        let key = KeyPair::generate().unwrap();
        let certificate = parameters.signed_by(&key, &self.issuer).unwrap();
        (certificate.pem(), key.serialize_pem())
    }
}

const BOTH: [ExtendedKeyUsagePurpose; 2] = [
    ExtendedKeyUsagePurpose::ServerAuth,
    ExtendedKeyUsagePurpose::ClientAuth,
];
const GOOD: (i64, i64) = (-1, 30);

fn secret(
    purpose: Purpose,
    names: KeyNames,
    (certificate, key): (String, String),
    ca: &str,
) -> SecretData {
    let keys = purpose.keys(names);
    SecretData::from([
        (keys.certificate.to_owned(), certificate.into_bytes()),
        (keys.key.to_owned(), key.into_bytes()),
        (keys.ca.to_owned(), ca.as_bytes().to_vec()),
    ])
}

fn slot(purpose: Purpose, data: &SecretData) -> Slot {
    Slot {
        secret: "given".to_owned(),
        found: material(purpose, "given", Some(data)),
    }
}

/// All TLS Secrets of a cluster, with certificates of one authority for these names.
fn all(authority: &Authority, names: &[&str]) -> ClusterTls {
    let of = |purpose, usages: &[ExtendedKeyUsagePurpose], names: &[&str]| {
        let signed = authority.sign(names, usages, GOOD);
        Some(slot(
            purpose,
            &secret(purpose, KeyNames::OfPurpose, signed, &authority.pem),
        ))
    };
    ClusterTls {
        peer: of(Purpose::Peer, &BOTH, names),
        server: of(Purpose::Server, &BOTH[..1], names),
        operator: of(Purpose::Operator, &BOTH[1..], &[]),
    }
}

fn addresses(member: MemberAddress) -> Addresses {
    Addresses {
        namespace: "prod".to_owned(),
        cluster: "db".to_owned(),
        member,
        cluster_domain: String::new(),
        peer_tls: true,
        client_tls: true,
    }
}

fn faults(tls: &ClusterTls) -> Vec<Fault> {
    tls.faults(&addresses(MemberAddress::Service), Timestamp::now())
}

fn with_peer(signed: (String, String), ca: &str) -> ClusterTls {
    let data = secret(Purpose::Peer, KeyNames::OfPurpose, signed, ca);
    ClusterTls {
        peer: Some(slot(Purpose::Peer, &data)),
        ..ClusterTls::default()
    }
}

#[test]
fn valid_certificates_have_no_faults() {
    let authority = Authority::new("one");
    assert_eq!(faults(&all(&authority, &[SERVICE])), []);
    assert_eq!(faults(&ClusterTls::default()), []);
}

#[test]
fn invariant_20_tls_fault_messages_name_secret_and_key() {
    let (one, two) = (Authority::new("one"), Authority::new("two"));
    let good = one.sign(&[SERVICE], &BOTH, GOOD);
    let cases = [
        (
            FaultKind::KeyMismatch,
            with_peer(
                (good.0.clone(), one.sign(&[SERVICE], &BOTH, GOOD).1),
                &one.pem,
            ),
        ),
        (
            FaultKind::UnknownAuthority,
            with_peer(good.clone(), &two.pem),
        ),
        (
            FaultKind::CertificateExpired,
            with_peer(one.sign(&[SERVICE], &BOTH, (-9, -1)), &one.pem),
        ),
        (
            FaultKind::CertificateNotYetValid,
            with_peer(one.sign(&[SERVICE], &BOTH, (1, 9)), &one.pem),
        ),
        (
            FaultKind::WrongUsage,
            with_peer(one.sign(&[SERVICE], &BOTH[..1], GOOD), &one.pem),
        ),
        (
            FaultKind::WrongUsage,
            with_peer(one.sign(&[SERVICE], &BOTH[1..], GOOD), &one.pem),
        ),
        (
            FaultKind::NameNotCovered,
            with_peer(one.sign(&["elsewhere.example"], &BOTH, GOOD), &one.pem),
        ),
        (
            FaultKind::CertificateUnreadable,
            with_peer(("no PEM".into(), good.1.clone()), &one.pem),
        ),
        (
            FaultKind::CertificateUnreadable,
            with_peer((good.0.clone(), "no PEM".into()), &one.pem),
        ),
        (
            FaultKind::CertificateUnreadable,
            with_peer(good.clone(), "no PEM"),
        ),
    ];
    for (code, tls) in cases {
        let found = faults(&tls);
        assert_eq!(found.len(), 1, "{code:?}: {found:?}");
        assert_eq!(found[0].code, code, "{found:?}");
        let text = &found[0].message;
        assert!(
            text.contains("spec.TLS.static.member.peerSecret: Secret given"),
            "{text}"
        );
        assert!(text.contains("peer"), "{text}");
        assert!(!text.contains("BEGIN"), "{text}");
    }
}

#[test]
fn certificate_untrusted_by_members_or_operators_is_a_fault() {
    let (one, two) = (Authority::new("one"), Authority::new("two"));
    let mut tls = all(&one, &[SERVICE]);
    // The operators trust only authority `two`, and the members trust only authority `one`.
    tls.operator = all(&two, &[SERVICE]).operator;
    let found = faults(&tls);
    let codes: Vec<_> = found
        .iter()
        .map(|fault| (fault.purpose, fault.code))
        .collect();
    assert_eq!(
        codes,
        [
            (Purpose::Server, FaultKind::UnknownAuthority),
            (Purpose::Operator, FaultKind::UnknownAuthority)
        ]
    );
    assert!(!found[1].concerns_members());
    // During a rotation, both sides trust both authorities, so no fault is reported.
    let bundle = format!("{}{}", one.pem, two.pem);
    for slot in [&mut tls.server, &mut tls.operator].into_iter().flatten() {
        if let Ok(material) = &mut slot.found {
            material.ca = bundle.clone().into_bytes();
        }
    }
    assert_eq!(faults(&tls), []);
}

#[test]
fn missing_tls_secret_or_key_is_reported() {
    let authority = Authority::new("one");
    let signed = authority.sign(&[SERVICE], &BOTH, GOOD);
    let usual = secret(Purpose::Server, KeyNames::Usual, signed, &authority.pem);
    let read = material(Purpose::Server, "web", Some(&usual)).unwrap();
    assert_eq!(read.names, KeyNames::Usual);
    let mut incomplete = usual.clone();
    incomplete.remove("ca.crt");
    let fault = material(Purpose::Server, "web", Some(&incomplete)).unwrap_err();
    assert_eq!(fault.code, FaultKind::KeyMissing);
    assert!(fault.message.contains("has no ca.crt"), "{}", fault.message);
    let fault = material(Purpose::Server, "web", Some(&SecretData::new())).unwrap_err();
    assert!(fault.message.contains("server.crt"), "{}", fault.message);
    let fault = material(Purpose::Server, "web", None).unwrap_err();
    assert_eq!(fault.code, FaultKind::SecretMissing);
}

#[test]
fn member_address_follows_names_in_certificates() {
    let authority = Authority::new("one");
    let chosen = |names: &[&str],
                  specified: Option<MemberAddress>,
                  running: Option<MemberAddress>| {
        let mut spec: EtcdClusterSpec = serde_json::from_value(serde_json::json!({
            "size": 3, "TLS": { "static": { "member": { "peerSecret": "a", "serverSecret": "b" }, "operatorSecret": "c" } }
        }))
        .unwrap();
        spec.member_address = specified;
        all(&authority, names).complete_spec(&mut spec, ("prod", "db"), running);
        spec.member_address
    };
    let (service, pod) = (Some(MemberAddress::Service), Some(MemberAddress::Pod));
    assert_eq!(chosen(&[POD], None, None), pod);
    assert_eq!(chosen(&[SERVICE], None, None), None);
    assert_eq!(chosen(&[POD, SERVICE], None, None), None);
    // The names in the certificates count only if neither the spec nor the running members determine the address
    // format.
    assert_eq!(chosen(&[POD], service.clone(), None), service);
    assert_eq!(chosen(&[POD, SERVICE], None, pod.clone()), pod);
    assert_eq!(chosen(&[POD], None, service), None);
    assert_eq!(chosen(&["elsewhere.example"], None, None), None);
}

#[test]
fn invariant_14_debug_output_contains_no_key_material() {
    let tls = all(&Authority::new("one"), &[SERVICE]);
    let shown = format!("{tls:?} {:?}", tls.access().unwrap());
    for secret in ["BEGIN", "45, 45, 45"] {
        assert!(!shown.contains(secret), "{shown}");
    }
}

/// Invariant 20: etcd rejects the certificates of an expired authority.
#[test]
fn invariant_20_expired_authority_is_a_fault() {
    let (old, new) = (Authority::expired("old"), Authority::new("new"));
    let by = |authority: &Authority| authority.sign(&[SERVICE], &BOTH, GOOD);
    let found = faults(&with_peer(by(&old), &old.pem));
    assert_eq!(found[0].code, FaultKind::AuthorityExpired);
    for word in ["Secret given", "peer-ca.crt", "2020-01-01"] {
        assert!(found[0].message.contains(word), "{}", found[0].message);
    }
    // An expired authority in the trust bundle is a fault only if it has issued the certificate.
    let both = format!("{}{}", old.pem, new.pem);
    assert_eq!(faults(&with_peer(by(&new), &both)), []);
    assert_eq!(
        faults(&with_peer(by(&old), &both))[0].code,
        FaultKind::AuthorityExpired
    );
}

/// The faults of the Secrets in `now`, for a member that has started with the Secrets in `started`.
fn faults_after(started: &ClusterTls, now: &ClusterTls) -> Vec<Fault> {
    let noted = Authorities::of(started).unwrap().to_string();
    let started = BTreeMap::from([("db-a".to_owned(), Authorities::read(&noted))]);
    now.faults_of_started(&started, &faults(now), Timestamp::now())
}

#[test]
fn invariant_20_change_of_secrets_needs_common_authority() {
    let (old, new) = (Authority::new("old"), Authority::new("new"));
    let fault = |at: &ClusterTls, next: &ClusterTls| {
        let noted = Authorities::of(at).unwrap();
        let started = BTreeMap::from([("db-a".to_owned(), noted)]);
        let addresses = addresses(MemberAddress::Service);
        at.fault_of_change(next, &started, (&addresses, Timestamp::now()))
    };
    let (at, same) = (all(&old, &[SERVICE]), all(&old, &[SERVICE]));
    assert_eq!(fault(&at, &same), None);
    let other = fault(&at, &all(&new, &[SERVICE])).unwrap();
    assert_eq!(other.code, FaultKind::AuthorityReplaced);
    assert!(
        other
            .message
            .contains("peer certificates have no common authority")
    );
    // The trust bundle in `without` lacks the authority `old`, which has issued the certificate of the running member.
    let both = format!("{}{}", old.pem, new.pem);
    let bundle = with_peer(old.sign(&[SERVICE], &BOTH, GOOD), &both);
    let without = with_peer(new.sign(&[SERVICE], &BOTH, GOOD), &new.pem);
    assert!(fault(&bundle, &without).is_some());
    let with = with_peer(new.sign(&[SERVICE], &BOTH, GOOD), &both);
    assert_eq!(fault(&bundle, &with), None);
}

/// Invariant 20: in each step, a running member and a new member have a common authority, and accept the certificate
/// of the other.
#[test]
fn invariant_20_authorities_are_replaced_in_steps() {
    let (old, new) = (Authority::new("old"), Authority::new("new"));
    let both = format!("{}{}", old.pem, new.pem);
    let peer = |by: &Authority, ca: &str| with_peer(by.sign(&[SERVICE], &BOTH, GOOD), ca);
    let start = peer(&old, &old.pem);
    let bundle = peer(&old, &both);
    // In the correct order, no step has a fault. The last row reverts the first step.
    for (from, to) in [
        (&start, &start),
        (&start, &bundle),
        (&bundle, &peer(&new, &both)),
        (&peer(&new, &both), &peer(&new, &new.pem)),
        (&bundle, &start),
    ] {
        assert_eq!(faults_after(from, to), []);
    }
    let at_once = faults_after(&start, &peer(&new, &new.pem));
    assert_eq!(at_once[0].code, FaultKind::AuthorityReplaced);
    assert!(at_once[0].concerns_members());
    for word in ["Secret given", "peer-ca.crt", "db-a"] {
        assert!(at_once[0].message.contains(word), "{}", at_once[0].message);
    }
    let early = faults_after(&start, &peer(&new, &both));
    assert_eq!(early[0].code, FaultKind::UnknownAuthority);
    assert!(
        early[0].message.contains("peer.crt"),
        "{}",
        early[0].message
    );
    // Without the annotation, the authorities of a member are unknown, so no fault is reported.
    assert_eq!(
        peer(&new, &new.pem).faults_of_started(&BTreeMap::new(), &[], Timestamp::now()),
        []
    );
}

#[test]
fn reissued_authority_with_same_key_has_same_identity() {
    let old = Authority::new("one");
    let mut own = CertificateParams::default();
    own.distinguished_name.push(DnType::CommonName, "one");
    own.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let again = own.self_signed(old.issuer.key()).unwrap().pem();
    let signed = || old.sign(&[SERVICE], &BOTH, GOOD);
    let (before, after) = (with_peer(signed(), &old.pem), with_peer(signed(), &again));
    assert_eq!(faults_after(&before, &after), []);
}

/// Members must trust the authority of the operators' certificate.
#[test]
fn invariant_20_running_members_must_accept_operator_certificate() {
    let (old, new) = (Authority::new("old"), Authority::new("new"));
    let both = format!("{}{}", old.pem, new.pem);
    let tls = |ca: &str, operator: &Authority| {
        let server = old.sign(&[SERVICE], &BOTH, GOOD);
        let client = operator.sign(&[], &BOTH[1..], GOOD);
        let data = |purpose, signed, ca| secret(purpose, KeyNames::OfPurpose, signed, ca);
        ClusterTls {
            peer: None,
            server: Some(slot(Purpose::Server, &data(Purpose::Server, server, ca))),
            operator: Some(slot(
                Purpose::Operator,
                &data(Purpose::Operator, client, &both),
            )),
        }
    };
    let start = tls(&old.pem, &old);
    assert_eq!(faults_after(&start, &tls(&both, &old)), []);
    let early = faults_after(&start, &tls(&both, &new));
    assert_eq!(early[0].code, FaultKind::UnknownAuthority);
    assert!(!early[0].concerns_members());
    let at_once = faults_after(&start, &tls(&new.pem, &new));
    assert_eq!(at_once[0].code, FaultKind::AuthorityReplaced);
    assert!(at_once[0].message.contains("server-ca.crt"));
}
