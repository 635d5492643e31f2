//! Tests of the restore program in the pod of a seed (the first member of a restored cluster). The S3 server, etcd and
//! the restore tools are real. If a program is missing, the tests fail with the command that installs it.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

use std::path::PathBuf;
use std::sync::Arc;

use api::manifest::manifest_key;
use bytes::Bytes;
use etcd::testing::{EtcdProcess, Programs, Start, free_port, on_path};
use etcd::{Access, Etcd, EtcdClient, KeyHash};
use futures::TryStreamExt;
use member::{DataDirectorySettings, Origin};
use restore::reason::Reason;
use restore::seed::{
    Contents, Fetch, Paths, Prepare, ReplaySource, Report, Survivor, fetch, prepare, run,
};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use store::compression::Compressor;
use store::testing::{ACCESS_KEY, S3Server, SECRET_KEY};
use store::{S3Store, Store};
use tempfile::TempDir;

#[path = "common/on_disk.rs"]
mod on_disk;

#[path = "seed/continuous.rs"]
mod continuous_point;
#[path = "seed/coreos.rs"]
mod coreos;
#[path = "seed/damaged.rs"]
mod damaged;
#[path = "seed/encrypted.rs"]
mod encrypted;
#[path = "seed/minors.rs"]
mod minors;
#[path = "seed/start.rs"]
mod start;
#[path = "seed/tool.rs"]
mod tool;

use on_disk::{Member, tool};

const KEYS: usize = 500;

/// A backup of a real cluster in a real bucket, and an empty data volume.
struct World {
    server: S3Server,
    volume: TempDir,
    secret: TempDir,
    programs: Programs,
    tool: PathBuf,
    /// The minor release of the etcd that has sent the snapshot.
    minor: &'static str,
    revision: i64,
    snapshot: Bytes,
    hash: KeyHash,
}

async fn take_snapshot(programs: &Programs) -> (Bytes, i64, KeyHash) {
    let etcd = EtcdProcess::start(programs, &Start::default()).await;
    let mut client = etcd_client::Client::connect([&etcd.client_url], None)
        .await
        .unwrap();
    for index in 0..KEYS {
        client
            .put(format!("/key/{index:05}"), format!("value {index}"), None)
            .await
            .unwrap();
    }
    // Some keys are deleted and written again, so that the compaction below removes some of their old revisions.
    for index in (0..KEYS).step_by(7) {
        let key = format!("/key/{index:05}");
        client.delete(key.as_str(), None).await.unwrap();
        let again = format!("value {index}");
        client.put(key, again, None).await.unwrap();
    }
    client.delete("/key/00001", None).await.unwrap();
    client
        .compact(i64::try_from(KEYS).unwrap(), None)
        .await
        .unwrap();
    client.put("/key/00001", "value 1", None).await.unwrap();
    let port = EtcdClient::new(Access::default());
    let revision = port.status(&etcd.client_url).await.unwrap().revision;
    let hash = port.hash(&etcd.client_url, revision).await.unwrap();
    let snapshot = port.snapshot(&etcd.client_url).await.unwrap();
    let chunks: Vec<Bytes> = snapshot.chunks.try_collect().await.unwrap();
    (chunks.concat().into(), revision, hash.unwrap())
}

impl World {
    async fn new(minor: &'static str) -> Self {
        let programs = Programs::find(minor);
        let (snapshot, revision, hash) = take_snapshot(&programs).await;
        let server = S3Server::start(&["bucket"]);
        let secret = tempfile::tempdir().unwrap();
        let credentials = format!(
            "[default]\naws_access_key_id = {ACCESS_KEY}\naws_secret_access_key = {SECRET_KEY}\n"
        );
        std::fs::write(secret.path().join("credentials"), credentials).unwrap();
        let world = Self {
            tool: tool(&programs, minor),
            volume: tempfile::tempdir().unwrap(),
            server,
            secret,
            programs,
            minor,
            revision,
            snapshot,
            hash,
        };
        world.put("a/backup", &world.snapshot).await;
        world.put_manifest(&world.manifest()).await;
        world
    }

    /// Sets the minor release of the restored cluster.
    fn set_target_minor(&mut self, minor: &str) {
        self.programs = Programs::find(minor);
        self.tool = tool(&self.programs, minor);
    }

