//! Tests of the fields of a recorded spec that the operator refuses.

use api::EtcdRestore;
use api::manifest::BackupManifest;
use api::names::VOLUME_TOOLS;
use api::storage::StorageBlock;
use api::version::EtcdVersion;
use serde_json::{Value, json};

use super::*;
use crate::plan::target::spec_to_restore;
use crate::reason::Reason;

fn pod(field: &str, value: &Value) -> Value {
    json!({ "pod": { field: value } })
}

/// Specs with one dangerous field each, and the name of this field.
fn dangerous() -> Vec<(Value, &'static str)> {
    let rows = containers_and_volumes()
        .into_iter()
        .chain(security_contexts())
        .chain(arguments_and_variables());
    let in_pod = rows.map(|(field, value)| {
        let name: &'static str = format!("spec.pod.{field}").leak();
        (pod(field, &value), name)
    });
    let image = json!({ "repository": "registry.example/etcd" });
    let apparmor = "container.apparmor.security.beta.kubernetes.io/grpc-proxy";
    let proxy = json!({ "grpcProxy": { "annotations": { apparmor: "unconfined" } } });
    let pinned = |name: &str| {
        let image = format!("{name}@sha256:{}", "0".repeat(64));
        (json!({ "image": image }), "spec.image")
    };
    let pinned = [
        "registry.example/etcd",
        "quay.io/coreos/etcd2",
        "quay.io/coreos/etcd:1/x",
    ]
    .map(pinned);
    in_pod
        .chain([
            (image, "spec.repository"),
            (proxy, "spec.grpcProxy.annotations"),
        ])
        .chain(pinned)
        .collect()
}

fn containers_and_volumes() -> Vec<(&'static str, Value)> {
    let container = json!([{ "name": "more", "image": "registry.example/tool:1" }]);
    let volume = |kind: &str, content: Value| json!([{ "name": "more", kind: content }]);
    let token = json!({ "sources": [{ "serviceAccountToken": { "path": "token" } }] });
    vec![
        ("sidecars", container.clone()),
        ("initContainers", container),
        ("volumes", volume("hostPath", json!({ "path": "/" }))),
        ("volumes", volume("secret", json!({ "secretName": "s" }))),
        ("volumes", volume("projected", token)),
        (
            "volumes",
            volume("persistentVolumeClaim", json!({ "claimName": "c" })),
        ),
        ("volumes", volume("csi", json!({ "driver": "d" }))),
        (
            "volumeMounts",
            json!([{ "name": "restore-encryption", "mountPath": "/keys" }]),
        ),
        (
            "volumes",
            volume("nfs", json!({ "server": "s", "path": "/" })),
        ),
        ("serviceAccountName", json!("admin")),
    ]
}

fn security_contexts() -> Vec<(&'static str, Value)> {
    vec![
        ("securityContext", json!({ "runAsUser": 0 })),
        ("securityContext", json!({ "runAsNonRoot": false })),
        // This security context sets no user. The image would then determine the user, which may be root.
        ("securityContext", json!({ "fsGroup": 2000 })),
        (
            "securityContext",
            json!({ "runAsUser": 9000, "sysctls": [{ "name": "kernel.shm_rmid_forced", "value": "0" }] }),
        ),
        (
            "securityContext",
            json!({ "runAsUser": 9000, "seccompProfile": { "type": "Unconfined" } }),
        ),
        (
            "securityContext",
            json!({ "runAsUser": 9000, "windowsOptions": { "hostProcess": true } }),
        ),
        ("containerSecurityContext", json!({ "privileged": true })),
        (
            "containerSecurityContext",
            json!({ "allowPrivilegeEscalation": true }),
        ),
        (
            "containerSecurityContext",
            json!({ "capabilities": { "add": ["SYS_ADMIN"] } }),
        ),
        ("containerSecurityContext", json!({ "runAsUser": 0 })),
        (
            "containerSecurityContext",
            json!({ "procMount": "Unmasked" }),
        ),
        (
            "containerSecurityContext",
            json!({ "appArmorProfile": { "type": "Unconfined" } }),
        ),
    ]
}

