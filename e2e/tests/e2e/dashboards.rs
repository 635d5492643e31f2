//! Runs the queries of the chart's Grafana dashboards in Prometheus, and draws the dashboards. `monitoring.rs` calls
//! these functions.

use std::collections::BTreeSet;
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, ensure};
use e2e::picture::{self, Span};
use e2e::wait::Poll;
use e2e::{DEADLINE, Prometheus, Sandbox, screen, until};
use k8s_openapi::api::core::v1::ConfigMap;
use kube::api::ListParams;
use serde_json::Value;

use crate::fixtures::root;

/// The label by which Grafana's sidecar selects dashboards.
const LABEL: &str = "grafana_dashboard=1";
/// Metrics that have no data in this test, each with the reason. The test requires no data from queries of these
/// metrics.
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

/// The value of Grafana's `$__rate_interval` in the pictures. A short value suffices, because Prometheus scrapes every
/// second.
const PICTURE_INTERVAL: &str = "15s";
/// If this environment variable is set, the test replaces pictures and outputs of commands in `docs`.
const UPDATE: &str = "UPDATE";
/// The prefix of the file names in the chart's ConfigMaps.
const PREFIX: &str = "etcd-operator-";
/// The folder of the pictures.
const PICTURES: &str = "docs/pictures";

/// A dashboard of the chart.
struct Dashboard {
    /// The file name in the chart, without the prefix and the extension.
    name: String,
    content: Value,
}

impl Dashboard {
    fn panels(&self) -> Result<&Vec<Value>> {
        self.content["panels"].as_array().context("no panels")
    }
}

/// A query of a panel or of a variable.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
struct Query {
    /// The name of the dashboard, and the title of the panel or the name of the variable.
    place: String,
    expression: String,
}

/// Replaces Grafana's variables in an expression. `interval` is the value of `$__rate_interval`.
fn filled(sandbox: &Sandbox, cluster: &str, interval: &str, expression: &str) -> String {
    let values = [
        ("$__rate_interval", interval),
        ("$namespace", sandbox.namespace.as_str()),
        ("$cluster", cluster),
        ("$pod", ".*"),
    ];
    let fill = |text: String, (name, value): (&str, &str)| text.replace(name, value);
    values.into_iter().fold(expression.to_owned(), fill)
}

/// Converts the query of a variable, `label_values(SERIES, LABEL)`, to a query that Prometheus understands.
fn query_of_variable(text: &str) -> Result<String> {
    let inside = text.strip_prefix("label_values(");
    let inside = inside.and_then(|text| text.strip_suffix(')'));
    let parts = inside.and_then(|text| text.rsplit_once(", "));
    let (series, label) = parts.with_context(|| format!("unknown form: {text}"))?;
    Ok(format!("count by ({label}) ({series})"))
}

/// The dashboards in the namespace.
async fn dashboards(sandbox: &Sandbox) -> Result<Vec<Dashboard>> {
    let found = sandbox.api::<ConfigMap>();
    let found = found.list(&ListParams::default().labels(LABEL)).await?;
    let files = found.items.iter().flat_map(|map| map.data.iter().flatten());
    let all = files.map(|(file, text)| {
        let name = file.trim_start_matches(PREFIX);
        let name = name.trim_end_matches(".json").to_owned();
        let content = serde_json::from_str(text).with_context(|| file.clone())?;
        Ok(Dashboard { name, content })
    });
    let all: Vec<Dashboard> = all.collect::<Result<_>>()?;
    ensure!(all.len() == 4, "{} dashboards", all.len());
    Ok(all)
}

/// The queries of all dashboards. `$__rate_interval` is longer than the test, so that the rates include all faults.
fn queries(sandbox: &Sandbox, cluster: &str, dashboards: &[Dashboard]) -> Result<BTreeSet<Query>> {
    let mut all = BTreeSet::new();
    let mut add = |place: String, expression: &str| {
        let expression = filled(sandbox, cluster, "1h", expression);
        all.insert(Query { place, expression });
    };
    for dashboard in dashboards {
        let name = &dashboard.name;
        for panel in dashboard.panels()? {
            for target in panel["targets"].as_array().context("no targets")? {
                let expression = target["expr"].as_str().context("no expr")?;
                add(format!("{name}: {}", panel["title"]), expression);
            }
        }
        let variables = dashboard.content["templating"]["list"].as_array();
        let variables = variables.context("no variables")?.iter();
        for variable in variables.filter(|variable| variable["type"] == "query") {
            let query = query_of_variable(variable["query"].as_str().context("no query")?)?;
            add(format!("{name}: variable {}", variable["name"]), &query);
        }
    }
    Ok(all)
}

/// Waits until every query returns data, except the queries of the metrics in [`WITHOUT_EVENTS`]. `cluster` is the
/// value of the dashboards' variable `$cluster`.
pub(crate) async fn have_data(
    sandbox: &Sandbox,
    prometheus: &Prometheus,
    cluster: &str,
) -> Result<()> {
    let mut missing = queries(sandbox, cluster, &dashboards(sandbox).await?)?;
    println!("{} queries", missing.len());
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

/// True if the panel uses a metric of [`WITHOUT_EVENTS`].
fn may_be_empty(panel: &Value) -> bool {
    let targets = panel["targets"].to_string();
    let mut metrics = WITHOUT_EVENTS.iter();
    metrics.any(|(metric, _)| targets.contains(metric))
}

/// Draws every dashboard with the data since `start`, and checks that no panel is empty, except panels that use a
/// metric of [`WITHOUT_EVENTS`]. `cluster` is the value of the dashboards' variable `$cluster`. If [`UPDATE`] is set,
/// replaces the pictures in `docs`.
pub(crate) async fn are_drawn(
    sandbox: &Sandbox,
    prometheus: &Prometheus,
    cluster: &str,
    start: SystemTime,
) -> Result<()> {
    let seconds = |time: SystemTime| time.duration_since(UNIX_EPOCH).map(|it| it.as_secs_f64());
    let span = Span {
        start: seconds(start)?,
        end: seconds(SystemTime::now())?,
    };
    let fill = |expression: &str| filled(sandbox, cluster, PICTURE_INTERVAL, expression);
    for dashboard in dashboards(sandbox).await? {
        let name = &dashboard.name;
        let drawn = picture::draw(prometheus, &dashboard.content, span, fill).await;
        let drawn = drawn.with_context(|| name.clone())?;
        let mut panels = dashboard.panels()?.iter();
        let empty = panels.find(|panel| {
            let title = panel["title"].as_str().unwrap_or_default();
            drawn.empty.iter().any(|empty| empty == title) && !may_be_empty(panel)
        });
        ensure!(empty.is_none(), "{name}: no data: {empty:?}");
        if std::env::var_os(UPDATE).is_some() {
            let folder = root().join(PICTURES);
            std::fs::create_dir_all(&folder)?;
            std::fs::write(folder.join(format!("{name}.svg")), drawn.svg)?;
        }
    }
    Ok(())
}

/// Checks that a page of `docs` has a code block for the output of this command. If [`UPDATE`] is set, replaces the
/// output.
pub(crate) fn show(page: &str, command: &str, output: &str) -> Result<()> {
    let path = root().join("docs").join(page);
    let text = std::fs::read_to_string(&path).with_context(|| page.to_owned())?;
    let text = screen::replaced(&text, command, output).with_context(|| page.to_owned())?;
    if std::env::var_os(UPDATE).is_some() {
        std::fs::write(&path, text)?;
    }
    Ok(())
}
