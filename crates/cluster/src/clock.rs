//! The API server's clock, compared with the operator's own.

use jiff::{SignedDuration, Timestamp};

use crate::authority::SKEW;

/// The API server's clock less the operator's, as they were read together; `None` where the API server told no time, or
/// where nothing is to be judged by it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ApiServerClock(pub Option<SignedDuration>);

impl ApiServerClock {
    /// The time by which everything is judged that Kubernetes has dated: the earlier one of both clocks.
    pub fn earlier(self, now: Timestamp) -> Timestamp {
        let behind = self.0.filter(SignedDuration::is_negative);
        let theirs = behind.and_then(|clock| now.checked_add(clock).ok());
        theirs.unwrap_or(now)
    }

    /// The time by which certificates are made and judged: the earlier one, where the clocks differ. A clock that is far
    /// ahead would have every authority expire at once, and no member would trust another; a clock that is behind delays
    /// what is due after two thirds of a life.
    pub fn for_certificates(self, now: Timestamp) -> Timestamp {
        Self(self.difference()).earlier(now)
    }

    /// What a user has to know of clocks that differ.
    pub fn problem(self) -> Option<String> {
        let clock = self.difference()?;
        let word = if clock.is_negative() {
            "ahead of"
        } else {
            "behind"
        };
        Some(format!(
            "the operator's clock is {} s {word} the API server's: certificates are made and renewed by the earlier of \
             the two; set the clock right, of the operator's node or of the control plane",
            clock.unsigned_abs().as_secs()
        ))
    }

    /// By more than a certificate allows for.
    fn difference(self) -> Option<SignedDuration> {
        self.0.filter(|clock| clock.unsigned_abs() > SKEW)
    }
}
