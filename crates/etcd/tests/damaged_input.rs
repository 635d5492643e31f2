//! Parses damaged databases and damaged metrics of real members.
#![allow(clippy::unwrap_used, clippy::panic)]

#[path = "../../api/tests/damaged/mod.rs"]
mod damaged;

use std::io::Write as _;
use std::path::Path;

use damaged::{assert_little_memory, bounded, cases, damaged, damaged_text};
use etcd::{Access, Etcd, EtcdClient, InspectError, Inspected, Inspector, Revisions};
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::{Index, select};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;

/// Length of the SHA-256 after a database.
const TRAILER: usize = 32;
const PAGE: usize = 4096;
/// Length of the beginning of a page, with the page's header and first elements.
const HEAD: usize = 256;

/// The part of etcd's metrics that the operator reads, as etcd 3.6 writes it.
const METRICS: &str = "HTTP/1.0 200 OK\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8\r\n\r\n\
    # HELP etcd_network_active_peers The current number of active peer connections.\n\
    # TYPE etcd_network_active_peers gauge\n\
    etcd_network_active_peers{Local=\"8e9e05c52164694d\",Remote=\"91bc3c398fb3c146\"} 1\n\
    etcd_network_active_peers{Local=\"8e9e05c52164694d\",Remote=\"fd422379fda50e48\"} 1\n\
    # TYPE etcd_server_has_leader gauge\netcd_server_has_leader 1\n\
    # TYPE etcd_server_id gauge\netcd_server_id{server_id=\"8e9e05c52164694d\"} 1\n\
    # TYPE etcd_server_proposals_applied_total gauge\netcd_server_proposals_applied_total 1.234567e+06\n\
    # TYPE etcd_server_proposals_pending gauge\netcd_server_proposals_pending 0\n";

/// The databases that etcd 3.2 and 3.3 wrote, with their SHA-256.
fn databases() -> Vec<Vec<u8>> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../e2e/fixtures/coreos");
    ["etcd-3.2.32.db", "etcd-3.3.27.db"]
        .map(|name| std::fs::read(folder.join(name)).unwrap())
        .to_vec()
}

/// Databases with damage at the beginning of pages, where the headers and elements are. The length stays the same,
/// because a wrong length is rejected at once.
fn with_damaged_pages() -> impl Strategy<Value = Vec<u8>> {
    let change = (
        any::<Index>(),
        0..HEAD,
        select(vec![0, 1, 2, 4, 0x7f, 0x80, 0xff_u8]),
    );
    (select(databases()), vec(change, 0..12)).prop_map(|(mut database, changes)| {
        database.truncate(database.len() - TRAILER);
        let pages = database.len() / PAGE;
        for (page, at, byte) in changes {
            database[page.index(pages) * PAGE + at] = byte;
        }
        database
    })
}

fn inspect(database: &[u8], chunk: usize) -> Result<Inspected, InspectError> {
    let mut inspector = Inspector::new();
    for part in database.chunks(chunk) {
        inspector.push(part);
    }
    inspector.finish()
}

/// Inspects a database as a whole, in chunks, and as a file.
fn read(database: &[u8], chunk: usize) {
    let whole = bounded(|| inspect(database, database.len().max(1)));
    assert_eq!(bounded(|| inspect(database, chunk)), whole);
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(database).unwrap();
    let walked = bounded(|| Revisions::of_file(&file));
    if let (Ok(inspected), Ok(walked)) = (&whole, &walked) {
        assert_eq!(inspected.revision, walked.revision);
    }
}

#[test]
fn undamaged_databases_are_read() {
    for database in databases() {
        let inspected = inspect(&database, PAGE).unwrap();
        assert!(inspected.trailer && inspected.revision > 1);
        read(&database, 1000);
    }
}

proptest! {
    #![proptest_config(cases(128))]

    #[test]
    fn damaged_pages_are_read_or_rejected_without_panic(database in with_damaged_pages(), chunk in 1..10_000_usize) {
        read(&database, chunk);
        assert_little_memory();
    }

    #[test]
    fn damaged_databases_are_read_or_rejected_without_panic(
        database in damaged(&databases().iter().map(Vec::as_slice).collect::<Vec<_>>()),
        chunk in 1..10_000_usize,
    ) {
        read(&database, chunk);
        assert_little_memory();
    }

    #[test]
    fn damaged_metrics_are_read_or_rejected_without_panic(answer in damaged_text(&[METRICS])) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let whole = answer == METRICS;
        let pulse = bounded(|| runtime.block_on(ask(answer)));
        prop_assert!(pulse.is_some() || !whole);
        if let Some(pulse) = pulse {
            // The original metrics have two peers. Random damage turns only a few other lines into peers.
            prop_assert!(pulse.peers.len() < 10, "{:?}", pulse);
        }
    }
}

/// The health data that the client reads from a server with this response.
async fn ask(answer: String) -> Option<etcd::Pulse> {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.unwrap();
        let mut request = [0; 1024];
        let read = stream.read(&mut request).await.unwrap_or(0);
        assert!(read > 0, "no request");
        let _ = stream.write_all(answer.as_bytes()).await;
    });
    EtcdClient::new(Access::default())
        .pulse(&address)
        .await
        .ok()
}
