//! Tests that the seed restores encrypted backups, and rejects a backup without encryption if keys are given.

use store::encryption::{Encryptor, FORMAT, Key};

use super::*;

const FIRST: &str = "AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=";

fn second() -> String {
    "B".repeat(42) + "A="
}

fn key(name: &str, text: &str) -> Key {
    Key::parse(name, text.as_bytes()).unwrap()
}

fn encrypted(content: &[u8], key: &Key) -> Bytes {
    let mut object = Vec::new();
    let mut encryptor = Encryptor::new(key).unwrap();
    encryptor.push(content, &mut object).unwrap();
    encryptor.finish(&mut object).unwrap();
    object.into()
}

fn compressed(content: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    let mut compressor = Compressor::new().unwrap();
    compressor
        .push(content, |piece| out.extend_from_slice(piece))
        .unwrap();
    compressor
        .finish(|piece| out.extend_from_slice(piece))
        .unwrap();
    out
}

/// A mounted Secret with these keys.
fn mounted(keys: &[(&str, &str)]) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    for (name, text) in keys {
        std::fs::write(folder.path().join(name), text).unwrap();
    }
    folder
}

impl World {
    /// Stores the snapshot, encrypted with this key, and its manifest.
    async fn encrypt(&self, compress: bool, key: &Key) {
        let content = if compress {
            compressed(&self.snapshot)
        } else {
            self.snapshot.to_vec()
        };
        let object = encrypted(&content, key);
        self.put("a/backup", &object).await;
        let mut manifest = self.manifest();
        manifest["compression"] = json!(if compress { "zstd" } else { "none" });
        manifest["storedSize"] = json!(object.len());
        let key = json!({ "name": key.name(), "id": key.id().to_string() });
        manifest["encryption"] = json!({ "format": FORMAT, "key": key });
        self.put_manifest(&manifest).await;
    }

    fn fetch_with(&self, keys: &TempDir) -> Fetch {
        Fetch {
            encryption_secret: Some("keys".to_owned()),
            encryption_keys: Some(keys.path().to_owned()),
            ..self.fetch()
        }
    }
}

/// The Secret contains an old and a new key, so backups with either key can be restored.
#[tokio::test]
async fn seed_selects_decryption_key_by_key_id() {
    let (old, new) = (FIRST.to_owned(), second());
    let keys = mounted(&[("2026", &old), ("2027", &new), ("notes", "text")]);
    for (name, text, compress) in [("2026", &old, true), ("2027", &new, false)] {
        let world = World::new("3.6").await;
        world.encrypt(compress, &key(name, text)).await;
        let arguments = world.fetch_with(&keys);
        let fetched = Box::pin(fetch(&arguments)).await.unwrap();
        assert_eq!(fetched.revision, world.revision);
        assert_eq!(fetched.size, world.snapshot.len() as u64);
        let peer_url = format!("http://127.0.0.1:{}", free_port());
        let restored = prepare(&world.prepare(&peer_url)).unwrap();
        assert_eq!(restored, fetched);
        // If the manifest is missing, `fetch` reads the ID of the key from the header of the object.
        let manifest = manifest_key("a/backup");
        world.store().await.delete(&manifest).await.unwrap();
        std::fs::remove_dir_all(world.data()).unwrap();
        let again = Box::pin(fetch(&arguments)).await.unwrap();
        assert_eq!(again.sha256, fetched.sha256);
    }
}

#[tokio::test]
async fn seed_reports_id_of_missing_decryption_key() {
    let world = World::new("3.6").await;
    let used = key("2026", FIRST);
    world.encrypt(false, &used).await;
    let id = used.id().to_string();
    let (wrong, empty) = (mounted(&[("2027", &second())]), mounted(&[]));
    for keys in [&wrong, &empty] {
        let arguments = world.fetch_with(keys);
        world.refuses(&arguments, Reason::SecretMissing, &id).await;
    }
    world
        .refuses(&world.fetch(), Reason::InvalidSpec, &id)
        .await;
}

/// An attacker with write access to the bucket can replace the backup and its manifest. The seed rejects the backup
/// with every kind of manifest.
#[tokio::test]
async fn seed_rejects_unencrypted_backup_if_keys_are_given() {
    let world = World::new("3.6").await;
    let keys = mounted(&[("2026", FIRST)]);
    let arguments = world.fetch_with(&keys);
    let (reason, says) = (Reason::SnapshotUnreadable, "is not encrypted");
    world.refuses(&arguments, reason, says).await;
    let mut manifest = world.manifest();
    let id = key("2026", FIRST).id().to_string();
    manifest["encryption"] = json!({ "format": FORMAT, "key": { "name": "2026", "id": id } });
    world.put_manifest(&manifest).await;
    world.refuses(&arguments, reason, says).await;
    world
        .store()
        .await
        .delete(&manifest_key("a/backup"))
        .await
        .unwrap();
    world.refuses(&arguments, reason, says).await;
}

#[tokio::test]
async fn seed_rejects_damaged_encrypted_backup_and_unknown_format() {
    let world = World::new("3.6").await;
    let keys = mounted(&[("2026", FIRST)]);
    let arguments = world.fetch_with(&keys);
    world.encrypt(false, &key("2026", FIRST)).await;
    let whole = store::testing::download(&world.store().await, "a/backup")
        .await
        .unwrap();
    let mut flipped = whole.to_vec();
    flipped[30_000] ^= 1;
    let unreadable = Reason::SnapshotUnreadable;
    for damaged in [
        flipped.into(),
        whole.slice(..whole.len() - 1),
        whole.slice(..20),
    ] {
        world.put("a/backup", &damaged).await;
        world.refuses(&arguments, unreadable, "encrypted").await;
    }
    let mut manifest = world.manifest();
    manifest["encryption"] = json!({ "format": "rot13", "key": { "name": "2026", "id": "ab" } });
    world.put_manifest(&manifest).await;
    world
        .refuses(&arguments, Reason::NotSupported, "rot13")
        .await;
}

/// Invariant 34: an earlier pod without keys may have left a backup without encryption on the volume.
#[tokio::test]
async fn snapshot_without_encryption_is_not_reused_if_keys_are_given() {
    let world = World::new("3.6").await;
    let encrypted = |contents: &Contents| contents.origin.as_ref().unwrap().encrypted;
    let plain = Box::pin(fetch(&world.fetch())).await.unwrap();
    assert_eq!(encrypted(&plain), Some(false));
    let keys = mounted(&[("2026", FIRST)]);
    let with_sha256 = Fetch {
        sha256: Some(plain.sha256.clone()),
        ..world.fetch_with(&keys)
    };
    for arguments in [&with_sha256, &world.fetch_with(&keys)] {
        let trouble = Box::pin(fetch(arguments)).await.unwrap_err();
        assert_eq!(trouble.reason, Reason::SnapshotUnreadable);
        let says = "is not encrypted";
        assert!(trouble.message.contains(says), "{}", trouble.message);
    }
    world.encrypt(false, &key("2026", FIRST)).await;
    let fetched = Box::pin(fetch(&with_sha256)).await.unwrap();
    assert_eq!(encrypted(&fetched), Some(true));
    assert_eq!(fetched.sha256, plain.sha256);
    // `fetch` keeps the data directory that `prepare` has created, and reports the origin of its data, so that the
    // operator can compare the origin with the recorded backup.
    let prepared = prepare(&world.prepare("http://127.0.0.1:1")).unwrap();
    assert_eq!(encrypted(&prepared), Some(true));
    let reported = Box::pin(fetch(&world.fetch())).await.unwrap();
    assert_eq!(encrypted(&reported), Some(true));
}
