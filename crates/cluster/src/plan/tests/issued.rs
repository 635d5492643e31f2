//! Certificates that cert-manager issues: the operator writes Certificates, and publishes the issued certificates.

use std::time::Duration;

use api::cluster::{CertManagerTls, PeerStage};
use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::Secret;
use kube::ResourceExt;
use kube::core::DynamicObject;
use member::Members;
use member::certificate::certificates;
use member::issued::{Denied, Issuance, IssuedWrite, certificate};
use member::tls::{Authorities, Fault, FaultKind, Purpose};
use serde_json::json;

use crate::action::Request;
use crate::authority::{CaScope, Made, authority};
use crate::certificates::Noted;
use crate::plan::Plan;
use crate::plan::tests::scene::Scene;
use crate::reason::Reason;
use crate::switch::{Clients, Maker, TlsMode, TlsRollout};

fn tls() -> CertManagerTls {
    let text = r#"{"issuerRef":{"name":"ca"},"client":false}"#;
    serde_json::from_str(text).unwrap()
}

fn made() -> Made {
    let day = Duration::from_hours(24);
    authority(CaScope::Peers, day, jiff::Timestamp::now()).unwrap()
}

/// A Secret with this certificate and this CA.
fn secret(name: &str, made: &Made) -> Secret {
    let values = [
        ("tls.crt", &made.certificate),
        ("tls.key", &made.key),
        ("ca.crt", &made.certificate),
    ];
    let values = values.map(|(key, value)| (key.to_owned(), ByteString(value.clone())));
    let mut secret = Secret {
        data: Some(values.into()),
        ..Secret::default()
    };
    secret.metadata.name = Some(name.to_owned());
    secret.metadata.resource_version = Some(format!("version of {name}"));
    secret
}

/// Sets the Certificates and the Secrets that the operator observes.
fn see(scene: &mut Scene, found: Result<&[DynamicObject], &Denied>, secrets: &[Secret]) {
    let object = &scene.desired.object;
    let members = Members::of(object, "prod", "token", None);
    let issuance = Issuance::of(&members, &tls(), found, secrets);
    scene.observed.certificates.issued = Some(issuance);
}

/// The Certificate of the peers as the operator writes it, with the condition Ready of cert-manager.
fn ready(scene: &Scene) -> DynamicObject {
    let members = Members::of(&scene.desired.object, "prod", "token", None);
    let mut made = certificate(&members, &tls(), &tls().certificates(false)[0]);
    made.data["status"] = json!({ "conditions": [{ "type": "Ready", "status": "True" }] });
    made
}

fn writes(plan: &Plan) -> Vec<&IssuedWrite> {
    let actions = plan.step.chains.iter().flatten();
    let issued = actions.filter_map(|action| match &action.request {
        Request::Issued(write) => Some(write),
        _ => None,
    });
    issued.collect()
}

fn unpublished(scene: &mut Scene) {
    scene.observed.tls.faults = vec![Fault {
        purpose: Purpose::Peer,
        code: FaultKind::CertificateNotIssued,
        message: "Secret db-peer-certs does not exist".to_owned(),
    }];
}

#[test]
fn invariant_20_certificates_are_requested_before_bootstrap() {
    let mut scene = Scene::nothing(3);
    unpublished(&mut scene);
    see(&mut scene, Ok(&[]), &[]);
    let plan = scene.built();
    let written = writes(&plan);
    let [IssuedWrite::Apply(made)] = written.as_slice() else {
        panic!("{written:?}");
    };
    assert_eq!(made.name_any(), "db-peer-issued");
    let actions: usize = plan.step.chains.iter().map(Vec::len).sum();
    assert_eq!(actions, 1, "{plan:?}");
    assert_eq!(plan.problems[0].reason, Reason::CertificateNotIssued);
    // An unchanged Certificate is not applied again while its Secret is missing.
    let made = ready(&scene);
    see(&mut scene, Ok(&[made]), &[]);
    let plan = scene.built();
    assert!(plan.step.is_empty());
    assert!(plan.requeue <= Duration::from_secs(3));
}

