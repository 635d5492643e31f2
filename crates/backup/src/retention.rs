//! Decides which backups of a path the retention rules keep, and which may be deleted. Performs no I/O.
//!
//! A backup is kept if at least one rule keeps it. `maxBackups` keeps the newest backups. `retention` keeps the newest
//! backup of each of the last hours, days, weeks or months that contain a backup. If neither `maxBackups` nor
//! `retention` is set, both rules keep all backups. `maxAge` overrides the other rules: a backup older than this age is
//! deleted. No rule deletes the newest complete backup or the newest verified backup (invariants 9 and 31).

use std::cmp::Reverse;
use std::collections::BTreeSet;

use api::backup::name::{self, Numbered};
use api::backup::{BackupPolicy, Retention};
use api::manifest::{MANIFEST_SUFFIX, manifest_key};
use jiff::civil::Date;
use jiff::tz::TimeZone;
use jiff::{SignedDuration, Timestamp};
use serde::{Deserialize, Serialize};

/// The retention rules of a backup policy.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rules {
    newest: usize,
    hourly: usize,
    daily: usize,
    weekly: usize,
    monthly: usize,
    age: Option<SignedDuration>,
    /// The newest verified backup. It is always kept (invariant 31).
    #[serde(default)]
    verified: Option<Numbered>,
}

impl Rules {
    /// Reads the rules from a policy.
    pub fn of(policy: &BackupPolicy) -> Self {
        let none = Retention::default();
        let retention = policy.retention.as_ref().unwrap_or(&none);
        let count =
            |number: Option<i32>| usize::try_from(number.unwrap_or_default()).unwrap_or_default();
        let age = policy
            .max_age
            .as_ref()
            .and_then(api::duration::DurationText::parse);
        Self {
            newest: usize::try_from(policy.max_backups.unwrap_or_default()).unwrap_or_default(),
            hourly: count(retention.keep_hourly),
            daily: count(retention.keep_daily),
            weekly: count(retention.keep_weekly),
            monthly: count(retention.keep_monthly),
            age: age.and_then(|age| SignedDuration::try_from(age).ok()),
            verified: None,
        }
    }

    /// Invariant 31: sets the newest verified backup, which the rules never delete.
    #[must_use]
    pub fn keeping(self, verified: Option<Numbered>) -> Self {
        Self { verified, ..self }
    }

    /// False if the rules keep every backup.
    pub fn delete(&self) -> bool {
        *self != Self::default()
    }

    fn limit_number(&self) -> bool {
        self.newest + self.hourly + self.daily + self.weekly + self.monthly > 0
    }
}

/// A backup or a manifest in the listing of a store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    /// The key of the backup's object or of its manifest in the store.
    pub key: String,
    /// The time and the revision in the object name.
    pub parts: Numbered,
}

/// The backups that were found at a path.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Listing {
    /// The backups, newest first.
    pub backups: Vec<Found>,
    /// The manifests whose backup is not in the listing.
    pub orphans: Vec<Found>,
}

