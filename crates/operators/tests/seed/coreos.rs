//! Restores backups of coreos/etcd-operator. The snapshots in `e2e/fixtures/coreos` are from etcd 3.2 and 3.3. JSON
//! files next to them contain responses of the etcd that has sent the snapshot.

use std::collections::BTreeMap;
use std::path::Path;

use etcd_client::{Client, GetOptions, LeaseTimeToLiveOptions};
use k8s_openapi::ByteString;
use serde::Deserialize;

use super::*;

/// A revision after the compaction. The snapshot contains the state of all keys at this revision.
const BETWEEN: i64 = 40;
/// The revision of the compaction.
const COMPACTED: i64 = 20;

/// A key with its value and metadata, as etcd returns them.
#[derive(Debug, Default, Deserialize, PartialEq)]
#[serde(default)]
struct Stored {
    key: ByteString,
    value: ByteString,
    create_revision: i64,
    mod_revision: i64,
    version: i64,
    lease: i64,
}

/// The hash of the keys. etcd 3.2 does not support it, so all recorded hashes are from etcd 3.3.27.
#[derive(Debug, Deserialize, PartialEq)]
struct Hash {
    hash: u32,
    compact_revision: i64,
}

/// The response of one endpoint to `etcdctl endpoint hashkv`.
#[derive(Deserialize)]
struct Hashed {
    #[serde(rename = "HashKV")]
    hash: Hash,
}

#[derive(Deserialize)]
struct Hashes {
    all: [Hashed; 1],
    revision40: [Hashed; 1],
}

#[derive(Deserialize)]
struct Header {
    revision: i64,
}

#[derive(Deserialize)]
struct Answer {
    header: Header,
    kvs: Vec<Stored>,
}

#[derive(Deserialize)]
struct Lease {
    id: i64,
    #[serde(rename = "granted-ttl")]
    granted: i64,
    keys: Option<Vec<ByteString>>,
}

/// The recorded responses of the old etcd, in the format of `etcdctl -w json`.
#[derive(Deserialize)]
struct RecordedAnswers {
    all: Answer,
    revision40: Answer,
    leases: Vec<Lease>,
}

fn fixture(file: &str) -> Vec<u8> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../e2e/fixtures/coreos");
    std::fs::read(folder.join(file)).unwrap()
}

async fn keys_at(client: &Client, revision: i64) -> Vec<Stored> {
    let options = GetOptions::new().with_all_keys().with_revision(revision);
    let answer = client.kv_client().get("", Some(options)).await.unwrap();
    let keys = answer.kvs().iter().map(|pair| Stored {
        key: ByteString(pair.key().to_vec()),
        value: ByteString(pair.value().to_vec()),
        create_revision: pair.create_revision(),
        mod_revision: pair.mod_revision(),
        version: pair.version(),
        lease: pair.lease(),
    });
    keys.collect()
}

/// Each lease with its granted time to live in seconds, and its keys.
async fn leases(client: &Client) -> BTreeMap<i64, (i64, Vec<ByteString>)> {
    let list = client.lease_client().leases().await.unwrap();
    let mut leases = BTreeMap::new();
    for lease in list.leases() {
        let options = LeaseTimeToLiveOptions::new().with_keys();
        let lease_data = client
            .lease_client()
            .time_to_live(lease.id(), Some(options))
            .await
            .unwrap();
        let mut keys: Vec<_> = lease_data.keys().iter().cloned().map(ByteString).collect();
        keys.sort();
        leases.insert(lease.id(), (lease_data.granted_ttl(), keys));
    }
    leases
}

async fn hash_at(client: &Client, revision: i64) -> Hash {
    let answer = client.maintenance_client().hash_kv(revision).await.unwrap();
    Hash {
        hash: answer.hash(),
        compact_revision: answer.compact_version(),
    }
}

