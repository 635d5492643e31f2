//! Tests the agent of a continuous backup as a process, with a real etcd and a directory as the store.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use api::backup::Encryption;
use backup::pvc::Reach;
use backup::recording::{RecordOrder, prefix};
use continuous::{BaseName, EncryptedStore, Reader, bases, read_base};
use etcd::testing::{EtcdProcess, Programs, Start};
use store::encryption::{Key, Keys, is_encrypted};
use store::{LocalStore, Store};
use tokio::time::sleep;

const DEADLINE: Duration = Duration::from_mins(1);

/// The directory of a mounted Secret with encryption keys, and the name of the key for new objects.
type Mounted<'a> = (&'a Path, &'a str);

/// Starts the agent as its pod does. The agent completes a segment after a minute, or when it ends. A test ends the
/// agent earlier, so only the end of the agent completes a segment.
fn agent(root: &Path, spool: &Path, endpoint: &str, keys: Option<Mounted<'_>>) -> Child {
    let encryption = keys.map(|(_, key)| Encryption {
        secret: "keys".to_owned(),
        key: Some(key.to_owned()),
    });
    let storage = serde_json::json!({ "pvc": { "claimName": "backups", "path": "etcd/main" } });
    let order = RecordOrder {
        storage: serde_json::from_value(storage).unwrap(),
        uid: "uid".to_owned(),
        endpoints: vec![endpoint.to_owned()],
        reach: Reach::default(),
        encryption,
        flush_millis: 60_000,
        base_seconds: 3_600,
        base_bytes: 1 << 30,
        window_seconds: 3_600,
        spool_bytes: 1 << 20,
        max_snapshot: 1 << 30,
    };
    let order = serde_json::to_string(&order).unwrap();
    Command::new(env!("CARGO_BIN_EXE_etcd-operator"))
        .arg0(api::names::MANAGER_BACKUP)
        .arg("record")
        .arg(format!("--order={order}"))
        .arg(format!("--root={}", root.display()))
        .arg(format!("--spool={}", spool.display()))
        .args(keys.map(|(directory, _)| format!("--keys={}", directory.display())))
        .spawn()
        .unwrap()
}

async fn first_base(store: &LocalStore, prefix: &str) -> BaseName {
    let end = Instant::now() + DEADLINE;
    loop {
        if let Some(base) = bases(store, prefix).await.unwrap().pop() {
            return base;
        }
        assert!(Instant::now() < end, "the agent has taken no base");
        sleep(Duration::from_millis(100)).await;
    }
}

/// The directories of an agent.
struct Directories {
    directory: tempfile::TempDir,
    store: LocalStore,
}

impl Directories {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let root = directory.path().join("root");
        std::fs::create_dir(&root).unwrap();
        Self {
            store: LocalStore::new(root),
            directory,
        }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// Runs an agent, changes keys, and ends the agent with SIGTERM. Returns the last revision.
    async fn record(&self, etcd: &EtcdProcess, prefix: &str, keys: Option<Mounted<'_>>) -> i64 {
        let (root, spool) = (self.path("root"), self.path("spool"));
        let mut child = agent(&root, &spool, &etcd.client_url, keys);
        first_base(&self.store, prefix).await;
        let mut client = etcd_client::Client::connect([&etcd.client_url], None)
            .await
            .unwrap();
        let mut last = 0;
        // The agent may connect to etcd only after some of these changes. It must record these changes too.
        for index in 0..50 {
            let answer = client.put("key", index.to_string(), None).await.unwrap();
            last = answer.header().unwrap().revision();
        }
        sleep(Duration::from_secs(4)).await;
        let killed = Command::new("kill")
            .arg(child.id().to_string())
            .status()
            .unwrap();
        assert!(killed.success());
        assert!(child.wait().unwrap().success());
        last
    }
}

#[tokio::test]
async fn agent_stores_all_changes_before_exit_on_sigterm() {
    let programs = Programs::find("3.6");
    let etcd = EtcdProcess::start(&programs, &Start::default()).await;
    let directories = Directories::new();
    let (store, prefix) = (&directories.store, prefix("etcd/main", "uid"));
    // In the second iteration, another agent continues the chain of the first agent.
    for _ in 0..2 {
        let last = directories.record(&etcd, &prefix, None).await;
        let base = first_base(store, &prefix).await;
        let reader = Reader::open(store, &prefix, base).await.unwrap();
        assert_eq!(reader.chain().last, last);
        assert_eq!(reader.chain().faults, []);
    }
    assert_eq!(bases(store, &prefix).await.unwrap().len(), 1);
}

/// The second agent has a new key, and continues the chain that the first agent has encrypted with the old key.
#[tokio::test]
async fn agent_encrypts_chain_and_continues_it_after_key_rotation() {
    let programs = Programs::find("3.6");
    let etcd = EtcdProcess::start(&programs, &Start::default()).await;
    let directories = Directories::new();
    let (store, prefix) = (&directories.store, prefix("etcd/main", "uid"));
    let mounted = directories.path("keys");
    std::fs::create_dir(&mounted).unwrap();
    let (mut keys, mut last) = (Keys::default(), 0);
    let texts = [
        (
            "2026",
            "AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=".to_owned(),
        ),
        ("2027", "B".repeat(42) + "A="),
    ];
    let mut ids = Vec::new();
    for (name, text) in texts {
        std::fs::write(mounted.join(name), &text).unwrap();
        let key = Key::parse(name, text.as_bytes()).unwrap();
        ids.push(key.id().to_string());
        keys.add(key);
        last = directories
            .record(&etcd, &prefix, Some((mounted.as_path(), name)))
            .await;
    }
    let all = bases(store, &prefix).await.unwrap();
    let [base] = all.as_slice() else {
        panic!("{all:?}");
    };
    let described = read_base(store, &prefix, *base).await.unwrap();
    assert_eq!(described.base.encryption.unwrap().key.id, ids[0]);
    let mut objects = 0;
    for object in store.list(&prefix).await.unwrap() {
        let content = std::fs::read(directories.path("root").join(&object.key)).unwrap();
        let is_base = object.key.ends_with(continuous::BASE);
        assert_eq!(is_encrypted(&content), !is_base, "{}", object.key);
        objects += usize::from(!is_base);
    }
    assert!(objects > 2, "{objects}");
    let decrypted = EncryptedStore::for_reading(store, Some(keys));
    let mut reader = Reader::open(&decrypted, &prefix, *base).await.unwrap();
    while reader.next().await.unwrap().is_some() {}
    assert_eq!(reader.last(), last);
}
