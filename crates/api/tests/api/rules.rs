//! Every rule of the schemas, with one object it accepts and one it refuses. The objects are the
//! fixtures `e2e/fixtures/cel/{accepted,refused}/<rule>.yaml`; the end-to-end tests apply the same ones to a real
//! kube-apiserver. A refused one names in its first line what the refusal must say.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use serde_json::Value;

use crate::files::{objects, yaml_files};
use crate::schema::{refusals, schema_of};

const ACCEPTED: &str = "e2e/fixtures/cel/accepted";
const REFUSED: &str = "e2e/fixtures/cel/refused";

fn stem(path: &Path) -> String {
    path.file_stem().unwrap().to_str().unwrap().to_owned()
}

fn expected(path: &Path) -> String {
    let text = fs::read_to_string(path).unwrap();
    let first = text.lines().next().unwrap_or_default();
    let fragment = first.strip_prefix("# ").unwrap_or_else(|| {
        panic!(
            "{}: the first line does not say what is expected",
            path.display()
        )
    });
    fragment.trim().to_owned()
}

#[test]
fn accepted_fixtures_are_accepted() {
    for path in yaml_files(ACCEPTED) {
        for object in objects(&path) {
            assert_eq!(
                refusals(&object),
                Vec::<String>::new(),
                "{}",
                path.display()
            );
        }
    }
}

#[test]
fn refused_fixtures_are_refused_for_their_reason_only() {
    for path in yaml_files(REFUSED) {
        let expected = expected(&path);
        for object in objects(&path) {
            let refusals = refusals(&object);
            assert!(
                refusals.iter().any(|refusal| refusal.contains(&expected)),
                "{}: expected {expected:?}, got {refusals:?}",
                path.display()
            );
            // A bound and its rule may both speak; nothing else may be wrong.
            assert!(refusals.len() <= 2, "{}: {refusals:?}", path.display());
        }
    }
}

#[test]
fn every_rule_has_an_accepted_and_a_refused_fixture() {
    let accepted: BTreeSet<String> = yaml_files(ACCEPTED).iter().map(|path| stem(path)).collect();
    let refused: BTreeSet<String> = yaml_files(REFUSED).iter().map(|path| stem(path)).collect();
    assert_eq!(accepted, refused, "fixtures come in pairs");

    let fragments: Vec<String> = yaml_files(REFUSED)
        .iter()
        .map(|path| expected(path))
        .collect();
    let mut messages = BTreeSet::new();
    for kind in ["EtcdCluster", "EtcdBackup", "EtcdRestore"] {
        collect_messages(schema_of(kind), &mut messages);
    }
    let untested: Vec<&String> = messages
        .iter()
        .filter(|message| {
            !fragments
                .iter()
                .any(|fragment| message.contains(fragment.as_str()))
        })
        .collect();
    assert!(
        untested.is_empty(),
        "rules without a fixture: {untested:#?}"
    );
}

#[test]
fn every_rule_says_what_to_do() {
    let mut messages = BTreeSet::new();
    for kind in ["EtcdCluster", "EtcdBackup", "EtcdRestore"] {
        collect_messages(schema_of(kind), &mut messages);
    }
    for message in messages {
        assert!(message.contains(": "), "no remedy after a colon: {message}");
    }
}

fn collect_messages(schema: &Value, messages: &mut BTreeSet<String>) {
    match schema {
        Value::Object(map) => {
            if let Some(Value::Array(rules)) = map.get("x-kubernetes-validations") {
                for rule in rules {
                    let message = rule["message"]
                        .as_str()
                        .unwrap_or_else(|| panic!("rule without message: {rule}"));
                    messages.insert(message.to_owned());
                }
            }
            map.values()
                .for_each(|inner| collect_messages(inner, messages));
        }
        Value::Array(items) => items
            .iter()
            .for_each(|inner| collect_messages(inner, messages)),
        _ => {}
    }
}
