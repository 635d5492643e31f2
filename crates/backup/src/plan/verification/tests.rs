//! Tests of the plan for verifications.
#![allow(
    clippy::needless_pass_by_value,
    reason = "tests pass `json!` literals directly as arguments"
)]

use serde_json::{Value, json};

use super::*;

const NEWEST: &str = "s3://bucket/etcd/main_v9_2026-01-02-00:00:00";
const OLDER: &str = "s3://bucket/etcd/main_v7_2026-01-01-00:00:00";

fn now() -> Timestamp {
    "2026-01-02T12:00:00Z".parse().unwrap()
}

fn backup(settings: Value, status: Value) -> EtcdBackup {
    let mut complete = json!({
        "succeeded": true, "location": NEWEST, "etcdVersion": "3.6.16", "etcdRevision": 9, "sha256": "ab",
        "startTime": "2026-01-02T00:00:00Z", "completionTime": "2026-01-02T00:01:00Z",
    });
    let fields = status.as_object().unwrap().clone();
    complete.as_object_mut().unwrap().extend(fields);
    serde_json::from_value(json!({
        "apiVersion": "etcd.database.coreos.com/v1beta2", "kind": "EtcdBackup",
        "metadata": { "name": "nightly", "namespace": "prod", "uid": "uid", "creationTimestamp": "2026-01-01T00:00:00Z" },
        "spec": {
            "etcdCluster": { "name": "main" }, "storageType": "S3",
            "s3": { "path": "bucket/etcd/main", "awsSecret": "aws" },
            "backupPolicy": { "schedule": "@daily", "maxBackups": 2 }, "verification": settings,
        },
        "status": complete,
    }))
    .unwrap()
}

fn running_since(start: &str) -> Value {
    json!({ "verification": { "location": NEWEST, "startTime": start } })
}

fn inputs(pod: PodState) -> VerificationInputs {
    VerificationInputs {
        pod,
        has_turn: true,
        image: Some(OperatorImage {
            image: "operator:1".to_owned(),
            pull_policy: None,
        }),
        etcd_image: None,
        repository: Some("registry.example/etcd".to_owned()),
    }
}

fn planned(backup: &EtcdBackup, pod: PodState) -> VerificationPlan {
    plan(backup, &inputs(pod), now())
}

#[test]
fn new_backup_is_verified_after_it_is_complete() {
    for (status, starts) in [
        (json!({}), true),
        (json!({ "lastVerified": { "location": OLDER } }), true),
        (json!({ "lastVerified": { "location": NEWEST } }), false),
        (json!({ "location": null }), false),
    ] {
        let planned = planned(&backup(json!({}), status.clone()), PodState::NotRead);
        let begins = VerificationVerdict::Starting(NEWEST.to_owned());
        assert_eq!(planned.verdict == begins, starts, "{status}: {planned:?}");
        assert_eq!(planned.step, Step::Nothing, "invariant 10: {status}");
    }
}

#[test]
fn verification_starts_at_scheduled_time() {
    let verified = json!({ "lastVerified": { "location": OLDER, "time": "2026-01-02T00:10:00Z" } });
    let weekly = backup(json!({ "schedule": "@weekly" }), verified.clone());
    let waits = planned(&weekly, PodState::NotRead);
    assert_eq!(waits.verdict, VerificationVerdict::Unchanged);
    assert!(waits.requeue.is_some());
    let hourly = backup(json!({ "schedule": "@hourly" }), verified);
    let begins = VerificationVerdict::Starting(NEWEST.to_owned());
    assert_eq!(planned(&hourly, PodState::NotRead).verdict, begins);
    // A scheduled verification reads the same backup again, because the stored object may have been damaged since the
    // last verification.
    let same = json!({ "lastVerified": { "location": NEWEST, "time": "2026-01-02T00:10:00Z" } });
    let hourly = backup(json!({ "schedule": "@hourly" }), same);
    assert_eq!(planned(&hourly, PodState::NotRead).verdict, begins);
}

fn in_window(schedule: &str) -> Value {
    json!({ "window": { "schedule": schedule, "duration": "2h" } })
}

