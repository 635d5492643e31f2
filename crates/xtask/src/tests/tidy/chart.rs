//! Checks that the values, schema, README, alerts and documentation of the chart agree. The checks need no Helm. The
//! end-to-end tests render the chart.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value as Json;
use serde_yaml_ng::Value;

use super::alerts::recordings;
use super::documents::anchors;
use super::root;

/// The sections of the chart values for the three operators. All have the same settings, so the README lists only the
/// settings of the first section.
const OPERATORS: [&str; 3] = ["clusterOperator", "backupOperator", "restoreOperator"];
/// The maximum number of characters of a default in the README's table. For a longer default, the table refers to
/// values.yaml.
const LONGEST_DEFAULT: usize = 60;
const TABLE: &str = "<!-- The table is generated: UPDATE=1 cargo test -p xtask chart -->\n";

fn chart(file: &str) -> PathBuf {
    root().join("charts/etcd-operator").join(file)
}

fn read(path: impl AsRef<Path>) -> String {
    let path = path.as_ref();
    fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn yaml(path: PathBuf) -> Value {
    serde_yaml_ng::from_str(&read(path)).unwrap()
}

fn schema() -> Json {
    serde_json::from_str(&read(chart("values.schema.json"))).unwrap()
}

/// The node of the schema to which `node` refers, or `node` itself if it contains no reference.
fn resolved<'a>(schema: &'a Json, node: &'a Json) -> &'a Json {
    let pointer = node["$ref"].as_str().and_then(|it| it.strip_prefix('#'));
    pointer.map_or(node, |pointer| schema.pointer(pointer).unwrap())
}

/// A value that users can set, with its default and description.
struct Leaf<'a> {
    path: String,
    default: &'a Value,
    description: &'a str,
}

/// The values that users can set, according to the schema. A mapping is one value if the schema does not list its
/// properties.
fn leaves<'a>(schema: &'a Json, values: &'a Value) -> Vec<Leaf<'a>> {
    fn collect<'a>(
        (schema, node): (&'a Json, &'a Json),
        value: &'a Value,
        path: &str,
        found: &mut Vec<Leaf<'a>>,
    ) {
        let inside = resolved(schema, node);
        let properties = inside["properties"].as_object();
        let mapping = value.as_mapping().filter(|mapping| !mapping.is_empty());
        let (Some(properties), Some(mapping)) = (properties, mapping) else {
            found.push(Leaf {
                path: path.to_owned(),
                default: value,
                description: node["description"].as_str().unwrap_or_default(),
            });
            return;
        };
        for (key, value) in mapping {
            let below = format!("{path}.{}", key.as_str().unwrap());
            let below = below.trim_start_matches('.');
            let node = properties.get(key.as_str().unwrap());
            let node = node.unwrap_or_else(|| panic!("{below} is not in the schema"));
            collect((schema, node), value, below, found);
        }
    }
    let mut found = Vec::new();
    collect((schema, schema), values, "", &mut found);
    found
}

/// Every property in the schema, with its path and its definition. Follows references to find the properties below.
fn properties(schema: &Json) -> Vec<(String, &Json)> {
    fn collect<'a>(
        (schema, node): (&'a Json, &'a Json),
        path: &str,
        found: &mut Vec<(String, &'a Json)>,
    ) {
        let inside = resolved(schema, node);
        for (key, node) in inside["properties"].as_object().into_iter().flatten() {
            let below = format!("{path}.{key}").trim_start_matches('.').to_owned();
            collect((schema, node), &below, found);
            found.push((below, node));
        }
    }
    let mut found = Vec::new();
    collect((schema, schema), "", &mut found);
    found
}

fn is_deprecated(node: &Json) -> bool {
    node["deprecated"] == true
}

