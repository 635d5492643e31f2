//! `cargo xtask bench backup`: one backup of a large database, beside what one would do by hand in the same run:
//! `etcdctl snapshot save` to a file, and then the upload of that file, one part after the other.
//!
//! Measured is the wall time of both, and the memory of this process while it transfers. Sizes in MiB come from
//! `BENCH_MIB`, rounds from `BENCH_ROUNDS`. Alone in its binary, so that nothing else in the process is measured.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::cast_precision_loss)]

mod procfs;

use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use backup::transfer::{Meter, Name, Transfer};
use etcd::testing::{EtcdProcess, Programs, Start};
use etcd::{Access, EtcdClient};
use store::testing::S3Server;
use store::{S3Store, Store};
use tokio::io::AsyncReadExt;
use tokio_util::sync::CancellationToken;

use procfs::memory;

const MIB: u64 = 1 << 20;

fn numbers(variable: &str, default: &[u64]) -> Vec<u64> {
    let text = std::env::var(variable).unwrap_or_default();
    let given: Vec<u64> = text
        .split(',')
        .filter_map(|number| number.trim().parse().ok())
        .collect();
    if given.is_empty() {
        default.to_vec()
    } else {
        given
    }
}

/// Values that do not compress, as those of an encrypted store, until the file has the size.
async fn fill(url: &str, mebibytes: u64) {
    let mut client = etcd_client::Client::connect([url], None).await.unwrap();
    let value = store::testing::content(1 << 20);
    for index in 0..mebibytes {
        client
            .put(format!("/{index:05}"), value.to_vec(), None)
            .await
            .unwrap();
    }
}

/// The snapshot to a file, and the file to the store: 8 MiB after 8 MiB.
async fn by_hand(programs: &Programs, url: &str, store: &dyn Store) -> Duration {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("snapshot.db");
    let began = Instant::now();
    let saved = Command::new(programs.etcdutl().with_file_name("etcdctl"))
        .args(["--endpoints", url, "snapshot", "save"])
        .arg(&file)
        .output()
        .unwrap();
    assert!(
        saved.status.success(),
        "{}",
        String::from_utf8_lossy(&saved.stderr)
    );
    let mut file = tokio::fs::File::open(&file).await.unwrap();
    let mut part = 0;
    loop {
        let mut content = Vec::with_capacity(8 << 20);
        (&mut file)
            .take(8 << 20)
            .read_to_end(&mut content)
            .await
            .unwrap();
        if content.is_empty() {
            break;
        }
        // As an object each: no more is under way at a time than one part.
        store
            .put(&format!("by-hand/{part:04}"), content.into())
            .await
            .unwrap();
        part += 1;
    }
    began.elapsed()
}

async fn ours(url: &str, store: Arc<dyn Store>) -> (Duration, i64, u64) {
    let transfer = Transfer {
        etcd: Arc::new(EtcdClient::new(Access::default())),
        endpoints: vec![url.to_owned()],
        store,
        name: Name::Exact("ours".to_owned()),
        compress: false,
        uid: "uid".to_owned(),
        cluster: None,
        since: jiff::Timestamp::now(),
    };
    // The peak counts from here on.
    std::fs::write("/proc/self/clear_refs", "5").unwrap();
    let began = Instant::now();
    let stored = transfer
        .run(&Meter::default(), &CancellationToken::new())
        .await
        .unwrap();
    (began.elapsed(), stored.size, memory("VmHWM"))
}

fn median(times: &mut [Duration]) -> f64 {
    times.sort();
    times[times.len() / 2].as_secs_f64()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "measures: run by cargo xtask bench backup"]
async fn a_backup_beside_a_file_and_its_upload() {
    let programs = Programs::find("3.6");
    let rounds = numbers("BENCH_ROUNDS", &[3])[0];
    println!("| database | ours | by hand | ratio | peak memory |\n|---|---|---|---|---|");
    for mebibytes in numbers("BENCH_MIB", &[100, 1024]) {
        let start = Start {
            flags: vec![
                "--unsafe-no-fsync".to_owned(),
                "--quota-backend-bytes=8589934592".to_owned(),
            ],
            ..Start::default()
        };
        let etcd = EtcdProcess::start(&programs, &start).await;
        fill(&etcd.client_url, mebibytes).await;
        let server = S3Server::start(&["bucket"]);
        let store: Arc<dyn Store> = Arc::new(S3Store::new(server.config("bucket")).await.unwrap());
        let (mut fast, mut slow) = (Vec::new(), Vec::new());
        let (mut peak, mut size) = (0, 0);
        for _ in 0..rounds {
            slow.push(by_hand(&programs, &etcd.client_url, store.as_ref()).await);
            let (took, stored, held) = ours(&etcd.client_url, store.clone()).await;
            fast.push(took);
            (peak, size) = (peak.max(held), stored);
        }
        let (fast, slow) = (median(&mut fast), median(&mut slow));
        println!(
            "| {} MiB | {fast:.2} s | {slow:.2} s | {:.2} | {} MiB |",
            size / (1 << 20),
            fast / slow,
            peak / MIB
        );
    }
}
