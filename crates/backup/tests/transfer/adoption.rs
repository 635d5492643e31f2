//! A new operator process adopts the complete backup of an interrupted process, and no other object.

use api::backup::name;
use api::manifest::ManifestCluster;

use super::*;

#[tokio::test]
async fn next_operator_process_adopts_complete_backup() {
    let etcd = EtcdProcess::start(&Programs::find("3.6"), &Start::default()).await;
    let server = S3Server::start(&["bucket"]);
    let store = s3(&server).await;
    let find = async |uid: &'static str, begun| found(store.as_ref(), uid, begun).await.unwrap();
    assert_eq!(find("uid-1", long_ago()).await, None);
    let transfer = transfer(client(), vec![etcd.client_url.clone()], store.clone());
    let stored = transfer
        .run(&Meter::default(), &CancellationToken::new())
        .await
        .unwrap();
    assert_eq!(find("uid-1", long_ago()).await, Some(stored.clone()));
    // The backup is not adopted for another EtcdBackup, or for a backup that starts later.
    assert_eq!(find("uid-2", long_ago()).await, None);
    let later = stored.created_at + jiff::SignedDuration::from_secs(1);
    assert_eq!(find("uid-1", later).await, None);
    // The backup is not adopted if its object or its manifest was replaced.
    store.put(KEY, Bytes::from_static(b"other")).await.unwrap();
    assert_eq!(find("uid-1", long_ago()).await, None);
    store
        .put(&manifest_key(KEY), Bytes::from_static(b"{}"))
        .await
        .unwrap();
    assert_eq!(find("uid-1", long_ago()).await, None);
}

/// The spec changes to another cluster in the same second in which the backup of the previous cluster is complete.
#[tokio::test]
async fn backup_of_another_cluster_is_not_adopted() {
    let snapshot = recorded().await;
    let begun: Timestamp = "2026-06-15T12:00:00Z".parse().unwrap();
    for name in [ObjectName::Exact(KEY.to_owned()), numbered(begun)] {
        let dir = tempfile::tempdir().unwrap();
        let store = Arc::new(LocalStore::new(dir.path()));
        let etcd = FakeEtcd::formed(7, &["a"], |name| format!("http://{name}:2379"));
        etcd.with(|state| state.snapshot.clone_from(&snapshot));
        let cluster = ManifestCluster {
            name: "one".to_owned(),
            namespace: "n".to_owned(),
            spec: serde_json::from_value(serde_json::json!({ "size": 3 })).unwrap(),
        };
        let run = Transfer {
            name: name.clone(),
            cluster: Some(cluster),
            ..transfer(
                Arc::new(etcd),
                vec!["http://a:2379".to_owned()],
                store.clone(),
            )
        };
        let none = CancellationToken::new();
        let stored = run.run(&Meter::default(), &none).await.unwrap();
        for (cluster, expected) in [
            (Some("one"), EarlierAttempt::Complete(stored.clone())),
            (Some("two"), EarlierAttempt::Incomplete(name.clone())),
            (None, EarlierAttempt::Incomplete(name.clone())),
        ] {
            let owner = Owner {
                uid: "uid-1",
                cluster,
                encrypted: false,
                verify_content: true,
            };
            let found = earlier_attempt(store.as_ref(), name.clone(), owner, begun).await;
            assert_eq!(found.unwrap(), expected, "{cluster:?}");
        }
    }
}

fn numbered(time: Timestamp) -> ObjectName {
    ObjectName::Numbered {
        path: KEY.to_owned(),
        time,
        leftover: None,
    }
}

#[tokio::test]
async fn earlier_attempt_of_periodic_backup_is_found_by_start_time() {
    let etcd = EtcdProcess::start(&Programs::find("3.6"), &Start::default()).await;
    fill(&etcd.client_url, 1).await;
    let server = S3Server::start(&["bucket"]);
    let mut run = transfer(client(), vec![etcd.client_url.clone()], s3(&server).await);
    let store = run.store.clone();
    let begun: Timestamp = "2026-06-15T12:00:00Z".parse().unwrap();
    run.name = numbered(begun);
    let stored = run
        .run(&Meter::default(), &CancellationToken::new())
        .await
        .unwrap();
    let key = stored.location.strip_prefix("s3://bucket/").unwrap();
    let parts = name::parse(KEY, key).unwrap();
    assert_eq!(parts.time, begun);
    // Without concurrent writes, the object name contains the revision of the snapshot.
    assert_eq!(i64::try_from(parts.revision).unwrap(), stored.revision);
    let find = async |uid: &'static str, time| {
        earlier_attempt(store.as_ref(), numbered(time), owner(uid), time)
            .await
            .unwrap()
    };
    assert_eq!(
        find("uid-1", begun).await,
        EarlierAttempt::Complete(stored.clone())
    );
    let later = begun + jiff::SignedDuration::from_secs(1);
    assert_eq!(
        find("uid-1", later).await,
        EarlierAttempt::Incomplete(numbered(later))
    );
    // A backup of another EtcdBackup from the same second is neither adopted nor overwritten.
    assert_eq!(
        find("uid-2", begun).await,
        EarlierAttempt::Incomplete(numbered(begun))
    );

    // After a crash between the write of the object and the write of the manifest, the next attempt overwrites the
    // object.
    store.delete(&manifest_key(key)).await.unwrap();
    fill(&etcd.client_url, 1).await;
    let EarlierAttempt::Incomplete(name) = find("uid-1", begun).await else {
        panic!("an object without a manifest was adopted");
    };
    run.name = name;
    let replaced = run
        .run(&Meter::default(), &CancellationToken::new())
        .await
        .unwrap();
    assert_eq!(replaced.location, stored.location);
    assert!(replaced.revision > stored.revision);
    assert_eq!(store.list("").await.unwrap().len(), 2);
    assert_eq!(
        find("uid-1", begun).await,
        EarlierAttempt::Complete(replaced)
    );
}
