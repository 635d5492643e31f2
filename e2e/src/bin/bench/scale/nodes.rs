//! The simulated nodes: Node objects without a kubelet. The benchmark renews their Leases. It cordons the real nodes,
//! so the scheduler binds all pods to simulated nodes.

use std::time::Duration;

use anyhow::{Context, Result};
use e2e::until;
use e2e::wait::Poll;
use futures::stream::{self, StreamExt, TryStreamExt};
use jiff::Timestamp;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::Node;
use kube::api::{Api, DeleteParams, ListParams, Patch, PatchParams, PostParams};
use kube::{Client, ResourceExt};
use serde_json::json;

use super::load::{CONCURRENCY, is_missing};

const PREFIX: &str = "scale-node-";
/// The label of nodes that the benchmark created ([`SIMULATED`]) or cordoned ([`CORDONED`]).
const LABEL: &str = "etcd-operator-bench";
const SIMULATED: &str = "simulated";
const CORDONED: &str = "cordoned";
const LEASES: &str = "kube-node-lease";
/// The interval at which a Lease is renewed. The testbed considers a node lost after 20 s without renewal.
const RENEWAL: Duration = Duration::from_secs(6);
/// Maximum number of pods on each node: the kubelet's default.
const PODS: usize = 110;
/// The percentage of a node's pod capacity that the benchmark plans to use. The capacity above this percentage is a
/// reserve, because the scheduler does not fill all nodes equally.
const FILL: usize = 60;
/// Number of zones.
pub(super) const ZONES: usize = 3;
/// Time limit until the nodes are schedulable.
const TIMEOUT: Duration = Duration::from_mins(2);

/// True if this is the name of a simulated node.
pub(super) fn is_simulated(node: &str) -> bool {
    node.starts_with(PREFIX)
}

/// The zone of a simulated node.
pub(super) fn zone_of(node: &str) -> Option<usize> {
    let index: usize = node.strip_prefix(PREFIX)?.parse().ok()?;
    Some(index % ZONES)
}

fn names(count: usize) -> impl Iterator<Item = String> {
    (0..count).map(|index| format!("{PREFIX}{index}"))
}

/// Cordons the real nodes, and creates simulated nodes for `pods` pods. Returns the number of simulated nodes, without
/// waiting until they are ready.
pub(super) async fn create(client: &Client, pods: usize) -> Result<usize> {
    let api: Api<Node> = Api::all(client.clone());
    for node in api.list(&ListParams::default()).await?.items {
        let spec = node.spec.as_ref();
        let is_open = spec.is_none_or(|spec| spec.unschedulable != Some(true));
        if !is_simulated(&node.name_any()) && is_open {
            cordon(&api, &node.name_any(), true).await?;
        }
    }
    let count = (pods * 100).div_ceil(PODS * FILL).next_multiple_of(ZONES);
    stream::iter(names(count).map(async |name| create_node(client, &name).await))
        .buffer_unordered(CONCURRENCY)
        .try_collect::<()>()
        .await?;
    Ok(count)
}

/// Waits until the simulated nodes have no taints. The caller must renew the Leases during this time.
pub(super) async fn await_schedulable(client: &Client, count: usize) -> Result<()> {
    let api: Api<Node> = Api::all(client.clone());
    let simulated = ListParams::default().labels(&selector(SIMULATED));
    until("the simulated nodes are ready", TIMEOUT, async || {
        let nodes = api.list(&simulated).await?.items;
        let tainted = |node: &&Node| {
            let taints = node.spec.as_ref().and_then(|spec| spec.taints.as_ref());
            taints.is_some_and(|taints| !taints.is_empty())
        };
        let waiting = nodes.iter().filter(tainted).count();
        Ok(if waiting == 0 && nodes.len() >= count {
            Poll::Done(())
        } else {
            Poll::NotYet(format!("{waiting} of {} have taints", nodes.len()))
        })
    })
    .await
}

