//! Checks that the manifests in the documents match the schemas of the CRDs and of the chart.

use serde::Deserialize;
use serde_json::Value;

use super::blocks::{Page, blocks, inline_code, pages};
use super::schemas::{KINDS, Schema, nested};

/// Kinds of other projects. Their manifests are not checked, because this repository does not contain their schemas.
const OTHER_KINDS: [&str; 6] = [
    "GitRepository",
    "Kustomization",
    "Pod",
    "PodMonitor",
    "Service",
    "ServiceMonitor",
];
/// Fields of other kinds in the prose. They are not checked.
const OTHER_FIELDS: [&str; 2] = ["spec.config", "spec.template.metadata.labels"];
/// Names of source files that look like fields. They are not checked.
const FILES: [&str; 1] = ["status.rs"];

fn documents(text: &str) -> Vec<Value> {
    serde_yaml_ng::Deserializer::from_str(text)
        .map(|document| Value::deserialize(document).unwrap_or_else(|it| panic!("{it}: {text}")))
        .filter(|document| !document.is_null())
        .collect()
}

/// The differences between a manifest and its schema. A manifest without `kind` is a part of an object of this project,
/// or values of the chart. A part of a Pod, Secret or ConfigMap is not checked.
fn faults(document: &Value) -> Vec<String> {
    let values = Schema::of_values();
    match document["kind"].as_str() {
        Some(kind) if KINDS.contains(&kind) => Schema::of_kind(kind).faults(document),
        Some("Application") => values.faults(&document["spec"]["source"]["helm"]["valuesObject"]),
        Some("HelmRelease") => values.faults(&document["spec"]["values"]),
        Some(kind) if OTHER_KINDS.contains(&kind) => Vec::new(),
        Some(kind) => vec![format!("unknown kind {kind}")],
        None if document["spec"]["containers"].is_array() || document["data"].is_object() => {
            Vec::new()
        }
        None if document.get("spec").is_some() || document.get("metadata").is_some() => KINDS
            .map(|kind| Schema::of_kind(kind).faults(document))
            .into_iter()
            .min_by_key(Vec::len)
            .unwrap_or_default(),
        None => values.faults(document),
    }
}

#[test]
fn manifests_in_documents_fit_schemas() {
    let mut found = Vec::new();
    let mut checked = 0;
    for Page { path, text } in pages() {
        for block in blocks(&text).iter().filter(|it| it.language == "yaml") {
            for document in documents(&block.text) {
                checked += 1;
                let faults = faults(&document).into_iter();
                found.extend(faults.map(|fault| format!("{path}:{}: {fault}", block.line)));
            }
        }
    }
    assert!(found.is_empty(), "{found:#?}");
    assert!(
        checked > 30,
        "the documents contain only {checked} manifests: does this check still parse their format?"
    );
}

#[test]
fn wrong_manifests_in_documents_are_detected() {
    for (text, expected) in [
        (
            "kind: EtcdCluster\nspec: {sise: 3}",
            ".spec.sise is not a field",
        ),
        ("kind: EtcdKluster", "unknown kind EtcdKluster"),
        (
            "spec: {recovery: {polizy: Manual}}",
            ".spec.recovery.polizy is not a field",
        ),
        (
            "backupOperator: {replica: 2}",
            ".backupOperator.replica is not a field",
        ),
        (
            "kind: HelmRelease\nspec: {values: {images: {}}}",
            ".images is not a field",
        ),
    ] {
        assert_eq!(faults(&documents(text)[0]), [expected]);
    }
}

/// The field and its value in inline code such as `spec.paused: true`. `None` for other code.
fn field(code: &str) -> Option<(&str, Option<&str>)> {
    let (path, value) = match code.split_once(": ") {
        Some((path, value)) => (path, Some(value)),
        None => (code, None),
    };
    let is_field = path.starts_with("spec.") || path.starts_with("status.");
    let good = |c: char| c.is_ascii_alphanumeric() || ".[]".contains(c);
    let is_named = is_field && path.chars().all(good) && !FILES.contains(&path);
    is_named.then_some((path, value))
}

/// True if a kind of this project has a field with this path that accepts the value.
fn exists(path: &str, value: Option<&str>) -> bool {
    KINDS.iter().any(|kind| {
        let schema = Schema::of_kind(kind);
        let value = value.map(|value| serde_yaml_ng::from_str(value).unwrap_or(Value::Null));
        let fits = value.is_none_or(|value| schema.faults(&nested(path, value)).is_empty());
        schema.has(path) && fits
    })
}

#[test]
fn fields_named_in_documents_exist() {
    let mut found = Vec::new();
    let mut checked = 0;
    for page in pages() {
        for code in inline_code(&page.text) {
            let Some((path, value)) = field(code) else {
                continue;
            };
            checked += 1;
            if !OTHER_FIELDS.contains(&path) && !exists(path, value) {
                found.push(format!("{}: {code}", page.path));
            }
        }
    }
    assert!(
        found.is_empty(),
        "documents name fields that do not exist: {found:#?}"
    );
    assert!(
        checked > 100,
        "the documents name only {checked} fields: does this check still parse their format?"
    );
}

#[test]
fn wrong_fields_in_prose_are_detected() {
    let is_right = |code| field(code).is_some_and(|(path, value)| exists(path, value));
    assert!(is_right("spec.recovery.policy: Automatic"));
    assert!(is_right("status.conditions"));
    assert!(!is_right("spec.recovery.policy: Always"));
    assert!(!is_right("spec.recovry.policy"));
    assert_eq!(field("status.rs"), None);
}
