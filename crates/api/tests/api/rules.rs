//! Tests each rule of the schemas with an object that it accepts and an object that it rejects:
//! `e2e/fixtures/cel/{accepted,refused}/<rule>.yaml`. The first line of a rejected fixture is the expected message.
//! The end-to-end tests send the same fixtures to a kube-apiserver.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use api::cluster::{
    EtcdOptions, OWNED_FLAGS, TYPED_FLAGS, flag_of_env, refused_argument, refused_variable,
};
use serde_json::{Value, json};

use crate::files::{objects, yaml_files};
use crate::schema::{refusals, refusals_of_change, schema_of};

const ACCEPTED: &str = "e2e/fixtures/cel/accepted";
const REFUSED: &str = "e2e/fixtures/cel/refused";

/// The kinds that the CRDs define.
const KINDS: [&str; 6] = [
    "EtcdCluster",
    "EtcdBackup",
    "EtcdRestore",
    "EtcdMirror",
    "EtcdRole",
    "EtcdUser",
];

fn stem(path: &Path) -> String {
    path.file_stem().unwrap().to_str().unwrap().to_owned()
}

fn expected(path: &Path) -> String {
    let text = fs::read_to_string(path).unwrap();
    let first = text.lines().next().unwrap_or_default();
    let fragment = first.strip_prefix("# ").unwrap_or_else(|| {
        panic!(
            "{}: the first line must be `# <expected message>`",
            path.display()
        )
    });
    fragment.trim().to_owned()
}

