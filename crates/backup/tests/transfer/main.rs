//! Tests of transfers, most of them with a real etcd. The store is a real S3 server or a directory.
#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use api::manifest::{BackupManifest, manifest_key};
use backup::reason::{Reason, Trouble};
use backup::snapshot::{EndpointLimits, Stored};
use backup::transfer::{EarlierAttempt, Meter, ObjectName, Owner, Transfer, earlier_attempt};
use bytes::Bytes;
use etcd::fake::FakeEtcd;
use etcd::testing::{EtcdProcess, Programs, Start, free_port};
use etcd::{Access, ClusterId, Etcd, EtcdClient, KeyHash};
use jiff::Timestamp;
use runtime::endpoints::{EndpointGrant, EndpointGrants, GrantedBy};
use store::fake::{Call, FaultyStore};
use store::testing::{S3Server, download};
use store::{LocalStore, S3Store, Store};
use tokio_util::sync::CancellationToken;

mod adoption;
mod encrypted;
mod interrupted;

const KEY: &str = "daily/etcd.backup";

fn transfer(etcd: Arc<dyn Etcd>, endpoints: Vec<String>, store: Arc<dyn Store>) -> Transfer {
    Transfer {
        etcd,
        endpoints,
        store,
        name: ObjectName::Exact(KEY.to_owned()),
        compress: false,
        encryption: None,
        uid: "uid-1".to_owned(),
        cluster: None,
        limits: EndpointLimits::default(),
        since: jiff::Timestamp::now(),
    }
}

/// The owner of a backup without an EtcdCluster.
fn owner(uid: &str) -> Owner<'_> {
    Owner {
        uid,
        cluster: None,
        encrypted: false,
        verify_content: true,
    }
}

/// The complete backup of the EtcdBackup `uid`, if the backup was created at or after `begun`.
async fn found(store: &dyn Store, uid: &str, begun: Timestamp) -> Result<Option<Stored>, Trouble> {
    let name = ObjectName::Exact(KEY.to_owned());
    Ok(
        match earlier_attempt(store, name, owner(uid), begun).await? {
            EarlierAttempt::Complete(stored) => Some(stored),
            EarlierAttempt::Incomplete(_) => None,
        },
    )
}

fn client() -> Arc<dyn Etcd> {
    Arc::new(EtcdClient::new(Access::default()))
}

async fn s3(server: &S3Server) -> Arc<dyn Store> {
    Arc::new(S3Store::new(server.config("bucket")).await.unwrap())
}

fn long_ago() -> Timestamp {
    Timestamp::from_second(1_000_000_000).unwrap()
}

/// Writes values of 256 KiB, `mebibytes` MiB in total, and the key `last`. Returns the revision of `last`. The upload
/// of a backup of 20 MiB has several parts.
async fn fill(url: &str, mebibytes: usize) -> i64 {
    let mut client = etcd_client::Client::connect([url], None).await.unwrap();
    let value = vec![b'v'; 1 << 18];
    for index in 0..mebibytes * 4 {
        client
            .put(format!("/k/{index:05}"), value.clone(), None)
            .await
            .unwrap();
    }
    let answer = client.put("last", "key", None).await.unwrap();
    answer.header().unwrap().revision()
}

