//! Tests the restore of an exact point: a real etcd is recorded in an S3 server, and the seed restores the base and
//! replays the changes.

use std::pin::pin;
use std::time::{Duration, Instant};

use continuous::{
    Agent, Capture, EncryptedStore, End, Extras, Limits, Reader, Recorder, Settings, StoredBase,
    bases, described, read_base, take_base,
};
use etcd_client::{
    Client, CompactionOptions, DeleteOptions, GetOptions, KeyValue, LeaseTimeToLiveOptions,
    PutOptions, Txn, TxnOp,
};
use member::Replay;
use store::encryption::{Key, Keys};
use tokio::time::sleep;

use super::*;

const PREFIX: &str = "a/main.continuous/uid/";
const LEASE: i64 = 0x1234;
const TTL: i64 = 300;

/// An etcd whose changes an agent has recorded.
struct Recorded {
    world: World,
    etcd: EtcdProcess,
    base: StoredBase,
    /// The revision after each recorded request.
    revisions: Vec<i64>,
}

async fn connect(url: &str) -> Client {
    Client::connect([url], None).await.unwrap()
}

async fn revision(client: &mut Client) -> i64 {
    let answer = client.get("any", None).await.unwrap();
    answer.header().unwrap().revision()
}

/// Sends puts, deletions and transactions, some of them with a lease. Returns the revision after each request.
async fn change(client: &mut Client) -> Vec<i64> {
    let mut revisions = Vec::new();
    for index in 0..90 {
        let key = format!("/key/{:02}", index % 17);
        let value = format!("value {index}");
        match index % 6 {
            0 => {
                let lease = Some(PutOptions::new().with_lease(LEASE));
                client.put(key, value, lease).await.unwrap();
            }
            1 => {
                let first = format!("/key/{:02}", index % 13);
                let range = DeleteOptions::new().with_range("/key/15");
                client.delete(first, Some(range)).await.unwrap();
            }
            2 => {
                let operations: Vec<TxnOp> = (0..3)
                    .map(|part| TxnOp::put(format!("/txn/{part}"), value.clone(), None))
                    .chain([TxnOp::delete(key, None)])
                    .collect();
                client.txn(Txn::new().and_then(operations)).await.unwrap();
            }
            _ => {
                client.put(key, value, None).await.unwrap();
            }
        }
        revisions.push(revision(client).await);
        if index % 30 == 0 {
            // During this pause, the agent can record a hash and check leases.
            sleep(Duration::from_millis(300)).await;
        }
    }
    revisions
}

fn limits() -> Limits {
    Limits {
        interval: Duration::from_millis(100),
        ..Limits::default()
    }
}

fn extras() -> Extras {
    Extras {
        hash_interval: Some(Duration::from_millis(100)),
        lease_interval: Duration::from_millis(100),
    }
}

impl Recorded {
    async fn new(minor: &'static str) -> Self {
        let world = World::new(minor).await;
        let etcd = EtcdProcess::start(&world.programs, &Start::default()).await;
        let mut client = connect(&etcd.client_url).await;
        let with_id = etcd_client::LeaseGrantOptions::new().with_id(LEASE);
        client.lease_grant(TTL, Some(with_id)).await.unwrap();
        for index in 0..20 {
            let key = format!("/key/{index:02}");
            client.put(key, "before", None).await.unwrap();
        }
        let physical = CompactionOptions::new().with_physical();
        client.compact(10, Some(physical)).await.unwrap();
        let (port, store) = (EtcdClient::new(Access::default()), world.store().await);
        let base = take_base(&port, &etcd.client_url, &store, PREFIX)
            .await
            .unwrap();
        let recorder = Recorder::new(&base, limits());
        let mut capture = Capture::new(&port, &store, PREFIX, base.clone(), recorder, extras());
        let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
        let stopped = async {
            let _ = stopped.await;
        };
        let url = etcd.client_url.clone();
        let mut run = pin!(capture.run(&url, stopped));
        let work = async {
            let revisions = change(&mut client).await;
            let last = revisions.last().copied().unwrap();
            stored(&store, &base, last).await;
            revisions
        };
        let revisions = tokio::select! {
            end = &mut run => panic!("the capture has ended: {end:?}"),
            revisions = work => revisions,
        };
        drop(stop);
        assert_eq!(run.await.unwrap(), End::Stopped);
        Self {
            world,
            etcd,
            base,
            revisions,
        }
    }