fn arguments_and_variables() -> Vec<(&'static str, Value)> {
    let env = |name: &str, value: Value| {
        let mut variable = json!({ "name": name });
        let key = if value.is_string() {
            "value"
        } else {
            "valueFrom"
        };
        variable[key] = value;
        json!([variable])
    };
    vec![
        (
            "annotations",
            json!({ "container.apparmor.security.beta.kubernetes.io/etcd": "unconfined" }),
        ),
        (
            "extraArgs",
            json!(["--auth-token=jwt,pub-key=/keys/a.pem,priv-key=/keys/b.pem,sign-method=RS256"]),
        ),
        ("extraArgs", json!(["--client-crl-file=/etc/crl"])),
        ("extraArgs", json!(["--log-outputs=/host/file"])),
        (
            "extraArgs",
            json!(["--experimental-distributed-tracing-address=example.com:4317"]),
        ),
        (
            "etcdEnv",
            env("ETCD_PEER_CLIENT_CERT_FILE", json!("/etc/shadow")),
        ),
        ("etcdEnv", env("ETCD_AUTH_TOKEN", json!("jwt,pub-key=a"))),
        (
            "etcdEnv",
            env(
                "GOGC",
                json!({ "secretKeyRef": { "name": "s", "key": "k" } }),
            ),
        ),
        (
            "etcdEnv",
            env("HTTPS_PROXY", json!("http://proxy.example:3128")),
        ),
        ("etcdEnv", env("LD_PRELOAD", json!("/data/library.so"))),
    ]
}

fn harmless() -> Value {
    json!({
        "size": 5, "version": "3.6.16", "repository": "quay.io/coreos/etcd", "memberAddress": "Pod",
        "image": format!("quay.io/coreos/etcd@sha256:{}", "0".repeat(64)),
        "TLS": { "generated": {} }, "auth": { "secret": "root" }, "services": { "client": { "type": "NodePort" } },
        "etcd": { "quotaBackendBytes": 1_073_741_824_i64 },
        "backup": { "storageType": "S3", "s3": { "path": "b/k", "awsSecret": "aws" },
                    "backupPolicy": { "backupIntervalInSecond": 600 } },
        "pod": {
            "labels": { "team": "a" },
            "annotations": { "prometheus.io/scrape": "true" },
            "nodeSelector": { "disk": "fast" },
            "antiAffinity": true,
            "tolerations": [{ "key": "etcd", "operator": "Exists" }],
            "resources": { "requests": { "cpu": "1" } },
            "etcdEnv": [{ "name": "ETCD_LOG_LEVEL", "value": "debug" }, { "name": "GOMEMLIMIT", "value": "1GiB" }],
            "extraArgs": ["--log-level=debug", "--pre-vote=true"],
            "persistentVolumeClaimSpec": {
                "accessModes": ["ReadWriteOnce"], "storageClassName": "fast",
                "resources": { "requests": { "storage": "1Gi" } },
            },
            "securityContext": { "runAsUser": 9000, "runAsNonRoot": true, "fsGroup": 9000,
                                 "seccompProfile": { "type": "RuntimeDefault" } },
            "containerSecurityContext": { "allowPrivilegeEscalation": false, "capabilities": { "drop": ["ALL"] },
                                          "privileged": false },
            "imagePullSecrets": [{ "name": "registry" }],
            "priorityClassName": "high",
            "terminationGracePeriodSeconds": 60,
            "volumes": [{ "name": "scratch", "emptyDir": {} }, { "name": "more", "configMap": { "name": "c" } }],
            "volumeMounts": [{ "name": "scratch", "mountPath": "/scratch" }],
            "ClusterDomain": ".cluster.local",
        },
        "grpcProxy": { "replicas": 3, "labels": { "team": "a" }, "annotations": { "team": "a" } },
    })
}

fn spec(value: &Value) -> EtcdClusterSpec {
    serde_json::from_value(value.clone()).unwrap()
}