/// Restores the backup, and reads a key from the restored etcd. Returns the revision and the value.
async fn restored(programs: &Programs, file: &Path, key: &str) -> (i64, Vec<u8>) {
    let dir = tempfile::tempdir().unwrap();
    let data = dir.path().join("data");
    let restored = Command::new(programs.etcdutl())
        .args([
            "snapshot",
            "restore",
            "--name=r",
            "--initial-cluster=r=http://127.0.0.1:1",
        ])
        .args([
            "--initial-advertise-peer-urls=http://127.0.0.1:1",
            "--data-dir",
        ])
        .arg(&data)
        .arg(file)
        .output()
        .unwrap();
    assert!(
        restored.status.success(),
        "{}",
        String::from_utf8_lossy(&restored.stderr)
    );
    let url = format!("http://127.0.0.1:{}", free_port());
    let mut etcd = Command::new(&programs.etcd)
        .args(["--name=r", "--listen-peer-urls=http://127.0.0.1:0"])
        .arg(format!("--data-dir={}", data.display()))
        .arg(format!("--listen-client-urls={url}"))
        .arg(format!("--advertise-client-urls={url}"))
        .stderr(std::process::Stdio::null())
        .spawn()
        .unwrap();
    let mut answer = None;
    for _ in 0..1200 {
        if let Ok(mut client) = etcd_client::Client::connect([&url], None).await
            && let Ok(got) = client.get(key, None).await
        {
            let value = got.kvs()[0].value().to_vec();
            answer = Some((got.header().unwrap().revision(), value));
            break;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    etcd.kill().unwrap();
    etcd.wait().unwrap();
    answer.expect("the restored etcd does not serve")
}

#[tokio::test]
async fn stored_backup_can_be_restored() {
    for minor in ["3.5", "3.6", "3.7"] {
        let programs = Programs::find(minor);
        let etcd = EtcdProcess::start(&programs, &Start::default()).await;
        let server = S3Server::start(&["bucket"]);
        let revision = fill(&etcd.client_url, 20).await;
        let transfer = transfer(client(), vec![etcd.client_url.clone()], s3(&server).await);
        let meter = Meter::default();
        let stored = transfer
            .run(&meter, &CancellationToken::new())
            .await
            .unwrap();

        assert_eq!(stored.revision, revision);
        assert!(stored.etcd_version.starts_with(minor));
        assert_eq!(stored.location, format!("s3://bucket/{KEY}"));
        let bytes = download(transfer.store.as_ref(), KEY).await.unwrap();
        assert_eq!(i64::try_from(bytes.len()), Ok(stored.size));
        assert_eq!(meter.read().bytes, bytes.len() as u64);
        let sum = Command::new("sha256sum")
            .arg(server.bucket_dir("bucket").join(KEY))
            .output()
            .unwrap();
        assert!(String::from_utf8_lossy(&sum.stdout).starts_with(&stored.sha256));
        let manifest = download(transfer.store.as_ref(), &manifest_key(KEY))
            .await
            .unwrap();
        let manifest: BackupManifest = serde_json::from_slice(&manifest).unwrap();
        assert_eq!(
            (manifest.revision, manifest.size),
            (stored.revision, stored.size)
        );
        assert_eq!(manifest.backup_uid.as_deref(), Some("uid-1"));
        // The database contains 80 keys of 256 KiB each, and the key `last`.
        assert_eq!((manifest.keys, stored.keys), (Some(81), Some(81)));
        assert!(manifest.hash.is_some(), "{minor}");

        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), &bytes).unwrap();
        let (again, value) = restored(&programs, file.path(), "last").await;
        assert_eq!((again, value.as_slice()), (revision, &b"key"[..]));
        assert_eq!(
            server.unfinished("bucket"),
            Vec::<std::path::PathBuf>::new()
        );
    }
}

#[tokio::test]
async fn backup_succeeds_with_one_dead_endpoint_even_without_quorum() {
    let programs = Programs::find("3.6");
    let mut members = EtcdProcess::start_cluster(&programs, 3, &Start::default()).await;
    let port = client();
    let server = S3Server::start(&["bucket"]);
    // One of the two endpoints is dead. The live endpoint returns a member list with all members.
    let alive = members
        .iter()
        .position(|member| member.name == "m1")
        .unwrap();
    let dead = format!("http://127.0.0.1:{}", free_port());
    let endpoints = vec![dead, members[alive].client_url.clone()];
    // At least one of five runs must end within three seconds. The other runs may be slower on a busy machine.
    let mut times = Vec::new();
    while times
        .last()
        .is_none_or(|took| *took >= Duration::from_secs(3))
    {
        assert!(times.len() < 5, "{times:?}");
        let run = transfer(port.clone(), endpoints.clone(), s3(&server).await);
        let began = std::time::Instant::now();
        run.run(&Meter::default(), &CancellationToken::new())
            .await
            .unwrap();
        times.push(began.elapsed());
    }

    // Without a quorum, etcd returns no member list, but the member `m1` can send its snapshot.
    for member in &mut members {
        if member.name != "m1" {
            member.kill();
        }
    }
    let last = transfer(port, endpoints, s3(&server).await);
    let stored = last
        .run(&Meter::default(), &CancellationToken::new())
        .await
        .unwrap();
    assert!(stored.size > 0);
}

