//! The kinds of clusters that the benchmark measures, and their manifests.

use std::time::Duration;

use anyhow::{Context, Result};
use e2e::objects::{Kind, field, ready_members};
use e2e::wait::Poll;
use e2e::{Sandbox, until};
use k8s_openapi::api::core::v1::Pod;
use kube::api::ListParams;
use serde::Serialize;
use serde_json::json;

use crate::cluster::TIMEOUT;

/// A kind of cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Subject {
    /// A StatefulSet that starts its pods in parallel. `--initial-cluster` lists all members, and each member has a
    /// volume.
    StatefulSet,
    /// An EtcdCluster without volumes. If a pod is deleted, the operator replaces its member by a new member.
    Operator,
    /// An EtcdCluster with volumes. If a pod is deleted, its member restarts on its volume.
    OperatorDurable,
}

pub(crate) const SUBJECTS: [Subject; 3] = [
    Subject::StatefulSet,
    Subject::Operator,
    Subject::OperatorDurable,
];

const DURABLE: &str = "  pod:\n    persistentVolumeClaimSpec:\n      accessModes: [ReadWriteOnce]\n      resources: \
                       {requests: {storage: 64Mi}}\n";

impl Subject {
    pub(crate) fn short(self) -> &'static str {
        match self {
            Self::StatefulSet => "sts",
            Self::Operator => "op",
            Self::OperatorDurable => "disk",
        }
    }

    /// The manifest of a cluster with `size` members.
    pub(crate) fn manifest(self, sandbox: &Sandbox, name: &str, size: usize) -> Result<String> {
        let version = sandbox
            .env
            .etcd_versions
            .last()
            .context("E2E_ETCD_VERSIONS is empty")?;
        let durable = if self == Self::OperatorDurable {
            DURABLE
        } else {
            ""
        };
        Ok(match self {
            Self::StatefulSet => stateful_set(name, version, size),
            Self::Operator | Self::OperatorDurable => format!(
                "apiVersion: etcd.database.coreos.com/v1beta2\nkind: EtcdCluster\nmetadata: {{name: {name}}}\n\
                 spec:\n  size: {size}\n  version: \"{version}\"\n{durable}"
            ),
        })
    }

    /// Waits until etcd and the operator have no pending work that could slow down the next measurement.
    pub(crate) async fn await_idle(self, sandbox: &Sandbox, name: &str, size: usize) -> Result<()> {
        if self != Self::StatefulSet {
            sandbox.await_members(name, size).await?;
            let object = sandbox.objects(Kind::EtcdCluster).get(name).await?;
            anyhow::ensure!(
                ready_members(&object).len() == size,
                "{}",
                field(&object, "/status")
            );
        }
        // etcd refuses to add a member until all voters have been connected for five seconds.
        tokio::time::sleep(Duration::from_secs(6)).await;
        Ok(())
    }

    /// Deletes the cluster and waits until its pods are deleted.
    pub(crate) async fn remove(self, sandbox: &Sandbox, name: &str) -> Result<()> {
        let object = match self {
            Self::StatefulSet => format!("statefulset/{name}"),
            Self::Operator | Self::OperatorDurable => format!("etcdcluster/{name}"),
        };
        let selector = format!("etcd_cluster={name}");
        sandbox.kubectl(&["delete", &object]).await?;
        sandbox
            .kubectl(&["delete", "pvc", "-l", &selector, "--wait=false"])
            .await?;
        until("all pods are deleted", TIMEOUT, async || {
            let pods = sandbox.api::<Pod>();
            let list = pods.list(&ListParams::default().labels(&selector)).await?;
            Ok(if list.items.is_empty() {
                Poll::Done(())
            } else {
                Poll::NotYet(format!("{}", list.items.len()))
            })
        })
        .await
    }
}

/// The reference: a StatefulSet with the image, the probes and the pod security context of the operator's pods.
fn stateful_set(name: &str, version: &str, size: usize) -> String {
    let peers: Vec<String> = (0..size)
        .map(|i| format!("{name}-{i}=http://{name}-{i}.{name}:2380"))
        .collect();
    let labels = json!({"app": "etcd", "etcd_cluster": name});
    let service = json!({
        "apiVersion": "v1", "kind": "Service", "metadata": {"name": name, "labels": labels},
        "spec": {"clusterIP": "None", "publishNotReadyAddresses": true, "selector": labels,
                 "ports": [{"name": "client", "port": 2379}, {"name": "peer", "port": 2380}]},
    });
    // This Service has the name of the client Service that the operator would create, so that the clients of the
    // benchmark find it.
    let client = json!({
        "apiVersion": "v1", "kind": "Service", "metadata": {"name": format!("{name}-client"), "labels": labels},
        "spec": {"selector": labels, "ports": [{"name": "client", "port": 2379}]},
    });
    let set = json!({
        "apiVersion": "apps/v1", "kind": "StatefulSet", "metadata": {"name": name, "labels": labels},
        "spec": {
            "serviceName": name, "replicas": size, "podManagementPolicy": "Parallel",
            "selector": {"matchLabels": labels},
            "persistentVolumeClaimRetentionPolicy": {"whenDeleted": "Delete"},
            "volumeClaimTemplates": [{"metadata": {"name": "data", "labels": labels},
                "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "64Mi"}}}}],
            "template": {"metadata": {"labels": labels}, "spec": {
                "automountServiceAccountToken": false,
                "securityContext": {"runAsNonRoot": true, "runAsUser": 65532, "runAsGroup": 65532, "fsGroup": 65532,
                                    "seccompProfile": {"type": "RuntimeDefault"}},
                "containers": [{
                    "name": "etcd", "image": format!("quay.io/coreos/etcd:v{version}"),
                    "imagePullPolicy": "IfNotPresent",
                    "env": [{"name": "POD", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}],
                    "command": ["/usr/local/bin/etcd", "--name=$(POD)", "--data-dir=/var/etcd/data",
                        format!("--initial-advertise-peer-urls=http://$(POD).{name}:2380"),
                        "--listen-peer-urls=http://0.0.0.0:2380", "--listen-client-urls=http://0.0.0.0:2379",
                        format!("--advertise-client-urls=http://$(POD).{name}:2379"),
                        "--listen-metrics-urls=http://0.0.0.0:2381",
                        format!("--initial-cluster={}", peers.join(",")),
                        format!("--initial-cluster-token={name}"), "--initial-cluster-state=new"],
                    "readinessProbe": {"httpGet": {"path": "/readyz", "port": 2381}, "periodSeconds": 1,
                                       "timeoutSeconds": 5, "failureThreshold": 3},
                    "securityContext": {"allowPrivilegeEscalation": false, "readOnlyRootFilesystem": true,
                                        "capabilities": {"drop": ["ALL"]}},
                    "volumeMounts": [{"name": "data", "mountPath": "/var/etcd"}],
                }],
            }},
        },
    });
    format!("{service}\n---\n{client}\n---\n{set}\n")
}
