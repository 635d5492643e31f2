//! Tests of retention with a real S3 server, including interrupted removals.
#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::collections::BTreeSet;
use std::sync::Arc;

use api::EtcdBackup;
use api::backup::BackupPolicy;
use api::backup::name::{self, Numbered};
use api::manifest::manifest_key;
use backup::plan::{Action, Job, Plan, Verdict, plan};
use backup::reason::{Reason, Trouble};
use backup::recording::prefix;
use backup::removal::{Removal, RemovalScope};
use backup::retention::Rules;
use backup::snapshot::{Inputs, RemovalResult, Site, Snapshot};
use backup::status::{notices, status};
use bytes::Bytes;
use continuous::{Base, SnapshotObject, write_base};
use etcd::ClusterId;
use futures::StreamExt;
use jiff::{SignedDuration, Timestamp};
use store::fake::{Call, FaultyStore};
use store::testing::S3Server;
use store::{LocalStore, S3Store, Store};

const PATH: &str = "daily/etcd";
const UID: &str = "uid-1";

fn now() -> Timestamp {
    "2026-06-15T12:00:00Z".parse().unwrap()
}

/// The key of a backup with this age in hours. Revisions of newer backups have more digits.
fn key_at(path: &str, hours_ago: i64) -> String {
    let parts = Numbered {
        time: now() - SignedDuration::from_hours(hours_ago),
        revision: u64::try_from(1005 - hours_ago).unwrap(),
    };
    name::name(path, parts)
}

fn key(hours_ago: i64) -> String {
    key_at(PATH, hours_ago)
}

async fn put(store: &dyn Store, key: &str, uid: &str) {
    store
        .put(key, Bytes::from_static(b"snapshot"))
        .await
        .unwrap();
    let manifest = serde_json::json!({
        "formatVersion": 1, "etcdVersion": "3.6.16", "clusterID": "00000000000000aa", "revision": 7, "size": 8,
        "sha256": "", "compression": "none", "createdAt": "2026-06-15T12:00:00Z", "backupUID": uid,
    });
    let manifest = serde_json::to_vec(&manifest).unwrap();
    store
        .put(&manifest_key(key), manifest.into())
        .await
        .unwrap();
}

async fn keys(store: &dyn Store) -> Vec<String> {
    let mut keys: Vec<String> = store
        .list("")
        .await
        .unwrap()
        .into_iter()
        .map(|object| object.key)
        .collect();
    keys.sort();
    keys
}

fn with_manifests(keys: impl IntoIterator<Item = String>) -> Vec<String> {
    let mut all: Vec<String> = keys
        .into_iter()
        .flat_map(|key| [manifest_key(&key), key])
        .collect();
    all.sort();
    all
}

fn removal(store: &Arc<dyn Store>, scope: RemovalScope) -> Removal {
    Removal {
        store: store.clone(),
        path: PATH.to_owned(),
        uid: UID.to_owned(),
        scope,
    }
}

/// Applies a rule that keeps `count` backups. The newest backup has the age 0.
async fn keep(store: &Arc<dyn Store>, count: i64) -> Result<RemovalResult, Trouble> {
    keep_with_others(store, count, &[]).await
}

/// Applies the rule as [`keep`] does, while other EtcdBackups use the same path.
async fn keep_with_others(
    store: &Arc<dyn Store>,
    count: i64,
    others: &[&str],
) -> Result<RemovalResult, Trouble> {
    let policy = BackupPolicy {
        max_backups: Some(count),
        ..BackupPolicy::default()
    };
    let scope = RemovalScope::Surplus {
        rules: Rules::of(&policy),
        newest: format!("{}/{}", store.location(), key(0)),
        others: others.iter().map(|uid| (*uid).to_owned()).collect(),
        now: now(),
    };
    removal(store, scope).run().await
}

async fn s3(server: &S3Server) -> Arc<dyn Store> {
    Arc::new(S3Store::new(server.config("bucket")).await.unwrap())
}

#[tokio::test]
async fn retention_removes_old_backups_with_manifests() {
    let server = S3Server::start(&["bucket"]);
    let store = s3(&server).await;
    for hours in 0..8 {
        put(store.as_ref(), &key(hours), UID).await;
    }
    let kept = keep(&store, 3).await.unwrap();
    assert_eq!(kept.deleted, 5);
    let newest: Vec<String> = kept
        .backups
        .into_iter()
        .map(|backup| backup.location)
        .collect();
    assert_eq!(newest[0], format!("s3://bucket/{}", key(0)));
    // The kept backups have the revisions 1005, 1004 and 1003. If revisions were compared as text, the rule would keep
    // 999.
    assert_eq!(keys(store.as_ref()).await, with_manifests((0..3).map(key)));
    assert_eq!(keep(&store, 3).await.unwrap().deleted, 0);
}

