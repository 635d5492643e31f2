//! Tests that the memory use of a transfer does not depend on the size of the database. This test is a separate binary,
//! so that no other test changes the memory use.
#![allow(clippy::unwrap_used)]

mod procfs;

use std::sync::Arc;

use backup::snapshot::EndpointLimits;
use backup::transfer::{Meter, ObjectName, Transfer};
use etcd::testing::{EtcdProcess, Programs, Start};
use etcd::{Access, EtcdClient};
use store::S3Store;
use store::testing::S3Server;
use tokio_util::sync::CancellationToken;

use procfs::memory;

const MIB: u64 = 1 << 20;

/// Memory limit for every size of database: four parts of 6 MiB, the buffers of the HTTP client, and unused heap.
const BUDGET: u64 = 80 * MIB;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn backup_memory_does_not_depend_on_database_size() {
    let start = Start {
        flags: vec!["--unsafe-no-fsync".to_owned()],
        ..Start::default()
    };
    let etcd = EtcdProcess::start(&Programs::find("3.6"), &start).await;
    {
        let mut client = etcd_client::Client::connect([&etcd.client_url], None)
            .await
            .unwrap();
        let value = vec![b'v'; 1 << 20];
        for index in 0..320 {
            client
                .put(format!("/k/{index:05}"), value.clone(), None)
                .await
                .unwrap();
        }
    }
    let server = S3Server::start(&["bucket"]);
    let transfer = Transfer {
        etcd: Arc::new(EtcdClient::new(Access::default())),
        endpoints: vec![etcd.client_url.clone()],
        store: Arc::new(S3Store::new(server.config("bucket")).await.unwrap()),
        name: ObjectName::Exact("large".to_owned()),
        compress: false,
        encryption: None,
        uid: "uid".to_owned(),
        cluster: None,
        limits: EndpointLimits::default(),
        since: jiff::Timestamp::now(),
    };
    // This write resets the peak memory use (`VmHWM`) of the process.
    std::fs::write("/proc/self/clear_refs", "5").unwrap();
    let before = memory("VmRSS");
    let began = std::time::Instant::now();
    let stored = transfer
        .run(&Meter::default(), &CancellationToken::new())
        .await
        .unwrap();
    let grown = memory("VmHWM").saturating_sub(before);
    println!(
        "{} MiB in {:?}, the process grew by {} MiB at most",
        stored.size >> 20,
        began.elapsed(),
        grown / MIB
    );
    assert!(stored.size > 300 << 20, "{}", stored.size);
    assert!(
        grown < BUDGET,
        "the memory of the process grew by {} MiB",
        grown / MIB
    );
}