fn manifest(recorded: &Value) -> BackupManifest {
    serde_json::from_value(json!({
        "formatVersion": 1, "etcdVersion": "3.5.0", "clusterID": "ab", "revision": 7, "size": 1, "sha256": "",
        "compression": "none", "createdAt": "2026-01-01T00:00:00Z",
        "cluster": { "name": "old", "namespace": "prod", "spec": recorded },
    }))
    .unwrap()
}

fn restore(template: Option<&Value>) -> EtcdRestore {
    let template = template.map(|spec| json!({ "spec": spec }));
    let target = json!({ "name": "main", "template": template });
    let spec = json!({ "etcdCluster": target, "backup": { "name": "b" } });
    EtcdRestore::new("again", serde_json::from_value(spec).unwrap())
}

#[test]
fn invariant_27_each_dangerous_part_of_recorded_spec_is_refused() {
    for (recorded, field) in dangerous() {
        assert_eq!(refused_fields(&spec(&recorded)), [field], "{recorded}");
        let refused = spec_to_restore(&restore(None), None, Some(&manifest(&recorded)));
        let trouble = refused.unwrap_err();
        assert_eq!(trouble.reason, Reason::RecordedSpecRefused, "{recorded}");
        for part in [field, "spec.etcdCluster.template"] {
            assert!(trouble.message.contains(part), "{}", trouble.message);
        }
    }
}

#[test]
fn invariant_27_harmless_recorded_spec_is_accepted() {
    for recorded in [json!({}), harmless()] {
        assert_eq!(refused_fields(&spec(&recorded)), Vec::<&str>::new());
        let accepted = spec_to_restore(&restore(None), None, Some(&manifest(&recorded)));
        assert_eq!(accepted, Ok(spec(&recorded)));
    }
    // The recorded spec sets a security context only for the container. The pod gets the operator's default, so the
    // spec is accepted.
    let container = pod(
        "containerSecurityContext",
        &json!({ "readOnlyRootFilesystem": true }),
    );
    assert_eq!(refused_fields(&spec(&container)), Vec::<&str>::new());
}

/// The pod of a seed has volumes with the credentials of the store and the keys of the backup.
#[test]
fn invariant_27_recorded_spec_mounts_only_its_own_volumes() {
    let block = json!({ "s3": { "path": "b/k", "awsSecret": "aws", "caSecret": "ca" } });
    let block: StorageBlock = serde_json::from_value(block).unwrap();
    let version = EtcdVersion::parse("3.6.16").unwrap();
    let source = member::Source::store(&block, &version, None).encrypted("keys");
    assert_eq!(source.volumes.len(), 3);
    let names = source.volumes.into_iter().map(|volume| volume.name);
    let mounting = |name: &str, volumes: Value| {
        let mounts = json!([{ "name": name, "mountPath": "/more" }]);
        let recorded = json!({ "pod": { "volumeMounts": mounts, "volumes": volumes } });
        refused_fields(&spec(&recorded))
    };
    for name in names.chain([VOLUME_TOOLS.to_owned()]) {
        assert_eq!(
            mounting(&name, json!([])),
            ["spec.pod.volumeMounts"],
            "{name}"
        );
    }
    let own = json!([{ "name": "more", "emptyDir": {} }]);
    for (name, volumes) in [("more", own), (VOLUME_DATA, json!([]))] {
        assert_eq!(mounting(name, volumes), Vec::<&str>::new());
    }
}

/// A user has written the template and the spec of the existing cluster, so all fields are accepted.
#[test]
fn invariant_27_template_and_spec_of_existing_cluster_are_accepted() {
    for (recorded, _) in dangerous() {
        let manifest = manifest(&recorded);
        let repeated = restore(Some(&recorded));
        let created = spec_to_restore(&repeated, None, Some(&manifest));
        let validated = api::restore::validate(&repeated);
        assert_eq!(validated, [], "{recorded}");
        assert_eq!(created, Ok(spec(&recorded)));
        let existing = spec(&recorded);
        let in_place = spec_to_restore(&restore(None), Some(&existing), Some(&manifest));
        assert_eq!(in_place, Ok(existing));
    }
}
