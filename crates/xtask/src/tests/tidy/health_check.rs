//! Runs the health check for Argo CD in docs/gitops.md with Lua 5.4.

use std::fs;
use std::io::Write;
use std::process::{Command, Stdio};

use serde_json::{Value, json};

use super::root;
use crate::programs;

/// The script of the first health check in docs/gitops.md.
fn script() -> String {
    let page = fs::read_to_string(root().join("docs/gitops.md")).unwrap();
    let start = "resource.customizations.health.etcd.database.coreos.com_EtcdCluster: |\n";
    let (_, rest) = page.split_once(start).expect("the health check");
    let lines = rest.lines().take_while(|line| line.starts_with("    "));
    lines.flat_map(|line| [line.trim(), "\n"]).collect()
}

/// A value as a Lua expression.
fn lua(value: &Value) -> String {
    match value {
        Value::Null => "nil".to_owned(),
        Value::Array(items) => {
            let items: Vec<String> = items.iter().map(lua).collect();
            format!("{{{}}}", items.join(", "))
        }
        Value::Object(fields) => {
            let fields = fields.iter();
            let fields: Vec<String> = fields
                .map(|(name, value)| format!("[{name:?}] = {}", lua(value)))
                .collect();
            format!("{{{}}}", fields.join(", "))
        }
        other => other.to_string(),
    }
}

/// The health status and the message that the script returns for an object.
fn health(object: &Value) -> (String, String) {
    let program = format!(
        "local obj = {}\nlocal function check()\n{}end\nlocal health = check()\nprint(health.status)\nprint(health.message)\n",
        lua(object),
        script()
    );
    let lua = programs::lua().expect("Lua is missing: run `apt-get install lua5.4`");
    let mut child = Command::new(lua)
        .arg("-")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut input = child.stdin.take().unwrap();
    input.write_all(program.as_bytes()).unwrap();
    drop(input);
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "Lua rejects\n{program}");
    let text = String::from_utf8(output.stdout).unwrap();
    let (status, message) = text.split_once('\n').unwrap();
    (status.to_owned(), message.trim_end().to_owned())
}

fn condition(kind: &str, status: &str, reason: &str, message: &str) -> Value {
    json!({ "type": kind, "status": status, "reason": reason, "message": message })
}

#[test]
fn argo_cd_health_check_follows_ready_condition() {
    let unread = "the operator has not processed the spec yet";
    let reconciling = condition("Reconciling", "True", "Scaling", "m");
    let not_ready = condition("Ready", "False", "Scaling", "adding a member");
    let stalled = condition("Stalled", "True", "InvalidSpec", "correct spec.version");
    let cases = [
        (json!({}), 1, "Progressing", unread),
        // The CRD sets `observedGeneration` of a new object to -1.
        (
            json!({ "observedGeneration": -1 }),
            1,
            "Progressing",
            unread,
        ),
        // The operator has written this status for generation 1, but the object has generation 2.
        (
            json!({ "observedGeneration": 1, "conditions": [condition("Ready", "True", "Ready", "m")] }),
            2,
            "Progressing",
            unread,
        ),
        (
            json!({ "observedGeneration": 1, "conditions": [condition("Ready", "True", "Ready", "3 of 3 serve")] }),
            1,
            "Healthy",
            "3 of 3 serve",
        ),
        (
            json!({ "observedGeneration": 1, "conditions": [not_ready, reconciling] }),
            1,
            "Progressing",
            "adding a member",
        ),
        (
            json!({ "observedGeneration": 1, "conditions": [condition("Ready", "False", "InvalidSpec", "x"), stalled] }),
            1,
            "Degraded",
            "correct spec.version",
        ),
        (
            json!({ "observedGeneration": 1, "conditions": [condition("Ready", "True", "Hibernated", "stopped")] }),
            1,
            "Suspended",
            "stopped",
        ),
        (
            json!({ "conditions": [condition("Managed", "False", "OtherScope", "no operator manages it")] }),
            1,
            "Degraded",
            "no operator manages it",
        ),
    ];
    for (status, generation, expected, message) in cases {
        let object = json!({ "metadata": { "generation": generation }, "status": status });
        let found = health(&object);
        assert_eq!(found, (expected.to_owned(), message.to_owned()), "{object}");
    }
}
