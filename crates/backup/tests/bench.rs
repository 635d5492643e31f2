//! Benchmark `cargo xtask bench backup`: compares the operator's backup of a large database with a manual backup.
//!
//! The manual backup runs `etcdctl snapshot save`, and then uploads the file as the command line tool of a store does:
//! in concurrent parts of 8 MiB.
//!
//! The benchmark measures the elapsed time, the processor time and the disk reads of all processes, and the memory of
//! this process. The binary contains no other benchmark, because another test would change the values.
//!
//! Variables: `BENCH_MIB` contains the sizes in MiB, `BENCH_ROUNDS` the number of rounds, and `BENCH_JSON` the file
//! for the results.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::cast_precision_loss)]

mod procfs;

use std::fs::File;
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use backup::snapshot::EndpointLimits;
use backup::transfer::{Meter, ObjectName, Transfer};
use bytes::BytesMut;
use etcd::testing::{EtcdProcess, Programs, Start};
use etcd::{Access, EtcdClient};
use serde_json::json;
use store::testing::{ACCESS_KEY, S3Server, SECRET_KEY};
use store::{S3Access, S3Config, S3Keys, S3Store, Store};
use tokio::io::AsyncReadExt;
use tokio_util::sync::CancellationToken;

use procfs::{memory, processor, processor_of_all, read_by_all};

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

/// Writes values that cannot be compressed.
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

/// Resets the state of the machine before a measurement. Afterwards, all writes are on disk, the store is empty, and
/// the page cache contains only the programs and the database.
async fn reset(store: &dyn Store, etcd: &EtcdProcess, programs: &Programs) {
    for object in store.list("").await.unwrap() {
        store.delete(&object.key).await.unwrap();
    }
    let synced = Command::new("sync").status().unwrap();
    assert!(synced.success());
    if std::fs::write("/proc/sys/vm/drop_caches", "1").is_err() {
        eprintln!("dropping the page cache requires root: the measured reads may differ");
    }
    for file in [
        etcd.data_dir().join("member/snap/db"),
        etcdctl(programs),
        std::env::current_exe().unwrap(),
    ] {
        std::io::copy(&mut File::open(file).unwrap(), &mut std::io::sink()).unwrap();
    }
}

fn etcdctl(programs: &Programs) -> PathBuf {
    programs.etcdutl().with_file_name("etcdctl")
}

/// The measured values of a manual backup.
struct Manual {
    file: Duration,
    both: Duration,
    of_all: Duration,
    read: u64,
}

fn manual(programs: &Programs, url: &str, server: &S3Server) -> Manual {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("snapshot.db");
    let (began, taken, read) = (Instant::now(), processor_of_all(), read_by_all());
    let saved = Command::new(etcdctl(programs))
        .args(["--endpoints", url, "snapshot", "save"])
        .arg(&file)
        .output()
        .unwrap();
    assert!(
        saved.status.success(),
        "{}",
        String::from_utf8_lossy(&saved.stderr)
    );
    let file_time = began.elapsed();
    let uploaded = Command::new(std::env::current_exe().unwrap())
        .args(["--ignored", "--exact", "manual_upload_stores_the_file"])
        .env(FILE, &file)
        .env(ENDPOINT, &server.endpoint)
        .output()
        .unwrap();
    assert!(uploaded.status.success(), "{uploaded:?}");
    Manual {
        file: file_time,
        both: began.elapsed(),
        of_all: processor_of_all().saturating_sub(taken),
        read: read_by_all().saturating_sub(read),
    }
}

/// The environment variable with the path of the file that [`manual`] uploads.
const FILE: &str = "BENCH_FILE";
/// The environment variable with the endpoint of the S3 server.
const ENDPOINT: &str = "BENCH_ENDPOINT";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "a part of the benchmark"]
async fn manual_upload_stores_the_file() {
    let (Ok(file), Ok(endpoint)) = (std::env::var(FILE), std::env::var(ENDPOINT)) else {
        return;
    };
    let config = S3Config {
        bucket: "bucket".to_owned(),
        endpoint: Some(endpoint),
        force_path_style: true,
        access: S3Access::Keys(S3Keys::new(ACCESS_KEY, SECRET_KEY)),
        ..S3Config::default()
    };
    let store = S3Store::new(config).await.unwrap().with_parts_of(8 << 20);
    let mut file = tokio::fs::File::open(&file).await.unwrap();
    let mut upload = store.begin("by-hand").await.unwrap();
    loop {
        let mut content = BytesMut::with_capacity(1 << 20);
        if file.read_buf(&mut content).await.unwrap() == 0 {
            break;
        }
        upload.write(content.freeze()).await.unwrap();
    }
    upload.commit().await.unwrap();
}

/// The measured values of a backup.
struct Measured {
    time: Duration,
    processor: Duration,
    of_all: Duration,
    read: u64,
    before: u64,
    peak: u64,
    size: i64,
}