#[tokio::test]
async fn retention_keeps_objects_of_other_paths() {
    let server = S3Server::start(&["bucket"]);
    let store = s3(&server).await;
    let mut others = Vec::new();
    for path in [
        "daily/etcd-prod",
        "daily/etcd_v2",
        "daily/etcd_v1_x",
        "daily/etc",
        "other/daily/etcd",
    ] {
        for hours in 0..4 {
            put(store.as_ref(), &key_at(path, hours), UID).await;
            others.push(key_at(path, hours));
        }
    }
    for other in [
        "daily/etcd",
        "daily/etcd_v7",
        "daily/etcd_v7_copy",
        "daily/etcd_v07_2026-06-15-00:00:00",
    ] {
        put(store.as_ref(), other, UID).await;
        others.push(other.to_owned());
    }
    for hours in 0..4 {
        put(store.as_ref(), &key(hours), UID).await;
    }
    assert_eq!(keep(&store, 1).await.unwrap().deleted, 3);
    others.push(key(0));
    assert_eq!(keys(store.as_ref()).await, with_manifests(others));
}

#[tokio::test]
async fn retention_handles_more_than_thousand_objects() {
    let server = S3Server::start(&["bucket"]);
    let store = s3(&server).await;
    futures::stream::iter(0..1001)
        .for_each_concurrent(16, async |hours| {
            put(store.as_ref(), &key(hours), UID).await;
        })
        .await;
    let kept = keep(&store, 2).await.unwrap();
    assert_eq!((kept.deleted, kept.backups.len()), (999, 2));
    assert_eq!(keys(store.as_ref()).await, with_manifests((0..2).map(key)));
}

#[tokio::test]
async fn invariant_9_retention_waits_while_newest_backup_is_incomplete() {
    let dir = tempfile::tempdir().unwrap();
    let store: Arc<dyn Store> = Arc::new(LocalStore::new(dir.path()));
    for hours in 0..4 {
        put(store.as_ref(), &key(hours), UID).await;
    }
    let all = keys(store.as_ref()).await;
    // In the three cases, the newest backup is missing, has no manifest, or has other content.
    for damage in 0..3 {
        match damage {
            0 => store.delete(&key(0)).await.unwrap(),
            1 => store.delete(&manifest_key(&key(0))).await.unwrap(),
            _ => store
                .put(&key(0), Bytes::from_static(b"cut"))
                .await
                .unwrap(),
        }
        let left = keys(store.as_ref()).await;
        let trouble = keep(&store, 1).await.unwrap_err();
        assert_eq!(trouble.reason, Reason::BackupMissing, "{trouble:?}");
        assert_eq!(keys(store.as_ref()).await, left);
        put(store.as_ref(), &key(0), UID).await;
    }
    assert_eq!(keys(store.as_ref()).await, all);
    assert_eq!(keep(&store, 1).await.unwrap().deleted, 3);
}

#[tokio::test]
async fn retention_keeps_backups_newer_than_verified_backup() {
    let dir = tempfile::tempdir().unwrap();
    let store: Arc<dyn Store> = Arc::new(LocalStore::new(dir.path()));
    for hours in -2..3 {
        put(store.as_ref(), &key(hours), UID).await;
    }
    assert_eq!(keep(&store, 1).await.unwrap().deleted, 2);
    assert_eq!(keys(store.as_ref()).await, with_manifests((-2..1).map(key)));
}

/// A removal may fail at any request. The newest backups stay complete, and the next removal deletes the remaining old
/// backups.
#[tokio::test]
async fn next_removal_completes_interrupted_removal() {
    let failure = || store::Error::Timeout("injected".to_owned());
    for call in [Call::Get, Call::Head, Call::List, Call::Delete] {
        for succeeding in 0..6 {
            let dir = tempfile::tempdir().unwrap();
            let plain = LocalStore::new(dir.path());
            let faulty = FaultyStore::new(plain.clone());
            let store: Arc<dyn Store> = Arc::new(faulty.clone());
            for hours in 0..4 {
                put(store.as_ref(), &key(hours), UID).await;
            }
            // The manifest of `key(9)` has no backup, as after a crash between the two deletions of a backup.
            put(store.as_ref(), &key(9), UID).await;
            store.delete(&key(9)).await.unwrap();
            faulty.fail_after(call, succeeding, failure());
            let first = keep(&store, 2).await;
            let between = keys(&plain).await;
            for hours in 0..2 {
                assert!(between.contains(&key(hours)), "{call:?} {between:?}");
                assert!(
                    between.contains(&manifest_key(&key(hours))),
                    "{call:?} {between:?}"
                );
            }
            // Every backup that remains has a manifest.
            for hours in 2..4 {
                let half =
                    between.contains(&key(hours)) && !between.contains(&manifest_key(&key(hours)));
                assert!(!half, "{call:?} {between:?}");
            }
            faulty.forget();
            keep(&store, 2).await.unwrap();
            assert_eq!(
                keys(store.as_ref()).await,
                with_manifests((0..2).map(key)),
                "{call:?} {first:?}"
            );
        }
    }
}

