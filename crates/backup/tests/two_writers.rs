//! Somebody else writes to the same path at the same time, or answers for the store: what is called a success is a
//! backup with its own manifest.
#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use api::backup::name;
use api::manifest::{BackupManifest, MANIFEST_SUFFIX, manifest_key};
use async_trait::async_trait;
use backup::reason::{Reason, Trouble};
use backup::removal::{Removal, What};
use backup::snapshot::Stored;
use backup::transfer::{Meter, Name, Transfer, Whose, Written, written};
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
    /// A whole backup of the other comes while ours is being written.
    WholeBeforeCommit,
    /// It comes when we have looked for what is there, just before our data.
    WholeAtCommit,
    /// It comes when our data is there.
    WholeBeforeManifest,
    /// It comes when our manifest has been seen.
    WholeAfterManifest,
    /// It comes when the manifest was read by which ours is to be removed.
    WholeBeforeRemoval,
    /// It comes when the data is being read.
    WholeWhileRead,
    /// One comes just before our data, and another one when that is being read.
    WholeAtCommitAndWhileRead,
}

/// A directory that tells its writings apart, as stores do, or does not, and does not let everybody list.
#[derive(Clone)]
struct Shared {
    inner: LocalStore,
    tells: bool,
    lists: bool,
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
            tells: true,
            lists: true,
            writings: Arc::default(),
            meddling: Arc::new(Mutex::new(meddling)),
            cancelled: CancellationToken::new(),
        }
    }

    fn tag(&self) -> Option<String> {
        let writings = self.writings.load(Ordering::SeqCst);
        self.tells.then(|| writings.to_string())
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

    /// Of the size that ours has, if ours is there.
    async fn other_whole(&self) {
        if self.inner.head(KEY).await.unwrap().is_none() {
            self.inner.put(KEY, "other".into()).await.unwrap();
        }
        self.other_data(KEY).await;
        let manifest = serde_json::json!({
            "formatVersion": 1, "etcdVersion": "3.6.16", "clusterID": "aa", "size": 8, "sha256": "",
            "revision": self.writings.load(Ordering::SeqCst),
            "compression": "none", "createdAt": "2026-06-15T12:00:00Z", "backupUID": "other",
        });
        let manifest = serde_json::to_vec(&manifest).unwrap();
        let put = self.inner.put(&manifest_key(KEY), manifest.into()).await;
        put.unwrap();
    }

    fn denied(&self) -> Result<(), Error> {
        let denied = Error::AccessDenied("403".to_owned());
        if self.lists { Ok(()) } else { Err(denied) }
    }
}

