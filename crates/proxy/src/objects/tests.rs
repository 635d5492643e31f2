//! Tests that the objects of the proxies have the settings of the spec.

use serde_json::{Value, json};

use super::*;
use crate::plan::{Plan, plan};

fn cluster(spec: &Value) -> EtcdCluster {
    serde_json::from_value(json!({
        "apiVersion": "etcd.database.coreos.com/v1beta2", "kind": "EtcdCluster",
        "metadata": { "name": "db", "namespace": "prod", "uid": "cluster-uid" },
        "spec": spec,
        "status": {
            "clusterID": "abc", "currentVersion": "3.6.16", "bootstrap": { "token": "db-1", "members": [] },
        },
    }))
    .unwrap()
}

fn of(cluster: &EtcdCluster) -> Objects {
    let Plan::Run(run) = plan(cluster) else {
        panic!("{:?}", plan(cluster));
    };
    let secrets = SecretNames::of(cluster, run.proxy);
    objects(
        cluster,
        &run,
        secrets.as_ref().map(|names| (names, "digest")),
    )
}

fn built(spec: &Value) -> Objects {
    of(&cluster(spec))
}

fn deployment_of(spec: &Value) -> Value {
    serde_json::to_value(built(spec).deployment).unwrap()
}

/// If a release changes this Deployment, the update of the operator replaces the proxies of all clusters, and
/// disconnects their clients.
#[test]
fn deployment_of_default_spec_is_stable() {
    let labels = json!({ "app": "etcd-grpc-proxy", "etcd_cluster": "db" });
    let mut with_token = labels.clone();
    with_token["etcd.database.coreos.com/token"] = json!("db-1");
    let spread = |key: &str| {
        json!({
            "maxSkew": 1, "topologyKey": key, "whenUnsatisfiable": "ScheduleAnyway",
            "labelSelector": { "matchLabels": labels },
        })
    };
    let alias = |ip: &str| json!({ "ip": ip, "hostnames": ["db-proxy.prod.svc"] });
    let port =
        |name: &str, port: u16| json!({ "name": name, "containerPort": port, "protocol": "TCP" });
    let container = json!({
        "name": "grpc-proxy",
        "image": "quay.io/coreos/etcd:v3.6.16",
        "command": ["/usr/local/bin/etcd"],
        "args": [
            "grpc-proxy", "start", "--endpoints=http://db-client.prod.svc:2379", "--listen-addr=0.0.0.0:2379",
            "--metrics-addr=http://0.0.0.0:2381", "--advertise-client-url=http://db-proxy.prod.svc:2379",
            "--max-send-bytes=2097152", "--dial-keepalive-time=10s", "--dial-keepalive-timeout=5s",
        ],
        "ports": [port("client", 2379), port("metrics", 2381)],
        "readinessProbe": {
            "httpGet": { "path": "/health", "port": 2381 },
            "periodSeconds": 2, "timeoutSeconds": 3, "failureThreshold": 3, "successThreshold": 1,
        },
        "lifecycle": { "preStop": { "sleep": { "seconds": 5 } } },
        "securityContext": {
            "allowPrivilegeEscalation": false, "capabilities": { "drop": ["ALL"] }, "readOnlyRootFilesystem": true,
        },
        "terminationMessagePolicy": "FallbackToLogsOnError",
    });
    let pod = json!({
        "containers": [container],
        "hostAliases": [alias("127.0.0.1"), alias("::1")],
        "automountServiceAccountToken": false,
        "enableServiceLinks": false,
        "securityContext": {
            "runAsNonRoot": true, "runAsUser": 65532, "runAsGroup": 65532, "fsGroup": 65532,
            "fsGroupChangePolicy": "OnRootMismatch", "seccompProfile": { "type": "RuntimeDefault" },
        },
        "topologySpreadConstraints": [spread("kubernetes.io/hostname"), spread("topology.kubernetes.io/zone")],
    });
    let expected = json!({
        "apiVersion": "apps/v1", "kind": "Deployment",
        "metadata": {
            "name": "db-proxy", "namespace": "prod", "labels": labels,
            "ownerReferences": [{
                "apiVersion": "etcd.database.coreos.com/v1beta2", "kind": "EtcdCluster", "name": "db",
                "uid": "cluster-uid", "controller": true,
            }],
        },
        "spec": {
            "replicas": 2,
            "revisionHistoryLimit": 2,
            "selector": { "matchLabels": labels },
            "strategy": { "type": "RollingUpdate", "rollingUpdate": { "maxSurge": 1, "maxUnavailable": 0 } },
            "template": { "metadata": { "labels": with_token }, "spec": pod },
        },
    });
    assert_eq!(deployment_of(&json!({ "grpcProxy": {} })), expected);
}

