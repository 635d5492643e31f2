//! Encrypted backups: the stored object contains no plaintext, and decrypts to the snapshot from etcd.

use store::encryption::{FORMAT, Key, Keys, is_encrypted};
use store::unpack::Unpacker;

use super::*;

const MARK: &str = "a value that must not occur in the store";

fn key() -> Key {
    let text = b"AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=";
    Key::parse("2026", text).unwrap()
}

fn unpacked(object: Bytes) -> Vec<u8> {
    let mut keys = Keys::default();
    keys.add(key());
    let mut unpacker = Unpacker::new(Some(keys));
    let mut snapshot = Vec::new();
    unpacker.push(object).unwrap();
    while let Some(piece) = unpacker.piece().unwrap() {
        snapshot.extend_from_slice(&piece);
    }
    unpacker.end().unwrap();
    while let Some(piece) = unpacker.piece().unwrap() {
        snapshot.extend_from_slice(&piece);
    }
    unpacker.finish().unwrap();
    snapshot
}

fn occurs(text: &str, bytes: &[u8]) -> bool {
    bytes
        .windows(text.len())
        .any(|window| window == text.as_bytes())
}

async fn manifest_at(store: &dyn Store) -> BackupManifest {
    let text = download(store, &manifest_key(KEY)).await.unwrap();
    serde_json::from_slice(&text).unwrap()
}

#[tokio::test]
async fn encrypted_backup_contains_no_plaintext_and_is_restorable() {
    let programs = Programs::find("3.6");
    let etcd = EtcdProcess::start(&programs, &Start::default()).await;
    let server = S3Server::start(&["bucket"]);
    let mut client_of_etcd = etcd_client::Client::connect([&etcd.client_url], None)
        .await
        .unwrap();
    client_of_etcd.put("secret", MARK, None).await.unwrap();
    // The database is so large that the upload has several parts.
    let revision = fill(&etcd.client_url, 20).await;
    let plain = transfer(client(), vec![etcd.client_url.clone()], s3(&server).await);
    let none = CancellationToken::new();
    plain.run(&Meter::default(), &none).await.unwrap();
    let object = download(plain.store.as_ref(), KEY).await.unwrap();
    assert!(
        occurs(MARK, &object),
        "the value must occur in an object that is not encrypted"
    );
    for compress in [false, true] {
        let run = Transfer {
            compress,
            encryption: Some(key()),
            ..plain.clone()
        };
        let stored = run.run(&Meter::default(), &none).await.unwrap();
        let recorded = stored.encryption_key.unwrap();
        assert_eq!(
            (recorded.name.as_str(), recorded.id),
            ("2026", key().id().to_string())
        );
        let object = download(run.store.as_ref(), KEY).await.unwrap();
        assert!(is_encrypted(&object));
        assert!(!occurs(MARK, &object) && !occurs("secret", &object));
        let manifest = manifest_at(run.store.as_ref()).await;
        assert_eq!(i64::try_from(object.len()).ok(), manifest.stored_size);
        assert_eq!(manifest.encryption.unwrap().format, FORMAT);
        let sum = Command::new("sha256sum")
            .arg(server.bucket_dir("bucket").join(KEY))
            .output()
            .unwrap();
        let sum = String::from_utf8_lossy(&sum.stdout).into_owned();
        assert!(sum.starts_with(&manifest.stored_sha256.unwrap()), "{sum}");
        let snapshot = unpacked(object);
        assert_eq!(i64::try_from(snapshot.len()).unwrap(), manifest.size);
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), &snapshot).unwrap();
        let (again, value) = restored(&programs, file.path(), "secret").await;
        assert_eq!((again, value.as_slice()), (revision, MARK.as_bytes()));
    }
}

/// The spec may change between two attempts, or another writer may replace the backup.
#[tokio::test]
async fn unencrypted_backup_is_not_adopted_if_spec_requires_encryption() {
    let snapshot = recorded().await;
    let none = CancellationToken::new();
    for encryption in [None, Some(key())] {
        // A directory has no ETags, so the adoption compares the checksum of the whole stored object. The adoption
        // needs no key, because the manifest contains the checksum of the encrypted object.
        let dir = tempfile::tempdir().unwrap();
        let store = Arc::new(LocalStore::new(dir.path()));
        let etcd = FakeEtcd::formed(7, &["a"], |name| format!("http://{name}:2379"));
        etcd.with(|state| state.snapshot.clone_from(&snapshot));
        let urls = vec!["http://a:2379".to_owned()];
        let run = Transfer {
            encryption: encryption.clone(),
            ..transfer(Arc::new(etcd), urls, store.clone())
        };
        let stored = run.run(&Meter::default(), &none).await.unwrap();
        let find = async |encrypted| {
            let owner = Owner {
                encrypted,
                ..owner("uid-1")
            };
            let name = ObjectName::Exact(KEY.to_owned());
            let found = earlier_attempt(store.as_ref(), name, owner, long_ago()).await;
            match found.unwrap() {
                EarlierAttempt::Complete(found) => Some(found),
                EarlierAttempt::Incomplete(_) => None,
            }
        };
        assert_eq!(find(encryption.is_some()).await, Some(stored));
        assert_eq!(find(encryption.is_none()).await, None);
        let mut damaged = download(store.as_ref(), KEY).await.unwrap().to_vec();
        let middle = damaged.len() / 2;
        damaged[middle] ^= 1;
        store.put(KEY, damaged.into()).await.unwrap();
        assert_eq!(find(encryption.is_some()).await, None);
    }
}