/// The window limits only the start of a verification. A running verification continues outside of the window.
#[test]
fn verification_starts_only_within_its_window() {
    let begins = VerificationVerdict::Starting(NEWEST.to_owned());
    // At 12:00, the window of `open` (11:00 to 13:00) is open, and the window of `closed` (10:00 to 12:00) has just
    // closed.
    let open = backup(in_window("0 11 * * *"), json!({}));
    assert_eq!(planned(&open, PodState::NotRead).verdict, begins);
    assert_eq!(need(&open, now()), VerificationNeed::Turn);
    let closed = backup(in_window("0 10 * * *"), json!({}));
    let waits = planned(&closed, PodState::NotRead);
    let VerificationVerdict::Waiting(why) = &waits.verdict else {
        panic!("{waits:?}");
    };
    for part in ["spec.verification.window", "2026-01-03T10:00:00Z"] {
        assert!(why.contains(part), "{why}");
    }
    assert!(waits.requeue.is_some(), "{waits:?}");
    // Outside its window, the EtcdBackup does not take the turn of its namespace, so it does not delay the
    // verifications of other EtcdBackups: only the EtcdBackup with the turn may start a verification.
    assert_eq!(need(&closed, now()), VerificationNeed::Nothing);
    let running = running_since("2026-01-02T11:59:00Z");
    let continues = planned(&backup(in_window("0 10 * * *"), running), PodState::Missing);
    assert!(matches!(continues.step, Step::Create(_)), "{continues:?}");
}

#[test]
fn window_delays_repeated_and_scheduled_verifications() {
    let mut settings = in_window("0 10 * * *");
    let failed = json!({ "verification": {
        "location": NEWEST, "failures": 1, "lastFailureTime": "2026-01-02T11:00:00Z" } });
    let waits = planned(&backup(settings.clone(), failed), PodState::NotRead);
    assert!(
        matches!(waits.verdict, VerificationVerdict::Waiting(_)),
        "{waits:?}"
    );
    settings["schedule"] = json!("@hourly");
    let verified =
        json!({ "lastVerified": { "location": NEWEST, "time": "2026-01-02T11:30:00Z" } });
    let waits = planned(
        &backup(settings.clone(), verified.clone()),
        PodState::NotRead,
    );
    assert!(
        matches!(waits.verdict, VerificationVerdict::Waiting(_)),
        "{waits:?}"
    );
    // With a weekly schedule, the verification is not due, so it does not wait for the window.
    settings["schedule"] = json!("@weekly");
    let waits = planned(&backup(settings, verified), PodState::NotRead);
    assert_eq!(waits.verdict, VerificationVerdict::Unchanged);
}

/// A change of the cluster waits for this verification.
#[test]
fn requested_backup_is_verified_outside_of_verification_window() {
    let complete = json!({ "lastSuccessDate": "2026-01-02T00:01:00Z" });
    let mut requested = backup(in_window("0 10 * * *"), complete);
    let annotation = api::names::ANNOTATION_BACKUP_REQUESTED.to_owned();
    let time = "2026-01-02T00:00:00Z".to_owned();
    requested.metadata.annotations = Some([(annotation, time)].into());
    let begins = VerificationVerdict::Starting(NEWEST.to_owned());
    assert_eq!(planned(&requested, PodState::NotRead).verdict, begins);
}

#[test]
fn second_verification_in_namespace_waits_for_first() {
    let alone = VerificationInputs {
        has_turn: false,
        ..inputs(PodState::NotRead)
    };
    let waits = plan(&backup(json!({}), json!({})), &alone, now());
    let queued = VerificationVerdict::Queued(NEWEST.to_owned());
    assert_eq!((waits.verdict, waits.step), (queued, Step::Nothing));
    assert!(waits.requeue.is_some());
    let missing = VerificationInputs {
        has_turn: false,
        ..inputs(PodState::Missing)
    };
    let recorded = backup(json!({}), running_since("2026-01-02T11:59:00Z"));
    assert_eq!(plan(&recorded, &missing, now()).step, Step::Nothing);
}

