//! A recorded etcd, its store, and etcd processes that are restored from a base.

use std::future::Future;
use std::pin::pin;
use std::process::Command;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use continuous::{BaseName, Capture, End, Extras, Limits, Reader, Recorder, StoredBase, take_base};
use etcd::testing::{EtcdProcess, Programs, Start};
use etcd::{Access, EtcdClient};
use etcd_client::{Client, GetOptions, KeyValue};
use futures::TryStreamExt;
use store::{LocalStore, Store};
use tempfile::TempDir;
use tokio::time::sleep;

pub(crate) const PREFIX: &str = "continuous/";

/// An etcd, and a store for its changes.
pub(crate) struct Lab {
    pub(crate) programs: Programs,
    pub(crate) etcd: EtcdProcess,
    pub(crate) store: LocalStore,
    _directory: TempDir,
}

impl Lab {
    pub(crate) async fn new(minor: &str) -> Self {
        let programs = Programs::find(minor);
        let start = Start {
            flags: vec!["--unsafe-no-fsync".to_owned()],
            ..Start::default()
        };
        let directory = tempfile::tempdir().unwrap();
        Self {
            etcd: EtcdProcess::start(&programs, &start).await,
            store: LocalStore::new(directory.path()),
            _directory: directory,
            programs,
        }
    }

    pub(crate) async fn client(&self) -> Client {
        client(&self.etcd).await
    }

    /// Takes a snapshot, and stores it with its base.
    pub(crate) async fn base(&self) -> StoredBase {
        let etcd = EtcdClient::new(Access::default());
        let taken = take_base(&etcd, &self.etcd.client_url, &self.store, PREFIX).await;
        taken.unwrap()
    }

    /// Records the changes until `work` has ended and the store has all changes.
    pub(crate) async fn record<T>(
        &self,
        base: &StoredBase,
        extras: Extras,
        work: impl Future<Output = T>,
    ) -> T {
        let etcd = EtcdClient::new(Access::default());
        let recorder = Recorder::new(base, limits());
        let mut capture = Capture::new(&etcd, &self.store, PREFIX, base.clone(), recorder, extras);
        let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
        let stopped = async {
            let _ = stopped.await;
        };
        let mut run = pin!(capture.run(&self.etcd.client_url, stopped));
        let work = async {
            let result = work.await;
            let revision = revision(&mut self.client().await).await;
            stored(&self.store, base.name, revision).await;
            result
        };
        let result = tokio::select! {
            end = &mut run => panic!("the capture has ended: {end:?}"),
            result = work => result,
        };
        drop(stop);
        assert_eq!(run.await.unwrap(), End::Stopped);
        result
    }

    /// Starts an etcd with the snapshot of a base.
    pub(crate) async fn restore(&self, base: &StoredBase) -> EtcdProcess {
        self.restore_with(base, &[]).await
    }

    /// Starts an etcd with the snapshot of a base and with these environment variables.
    pub(crate) async fn restore_with(
        &self,
        base: &StoredBase,
        variables: &[(&str, &str)],
    ) -> EtcdProcess {
        let variables = variables.iter();
        let owned = variables.map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
        let start = Start {
            variables: owned.collect(),
            flags: [
                "--unsafe-no-fsync",
                "--max-txn-ops=10000",
                "--max-request-bytes=10485760",
            ]
            .map(str::to_owned)
            .to_vec(),
            ..Start::default()
        };
        let mut process = EtcdProcess::start(&self.programs, &start).await;
        restore_into(&mut process, &self.programs, &self.store, base).await;
        process
    }

    /// Replaces the data of the recorded etcd by the snapshot of a base. The cluster ID stays the same.
    pub(crate) async fn restore_in_place(&mut self, base: &StoredBase) {
        restore_into(&mut self.etcd, &self.programs, &self.store, base).await;
    }
}

async fn restore_into(
    process: &mut EtcdProcess,
    programs: &Programs,
    store: &LocalStore,
    base: &StoredBase,
) {
    process.stop();
    std::fs::remove_dir_all(process.data_dir()).unwrap();
    let snapshot = store.get(&base.base.snapshot.key).await.unwrap();
    let snapshot: Vec<Bytes> = snapshot.chunks.try_collect().await.unwrap();
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), snapshot.concat()).unwrap();
    let (name, peer) = (&process.name, &process.peer_url);
    let output = Command::new(programs.etcdutl())
        .args(["snapshot", "restore"])
        .arg(file.path())
        .arg(format!("--data-dir={}", process.data_dir().display()))
        .arg(format!("--name={name}"))
        .arg(format!("--initial-cluster={name}={peer}"))
        .arg(format!("--initial-advertise-peer-urls={peer}"))
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{text}");
    process.restart();
    assert!(process.serves().await);
}

pub(crate) fn limits() -> Limits {
    Limits {
        interval: Duration::from_millis(100),
        ..Limits::default()
    }
}

/// Short intervals, so that a short test has several hashes and checks of leases.
pub(crate) fn extras() -> Extras {
    Extras {
        hash_interval: Some(Duration::from_millis(200)),
        lease_interval: Duration::from_millis(200),
    }
}

pub(crate) fn now_micros() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
    i64::try_from(since.as_micros()).unwrap()
}

pub(crate) async fn client(etcd: &EtcdProcess) -> Client {
    Client::connect([etcd.client_url.as_str()], None)
        .await
        .unwrap()
}

pub(crate) async fn revision(client: &mut Client) -> i64 {
    let answer = client.get("any", None).await.unwrap();
    answer.header().unwrap().revision()
}

/// Waits until the store has this revision.
pub(crate) async fn stored(store: &dyn Store, base: BaseName, revision: i64) {
    let end = Instant::now() + Duration::from_mins(1);
    loop {
        let reader = Reader::open(store, PREFIX, base).await.unwrap();
        assert_eq!(reader.chain().faults, []);
        if reader.chain().last >= revision {
            return;
        }
        let last = reader.chain().last;
        assert!(
            Instant::now() < end,
            "revision {last} of {revision} is stored"
        );
        sleep(Duration::from_millis(50)).await;
    }
}

/// All keys at a revision, with their properties. Revision 0 is the current revision.
pub(crate) async fn keys(client: &mut Client, revision: i64) -> Vec<KeyValue> {
    let mut all = Vec::new();
    let mut next = vec![0];
    loop {
        let options = GetOptions::new()
            .with_from_key()
            .with_revision(revision)
            .with_limit(2);
        let mut answer = client.get(next, Some(options)).await.unwrap();
        let more = answer.more();
        all.extend(answer.take_kvs());
        if !more {
            return all;
        }
        next = all.last().unwrap().key().to_vec();
        next.push(0);
    }
}

/// The hash of all keys at a revision, with the compaction revision.
pub(crate) async fn hash(client: &mut Client, revision: i64) -> (u32, i64) {
    let answer = client.hash_kv(revision).await.unwrap();
    (answer.hash(), answer.compact_version())
}
