//! Tests with another writer at the same path, or with a proxy that acknowledges writes without storing them. A
//! transfer succeeds only if the store contains its object and its manifest.
#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use api::backup::name;
use api::manifest::{BackupManifest, MANIFEST_SUFFIX, manifest_key};
use async_trait::async_trait;
use backup::reason::{Reason, Trouble};
use backup::removal::{Removal, RemovalScope};
use backup::snapshot::{EndpointLimits, Stored};
use backup::transfer::{EarlierAttempt, Meter, ObjectName, Owner, Transfer, earlier_attempt};
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

/// The fault, or the write of another writer, that interferes with a transfer or a removal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Interference {
    None,
    /// Another object of the same size replaces the object before the manifest is written.
    DataBeforeManifest,
    /// Another object of the same size replaces the object after the manifest was written.
    DataAfterManifest,
    /// Another manifest replaces the manifest.
    Manifest,
    /// The store acknowledges the manifest, but does not store it.
    Swallowed,
    /// The transfer is canceled after the commit of its object.
    Canceled,
    /// The other writer stores a complete backup during the upload.
    BackupBeforeCommit,
    /// The other writer stores a complete backup directly before the commit. The transfer has read the store before.
    BackupAtCommit,
    /// The other writer stores a complete backup between the commit and the manifest.
    BackupBeforeManifest,
    /// The other writer stores a complete backup after the store has returned the manifest.
    BackupAfterManifest,
    /// The other writer stores a complete backup after the removal has read the manifest.
    BackupBeforeRemoval,
    /// The other writer stores a complete backup while the transfer reads its object again.
    BackupWhileRead,
    /// The other writer stores two complete backups: one directly before the commit, and one while the transfer reads
    /// its object again.
    BackupAtCommitAndWhileRead,
}

/// A directory as a store. ETags and the permission to list objects are optional.
#[derive(Clone)]
struct Shared {
    inner: LocalStore,
    has_tags: bool,
    lists: bool,
    writes: Arc<AtomicUsize>,
    interference: Arc<Mutex<Interference>>,
    cancelled: CancellationToken,
}

struct SharedUpload {
    inner: Box<dyn Upload>,
    store: Shared,
}

impl Shared {
    fn new(dir: &tempfile::TempDir, interference: Interference) -> Self {
        Self {
            inner: LocalStore::new(dir.path()),
            has_tags: true,
            lists: true,
            writes: Arc::default(),
            interference: Arc::new(Mutex::new(interference)),
            cancelled: CancellationToken::new(),
        }
    }

    fn tag(&self) -> Option<String> {
        let writes = self.writes.load(Ordering::SeqCst);
        self.has_tags.then(|| writes.to_string())
    }

    /// True if the interference `kind` must happen now. This function resets the interference, so that it happens only
    /// once.
    fn interferes(&self, kind: Interference) -> bool {
        let mut interference = self.interference.lock().unwrap();
        let interferes = *interference == kind;
        if interferes {
            *interference = Interference::None;
        }
        interferes
    }

    async fn other_data(&self, key: &str) {
        let size = self.inner.head(key).await.unwrap().unwrap().size;
        let other = vec![7; usize::try_from(size).unwrap()];
        self.inner.put(key, other.into()).await.unwrap();
        self.writes.fetch_add(1, Ordering::SeqCst);
    }

