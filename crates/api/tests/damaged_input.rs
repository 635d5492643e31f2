//! Parses damaged objects, manifests, durations, versions, paths and names.
#![allow(clippy::unwrap_used, clippy::panic)]

mod damaged;

use std::path::Path;

use api::backup::name;
use api::duration::DurationText;
use api::manifest::BackupManifest;
use api::storage::ObjectPath;
use api::version::EtcdVersion;
use api::{EtcdBackup, EtcdCluster, EtcdMirror, EtcdRestore, EtcdRole, EtcdUser};
use damaged::{assert_little_memory, bounded, cases, damaged, damaged_text};
use k8s_openapi::jiff::Timestamp;
use proptest::prelude::*;
use serde::Serialize;
use serde::de::DeserializeOwned;

/// A manifest in the format of the backup operator, with the spec of a cluster.
const MANIFEST: &str = r#"{"formatVersion":1,"etcdVersion":"3.6.16","clusterID":"cdf818194e3a8c32","revision":10004,
"size":20512,"sha256":"e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855","hash":3917214398,"keys":17,
"compression":"zstd","storedSize":2051,"encryption":{"format":"aes256gcm-chunks-v1","key":{"name":"2026","id":"a62e0f7753a4df18"}},
"storedSha256":"e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855","storeTag":"\"d41d8cd98f00b204e9800998ecf8427e-2\"",
"createdAt":"2026-11-24T00:00:00Z","backupUID":"0d5e0a2f-6f1d-4d3c-9d57-9f116c2a4f25",
"cluster":{"name":"example","namespace":"prod","spec":{"size":3,"version":"3.6.16","pod":{"persistentVolumeClaimSpec":
{"accessModes":["ReadWriteOnce"],"resources":{"requests":{"storage":"1Gi"}}}},"TLS":{"generated":{}}}}}"#;

/// The manifests of coreos/etcd-operator v0.9.4 as JSON.
fn objects() -> Vec<Vec<u8>> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../e2e/fixtures/v0.9.4");
    let files = std::fs::read_dir(folder)
        .unwrap()
        .map(|file| file.unwrap().path());
    let objects: Vec<Vec<u8>> = files
        .map(|path| {
            let text = std::fs::read_to_string(path).unwrap();
            let value: serde_json::Value = serde_yaml_ng::from_str(&text).unwrap();
            serde_json::to_vec(&value).unwrap()
        })
        .collect();
    assert!(objects.len() > 5);
    objects
}

fn damaged_objects() -> impl Strategy<Value = Vec<u8>> {
    let objects = objects();
    let objects: Vec<&[u8]> = objects.iter().map(Vec::as_slice).collect();
    damaged(&objects)
}

/// Parses a text, and asserts that the value stays the same when it is written and read again. `None` if the text is
/// invalid.
fn round_trip<T: Serialize + DeserializeOwned>(text: &[u8]) -> Option<T> {
    let value: T = bounded(|| serde_json::from_slice(text)).ok()?;
    let written = serde_json::to_value(&value).unwrap();
    let again: T = serde_json::from_value(written.clone()).unwrap();
    assert_eq!(serde_json::to_value(&again).unwrap(), written);
    Some(value)
}

#[test]
fn undamaged_objects_and_manifests_round_trip() {
    assert!(round_trip::<BackupManifest>(MANIFEST.as_bytes()).is_some());
    for object in objects() {
        let value: serde_json::Value = serde_json::from_slice(&object).unwrap();
        let read = match value["kind"].as_str() {
            Some("EtcdCluster") => round_trip::<EtcdCluster>(&object).is_some(),
            Some("EtcdBackup") => round_trip::<EtcdBackup>(&object).is_some(),
            Some("EtcdMirror") => round_trip::<EtcdMirror>(&object).is_some(),
            Some("EtcdRole") => round_trip::<EtcdRole>(&object).is_some(),
            Some("EtcdUser") => round_trip::<EtcdUser>(&object).is_some(),
            _ => round_trip::<EtcdRestore>(&object).is_some(),
        };
        assert!(read, "{value}");
    }
}

