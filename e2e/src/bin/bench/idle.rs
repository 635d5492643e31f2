//! Measures the memory and the CPU time of a pod with the statistics of its kubelet. Also measures the cluster operator
//! while its clusters are idle.

use std::time::Duration;

use anyhow::{Context, Result};
use e2e::Sandbox;
use e2e::objects::node_of;
use k8s_openapi::api::core::v1::Pod;
use kube::api::ListParams;
use serde::Serialize;
use serde_json::Value;

const WINDOW: Duration = Duration::from_secs(45);

#[derive(Clone, Debug, Serialize)]
pub(crate) struct Idle {
    clusters: usize,
    window_seconds: f64,
    resident_megabytes: f64,
    working_set_megabytes: f64,
    processor_milliseconds_per_second: f64,
}

/// The current memory of a container, and its CPU time since its start.
#[derive(Clone, Debug)]
pub(crate) struct Usage {
    pub(crate) resident_bytes: f64,
    pub(crate) working_set_bytes: f64,
    pub(crate) processor_nanoseconds: f64,
    at: String,
}

impl Usage {
    /// The used CPU time divided by the time since an earlier measurement, in cores.
    pub(crate) fn cores_since(&self, before: &Self) -> Result<f64> {
        let seconds = seconds_between(&before.at, &self.at)?;
        Ok((self.processor_nanoseconds - before.processor_nanoseconds) / 1e9 / seconds)
    }
}

/// Measures the memory and the CPU time of the operator during [`WINDOW`].
pub(crate) async fn measure(sandbox: &Sandbox, clusters: usize) -> Result<Idle> {
    println!(
        "measuring the idle operator with {clusters} clusters for {} s",
        WINDOW.as_secs()
    );
    // The measurement starts after 15 s. Before that, the operator still completes its work for the new clusters.
    tokio::time::sleep(Duration::from_secs(15)).await;
    let operator = operator(sandbox).await?;
    let before = usage(sandbox, &operator).await?;
    tokio::time::sleep(WINDOW).await;
    let after = usage(sandbox, &operator).await?;
    let seconds = seconds_between(&before.at, &after.at)?;
    Ok(Idle {
        clusters,
        window_seconds: seconds,
        resident_megabytes: after.resident_bytes / 1e6,
        working_set_megabytes: after.working_set_bytes / 1e6,
        processor_milliseconds_per_second: after.cores_since(&before)? * 1e3,
    })
}

impl Idle {
    pub(crate) fn print(&self) {
        println!(
            "\nThe idle operator with {} clusters: {:.1} MB resident (working set {:.1} MB; goal 20), {:.2} ms of \
             CPU time per second",
            self.clusters,
            self.resident_megabytes,
            self.working_set_megabytes,
            self.processor_milliseconds_per_second
        );
    }
}

/// The pod of the cluster operator.
async fn operator(sandbox: &Sandbox) -> Result<Pod> {
    let pods = sandbox
        .api::<Pod>()
        .list(&ListParams::default())
        .await?
        .items;
    let operator = pods.into_iter().find(|pod| {
        let name = pod.metadata.name.as_deref().unwrap_or_default();
        name.starts_with("etcd-operator-") && pod.metadata.deletion_timestamp.is_none()
    });
    operator.context("the cluster operator has no pod")
}

/// The kubelet's statistics for the first container of a pod.
pub(crate) async fn usage(sandbox: &Sandbox, pod: &Pod) -> Result<Usage> {
    let node = node_of(pod);
    let name = pod.metadata.name.as_deref().unwrap_or_default();
    let request = http::Request::get(format!("/api/v1/nodes/{node}/proxy/stats/summary"))
        .body(Vec::new())
        .context("request")?;
    let summary: Value = sandbox.client.request(request).await?;
    let container = summary["pods"]
        .as_array()
        .into_iter()
        .flatten()
        .find(|pod| {
            pod["podRef"]["name"] == name && pod["podRef"]["namespace"] == sandbox.namespace
        })
        .map(|pod| pod["containers"][0].clone())
        .with_context(|| format!("the kubelet of {node} has no statistics for {name} yet"))?;
    let number = |pointer: &str| {
        container
            .pointer(pointer)
            .and_then(Value::as_f64)
            .with_context(|| format!("{pointer} is missing"))
    };
    Ok(Usage {
        resident_bytes: number("/memory/rssBytes")?,
        working_set_bytes: number("/memory/workingSetBytes")?,
        processor_nanoseconds: number("/cpu/usageCoreNanoSeconds")?,
        at: container["cpu"]["time"]
            .as_str()
            .context("no time")?
            .to_owned(),
    })
}

fn seconds_between(before: &str, after: &str) -> Result<f64> {
    let time =
        |text: &str| -> Result<jiff::Timestamp> { text.parse().with_context(|| text.to_owned()) };
    let seconds = time(after)?.duration_since(time(before)?).as_secs_f64();
    anyhow::ensure!(
        seconds > 0.0,
        "the kubelet's statistics did not change between the measurements"
    );
    Ok(seconds)
}
