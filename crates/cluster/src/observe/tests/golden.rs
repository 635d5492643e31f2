//! The file `crates/cluster/tests/golden/pods.json` contains the pods that the operator builds for fixed specs. If a
//! new build would restart members in these pods, it would also restart the members of every user.
//!
//! After an intended change of the content of pods, update the file (CONTRIBUTING.md):
//!
//! ```sh
//! UPDATE=1 cargo test -p cluster --lib golden
//! ```

use std::fs;
use std::path::PathBuf;

use api::EtcdCluster;
use api::cluster::EtcdClusterSpec;
use api::version::EtcdVersion;
use k8s_openapi::api::core::v1::Pod;
use member::{self, Member, Members, Operators, Role, Start};
use serde_json::{Value, json};

use crate::observe::pods;
use crate::plan::effective::Effective;
use crate::plan::tests::scene::{CLUSTER, Scene, at};
use crate::plan::tests::writes::Write;

const LETTERS: [&str; 3] = ["a", "b", "c"];
const MEMBERS: [&str; 3] = ["db-aaaaaaaaaa", "db-bbbbbbbbbb", "db-cccccccccc"];

/// Specs with and without each setting that changes a pod.
fn cases() -> Vec<(&'static str, Value)> {
    let claim = json!({ "accessModes": ["ReadWriteOnce"], "resources": { "requests": { "storage": "1Gi" } } });
    let tls = json!({ "static": { "member": { "peerSecret": "peer", "serverSecret": "server" },
        "operatorSecret": "operator" } });
    vec![
        ("plain", json!({ "size": 3, "version": "3.6.16" })),
        ("3.4", json!({ "size": 3, "version": "3.4.40" })),
        ("3.5", json!({ "size": 3, "version": "3.5.35" })),
        (
            "on volumes",
            json!({ "size": 3, "version": "3.7.3", "pod": { "persistentVolumeClaimSpec": claim } }),
        ),
        (
            "TLS",
            json!({ "size": 3, "version": "3.6.16", "memberAddress": "Pod", "TLS": tls }),
        ),
        (
            "generated TLS",
            json!({ "size": 3, "version": "3.6.16", "TLS": { "generated": {} } }),
        ),
        (
            "much",
            json!({ "size": 3, "version": "3.6.16", "repository": "registry.local/etcd",
                "etcd": { "quotaBackendBytes": 8_589_934_592_i64, "autoCompactionMode": "periodic",
                    "autoCompactionRetention": "30m", "heartbeatInterval": "200ms" },
                "pod": { "labels": { "team": "a" }, "annotations": { "note": "b" }, "antiAffinity": true,
                    "nodeSelector": { "disk": "fast" }, "extraArgs": ["--log-level=debug"],
                    "etcdEnv": [{ "name": "GOGC", "value": "50" }],
                    "resources": { "requests": { "cpu": "1" }, "limits": { "memory": "1Gi" } },
                    "tolerations": [{ "key": "a", "operator": "Exists" }], "terminationGracePeriodSeconds": 20 } }),
        ),
        (
            "image by digest",
            json!({ "size": 3, "version": "3.6.16", "image": format!("registry.local/etcd@sha256:{}",
                "0123456789abcdef".repeat(4)) }),
        ),
    ]
}

fn cluster(spec: &Value) -> EtcdCluster {
    let spec: EtcdClusterSpec = serde_json::from_value(spec.clone()).unwrap();
    let mut cluster = EtcdCluster::new("db", spec);
    cluster.metadata.namespace = Some("prod".into());
    cluster.metadata.uid = Some("uid".into());
    cluster
}

/// The pods of a bootstrap member, of a joined member, and of a member that restarted on its volume.
fn built(spec: &Value) -> Vec<Pod> {
    let cluster = cluster(spec);
    let id = CLUSTER.to_string();
    let members = Members::of(&cluster, "prod", "token", Some(&id));
    let version = EtcdVersion::parse(&cluster.spec.version).unwrap();
    let first = Start::Bootstrap {
        members: MEMBERS.map(String::from).into(),
    };
    let joins = Start::Join {
        initial_cluster: format!("{0}=http://{0}.prod.svc:2380", MEMBERS[1]),
    };
    let starts = MEMBERS.into_iter().zip([first, joins, Start::OnDisk]);
    let pods = starts.map(|(name, start)| {
        let (version, role) = (&version, Role::Voter);
        let member = Member {
            name,
            version,
            role,
            start,
        };
        member::pod(&members, &member)
    });
    pods.collect()
}

