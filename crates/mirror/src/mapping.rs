//! Maps the keys of a source to keys of a destination. Performs no I/O.

use api::names::MIRROR_RECORDS;
use bytes::Bytes;
use etcd::KeyRange;

/// The prefixes of a mirror. A copied key has the prefix of the destination instead of the prefix of the source.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mapping {
    source: String,
    destination: String,
}

impl Mapping {
    /// Creates a mapping. An empty prefix means all keys.
    pub fn new(source: &str, destination: &str) -> Self {
        Self {
            source: source.to_owned(),
            destination: destination.to_owned(),
        }
    }

    /// The prefix of the source.
    pub fn source_prefix(&self) -> &str {
        &self.source
    }

    /// The prefix of the destination.
    pub fn destination_prefix(&self) -> &str {
        &self.destination
    }

    /// The copied keys in the source.
    pub fn source_range(&self) -> KeyRange {
        KeyRange::prefix(self.source.as_bytes())
    }

    /// The copied keys in the destination. The range may contain the records of mirrors.
    pub fn destination_range(&self) -> KeyRange {
        KeyRange::prefix(self.destination.as_bytes())
    }

    /// The key in the destination for a key of the source. `None` if the key is not copied: it does not have the
    /// prefix, belongs to the records of mirrors, or would be empty.
    pub fn to_destination(&self, key: &[u8]) -> Option<Bytes> {
        let rest = key.strip_prefix(self.source.as_bytes())?;
        let mapped = Bytes::from([self.destination.as_bytes(), rest].concat());
        // etcd rejects an empty key. The mapped key is empty if the key equals the prefix of the source, and the
        // destination has no prefix.
        let is_copied = !mapped.is_empty() && !is_record(key) && !is_record(&mapped);
        is_copied.then_some(mapped)
    }

    /// The key in the source for a key of the destination. `None` if the key does not have the prefix of the
    /// destination.
    pub fn to_source(&self, key: &[u8]) -> Option<Bytes> {
        let rest = key.strip_prefix(self.destination.as_bytes())?;
        Some(Bytes::from([self.source.as_bytes(), rest].concat()))
    }

    /// The keys of the destination for the keys of the source after `after`, up to and including `up_to`. Without
    /// `after`, the range begins with the prefix. Without `up_to`, it ends with the last key of the prefix.
    pub fn destination_part(&self, after: Option<&[u8]>, up_to: Option<&[u8]>) -> KeyRange {
        let mapped = |key: &[u8]| {
            let rest = key.strip_prefix(self.source.as_bytes()).unwrap_or_default();
            [self.destination.as_bytes(), rest].concat()
        };
        let (after, up_to) = (after.map(mapped), up_to.map(mapped));
        let range = self.destination_range().after(after.as_deref());
        range.up_to(up_to.as_deref())
    }
}

/// Whether a key belongs to the records of mirrors, which no mirror copies or deletes.
pub fn is_record(key: &[u8]) -> bool {
    key.starts_with(MIRROR_RECORDS.as_bytes())
}

/// All keys with records of mirrors.
pub fn records() -> KeyRange {
    KeyRange::prefix(MIRROR_RECORDS.as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn destination_prefix_replaces_source_prefix() {
        let mapping = Mapping::new("/a/", "/copy/");
        for (key, expected) in [
            (&b"/a/x"[..], Some(&b"/copy/x"[..])),
            (b"/a/", Some(b"/copy/")),
            (b"/a/\xff\0", Some(b"/copy/\xff\0")),
            (b"/b/x", None),
            (b"/a", None),
        ] {
            let mapped = mapping.to_destination(key);
            assert_eq!(mapped.as_deref(), expected, "{key:?}");
            if let Some(mapped) = mapped {
                assert_eq!(mapping.to_source(&mapped).as_deref(), Some(key));
            }
        }
        let bare = Mapping::new("/a/", "");
        assert_eq!(bare.to_destination(b"/a/x").as_deref(), Some(&b"x"[..]));
        assert_eq!(bare.to_destination(b"/a/"), None);
    }

    #[test]
    fn keys_of_mirror_records_are_not_copied() {
        let record = format!("{MIRROR_RECORDS}checkpoint/1");
        let all = Mapping::new("", "");
        assert_eq!(all.to_destination(record.as_bytes()), None);
        assert!(all.to_destination(b"etcd.database.coreos.com/x").is_some());
        let into = Mapping::new("/a/", "etcd.database.coreos.com/");
        assert_eq!(into.to_destination(b"/a/mirror/x"), None);
        assert!(into.to_destination(b"/a/x").is_some());
        let elsewhere = Mapping::new("", "/copy/");
        assert_eq!(elsewhere.to_destination(record.as_bytes()), None);
    }

    #[test]
    fn part_of_destination_matches_part_of_source() {
        let mapping = Mapping::new("/a/", "/copy/");
        let part = mapping.destination_part(Some(b"/a/b"), Some(b"/a/d"));
        for (key, expected) in [
            (&b"/copy/b"[..], false),
            (b"/copy/b\0", true),
            (b"/copy/d", true),
            (b"/copy/d\0", false),
        ] {
            assert_eq!(part.contains(key), expected, "{key:?}");
        }
        let all = mapping.destination_part(None, None);
        assert_eq!(all, mapping.destination_range());
    }
}
