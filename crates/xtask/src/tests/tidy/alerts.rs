//! Checks the alerts and recording rules of the chart with promtool.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::Command;

use serde_yaml_ng::Value;

use super::root;
use crate::{programs, shell};

const CASES: &str = "crates/xtask/src/tests/tidy/alerts.yaml";
const RECORDING_CASES: &str = "crates/xtask/src/tests/tidy/recordings.yaml";

/// The alerts of the chart as a rule file of Prometheus, for the cluster operator in the namespace `operators`.
fn rules() -> Value {
    let chart = root().join("charts/etcd-operator/alerts.yaml");
    let text = fs::read_to_string(chart).unwrap();
    let text = text
        .replace("BACKUP_SECONDS", "7200")
        .replace("CERTIFICATE_SECONDS", "604800")
        .replace("RESTORE_SECONDS", "3600")
        .replace("NAMESPACE", "operators")
        .replace("OPERATOR", "etcd-operator")
        .replace("WORD", "cluster");
    serde_yaml_ng::from_str(&text).unwrap()
}

/// The recording rules of the chart, each with `record` and `expr`.
pub(super) fn recordings() -> Vec<Value> {
    let chart = root().join("charts/etcd-operator/recordings.yaml");
    serde_yaml_ng::from_str(&fs::read_to_string(chart).unwrap()).unwrap()
}

fn recording_file() -> String {
    rule_file(&mapping([("recordings", recordings().into())]))
}

fn rule_file(alerts: &Value) -> String {
    let groups = alerts.as_mapping().unwrap().iter();
    let groups: Vec<Value> = groups
        .map(|(name, rules)| mapping([("name", name.clone()), ("rules", rules.clone())]))
        .collect();
    let file = mapping([("groups", Value::from(groups))]);
    serde_yaml_ng::to_string(&file).unwrap()
}

pub(super) fn mapping<const N: usize>(entries: [(&str, Value); N]) -> Value {
    let entries = entries.into_iter();
    let entries = entries.map(|(key, value)| (Value::from(key), value));
    Value::Mapping(entries.collect())
}

/// Runs promtool in `folder`.
pub(super) fn promtool(arguments: &[&str], folder: &Path) {
    let mut command = Command::new(programs::promtool().unwrap());
    shell::output(command.args(arguments).current_dir(folder)).unwrap();
}

/// The rules are not evaluated: promtool only parses names, expressions and templates.
#[test]
fn prometheus_accepts_all_rules() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("rules.yaml"), rule_file(&rules())).unwrap();
    fs::write(folder.path().join("recordings.yaml"), recording_file()).unwrap();
    let words = ["check", "rules", "rules.yaml", "recordings.yaml"];
    promtool(&words, folder.path());
}

#[test]
fn each_alert_fires_and_ends() {
    let mut alerts = rules();
    let mut names = BTreeSet::new();
    for (_, group) in alerts.as_mapping_mut().unwrap() {
        for rule in group.as_sequence_mut().unwrap() {
            // Annotations of alerts are removed, because promtool would compare their exact text, and this test does
            // not check their wording.
            rule.as_mapping_mut().unwrap().remove("annotations");
            names.insert(rule["alert"].as_str().unwrap().to_owned());
        }
    }
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("alerts.rules.yaml"), rule_file(&alerts)).unwrap();
    let cases = fs::read_to_string(root().join(CASES)).unwrap();
    fs::write(folder.path().join("alerts.yaml"), &cases).unwrap();
    promtool(&["test", "rules", "alerts.yaml"], folder.path());
    let cases: Value = serde_yaml_ng::from_str(&cases).unwrap();
    let tests = cases["tests"].as_sequence().unwrap().iter();
    let evaluations = tests.flat_map(|test| test["alert_rule_test"].as_sequence().unwrap());
    let firing = evaluations.filter(|evaluation| evaluation.get("exp_alerts").is_some());
    let tested: BTreeSet<String> = firing
        .map(|evaluation| evaluation["alertname"].as_str().unwrap().to_owned())
        .collect();
    assert_eq!(tested, names, "{CASES} must test each alert of the chart");
}

#[test]
fn each_recording_rule_has_expected_value() {
    let folder = tempfile::tempdir().unwrap();
    let rules = folder.path().join("recordings.rules.yaml");
    fs::write(rules, recording_file()).unwrap();
    let cases = fs::read_to_string(root().join(RECORDING_CASES)).unwrap();
    fs::write(folder.path().join("recordings.yaml"), &cases).unwrap();
    promtool(&["test", "rules", "recordings.yaml"], folder.path());
    let cases: Value = serde_yaml_ng::from_str(&cases).unwrap();
    let tests = cases["tests"].as_sequence().unwrap().iter();
    let evaluations = tests.flat_map(|test| test["promql_expr_test"].as_sequence().unwrap());
    let with_value = evaluations.filter(|it| it["exp_samples"].as_sequence().is_some());
    let tested: BTreeSet<String> = with_value
        .map(|evaluation| evaluation["expr"].as_str().unwrap().to_owned())
        .collect();
    let recordings = recordings();
    let names = recordings.iter().map(|it| it["record"].as_str().unwrap());
    assert_eq!(
        tested,
        names.map(str::to_owned).collect(),
        "{RECORDING_CASES} must test each recording rule of the chart"
    );
}
