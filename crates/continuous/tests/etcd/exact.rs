//! A replay must reproduce every recorded revision exactly.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use continuous::{Options, Reader, ReplayError, Report, StoredBase, Target, Until, bases, replay};
use etcd::testing::EtcdProcess;
use etcd_client::{Client, CompactionOptions, LeaseTimeToLiveOptions, PutOptions};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use tokio::time::sleep;

use crate::history::History;
use crate::lab::{Lab, PREFIX, client, extras, hash, keys, now_micros, revision};

async fn replayed(
    lab: &Lab,
    base: &StoredBase,
    target: &EtcdProcess,
    options: Options,
) -> Result<Report, ReplayError> {
    let mut reader = Reader::open(&lab.store, PREFIX, base.name).await.unwrap();
    let target = Target::connect(&target.client_url, None).await.unwrap();
    replay(&mut reader, &target, options).await
}

fn until(until: Until) -> Options {
    Options {
        until,
        follow_compactions: false,
    }
}

/// Compares the keys and leases of the recorded etcd at a revision with those of the target.
async fn assert_equal(source: &mut Client, target: &mut Client, at: i64) {
    let (expected, found) = (keys(source, at).await, keys(target, 0).await);
    assert_eq!(found.len(), expected.len(), "number of keys at {at}");
    for (found, expected) in found.iter().zip(&expected) {
        let properties = |kv: &etcd_client::KeyValue| {
            (
                kv.key().to_vec(),
                kv.create_revision(),
                kv.mod_revision(),
                kv.version(),
                kv.lease(),
            )
        };
        assert_eq!(properties(found), properties(expected), "at {at}");
        assert!(found.value() == expected.value(), "{:?}", found.key());
    }
    let mut leases: BTreeMap<i64, BTreeSet<Vec<u8>>> = BTreeMap::new();
    for kv in expected.iter().filter(|kv| kv.lease() != 0) {
        let keys = leases.entry(kv.lease()).or_default();
        keys.insert(kv.key().to_vec());
    }
    for (id, keys) in leases {
        let options = LeaseTimeToLiveOptions::new().with_keys();
        let found = target.lease_time_to_live(id, Some(options.clone())).await;
        let found = found.unwrap();
        let attached: BTreeSet<Vec<u8>> = found.keys().iter().cloned().collect();
        assert_eq!(attached, keys, "keys of lease {id:x} at {at}");
        let original = source.lease_time_to_live(id, Some(options)).await.unwrap();
        if original.ttl() >= 0 {
            assert_eq!(found.granted_ttl(), original.granted_ttl());
        }
    }
}

/// A base with compacted revisions, leases and deleted keys.
async fn prepared_base(lab: &Lab, history: &mut History) -> StoredBase {
    let mut client = lab.client().await;
    history.grant(400).await;
    for _ in 0..60 {
        history.step().await;
    }
    let compacted = revision(&mut client).await - 20;
    let physical = CompactionOptions::new().with_physical();
    client.compact(compacted, Some(physical)).await.unwrap();
    for _ in 0..10 {
        history.step().await;
    }
    lab.base().await
}

