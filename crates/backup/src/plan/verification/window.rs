//! The times at which a verification may start (`spec.verification.window`). Performs no I/O.

use api::backup::VerificationWindow;
use jiff::{SignedDuration, Timestamp};
use runtime::schedule::Schedule;

/// The first time at or after `now` at which the window is open. Without a window, this is `now`. `None` if the window
/// never opens again.
pub(super) fn opening(window: Option<&VerificationWindow>, now: Timestamp) -> Option<Timestamp> {
    let Some(window) = window else {
        return Some(now);
    };
    let schedule = Schedule::parse(&window.schedule, window.time_zone.as_deref()).ok()?;
    let length = SignedDuration::try_from(window.duration.parse()?).ok()?;
    let opened = schedule.last_until(now);
    if opened.is_some_and(|opened| now.duration_since(opened) < length) {
        return Some(now);
    }
    schedule.next_after(now)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn opens(schedule: &str, zone: &str, duration: &str, now: &str) -> Option<String> {
        let window = json!({ "schedule": schedule, "timeZone": zone, "duration": duration });
        let window: VerificationWindow = serde_json::from_value(window).unwrap();
        let found = opening(Some(&window), now.parse().unwrap());
        found.map(|time| time.to_string())
    }

    #[test]
    fn window_opens_at_its_start_and_closes_after_its_duration() {
        for (now, expected) in [
            ("2026-01-02T21:59:59Z", "2026-01-02T22:00:00Z"),
            ("2026-01-02T22:00:00Z", "2026-01-02T22:00:00Z"),
            // The window opens at 22:00 and closes at 04:00 of the next day.
            ("2026-01-03T03:59:59Z", "2026-01-03T03:59:59Z"),
            ("2026-01-03T04:00:00Z", "2026-01-03T22:00:00Z"),
        ] {
            let found = opens("0 22 * * *", "Etc/UTC", "6h", now);
            assert_eq!(found.as_deref(), Some(expected), "{now}");
        }
    }

    #[test]
    fn window_follows_its_time_zone() {
        let found = |now| opens("0 22 * * SAT", "Europe/Berlin", "2h", now);
        // The window opens on Saturday, January 3, at 22:00 in Berlin.
        let start = "2026-01-03T21:00:00Z";
        assert_eq!(found("2026-01-02T12:00:00Z").as_deref(), Some(start));
        let inside = "2026-01-03T22:30:00Z";
        assert_eq!(found(inside).as_deref(), Some(inside));
        let next = "2026-01-10T21:00:00Z";
        assert_eq!(found("2026-01-03T23:00:00Z").as_deref(), Some(next));
    }

    #[test]
    fn unset_window_or_window_as_long_as_its_interval_is_always_open() {
        let now = "2026-01-02T12:00:00Z";
        assert_eq!(opens("@daily", "Etc/UTC", "24h", now).as_deref(), Some(now));
        let now: Timestamp = now.parse().unwrap();
        assert_eq!(opening(None, now), Some(now));
    }
}