#[test]
fn proxy_pods_have_settings_of_spec() {
    let spec = json!({
        "repository": "registry.local/etcd",
        "grpcProxy": {
            "replicas": 5,
            "resources": { "limits": { "memory": "128Mi" } },
            "labels": { "team": "a", "app": "other" },
            "annotations": { "note": "b" },
            "nodeSelector": { "disk": "fast" },
            "tolerations": [{ "key": "a", "operator": "Exists" }],
            "priorityClassName": "high",
        },
        "pod": { "imagePullSecrets": [{ "name": "pull" }], "imagePullPolicy": "Always" },
    });
    let deployment = deployment_of(&spec);
    assert_eq!(deployment["spec"]["replicas"], 5);
    let template = &deployment["spec"]["template"];
    let labels = &template["metadata"]["labels"];
    assert_eq!(
        (&labels["team"], &labels["app"]),
        (&json!("a"), &json!("etcd-grpc-proxy"))
    );
    assert_eq!(template["metadata"]["annotations"], json!({ "note": "b" }));
    let pod = &template["spec"];
    assert_eq!(pod["nodeSelector"], json!({ "disk": "fast" }));
    assert_eq!(pod["tolerations"][0]["key"], "a");
    assert_eq!(pod["priorityClassName"], "high");
    assert_eq!(pod["imagePullSecrets"], json!([{ "name": "pull" }]));
    let container = &pod["containers"][0];
    assert_eq!(container["image"], "registry.local/etcd:v3.6.16");
    assert_eq!(container["imagePullPolicy"], "Always");
    assert_eq!(container["resources"]["limits"]["memory"], "128Mi");
}

#[test]
fn proxies_mount_only_their_own_certificates() {
    let secrets = |spec: &Value| {
        let deployment = deployment_of(spec);
        let template = &deployment["spec"]["template"];
        assert_eq!(
            template["metadata"]["annotations"]["etcd.database.coreos.com/certificates"],
            "digest"
        );
        let mounts = template["spec"]["containers"][0]["volumeMounts"]
            .as_array()
            .unwrap();
        let paths: Vec<&str> = mounts
            .iter()
            .filter(|mount| mount["readOnly"] == true)
            .filter_map(|mount| mount["mountPath"].as_str())
            .collect();
        assert_eq!(
            paths,
            [
                "/etc/etcdtls/proxy/client-tls",
                "/etc/etcdtls/proxy/server-tls"
            ]
        );
        let volumes = template["spec"]["volumes"].as_array().unwrap();
        let keys = json!([
            { "key": "tls.crt", "path": "tls.crt" },
            { "key": "tls.key", "path": "tls.key" },
            { "key": "ca.crt", "path": "ca.crt" },
        ]);
        assert!(
            volumes
                .iter()
                .all(|volume| volume["secret"]["items"] == keys)
        );
        let names = volumes
            .iter()
            .map(|volume| volume["secret"]["secretName"].clone());
        names.collect::<Vec<_>>()
    };
    let generated = json!({ "TLS": { "generated": {} }, "grpcProxy": {} });
    assert_eq!(secrets(&generated), ["db-proxy-tls", "db-proxy-tls"]);
    let issued =
        json!({ "TLS": { "certManager": { "issuerRef": { "name": "ca" } } }, "grpcProxy": {} });
    assert_eq!(secrets(&issued), ["db-proxy-certs", "db-proxy-certs"]);
    let own = json!({
        "TLS": { "static": { "member": { "serverSecret": "s" }, "operatorSecret": "o" } },
        "grpcProxy": { "clientSecret": "to-members", "serverSecret": "to-clients" },
    });
    assert_eq!(secrets(&own), ["to-members", "to-clients"]);
}

#[test]
fn hibernated_cluster_has_no_proxies() {
    let claim = json!({ "resources": { "requests": { "storage": "1Gi" } } });
    let pod = json!({ "persistentVolumeClaimSpec": claim });
    let spec = json!({ "hibernate": true, "pod": pod, "grpcProxy": { "replicas": 3 } });
    assert_eq!(deployment_of(&spec)["spec"]["replicas"], 0);
}

