//! Removes values that may be secret from objects, before they are written into a support bundle. Performs no I/O.

use serde_json::Value;

/// The text that replaces a removed value.
const REMOVED: &str = "REMOVED";
/// The value of an environment variable or flag is removed if the name contains one of these texts.
const SUSPICIOUS: [&str; 8] = [
    "password",
    "passwd",
    "secret",
    "token",
    "credential",
    "apikey",
    "api_key",
    "private",
];
/// Annotations that are removed, because they contain a copy of the whole object.
const COPIES: [&str; 1] = ["kubectl.kubernetes.io/last-applied-configuration"];

/// Redacts an object of any kind. Removes the data of Secrets, the values of environment variables and flags with
/// suspicious names, the users and passwords in URLs, and copies of the object.
pub fn object(value: &mut Value) {
    if value["kind"] == "Secret" {
        for field in ["data", "stringData"] {
            if let Some(Value::Object(data)) = value.get_mut(field) {
                data.values_mut()
                    .for_each(|value| *value = Value::from(REMOVED));
            }
        }
    }
    if let Some(Value::Object(metadata)) = value.get_mut("metadata") {
        metadata.remove("managedFields");
        if let Some(Value::Object(annotations)) = metadata.get_mut("annotations") {
            annotations.retain(|key, _| !COPIES.contains(&key.as_str()));
        }
    }
    walk(value);
}

fn is_suspicious(name: &str) -> bool {
    let name = name.to_lowercase();
    SUSPICIOUS.iter().any(|part| name.contains(part))
}

fn walk(value: &mut Value) {
    match value {
        Value::Object(map) => {
            // If `map` is an environment variable with a suspicious name, its value is removed. A variable that refers
            // to a Secret has no field `value` and stays unchanged.
            let name = map.get("name").and_then(Value::as_str).unwrap_or_default();
            if is_suspicious(name) && map.get("value").is_some_and(Value::is_string) {
                map.insert("value".to_owned(), Value::from(REMOVED));
            }
            map.values_mut().for_each(walk);
        }
        Value::Array(list) => list.iter_mut().for_each(walk),
        Value::String(text) => *text = line(text),
        _ => {}
    }
}

/// Redacts a text. Removes the user and the password of each URL. If the text is a flag with a suspicious name
/// (`--name=value`), removes the value of the flag.
pub fn line(text: &str) -> String {
    let text = url_passwords(text);
    let flag = text
        .strip_prefix("--")
        .and_then(|rest| rest.split_once('='));
    match flag {
        Some((name, _)) if is_suspicious(name) => format!("--{name}={REMOVED}"),
        _ => text,
    }
}

/// Removes the user and the password of each URL: the text between `://` and `@`.
fn url_passwords(text: &str) -> String {
    let mut parts = text.split("://");
    let mut result = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        result.push_str("://");
        let end = part.find(|letter: char| "/?# \"',".contains(letter) || letter.is_whitespace());
        let (authority, rest) = part.split_at(end.unwrap_or(part.len()));
        match authority.rsplit_once('@') {
            Some((_, host)) => {
                result.push_str(REMOVED);
                result.push('@');
                result.push_str(host);
            }
            None => result.push_str(authority),
        }
        result.push_str(rest);
    }
    result
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn redacted_secret_has_no_data() {
        let mut secret = json!({ "kind": "Secret", "data": { "password": "cGFzcw==", "x": "eA==" },
            "stringData": { "y": "plain" } });
        object(&mut secret);
        let text = secret.to_string();
        for part in ["cGFzcw==", "eA==", "plain"] {
            assert!(!text.contains(part), "{text}");
        }
        assert!(text.contains("password"), "{text}");
    }

    #[test]
    fn passwords_in_variables_flags_and_urls_are_removed() {
        let mut pod = json!({ "kind": "Pod",
            "metadata": { "managedFields": [{}], "annotations": {
                "kubectl.kubernetes.io/last-applied-configuration": "hunter2", "team": "a" } },
            "spec": { "containers": [{ "name": "secret-reader", "args": ["--auth-token=hunter2", "--name=a"],
                "env": [{ "name": "DB_PASSWORD", "value": "hunter2" }, { "name": "PROXY", "value": "http://u:hunter2@proxy:1/x" },
                    { "name": "API_TOKEN", "valueFrom": { "secretKeyRef": { "name": "s", "key": "k" } } },
                    { "name": "GOGC", "value": "50" }] }] } });
        object(&mut pod);
        let text = pod.to_string();
        assert!(
            !text.contains("hunter2") && !text.contains("managedFields"),
            "{text}"
        );
        for part in [
            "http://REMOVED@proxy:1/x",
            "\"50\"",
            "secretKeyRef",
            "--name=a",
            "\"team\":\"a\"",
        ] {
            assert!(text.contains(part), "{part}: {text}");
        }
    }

    #[test]
    fn redaction_keeps_text_without_secrets() {
        for text in [
            "s3://bucket/key@v1",
            "a@b.c",
            "https://main-client.prod.svc:2379",
            "--cert-file=/x",
            "",
        ] {
            assert_eq!(line(text), text);
        }
        assert_eq!(line("see https://a:b@c, d"), "see https://REMOVED@c, d");
    }
}
