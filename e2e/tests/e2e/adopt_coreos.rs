//! A cluster made by coreos/etcd-operator v0.9.4 is taken over while clients write.
//!
//! The test makes the old form itself: the object with its old status, both Services, and pods as that operator built
//! them (`pkg/util/k8sutil/k8sutil.go`), first a seed and then members that were added one by one. Left out is the init
//! container that waits for DNS, whose image the nodes do not hold; and the probe calls etcdctl without a shell, which
//! the images here have none.

use anyhow::{Context, Result, ensure};
use e2e::objects::{Kind, await_object, field, has_condition, members};
use e2e::wait::Look;
use e2e::{PATIENCE, Sandbox, Writer, scenario, until};
use kube::ResourceExt;
use serde_json::{Value, json};

const NAMES: [&str; 3] = ["c-5zc2k9fz8t", "c-7xwq2m4n6b", "c-d8rk3h9v2s"];

fn peer_url(sandbox: &Sandbox, member: &str) -> String {
    format!("http://{member}.c.{}.svc:2380", sandbox.namespace)
}

fn service(owner: &Value, name: &str, headless: bool) -> Value {
    let port =
        |name: &str, number: u16| json!({ "name": name, "port": number, "targetPort": number });
    let labels = json!({ "app": "etcd", "etcd_cluster": "c" });
    let mut service = json!({
        "apiVersion": "v1", "kind": "Service",
        "metadata": { "name": name, "labels": labels, "ownerReferences": [owner],
            "annotations": { "service.alpha.kubernetes.io/tolerate-unready-endpoints": "true" } },
        "spec": { "selector": labels, "ports": [port("client", 2379)] },
    });
    if headless {
        service["spec"]["clusterIP"] = json!("None");
        service["spec"]["ports"] = json!([port("client", 2379), port("peer", 2380)]);
        // What the annotation meant before Kubernetes 1.21.
        service["spec"]["publishNotReadyAddresses"] = json!(true);
    }
    service
}

/// `together`: the members the pod is told of, itself last; the first of all begins the cluster.
fn pod(sandbox: &Sandbox, owner: &Value, version: &str, together: &[&str]) -> Value {
    let name = together.last().copied().unwrap_or_default();
    let list: Vec<String> = together
        .iter()
        .map(|one| format!("{one}={}", peer_url(sandbox, one)))
        .collect();
    let state = if together.len() == 1 {
        "new"
    } else {
        "existing"
    };
    let client = format!("http://{name}.c.{}.svc:2379", sandbox.namespace);
    let mut command = vec![
        "/usr/local/bin/etcd".to_owned(),
        "--data-dir=/var/etcd/data".to_owned(),
        format!("--name={name}"),
        format!("--initial-advertise-peer-urls={}", peer_url(sandbox, name)),
        "--listen-peer-urls=http://0.0.0.0:2380".to_owned(),
        "--listen-client-urls=http://0.0.0.0:2379".to_owned(),
        format!("--advertise-client-urls={client}"),
        format!("--initial-cluster={}", list.join(",")),
        format!("--initial-cluster-state={state}"),
    ];
    if state == "new" {
        command.push("--initial-cluster-token=9c1f5e8a-53a1-4b1d-8c6e-2f3a4b5c6d7e".to_owned());
    }
    let probe = |delay: u8, timeout: u8, period: u8| {
        json!({ "exec": { "command": ["/usr/local/bin/etcdctl", "endpoint", "status"] },
            "initialDelaySeconds": delay, "timeoutSeconds": timeout, "periodSeconds": period, "failureThreshold": 3 })
    };
    json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": { "name": name, "ownerReferences": [owner], "annotations": { "etcd.version": version },
            "labels": { "app": "etcd", "etcd_node": name, "etcd_cluster": "c" } },
        "spec": {
            "hostname": name, "subdomain": "c", "restartPolicy": "Never", "automountServiceAccountToken": false,
            "volumes": [{ "name": "etcd-data", "emptyDir": {} }],
            "containers": [{ "name": "etcd", "image": format!("quay.io/coreos/etcd:v{version}"), "command": command,
                "env": [{ "name": "ETCDCTL_API", "value": "3" }],
                "ports": [{ "name": "server", "containerPort": 2380 }, { "name": "client", "containerPort": 2379 }],
                "volumeMounts": [{ "name": "etcd-data", "mountPath": "/var/etcd" }],
                "livenessProbe": probe(10, 10, 60), "readinessProbe": probe(1, 5, 5) }],
        },
    })
}

async fn await_ready(sandbox: &Sandbox, count: usize) -> Result<()> {
    until(
        &format!("{count} old pods are ready"),
        PATIENCE,
        async || {
            let pods = sandbox.member_pods("c").await?;
            let is_ready = |pod: &k8s_openapi::api::core::v1::Pod| {
                let statuses = pod
                    .status
                    .as_ref()
                    .and_then(|status| status.container_statuses.as_ref());
                statuses.is_some_and(|all| all.iter().all(|status| status.ready))
            };
            let ready = pods.iter().filter(|pod| is_ready(pod)).count();
            Ok(if ready == count {
                Look::Done(())
            } else {
                Look::NotYet(format!("{ready} ready"))
            })
        },
    )
    .await
}

