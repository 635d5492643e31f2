//! Tests of the facts about a pod, with statuses as kubelets report them.
#![allow(
    clippy::needless_pass_by_value,
    reason = "tests pass `json!` literals directly as arguments"
)]

use member::Origin;
use serde_json::{Value, json};

use super::*;

#[test]
fn seed_with_cluster_labels_counts_as_joined() {
    let joined = |labels: Value| {
        let pod = json!({ "metadata": { "labels": labels } });
        facts(&serde_json::from_value(pod).unwrap()).joined
    };
    assert!(joined(json!({ "app": "etcd", "etcd_cluster": "main" })));
    assert!(!joined(json!({ "etcd_node": "main-aaaaaaaaaa" })));
}

fn reported(init: Value) -> PodFacts {
    facts(&serde_json::from_value(json!({ "status": { "initContainerStatuses": init } })).unwrap())
}

fn container(name: &str, state: Value, last: Value) -> Value {
    json!({ "name": name, "image": "i", "imageID": "", "ready": false, "restartCount": 1,
            "state": state, "lastState": last })
}

fn ended(code: i32, message: &str) -> Value {
    json!({ "terminated": { "exitCode": code, "message": message, "reason": "Error" } })
}

const DONE: &str = r#"{"result":"done","revision":7,"size":1,"sha256":"ab"}"#;

#[test]
fn invariant_9_seed_is_verified_only_when_etcd_is_ready() {
    let observed = |ready: bool| {
        let mut etcd = container("etcd", json!({ "running": {} }), json!({}));
        etcd["ready"] = json!(ready);
        let status = json!({
            "initContainerStatuses": [container("fetch", ended(0, DONE), json!({}))],
            "containerStatuses": [etcd],
        });
        let spec =
            json!({ "containers": [{ "name": "etcd" }], "initContainers": [{ "name": "fetch" }] });
        facts(&serde_json::from_value(json!({ "spec": spec, "status": status })).unwrap())
    };
    let expected = |verified| PodFacts {
        restored: Some(7),
        sha256: Some("ab".into()),
        verified,
        progress: Some(Moved {
            bytes: 1,
            total: Some(1),
        }),
        ..PodFacts::default()
    };
    assert_eq!(observed(false), expected(false));
    assert_eq!(observed(true), expected(true));
}

#[test]
fn origin_of_data_is_read_from_pod_report() {
    let origin = |suffix: &str| {
        let message = DONE.replace('}', suffix);
        reported(json!([container("fetch", ended(0, &message), json!({}))])).origin
    };
    assert_eq!(origin("}"), None);
    let expected = |encrypted| Origin {
        location_hash: "cd".into(),
        bump_revision: 7,
        encrypted,
        replayed_revision: None,
    };
    // The report of a pod of an earlier release does not contain `encrypted`.
    let suffix = r#","of":{"place":"cd","bumpRevision":7}}"#;
    assert_eq!(origin(suffix), Some(expected(None)));
    let suffix = r#","of":{"place":"cd","bumpRevision":7,"encrypted":true}}"#;
    assert_eq!(origin(suffix), Some(expected(Some(true))));
}

#[test]
fn fetch_error_is_reported_until_fetch_runs_again() {
    let failed = r#"{"result":"failed","reason":"SnapshotUnreadable","message":"sha256 differs"}"#;
    let waiting = json!({ "waiting": { "reason": "CrashLoopBackOff" } });
    let expected = Trouble::new(Reason::SnapshotUnreadable, "sha256 differs");
    for (state, last) in [(ended(1, failed), json!({})), (waiting, ended(1, failed))] {
        assert_eq!(
            reported(json!([container("fetch", state, last)])).trouble,
            Some(expected.clone())
        );
    }
    let retrying = container("fetch", json!({ "running": {} }), ended(1, failed));
    assert_eq!(reported(json!([retrying])).trouble, None);
}

#[test]
fn reason_of_seed_pod_that_cannot_start_is_reported() {
    let pull = json!({ "waiting": { "reason": "ImagePullBackOff", "message": "not found" } });
    let trouble = reported(json!([container("fetch", pull, json!({}))]))
        .trouble
        .unwrap();
    assert_eq!(trouble.reason, Reason::ImageNotFound);
    let killed = reported(json!([container("fetch", ended(137, ""), json!({}))]))
        .trouble
        .unwrap();
    assert_eq!(killed.reason, Reason::PodNotStarting);
    let evicted = json!({ "status": { "phase": "Failed", "reason": "Evicted", "message": "DiskPressure",
        "initContainerStatuses": [container("fetch", ended(143, ""), json!({}))] } });
    let trouble = facts(&serde_json::from_value(evicted).unwrap())
        .trouble
        .unwrap();
    assert_eq!(trouble.reason, Reason::PodNotStarting);
    let expected = "has ended and is not restarted (Evicted: DiskPressure)";
    assert!(trouble.message.contains(expected), "{}", trouble.message);
    let pod = json!({ "status": { "conditions": [
        { "type": "PodScheduled", "status": "False", "message": "no node" }] } });
    let trouble = facts(&serde_json::from_value(pod).unwrap())
        .trouble
        .unwrap();
    assert_eq!(trouble.reason, Reason::PodNotStarting);
}
