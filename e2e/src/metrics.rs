//! Reads metrics as a monitoring system does.

use std::time::Duration;

use anyhow::{Context, Result};
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use kube::api::ListParams;

use crate::Sandbox;
use crate::wait::{Poll, until};

/// Time limit for a response with metrics. The request passes through the API server and a kubelet.
const METRICS_TIMEOUT: Duration = Duration::from_secs(20);

/// One response of `/metrics`.
pub struct Page(String);

impl Page {
    /// Metrics in the text format of Prometheus.
    #[must_use]
    pub fn new(text: String) -> Self {
        Self(text)
    }

    /// Reads the metrics of one operator pod.
    ///
    /// # Errors
    /// Fails if the pod does not respond.
    pub async fn of_pod(sandbox: &Sandbox, pod: &str) -> Result<Self> {
        Self::of_port(sandbox, pod, 8080, "metrics").await
    }

    /// Reads the metrics of a member's etcd.
    ///
    /// # Errors
    /// Fails if etcd does not respond.
    pub async fn of_member(sandbox: &Sandbox, pod: &str) -> Result<Self> {
        Self::of_port(sandbox, pod, 2381, "metrics").await
    }

    /// Reads the metrics of a gRPC proxy itself, from its path `/proxy/metrics`. The path `/metrics` of the proxy
    /// returns the metrics of a member.
    ///
    /// # Errors
    /// Fails if the proxy does not respond.
    pub async fn of_proxy(sandbox: &Sandbox, pod: &str) -> Result<Self> {
        Self::of_port(sandbox, pod, 2381, "proxy/metrics").await
    }

    async fn of_port(sandbox: &Sandbox, pod: &str, port: u16, path: &str) -> Result<Self> {
        let namespace = &sandbox.namespace;
        let path = format!("/api/v1/namespaces/{namespace}/pods/{pod}:{port}/proxy/{path}");
        until(
            "the metrics endpoint answers",
            METRICS_TIMEOUT,
            async || {
                let page = sandbox.kubectl(&["get", "--raw", &path]).await?;
                Ok(Poll::Done(Self(page)))
            },
        )
        .await
    }

    /// Reads the metrics of an operator, such as `etcd-operator`, from its first pod.
    ///
    /// # Errors
    /// Fails if the operator has no pod, or if the pod does not respond.
    pub async fn of_operator(sandbox: &Sandbox, operator: &str) -> Result<Self> {
        let pods = operator_pods(sandbox, operator).await?;
        let pod = pods.first().context("the operator has no pod")?;
        Self::of_pod(sandbox, &pod.name_any()).await
    }

    /// The sum of the metric `name` over all series whose labels contain the text `labels`.
    #[must_use]
    pub fn sum(&self, name: &str, labels: &str) -> f64 {
        let found = self.series(name);
        let found = found.filter(|(found, _)| found.contains(labels));
        found.map(|(_, value)| value).sum()
    }

    /// The labels and the value of each series of the metric `name`. The labels are a text in braces, or empty.
    pub fn series(&self, name: &str) -> impl Iterator<Item = (&str, f64)> {
        self.0.lines().filter_map(move |line| {
            let rest = line.strip_prefix(name)?;
            let (labels, value) = rest.rsplit_once(' ')?;
            let whole = labels.is_empty() || labels.starts_with('{');
            whole.then_some((labels, value.parse().ok()?))
        })
    }
}

/// The pods of an operator, without terminating pods.
///
/// # Errors
/// Fails if the API server does not respond.
pub async fn operator_pods(sandbox: &Sandbox, operator: &str) -> Result<Vec<Pod>> {
    let selector = format!("app.kubernetes.io/component={operator}");
    let pods: kube::Api<Pod> = sandbox.api();
    let list = pods.list(&ListParams::default().labels(&selector)).await?;
    let stays = |pod: &Pod| pod.metadata.deletion_timestamp.is_none();
    Ok(list.items.into_iter().filter(stays).collect())
}

#[cfg(test)]
mod tests {
    use super::Page;

    #[test]
    fn sum_adds_only_series_of_named_metric_and_labels() {
        let page =
            Page("# TYPE a gauge\na{x=\"1\"} 2\na{x=\"2\"} 3\na_b 7\na 1\n# EOF\n".to_owned());
        assert!((page.sum("a", "") - 6.0).abs() < f64::EPSILON);
        assert!((page.sum("a", "x=\"2\"") - 3.0).abs() < f64::EPSILON);
        assert!(page.sum("nothing", "").abs() < f64::EPSILON);
    }
}
