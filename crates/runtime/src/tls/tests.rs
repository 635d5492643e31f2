//! Certificates that hold and those that do not, each with what is said of it.

use std::time::Duration;

use api::cluster::KeyNames;
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose,
};

use super::*;

const SERVICE: &str = "*.prod.svc";
const POD: &str = "*.db.prod.svc";

/// An authority that signs what a test asks for.
struct Authority {
    issuer: Issuer<'static, KeyPair>,
    pem: String,
}

impl Authority {
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

    /// A certificate and its key; `from` and `to` in days from now.
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

/// TLS everywhere, of one authority, for these names.
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
fn certificates_that_hold_have_no_fault() {
    let authority = Authority::new("one");
    assert_eq!(faults(&all(&authority, &[SERVICE])), []);
    assert_eq!(faults(&ClusterTls::default()), []);
}

#[test]
fn invariant_20_what_is_wrong_is_said_with_secret_key_and_remedy() {
    let (one, two) = (Authority::new("one"), Authority::new("two"));
    let good = one.sign(&[SERVICE], &BOTH, GOOD);
    let cases = [
        (
            "KeyMismatch",
            with_peer(
                (good.0.clone(), one.sign(&[SERVICE], &BOTH, GOOD).1),
                &one.pem,
            ),
        ),
        ("UnknownAuthority", with_peer(good.clone(), &two.pem)),
        (
            "CertificateExpired",
            with_peer(one.sign(&[SERVICE], &BOTH, (-9, -1)), &one.pem),
        ),
        (
            "CertificateNotYetValid",
            with_peer(one.sign(&[SERVICE], &BOTH, (1, 9)), &one.pem),
        ),
        (
            "WrongUsage",
            with_peer(one.sign(&[SERVICE], &BOTH[..1], GOOD), &one.pem),
        ),
        (
            "WrongUsage",
            with_peer(one.sign(&[SERVICE], &BOTH[1..], GOOD), &one.pem),
        ),
        (
            "NameNotCovered",
            with_peer(one.sign(&["elsewhere.example"], &BOTH, GOOD), &one.pem),
        ),
        (
            "CertificateUnreadable",
            with_peer(("no PEM".into(), good.1.clone()), &one.pem),
        ),
        (
            "CertificateUnreadable",
            with_peer((good.0.clone(), "no PEM".into()), &one.pem),
        ),
        ("CertificateUnreadable", with_peer(good.clone(), "no PEM")),
    ];
    for (code, tls) in cases {
        let found = faults(&tls);
        assert_eq!(found.len(), 1, "{code}: {found:?}");
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
fn a_certificate_is_checked_against_the_authorities_that_will_be_asked() {
    let (one, two) = (Authority::new("one"), Authority::new("two"));
    let mut tls = all(&one, &[SERVICE]);
    // Clients that trust another authority, and show a certificate the members do not trust.
    tls.operator = all(&two, &[SERVICE]).operator;
    let found = faults(&tls);
    let codes: Vec<_> = found
        .iter()
        .map(|fault| (fault.purpose, fault.code))
        .collect();
    assert_eq!(
        codes,
        [
            (Purpose::Server, "UnknownAuthority"),
            (Purpose::Operator, "UnknownAuthority")
        ]
    );
    assert!(!found[1].concerns_members());
    // A bundle of both: as in a change of authorities.
    let bundle = format!("{}{}", one.pem, two.pem);
    for slot in [&mut tls.server, &mut tls.operator].into_iter().flatten() {
        if let Ok(material) = &mut slot.found {
            material.ca = bundle.clone().into_bytes();
        }
    }
    assert_eq!(faults(&tls), []);
}

#[test]
fn keys_are_read_by_either_names_and_what_is_missing_is_named() {
    let authority = Authority::new("one");
    let signed = authority.sign(&[SERVICE], &BOTH, GOOD);
    let usual = secret(Purpose::Server, KeyNames::Usual, signed, &authority.pem);
    let read = material(Purpose::Server, "web", Some(&usual)).unwrap();
    assert_eq!(read.names, KeyNames::Usual);
    let mut lacking = usual.clone();
    lacking.remove("ca.crt");
    let fault = material(Purpose::Server, "web", Some(&lacking)).unwrap_err();
    assert_eq!(fault.code, "KeyMissing");
    assert!(fault.message.contains("has no ca.crt"), "{}", fault.message);
    let fault = material(Purpose::Server, "web", Some(&SecretData::new())).unwrap_err();
    assert!(fault.message.contains("server.crt"), "{}", fault.message);
    let fault = material(Purpose::Server, "web", None).unwrap_err();
    assert_eq!(fault.code, "SecretMissing");
}

#[test]
fn certificates_that_cover_the_pods_form_alone_choose_it() {
    let authority = Authority::new("one");
    let chosen = |names: &[&str], said: Option<MemberAddress>, running: Option<MemberAddress>| {
        let mut spec: EtcdClusterSpec = serde_json::from_value(serde_json::json!({
            "size": 3, "TLS": { "static": { "member": { "peerSecret": "a", "serverSecret": "b" }, "operatorSecret": "c" } }
        }))
        .unwrap();
        spec.member_address = said;
        all(&authority, names).settle(&mut spec, ("prod", "db"), running);
        spec.member_address
    };
    let (service, pod) = (Some(MemberAddress::Service), Some(MemberAddress::Pod));
    assert_eq!(chosen(&[POD], None, None), pod);
    assert_eq!(chosen(&[SERVICE], None, None), None);
    assert_eq!(chosen(&[POD, SERVICE], None, None), None);
    // What is said, and what runs, is not changed by a certificate.
    assert_eq!(chosen(&[POD], service.clone(), None), service);
    assert_eq!(chosen(&[POD, SERVICE], None, pod.clone()), pod);
    assert_eq!(chosen(&[POD], None, service), None);
    assert_eq!(chosen(&["elsewhere.example"], None, None), None);
}

#[test]
fn invariant_14_material_is_not_shown() {
    let tls = all(&Authority::new("one"), &[SERVICE]);
    let shown = format!("{tls:?} {:?}", tls.access().unwrap());
    for secret in ["BEGIN", "45, 45, 45"] {
        assert!(!shown.contains(secret), "{shown}");
    }
}