#[tokio::test]
async fn backup_reports_failures_of_etcd_and_store() {
    let server = S3Server::start(&["bucket"]);
    let unreachable = format!("http://127.0.0.1:{}", free_port());
    let run = transfer(client(), vec![unreachable.clone()], s3(&server).await);
    let trouble = run
        .run(&Meter::default(), &CancellationToken::new())
        .await
        .unwrap_err();
    assert_eq!(trouble.reason, Reason::EtcdUnreachable);
    assert!(
        trouble.message.contains(&unreachable) && trouble.message.contains("spec.etcdEndpoints"),
        "{trouble:?}"
    );

    let etcd = EtcdProcess::start(&Programs::find("3.6"), &Start::default()).await;
    let store = Arc::new(S3Store::new(server.config("missing")).await.unwrap());
    let run = transfer(client(), vec![etcd.client_url.clone()], store.clone());
    let trouble = run
        .run(&Meter::default(), &CancellationToken::new())
        .await
        .unwrap_err();
    assert_eq!(trouble.reason, Reason::BucketMissing, "{trouble:?}");
    let trouble = found(store.as_ref(), "uid-1", long_ago()).await;
    assert!(
        matches!(&trouble, Ok(None))
            || matches!(&trouble, Err(t) if t.reason == Reason::BucketMissing),
        "{trouble:?}"
    );
}

/// The limits of a transfer for the namespace `team-b` with these grants.
fn limited(grants: Vec<EndpointGrant>) -> EndpointLimits {
    let by = GrantedBy::default();
    EndpointLimits {
        advertised: EndpointGrants::new("operators", by, grants).of("team-b"),
        cluster_id: None,
    }
}

/// Invariant 28: the member list from etcd may contain members of other clusters. The operator connects to them only
/// with a grant.
#[tokio::test]
async fn invariant_28_operator_follows_member_list_only_to_granted_endpoints() {
    let victim = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let victim_url = victim.local_addr().unwrap().to_string();
    let start = Start {
        flags: vec![format!("--advertise-client-urls=http://{victim_url}")],
        ..Start::default()
    };
    let etcd = EtcdProcess::start(&Programs::find("3.6"), &start).await;
    let grant = format!("team-b={victim_url}").parse().unwrap();
    // The case without a connection runs first. If it ran later, `accept` could return a pending connection of an
    // earlier case.
    for (limits, connects) in [
        (limited(Vec::new()), false),
        (limited(vec![grant]), true),
        (EndpointLimits::default(), true),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let store = Arc::new(LocalStore::new(dir.path()));
        let run = Transfer {
            limits,
            ..transfer(client(), vec![etcd.client_url.clone()], store)
        };
        let (meter, none) = (Meter::default(), CancellationToken::new());
        let connection = tokio::time::timeout(Duration::from_secs(1), victim.accept());
        let (stored, connection) = tokio::join!(run.run(&meter, &none), connection);
        stored.unwrap();
        assert_eq!(connection.is_ok(), connects, "{:?}", run.limits);
    }
}

/// Invariant 28: a member of another cluster may get the address of a deleted pod. The snapshot of the other cluster
/// must not be stored.
#[tokio::test]
async fn invariant_28_snapshot_of_another_cluster_is_not_stored() {
    let etcd = EtcdProcess::start(&Programs::find("3.6"), &Start::default()).await;
    let id = client().status(&etcd.client_url).await.unwrap().cluster_id;
    for (recorded, stores) in [(ClusterId(1), false), (id, true)] {
        let dir = tempfile::tempdir().unwrap();
        let run = Transfer {
            limits: EndpointLimits {
                cluster_id: Some(recorded),
                ..EndpointLimits::default()
            },
            ..transfer(
                client(),
                vec![etcd.client_url.clone()],
                Arc::new(LocalStore::new(dir.path())),
            )
        };
        let none = CancellationToken::new();
        let stored = run.run(&Meter::default(), &none).await;
        let files = std::fs::read_dir(dir.path()).unwrap().count();
        assert_eq!((stored.is_ok(), files > 0), (stores, stores), "{stored:?}");
    }
}

