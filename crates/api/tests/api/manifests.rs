//! Tests: manifests of coreos/etcd-operator v0.9.4, and the examples of this project.

use std::path::Path;

use api::access::{validate_role, validate_user};
use api::{
    EtcdBackup, EtcdCluster, EtcdMirror, EtcdRestore, EtcdRole, EtcdUser, Problem, backup, cluster,
    mirror, restore,
};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::files::{objects, root, yaml_files};
use crate::schema::refusals;

/// Parses an object and serializes it again. Fails if a field is lost.
fn round_trip<T: DeserializeOwned + Serialize>(object: &Value, path: &Path) -> T {
    let typed: T = serde_json::from_value(object.clone())
        .unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let back = serde_json::to_value(&typed).unwrap();
    assert_contains(&back, object, &path.display().to_string());
    typed
}

fn assert_contains(whole: &Value, part: &Value, place: &str) {
    match (whole, part) {
        (Value::Object(whole), Value::Object(part)) => {
            // A field with the value `false` may be missing in `whole`, because Go programs omit such fields and read a
            // missing field as `false`.
            for (key, value) in part
                .iter()
                .filter(|(_, value)| **value != Value::Bool(false))
            {
                let found = whole
                    .get(key)
                    .unwrap_or_else(|| panic!("{place}.{key} is lost"));
                assert_contains(found, value, &format!("{place}.{key}"));
            }
        }
        (Value::Array(whole), Value::Array(part)) => {
            assert_eq!(whole.len(), part.len(), "{place}");
            for (index, value) in part.iter().enumerate() {
                assert_contains(&whole[index], value, &format!("{place}[{index}]"));
            }
        }
        _ => assert_eq!(whole, part, "{place}"),
    }
}

/// The problems of an object, and the names of its fields that have no effect. `None` for objects of other APIs.
fn check(object: &Value, path: &Path) -> Option<(Vec<Problem>, Vec<String>)> {
    match object["kind"].as_str()? {
        "EtcdCluster" => {
            let typed: EtcdCluster = round_trip(object, path);
            Some((
                cluster::validate(&typed),
                cluster::not_in_effect(&typed.spec),
            ))
        }
        "EtcdBackup" => {
            let typed: EtcdBackup = round_trip(object, path);
            Some((backup::validate(&typed), backup::not_in_effect(&typed.spec)))
        }
        "EtcdRestore" => {
            let typed: EtcdRestore = round_trip(object, path);
            Some((
                restore::validate(&typed),
                restore::not_in_effect(&typed.spec),
            ))
        }
        "EtcdMirror" => {
            let typed: EtcdMirror = round_trip(object, path);
            Some((mirror::validate(&typed), Vec::new()))
        }
        "EtcdRole" => {
            let typed: EtcdRole = round_trip(object, path);
            Some((validate_role(&typed), Vec::new()))
        }
        "EtcdUser" => {
            let typed: EtcdUser = round_trip(object, path);
            Some((validate_user(&typed), Vec::new()))
        }
        _ => None,
    }
}

fn expect_good(path: &Path) -> usize {
    let mut own = 0;
    for object in objects(path) {
        if let Some((problems, _)) = check(&object, path) {
            own += 1;
            assert_eq!(
                refusals(&object),
                Vec::<String>::new(),
                "{}",
                path.display()
            );
            assert_eq!(problems, [], "{}", path.display());
        }
    }
    own
}

#[test]
fn manifests_of_coreos_operator_v0_9_4_are_accepted() {
    let files = yaml_files("e2e/fixtures/v0.9.4");
    assert!(files.len() >= 5, "{files:?}");
    for path in files {
        assert!(expect_good(&path) > 0, "{}", path.display());
    }
}

#[test]
fn examples_parse_and_are_accepted() {
    let own: usize = yaml_files("examples")
        .iter()
        .map(|path| expect_good(path))
        .sum();
    assert!(
        own >= 6,
        "the examples contain only {own} objects of this API, which is too few"
    );
}

#[test]
fn examples_mark_fields_not_yet_in_effect() {
    for path in yaml_files("examples") {
        let text = std::fs::read_to_string(&path).unwrap();
        let waiting = objects(&path)
            .iter()
            .filter_map(|object| check(object, &path))
            .any(|(_, fields)| !fields.is_empty());
        assert_eq!(
            text.contains("not in effect yet"),
            waiting,
            "{}",
            path.display()
        );
    }
}

#[test]
fn example_etcd_cluster_has_default_spec() {
    let path = root().join("examples/example-etcd-cluster.yaml");
    let object = objects(&path).remove(0);
    let typed: EtcdCluster = round_trip(&object, &path);
    assert_eq!(typed.spec, cluster::EtcdClusterSpec::default());
}

#[test]
fn objects_stored_by_coreos_operator_v0_9_4_can_be_read() {
    // The operator of v0.9.4 stored such objects: with null lists, an empty status, or conditions in its own format.
    let stored = [
        r#"{"metadata":{"name":"a"},"spec":{"size":3,"pod":{"ClusterDomain":"","resources":{}}},"status":{"phase":"Running","size":3,
            "members":{"ready":null},"currentVersion":"3.2.13","targetVersion":"","conditions":[{"type":"Available","status":"True",
            "lastUpdateTime":"2019-01-01T00:00:00Z","lastTransitionTime":"2019-01-01T00:00:00Z","reason":"Cluster available"}]}}"#,
        r#"{"metadata":{"name":"a"},"spec":{"size":3},"status":{"conditions":[{"type":"Available","status":"True"}]}}"#,
        r#"{"metadata":{"name":"a"},"spec":{},"status":{}}"#,
    ];
    for text in stored {
        let cluster: EtcdCluster =
            serde_json::from_str(text).unwrap_or_else(|error| panic!("{text}: {error}"));
        assert_eq!(cluster.spec.size, 3);
    }
    let backup: EtcdBackup = serde_json::from_str(
        r#"{"metadata":{"name":"a"},"spec":{"etcdEndpoints":null,"storageType":"Floppy"},"status":{"succeeded":false,"lastSuccessDate":null}}"#,
    )
    .unwrap();
    assert_eq!(backup.spec.storage_type.as_str(), "Floppy");
    assert!(!backup::validate(&backup).is_empty());
}
