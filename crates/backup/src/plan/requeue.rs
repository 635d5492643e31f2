//! The times between the reconciles of an EtcdBackup. Performs no I/O.

use std::time::Duration;

use jiff::Timestamp;

/// While a transfer runs, its progress is reported at this interval.
pub(super) const PROGRESS_INTERVAL: Duration = Duration::from_secs(3);

/// First interval between checks for missing input, such as a Secret or a cluster. No watch reports the creation of the
/// input.
pub(super) const INPUT_RETRY: Duration = Duration::from_secs(3);

/// Longest interval between checks for missing input.
const MAX_INPUT_RETRY: Duration = Duration::from_secs(30);

/// Maximum time between two reconciles, because a change of the clock may make a backup due.
const MAX_REQUEUE: Duration = Duration::from_mins(10);

pub(super) fn until(time: Timestamp, now: Timestamp) -> Duration {
    Duration::try_from(time.duration_since(now))
        .unwrap_or(INPUT_RETRY)
        .min(MAX_REQUEUE)
}

/// The interval between checks for missing input: a tenth of the time that the operator has waited so far. New input is
/// therefore found after a delay that is small compared with the waiting time.
pub(super) fn input_retry(waits_since: Timestamp, now: Timestamp) -> Duration {
    let waited = Duration::try_from(now.duration_since(waits_since)).unwrap_or_default();
    (waited / 10).clamp(INPUT_RETRY, MAX_INPUT_RETRY)
}
