//! Tests of the watch of all keys with real etcd processes.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::time::Duration;

use etcd::testing::{EtcdProcess, Programs, Start};
use etcd::{Access, Credentials, Error, EtcdClient, Watch, WatchError, WatchEvent};
use etcd_client::{Client, DeleteOptions, LeaseGrantOptions, PutOptions, Txn, TxnOp};
use tokio::time::timeout;

/// Content, lease, version and create revision.
type Value<'a> = (&'a [u8], i64, i64, i64);

const MINORS: [&str; 3] = ["3.5", "3.6", "3.7"];

async fn client(etcd: &EtcdProcess) -> Client {
    Client::connect([etcd.client_url.as_str()], None)
        .await
        .unwrap()
}

/// Waits for a number of events. Returns them, and the number of batches that are fragments.
async fn events(watch: &mut Watch, count: usize) -> (Vec<WatchEvent>, usize) {
    let (mut events, mut fragments) = (Vec::new(), 0);
    while events.len() < count {
        let batch = timeout(Duration::from_secs(30), watch.next());
        let batch = batch.await.expect("a batch").unwrap();
        fragments += usize::from(batch.is_fragment);
        events.extend(batch.events);
    }
    (events, fragments)
}

#[tokio::test]
async fn watch_delivers_value_lease_and_revisions_of_changes() {
    for minor in MINORS {
        let etcd = EtcdProcess::start(&Programs::find(minor), &Start::default()).await;
        let mut writer = client(&etcd).await;
        let lease = LeaseGrantOptions::new().with_id(77);
        writer.lease_grant(600, Some(lease)).await.unwrap();
        let with_lease = Some(PutOptions::new().with_lease(77));
        writer.put([0, 0xff], "one", with_lease).await.unwrap();
        let reader = EtcdClient::new(Access::default());
        let mut watch = reader.watch(&etcd.client_url, 2).await.unwrap();
        let operations = [
            TxnOp::put("b", "", None),
            TxnOp::delete([0, 0xff], None),
            TxnOp::put("a", "two", None),
        ];
        let txn = Txn::new().and_then(operations);
        writer.txn(txn).await.unwrap();
        writer.put("a", "three", None).await.unwrap();
        let (events, _) = events(&mut watch, 5).await;
        let found: Vec<_> = events
            .iter()
            .map(|event| {
                let value = event.change.value.as_ref();
                let value = value.map(|value| {
                    let content = value.content.as_ref();
                    (content, value.lease, value.version, value.create_revision)
                });
                (event.revision, event.change.key.as_ref(), value)
            })
            .collect();
        let expected: [(i64, &[u8], Option<Value<'_>>); 5] = [
            (2, &[0, 0xff], Some((b"one", 77, 1, 2))),
            (3, b"b", Some((b"", 0, 1, 3))),
            (3, &[0, 0xff], None),
            (3, b"a", Some((b"two", 0, 1, 3))),
            (4, b"a", Some((b"three", 0, 2, 3))),
        ];
        assert_eq!(found, expected, "{minor}");
        let found = reader.lease(&etcd.client_url, 77).await.unwrap();
        assert_eq!((found.granted, found.revision), (Some(600), 4));
        let found = reader.lease(&etcd.client_url, 78).await.unwrap();
        assert_eq!((found.granted, found.revision), (None, 4));
    }
}

/// The events of one revision have more than 2 MiB, so etcd splits them.
#[tokio::test]
async fn large_revision_is_delivered_in_fragments() {
    for minor in MINORS {
        let etcd = EtcdProcess::start(&Programs::find(minor), &Start::default()).await;
        let mut writer = client(&etcd).await;
        let prefix = "k".repeat(600);
        for begin in (0..4_000).step_by(125) {
            let puts = (begin..begin + 125)
                .map(|index: u32| TxnOp::put(format!("{prefix}{index:04}"), "", None));
            let txn = Txn::new().and_then(puts.collect::<Vec<_>>());
            writer.txn(txn).await.unwrap();
        }
        let reader = EtcdClient::new(Access::default());
        let mut watch = reader.watch(&etcd.client_url, 34).await.unwrap();
        let options = DeleteOptions::new().with_prefix();
        writer.delete(prefix, Some(options)).await.unwrap();
        let (events, fragments) = events(&mut watch, 4_000).await;
        assert_eq!(events.len(), 4_000, "{minor}");
        assert!(fragments > 0, "{minor}");
        assert!(events.iter().all(|event| event.revision == 34));
        let keys: Vec<_> = events.iter().map(|event| &event.change.key).collect();
        assert!(keys.is_sorted(), "{minor}");
    }
}

#[tokio::test]
async fn watch_from_compacted_revision_fails_with_compaction_revision() {
    for minor in MINORS {
        let etcd = EtcdProcess::start(&Programs::find(minor), &Start::default()).await;
        let mut writer = client(&etcd).await;
        for index in 0..5 {
            writer.put("key", index.to_string(), None).await.unwrap();
        }
        writer.compact(5, None).await.unwrap();
        let reader = EtcdClient::new(Access::default());
        let mut watch = reader.watch(&etcd.client_url, 4).await.unwrap();
        let error = watch.next().await.unwrap_err();
        let is_compacted = matches!(error, WatchError::Compacted { compacted: 5 });
        assert!(is_compacted, "{minor}: {error:?}");
        let mut watch = reader.watch(&etcd.client_url, 5).await.unwrap();
        let (events, _) = events(&mut watch, 2).await;
        assert_eq!((events[0].revision, events[1].revision), (5, 6), "{minor}");
    }
}

#[tokio::test]
async fn watch_on_follower_reports_progress_and_broken_connection() {
    let programs = Programs::find("3.6");
    let mut members = EtcdProcess::start_cluster(&programs, 3, &Start::default()).await;
    let reader = EtcdClient::new(Access::default());
    let mut writer = client(&members[0]).await;
    let leader = writer.status().await.unwrap().leader();
    let mut follower = 0;
    for (index, member) in members.iter().enumerate() {
        let status = client(member).await.status().await.unwrap();
        if status.header().unwrap().member_id() != leader {
            follower = index;
        }
    }
    let url = members[follower].client_url.clone();
    // The watch starts at revision 1, because etcd sends no progress notification to a watch that starts after the
    // member's revision.
    let mut watch = reader.watch(&url, 1).await.unwrap();
    let batch = loop {
        watch.request_progress().await.unwrap();
        // The request is repeated, because etcd ignores it until the watch has received all past events.
        if let Ok(batch) = timeout(Duration::from_millis(500), watch.next()).await {
            break batch.unwrap();
        }
    };
    assert_eq!((batch.events.len(), batch.revision), (0, 1));
    let position = (follower + 1) % members.len();
    let mut writer = client(&members[position]).await;
    writer.put("key", "", None).await.unwrap();
    let (found, _) = events(&mut watch, 1).await;
    assert_eq!(found[0].revision, 2);
    // The loop above may have requested several progress notifications, so some of them may arrive before the error.
    members[follower].kill();
    let ended = loop {
        let next = timeout(Duration::from_secs(30), watch.next()).await;
        if let Err(error) = next.expect("an error") {
            break error;
        }
    };
    assert!(
        matches!(ended, WatchError::Ended(Error::Unreachable(_))),
        "{ended:?}"
    );
}

#[tokio::test]
async fn watch_requires_login_if_authentication_is_enabled() {
    for minor in MINORS {
        let start = Start {
            flags: vec!["--bcrypt-cost=4".to_owned()],
            ..Start::default()
        };
        let etcd = EtcdProcess::start(&Programs::find(minor), &start).await;
        let url = etcd.client_url.clone();
        client(&etcd).await.put("key", "", None).await.unwrap();
        let root = |password: &str| {
            EtcdClient::new(Access {
                tls: None,
                credentials: Some(Credentials {
                    user: "root".into(),
                    password: password.into(),
                    former: Vec::new(),
                }),
            })
        };
        let reader = root("secret");
        let enabled = etcd::Etcd::enable_auth(&reader, std::slice::from_ref(&url));
        enabled.await.unwrap();
        let mut watch = reader.watch(&url, 2).await.unwrap();
        let (found, _) = events(&mut watch, 1).await;
        assert_eq!(found[0].revision, 2, "{minor}");
        for denied in [EtcdClient::new(Access::default()), root("wrong")] {
            let error = denied.watch(&url, 2).await.map(|_| ()).unwrap_err();
            let is_denied = matches!(error, Error::AccessDenied(_));
            assert!(is_denied, "{minor}: {error:?}");
        }
    }
}
