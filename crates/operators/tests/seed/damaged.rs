//! Tests that the seed rejects damaged backups, and backups that are not the chosen backup.

use super::*;

/// Invariant 9: the seed creates no data directory from a backup that differs from the snapshot of etcd.
#[tokio::test]
async fn seed_rejects_damaged_backup() {
    let world = World::new("3.6").await;
    let mut damaged = world.snapshot.to_vec();
    damaged[20_000] ^= 1;
    world.put("a/backup", &damaged.into()).await;
    world
        .refuses(&world.fetch(), Reason::SnapshotUnreadable, "SHA-256")
        .await;
    let cut = world.snapshot.slice(..world.snapshot.len() - 4096);
    world.put("a/backup", &cut).await;
    world
        .refuses(&world.fetch(), Reason::SnapshotUnreadable, "another backup")
        .await;
    // `bare` has no checksum at its end, like a database file that was copied from the disk of a member.
    let bare = world.snapshot.slice(..world.snapshot.len() - 32);
    world.put("a/backup", &bare).await;
    world
        .refuses(&world.fetch(), Reason::SnapshotUnreadable, "checksum")
        .await;
    world
        .put("a/backup", &Bytes::from_static(b"not a database"))
        .await;
    world
        .refuses(&world.fetch(), Reason::SnapshotUnreadable, "another backup")
        .await;
}

#[tokio::test]
async fn seed_rejects_snapshot_damaged_on_volume() {
    let world = World::new("3.6").await;
    fetch(&world.fetch()).await.unwrap();
    let snapshot = world.volume.path().join("restore/snapshot.db");
    let mut bytes = std::fs::read(&snapshot).unwrap();
    bytes[20_000] ^= 1;
    std::fs::write(&snapshot, bytes).unwrap();
    let trouble = prepare(&world.prepare("http://127.0.0.1:1")).unwrap_err();
    assert_eq!(trouble.reason, Reason::SnapshotUnreadable);
    assert!(!world.data().exists());
}

#[tokio::test]
async fn seed_rejects_backup_that_contradicts_its_manifest() {
    let world = World::new("3.6").await;
    for (field, value, says) in [
        ("sha256", json!("ab".repeat(32)), "SHA-256"),
        ("revision", json!(world.revision + 1), "revision"),
        ("revision", json!(world.revision - 1), "revision"),
        ("size", json!(1), "bytes"),
    ] {
        let mut manifest = world.manifest();
        manifest[field] = value;
        world.put_manifest(&manifest).await;
        world
            .refuses(&world.fetch(), Reason::SnapshotUnreadable, says)
            .await;
    }
    let mut compressed = world.manifest();
    compressed["compression"] = json!("lz4");
    world.put_manifest(&compressed).await;
    world
        .refuses(&world.fetch(), Reason::NotSupported, "lz4")
        .await;
    world
        .put(&manifest_key("a/backup"), &Bytes::from_static(b"{garbage"))
        .await;
    world
        .refuses(&world.fetch(), Reason::SnapshotUnreadable, "manifest")
        .await;
}

/// Invariant 9: a complete backup that is not the chosen backup is rejected, with or without a manifest.
#[tokio::test]
async fn seed_rejects_backup_that_overwrote_chosen_backup() {
    let world = World::new("3.6").await;
    world.put_manifest(&world.manifest()).await;
    let right = world.manifest()["sha256"].as_str().map(str::to_owned);
    let chosen = |sha256: Option<String>| Fetch {
        sha256,
        ..world.fetch()
    };
    let (right, another) = (chosen(right), chosen(Some("ab".repeat(32))));
    let (unreadable, why) = (Reason::SnapshotUnreadable, "overwritten");
    world.refuses(&another, unreadable, why).await;
    let manifest = manifest_key("a/backup");
    world.store().await.delete(&manifest).await.unwrap();
    world.refuses(&another, unreadable, why).await;
    // `fetch` compares the SHA-256 even if the snapshot is already on the volume.
    let fetched = fetch(&right).await.unwrap();
    assert_eq!(fetch(&another).await.unwrap_err().reason, unreadable);
    assert_eq!(fetch(&world.fetch()).await.unwrap(), fetched);
}