#[test]
fn schema_describes_every_chart_value() {
    let schema = schema();
    let values = yaml(chart("values.yaml"));
    let silent: Vec<String> = properties(&schema)
        .into_iter()
        .filter(|(_, node)| node["description"].as_str().is_none_or(str::is_empty))
        .map(|(path, _)| path)
        .collect();
    assert!(
        silent.is_empty(),
        "chart values without a description: {silent:#?}"
    );
    // `leaves` panics for a value that the schema does not define, so this call also checks that the schema is
    // complete.
    assert!(leaves(&schema, &values).len() > 100);
}

#[test]
fn values_file_contains_every_property_of_chart_schema() {
    /// Parts of the paths of properties that have no default in values.yaml: fields of Kubernetes objects, and the
    /// switches of the alerts.
    const WITHOUT_DEFAULT: [&str; 4] = [
        "livenessProbe.",
        "readinessProbe.",
        "prometheusRule.disabled.",
        ".resources.claims",
    ];
    let schema = schema();
    let values = yaml(chart("values.yaml"));
    let missing: Vec<String> = properties(&schema)
        .into_iter()
        .filter(|(_, node)| !is_deprecated(node))
        .map(|(path, _)| path)
        .filter(|path| !WITHOUT_DEFAULT.iter().any(|part| path.contains(part)))
        .filter(|path| {
            let mut keys = path.split('.');
            keys.try_fold(&values, |value, key| value.get(key))
                .is_none()
        })
        .collect();
    assert!(
        missing.is_empty(),
        "properties of the schema that values.yaml does not set: {missing:#?}"
    );
}

/// The table of values in the chart's README, as Markdown.
fn table(schema: &Json, values: &Value) -> String {
    let mut rows = String::from("| value | default | description |\n|---|---|---|\n");
    let leaves = leaves(schema, values);
    let of_first = |path: &str| {
        let (operator, rest) = path.split_once('.')?;
        let first = format!("{}.{rest}", OPERATORS[0]);
        let is_other = OPERATORS[1..].contains(&operator);
        leaves.iter().find(|leaf| is_other && leaf.path == first)
    };
    for leaf in &leaves {
        let mut description = leaf.description;
        if let Some(first) = of_first(&leaf.path) {
            if first.default == leaf.default {
                continue;
            }
            description = "The same setting as for the cluster operator, with another default.";
        }
        let default = serde_json::to_string(leaf.default).unwrap();
        let default = if default.len() > LONGEST_DEFAULT {
            String::from("see values.yaml")
        } else {
            format!("`{default}`")
        };
        let text = description.replace('|', "\\|");
        let _ = writeln!(rows, "| `{}` | {default} | {text} |", leaf.path);
    }
    for operator in &OPERATORS[1..] {
        let text = schema["properties"][operator]["description"].as_str();
        let text = text.unwrap_or_default();
        let first = OPERATORS[0];
        let _ = writeln!(
            rows,
            "| `{operator}.*` | | {text} The values are those of `{first}.*`. |"
        );
    }
    rows
}

#[test]
fn chart_readme_table_matches_schema_and_values() {
    let path = chart("README.md");
    let found = read(&path);
    let (head, _) = found.split_once(TABLE).expect("the README has no table");
    let rows = table(&schema(), &yaml(chart("values.yaml")));
    // The table of values is at the end of the README, so everything after the line `TABLE` is replaced.
    let expected = format!("{head}{TABLE}\n{rows}");
    if std::env::var_os("UPDATE").is_some() {
        fs::write(&path, &expected).unwrap();
        return;
    }
    assert!(
        found == expected,
        "charts/etcd-operator/README.md is outdated: run `UPDATE=1 cargo test -p xtask chart`"
    );
}

