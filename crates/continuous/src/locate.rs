//! Finds the revision to restore for a time. Changes nothing.

use store::Store;

use crate::base::StoredBase;
use crate::name::{BaseName, SegmentName};
use crate::record::{Gap, Moment};
use crate::stored::{ReadError, bases, chain, read_base, read_times};

/// The revision to restore for a requested time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Located {
    /// The last revision that the recorder received at the requested time or before.
    pub revision: i64,
    /// The time at which the recorder received the revision, in microseconds since the epoch. This is the time of the
    /// base if nothing changed between the base and the requested time.
    pub observed: i64,
    /// True if the chain has no later revision. If the recorder stopped before the requested time, it did not record
    /// the changes after `revision`.
    pub is_last: bool,
    /// The gap after the revision, if the recorder detected it at the requested time or before.
    pub gap: Option<Gap>,
}

/// Finds the revision for a time in microseconds since the epoch, and the base from which it can be restored. `None` if
/// the time is before the first base. `prefix` is empty or ends with a slash.
///
/// For a chain of a day, this function reads about 20 segments. It does not verify the chain, because a replay verifies
/// it.
///
/// # Errors
/// Fails if the store fails, or if an object is damaged.
pub async fn locate(
    store: &dyn Store,
    prefix: &str,
    time: i64,
) -> Result<Option<(StoredBase, Located)>, ReadError> {
    let mut newest: Option<StoredBase> = None;
    for name in bases(store, prefix).await? {
        let base = read_base(store, prefix, name).await?;
        // The creation time decides, because a base that was taken after a restore of etcd's data can have a lower
        // revision.
        let is_newer = |than: &StoredBase| base.base.created >= than.base.created;
        if base.base.created <= time && newest.as_ref().is_none_or(is_newer) {
            newest = Some(base);
        }
    }
    let Some(base) = newest else {
        return Ok(None);
    };
    let segments = chain(store, prefix, base.name).await?.segments;
    let start = Moment {
        revision: base.base.revision,
        time: base.base.created,
    };
    let located = in_chain(store, prefix, (base.name, start), &segments, time).await?;
    Ok(Some((base, located)))
}

/// Finds the revision of a time in the chain of a base. `segments` are all segments of the chain, and `start` has the
/// revision and the time of the base.
pub(crate) async fn in_chain(
    store: &dyn Store,
    prefix: &str,
    (base, start): (BaseName, Moment),
    segments: &[SegmentName],
    time: i64,
) -> Result<Located, ReadError> {
    let mut located = Located {
        revision: start.revision,
        observed: start.time,
        is_last: true,
        gap: None,
    };
    let first = first_segment(store, prefix, base, segments, time).await?;
    for segment in segments.get(first..).unwrap_or_default() {
        let times = read_times(store, prefix, base, *segment).await?;
        for at in times.transactions {
            if at.time > time {
                located.is_last = false;
                return Ok(located);
            }
            (located.revision, located.observed) = (at.revision, at.time);
        }
        if let Some(gap) = times.gap.filter(|gap| gap.observed <= time) {
            located.gap = Some(gap);
        }
    }
    Ok(located)
}

/// The index of the last segment whose first transaction is at `time` or before. If there is no such segment, the index
/// of the first segment with transactions. A binary search is possible, because times do not decrease in a chain.
async fn first_segment(
    store: &dyn Store,
    prefix: &str,
    base: BaseName,
    segments: &[SegmentName],
    time: i64,
) -> Result<usize, ReadError> {
    let all = segments.iter().enumerate();
    let with_transactions: Vec<(usize, SegmentName)> = all
        .filter(|(_, name)| name.last >= name.first)
        .map(|(index, name)| (index, *name))
        .collect();
    let (mut low, mut high) = (0, with_transactions.len());
    while low + 1 < high {
        let middle = low.midpoint(high);
        let Some((_, name)) = with_transactions.get(middle) else {
            break;
        };
        let times = read_times(store, prefix, base, *name).await?;
        let first = times.transactions.first();
        if first.is_some_and(|first| first.time <= time) {
            low = middle;
        } else {
            high = middle;
        }
    }
    Ok(with_transactions.get(low).map_or(0, |(index, _)| *index))
}

#[cfg(test)]
mod tests;
