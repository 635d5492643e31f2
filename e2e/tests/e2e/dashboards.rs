//! Runs the queries of the chart's Grafana dashboards in Prometheus. `monitoring.rs` uses these functions.

use std::collections::BTreeSet;

use anyhow::{Context, Result, ensure};
use e2e::wait::Poll;
use e2e::{DEADLINE, Prometheus, Sandbox, until};
use k8s_openapi::api::core::v1::ConfigMap;
use kube::ResourceExt;
use kube::api::ListParams;
use serde_json::Value;

/// The label by which Grafana's sidecar finds dashboards.
const LABEL: &str = "grafana_dashboard=1";
/// Metrics of events that the test does not cause, each with the reason. A query with such a metric may return no data.
const WITHOUT_EVENTS: [(&str, &str); 2] = [
    (
        "etcd_operator_cluster_reconcile_failed_total",
        "the test causes no failure of this operator",
    ),
    (
        "etcd_operator_backup_reconcile_failed_total",
        "the test causes no failure of this operator",
    ),
];

/// A query of a dashboard, or of a variable.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
struct Query {
    /// The file and the panel or variable.
    place: String,
    expression: String,
}

/// Replaces the variables of Grafana. The interval is longer than the test, so that rates include all faults.
fn filled(sandbox: &Sandbox, cluster: &str, expression: &str) -> String {
    let values = [
        ("$__rate_interval", "1h"),
        ("$namespace", sandbox.namespace.as_str()),
        ("$cluster", cluster),
        ("$pod", ".*"),
    ];
    let fill = |text: String, (name, value): (&str, &str)| text.replace(name, value);
    values.into_iter().fold(expression.to_owned(), fill)
}

/// The query for the values of a variable, in the form `label_values(SERIES, LABEL)`.
fn query_of_variable(text: &str) -> Result<String> {
    let inside = text.strip_prefix("label_values(");
    let inside = inside.and_then(|text| text.strip_suffix(')'));
    let parts = inside.and_then(|text| text.rsplit_once(", "));
    let (series, label) = parts.with_context(|| format!("unknown form: {text}"))?;
    Ok(format!("count by ({label}) ({series})"))
}

/// The queries of all dashboards of the release, and the number of dashboards.
async fn queries(sandbox: &Sandbox, cluster: &str) -> Result<(BTreeSet<Query>, usize)> {
    let found = sandbox.api::<ConfigMap>();
    let found = found.list(&ListParams::default().labels(LABEL)).await?;
    let mut all = BTreeSet::new();
    let mut add = |place: String, expression: &str| {
        let expression = filled(sandbox, cluster, expression);
        all.insert(Query { place, expression });
    };
    for map in &found.items {
        let name = map.name_any();
        for text in map.data.iter().flat_map(|data| data.values()) {
            let dashboard: Value = serde_json::from_str(text).with_context(|| name.clone())?;
            for panel in dashboard["panels"].as_array().context("no panels")? {
                for target in panel["targets"].as_array().context("no targets")? {
                    let expression = target["expr"].as_str().context("no expr")?;
                    add(format!("{name}: {}", panel["title"]), expression);
                }
            }
            let variables = dashboard["templating"]["list"].as_array();
            let variables = variables.context("no variables")?.iter();
            for variable in variables.filter(|variable| variable["type"] == "query") {
                let query = query_of_variable(variable["query"].as_str().context("no query")?)?;
                add(format!("{name}: variable {}", variable["name"]), &query);
            }
        }
    }
    Ok((all, found.items.len()))
}

/// Waits until every query has returned data. Panels about members show this cluster.
pub(crate) async fn have_data(
    sandbox: &Sandbox,
    prometheus: &Prometheus,
    cluster: &str,
) -> Result<()> {
    let (mut missing, dashboards) = queries(sandbox, cluster).await?;
    ensure!(dashboards == 4, "{dashboards} dashboards");
    println!("{} queries of {dashboards} dashboards", missing.len());
    for (metric, reason) in WITHOUT_EVENTS {
        let before = missing.len();
        missing.retain(|query| !query.expression.contains(metric));
        ensure!(
            missing.len() < before,
            "no dashboard uses {metric} ({reason})"
        );
    }
    until("every query has data", DEADLINE, async || {
        for query in missing.clone() {
            let found = prometheus.query(&query.expression).await;
            if !found.with_context(|| query.place.clone())?.is_empty() {
                missing.remove(&query);
            }
        }
        Ok(if missing.is_empty() {
            Poll::Done(())
        } else {
            Poll::NotYet(format!("no data: {missing:#?}"))
        })
    })
    .await
}