    /// An etcd whose changes an agent records and encrypts with this key.
    async fn encrypted(minor: &'static str, key: Key) -> Self {
        let world = World::new(minor).await;
        let etcd = EtcdProcess::start(&world.programs, &Start::default()).await;
        let mut client = connect(&etcd.client_url).await;
        let with_id = etcd_client::LeaseGrantOptions::new().with_id(LEASE);
        client.lease_grant(TTL, Some(with_id)).await.unwrap();
        let (port, plain) = (EtcdClient::new(Access::default()), world.store().await);
        let (description, mut keys) = (described(&key), Keys::default());
        keys.add(key.clone());
        let store = EncryptedStore::new(&plain, key, keys);
        let settings = Settings {
            prefix: PREFIX.to_owned(),
            limits: limits(),
            extras: extras(),
            max_age: Duration::from_hours(1),
            max_bytes: u64::MAX,
            window: Duration::MAX,
            spool: None,
        };
        let members = vec![etcd.client_url.clone()];
        let mut agent = Agent::new(&port, members, &store, settings).encrypted(description);
        let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
        let stopped = async {
            let _ = stopped.await;
        };
        let mut run = pin!(agent.run(stopped));
        let work = async {
            let name = loop {
                if let Some(name) = bases(&plain, PREFIX).await.unwrap().pop() {
                    break name;
                }
                sleep(Duration::from_millis(50)).await;
            };
            let base = read_base(&plain, PREFIX, name).await.unwrap();
            let revisions = change(&mut client).await;
            let last = revisions.last().copied().unwrap();
            stored(&plain, &base, last).await;
            (base, revisions)
        };
        let (base, revisions) = tokio::select! {
            end = &mut run => panic!("the agent has ended: {end:?}"),
            done = work => done,
        };
        drop(stop);
        run.await.unwrap();
        Self {
            world,
            etcd,
            base,
            revisions,
        }
    }

    fn last(&self) -> i64 {
        self.revisions.last().copied().unwrap()
    }

    /// The arguments of the containers of a seed that restores this revision.
    fn seed(&self, revision: i64, peer_url: &str) -> (Fetch, Prepare) {
        let snapshot = &self.base.base.snapshot;
        let fetch = Fetch {
            sha256: Some(snapshot.sha256.clone()),
            replay: ReplaySource {
                replay_prefix: Some(PREFIX.to_owned()),
                replay_base: Some(self.base.name.to_string()),
                replay_revision: Some(revision),
            },
            ..self.world.fetch_from(&format!("bucket/{}", snapshot.key))
        };
        let mut prepare = self.world.prepare(peer_url);
        prepare.settings.replay = Some(Replay {
            base: self.base.name.to_string(),
            revision,
        });
        (fetch, prepare)
    }

    fn clear(&self) {
        for name in ["data", "restore"] {
            let _ = std::fs::remove_dir_all(self.world.volume.path().join(name));
        }
        let _ = std::fs::remove_file(self.world.volume.path().join("restored.json"));
    }

    /// Compares all keys, the hash of the keys and the lease of the recorded etcd at a revision with a restored member.
    async fn assert_equal(&self, member: &Member, at: i64) {
        let mut source = connect(&self.etcd.client_url).await;
        let mut restored = connect(&member.client_url).await;
        assert_eq!(revision(&mut restored).await, at);
        let expected = keys(&mut source, at).await;
        assert_eq!(keys(&mut restored, 0).await, expected, "revision {at}");
        let port = EtcdClient::new(Access::default());
        let hash = port.hash(&self.etcd.client_url, at).await.unwrap();
        assert!(hash.is_some());
        let found = port.hash(&member.client_url, at).await.unwrap();
        assert_eq!(found, hash, "hash at revision {at}");
        if expected.iter().any(|kv| kv.lease == LEASE) {
            let options = LeaseTimeToLiveOptions::new().with_keys();
            let lease = restored.lease_time_to_live(LEASE, Some(options)).await;
            let lease = lease.unwrap();
            let with_lease = expected.iter().filter(|kv| kv.lease == LEASE);
            assert_eq!(lease.granted_ttl(), TTL);
            assert_eq!(lease.keys().len(), with_lease.count());
        }
    }
}

/// All properties of a key.
#[derive(Debug, PartialEq, Eq)]
struct KeyState {
    name: Vec<u8>,
    value: Vec<u8>,
    create_revision: i64,
    mod_revision: i64,
    version: i64,
    lease: i64,
}

