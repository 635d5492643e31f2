//! Reads the data of a panel from Prometheus.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context, Result, bail};
use serde_json::Value;

use crate::Prometheus;

/// The number of points of a line over the whole time range.
const POINTS: f64 = 200.0;
/// The label with the name of the metric, which Grafana does not show in tables.
const METRIC: &str = "__name__";

/// The time range of a picture, in Unix seconds.
#[derive(Clone, Copy, Debug)]
pub struct Span {
    /// The left end of all graphs.
    pub start: f64,
    /// The right end of all graphs.
    pub end: f64,
}

impl Span {
    /// The time between two points of a line, in seconds.
    pub(super) fn step(self) -> f64 {
        ((self.end - self.start) / POINTS).ceil().max(1.0)
    }
}

/// The data of a panel.
#[derive(Debug)]
pub(super) enum Data {
    /// The number of a `stat` panel.
    Number(Option<f64>),
    Table(Table),
    /// The lines of a `timeseries` panel.
    Lines(Vec<Line>),
}

impl Data {
    pub(super) fn is_empty(&self) -> bool {
        match self {
            Self::Number(number) => number.is_none(),
            Self::Table(table) => table.rows.is_empty(),
            Self::Lines(lines) => lines.iter().all(|line| line.points.is_empty()),
        }
    }
}

/// A line of a graph. `name` appears in the legend, and a point is a time and a value.
#[derive(Debug)]
pub(super) struct Line {
    pub(super) name: String,
    pub(super) points: Vec<(f64, f64)>,
}

/// A table with one cell for each row and column.
#[derive(Debug)]
pub(super) struct Table {
    pub(super) columns: Vec<String>,
    pub(super) rows: Vec<Vec<Cell>>,
}

#[derive(Clone, Debug, PartialEq)]
pub(super) enum Cell {
    Label(String),
    Number(f64),
    Missing,
}

/// The result of one query: the labels and the current value of each series.
struct Answer {
    /// The `refId` of the query, such as `A`.
    reference: String,
    series: Vec<(BTreeMap<String, String>, f64)>,
}

/// Runs the queries of a panel.
pub(super) async fn read(
    prometheus: &Prometheus,
    panel: &Value,
    span: Span,
    fill: &impl Fn(&str) -> String,
) -> Result<Data> {
    let targets = panel["targets"].as_array().context("no targets")?;
    let kind = panel["type"].as_str().context("no type")?;
    if !["stat", "table", "timeseries"].contains(&kind) {
        bail!("unknown type of panel: {kind}");
    }
    let (mut lines, mut answers) = (Vec::new(), Vec::new());
    for target in targets {
        let text = |key: &str| target[key].as_str();
        let expression = fill(text("expr").context("no expr")?);
        if kind == "timeseries" {
            let format = text("legendFormat").unwrap_or_default();
            let found = prometheus.query_range(&expression, (span.start, span.end), span.step());
            lines.extend(found.await?.iter().map(|series| line(format, series)));
            continue;
        }
        let series = prometheus.query(&expression).await?;
        let current = |series: &Value| {
            let (_, value) = point(&series["value"])?;
            Some((labels(&series["metric"]), value))
        };
        answers.push(Answer {
            reference: text("refId").unwrap_or_default().to_owned(),
            series: series.iter().filter_map(current).collect(),
        });
    }
    Ok(match kind {
        "timeseries" => Data::Lines(lines),
        "table" => Data::Table(merged(panel, &answers)),
        _ => {
            let mut values = answers.iter().flat_map(|answer| &answer.series);
            Data::Number(values.next().map(|(_, value)| *value))
        }
    })
}

/// The time and the value of a sample. `None` if the value is not finite and so cannot be drawn.
fn point(sample: &Value) -> Option<(f64, f64)> {
    let value: f64 = sample[1].as_str()?.parse().ok()?;
    let time = sample[0].as_f64()?;
    value.is_finite().then_some((time, value))
}

fn labels(metric: &Value) -> BTreeMap<String, String> {
    let all = metric.as_object().into_iter().flatten();
    let shown = all.filter(|(name, _)| *name != METRIC);
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    shown
        .map(|(name, value)| (name.clone(), text(value)))
        .collect()
}

fn line(format: &str, series: &Value) -> Line {
    let samples = series["values"].as_array().into_iter().flatten();
    Line {
        name: legend(format, &series["metric"]),
        points: samples.filter_map(point).collect(),
    }
}

/// The name of a series in the legend: `format`, in which `{{label}}` is replaced by the value of the label.
fn legend(format: &str, metric: &Value) -> String {
    let mut text = String::new();
    let mut rest = format;
    while let Some((before, after)) = rest.split_once("{{") {
        let (label, after) = after.split_once("}}").unwrap_or((after, ""));
        text.push_str(before);
        text.push_str(metric[label.trim()].as_str().unwrap_or_default());
        rest = after;
    }
    text.push_str(rest);
    text
}

