//! Tests of the search for recorded changes, without a store.

use continuous::{Base, BaseEncryption, BaseKey, ChainFault, SnapshotObject};
use etcd::ClusterId;
use serde_json::{Value, json};
use store::encryption::{self, FORMAT, Key};

use super::*;

const TIME: &str = "2026-11-28T01:02:03.000004Z";

fn micros(text: &str) -> i64 {
    text.parse::<Timestamp>().unwrap().as_microsecond()
}

fn restore(at: &Value) -> EtcdRestore {
    let spec = json!({
        "etcdCluster": { "name": "main" }, "backup": { "name": "nightly" }, "continuous": { "at": at },
    });
    let mut restore = EtcdRestore::new("again", serde_json::from_value(spec).unwrap());
    restore.metadata.generation = Some(3);
    restore
}

fn block(path: &str) -> StorageBlock {
    serde_json::from_value(json!({ "s3": { "path": path, "awsSecret": "aws" } })).unwrap()
}

fn found() -> FoundPoint {
    let base = Base {
        cluster_id: ClusterId(0xab),
        revision: 10,
        snapshot: SnapshotObject {
            key: "etcd/main.continuous/uid/snapshots/1.snapshot".to_owned(),
            size: 100,
            sha256: "AB".repeat(32),
        },
        created: micros("2026-11-28T00:00:00Z"),
        encryption: None,
    };
    FoundPoint {
        base: base.encode().unwrap(),
        at: Moment {
            revision: 17,
            time: micros(TIME),
        },
        segments: 2,
        bytes: 300,
    }
}

#[test]
fn exactly_one_requested_point_is_accepted() {
    let requested = |at: Value| {
        let restore = restore(&at);
        requested(&restore.spec.continuous.unwrap().at)
    };
    assert_eq!(
        requested(json!({ "time": TIME })),
        Some((
            "spec.continuous.at.time",
            Point::Time(micros("2026-11-28T01:02:03.000004Z"))
        ))
    );
    assert_eq!(
        requested(json!({ "revision": 7 })),
        Some(("spec.continuous.at.revision", Point::Revision(7)))
    );
    assert_eq!(
        requested(json!({ "latest": true })),
        Some(("spec.continuous.at.latest", Point::Latest))
    );
    assert_eq!(requested(json!({})), None);
    assert_eq!(requested(json!({ "revision": 7, "latest": true })), None);
}

fn chosen(
    restore: &EtcdRestore,
    directory: &StorageBlock,
    key: &str,
    found: &FoundPoint,
) -> Result<ChosenBackup, Trouble> {
    let found = found_base(directory, &format!("{key}/"), found)?;
    super::chosen(restore, (directory, key), found, None)
}

#[test]
fn recorded_backup_contains_point_and_snapshot_of_base() {
    let directory = block("bucket/etcd/main.continuous/uid");
    let key = "etcd/main.continuous/uid";
    let restore = restore(&json!({ "latest": true }));
    let record = chosen(&restore, &directory, key, &found()).unwrap();
    assert_eq!(
        record.source,
        block("bucket/etcd/main.continuous/uid/snapshots/1.snapshot")
    );
    assert_eq!(record.sha256, Some("ab".repeat(32)));
    assert_eq!(
        (record.stored_size, record.etcd_revision, record.generation),
        (Some(100), Some(10), Some(3))
    );
    let point = record.continuous.unwrap();
    let base = found().base.name.to_string();
    assert_eq!(
        serde_json::to_value(&point).unwrap(),
        json!({
            "revision": 17, "time": TIME, "base": base, "baseRevision": 10,
            "baseTime": "2026-11-28T00:00:00.000000Z", "clusterID": "ab", "segments": 2, "segmentBytes": 300,
            "prefix": "etcd/main.continuous/uid/",
        })
    );
    // `another` is not the key of this directory, so the base is refused.
    assert!(chosen(&restore, &directory, "another", &found()).is_err());
}

#[test]
fn directory_of_etcdbackup_has_uid_and_its_own_complete_time() {
    let backup = |location: &str| -> EtcdBackup {
        serde_json::from_value(json!({
            "apiVersion": "etcd.database.coreos.com/v1beta2", "kind": "EtcdBackup",
            "metadata": { "name": "nightly", "uid": "uid" },
            "spec": { "etcdEndpoints": ["http://a:2379"], "storageType": "S3", "s3": { "path": "bucket/etcd/main" } },
            "status": { "continuous": { "location": location, "completeTime": "2026-11-28T01:00:00Z" } },
        }))
        .unwrap()
    };
    let (directory, complete) =
        recorded_by(&backup("s3://bucket/etcd/main.continuous/uid/")).unwrap();
    assert_eq!(directory.source().path(), "bucket/etcd/main.continuous/uid");
    assert_eq!(complete, Some(micros("2026-11-28T01:00:00Z")));
    // The path in the spec has changed. The time in the status is about the old directory, so it is not returned.
    let (_, complete) = recorded_by(&backup("s3://bucket/etcd/old.continuous/uid/")).unwrap();
    assert_eq!(complete, None);
}