/// Finds the backups of `path` and their manifests in `keys`. Ignores a key that does not match the name pattern of
/// `path` completely (invariant 13).
pub fn read<'a>(path: &str, keys: impl IntoIterator<Item = &'a str>) -> Listing {
    let mut listing = Listing::default();
    let mut manifests = Vec::new();
    for key in keys {
        let described = key.strip_suffix(MANIFEST_SUFFIX);
        if let Some(parts) = name::parse(path, described.unwrap_or(key)) {
            let found = Found {
                key: key.to_owned(),
                parts,
            };
            if described.is_some() {
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

/// The backups that may be deleted, oldest first. All of them are older than `verified`, which the caller has found
/// complete in the store (invariant 9).
pub fn surplus<'a>(
    backups: &'a [Found],
    rules: &Rules,
    verified: Numbered,
    now: Timestamp,
) -> Vec<&'a Found> {
    // A backup that is newer than `verified` may be incomplete. It does not count for the rules and is not deleted.
    let mut known: Vec<&Found> = backups
        .iter()
        .filter(|found| found.parts <= verified)
        .collect();
    known.sort_by_key(|found| Reverse(found.parts));
    let mut kept: BTreeSet<Numbered> = BTreeSet::new();
    if rules.limit_number() {
        kept.extend(known.iter().take(rules.newest).map(|found| found.parts));
        keep_newest_of(&known, rules.hourly, &mut kept, |time| {
            time.as_second().div_euclid(3600)
        });
        keep_newest_of(&known, rules.daily, &mut kept, |time| days(date(time)));
        // Day 0 (1970-01-01) was a Thursday. With an offset of three days, each week starts on a Monday.
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
        // `verified`, the newest complete backup, is always kept.
        .filter(|found| found.parts < verified)
        .filter(|found| !kept.contains(&found.parts) || too_old(found))
        // Invariant 31: the newest backup that a verification has restored is always kept.
        .filter(|found| rules.verified != Some(found.parts))
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

    /// 2026-01-15 is a Thursday.
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

    /// Applies the rules to backups with these ages in seconds. Returns the ages of the kept backups.
    fn kept(json: &str, ages: &[i64]) -> Vec<i64> {
        let backups: Vec<Found> = ages.iter().map(|age| found(1, *age)).collect();
        let newest = backups.iter().map(|found| found.parts).max().unwrap();
        let removed = surplus(&backups, &rules(json), newest, now());
        let is_kept = |found: &&Found| !removed.contains(found);
        let ages = backups.iter().filter(is_kept);
        ages.map(|found| now().duration_since(found.parts.time).as_secs())
            .collect()
    }

    #[test]
    fn retention_without_rules_deletes_nothing() {
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
    fn max_backups_rule_keeps_newest_backups() {
        let ages = [0, HOUR, 2 * HOUR, 3 * HOUR];
        assert_eq!(kept(r#"{"maxBackups":2}"#, &ages), [0, HOUR]);
        assert_eq!(kept(r#"{"maxBackups":9}"#, &ages), ages);
        assert_eq!(kept(r#"{"maxBackups":1}"#, &ages), [0]);
    }

    /// Invariant 31: newer backups may not be restorable, so the newest verified backup is kept.
    #[test]
    fn invariant_31_no_rule_deletes_newest_verified_backup() {
        let backups: Vec<Found> = [0, HOUR, DAY, 90 * DAY]
            .iter()
            .map(|age| found(7, *age))
            .collect();
        for json in [r#"{"maxBackups":1}"#, r#"{"maxAge":"1h","maxBackups":1}"#] {
            let rules = rules(json).keeping(Some(backups[3].parts));
            let removed = surplus(&backups, &rules, backups[0].parts, now());
            assert!(!removed.contains(&&backups[3]), "{json}");
            assert!(removed.contains(&&backups[2]), "{json}");
        }
    }

    #[test]
    fn max_age_rule_deletes_older_backups_except_newest() {
        let old = r#"{"maxAge":"48h"}"#;
        assert_eq!(kept(old, &[HOUR, 2 * DAY, 2 * DAY + 1]), [HOUR, 2 * DAY]);
        assert_eq!(kept(old, &[30 * DAY, 31 * DAY]), [30 * DAY]);
        // A backup older than maxAge is deleted, even if maxBackups would keep it.
        assert_eq!(
            kept(r#"{"maxAge":"1h","maxBackups":5}"#, &[0, HOUR, DAY]),
            [0, HOUR]
        );
    }

    #[test]
    fn retention_keeps_newest_backup_of_each_period() {
        let hourly = r#"{"retention":{"keepHourly":2}}"#;
        // The backups are from 12:00, 11:50, 11:10, 10:59 and 09:00.
        assert_eq!(kept(hourly, &[0, 600, 3000, 3660, 3 * HOUR]), [0, 600]);
        let daily = r#"{"retention":{"keepDaily":3}}"#;
        // Days without a backup do not count, so backups from before an outage are kept.
        assert_eq!(
            kept(
                daily,
                &[0, 6 * HOUR, 13 * HOUR, 20 * HOUR, 9 * DAY, 10 * DAY]
            ),
            [0, 13 * HOUR, 9 * DAY]
        );
        let weekly = r#"{"retention":{"keepWeekly":2}}"#;
        // The backups are from Thursday, from Monday of the same week, and from Sunday and Monday of the previous week.
        assert_eq!(kept(weekly, &[0, 3 * DAY, 4 * DAY, 10 * DAY]), [0, 4 * DAY]);
        let monthly = r#"{"retention":{"keepMonthly":2}}"#;
        assert_eq!(
            kept(monthly, &[0, 14 * DAY, 15 * DAY, 40 * DAY]),
            [0, 15 * DAY]
        );
    }

    #[test]
    fn backup_is_kept_if_any_retention_rule_keeps_it() {
        let both = r#"{"maxBackups":2,"retention":{"keepDaily":2}}"#;
        assert_eq!(kept(both, &[0, 60, 120, DAY, 2 * DAY]), [0, 60, DAY]);
    }

    #[test]
    fn invariant_9_retention_deletes_only_backups_older_than_verified_backup() {
        let backups = [found(9, 0), found(8, 60), found(7, 120), found(6, 180)];
        let gone = surplus(
            &backups,
            &rules(r#"{"maxBackups":1}"#),
            backups[1].parts,
            now(),
        );
        assert_eq!(gone, [&backups[3], &backups[2]]);
    }

    /// The revision is compared as a number, because revision 1000 is before 999 in text order. The time is compared
    /// first, because a restored cluster can have a lower revision.
    #[test]
    fn retention_orders_backups_by_time_and_revision() {
        let backups = [found(1000, 0), found(999, 60), found(99, 120), found(5, 30)];
        let gone = surplus(
            &backups,
            &rules(r#"{"maxBackups":2}"#),
            backups[0].parts,
            now(),
        );
        assert_eq!(gone, [&backups[2], &backups[1]]);
    }

    #[test]
    fn invariant_13_retention_ignores_objects_of_similar_paths() {
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

        /// Invariants 9 and 13: every deleted backup is in the listing and older than `verified`. Without `maxAge`,
        /// the rules keep at least `maxBackups` backups. If the rules are applied again, they delete nothing more.
        #[test]
        fn invariant_9_newest_backup_survives_all_rules(
            ages in prop::collection::vec((0_u64..2000, 0_i64..100 * DAY), 1..60),
            policy in policies(),
            which in 0_usize..60,
        ) {
            let backups: Vec<Found> = ages.iter().map(|(revision, age)| found(*revision, *age)).collect();
            let rules = Rules::of(&policy);
            let verified = backups[which % backups.len()].parts;
            let removed: Vec<Found> = surplus(&backups, &rules, verified, now()).into_iter().cloned().collect();
            for found in &removed {
                prop_assert!(found.parts < verified);
                prop_assert!(backups.contains(found));
            }
            prop_assert!(!removed.iter().any(|found| found.parts == verified));
            if !rules.delete() {
                prop_assert!(removed.is_empty());
            }
            let kept: Vec<Found> = backups.iter().filter(|found| !removed.contains(found)).cloned().collect();
            prop_assert!(surplus(&kept, &rules, verified, now()).is_empty());
            if rules.age.is_none() && rules.limit_number() {
                let distinct: BTreeSet<Numbered> =
                    kept.iter().map(|found| found.parts).filter(|parts| *parts <= verified).collect();
                let known: BTreeSet<Numbered> =
                    backups.iter().map(|found| found.parts).filter(|parts| *parts <= verified).collect();
                prop_assert!(distinct.len() >= rules.newest.max(1).min(known.len()));
            }
        }
    }
}