    async fn store(&self) -> S3Store {
        S3Store::new(self.server.config("bucket")).await.unwrap()
    }

    async fn put(&self, key: &str, content: &Bytes) {
        self.store().await.put(key, content.clone()).await.unwrap();
    }

    async fn put_manifest(&self, manifest: &Value) {
        self.put(&manifest_key("a/backup"), &manifest.to_string().into())
            .await;
    }

    fn manifest(&self) -> Value {
        json!({
            "formatVersion": 1, "etcdVersion": format!("{}.16", self.minor), "clusterID": "00000000000000ab",
            "revision": self.revision,
            "size": self.snapshot.len(), "sha256": format!("{:x}", Sha256::digest(&self.snapshot)),
            "compression": "none", "createdAt": "2026-01-01T00:00:00Z", "hash": self.hash.hash,
        })
    }

    fn paths(&self) -> Paths {
        Paths {
            volume: self.volume.path().to_owned(),
            report: self.volume.path().join("report"),
        }
    }

    fn fetch_from(&self, path: &str) -> Fetch {
        let source = json!({ "s3": { "path": path, "awsSecret": "aws", "endpoint": self.server.endpoint, "forcePathStyle": true } });
        Fetch {
            source: Some(serde_json::from_value(source).unwrap()),
            survivor: Survivor::default(),
            replay: ReplaySource::default(),
            secret: Some(self.secret.path().to_owned()),
            ca: None,
            claim: None,
            encryption_secret: None,
            encryption_keys: None,
            etcd_version: None,
            sha256: None,
            meter: Arc::default(),
            bump_revision: None,
            copy_to: None,
            paths: self.paths(),
        }
    }

    fn fetch(&self) -> Fetch {
        self.fetch_from("bucket/a/backup")
    }

    /// The arguments of a fetch for a cluster with this etcd version.
    fn fetch_into(&self, version: &str) -> Fetch {
        Fetch {
            etcd_version: Some(version.to_owned()),
            ..self.fetch()
        }
    }

    fn prepare(&self, peer_url: &str) -> Prepare {
        Prepare {
            settings: DataDirectorySettings {
                tool: self.tool.clone(),
                name: "main-aaaaaaaaaa".into(),
                peer_url: peer_url.into(),
                token: "restore-uid".into(),
                bump_revision: None,
                replay: None,
            },
            etcd: self.programs.etcd.clone(),
            paths: self.paths(),
        }
    }

    fn data(&self) -> PathBuf {
        self.volume.path().join("data")
    }

    async fn refuses(&self, arguments: &Fetch, reason: Reason, says: &str) {
        let trouble = fetch(arguments).await.unwrap_err();
        assert_eq!(trouble.reason, reason, "{}", trouble.message);
        assert!(trouble.message.contains(says), "{}", trouble.message);
        assert!(!self.data().exists() && !self.volume.path().join("restore/snapshot.db").exists());
    }
}

async fn restores_all_keys(minor: &'static str) {
    restores_all_keys_into(minor, minor).await;
}

/// Restores a backup of the minor release `of` into a cluster with the minor release `minor`.
async fn restores_all_keys_into(of: &'static str, minor: &str) {
    let mut world = World::new(of).await;
    world.set_target_minor(minor);
    let arguments = world.fetch_into(&format!("{minor}.0"));
    let fetched = Box::pin(fetch(&arguments)).await.unwrap();
    assert_eq!(fetched.revision, world.revision);
    assert!(
        !world.data().exists(),
        "the data directory exists before the snapshot was verified"
    );
    let peer_url = format!("http://127.0.0.1:{}", free_port());
    let restored = prepare(&world.prepare(&peer_url)).unwrap();
    assert_eq!(restored, fetched);
    assert!(
        !world.volume.path().join("restore").exists(),
        "the snapshot is left on the volume"
    );

    let mut member = Member::start(&world.programs, &world.data(), &peer_url);
    let status = member
        .serves()
        .await
        .expect("etcd must start on the restored data directory");
    assert_eq!(status.revision, world.revision);
    // The restored etcd and the report `restored` have the hash of the keys in the backup (`world.hash`).
    let port = EtcdClient::new(Access::default());
    let found = port.hash(&member.client_url, restored.revision).await;
    assert_eq!(found.unwrap(), Some(world.hash));
    assert_eq!(restored.hash, Some(world.hash));
    for index in [0, KEYS / 2, KEYS - 1] {
        assert_eq!(
            member.value(&format!("/key/{index:05}")).await,
            Some(format!("value {index}"))
        );
    }
}

