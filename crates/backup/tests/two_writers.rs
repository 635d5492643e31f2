//! Somebody else writes to the same path at the same time, or answers for the store: what is called a success is a
//! backup with its own manifest.
#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use api::backup::name;
use api::conditions::Reason;
use api::manifest::{BackupManifest, MANIFEST_SUFFIX, manifest_key};
use async_trait::async_trait;
use backup::observed::{Stored, Trouble};
use backup::transfer::{Meter, Name, Transfer};
use bytes::Bytes;
use etcd::fake::FakeEtcd;
use etcd::testing::{EtcdProcess, Programs, Start};
use etcd::{Access, Etcd, EtcdClient};
use futures::TryStreamExt;
use jiff::Timestamp;
use store::testing::download;
use store::{Committed, Error, LocalStore, Object, ObjectStream, Store, Unfinished, Upload};
use tokio_util::sync::CancellationToken;

const KEY: &str = "daily/etcd";

/// What the other one does, and when.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Meddling {
    None,
    /// Data of the same size comes in the place of ours before our manifest is written.
    DataBeforeManifest,
    /// The same after it was written.
    DataAfterManifest,
    /// The other's manifest comes after ours.
    Manifest,
    /// Something answers that a manifest was taken, and nothing is there.
    Swallowed,
    /// Our transfer is given up when its data is there.
    GivenUp,
}

/// A directory that tells its writings apart, as stores do.
#[derive(Clone)]
struct Shared {
    inner: LocalStore,
    writings: Arc<AtomicUsize>,
    meddling: Arc<Mutex<Meddling>>,
    cancelled: CancellationToken,
}

struct SharedUpload {
    inner: Box<dyn Upload>,
    store: Shared,
}

impl Shared {
    fn new(dir: &tempfile::TempDir, meddling: Meddling) -> Self {
        Self {
            inner: LocalStore::new(dir.path()),
            writings: Arc::default(),
            meddling: Arc::new(Mutex::new(meddling)),
            cancelled: CancellationToken::new(),
        }
    }

    fn tag(&self) -> String {
        self.writings.load(Ordering::SeqCst).to_string()
    }

    /// Once.
    fn meddles(&self, how: Meddling) -> bool {
        let mut meddling = self.meddling.lock().unwrap();
        let meddles = *meddling == how;
        if meddles {
            *meddling = Meddling::None;
        }
        meddles
    }

    async fn other_data(&self, key: &str) {
        let size = self.inner.head(key).await.unwrap().unwrap().size;
        let other = vec![7; usize::try_from(size).unwrap()];
        self.inner.put(key, other.into()).await.unwrap();
        self.writings.fetch_add(1, Ordering::SeqCst);
    }
}

#[async_trait]
impl Upload for SharedUpload {
    async fn write(&mut self, chunk: Bytes) -> Result<(), Error> {
        self.inner.write(chunk).await
    }
    async fn commit(self: Box<Self>) -> Result<Committed, Error> {
        let Self { inner, store } = *self;
        let committed = inner.commit().await?;
        store.writings.fetch_add(1, Ordering::SeqCst);
        let tag = Some(store.tag());
        if store.meddles(Meddling::DataBeforeManifest) {
            let key = store.inner.list("").await?.remove(0).key;
            store.other_data(&key).await;
        }
        if store.meddles(Meddling::GivenUp) {
            store.cancelled.cancel();
        }
        Ok(Committed { tag, ..committed })
    }
    async fn abort(self: Box<Self>) -> Result<(), Error> {
        self.inner.abort().await
    }
}

#[async_trait]
impl Store for Shared {
    fn location(&self) -> String {
        self.inner.location()
    }
    async fn begin(&self, key: &str) -> Result<Box<dyn Upload>, Error> {
        Ok(Box::new(SharedUpload {
            inner: self.inner.begin(key).await?,
            store: self.clone(),
        }))
    }
    async fn put(&self, key: &str, content: Bytes) -> Result<(), Error> {
        if self.meddles(Meddling::Swallowed) {
            return Ok(());
        }
        self.inner.put(key, content.clone()).await?;
        let Some(data) = key.strip_suffix(MANIFEST_SUFFIX) else {
            return Ok(());
        };
        if self.meddles(Meddling::DataAfterManifest) {
            self.other_data(data).await;
        }
        if self.meddles(Meddling::Manifest) {
            let mut other: BackupManifest = serde_json::from_slice(&content).unwrap();
            other.backup_uid = Some("other".to_owned());
            let other = serde_json::to_vec(&other).unwrap();
            self.inner.put(key, other.into()).await?;
        }
        Ok(())
    }
    async fn get(&self, key: &str) -> Result<ObjectStream, Error> {
        self.inner.get(key).await
    }
    async fn head(&self, key: &str) -> Result<Option<Object>, Error> {
        let found = self.inner.head(key).await?;
        let tag = Some(self.tag());
        Ok(found.map(|found| Object { tag, ..found }))
    }
    async fn list(&self, prefix: &str) -> Result<Vec<Object>, Error> {
        self.inner.list(prefix).await
    }
    async fn delete(&self, key: &str) -> Result<(), Error> {
        self.inner.delete(key).await
    }
    async fn unfinished(&self, prefix: &str) -> Result<Vec<Unfinished>, Error> {
        self.inner.unfinished(prefix).await
    }
    async fn discard(&self, unfinished: &Unfinished) -> Result<(), Error> {
        self.inner.discard(unfinished).await
    }
}

