//! Pods of coreos/etcd-operator v0.9.4 (`pkg/util/k8sutil/k8sutil.go` and `pod_util.go`) in every form: on emptyDir or
//! on a PVC, with or without TLS. The tests check how the operator reads and replaces these pods.

use api::EtcdCluster;
use etcd::KeyHash;
use k8s_openapi::api::core::v1::Pod;
use member::Operators;
use serde_json::{Value, json};

use crate::observe::pods;
use crate::plan::effective::Effective;
use crate::plan::tests::scene::{CLUSTER, Scene, at};
use crate::plan::tests::writes::Write;
use crate::snapshot::{Kept, Observed, Seen, Trouble};

const LETTERS: [&str; 3] = ["a", "b", "c"];
const NAMES: [&str; 3] = ["db-5zc2k9fz8t", "db-7xwq2m4n6b", "db-d8rk3h9v2s"];
const VERSION: &str = "3.5.35";

/// The settings of a cluster of coreos/etcd-operator.
#[derive(Clone, Copy, Default)]
struct Old {
    tls: bool,
    claim: bool,
}

fn spec(old: Old) -> Value {
    let mut spec =
        json!({ "size": 3, "version": VERSION, "pod": { "busyboxImage": "busybox:1.28.0-glibc" } });
    if old.tls {
        spec["TLS"] = json!({ "static": { "member": { "peerSecret": "etcd-peer-tls", "serverSecret": "etcd-server-tls" },
            "operatorSecret": "etcd-client-tls" } });
        spec["memberAddress"] = json!("Pod");
    }
    if old.claim {
        spec["pod"]["persistentVolumeClaimSpec"] = json!({ "storageClassName": "standard",
            "accessModes": ["ReadWriteOnce"], "resources": { "requests": { "storage": "512Mi" } } });
    }
    spec
}

fn cluster(old: Old) -> EtcdCluster {
    let spec = serde_json::from_value(spec(old)).unwrap();
    let mut cluster = EtcdCluster::new("db", spec);
    cluster.metadata.namespace = Some("prod".into());
    cluster.metadata.uid = Some("uid".into());
    cluster
}

/// The pod of a member. `number`: how many members were created before this member.
fn pod(old: Old, number: usize) -> Value {
    let name = NAMES[number];
    let scheme = if old.tls { "https" } else { "http" };
    let url = |name: &str, port: u16| format!("{scheme}://{name}.db.prod.svc:{port}");
    let list: Vec<String> = NAMES[..=number]
        .iter()
        .map(|one| format!("{one}={}", url(one, 2380)))
        .collect();
    let state = if number == 0 { "new" } else { "existing" };
    let mut command = format!(
        "/usr/local/bin/etcd --data-dir=/var/etcd/data --name={name} --initial-advertise-peer-urls={} \
         --listen-peer-urls={scheme}://0.0.0.0:2380 --listen-client-urls={scheme}://0.0.0.0:2379 \
         --advertise-client-urls={} --initial-cluster={} --initial-cluster-state={state}",
        url(name, 2380),
        url(name, 2379),
        list.join(",")
    );
    let mut etcdctl = "ETCDCTL_API=3 etcdctl endpoint status".to_owned();
    let mut volumes = vec![if old.claim {
        json!({ "name": "etcd-data", "persistentVolumeClaim": { "claimName": name } })
    } else {
        json!({ "name": "etcd-data", "emptyDir": {} })
    }];
    let mut mounts = vec![json!({ "name": "etcd-data", "mountPath": "/var/etcd" })];
    if old.tls {
        let peer = "/etc/etcdtls/member/peer-tls";
        let server = "/etc/etcdtls/member/server-tls";
        let client = "/etc/etcdtls/operator/etcd-tls";
        let flags = format!(
            " --peer-client-cert-auth=true --peer-trusted-ca-file={peer}/peer-ca.crt --peer-cert-file={peer}/peer.crt \
             --peer-key-file={peer}/peer.key --client-cert-auth=true --trusted-ca-file={server}/server-ca.crt \
             --cert-file={server}/server.crt --key-file={server}/server.key"
        );
        command.push_str(&flags);
        etcdctl = format!(
            "ETCDCTL_API=3 etcdctl --endpoints=https://localhost:2379 --cert={client}/etcd-client.crt \
             --key={client}/etcd-client.key --cacert={client}/etcd-client-ca.crt endpoint status"
        );
        for (volume, path, secret) in [
            ("member-peer-tls", peer, "etcd-peer-tls"),
            ("member-server-tls", server, "etcd-server-tls"),
            ("etcd-client-tls", client, "etcd-client-tls"),
        ] {
            volumes.push(json!({ "name": volume, "secret": { "secretName": secret } }));
            mounts.push(json!({ "name": volume, "mountPath": path }));
        }
    }
    if number == 0 {
        command += " --initial-cluster-token=9c1f5e8a-53a1-4b1d-8c6e-2f3a4b5c6d7e";
    }
    let words: Vec<&str> = command.split(' ').collect();
    let probe = |delay: u8, timeout: u8, period: u8| {
        json!({ "exec": { "command": ["/bin/sh", "-ec", etcdctl] }, "initialDelaySeconds": delay,
            "timeoutSeconds": timeout, "periodSeconds": period, "failureThreshold": 3 })
    };
    let lookup = format!(
        "TIMEOUT_READY=0\nwhile ( ! nslookup {name}.db.prod.svc )\ndo\n  # If TIMEOUT_READY is 0 we should never time \
         out and exit\n  TIMEOUT_READY=$(( TIMEOUT_READY-1 ))\n  if [ $TIMEOUT_READY -eq 0 ];\n  then\n    echo \
         \"Timed out waiting for DNS entry\"\n    exit 1\n  fi\n  sleep 1\ndone"
    );
    json!({
        "metadata": { "name": name, "namespace": "prod", "uid": format!("pod-{name}"),
            "annotations": { "etcd.version": VERSION },
            "labels": { "app": "etcd", "etcd_node": name, "etcd_cluster": "db" } },
        "spec": {
            "hostname": name, "subdomain": "db", "restartPolicy": "Never", "automountServiceAccountToken": false,
            "initContainers": [{ "name": "check-dns", "image": "busybox:1.28.0-glibc",
                "command": ["/bin/sh", "-c", lookup] }],
            "volumes": volumes,
            "containers": [{ "name": "etcd", "image": format!("quay.io/coreos/etcd:v{VERSION}"), "command": words,
                "ports": [{ "name": "server", "containerPort": 2380 }, { "name": "client", "containerPort": 2379 }],
                "volumeMounts": mounts, "livenessProbe": probe(10, 10, 60), "readinessProbe": probe(1, 5, 5) }],
        },
        "status": { "phase": "Running", "podIP": "10.0.0.7", "conditions": [{ "type": "Ready", "status": "True" }],
            "initContainerStatuses": [{ "name": "check-dns", "ready": true, "restartCount": 0, "image": "",
                "imageID": "", "state": { "terminated": { "exitCode": 0, "reason": "Completed" } } }],
            "containerStatuses": [{ "name": "etcd", "ready": true, "restartCount": 0, "image": "", "imageID": "",
                "state": { "running": { "startedAt": "1970-01-01T00:00:00Z" } } }] },
    })
}