/// Makes the cluster as the old operator did; returns its object's owner reference.
async fn make_old_cluster(sandbox: &Sandbox, version: &str) -> Result<()> {
    // The old pods name no security context.
    let label = "pod-security.kubernetes.io/enforce=privileged";
    sandbox
        .kubectl(&[
            "label",
            "namespace",
            &sandbox.namespace,
            label,
            "--overwrite",
        ])
        .await?;
    let object = json!({
        "apiVersion": "etcd.database.coreos.com/v1beta2", "kind": "EtcdCluster", "metadata": { "name": "c" },
        "spec": { "size": 3, "version": version, "repository": "quay.io/coreos/etcd" },
    });
    sandbox.apply(&object.to_string()).await?;
    let status = json!({ "status": {
        "phase": "Running", "size": 3, "serviceName": "c-client", "clientPort": 2379, "currentVersion": version,
        "targetVersion": "", "members": { "ready": NAMES },
        "conditions": [{ "type": "Available", "status": "True", "reason": "Cluster available", "message": "",
            "lastUpdateTime": "2019-06-12T08:00:00Z", "lastTransitionTime": "2019-06-12T08:00:00Z" }],
    } });
    let words = [
        "patch",
        "etcdcluster",
        "c",
        "--subresource=status",
        "--type=merge",
        "-p",
    ];
    let status = status.to_string();
    sandbox.kubectl(&[&words[..], &[&status]].concat()).await?;
    let uid = sandbox
        .objects(Kind::EtcdCluster)
        .get("c")
        .await?
        .uid()
        .context("no UID")?;
    let owner = json!({ "apiVersion": "etcd.database.coreos.com/v1beta2", "kind": "EtcdCluster", "name": "c",
        "uid": uid, "controller": true });
    sandbox
        .apply(&service(&owner, "c-client", false).to_string())
        .await?;
    sandbox
        .apply(&service(&owner, "c", true).to_string())
        .await?;
    for count in 1..=NAMES.len() {
        let together = &NAMES[..count];
        if count > 1 {
            let url = format!("--peer-urls={}", peer_url(sandbox, together[count - 1]));
            let add = [
                "exec",
                NAMES[0],
                "--",
                "/usr/local/bin/etcdctl",
                "member",
                "add",
                together[count - 1],
                &url,
            ];
            // etcd takes an addition when its members have been connected for a while.
            until("etcd adds a member", PATIENCE, async || {
                sandbox.kubectl(&add).await?;
                Ok(Look::Done(()))
            })
            .await?;
        }
        sandbox
            .apply(&pod(sandbox, &owner, version, together).to_string())
            .await?;
        await_ready(sandbox, count).await?;
    }
    Ok(())
}

#[tokio::test]
async fn adopt_coreos_takes_a_cluster_over_without_a_failed_write() {
    scenario("adopt_coreos", async |sandbox| {
        // Stopped as the old operator is before this one is installed.
        sandbox
            .kubectl(&["scale", "deployment/etcd-operator", "--replicas=0"])
            .await?;
        until("no operator runs", PATIENCE, async || {
            let pods = sandbox.kubectl(&["get", "pods", "-o", "name"]).await?;
            Ok(
                if pods
                    .lines()
                    .any(|pod| pod.starts_with("pod/etcd-operator-"))
                {
                    Look::NotYet(pods)
                } else {
                    Look::Done(())
                },
            )
        })
        .await?;
        let versions = sandbox.env.etcd_versions.iter();
        let version = { versions }.find(|version| version.starts_with("3.5"));
        let version = version.context("the nodes hold no etcd 3.5")?.clone();
        make_old_cluster(sandbox, &version).await?;
        let writer = Writer::start(sandbox, "c").await?;

        sandbox
            .kubectl(&["scale", "deployment/etcd-operator", "--replicas=1"])
            .await?;
        let clusters = sandbox.objects(Kind::EtcdCluster);
        let seen = await_object(&clusters, "c", "it is recorded", PATIENCE, |object| {
            field(object, "/status/clusterID").is_string()
                && has_condition(object, "Available", "True")
        })
        .await?;
        let id = field(&seen, "/status/clusterID").clone();
        until("every pod is of the new form", PATIENCE * 2, async || {
            let pods = sandbox.member_pods("c").await?;
            let policy = |pod: &k8s_openapi::api::core::v1::Pod| {
                pod.spec
                    .as_ref()
                    .and_then(|spec| spec.restart_policy.clone())
            };
            let new = pods
                .iter()
                .filter(|pod| policy(pod).as_deref() == Some("Always"))
                .count();
            Ok(if new == 3 && pods.len() == 3 {
                Look::Done(())
            } else {
                Look::NotYet(format!("{new} of {} pods", pods.len()))
            })
        })
        .await?;
        let after = sandbox.await_members("c", 3).await?;
        ensure!(
            field(&after, "/status/clusterID") == &id,
            "it is the same cluster"
        );
        let names: Vec<String> = members(&after).into_iter().map(|(name, _)| name).collect();
        ensure!(
            NAMES.iter().all(|old| !names.contains(&(*old).to_owned())),
            "{names:?}"
        );
        writer.await_more(10).await?;
        let tally = writer
            .finish("a cluster of coreos/etcd-operator taken over")
            .await?;
        // A client that tries again for as long as clients do sees nothing, on a busy machine, too.
        ensure!(tally.gap.as_secs_f32() < 10.0, "{tally}");
        Ok(())
    })
    .await;
}