#[test]
fn accepted_fixtures_violate_no_crd_rule() {
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
fn refused_fixtures_violate_only_expected_crd_rule() {
    for path in yaml_files(REFUSED) {
        let expected = expected(&path);
        for object in objects(&path) {
            let refusals = refusals(&object);
            assert!(
                refusals.iter().any(|refusal| refusal.contains(&expected)),
                "{}: expected {expected:?}, got {refusals:?}",
                path.display()
            );
            // A second refusal is allowed, because a bound such as `maximum` may reject the same field as the rule.
            assert!(refusals.len() <= 2, "{}: {refusals:?}", path.display());
        }
    }
}

#[test]
fn every_crd_rule_has_an_accepted_and_a_refused_fixture() {
    let accepted: BTreeSet<String> = yaml_files(ACCEPTED).iter().map(|path| stem(path)).collect();
    let refused: BTreeSet<String> = yaml_files(REFUSED).iter().map(|path| stem(path)).collect();
    assert_eq!(
        accepted, refused,
        "each rule must have an accepted and a refused fixture"
    );

    let fragments: Vec<String> = yaml_files(REFUSED)
        .iter()
        .map(|path| expected(path))
        .collect();
    let mut messages = BTreeSet::new();
    for kind in KINDS {
        collect_messages(schema_of(kind), &mut messages);
    }
    let untested: Vec<&String> = messages
        .iter()
        // The fixtures are new objects, which cannot violate a rule that compares an object with its previous version.
        .filter(|message| !is_rule_for_changes(message))
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
fn message_of_every_crd_rule_contains_remedy() {
    let mut messages = BTreeSet::new();
    for kind in KINDS {
        collect_messages(schema_of(kind), &mut messages);
    }
    for message in messages {
        assert!(message.contains(": "), "no remedy after a colon: {message}");
    }
}

/// True for the message of a rule that compares an object with its previous version.
fn is_rule_for_changes(message: &str) -> bool {
    message.contains(" cannot be changed: ")
}

#[test]
fn destination_and_prefix_of_mirror_cannot_be_changed() {
    let mirror = |source: Value, destination: Value| {
        json!({ "apiVersion": "etcd.database.coreos.com/v1beta2", "kind": "EtcdMirror",
            "metadata": { "name": "example" },
            "spec": { "source": source, "destination": destination } })
    };
    let endpoint = |url: &str| json!({ "etcdEndpoints": [url] });
    let with_prefix =
        |prefix: &str| json!({ "etcdEndpoints": ["http://a:2379"], "prefix": prefix });
    let to = |name: &str| json!({ "etcdCluster": { "name": name } });
    let old = mirror(endpoint("http://a:2379"), to("b"));
    for (new, expected) in [
        (mirror(endpoint("http://c:2379"), to("b")), None),
        (mirror(with_prefix(""), to("b")), None),
        (
            mirror(with_prefix("/x/"), to("b")),
            Some("spec.source.prefix cannot be changed"),
        ),
        (
            mirror(endpoint("http://a:2379"), to("c")),
            Some("spec.destination cannot be changed"),
        ),
    ] {
        assert_eq!(refusals(&new), Vec::<String>::new(), "{new}");
        let found = refusals_of_change(&old, &new);
        match expected {
            None => assert_eq!(found, Vec::<String>::new(), "{new}"),
            Some(expected) => {
                assert!(found.len() == 1 && found[0].contains(expected), "{found:?}");
            }
        }
    }
}

fn is_refused(pod: &Value) -> bool {
    let object = json!({ "apiVersion": "etcd.database.coreos.com/v1beta2", "kind": "EtcdCluster",
        "metadata": { "name": "example" }, "spec": { "pod": pod } });
    !refusals(&object).is_empty()
}

/// The operator checks the same flags as the schema, because the installed CRD may be older.
#[test]
fn schema_and_operator_reject_same_flags_and_variables() {
    let others = [
        "log-level",
        "names",
        "data",
        "peer-name",
        "wal",
        "feature-gates",
        "discover",
    ];
    let owned = OWNED_FLAGS.iter().map(|flag| flag.replace('*', ""));
    let longer = OWNED_FLAGS.iter().map(|flag| flag.replace('*', "x-9"));
    let mut flags: Vec<String> = owned.chain(longer).collect();
    flags.extend(
        TYPED_FLAGS
            .iter()
            .chain(&others)
            .map(|flag| (*flag).to_owned()),
    );
    let more: Vec<String> = flags
        .iter()
        .flat_map(|flag| {
            [
                format!("experimental-{flag}"),
                format!("{flag}-more"),
                format!("x-{flag}"),
            ]
        })
        .collect();
    for flag in flags.iter().chain(&more) {
        let argument = format!("--{flag}=1");
        assert_eq!(
            is_refused(&json!({ "extraArgs": [argument] })),
            refused_argument(&argument).is_some(),
            "{argument}"
        );
        let name = format!("ETCD_{}", flag.to_uppercase().replace('-', "_"));
        let lower = format!("ETCD_{}", flag.replace('-', "_"));
        for variable in [name, lower] {
            let env = json!({ "etcdEnv": [{ "name": variable, "value": "1" }] });
            assert_eq!(
                is_refused(&env),
                refused_variable(&variable).is_some(),
                "{variable}"
            );
        }
    }
}

/// The environment variable of a reserved flag must also be reserved, because etcd reads flags from variables.
#[test]
fn operator_reserves_variable_of_each_reserved_flag() {
    for owned in OWNED_FLAGS {
        let flag = owned.replace('*', "x");
        assert!(refused_argument(&format!("--{flag}")).is_some());
        let variable = format!("ETCD_{}", flag.to_uppercase().replace('-', "_"));
        assert_eq!(flag_of_env(&variable).as_deref(), Some(flag.as_str()));
        assert!(refused_variable(&variable).is_some(), "{variable}");
    }
}

/// If `spec.etcd` sets an option, the schema rejects the environment variable of the same option.
#[test]
fn schema_rejects_variable_of_every_option_that_spec_sets() {
    let all = json!({ "quotaBackendBytes": 4_294_967_296_i64, "autoCompactionMode": "periodic",
        "autoCompactionRetention": "1h", "heartbeatInterval": "100ms", "electionTimeout": "1s", "snapshotCount": 5000,
        "maxRequestBytes": 2_097_152, "maxTxnOps": 1024 });
    let options: EtcdOptions = serde_json::from_value(all.clone()).unwrap();
    let flags: Vec<&str> = options.flags().iter().map(|option| option.flag).collect();
    assert_eq!(flags, TYPED_FLAGS);
    for flag in flags {
        let name = format!("ETCD_{}", flag.to_uppercase().replace('-', "_"));
        let refused = |etcd: &Value| {
            let object = json!({ "apiVersion": "etcd.database.coreos.com/v1beta2", "kind": "EtcdCluster",
                "metadata": { "name": "example" },
                "spec": { "etcd": etcd, "pod": { "etcdEnv": [{ "name": name, "value": "1" }] } } });
            !refusals(&object).is_empty()
        };
        assert!(refused(&all), "{name}");
        assert!(!refused(&json!({})), "{name}");
    }
}

/// The rules for an EtcdCluster also apply to the template in an EtcdRestore.
#[test]
fn restore_template_may_not_set_reserved_flags() {
    let restore = json!({ "apiVersion": "etcd.database.coreos.com/v1beta2", "kind": "EtcdRestore",
        "metadata": { "name": "example" }, "spec": { "backup": { "name": "b" }, "etcdCluster": { "name": "c",
            "template": { "spec": { "pod": { "etcdEnv": [{ "name": "ETCD_FORCE_NEW_CLUSTER", "value": "true" }] } } } } } });
    let refusals = refusals(&restore);
    assert!(
        refusals.iter().any(|one| one.contains("spec.pod.etcdEnv")),
        "{refusals:?}"
    );
    let problems = api::restore::validate(&serde_json::from_value(restore).unwrap());
    let fields: Vec<&str> = problems.iter().map(|one| one.field.as_str()).collect();
    assert_eq!(fields, ["spec.etcdCluster.template.spec.pod.etcdEnv"]);
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
