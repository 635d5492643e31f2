//! Which backups of a path are kept, and which may be deleted. Pure.
//!
//! A backup is kept while a rule keeps it: the newest `maxBackups`, or the newest of one of the last hours, days,
//! weeks and months that have one. Without such a rule all are kept. `maxAge` takes what is older whatever keeps it.

use std::cmp::Reverse;
use std::collections::BTreeSet;

use api::backup::name::{self, Numbered};
use api::backup::{BackupPolicy, Retention};
use api::manifest::{MANIFEST_SUFFIX, manifest_key};
use jiff::civil::Date;
use jiff::tz::TimeZone;
use jiff::{SignedDuration, Timestamp};
use serde::{Deserialize, Serialize};

/// What is kept.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rules {
    newest: usize,
    hourly: usize,
    daily: usize,
    weekly: usize,
    monthly: usize,
    age: Option<SignedDuration>,
}

impl Rules {
    /// Reads a policy.
    pub fn of(policy: &BackupPolicy) -> Self {
        let none = Retention::default();
        let kept = policy.retention.as_ref().unwrap_or(&none);
        let count =
            |number: Option<i32>| usize::try_from(number.unwrap_or_default()).unwrap_or_default();
        let age = policy
            .max_age
            .as_ref()
            .and_then(api::duration::DurationText::parse);
        Self {
            newest: usize::try_from(policy.max_backups.unwrap_or_default()).unwrap_or_default(),
            hourly: count(kept.keep_hourly),
            daily: count(kept.keep_daily),
            weekly: count(kept.keep_weekly),
            monthly: count(kept.keep_monthly),
            age: age.and_then(|age| SignedDuration::try_from(age).ok()),
        }
    }

    /// Whether anything is ever deleted.
    pub fn delete(&self) -> bool {
        *self != Self::default()
    }

    fn limits(&self) -> bool {
        self.newest + self.hourly + self.daily + self.weekly + self.monthly > 0
    }
}

/// A backup as its name tells it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    /// Its key.
    pub key: String,
    /// What the name says.
    pub parts: Numbered,
}

/// What the listing of a path holds.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Listing {
    /// The backups, newest first.
    pub backups: Vec<Found>,
    /// Manifests whose backup is not in the listing: their keys.
    pub orphans: Vec<Found>,
}

/// Reads a listing. Invariant 13: what is not in full a name of this path is not looked at any further.
pub fn read<'a>(path: &str, keys: impl IntoIterator<Item = &'a str>) -> Listing {
    let mut listing = Listing::default();
    let mut manifests = Vec::new();
    for key in keys {
        let of = key.strip_suffix(MANIFEST_SUFFIX);
        if let Some(parts) = name::parse(path, of.unwrap_or(key)) {
            let found = Found {
                key: key.to_owned(),
                parts,
            };
            if of.is_some() {
                manifests.push(found);
            } else {
                listing.backups.push(found);
            }
        }
    }
    listing.backups.sort_by_key(|found| Reverse(found.parts));
    listing.backups.dedup();
    let held: BTreeSet<String> = listing
        .backups
        .iter()
        .map(|found| manifest_key(&found.key))
        .collect();
    manifests.retain(|manifest| !held.contains(&manifest.key));
    listing.orphans = manifests;
    listing
}

/// The backups that may be deleted, oldest first: only such as are older than `verified`, which was found whole in
/// the store just now (invariant 9).
pub fn surplus<'a>(
    backups: &'a [Found],
    rules: &Rules,
    verified: Numbered,
    now: Timestamp,
) -> Vec<&'a Found> {
    // What is newer may still be on its way: it neither counts nor goes.
    let mut known: Vec<&Found> = backups
        .iter()
        .filter(|found| found.parts <= verified)
        .collect();
    known.sort_by_key(|found| Reverse(found.parts));
    let mut kept: BTreeSet<Numbered> = BTreeSet::new();
    if rules.limits() {
        kept.extend(known.iter().take(rules.newest).map(|found| found.parts));
        keep_newest_of(&known, rules.hourly, &mut kept, |time| {
            time.as_second().div_euclid(3600)
        });
        keep_newest_of(&known, rules.daily, &mut kept, |time| days(date(time)));
        // Weeks begin on Monday: 1970-01-01 was a Thursday.
        keep_newest_of(&known, rules.weekly, &mut kept, |time| {
            (days(date(time)) + 3).div_euclid(7)
        });
        keep_newest_of(&known, rules.monthly, &mut kept, |time| {
            let date = date(time);
            i64::from(date.year()) * 12 + i64::from(date.month())
        });
    } else {
        kept.extend(known.iter().map(|found| found.parts));
    }
    let too_old = |found: &Found| {
        rules
            .age
            .is_some_and(|age| now.duration_since(found.parts.time) > age)
    };
    let mut surplus: Vec<&Found> = known
        .into_iter()
        // Never the newest, and never but for a newer one.
        .filter(|found| found.parts < verified)
        .filter(|found| !kept.contains(&found.parts) || too_old(found))
        .collect();
    surplus.reverse();
    surplus
}

