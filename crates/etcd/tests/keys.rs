//! Tests of reads and changes of keys with real etcd processes.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::time::Duration;

use bytes::Bytes;
use etcd::testing::{EtcdProcess, Programs, Start};
use etcd::{Access, EtcdClient, KeyRange, Operation, PageError, Precondition};
use etcd_client::Client;
use tokio::time::timeout;

const MINORS: [&str; 4] = ["3.4", "3.5", "3.6", "3.7"];

async fn writer(etcd: &EtcdProcess) -> Client {
    Client::connect([etcd.client_url.as_str()], None)
        .await
        .unwrap()
}

fn put(key: &'static str, value: &'static str) -> Operation {
    Operation::Put {
        key: Bytes::from_static(key.as_bytes()),
        value: Bytes::from_static(value.as_bytes()),
    }
}

fn delete(key: &'static str) -> Operation {
    Operation::Delete {
        key: Bytes::from_static(key.as_bytes()),
    }
}

async fn keys(client: &EtcdClient, url: &str, range: &KeyRange) -> Vec<(Bytes, Bytes)> {
    let page = client.page(url, range, 0, 100).await.unwrap();
    assert!(!page.has_more);
    page.entries
}

#[tokio::test]
async fn pages_of_a_revision_contain_all_keys_in_order_until_compaction() {
    for minor in MINORS {
        let etcd = EtcdProcess::start(&Programs::find(minor), &Start::default()).await;
        let (url, mut writer) = (etcd.client_url.clone(), writer(&etcd).await);
        for index in 0..10 {
            writer.put(format!("a/{index}"), "old", None).await.unwrap();
        }
        writer.put("b", "", None).await.unwrap();
        writer.put("a/3", "new", None).await.unwrap();
        let client = EtcdClient::new(Access::default());
        let all = KeyRange::prefix(b"a/");
        let (mut found, mut after) = (Vec::new(), None);
        loop {
            let range = all.after(after.as_deref());
            let page = client.page(&url, &range, 12, 4).await.unwrap();
            assert_eq!(page.revision, 13, "{minor}");
            after = page.entries.last().map(|(key, _)| key.clone());
            found.extend(page.entries);
            if !page.has_more {
                break;
            }
        }
        assert_eq!(found.len(), 10, "{minor}");
        assert!(found.is_sorted(), "{minor}");
        assert!(found.iter().all(|(_, value)| value == "old"), "{minor}");
        let newest = client.page(&url, &KeyRange::key(b"a/3"), 0, 1).await;
        let newest = newest.unwrap();
        assert_eq!((newest.first_changed, newest.entries.len()), (13, 1));
        writer.compact(13, None).await.unwrap();
        let compacted = client.page(&url, &all, 12, 4).await;
        assert!(
            matches!(compacted, Err(PageError::Compacted)),
            "{minor}: {compacted:?}"
        );
    }
}

#[tokio::test]
async fn oversized_page_fails_until_client_requests_fewer_keys() {
    let etcd = EtcdProcess::start(&Programs::find("3.6"), &Start::default()).await;
    let (url, mut writer) = (etcd.client_url.clone(), writer(&etcd).await);
    for index in 0..8 {
        let value = vec![b'x'; 1 << 20];
        writer.put(format!("k{index}"), value, None).await.unwrap();
    }
    let small = EtcdClient::new(Access::default());
    let page = small.page(&url, &KeyRange::all(), 0, 1).await;
    assert!(matches!(page, Err(PageError::TooLarge)), "{page:?}");
    let large = EtcdClient::new(Access::default()).with_max_answer(6 << 20);
    let page = large.page(&url, &KeyRange::all(), 0, 8).await;
    assert!(matches!(page, Err(PageError::TooLarge)), "{page:?}");
    let page = large.page(&url, &KeyRange::all(), 0, 4).await.unwrap();
    assert_eq!((page.entries.len(), page.has_more), (4, true));
}

#[tokio::test]
async fn changes_are_applied_only_if_all_preconditions_hold() {
    for minor in MINORS {
        let etcd = EtcdProcess::start(&Programs::find(minor), &Start::default()).await;
        let url = etcd.client_url.clone();
        let client = EtcdClient::new(Access::default());
        let range = KeyRange::prefix(b"p/");
        let empty = || Precondition::Empty(range.clone());
        let value = |value: &'static str| Precondition::Value {
            key: Bytes::from_static(b"state"),
            value: Bytes::from_static(value.as_bytes()),
        };
        let changed = |revision| Precondition::Changed {
            key: Bytes::from_static(b"state"),
            revision,
        };
        let commit = async |preconditions: &[Precondition], operations: &[Operation]| {
            client
                .commit(&url, preconditions, operations)
                .await
                .unwrap()
        };
        let first = [put("state", "1"), put("p/a", "x")];
        assert_eq!(commit(&[value("0")], &first).await, None, "{minor}");
        assert_eq!(commit(&[empty(), changed(0)], &first).await, Some(2));
        assert_eq!(commit(&[empty(), changed(2)], &first).await, None);
        assert_eq!(commit(&[empty()], &first).await, None, "{minor}");
        let second = [put("state", "2"), delete("p/a"), put("p/b", "y")];
        assert_eq!(commit(&[value("1"), changed(1)], &second).await, None);
        assert_eq!(commit(&[value("1"), changed(2)], &second).await, Some(3));
        assert_eq!(commit(&[value("1")], &second).await, None, "{minor}");
        let found = keys(&client, &url, &KeyRange::all()).await;
        let expected = [("p/b", "y"), ("state", "2")];
        let expected = expected.map(|(key, value)| (Bytes::from(key), Bytes::from(value)));
        assert_eq!(found, expected, "{minor}");
    }
}

#[tokio::test]
async fn watch_of_a_prefix_delivers_only_its_keys() {
    for minor in MINORS {
        let etcd = EtcdProcess::start(&Programs::find(minor), &Start::default()).await;
        let url = etcd.client_url.clone();
        let client = EtcdClient::new(Access::default());
        let range = KeyRange::prefix(b"a/");
        let mut watch = client.watch_range(&url, &range, 1).await.unwrap();
        let operations = [put("b", ""), put("a/1", ""), put("a0", "")];
        client.commit(&url, &[], &operations).await.unwrap();
        client.commit(&url, &[], &[delete("b")]).await.unwrap();
        client.commit(&url, &[], &[delete("a/1")]).await.unwrap();
        let mut events = Vec::new();
        while events.len() < 2 {
            let batch = timeout(Duration::from_secs(30), watch.next()).await;
            events.extend(batch.expect("a batch").unwrap().events);
        }
        let found: Vec<_> = events
            .iter()
            .map(|event| (event.revision, event.change.value.is_some()))
            .collect();
        assert_eq!(found, [(2, true), (4, false)], "{minor}");
    }
}
