//! The pauses of a watch after its errors.

use std::time::Duration;

use kube::runtime::utils::Backoff;
use kube::runtime::watcher::DefaultBackoff;

/// Maximum pause. With kube's default, a watch could pause for up to 30 s after the end of an outage of the API server.
const MAX_PAUSE: Duration = Duration::from_secs(5);

/// The pauses of kube's watches, limited to [`MAX_PAUSE`].
#[derive(Default)]
pub(crate) struct WatchPauses(DefaultBackoff);

impl Iterator for WatchPauses {
    type Item = Duration;

    fn next(&mut self) -> Option<Duration> {
        self.0.next().map(|pause| pause.min(MAX_PAUSE))
    }
}

impl Backoff for WatchPauses {
    fn reset(&mut self) {
        self.0.reset();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn watch_retry_pauses_grow_to_five_seconds() {
        let pauses: Vec<Duration> = WatchPauses::default().take(20).collect();
        assert!(pauses[0] < Duration::from_secs(2), "{pauses:?}");
        assert_eq!(pauses[19], MAX_PAUSE, "{pauses:?}");
        assert_eq!(pauses.iter().max(), Some(&MAX_PAUSE));
    }
}
