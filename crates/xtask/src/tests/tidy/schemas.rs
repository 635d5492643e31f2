//! Compares values with the schemas of the CRDs and of the chart: unknown fields, types and permitted values. The
//! validation rules (CEL) of the CRDs are not evaluated. The tests of the crate `api` evaluate them for the examples.

use std::collections::BTreeMap;
use std::fs;
use std::sync::LazyLock;

use serde_json::{Map, Value};

use super::root;

/// The kinds that the CRDs of this project define.
pub(super) const KINDS: [&str; 6] = [
    "EtcdCluster",
    "EtcdBackup",
    "EtcdRestore",
    "EtcdMirror",
    "EtcdRole",
    "EtcdUser",
];

/// The key of the chart's schema in [`SCHEMAS`].
const VALUES: &str = "values";

/// The schemas by kind. They are parsed once, because parsing takes most of the time of these tests.
static SCHEMAS: LazyLock<BTreeMap<&str, Schema>> = LazyLock::new(|| {
    let chart = root().join("charts/etcd-operator");
    let of_kind = |kind: &'static str| {
        let name = format!("{}s.etcd.database.coreos.com.yaml", kind.to_lowercase());
        let text = fs::read_to_string(chart.join("crds-generated").join(name)).unwrap();
        let definition: Value = serde_yaml_ng::from_str(&text).unwrap();
        let schema = &definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"];
        (kind, Schema(schema.clone()))
    };
    let values = fs::read_to_string(chart.join("values.schema.json")).unwrap();
    let values = Schema(serde_json::from_str(&values).unwrap());
    let kinds = KINDS.into_iter().map(of_kind);
    kinds.chain([(VALUES, values)]).collect()
});

/// A JSON schema, with the definitions to which it refers.
pub(super) struct Schema(Value);

impl Schema {
    /// The schema of a kind that the CRDs of this project define.
    pub(super) fn of_kind(kind: &str) -> &'static Self {
        &SCHEMAS[kind]
    }

    /// The schema of the values of the chart.
    pub(super) fn of_values() -> &'static Self {
        &SCHEMAS[VALUES]
    }

    /// The differences between an object and this schema. The fields `apiVersion`, `kind` and `metadata` are not
    /// checked.
    pub(super) fn faults(&self, value: &Value) -> Vec<String> {
        let mut value = value.clone();
        if let Some(fields) = value.as_object_mut() {
            for field in ["apiVersion", "kind", "metadata"] {
                fields.remove(field);
            }
        }
        let mut found = Vec::new();
        self.compare(&self.0, &value, "", &mut found);
        found
    }

    /// True if the schema has the field `path`, or accepts every field at this place. A list item is written as `[]`.
    pub(super) fn has(&self, path: &str) -> bool {
        let mut node = &self.0;
        for part in path.replace("[]", ".[]").split('.') {
            node = self.resolved(node);
            if is_open(node) {
                return true;
            }
            let next = match part {
                "" => continue,
                "[]" => node.get("items"),
                name => node["properties"].get(name).or_else(|| inner(node)),
            };
            let Some(next) = next else { return false };
            node = next;
        }
        true
    }

    fn resolved<'a>(&'a self, node: &'a Value) -> &'a Value {
        let pointer = node["$ref"].as_str().and_then(|it| it.strip_prefix('#'));
        pointer.map_or(node, |pointer| self.0.pointer(pointer).unwrap())
    }

    fn compare(&self, node: &Value, value: &Value, path: &str, found: &mut Vec<String>) {
        let node = self.resolved(node);
        // `null` is valid for every field, because it means that the field is not set: in chart values, in a patch and
        // in a manifest.
        if value.is_null() || is_open(node) {
            return;
        }
        if !has_type(node, value) {
            found.push(format!("{path} has another type: {value}"));
            return;
        }
        let permitted = node["enum"].as_array();
        if permitted.is_some_and(|permitted| !permitted.contains(value)) {
            found.push(format!("{path} cannot be {value}"));
        }
        for (key, value) in value.as_object().into_iter().flatten() {
            let below = format!("{path}.{key}");
            match node["properties"].get(key).or_else(|| inner(node)) {
                Some(node) => self.compare(node, value, &below, found),
                None => found.push(format!("{below} is not a field")),
            }
        }
        for value in value.as_array().into_iter().flatten() {
            self.compare(&node["items"], value, &format!("{path}[]"), found);
        }
    }
}