fn seen(old: Old, number: usize) -> crate::snapshot::Pod {
    let pod: Pod = serde_json::from_value(pod(old, number)).unwrap();
    pods::pod(&pod, &cluster(old).spec, true)
}

/// A cluster of coreos/etcd-operator that is not adopted yet.
fn found(old: Old) -> Scene {
    let mut scene = Scene::formed(&LETTERS).version(VERSION);
    if old.claim {
        scene = scene.durable();
    }
    scene.desired =
        crate::desired::desired(&Effective::as_written(cluster(old)), &Operators::default());
    // The volumes of this scene have no size, so the desired state must not request a size.
    scene.desired.claim = None;
    let observed = &mut scene.observed;
    (observed.intent, observed.cluster_id) = (None, None);
    observed.services.clear();
    (observed.shared.headless, observed.shared.client) = (Kept::Drifted, Kept::Drifted);
    observed.shared.budget = Kept::Missing;
    for disk in observed.disks.values_mut() {
        (disk.token, disk.cluster_id, disk.version) = (None, None, None);
    }
    for (number, letter) in LETTERS.into_iter().enumerate() {
        let mut pod = seen(old, number);
        pod.created = at(0);
        observed.pods.insert(letter.into(), pod);
    }
    scene
}

/// The cluster after the adoption: the status has the cluster ID, the pods have annotations and Services, and the
/// operator has compared the members' data.
fn taken_over(old: Old) -> Scene {
    let mut scene = found(old);
    let recorded = scene.writes().into_iter().find_map(|write| match write {
        Write::RecordIntent {
            intent, cluster_id, ..
        } => Some((intent, cluster_id)),
        _ => None,
    });
    let (intent, cluster_id) = recorded.unwrap();
    for letter in LETTERS {
        scene = scene.reserved(letter).marked(letter);
    }
    let Observed {
        pods,
        disks,
        shared,
        hashes,
        ..
    } = &mut scene.observed;
    for letter in LETTERS {
        let hash = KeyHash {
            hash: 7,
            compacted: 0,
        };
        hashes.insert(letter.into(), Seen::Known(Some(hash)));
        let pod = pods.get_mut(letter).unwrap();
        (pod.token, pod.cluster_id) = (Some(intent.token.clone()), cluster_id);
        pod.role = Some(crate::snapshot::Role::Voter);
        if let Some(disk) = disks.get_mut(letter) {
            (disk.token, disk.cluster_id) = (Some(intent.token.clone()), cluster_id);
        }
    }
    (shared.headless, shared.client) = (Kept::AsMade(()), Kept::AsMade(true));
    shared.budget = Kept::AsMade(2);
    (scene.observed.intent, scene.observed.cluster_id) = (Some(intent), cluster_id);
    scene
}