#[test]
fn verification_pod_uses_pinned_image_of_cluster_unless_repository_is_set() {
    let pinned = "registry.example/etcd@sha256:ab";
    let inputs = VerificationInputs {
        etcd_image: Some(pinned.to_owned()),
        ..inputs(PodState::Missing)
    };
    let repository = json!({ "repository": "other.example/etcd" });
    for (settings, expected) in [
        (json!({}), pinned),
        (repository, "other.example/etcd:v3.6.16"),
    ] {
        let recorded = backup(settings, running_since("2026-01-02T11:59:00Z"));
        let Step::Create(pod) = plan(&recorded, &inputs, now()).step else {
            panic!("no pod");
        };
        let spec = pod.spec.unwrap();
        assert_eq!(spec.containers[0].image.as_deref(), Some(expected));
    }
}

#[test]
fn verification_pod_restores_newest_backup_with_its_etcd_version() {
    let recorded = backup(json!({}), running_since("2026-01-02T11:59:00Z"));
    let Step::Create(pod) = planned(&recorded, PodState::Missing).step else {
        panic!("no pod");
    };
    assert_eq!(pod.owner_references()[0].uid, "uid");
    let spec = pod.spec.unwrap();
    let image = spec.containers[0].image.as_deref();
    assert_eq!(image, Some("registry.example/etcd:v3.6.16"));
    let args = spec.init_containers.unwrap()[0].args.clone().unwrap();
    let source = args
        .iter()
        .find(|argument| argument.starts_with("--source="))
        .unwrap();
    assert!(
        source.contains("bucket/etcd/main_v9_2026-01-02-00:00:00"),
        "{source}"
    );
    assert!(args.contains(&"--sha256=ab".to_owned()), "{args:?}");
    let VerificationNeed::Pod(name) = need(&recorded, now()) else {
        panic!("no need");
    };
    assert_eq!(pod.metadata.name, Some(name));
}

/// The status records whether the newest backup is encrypted. The spec may have changed since then.
#[test]
fn verification_pod_gets_keys_only_for_encrypted_backup() {
    let key = json!({ "name": "2026", "id": "a62e0f7753a4df18" });
    for (spec, status, expected) in [
        (Value::Null, Value::Null, Some(false)),
        (json!({ "secret": "keys" }), Value::Null, Some(false)),
        (json!({ "secret": "keys" }), key.clone(), Some(true)),
        (Value::Null, key, None),
    ] {
        let mut recorded = backup(json!({}), running_since("2026-01-02T11:59:00Z"));
        recorded.spec.encryption = serde_json::from_value(spec).unwrap();
        let recorded_status = recorded.status.as_mut().unwrap();
        recorded_status.encryption_key = serde_json::from_value(status).unwrap();
        let planned = planned(&recorded, PodState::Missing);
        let has_keys = match planned.step {
            Step::Create(pod) => {
                let args = pod.spec.unwrap().init_containers.unwrap()[0].args.clone();
                Some(
                    args.unwrap()
                        .contains(&"--encryption-secret=keys".to_owned()),
                )
            }
            _ => None,
        };
        assert_eq!(has_keys, expected);
        if expected.is_none() {
            let VerificationVerdict::Waiting(why) = planned.verdict else {
                panic!("{:?}", planned.verdict)
            };
            for part in ["a62e0f7753a4df18", "spec.encryption"] {
                assert!(why.contains(part), "{why}");
            }
        }
    }
}

#[test]
fn verification_pod_is_deleted_before_result_is_recorded() {
    let recorded = backup(json!({}), running_since("2026-01-02T11:59:00Z"));
    let proof = Proof {
        revision: 9,
        keys: Some(3),
        keys_compared: true,
        hash_compared: true,
    };
    let ended = planned(&recorded, PodState::Ended(Ok(proof.clone())));
    assert!(matches!(ended.step, Step::Delete(_)), "{ended:?}");
    assert_eq!(ended.verdict, VerificationVerdict::Verified(proof));
}

