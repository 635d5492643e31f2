//! Durations since a point in time, and the difference between the API server's clock and the operator's clock.

use std::time::Duration;

use jiff::{SignedDuration, Timestamp};

/// The validity of a certificate starts this long before its creation, because clocks of other machines may be behind.
pub(crate) const SKEW: Duration = Duration::from_mins(5);

/// The time from `since` to `now`; zero if `since` is later.
pub(crate) fn age(since: Timestamp, now: Timestamp) -> Duration {
    Duration::try_from(now.duration_since(since)).unwrap_or_default()
}

/// The API server's time minus the operator's time, both read at the same moment. `None` if the API server sent no
/// time, or if the operator did not read it because no decision depends on it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ApiServerClock(pub Option<SignedDuration>);

impl ApiServerClock {
    /// The time to compare with timestamps from Kubernetes: the earlier of the operator's and the API server's time.
    pub fn earlier(self, now: Timestamp) -> Timestamp {
        runtime::clock::earlier(now, self.0)
    }

    /// The time for issuing and checking certificates: the operator's time or, if the clocks differ by more than
    /// `SKEW`, the earlier of the two times. To a clock that is far ahead, every CA seems expired.
    pub fn for_certificates(self, now: Timestamp) -> Timestamp {
        Self(self.difference()).earlier(now)
    }

    /// The message for users if the clocks differ by more than `SKEW`.
    pub fn problem(self) -> Option<String> {
        let clock = self.difference()?;
        let word = if clock.is_negative() {
            "ahead of"
        } else {
            "behind"
        };
        Some(format!(
            "the operator's clock is {} s {word} the API server's clock, so the operator issues and renews certificates by the earlier of the two clocks: correct the clock of the operator's node or of the control plane",
            clock.unsigned_abs().as_secs()
        ))
    }

    /// The difference of the clocks, if it exceeds `SKEW`.
    fn difference(self) -> Option<SignedDuration> {
        self.0.filter(|clock| clock.unsigned_abs() > SKEW)
    }
}
