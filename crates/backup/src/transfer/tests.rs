//! Tests of a transfer.

use super::*;

/// Whether the check ends a transfer that copies `step` bytes ten times in each window.
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
    // A transfer of only one byte in each step is ended too.
    for (step, expected) in [(0, true), (1, true), (4 * mebibyte, false)] {
        assert_eq!(is_ended(step).await, expected, "{step}");
    }
    let trouble = too_slow("http://a:2379");
    assert_eq!(trouble.reason, Reason::TooSlow);
    for part in ["8 MiB", "5 minutes", "http://a:2379", "check"] {
        assert!(trouble.message.contains(part), "{trouble:?}");
    }
}
