//! Compares an existing object with the object that the operator would build.

use serde::Serialize;
use serde_json::Value;

/// True if the existing object `there` has every field of the built object `made` with the same value. Of the metadata,
/// only labels, annotations and owner references are compared. Other fields of `there`, such as defaults and
/// annotations of other software, make no difference.
pub fn contains<K: Serialize>(there: &K, made: &K) -> bool {
    let (Ok(mut made), Ok(there)) = (serde_json::to_value(made), serde_json::to_value(there))
    else {
        return false;
    };
    if let Some(metadata) = made.get_mut("metadata").and_then(Value::as_object_mut) {
        metadata
            .retain(|key, _| matches!(key.as_str(), "labels" | "annotations" | "ownerReferences"));
    }
    has(&there, &made)
}

fn has(there: &Value, made: &Value) -> bool {
    match (there, made) {
        (Value::Object(there), Value::Object(made)) => made
            .iter()
            .all(|(key, value)| has(there.get(key).unwrap_or(&Value::Null), value)),
        (Value::Array(there), Value::Array(made)) => {
            there.len() == made.len()
                && there.iter().zip(made).all(|(there, made)| has(there, made))
        }
        (there, made) => there == made || made.is_null(),
    }
}