/// A snapshot as a member would send it, in chunks.
async fn recorded() -> Vec<Bytes> {
    let etcd = EtcdProcess::start(&Programs::find("3.6"), &Start::default()).await;
    let client = EtcdClient::new(Access::default());
    let snapshot = client.snapshot(&etcd.client_url).await.unwrap();
    snapshot.chunks.try_collect().await.unwrap()
}

fn transfer(snapshot: &[Bytes], store: &Shared, uid: &str, name: Name) -> Transfer {
    let etcd = FakeEtcd::formed(7, &["a"], |name| format!("http://{name}:2379"));
    etcd.with(|state| state.snapshot = snapshot.to_vec());
    Transfer {
        etcd: Arc::new(etcd),
        endpoints: vec!["http://a:2379".to_owned()],
        store: Arc::new(store.clone()),
        name,
        compress: false,
        uid: uid.to_owned(),
        cluster: None,
        since: Timestamp::UNIX_EPOCH,
    }
}

async fn run(transfer: &Transfer, store: &Shared) -> Result<Stored, Trouble> {
    transfer.run(&Meter::default(), &store.cancelled).await
}

/// The data under a key and what its manifest says of it.
async fn pair(store: &Shared, key: &str) -> (Bytes, BackupManifest) {
    let data = download(&store.inner, key).await.unwrap();
    let manifest = download(&store.inner, &manifest_key(key)).await.unwrap();
    (data, serde_json::from_slice(&manifest).unwrap())
}

/// Invariant 12.
#[tokio::test]
async fn invariant_12_data_and_manifest_of_two_writers_are_no_success() {
    let snapshot = recorded().await;
    for meddling in [
        Meddling::DataBeforeManifest,
        Meddling::DataAfterManifest,
        Meddling::Manifest,
        Meddling::Swallowed,
    ] {
        let dir = tempfile::tempdir().unwrap();
        let store = Shared::new(&dir, meddling);
        let ours = transfer(&snapshot, &store, "ours", Name::Exact(KEY.to_owned()));
        let trouble = run(&ours, &store).await.unwrap_err();
        assert_eq!(trouble.reason, Reason::BackupMissing, "{meddling:?}");
        assert!(trouble.message.contains("a path of its own"), "{trouble:?}");
        // No manifest vouches for data it does not describe.
        if meddling == Meddling::DataBeforeManifest || meddling == Meddling::DataAfterManifest {
            assert_eq!(store.list(&manifest_key(KEY)).await.unwrap(), []);
        }
        // The next attempt is whole.
        let stored = run(&ours, &store).await.unwrap();
        let (data, manifest) = pair(&store, KEY).await;
        assert!(data == snapshot.concat(), "{meddling:?}");
        assert_eq!(manifest.backup_uid.as_deref(), Some("ours"));
        assert_eq!(manifest.sha256, stored.sha256);
    }
}

#[tokio::test]
async fn what_is_committed_gets_its_manifest_also_when_it_is_given_up() {
    let dir = tempfile::tempdir().unwrap();
    let store = Shared::new(&dir, Meddling::GivenUp);
    let ours = transfer(
        &recorded().await,
        &store,
        "ours",
        Name::Exact(KEY.to_owned()),
    );
    run(&ours, &store).await.unwrap();
    assert!(store.cancelled.is_cancelled());
    // So `deletionPolicy: Delete` finds it.
    let (_, manifest) = pair(&store, KEY).await;
    assert_eq!(manifest.backup_uid.as_deref(), Some("ours"));
}

#[tokio::test]
async fn two_of_one_path_that_begin_in_the_same_second_have_names_of_their_own() {
    let snapshot = recorded().await;
    let dir = tempfile::tempdir().unwrap();
    let store = Shared::new(&dir, Meddling::None);
    let time: Timestamp = "2026-06-15T12:00:00Z".parse().unwrap();
    let mut keys = Vec::new();
    for uid in ["one", "two"] {
        let name = Name::Numbered {
            path: KEY.to_owned(),
            time,
            left: None,
        };
        let transfer = transfer(&snapshot, &store, uid, name);
        let stored = run(&transfer, &store).await.unwrap();
        let key = stored.location.split_once(KEY).unwrap().1;
        let key = format!("{KEY}{key}");
        assert!(name::parse(KEY, &key).is_some_and(|parts| parts.time == time));
        let (_, manifest) = pair(&store, &key).await;
        assert_eq!(manifest.backup_uid.as_deref(), Some(uid));
        keys.push(key);
    }
    assert_ne!(keys[0], keys[1]);
}