#[test]
fn verification_ends_after_time_limit() {
    let settings = json!({ "timeoutSeconds": 60 });
    let recorded = backup(settings, running_since("2026-01-02T11:50:00Z"));
    for pod in [
        PodState::Running,
        PodState::Missing,
        PodState::Starting("0/3 nodes are available".to_owned()),
    ] {
        let ended = planned(&recorded, pod.clone());
        let VerificationVerdict::Failed(failure) = ended.verdict else {
            panic!("{pod:?}");
        };
        assert!(!failure.damaged, "{failure:?}");
        assert!(failure.message.contains("timeoutSeconds"), "{failure:?}");
    }
    // The operator uses the result of the pod, even if the operator reads this result after the time limit.
    let failure = Failure {
        damaged: true,
        message: "different".to_owned(),
    };
    let ended = planned(&recorded, PodState::Ended(Err(failure.clone())));
    assert_eq!(ended.verdict, VerificationVerdict::Failed(failure));
}

#[test]
fn failed_verification_is_repeated_with_growing_pauses() {
    let failed = |failures: i32, at: &str| json!({ "verification": { "location": NEWEST, "failures": failures, "lastFailureTime": at } });
    for (failures, at, starts) in [
        (1, "2026-01-02T11:59:30Z", false),
        (1, "2026-01-02T11:58:59Z", true),
        (4, "2026-01-02T11:55:00Z", false),
        (4, "2026-01-02T11:51:00Z", true),
        (1000, "2026-01-02T06:30:00Z", false),
        (1000, "2026-01-02T05:59:00Z", true),
    ] {
        let planned = planned(&backup(json!({}), failed(failures, at)), PodState::NotRead);
        let begins = VerificationVerdict::Starting(NEWEST.to_owned());
        assert_eq!(planned.verdict == begins, starts, "{failures} {at}");
    }
    // The verification of an older backup has failed. The verification of the newest backup starts without a delay.
    let older = json!({ "verification": {
        "location": OLDER, "failures": 9, "lastFailureTime": "2026-01-02T11:59:59Z" } });
    let planned = planned(&backup(json!({}), older), PodState::NotRead);
    assert_eq!(
        planned.verdict,
        VerificationVerdict::Starting(NEWEST.to_owned())
    );
}

#[test]
fn newest_backup_is_verified_if_pod_for_older_backup_is_missing() {
    let older =
        json!({ "verification": { "location": OLDER, "startTime": "2026-01-02T11:59:00Z" } });
    let begins = VerificationVerdict::Starting(NEWEST.to_owned());
    assert_eq!(
        planned(&backup(json!({}), older.clone()), PodState::Missing).verdict,
        begins
    );
    let goes_on = planned(&backup(json!({}), older), PodState::Running);
    assert!(
        matches!(goes_on.verdict, VerificationVerdict::Waiting(_)),
        "{goes_on:?}"
    );
}

#[test]
fn removal_of_verification_settings_ends_running_verification() {
    let mut recorded = backup(json!({}), running_since("2026-01-02T11:59:00Z"));
    recorded.spec.verification = None;
    let ended = planned(&recorded, PodState::NotRead);
    assert!(matches!(ended.step, Step::Delete(_)), "{ended:?}");
    assert_eq!(ended.verdict, VerificationVerdict::Off);
    recorded.status.as_mut().unwrap().verification = None;
    assert_eq!(
        planned(&recorded, PodState::NotRead),
        VerificationPlan::default()
    );
}

/// Invariant 31: the plan names the newest verified backup, and retention keeps this backup.
#[test]
fn invariant_31_verified_backup_is_passed_to_retention() {
    let verified = json!({ "lastVerified": { "location": OLDER } });
    let parts = super::verified(&backup(json!({}), verified.clone())).unwrap();
    assert_eq!(
        name::name("etcd/main", parts),
        "etcd/main_v7_2026-01-01-00:00:00"
    );
    // `verified` returns no backup if `spec.verification` is not set, or if the verified backup is not at the path in
    // the spec.
    let mut off = backup(json!({}), verified);
    off.spec.verification = None;
    assert_eq!(super::verified(&off), None);
    let elsewhere =
        json!({ "lastVerified": { "location": "s3://bucket/other_v7_2026-01-01-00:00:00" } });
    assert_eq!(super::verified(&backup(json!({}), elsewhere)), None);
}
