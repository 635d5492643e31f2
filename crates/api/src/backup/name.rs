//! The names of periodic backups: `<path>_v<revision>_<time>`, as coreos/etcd-operator wrote them.
//!
//! Invariant 13 depends on this module: an object belongs to a path only if its name is exactly the name that this
//! module would write.

use k8s_openapi::jiff::Timestamp;
use k8s_openapi::jiff::civil::DateTime;
use k8s_openapi::jiff::tz::TimeZone;
use serde::{Deserialize, Serialize};

/// Format of the time in a name. The time is in UTC, as in coreos/etcd-operator.
const TIME: &str = "%Y-%m-%d-%H:%M:%S";

/// The part of a periodic backup's name that follows its path.
///
/// Values are ordered by age. The time is compared first, because a restored cluster continues from an earlier
/// revision.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Numbered {
    /// Start of the backup, in whole seconds.
    pub time: Timestamp,
    /// The revision of the member when the snapshot stream started. The manifest contains the revision of the backup,
    /// which may be later.
    pub revision: u64,
}

/// Prefix of the names of all periodic backups of a path. Names of backups of other paths can have the same prefix, so
/// callers must check each listed name with [`parse`].
pub fn prefix(path: &str) -> String {
    format!("{path}_v")
}

/// The name of a periodic backup.
pub fn name(path: &str, parts: Numbered) -> String {
    let time = parts.time.to_zoned(TimeZone::UTC).strftime(TIME);
    format!("{}{}_{time}", prefix(path), parts.revision)
}

/// The part of the name `key` after the path. `None` unless `key` is exactly the name of a periodic backup of this
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
    // The parser rejects names with a sign, a leading zero or an additional character, because the operator never
    // writes such a name.
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

    /// Invariant 13: a name that differs in one character does not belong to the path.
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
        // This name is in the list above. It belongs to the path `etcd_v2`, but not to the path `etcd`.
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