#[tokio::test]
async fn removal_deletes_only_backups_of_deleted_etcdbackup() {
    let server = S3Server::start(&["bucket"]);
    let store = s3(&server).await;
    put(store.as_ref(), PATH, UID).await;
    put(store.as_ref(), &key(1), UID).await;
    put(store.as_ref(), &key(2), "uid-2").await;
    // Backups of coreos/etcd-operator have no manifest, and thus no owner.
    store
        .put(&key(3), Bytes::from_static(b"old"))
        .await
        .unwrap();
    put(store.as_ref(), &key_at("daily/etcd_v2", 1), UID).await;
    let removed = removal(&store, RemovalScope::Everything)
        .run()
        .await
        .unwrap();
    assert_eq!(removed.deleted, 2);
    let mut left = with_manifests([key(2), key_at("daily/etcd_v2", 1)]);
    left.push(key(3));
    left.sort();
    assert_eq!(keys(store.as_ref()).await, left);
    assert_eq!(
        removal(&store, RemovalScope::Everything)
            .run()
            .await
            .unwrap()
            .deleted,
        0
    );
}

/// The prefix of the records of a continuous backup contains the UID of the EtcdBackup.
#[tokio::test]
async fn invariant_13_removal_deletes_only_own_continuous_backup() {
    let server = S3Server::start(&["bucket"]);
    let store = s3(&server).await;
    for uid in [UID, "uid-2"] {
        let prefix = prefix(PATH, uid);
        let key = format!("{prefix}snapshots/00001764000000000000.snapshot");
        store
            .put(&key, Bytes::from_static(b"snapshot"))
            .await
            .unwrap();
        let base = Base {
            cluster_id: ClusterId(7),
            revision: 5,
            snapshot: SnapshotObject {
                key,
                size: 8,
                sha256: "00".repeat(32),
            },
            created: 1_764_000_000_000_000,
            encryption: None,
        };
        let base = base.encode().unwrap();
        write_base(store.as_ref(), &prefix, &base).await.unwrap();
    }
    assert_eq!(keys(store.as_ref()).await.len(), 4);
    removal(&store, RemovalScope::Everything)
        .run()
        .await
        .unwrap();
    let left = keys(store.as_ref()).await;
    assert_eq!(left.len(), 2, "{left:?}");
    let other = prefix(PATH, "uid-2");
    assert!(left.iter().all(|key| key.starts_with(&other)), "{left:?}");
}

/// Two EtcdBackups, one hourly and one daily, use the same path. Retention of one EtcdBackup ignores the backups of
/// the other.
#[tokio::test]
async fn invariant_13_retention_keeps_backups_of_other_etcdbackups() {
    let server = S3Server::start(&["bucket"]);
    let store = s3(&server).await;
    for hours in [0, 1, 3, 5] {
        put(store.as_ref(), &key(hours), UID).await;
    }
    for hours in [2, 24, 48] {
        put(store.as_ref(), &key(hours), "uid-2").await;
    }
    // The retention rules also apply to backups of a deleted EtcdBackup (`uid-0`), and to backups of
    // coreos/etcd-operator, which have no manifest.
    put(store.as_ref(), &key(6), "uid-0").await;
    store
        .put(&key(7), Bytes::from_static(b"old"))
        .await
        .unwrap();
    let kept = keep_with_others(&store, 3, &["uid-2", "uid-3"])
        .await
        .unwrap();
    assert_eq!(kept.deleted, 3);
    let locations: Vec<String> = kept
        .backups
        .into_iter()
        .map(|backup| backup.location)
        .collect();
    let expected = [0, 1, 3].map(|hours| format!("s3://bucket/{}", key(hours)));
    assert_eq!(locations, expected);
    let left = with_manifests([0, 1, 2, 3, 24, 48].map(key));
    assert_eq!(keys(store.as_ref()).await, left);
    // The EtcdBackup `uid-2` was deleted, so the retention rules apply to its backups too.
    assert_eq!(keep(&store, 3).await.unwrap().deleted, 3);
    assert_eq!(
        keys(store.as_ref()).await,
        with_manifests([0, 1, 2].map(key))
    );
}

