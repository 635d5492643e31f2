//! Tests of the columns of an `EtcdRestore`.

use serde_json::json;

use super::*;

#[test]
fn source_column_shows_etcdbackup_or_store() {
    let of = |source: serde_json::Value| {
        let mut spec = json!({ "etcdCluster": { "name": "main" } });
        for (field, value) in source.as_object().unwrap() {
            spec[field] = value.clone();
        }
        serde_json::from_value::<EtcdRestoreSpec>(spec)
            .unwrap()
            .source_text()
    };
    for (source, text) in [
        (
            json!({ "backup": { "name": "nightly" } }),
            Some("EtcdBackup nightly"),
        ),
        (
            json!({ "backupStorageType": "S3", "s3": { "path": "bucket/key" } }),
            Some("S3 bucket/key"),
        ),
        (
            json!({ "backupStorageType": "PVC", "pvc": { "claimName": "backups", "path": "etcd/main" } }),
            Some("PVC backups/etcd/main"),
        ),
        (json!({ "backupStorageType": "S3" }), None),
        (json!({}), None),
    ] {
        assert_eq!(of(source).as_deref(), text);
    }
}
