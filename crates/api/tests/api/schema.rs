//! Checks objects like a kube-apiserver: unknown fields, types, bounds, lengths, enums, required fields, defaults and
//! CEL rules, but not patterns. The end-to-end tests send the fixtures of `rules.rs` to a real kube-apiserver.

use std::collections::BTreeMap;
use std::sync::LazyLock;

use api::crd;
use kube::core::cel::{Validator, apply_defaults};
use serde_json::Value;

static SCHEMAS: LazyLock<BTreeMap<String, Value>> = LazyLock::new(|| {
    let definitions = crd::all().into_iter();
    definitions
        .map(|definition| serde_json::to_value(definition).unwrap())
        .map(|definition| {
            let kind = definition["spec"]["names"]["kind"]
                .as_str()
                .unwrap()
                .to_owned();
            let mut schema = definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"].clone();
            bind_old_self(&mut schema);
            (kind, schema)
        })
        .collect()
});

/// Removes `oldSelf.hasValue() ||`, the exemption of existing objects, from rules with `optionalOldSelf`. The fixtures
/// are new objects, and the evaluator of this test does not support an empty `oldSelf`.
fn bind_old_self(schema: &mut Value) {
    for rule in schema["x-kubernetes-validations"]
        .as_array_mut()
        .into_iter()
        .flatten()
    {
        if rule["optionalOldSelf"] == true {
            let text = rule["rule"].as_str().unwrap();
            let reduced = text
                .strip_prefix("oldSelf.hasValue() || ")
                .expect("the rule must apply to creations");
            *rule = serde_json::json!({ "rule": reduced, "message": rule["message"] });
        }
    }
}

pub(crate) fn schema_of(kind: &str) -> &'static Value {
    SCHEMAS
        .get(kind)
        .unwrap_or_else(|| panic!("no definition of {kind}"))
}

/// The errors with which the rules reject the change of an object.
pub(crate) fn refusals_of_change(old: &Value, new: &Value) -> Vec<String> {
    let schema = schema_of(new["kind"].as_str().expect("kind"));
    let (old, new) = (apply_defaults(schema, old), apply_defaults(schema, new));
    match Validator::new().validate(schema, &new, Some(&old)) {
        Ok(()) => Vec::new(),
        Err(errors) => errors.iter().map(ToString::to_string).collect(),
    }
}

/// The errors with which the API server rejects the object. Empty if it accepts the object.
pub(crate) fn refusals(object: &Value) -> Vec<String> {
    let schema = schema_of(object["kind"].as_str().expect("kind"));
    let object = apply_defaults(schema, object);
    let mut refusals = Vec::new();
    check(schema, &object, "", &mut refusals);
    if let Err(errors) = Validator::new().validate(schema, &object, None) {
        refusals.extend(errors.iter().map(ToString::to_string));
    }
    refusals
}

fn check(schema: &Value, value: &Value, path: &str, refusals: &mut Vec<String>) {
    if schema["x-kubernetes-int-or-string"] == true
        || schema["x-kubernetes-preserve-unknown-fields"] == true
    {
        return;
    }
    let mut refuse = |cause: String| refusals.push(format!("{path}: {cause}"));
    if value.is_null() {
        return; // A null value is no error: the API server prunes it, or `nullable` allows it.
    }
    let fits = match schema["type"].as_str() {
        Some("object") => value.is_object(),
        Some("array") => value.is_array(),
        Some("string") => value.is_string(),
        Some("integer") => value.is_i64(),
        Some("number") => value.is_number(),
        Some("boolean") => value.is_boolean(),
        _ => true,
    };
    if !fits {
        refuse(format!("Invalid value: must be of type {}", schema["type"]));
        return;
    }
    if schema["enum"]
        .as_array()
        .is_some_and(|allowed| !allowed.contains(value))
    {
        refuse(format!("Unsupported value: {value}"));
    }
    if let Some(number) = value.as_f64() {
        if schema["minimum"]
            .as_f64()
            .is_some_and(|minimum| number < minimum)
        {
            refuse(format!(
                "should be greater than or equal to {}",
                schema["minimum"]
            ));
        }
        if schema["maximum"]
            .as_f64()
            .is_some_and(|maximum| number > maximum)
        {
            refuse(format!(
                "should be less than or equal to {}",
                schema["maximum"]
            ));
        }
    }
    let length = value
        .as_str()
        .map(|text| text.chars().count())
        .or_else(|| value.as_array().map(Vec::len));
    let bounds = if value.is_string() {
        ["minLength", "maxLength"]
    } else {
        ["minItems", "maxItems"]
    };
    if let Some(length) = length.map(|length| length as u64) {
        if schema[bounds[0]]
            .as_u64()
            .is_some_and(|minimum| length < minimum)
        {
            refuse(format!("should be at least {} long", schema[bounds[0]]));
        }
        if schema[bounds[1]]
            .as_u64()
            .is_some_and(|maximum| length > maximum)
        {
            refuse("Too long".to_owned());
        }
    }
    for required in schema["required"]
        .as_array()
        .into_iter()
        .flatten()
        .filter_map(Value::as_str)
    {
        if value.get(required).is_none_or(Value::is_null) {
            refuse(format!("{required}: Required value"));
        }
    }
    for (name, inner) in value.as_object().into_iter().flatten() {
        check_field(schema, name, inner, path, refusals);
    }
    for (index, inner) in value.as_array().into_iter().flatten().enumerate() {
        check(
            &schema["items"],
            inner,
            &format!("{path}[{index}]"),
            refusals,
        );
    }
}

fn check_field(schema: &Value, name: &str, inner: &Value, path: &str, refusals: &mut Vec<String>) {
    let inner_path = format!("{path}.{name}");
    if let Some(property) = schema["properties"].get(name) {
        check(property, inner, &inner_path, refusals);
    } else if schema["additionalProperties"].is_object() {
        check(
            &schema["additionalProperties"],
            inner,
            &inner_path,
            refusals,
        );
    } else {
        let of_every_object = path.is_empty() && ["apiVersion", "kind", "metadata"].contains(&name);
        if !of_every_object && !path.starts_with(".metadata") {
            refusals.push(format!("{inner_path}: unknown field"));
        }
    }
}