fn golden_file() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/golden/pods.json")
}

fn golden() -> Vec<Value> {
    serde_json::from_str(&fs::read_to_string(golden_file()).unwrap()).unwrap()
}

/// Adds the status of a running pod. The pod lacks the defaults that the API server adds: they make no difference,
/// because the operator compares recorded specs (ADR 14).
fn runs(mut pod: Pod) -> Pod {
    let ready = json!({ "phase": "Running", "podIP": "10.0.0.7",
        "conditions": [{ "type": "Ready", "status": "True" }],
        "containerStatuses": [{ "name": "etcd", "ready": true, "restartCount": 0, "image": "", "imageID": "",
            "state": { "running": { "startedAt": "1970-01-01T00:00:00Z" } } }] });
    pod.status = serde_json::from_value(ready).unwrap();
    pod.metadata.uid = Some("pod".into());
    pod
}

/// A healthy cluster with the given pods. All members have the same data.
fn scene(spec: &Value, made: &[Pod]) -> Scene {
    let cluster = cluster(spec);
    let mut scene = Scene::formed(&LETTERS).version(&cluster.spec.version);
    if cluster.spec.is_durable() {
        scene = scene.durable();
    }
    scene.desired = crate::desired::desired(
        &Effective::as_written(cluster.clone()),
        &Operators::default(),
    );
    // The volumes of this scene have no size, so the desired state must not request a size.
    scene.desired.claim = None;
    for (letter, pod) in LETTERS.into_iter().zip(made) {
        let mut seen = pods::pod(&runs(pod.clone()), &cluster.spec, true);
        seen.created = at(0);
        scene.observed.pods.insert(letter.into(), seen);
        let hash = etcd::KeyHash {
            hash: 7,
            compacted: 0,
        };
        let hash = crate::snapshot::Seen::Known(Some(hash));
        scene.observed.hashes.insert(letter.into(), hash);
    }
    scene
}

/// The planned writes that clients or members could notice.
fn disturbs(scene: &Scene) -> Vec<Write> {
    let plan = scene.drained();
    let quiet = |write: &Write| {
        matches!(
            write,
            Write::PatchMetadata { .. } | Write::NoteVersion { .. } | Write::ApplyBudget { .. }
        )
    };
    let writes = scene.writes().into_iter().chain(plan.writes());
    let all = writes.chain(plan.changes());
    all.filter(|write| !quiet(write)).collect()
}

/// If this test fails, this build restarts the members of every cluster whose pods the previous build created.
#[test]
fn members_in_pods_of_previous_build_are_not_restarted() {
    let golden = golden();
    assert_eq!(golden.len(), cases().len());
    for case in golden {
        let made: Vec<Pod> = serde_json::from_value(case["pods"].clone()).unwrap();
        assert_eq!(made.len(), 3);
        let scene = scene(&case["spec"], &made);
        let what = &case["case"];
        assert_eq!(scene.plan().problems, [], "{what}");
        assert_eq!(disturbs(&scene), [], "{what}");
        assert_eq!(scene.plan().asks, None, "{what}");
    }
}

/// Checks that `disturbs` detects a restart.
#[test]
fn members_in_pods_of_previous_build_restart_after_spec_change() {
    let mut case = golden().swap_remove(3);
    let made: Vec<Pod> = serde_json::from_value(case["pods"].take()).unwrap();
    assert_eq!(disturbs(&scene(&case["spec"], &made)), []);
    case["spec"]["etcd"] = json!({ "heartbeatInterval": "200ms" });
    let writes = disturbs(&scene(&case["spec"], &made));
    let restarts = |write: &Write| matches!(write, Write::DeletePod { .. });
    assert!(writes.iter().any(restarts), "{writes:?}");
}

/// If this test fails, new members get other pods than the running members have. Before you update the file for an
/// intended change, the other tests of this module must pass with the old file.
#[test]
fn built_pods_match_golden_file() {
    let all = cases()
        .into_iter()
        .map(|(case, spec)| json!({ "case": case, "spec": spec, "pods": built(&spec) }));
    let all: Vec<Value> = all.collect();
    if std::env::var_os("UPDATE").is_some() {
        let text = serde_json::to_string_pretty(&all).unwrap();
        fs::write(golden_file(), text + "\n").unwrap();
    }
    for (golden, built) in golden().iter().zip(&all) {
        assert_eq!(
            golden, built,
            "the built pods differ from the file; if this is intended, run UPDATE=1 cargo test -p cluster --lib golden"
        );
    }
}
