//! The operator adopts a cluster of coreos/etcd-operator v0.9.4, while a client writes.
//!
//! The test creates the objects that the old operator created (`pkg/util/k8sutil/k8sutil.go`): the EtcdCluster with
//! its old status, two Services, and three pods that join one by one. The pods differ from the original in these
//! points:
//!
//! - An original pod has an init container that waits for DNS with the busybox image, which the nodes do not have.
//!   Here, only the third pod has an init container. It runs the etcd image with a command that exits at once.
//! - The probes call etcdctl without a shell, because the images contain no shell.
//! - Pods with volumes run as UID 65532, the user of the pods that replace them. The volumes of the testbed ignore
//!   `fsGroup`, so a pod with another user could not read the data (`docs/adoption.md`).
//!
//! Unit tests cover pods with the original init container: `observe/tests/coreos.rs` in the crate `cluster`.

use anyhow::{Context, Result, ensure};
use e2e::objects::{Kind, await_object, field, has_condition, members};
use e2e::wait::Poll;
use e2e::{DEADLINE, Sandbox, Writer, cluster_scenario, until};
use kube::ResourceExt;
use serde_json::{Value, json};

use crate::certificates::{client, make_secrets, pod_dns_names};

const NAMES: [&str; 3] = ["c-5zc2k9fz8t", "c-7xwq2m4n6b", "c-d8rk3h9v2s"];

/// Whether the old cluster has TLS or volumes.
#[derive(Clone, Copy)]
pub(crate) enum Form {
    Plain,
    Tls,
    Volumes,
}

impl Form {
    fn scheme(self) -> &'static str {
        if matches!(self, Self::Tls) {
            "https"
        } else {
            "http"
        }
    }

    /// The etcdctl command of the probes.
    fn etcdctl(self) -> Vec<String> {
        let mut words = vec!["/usr/local/bin/etcdctl".to_owned()];
        if matches!(self, Self::Tls) {
            words.push("--endpoints=https://localhost:2379".to_owned());
            for (flag, file) in [
                ("cert", "etcd-client.crt"),
                ("key", "etcd-client.key"),
                ("cacert", "etcd-client-ca.crt"),
            ] {
                words.push(format!("--{flag}={CLIENT}/{file}"));
            }
        }
        words
    }

    fn spec(self, version: &str) -> Value {
        let mut spec =
            json!({ "size": 3, "version": version, "repository": "quay.io/coreos/etcd" });
        match self {
            Self::Plain => {}
            Self::Tls => {
                spec["TLS"] = json!({ "static": { "operatorSecret": "operator",
                    "member": { "peerSecret": "peer", "serverSecret": "server" } } });
            }
            Self::Volumes => {
                spec["pod"] =
                    json!({ "persistentVolumeClaimSpec": claim(), "securityContext": user() });
            }
        }
        spec
    }
}

const PEER: &str = "/etc/etcdtls/member/peer-tls";
const SERVER: &str = "/etc/etcdtls/member/server-tls";
const CLIENT: &str = "/etc/etcdtls/operator/etcd-tls";

fn claim() -> Value {
    json!({ "accessModes": ["ReadWriteOnce"], "resources": { "requests": { "storage": "64Mi" } } })
}

fn user() -> Value {
    json!({ "runAsNonRoot": true, "runAsUser": 65532, "runAsGroup": 65532, "fsGroup": 65532 })
}

fn peer_url(sandbox: &Sandbox, form: Form, member: &str) -> String {
    format!(
        "{}://{member}.c.{}.svc:2380",
        form.scheme(),
        sandbox.namespace
    )
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
        // Kubernetes 1.21 and later publish unready addresses only because of this field. Earlier versions also read
        // the annotation above.
        service["spec"]["publishNotReadyAddresses"] = json!(true);
    }
    service
}

