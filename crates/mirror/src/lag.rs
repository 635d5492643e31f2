//! Measures how far a destination is behind its source. Performs no I/O.

use std::collections::VecDeque;

use jiff::Timestamp;

/// Maximum number of observed revisions that the destination has not reached. With one observation every five seconds,
/// they cover five minutes. If the lag is longer, every second observation is dropped, and the reported lag is less
/// precise.
const MAX_OBSERVATIONS: usize = 60;

/// Measures the lag of one mirror.
#[derive(Clone, Debug, Default)]
pub struct LagMeter {
    /// The revisions of the source that the destination has not reached, with the time of their observation.
    ahead: VecDeque<(i64, Timestamp)>,
    /// The newest observed revision of the source.
    newest: i64,
    /// The destination contains all changes before this time.
    synced: Option<Timestamp>,
}

/// The lag at one time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lag {
    /// The number of revisions that the destination does not contain.
    pub revisions: i64,
    /// The destination contains all changes before this time. `None` if this is not known yet.
    pub synced: Option<Timestamp>,
}

impl LagMeter {
    /// Adds an observation: the newest revision of the source at a time.
    pub fn observe(&mut self, newest: i64, at: Timestamp) {
        self.newest = self.newest.max(newest);
        if self.ahead.len() == MAX_OBSERVATIONS {
            // Every second observation is dropped, but the oldest observation stays.
            let mut index = 0;
            self.ahead.retain(|_| {
                index += 1;
                index % 2 == 1
            });
        }
        self.ahead.push_back((newest, at));
    }

    /// Records that the destination contains all changes up to a revision.
    pub fn reach(&mut self, position: i64) {
        while let Some((revision, at)) = self.ahead.front().copied() {
            if revision > position {
                break;
            }
            self.synced = Some(at);
            self.ahead.pop_front();
        }
    }

    /// The lag of a destination that contains all changes up to a revision.
    pub fn lag(&self, position: i64) -> Lag {
        Lag {
            revisions: (self.newest - position).max(0),
            synced: self.synced,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(second).unwrap()
    }

    #[test]
    fn destination_is_synced_up_to_last_reached_observation() {
        let mut meter = LagMeter::default();
        meter.observe(10, at(100));
        meter.observe(20, at(105));
        meter.reach(9);
        let unknown = Lag {
            revisions: 11,
            synced: None,
        };
        assert_eq!(meter.lag(9), unknown);
        meter.reach(15);
        let behind = Lag {
            revisions: 5,
            synced: Some(at(100)),
        };
        assert_eq!(meter.lag(15), behind);
        meter.reach(20);
        let current = Lag {
            revisions: 0,
            synced: Some(at(105)),
        };
        assert_eq!(meter.lag(20), current);
        assert!(meter.ahead.is_empty());
        // A mirror can apply changes that are newer than the last observation. The lag is then 0 revisions.
        assert_eq!(meter.lag(25), current);
    }

    #[test]
    fn long_lag_keeps_oldest_observation_in_bounded_memory() {
        let mut meter = LagMeter::default();
        for second in 0..10_000 {
            meter.observe(second, at(second));
        }
        assert!(meter.ahead.len() <= MAX_OBSERVATIONS);
        assert_eq!(meter.ahead.front(), Some(&(0, at(0))));
        meter.reach(9_999);
        assert_eq!(meter.lag(9_999).synced, Some(at(9_999)));
    }
}