/// The end-to-end tests render the cases in `e2e/fixtures/chart/values.yaml`. This test fails for each chart value that
/// no case sets.
#[test]
fn rendered_test_cases_set_every_chart_value() {
    let cases = yaml(root().join("e2e/fixtures/chart/values.yaml"));
    let (schema, values) = (schema(), yaml(chart("values.yaml")));
    let is_set = |path: &str| {
        cases.as_sequence().unwrap().iter().any(|case| {
            let mut keys = path.split('.');
            keys.try_fold(&case["values"], |value, key| value.get(key))
                .is_some()
        })
    };
    let of_any = |path: &str| match path.split_once('.') {
        Some((operator, rest)) if OPERATORS.contains(&operator) => OPERATORS
            .iter()
            .any(|operator| is_set(&format!("{operator}.{rest}"))),
        _ => is_set(path),
    };
    let leaves = leaves(&schema, &values);
    let paths = leaves.iter().map(|leaf| leaf.path.as_str());
    let untested: Vec<&str> = paths.filter(|path| !of_any(path)).collect();
    assert!(
        untested.is_empty(),
        "chart values that no rendered case sets: {untested:#?}"
    );
}

#[test]
fn deprecated_chart_values_are_mapped_and_documented() {
    let old = yaml(chart("old-values.yaml"));
    let mapped: BTreeSet<String> =
        old.as_mapping()
            .unwrap()
            .keys()
            .fold(BTreeSet::new(), |mut all, key| {
                let key = key.as_str().unwrap();
                all.extend(OPERATORS.map(|operator| key.replace("OPERATOR", operator)));
                all
            });
    let schema = schema();
    let all = properties(&schema).into_iter();
    let deprecated: BTreeSet<String> = all
        .filter(|(_, node)| is_deprecated(node))
        .map(|(path, _)| path)
        .collect();
    assert_eq!(mapped, deprecated, "old-values.yaml, values.schema.json");
    let document = read(root().join("docs/install.md"));
    for key in old.as_mapping().unwrap().keys() {
        let key = key.as_str().unwrap().replace("OPERATOR.", ".");
        assert!(
            document.contains(&format!("`{key}`")),
            "{key} is not in docs/install.md"
        );
    }
}

#[test]
fn each_alert_has_switch_runbook_and_documentation() {
    let alerts = yaml(chart("alerts.yaml"));
    let groups = alerts.as_mapping().unwrap().values();
    let rules: Vec<&Value> = groups.flat_map(|it| it.as_sequence().unwrap()).collect();
    let names: BTreeSet<&str> = rules
        .iter()
        .map(|rule| rule["alert"].as_str().unwrap())
        .collect();
    let schema = schema();
    let switches = &schema["properties"]["prometheusRule"]["properties"]["disabled"]["properties"];
    let switches = switches.as_object().unwrap().keys();
    assert_eq!(names, switches.map(String::as_str).collect());
    let metrics = read(root().join("docs/metrics.md"));
    for rule in rules {
        let name = rule["alert"].as_str().unwrap();
        assert!(metrics.contains(&format!("`{name}`")), "{name}");
        let runbook = rule["annotations"]["runbook_url"].as_str().unwrap();
        let (page, anchor) = runbook.split_once('#').unwrap();
        let page = read(root().join("docs").join(page));
        assert!(anchors(&page).contains(anchor), "{name}: {runbook}");
    }
}

/// The names follow the convention of Prometheus, `LABELS:METRIC:OPERATIONS`: the labels of the series, the metric, and
/// the operations.
#[test]
fn recording_rules_have_conventional_names_and_documentation() {
    let metrics = read(root().join("docs/metrics.md"));
    for rule in recordings() {
        let name = rule["record"].as_str().unwrap();
        let parts: Vec<&str> = name.split(':').collect();
        let [labels, metric, operations] = parts[..] else {
            panic!("{name} has not the form LABELS:METRIC:OPERATIONS");
        };
        let by = format!("by ({})", labels.replace('_', ", "));
        let expression = rule["expr"].as_str().unwrap();
        let (first, rest) = expression.split_once(' ').unwrap();
        assert!(rest.starts_with(&by), "{name}: {expression}");
        assert!(operations.starts_with(first), "{name}: {expression}");
        assert!(
            metric.starts_with("etcd_") && !metric.ends_with("_total"),
            "{name}"
        );
        assert!(metrics.contains(&format!("`{name}`")), "{name}");
    }
}
