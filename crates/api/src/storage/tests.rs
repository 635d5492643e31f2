//! Tests: storage locations of a spec.

use super::*;

#[test]
fn storage_block_round_trips_as_json() {
    let oss = OssSource {
        path: "bucket/etcd".to_owned(),
        oss_secret: Some("oss".to_owned()),
        endpoint: None,
    };
    let block = StorageBlock::from(StorageSource::Oss(&oss));
    let text = serde_json::to_string(&block).unwrap();
    assert_eq!(text, r#"{"oss":{"path":"bucket/etcd","ossSecret":"oss"}}"#);
    let read: StorageBlock = serde_json::from_str(&text).unwrap();
    assert_eq!(read.source(), StorageSource::Oss(&oss));
    let moved = read.at("bucket/etcd_v7_2026-01-01-00:00:00".to_owned());
    assert_eq!(moved.source().path(), "bucket/etcd_v7_2026-01-01-00:00:00");
}

#[test]
fn storage_path_is_split_into_bucket_and_key_at_first_slash() {
    let parsed = ObjectPath::parse("bucket/a/b.db").unwrap();
    assert_eq!(
        (parsed.bucket.as_str(), parsed.key.as_str()),
        ("bucket", "a/b.db")
    );
}

#[test]
fn storage_path_error_names_defect() {
    let cases = [
        ("bucket", PathError::NoSlash),
        ("", PathError::NoSlash),
        ("/key", PathError::NoBucket),
        ("bucket/", PathError::NoKey),
        ("bucket/key/", PathError::EndsInSlash),
    ];
    for (path, error) in cases {
        assert_eq!(ObjectPath::parse(path), Err(error), "{path}");
    }
}

#[test]
fn unknown_storage_type_is_parsed_and_reported() {
    let blocks = Blocks {
        s3: None,
        abs: None,
        gcs: None,
        oss: None,
        pvc: None,
        local: None,
    };
    let unknown: StorageType = serde_json::from_str("\"Floppy\"").unwrap();
    let problem = blocks.select(&unknown, "spec", "storageType").unwrap_err();
    assert_eq!(problem.field, "spec.storageType");
    assert!(
        problem.remedy.contains("S3, ABS, GCS, OSS, PVC, Local"),
        "{problem}"
    );
}

#[test]
fn storage_block_must_match_storage_type() {
    let s3 = S3Source {
        path: "b/k".into(),
        ..S3Source::default()
    };
    let blocks = Blocks {
        s3: Some(&s3),
        abs: None,
        gcs: None,
        oss: None,
        pvc: None,
        local: None,
    };
    assert_eq!(
        blocks.select(&StorageType::S3, "spec", "storageType"),
        Ok(StorageSource::S3(&s3))
    );
    let problem = blocks
        .select(&StorageType::Gcs, "spec", "storageType")
        .unwrap_err();
    assert_eq!(problem.field, "spec.gcs");
}

#[test]
fn path_of_location_is_read_only_if_store_matches() {
    let block: StorageBlock =
        serde_json::from_str(r#"{ "pvc": { "claimName": "backups", "path": "etcd/main" } }"#)
            .unwrap();
    let path = "etcd/main_v7_2026-01-01-00:00:00";
    assert_eq!(block.path_in(&format!("pvc://backups/{path}")), Some(path));
    assert_eq!(block.path_in(&format!("pvc://other/{path}")), None);
    let block: StorageBlock =
        serde_json::from_str(r#"{ "s3": { "path": "bucket/etcd/main" } }"#).unwrap();
    assert_eq!(
        block.path_in("s3://bucket/etcd/main"),
        Some("bucket/etcd/main")
    );
    assert_eq!(block.path_in("bucket/etcd/main"), None);
}
