//! An EtcdCluster joins the etcd cluster of a StatefulSet as described in `docs/adoption.md`, while a client writes.
//! The client's Service selects old and new members.

use anyhow::{Result, ensure};
use e2e::leaks::cluster_scenario_without_leaks;
use e2e::objects::{Kind, await_object, field, members};
use e2e::{DEADLINE, Sandbox, Writer, plugin};
use serde_json::{Value, json};

use crate::certificates::{client, make_secrets};
use crate::fixtures::newest_version;

/// Whether the StatefulSet uses TLS. With TLS, certificates are in the Secrets `peer` and `server`, and etcd requires
/// client certificates.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Form {
    Plain,
    Tls,
}

impl Form {
    fn scheme(self) -> &'static str {
        match self {
            Self::Plain => "http",
            Self::Tls => "https",
        }
    }

    fn flags(self) -> Vec<String> {
        if self == Self::Plain {
            return Vec::new();
        }
        let flags = [
            "client-cert-auth=true",
            "cert-file=/tls/server/server.crt",
            "key-file=/tls/server/server.key",
            "trusted-ca-file=/tls/server/server-ca.crt",
            "peer-client-cert-auth=true",
            "peer-cert-file=/tls/peer/peer.crt",
            "peer-key-file=/tls/peer/peer.key",
            "peer-trusted-ca-file=/tls/peer/peer-ca.crt",
        ];
        flags.map(|flag| format!("--{flag}")).into()
    }
}

fn statefulset(namespace: &str, version: &str, form: Form) -> Value {
    let scheme = form.scheme();
    let url = |name: &str, port: u16| format!("{scheme}://{name}.old.{namespace}.svc:{port}");
    let list: Vec<String> = (0..3)
        .map(|at| format!("old-{at}={}", url(&format!("old-{at}"), 2380)))
        .collect();
    let mut command = vec![
        "/usr/local/bin/etcd".to_owned(),
        "--name=$(POD)".to_owned(),
        "--data-dir=/data/etcd".to_owned(),
        format!("--listen-peer-urls={scheme}://0.0.0.0:2380"),
        format!("--listen-client-urls={scheme}://0.0.0.0:2379"),
        "--listen-metrics-urls=http://0.0.0.0:2381".to_owned(),
        format!("--initial-advertise-peer-urls={}", url("$(POD)", 2380)),
        format!("--advertise-client-urls={}", url("$(POD)", 2379)),
        format!("--initial-cluster={}", list.join(",")),
        "--initial-cluster-state=new".to_owned(),
    ];
    command.extend(form.flags());
    let mut volumes = vec![json!({ "name": "data", "emptyDir": {} })];
    let mut mounts = vec![json!({ "name": "data", "mountPath": "/data" })];
    let secrets: &[&str] = if form == Form::Tls {
        &["peer", "server"]
    } else {
        &[]
    };
    for secret in secrets {
        volumes.push(json!({ "name": secret, "secret": { "secretName": secret } }));
        mounts.push(json!({ "name": secret, "mountPath": format!("/tls/{secret}") }));
    }
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
                    "volumes": volumes,
                    "containers": [{
                        "name": "etcd", "image": format!("quay.io/coreos/etcd:v{version}"), "command": command,
                        "env": [{ "name": "POD", "valueFrom": { "fieldRef": { "fieldPath": "metadata.name" } } }],
                        "securityContext": { "allowPrivilegeEscalation": false, "capabilities": { "drop": ["ALL"] } },
                        "volumeMounts": mounts,
                        "readinessProbe": { "httpGet": { "path": "/health", "port": 2381 }, "periodSeconds": 1,
                            "failureThreshold": 1 },
                    }],
                },
            },
        },
    })
}

async fn make_old(sandbox: &Sandbox, version: &str, form: Form) -> Result<()> {
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
        .apply(&statefulset(&sandbox.namespace, version, form).to_string())
        .await?;
    sandbox
        .kubectl(&["rollout", "status", "statefulset/old", "--timeout=300s"])
        .await
        .map(drop)
}