impl From<&KeyValue> for KeyState {
    fn from(kv: &KeyValue) -> Self {
        Self {
            name: kv.key().to_vec(),
            value: kv.value().to_vec(),
            create_revision: kv.create_revision(),
            mod_revision: kv.mod_revision(),
            version: kv.version(),
            lease: kv.lease(),
        }
    }
}

async fn keys(client: &mut Client, revision: i64) -> Vec<KeyState> {
    let options = GetOptions::new().with_all_keys().with_revision(revision);
    let answer = client.get("", Some(options)).await.unwrap();
    answer.kvs().iter().map(KeyState::from).collect()
}

/// Waits until the store has all segments up to this revision.
async fn stored(store: &S3Store, base: &StoredBase, revision: i64) {
    let end = Instant::now() + Duration::from_mins(1);
    loop {
        let reader = Reader::open(store, PREFIX, base.name).await.unwrap();
        if reader.chain().last >= revision {
            return;
        }
        assert!(Instant::now() < end, "revision {revision} is not stored");
        sleep(Duration::from_millis(50)).await;
    }
}

async fn seed_restores_exact_revisions(minor: &'static str) {
    let recorded = Box::pin(Recorded::new(minor)).await;
    let (first, last) = (recorded.base.base.revision, recorded.last());
    let some = recorded.revisions.iter().copied().step_by(17);
    let points: Vec<i64> = some.chain([first, first + 1, last]).collect();
    for at in points {
        recorded.clear();
        let peer_url = format!("http://127.0.0.1:{}", free_port());
        let (arguments, prepared) = recorded.seed(at, &peer_url);
        let fetched = Box::pin(fetch(&arguments)).await.unwrap();
        assert_eq!(fetched.revision, at);
        let origin = fetched.origin.clone().unwrap();
        assert_eq!(origin.replayed_revision, Some(at));
        let moved = arguments.meter.read();
        assert_eq!(moved.total, Some(moved.bytes));
        let restored = prepare(&prepared).unwrap();
        assert_eq!(restored, fetched);
        assert!(!recorded.world.volume.path().join("restore").exists());
        // If the containers of the seed restart, they keep the data.
        assert_eq!(Box::pin(fetch(&arguments)).await.unwrap(), fetched);
        assert_eq!(prepare(&prepared).unwrap(), fetched);
        let (programs, data) = (&recorded.world.programs, recorded.world.data());
        let mut member = Member::start(programs, &data, &peer_url);
        let status = member.serves().await;
        assert!(status.is_some(), "etcd does not start after the replay");
        recorded.assert_equal(&member, at).await;
    }
}

#[tokio::test]
async fn seed_restores_exact_revisions_of_etcd_3_5() {
    Box::pin(seed_restores_exact_revisions("3.5")).await;
}

#[tokio::test]
async fn seed_restores_exact_revisions_of_etcd_3_6() {
    Box::pin(seed_restores_exact_revisions("3.6")).await;
}

#[tokio::test]
async fn seed_restores_exact_revisions_of_etcd_3_7() {
    Box::pin(seed_restores_exact_revisions("3.7")).await;
}

/// The etcd container repeats the interrupted replay with the files on the volume, and then becomes the member. It
/// needs neither the store nor the Secret of the store.
#[tokio::test]
async fn interrupted_replay_is_repeated_from_snapshot() {
    let recorded = Box::pin(Recorded::new("3.6")).await;
    let at = recorded.revisions[40];
    let peer_url = format!("http://127.0.0.1:{}", free_port());
    let (arguments, prepared) = recorded.seed(at, &peer_url);
    Box::pin(fetch(&arguments)).await.unwrap();
    // An earlier start was interrupted, so the unfinished data directory contains only a part of the changes.
    let half = recorded
        .world
        .volume
        .path()
        .join("restore/data/member/snap");
    std::fs::create_dir_all(&half).unwrap();
    std::fs::write(half.join("db"), "half").unwrap();
    // The node has crashed while the container `fetch` wrote the segments.
    let changes = recorded.world.volume.path().join("restore/changes");
    std::fs::remove_dir_all(&changes).unwrap();
    Box::pin(fetch(&arguments)).await.unwrap();
    let listed = recorded.world.store().await.list(PREFIX).await.unwrap();
    for object in listed {
        let store = recorded.world.store().await;
        store.delete(&object.key).await.unwrap();
    }
    let program = start::program(&recorded.world, &prepared.settings);
    let mut member = Member::start_as(program, &recorded.world.data(), &peer_url);
    assert!(member.serves().await.is_some(), "the program becomes etcd");
    recorded.assert_equal(&member, at).await;
}