    /// Stores a complete backup of the other writer. Its object has the size of an existing object.
    async fn other_backup(&self) {
        if self.inner.head(KEY).await.unwrap().is_none() {
            self.inner.put(KEY, "other".into()).await.unwrap();
        }
        self.other_data(KEY).await;
        let manifest = serde_json::json!({
            "formatVersion": 1, "etcdVersion": "3.6.16", "clusterID": "aa", "size": 8, "sha256": "",
            "revision": self.writes.load(Ordering::SeqCst),
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
        if self.store.interferes(Interference::BackupBeforeCommit) {
            self.store.other_backup().await;
        }
        self.inner.write(chunk).await
    }
    async fn commit(self: Box<Self>) -> Result<Committed, Error> {
        let Self { inner, store } = *self;
        if store.interferes(Interference::BackupAtCommit) {
            store.other_backup().await;
        }
        if store.interferes(Interference::BackupAtCommitAndWhileRead) {
            store.other_backup().await;
            *store.interference.lock().unwrap() = Interference::BackupWhileRead;
        }
        let committed = inner.commit().await?;
        store.writes.fetch_add(1, Ordering::SeqCst);
        let tag = store.tag();
        if store.interferes(Interference::BackupBeforeManifest) {
            store.other_backup().await;
        }
        if store.interferes(Interference::DataBeforeManifest) {
            let key = store.inner.list("").await?.remove(0).key;
            store.other_data(&key).await;
        }
        if store.interferes(Interference::Canceled) {
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
        if self.interferes(Interference::Swallowed) {
            return Ok(());
        }
        self.inner.put(key, content.clone()).await?;
        let Some(data) = key.strip_suffix(MANIFEST_SUFFIX) else {
            return Ok(());
        };
        if self.interferes(Interference::DataAfterManifest) {
            self.other_data(data).await;
        }
        if self.interferes(Interference::Manifest) {
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
        if self.interferes(Interference::BackupBeforeRemoval) {
            self.other_backup().await;
        }
        if !key.ends_with(MANIFEST_SUFFIX) && self.interferes(Interference::BackupWhileRead) {
            self.other_backup().await;
        }
        found
    }
    async fn head(&self, key: &str) -> Result<Option<Object>, Error> {
        let has_manifest = self.inner.head(&manifest_key(KEY)).await?.is_some();
        if has_manifest && self.interferes(Interference::BackupAfterManifest) {
            self.other_backup().await;
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

/// The chunks of a snapshot from a real member.
async fn recorded() -> Vec<Bytes> {
    let etcd = EtcdProcess::start(&Programs::find("3.6"), &Start::default()).await;
    let client = EtcdClient::new(Access::default());
    let snapshot = client.snapshot(&etcd.client_url).await.unwrap();
    snapshot.chunks.try_collect().await.unwrap()
}

fn transfer(snapshot: &[Bytes], store: &Shared, uid: &str, name: ObjectName) -> Transfer {
    let etcd = FakeEtcd::formed(7, &["a"], |name| format!("http://{name}:2379"));
    etcd.with(|state| state.snapshot = snapshot.to_vec());
    Transfer {
        etcd: Arc::new(etcd),
        endpoints: vec!["http://a:2379".to_owned()],
        store: Arc::new(store.clone()),
        name,
        compress: false,
        encryption: None,
        uid: uid.to_owned(),
        cluster: None,
        limits: EndpointLimits::default(),
        since: Timestamp::UNIX_EPOCH,
    }
}

async fn run(transfer: &Transfer, store: &Shared) -> Result<Stored, Trouble> {
    transfer.run(&Meter::default(), &store.cancelled).await
}

/// The object and the manifest at a key.
async fn pair(store: &Shared, key: &str) -> (Bytes, BackupManifest) {
    let data = download(&store.inner, key).await.unwrap();
    let manifest = download(&store.inner, &manifest_key(key)).await.unwrap();
    (data, serde_json::from_slice(&manifest).unwrap())
}

#[tokio::test]
async fn invariant_12_backup_fails_if_object_or_manifest_is_replaced() {
    let snapshot = recorded().await;
    // Without ETags, the store does not show that an object was replaced, so the transfer reads the whole object again.
    for (has_tags, compress) in [(true, false), (false, false), (false, true)] {
        for interference in [
            Interference::DataBeforeManifest,
            Interference::DataAfterManifest,
            Interference::Manifest,
            Interference::Swallowed,
        ] {
            let dir = tempfile::tempdir().unwrap();
            let store = Shared {
                has_tags,
                ..Shared::new(&dir, interference)
            };
            let ours = Transfer {
                compress,
                ..transfer(&snapshot, &store, "ours", ObjectName::Exact(KEY.to_owned()))
            };
            let trouble = run(&ours, &store).await.unwrap_err();
            assert_eq!(trouble.reason, Reason::BackupMissing, "{interference:?}");
            assert!(trouble.message.contains("its own path"), "{trouble:?}");
            // The object is from the other writer, so the transfer must delete its own manifest.
            if interference == Interference::DataBeforeManifest
                || interference == Interference::DataAfterManifest
            {
                assert_eq!(store.list(&manifest_key(KEY)).await.unwrap(), []);
            }
            // The next attempt succeeds.
            let stored = run(&ours, &store).await.unwrap();
            let (data, manifest) = pair(&store, KEY).await;
            assert!(compress || data == snapshot.concat(), "{interference:?}");
            assert_eq!(manifest.backup_uid.as_deref(), Some("ours"));
            assert_eq!(manifest.sha256, stored.sha256);
        }
    }
}

#[tokio::test]
async fn canceled_transfer_writes_manifest_after_commit() {
    let dir = tempfile::tempdir().unwrap();
    let store = Shared::new(&dir, Interference::Canceled);
    let ours = transfer(
        &recorded().await,
        &store,
        "ours",
        ObjectName::Exact(KEY.to_owned()),
    );
    run(&ours, &store).await.unwrap();
    assert!(store.cancelled.is_cancelled());
    // The manifest is written, because a deletion with `deletionPolicy: Delete` finds the backup only by its manifest.
    let (_, manifest) = pair(&store, KEY).await;
    assert_eq!(manifest.backup_uid.as_deref(), Some("ours"));
}

#[tokio::test]
async fn backups_of_same_second_have_distinct_names() {
    let snapshot = recorded().await;
    let dir = tempfile::tempdir().unwrap();
    let store = Shared::new(&dir, Interference::None);
    let time: Timestamp = "2026-06-15T12:00:00Z".parse().unwrap();
    let mut keys = Vec::new();
    for uid in ["one", "two"] {
        let name = ObjectName::Numbered {
            path: KEY.to_owned(),
            time,
            leftover: None,
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

/// Without ETags, an object of the right size may be from another writer.
#[tokio::test]
async fn invariant_12_replaced_object_is_detected_without_etags() {
    let snapshot = recorded().await;
    let dir = tempfile::tempdir().unwrap();
    let store = Shared {
        has_tags: false,
        ..Shared::new(&dir, Interference::BackupBeforeManifest)
    };
    let ours = transfer(&snapshot, &store, "ours", ObjectName::Exact(KEY.to_owned()));
    let trouble = run(&ours, &store).await.unwrap_err();
    assert_eq!(trouble.reason, Reason::BackupMissing, "{trouble:?}");
    // The transfer has not changed the backup of the other writer.
    let (data, manifest) = pair(&store, KEY).await;
    assert!(data.iter().all(|byte| *byte == 7));
    assert_eq!(manifest.backup_uid.as_deref(), Some("other"));
    // The next attempt replaces the backup of the other writer, even if the other writer stores another backup before
    // or during the commit of this attempt.
    for interference in [
        Interference::None,
        Interference::BackupBeforeCommit,
        Interference::BackupAtCommit,
    ] {
        *store.interference.lock().unwrap() = interference;
        run(&ours, &store).await.unwrap();
        let (data, manifest) = pair(&store, KEY).await;
        assert!(data == snapshot.concat(), "{interference:?}");
        assert_eq!(manifest.backup_uid.as_deref(), Some("ours"));
    }
}

/// In a directory, a read continues with the old file if the file is replaced during the read. The transfer must
/// nevertheless detect the replacement.
#[tokio::test]
async fn invariant_12_backup_fails_if_object_is_replaced_during_read() {
    let snapshot = recorded().await;
    for interference in [
        Interference::BackupWhileRead,
        Interference::BackupAtCommitAndWhileRead,
    ] {
        let dir = tempfile::tempdir().unwrap();
        let store = Shared {
            has_tags: false,
            ..Shared::new(&dir, interference)
        };
        let theirs = async || {
            let (data, manifest) = pair(&store, KEY).await;
            assert!(data.iter().all(|byte| *byte == 7), "{interference:?}");
            assert_eq!(manifest.backup_uid.as_deref(), Some("other"));
        };
        let ours = transfer(&snapshot, &store, "ours", ObjectName::Exact(KEY.to_owned()));
        let trouble = run(&ours, &store).await.unwrap_err();
        assert_eq!(trouble.reason, Reason::BackupMissing, "{trouble:?}");
        assert_eq!(*store.interference.lock().unwrap(), Interference::None);
        theirs().await;
        // `earlier_attempt` does not adopt an object that is replaced while it reads the object.
        run(&ours, &store).await.unwrap();
        *store.interference.lock().unwrap() = Interference::BackupWhileRead;
        let found = earlier_attempt(
            &store,
            ObjectName::Exact(KEY.to_owned()),
            Owner {
                uid: "ours",
                cluster: None,
                encrypted: false,
                verify_content: true,
            },
            Timestamp::UNIX_EPOCH,
        );
        assert!(
            matches!(found.await, Ok(EarlierAttempt::Incomplete(_))),
            "{interference:?}"
        );
        theirs().await;
    }
}

/// The operator process may end before it has checked the stored object and its manifest. The next process must not
/// adopt an object that another writer has replaced.
#[tokio::test]
async fn overwritten_backup_object_is_not_adopted() {
    let snapshot = recorded().await;
    let begun: Timestamp = "2026-06-15T12:00:00Z".parse().unwrap();
    for (numbered, has_tags, verify_content) in [
        (false, true, false),
        (true, true, true),
        (false, false, true),
        (true, false, true),
        (false, false, false),
    ] {
        let owner = Owner {
            uid: "ours",
            cluster: None,
            encrypted: false,
            verify_content,
        };
        let dir = tempfile::tempdir().unwrap();
        let store = Shared {
            has_tags,
            ..Shared::new(&dir, Interference::None)
        };
        let name_with = |leftover: Option<&str>| {
            if numbered {
                ObjectName::Numbered {
                    path: KEY.to_owned(),
                    time: begun,
                    leftover: leftover.map(str::to_owned),
                }
            } else {
                ObjectName::Exact(KEY.to_owned())
            }
        };
        let ours = transfer(&snapshot, &store, "ours", name_with(None));
        let stored = run(&ours, &store).await.unwrap();
        let find = async || {
            earlier_attempt(&store, name_with(None), owner, begun)
                .await
                .unwrap()
        };
        assert_eq!(find().await, EarlierAttempt::Complete(stored.clone()));
        let key = stored.location.split_once(KEY).unwrap().1;
        let key = format!("{KEY}{key}");
        store.other_data(&key).await;
        if !has_tags && !verify_content {
            // Without ETags, only a read of the whole object (`verify_content`) shows that the object was replaced.
            assert_eq!(find().await, EarlierAttempt::Complete(stored));
            continue;
        }
        let EarlierAttempt::Incomplete(name) = find().await else {
            panic!("the data of another writer was adopted")
        };
        assert_eq!(name, name_with(Some(&key)));
        // The next attempt overwrites the object of the other writer.
        let ours = transfer(&snapshot, &store, "ours", name);
        let stored = run(&ours, &store).await.unwrap();
        assert_eq!(find().await, EarlierAttempt::Complete(stored));
        assert_eq!(store.list("").await.unwrap().len(), 2);
    }
}

#[tokio::test]
async fn manifest_of_other_writer_is_not_removed() {
    let dir = tempfile::tempdir().unwrap();
    let store = Shared::new(&dir, Interference::BackupAfterManifest);
    let snapshot = recorded().await;
    let ours = transfer(&snapshot, &store, "ours", ObjectName::Exact(KEY.to_owned()));
    let trouble = run(&ours, &store).await.unwrap_err();
    assert_eq!(trouble.reason, Reason::BackupMissing, "{trouble:?}");
    let (_, manifest) = pair(&store, KEY).await;
    assert_eq!(manifest.backup_uid.as_deref(), Some("other"));
}

#[tokio::test]
async fn invariant_13_replaced_backup_is_not_removed() {
    let snapshot = recorded().await;
    for (interference, left) in [
        (Interference::None, 0),
        (Interference::BackupBeforeRemoval, 2),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let store = Shared::new(&dir, Interference::None);
        let ours = transfer(&snapshot, &store, "ours", ObjectName::Exact(KEY.to_owned()));
        run(&ours, &store).await.unwrap();
        *store.interference.lock().unwrap() = interference;
        let removal = Removal {
            store: Arc::new(store.clone()),
            path: KEY.to_owned(),
            uid: "ours".to_owned(),
            scope: RemovalScope::Everything,
        };
        removal.run().await.unwrap();
        assert_eq!(
            store.list("").await.unwrap().len(),
            left,
            "{interference:?}"
        );
    }
}

/// Without the permission `s3:ListBucket`, S3 returns 403 for a missing object.
#[tokio::test]
async fn periodic_backup_is_stored_without_list_permission() {
    let snapshot = recorded().await;
    let dir = tempfile::tempdir().unwrap();
    let store = Shared {
        lists: false,
        ..Shared::new(&dir, Interference::None)
    };
    let time: Timestamp = "2026-06-15T12:00:00Z".parse().unwrap();
    let mut keys = Vec::new();
    for uid in ["one", "two"] {
        let name = ObjectName::Numbered {
            path: KEY.to_owned(),
            time,
            leftover: None,
        };
        let transfer = transfer(&snapshot, &store, uid, name);
        keys.push(run(&transfer, &store).await.unwrap().location);
    }
    assert_ne!(keys[0], keys[1]);
}