#[test]
fn point_error_contains_field_nearest_points_and_remedy() {
    let moment = |revision, time| Moment {
        revision,
        time: micros(time),
    };
    let (early, late) = ("2026-11-28T00:00:00Z", "2026-11-28T02:00:00Z");
    let unrecorded = Reason::PointNotRecorded;
    for (error, reason, parts) in [
        (
            PointError::NoBase,
            Reason::BackupMissing,
            vec!["no recorded changes in s3://b/k", "spec.backup.name"],
        ),
        (
            PointError::TooManyBases { limit: 9 },
            Reason::StoreUnreachable,
            vec!["more than 9 bases in s3://b/k", "delete the bases"],
        ),
        (
            PointError::BeforeOldest(moment(10, early)),
            unrecorded,
            vec!["revision 10 (2026-11-28T00:00:00Z)", "later one"],
        ),
        (
            PointError::AfterNewest(moment(40, late)),
            unrecorded,
            vec!["revision 40 (2026-11-28T02:00:00Z)", "latest: true"],
        ),
        (
            PointError::InGap {
                before: moment(20, early),
                after: moment(30, late),
            },
            unrecorded,
            vec![
                "revision 20 (2026-11-28T00:00:00Z) before",
                "revision 30 (2026-11-28T02:00:00Z) after",
                "spec.continuous.at.revision",
            ],
        ),
        (
            PointError::Broken {
                last: moment(20, early),
                faults: vec![ChainFault::Missing {
                    after: 20,
                    next: 30,
                }],
            },
            Reason::SnapshotUnreadable,
            vec![
                "revision 20 (2026-11-28T00:00:00Z)",
                "between the revisions 20 and 30 are missing",
                "Put the missing objects back",
            ],
        ),
        (
            PointError::Ambiguous {
                first: ClusterId(0xab),
                first_time: micros(late),
                second: ClusterId(0xcd),
                second_time: micros(early),
            },
            unrecorded,
            vec![
                "cluster ab at 2026-11-28T02:00:00Z",
                "cluster cd at 2026-11-28T00:00:00Z",
                "spec.continuous.at.time",
            ],
        ),
    ] {
        let trouble = trouble(&error, "spec.continuous.at.revision", "s3://b/k");
        assert_eq!(trouble.reason, reason);
        let message = trouble.message;
        assert!(message.starts_with("spec.continuous.at.revision: "));
        for part in parts {
            assert!(message.contains(part), "{message}");
        }
    }
}

/// Invariant 15: a forged directory can cause any number of problems of a chain.
#[test]
fn invariant_15_message_lists_at_most_three_problems_of_chain() {
    let last = Moment {
        revision: 20,
        time: micros(TIME),
    };
    for (count, more) in [(3, None), (100_000, Some("99997 more problems"))] {
        let fault = ChainFault::Missing {
            after: 20,
            next: 30,
        };
        let faults = vec![fault; count];
        let error = PointError::Broken { last, faults };
        let message = trouble(&error, "spec.continuous.at.latest", "s3://b/k").message;
        assert_eq!(message.matches("between the revisions").count(), 3);
        assert_eq!(message.contains("more problems"), more.is_some());
        assert!(message.contains(more.unwrap_or_default()), "{message}");
    }
}

#[test]
fn recorded_encrypted_base_has_key_and_size_of_stored_object() {
    let mut found = found();
    let mut base = found.base.base.clone();
    base.encryption = Some(BaseEncryption {
        format: FORMAT.to_owned(),
        key: BaseKey {
            name: "2026".to_owned(),
            id: "ab12".to_owned(),
        },
    });
    found.base = base.encode().unwrap();
    let directory = block("bucket/etcd/main.continuous/uid");
    let restore = restore(&json!({ "latest": true }));
    let record = chosen(&restore, &directory, "etcd/main.continuous/uid", &found).unwrap();
    let key = record.encryption_key.unwrap();
    assert_eq!((key.name.as_str(), key.id.as_str()), ("2026", "ab12"));
    // The base has 100 bytes. The encryption adds a header of 48 bytes and, for the only chunk, an authentication tag
    // of 16 bytes.
    assert_eq!(record.stored_size, Some(100 + 48 + 16));
}

#[test]
fn point_encryption_error_contains_key_secret_or_segment() {
    let encrypted = PointError::Encrypted(BaseKey {
        name: "2026".to_owned(),
        id: "ab12".to_owned(),
    });
    let plain = PointError::NotEncrypted(Moment {
        revision: 30,
        time: micros("2026-11-28T00:00:00Z"),
    });
    let key = Key::parse("2026", b"AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=");
    let unknown = PointError::Read(ReadError::Encryption {
        key: "a.segment".to_owned(),
        error: encryption::Error::UnknownKey {
            id: key.unwrap().id(),
            keys: "none".to_owned(),
        },
    });
    let plain_segment = PointError::Read(ReadError::Encryption {
        key: "a.segment".to_owned(),
        error: encryption::Error::NotEncrypted,
    });
    for (error, secret, reason, part) in [
        (
            &plain_segment,
            Some("keys"),
            Reason::SnapshotUnreadable,
            "the segment \"a.segment\" in s3://b/k is not encrypted",
        ),
        (&encrypted, None, Reason::InvalidSpec, "ID ab12"),
        (
            &plain,
            Some("keys"),
            Reason::SnapshotUnreadable,
            "spec.encryption.secret: keys",
        ),
        (
            &unknown,
            Some("keys"),
            Reason::SecretMissing,
            "a62e0f7753a4df18",
        ),
        (&unknown, None, Reason::InvalidSpec, "a62e0f7753a4df18"),
    ] {
        let trouble = in_encryption(error, "spec.continuous.at.latest", "s3://b/k", secret);
        let trouble = trouble.unwrap();
        assert_eq!(trouble.reason, reason);
        assert!(trouble.message.contains(part), "{}", trouble.message);
    }
    let other = in_encryption(&PointError::NoBase, "field", "s3://b/k", None);
    assert_eq!(other, None);
}
