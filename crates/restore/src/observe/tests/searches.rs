//! Tests of the search for a point in recorded changes on a PersistentVolumeClaim.

use std::path::Path;

use etcd::fake::FakeEtcd;
use k8s_openapi::jiff::{SignedDuration, Timestamp};
use store::LocalStore;

use super::points::{PREFIX, SNAPSHOT, etcd_backup, fill, plain, restore_at, with_seed};
use super::*;
use crate::plan::{Action, plan};
use crate::search::{self, Search, SearchReport};
use crate::snapshot::SearchStep;

fn backup() -> Value {
    etcd_backup(json!({
        "etcdCluster": { "name": "main" }, "storageType": "PVC",
        "pvc": { "claimName": "backups", "path": "etcd/b" },
    }))
}

fn restore_to(at: &Value) -> EtcdRestore {
    let source = json!({ "backup": { "name": "b" } });
    with_seed(restore_at(&source, &json!({ "at": at }), &plain()))
}

async fn observed(restore: &EtcdRestore, pod: Option<Value>) -> Observation {
    let (client, _) = fake::server(move |what, _| match what {
        "GET etcdbackups" => (200, backup()),
        "GET persistentvolumeclaims" => (
            200,
            json!({ "apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": { "name": "backups" } }),
        ),
        "GET pods" => pod.clone().map_or((404, Value::Null), |pod| (200, pod)),
        _ => (404, Value::Null),
    });
    let etcd = FakeEtcd::formed(7, &["seed"], |name| format!("http://{name}:2379"));
    observe_once(&client, &etcd, restore).await
}

/// The time this many seconds ago, without fractions of a second.
fn ago(seconds: i64) -> String {
    let second = (Timestamp::now() - SignedDuration::from_secs(seconds)).as_second();
    Timestamp::from_second(second).unwrap().to_string()
}

fn pod_of_restore() -> Value {
    json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {
            "name": "etcd-search-1", "uid": "pod-uid",
            "ownerReferences": [{ "apiVersion": "v", "kind": "EtcdRestore", "name": "again", "uid": "restore-uid" }],
        },
    })
}

/// A pod that has ended this many seconds ago with this report.
fn ended(report: &SearchReport, seconds: i64) -> Value {
    let message = serde_json::to_string(report).unwrap();
    let mut pod = pod_of_restore();
    pod["status"] = json!({ "phase": "Succeeded", "containerStatuses": [{
        "name": "search", "image": "", "imageID": "", "ready": false, "restartCount": 0,
        "state": { "terminated": { "exitCode": 0, "finishedAt": ago(seconds), "message": message } },
    }] });
    pod
}

/// Runs the search in a directory with the changes of the revisions 11 to 20. Returns its report.
async fn searched(at: &Value) -> SearchReport {
    let (volume, reports) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    fill(&LocalStore::new(volume.path())).await;
    search_in(volume.path(), &reports.path().join("report"), at).await
}

async fn search_in(volume: &Path, report: &Path, at: &Value) -> SearchReport {
    let path = PREFIX.trim_end_matches('/');
    let order =
        json!({ "directory": { "pvc": { "claimName": "backups", "path": path } }, "at": at });
    let arguments = Search {
        order: serde_json::from_value(order).unwrap(),
        root: volume.to_owned(),
        keys: volume.join("keys"),
        report: report.to_owned(),
    };
    let succeeded = search::run(&arguments).await;
    let report = std::fs::read_to_string(report).unwrap();
    assert!(
        report.len() < 4096,
        "the report exceeds a termination message"
    );
    let report = serde_json::from_str(&report).unwrap();
    assert_eq!(succeeded, matches!(report, SearchReport::Found(_)));
    report
}

#[tokio::test]
async fn point_on_pvc_is_found_by_search_pod() {
    let at = json!({ "revision": 13 });
    let restore = restore_to(&at);
    let missing = observed(&restore, None).await;
    let planned = plan(&restore, &missing.snapshot);
    let Action::StartSearch(pod) = planned.action else {
        panic!("{planned:?}");
    };
    let arguments = pod.spec.unwrap().containers[0].args.clone().unwrap();
    assert_eq!(arguments[0], "search");
    assert!(
        arguments[1].contains(PREFIX.trim_end_matches('/')),
        "{arguments:?}"
    );
    let pod = ended(&searched(&at).await, 1);
    let observation = observed(&restore, Some(pod)).await;
    let ready = &observation.snapshot.source;
    assert!(matches!(ready, Source::Ready(_)), "{ready:?}");
    let chosen = observation.snapshot.found.unwrap();
    assert_eq!(chosen.location, format!("pvc://backups/{SNAPSHOT}"));
    assert_eq!(chosen.etcd_backup.as_deref(), Some("b"));
    let point = chosen.continuous.unwrap();
    assert_eq!(
        (point.revision, point.base_revision, point.segments),
        (13, 10, 3)
    );
    assert_eq!(point.prefix, PREFIX);
}