#[async_trait]
impl Upload for SharedUpload {
    async fn write(&mut self, chunk: Bytes) -> Result<(), Error> {
        if self.store.meddles(Meddling::WholeBeforeCommit) {
            self.store.other_whole().await;
        }
        self.inner.write(chunk).await
    }
    async fn commit(self: Box<Self>) -> Result<Committed, Error> {
        let Self { inner, store } = *self;
        if store.meddles(Meddling::WholeAtCommit) {
            store.other_whole().await;
        }
        if store.meddles(Meddling::WholeAtCommitAndWhileRead) {
            store.other_whole().await;
            *store.meddling.lock().unwrap() = Meddling::WholeWhileRead;
        }
        let committed = inner.commit().await?;
        store.writings.fetch_add(1, Ordering::SeqCst);
        let tag = store.tag();
        if store.meddles(Meddling::WholeBeforeManifest) {
            store.other_whole().await;
        }
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
        let found = match self.inner.get(key).await {
            Err(Error::NoSuchObject { .. }) => {
                self.denied()?;
                self.inner.get(key).await
            }
            found => found,
        };
        if self.meddles(Meddling::WholeBeforeRemoval) {
            self.other_whole().await;
        }
        if !key.ends_with(MANIFEST_SUFFIX) && self.meddles(Meddling::WholeWhileRead) {
            self.other_whole().await;
        }
        found
    }
    async fn head(&self, key: &str) -> Result<Option<Object>, Error> {
        let vouched = self.inner.head(&manifest_key(KEY)).await?.is_some();
        if vouched && self.meddles(Meddling::WholeAfterManifest) {
            self.other_whole().await;
        }
        let found = self.inner.head(key).await?;
        if found.is_none() {
            self.denied()?;
        }
        let tag = self.tag();
        Ok(found.map(|found| Object { tag, ..found }))
    }
    async fn list(&self, prefix: &str) -> Result<Vec<Object>, Error> {
        self.denied()?;
        self.inner.list(prefix).await
    }
    async fn delete(&self, key: &str) -> Result<(), Error> {
        self.inner.delete(key).await
    }
    async fn unfinished(&self, prefix: &str) -> Result<Vec<Unfinished>, Error> {
        self.denied()?;
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
    // In a directory, which does not tell one writing from another, all of it is read.
    for (tells, compress) in [(true, false), (false, false), (false, true)] {
        for meddling in [
            Meddling::DataBeforeManifest,
            Meddling::DataAfterManifest,
            Meddling::Manifest,
            Meddling::Swallowed,
        ] {
            let dir = tempfile::tempdir().unwrap();
            let store = Shared {
                tells,
                ..Shared::new(&dir, meddling)
            };
            let ours = Transfer {
                compress,
                ..transfer(&snapshot, &store, "ours", Name::Exact(KEY.to_owned()))
            };
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
            assert!(compress || data == snapshot.concat(), "{meddling:?}");
            assert_eq!(manifest.backup_uid.as_deref(), Some("ours"));
            assert_eq!(manifest.sha256, stored.sha256);
        }
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

/// Invariant 12. Where writings are not told apart, as in directories, equal sizes say nothing.
#[tokio::test]
async fn invariant_12_in_a_directory_what_lies_there_is_read_where_another_manifest_has_come() {
    let snapshot = recorded().await;
    let dir = tempfile::tempdir().unwrap();
    let store = Shared {
        tells: false,
        ..Shared::new(&dir, Meddling::WholeBeforeManifest)
    };
    let ours = transfer(&snapshot, &store, "ours", Name::Exact(KEY.to_owned()));
    let trouble = run(&ours, &store).await.unwrap_err();
    assert_eq!(trouble.reason, Reason::BackupMissing, "{trouble:?}");
    // What the other has written is as it was written.
    let (data, manifest) = pair(&store, KEY).await;
    assert!(data.iter().all(|byte| *byte == 7));
    assert_eq!(manifest.backup_uid.as_deref(), Some("other"));
    // The next attempt replaces it, as one does that was whole before ours was.
    for meddling in [
        Meddling::None,
        Meddling::WholeBeforeCommit,
        Meddling::WholeAtCommit,
    ] {
        *store.meddling.lock().unwrap() = meddling;
        run(&ours, &store).await.unwrap();
        let (data, manifest) = pair(&store, KEY).await;
        assert!(data == snapshot.concat(), "{meddling:?}");
        assert_eq!(manifest.backup_uid.as_deref(), Some("ours"));
    }
}

/// Invariant 12. In a directory what is being read is read to its end, whoever has taken its place since.
#[tokio::test]
async fn invariant_12_what_was_replaced_while_it_was_read_is_no_success() {
    let snapshot = recorded().await;
    for meddling in [
        Meddling::WholeWhileRead,
        Meddling::WholeAtCommitAndWhileRead,
    ] {
        let dir = tempfile::tempdir().unwrap();
        let store = Shared {
            tells: false,
            ..Shared::new(&dir, meddling)
        };
        let theirs = async || {
            let (data, manifest) = pair(&store, KEY).await;
            assert!(data.iter().all(|byte| *byte == 7), "{meddling:?}");
            assert_eq!(manifest.backup_uid.as_deref(), Some("other"));
        };
        let ours = transfer(&snapshot, &store, "ours", Name::Exact(KEY.to_owned()));
        let trouble = run(&ours, &store).await.unwrap_err();
        assert_eq!(trouble.reason, Reason::BackupMissing, "{trouble:?}");
        assert_eq!(*store.meddling.lock().unwrap(), Meddling::None);
        theirs().await;
        // Nor is it adopted.
        run(&ours, &store).await.unwrap();
        *store.meddling.lock().unwrap() = Meddling::WholeWhileRead;
        let found = written(
            &store,
            Name::Exact(KEY.to_owned()),
            Whose {
                uid: "ours",
                cluster: None,
                reads: true,
            },
            Timestamp::UNIX_EPOCH,
        );
        assert!(matches!(found.await, Ok(Written::Not(_))), "{meddling:?}");
        theirs().await;
    }
}

/// Whoever died after the manifest had not looked at both: what has come in the place of the data by then, of the same
/// size, is no backup of ours.
#[tokio::test]
async fn what_somebody_else_has_written_over_is_not_adopted() {
    let snapshot = recorded().await;
    let begun: Timestamp = "2026-06-15T12:00:00Z".parse().unwrap();
    for (numbered, tells, reads) in [
        (false, true, false),
        (true, true, true),
        (false, false, true),
        (true, false, true),
        (false, false, false),
    ] {
        let whose = Whose {
            uid: "ours",
            cluster: None,
            reads,
        };
        let dir = tempfile::tempdir().unwrap();
        let store = Shared {
            tells,
            ..Shared::new(&dir, Meddling::None)
        };
        let called = |left: Option<&str>| {
            if numbered {
                Name::Numbered {
                    path: KEY.to_owned(),
                    time: begun,
                    left: left.map(str::to_owned),
                }
            } else {
                Name::Exact(KEY.to_owned())
            }
        };
        let ours = transfer(&snapshot, &store, "ours", called(None));
        let stored = run(&ours, &store).await.unwrap();
        let find = async || written(&store, called(None), whose, begun).await.unwrap();
        assert_eq!(find().await, Written::Whole(stored.clone()));
        let key = stored.location.split_once(KEY).unwrap().1;
        let key = format!("{KEY}{key}");
        store.other_data(&key).await;
        if !tells && !reads {
            // A directory does not show it.
            assert_eq!(find().await, Written::Whole(stored));
            continue;
        }
        let Written::Not(name) = find().await else {
            panic!("somebody else's data was adopted")
        };
        assert_eq!(name, called(Some(&key)));
        // The next attempt replaces it.
        let ours = transfer(&snapshot, &store, "ours", name);
        let stored = run(&ours, &store).await.unwrap();
        assert_eq!(find().await, Written::Whole(stored));
        assert_eq!(store.list("").await.unwrap().len(), 2);
    }
}

#[tokio::test]
async fn the_others_manifest_is_not_removed_for_ours() {
    let dir = tempfile::tempdir().unwrap();
    let store = Shared::new(&dir, Meddling::WholeAfterManifest);
    let snapshot = recorded().await;
    let ours = transfer(&snapshot, &store, "ours", Name::Exact(KEY.to_owned()));
    let trouble = run(&ours, &store).await.unwrap_err();
    assert_eq!(trouble.reason, Reason::BackupMissing, "{trouble:?}");
    let (_, manifest) = pair(&store, KEY).await;
    assert_eq!(manifest.backup_uid.as_deref(), Some("other"));
}

/// Invariant 13.
#[tokio::test]
async fn invariant_13_what_another_has_put_in_the_place_of_ours_is_not_removed() {
    let snapshot = recorded().await;
    for (meddling, left) in [(Meddling::None, 0), (Meddling::WholeBeforeRemoval, 2)] {
        let dir = tempfile::tempdir().unwrap();
        let store = Shared::new(&dir, Meddling::None);
        let ours = transfer(&snapshot, &store, "ours", Name::Exact(KEY.to_owned()));
        run(&ours, &store).await.unwrap();
        *store.meddling.lock().unwrap() = meddling;
        let removal = Removal {
            store: Arc::new(store.clone()),
            path: KEY.to_owned(),
            uid: "ours".to_owned(),
            what: What::Everything,
            now: Timestamp::now(),
        };
        removal.run().await.unwrap();
        assert_eq!(store.list("").await.unwrap().len(), left, "{meddling:?}");
    }
}

/// S3 answers 403 for what is not there where `s3:ListBucket` is not allowed.
#[tokio::test]
async fn one_of_many_is_stored_also_by_those_who_may_not_list() {
    let snapshot = recorded().await;
    let dir = tempfile::tempdir().unwrap();
    let store = Shared {
        lists: false,
        ..Shared::new(&dir, Meddling::None)
    };
    let time: Timestamp = "2026-06-15T12:00:00Z".parse().unwrap();
    let mut keys = Vec::new();
    for uid in ["one", "two"] {
        let name = Name::Numbered {
            path: KEY.to_owned(),
            time,
            left: None,
        };
        let transfer = transfer(&snapshot, &store, uid, name);
        keys.push(run(&transfer, &store).await.unwrap().location);
    }
    assert_ne!(keys[0], keys[1]);
}