/// The chunks of a snapshot from a real member.
async fn recorded() -> Vec<Bytes> {
    use futures::TryStreamExt;
    let etcd = EtcdProcess::start(&Programs::find("3.6"), &Start::default()).await;
    let snapshot = client().snapshot(&etcd.client_url).await.unwrap();
    snapshot.chunks.try_collect().await.unwrap()
}

#[tokio::test]
async fn invariant_12_snapshot_with_wrong_checksum_is_rejected() {
    let whole = recorded().await;
    let cut: Vec<Bytes> = whole[..whole.len() - 1].to_vec();
    let mut damaged = whole.clone();
    let mut page = damaged[1].to_vec();
    page[7] ^= 1;
    damaged[1] = page.into();
    let mut short = cut.clone();
    short.push(Bytes::from_static(b"half a checksum"));
    for (snapshot, good) in [
        (whole, true),
        (cut, false),
        (damaged, false),
        (short, false),
        (Vec::new(), false),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let store = Arc::new(LocalStore::new(dir.path()));
        let etcd = FakeEtcd::formed(7, &["a"], |name| format!("http://{name}:2379"));
        etcd.with(|state| state.snapshot = snapshot);
        let run = transfer(
            Arc::new(etcd),
            vec!["http://a:2379".to_owned()],
            store.clone(),
        );
        let outcome = run.run(&Meter::default(), &CancellationToken::new()).await;
        assert_eq!(outcome.is_ok(), good, "{outcome:?}");
        if let Err(trouble) = outcome {
            assert_eq!(trouble.reason, Reason::ChecksumMismatch);
            assert_eq!(store.list("").await.unwrap(), []);
        }
    }
}

#[tokio::test]
async fn invariant_12_backup_fails_if_store_fails() {
    let whole = recorded().await;
    let denied = || store::Error::AccessDenied("403".to_owned());
    for call in [
        Call::Begin,
        Call::Write,
        Call::Commit,
        Call::CommitAnswer,
        Call::Put,
    ] {
        let dir = tempfile::tempdir().unwrap();
        let store = FaultyStore::new(LocalStore::new(dir.path()));
        store.fail(call, denied());
        let etcd = FakeEtcd::formed(7, &["a"], |name| format!("http://{name}:2379"));
        etcd.with(|state| state.snapshot.clone_from(&whole));
        let run = transfer(
            Arc::new(etcd),
            vec!["http://a:2379".to_owned()],
            Arc::new(store.clone()),
        );
        let outcome = run.run(&Meter::default(), &CancellationToken::new()).await;
        assert_eq!(
            outcome.unwrap_err().reason,
            Reason::AccessDenied,
            "{call:?}"
        );
        // An object without a manifest does not count as a backup.
        assert_eq!(found(&store, "uid-1", long_ago()).await.unwrap(), None);
        // The next attempt succeeds.
        run.run(&Meter::default(), &CancellationToken::new())
            .await
            .unwrap();
        assert!(found(&store, "uid-1", long_ago()).await.unwrap().is_some());
    }
}

/// A member applies no writes while it computes the hash or counts its keys. With a large database, this would take
/// too long.
#[tokio::test]
async fn manifest_of_large_database_has_no_hash_and_no_number_of_keys() {
    const GIB: i64 = 1 << 30;
    let whole = recorded().await;
    for (size, hash, keys) in [
        (GIB, Some(5), Some(3)),
        (GIB + 1, None, Some(3)),
        (8 * GIB, None, Some(3)),
        (8 * GIB + 1, None, None),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let store = Arc::new(LocalStore::new(dir.path()));
        let etcd = FakeEtcd::formed(7, &["a"], |name| format!("http://{name}:2379"));
        etcd.with(|state| {
            state.snapshot.clone_from(&whole);
            state.members[0].db_size = size;
            state.hash = Some(KeyHash {
                hash: 5,
                compacted: 0,
            });
            state.keys = Some(3);
        });
        let endpoints = vec!["http://a:2379".to_owned()];
        let run = transfer(Arc::new(etcd), endpoints, store.clone());
        let none = CancellationToken::new();
        let stored = run.run(&Meter::default(), &none).await.unwrap();
        let manifest = download(store.as_ref(), &manifest_key(KEY)).await.unwrap();
        let manifest: BackupManifest = serde_json::from_slice(&manifest).unwrap();
        assert_eq!((manifest.hash, manifest.keys), (hash, keys), "{size}");
        assert_eq!(stored.keys, keys, "{size}");
    }
}