async fn reproduces_every_revision(minor: &str, seed: u64) {
    let lab = Lab::new(minor).await;
    let mut rng = StdRng::seed_from_u64(seed);
    let mut history = History::new(lab.client().await, StdRng::seed_from_u64(seed));
    let base = prepared_base(&lab, &mut history).await;
    let mut source = lab.client().await;
    let mut revisions = vec![base.base.revision];
    lab.record(&base, extras(), async {
        for step in 0..400 {
            revisions.push(history.step().await);
            match step {
                100 => history.large_values().await,
                200 => history.large_deletion().await,
                300 => history.expiring_lease().await,
                _ => {}
            }
        }
    })
    .await;
    let last = revision(&mut source).await;

    let target = lab.restore(&base).await;
    let report = replayed(&lab, &base, &target, until(Until::Latest)).await;
    let report = report.unwrap();
    assert_eq!(report.revision, last, "{minor}");
    let replayed_revisions = u64::try_from(last - base.base.revision).unwrap();
    assert_eq!(report.transactions, replayed_revisions);
    assert!(report.hashes_compared > 0, "{report:?}");
    assert_eq!(report.hashes_skipped, 0, "{report:?}");
    let mut restored = client(&target).await;
    for _ in 0..20 {
        let at = revisions[rng.random_range(0..revisions.len())];
        let expected = hash(&mut source, at).await;
        assert_eq!(hash(&mut restored, at).await, expected, "{minor} at {at}");
    }
    assert_equal(&mut source, &mut restored, last).await;

    for _ in 0..3 {
        let at = revisions[rng.random_range(0..revisions.len())];
        let target = lab.restore(&base).await;
        let report = replayed(&lab, &base, &target, until(Until::Revision(at))).await;
        assert_eq!(report.unwrap().revision, at);
        let mut restored = client(&target).await;
        assert_eq!(revision(&mut restored).await, at, "{minor}");
        assert_equal(&mut source, &mut restored, at).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn replay_reproduces_every_revision_of_etcd_3_5() {
    reproduces_every_revision("3.5", 35).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn replay_reproduces_every_revision_of_etcd_3_6() {
    reproduces_every_revision("3.6", 36).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn replay_reproduces_every_revision_of_etcd_3_7() {
    reproduces_every_revision("3.7", 37).await;
}

/// The recorded etcd is compacted during the recording, like the etcd of an API server.
#[tokio::test(flavor = "multi_thread")]
async fn hashes_are_compared_after_recorded_compactions() {
    let lab = Lab::new("3.6").await;
    let mut history = History::new(lab.client().await, StdRng::seed_from_u64(1));
    let base = prepared_base(&lab, &mut history).await;
    let mut source = lab.client().await;
    lab.record(&base, extras(), async {
        let mut source = lab.client().await;
        for _ in 0..6 {
            for _ in 0..30 {
                history.step().await;
            }
            // The compaction causes no gap, because the store already contains all changes before it.
            let at = revision(&mut source).await;
            crate::lab::stored(&lab.store, base.name, at).await;
            source.compact(at - 1, None).await.unwrap();
        }
    })
    .await;
    let last = revision(&mut source).await;
    for follow_compactions in [false, true] {
        let target = lab.restore(&base).await;
        let options = Options {
            until: Until::Latest,
            follow_compactions,
        };
        let report = replayed(&lab, &base, &target, options).await.unwrap();
        assert_eq!(report.revision, last);
        let mut restored = client(&target).await;
        assert_equal(&mut source, &mut restored, last).await;
        if follow_compactions {
            assert!(report.hashes_compared > 1, "{report:?}");
            let physical = CompactionOptions::new().with_physical();
            let _ = source.compact(last - 1, Some(physical)).await;
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn replay_ends_at_requested_time() {
    let lab = Lab::new("3.6").await;
    let base = lab.base().await;
    let mut source = lab.client().await;
    let mut times = Vec::new();
    lab.record(&base, extras(), async {
        let mut source = lab.client().await;
        for index in 0..5 {
            source.put("key", index.to_string(), None).await.unwrap();
            let at = revision(&mut source).await;
            // `stored` waits until the store contains this revision, so the time in its record is before `now_micros`
            // below.
            crate::lab::stored(&lab.store, base.name, at).await;
            times.push((now_micros(), at));
        }
    })
    .await;
    for (time, expected) in times {
        let target = lab.restore(&base).await;
        let report = replayed(&lab, &base, &target, until(Until::Time(time))).await;
        assert_eq!(report.unwrap().revision, expected);
        assert_equal(&mut source, &mut client(&target).await, expected).await;
    }
    let target = lab.restore(&base).await;
    let before = Until::Time(base.base.created - 1);
    let error = replayed(&lab, &base, &target, until(before)).await;
    assert!(matches!(error, Err(ReplayError::BeforeBase)));
    assert_eq!(bases(&lab.store, PREFIX).await.unwrap(), [base.name]);
}

/// If a lease expired during a replay, etcd would delete its keys and use a revision.
#[tokio::test(flavor = "multi_thread")]
async fn leases_with_short_ttl_survive_long_replay() {
    let lab = Lab::new("3.6").await;
    let mut history = History::new(lab.client().await, StdRng::seed_from_u64(2));
    let lease = history.grant(5).await;
    let mut source = lab.client().await;
    let (mut keeper, _answers) = source.lease_keep_alive(lease).await.unwrap();
    let keep_alive = tokio::spawn(async move {
        while keeper.keep_alive().await.is_ok() {
            sleep(Duration::from_millis(500)).await;
        }
    });
    let with_lease = || Some(PutOptions::new().with_lease(lease));
    source.put("a", "", with_lease()).await.unwrap();
    let base = lab.base().await;
    let last = lab
        .record(&base, extras(), async {
            let mut source = lab.client().await;
            source.put("b", "", with_lease()).await.unwrap();
            source.put("c", "", None).await.unwrap();
            revision(&mut source).await
        })
        .await;
    keep_alive.abort();
    let target = lab.restore(&base).await;
    let mut reader = Reader::open(&lab.store, PREFIX, base.name).await.unwrap();
    let renewing = Target::connect(&target.client_url, None).await.unwrap();
    let report = replay(&mut reader, &renewing, until(Until::Latest)).await;
    assert_eq!(report.unwrap().revision, last);
    // The lease outlives its TTL, because `renewing` renews the lease until `renewing` is dropped.
    let mut restored = client(&target).await;
    let begun = Instant::now();
    while begun.elapsed() < Duration::from_secs(12) {
        assert_eq!(revision(&mut restored).await, last);
        sleep(Duration::from_millis(200)).await;
    }
    drop(renewing);
    while revision(&mut restored).await == last {
        sleep(Duration::from_millis(100)).await;
    }
    let left = keys(&mut restored, 0).await;
    let left: Vec<&[u8]> = left.iter().map(etcd_client::KeyValue::key).collect();
    assert_eq!(left, [b"c"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn replay_that_drifts_by_one_revision_fails() {
    let lab = Lab::new("3.6").await;
    let base = lab.base().await;
    lab.record(&base, extras(), async {
        let mut source = lab.client().await;
        for index in 0..2_000 {
            source.put("key", index.to_string(), None).await.unwrap();
        }
    })
    .await;
    let target = lab.restore(&base).await;
    let mut other = client(&target).await;
    let disturb = async {
        let start = base.base.revision;
        while revision(&mut other).await < start + 10 {
            tokio::task::yield_now().await;
        }
        other.put("other", "", None).await.unwrap();
    };
    let (result, ()) = tokio::join!(
        replayed(&lab, &base, &target, until(Until::Latest)),
        disturb
    );
    let error = result.unwrap_err();
    assert!(
        matches!(error, ReplayError::Drifted { expected, found } if found == expected + 1),
        "{error:?}"
    );
    // The target now has a later revision than the base, so a second replay must fail.
    let again = replayed(&lab, &base, &target, until(Until::Latest)).await;
    assert!(matches!(again, Err(ReplayError::WrongStart { .. })));
}
