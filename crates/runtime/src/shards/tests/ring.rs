//! Tests of single decisions of a replica about the Leases.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use api::names::ANNOTATION_REPLICAS;
use k8s_openapi::api::coordination::v1::Lease;
use serde_json::json;

use super::super::ring::{
    Beat, DURATION, Join, RENEWAL_LIMIT, Record, Replica, Replicas, Ring, Step,
};
use super::super::{Slot, State};

const RENEWS: Beat = Beat {
    leaving: false,
    renews: true,
};
const LEAVES: Beat = Beat {
    leaving: true,
    renews: true,
};
const SECOND: Duration = Duration::from_secs(1);

fn record(name: &str, version: u32, holder: Option<&str>) -> Record {
    Record {
        name: name.to_owned(),
        version: version.to_string(),
        holder: holder.map(str::to_owned),
        replicas: Replicas::new(),
    }
}

fn slots(states: &[State]) -> Vec<Slot> {
    let slot = |state: &State| Slot {
        state: *state,
        running: 0,
    };
    states.iter().map(slot).collect()
}

fn listed(join: Join) -> Vec<String> {
    let Join::List(replicas) = join else {
        panic!("{join:?}");
    };
    replicas.into_keys().collect()
}

#[test]
fn replicas_and_holder_are_read_from_lease() {
    let lease = |list: &str| -> Lease {
        let annotations = json!({ ANNOTATION_REPLICAS: list });
        serde_json::from_value(json!({
            "metadata": { "name": "etcd-operator", "resourceVersion": "7", "annotations": annotations },
            "spec": { "holderIdentity": "shards/8" },
        }))
        .unwrap()
    };
    let found = Record::from(&lease(r#"{"a":{"beat":3,"leaving":true},"b":{"beat":1}}"#));
    assert_eq!(found.holder.as_deref(), Some("shards/8"));
    assert_eq!(found.version, "7");
    let leaving = |name: &str| found.replicas[name].leaving;
    assert!(leaving("a") && !leaving("b"));
    assert!(Record::from(&lease("damaged")).replicas.is_empty());
}

/// Invariant 40: an operator with another number of shards starts only after the Lease is free.
#[test]
fn invariant_40_replica_with_other_shard_count_waits_for_lease() {
    let (begin, none) = (Instant::now(), slots(&[State::Free; 4]));
    for holder in ["shards/8", "etcd-operator-5d8"] {
        let mut ring = Ring::new("a", "etcd-operator", 4);
        let held = record("etcd-operator", 1, Some(holder));
        assert_eq!(ring.join(&held, &none, RENEWS, begin), Join::Wait);
        // The holder has renewed the Lease (version 2), so the wait for the expiry begins again.
        let renewed = record("etcd-operator", 2, Some(holder));
        let now = begin + DURATION;
        assert_eq!(ring.join(&renewed, &none, RENEWS, now), Join::Wait);
        let last = now + DURATION.saturating_sub(SECOND);
        assert_eq!(ring.join(&renewed, &none, RENEWS, last), Join::Wait);
        let free = ring.join(&renewed, &none, RENEWS, now + DURATION);
        assert_eq!(listed(free), ["a"]);
    }
    let mut ring = Ring::new("a", "etcd-operator", 4);
    let released = record("etcd-operator", 1, None);
    let joined = ring.join(&released, &none, RENEWS, begin);
    assert_eq!(listed(joined), ["a"]);
    // A replica that holds a shard does not take the operator's Lease, even if this Lease has no holder.
    let held = slots(&[State::Held, State::Free, State::Free, State::Free]);
    assert_eq!(ring.join(&released, &held, RENEWS, begin), Join::Wait);
}

#[test]
fn replica_without_renewals_is_removed_from_list() {
    let (begin, none) = (Instant::now(), slots(&[State::Free; 2]));
    let mut ring = Ring::new("a", "etcd-operator", 2);
    let mut lease = record("etcd-operator", 1, Some("shards/2"));
    let entry = |beat| Replica {
        beat,
        leaving: false,
    };
    lease.replicas.insert("b".to_owned(), entry(1));
    lease.replicas.insert("c".to_owned(), entry(1));
    let joined = ring.join(&lease, &none, RENEWS, begin);
    assert_eq!(listed(joined), ["a", "b", "c"]);
    lease.replicas.insert("c".to_owned(), entry(2));
    let joined = ring.join(&lease, &none, RENEWS, begin + DURATION);
    assert_eq!(listed(joined), ["a", "c"]);
}

/// Invariant 40: an entry that is listed again must differ from its earlier values, because a slow replica may not have
/// seen that the entry was missing.
#[test]
fn invariant_40_entry_of_replica_never_repeats() {
    let (now, none) = (Instant::now(), slots(&[State::Free; 2]));
    let mut beats = Vec::new();
    for _ in 0..2 {
        let mut ring = Ring::new("a", "etcd-operator", 2);
        for _ in 0..3 {
            // This Lease has no entry of replica `a`.
            let lease = record("etcd-operator", 1, Some("shards/2"));
            let Join::List(replicas) = ring.join(&lease, &none, RENEWS, now) else {
                panic!("the replica is not listed");
            };
            beats.push(replicas["a"].beat);
        }
    }
    let different: BTreeSet<u64> = beats.iter().copied().collect();
    assert_eq!(different.len(), beats.len(), "{beats:?}");
}

/// Invariant 40: the replica ends before another process may take its Leases.
#[test]
fn invariant_40_replica_ends_before_its_leases_are_free() {
    let begin = Instant::now();
    let mut ring = Ring::new("a", "etcd-operator", 2);
    let held = slots(&[State::Held, State::Free]);
    assert!(
        !ring.may_hold(begin),
        "a replica without a renewal must hold no shard"
    );
    ring.renewed(begin);
    assert_eq!(ring.deadline(&held), Some(begin + RENEWAL_LIMIT));
    // If the last renewal began at least `RENEWAL_LIMIT` ago, no shard may be held.
    assert!(ring.may_hold(begin + RENEWAL_LIMIT.saturating_sub(SECOND)));
    assert!(!ring.may_hold(begin + RENEWAL_LIMIT));
    assert_eq!(ring.deadline(&slots(&[State::Free; 2])), None);
    assert!(RENEWAL_LIMIT < DURATION);
    let running = [Slot {
        state: State::Leaving,
        running: 1,
    }];
    assert_eq!(ring.deadline(&running), Some(begin + RENEWAL_LIMIT));
    assert!(!ring.must_renew(begin + SECOND));
    assert!(ring.must_renew(begin + RENEWAL_LIMIT / 2));
}

fn member(ring: &mut Ring, count: usize, others: &[&str], now: Instant) {
    let group = ring.group();
    let mut lease = record("etcd-operator", 1, Some(group.as_str()));
    for name in others {
        lease
            .replicas
            .insert((*name).to_owned(), Replica::default());
    }
    let none = slots(&vec![State::Free; count]);
    assert!(matches!(
        ring.join(&lease, &none, RENEWS, now),
        Join::List(_)
    ));
}

#[test]
fn replica_takes_free_shards_and_releases_excess() {
    let now = Instant::now();
    let mut ring = Ring::new("a", "etcd-operator", 3);
    member(&mut ring, 3, &[], now);
    let none = slots(&[State::Free; 3]);
    let take = ring.steps(&[], &none, RENEWS, now).unwrap();
    assert_eq!(take, [0, 1, 2].map(|shard| (shard, Step::Take)));

    member(&mut ring, 3, &["b"], now);
    let lease = |shard: u16, holder| record(&ring.lease_of(shard), 1, holder);
    let own = [0, 1, 2].map(|shard| lease(shard, Some("a")));
    let held = slots(&[State::Held; 3]);
    let steps = ring.steps(&own, &held, RENEWS, now).unwrap();
    assert!(steps.contains(&(2, Step::Release)), "{steps:?}");
    let steps = ring.steps(&own, &held, Beat::default(), now).unwrap();
    assert_eq!(steps, [(2, Step::Release)], "no renewal is due");
    // During the shutdown, the replica releases all shards.
    let steps = ring.steps(&own, &held, LEAVES, now).unwrap();
    assert_eq!(steps, [0, 1, 2].map(|shard| (shard, Step::Release)));
}

#[test]
fn lost_shard_ends_replica_unless_its_reconciles_have_ended() {
    let now = Instant::now();
    let mut ring = Ring::new("a", "etcd-operator", 1);
    member(&mut ring, 1, &["b"], now);
    let taken = [record("etcd-operator-shard-0", 1, Some("b"))];
    for leases in [&taken[..], &taken[1..]] {
        let lost = ring.steps(leases, &slots(&[State::Held]), RENEWS, now);
        assert_eq!(lost, Err("etcd-operator-shard-0".to_owned()));
    }
    let left = ring.steps(&taken, &slots(&[State::Leaving]), RENEWS, now);
    assert_eq!(left, Ok(vec![(0, Step::Forget)]));
}

#[test]
fn lease_of_another_replica_is_taken_only_after_expiry() {
    let now = Instant::now();
    let mut ring = Ring::new("a", "etcd-operator", 1);
    member(&mut ring, 1, &[], now);
    let (taken, none) = (
        [record("etcd-operator-shard-0", 1, Some("b"))],
        slots(&[State::Free]),
    );
    for (after, expected) in [
        (Duration::ZERO, vec![]),
        (DURATION.saturating_sub(SECOND), vec![]),
        (DURATION, vec![(0, Step::Take)]),
    ] {
        let steps = ring.steps(&taken, &none, RENEWS, now + after);
        assert_eq!(steps, Ok(expected), "{after:?}");
    }
    // A restarted container has the same replica name, so it takes its own Lease without a wait for the expiry.
    let own = [record("etcd-operator-shard-0", 2, Some("a"))];
    let steps = ring.steps(&own, &none, RENEWS, now);
    assert_eq!(steps, Ok(vec![(0, Step::Take)]));
}