/// A pod of the old cluster. `initial_members` are the names in `--initial-cluster`, and the last name is the member of
/// this pod. A single name means that the pod bootstraps the cluster.
fn pod(
    sandbox: &Sandbox,
    owner: &Value,
    (form, version): (Form, &str),
    initial_members: &[&str],
) -> Value {
    let name = initial_members.last().copied().unwrap_or_default();
    let list: Vec<String> = initial_members
        .iter()
        .map(|one| format!("{one}={}", peer_url(sandbox, form, one)))
        .collect();
    let state = if initial_members.len() == 1 {
        "new"
    } else {
        "existing"
    };
    let scheme = form.scheme();
    let client = format!("{scheme}://{name}.c.{}.svc:2379", sandbox.namespace);
    let mut command = vec![
        "/usr/local/bin/etcd".to_owned(),
        "--data-dir=/var/etcd/data".to_owned(),
        format!("--name={name}"),
        format!(
            "--initial-advertise-peer-urls={}",
            peer_url(sandbox, form, name)
        ),
        format!("--listen-peer-urls={scheme}://0.0.0.0:2380"),
        format!("--listen-client-urls={scheme}://0.0.0.0:2379"),
        format!("--advertise-client-urls={client}"),
        format!("--initial-cluster={}", list.join(",")),
        format!("--initial-cluster-state={state}"),
    ];
    if state == "new" {
        command.push("--initial-cluster-token=9c1f5e8a-53a1-4b1d-8c6e-2f3a4b5c6d7e".to_owned());
    }
    let mut volumes = vec![json!({ "name": "etcd-data", "emptyDir": {} })];
    let mut mounts = vec![json!({ "name": "etcd-data", "mountPath": "/var/etcd" })];
    match form {
        Form::Plain => {}
        Form::Volumes => {
            volumes = vec![
                json!({ "name": "etcd-data", "persistentVolumeClaim": { "claimName": name } }),
            ];
        }
        Form::Tls => {
            command.extend([
                "--peer-client-cert-auth=true".to_owned(),
                format!("--peer-trusted-ca-file={PEER}/peer-ca.crt"),
                format!("--peer-cert-file={PEER}/peer.crt"),
                format!("--peer-key-file={PEER}/peer.key"),
                "--client-cert-auth=true".to_owned(),
                format!("--trusted-ca-file={SERVER}/server-ca.crt"),
                format!("--cert-file={SERVER}/server.crt"),
                format!("--key-file={SERVER}/server.key"),
            ]);
            for (volume, path, secret) in [
                ("member-peer-tls", PEER, "peer"),
                ("member-server-tls", SERVER, "server"),
                ("etcd-client-tls", CLIENT, "operator"),
            ] {
                volumes.push(json!({ "name": volume, "secret": { "secretName": secret } }));
                mounts.push(json!({ "name": volume, "mountPath": path }));
            }
        }
    }
    let image = format!("quay.io/coreos/etcd:v{version}");
    let mut init_containers = json!([]);
    if initial_members.len() == NAMES.len() {
        init_containers = json!([{ "name": "check-dns", "image": image, "command": ["/usr/local/bin/etcdctl", "version"],
            "env": [{ "name": "ETCDCTL_API", "value": "3" }] }]);
    }
    let mut probe_command = form.etcdctl();
    probe_command.extend(["endpoint", "status"].map(String::from));
    let probe = |delay: u8, timeout: u8, period: u8| {
        json!({ "exec": { "command": probe_command },
            "initialDelaySeconds": delay, "timeoutSeconds": timeout, "periodSeconds": period, "failureThreshold": 3 })
    };
    json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": { "name": name, "ownerReferences": [owner], "annotations": { "etcd.version": version },
            "labels": { "app": "etcd", "etcd_node": name, "etcd_cluster": "c" } },
        "spec": {
            "hostname": name, "subdomain": "c", "automountServiceAccountToken": false,
            // With TLS, the existing members reject a new member until DNS has the name of the new member. A rejected
            // member exits, so its container must be restarted. The init container of the old operator waited for DNS,
            // but the init container of this test does not.
            "restartPolicy": if matches!(form, Form::Tls) { "OnFailure" } else { "Never" },
            "volumes": volumes,
            "securityContext": if matches!(form, Form::Volumes) { user() } else { Value::Null },
            "initContainers": init_containers,
            "containers": [{ "name": "etcd", "image": image, "command": command,
                "env": [{ "name": "ETCDCTL_API", "value": "3" }],
                "ports": [{ "name": "server", "containerPort": 2380 }, { "name": "client", "containerPort": 2379 }],
                "volumeMounts": mounts,
                "livenessProbe": probe(10, 10, 60), "readinessProbe": probe(1, 5, 5) }],
        },
    })
}

async fn await_ready(sandbox: &Sandbox, count: usize) -> Result<()> {
    until(
        &format!("{count} old pods are ready"),
        DEADLINE,
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
                Poll::Done(())
            } else {
                Poll::NotYet(format!("{ready} ready"))
            })
        },
    )
    .await
}

/// Creates all objects of the old cluster, and waits until its members are ready.
async fn make_old_cluster(sandbox: &Sandbox, form: Form, version: &str) -> Result<()> {
    // The namespace gets the privileged Pod Security Standard, because the old pods lack security settings that the
    // restricted standard requires.
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
        "spec": form.spec(version),
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
        let initial_members = &NAMES[..count];
        if count > 1 {
            let url = format!(
                "--peer-urls={}",
                peer_url(sandbox, form, initial_members[count - 1])
            );
            let etcdctl = form.etcdctl();
            let words = etcdctl.iter().map(String::as_str);
            let mut add = vec!["exec", NAMES[0], "--"];
            add.extend(words);
            add.extend(["member", "add", initial_members[count - 1], &url]);
            // The request is repeated, because etcd refuses to add a member until the existing members have been
            // connected for some seconds.
            until("etcd adds a member", DEADLINE, async || {
                match sandbox.kubectl(&add).await {
                    // The member was added by an earlier request whose response was lost.
                    Err(error) if error.to_string().contains("Peer URLs already exists") => {}
                    outcome => drop(outcome?),
                }
                Ok(Poll::Done(()))
            })
            .await?;
        }
        if matches!(form, Form::Volumes) {
            let name = initial_members[count - 1];
            let claim = json!({
                "apiVersion": "v1", "kind": "PersistentVolumeClaim",
                "metadata": { "name": name, "ownerReferences": [owner],
                    "labels": { "app": "etcd", "etcd_cluster": "c" } },
                "spec": claim(),
            });
            sandbox.apply(&claim.to_string()).await?;
        }
        let pod = pod(sandbox, &owner, (form, version), initial_members);
        sandbox.apply(&pod.to_string()).await?;
        await_ready(sandbox, count).await?;
    }
    Ok(())
}

