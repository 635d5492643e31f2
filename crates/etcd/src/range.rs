//! Ranges of keys. Performs no I/O.

use bytes::Bytes;

/// The end of a range without an end, as in etcd's API.
const NO_END: &[u8] = &[0];

/// The keys from `start` to `end`. The range contains `start`, but not `end`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeyRange {
    /// The first key.
    pub start: Bytes,
    /// The first key after the range. A single zero byte means that the range has no end.
    pub end: Bytes,
}

impl KeyRange {
    /// All keys.
    pub fn all() -> Self {
        // The smallest key is a single zero byte, because etcd rejects an empty key.
        Self {
            start: Bytes::from_static(&[0]),
            end: Bytes::from_static(NO_END),
        }
    }

    /// All keys that begin with `prefix`. An empty prefix means all keys.
    pub fn prefix(prefix: &[u8]) -> Self {
        if prefix.is_empty() {
            return Self::all();
        }
        Self {
            start: Bytes::copy_from_slice(prefix),
            end: after_prefix(prefix),
        }
    }

    /// One key.
    pub fn key(key: &[u8]) -> Self {
        Self {
            start: Bytes::copy_from_slice(key),
            end: next_key(key),
        }
    }

    /// The keys of the range after `key`. `None` means the whole range.
    #[must_use]
    pub fn after(&self, key: Option<&[u8]>) -> Self {
        let start = key.map_or_else(|| self.start.clone(), next_key);
        Self {
            start: start.max(self.start.clone()),
            end: self.end.clone(),
        }
    }

    /// The keys of the range up to `key`, including `key`. `None` means the whole range.
    #[must_use]
    pub fn up_to(&self, key: Option<&[u8]>) -> Self {
        let end = key.map_or_else(|| self.end.clone(), next_key);
        let is_earlier = self.has_no_end() || end < self.end;
        Self {
            start: self.start.clone(),
            end: if is_earlier { end } else { self.end.clone() },
        }
    }

    /// Whether the range contains the key.
    pub fn contains(&self, key: &[u8]) -> bool {
        key >= self.start.as_ref() && (self.has_no_end() || key < self.end.as_ref())
    }

    /// Whether the range contains no key.
    pub fn is_empty(&self) -> bool {
        !self.has_no_end() && self.start >= self.end
    }

    /// Whether at least one key is in both ranges.
    pub fn overlaps(&self, other: &Self) -> bool {
        let begins_before_end_of =
            |range: &Self, end: &Self| end.has_no_end() || range.start < end.end;
        begins_before_end_of(self, other) && begins_before_end_of(other, self)
    }

    /// The parts of this range that `hole` does not contain.
    pub fn without(&self, hole: &Self) -> Vec<Self> {
        if !self.overlaps(hole) {
            return vec![self.clone()];
        }
        let before = Self {
            start: self.start.clone(),
            end: hole.start.clone(),
        };
        let after = Self {
            start: hole.end.clone(),
            end: self.end.clone(),
        };
        let mut parts = Vec::new();
        if !before.is_empty() {
            parts.push(before);
        }
        if !hole.has_no_end() && !after.is_empty() {
            parts.push(after);
        }
        parts
    }

    fn has_no_end(&self) -> bool {
        self.end == NO_END
    }
}

/// The smallest key after `key`.
fn next_key(key: &[u8]) -> Bytes {
    Bytes::from([key, &[0]].concat())
}

/// The smallest key after all keys with this prefix.
fn after_prefix(prefix: &[u8]) -> Bytes {
    let kept = prefix.iter().rposition(|byte| *byte < u8::MAX);
    let Some(last) = kept else {
        return Bytes::from_static(NO_END);
    };
    let mut end = prefix[..=last].to_vec();
    end[last] += 1;
    Bytes::from(end)
}

#[cfg(test)]
mod tests {
    use std::slice;

    use super::*;

    fn range(start: &'static [u8], end: &'static [u8]) -> KeyRange {
        KeyRange {
            start: Bytes::from_static(start),
            end: Bytes::from_static(end),
        }
    }

    #[test]
    fn prefix_and_key_ranges_contain_exactly_their_keys() {
        for (prefix, expected) in [
            (&b""[..], range(b"\0", b"\0")),
            (b"/a/", range(b"/a/", b"/a0")),
            (b"a\xff", range(b"a\xff", b"b")),
            (b"\xff\xff", range(b"\xff\xff", b"\0")),
        ] {
            let found = KeyRange::prefix(prefix);
            assert_eq!(found, expected);
            let longer = [prefix, b"x"].concat();
            assert!(found.contains(&longer), "{prefix:?}");
        }
        let slash = KeyRange::prefix(b"/a/");
        for outside in [&b"/a"[..], b"/a0", b"/b/x", b"\0"] {
            assert!(!slash.contains(outside), "{outside:?}");
        }
        assert!(KeyRange::key(b"k").contains(b"k"));
        assert!(!KeyRange::key(b"k").contains(b"k\0"));
    }

    #[test]
    fn prefix_ranges_overlap_if_one_prefix_begins_with_the_other() {
        for (one, other, expected) in [
            (&b"/a/"[..], &b"/a/"[..], true),
            (b"/a/", b"/a/b/", true),
            (b"", b"/a/", true),
            (b"/a", b"/ab/", true),
            (b"/a/", b"/b/", false),
            (b"/a/", b"/a0", false),
            (b"\xff", b"/", false),
            (b"\xff", b"\xff\xff", true),
        ] {
            let (one, other) = (KeyRange::prefix(one), KeyRange::prefix(other));
            assert_eq!(one.overlaps(&other), expected, "{one:?} {other:?}");
            assert_eq!(other.overlaps(&one), expected, "{other:?} {one:?}");
        }
    }

    #[test]
    fn range_is_divided_at_keys_and_ranges() {
        let all = KeyRange::all();
        assert_eq!(all.after(None), all);
        assert_eq!(all.up_to(None), all);
        assert_eq!(all.after(Some(b"k")), range(b"k\0", b"\0"));
        assert_eq!(all.up_to(Some(b"k")), range(b"\0", b"k\0"));
        let letters = range(b"a", b"f");
        assert_eq!(letters.after(Some(b"b")), range(b"b\0", b"f"));
        assert_eq!(letters.up_to(Some(b"b")), range(b"a", b"b\0"));
        assert_eq!(letters.up_to(Some(b"x")), letters);
        let hole = range(b"c", b"d");
        assert_eq!(
            letters.without(&hole),
            [range(b"a", b"c"), range(b"d", b"f")]
        );
        assert_eq!(letters.without(&range(b"a", b"f")), []);
        let elsewhere = range(b"x", b"z");
        assert_eq!(letters.without(&elsewhere), slice::from_ref(&letters));
        assert_eq!(all.without(&hole), [range(b"\0", b"c"), range(b"d", b"\0")]);
        assert_eq!(letters.without(&range(b"c", b"\0")), [range(b"a", b"c")]);
    }
}