async fn ours(url: &str, store: Arc<dyn Store>) -> Measured {
    let transfer = Transfer {
        etcd: Arc::new(EtcdClient::new(Access::default())),
        endpoints: vec![url.to_owned()],
        store,
        name: ObjectName::Exact("ours".to_owned()),
        compress: false,
        encryption: None,
        uid: "uid".to_owned(),
        cluster: None,
        limits: EndpointLimits::default(),
        since: jiff::Timestamp::now(),
    };
    // This write resets the peak memory use (`VmHWM`) of the process.
    std::fs::write("/proc/self/clear_refs", "5").unwrap();
    let (began, taken, before) = (Instant::now(), processor(), memory("VmRSS"));
    let (taken_by_all, read) = (processor_of_all(), read_by_all());
    let stored = transfer
        .run(&Meter::default(), &CancellationToken::new())
        .await
        .unwrap();
    Measured {
        time: began.elapsed(),
        processor: processor().saturating_sub(taken),
        of_all: processor_of_all().saturating_sub(taken_by_all),
        read: read_by_all().saturating_sub(read),
        before,
        peak: memory("VmHWM"),
        size: stored.size,
    }
}

fn median(times: impl Iterator<Item = Duration>) -> f64 {
    let mut times: Vec<Duration> = times.collect();
    times.sort();
    times[times.len() / 2].as_secs_f64()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "a benchmark: run it with cargo xtask bench backup"]
async fn benchmark_compares_backup_with_manual_upload() {
    let programs = Programs::find("3.6");
    let rounds = numbers("BENCH_ROUNDS", &[3])[0];
    println!(
        "| database | operator | manual (snapshot only) | ratio | CPU time of the backup | all processes: operator, manual | disk reads: operator, manual | peak memory (before) |\n|---|---|---|---|---|---|---|---|"
    );
    let mut figures = Vec::new();
    for mebibytes in numbers("BENCH_MIB", &[100, 1024]) {
        let start = Start {
            flags: vec![
                "--unsafe-no-fsync".to_owned(),
                "--quota-backend-bytes=8589934592".to_owned(),
                // By default, etcd keeps at least 5,000 recent writes in memory. With values of 1 MiB, these writes
                // would leave too little memory for the page cache.
                "--snapshot-count=100".to_owned(),
                "--snapshot-catchup-entries=10".to_owned(),
            ],
            ..Start::default()
        };
        let etcd = EtcdProcess::start(&programs, &start).await;
        fill(&etcd.client_url, mebibytes).await;
        let server = S3Server::start(&["bucket"]);
        let store: Arc<dyn Store> = Arc::new(S3Store::new(server.config("bucket")).await.unwrap());
        let (mut fast, mut slow) = (Vec::new(), Vec::new());
        for _ in 0..rounds {
            reset(store.as_ref(), &etcd, &programs).await;
            fast.push(ours(&etcd.client_url, store.clone()).await);
            reset(store.as_ref(), &etcd, &programs).await;
            slow.push(manual(&programs, &etcd.client_url, &server));
        }
        let size = fast.iter().map(|took| took.size).max().unwrap();
        let seconds = |times: Vec<Duration>| -> Vec<f64> {
            times.iter().map(Duration::as_secs_f64).collect()
        };
        figures.push(json!({
            "database_bytes": size,
            "ours_seconds": seconds(fast.iter().map(|took| took.time).collect()),
            "ours_processor_seconds": seconds(fast.iter().map(|took| took.processor).collect()),
            "ours_processor_seconds_of_all": seconds(fast.iter().map(|took| took.of_all).collect()),
            "by_hand_seconds": seconds(slow.iter().map(|took| took.both).collect()),
            "by_hand_file_seconds": seconds(slow.iter().map(|took| took.file).collect()),
            "by_hand_processor_seconds_of_all": seconds(slow.iter().map(|took| took.of_all).collect()),
            "ours_read_bytes": fast.iter().map(|took| took.read).collect::<Vec<_>>(),
            "by_hand_read_bytes": slow.iter().map(|took| took.read).collect::<Vec<_>>(),
            "peak_memory_bytes": fast.iter().map(|took| took.peak).max(),
            "goals": {"ratio": 0.8, "peak_memory_bytes": 64 * MIB},
        }));
        let peak = fast.iter().max_by_key(|took| took.peak).unwrap();
        let (before, peak) = (peak.before / MIB, peak.peak / MIB);
        let processor = median(fast.iter().map(|took| took.processor));
        let of_all = median(fast.iter().map(|took| took.of_all));
        let of_all_by_hand = median(slow.iter().map(|took| took.of_all));
        let read = fast.iter().map(|took| took.read).max().unwrap() / MIB;
        let read_by_hand = slow.iter().map(|took| took.read).max().unwrap() / MIB;
        let fast = median(fast.iter().map(|took| took.time));
        let file = median(slow.iter().map(|took| took.file));
        let slow = median(slow.iter().map(|took| took.both));
        println!(
            "| {} MiB | {fast:.2} s | {slow:.2} s ({file:.2} s) | {:.2} | {processor:.2} s | {of_all:.2} s, {of_all_by_hand:.2} s | {read} MiB, {read_by_hand} MiB | {peak} MiB ({before} MiB) |",
            size / (1 << 20),
            fast / slow,
        );
    }
    if let Some(file) = std::env::var_os("BENCH_JSON") {
        std::fs::write(file, serde_json::to_vec_pretty(&figures).unwrap()).unwrap();
    }
}
