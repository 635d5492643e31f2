//! Tests of the client with real etcd processes: the repair of a full database, alarms, and the preparation for etcd
//! 3.7.
#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::time::{Duration, Instant};

use etcd::testing::{EtcdProcess, Programs, Start};
use etcd::{Access, Alarm, AlarmKind, Error, Etcd, EtcdClient, MemberId};
use etcd_client::{AlarmAction, AlarmOptions, AlarmType, Client};

const MINORS: [&str; 4] = ["3.4", "3.5", "3.6", "3.7"];
/// Size of a value in bytes: an eighth of the quota.
const VALUE: usize = 1 << 20;

/// Overwrites one key until the old values fill the database and etcd rejects the write. Returns the last revision.
async fn fill(url: &str) -> i64 {
    let mut client = Client::connect([url], None).await.unwrap();
    for _ in 0..100 {
        if let Err(error) = client.put("key", vec![7; VALUE], None).await {
            assert!(error.to_string().contains("space"), "{error}");
            break;
        }
    }
    let answer = client.get("key", None).await.unwrap();
    answer.header().unwrap().revision()
}

#[tokio::test]
async fn full_database_is_repaired_by_compaction_and_defragmentation() {
    for minor in MINORS {
        let start = Start {
            flags: vec!["--quota-backend-bytes=8388608".to_owned()],
            ..Start::default()
        };
        let etcd = EtcdProcess::start(&Programs::find(minor), &start).await;
        let (url, client) = (etcd.client_url.clone(), EtcdClient::new(Access::default()));
        let via = [url.clone()];
        let revision = fill(&url).await;

        let full = client.status(&url).await.unwrap();
        let alarm = Alarm {
            member: full.member_id,
            kind: AlarmKind::NoSpace,
        };
        assert!(
            !full.errors.is_empty(),
            "{minor}: the status must report the alarm"
        );
        assert_eq!(client.alarms(&via).await.unwrap(), [alarm]);

        client.compact(&via, revision).await.unwrap();
        client.compact(&via, revision - 1).await.unwrap();
        // The loop below requests the alarms, because etcd updates the reported database size only at a commit, and
        // this request triggers a commit.
        let begun = Instant::now();
        // The loop is skipped for etcd 3.4, because etcd 3.4 commits only after a write, and rejects writes to a full
        // database.
        loop {
            if minor == "3.4" {
                break;
            }
            client.alarms(&via).await.unwrap();
            let compacted = client.status(&url).await.unwrap();
            if compacted.db_size_in_use < compacted.db_size / 2 {
                break;
            }
            assert!(
                begun.elapsed() < Duration::from_secs(10),
                "{minor}: {compacted:?}"
            );
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        client.defragment(&url).await.unwrap();
        let small = client.status(&url).await.unwrap();
        assert!(small.db_size < full.db_size / 2, "{minor}: {small:?}");

        client.disarm(&via, alarm).await.unwrap();
        client.disarm(&via, alarm).await.unwrap();
        assert_eq!(client.alarms(&via).await.unwrap(), []);
        let mut user = Client::connect([&url], None).await.unwrap();
        user.put("key", "again", None).await.unwrap();
    }
}

/// Invariant 29: etcd 3.7 does not start if entries of etcd 3.5 follow the last snapshot in its Raft log.
/// `append_entries` makes etcd 3.6 save a new snapshot. If a later etcd 3.7 starts without this snapshot, the test
/// fails, and `append_entries` and the invariant are no longer needed.
#[tokio::test]
async fn invariant_29_etcd_3_7_starts_on_log_of_3_5_only_after_preparation() {
    const SNAPSHOT_COUNT: u64 = 500;
    let start = Start {
        flags: vec![format!("--snapshot-count={SNAPSHOT_COUNT}")],
        ..Start::default()
    };
    let client = EtcdClient::new(Access::default());
    for prepare in [false, true] {
        let mut etcd = EtcdProcess::start(&Programs::find("3.5"), &start).await;
        etcd.change_release(&Programs::find("3.6"));
        assert!(etcd.serves().await);
        let url = etcd.client_url.clone();
        let mut user = Client::connect([&url], None).await.unwrap();
        user.put("key", "value", None).await.unwrap();
        let ready = async {
            loop {
                let status = client.status(&url).await.unwrap();
                let stored = status.storage_version.clone().unwrap_or_default();
                if stored.starts_with("3.6") {
                    return status;
                }
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        };
        let before = tokio::time::timeout(Duration::from_secs(30), ready);
        let before = before.await.unwrap();
        let until = before.raft_index + SNAPSHOT_COUNT + 1;
        if prepare {
            client.append_entries(&url, until).await.unwrap();
            client.append_entries(&url, until).await.unwrap();
            let after = client.status(&url).await.unwrap();
            assert!((until..until + 100).contains(&after.raft_applied_index));
            assert_eq!((after.revision, after.errors), (before.revision, vec![]));
        }
        etcd.change_release(&Programs::find("3.7"));
        assert_eq!(etcd.serves().await, prepare);
    }
}

#[tokio::test]
async fn corrupt_alarm_blocks_writes_but_neither_member_list_nor_disarm() {
    for minor in MINORS {
        let etcd = EtcdProcess::start(&Programs::find(minor), &Start::default()).await;
        let (url, client) = (etcd.client_url.clone(), EtcdClient::new(Access::default()));
        let via = [url.clone()];
        let mut user = Client::connect([&url], None).await.unwrap();
        let mut member = AlarmOptions::new();
        member.with_member(7);
        user.alarm(AlarmAction::Activate, AlarmType::Corrupt, Some(member))
            .await
            .unwrap();
        assert!(user.put("key", "value", None).await.is_err(), "{minor}");

        let alarm = Alarm {
            member: MemberId(7),
            kind: AlarmKind::Corrupt,
        };
        assert_eq!(client.alarms(&via).await.unwrap(), [alarm], "{minor}");
        assert_eq!(client.members(&via).await.unwrap().members.len(), 1);
        client.disarm(&via, alarm).await.unwrap();
        user.put("key", "value", None).await.unwrap();
    }
}

#[tokio::test]
async fn defragmentation_of_unreachable_member_fails() {
    let client = EtcdClient::new(Access::default());
    let answer = client.defragment("http://127.0.0.1:1").await;
    assert!(matches!(answer, Err(Error::Unreachable(_))), "{answer:?}");
}
