//! Restores backups of one minor release of etcd into clusters of a later minor release.

use super::*;

#[tokio::test]
async fn etcd_3_5_restores_backup_of_3_4() {
    restores_all_keys_into("3.4", "3.5").await;
}

#[tokio::test]
async fn etcd_3_6_restores_backup_of_3_5() {
    restores_all_keys_into("3.5", "3.6").await;
}

#[tokio::test]
async fn etcd_3_7_restores_backup_of_3_6() {
    restores_all_keys_into("3.6", "3.7").await;
}

/// Unlike an upgrade, a restore can skip minor releases.
#[tokio::test]
async fn etcd_3_7_restores_backup_of_3_4() {
    restores_all_keys_into("3.4", "3.7").await;
}

/// The operator cannot read the manifest on a PersistentVolumeClaim, so the seed checks the version too.
#[tokio::test]
async fn backup_of_newer_minor_is_rejected_before_fetch() {
    let world = World::new("3.6").await;
    // The backup is deleted, so a download would fail with another error than `InvalidSpec`.
    world.store().await.delete("a/backup").await.unwrap();
    for older in ["3.4.23", "3.5.35"] {
        for named in [older, "3.6.16"] {
            let into = world.fetch_into(older);
            world.refuses(&into, Reason::InvalidSpec, named).await;
        }
    }
    world.put("a/backup", &world.snapshot).await;
    // The backup is from a later patch release than 3.6.0. It is accepted, because all patch releases of a minor
    // release can read the same data.
    let fetched = fetch(&world.fetch_into("3.6.0")).await.unwrap();
    assert_eq!(fetched.revision, world.revision);
}
