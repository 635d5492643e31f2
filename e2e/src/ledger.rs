//! What a writer knows: which writes were acknowledged to it, and how long it waited for one. It may not ask anybody.

use std::collections::BTreeMap;
use std::fmt;
use std::time::{Duration, Instant};

use anyhow::Result;

/// An acknowledged write.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AcknowledgedWrite {
    /// The revision etcd said.
    pub(crate) revision: i64,
    /// It was sent more than once.
    pub(crate) retried: bool,
}

impl AcknowledgedWrite {
    /// Whether it is what was found under its key, at which revision. An attempt whose answer was lost may be carried
    /// out after the one that was acknowledged: the same value is written once more then.
    fn matches(self, found: Option<&(String, i64)>, value: &str) -> bool {
        found.is_some_and(|(now, at)| {
            now == value && (*at == self.revision || (self.retried && *at > self.revision))
        })
    }
}

/// An acknowledged write that cannot be read back as it was acknowledged.
#[derive(Clone, Debug)]
pub struct Lost {
    /// Its key.
    pub key: String,
    /// The revision it was acknowledged at.
    pub revision: i64,
    /// The revision at which something is found under its key.
    pub found: Option<i64>,
}

/// What became of each write.
pub(crate) struct Ledger {
    /// Where its keys begin.
    prefix: &'static str,
    begun: Instant,
    /// Number of the key, and the store's revision when its write was acknowledged.
    acknowledged: BTreeMap<u64, AcknowledgedWrite>,
    /// Numbers of the keys whose writes were not answered, or refused.
    unknown: Vec<u64>,
    last: Instant,
    gap: Duration,
    gap_begun: Instant,
    last_error: String,
}

/// What became of the writes.
#[derive(Clone, Debug)]
pub struct Tally {
    /// Writes etcd acknowledged.
    pub acknowledged: usize,
    /// Writes etcd refused or did not answer in time; they may have been done.
    pub unknown: usize,
    /// Acknowledged writes that are not there, or differ: their keys, with the revision they were acknowledged at.
    pub lost: Vec<Lost>,
    /// The longest time between two acknowledged writes.
    pub gap: Duration,
    /// When that began, from the writer's beginning on.
    pub gap_begun: Duration,
    /// The last error a write ended with.
    pub last_error: String,
}

impl fmt::Display for Tally {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            to,
            "{} writes acknowledged, {} unanswered, {} lost; longest gap {:.1} s, {:.1} s after the first",
            self.acknowledged,
            self.unknown,
            self.lost.len(),
            self.gap.as_secs_f32(),
            self.gap_begun.as_secs_f32(),
        )?;
        if !self.last_error.is_empty() {
            write!(to, "; last error: {}", self.last_error)?;
        }
        Ok(())
    }
}

/// The key of a write.
pub(crate) fn key(prefix: &str, number: u64) -> String {
    format!("{prefix}{number:08}")
}

/// What is written under it.
pub(crate) fn value(prefix: &str, number: u64) -> String {
    format!("the value of {}", key(prefix, number))
}

impl Ledger {
    /// Nothing has been written.
    pub(crate) const fn new(prefix: &'static str, begun: Instant) -> Self {
        Self {
            prefix,
            begun,
            acknowledged: BTreeMap::new(),
            unknown: Vec::new(),
            last: begun,
            gap: Duration::ZERO,
            gap_begun: begun,
            last_error: String::new(),
        }
    }

    /// Takes down what became of a write.
    pub(crate) fn record(&mut self, number: u64, outcome: Result<AcknowledgedWrite>) {
        match outcome {
            Ok(written) => {
                let now = Instant::now();
                let silence = now.duration_since(self.last);
                if silence > self.gap && !self.acknowledged.is_empty() {
                    (self.gap, self.gap_begun) = (silence, self.last);
                }
                self.last = now;
                self.acknowledged.insert(number, written);
            }
            Err(error) => {
                self.unknown.push(number);
                self.last_error = format!("{error:#}");
            }
        }
    }

    /// How many writes were acknowledged.
    pub(crate) fn acknowledged(&self) -> usize {
        self.acknowledged.len()
    }

    /// How long ago the last one was.
    pub(crate) fn silence(&self) -> Duration {
        self.last.elapsed()
    }

    /// The last error a write ended with.
    pub(crate) fn last_error(&self) -> &str {
        &self.last_error
    }

