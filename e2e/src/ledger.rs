//! The acknowledged writes of a client, and the time between them, from etcd's responses.

use std::collections::BTreeMap;
use std::fmt;
use std::time::{Duration, Instant};

use anyhow::Result;

#[derive(Clone, Copy, Debug)]
pub(crate) struct AcknowledgedWrite {
    /// The revision in etcd's response.
    pub(crate) revision: i64,
    /// True if the client sent the write more than once.
    pub(crate) retried: bool,
}

impl AcknowledgedWrite {
    /// True if the stored value and its revision belong to this write. After a retry, the revision may be later than
    /// acknowledged: etcd can apply the first attempt, whose response was lost, after the second attempt.
    fn matches(self, found: Option<&(String, i64)>, value: &str) -> bool {
        found.is_some_and(|(now, at)| {
            now == value && (*at == self.revision || (self.retried && *at > self.revision))
        })
    }
}

/// An acknowledged write whose key is missing or has another value or revision.
#[derive(Clone, Debug)]
pub struct Lost {
    /// The key of the write.
    pub key: String,
    /// The revision that etcd acknowledged.
    pub revision: i64,
    /// The revision of the stored value. `None` if the key is missing.
    pub found: Option<i64>,
}

/// The writes of one client and their outcomes.
pub(crate) struct Ledger {
    /// The prefix of the client's keys.
    prefix: &'static str,
    begun: Instant,
    /// The acknowledged writes, by the number of the key.
    acknowledged: BTreeMap<u64, AcknowledgedWrite>,
    /// The revision and the time of each acknowledgment, in the order of the acknowledgments.
    times: Vec<(i64, Instant)>,
    /// The numbers of the keys whose write was rejected or not answered.
    unknown: Vec<u64>,
    last: Instant,
    gap: Duration,
    gap_begun: Instant,
    last_error: String,
}

/// The summary of a client's writes.
#[derive(Clone, Debug)]
pub struct Tally {
    /// Writes that etcd acknowledged.
    pub acknowledged: usize,
    /// Writes that etcd rejected or did not answer in time. etcd may have applied them.
    pub unknown: usize,
    /// Acknowledged writes that etcd has lost or changed.
    pub lost: Vec<Lost>,
    /// The maximum time between two acknowledged writes.
    pub gap: Duration,
    /// The time from the start of the client to the start of the longest gap.
    pub gap_begun: Duration,
    /// The error of the last failed write.
    pub last_error: String,
}

impl fmt::Display for Tally {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            to,
            "{} writes acknowledged, {} unanswered, {} lost; longest gap {:.1} s, which began after {:.1} s",
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

pub(crate) fn key(prefix: &str, number: u64) -> String {
    format!("{prefix}{number:08}")
}

pub(crate) fn value(prefix: &str, number: u64) -> String {
    format!("the value of {}", key(prefix, number))
}

impl Ledger {
    /// A ledger of a client that starts now.
    pub(crate) const fn new(prefix: &'static str, begun: Instant) -> Self {
        Self {
            prefix,
            begun,
            acknowledged: BTreeMap::new(),
            times: Vec::new(),
            unknown: Vec::new(),
            last: begun,
            gap: Duration::ZERO,
            gap_begun: begun,
            last_error: String::new(),
        }
    }

    pub(crate) fn record(&mut self, number: u64, outcome: Result<AcknowledgedWrite>) {
        match outcome {
            Ok(written) => {
                let now = Instant::now();
                let silence = now.duration_since(self.last);
                if silence > self.gap && !self.acknowledged.is_empty() {
                    (self.gap, self.gap_begun) = (silence, self.last);
                }
                self.last = now;
                self.times.push((written.revision, now));
                self.acknowledged.insert(number, written);
            }
            Err(error) => {
                self.unknown.push(number);
                self.last_error = format!("{error:#}");
            }
        }
    }

    pub(crate) fn acknowledged(&self) -> usize {
        self.acknowledged.len()
    }

    /// The writes with a revision greater than `revision` that were acknowledged before `at`: their number, and the
    /// time from the first of them to the last write that was acknowledged before `at`.
    pub(crate) fn newer_than(&self, revision: i64, at: Instant) -> (usize, Duration) {
        let before = self.times.iter().filter(|(_, time)| *time <= at);
        let last = before.clone().map(|(_, time)| *time).max().unwrap_or(at);
        let newer: Vec<Instant> = before
            .filter(|(found, _)| *found > revision)
            .map(|(_, time)| *time)
            .collect();
        let first = newer.iter().min().copied().unwrap_or(last);
        (newer.len(), last.duration_since(first))
    }

    pub(crate) fn silence(&self) -> Duration {
        self.last.elapsed()
    }

    /// The error of the last failed write.
    pub(crate) fn last_error(&self) -> &str {
        &self.last_error
    }

    /// Compares the acknowledged writes with the stored values and revisions. `silence`, the time since the last
    /// acknowledged write, also counts as a gap.
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
    fn ledger_counts_newer_writes_acknowledged_before_given_time() {
        let begun = Instant::now();
        let mut ledger = Ledger::new("a/", begun);
        for (number, revision) in [(0, 5), (1, 6), (2, 8)] {
            ledger.record(number, Ok(once(revision)));
        }
        let now = Instant::now();
        assert_eq!(ledger.newer_than(8, now), (0, Duration::ZERO));
        assert_eq!(ledger.newer_than(5, now).0, 2);
        assert_eq!(ledger.newer_than(5, begun).0, 0);
    }

    #[test]
    fn ledger_accepts_later_revision_only_for_retried_writes() {
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
    fn ledger_measures_gap_between_acknowledged_writes() {
        let begun = Instant::now()
            .checked_sub(Duration::from_secs(10))
            .unwrap_or_else(Instant::now);
        let mut ledger = Ledger::new("k/", begun);
        // The time before the first write does not count as a gap, because the cluster may still be starting.
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
    fn ledger_reports_only_acknowledged_writes_as_lost() {
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
        // Three writes are lost: key 0 has another value, key 2 has another revision, and key 3 is missing.
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