fn every_form() -> [Old; 4] {
    let form = |tls, claim| Old { tls, claim };
    [
        form(false, false),
        form(true, false),
        form(false, true),
        form(true, true),
    ]
}

#[test]
fn observation_parses_member_pod_of_coreos_operator() {
    for old in every_form() {
        let (first, last) = (seen(old, 0), seen(old, 2));
        for pod in [&first, &last] {
            assert_eq!((&pod.token, pod.cluster_id, pod.role), (&None, None, None));
            assert_eq!(pod.version.as_deref(), Some(VERSION));
            assert_eq!(pod.image, format!("quay.io/coreos/etcd:v{VERSION}"));
            assert_eq!(pod.durable, old.claim);
            assert!(pod.ready && pod.running && pod.stays());
            let why = pod.difference.pod.as_deref();
            assert_eq!(why, Some("the pod was created by another operator"));
            assert!(pod.difference.resources.is_none());
        }
        assert!(!first.joins && last.joins);
        assert_eq!(last.initial, NAMES.map(String::from).into());
    }
}

#[test]
fn missing_image_of_dns_init_container_is_reported() {
    let mut waits = pod(Old::default(), 0);
    waits["status"] = json!({ "phase": "Pending", "initContainerStatuses": [{ "name": "check-dns", "ready": false,
        "restartCount": 0, "image": "", "imageID": "",
        "state": { "waiting": { "reason": "ImagePullBackOff", "message": "busybox:1.28.0-glibc" } } }] });
    let waits: Pod = serde_json::from_value(waits).unwrap();
    let waits = pods::pod(&waits, &cluster(Old::default()).spec, true);
    assert!(
        matches!(&waits.trouble, Some(Trouble::Image(text)) if text.contains("busybox")),
        "{:?}",
        waits.trouble
    );
    assert!(!waits.running && waits.stays());
}

#[test]
fn invariant_7_cluster_of_coreos_operator_is_adopted_not_bootstrapped() {
    for old in every_form() {
        let scene = found(old);
        let records = |write: &Write| matches!(write, Write::RecordIntent { cluster_id, .. } if *cluster_id == Some(CLUSTER));
        assert!(scene.writes().iter().any(records));
        assert_eq!(scene.changes(), []);
        assert!(scene.silent().writes().is_empty());
    }
}

/// Invariants 3 and 5: a member without a volume gets a replacement before it is removed. A member on a PVC gets a new
/// pod and keeps its data.
#[test]
fn adopted_members_with_emptydir_are_replaced_and_pods_with_pvc_recreated() {
    for old in every_form() {
        let scene = taken_over(old).drained();
        let writes = scene.writes();
        let deleted: Vec<&str> = writes
            .iter()
            .filter_map(|write| match write {
                Write::DeletePod { member, .. } => Some(member.as_str()),
                _ => None,
            })
            .collect();
        let deletes_disks = |write: &Write| matches!(write, Write::DeleteDisk { .. });
        assert!(!writes.iter().any(deletes_disks), "{writes:?}");
        if old.claim {
            // The pod of `b` is deleted first, because `b` is a follower. The PVC of `b` records the version with which
            // the member restarts.
            assert_eq!(deleted, ["b"], "{writes:?}");
            let notes = |write: &Write| {
                matches!(write, Write::NoteVersion { member, version, .. }
                    if member == "b" && version == VERSION)
            };
            assert!(writes.iter().any(notes), "{writes:?}");
            assert_eq!(scene.changes(), []);
        } else {
            assert!(deleted.is_empty(), "{writes:?}");
            let next = scene.reserved("n").changes();
            assert_eq!(
                next,
                [Write::AddMember {
                    member: "n".into(),
                    learner: true
                }]
            );
        }
    }
}

/// No controller recreates a failed pod of coreos/etcd-operator. The operator recreates it on its PVC.
#[test]
fn failed_pod_of_coreos_operator_is_recreated_on_its_pvc() {
    let old = Old {
        tls: true,
        claim: true,
    };
    let mut scene = taken_over(old).down("b");
    let pod = scene.observed.pods.get_mut("b").unwrap();
    (pod.failed, pod.running, pod.ready) = (true, false, false);
    let writes = scene.writes();
    let ends = |write: &Write| matches!(write, Write::DeletePod { member, .. } if member == "b");
    assert!(writes.iter().any(ends), "{writes:?}");
    assert_eq!(scene.changes(), []);
    let gone = scene.without_pod("b");
    let made = gone.writes().into_iter().find_map(|write| match write {
        Write::CreatePod(start) => Some(start),
        _ => None,
    });
    let made = made.unwrap();
    assert_eq!((made.member.as_str(), made.durable), ("b", true));
    assert_eq!(made.state, crate::plan::State::OnDisk);
    assert_eq!(made.version, VERSION);
}
