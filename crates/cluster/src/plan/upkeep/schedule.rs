//! Determines when a scheduled defragmentation is due. The result depends only on the schedule and the time.

use api::cluster::Defragmentation;
use jiff::{SignedDuration, Timestamp};
use runtime::schedule::{Problem, Schedule};

/// A scheduled defragmentation that cannot start within this time is skipped.
const LATEST: SignedDuration = SignedDuration::from_hours(1);

/// The most recent scheduled time; `None` if it is older than `LATEST`, or if there is no schedule.
pub(super) fn due(rule: &Defragmentation, now: Timestamp) -> Result<Option<Timestamp>, String> {
    let Some(text) = &rule.schedule else {
        return Ok(None);
    };
    let schedule = Schedule::parse(text, rule.time_zone.as_deref()).map_err(|it| message(&it))?;
    let last = schedule.last_until(now);
    Ok(last.filter(|last| now.duration_since(*last) <= LATEST))
}

fn message(problem: &Problem) -> String {
    match problem {
        Problem::Schedule { text, why } => format!(
            "spec.upkeep.defragmentation.schedule {text:?} is invalid: {why}; set five cron fields such as 0 3 * * \
             6, or @weekly"
        ),
        Problem::TimeZone { name } => format!(
            "spec.upkeep.defragmentation.timeZone {name:?} is not known: use a name such as Europe/Berlin"
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rule(schedule: &str, zone: Option<&str>) -> Defragmentation {
        Defragmentation {
            schedule: Some(schedule.to_owned()),
            time_zone: zone.map(str::to_owned),
            ..Defragmentation::default()
        }
    }

    fn at(text: &str) -> Timestamp {
        text.parse().unwrap()
    }

    #[test]
    fn scheduled_defragmentation_may_start_up_to_an_hour_late() {
        let rule = rule("0 3 * * *", None);
        for (now, expected) in [
            ("2026-07-01T02:59:59Z", None),
            ("2026-07-01T03:00:00Z", Some("2026-07-01T03:00:00Z")),
            ("2026-07-01T03:59:00Z", Some("2026-07-01T03:00:00Z")),
            ("2026-07-01T04:30:00Z", None),
        ] {
            assert_eq!(due(&rule, at(now)), Ok(expected.map(at)), "{now}");
        }
    }

    #[test]
    fn defragmentation_schedule_uses_its_time_zone() {
        let rule = rule("0 3 * * *", Some("Europe/Berlin"));
        let due = due(&rule, at("2026-07-01T01:10:00Z"));
        assert_eq!(due, Ok(Some(at("2026-07-01T01:00:00Z"))));
    }

    #[test]
    fn invalid_schedule_or_time_zone_is_reported() {
        let now = at("2026-07-01T01:10:00Z");
        assert!(due(&rule("99 * * * *", None), now).is_err_and(|text| text.contains("99")));
        let empty = due(&rule(", 3 * * 6", None), now);
        assert!(empty.is_err_and(|text| text.contains("empty entry")));
        let unknown = due(&rule("@daily", Some("Mars/Base")), now);
        assert!(unknown.is_err_and(|text| text.contains("Mars/Base")));
        assert_eq!(due(&Defragmentation::default(), now), Ok(None));
    }
}
