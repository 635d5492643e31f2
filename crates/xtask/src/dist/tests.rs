//! Tests of the files of a release that need no compiled program. They use the Helm of the testbed.

use std::collections::BTreeSet;

use serde_json::Value as Json;
use serde_yaml_ng::Value;

use super::*;

const DIGEST: &str = "sha256:0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";

fn release(repository: &str, digest: Option<&str>) -> Release {
    let version = format!("{}-rc.1", origin::VERSION);
    Release {
        origin: Origin {
            version: version.clone(),
            revision: Some("0123456789012345678901234567890123456789".into()),
            source: Some("https://git.example.com/etcd-operator".into()),
            created: Some("2026-11-01T00:00:00Z".into()),
        },
        version,
        repository: repository.into(),
        digest: digest.map(str::to_owned),
    }
}

fn published() -> Release {
    release("registry.example.com/a/etcd-operator", Some(DIGEST))
}

/// Packages the released chart in this folder. Returns the path of the package.
fn packaged(folder: &Path, release: &Release) -> PathBuf {
    let files = chart::released(chart::files().unwrap(), release).unwrap();
    let package = folder.join(release.chart());
    fs::write(&package, chart::package(&files).unwrap()).unwrap();
    package
}

fn rendered(release: &Release, manifest: &chart::Manifest) -> Vec<Value> {
    let dir = tempfile::tempdir().unwrap();
    let package = packaged(dir.path(), release);
    let text = chart::render(&programs::helm().unwrap(), &package, manifest).unwrap();
    serde_yaml_ng::Deserializer::from_str(&text)
        .map(|document| serde::Deserialize::deserialize(document).unwrap())
        .collect()
}

fn kinds(objects: &[Value]) -> BTreeSet<&str> {
    objects
        .iter()
        .filter_map(|object| object["kind"].as_str())
        .collect()
}

fn images(objects: &[Value]) -> Vec<String> {
    let deployments = objects
        .iter()
        .filter(|object| object["kind"] == "Deployment");
    let image = |object: &Value| {
        object["spec"]["template"]["spec"]["containers"][0]["image"]
            .as_str()
            .map(str::to_owned)
    };
    deployments.filter_map(image).collect()
}

#[test]
fn manifests_run_the_released_image() {
    let release = published();
    for manifest in [&chart::NAMESPACED, &chart::CLUSTER_WIDE] {
        let images = images(&rendered(&release, manifest));
        let expected = format!(
            "registry.example.com/a/etcd-operator:{}@{DIGEST}",
            release.version
        );
        assert_eq!(images, vec![expected; 3]);
    }
    let local = release_without_registry();
    let images = images(&rendered(&local, &chart::NAMESPACED));
    assert_eq!(
        images[0],
        format!("localhost/etcd-operator:{}", local.version)
    );
}

fn release_without_registry() -> Release {
    release(image::NAME, None)
}

/// `kubectl delete -f` with the manifest deletes only the operators.
#[test]
fn deleting_manifest_keeps_every_cluster() {
    for manifest in [&chart::NAMESPACED, &chart::CLUSTER_WIDE] {
        let objects = rendered(&published(), manifest);
        let kinds = kinds(&objects);
        for kind in ["CustomResourceDefinition", "Namespace", "EtcdCluster"] {
            assert!(!kinds.contains(kind), "{kinds:?}");
        }
        // The manifest contains no pod of `helm test`, and all its objects are in one namespace.
        assert!(!kinds.contains("Pod"), "{kinds:?}");
        let namespaces = objects
            .iter()
            .filter_map(|it| it["metadata"]["namespace"].as_str());
        assert!(namespaces.into_iter().all(|it| it == manifest.namespace));
    }
}

#[test]
fn namespaced_manifest_grants_no_rights_in_other_namespaces() {
    let own = rendered(&published(), &chart::NAMESPACED);
    assert!(kinds(&own).contains("Role") && !kinds(&own).contains("ClusterRole"));
    let all = rendered(&published(), &chart::CLUSTER_WIDE);
    assert!(kinds(&all).contains("ClusterRole"));
}

#[test]
fn packaged_chart_passes_lint_and_is_reproducible() {
    let dirs = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    let [first, second] = dirs
        .each_ref()
        .map(|dir| packaged(dir.path(), &published()));
    chart::lint(&programs::helm().unwrap(), &first).unwrap();
    assert_eq!(fs::read(first).unwrap(), fs::read(second).unwrap());
}

#[test]
fn released_chart_does_not_mention_missing_image() {
    for (name, text) in chart::released(chart::files().unwrap(), &published()).unwrap() {
        for old in [
            "is in no registry",
            "No image is published",
            "../../docs",
            "image.repository=REPOSITORY",
        ] {
            assert!(!text.contains(old), "{name}: {old}");
        }
        if name == "Chart.yaml" {
            assert!(
                text.contains("- https://git.example.com/etcd-operator\n"),
                "{text}"
            );
        }
    }
}