    /// Compares what was acknowledged with what was read back: by key, the value and its revision. The silence at the end
    /// counts as a gap, too.
    pub(crate) fn tally(
        &self,
        found: &BTreeMap<String, (String, i64)>,
        silence: Duration,
    ) -> Tally {
        let lost = self.acknowledged.iter().filter_map(|(number, written)| {
            let key = key(self.prefix, *number);
            let now = found.get(&key);
            (!written.matches(now, &value(self.prefix, *number))).then(|| Lost {
                key,
                revision: written.revision,
                found: now.map(|(_, revision)| *revision),
            })
        });
        let (gap, gap_begun) = if silence > self.gap {
            (silence, self.last)
        } else {
            (self.gap, self.gap_begun)
        };
        Tally {
            acknowledged: self.acknowledged.len(),
            unknown: self.unknown.len(),
            lost: lost.collect(),
            gap,
            gap_begun: gap_begun.saturating_duration_since(self.begun),
            last_error: self.last_error.clone(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn once(revision: i64) -> AcknowledgedWrite {
        AcknowledgedWrite {
            revision,
            retried: false,
        }
    }

    #[test]
    fn retried_write_may_have_later_revision() {
        let found = |value: &str, revision| Some((value.to_owned(), revision));
        let again = AcknowledgedWrite {
            revision: 5,
            retried: true,
        };
        for (written, found, kept) in [
            (once(5), found("a", 5), true),
            (once(5), found("a", 6), false),
            (once(5), found("b", 5), false),
            (once(5), None, false),
            (again, found("a", 5), true),
            (again, found("a", 6), true),
            (again, found("a", 4), false),
            (again, found("b", 6), false),
            (again, None, false),
        ] {
            assert_eq!(written.matches(found.as_ref(), "a"), kept, "{found:?}");
        }
    }

    #[test]
    fn gap_is_time_between_acknowledged_writes() {
        let begun = Instant::now()
            .checked_sub(Duration::from_secs(10))
            .unwrap_or_else(Instant::now);
        let mut ledger = Ledger::new("k/", begun);
        // Before the first there is no gap: the cluster was not there yet.
        ledger.record(0, Ok(once(5)));
        assert_eq!(ledger.gap, Duration::ZERO);
        let back = Instant::now()
            .checked_sub(Duration::from_secs(4))
            .unwrap_or_else(Instant::now);
        ledger.last = back;
        ledger.record(1, Err(anyhow::anyhow!("no answer")));
        ledger.record(2, Ok(once(6)));
        assert!(ledger.gap >= Duration::from_secs(4), "{:?}", ledger.gap);
        assert_eq!(ledger.gap_begun, back);
        assert_eq!(ledger.acknowledged.len(), 2);
        assert_eq!(ledger.unknown, [1]);
        let tally = |silence| ledger.tally(&BTreeMap::new(), Duration::from_secs(silence));
        assert_eq!(tally(1).gap, ledger.gap);
        assert_eq!(tally(60).gap, Duration::from_mins(1));
    }

    #[test]
    fn only_missing_acknowledged_writes_are_lost() {
        let mut ledger = Ledger::new("k/", Instant::now());
        ledger.record(0, Ok(once(5)));
        ledger.record(1, Err(anyhow::anyhow!("no answer")));
        ledger.record(2, Ok(once(7)));
        ledger.record(3, Ok(once(8)));
        let kept = |number, revision| (key("k/", number), (value("k/", number), revision));
        let lost = |found: &[(String, (String, i64))]| -> Vec<(String, Option<i64>)> {
            let found = found.iter().cloned().collect();
            let tally = ledger.tally(&found, Duration::ZERO);
            assert_eq!((tally.acknowledged, tally.unknown), (3, 1));
            tally
                .lost
                .into_iter()
                .map(|one| (one.key, one.found))
                .collect()
        };
        assert!(lost(&[kept(0, 5), kept(2, 7), kept(3, 8)]).is_empty());
        // Another value, another revision, and nothing at all.
        let other = (key("k/", 0), (value("k/", 1), 5));
        assert_eq!(
            lost(&[other, kept(2, 9)]),
            [
                (key("k/", 0), Some(5)),
                (key("k/", 2), Some(9)),
                (key("k/", 3), None)
            ]
        );
    }
}
