//! Locks of objects in Google Cloud Storage and Azure. fake-gcs-server stores and reports the lock, but does not
//! enforce it. Azurite ignores the lock, so the proxy adds the headers that confirm a lock to the responses of Azurite.

use api::storage::{ObjectLock, ObjectLockMode};
use store::testing::{AzureServer, GoogleServer, content, upload};
use store::{AbsConfig, AbsStore, GcsConfig, GcsStore, Store};

use crate::proxy::{Harm, Proxy, Request};
use crate::{ALWAYS, KEY, MIB, any, fault};

const MODE: &str = "x-ms-immutability-policy-mode";
const UNTIL: &str = "x-ms-immutability-policy-until-date";

const LOCK: ObjectLock = ObjectLock {
    mode: ObjectLockMode::Governance,
    days: 3,
};

fn head(request: &Request) -> bool {
    request.method == "HEAD"
}

/// A proxy in front of the server, and a store that uses the proxy. With `trusted`, the store also has Google's own
/// client.
async fn google(server: &GoogleServer, trusted: bool) -> (Proxy, GcsStore) {
    let proxy = Proxy::start(&server.endpoint).await;
    let config = GcsConfig {
        endpoint: Some(proxy.url(&server.endpoint)),
        ..server.config("bucket")
    };
    let store = if trusted {
        GcsStore::with_trusted_endpoint(config).await
    } else {
        GcsStore::new(config).await
    };
    (proxy, store.unwrap().with_lock(Some(LOCK)))
}

async fn azure(server: &AzureServer) -> (Proxy, AbsStore) {
    let proxy = Proxy::start(&server.endpoint).await;
    let config = AbsConfig {
        endpoint: Some(proxy.url(&server.endpoint)),
        ..server.config("bucket")
    };
    let store = AbsStore::new(&config).unwrap();
    (proxy, store.with_lock(Some(LOCK)))
}

/// Asserts that uploads fail because the store does not confirm the lock, and that failed uploads leave no object.
async fn refuses_unlocked_objects(store: &dyn Store) {
    for size in [10, 20 * MIB] {
        let error = upload(store, KEY, &content(size), MIB).await.unwrap_err();
        let text = error.to_string();
        assert!(
            text.starts_with("objectLock: the store does not confirm"),
            "{text}"
        );
        assert_eq!(store.list("").await.unwrap(), [], "{size}");
    }
    let error = store.put(KEY, content(10)).await.unwrap_err();
    assert!(error.to_string().starts_with("objectLock: "), "{error}");
    assert_eq!(store.list("").await.unwrap(), []);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn google_upload_fails_if_store_does_not_confirm_lock() {
    let server = GoogleServer::start(&["bucket"]);
    let (proxy, store) = google(&server, false).await;
    for (stored, answered) in [
        ("\"retention\":{", "\"ignored\":{"),
        ("\"mode\":\"Unlocked\"", "\"mode\":\"Locked\""),
        ("\"retainUntilTime\":\"20", "\"retainUntilTime\":\"19"),
    ] {
        proxy.harm(&[fault(any, ALWAYS, Harm::Text(stored, answered))]);
        refuses_unlocked_objects(&store).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn azure_upload_fails_if_store_does_not_confirm_lock() {
    let server = AzureServer::start(&["bucket"]);
    let (proxy, store) = azure(&server).await;
    refuses_unlocked_objects(&store).await;
    for harm in [
        Harm::Headers(&[(MODE, Some("Unlocked"))]),
        Harm::Headers(&[
            (MODE, Some("Unlocked")),
            (UNTIL, Some("Fri, 01 Jan 2021 00:00:00 GMT")),
        ]),
        Harm::Headers(&[
            (MODE, Some("Locked")),
            (UNTIL, Some("Fri, 01 Jan 2100 00:00:00 GMT")),
        ]),
    ] {
        proxy.harm(&[fault(head, ALWAYS, harm)]);
        refuses_unlocked_objects(&store).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn google_objects_are_stored_with_retention() {
    let server = GoogleServer::start(&["bucket"]);
    // With `trusted`, the store also has Google's own client. This client does not report locks, so the store must not
    // use it, even for small objects.
    for trusted in [false, true] {
        let (proxy, store) = google(&server, trusted).await;
        for size in [10, 20 * MIB] {
            proxy.harm(&[]);
            upload(&store, KEY, &content(size), MIB).await.unwrap();
            let bodies = proxy.bodies();
            let sent = bodies.iter().map(|body| String::from_utf8_lossy(body));
            let retentions = sent.filter(|body| {
                body.contains("\"retention\":{\"mode\":\"Unlocked\",\"retainUntilTime\":\"20")
            });
            assert_eq!(retentions.count(), 1, "{trusted} {size}");
        }
        store.put("manifest", content(10)).await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn azure_blobs_are_stored_with_immutability_policy() {
    let server = AzureServer::start(&["bucket"]);
    let (proxy, store) = azure(&server).await;
    let confirmed = Harm::Headers(&[
        (MODE, Some("Unlocked")),
        (UNTIL, Some("Fri, 01 Jan 2100 00:00:00 GMT")),
    ]);
    for size in [10, 20 * MIB] {
        proxy.harm(&[fault(head, ALWAYS, confirmed.clone())]);
        upload(&store, KEY, &content(size), MIB).await.unwrap();
        let asked = proxy.asked();
        let mut locks = asked
            .iter()
            .filter(|request| request.header(MODE).is_some());
        let lock = locks.next().unwrap();
        assert!(locks.next().is_none(), "{size}: two requests have a lock");
        assert!(!lock.target.contains("comp=block&"), "{}", lock.target);
        assert_eq!(lock.header(MODE), Some("unlocked"));
        assert!(lock.header(UNTIL).unwrap().ends_with(" GMT"));
        // The `expected-lock` headers are only for the transport of the `store` crate, which does not send them.
        let is_internal = |request: &Request| request.head.contains("expected-lock");
        assert!(!asked.iter().any(is_internal));
    }
    store.put("manifest", content(10)).await.unwrap();
}