#[test]
fn changed_chart_file_needs_new_replacement() {
    let mut files = chart::files().unwrap();
    for (_, text) in files.iter_mut().filter(|(name, _)| name == "values.yaml") {
        *text = text.replace("localhost/etcd-operator", "elsewhere/etcd-operator");
    }
    let error = format!("{:#}", chart::released(files, &published()).unwrap_err());
    assert!(error.contains("values.yaml"), "{error}");
}

#[test]
fn crd_file_contains_all_kinds() {
    let text = chart::crds(&chart::files().unwrap());
    let names: Vec<String> = serde_yaml_ng::Deserializer::from_str(&text)
        .map(|document| <Value as serde::Deserialize>::deserialize(document).unwrap())
        .filter_map(|object| object["spec"]["names"]["kind"].as_str().map(str::to_owned))
        .collect();
    assert_eq!(names, ["EtcdBackup", "EtcdCluster", "EtcdRestore"]);
}

#[test]
fn readme_describes_every_file() {
    for release in [published(), release_without_registry()] {
        let page = listing::readme(&release);
        for (name, _) in listing::files(&release) {
            assert!(page.contains(&format!("| `{name}` |")), "{name}");
        }
        assert_eq!(
            page.contains("No registry serves"),
            release.digest.is_none()
        );
    }
}

#[test]
fn checksums_have_format_of_sha256sum() {
    let dir = tempfile::tempdir().unwrap();
    put(dir.path(), "b", "").unwrap();
    put(dir.path(), "a", "").unwrap();
    let text = listing::text(&listing::sums(dir.path()).unwrap());
    let empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";
    assert_eq!(text, format!("{empty}  a\n{empty}  b\n"));
    put(dir.path(), listing::SUMS, &text).unwrap();
    let mut check = Command::new("sha256sum");
    shell::output(check.args(["-c", listing::SUMS]).current_dir(dir.path())).unwrap();
}

#[test]
fn comparison_names_changed_and_missing_files() {
    let sum = |name: &str, sha256: &str| Sum {
        name: name.into(),
        sha256: sha256.into(),
    };
    let first = [sum("a", "1"), sum("b", "1"), sum("c", "1")];
    let second = [sum("a", "1"), sum("b", "2"), sum("d", "1")];
    assert_eq!(listing::differences(&first, &second), ["b", "c", "d"]);
    assert!(listing::differences(&first, &first).is_empty());
}

#[test]
fn provenance_names_files_image_commit_and_tools() {
    let release = published();
    let sums = [Sum {
        name: "install.yaml".into(),
        sha256: "ab".into(),
    }];
    let inputs = provenance::Inputs {
        tools: vec![("rustc", "rustc 1.0".into())],
        files: sums.to_vec(),
    };
    let statement = || provenance::statement(&release, "urn:b", &inputs, &sums).unwrap();
    // The statement contains no time, so two builds have the same statement.
    assert_eq!(statement(), statement());
    let json: Json = serde_json::from_str(&statement()).unwrap();
    assert_eq!(json["_type"], "https://in-toto.io/Statement/v1");
    assert_eq!(json["predicateType"], "https://slsa.dev/provenance/v1");
    assert_eq!(json["subject"][0]["digest"]["sha256"], "ab");
    assert_eq!(json["subject"][1]["name"], release.repository.as_str());
    assert_eq!(
        json["subject"][1]["digest"]["sha256"],
        DIGEST.trim_start_matches("sha256:")
    );
    let definition = &json["predicate"]["buildDefinition"];
    let commit = &definition["resolvedDependencies"][0];
    assert_eq!(commit["uri"], "git+https://git.example.com/etcd-operator");
    assert_eq!(
        commit["digest"]["gitCommit"],
        release.origin.revision.as_deref().unwrap()
    );
    assert_eq!(
        definition["internalParameters"]["tools"]["rustc"],
        "rustc 1.0"
    );
    assert_eq!(json["predicate"]["runDetails"]["builder"]["id"], "urn:b");
}

#[test]
fn repository_has_neither_tag_nor_scheme() {
    for good in ["registry.example.com/etcd-operator", "localhost:5000/a/b"] {
        check_repository(good).unwrap();
    }
    for bad in [
        "etcd-operator",
        "https://x/y",
        "x/y:1",
        "x/y@sha256:0",
        "x/",
    ] {
        let error = check_repository(bad).unwrap_err().to_string();
        assert!(error.contains("REGISTRY/NAME"), "{error}");
    }
}

#[test]
fn folder_with_other_files_is_not_replaced() {
    let dir = tempfile::tempdir().unwrap();
    check_output(dir.path()).unwrap();
    check_output(&dir.path().join("missing")).unwrap();
    put(dir.path(), "letter.txt", "").unwrap();
    let error = check_output(dir.path()).unwrap_err().to_string();
    assert!(error.contains("--output"), "{error}");
    put(dir.path(), listing::SUMS, "").unwrap();
    check_output(dir.path()).unwrap();
}
