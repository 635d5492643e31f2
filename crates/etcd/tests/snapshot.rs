//! Tests of the inspector with real databases. The inspector must find the same revisions as `etcdutl snapshot status`.
#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use etcd::testing::{EtcdProcess, Programs, Start};
use etcd::{Access, Etcd, EtcdClient, InspectError, Inspected, Inspector, Revisions, WalkError};
use etcd_client::{Client, CompactionOptions, Compare, CompareOp, PutOptions, Txn, TxnOp};
use futures::TryStreamExt;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

fn inspect(bytes: &[u8], mut chunk: impl FnMut() -> usize) -> Result<Inspected, InspectError> {
    let mut inspector = Inspector::new();
    let mut rest = bytes;
    while !rest.is_empty() {
        let (now, later) = rest.split_at(chunk().clamp(1, rest.len()));
        inspector.push(now);
        rest = later;
    }
    inspector.finish()
}

/// The revision that `etcdutl` reports for the file.
fn etcdutl(programs: &Programs, file: &Path) -> i64 {
    let output = Command::new(programs.etcdutl())
        .args(["snapshot", "status", "-w", "json"])
        .arg(file)
        .output()
        .unwrap();
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    let status: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    status["revision"].as_i64().unwrap()
}

async fn snapshot(etcd: &EtcdProcess) -> Vec<u8> {
    let client = EtcdClient::new(Access::default());
    let snapshot = client.snapshot(&etcd.client_url).await.unwrap();
    let chunks: Vec<_> = snapshot.chunks.try_collect().await.unwrap();
    chunks.concat()
}

/// Compares the inspection of one snapshot with etcdutl and with the server. The inspector gets the snapshot as a
/// whole, and then in chunks of several sizes.
async fn agrees(programs: &Programs, etcd: &EtcdProcess, rng: &mut StdRng) -> Inspected {
    let before = EtcdClient::new(Access::default())
        .status(&etcd.client_url)
        .await
        .unwrap();
    let bytes = snapshot(etcd).await;
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), &bytes).unwrap();
    let expected = etcdutl(programs, file.path());
    let whole = inspect(&bytes, || usize::MAX).unwrap();
    assert_eq!(
        whole.revision, expected,
        "the server reports revision {}",
        before.revision
    );
    assert!(whole.trailer);
    assert_eq!(whole.size, bytes.len() as u64);
    // `Revisions::of_file` reads only a few pages, but must return the same revisions as `inspect`.
    let walked = Revisions::of_file(file.as_file()).unwrap();
    assert_eq!(
        (walked.revision, walked.compacted, walked.store_revision()),
        (whole.revision, whole.compacted, whole.store_revision())
    );
    assert!(
        whole.revision.max(whole.compacted) == before.revision || before.revision == 1,
        "the file has {whole:?}, but the server reports revision {}",
        before.revision
    );
    // Small chunks would take too long for large files.
    let sizes: &[usize] = if bytes.len() < 1 << 20 {
        &[7, 33, 4096, 40_000]
    } else {
        &[40_000]
    };
    for &largest in sizes {
        let pieces = inspect(&bytes, || rng.random_range(1..=largest)).unwrap();
        assert_eq!(pieces, whole, "in chunks of up to {largest}");
    }
    whole
}

async fn fill(client: &mut Client, rng: &mut StdRng, puts: usize, largest: usize) {
    for index in 0..puts {
        let key = format!("/key/{:05}", rng.random_range(0..puts));
        match rng.random_range(0..20) {
            0 => {
                client.delete(key, None).await.unwrap();
            }
            1 => {
                let lease = client.lease_grant(600, None).await.unwrap().id();
                let options = PutOptions::new().with_lease(lease);
                client.put(key, "leased", Some(options)).await.unwrap();
            }
            2 => {
                let many: Vec<TxnOp> = (0..30)
                    .map(|part| TxnOp::put(format!("{key}/{part}"), vec![1; 200], None))
                    .collect();
                let when = Compare::version("absent", CompareOp::Equal, 0);
                client
                    .txn(Txn::new().when([when]).and_then(many))
                    .await
                    .unwrap();
            }
            3 if index > 10 => {
                let revision = client
                    .get("x", None)
                    .await
                    .unwrap()
                    .header()
                    .unwrap()
                    .revision();
                let options = CompactionOptions::new().with_physical();
                let _ = client
                    .compact(revision - rng.random_range(0..3), Some(options))
                    .await;
            }
            _ => {
                let value = vec![b'v'; rng.random_range(0..=largest)];
                client.put(key, value, None).await.unwrap();
            }
        }
    }
}