/// An EtcdBackup with this policy, to whose newest backup the retention rules were not applied yet.
fn pending(store: &dyn Store, policy: &serde_json::Value) -> EtcdBackup {
    let mut policy = policy.clone();
    policy["schedule"] = serde_json::json!("0 0 1 1 *");
    policy["suspend"] = serde_json::json!(true);
    serde_json::from_value(serde_json::json!({
        "apiVersion": "etcd.database.coreos.com/v1beta2", "kind": "EtcdBackup",
        "metadata": { "name": "b", "namespace": "n", "uid": UID, "generation": 1 },
        "spec": {
            "etcdCluster": { "name": "c" }, "storageType": "Local", "local": { "path": PATH }, "backupPolicy": policy,
        },
        "status": {
            "succeeded": true, "observedGeneration": 1, "location": format!("{}/{}", store.location(), key(0)),
            "startTime": now().to_string(), "completionTime": now().to_string(), "lastSuccessDate": now().to_string(),
        },
    }))
    .unwrap()
}

/// The plan of an operator whose clock is ahead of the API server's clock by `ahead`, and the time of the operator's
/// clock.
fn planned(backup: &EtcdBackup, ahead: SignedDuration) -> (Plan, Timestamp) {
    let snapshot = Snapshot {
        inputs: Inputs::Removal {
            site: Site::Store {
                key: PATH.to_owned(),
            },
            others: BTreeSet::new(),
        },
        clock_difference: Some(-ahead),
        ..Snapshot::default()
    };
    let operator = now() + ahead;
    (plan(backup, &snapshot, operator), operator)
}

/// Executes the removal of a plan, and returns the number of deleted backups. `None` if the plan contains no removal.
async fn removed(store: &Arc<dyn Store>, plan: &Plan) -> Option<usize> {
    let Some(Job::Removal { scope, .. }) = plan.job.clone() else {
        return None;
    };
    Some(removal(store, scope).run().await.unwrap().deleted)
}

#[tokio::test]
async fn invariant_9_retention_deletes_nothing_while_clocks_differ() {
    let dir = tempfile::tempdir().unwrap();
    let store: Arc<dyn Store> = Arc::new(LocalStore::new(dir.path()));
    for hours in [0, 24, 47, 72] {
        put(store.as_ref(), &key(hours), UID).await;
    }
    let all = keys(store.as_ref()).await;
    let by_age = pending(store.as_ref(), &serde_json::json!({ "maxAge": "47h30m" }));
    // Names of backups contain times, so with a wrong clock an old backup can seem to be the newest. While the clocks
    // differ, the rules that count backups therefore delete nothing, like the rule for the age.
    let by_count = pending(store.as_ref(), &serde_json::json!({ "maxBackups": 1 }));
    let by_day = pending(
        store.as_ref(),
        &serde_json::json!({ "retention": { "keepDaily": 1 } }),
    );
    for minutes in [61, -61, 60 * 24 * 60, -60 * 24 * 60] {
        for backup in [&by_age, &by_count, &by_day] {
            let ahead = SignedDuration::from_mins(minutes);
            let (plan, operator) = planned(backup, ahead);
            assert_eq!(removed(&store, &plan).await, None);
            assert_eq!(keys(store.as_ref()).await, all);
            assert_eq!(plan.action, Action::Nothing);
            let Verdict::RetentionFailed(trouble) = &plan.verdict else {
                panic!("{plan:?}")
            };
            assert_eq!(trouble.reason, Reason::ClocksDiffer);
            let both = [operator, now()].map(|time| time.to_string());
            for part in [both[0].as_str(), &both[1], "correct the clock"] {
                assert!(trouble.message.contains(part), "{trouble:?}");
            }
            assert_eq!(notices(backup, &plan)[0].reason, "RemovalFailed");
            // The message contains only the times of the first report, so later reconciles do not change the status.
            let mut reported = backup.clone();
            reported.status = Some(status(backup, &plan, operator));
            let (again, later) = planned(
                &reported,
                ahead + SignedDuration::from_mins(3 * minutes.signum()),
            );
            assert_eq!(Some(status(&reported, &again, later)), reported.status);
        }
    }
    // If the clocks differ by less than an hour, the ages are computed from the clock that is behind.
    let (plan, _) = planned(&by_age, SignedDuration::from_mins(59));
    assert_eq!(removed(&store, &plan).await, Some(1));
    let left = with_manifests([0, 24, 47].map(key));
    assert_eq!(keys(store.as_ref()).await, left);
    let (plan, _) = planned(&by_count, SignedDuration::ZERO);
    assert_eq!(removed(&store, &plan).await, Some(2));
}
