//! Builds the API reference page from the schemas of the CRDs.

use std::fmt::Write;

use serde_json::Value;

/// The text of the page.
pub(crate) fn page(definitions: &[Value]) -> String {
    let mut page = String::from(
        "<!-- Generated from the crate `api` by `UPDATE=1 cargo test -p api`. Do not edit. -->\n\n\
         # API reference\n\n\
         Group `etcd.database.coreos.com`, version `v1beta2`. A dot separates a field from its parent object, `[]` means the items of a list.\n\
         Fields marked *required* must be set. Fields of Kubernetes types are not listed: see the Kubernetes\n\
         API reference.\n",
    );
    for definition in definitions {
        let kind = definition["spec"]["names"]["kind"].as_str().unwrap();
        let schema = &definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"];
        let summary = schema["description"].as_str().unwrap();
        write!(page, "\n## {kind}\n\n{summary}\n").unwrap();
        rules_of(schema, &mut page);
        for part in ["spec", "status"] {
            write!(
                page,
                "\n### {kind} {part}\n\n| field | type | description |\n|---|---|---|\n"
            )
            .unwrap();
            let mut rows = Vec::new();
            fields(&schema["properties"][part], part, &mut rows);
            page.extend(rows);
        }
    }
    page
}

fn rules_of(schema: &Value, page: &mut String) {
    let messages = messages(schema);
    if !messages.is_empty() {
        page.push_str("\nRules for the whole object:\n\n");
        for message in messages {
            writeln!(page, "- {}", literal(message)).unwrap();
        }
    }
}

fn messages(schema: &Value) -> Vec<&str> {
    let rules = schema["x-kubernetes-validations"]
        .as_array()
        .map_or(&[][..], Vec::as_slice);
    rules
        .iter()
        .filter_map(|rule| rule["message"].as_str())
        .collect()
}

fn fields(schema: &Value, path: &str, rows: &mut Vec<String>) {
    for message in messages(schema) {
        rows.push(format!("| `{path}` | rule | {} |\n", literal(message)));
    }
    let Some(properties) = schema["properties"].as_object() else {
        return;
    };
    for (name, property) in properties {
        let path = format!("{path}.{name}");
        let required = schema["required"]
            .as_array()
            .is_some_and(|all| all.iter().any(|one| one == name));
        rows.push(row(&path, property, required));
        // The fields of `template.spec` are skipped, because they are the fields of an EtcdCluster, which the API
        // reference already lists.
        if path.ends_with("template.spec") {
            continue;
        }
        if is_own(property) {
            fields(property, &path, rows);
        } else if is_own(&property["items"]) {
            fields(&property["items"], &format!("{path}[]"), rows);
        }
    }
}

/// True if the type belongs to this API. Embedded Kubernetes types have no descriptions.
fn is_own(schema: &Value) -> bool {
    schema["properties"]
        .as_object()
        .is_some_and(|all| all.values().any(|one| one["description"].is_string()))
}

fn row(path: &str, schema: &Value, required: bool) -> String {
    let mut text = cell(schema["description"].as_str().unwrap_or_default());
    if !is_own(schema) && !path.ends_with("template.spec") {
        for message in messages(schema) {
            write!(text, " Rule: {}.", literal(message)).unwrap();
        }
    }
    let values = schema["enum"].as_array().map_or(&[][..], Vec::as_slice);
    let values: Vec<String> = values
        .iter()
        .filter_map(Value::as_str)
        .map(|value| format!("`{value}`"))
        .collect();
    if !values.is_empty() {
        write!(text, " One of {}.", values.join(", ")).unwrap();
    }
    if !schema["default"].is_null() {
        write!(
            text,
            " Default: `{}`.",
            schema["default"].to_string().trim_matches('"')
        )
        .unwrap();
    }
    let mark = if required { ", *required*" } else { "" };
    format!(
        "| `{path}` | {}{mark} | {} |\n",
        type_of(schema),
        text.trim()
    )
}

fn type_of(schema: &Value) -> String {
    match schema["type"].as_str() {
        Some("array") => format!("list of {}", type_of(&schema["items"])),
        Some("object") if schema["additionalProperties"].is_object() => "map".to_owned(),
        Some("string") if schema["format"] == "date-time" => "time".to_owned(),
        Some(other) => other.to_owned(),
        None => "integer or string".to_owned(),
    }
}

fn cell(text: &str) -> String {
    text.split_whitespace()
        .collect::<Vec<_>>()
        .join(" ")
        .replace('|', "\\|")
}

/// Escapes Markdown in a text.
fn literal(text: &str) -> String {
    cell(text)
        .replace('<', "&lt;")
        .replace('*', "\\*")
        .replace('_', "\\_")
}