/// Joins new members to the StatefulSet's cluster, and then deletes the StatefulSet.
async fn join(sandbox: &Sandbox, version: &str, form: Form, writer: Writer) -> Result<()> {
    let (namespace, scheme) = (&sandbox.namespace, form.scheme());
    let url = |at| format!("{scheme}://old-{at}.old.{namespace}.svc:2379");
    let urls: Vec<String> = (0..3).map(url).collect();
    let mut object = json!({
        "apiVersion": "etcd.database.coreos.com/v1beta2", "kind": "EtcdCluster",
        "metadata": { "name": "c", "annotations": { "etcd.database.coreos.com/join": urls.join(",") } },
        "spec": { "size": 3, "version": version, "pod": { "labels": { "serves": "app" } } },
    });
    let clusters = sandbox.objects(Kind::EtcdCluster);
    if form == Form::Tls {
        // The spec has no peer Secret, but the old members use TLS between peers. The operator must not join until
        // the spec is corrected.
        object["spec"]["TLS"] = json!({ "static": { "operatorSecret": "operator",
            "member": { "serverSecret": "server" } } });
        sandbox.apply(&object.to_string()).await?;
        let refusal = ["JoinRefused", "spec.TLS.static.member.peerSecret"];
        sandbox
            .await_event(Kind::EtcdCluster, "c", &refusal)
            .await?;
        let refused = clusters.get("c").await?;
        ensure!(
            field(&refused, "/status/clusterID").is_null(),
            "the operator joined with a wrong spec"
        );
        object["spec"]["TLS"]["static"]["member"]["peerSecret"] = json!("peer");
        sandbox.apply(&object.to_string()).await?;
    } else {
        let file = std::env::temp_dir().join(format!("{namespace}-join.json"));
        std::fs::write(&file, object.to_string())?;
        let path = file.to_string_lossy();
        plugin::run(sandbox, &["join", "c", "--file", &path, "--yes"]).await?;
        std::fs::remove_file(&file)?;
    }
    let seen = await_object(
        &clusters,
        "c",
        "the cluster ID is recorded",
        DEADLINE,
        |object| field(object, "/status/clusterID").is_string(),
    )
    .await?;
    ensure!(
        field(&seen, "/status/bootstrap/members")
            .as_array()
            .is_none_or(Vec::is_empty),
        "the operator bootstrapped a cluster"
    );
    plugin::run(sandbox, &["join", "c", "--wait", "--timeout", "10m"]).await?;
    let after = sandbox.await_members("c", 3).await?;
    ensure!(
        field(&after, "/status/clusterID") == field(&seen, "/status/clusterID"),
        "the cluster ID changed"
    );
    let names: Vec<String> = members(&after).into_iter().map(|(name, _)| name).collect();
    ensure!(names.iter().all(|name| name.starts_with("c-")), "{names:?}");

    sandbox
        .kubectl(&["delete", "statefulset,service", "old"])
        .await?;
    plugin::run(sandbox, &["join", "c", "--finish", "--yes"]).await?;
    sandbox.await_members("c", 3).await?;
    writer.await_more(10).await?;
    writer
        .finish("join of a StatefulSet's etcd")
        .await
        .map(drop)
}

/// Old and new members have certificates of the same CA. The certificates contain each wildcard with and without the
/// cluster domain: etcd asks DNS for the names of a connecting peer's IP address, and these names include the cluster
/// domain.
#[tokio::test]
async fn cluster_joins_statefulset_with_tls_without_lost_writes() {
    cluster_scenario_without_leaks("join_statefulset_tls", async |sandbox| {
        let (version, namespace) = (newest_version(&sandbox.env)?, &sandbox.namespace);
        let domains = ["", ".cluster.local"];
        let names = domains.map(|domain| {
            [
                format!("*.{namespace}.svc{domain}"),
                format!("*.old.{namespace}.svc{domain}"),
            ]
        });
        let authority = make_secrets(sandbox, &names.concat(), false).await?;
        make_old(sandbox, &version, Form::Tls).await?;
        let identity = client(&authority, sandbox, "app")?;
        let writer = Writer::start_tls(sandbox, "app", &identity).await?;
        join(sandbox, &version, Form::Tls, writer).await
    })
    .await;
}

mod full {
    use e2e::cluster_scenario;

    use super::*;

    #[tokio::test]
    async fn cluster_joins_statefulset_without_lost_writes() {
        cluster_scenario("join_statefulset", async |sandbox| {
            let version = newest_version(&sandbox.env)?;
            make_old(sandbox, &version, Form::Plain).await?;
            let writer = Writer::start(sandbox, "app").await?;
            join(sandbox, &version, Form::Plain, writer).await
        })
        .await;
    }
}
