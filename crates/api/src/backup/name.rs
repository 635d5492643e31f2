//! The names of scheduled backups: `<path>_v<revision>_<time>`, as in coreos/etcd-operator.
//!
//! Invariant 13: an object in the store belongs to a path only if its name is exactly a name that [`name`] returns for
//! this path.

use k8s_openapi::jiff::Timestamp;
use k8s_openapi::jiff::civil::DateTime;
use k8s_openapi::jiff::tz::TimeZone;
use serde::{Deserialize, Serialize};

/// The format of the time, which is in UTC.
const TIME: &str = "%Y-%m-%d-%H:%M:%S";

/// The revision and the time in the name of a scheduled backup.
///
/// The order is by time, then by revision, because a restored cluster continues from an earlier revision.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Numbered {
    /// The start of the backup, in whole seconds.
    pub time: Timestamp,
    /// The revision of the member before the snapshot. The revision in the manifest may be later, because the database
    /// can change until the snapshot starts.
    pub revision: u64,
}

/// The prefix of the names of a path's scheduled backups. Other names can have the same prefix, so callers must check
/// each name with [`parse`].
pub fn prefix(path: &str) -> String {
    format!("{path}_v")
}

/// The name of a scheduled backup.
pub fn name(path: &str, parts: Numbered) -> String {
    let time = parts.time.to_zoned(TimeZone::UTC).strftime(TIME);
    format!("{}{}_{time}", prefix(path), parts.revision)
}

/// The revision and the time in the name `key`. `None` if `key` is not exactly the name of a scheduled backup of this
/// path.
pub fn parse(path: &str, key: &str) -> Option<Numbered> {
    let rest = key.strip_prefix(&prefix(path))?;
    let (revision, time) = rest.split_once('_')?;
    let parts = Numbered {
        time: DateTime::strptime(TIME, time)
            .ok()?
            .to_zoned(TimeZone::UTC)
            .ok()?
            .timestamp(),
        revision: revision.parse().ok()?,
    };
    // `key` is accepted only if `name` produces the same text. This rejects a sign, a leading zero or an additional
    // character, which the operator never writes.
    (name(path, parts) == key).then_some(parts)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(second).unwrap()
    }

    #[test]
    fn backup_name_round_trips_in_v1beta2_format() {
        let parts = Numbered {
            time: at(1_546_300_799),
            revision: 99,
        };
        let key = name("etcd/backup", parts);
        assert_eq!(key, "etcd/backup_v99_2018-12-31-23:59:59");
        assert_eq!(parse("etcd/backup", &key), Some(parts));
        for revision in [0, 1, 1000, u64::MAX] {
            let parts = Numbered { revision, ..parts };
            assert_eq!(parse("p", &name("p", parts)), Some(parts));
        }
    }

    /// Invariant 13: a name that only resembles the name of a scheduled backup does not belong to the path.
    #[test]
    fn invariant_13_only_exact_backup_names_are_parsed() {
        let good = "etcd_v99_2018-12-31-23:59:59";
        assert!(parse("etcd", good).is_some());
        for other in [
            "etcd",
            "etcd.manifest.json",
            "etcd_v99",
            "etcd_v_2018-12-31-23:59:59",
            "etcd_v+9_2018-12-31-23:59:59",
            "etcd_v099_2018-12-31-23:59:59",
            "etcd_v-1_2018-12-31-23:59:59",
            "etcd_v9_2018-12-31-23:59:60",
            "etcd_v9_2018-02-30-23:59:59",
            "etcd_v9_2018-12-31-23:59:5",
            "etcd_v9_ 2018-12-31-23:59:59",
            "etcd_v99_2018-12-31-23:59:59.manifest.json",
            "etcd_v99_2018-12-31-23:59:59_v1_2018-12-31-23:59:59",
            "x/etcd_v99_2018-12-31-23:59:59",
            "etcd-prod_v99_2018-12-31-23:59:59",
            "etcd_v2_v99_2018-12-31-23:59:59",
            "Etcd_v99_2018-12-31-23:59:59",
        ] {
            assert_eq!(parse("etcd", other), None, "{other}");
        }
        // One name in the list starts with `etcd_v2_`: it belongs to the path `etcd_v2`, but not to the path `etcd`.
        assert!(parse("etcd_v2", "etcd_v2_v99_2018-12-31-23:59:59").is_some());
    }

    #[test]
    fn backup_names_sort_by_time_then_by_numeric_revision() {
        let new = Numbered {
            time: at(20),
            revision: 7,
        };
        let old = Numbered {
            time: at(10),
            revision: 99,
        };
        assert!(
            new > old,
            "the name with the later time must be newer, because a restored cluster continues from an earlier revision"
        );
        let later = Numbered {
            time: at(10),
            revision: 1000,
        };
        assert!(later > old, "revisions must compare as numbers");
    }
}
