//! Schedules and backup policies with mistakes of users. The operator evaluates the policies of all tenants, so an
//! invalid policy must be rejected quickly.
#![allow(clippy::unwrap_used, clippy::panic)]

#[path = "../../api/tests/damaged/mod.rs"]
mod damaged;

use api::backup::BackupPolicy;
use backup::plan::schedule::{Next, Schedule};
use damaged::{assert_little_memory, bounded, cases, damaged, damaged_text};
use jiff::Timestamp;
use proptest::prelude::*;

/// The cron schedules that the tests damage. Some use special characters, and one names February 30, which never
/// occurs.
const SCHEDULES: &[&str] = &[
    "0 3 * * *",
    "*/15 8-18 * * 1-5",
    "@daily",
    "0 0 30 2 *",
    "0 0 29 2 1",
    "59 23 31 12 *",
    "0 0 L * *",
    "0 0 * * 5#2",
    "0 0 15W * MON-FRI",
    "1,2,3,4-59/7 * * JAN,FEB SUN",
];
const ZONES: &[&str] = &[
    "Etc/UTC",
    "Europe/Berlin",
    "America/New_York",
    "Asia/Kathmandu",
];

fn evaluate(policy: &BackupPolicy, second: i64) {
    let now = Timestamp::from_second(second).unwrap();
    let found = bounded(|| {
        let schedule = Schedule::of(policy).ok().flatten()?;
        Some(schedule.next(Some(now), now, "seed", now))
    });
    if let Some(Next::At(time)) = found {
        assert!(time > now, "{policy:?}: {time} is not after {now}");
    }
}

proptest! {
    #![proptest_config(cases(256))]

    #[test]
    fn damaged_schedules_are_rejected_or_evaluated(
        schedule in damaged_text(SCHEDULES),
        zone in prop_oneof![4 => prop::sample::select(ZONES).prop_map(str::to_owned), 1 => damaged_text(ZONES)],
        deadline in prop::option::of(any::<i64>()),
        second in 0_i64..4_000_000_000,
    ) {
        let policy = BackupPolicy {
            schedule: Some(schedule),
            time_zone: Some(zone),
            starting_deadline_seconds: deadline,
            ..BackupPolicy::default()
        };
        evaluate(&policy, second);
        assert_little_memory();
    }

    #[test]
    fn damaged_backup_policies_are_rejected_or_evaluated(
        text in damaged(&[
            &br#"{"backupIntervalInSecond":3600,"maxBackups":5,"timeoutInSecond":600,"startingDeadlineSeconds":60}"#[..],
            &br#"{"schedule":"0 3 * * *","timeZone":"Europe/Berlin","retention":{"keepDaily":7},"maxAge":"72h"}"#[..],
        ]),
        second in 0_i64..4_000_000_000,
    ) {
        if let Ok(policy) = bounded(|| serde_json::from_slice::<BackupPolicy>(&text)) {
            evaluate(&policy, second);
        }
    }
}