proptest! {
    #![proptest_config(cases(256))]

    #[test]
    fn damaged_manifests_are_rejected_or_round_trip(text in damaged(&[MANIFEST.as_bytes()])) {
        round_trip::<BackupManifest>(&text);
    }

    #[test]
    fn damaged_objects_are_rejected_or_can_be_validated(text in damaged_objects()) {
        if let Some(cluster) = round_trip::<EtcdCluster>(&text) {
            bounded(|| api::cluster::validate(&cluster));
        }
        if let Some(backup) = round_trip::<EtcdBackup>(&text) {
            bounded(|| api::backup::validate(&backup));
        }
        if let Some(restore) = round_trip::<EtcdRestore>(&text) {
            bounded(|| api::restore::validate(&restore));
        }
        if let Some(mirror) = round_trip::<EtcdMirror>(&text) {
            bounded(|| api::mirror::validate(&mirror));
        }
        if let Some(role) = round_trip::<EtcdRole>(&text) {
            bounded(|| api::access::validate_role(&role));
        }
        if let Some(user) = round_trip::<EtcdUser>(&text) {
            bounded(|| api::access::validate_user(&user));
        }
    }

    #[test]
    fn damaged_durations_are_rejected_or_round_trip_as_milliseconds(
        text in damaged_text(&["60s", "1h30m", "250ms", "1m1s1ms", "99999999999h"]),
    ) {
        if let Some(duration) = bounded(|| DurationText(text.clone()).parse())
            && let Ok(millis) = u64::try_from(duration.as_millis())
        {
            prop_assert_eq!(DurationText(format!("{millis}ms")).parse(), Some(duration), "{}", text);
        }
    }

    #[test]
    fn damaged_versions_are_rejected_or_round_trip(
        text in damaged_text(&["3.5.35", "v3.2.13", "3.6.0-rc.1", "3.7.3+build.5"]),
    ) {
        if let Ok(version) = bounded(|| EtcdVersion::parse(&text)) {
            let written = version.semver().to_string();
            prop_assert_eq!(text.trim_start_matches('v'), &written);
        }
    }

    /// Invariant 13: every accepted name is exactly the name that the operator would write.
    #[test]
    fn damaged_names_of_backups_are_rejected_or_round_trip(
        path in "[a-z/_v0-9]{0,12}",
        key in damaged_text(&["_v99_2018-12-31-23:59:59", "_v1_1970-01-01-00:00:00", ".manifest.json"]),
        revision in any::<u64>(),
        second in -60_000_000_000_i64..250_000_000_000,
    ) {
        let key = format!("{path}{key}");
        if let Some(parts) = bounded(|| name::parse(&path, &key)) {
            prop_assert_eq!(name::name(&path, parts), key);
        }
        let parts = name::Numbered { time: Timestamp::from_second(second).unwrap(), revision };
        let written = name::name(&path, parts);
        // The seconds from 0 to 250,000,000,000 are in the years 1970 to 9892. `parse` rejects only a name whose year
        // does not have four digits.
        if let Some(read) = name::parse(&path, &written) {
            prop_assert_eq!(read, parts);
        } else {
            prop_assert!(!(0..250_000_000_000).contains(&second), "{}", written);
        }
    }

    #[test]
    fn damaged_storage_paths_are_rejected_or_round_trip(
        text in damaged_text(&["bucket/key", "bucket/a/b/etcd.backup", "/key", "bucket/"]),
    ) {
        if let Ok(path) = bounded(|| ObjectPath::parse(&text)) {
            prop_assert!(!path.bucket.is_empty() && !path.bucket.contains('/'));
            prop_assert_eq!(format!("{}/{}", path.bucket, path.key), text);
        }
        assert_little_memory();
    }
}
