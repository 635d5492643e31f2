//! Renders the chart with Helm and the values in `e2e/fixtures/chart/values.yaml`, and with values of the chart
//! stable/etcd-operator. These tests need no Kubernetes cluster.

use std::collections::BTreeMap;
use std::io::Write as _;

use anyhow::{Context, Result, bail, ensure};
use e2e::{Env, chart};
use serde::Deserialize;
use serde_json::{Value, json};
use tempfile::NamedTempFile;

use crate::fixtures::root;

/// A case in `e2e/fixtures/chart/values.yaml`: values and the expected result.
#[derive(Deserialize)]
struct Case {
    #[serde(rename = "case")]
    name: String,
    #[serde(default)]
    values: BTreeMap<String, Value>,
    /// The expected values at JSON pointers, for each object. `None` if the object must not exist.
    #[serde(default)]
    expect: BTreeMap<String, Option<BTreeMap<String, Value>>>,
    /// A part of the message with which Helm rejects the values. `None` if Helm accepts them.
    error: Option<String>,
}

fn read<T: serde::de::DeserializeOwned>(path: &str) -> Result<T> {
    let path = root().join(path);
    let text = std::fs::read_to_string(&path).with_context(|| path.display().to_string())?;
    serde_yaml_ng::from_str(&text).with_context(|| path.display().to_string())
}

/// The output of `helm template` with these values.
async fn render(env: &Env, values: &Value) -> Result<String> {
    let mut file = NamedTempFile::new()?;
    // The values are written as JSON, which is also valid YAML.
    file.write_all(values.to_string().as_bytes())?;
    let (chart, file) = (env.chart.to_string_lossy(), file.path().to_string_lossy());
    let words = ["template", "x", &chart, "-n", "ns", "-f", &file];
    chart::helm(env, &words).await
}

/// The rendered objects by KIND/NAME. Further objects with the same kind and name have the key NAMESPACE/KIND/NAME.
fn objects(rendered: &str) -> Result<BTreeMap<String, Value>> {
    let mut found = BTreeMap::new();
    for object in chart::objects(rendered)? {
        let text = |pointer: &str| object.pointer(pointer).and_then(Value::as_str);
        let (kind, name) = (text("/kind"), text("/metadata/name"));
        let mut key = format!("{}/{}", kind.context("no kind")?, name.context("no name")?);
        if found.contains_key(&key) {
            key = format!("{}/{key}", text("/metadata/namespace").unwrap_or_default());
        }
        ensure!(
            found.insert(key.clone(), object).is_none(),
            "{key} is rendered twice"
        );
    }
    Ok(found)
}

async fn check(env: &Env, case: &Case) -> Result<()> {
    let outcome = render(env, &json!(case.values)).await;
    if let Some(part) = &case.error {
        let Err(error) = outcome else {
            bail!("Helm accepts the values");
        };
        ensure!(error.to_string().contains(part), "{error}");
        return Ok(());
    }
    let objects = objects(&outcome?)?;
    for (key, fields) in &case.expect {
        let object = objects.get(key);
        let Some(fields) = fields else {
            ensure!(object.is_none(), "{key} is rendered");
            continue;
        };
        let object = object.with_context(|| format!("{key} is missing"))?;
        for (pointer, expected) in fields {
            let found = object.pointer(pointer).unwrap_or(&Value::Null);
            ensure!(
                found == expected,
                "{key} {pointer} is {found}, expected {expected}"
            );
        }
    }
    Ok(())
}

#[tokio::test]
async fn every_chart_value_changes_rendered_objects() {
    let outcome: Result<()> = async {
        let env = Env::from_vars()?;
        let cases: Vec<Case> = read("e2e/fixtures/chart/values.yaml")?;
        for case in &cases {
            let checked = check(&env, case).await;
            checked.with_context(|| format!("case: {}", case.name))?;
        }
        Ok(())
    }
    .await;
    if let Err(error) = outcome {
        panic!("{error:?}");
    }
}

/// Sets the value at a path such as `a.b.c` to "old".
fn set(values: &mut Value, path: &str) {
    let mut keys: Vec<&str> = path.split('.').collect();
    let last = keys.pop().unwrap_or_default();
    let parent = keys.into_iter().fold(values, |value, key| &mut value[key]);
    parent[last] = json!("old");
}

#[tokio::test]
async fn old_chart_value_is_rejected_and_error_names_replacement() {
    const OPERATORS: [&str; 3] = ["clusterOperator", "backupOperator", "restoreOperator"];
    let outcome: Result<()> = async {
        let env = Env::from_vars()?;
        let old: BTreeMap<String, String> = read("charts/etcd-operator/old-values.yaml")?;
        let mut values = json!({});
        let mut lines = Vec::new();
        for (path, new) in &old {
            for operator in OPERATORS {
                let replaced = |text: &str| text.replace("OPERATOR", operator);
                set(&mut values, &replaced(path));
                lines.push(format!("  {}: {}", replaced(path), replaced(new)));
            }
        }
        let Err(error) = render(&env, &values).await else {
            bail!("Helm accepts the values of the old chart");
        };
        let error = error.to_string();
        for line in lines {
            ensure!(error.contains(&line), "no line {line:?} in {error}");
        }
        Ok(())
    }
    .await;
    if let Err(error) = outcome {
        panic!("{error:?}");
    }
}
