//! Counts the requests to a running seed. If the seed will be deleted, the observation must not query its etcd. A slow
//! answer would make the observation older than ten seconds, and the deletion would not be sent.

use std::collections::VecDeque;

use api::names::FINALIZER_CLAIM;
use api::restore::ChosenBackup;
use etcd::KeyHash;
use etcd::fake::FakeEtcd;
use serde_json::{Value, json};

use super::*;
use crate::fake;

const URL: &str = "http://10.0.0.7:2379";
const SHA: &str = "abcd";

/// An EtcdRestore with `overwrite: true` that holds the lock.
fn restore() -> EtcdRestore {
    let mut restore = fake::restore_in_place();
    restore.metadata.finalizers = Some(vec![FINALIZER_CLAIM.into()]);
    let source = json!({ "s3": { "path": "b/k", "awsSecret": "aws" } });
    let chosen = ChosenBackup {
        sha256: Some(SHA.into()),
        ..choice::chosen_from(&restore, serde_json::from_value(source).unwrap())
    };
    let seed = naming::seed(&restore);
    let status = restore.status.get_or_insert_default();
    (status.seed, status.backup) = (Some(seed), Some(chosen));
    let replaces = json!({ "uid": "cluster-uid", "clusterID": "aa" });
    status.replaces = serde_json::from_value(replaces).unwrap();
    restore
}

fn cluster() -> Value {
    json!({
        "apiVersion": "etcd.database.coreos.com/v1beta2", "kind": "EtcdCluster",
        "metadata": { "name": "main", "namespace": "prod", "uid": "cluster-uid",
                      "annotations": { ANNOTATION_RESTORE: "restore-uid" } },
        "spec": { "size": 3, "version": "3.6.16" },
        "status": { "clusterID": "aa" },
    })
}

/// The seed's pod. Its etcd runs on a snapshot with this SHA-256.
fn pod(restore: &EtcdRestore, sha256: &str) -> Value {
    let chosen = choice::recorded(restore).unwrap();
    let source = serde_json::to_string(&chosen.source).unwrap();
    let report = json!({ "result": "done", "revision": 1, "size": 100, "sha256": sha256,
                       "hash": { "hash": 5, "compacted": 0 } });
    json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": { "name": naming::seed(restore).member, "namespace": "prod", "uid": "pod",
            "ownerReferences": [{ "apiVersion": "v", "kind": "EtcdCluster", "name": "main", "uid": "cluster-uid" }] },
        "spec": { "containers": [], "initContainers": [{ "name": "fetch",
            "args": ["seed", "fetch", format!("--source={source}")] }] },
        "status": { "podIP": "10.0.0.7",
            "initContainerStatuses": [{ "name": "fetch", "image": "", "imageID": "", "ready": true, "restartCount": 0,
                "state": { "terminated": { "exitCode": 0, "message": report.to_string() } } }],
            "containerStatuses": [{ "name": "etcd", "image": "", "imageID": "", "ready": true, "restartCount": 0,
                "state": { "running": {} } }] },
    })
}

/// Observes once. Returns the number of requests to etcd, and the observation.
async fn observed(restore: &EtcdRestore, sha256: &str) -> (usize, Observation) {
    const ENOUGH: usize = 10;
    let pod = pod(restore, sha256);
    let (client, _) = fake::server(move |what, _| match what {
        "GET etcdclusters" => (200, cluster()),
        "GET pods" => (200, pod.clone()),
        _ => (404, Value::Null),
    });
    let etcd = FakeEtcd::formed(7, &["seed"], |_| URL.to_owned());
    etcd.with(|state| {
        state.script = VecDeque::from(vec![None; ENOUGH]);
        let (hash, compacted) = (5, 0);
        state.hash = Some(KeyHash { hash, compacted });
    });
    let observation = observe_once(&client, &etcd, restore).await;
    let requests = ENOUGH - etcd.with(|state| state.script.len());
    (requests, observation)
}

#[tokio::test]
async fn aborted_restore_sends_no_requests_to_seed() {
    let (requests, observation) = observed(&restore(), SHA).await;
    let serves = matches!(observation.snapshot.serving, Serving::Serves { .. });
    assert!(serves, "{:?}", observation.snapshot);
    // For a restore that is not aborted, the operator sends three requests to the seed's etcd: for the member list, for
    // the status and for the hash.
    assert_eq!(requests, 3);
    let mut deleted = restore();
    deleted.metadata.deletion_timestamp =
        Some(serde_json::from_str("\"2026-01-01T00:00:00Z\"").unwrap());
    let mut abandoned = restore();
    let why = json!({ "reason": "BackupMissing", "message": "no such key" });
    abandoned.status.get_or_insert_default().abandoned = serde_json::from_value(why).unwrap();
    for aborted in [deleted, abandoned] {
        let (requests, observation) = observed(&aborted, SHA).await;
        // The pod of the seed was read, but its etcd was not queried.
        assert!(matches!(observation.snapshot.seed.pod, Pod::Present(_)));
        assert_eq!(requests, 0);
        assert_eq!(observation.snapshot.serving, Serving::NotRead);
        let action = plan::plan(&aborted, &observation.snapshot).action;
        assert_eq!(action, plan::Action::DiscardSeed);
    }
}

/// A seed with another backup is deleted, so its hash is not needed. etcd needs half a second per GiB to compute it.
#[tokio::test]
async fn no_hash_is_requested_from_seed_with_other_backup() {
    for (sha256, expected) in [(SHA, 3), ("ffff", 2)] {
        let (requests, observation) = observed(&restore(), sha256).await;
        let is_other = contains_other_backup(&observation.snapshot);
        assert_eq!(is_other, sha256 != SHA);
        assert_eq!(requests, expected, "{sha256}");
    }
}
