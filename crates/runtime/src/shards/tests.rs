//! Tests of the shards without an API server. `tests/api_server/shards.rs` uses a real API server.

mod model;
mod ring;

use futures::FutureExt;
use k8s_openapi::api::core::v1::ConfigMap;
use kube::core::ObjectMeta;

use super::*;

/// Replicas of different releases run concurrently during an upgrade. If they disagreed about the shard of a cluster,
/// two replicas could reconcile the cluster.
#[test]
fn invariant_40_shard_of_object_never_changes() {
    for (namespace, name, expected) in [
        ("prod", "db", [0, 1, 7, 55]),
        ("team-a", "main", [0, 0, 0, 16]),
    ] {
        let found = [1, 2, 8, 64].map(|count| Shards::divided(count).of(namespace, name));
        assert_eq!(found, expected, "{namespace}/{name}");
    }
}

#[test]
fn objects_are_spread_evenly_over_shards() {
    for (count, least, most) in [(2, 450, 550), (3, 290, 380), (8, 100, 150)] {
        let shards = Shards::divided(count);
        let mut found = vec![0; usize::from(count)];
        for number in 0..1000 {
            found[usize::from(shards.of("prod", &format!("db-{number}")))] += 1;
        }
        assert!(
            found.iter().all(|one| (least..=most).contains(one)),
            "{found:?}"
        );
    }
}

#[test]
fn undivided_operator_holds_every_object() {
    let shards = Shards::undivided();
    assert!(shards.enter("prod", "db").is_some());
    assert!(shards.acquisitions().is_none());
    let object = ConfigMap {
        metadata: ObjectMeta {
            name: Some("db".to_owned()),
            namespace: Some("prod".to_owned()),
            ..ObjectMeta::default()
        },
        ..ConfigMap::default()
    };
    assert!(shards.holds(&object));
}

#[test]
fn invariant_40_leaving_shard_waits_for_running_reconcile() {
    let shards = Shards::divided(8);
    let shard = shards.of("prod", "db");
    assert!(shards.enter("prod", "db").is_none());
    shards.hold(shard);
    let running = shards.enter("prod", "db").unwrap();
    let another = shards.enter("prod", "db").unwrap();
    assert!(!shards.leave(shard));
    assert!(
        shards.enter("prod", "db").is_none(),
        "a leaving shard must start no reconcile"
    );
    drop(running);
    assert!(!shards.leave(shard));
    assert!(shards.idle().now_or_never().is_none());
    drop(another);
    assert!(shards.idle().now_or_never().is_some());
    assert!(shards.leave(shard));
    shards.free(shard);
    assert!(shards.all().iter().all(|slot| !slot.needs_lease()));
}

#[test]
fn each_shard_acquisition_is_reported_once_to_each_controller() {
    let shards = Shards::divided(8);
    drop(shards.acquisitions());
    let mut all = [
        shards.acquisitions().unwrap(),
        shards.acquisitions().unwrap(),
    ];
    shards.hold(3);
    shards.hold(3);
    shards.leave(3);
    shards.hold(3);
    for acquired in &mut all {
        assert_eq!(acquired.try_recv().ok(), Some(3));
        assert_eq!(
            acquired.try_recv().ok(),
            Some(3),
            "a shard that was leaving must be reported again"
        );
        assert!(acquired.try_recv().is_err());
    }
}

/// The controllers of users and roles start later than the controller of clusters, because they wait for their CRDs.
#[test]
fn held_shard_is_reported_to_controller_that_starts_later() {
    let shards = Shards::divided(8);
    for shard in [2, 3, 4] {
        shards.hold(shard);
    }
    shards.leave(4);
    let mut acquired = shards.acquisitions().unwrap();
    let received = [acquired.try_recv().ok(), acquired.try_recv().ok()];
    assert_eq!(received, [Some(2), Some(3)]);
    assert!(acquired.try_recv().is_err());
}
