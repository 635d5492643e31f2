//! Faults during the recording. A change may be lost only if the chain ends with a gap.

use std::time::Duration;

use continuous::{
    Capture, CaptureError, ChainFault, End, Extras, Gap, GapReason, Limits, Options, RangeError,
    Reader, Record, Recorder, ReplayError, Segment, StoredBase, TakeError, Target, Until, replay,
    take_base,
};
use etcd::{Access, EtcdClient};
use store::Store;
use store::fake::{Call, FaultyStore};
use tokio::time::sleep;

use crate::lab::{Lab, PREFIX, client, extras, hash, limits, revision, stored};

/// A future that never completes.
async fn never() {
    std::future::pending::<()>().await;
}

/// All records of a chain, except hashes.
async fn records(lab: &Lab, base: &StoredBase) -> Vec<Record> {
    let mut reader = Reader::open(&lab.store, PREFIX, base.name).await.unwrap();
    let mut all = Vec::new();
    while let Some(segment) = reader.next().await.unwrap() {
        let Segment { records, .. } = segment;
        all.extend(records);
    }
    all.retain(|record| !matches!(record, Record::Hash(_)));
    all
}

/// Replays the whole chain, and compares the hash of the target with that of the recorded etcd.
async fn assert_replay_is_exact(lab: &Lab, base: &StoredBase) {
    let mut source = lab.client().await;
    let last = revision(&mut source).await;
    let target = lab.restore(base).await;
    let mut reader = Reader::open(&lab.store, PREFIX, base.name).await.unwrap();
    let connected = Target::connect(&target.client_url, None).await.unwrap();
    let options = Options {
        until: Until::Revision(last),
        follow_compactions: false,
    };
    let report = replay(&mut reader, &connected, options).await.unwrap();
    assert_eq!(report.revision, last);
    let mut restored = client(&target).await;
    assert_eq!(
        hash(&mut restored, last).await,
        hash(&mut source, last).await
    );
}

