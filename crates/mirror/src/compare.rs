//! Compares the keys of a source with the keys of a destination, page by page. Performs no I/O.

use std::cmp::Ordering;

use bytes::Bytes;
use etcd::{KeyPage, Operation};

use crate::mapping::{Mapping, is_record};

/// The differences between the keys of a source and of a destination, up to a key of the source.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Difference {
    /// The changes that make the destination equal to the source.
    pub operations: Vec<Operation>,
    /// The last compared key of the source. `None`: all keys are compared.
    pub up_to: Option<Bytes>,
    /// The number of compared keys of the source.
    pub compared: usize,
}

/// Compares a page of a source with a page of a destination. Both pages begin after the same key. If a page is not the
/// last page, the difference ends at its last key. If neither page is the last page, it ends at the smaller of both
/// last keys.
pub fn compare(mapping: &Mapping, source: KeyPage, destination: KeyPage) -> Difference {
    let end = |page: &[(Bytes, Bytes)], has_more: bool| {
        let last = page.last().filter(|_| has_more);
        last.map(|(key, _)| key.clone())
    };
    let source_end = end(&source.entries, source.has_more);
    // The keys of the destination are compared as keys of the source. The mapping keeps their order.
    let mapped = destination.entries.into_iter().filter_map(|(key, value)| {
        let of_source = mapping.to_source(&key)?;
        Some((of_source, (key, value)))
    });
    let mapped: Vec<(Bytes, (Bytes, Bytes))> = mapped.collect();
    let last = mapped.last().filter(|_| destination.has_more);
    let destination_end = last.map(|(key, _)| key.clone());
    let up_to = match (source_end, destination_end) {
        (Some(one), Some(other)) => Some(one.min(other)),
        (one, other) => one.or(other),
    };
    let is_compared = |key: &Bytes| up_to.as_ref().is_none_or(|end| key <= end);
    let mut wanted = source.entries.into_iter().peekable();
    let mut found = mapped.into_iter().peekable();
    let (mut operations, mut compared) = (Vec::new(), 0);
    loop {
        let of_source = wanted
            .peek()
            .map(|(key, _)| key)
            .filter(|key| is_compared(key));
        let of_destination = found
            .peek()
            .map(|(key, _)| key)
            .filter(|key| is_compared(key));
        let order = match (of_source, of_destination) {
            (None, None) => break,
            (Some(_), None) => Ordering::Less,
            (None, Some(_)) => Ordering::Greater,
            (Some(one), Some(other)) => one.cmp(other),
        };
        let new = wanted.next_if(|_| order != Ordering::Greater);
        let old = found.next_if(|_| order != Ordering::Less);
        let old = old.map(|(_, entry)| entry);
        compared += usize::from(new.is_some());
        operations.extend(change(mapping, new, old));
    }
    Difference {
        operations,
        up_to,
        compared,
    }
}

/// The change for one key, which exists in the source (`new`), in the destination (`old`), or in both.
fn change(
    mapping: &Mapping,
    new: Option<(Bytes, Bytes)>,
    old: Option<(Bytes, Bytes)>,
) -> Option<Operation> {
    let new = new.and_then(|(key, value)| Some((mapping.to_destination(&key)?, value)));
    match (new, old) {
        (Some((_, value)), Some((_, current))) if value == current => None,
        (Some((key, value)), _) => Some(Operation::Put { key, value }),
        (None, Some((key, _))) if is_record(&key) => None,
        (None, Some((key, _))) => Some(Operation::Delete { key }),
        (None, None) => None,
    }
}

#[cfg(test)]
mod tests {
    use etcd::ClusterId;

    use super::*;

    fn page(entries: &[(&str, &str)], has_more: bool) -> KeyPage {
        let entries = entries.iter().map(|(key, value)| {
            let copy = |text: &str| Bytes::copy_from_slice(text.as_bytes());
            (copy(key), copy(value))
        });
        KeyPage {
            cluster_id: ClusterId(1),
            revision: 1,
            entries: entries.collect(),
            first_changed: 0,
            has_more,
        }
    }

    /// The changes as texts: `+key=value` or `-key`.
    fn changes(difference: &Difference) -> Vec<String> {
        let text = |bytes: &Bytes| String::from_utf8_lossy(bytes).into_owned();
        let operations = difference.operations.iter();
        operations
            .map(|operation| match operation {
                Operation::Put { key, value } => format!("+{}={}", text(key), text(value)),
                Operation::Delete { key } => format!("-{}", text(key)),
            })
            .collect()
    }

    #[test]
    fn difference_contains_only_changed_keys() {
        let mapping = Mapping::new("/a/", "/b/");
        let source = page(&[("/a/1", "x"), ("/a/2", "y"), ("/a/4", "z")], false);
        let destination = page(&[("/b/1", "x"), ("/b/2", "old"), ("/b/3", "w")], false);
        let found = compare(&mapping, source.clone(), destination);
        assert_eq!(changes(&found), ["+/b/2=y", "-/b/3", "+/b/4=z"]);
        assert_eq!((found.up_to.clone(), found.compared), (None, 3));
        let equal = page(&[("/b/1", "x"), ("/b/2", "y"), ("/b/4", "z")], false);
        assert_eq!(changes(&compare(&mapping, source, equal)), [""; 0]);
    }

    #[test]
    fn difference_ends_at_smaller_last_key_of_incomplete_pages() {
        let mapping = Mapping::new("", "");
        let source = page(&[("a", "1"), ("c", "1")], true);
        let destination = page(&[("b", "1"), ("d", "1")], false);
        let found = compare(&mapping, source.clone(), destination.clone());
        assert_eq!(changes(&found), ["+a=1", "-b", "+c=1"]);
        assert_eq!(found.up_to.as_deref(), Some(&b"c"[..]));
        let destination = page(&[("a", "1"), ("b", "1")], true);
        let found = compare(&mapping, source, destination.clone());
        assert_eq!(changes(&found), ["-b"]);
        assert_eq!(found.up_to.as_deref(), Some(&b"b"[..]));
        let empty = page(&[], false);
        let found = compare(&mapping, empty, destination);
        assert_eq!(changes(&found), ["-a", "-b"]);
        assert_eq!(found.up_to.as_deref(), Some(&b"b"[..]));
    }

    #[test]
    fn keys_of_mirror_records_are_neither_copied_nor_deleted() {
        let mapping = Mapping::new("", "");
        let record = "etcd.database.coreos.com/mirror/registry";
        let found = compare(
            &mapping,
            page(&[("a", "1"), (record, "of source")], false),
            page(&[(record, "of destination"), ("z", "1")], false),
        );
        assert_eq!(changes(&found), ["+a=1", "-z"]);
    }
}