/// Checks that the restored etcd gives the recorded responses.
async fn check_recorded_answers(member: &Member, recorded: RecordedAnswers, hashes: Hashes) {
    let client = Client::connect([&member.client_url], None).await.unwrap();
    assert_eq!(keys_at(&client, 0).await, recorded.all.kvs);
    // The hashes `all` and `between` include all changes after the last compaction: `all` up to the revision `now`,
    // `between` up to the revision `BETWEEN`.
    let ([all], [between]) = (hashes.all, hashes.revision40);
    let now = recorded.all.header.revision;
    assert_eq!(hash_at(&client, now).await, all.hash);
    assert_eq!(hash_at(&client, BETWEEN).await, between.hash);
    // The restored etcd also has the history: at the revision `BETWEEN`, it returns earlier values, and keys that were
    // deleted later.
    let between = keys_at(&client, BETWEEN).await;
    assert_eq!(between, recorded.revision40.kvs);
    let options = GetOptions::new().with_revision(COMPACTED - 1);
    let compacted = client.kv_client().get("painted/", Some(options)).await;
    let refused = compacted.unwrap_err().to_string();
    assert!(refused.contains("compacted"), "{refused}");
    let granted = recorded.leases.into_iter().map(|lease| {
        let mut keys = lease.keys.unwrap_or_default();
        keys.sort();
        (lease.id, (lease.granted, keys))
    });
    assert_eq!(leases(&client).await, granted.collect());
    // The restored etcd continues after the revision `now`: the revocation of a lease deletes the keys of the lease in
    // one new revision.
    let key = recorded.all.kvs.iter().find(|stored| stored.lease != 0);
    let key = key.expect("a recorded key must have a lease");
    let revoked = client.lease_client().revoke(key.lease).await.unwrap();
    assert_eq!(revoked.header().unwrap().revision(), now + 1);
    let left = keys_at(&client, 0).await;
    assert!(!left.is_empty() && left.iter().all(|stored| stored.lease == 0));
}

async fn restores_backups_of_3_2_and_3_3(minor: &'static str) {
    for old in ["3.2.32", "3.3.27"] {
        let world = World::new(minor).await;
        let backup: Bytes = fixture(&format!("etcd-{old}.db")).into();
        let recorded: RecordedAnswers =
            serde_json::from_slice(&fixture(&format!("etcd-{old}.json"))).unwrap();
        let hashes = fixture(&format!("etcd-{old}.hash.json"));
        let hashes: Hashes = serde_json::from_slice(&hashes).unwrap();
        // The object name has the format of coreos/etcd-operator, and there is no manifest.
        let key = format!(
            "a/etcd.backup_v{}_2019-03-01-12:00:00",
            recorded.all.header.revision
        );
        world.put(&key, &backup).await;
        let arguments = Fetch {
            etcd_version: Some(format!("{minor}.0")),
            ..world.fetch_from(&format!("bucket/{key}"))
        };
        let fetched = Box::pin(fetch(&arguments)).await.unwrap();
        assert_eq!(fetched.revision, recorded.all.header.revision);
        let peer_url = format!("http://127.0.0.1:{}", free_port());
        let restored = prepare(&world.prepare(&peer_url)).unwrap();
        assert_eq!(restored, fetched);
        let mut member = Member::start(&world.programs, &world.data(), &peer_url);
        let status = member.serves().await;
        let status = status.unwrap_or_else(|| panic!("etcd {minor} does not start on {old}"));
        assert_eq!(status.revision, recorded.all.header.revision);
        check_recorded_answers(&member, recorded, hashes).await;
    }
}

#[tokio::test]
async fn etcd_3_4_restores_backups_of_3_2_and_3_3() {
    restores_backups_of_3_2_and_3_3("3.4").await;
}

#[tokio::test]
async fn etcd_3_5_restores_backups_of_3_2_and_3_3() {
    restores_backups_of_3_2_and_3_3("3.5").await;
}

#[tokio::test]
async fn etcd_3_6_restores_backups_of_3_2_and_3_3() {
    restores_backups_of_3_2_and_3_3("3.6").await;
}

#[tokio::test]
async fn etcd_3_7_restores_backups_of_3_2_and_3_3() {
    restores_backups_of_3_2_and_3_3("3.7").await;
}

/// One byte of a value is changed. The checksum at the end of the snapshot must detect this.
#[tokio::test]
async fn damaged_backup_of_etcd_3_2_or_3_3_is_rejected() {
    let world = World::new("3.7").await;
    for old in ["3.2.32", "3.3.27"] {
        let mut damaged = fixture(&format!("etcd-{old}.db"));
        let middle = damaged.len() / 2;
        damaged[middle] ^= 1;
        world.put("a/old", &damaged.into()).await;
        let arguments = world.fetch_from("bucket/a/old");
        world
            .refuses(&arguments, Reason::SnapshotUnreadable, "SHA-256")
            .await;
    }
}
