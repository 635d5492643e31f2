//! The delays between the reconciles of an EtcdBackup. Performs no I/O.

use std::time::Duration;

use jiff::Timestamp;

/// Delay between two updates of the progress in the status.
pub(super) const PROGRESS_INTERVAL: Duration = Duration::from_secs(3);

/// Minimum delay between two checks for missing input, such as a Secret or an EtcdCluster. No watch reports the
/// creation of this input.
pub(super) const INPUT_RETRY: Duration = Duration::from_secs(3);

/// Maximum delay between two checks for missing input.
const MAX_INPUT_RETRY: Duration = Duration::from_secs(30);

/// Maximum delay between two reconciles, because a change of the clock may make a backup due.
const MAX_REQUEUE: Duration = Duration::from_mins(10);

pub(super) fn until(time: Timestamp, now: Timestamp) -> Duration {
    Duration::try_from(time.duration_since(now))
        .unwrap_or(INPUT_RETRY)
        .min(MAX_REQUEUE)
}

/// The delay until the next check for missing input: a tenth of the time that the operator has already waited, but at
/// least `INPUT_RETRY` and at most `MAX_INPUT_RETRY`.
pub(super) fn input_retry(waits_since: Timestamp, now: Timestamp) -> Duration {
    let waited = Duration::try_from(now.duration_since(waits_since)).unwrap_or_default();
    (waited / 10).clamp(INPUT_RETRY, MAX_INPUT_RETRY)
}
