//! Tests of the views of clusters.

use jiff::Timestamp;
use serde_json::{Value, json};

use super::*;
use crate::text::Paint;
use crate::view::{details, list};

fn cluster() -> EtcdCluster {
    serde_json::from_value(json!({
        "apiVersion": "etcd.database.coreos.com/v1beta2", "kind": "EtcdCluster",
        "metadata": { "name": "main", "namespace": "prod", "generation": 2 },
        "spec": { "size": 3, "version": "v3.6.16" },
        "status": {
            "observedGeneration": 2, "state": "Ready", "clusterID": "7f", "healthyMembers": 3, "leader": "main-aaaaaaaaaa",
            "currentVersion": "3.6.16", "nextStep": "defragment a member", "waitingFor": "the schedule",
            "memberDetails": [
                { "name": "main-bbbbbbbbbb", "id": "b", "role": "Voter", "healthy": true, "dbSize": 1024, "revisionLag": 1 },
                { "name": "main-aaaaaaaaaa", "id": "a", "role": "Leader", "healthy": true, "dbSize": 2048 }
            ],
            "alarms": [{ "type": "NoSpace", "member": "main-bbbbbbbbbb" }],
            "certificates": { "secret": "main-peer-ca", "key": "ca.crt", "notAfter": "2026-12-06T00:00:00Z", "expiresWithin": "30d" },
            "lastBackup": { "name": "nightly", "time": "2026-11-26T00:00:00Z", "revision": 100, "location": "s3://b/k" },
            "conditions": [
                condition("Ready", "True", "AsDesired", ""), condition("Available", "True", "QuorumHealthy", ""),
                condition("Degraded", "True", "NoSpace", "compact"), condition("Stalled", "True", "NoSpace", "compact"),
                condition("Advisable", "False", "EvenSize", "use 3"), condition("Upgrading", "False", "AsDesired", "no change")
            ]
        }
    }))
    .unwrap()
}

fn condition(kind: &str, status: &str, reason: &str, message: &str) -> Value {
    json!({ "type": kind, "status": status, "reason": reason, "message": message,
        "lastTransitionTime": "2026-11-26T00:00:00Z" })
}

fn pod(name: &str, waiting: Option<&str>) -> Pod {
    let state = waiting.map_or_else(
        || json!({ "running": {} }),
        |reason| json!({ "waiting": { "reason": reason } }),
    );
    serde_json::from_value(json!({
        "metadata": { "name": name },
        "spec": { "nodeName": "node-0", "containers": [{ "name": "etcd",
            "args": [format!("--advertise-client-urls=http://{name}.prod.svc:2379")] }] },
        "status": { "containerStatuses": [{ "name": "etcd", "ready": waiting.is_none(), "restartCount": 2,
            "image": "x", "imageID": "x", "state": state }] }
    }))
    .unwrap()
}

fn answer(id: &str, name: &str, leader: &str, revision: u64) -> LiveMember {
    LiveMember {
        id: id.to_owned(),
        endpoint: format!("http://{name}.prod.svc:2379"),
        leader: leader.to_owned(),
        version: "3.6.16".to_owned(),
        term: 4,
        revision,
        db_size: 4096,
        quota: Some(8192),
        ..LiveMember::default()
    }
}

fn viewed(pods: &[Pod], live: &LiveAnswer) -> ClusterView {
    let backup: EtcdBackup = serde_json::from_value(json!({
        "apiVersion": "etcd.database.coreos.com/v1beta2", "kind": "EtcdBackup", "metadata": { "name": "nightly" },
        "spec": { "etcdCluster": { "name": "main" }, "storageType": "S3", "backupPolicy": { "schedule": "@daily" } },
        "status": { "succeeded": true, "sha256": "00", "conditions": [
            condition("Complete", "True", "Succeeded", ""),
            condition("Progressing", "True", "Scheduled", "next backup at 03:00") ] }
    }))
    .unwrap();
    let mut other = backup.clone();
    other.spec.etcd_cluster.as_mut().unwrap().name = "other".to_owned();
    let cluster = cluster();
    view(Inputs {
        cluster: &cluster,
        pods,
        backups: &[backup, other],
        live,
    })
}

const A: &str = "main-aaaaaaaaaa";
const B: &str = "main-bbbbbbbbbb";