/// Invariant 38: the data directory of the seed gets its final name only if it has exactly the requested revision.
#[tokio::test]
async fn invariant_38_seed_with_missing_or_damaged_changes_fails() {
    let recorded = Box::pin(Recorded::new("3.6")).await;
    let at = recorded.revisions[60];
    let (arguments, prepared) = recorded.seed(at, "http://127.0.0.1:1");
    // A segment is damaged on the volume, after it was fetched.
    Box::pin(fetch(&arguments)).await.unwrap();
    let changes = recorded.world.volume.path().join("restore/changes");
    let directory = changes.join(recorded.base.name.to_string());
    let mut segments: Vec<_> = std::fs::read_dir(&directory)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .collect();
    segments.sort();
    let segment = &segments[segments.len() / 2];
    let whole = std::fs::read(segment).unwrap();
    let mut damaged = whole.clone();
    *damaged.last_mut().unwrap() ^= 1;
    std::fs::write(segment, &damaged).unwrap();
    let trouble = prepare(&prepared).unwrap_err();
    assert_eq!(trouble.reason, Reason::SnapshotUnreadable);
    let says = "spec.continuous.at";
    assert!(trouble.message.contains(says), "{}", trouble.message);
    assert!(!recorded.world.data().exists());
    // The store contains the damaged segment. Later, the segment is deleted from the store.
    let name = segment.file_name().unwrap().to_str().unwrap();
    let key = format!("{PREFIX}{}/{name}", recorded.base.name);
    let store = recorded.world.store().await;
    store.put(&key, damaged.into()).await.unwrap();
    let trouble = Box::pin(fetch(&arguments)).await.unwrap_err();
    assert_eq!(trouble.reason, Reason::SnapshotUnreadable);
    assert!(trouble.message.contains(name), "{}", trouble.message);
    store.delete(&key).await.unwrap();
    let trouble = Box::pin(fetch(&arguments)).await.unwrap_err();
    assert_eq!(trouble.reason, Reason::SnapshotUnreadable);
    assert!(trouble.message.contains("missing"), "{}", trouble.message);
    assert!(!recorded.world.data().exists());
    // When the segment is in the store again, the restore completes.
    store.put(&key, whole.into()).await.unwrap();
    Box::pin(fetch(&arguments)).await.unwrap();
    assert_eq!(prepare(&prepared).unwrap().revision, at);
}

/// The base and all segments are encrypted. The container of etcd needs no key.
#[tokio::test]
async fn seed_replays_encrypted_changes() {
    let text = "AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=";
    let key = Key::parse("2026", text.as_bytes()).unwrap();
    let id = key.id().to_string();
    let recorded = Box::pin(Recorded::encrypted("3.6", key)).await;
    let at = recorded.revisions[60];
    let peer_url = format!("http://127.0.0.1:{}", free_port());
    let (without_keys, prepared) = recorded.seed(at, &peer_url);
    let with_keys = |directory: &TempDir| Fetch {
        encryption_secret: Some("keys".to_owned()),
        encryption_keys: Some(directory.path().to_owned()),
        ..without_keys.clone()
    };
    let (right, wrong) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    std::fs::write(right.path().join("2026"), text).unwrap();
    std::fs::write(wrong.path().join("2027"), "B".repeat(42) + "A=").unwrap();
    for (arguments, reason) in [
        (without_keys.clone(), Reason::InvalidSpec),
        (with_keys(&wrong), Reason::SecretMissing),
    ] {
        let trouble = Box::pin(fetch(&arguments)).await.unwrap_err();
        assert_eq!(trouble.reason, reason, "{}", trouble.message);
        assert!(trouble.message.contains(&id), "{}", trouble.message);
    }
    let arguments = with_keys(&right);
    let fetched = Box::pin(fetch(&arguments)).await.unwrap();
    assert_eq!(fetched.revision, at);
    let moved = arguments.meter.read();
    assert_eq!(moved.total, Some(moved.bytes));
    assert_eq!(prepare(&prepared).unwrap(), fetched);
    let (programs, data) = (&recorded.world.programs, recorded.world.data());
    let mut member = Member::start(programs, &data, &peer_url);
    assert!(member.serves().await.is_some(), "etcd does not start");
    recorded.assert_equal(&member, at).await;
}