/// Combines the answers into one table, like Grafana's transformations `merge` and `organize`. Series become one row
/// if they have the same values of the labels that all answers have.
fn merged(panel: &Value, answers: &[Answer]) -> Table {
    let names = |answer: &Answer| -> BTreeSet<String> {
        let labels = answer.series.iter().flat_map(|(labels, _)| labels.keys());
        labels.cloned().collect()
    };
    let found = answers.iter().filter(|answer| !answer.series.is_empty());
    let names: Vec<BTreeSet<String>> = found.map(names).collect();
    let all: BTreeSet<&String> = names.iter().flatten().collect();
    let is_common = |label: &&&String| names.iter().all(|names| names.contains(**label));
    let common: Vec<&String> = all.iter().filter(is_common).copied().collect();
    let mut rows: BTreeMap<Vec<&str>, BTreeMap<String, Cell>> = BTreeMap::new();
    for answer in answers {
        for (labels, value) in &answer.series {
            let text = |label: &&String| labels.get(*label).map_or("", String::as_str);
            let key = common.iter().map(text);
            let row = rows.entry(key.collect()).or_default();
            for (label, value) in labels {
                row.insert(label.clone(), Cell::Label(value.clone()));
            }
            row.insert(format!("Value #{}", answer.reference), Cell::Number(*value));
        }
    }
    let transformations = panel["transformations"].as_array().into_iter().flatten();
    let mut organize = transformations.filter(|one| one["id"] == "organize");
    let organize = organize.next().map(|one| &one["options"]);
    let option = |list: &str, name: &str| organize.map(|options| &options[list][name]);
    let values = answers
        .iter()
        .map(|answer| format!("Value #{}", answer.reference));
    let columns = all.into_iter().cloned().chain(values);
    let columns: Vec<String> = columns
        .filter(|name| option("excludeByName", name).is_none_or(|it| *it != true))
        .collect();
    let cells = |row: &BTreeMap<String, Cell>| -> Vec<Cell> {
        let cell = |name: &String| row.get(name).cloned().unwrap_or(Cell::Missing);
        columns.iter().map(cell).collect()
    };
    let renamed = |name: &String| {
        let new = option("renameByName", name).and_then(Value::as_str);
        new.map_or_else(|| name.clone(), str::to_owned)
    };
    Table {
        rows: rows.values().map(cells).collect(),
        columns: columns.iter().map(renamed).collect(),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn legend_contains_values_of_labels() {
        let metric = json!({"namespace": "prod", "cluster": "main"});
        assert_eq!(legend("{{namespace}}/{{ cluster }}", &metric), "prod/main");
        assert_eq!(legend("quota", &metric), "quota");
    }

    #[test]
    fn samples_without_finite_value_are_omitted() {
        let series = json!({"metric": {}, "values": [[1.0, "2"], [2.0, "NaN"], [3.0, "+Inf"]]});
        assert_eq!(line("x", &series).points, [(1.0, 2.0)]);
    }

    #[test]
    fn query_answers_with_equal_labels_share_table_row() {
        let answer = |reference: &str, series: &[(&str, f64)]| Answer {
            reference: reference.into(),
            series: series
                .iter()
                .map(|(cluster, value)| {
                    let labels = [("cluster".to_owned(), (*cluster).to_owned())];
                    (labels.into(), *value)
                })
                .collect(),
        };
        let panel = json!({"transformations": [
            {"id": "merge", "options": {}},
            {"id": "organize", "options": {
                "excludeByName": {"Time": true, "Value #C": true},
                "renameByName": {"Value #A": "Quorum"},
            }},
        ]});
        let answers = [
            answer("A", &[("main", 1.0), ("other", 0.0)]),
            answer("B", &[("main", 3.0)]),
            answer("C", &[("main", 1.0)]),
        ];
        let table = merged(&panel, &answers);
        assert_eq!(table.columns, ["cluster", "Quorum", "Value #B"]);
        let label = |text: &str| Cell::Label(text.into());
        assert_eq!(
            table.rows,
            [
                vec![label("main"), Cell::Number(1.0), Cell::Number(3.0)],
                vec![label("other"), Cell::Number(0.0), Cell::Missing],
            ]
        );
    }

    #[test]
    fn query_step_grows_with_time_range_and_is_at_least_one_second() {
        let step = |end: f64| Span { start: 0.0, end }.step();
        assert!((step(60.0) - 1.0).abs() < 1e-9);
        assert!((step(2000.0) - 10.0).abs() < 1e-9);
    }
}
