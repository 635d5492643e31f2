//! Limits the number of concurrent reads of listings and manifests, and thus their memory (ADR 24). Users choose the
//! store, and its listing may contain up to 100,000 names.

use std::sync::Arc;

use async_trait::async_trait;
use bytes::Bytes;
use runtime::Scope;
use runtime::slots::{Place, Slot, SlotLimits, Slots};
use store::{Error, Object, ObjectStream, Store, Unfinished, Upload};

use crate::transfer::slot_key;

pub(crate) struct Reads(Arc<Slots>);

impl Reads {
    pub(crate) fn new(scope: &Scope) -> Self {
        Self(Slots::new(SlotLimits::of_reads(scope)))
    }

    /// Waits for a slot. The caller holds the slot while it uses the listing.
    pub(crate) async fn slot(&self, namespace: &str, store: &dyn Store) -> Option<Slot> {
        self.0.acquire(place(namespace, store)).await
    }

    /// Wraps the store so that each listing waits for a slot. The slot is free again when the listing has ended.
    pub(crate) fn limit(&self, namespace: &str, store: Arc<dyn Store>) -> Arc<dyn Store> {
        Arc::new(LimitedStore {
            place: place(namespace, store.as_ref()),
            slots: self.0.clone(),
            store,
        })
    }
}

fn place(namespace: &str, store: &dyn Store) -> Place {
    Place {
        namespace: namespace.to_owned(),
        store: slot_key(store),
        in_pod: false,
    }
}

struct LimitedStore {
    store: Arc<dyn Store>,
    slots: Arc<Slots>,
    place: Place,
}

#[async_trait]
impl Store for LimitedStore {
    fn location(&self) -> String {
        self.store.location()
    }

    fn endpoint(&self) -> String {
        self.store.endpoint()
    }

    async fn begin(&self, key: &str) -> Result<Box<dyn Upload>, Error> {
        self.store.begin(key).await
    }

    async fn put(&self, key: &str, content: Bytes) -> Result<(), Error> {
        self.store.put(key, content).await
    }

    async fn get(&self, key: &str) -> Result<ObjectStream, Error> {
        self.store.get(key).await
    }

    async fn head(&self, key: &str) -> Result<Option<Object>, Error> {
        self.store.head(key).await
    }

    async fn list(&self, prefix: &str) -> Result<Vec<Object>, Error> {
        let _slot = self.slots.acquire(self.place.clone()).await;
        self.store.list(prefix).await
    }

    async fn delete(&self, key: &str) -> Result<(), Error> {
        self.store.delete(key).await
    }

    async fn unfinished(&self, prefix: &str) -> Result<Vec<Unfinished>, Error> {
        let _slot = self.slots.acquire(self.place.clone()).await;
        self.store.unfinished(prefix).await
    }

    async fn discard(&self, unfinished: &Unfinished) -> Result<(), Error> {
        self.store.discard(unfinished).await
    }

    async fn discard_unfinished(&self, key: &str, begun_before: i64) -> Result<(), Error> {
        let _slot = self.slots.acquire(self.place.clone()).await;
        self.store.discard_unfinished(key, begun_before).await
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::time::Duration;

    use futures::future::join_all;
    use store::LocalStore;

    use super::*;

    /// Counts concurrent listings of a directory.
    struct CountingStore {
        store: LocalStore,
        running: AtomicUsize,
        most: AtomicUsize,
    }

    impl CountingStore {
        async fn count(&self) {
            let running = self.running.fetch_add(1, Ordering::SeqCst) + 1;
            self.most.fetch_max(running, Ordering::SeqCst);
            tokio::time::sleep(Duration::from_millis(5)).await;
            self.running.fetch_sub(1, Ordering::SeqCst);
        }
    }

    #[async_trait]
    impl Store for CountingStore {
        fn location(&self) -> String {
            self.store.location()
        }

        async fn begin(&self, key: &str) -> Result<Box<dyn Upload>, Error> {
            self.store.begin(key).await
        }

        async fn put(&self, key: &str, content: Bytes) -> Result<(), Error> {
            self.store.put(key, content).await
        }

        async fn get(&self, key: &str) -> Result<ObjectStream, Error> {
            self.store.get(key).await
        }

        async fn head(&self, key: &str) -> Result<Option<Object>, Error> {
            self.store.head(key).await
        }

        async fn list(&self, prefix: &str) -> Result<Vec<Object>, Error> {
            self.count().await;
            self.store.list(prefix).await
        }

        async fn delete(&self, key: &str) -> Result<(), Error> {
            self.store.delete(key).await
        }

        async fn unfinished(&self, prefix: &str) -> Result<Vec<Unfinished>, Error> {
            self.count().await;
            self.store.unfinished(prefix).await
        }

        async fn discard(&self, unfinished: &Unfinished) -> Result<(), Error> {
            self.store.discard(unfinished).await
        }
    }

    #[tokio::test]
    async fn at_most_four_listings_run_concurrently() {
        let directory = tempfile::tempdir().unwrap();
        let counting = Arc::new(CountingStore {
            store: LocalStore::new(directory.path()),
            running: AtomicUsize::new(0),
            most: AtomicUsize::new(0),
        });
        let most = |namespaces: usize| {
            counting.most.store(0, Ordering::SeqCst);
            let reads = Reads::new(&Scope::All);
            let stores: Vec<_> = (0..24)
                .map(|task| reads.limit(&(task % namespaces).to_string(), counting.clone()))
                .collect();
            async move {
                join_all(stores.iter().map(async |store| {
                    store.list("etcd").await.unwrap();
                    store.unfinished("etcd").await.unwrap();
                    store.discard_unfinished("etcd", 0).await.unwrap();
                }))
                .await;
            }
        };
        most(6).await;
        assert_eq!(counting.most.load(Ordering::SeqCst), 4);
        // The listings of one namespace use at most half of the four slots.
        most(1).await;
        assert_eq!(counting.most.load(Ordering::SeqCst), 2);
    }
}
