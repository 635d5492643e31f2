//! The API server answers the operator with status 429, like an overloaded API server. The operator slows down.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use e2e::metrics::Page;
use e2e::wait::Poll;
use e2e::{DEADLINE, Sandbox, cluster_scenario, until};
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;

use crate::fixtures::cluster;
use crate::node_reboot::operator;

/// The time during which the test counts rejected requests.
const WINDOW: Duration = Duration::from_secs(10);
/// The maximum rate of rejected requests. After each rejection, the operator's client waits one second, and the
/// operator has about ten requests in flight.
const MAX_REJECTED_PER_SECOND: f64 = 30.0;

/// A priority level of API Priority and Fairness that rejects requests of this sandbox's operator, except requests for
/// its Lease. The API server accepts only one of these requests at a time, because a level without seats runs a request
/// only if no other request runs in this level.
struct Limit<'a> {
    sandbox: &'a Sandbox,
    name: &'a str,
}

impl<'a> Limit<'a> {
    async fn set(sandbox: &'a Sandbox) -> Result<Self> {
        // The objects are cluster-scoped, so they get the unique name of the sandbox's namespace.
        let name = sandbox.namespace.as_str();
        let manifest = format!(
            "apiVersion: flowcontrol.apiserver.k8s.io/v1
kind: PriorityLevelConfiguration
metadata: {{name: {name}}}
spec:
  type: Limited
  limited:
    nominalConcurrencyShares: 0
    borrowingLimitPercent: 0
    limitResponse: {{type: Reject}}
---
apiVersion: flowcontrol.apiserver.k8s.io/v1
kind: FlowSchema
metadata: {{name: {name}}}
spec:
  priorityLevelConfiguration: {{name: {name}}}
  matchingPrecedence: 500
  rules:
  - subjects:
    - kind: ServiceAccount
      serviceAccount: {{name: etcd-operator, namespace: {name}}}
    resourceRules:
    - verbs: ['*']
      apiGroups: ['', etcd.database.coreos.com, events.k8s.io, networking.k8s.io, policy]
      resources: ['*']
      namespaces: ['*']
      clusterScope: true
"
        );
        sandbox.apply(&manifest).await?;
        let limit = Self { sandbox, name };
        until("the limit is in effect", DEADLINE, async || {
            let metrics = limit.metrics().await?;
            let mut levels = metrics.series("apiserver_flowcontrol_nominal_limit_seats");
            Ok(if levels.any(|(labels, _)| labels.contains(name)) {
                Poll::Done(())
            } else {
                Poll::NotYet(String::from("the API server has not read the limit"))
            })
        })
        .await?;
        Ok(limit)
    }

    async fn metrics(&self) -> Result<Page> {
        let metrics = self.sandbox.kubectl(&["get", "--raw", "/metrics"]).await?;
        Ok(Page::new(metrics))
    }

    /// The number of requests that this limit has rejected.
    async fn rejected(&self) -> Result<f64> {
        let schema = format!("flow_schema=\"{}\"", self.name);
        let name = "apiserver_flowcontrol_rejected_requests_total";
        Ok(self.metrics().await?.sum(name, &schema))
    }

    async fn remove(self) -> Result<()> {
        let kinds = "flowschemas,prioritylevelconfigurations";
        let words = ["delete", kinds, self.name];
        self.sandbox.kubectl(&words).await.map(drop)
    }
}

/// Ensures that requests are rejected, and that the operator retries them at a low rate.
async fn requests_are_repeated_slowly(sandbox: &Sandbox, limit: &Limit<'_>) -> Result<()> {
    sandbox.scale("c", 3).await?;
    let first = until("a request is rejected", DEADLINE, async || {
        let count = limit.rejected().await?;
        Ok(if count > 0.0 {
            Poll::Done(count)
        } else {
            Poll::NotYet("no rejected request".to_owned())
        })
    })
    .await?;
    let begun = Instant::now();
    tokio::time::sleep(WINDOW).await;
    let count = limit.rejected().await? - first;
    let per_second = count / begun.elapsed().as_secs_f64();
    eprintln!("    {per_second:.1} rejected requests per second");
    ensure!(count > 0.0, "the operator does not retry");
    ensure!(
        per_second <= MAX_REJECTED_PER_SECOND,
        "{per_second:.1} rejected requests per second"
    );
    Ok(())
}

#[tokio::test]
async fn operator_slows_down_while_api_server_rejects_requests() {
    cluster_scenario("api_server_429", async |sandbox| {
        sandbox.apply(&cluster(&sandbox.env, "c", 1)?).await?;
        sandbox.await_members("c", 1).await?;
        let before = operator(sandbox).await?;
        let limit = Limit::set(sandbox).await?;
        let outcome = requests_are_repeated_slowly(sandbox, &limit).await;
        // The limit is removed even if the check failed, because it is cluster-scoped and would outlive the namespace.
        limit.remove().await?;
        outcome?;
        sandbox.await_members("c", 3).await?;
        // The limit does not apply to the Lease, so the operator must not have restarted.
        let after = operator(sandbox).await?;
        let restarts = |pod: &Pod| {
            let status = pod.status.iter();
            let containers = status.flat_map(|status| status.container_statuses.iter().flatten());
            containers.map(|one| one.restart_count).sum::<i32>()
        };
        ensure!(
            (before.uid(), restarts(&before)) == (after.uid(), restarts(&after)),
            "the operator was restarted"
        );
        Ok(())
    })
    .await;
}