#[tokio::test]
async fn snapshot_older_than_member_status_is_rejected() {
    let whole = recorded().await;
    let dir = tempfile::tempdir().unwrap();
    let etcd = FakeEtcd::formed(7, &["a"], |name| format!("http://{name}:2379"));
    etcd.with(|state| {
        state.snapshot = whole;
        state.members[0].revision = 1000;
    });
    let store = Arc::new(LocalStore::new(dir.path()));
    let run = transfer(Arc::new(etcd), vec!["http://a:2379".to_owned()], store);
    let trouble = run
        .run(&Meter::default(), &CancellationToken::new())
        .await
        .unwrap_err();
    assert_eq!(trouble.reason, Reason::SnapshotUnreadable, "{trouble:?}");
}

#[tokio::test]
async fn backup_rejects_endpoints_of_two_clusters() {
    let programs = Programs::find("3.6");
    let other = Start {
        flags: vec!["--initial-cluster-token=other".to_owned()],
        ..Start::default()
    };
    let (one, two) = (
        EtcdProcess::start(&programs, &Start::default()).await,
        EtcdProcess::start(&programs, &other).await,
    );
    let dir = tempfile::tempdir().unwrap();
    let endpoints = vec![one.client_url.clone(), two.client_url.clone()];
    let run = transfer(client(), endpoints, Arc::new(LocalStore::new(dir.path())));
    let trouble = run
        .run(&Meter::default(), &CancellationToken::new())
        .await
        .unwrap_err();
    assert_eq!(trouble.reason, Reason::InvalidSpec, "{trouble:?}");
}

#[tokio::test]
async fn compressed_backup_has_content_of_snapshot() {
    let etcd = EtcdProcess::start(&Programs::find("3.6"), &Start::default()).await;
    fill(&etcd.client_url, 20).await;
    let server = S3Server::start(&["bucket"]);
    let mut run = transfer(client(), vec![etcd.client_url.clone()], s3(&server).await);
    run.compress = true;
    let stored = run
        .run(&Meter::default(), &CancellationToken::new())
        .await
        .unwrap();
    let compressed = download(run.store.as_ref(), KEY).await.unwrap();
    assert!(
        (compressed.len() as u64) * 4 < u64::try_from(stored.size).unwrap(),
        "{} of {} bytes",
        compressed.len(),
        stored.size
    );
    let manifest = download(run.store.as_ref(), &manifest_key(KEY))
        .await
        .unwrap();
    let manifest: BackupManifest = serde_json::from_slice(&manifest).unwrap();
    assert_eq!(manifest.compression, "zstd");
    assert_eq!(
        manifest.stored_size,
        Some(i64::try_from(compressed.len()).unwrap())
    );
    assert_eq!(
        found(run.store.as_ref(), "uid-1", long_ago())
            .await
            .unwrap(),
        Some(stored.clone())
    );
    // The decompressed content matches the checksum from etcd and the checksum in the manifest.
    let mut inspector = etcd::Inspector::new();
    let mut decompressor = store::compression::Decompressor::new().unwrap();
    let mut rest: &[u8] = &compressed;
    while let Some(piece) = decompressor.next(&mut rest).unwrap() {
        inspector.push(piece);
    }
    decompressor.finish().unwrap();
    let inspected = inspector.finish().unwrap();
    assert!(inspected.trailer);
    assert_eq!(hex::encode(inspected.sha256), stored.sha256);
    assert_eq!(inspected.store_revision(), stored.revision);
}