/// Renews the Leases of all simulated nodes, until the caller aborts the task.
pub(super) async fn renew(client: Client, count: usize) {
    let leases: Api<Lease> = Api::namespaced(client, LEASES);
    loop {
        stream::iter(names(count))
            .map(async |name| {
                let patch = json!({"spec": {"renewTime": micro_now()}});
                let patch = Patch::Merge(patch);
                // A failed renewal is not retried, because the next renewal follows before Kubernetes considers the
                // node lost.
                let _ = leases.patch(&name, &PatchParams::default(), &patch).await;
            })
            .buffer_unordered(CONCURRENCY)
            .collect::<()>()
            .await;
        tokio::time::sleep(RENEWAL).await;
    }
}

/// Deletes the simulated nodes, and uncordons the nodes that the benchmark cordoned.
pub(super) async fn delete(client: &Client) -> Result<()> {
    let api: Api<Node> = Api::all(client.clone());
    let leases: Api<Lease> = Api::namespaced(client.clone(), LEASES);
    let of = |value| ListParams::default().labels(&selector(value));
    let simulated = of(SIMULATED);
    let params = DeleteParams::default();
    for lease in leases.list(&simulated).await?.items {
        is_missing(leases.delete(&lease.name_any(), &params).await).context("delete a Lease")?;
    }
    for node in api.list(&simulated).await?.items {
        is_missing(api.delete(&node.name_any(), &params).await).context("delete a node")?;
    }
    for node in api.list(&of(CORDONED)).await?.items {
        cordon(&api, &node.name_any(), false).await?;
    }
    Ok(())
}

fn selector(value: &str) -> String {
    format!("{LABEL}={value}")
}

/// Cordons or uncordons a real node. The label marks the nodes to uncordon after the benchmark.
async fn cordon(api: &Api<Node>, name: &str, cordoned: bool) -> Result<()> {
    let patch = json!({
        "metadata": {"labels": {LABEL: cordoned.then_some(CORDONED)}},
        "spec": {"unschedulable": cordoned},
    });
    let patch = Patch::Merge(patch);
    let done = api.patch(name, &PatchParams::default(), &patch).await;
    done.map(drop).with_context(|| format!("cordon {name}"))
}

fn micro_now() -> String {
    format!("{:.6}", Timestamp::now())
}

async fn create_node(client: &Client, name: &str) -> Result<()> {
    let api: Api<Node> = Api::all(client.clone());
    let leases: Api<Lease> = Api::namespaced(client.clone(), LEASES);
    let zone = format!("scale-{}", zone_of(name).unwrap_or_default());
    let node: Node = serde_json::from_value(json!({
        "metadata": {"name": name, "labels": {
            LABEL: SIMULATED, "kubernetes.io/hostname": name, "kubernetes.io/os": "linux",
            "topology.kubernetes.io/zone": zone,
        }},
    }))?;
    let lease: Lease = serde_json::from_value(json!({
        "metadata": {"name": name, "labels": {LABEL: SIMULATED}},
        "spec": {"holderIdentity": name, "leaseDurationSeconds": 40, "renewTime": micro_now()},
    }))?;
    let params = PostParams::default();
    exists(leases.create(&params, &lease).await).context("create a Lease")?;
    exists(api.create(&params, &node).await).context("create a node")?;
    let now = format!("{:.0}", Timestamp::now());
    let resources = json!({"cpu": "64", "memory": "256Gi", "ephemeral-storage": "1Ti", "pods": PODS.to_string()});
    let status = json!({"status": {
        "capacity": resources, "allocatable": resources,
        "conditions": [{"type": "Ready", "status": "True", "reason": "Simulated",
                        "lastHeartbeatTime": now, "lastTransitionTime": now}],
    }});
    let (params, patch) = (PatchParams::default(), Patch::Strategic(status));
    let done = api.patch_status(name, &params, &patch).await;
    done.map(drop).context("set the status of a node")
}

/// Ignores the error that the object already exists (409), for example from a benchmark that was killed. Returns all
/// other errors.
fn exists<T>(made: kube::Result<T>) -> kube::Result<()> {
    match made {
        Err(kube::Error::Api(status)) if status.code == 409 => Ok(()),
        made => made.map(drop),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn name_of_simulated_node_determines_zone() {
        assert_eq!(zone_of("scale-node-7"), Some(1));
        assert_eq!(zone_of("node-7"), None);
        assert!(is_simulated("scale-node-0") && !is_simulated("node-0"));
    }
}
