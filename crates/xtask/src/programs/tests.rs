//! Tests: versions, cache folders and linker flags of the programs.

use anyhow::bail;

use super::*;

#[test]
fn etcd_versions_are_read_from_go_mod() {
    let versions = etcd_versions().unwrap();
    assert_eq!(versions.len(), 5);
    for (version, minor) in versions
        .iter()
        .zip(["3.4.", "3.5.", "3.5.", "3.6.", "3.7."])
    {
        assert!(version.starts_with(minor), "{version}");
    }
}

#[test]
fn older_etcd_3_5_release_is_listed_first() {
    let versions = etcd_versions().unwrap();
    let patches: Vec<u64> = versions
        .iter()
        .filter_map(|version| version.strip_prefix("3.5.")?.parse().ok())
        .collect();
    // The first 3.5 release is older than 3.5.26, and the second is not. An upgrade to 3.6 requires 3.5.26 or later
    // (`crates/api/src/version/path.rs`).
    assert!(patches[0] < 26 && patches[1] >= 26, "{patches:?}");
}

#[test]
fn helm_linker_flags_contain_helm_version_from_go_mod() {
    let path = checkout::testbed_sources().join("helm/go.mod");
    let version = required(&fs::read_to_string(path).unwrap(), "helm.sh/helm/v4").unwrap();
    assert!(HELM_VERSION.ends_with(&format!("=v{version}")), "{version}");
}

#[test]
fn required_version_is_found_in_single_line_and_block_of_go_mod() {
    assert_eq!(required("require a/b v1.2.3\n", "a/b").unwrap(), "1.2.3");
    let old = "require a/b v1.2.3+incompatible\n";
    assert_eq!(required(old, "a/b").unwrap(), "1.2.3");
    assert_eq!(
        required(
            "require (\n\ta/bc v1.0.0\n\ta/b v1.2.3 // indirect\n)\n",
            "a/b"
        )
        .unwrap(),
        "1.2.3"
    );
    assert_eq!(required("module a/b\n", "x"), None);
}

#[test]
fn only_successful_build_creates_cache_entry() {
    let dir = tempfile::tempdir().unwrap();
    let key = "0123456789abcdef0123";
    assert!(cached(dir.path(), "x", key, |_| bail!("no")).is_err());
    assert!(!dir.path().join("x-0123456789abcdef").exists());
    let made = cached(dir.path(), "x", key, |folder| {
        Ok(fs::write(folder.join("f"), "")?)
    })
    .unwrap();
    assert!(made.join("f").is_file());
    cached(dir.path(), "x", key, |_| panic!("built again")).unwrap();
}

#[test]
fn cache_key_depends_on_sources_and_go_version() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("go.mod"), "a").unwrap();
    let first = key(dir.path(), "go1").unwrap();
    assert_ne!(first, key(dir.path(), "go2").unwrap());
    fs::write(dir.path().join("go.mod"), "b").unwrap();
    assert_ne!(first, key(dir.path(), "go1").unwrap());
}
