//! Tests of a transfer.

use etcd::fake::FakeEtcd;
use store::LocalStore;
use store::fake::FaultyStore;

use super::*;

/// True if `stalled` ends a transfer that copies `step` bytes ten times per window.
async fn is_ended(step: u64) -> bool {
    const STEP: Duration = Duration::from_millis(50);
    let meter = Meter::default();
    let moved = async {
        for number in 1..=40 {
            tokio::time::sleep(STEP).await;
            meter.advance_to(number * step);
        }
    };
    tokio::select! {
        () = stalled(&meter, 10 * STEP) => true,
        () = moved => false,
    }
}

#[tokio::test]
async fn transfer_below_minimum_progress_is_ended() {
    let mebibyte = 1 << 20;
    // `step` is the number of bytes that the transfer receives in each step. Zero bytes and one byte are below the
    // minimum.
    for (step, expected) in [(0, true), (1, true), (4 * mebibyte, false)] {
        assert_eq!(is_ended(step).await, expected, "{step}");
    }
    let trouble = too_slow("http://a:2379");
    assert_eq!(trouble.reason, Reason::TooSlow);
    for part in ["8 MiB", "5 minutes", "http://a:2379", "check"] {
        assert!(trouble.message.contains(part), "{trouble:?}");
    }
}

/// The store accepts the start of an upload, but none of its bytes.
#[tokio::test]
async fn transfer_to_store_that_accepts_no_bytes_is_ended() {
    let url = |name: &str| format!("http://{name}:2379");
    let etcd = FakeEtcd::formed(1, &["a"], url);
    etcd.with(|state| state.snapshot = vec![Bytes::from_static(b"snapshot")]);
    let dir = tempfile::tempdir().unwrap();
    let local = LocalStore::new(dir.path());
    let stalled = FaultyStore::new(local.clone()).with_write_delay(Duration::from_hours(1));
    let transfer = Transfer {
        etcd: Arc::new(etcd),
        endpoints: vec![url("a")],
        store: Arc::new(stalled),
        name: ObjectName::Exact("key".to_owned()),
        compress: false,
        encryption: None,
        uid: "uid".to_owned(),
        cluster: None,
        limits: EndpointLimits::default(),
        since: Timestamp::UNIX_EPOCH,
    };
    let (meter, cancelled) = (Meter::default(), CancellationToken::new());
    let ended = transfer.run_within(Duration::from_millis(100), &meter, &cancelled);
    let ended = tokio::time::timeout(Duration::from_secs(30), ended).await;
    let trouble = ended.unwrap().unwrap_err();
    assert_eq!(trouble.reason, Reason::TooSlow);
    assert!(trouble.message.contains("http://a:2379"), "{trouble:?}");
    assert_eq!(local.list("").await.unwrap(), []);
    assert_eq!(local.unfinished("").await.unwrap(), []);
}