async fn many_databases(minor: &str, seed: u64) {
    let programs = Programs::find(minor);
    let rng = &mut StdRng::seed_from_u64(seed);
    for largest in [10, 900, 20_000, 600_000] {
        // The flag `--unsafe-no-fsync` makes etcd faster, and the test does not need a durable file.
        let start = Start {
            flags: vec!["--unsafe-no-fsync".to_owned()],
            ..Start::default()
        };
        let etcd = EtcdProcess::start(&programs, &start).await;
        let mut client = Client::connect([&etcd.client_url], None).await.unwrap();
        agrees(&programs, &etcd, rng).await;
        for puts in [1, 3, 40, 150] {
            fill(&mut client, rng, puts, largest).await;
            agrees(&programs, &etcd, rng).await;
        }
        // The value of "big" takes several overflow pages. The value of "small" is stored after it.
        client
            .put("big", vec![b'_'; 1_400_000], None)
            .await
            .unwrap();
        agrees(&programs, &etcd, rng).await;
        client.put("small", "", None).await.unwrap();
        agrees(&programs, &etcd, rng).await;
        client.defragment().await.unwrap();
        agrees(&programs, &etcd, rng).await;
        fill(&mut client, rng, 20, largest).await;
        agrees(&programs, &etcd, rng).await;
    }
}

#[tokio::test]
async fn inspected_revision_matches_etcdutl_3_5() {
    many_databases("3.5", 1).await;
}

#[tokio::test]
async fn inspected_revision_matches_etcdutl_3_6() {
    many_databases("3.6", 2).await;
}

#[tokio::test]
async fn inspected_revision_matches_etcdutl_3_7() {
    many_databases("3.7", 3).await;
}

#[tokio::test]
async fn inspection_returns_compaction_revision_if_newest_keys_are_deleted() {
    let programs = Programs::find("3.6");
    let etcd = EtcdProcess::start(&programs, &Start::default()).await;
    let mut client = Client::connect([&etcd.client_url], None).await.unwrap();
    client.put("a", "1", None).await.unwrap();
    client.delete("a", None).await.unwrap();
    let options = CompactionOptions::new().with_physical();
    client.compact(3, Some(options)).await.unwrap();
    let rng = &mut StdRng::seed_from_u64(9);
    let inspected = agrees(&programs, &etcd, rng).await;
    assert_eq!(inspected.compacted, 3);
}

/// etcd writes pages during the transfer. These pages are in the file, but do not belong to the snapshot.
#[tokio::test]
async fn concurrent_writes_do_not_change_snapshot_revision() {
    let programs = Programs::find("3.6");
    let etcd = EtcdProcess::start(&programs, &Start::default()).await;
    let mut client = Client::connect([&etcd.client_url], None).await.unwrap();
    // The test writes these keys and deletes them below. etcd then reuses their pages for the writes during the
    // snapshot.
    for index in 0..3000 {
        client
            .put(format!("/k/{index}"), vec![b'v'; 8000], None)
            .await
            .unwrap();
    }
    let revision = client
        .get("x", None)
        .await
        .unwrap()
        .header()
        .unwrap()
        .revision();
    client
        .delete("/k/", Some(etcd_client::DeleteOptions::new().with_prefix()))
        .await
        .unwrap();
    let options = CompactionOptions::new().with_physical();
    client.compact(revision + 1, Some(options)).await.unwrap();
    client.put("after", "compaction", None).await.unwrap();

    let stop = Arc::new(AtomicBool::new(false));
    let writers: Vec<_> = (0..8)
        .map(|writer| {
            let (stop, mut client) = (stop.clone(), client.clone());
            tokio::spawn(async move {
                while !stop.load(Ordering::Relaxed) {
                    client
                        .put(format!("/w/{writer}"), vec![b'w'; 3000], None)
                        .await
                        .unwrap();
                }
            })
        })
        .collect();
    let port = EtcdClient::new(Access::default());
    for _ in 0..4 {
        let before = port.status(&etcd.client_url).await.unwrap().revision;
        let stream = port.snapshot(&etcd.client_url).await.unwrap();
        // The test reads slowly, so that etcd commits many times during the transfer.
        let mut chunks = stream.chunks;
        let mut bytes = Vec::new();
        while let Some(chunk) = chunks.try_next().await.unwrap() {
            bytes.extend_from_slice(&chunk);
            tokio::time::sleep(std::time::Duration::from_micros(300)).await;
        }
        let after = port.status(&etcd.client_url).await.unwrap().revision;
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), &bytes).unwrap();
        let inspected = inspect(&bytes, || 32_768).unwrap();
        assert_eq!(inspected.revision, etcdutl(&programs, file.path()));
        assert!(
            before <= inspected.revision && inspected.revision < after,
            "{before} {inspected:?} {after}"
        );
    }
    stop.store(true, Ordering::Relaxed);
    for writer in writers {
        writer.await.unwrap();
    }
}

