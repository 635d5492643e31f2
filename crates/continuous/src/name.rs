//! The names of the objects of a continuous backup. The order of the names is the order of the revisions. Performs no
//! I/O.

use std::fmt;

use crate::digest::ShortDigest;

/// The directory of the objects that describe bases. It contains no segments, so a list of all bases needs few
/// requests.
pub const BASES: &str = "bases/";

/// The end of the name of an object that describes a base.
pub const BASE: &str = ".json";

/// The directory of the snapshots that the recorder takes.
pub const SNAPSHOTS: &str = "snapshots/";

/// The end of the name of a snapshot.
const SNAPSHOT: &str = ".snapshot";

/// The end of the name of a segment.
const SEGMENT: &str = ".segment";

/// Number of decimal digits of a revision.
const DIGITS: usize = 20;

/// The name of a snapshot in [`SNAPSHOTS`], from the time in microseconds since the epoch.
pub(crate) fn snapshot_name(micros: i64) -> String {
    format!("{micros:0DIGITS$}{SNAPSHOT}")
}

/// Whether the name in [`SNAPSHOTS`] is the name of a snapshot.
pub(crate) fn is_snapshot(name: &str) -> bool {
    let time = name.strip_suffix(SNAPSHOT);
    time.and_then(parse_revision).is_some()
}

/// Whether the object with this key is a snapshot or a segment, which contain the data of etcd. `key` may have any
/// prefix.
pub(crate) fn has_content(key: &str) -> bool {
    [SNAPSHOT, SEGMENT].iter().any(|end| key.ends_with(end))
}

/// The name of a base's directory, and of the object that describes the base.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BaseName {
    /// The revision of the base.
    pub revision: i64,
    /// The beginning of the SHA-256 of the object that describes the base.
    pub digest: ShortDigest,
}

impl BaseName {
    /// Parses the name of a directory. `None` if it is not the directory of a base.
    pub fn parse(text: &str) -> Option<Self> {
        let (revision, digest) = text.split_once('-')?;
        Some(Self {
            revision: parse_revision(revision)?,
            digest: ShortDigest::parse(digest)?,
        })
    }
}

impl fmt::Display for BaseName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:0DIGITS$}-{}", self.revision, self.digest)
    }
}

/// The name of a segment in the directory of its base.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SegmentName {
    /// The first revision of the segment.
    pub first: i64,
    /// The last revision of the segment, or `first - 1` if the segment has no transaction.
    pub last: i64,
    /// The beginning of the SHA-256 of the preceding object in the chain.
    pub previous: ShortDigest,
    /// The beginning of the SHA-256 of the segment.
    pub digest: ShortDigest,
}

impl SegmentName {
    /// Parses the name of an object. `None` if the object is not a segment.
    pub fn parse(text: &str) -> Option<Self> {
        let mut parts = text.strip_suffix(SEGMENT)?.split('-');
        let name = Self {
            first: parse_revision(parts.next()?)?,
            last: parse_revision(parts.next()?)?,
            previous: ShortDigest::parse(parts.next()?)?,
            digest: ShortDigest::parse(parts.next()?)?,
        };
        (parts.next().is_none() && name.first >= 1 && name.last >= name.first - 1).then_some(name)
    }
}

impl fmt::Display for SegmentName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            first,
            last,
            previous,
            digest,
        } = self;
        write!(
            f,
            "{first:0DIGITS$}-{last:0DIGITS$}-{previous}-{digest}{SEGMENT}"
        )
    }
}

/// Parses a revision of exactly 20 decimal digits. `None` for `i64::MAX`, because it has no next revision.
fn parse_revision(text: &str) -> Option<i64> {
    let is_number = text.len() == DIGITS && text.bytes().all(|byte| byte.is_ascii_digit());
    let revision: i64 = is_number.then(|| text.parse().ok()).flatten()?;
    (revision < i64::MAX).then_some(revision)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::digest::Digest;

    fn name(first: i64, last: i64) -> SegmentName {
        SegmentName {
            first,
            last,
            previous: Digest::of(b"previous").short(),
            digest: Digest::of(b"segment").short(),
        }
    }

    #[test]
    fn object_names_round_trip_and_sort_by_revision() {
        let names = [
            (2, 1),
            (2, 2),
            (2, 9),
            (10, 99),
            (100, 100),
            (1 << 60, 1 << 61),
        ];
        let names = names.map(|(first, last)| name(first, last));
        let mut texts = names.map(|name| name.to_string());
        for (name, text) in names.iter().zip(&texts) {
            assert_eq!(SegmentName::parse(text), Some(*name));
        }
        let expected = texts.clone();
        texts.sort();
        assert_eq!(texts, expected);
        let base = BaseName {
            revision: 7,
            digest: Digest::of(b"base").short(),
        };
        assert_eq!(BaseName::parse(&base.to_string()), Some(base));
    }

    #[test]
    fn only_snapshot_names_are_recognized_as_snapshots() {
        assert!(is_snapshot(&snapshot_name(1_764_000_000_000_000)));
        for other in [
            "1.snapshot",
            "notes.txt",
            "../00000000000000000001.snapshot",
        ] {
            assert!(!is_snapshot(other), "{other}");
        }
    }

    #[test]
    fn malformed_segment_and_base_names_are_rejected() {
        let text = name(2, 9).to_string();
        for other in [
            String::new(),
            BASE.to_owned(),
            text.replace(SEGMENT, ".json"),
            text.replacen('0', "", 1),
            text.replacen('0', "+", 1),
            text.to_uppercase(),
            text.replace('-', "--"),
            format!("{}-0{SEGMENT}", text.trim_end_matches(SEGMENT)),
            name(9, 2).to_string(),
            name(i64::MAX, i64::MAX).to_string(),
            name(0, 0).to_string(),
        ] {
            assert_eq!(SegmentName::parse(&other), None, "{other}");
        }
        assert_eq!(BaseName::parse(&text), None);
    }
}
