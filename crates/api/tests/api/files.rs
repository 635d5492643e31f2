//! Access to files of the workspace.

use std::fs;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde_json::Value;

pub(crate) fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../..")
        .canonicalize()
        .unwrap()
}

/// The YAML files in a directory, sorted by name.
pub(crate) fn yaml_files(directory: &str) -> Vec<PathBuf> {
    let directory = root().join(directory);
    let entries =
        fs::read_dir(&directory).unwrap_or_else(|error| panic!("{}: {error}", directory.display()));
    let mut files: Vec<PathBuf> = entries.map(|entry| entry.unwrap().path()).collect();
    files.retain(|path| {
        path.extension()
            .is_some_and(|extension| extension == "yaml")
    });
    files.sort();
    files
}

/// The objects in a YAML file, also those in the data of its ConfigMaps.
pub(crate) fn objects(path: &Path) -> Vec<Value> {
    let text = fs::read_to_string(path).unwrap();
    let mut objects = documents(&text, path);
    let inner: Vec<Value> = objects
        .iter()
        .filter(|object| object["kind"] == "ConfigMap")
        .flat_map(|object| object["data"].as_object().unwrap().values())
        .flat_map(|text| documents(text.as_str().unwrap(), path))
        .collect();
    objects.extend(inner);
    objects
}

fn documents(text: &str, path: &Path) -> Vec<Value> {
    serde_yaml_ng::Deserializer::from_str(text)
        .map(|document| {
            Value::deserialize(document)
                .unwrap_or_else(|error| panic!("{}: {error}", path.display()))
        })
        .filter(|object| !object.is_null())
        .collect()
}

/// Fails if the content of a generated file is not `text`. If the environment variable `UPDATE` is set, writes `text`
/// to the file instead.
pub(crate) fn expect_generated(path: &str, text: &str) {
    let file = root().join(path);
    if std::env::var_os("UPDATE").is_some() {
        fs::create_dir_all(file.parent().unwrap()).unwrap();
        fs::write(&file, text).unwrap();
    }
    let found = fs::read_to_string(&file).unwrap_or_default();
    assert!(
        found == text,
        "{path} is out of date: run `UPDATE=1 cargo test -p api`"
    );
}