#[tokio::test]
async fn failed_search_is_reported_and_repeated_later() {
    let at = json!({ "revision": 99 });
    let (restore, report) = (restore_to(&at), searched(&at).await);
    let recent = observed(&restore, Some(ended(&report, 10))).await;
    let Source::Unavailable(trouble) = &recent.snapshot.source else {
        panic!("{:?}", recent.snapshot.source);
    };
    assert_eq!(trouble.reason, Reason::PointNotRecorded);
    assert!(
        trouble.message.contains("revision 20"),
        "{}",
        trouble.message
    );
    let old = observed(&restore, Some(ended(&report, 400))).await;
    assert_search_ends(&old);
}

/// The server of the volume did not answer within the time limit of the pod.
#[tokio::test]
async fn timed_out_search_is_reported_and_repeated_later() {
    let restore = restore_to(&json!({ "revision": 13 }));
    let failed = |seconds: i64| {
        let mut pod = pod_of_restore();
        let at = ago(seconds);
        pod["metadata"]["creationTimestamp"] = json!(ago(3600));
        pod["status"] = json!({
            "phase": "Failed", "reason": "DeadlineExceeded", "message": "active longer than its deadline",
            "conditions": [{ "type": "Ready", "status": "False", "lastTransitionTime": at }],
        });
        pod
    };
    let recent = observed(&restore, Some(failed(10))).await;
    let Source::Unavailable(trouble) = &recent.snapshot.source else {
        panic!("{:?}", recent.snapshot.source);
    };
    assert_eq!(trouble.reason, Reason::PodNotStarting);
    assert!(
        trouble.message.contains("DeadlineExceeded"),
        "{}",
        trouble.message
    );
    assert_search_ends(&observed(&restore, Some(failed(400))).await);
}

fn assert_search_ends(observation: &Observation) {
    let step = &observation.snapshot.source;
    assert!(
        matches!(step, Source::Search(SearchStep::End(_))),
        "{step:?}"
    );
}

/// A result stays unused while the EtcdCluster is paused. The agent may record later revisions during this time.
#[tokio::test]
async fn search_is_repeated_if_its_result_is_old() {
    let at = json!({ "latest": true });
    let (restore, report) = (restore_to(&at), searched(&at).await);
    let recent = observed(&restore, Some(ended(&report, 30))).await;
    let found = recent.snapshot.found.unwrap().continuous.unwrap();
    assert_eq!(found.revision, 20);
    assert_search_ends(&observed(&restore, Some(ended(&report, 200))).await);
}

#[tokio::test]
async fn search_report_with_another_point_is_refused() {
    let report = searched(&json!({ "revision": 12 })).await;
    let restore = restore_to(&json!({ "revision": 13 }));
    let observation = observed(&restore, Some(ended(&report, 1))).await;
    let Source::Unavailable(trouble) = &observation.snapshot.source else {
        panic!("{:?}", observation.snapshot.source);
    };
    assert!(
        trouble.message.contains("another point"),
        "{}",
        trouble.message
    );
}

#[tokio::test]
async fn missing_key_secret_is_reported_before_search() {
    let mut restore = restore_to(&json!({ "revision": 13 }));
    let encryption = json!({ "secret": "keys" });
    restore.spec.encryption = Some(serde_json::from_value(encryption).unwrap());
    let observation = observed(&restore, None).await;
    let Source::Unavailable(trouble) = &observation.snapshot.source else {
        panic!("{:?}", observation.snapshot.source);
    };
    assert_eq!(trouble.reason, Reason::SecretMissing);
    assert!(
        trouble.message.contains("Secret keys"),
        "{}",
        trouble.message
    );
}

#[tokio::test]
async fn search_report_in_pod_of_another_owner_is_ignored() {
    let at = json!({ "revision": 13 });
    let mut pod = ended(&searched(&at).await, 1);
    pod["metadata"]["ownerReferences"] = json!([]);
    let observation = observed(&restore_to(&at), Some(pod)).await;
    let Source::Unavailable(trouble) = &observation.snapshot.source else {
        panic!("{:?}", observation.snapshot.source);
    };
    assert_eq!(trouble.reason, Reason::InProgress, "{}", trouble.message);
}

/// Invariant 13: a forged report names a snapshot of another directory.
#[tokio::test]
async fn invariant_13_search_report_with_foreign_snapshot_is_refused() {
    let at = json!({ "revision": 13 });
    let SearchReport::Found(found) = searched(&at).await else {
        panic!("the point was not found");
    };
    let above = format!("{PREFIX}../../other/snapshots/1.snapshot");
    for snapshot in ["etcd/other/snapshots/1.snapshot", above.as_str()] {
        let mut forged = found.clone();
        snapshot.clone_into(&mut forged.snapshot);
        let pod = ended(&SearchReport::Found(forged), 1);
        let observation = observed(&restore_to(&at), Some(pod)).await;
        let Source::Unavailable(trouble) = &observation.snapshot.source else {
            panic!("{:?}", observation.snapshot.source);
        };
        assert_eq!(trouble.reason, Reason::SnapshotUnreadable);
    }
}
