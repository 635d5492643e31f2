//! Shared parts of the schemas.
//!
//! Embedded schemas of Kubernetes types have no descriptions. A type that occurs twice has descriptions only once: the
//! spec of an EtcdCluster has none in an EtcdRestore. With all descriptions, the CRDs would be too large for `kubectl
//! apply` (262144 bytes) and for Helm's release Secret (1 MiB).

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::EnvVar;
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Deserializer};
use serde_json::{Value, json};

/// The schema of a Kubernetes type without descriptions.
pub(crate) fn embedded<T: JsonSchema>(generator: &mut SchemaGenerator) -> Schema {
    let mut schema = generator.subschema_for::<T>().to_value();
    strip_descriptions(&mut schema);
    Schema::try_from(schema).unwrap_or_default()
}

/// The schema of a list with at most 32 items of a Kubernetes type.
pub(crate) fn embedded_list<T: JsonSchema>(generator: &mut SchemaGenerator) -> Schema {
    let items = embedded::<T>(generator);
    json_schema!({ "type": "array", "maxItems": 32, "items": items })
}

/// The schema of environment variables. The names have a maximum length, because CEL rules match the names, and the API
/// server rejects CEL rules with unlimited cost.
pub(crate) fn environment(generator: &mut SchemaGenerator) -> Schema {
    let mut schema = embedded_list::<EnvVar>(generator).to_value();
    if let Some(name) = schema.pointer_mut("/items/properties/name") {
        name["maxLength"] = json!(256);
    }
    Schema::try_from(schema).unwrap_or_default()
}

/// The schema of a map of labels or annotations.
pub(crate) fn text_map(_: &mut SchemaGenerator) -> Schema {
    json_schema!({ "type": "object", "maxProperties": 64, "additionalProperties": { "type": "string" } })
}

/// The schema of a part of a status that is a copy of a spec. The API server has validated the spec, so the copy is
/// not validated.
pub(crate) fn open_object(_: &mut SchemaGenerator) -> Schema {
    json_schema!({ "type": "object", "x-kubernetes-preserve-unknown-fields": true })
}

/// The schema of the name of an object.
pub(crate) fn object_name(_: &mut SchemaGenerator) -> Schema {
    json_schema!({ "type": "string", "minLength": 1, "maxLength": 253 })
}

/// The schema of an optional object name. As in coreos/etcd-operator, an empty text means no name.
pub(crate) fn optional_object_name(_: &mut SchemaGenerator) -> Schema {
    json_schema!({ "type": "string", "maxLength": 253 })
}

/// Removes the descriptions of the fields of a type, for a schema that contains the type more than once. The
/// description of the schema itself stays.
pub(crate) fn without_descriptions_of_fields(schema: &mut Schema) {
    if let Some(schema) = schema.as_object_mut() {
        schema.values_mut().for_each(strip_descriptions);
    }
}

fn strip_descriptions(schema: &mut Value) {
    match schema {
        Value::Object(map) => {
            if map.get("description").is_some_and(Value::is_string) {
                map.remove("description");
            }
            map.values_mut().for_each(strip_descriptions);
        }
        Value::Array(items) => items.iter_mut().for_each(strip_descriptions),
        _ => {}
    }
}

/// Reads `null` as an empty value, because Go writes `null` for an empty list or map.
pub(crate) fn null_as_empty<'de, D, T>(deserializer: D) -> Result<T, D::Error>
where
    D: Deserializer<'de>,
    T: Deserialize<'de> + Default,
{
    Ok(Option::<T>::deserialize(deserializer)?.unwrap_or_default())
}

/// Reads a list without the items that cannot be parsed, so that a status of another release can be read.
pub(crate) fn readable_items<'de, D, T>(deserializer: D) -> Result<Vec<T>, D::Error>
where
    D: Deserializer<'de>,
    T: serde::de::DeserializeOwned,
{
    let items = Option::<Vec<Value>>::deserialize(deserializer)?.unwrap_or_default();
    Ok(items
        .into_iter()
        .filter_map(|item| serde_json::from_value(item).ok())
        .collect())
}

/// The text. `None` if it is missing or empty, because coreos/etcd-operator treats an empty text as missing.
pub(crate) fn given(text: Option<&String>) -> Option<&str> {
    text.map(String::as_str).filter(|text| !text.is_empty())
}

/// A map of labels or annotations.
pub(crate) type TextMap = BTreeMap<String, String>;

#[allow(
    clippy::trivially_copy_pass_by_ref,
    reason = "serde passes a reference"
)]
pub(crate) fn is_false(value: &bool) -> bool {
    !value
}