async fn put_many(lab: &Lab, count: usize) {
    let mut client = lab.client().await;
    for index in 0..count {
        let (key, value) = (format!("key-{}", index % 7), index.to_string());
        client.put(key, value, None).await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn compaction_before_recording_causes_gap_that_replay_refuses() {
    let lab = Lab::new("3.6").await;
    put_many(&lab, 5).await;
    let base = lab.base().await;
    put_many(&lab, 10).await;
    let mut source = lab.client().await;
    let start = base.base.revision;
    source.compact(start + 5, None).await.unwrap();
    let etcd = EtcdClient::new(Access::default());
    let recorder = Recorder::new(&base, limits());
    let mut capture = Capture::new(&etcd, &lab.store, PREFIX, base.clone(), recorder, extras());
    let end = capture.run(&lab.etcd.client_url, never()).await.unwrap();
    assert_eq!(end, End::Gap(GapReason::Compacted));
    let records = records(&lab, &base).await;
    let [Record::Gap(Gap { after, reason, .. })] = records.as_slice() else {
        panic!("{records:?}");
    };
    assert_eq!((*after, *reason), (start, GapReason::Compacted));
    // A replay to a revision or time after the gap must fail.
    let target = lab.restore(&base).await;
    let mut reader = Reader::open(&lab.store, PREFIX, base.name).await.unwrap();
    let connected = Target::connect(&target.client_url, None).await.unwrap();
    let options = Options {
        until: Until::Revision(start + 1),
        follow_compactions: false,
    };
    let error = replay(&mut reader, &connected, options).await.unwrap_err();
    assert!(
        matches!(error, ReplayError::Range(RangeError::AfterEnd { .. })),
        "{error:?}"
    );
    let options = Options {
        until: Until::Time(i64::MAX),
        follow_compactions: false,
    };
    let error = replay(&mut reader, &connected, options).await.unwrap_err();
    assert!(matches!(error, ReplayError::Gap(_)), "{error:?}");
    // The chain of a new base has no gap.
    let next = lab.base().await;
    lab.record(&next, extras(), put_many(&lab, 20)).await;
    assert_replay_is_exact(&lab, &next).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn compaction_at_last_recorded_revision_causes_no_gap() {
    let lab = Lab::new("3.6").await;
    put_many(&lab, 5).await;
    let base = lab.base().await;
    let mut source = lab.client().await;
    source.compact(base.base.revision, None).await.unwrap();
    lab.record(&base, extras(), put_many(&lab, 20)).await;
    let records = records(&lab, &base).await;
    assert_eq!(records.len(), 20);
}

#[tokio::test(flavor = "multi_thread")]
async fn change_of_cluster_id_is_recorded_as_gap() {
    let (lab, other) = (Lab::new("3.6").await, Lab::new("3.6").await);
    let base = lab.base().await;
    put_many(&other, 5).await;
    let etcd = EtcdClient::new(Access::default());
    let recorder = Recorder::new(&base, limits());
    let mut capture = Capture::new(&etcd, &lab.store, PREFIX, base.clone(), recorder, extras());
    let end = capture.run(&other.etcd.client_url, never()).await.unwrap();
    assert_eq!(end, End::Gap(GapReason::ClusterChanged));
    let records = records(&lab, &base).await;
    assert!(
        matches!(records.as_slice(), [Record::Gap(_)]),
        "{records:?}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn restored_data_with_same_cluster_id_is_recorded_as_gap() {
    let mut lab = Lab::new("3.6").await;
    put_many(&lab, 5).await;
    let base = lab.base().await;
    lab.record(&base, extras(), put_many(&lab, 20)).await;
    let recorder = resumed(&lab, &base).await;
    let last = recorder.last();
    lab.restore_in_place(&base).await;
    put_many(&lab, 5).await;
    let etcd = EtcdClient::new(Access::default());
    let mut capture = Capture::new(&etcd, &lab.store, PREFIX, base.clone(), recorder, extras());
    let end = capture.run(&lab.etcd.client_url, never()).await.unwrap();
    assert_eq!(end, End::Gap(GapReason::RevisionReset));
    let records = records(&lab, &base).await;
    let expected = |gap: &Gap| (gap.after, gap.reason) == (last, GapReason::RevisionReset);
    assert!(
        matches!(records.last(), Some(Record::Gap(gap)) if expected(gap)),
        "{records:?}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn capture_continues_after_restart_of_etcd() {
    let mut lab = Lab::new("3.6").await;
    let base = lab.base().await;
    let etcd = EtcdClient::new(Access::default());
    let store = lab.store.clone();
    for _ in 0..3 {
        put_many(&lab, 50).await;
        // Each pass uses a new recorder, which continues after the last stored segment.
        let recorder = resumed(&lab, &base).await;
        let mut capture = Capture::new(&etcd, &store, PREFIX, base.clone(), recorder, extras());
        let member = lab.etcd.client_url.clone();
        let last = revision(&mut lab.client().await).await;
        let kill = async {
            stored(&store, base.name, last).await;
            lab.etcd.kill();
        };
        let (end, ()) = tokio::join!(capture.run(&member, never()), kill);
        let error = end.unwrap_err();
        assert!(
            matches!(error, CaptureError::Watch(_) | CaptureError::Etcd(_)),
            "{error:?}"
        );
        // etcd does not run, so another call of `run` must fail.
        let again = capture.run(&member, never()).await;
        assert!(matches!(again, Err(CaptureError::Watch(_))), "{again:?}");
        lab.etcd.restart();
        assert!(lab.etcd.serves().await);
    }
    let last = revision(&mut lab.client().await).await;
    stored(&lab.store, base.name, last).await;
    assert_replay_is_exact(&lab, &base).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn failed_base_leaves_no_snapshot_in_store() {
    let lab = Lab::new("3.6").await;
    let store = FaultyStore::new(lab.store.clone());
    store.fail(
        Call::CommitAnswer,
        store::Error::Timeout("commit".to_owned()),
    );
    let etcd = EtcdClient::new(Access::default());
    let taken = take_base(&etcd, &lab.etcd.client_url, &store, PREFIX).await;
    assert!(matches!(taken, Err(TakeError::Store(_))), "{taken:?}");
    assert_eq!(lab.store.list("").await.unwrap(), []);
}

/// A recorder that continues the stored chain.
async fn resumed(lab: &Lab, base: &StoredBase) -> Recorder {
    let mut reader = Reader::open(&lab.store, PREFIX, base.name).await.unwrap();
    let mut tip = None;
    while let Some(segment) = reader.next().await.unwrap() {
        tip = Some(segment);
    }
    match tip {
        Some(tip) => Recorder::resume(base, &tip, limits()).unwrap(),
        None => Recorder::new(base, limits()),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn no_change_is_lost_while_store_is_unavailable() {
    let lab = Lab::new("3.6").await;
    let base = lab.base().await;
    let store = FaultyStore::new(lab.store.clone());
    for _ in 0..4 {
        store.fail(Call::Put, store::Error::Full("disk".to_owned()));
    }
    let small = Limits {
        bytes: 500,
        ..limits()
    };
    let etcd = EtcdClient::new(Access::default());
    let recorder = Recorder::new(&base, small);
    let mut capture = Capture::new(&etcd, &store, PREFIX, base.clone(), recorder, extras());
    let last = async {
        put_many(&lab, 200).await;
        let last = revision(&mut lab.client().await).await;
        stored(&lab.store, base.name, last).await;
    };
    let end = capture.run(&lab.etcd.client_url, last).await.unwrap();
    assert_eq!(end, End::Stopped);
    assert_replay_is_exact(&lab, &base).await;
}

/// If the future of [`Capture::run`] is dropped at any time, the next call of `run` continues without losing a change.
#[tokio::test(flavor = "multi_thread")]
async fn no_change_is_lost_if_future_of_capture_is_dropped() {
    let lab = Lab::new("3.6").await;
    let base = lab.base().await;
    let etcd = EtcdClient::new(Access::default());
    let recorder = Recorder::new(&base, limits());
    let mut capture = Capture::new(&etcd, &lab.store, PREFIX, base.clone(), recorder, extras());
    let work = async {
        put_many(&lab, 500).await;
        let last = revision(&mut lab.client().await).await;
        stored(&lab.store, base.name, last).await;
    };
    let mut work = std::pin::pin!(work);
    let mut pause = Duration::from_millis(1);
    loop {
        tokio::select! {
            () = &mut work => break,
            () = sleep(pause) => {}
            end = capture.run(&lab.etcd.client_url, never()) => panic!("{end:?}"),
        }
        pause = pause * 3 / 2 + Duration::from_millis(1);
    }
    assert_replay_is_exact(&lab, &base).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn chain_with_branches_of_concurrent_recorders_is_complete() {
    let lab = Lab::new("3.6").await;
    let base = lab.base().await;
    let etcd = EtcdClient::new(Access::default());
    let quiet = Extras {
        hash_interval: None,
        ..extras()
    };
    let mut captures: Vec<Capture<'_>> = (0..2)
        .map(|_| {
            let recorder = Recorder::new(&base, limits());
            Capture::new(&etcd, &lab.store, PREFIX, base.clone(), recorder, quiet)
        })
        .collect();
    let [one, two] = captures.as_mut_slice() else {
        unreachable!()
    };
    let (stop_one, stopped_one) = tokio::sync::oneshot::channel::<()>();
    let (stop_two, stopped_two) = tokio::sync::oneshot::channel::<()>();
    let work = async {
        put_many(&lab, 300).await;
        let last = revision(&mut lab.client().await).await;
        stored(&lab.store, base.name, last).await;
        stop_one.send(()).unwrap();
        stop_two.send(()).unwrap();
    };
    let member = &lab.etcd.client_url;
    let (first, second, ()) = tokio::join!(
        one.run(member, async {
            let _ = stopped_one.await;
        }),
        two.run(member, async {
            let _ = stopped_two.await;
        }),
        work
    );
    assert_eq!(
        (first.unwrap(), second.unwrap()),
        (End::Stopped, End::Stopped)
    );
    let reader = Reader::open(&lab.store, PREFIX, base.name).await.unwrap();
    assert!(!reader.chain().branches.is_empty());
    assert_eq!(reader.chain().faults, Vec::<ChainFault>::new());
    assert_replay_is_exact(&lab, &base).await;
}
