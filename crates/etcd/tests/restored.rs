//! Tests with real etcd processes whose restored data requires a login. The revision, the number of keys and their hash
//! must be readable without a login.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::time::Duration;

use etcd::testing::{EtcdProcess, Programs, Start};
use etcd::{Access, Credentials, Etcd, EtcdClient, served};

const LIMIT: Duration = Duration::from_secs(30);

#[tokio::test]
async fn restored_data_is_read_without_login() {
    for minor in ["3.5", "3.6", "3.7"] {
        let start = Start {
            flags: vec!["--bcrypt-cost=4".to_owned()],
            ..Start::default()
        };
        let process = EtcdProcess::start(&Programs::find(minor), &start).await;
        let url = process.client_url.clone();
        let mut writer = etcd_client::Client::connect([url.as_str()], None)
            .await
            .unwrap();
        for key in ["a", "b", "a"] {
            writer.put(key, "value", None).await.unwrap();
        }
        let root = EtcdClient::new(Access {
            tls: None,
            credentials: Some(Credentials {
                user: "root".into(),
                password: "secret".into(),
                former: Vec::new(),
            }),
        });
        root.enable_auth(std::slice::from_ref(&url)).await.unwrap();
        assert!(
            writer.get("a", None).await.is_err(),
            "{minor}: no login is required"
        );
        let host = |url: &str| url.strip_prefix("http://").unwrap().to_owned();
        let (peer, metrics) = (host(&process.peer_url), host(&url));
        let found = served(&peer, &metrics, 3, LIMIT).await.unwrap();
        assert_eq!((found.revision, found.keys), (4, Some(2)), "{minor}");
        // `served` must return the hash at the requested revision, because the operator compares this hash with the
        // hash in the manifest of a backup.
        assert_eq!(found.hash, root.hash(&url, 3).await.unwrap(), "{minor}");
        assert_ne!(found.hash, root.hash(&url, 4).await.unwrap(), "{minor}");
        // `key_count` must return the number of keys at the given revision, because the manifest of a backup contains
        // this number.
        for (revision, keys) in [(2, 1), (3, 2), (4, 2)] {
            let counted = root.key_count(&url, revision).await.unwrap();
            assert_eq!(counted, Some(keys), "{minor}: revision {revision}");
        }
        assert!(root.key_count(&url, 9).await.is_err(), "{minor}");
        root.compact(std::slice::from_ref(&url), 4).await.unwrap();
        assert_eq!(root.key_count(&url, 3).await.unwrap(), None, "{minor}");
        // Revision 9 does not exist in etcd. `served` must fail then, and not return the hash of another revision.
        let error = served(&peer, &metrics, 9, LIMIT).await.unwrap_err();
        assert!(error.to_string().contains("400"), "{minor}: {error}");
    }
}