#[tokio::test]
async fn etcd_3_4_backup_is_restored_by_tool_of_same_minor() {
    restores_all_keys("3.4").await;
}

#[tokio::test]
async fn etcd_3_5_backup_is_restored_by_tool_of_same_minor() {
    restores_all_keys("3.5").await;
}

#[tokio::test]
async fn etcd_3_6_backup_is_restored_by_tool_of_same_minor() {
    restores_all_keys("3.6").await;
}

#[tokio::test]
async fn etcd_3_7_backup_is_restored_by_tool_of_same_minor() {
    restores_all_keys("3.7").await;
}

/// Invariant 6: a member that has lost its data does not start as an empty member.
#[tokio::test]
async fn invariant_6_seed_without_data_does_not_start() {
    for minor in ["3.4", "3.5", "3.6", "3.7"] {
        let (programs, empty) = (Programs::find(minor), tempfile::tempdir().unwrap());
        let peer_url = format!("http://127.0.0.1:{}", free_port());
        let mut member = Member::start(&programs, &empty.path().join("data"), &peer_url);
        assert_eq!(member.serves().await, None, "etcd {minor}");
    }
}

#[tokio::test]
async fn restarted_seed_keeps_existing_data() {
    let world = World::new("3.6").await;
    fetch(&world.fetch()).await.unwrap();
    let peer_url = format!("http://127.0.0.1:{}", free_port());
    let first = prepare(&world.prepare(&peer_url)).unwrap();
    std::fs::write(world.data().join("mark"), "live").unwrap();
    // When the pod starts again, the Secret and the backup no longer exist.
    let mut again = world.fetch_from("missing/nothing");
    again.secret = None;
    // `fetch` returns the SHA-256 of the existing data, and not `again.sha256`, so that the operator can compare the
    // existing data with the recorded backup.
    again.sha256 = Some("ab".repeat(32));
    assert_eq!(fetch(&again).await.unwrap(), first);
    assert_eq!(prepare(&world.prepare(&peer_url)).unwrap(), first);
    assert_eq!(
        std::fs::read_to_string(world.data().join("mark")).unwrap(),
        "live"
    );
}

#[tokio::test]
async fn interrupted_restore_reuses_fetched_snapshot() {
    let world = World::new("3.6").await;
    let fetched = fetch(&world.fetch()).await.unwrap();
    let half = world.volume.path().join("restore/data/member/snap");
    std::fs::create_dir_all(&half).unwrap();
    std::fs::write(half.join("db"), "half").unwrap();
    // `fetch` succeeds although the backup is deleted from the store, because the snapshot is already on the volume.
    world.store().await.delete("a/backup").await.unwrap();
    assert_eq!(fetch(&world.fetch()).await.unwrap(), fetched);
    // `fetch` also uses the snapshot on the volume if its arguments name another location with the same SHA-256.
    let mut copy = world.fetch_from("missing/nothing");
    copy.sha256 = Some(fetched.sha256.clone());
    assert_eq!(fetch(&copy).await.unwrap(), fetched);
    prepare(&world.prepare("http://127.0.0.1:1")).unwrap();
    assert!(world.data().join("member/snap/db").exists());
}

/// The node has crashed before the whole snapshot was on disk.
#[tokio::test]
async fn truncated_snapshot_is_fetched_again() {
    let world = World::new("3.6").await;
    let fetched = fetch(&world.fetch()).await.unwrap();
    let snapshot = world.volume.path().join("restore/snapshot.db");
    for left in [0, world.snapshot.len() / 2, world.snapshot.len() - 1] {
        std::fs::write(&snapshot, &world.snapshot[..left]).unwrap();
        assert_eq!(fetch(&world.fetch()).await.unwrap(), fetched);
        assert!(std::fs::read(&snapshot).unwrap() == world.snapshot);
    }
    prepare(&world.prepare("http://127.0.0.1:1")).unwrap();
}

