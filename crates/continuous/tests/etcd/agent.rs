//! Tests of the agent: new bases, gaps, and restarts of the agent.

use std::future::Future;
use std::time::Duration;

use continuous::{
    Agent, BaseName, EncryptedStore, GapReason, Monitor, Options, Reader, Record, Settings, Target,
    Until, bases, described, read_base, replay,
};
use etcd::{Access, EtcdClient};
use futures::StreamExt;
use store::Store;
use store::encryption::{Key, Keys, is_encrypted};
use store::fake::{Call, FaultyStore};
use tokio::time::{sleep, timeout};

use crate::lab::{Lab, PREFIX, client, extras, hash, limits, now_micros, revision, stored};

const NO_RENEWAL: Duration = Duration::from_hours(1);

fn settings() -> Settings {
    Settings {
        prefix: PREFIX.to_owned(),
        limits: limits(),
        extras: extras(),
        max_age: NO_RENEWAL,
        max_bytes: u64::MAX,
        window: Duration::MAX,
        spool: None,
    }
}

/// Runs an agent until `work` has ended.
async fn agent_until<T, W: Future<Output = T>>(
    lab: &Lab,
    settings: Settings,
    work: impl FnOnce(Monitor) -> W,
) -> T {
    agent_with(lab, &lab.store, settings, work).await
}

/// Runs an agent with this store until `work` has ended.
async fn agent_with<T, W: Future<Output = T>>(
    lab: &Lab,
    store: &dyn Store,
    settings: Settings,
    work: impl FnOnce(Monitor) -> W,
) -> T {
    let etcd = EtcdClient::new(Access::default());
    let members = vec![lab.etcd.client_url.clone()];
    run_agent(Agent::new(&etcd, members, store, settings), work).await
}

async fn run_agent<T, W: Future<Output = T>>(
    mut agent: Agent<'_>,
    work: impl FnOnce(Monitor) -> W,
) -> T {
    let work = work(agent.monitor());
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let stopped = async {
        let _ = stopped.await;
    };
    let mut run = std::pin::pin!(agent.run(stopped));
    let result = tokio::select! {
        end = &mut run => panic!("the agent has ended: {end:?}"),
        result = work => result,
    };
    drop(stop);
    run.await.unwrap();
    result
}

/// Runs an agent until `work` has ended and all changes are in the chain of the newest base.
async fn with_agent<T>(lab: &Lab, max_age: Duration, work: impl Future<Output = T>) -> T {
    let settings = Settings {
        max_age,
        ..settings()
    };
    agent_until(lab, settings, |_| async move {
        let result = work.await;
        let last = revision(&mut lab.client().await).await;
        stored(&lab.store, newest_base(lab).await, last).await;
        result
    })
    .await
}

/// Returns the newest base. Waits until the store has a base.
async fn newest_base(lab: &Lab) -> BaseName {
    loop {
        if let Some(base) = bases(&lab.store, PREFIX).await.unwrap().pop() {
            return base;
        }
        sleep(Duration::from_millis(50)).await;
    }
}

async fn put(lab: &Lab, count: usize) {
    let mut client = lab.client().await;
    for index in 0..count {
        client.put("key", index.to_string(), None).await.unwrap();
    }
}

async fn assert_restorable(lab: &Lab, name: BaseName, at: i64) {
    let mut source = lab.client().await;
    let base = read_base(&lab.store, PREFIX, name).await.unwrap();
    let target = lab.restore(&base).await;
    let mut reader = Reader::open(&lab.store, PREFIX, name).await.unwrap();
    let connected = Target::connect(&target.client_url, None).await.unwrap();
    let options = Options {
        until: Until::Revision(at),
        follow_compactions: false,
    };
    let report = replay(&mut reader, &connected, options).await.unwrap();
    assert_eq!(report.revision, at);
    let mut restored = client(&target).await;
    let expected = hash(&mut source, at).await;
    assert_eq!(hash(&mut restored, at).await.0, expected.0);
}