fn keep_newest_of(
    newest_first: &[&Found],
    count: usize,
    kept: &mut BTreeSet<Numbered>,
    period: impl Fn(Timestamp) -> i64,
) {
    let mut seen = BTreeSet::new();
    for found in newest_first {
        if seen.len() < count && seen.insert(period(found.parts.time)) {
            kept.insert(found.parts);
        }
    }
}

fn date(time: Timestamp) -> Date {
    time.to_zoned(TimeZone::UTC).date()
}

fn days(date: Date) -> i64 {
    let since = date.duration_since(Date::constant(1970, 1, 1));
    since.as_secs().div_euclid(86_400)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const HOUR: i64 = 3600;
    const DAY: i64 = 24 * HOUR;

    /// 2026-01-15T12:00:00Z, a Thursday.
    fn now() -> Timestamp {
        "2026-01-15T12:00:00Z".parse().unwrap()
    }

    fn back(seconds: i64) -> Timestamp {
        now() - SignedDuration::from_secs(seconds)
    }

    fn found(revision: u64, seconds_ago: i64) -> Found {
        let parts = Numbered {
            time: back(seconds_ago),
            revision,
        };
        Found {
            key: name::name("p", parts),
            parts,
        }
    }

    fn rules(json: &str) -> Rules {
        Rules::of(&serde_json::from_str(json).unwrap())
    }

    /// The ages in seconds of what is kept of backups of these ages.
    fn kept(json: &str, ages: &[i64]) -> Vec<i64> {
        let backups: Vec<Found> = ages.iter().map(|age| found(1, *age)).collect();
        let newest = backups.iter().map(|found| found.parts).max().unwrap();
        let gone = surplus(&backups, &rules(json), newest, now());
        let stays = |found: &&Found| !gone.contains(found);
        let ages = backups.iter().filter(stays);
        ages.map(|found| now().duration_since(found.parts.time).as_secs())
            .collect()
    }

    #[test]
    fn nothing_is_deleted_without_a_rule() {
        for json in [
            "{}",
            r#"{"maxBackups":0}"#,
            r#"{"retention":{}}"#,
            r#"{"retention":{"keepDaily":0}}"#,
        ] {
            assert!(!rules(json).delete(), "{json}");
            assert_eq!(
                kept(json, &[0, DAY, 400 * DAY]),
                [0, DAY, 400 * DAY],
                "{json}"
            );
        }
    }

    #[test]
    fn the_newest_few_are_kept() {
        let ages = [0, HOUR, 2 * HOUR, 3 * HOUR];
        assert_eq!(kept(r#"{"maxBackups":2}"#, &ages), [0, HOUR]);
        assert_eq!(kept(r#"{"maxBackups":9}"#, &ages), ages);
        assert_eq!(kept(r#"{"maxBackups":1}"#, &ages), [0]);
    }

    #[test]
    fn what_is_too_old_goes_and_the_newest_stays_whatever_its_age() {
        let old = r#"{"maxAge":"48h"}"#;
        assert_eq!(kept(old, &[HOUR, 2 * DAY, 2 * DAY + 1]), [HOUR, 2 * DAY]);
        assert_eq!(kept(old, &[30 * DAY, 31 * DAY]), [30 * DAY]);
        // Also what another rule would keep.
        assert_eq!(
            kept(r#"{"maxAge":"1h","maxBackups":5}"#, &[0, HOUR, DAY]),
            [0, HOUR]
        );
    }

    #[test]
    fn the_newest_of_each_hour_day_week_and_month_is_kept() {
        let hourly = r#"{"retention":{"keepHourly":2}}"#;
        // 12:00, 11:50, 11:10, 10:59, 09:00.
        assert_eq!(kept(hourly, &[0, 600, 3000, 3660, 3 * HOUR]), [0, 600]);
        let daily = r#"{"retention":{"keepDaily":3}}"#;
        // Days without a backup do not count: an outage takes nothing away.
        assert_eq!(
            kept(
                daily,
                &[0, 6 * HOUR, 13 * HOUR, 20 * HOUR, 9 * DAY, 10 * DAY]
            ),
            [0, 13 * HOUR, 9 * DAY]
        );
        let weekly = r#"{"retention":{"keepWeekly":2}}"#;
        // Thursday, Monday of that week, the Sunday before, the Monday before that.
        assert_eq!(kept(weekly, &[0, 3 * DAY, 4 * DAY, 10 * DAY]), [0, 4 * DAY]);
        let monthly = r#"{"retention":{"keepMonthly":2}}"#;
        assert_eq!(
            kept(monthly, &[0, 14 * DAY, 15 * DAY, 40 * DAY]),
            [0, 15 * DAY]
        );
    }

    #[test]
    fn one_rule_is_enough_to_be_kept() {
        let both = r#"{"maxBackups":2,"retention":{"keepDaily":2}}"#;
        assert_eq!(kept(both, &[0, 60, 120, DAY, 2 * DAY]), [0, 60, DAY]);
    }

    /// Invariant 9.
    #[test]
    fn invariant_9_only_what_is_older_than_the_verified_one_goes() {
        let backups = [found(9, 0), found(8, 60), found(7, 120), found(6, 180)];
        let gone = surplus(
            &backups,
            &rules(r#"{"maxBackups":1}"#),
            backups[1].parts,
            now(),
        );
        assert_eq!(gone, [&backups[3], &backups[2]]);
    }

    /// After 999 comes 1000, and after a restore a revision that was there before.
    #[test]
    fn what_is_newest_is_told_by_time_and_number_and_not_by_text() {
        let backups = [found(1000, 0), found(999, 60), found(99, 120), found(5, 30)];
        let gone = surplus(
            &backups,
            &rules(r#"{"maxBackups":2}"#),
            backups[0].parts,
            now(),
        );
        assert_eq!(gone, [&backups[2], &backups[1]]);
    }

    /// Invariant 13.
    #[test]
    fn invariant_13_a_siblings_objects_are_not_seen() {
        let ours = found(3, 60).key;
        let manifest = manifest_key(&ours);
        let lonely = manifest_key(&found(2, 90).key);
        let keys = [
            "p",
            "p.manifest.json",
            "p_vault",
            "p_v1",
            ours.as_str(),
            manifest.as_str(),
            lonely.as_str(),
            "p_v2_v3_2026-01-15-12:00:00",
            "p-prod_v3_2026-01-15-12:00:00",
            "p_v3_2026-01-15-12:00:00.manifest.json.bak",
        ];
        let listing = read("p", keys);
        assert_eq!(listing.backups, [found(3, 60)]);
        let orphans: Vec<&str> = listing
            .orphans
            .iter()
            .map(|found| found.key.as_str())
            .collect();
        assert_eq!(orphans, [lonely.as_str()]);
    }

    fn policies() -> impl Strategy<Value = BackupPolicy> {
        let number = || prop::option::of(0_i32..6);
        (
            prop::option::of(0_i64..8),
            number(),
            number(),
            number(),
            number(),
            prop::option::of(0_u32..2000),
        )
            .prop_map(
                |(max_backups, keep_hourly, keep_daily, keep_weekly, keep_monthly, age)| {
                    BackupPolicy {
                        max_backups,
                        max_age: age.map(|hours| api::duration::DurationText(format!("{hours}h"))),
                        retention: Some(Retention {
                            keep_hourly,
                            keep_daily,
                            keep_weekly,
                            keep_monthly,
                        }),
                        ..BackupPolicy::default()
                    }
                },
            )
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2000))]

        /// Invariants 9 and 13: the newest stays, what goes is older than the verified one and in the listing, what
        /// one rule keeps stays unless it is too old, and what was decided once stays decided.
        #[test]
        fn invariant_9_whatever_the_rules_the_newest_stays(
            ages in prop::collection::vec((0_u64..2000, 0_i64..100 * DAY), 1..60),
            policy in policies(),
            which in 0_usize..60,
        ) {
            let backups: Vec<Found> = ages.iter().map(|(revision, age)| found(*revision, *age)).collect();
            let rules = Rules::of(&policy);
            let verified = backups[which % backups.len()].parts;
            let gone: Vec<Found> = surplus(&backups, &rules, verified, now()).into_iter().cloned().collect();
            for found in &gone {
                prop_assert!(found.parts < verified);
                prop_assert!(backups.contains(found));
            }
            prop_assert!(!gone.iter().any(|found| found.parts == verified));
            if !rules.delete() {
                prop_assert!(gone.is_empty());
            }
            let left: Vec<Found> = backups.iter().filter(|found| !gone.contains(found)).cloned().collect();
            prop_assert!(surplus(&left, &rules, verified, now()).is_empty());
            if rules.age.is_none() && rules.limits() {
                let distinct: BTreeSet<Numbered> =
                    left.iter().map(|found| found.parts).filter(|parts| *parts <= verified).collect();
                let known: BTreeSet<Numbered> =
                    backups.iter().map(|found| found.parts).filter(|parts| *parts <= verified).collect();
                prop_assert!(distinct.len() >= rules.newest.max(1).min(known.len()));
            }
        }
    }
}