#[tokio::test]
async fn data_directory_of_another_program_is_kept() {
    let world = World::new("3.6").await;
    std::fs::create_dir(world.data()).unwrap();
    std::fs::write(world.data().join("mark"), "another's").unwrap();
    let trouble = fetch(&world.fetch()).await.unwrap_err();
    assert_eq!(trouble.reason, Reason::SeedFailed);
    assert!(prepare(&world.prepare("http://127.0.0.1:1")).is_err());
    assert_eq!(std::fs::read_dir(world.data()).unwrap().count(), 1);
}

/// Invariant 9: without a manifest, only the location identifies a backup, so a snapshot from another location is not
/// reused. `fetch` and `prepare` return the origin of the data.
#[tokio::test]
async fn snapshot_of_other_backup_is_not_reused() {
    let world = World::new("3.6").await;
    let manifest = manifest_key("a/backup");
    world.store().await.delete(&manifest).await.unwrap();
    world.put("a/other", &world.snapshot).await;
    let other = world.fetch_from("bucket/a/other");
    let (here, there) = (fingerprint_of(&world.fetch()), fingerprint_of(&other));
    let origin = |contents: &Contents| contents.origin.clone().unwrap();
    let from = |fingerprint: &str| Origin {
        location_hash: fingerprint.to_owned(),
        bump_revision: 0,
        encrypted: Some(false),
        replayed_revision: None,
    };
    assert_eq!(origin(&fetch(&other).await.unwrap()), from(&there));
    assert_eq!(origin(&fetch(&world.fetch()).await.unwrap()), from(&here));

    let mut raised = world.prepare("http://127.0.0.1:1");
    raised.settings.bump_revision = Some(1000);
    let raised_origin = Origin {
        bump_revision: 1000,
        ..from(&here)
    };
    assert_eq!(origin(&prepare(&raised).unwrap()), raised_origin);
    // If the data directory exists, `fetch` reports the origin of the existing data, and not the origin in its
    // arguments (`other`).
    assert_eq!(origin(&fetch(&other).await.unwrap()), raised_origin);
}

fn fingerprint_of(fetch: &Fetch) -> String {
    restore::plan::choice::fingerprint(fetch.source.as_ref().unwrap())
}

#[tokio::test]
async fn seed_restores_backup_without_manifest() {
    let world = World::new("3.5").await;
    world
        .store()
        .await
        .delete(&manifest_key("a/backup"))
        .await
        .unwrap();
    assert_eq!(
        fetch(&world.fetch()).await.unwrap().revision,
        world.revision
    );
    prepare(&world.prepare("http://127.0.0.1:1")).unwrap();
}

/// Invariant 12: after decompression, the fetched snapshot equals the snapshot from etcd.
#[tokio::test]
async fn seed_fetches_compressed_backup_and_rejects_truncated_backup() {
    let world = World::new("3.6").await;
    let mut compressor = Compressor::new().unwrap();
    let mut stored = Vec::new();
    compressor
        .push(&world.snapshot, |piece| stored.extend_from_slice(piece))
        .unwrap();
    compressor
        .finish(|piece| stored.extend_from_slice(piece))
        .unwrap();
    assert!(stored.len() < world.snapshot.len());
    let mut manifest = world.manifest();
    manifest["compression"] = json!("zstd");
    manifest["storedSize"] = json!(stored.len());
    world.put_manifest(&manifest).await;
    let cut = Bytes::copy_from_slice(&stored[..stored.len() / 2]);
    world.put("a/backup", &cut).await;
    world
        .refuses(&world.fetch(), Reason::SnapshotUnreadable, "decompressed")
        .await;
    world.put("a/backup", &stored.into()).await;
    let contents = fetch(&world.fetch()).await.unwrap();
    assert_eq!(contents.revision, world.revision);
    assert_eq!(contents.size, world.snapshot.len() as u64);
    let fetched = std::fs::read(world.paths().volume.join("restore/snapshot.db")).unwrap();
    assert!(fetched == world.snapshot);
}

