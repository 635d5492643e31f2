//! Tests of the condition `Advisable`.

use api::EtcdCluster;
use api::cluster::{Advice, EtcdOptions};
use api::conditions::ConditionType;
use etcd::Status;

use super::{at, condition, object};
use crate::expiry::Expiry;
use crate::plan::tests::scene::Scene;
use crate::seen::Seen;
use crate::status::Report;

/// Changes a cluster without advice, and returns the reason and the message of its condition `Advisable`.
fn advice(change: impl FnOnce(&mut Scene, &mut EtcdCluster)) -> (String, String) {
    let mut scene = Scene::formed(&["a", "b", "c"]).durable();
    for (name, pod) in &mut scene.observed.pods {
        pod.node = Some(format!("node-{name}"));
    }
    let mut cluster = object(api::EtcdClusterSpec::default(), None);
    let backup = r#"{"storageType":"S3","s3":{"path":"bucket/key"},"backupPolicy":{"backupIntervalInSecond":60}}"#;
    cluster.spec.backup = serde_json::from_str(backup).unwrap();
    cluster.spec.etcd = Some(EtcdOptions {
        auto_compaction_retention: Some("1h".into()),
        ..EtcdOptions::default()
    });
    change(&mut scene, &mut cluster);
    let plan = scene.built();
    let report = Report {
        cluster: &cluster,
        desired: &scene.desired,
        observed: &scene.observed,
        plan: &plan,
        failure: None,
    };
    let status = report.status(&at(100));
    let (status, reason, message) = condition(&status, &ConditionType::Advisable);
    let is_advice = message.starts_with(&format!("{reason}: "));
    assert_eq!(is_advice, status == "False", "{message}");
    (reason, message)
}

#[test]
fn status_gives_each_advice_only_for_its_cause() {
    let quota = |scene: &mut Scene, size: i64| {
        scene.desired.upkeep.quota = 1000;
        let answers = scene.observed.statuses.values_mut();
        for answer in answers {
            if let Seen::Known(Status { db_size, .. }) = answer {
                *db_size = size;
            }
        }
    };
    let expiry = |generated: bool| Expiry {
        secret: "tls".into(),
        key: "tls.crt",
        not_before: at(0).0,
        not_after: at(101).0,
        generated,
    };
    assert_eq!(advice(|_, _| ()).0, "AsAdvised");
    assert_eq!(advice(|scene, _| scene.desired.size = 4).0, "EvenSize");
    let old = |scene: &mut Scene| scene.desired.version = "3.2.13".into();
    assert_eq!(advice(|scene, _| old(scene)).0, "UntestedVersion");
    assert_eq!(
        advice(|scene, _| scene.desired.durable = false).0,
        "NoVolumes"
    );
    assert_eq!(
        advice(|_, cluster| cluster.spec.backup = None).0,
        "NoBackup"
    );
    assert_eq!(
        advice(|_, cluster| cluster.spec.etcd = None).0,
        "NoCompaction"
    );
    assert_eq!(advice(|scene, _| quota(scene, 800)).0, "QuotaNearlyFull");
    assert_eq!(advice(|scene, _| quota(scene, 700)).0, "AsAdvised");
    let with_expiry = |generated| {
        advice(move |scene, _| scene.observed.certificates.expiries = vec![expiry(generated)]).0
    };
    assert_eq!(with_expiry(false), "CertificateExpiring");
    // The status gives no advice about the expiry of generated certificates, because the operator renews them.
    assert_eq!(with_expiry(true), "AsAdvised");
    let (reason, message) = advice(|scene, _| {
        scene.observed.pods.get_mut("a").unwrap().node = Some("node-b".into());
    });
    assert_eq!(reason, "SharedNode");
    assert!(
        message.contains("2 members run on node node-b"),
        "{message}"
    );
}

#[test]
fn silenced_advice_is_not_reported() {
    let (reason, message) = advice(|scene, cluster| {
        scene.desired.size = 4;
        cluster.spec.backup = None;
        cluster.spec.etcd = None;
        cluster.spec.silenced_advice = vec![Advice::EvenSize];
    });
    assert_eq!(reason, "NoBackup");
    assert!(message.contains("NoCompaction: "), "{message}");
    assert!(!message.contains("EvenSize"), "{message}");
}

#[test]
fn every_known_advice_is_a_reason() {
    for name in Advice::KNOWN {
        let reason = crate::reason::Reason::parse(name);
        assert!(reason.is_some(), "{name} is not a reason");
    }
}

#[test]
fn advice_about_version_before_3_4_says_that_new_members_are_voters() {
    let (_, message) = advice(|scene, _| scene.desired.version = "3.2.13".into());
    assert!(message.contains("a new member is a voter"), "{message}");
}
