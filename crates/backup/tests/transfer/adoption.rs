//! What an operator that died has left is known again by the one that comes after, and nothing else is.

use api::backup::name;
use api::manifest::ManifestCluster;

use super::*;

#[tokio::test]
async fn is_found_again_by_the_operator_that_comes_after() {
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
    // Not for another EtcdBackup, nor for one that began later.
    assert_eq!(find("uid-2", long_ago()).await, None);
    let later = stored.created_at + jiff::SignedDuration::from_secs(1);
    assert_eq!(find("uid-1", later).await, None);
    // Nor if the object is another one by now, or the manifest is nobody's.
    store.put(KEY, Bytes::from_static(b"other")).await.unwrap();
    assert_eq!(find("uid-1", long_ago()).await, None);
    store
        .put(&manifest_key(KEY), Bytes::from_static(b"{}"))
        .await
        .unwrap();
    assert_eq!(find("uid-1", long_ago()).await, None);
}

/// The spec was changed in the second in which the backup of the cluster before was complete.
#[tokio::test]
async fn what_was_made_of_another_cluster_is_not_adopted() {
    let snapshot = recorded().await;
    let begun: Timestamp = "2026-06-15T12:00:00Z".parse().unwrap();
    for name in [Name::Exact(KEY.to_owned()), numbered(begun)] {
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
            (Some("one"), Written::Whole(stored.clone())),
            (Some("two"), Written::Not(name.clone())),
            (None, Written::Not(name.clone())),
        ] {
            let whose = Whose {
                uid: "uid-1",
                cluster,
                reads: true,
            };
            let found = written(store.as_ref(), name.clone(), whose, begun).await;
            assert_eq!(found.unwrap(), expected, "{cluster:?}");
        }
    }
}

fn numbered(time: Timestamp) -> Name {
    Name::Numbered {
        path: KEY.to_owned(),
        time,
        left: None,
    }
}

#[tokio::test]
async fn a_periodic_backup_is_named_by_its_run_and_found_again_by_it() {
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
    // Nothing was written meanwhile: the revision before the stream is the snapshot's own.
    assert_eq!(i64::try_from(parts.revision).unwrap(), stored.revision);
    let look = async |uid: &'static str, time| {
        written(store.as_ref(), numbered(time), alone(uid), time)
            .await
            .unwrap()
    };
    assert_eq!(look("uid-1", begun).await, Written::Whole(stored.clone()));
    let later = begun + jiff::SignedDuration::from_secs(1);
    assert_eq!(look("uid-1", later).await, Written::Not(numbered(later)));
    // Another EtcdBackup's of the same second is neither ours nor replaced.
    assert_eq!(look("uid-2", begun).await, Written::Not(numbered(begun)));

    // The operator died between the backup and its manifest: the next attempt replaces it, whatever the revision.
    store.delete(&manifest_key(key)).await.unwrap();
    fill(&etcd.client_url, 1).await;
    let Written::Not(again) = look("uid-1", begun).await else {
        panic!("a backup without its manifest is none");
    };
    run.name = again;
    let replaced = run
        .run(&Meter::default(), &CancellationToken::new())
        .await
        .unwrap();
    assert_eq!(replaced.location, stored.location);
    assert!(replaced.revision > stored.revision);
    assert_eq!(store.list("").await.unwrap().len(), 2);
    assert_eq!(look("uid-1", begun).await, Written::Whole(replaced));
}