#[tokio::test]
async fn database_file_without_checksum_is_inspected() {
    let programs = Programs::find("3.6");
    let mut etcd = EtcdProcess::start(&programs, &Start::default()).await;
    let mut client = Client::connect([&etcd.client_url], None).await.unwrap();
    let rng = &mut StdRng::seed_from_u64(4);
    fill(&mut client, rng, 100, 2000).await;
    let revision = client
        .get("x", None)
        .await
        .unwrap()
        .header()
        .unwrap()
        .revision();
    etcd.stop();
    let bytes = std::fs::read(etcd.data_dir().join("member/snap/db")).unwrap();
    let inspected = inspect(&bytes, || 10_000).unwrap();
    assert_eq!(inspected.revision, revision);
    assert!(!inspected.trailer);
}

/// The inspection of a damaged file must return a result or an error, and must not panic.
#[tokio::test]
async fn inspection_of_damaged_file_never_panics() {
    let programs = Programs::find("3.6");
    let etcd = EtcdProcess::start(&programs, &Start::default()).await;
    let mut client = Client::connect([&etcd.client_url], None).await.unwrap();
    let rng = &mut StdRng::seed_from_u64(5);
    fill(&mut client, rng, 30, 3000).await;
    let whole = snapshot(&etcd).await;
    // The checksum at the end is removed, because with a checksum, the inspector rejects every damaged file before it
    // parses the pages.
    let bytes = &whole[..whole.len() - 32];
    let (mut understood, mut walked) = (0, 0);
    for round in 0..400 {
        let mut damaged = bytes.to_vec();
        for _ in 0..=round % 40 {
            // If `round` is even, the damage is only in the first 64 bytes of pages, which contain the headers.
            let page = rng.random_range(0..damaged.len() / 4096) * 4096;
            let at = page + rng.random_range(0..if round % 2 == 0 { 64 } else { 4096 });
            damaged[at] = if round % 3 == 0 { 0xff } else { rng.random() };
        }
        understood += usize::from(inspect(&damaged, || 9000).is_ok());
        walked += usize::from(walk(&damaged).is_ok());
    }
    assert!((1..400).contains(&walked), "{walked}");
    assert!((1..400).contains(&understood), "{understood}");
}

/// Damage or truncation changes the checksum, so the inspector rejects the snapshot (invariant 12).
#[tokio::test]
async fn invariant_12_damaged_or_truncated_snapshot_is_rejected() {
    let programs = Programs::find("3.6");
    let etcd = EtcdProcess::start(&programs, &Start::default()).await;
    let bytes = snapshot(&etcd).await;
    let mut damaged = bytes.clone();
    damaged[bytes.len() / 2] ^= 1;
    assert_eq!(
        inspect(&damaged, || 4096),
        Err(InspectError::ChecksumMismatch)
    );
    let cut = &bytes[..bytes.len() - 4096];
    assert_eq!(inspect(cut, || 4096), Err(InspectError::ChecksumMismatch));
    let cut = &bytes[..bytes.len() - 100];
    assert_eq!(
        inspect(cut, || 4096),
        Err(InspectError::Truncated {
            size: cut.len() as u64
        })
    );
    assert_eq!(inspect(&[], || 1), Err(InspectError::Truncated { size: 0 }));
    assert_eq!(
        inspect(&[0; 8192], || 4096),
        Err(InspectError::NotADatabase)
    );
    for nothing in [&[0; 8192][..], &[], &bytes[..4096], &bytes[..8192]] {
        let found = walk(nothing);
        assert!(matches!(found, Err(WalkError::Database(_))), "{found:?}");
    }
}

fn walk(bytes: &[u8]) -> Result<Revisions, WalkError> {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), bytes).unwrap();
    Revisions::of_file(file.as_file())
}