#[test]
fn missing_cert_manager_is_reported_and_no_certificate_is_requested() {
    let mut scene = Scene::formed(&["a", "b", "c"]);
    let published = made();
    let mut target = secret("db-peer-certs", &published);
    let labels = api::names::cluster_labels("db");
    target.metadata.labels = Some(labels);
    let all = [secret("db-peer-issued", &published), target];
    see(&mut scene, Err(&Denied::NotServed), &all);
    let plan = scene.built();
    assert!(
        !writes(&plan)
            .iter()
            .any(|one| matches!(one, IssuedWrite::Apply(_)))
    );
    let reasons: Vec<Reason> = plan.problems.iter().map(|one| one.reason).collect();
    assert_eq!(reasons, [Reason::CertManagerMissing]);
}

#[test]
fn invariant_20_certificate_of_new_authority_waits_for_running_members() {
    let (old, new) = (made(), made());
    let mut scene = Scene::formed(&["a", "b", "c"]);
    let mut target = secret("db-peer-certs", &old);
    target.metadata.labels = Some(api::names::cluster_labels("db"));
    let bundle = ByteString([&*old.certificate, &*new.certificate].concat());
    target
        .data
        .as_mut()
        .unwrap()
        .insert("ca.crt".to_owned(), bundle);
    let certificate = ready(&scene);
    let all = [secret("db-peer-issued", &new), target];
    see(&mut scene, Ok(&[certificate]), &all);
    // If no running member uses the Secret, the certificate is published.
    let published = |scene: &Scene| {
        let plan = scene.built();
        let written = writes(&plan);
        let [IssuedWrite::Publish(one)] = written.as_slice() else {
            panic!("{written:?}");
        };
        (one.renews, one.from.clone())
    };
    assert_eq!(published(&scene), (true, "db-peer-issued".to_owned()));
    let mode = TlsMode {
        peers: PeerStage::Tls,
        clients: Clients::Plain,
        maker: Some(Maker::CertManager),
    };
    let names = ["a", "b", "c"].map(str::to_owned);
    scene.observed.tls_rollout = Some(TlsRollout {
        at: None,
        recorded: true,
        next: None,
        modes: names.clone().map(|name| (name, mode)).into(),
        refused: None,
    });
    for name in names {
        let noted = Noted {
            authorities: Some(Authorities::read("peer=0123456789abcdef;server=")),
            ..Noted::default()
        };
        scene.observed.certificates.pods.insert(name, noted);
    }
    assert_eq!(published(&scene), (false, "db-peer-certs".to_owned()));
    // During a change from static certificates, the members with static certificates must trust the new CA too.
    let identity = certificates(&new.certificate).unwrap()[0].identity();
    let trusting = Authorities::read(&format!("peer={identity};server="));
    let trust = |scene: &mut Scene, name: &str| {
        let noted = scene.observed.certificates.pods.get_mut(name).unwrap();
        noted.authorities = Some(trusting.clone());
    };
    trust(&mut scene, "a");
    trust(&mut scene, "b");
    let rollout = scene.observed.tls_rollout.as_mut().unwrap();
    rollout.modes.get_mut("c").unwrap().maker = Some(Maker::Others);
    assert_eq!(published(&scene), (false, "db-peer-certs".to_owned()));
    trust(&mut scene, "c");
    assert_eq!(published(&scene), (true, "db-peer-issued".to_owned()));
}

#[test]
fn invalid_spec_stops_certificate_requests_but_not_publications() {
    let mut scene = Scene::formed(&["a", "b", "c"]);
    scene.desired.invalid = Some("spec.size is 9".to_owned());
    see(&mut scene, Ok(&[]), &[secret("db-peer-issued", &made())]);
    let plan = scene.built();
    let written = writes(&plan);
    assert!(
        matches!(written.as_slice(), [IssuedWrite::Publish(_)]),
        "{written:?}"
    );
}
