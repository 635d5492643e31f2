//! Backups of one minor version in a cluster of another.

use super::*;

#[tokio::test]
async fn etcd_3_5_takes_a_backup_of_3_4() {
    brings_every_key_into("3.4", "3.5").await;
}

#[tokio::test]
async fn etcd_3_6_takes_a_backup_of_3_5() {
    brings_every_key_into("3.5", "3.6").await;
}

#[tokio::test]
async fn etcd_3_7_takes_a_backup_of_3_6() {
    brings_every_key_into("3.6", "3.7").await;
}

/// A backup may be old: clusters go up by one minor version at a time, and what is restored need not.
#[tokio::test]
async fn etcd_3_7_takes_a_backup_of_3_4() {
    brings_every_key_into("3.4", "3.7").await;
}

/// Also where the operator has not looked before, on a claim.
#[tokio::test]
async fn a_backup_of_a_newer_minor_is_refused_before_it_is_fetched() {
    let world = World::new("3.6").await;
    // It would be missed.
    world.store().await.delete("a/backup").await.unwrap();
    for older in ["3.4.23", "3.5.35"] {
        for named in [older, "3.6.16"] {
            let into = world.fetch_into(older);
            world.refuses(&into, Reason::InvalidSpec, named).await;
        }
    }
    world.put("a/backup", &world.snapshot).await;
    // Patch releases read each other's.
    let fetched = fetch(&world.fetch_into("3.6.0")).await.unwrap();
    assert_eq!(fetched.revision, world.revision);
}
