//! Measures durations since a point in time.

use std::time::Duration;

use jiff::Timestamp;

/// The time from `since` to `now`; zero if `since` is later.
pub(super) fn age(since: Timestamp, now: Timestamp) -> Duration {
    Duration::try_from(now.duration_since(since)).unwrap_or_default()
}
