//! The names of periodic backups: `<path>_v<revision>_<time>`, as v1beta2 wrote them, and read back in full.
//!
//! Invariant 13 rests on this: an object belongs to a path only if its whole name is one this module would write.

use k8s_openapi::jiff::Timestamp;
use k8s_openapi::jiff::civil::DateTime;
use k8s_openapi::jiff::tz::TimeZone;
use serde::{Deserialize, Serialize};

/// The time in a name, in UTC, as v1beta2 wrote it.
const TIME: &str = "%Y-%m-%d-%H:%M:%S";

/// The parts of a periodic backup's name beside its path.
///
/// The order is that of age: the time comes first, since a cluster that was restored counts its revisions from
/// an earlier one on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Numbered {
    /// When the backup began, to the second.
    pub time: Timestamp,
    /// The revision the member had when the stream began: what the backup holds at least. Its own revision is in
    /// its manifest.
    pub revision: u64,
}

/// What the names of all periodic backups of a path begin with. A sibling's names may begin so too: what is listed
/// by this has to be read with [`parse`].
pub fn prefix(path: &str) -> String {
    format!("{path}_v")
}

/// The name of a periodic backup.
pub fn name(path: &str, parts: Numbered) -> String {
    let time = parts.time.to_zoned(TimeZone::UTC).strftime(TIME);
    format!("{}{}_{time}", prefix(path), parts.revision)
}

/// The parts of a name, if the whole of it is that of a periodic backup of this path.
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
    // One text for each name: no signs, no leading zeros, nothing in front and nothing behind.
    (name(path, parts) == key).then_some(parts)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(second).unwrap()
    }

    #[test]
    fn a_name_is_written_as_v1beta2_did_and_read_back() {
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

    /// Invariant 13.
    #[test]
    fn invariant_13_only_a_whole_name_is_a_name() {
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
        // The sibling's own.
        assert!(parse("etcd_v2", "etcd_v2_v99_2018-12-31-23:59:59").is_some());
    }

    #[test]
    fn the_order_is_that_of_age_and_not_of_texts() {
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
            "a restored cluster counts from an earlier revision on"
        );
        let later = Numbered {
            time: at(10),
            revision: 1000,
        };
        assert!(later > old, "1000 is more than 99");
    }
}
