//! Computes the time of the next run of a periodic EtcdBackup. A run is a backup that the schedule starts. Performs no
//! I/O.

use api::backup::BackupPolicy;
use jiff::{SignedDuration, Timestamp};
use runtime::schedule::{Problem, Schedule as Cron};

/// The jitter of a run is at most the schedule's interval divided by this number.
const JITTER_DIVISOR: i32 = 20;
/// Maximum jitter of a run.
const MAX_JITTER: SignedDuration = SignedDuration::from_secs(30);

/// Minimum starting deadline in seconds. A reconcile starts slightly after the planned time, so a shorter deadline
/// could skip every run.
const MIN_STARTING_DEADLINE: i64 = 10;

#[derive(Debug)]
enum Rule {
    Every(SignedDuration),
    At(Cron),
}

/// A parsed schedule: a cron expression with its time zone, or an interval.
#[derive(Debug)]
pub struct Schedule {
    rule: Rule,
    /// A run is skipped if it cannot start within this time after its planned time.
    deadline: Option<SignedDuration>,
}

/// When the next run is due.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// The run is due now.
    Due,
    /// The run is due at a later time.
    At(Timestamp),
    /// The schedule has no further run.
    Never,
}

impl Schedule {
    /// The schedule of a policy; `None` for a single backup.
    ///
    /// # Errors
    ///
    /// Fails if `schedule` is not a cron expression or `timeZone` is unknown.
    pub fn of(policy: &BackupPolicy) -> Result<Option<Self>, Problem> {
        let deadline = policy
            .starting_deadline_seconds
            .map(|seconds| SignedDuration::from_secs(seconds.max(MIN_STARTING_DEADLINE)));
        let rule = match (&policy.schedule, policy.backup_interval_in_second) {
            (Some(text), _) => Rule::At(Cron::parse(text, policy.time_zone.as_deref())?),
            (None, Some(seconds)) if seconds > 0 => Rule::Every(SignedDuration::from_secs(seconds)),
            (None, _) => return Ok(None),
        };
        Ok(Some(Self { rule, deadline }))
    }

    /// Returns the time of the next run. `last` is the start of the last backup, `created` the creation of the
    /// EtcdBackup. If several runs were missed, only one run is due. The jitter depends on `seed`.
    pub fn next(
        &self,
        last: Option<Timestamp>,
        created: Timestamp,
        seed: &str,
        now: Timestamp,
    ) -> Next {
        match &self.rule {
            // With an interval, the first backup starts at once.
            Rule::Every(_) if last.is_none() => Next::Due,
            Rule::Every(interval) => self.every(*interval, last.unwrap_or(created), seed, now),
            Rule::At(cron) => self.at(cron, last.unwrap_or(created), seed, now),
        }
    }

    /// The time of the first run after `last`, without jitter. `last` is the completion of the newest backup, or
    /// `None` if no backup exists. `None` is returned if the schedule has no further run.
    pub fn run_after(&self, last: Option<Timestamp>, created: Timestamp) -> Option<Timestamp> {
        match (&self.rule, last) {
            (Rule::Every(_), None) => Some(created),
            (Rule::Every(interval), Some(last)) => Some(later(last, *interval)),
            (Rule::At(cron), last) => cron.next_after(last.unwrap_or(created)),
        }
    }

    fn every(&self, interval: SignedDuration, last: Timestamp, seed: &str, now: Timestamp) -> Next {
        let jitter = self.jitter(interval, seed, last);
        let mut planned = later(last, interval);
        if let Some(deadline) = self.deadline
            && now.duration_since(planned) > deadline
        {
            // `planned` becomes the latest missed run, or the next run if the starting deadline of the latest missed
            // run has passed.
            let missed = now.duration_since(planned).as_secs() / interval.as_secs().max(1);
            let intervals =
                |count: i64| SignedDuration::from_secs(interval.as_secs().saturating_mul(count));
            planned = later(planned, intervals(missed));
            if now.duration_since(planned) > deadline {
                planned = later(planned, interval);
            }
        }
        due(later(planned, jitter), now)
    }

    fn at(&self, cron: &Cron, last: Timestamp, seed: &str, now: Timestamp) -> Next {
        // The search begins after `from`, which skips all runs whose starting deadline has passed.
        let from = match self.deadline {
            // If `now` minus the deadline is before the first representable time, `since` is `None`, and no run is
            // skipped.
            Some(deadline) => {
                let since = now.checked_sub(deadline).ok();
                let since = since.and_then(|it| it.checked_sub(SignedDuration::from_secs(1)).ok());
                since.map_or(last, |since| last.max(since))
            }
            None => last,
        };
        let Some(planned) = cron.next_after(from) else {
            return Next::Never;
        };
        let interval = cron
            .next_after(planned)
            .map_or(MAX_JITTER * JITTER_DIVISOR, |next| {
                next.duration_since(planned)
            });
        due(later(planned, self.jitter(interval, seed, planned)), now)
    }

