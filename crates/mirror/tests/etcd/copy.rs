//! Copies of keys, and their continuation after interruptions and compactions.

use std::time::Duration;

use etcd_client::{Client, DeleteOptions, PutOptions, Txn, TxnOp};
use mirror::checkpoint::CopyReason;
use mirror::progress::State;

use crate::lab::{Lab, client, keys_below, until};

const ALL: (&str, &str) = ("", "");

async fn put_many(client: &mut Client, prefix: &str, count: usize, value: &str) {
    for begin in (0..count).step_by(100) {
        let end = (begin + 100).min(count);
        let puts = (begin..end).map(|index| TxnOp::put(format!("{prefix}{index:05}"), value, None));
        let txn = Txn::new().and_then(puts.collect::<Vec<_>>());
        client.txn(txn).await.unwrap();
    }
}

#[tokio::test]
async fn mirror_copies_existing_keys_and_all_later_changes() {
    for (from, to) in [
        ("3.4", "3.7"),
        ("3.5", "3.6"),
        ("3.6", "3.5"),
        ("3.7", "3.6"),
    ] {
        let lab = Lab::new(from, to).await;
        let mut source = client(&lab.source).await;
        put_many(&mut source, "k/", 1_000, "old").await;
        source.put([0_u8, 0xff], [0xff_u8, 0], None).await.unwrap();
        let mirror = lab.mirror("m", ALL);
        lab.await_equal(ALL).await;
        let lease = source.lease_grant(600, None).await.unwrap().id();
        let with_lease = Some(PutOptions::new().with_lease(lease));
        source.put("leased", "x", with_lease).await.unwrap();
        put_many(&mut source, "k/", 500, "new").await;
        let range = DeleteOptions::new().with_range("k/00900");
        source.delete("k/00700", Some(range)).await.unwrap();
        lab.await_equal(ALL).await;
        let mut destination = client(&lab.destination).await;
        let copied = destination.get("k/00001", None).await.unwrap();
        assert_eq!(copied.kvs()[0].value(), b"new", "{from} {to}");
        // The copied key has no lease. The revocation of the lease in the source arrives as a deletion.
        let leased = destination.get("leased", None).await.unwrap();
        assert!(leased.kvs().iter().all(|kv| kv.lease() == 0));
        source.lease_revoke(lease).await.unwrap();
        lab.await_equal(ALL).await;
        assert!(keys_below(&lab.destination, "leased").await.is_empty());
        until("the mirror is up to date", || {
            let lag = mirror.progress().lag;
            lag.is_some_and(|lag| lag.revisions == 0 && lag.synced.is_some())
        })
        .await;
        let progress = mirror.stop().await;
        assert_eq!(progress.state, State::Following);
        let copy = progress.copy.unwrap();
        assert_eq!((copy.reason, copy.complete), (CopyReason::Initial, true));
        assert!((copy.compared, copy.deleted) == (1_001, 0), "{copy:?}");
    }
}

/// Unlike `etcdctl make-mirror`, a mirror does not copy all keys again after an interruption.
#[tokio::test]
async fn interrupted_mirror_continues_without_second_copy() {
    let mut lab = Lab::new("3.6", "3.6").await;
    let mut source = client(&lab.source).await;
    put_many(&mut source, "k/", 300, "1").await;
    let mirror = lab.mirror("m", ALL);
    lab.await_equal(ALL).await;
    until("the copy is complete", || {
        mirror.progress().state == State::Following
    })
    .await;
    mirror.stop().await;
    put_many(&mut source, "k/", 200, "2").await;
    source.delete("k/00250", None).await.unwrap();
    let mirror = lab.mirror("m", ALL);
    lab.await_equal(ALL).await;
    // While the mirror runs, first the destination restarts, and then the source.
    lab.destination.restart();
    put_many(&mut source, "k/", 100, "3").await;
    assert!(lab.destination.serves().await);
    lab.await_equal(ALL).await;
    lab.source.restart();
    assert!(lab.source.serves().await);
    let mut source = client(&lab.source).await;
    put_many(&mut source, "k/", 50, "4").await;
    lab.await_equal(ALL).await;
    let progress = mirror.stop().await;
    assert_eq!(progress.copy, None, "{progress:?}");
}

