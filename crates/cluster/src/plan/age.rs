//! How long something has lasted.

use std::time::Duration;

use jiff::Timestamp;

/// How long ago something was.
pub(super) fn age(since: Timestamp, now: Timestamp) -> Duration {
    Duration::try_from(now.duration_since(since)).unwrap_or_default()
}