/// The members have no volumes, so new members replace them. Invariant 20: the new members start with the TLS Secrets
/// of the old cluster.
#[tokio::test]
async fn coreos_cluster_with_tls_is_adopted() {
    cluster_scenario("adopt_coreos_tls", async |sandbox| {
        adopt(sandbox, Form::Tls).await
    })
    .await;
}

/// Invariant 5: every member keeps its identity and its PVC.
#[tokio::test]
async fn coreos_cluster_on_volumes_is_adopted() {
    cluster_scenario("adopt_coreos_volumes", async |sandbox| {
        adopt(sandbox, Form::Volumes).await
    })
    .await;
}

/// Adopts a cluster of etcd 3.5, and checks that no acknowledged write is lost.
async fn adopt(sandbox: &Sandbox, form: Form) -> Result<()> {
    let version = sandbox.env.newest_of("3.5")?;
    let writer = adopt_version(sandbox, form, &version).await?;
    writer
        .finish("adoption of a coreos/etcd-operator cluster")
        .await
        .map(drop)
}

/// Creates an old cluster, starts the operator, and waits until the adoption is complete. Returns the client that
/// wrote during the adoption.
pub(crate) async fn adopt_version(sandbox: &Sandbox, form: Form, version: &str) -> Result<Writer> {
    // The operator, which the sandbox has already installed, is stopped until the old cluster exists, as in a real
    // migration. coreos/etcd-operator itself does not run in this test.
    sandbox
        .kubectl(&["scale", "deployment/etcd-operator", "--replicas=0"])
        .await?;
    until("no operator runs", DEADLINE, async || {
        let pods = sandbox.kubectl(&["get", "pods", "-o", "name"]).await?;
        let runs = |pod: &str| pod.starts_with("pod/etcd-operator-");
        Ok(if pods.lines().any(runs) {
            Poll::NotYet(pods)
        } else {
            Poll::Done(())
        })
    })
    .await?;
    let writer = if matches!(form, Form::Tls) {
        // As the old operator required, the certificate contains the names of the pods with the cluster domain too. A
        // member with TLS asks DNS for the names of a peer's IP address. These names contain the cluster domain, and
        // one of them must match a name in the certificate of the peer (`isHostInDNS` in etcd's
        // `client/pkg/transport`).
        let mut names = pod_dns_names(sandbox, "c");
        names.push(format!("*.c.{}.svc.cluster.local", sandbox.namespace));
        let authority = make_secrets(sandbox, &names, false).await?;
        make_old_cluster(sandbox, form, version).await?;
        let identity = client(&authority, sandbox, "c")?;
        Writer::start_tls(sandbox, "c", &identity).await?
    } else {
        make_old_cluster(sandbox, form, version).await?;
        Writer::start(sandbox, "c").await?
    };

    sandbox
        .kubectl(&["scale", "deployment/etcd-operator", "--replicas=1"])
        .await?;
    let clusters = sandbox.objects(Kind::EtcdCluster);
    let seen = await_object(
        &clusters,
        "c",
        "the cluster ID is recorded",
        DEADLINE,
        |object| {
            field(object, "/status/clusterID").is_string()
                && has_condition(object, "Available", "True")
        },
    )
    .await?;
    let id = field(&seen, "/status/clusterID").clone();
    until("the operator built each pod", DEADLINE * 2, async || {
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
            Poll::Done(())
        } else {
            Poll::NotYet(format!("{new} of {} pods", pods.len()))
        })
    })
    .await?;
    let after = sandbox.await_members("c", 3).await?;
    ensure!(
        field(&after, "/status/clusterID") == &id,
        "the cluster ID changed"
    );
    let names: Vec<String> = members(&after).into_iter().map(|(name, _)| name).collect();
    let stays = matches!(form, Form::Volumes);
    ensure!(
        NAMES
            .iter()
            .all(|old| names.contains(&(*old).to_owned()) == stays),
        "{names:?}"
    );
    writer.await_more(10).await?;
    Ok(writer)
}

mod full {
    use super::*;

    #[tokio::test]
    async fn coreos_cluster_without_tls_or_volumes_is_adopted() {
        cluster_scenario("adopt_coreos", async |sandbox| {
            adopt(sandbox, Form::Plain).await
        })
        .await;
    }
}