    /// A delay of at most a twentieth of the interval, so that the backups of EtcdBackups with the same schedule start
    /// at different times.
    fn jitter(&self, interval: SignedDuration, seed: &str, run: Timestamp) -> SignedDuration {
        let max = (interval / JITTER_DIVISOR).min(MAX_JITTER);
        // The jitter is at most half of the starting deadline, so that a delayed run does not miss the deadline.
        let max = self.deadline.map_or(max, |deadline| max.min(deadline / 2));
        let max = max.as_secs().max(0).unsigned_abs();
        let seconds = hash(seed, run) % (max + 1);
        SignedDuration::from_secs(i64::try_from(seconds).unwrap_or_default())
    }
}

fn due(time: Timestamp, now: Timestamp) -> Next {
    if time <= now {
        Next::Due
    } else {
        Next::At(time)
    }
}

fn later(time: Timestamp, by: SignedDuration) -> Timestamp {
    time.checked_add(by).unwrap_or(Timestamp::MAX)
}

/// FNV-1a, a hash that is the same in every process and release.
fn hash(seed: &str, run: Timestamp) -> u64 {
    let bytes = seed.bytes().chain(run.as_second().to_le_bytes());
    bytes.fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn at(text: &str) -> Timestamp {
        text.parse().unwrap()
    }

    fn policy(json: &str) -> BackupPolicy {
        serde_json::from_str(json).unwrap()
    }

    fn schedule(json: &str) -> Schedule {
        Schedule::of(&policy(json)).unwrap().unwrap()
    }

    /// The next run, rounded down to a full minute to remove the jitter.
    fn next(json: &str, last: Option<&str>, now: &str) -> Next {
        let found = schedule(json).next(last.map(at), at("2026-01-01T00:00:00Z"), "seed", at(now));
        match found {
            Next::At(time) => Next::At(time - SignedDuration::from_secs(time.as_second() % 60)),
            other => other,
        }
    }

    const HOURLY: &str = r#"{"backupIntervalInSecond":3600}"#;

    #[test]
    fn single_backup_has_no_schedule() {
        for json in ["{}", r#"{"backupIntervalInSecond":0}"#] {
            assert!(Schedule::of(&policy(json)).unwrap().is_none(), "{json}");
        }
    }

    #[test]
    fn next_run_is_computed_from_newest_backup_or_creation() {
        let created = at("2026-01-01T08:00:00Z");
        let last = at("2026-01-01T10:03:00Z");
        let daily = schedule(r#"{"schedule":"@daily"}"#);
        for found in [
            daily.run_after(None, created),
            daily.run_after(Some(last), created),
        ] {
            assert_eq!(found, Some(at("2026-01-02T00:00:00Z")));
        }
        let hourly = schedule(HOURLY);
        assert_eq!(hourly.run_after(None, created), Some(created));
        let next = at("2026-01-01T11:03:00Z");
        assert_eq!(hourly.run_after(Some(last), created), Some(next));
    }

    #[test]
    fn first_backup_with_interval_is_due_at_once() {
        assert_eq!(next(HOURLY, None, "2026-01-01T00:00:00Z"), Next::Due);
        assert_eq!(next(HOURLY, None, "2030-01-01T00:00:00Z"), Next::Due);
    }

    #[test]
    fn next_backup_is_due_after_interval() {
        let last = Some("2026-01-01T10:00:00Z");
        let planned = Next::At(at("2026-01-01T11:00:00Z"));
        assert_eq!(next(HOURLY, last, "2026-01-01T10:00:01Z"), planned);
        assert_eq!(next(HOURLY, last, "2026-01-01T10:59:59Z"), planned);
        assert_eq!(next(HOURLY, last, "2026-01-01T11:00:30Z"), Next::Due);
    }

    /// Requirement "backups 4" of docs/conformance.md.
    #[test]
    fn schedule_jitter_is_deterministic_and_bounded() {
        let last = at("2026-01-15T12:00:00Z");
        for (seconds, max) in [(3600, 30), (100, 5), (10, 0)] {
            let text = format!(r#"{{"backupIntervalInSecond":{seconds}}}"#);
            let jitter = |seed: &str| match schedule(&text).next(Some(last), last, seed, last) {
                Next::At(time) => time.duration_since(last).as_secs() - seconds,
                other => panic!("{other:?}"),
            };
            let first: Vec<i64> = (0..200).map(|seed| jitter(&seed.to_string())).collect();
            let second: Vec<i64> = (0..200).map(|seed| jitter(&seed.to_string())).collect();
            assert_eq!(first, second);
            // The 200 seeds produce every jitter from zero to `max` seconds.
            let distinct: std::collections::BTreeSet<i64> = first.into_iter().collect();
            assert!(
                distinct.iter().eq((0..=max).collect::<Vec<_>>().iter()),
                "{distinct:?}"
            );
        }
    }

    #[test]
    fn several_missed_runs_cause_one_run() {
        let now = "2026-01-03T10:30:00Z";
        assert_eq!(next(HOURLY, Some("2026-01-01T10:00:00Z"), now), Next::Due);
        assert_eq!(
            next(HOURLY, Some(now), now),
            Next::At(at("2026-01-03T11:30:00Z"))
        );
        let daily = r#"{"schedule":"0 3 * * *"}"#;
        assert_eq!(next(daily, Some("2026-01-01T03:00:00Z"), now), Next::Due);
        assert_eq!(
            next(daily, Some(now), now),
            Next::At(at("2026-01-04T03:00:00Z"))
        );
    }

    #[test]
    fn run_missed_beyond_starting_deadline_is_skipped() {
        let daily = r#"{"schedule":"0 3 * * *","startingDeadlineSeconds":600}"#;
        let last = Some("2026-01-01T03:00:00Z");
        assert_eq!(next(daily, last, "2026-01-03T03:09:00Z"), Next::Due);
        assert_eq!(
            next(daily, last, "2026-01-03T03:11:00Z"),
            Next::At(at("2026-01-04T03:00:00Z"))
        );
        let hourly = r#"{"backupIntervalInSecond":3600,"startingDeadlineSeconds":600}"#;
        assert_eq!(next(hourly, last, "2026-01-03T03:09:00Z"), Next::Due);
        assert_eq!(
            next(hourly, last, "2026-01-03T03:11:00Z"),
            Next::At(at("2026-01-03T04:00:00Z"))
        );
        assert_eq!(
            next(hourly, last, "2026-01-01T03:50:00Z"),
            Next::At(at("2026-01-01T04:00:00Z"))
        );
    }

    #[test]
    fn zero_starting_deadline_allows_delay_of_a_few_seconds() {
        let last = Some("2026-01-01T03:00:00Z");
        for json in [
            r#"{"backupIntervalInSecond":3600,"startingDeadlineSeconds":0}"#,
            r#"{"schedule":"0 * * * *","startingDeadlineSeconds":0}"#,
        ] {
            assert_eq!(
                next(json, last, "2026-01-01T04:00:06.5Z"),
                Next::Due,
                "{json}"
            );
            let missed = next(json, last, "2026-01-01T04:00:20Z");
            assert_eq!(missed, Next::At(at("2026-01-01T05:00:00Z")), "{json}");
        }
    }

    #[test]
    fn first_backup_with_cron_schedule_waits_for_first_run() {
        let daily = r#"{"schedule":"@daily"}"#;
        let tomorrow = Next::At(at("2026-01-02T00:00:00Z"));
        assert_eq!(next(daily, None, "2026-01-01T08:00:00Z"), tomorrow);
        assert_eq!(next(daily, None, "2026-01-02T00:01:00Z"), Next::Due);
    }

    #[test]
    fn schedule_uses_configured_time_zone() {
        let berlin = r#"{"schedule":"30 3 * * *","timeZone":"Europe/Berlin"}"#;
        let last = Some("2026-01-10T12:00:00Z");
        assert_eq!(
            next(berlin, last, "2026-01-10T12:00:00Z"),
            Next::At(at("2026-01-11T02:30:00Z"))
        );
        // In summer, Berlin is two hours ahead of UTC.
        assert_eq!(
            next(berlin, Some("2026-07-10T12:00:00Z"), "2026-07-10T12:00:00Z"),
            Next::At(at("2026-07-11T01:30:00Z"))
        );
        // On March 29, 02:30 does not exist in Berlin, because daylight saving time starts. The run is not skipped.
        let gap = r#"{"schedule":"30 2 * * *","timeZone":"Europe/Berlin"}"#;
        let found = next(gap, Some("2026-03-28T12:00:00Z"), "2026-03-28T12:00:00Z");
        assert!(
            matches!(found, Next::At(time) if time < at("2026-03-29T03:00:00Z")),
            "{found:?}"
        );
    }

    /// At the end of daylight saving time, one hour occurs twice. A daily run in this hour starts once, and an hourly
    /// run starts twice.
    #[test]
    fn repeated_hour_of_clock_change_causes_no_second_daily_run() {
        let daily = r#"{"schedule":"30 2 * * *","timeZone":"Europe/Berlin"}"#;
        let first = Next::At(at("2026-10-25T00:30:00Z"));
        let evening = "2026-10-24T12:00:00Z";
        assert_eq!(next(daily, Some(evening), evening), first);
        let begun = "2026-10-25T00:30:17Z";
        assert_eq!(
            next(daily, Some(begun), begun),
            Next::At(at("2026-10-26T01:30:00Z"))
        );
        let hourly = r#"{"schedule":"0 * * * *","timeZone":"Europe/Berlin"}"#;
        let mut last = "2026-10-24T23:00:20Z".to_owned();
        for hour in ["00", "01", "02", "03"] {
            let expected = format!("2026-10-25T{hour}:00:00Z");
            assert_eq!(
                next(hourly, Some(&last), &last),
                Next::At(at(&expected)),
                "{hour}"
            );
            last = expected.replace("00Z", "20Z");
        }
        // At the start of daylight saving time, the hour from 02:00 to 03:00 does not exist in Berlin. The next hourly
        // run starts one hour after the previous run.
        let spring = "2026-03-29T00:00:20Z";
        assert_eq!(
            next(hourly, Some(spring), spring),
            Next::At(at("2026-03-29T01:00:00Z"))
        );
    }

    #[test]
    fn cron_fields_have_standard_meaning() {
        let now = "2026-01-01T00:00:30Z"; // This day is a Thursday.
        for (text, expected) in [
            ("*/15 * * * *", "2026-01-01T00:15:00Z"),
            ("0 0 * * 0", "2026-01-04T00:00:00Z"),
            ("0 0 * * 7", "2026-01-04T00:00:00Z"),
            ("0 0 * * MON-FRI", "2026-01-02T00:00:00Z"),
            ("5 4 1 * *", "2026-01-01T04:05:00Z"),
            ("0 0 13 * 5", "2026-01-02T00:00:00Z"),
            ("@hourly", "2026-01-01T01:00:00Z"),
            ("@weekly", "2026-01-04T00:00:00Z"),
            ("@monthly", "2026-02-01T00:00:00Z"),
            ("@yearly", "2027-01-01T00:00:00Z"),
        ] {
            let json = format!(r#"{{"schedule":"{text}"}}"#);
            assert_eq!(
                next(&json, Some(now), now),
                Next::At(at(expected)),
                "{text}"
            );
        }
    }

    #[test]
    fn invalid_schedule_is_reported() {
        for text in ["every day", ", 3 * * *", "0 0 30 2 *"] {
            let json = format!(r#"{{"schedule":"{text}"}}"#);
            let problem = Schedule::of(&policy(&json)).unwrap_err();
            assert!(
                matches!(problem, Problem::Schedule { .. }),
                "{text}: {problem}"
            );
        }
        let problem = Schedule::of(&policy(
            r#"{"schedule":"@daily","timeZone":"Mars/Olympus"}"#,
        ));
        assert!(matches!(problem.unwrap_err(), Problem::TimeZone { .. }));
    }

    #[test]
    fn huge_starting_deadline_skips_no_run() {
        let text = r#"{"schedule":"0 3 * * *","startingDeadlineSeconds":9223372036854775807}"#;
        let last = "2026-01-01T03:00:00Z";
        assert_eq!(next(text, Some(last), "2026-01-05T00:00:00Z"), Next::Due);
        let waits = next(text, Some(last), "2026-01-01T04:00:00Z");
        assert!(matches!(waits, Next::At(_)), "{waits:?}");
    }

    proptest! {
        /// For every interval, no run is due directly after a run. The next run is due at the latest after the interval
        /// plus the jitter.
        #[test]
        fn next_run_is_due_within_interval_and_jitter(
            interval in 1_i64..1_000_000,
            deadline in prop::option::of(0_i64..100_000),
            away in 0_i64..10_000_000,
            seed in "[a-z]{8}",
        ) {
            let mut policy = BackupPolicy { backup_interval_in_second: Some(interval), ..BackupPolicy::default() };
            policy.starting_deadline_seconds = deadline;
            let schedule = Schedule::of(&policy).unwrap().unwrap();
            let last = at("2026-01-01T00:00:00Z");
            let now = last + SignedDuration::from_secs(away);
            if let Next::At(time) = schedule.next(Some(last), last, &seed, now) {
                prop_assert!(time > now);
                prop_assert!(time.duration_since(now).as_secs() <= interval + interval / 20 + 1);
                prop_assert_eq!(schedule.next(Some(last), last, &seed, time), Next::Due);
            } else {
                prop_assert!(away >= interval);
            }
            let after = schedule.next(Some(now), last, &seed, now);
            prop_assert!(matches!(after, Next::At(time) if time > now));
        }
    }
}
