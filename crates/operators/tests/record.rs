//! Tests the agent of a continuous backup as a process, with a real etcd and a directory as the store.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use backup::pvc::Reach;
use backup::recording::{RecordOrder, prefix};
use continuous::{BaseName, Reader, bases};
use etcd::testing::{EtcdProcess, Programs, Start};
use store::LocalStore;
use tokio::time::sleep;

const DEADLINE: Duration = Duration::from_mins(1);

/// Starts the agent as its pod does. The agent completes a segment only after a minute or when it ends, so within a
/// test only its end completes a segment.
fn agent(root: &Path, spool: &Path, endpoint: &str) -> Child {
    let storage = serde_json::json!({ "pvc": { "claimName": "backups", "path": "etcd/main" } });
    let order = RecordOrder {
        storage: serde_json::from_value(storage).unwrap(),
        uid: "uid".to_owned(),
        endpoints: vec![endpoint.to_owned()],
        reach: Reach::default(),
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

#[tokio::test]
async fn agent_stores_all_changes_before_exit_on_sigterm() {
    let programs = Programs::find("3.6");
    let etcd = EtcdProcess::start(&programs, &Start::default()).await;
    let directory = tempfile::tempdir().unwrap();
    let (root, spool) = (
        directory.path().join("root"),
        directory.path().join("spool"),
    );
    std::fs::create_dir(&root).unwrap();
    let store = LocalStore::new(&root);
    let prefix = prefix("etcd/main", "uid");
    let mut last = 0;
    // In the second iteration, another agent continues the chain of the first agent.
    for _ in 0..2 {
        let mut child = agent(&root, &spool, &etcd.client_url);
        first_base(&store, &prefix).await;
        let mut client = etcd_client::Client::connect([&etcd.client_url], None)
            .await
            .unwrap();
        // The agent may not be connected yet. It must also record the changes from before its connection.
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
        let base = first_base(&store, &prefix).await;
        let reader = Reader::open(&store, &prefix, base).await.unwrap();
        assert_eq!(reader.chain().last, last);
        assert_eq!(reader.chain().faults, []);
    }
    assert_eq!(bases(&store, &prefix).await.unwrap().len(), 1);
}