#[test]
fn readiness_probe_of_proxy_depends_on_authentication() {
    let probe = |auth: Value| {
        let spec = json!({ "auth": auth, "grpcProxy": {} });
        deployment_of(&spec)["spec"]["template"]["spec"]["containers"][0]["readinessProbe"].clone()
    };
    for open in [json!(null), json!({ "secret": "root", "enabled": false })] {
        assert_eq!(probe(open)["httpGet"]["path"], "/health");
    }
    for closed in [
        json!({ "secret": "root" }),
        json!({ "secret": "root", "enabled": true }),
    ] {
        assert_eq!(probe(closed)["tcpSocket"]["port"], 2379);
    }
}

/// Invariant 17: the Service selects no proxy that may have cached answers of an earlier etcd cluster.
#[test]
fn invariant_17_service_selects_only_proxies_of_current_etcd_cluster() {
    let mut restored = cluster(&json!({ "grpcProxy": {} }));
    let before = of(&restored);
    let status = restored.status.as_mut().unwrap();
    status.bootstrap.as_mut().unwrap().token = "restore-db-2".to_owned();
    let after = of(&restored);
    let selector = |objects: &Objects| objects.service.spec.clone().unwrap().selector.unwrap();
    let labels = |objects: &Objects| {
        let spec = objects.deployment.spec.clone().unwrap();
        spec.template.metadata.unwrap().labels.unwrap()
    };
    let selects = |service: &Objects, pods: &Objects| {
        let labels = labels(pods);
        selector(service)
            .iter()
            .all(|(key, value)| labels.get(key) == Some(value))
    };
    assert!(selects(&before, &before) && selects(&after, &after));
    assert!(!selects(&after, &before));
    let fixed = |objects: &Objects| objects.deployment.spec.clone().unwrap().selector;
    assert_eq!(
        fixed(&before),
        fixed(&after),
        "the selector of a Deployment is immutable"
    );
}

#[test]
fn budget_allows_eviction_of_one_proxy() {
    let budget = built(&json!({ "grpcProxy": {} }))
        .budget
        .unwrap()
        .spec
        .unwrap();
    assert_eq!(budget.max_unavailable, Some(IntOrString::Int(1)));
    let labels = budget.selector.unwrap().match_labels.unwrap();
    assert_eq!(labels["app"], "etcd-grpc-proxy");
    let without = json!({ "grpcProxy": {}, "podDisruptionBudget": { "enabled": false } });
    assert_eq!(built(&without).budget, None);
}

#[test]
fn network_policy_admits_only_clients_of_members() {
    assert_eq!(built(&json!({ "grpcProxy": {} })).policy, None);
    let team = json!({ "namespaceSelector": { "matchLabels": { "team": "a" } } });
    let ingress = |access: Value| {
        let policy = built(&json!({ "grpcProxy": {}, "networkPolicy": access })).policy;
        serde_json::to_value(policy).unwrap()["spec"]["ingress"].clone()
    };
    let limited = ingress(json!({ "clients": [team] }));
    assert_eq!(limited[0]["from"], json!([team]));
    assert_eq!(limited[0]["ports"][0]["port"], 2379);
    assert_eq!(
        limited[1]["from"],
        json!(null),
        "the metrics port must admit all sources"
    );
    let open = ingress(json!({ "metrics": [team] }));
    assert_eq!(open[0]["from"], json!([{ "podSelector": {} }]));
    assert_eq!(open[1]["from"], json!([team]));
}

/// The selectors of the members' objects require the label `app=etcd`.
#[test]
fn proxies_never_match_selectors_of_members() {
    let objects = built(&json!({ "grpcProxy": { "labels": { "app": "etcd" } } }));
    let template = objects.deployment.spec.unwrap().template;
    let labels = template.metadata.unwrap().labels.unwrap();
    assert_ne!(labels["app"], names::APP);
    for metadata in [objects.deployment.metadata, objects.service.metadata] {
        assert_ne!(metadata.labels.unwrap()["app"], names::APP);
    }
}

#[test]
fn digest_of_objects_changes_with_spec() {
    let before = built(&json!({ "grpcProxy": {} })).digest();
    assert_eq!(built(&json!({ "grpcProxy": {} })).digest(), before);
    for changed in [
        json!({ "grpcProxy": { "replicas": 3 } }),
        json!({ "grpcProxy": { "serviceName": "front" } }),
        json!({ "grpcProxy": {}, "networkPolicy": {} }),
    ] {
        assert_ne!(built(&changed).digest(), before, "{changed}");
    }
}