/// The schema for the values of a map. `None` if the node is not a map.
fn inner(node: &Value) -> Option<&Value> {
    node.get("additionalProperties").filter(|it| it.is_object())
}

/// True if the schema restricts at most the type of the value.
fn is_open(node: &Value) -> bool {
    let is_map = node["properties"].is_object() || inner(node).is_some();
    node["x-kubernetes-preserve-unknown-fields"] == true
        || node["x-kubernetes-int-or-string"] == true
        || node.get("type").is_none()
        || (node["type"] == "object" && !is_map)
}

fn has_type(node: &Value, value: &Value) -> bool {
    let is = |name: &str| match name {
        "object" => value.is_object(),
        "array" => value.is_array(),
        "string" => value.is_string(),
        "integer" => value.is_i64(),
        "number" => value.is_number(),
        "boolean" => value.is_boolean(),
        _ => true,
    };
    match &node["type"] {
        Value::Array(types) => types.iter().filter_map(Value::as_str).any(is),
        one => one.as_str().is_none_or(is),
    }
}

/// An object in which only the field `path` is set. An index such as `[0]` becomes a list with one item.
pub(super) fn nested(path: &str, value: Value) -> Value {
    path.replace('[', ".[")
        .rsplit('.')
        .fold(value, |value, part| {
            if part.starts_with('[') {
                Value::Array(vec![value])
            } else {
                Value::Object(Map::from_iter([(part.to_owned(), value)]))
            }
        })
}

#[test]
fn wrong_fields_types_and_values_are_detected() {
    let cluster = Schema::of_kind("EtcdCluster");
    let faults = |text: &str| cluster.faults(&serde_yaml_ng::from_str::<Value>(text).unwrap());
    assert_eq!(
        faults("metadata: {name: a}\nspec: {size: 3, pod: {labels: {a: b}}, TLS: {generated: {}}}"),
        Vec::<String>::new()
    );
    for (wrong, expected) in [
        ("spec: {sise: 3}", ".spec.sise is not a field"),
        (
            "spec: {size: three}",
            ".spec.size has another type: \"three\"",
        ),
        (
            "spec: {etcd: {snapshotCounts: 3}}",
            ".spec.etcd.snapshotCounts is not a field",
        ),
        (
            "spec: {recovery: {policy: Often}}",
            ".spec.recovery.policy cannot be \"Often\"",
        ),
        (
            "spec: {pod: {labels: {a: 1}}}",
            ".spec.pod.labels.a has another type: 1",
        ),
        (
            "spec: {pod: {tolerations: [{keys: a}]}}",
            ".spec.pod.tolerations[].keys is not a field",
        ),
    ] {
        assert_eq!(faults(wrong), [expected]);
    }
    let values = Schema::of_values();
    let set = |path, value| values.faults(&nested(path, value));
    assert!(set("podMonitor.enabled", true.into()).is_empty());
    assert!(set("backupOperator.extraEnv[0].name", "A".into()).is_empty());
    assert_eq!(
        set("podMonitor.enable", true.into()),
        [".podMonitor.enable is not a field"]
    );
    assert_eq!(
        set("clusterOperator.replicas", "two".into()),
        [".clusterOperator.replicas has another type: \"two\""]
    );
}

#[test]
fn fields_missing_in_schema_are_detected() {
    let cluster = Schema::of_kind("EtcdCluster");
    for path in [
        "spec.size",
        "spec.TLS",
        "status.memberDetails[].dbSize",
        "status.conditions[].type",
        "spec.pod.resources.requests.cpu",
    ] {
        assert!(cluster.has(path), "{path}");
    }
    for path in [
        "spec.sise",
        "status.memberDetails[].size",
        "spec.size.a",
        "spce",
    ] {
        assert!(!cluster.has(path), "{path}");
    }
}
