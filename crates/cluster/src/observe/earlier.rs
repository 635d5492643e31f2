//! Pods as earlier builds made them, kept in `crates/cluster/tests/pods`, one file for each build: today's operator
//! restarts none of their members.
//!
//! A build that makes pods otherwise than the one before adds its own file before it is given away, and no file is ever
//! changed (CONTRIBUTING.md):
//!
//! ```sh
//! GOLDEN=0.2.0 cargo test -p cluster --lib earlier
//! ```

use std::fs;
use std::path::PathBuf;

use api::EtcdCluster;
use api::cluster::EtcdClusterSpec;
use api::version::EtcdVersion;
use k8s_openapi::api::core::v1::Pod;
use runtime::member::{self, Member, Members, Role, Start};
use serde_json::{Value, json};

use super::pods;
use crate::plan::tests::scene::{CLUSTER, Scene, at};
use crate::write::Write;

const LETTERS: [&str; 3] = ["a", "b", "c"];
const MEMBERS: [&str; 3] = ["db-aaaaaaaaaa", "db-bbbbbbbbbb", "db-cccccccccc"];

/// What users say of pods, in several forms.
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
    ]
}

fn cluster(spec: &Value) -> EtcdCluster {
    let spec: EtcdClusterSpec = serde_json::from_value(spec.clone()).unwrap();
    let mut cluster = EtcdCluster::new("db", spec);
    cluster.metadata.namespace = Some("prod".into());
    cluster.metadata.uid = Some("uid".into());
    cluster
}

/// What today's build makes: a first member, one that joined, and one that came back on its volume.
fn made_today(spec: &Value) -> Vec<Pod> {
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

fn directory() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/pods")
}

/// What the API server adds while they run is in none of the files: the operator compares words (ADR 14).
fn runs(mut pod: Pod) -> Pod {
    let ready = json!({ "phase": "Running", "podIP": "10.0.0.7",
        "conditions": [{ "type": "Ready", "status": "True" }],
        "containerStatuses": [{ "name": "etcd", "ready": true, "restartCount": 0, "image": "", "imageID": "",
            "state": { "running": { "startedAt": "1970-01-01T00:00:00Z" } } }] });
    pod.status = serde_json::from_value(ready).unwrap();
    pod.metadata.uid = Some("pod".into());
    pod
}

/// A healthy cluster of these pods, whose members hold the same data.
fn scene(spec: &Value, made: &[Pod]) -> Scene {
    let cluster = cluster(spec);
    let mut scene = Scene::formed(&LETTERS).version(&cluster.spec.version);
    if cluster.spec.is_durable() {
        scene = scene.durable();
    }
    scene.desired = crate::desired::desired(&cluster);
    // The scene's volumes say nothing of their size.
    scene.desired.claim = None;
    for (letter, pod) in LETTERS.into_iter().zip(made) {
        let mut seen = pods::pod(&runs(pod.clone()), &cluster.spec, true);
        seen.created = at(0);
        scene.observed.pods.insert(letter.into(), seen);
        let hash = etcd::KeyHash {
            hash: 7,
            compacted: 0,
        };
        let hash = crate::observed::Seen::Known(Some(hash));
        scene.observed.hashes.insert(letter.into(), hash);
    }
    scene
}

/// What would be done about them that clients or members could notice.
fn disturbs(scene: &Scene) -> Vec<Write> {
    let plan = scene.led_aside();
    let quiet = |write: &Write| {
        matches!(
            write,
            Write::PatchMetadata { .. } | Write::ApplyBudget { .. }
        )
    };
    let writes = scene.writes().into_iter().chain(plan.writes());
    let all = writes.chain(plan.changes());
    all.filter(|write| !quiet(write)).collect()
}

#[test]
fn no_member_of_an_earlier_build_is_restarted() {
    let mut read = 0;
    for file in fs::read_dir(directory()).unwrap() {
        let path = file.unwrap().path();
        let text = fs::read_to_string(&path).unwrap();
        let golden: Vec<Value> = serde_json::from_str(&text).unwrap();
        for case in golden {
            let made: Vec<Pod> = serde_json::from_value(case["pods"].clone()).unwrap();
            assert_eq!(made.len(), 3);
            let scene = scene(&case["spec"], &made);
            let what = format!("{} {}", path.display(), case["case"]);
            assert_eq!(scene.plan().problems, [], "{what}");
            assert_eq!(disturbs(&scene), [], "{what}");
            assert_eq!(scene.plan().asks, None, "{what}");
            read += 1;
        }
    }
    assert!(read > 0, "there are files");
}

/// The test above would see it.
#[test]
fn pods_for_other_words_are_restarted() {
    let (_, mut spec) = cases().swap_remove(3);
    let made = made_today(&spec);
    assert_eq!(disturbs(&scene(&spec, &made)), []);
    spec["etcd"] = json!({ "heartbeatInterval": "200ms" });
    let writes = disturbs(&scene(&spec, &made));
    assert!(
        writes
            .iter()
            .any(|write| matches!(write, Write::DeletePod { .. })),
        "{writes:?}"
    );
}

/// Writes the file of today's build where `GOLDEN` names it.
#[test]
fn the_pods_of_today_are_kept_under_the_name_of_their_build() {
    let Ok(build) = std::env::var("GOLDEN") else {
        return;
    };
    let path = directory().join(format!("{build}.json"));
    assert!(!path.exists(), "what was given away is not changed");
    let all = cases()
        .into_iter()
        .map(|(case, spec)| json!({ "case": case, "spec": spec, "pods": made_today(&spec) }));
    let text = serde_json::to_string_pretty(&all.collect::<Vec<_>>()).unwrap();
    fs::write(path, text + "\n").unwrap();
}