#[tokio::test]
async fn seed_reports_wrong_backup_location_or_secret_with_remedy() {
    let world = World::new("3.6").await;
    world
        .refuses(
            &world.fetch_from("bucket/a/other"),
            Reason::BackupMissing,
            "a/other",
        )
        .await;
    world
        .refuses(
            &world.fetch_from("nowhere/a/backup"),
            Reason::BucketMissing,
            "nowhere",
        )
        .await;
    world
        .refuses(&world.fetch_from("bucket"), Reason::InvalidSpec, "path")
        .await;
    std::fs::write(
        world.secret.path().join("credentials"),
        "[default]\naws_access_key_id = x\n",
    )
    .unwrap();
    world
        .refuses(
            &world.fetch(),
            Reason::SecretMissing,
            "aws_secret_access_key",
        )
        .await;
    std::fs::remove_file(world.secret.path().join("credentials")).unwrap();
    world
        .refuses(&world.fetch(), Reason::SecretMissing, "credentials")
        .await;
    let wrong = "[default]\naws_access_key_id = x\naws_secret_access_key = THE-SECRET\n";
    std::fs::write(world.secret.path().join("credentials"), wrong).unwrap();
    let trouble = fetch(&world.fetch()).await.unwrap_err();
    assert_eq!(trouble.reason, Reason::AccessDenied, "{}", trouble.message);
    // Invariant 14: the message contains nothing from the Secret.
    assert!(!trouble.message.contains("THE-SECRET"));
    let wrong = format!(
        "[default]\naws_access_key_id = {ACCESS_KEY}\naws_secret_access_key = THE-SECRET\n"
    );
    std::fs::write(world.secret.path().join("credentials"), wrong).unwrap();
    world
        .refuses(&world.fetch(), Reason::AccessDenied, "secret key")
        .await;
}

#[tokio::test]
async fn seed_result_is_written_to_termination_message() {
    let world = World::new("3.6").await;
    let copied = world.volume.path().join("copied");
    let mut good = world.fetch();
    good.copy_to = Some(copied.clone());
    assert!(run(&restore::seed::Command::Fetch(Box::new(good))).await);
    let report: Report =
        serde_json::from_slice(&std::fs::read(world.paths().report).unwrap()).unwrap();
    assert!(
        matches!(report, Report::Done(Contents { revision, .. }) if revision == world.revision)
    );
    assert!(
        copied.metadata().unwrap().len() > 0,
        "the program for the next container was not copied"
    );

    let empty = tempfile::tempdir().unwrap();
    let mut bad = world.fetch_from("nowhere/a/backup");
    bad.paths.volume = empty.path().to_owned();
    assert!(!run(&restore::seed::Command::Fetch(Box::new(bad))).await);
    let report: Report =
        serde_json::from_slice(&std::fs::read(world.paths().report).unwrap()).unwrap();
    assert!(matches!(report, Report::Failed { reason, .. } if reason == "BucketMissing"));
}

#[tokio::test]
async fn missing_snapshot_and_failing_restore_tool_are_reported() {
    let world = World::new("3.6").await;
    let mut arguments = world.prepare("http://127.0.0.1:1");
    let trouble = prepare(&arguments).unwrap_err();
    assert!(
        trouble.message.contains("no fetched snapshot"),
        "{}",
        trouble.message
    );
    fetch(&world.fetch()).await.unwrap();
    arguments.settings.tool = "/nowhere/etcdutl".into();
    let trouble = prepare(&arguments).unwrap_err();
    assert!(
        trouble.message.contains("/nowhere/etcdutl"),
        "{}",
        trouble.message
    );
    arguments.settings.tool = on_path("false").unwrap();
    assert_eq!(
        prepare(&arguments).unwrap_err().reason,
        Reason::SnapshotUnreadable
    );
    assert!(!world.data().exists());
}

/// A cluster without any writes can be restored.
#[tokio::test]
async fn seed_restores_backup_of_empty_cluster() {
    let mut world = World::new("3.6").await;
    let etcd = EtcdProcess::start(&world.programs, &Start::default()).await;
    let port = EtcdClient::new(Access::default());
    let snapshot = port.snapshot(&etcd.client_url).await.unwrap();
    let chunks: Vec<Bytes> = snapshot.chunks.try_collect().await.unwrap();
    world.snapshot = chunks.concat().into();
    world.revision = port.status(&etcd.client_url).await.unwrap().revision;
    world.put("a/backup", &world.snapshot).await;
    world.put_manifest(&world.manifest()).await;
    assert_eq!(fetch(&world.fetch()).await.unwrap().revision, 1);
    let peer_url = format!("http://127.0.0.1:{}", free_port());
    prepare(&world.prepare(&peer_url)).unwrap();
    let mut member = Member::start(&world.programs, &world.data(), &peer_url);
    assert_eq!(member.serves().await.expect("etcd starts").revision, 1);
}