#[tokio::test(flavor = "multi_thread")]
async fn restarted_agent_continues_the_chain() {
    let lab = Lab::new("3.6").await;
    for _ in 0..3 {
        with_agent(&lab, NO_RENEWAL, put(&lab, 20)).await;
        // No agent runs during these writes, so the next agent must record them.
        put(&lab, 10).await;
    }
    with_agent(&lab, NO_RENEWAL, async {}).await;
    let all = bases(&lab.store, PREFIX).await.unwrap();
    let [base] = all.as_slice() else {
        panic!("{all:?}");
    };
    let last = revision(&mut lab.client().await).await;
    assert_restorable(&lab, *base, last).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn chains_of_consecutive_bases_miss_no_revision() {
    let lab = Lab::new("3.6").await;
    let renewal = Duration::from_millis(700);
    with_agent(&lab, renewal, async {
        while bases(&lab.store, PREFIX).await.unwrap().len() < 3 {
            put(&lab, 5).await;
        }
    })
    .await;
    let all = bases(&lab.store, PREFIX).await.unwrap();
    for (base, next) in all.iter().zip(all.iter().skip(1)) {
        let reader = Reader::open(&lab.store, PREFIX, *base).await.unwrap();
        assert!(reader.chain().last >= next.revision, "{base} {next}");
    }
    assert_restorable(&lab, all[0], all[1].revision).await;
    let last = revision(&mut lab.client().await).await;
    assert_restorable(&lab, all[all.len() - 1], last).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn agent_takes_new_base_after_gap() {
    let lab = Lab::new("3.6").await;
    with_agent(&lab, NO_RENEWAL, put(&lab, 20)).await;
    let first = newest_base(&lab).await;
    put(&lab, 20).await;
    let mut source = lab.client().await;
    let compacted = revision(&mut source).await;
    source.compact(compacted, None).await.unwrap();
    with_agent(&lab, NO_RENEWAL, async {
        while newest_base(&lab).await == first {
            sleep(Duration::from_millis(50)).await;
        }
        put(&lab, 20).await;
    })
    .await;
    let mut reader = Reader::open(&lab.store, PREFIX, first).await.unwrap();
    let mut last = None;
    while let Some(segment) = reader.next().await.unwrap() {
        last = segment.records.last().cloned();
    }
    let Some(Record::Gap(gap)) = last else {
        panic!("{last:?}");
    };
    assert_eq!(gap.reason, GapReason::Compacted);
    let last = revision(&mut source).await;
    assert_restorable(&lab, newest_base(&lab).await, last).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn new_base_is_taken_if_segments_exceed_maximum_size() {
    let lab = &Lab::new("3.6").await;
    let small = Settings {
        max_bytes: 1,
        ..settings()
    };
    agent_until(lab, small, |_| async move {
        while bases(&lab.store, PREFIX).await.unwrap().len() < 2 {
            put(lab, 5).await;
            sleep(Duration::from_millis(50)).await;
        }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn changes_are_read_while_store_rejects_the_next_base() {
    let lab = &Lab::new("3.6").await;
    let store = &FaultyStore::new(lab.store.clone());
    let short = Settings {
        max_age: Duration::from_secs(1),
        ..settings()
    };
    agent_with(lab, store, short, |monitor| async move {
        newest_base(lab).await;
        for call in [Call::Begin, Call::Put] {
            for _ in 0..1_000 {
                store.fail(call, store::Error::Full("disk".to_owned()));
            }
        }
        // During this pause, the next base becomes due, and the store rejects it.
        sleep(Duration::from_secs(4)).await;
        let waiting = monitor.read().waiting_bytes;
        put(lab, 20).await;
        let read = async {
            while monitor.read().waiting_bytes <= waiting {
                sleep(Duration::from_millis(50)).await;
            }
        };
        timeout(Duration::from_secs(10), read).await.unwrap();
        store.forget();
        while bases(&lab.store, PREFIX).await.unwrap().len() < 2 {
            sleep(Duration::from_millis(50)).await;
        }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn bases_before_retention_window_are_deleted_with_their_segments() {
    let lab = &Lab::new("3.6").await;
    let short = Settings {
        max_age: Duration::from_millis(700),
        window: Duration::ZERO,
        ..settings()
    };
    agent_until(lab, short, |_| async move {
        let first = newest_base(lab).await;
        while bases(&lab.store, PREFIX).await.unwrap().contains(&first) {
            put(lab, 5).await;
            sleep(Duration::from_millis(50)).await;
        }
        let left = lab.store.list(&format!("{PREFIX}{first}/")).await.unwrap();
        assert_eq!(left, []);
    })
    .await;
    with_agent(lab, NO_RENEWAL, put(lab, 20)).await;
    let last = revision(&mut lab.client().await).await;
    assert_restorable(lab, newest_base(lab).await, last).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn complete_time_covers_all_acknowledged_writes() {
    let lab = &Lab::new("3.6").await;
    agent_until(lab, settings(), |monitor| async move {
        put(lab, 20).await;
        let written = now_micros();
        let progress = loop {
            let progress = monitor.read();
            let complete = progress.complete_time.is_some_and(|time| time >= written);
            if complete && progress.held.is_some() {
                break progress;
            }
            sleep(Duration::from_millis(50)).await;
        };
        let last = revision(&mut lab.client().await).await;
        assert_eq!(progress.revision, Some(last));
        assert_eq!(progress.etcd_revision, Some(last));
        assert_eq!(progress.problem, None);
        assert!(progress.base.unwrap().segments > 0);
        assert_eq!(progress.held.unwrap().gap_count, 0);
    })
    .await;
}

/// All segments of a base are encrypted, or none. An agent that starts with encryption therefore needs a new base.
#[tokio::test(flavor = "multi_thread")]
async fn agent_takes_new_base_when_encryption_is_turned_on() {
    let lab = Lab::new("3.6").await;
    with_agent(&lab, NO_RENEWAL, put(&lab, 10)).await;
    let plain = newest_base(&lab).await;
    put(&lab, 1).await;
    let text = b"AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=";
    let (key, mut keys) = (Key::parse("2026", text).unwrap(), Keys::default());
    keys.add(key.clone());
    let description = described(&key);
    let store = EncryptedStore::new(&lab.store, key, keys);
    let etcd = EtcdClient::new(Access::default());
    let members = vec![lab.etcd.client_url.clone()];
    let agent = Agent::new(&etcd, members, &store, settings()).encrypted(description.clone());
    run_agent(agent, |_| async {
        while newest_base(&lab).await == plain {
            sleep(Duration::from_millis(50)).await;
        }
        put(&lab, 10).await;
        let last = revision(&mut lab.client().await).await;
        stored(&lab.store, newest_base(&lab).await, last).await;
    })
    .await;
    let encrypted = newest_base(&lab).await;
    for (name, expected) in [(plain, None), (encrypted, Some(description))] {
        let base = read_base(&lab.store, PREFIX, name).await.unwrap();
        let is_expected = expected.is_some();
        assert_eq!(base.base.encryption, expected);
        let segments = lab.store.list(&format!("{PREFIX}{name}/")).await.unwrap();
        assert!(!segments.is_empty());
        for segment in segments {
            let mut stored = lab.store.get(&segment.key).await.unwrap().chunks;
            let beginning = stored.next().await.unwrap().unwrap();
            assert_eq!(is_encrypted(&beginning), is_expected, "{}", segment.key);
        }
    }
}
