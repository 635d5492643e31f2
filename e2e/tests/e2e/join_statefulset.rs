//! The etcd of a plain StatefulSet is moved into an EtcdCluster by the procedure of `docs/adoption.md`, while clients
//! write through a Service that leads to both.

use anyhow::{Result, ensure};
use e2e::objects::{Kind, await_object, field, members};
use e2e::{PATIENCE, Sandbox, Writer, scenario};
use serde_json::{Value, json};

use crate::fixtures::newest_version;

fn statefulset(namespace: &str, version: &str) -> Value {
    let url = |name: &str, port: u16| format!("http://{name}.old.{namespace}.svc:{port}");
    let list: Vec<String> = (0..3)
        .map(|at| format!("old-{at}={}", url(&format!("old-{at}"), 2380)))
        .collect();
    let command = vec![
        "/usr/local/bin/etcd".to_owned(),
        "--name=$(POD)".to_owned(),
        "--data-dir=/data/etcd".to_owned(),
        "--listen-peer-urls=http://0.0.0.0:2380".to_owned(),
        "--listen-client-urls=http://0.0.0.0:2379".to_owned(),
        format!("--initial-advertise-peer-urls={}", url("$(POD)", 2380)),
        format!("--advertise-client-urls={}", url("$(POD)", 2379)),
        format!("--initial-cluster={}", list.join(",")),
        "--initial-cluster-state=new".to_owned(),
    ];
    json!({
        "apiVersion": "apps/v1", "kind": "StatefulSet", "metadata": { "name": "old" },
        "spec": {
            "serviceName": "old", "replicas": 3, "podManagementPolicy": "Parallel",
            "selector": { "matchLabels": { "set": "old" } },
            "template": {
                "metadata": { "labels": { "set": "old", "serves": "app" } },
                "spec": {
                    "securityContext": { "runAsNonRoot": true, "runAsUser": 65532, "fsGroup": 65532,
                        "seccompProfile": { "type": "RuntimeDefault" } },
                    "volumes": [{ "name": "data", "emptyDir": {} }],
                    "containers": [{
                        "name": "etcd", "image": format!("quay.io/coreos/etcd:v{version}"), "command": command,
                        "env": [{ "name": "POD", "valueFrom": { "fieldRef": { "fieldPath": "metadata.name" } } }],
                        "securityContext": { "allowPrivilegeEscalation": false, "capabilities": { "drop": ["ALL"] } },
                        "volumeMounts": [{ "name": "data", "mountPath": "/data" }],
                        "readinessProbe": { "httpGet": { "path": "/health", "port": 2379 }, "periodSeconds": 1,
                            "failureThreshold": 1 },
                    }],
                },
            },
        },
    })
}

async fn make_old(sandbox: &Sandbox, version: &str) -> Result<()> {
    let headless = json!({
        "apiVersion": "v1", "kind": "Service", "metadata": { "name": "old" },
        "spec": { "clusterIP": "None", "publishNotReadyAddresses": true, "selector": { "set": "old" },
            "ports": [{ "name": "client", "port": 2379 }, { "name": "peer", "port": 2380 }] },
    });
    sandbox.apply(&headless.to_string()).await?;
    let service = json!({
        "apiVersion": "v1", "kind": "Service", "metadata": { "name": "app-client" },
        "spec": { "selector": { "serves": "app" }, "ports": [{ "name": "client", "port": 2379 }] },
    });
    sandbox.apply(&service.to_string()).await?;
    sandbox
        .apply(&statefulset(&sandbox.namespace, version).to_string())
        .await?;
    sandbox
        .kubectl(&["rollout", "status", "statefulset/old", "--timeout=120s"])
        .await
        .map(drop)
}

#[tokio::test]
async fn join_statefulset_moves_its_etcd_in_without_a_lost_write() {
    scenario("join_statefulset", async |sandbox| {
        let (version, namespace) = (newest_version(&sandbox.env)?, &sandbox.namespace);
        make_old(sandbox, &version).await?;
        let writer = Writer::start(sandbox, "app").await?;

        let urls: Vec<String> =
            (0..3).map(|at| format!("http://old-{at}.old.{namespace}.svc:2379")).collect();
        let object = json!({
            "apiVersion": "etcd.database.coreos.com/v1beta2", "kind": "EtcdCluster",
            "metadata": { "name": "c", "annotations": { "etcd.database.coreos.com/join": urls.join(",") } },
            "spec": { "size": 3, "version": version, "pod": { "labels": { "serves": "app" } } },
        });
        sandbox.apply(&object.to_string()).await?;
        let clusters = sandbox.objects(Kind::EtcdCluster);
        let seen = await_object(&clusters, "c", "the cluster is recorded", PATIENCE, |object| {
            field(object, "/status/clusterID").is_string()
        })
        .await?;
        ensure!(field(&seen, "/status/bootstrap/members").as_array().is_none_or(Vec::is_empty), "it began here");
        let after = sandbox.await_members("c", 3).await?;
        ensure!(field(&after, "/status/clusterID") == field(&seen, "/status/clusterID"), "it is the same cluster");
        let names: Vec<String> = members(&after).into_iter().map(|(name, _)| name).collect();
        ensure!(names.iter().all(|name| name.starts_with("c-")), "{names:?}");

        sandbox.kubectl(&["delete", "statefulset,service", "old"]).await?;
        sandbox.kubectl(&["annotate", "etcdcluster", "c", "etcd.database.coreos.com/join-"]).await?;
        sandbox.await_members("c", 3).await?;
        writer.await_more(10).await?;
        let tally = writer.finish("a StatefulSet's etcd moved in").await?;
        ensure!(tally.gap.as_secs_f32() < 8.0, "{tally}");
        Ok(())
    })
    .await;
}