#[tokio::test]
async fn compacted_changes_cause_copy_that_deletes_removed_keys() {
    let pair = ("k/", "copy/");
    let lab = Lab::new("3.6", "3.6").await;
    let mut source = client(&lab.source).await;
    let mut destination = client(&lab.destination).await;
    destination.put("other", "kept", None).await.unwrap();
    put_many(&mut source, "k/", 600, "1").await;
    let mirror = lab.mirror("m", pair);
    lab.await_equal(pair).await;
    until("the copy is complete", || {
        mirror.progress().state == State::Following
    })
    .await;
    mirror.stop().await;
    let range = DeleteOptions::new().with_range("k/00400");
    source.delete("k/00100", Some(range)).await.unwrap();
    put_many(&mut source, "k/", 10, "2").await;
    put_many(&mut source, "foreign/", 10, "2").await;
    let newest = source.put("k/new", "2", None).await.unwrap();
    let newest = newest.header().unwrap().revision();
    source.compact(newest, None).await.unwrap();
    let mirror = lab.mirror("m", pair);
    lab.await_equal(pair).await;
    until("the copy is complete", || {
        mirror.progress().state == State::Following
    })
    .await;
    let progress = mirror.progress();
    let copy = progress.copy.unwrap();
    assert_eq!((copy.reason, copy.complete), (CopyReason::Compacted, true));
    assert_eq!((copy.compared, copy.written, copy.deleted), (301, 11, 300));
    let notices = mirror.monitor.take_notices();
    let reasons: Vec<_> = notices.iter().map(|notice| notice.reason).collect();
    assert_eq!(reasons, ["CopyStarted", "CopyComplete"]);
    assert_eq!(keys_below(&lab.destination, "other").await.len(), 1);
    assert!(keys_below(&lab.destination, "foreign").await.is_empty());
    mirror.stop().await;
}

/// The source deletes 1,000 keys in one transaction. A transaction of the destination can change only 127 keys.
#[tokio::test]
async fn large_transaction_is_applied_in_parts_and_reported() {
    let pair = ("k/", "k/");
    let lab = Lab::new("3.6", "3.6").await;
    let mut source = client(&lab.source).await;
    put_many(&mut source, "k/", 1_000, "1").await;
    let mirror = lab.mirror("m", pair);
    lab.await_equal(pair).await;
    until("the copy is complete", || {
        mirror.progress().state == State::Following
    })
    .await;
    let prefix = DeleteOptions::new().with_prefix();
    source.delete("k/", Some(prefix)).await.unwrap();
    lab.await_equal(pair).await;
    put_many(&mut source, "k/", 5, "2").await;
    lab.await_equal(pair).await;
    let progress = mirror.stop().await;
    assert_eq!(progress.splits, 1);
}

/// The 24 values of 1,400 KiB exceed the 16 MiB of a page, and each value almost fills a transaction.
#[tokio::test]
async fn large_values_are_copied() {
    let lab = Lab::new("3.6", "3.6").await;
    let mut source = client(&lab.source).await;
    for index in 0..24 {
        let value = vec![b'x'; 1_400 << 10];
        source
            .put(format!("large/{index:02}"), value, None)
            .await
            .unwrap();
    }
    let mirror = lab.mirror("m", ALL);
    for index in 0..24 {
        let key = format!("large/{index:02}");
        let found = async || keys_below(&lab.destination, &key).await;
        let begun = std::time::Instant::now();
        while found().await.is_empty() {
            assert!(begun.elapsed() < Duration::from_mins(1), "{key}");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }
    until("the copy is complete", || {
        mirror.progress().state == State::Following
    })
    .await;
    let progress = mirror.stop().await;
    assert_eq!(progress.copy.unwrap().written, 24);
}
