//! Converts a recorded transaction into the operations of an etcd transaction. Performs no I/O.
//!
//! etcd numbers the sub-revisions of a transaction in the order of its operations. A deletion of a range deletes the
//! keys in ascending order, so it can replace successive deletions in this order.

use bytes::{BufMut, Bytes, BytesMut};
use etcd::Change;

/// Minimum number of successive deletions, with ascending keys, that become one deletion of a range.
pub(super) const MIN_RUN: usize = 64;

/// A part of a transaction.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Part<'a> {
    /// A single change.
    Single(&'a Change),
    /// At least [`MIN_RUN`] successive deletions with ascending keys. The transaction puts no key in this range.
    Run(&'a [Change]),
}

/// Splits the changes of a transaction into parts.
pub(super) fn parts(changes: &[Change]) -> Vec<Part<'_>> {
    let mut parts = Vec::new();
    let mut rest = changes;
    while !rest.is_empty() {
        let length = run_length(rest).max(1);
        let (run, later) = rest.split_at(length);
        rest = later;
        if length >= MIN_RUN && is_free_of_puts(run, changes) {
            parts.push(Part::Run(run));
        } else {
            parts.extend(run.iter().map(Part::Single));
        }
    }
    parts
}

/// Number of successive deletions with ascending keys at the beginning of `changes`.
fn run_length(changes: &[Change]) -> usize {
    let mut last: Option<&Bytes> = None;
    let in_order = changes.iter().take_while(|change| {
        let follows = change.value.is_none() && last.is_none_or(|last| *last < change.key);
        last = Some(&change.key);
        follows
    });
    in_order.count()
}

/// Whether the transaction `changes` puts no key in the range of the deletions `run`. etcd rejects a transaction that
/// puts a key in a range that it also deletes.
fn is_free_of_puts(run: &[Change], changes: &[Change]) -> bool {
    let (Some(first), Some(last)) = (run.first(), run.last()) else {
        return false;
    };
    let mut puts = changes.iter().filter(|change| change.value.is_some());
    !puts.any(|put| put.key >= first.key && put.key <= last.key)
}

/// The smallest key after `key`. As the exclusive end of a range, it makes `key` the last key of the range.
pub(super) fn key_after(key: &Bytes) -> Bytes {
    let mut after = BytesMut::with_capacity(key.len() + 1);
    after.extend_from_slice(key);
    after.put_u8(0);
    after.freeze()
}

#[cfg(test)]
mod tests {
    use etcd::Value;

    use super::*;

    fn deletion(key: usize) -> Change {
        Change {
            key: format!("k{key:05}").into(),
            value: None,
        }
    }

    fn put(key: usize) -> Change {
        Change {
            value: Some(Value::default()),
            ..deletion(key)
        }
    }

    fn lengths(changes: &[Change]) -> Vec<usize> {
        let parts = parts(changes);
        parts
            .iter()
            .map(|part| match part {
                Part::Single(_) => 1,
                Part::Run(run) => run.len(),
            })
            .collect()
    }

    #[test]
    fn ascending_deletions_become_one_range_deletion() {
        let mut changes: Vec<Change> = (0..100).map(deletion).collect();
        changes.push(put(500));
        changes.extend((200..200 + MIN_RUN).map(deletion));
        assert_eq!(lengths(&changes), [100, 1, MIN_RUN]);
        assert_eq!(lengths(&changes[..MIN_RUN - 1]), [1; MIN_RUN - 1]);
    }

    #[test]
    fn deletions_stay_separate_if_transaction_puts_key_between_them() {
        let mut changes: Vec<Change> = (0..100).filter(|key| *key != 50).map(deletion).collect();
        changes.push(put(50));
        assert_eq!(lengths(&changes), [1; 100]);
    }

    #[test]
    fn descending_deletions_stay_separate() {
        let changes: Vec<Change> = (0..100).rev().map(deletion).collect();
        assert_eq!(lengths(&changes), [1; 100]);
    }
}