#[test]
fn member_answers_take_precedence_over_status() {
    let answers = vec![answer("a", A, "b", 200), answer("b", B, "b", 190)];
    let view = viewed(
        &[pod(A, None), pod(B, None)],
        &LiveAnswer::Answers(answers, None),
    );
    assert_eq!(view.source, Source::Members);
    assert_eq!(view.leader.as_deref(), Some(B));
    assert_eq!(view.quota_bytes, 8192);
    assert_eq!(
        (view.members[0].lag, view.members[1].lag),
        (Some(0), Some(10))
    );
    assert_eq!(view.members[0].role.as_deref(), Some("Voter"));
    assert_eq!(view.last_backup.unwrap().behind, Some(100));
}

#[test]
fn member_without_answer_or_leader_is_not_healthy() {
    let answers = vec![answer("a", A, "", 200)];
    let problem = Some("context deadline exceeded".to_owned());
    let pods = [pod(A, None), pod(B, Some("CrashLoopBackOff"))];
    let view = viewed(&pods, &LiveAnswer::Answers(answers, problem));
    assert_eq!(view.healthy_members, 0);
    assert_eq!(view.members[1].pod, "CrashLoopBackOff");
    assert_eq!(
        view.source_problem.as_deref(),
        Some("context deadline exceeded")
    );
}

#[test]
fn reported_status_is_shown_if_members_cannot_be_queried() {
    let failed = LiveAnswer::Failed("forbidden".to_owned());
    let view = viewed(&[pod(A, None)], &failed);
    assert_eq!((view.source, view.healthy_members), (Source::Status, 3));
    assert_eq!(view.leader.as_deref(), Some(A));
    assert_eq!(view.members[1].pod, "Missing");
    let silent = viewed(&[], &LiveAnswer::Answers(Vec::new(), None));
    assert_eq!(silent.source_problem.as_deref(), Some("no member answered"));
}

#[test]
fn status_lists_each_problem_once_and_advice_last() {
    let found = viewed(&[], &LiveAnswer::NotAsked).problems;
    let found: Vec<_> = found
        .iter()
        .map(|one| (one.condition.as_str(), one.advice))
        .collect();
    assert_eq!(found, [("Stalled", false), ("Advisable", true)]);
}

#[test]
fn status_details_show_health_size_backups_and_certificates() {
    let now: Timestamp = "2026-11-26T05:00:00Z".parse().unwrap();
    let answers = vec![answer("a", A, "a", 200), answer("b", B, "a", 190)];
    let live = LiveAnswer::Answers(answers, None);
    let view = viewed(&[pod(A, None), pod(B, None)], &live);
    let text = details(&view, true, now, Paint(false));
    for part in [
        "prod/main: Ready, available, 2 of 3 members healthy, ID 7f",
        "4.0 KiB of 8.0 KiB (50 %)",
        "revision 200",
        "NoSpace on main-bbbbbbbbbb",
        "Secret main-peer-ca (ca.crt): 2026-12-06T00:00:00Z, in 9d",
        "5h ago by EtcdBackup nightly, revision 100 (100 revisions behind), s3://b/k",
        "nightly: Succeeded, checksum verified; next backup at 03:00",
        "defragment a member",
        "the schedule",
        "Stalled NoSpace: compact",
        "Advisable EvenSize: use 3",
        "node-0",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
    assert!(!text.contains('\u{1b}') && !text.contains("Note"), "{text}");
    let failed = LiveAnswer::Failed("forbidden".to_owned());
    let text = details(&viewed(&[], &failed), false, now, Paint(false));
    assert!(
        text.contains(
            "the members could not be queried (forbidden), so the numbers come from the status of the EtcdCluster"
        ),
        "{text}"
    );
}

#[test]
fn status_list_has_one_line_for_each_cluster() {
    let now = "2026-11-26T05:00:00Z".parse().unwrap();
    let views = [
        viewed(&[], &LiveAnswer::NotAsked),
        viewed(&[], &LiveAnswer::NotAsked),
    ];
    let text = list(&views, true, now, Paint(false));
    assert_eq!(text.lines().count(), 3, "{text}");
    for part in [
        "prod",
        "3/3",
        "in 9d",
        "5h ago",
        "2.0 KiB (0 %)",
        "the schedule",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
}

#[test]
fn cluster_status_is_written_as_json() {
    let value = serde_json::to_value(viewed(&[], &LiveAnswer::NotAsked)).unwrap();
    assert_eq!(value["healthyMembers"], 3);
    assert_eq!(value["source"], "status");
    assert_eq!(value["certificate"]["notAfter"], "2026-12-06T00:00:00Z");
    assert_eq!(value["members"][0]["name"], A);
}
