//! Deletes old bases with their segments, and reports what the store contains.

use std::time::Duration;

use store::Store;

use crate::base::StoredBase;
use crate::progress::{Held, Missing, Monitor};
use crate::removal::{discard_uploads, remove_base};
use crate::stored::{ReadError, base_key, bases, chain, read_base};

/// At most this number of bases is deleted for each new base. This limits the loss that a wrong clock causes until it
/// is corrected.
const MAX_REMOVED: usize = 2;

/// If the clock of the recorder and the clock of the store differ by more than this number of seconds, no base is
/// deleted.
const MAX_CLOCK_SKEW: i64 = 300;

const MICROS: i64 = 1_000_000;

/// Number of the oldest bases, at most [`MAX_REMOVED`], that a restore to a time in the window does not need. `created`
/// contains the times of all bases in ascending order, in microseconds since the epoch.
///
/// Invariant 37: the newest base at or before the beginning of the window stays, and so do all later bases. The window
/// ends at the time of the newest base, so the clock of this process does not matter.
fn surplus(created: &[i64], window: Duration) -> usize {
    let window = i64::try_from(window.as_micros()).unwrap_or(i64::MAX);
    let newest = created.last().copied().unwrap_or_default();
    let start = newest.saturating_sub(window);
    let first = created.iter().rposition(|time| *time <= start);
    first.unwrap_or(0).min(MAX_REMOVED)
}

/// The gaps between the chains of consecutive bases. `last` contains the last revision of each chain except the newest.
///
/// If the answer to the write of a base was lost, the older chain continued until a later base. The older chain then
/// contains the revisions between the two bases, so there is no gap.
fn gaps(bases: &[StoredBase], last: &[i64]) -> Vec<Missing> {
    let mut found = Vec::new();
    // The highest revision in the chains up to `one` since the last change of the cluster ID.
    let mut reached = 0;
    let pairs = bases.iter().zip(bases.iter().skip(1)).zip(last);
    for ((one, next), last) in pairs {
        let (one, next) = (&one.base, &next.base);
        let cluster_changed = one.cluster_id != next.cluster_id;
        reached = (*last).max(reached);
        // The next base contains its own revision, so only earlier revisions can be missing.
        if cluster_changed || reached + 1 < next.revision {
            found.push(Missing {
                after: reached,
                until: next.revision,
                until_time: next.created,
                cluster_changed,
            });
        }
        if cluster_changed {
            reached = 0;
        }
    }
    found
}

/// Whether the clock of the recorder agreed with the clock of the store when the newest base was written. True if the
/// store does not report times.
async fn clocks_agree(
    store: &dyn Store,
    prefix: &str,
    newest: &StoredBase,
) -> Result<bool, ReadError> {
    let key = base_key(prefix, newest.name);
    let found = store.head(&key).await;
    let found = found.map_err(|error| ReadError::store(&key, error))?;
    let modified = found.and_then(|object| object.modified_unix_seconds);
    let created = newest.base.created / MICROS;
    Ok(modified.is_none_or(|time| (time - created).abs() <= MAX_CLOCK_SKEW))
}

/// Deletes the bases that a restore to a time in the window does not need, and the uploads that an earlier process has
/// left. Reports the content of the store. `since` is the time at which this process started, in seconds since the
/// epoch.
pub(crate) async fn tidy(
    store: &dyn Store,
    prefix: &str,
    window: Duration,
    since: i64,
    monitor: &Monitor,
) -> Result<(), ReadError> {
    discard_uploads(store, prefix, since).await;
    let mut stored = Vec::new();
    for name in bases(store, prefix).await? {
        match read_base(store, prefix, name).await {
            Ok(base) => stored.push(base),
            Err(error @ ReadError::Store { .. }) => return Err(error),
            // A base that cannot be parsed is never deleted, because its time is unknown.
            Err(error) => tracing::warn!(%error, %name, "a base cannot be read"),
        }
    }
    stored.sort_by_key(|base| (base.base.created, base.base.revision));
    let created: Vec<i64> = stored.iter().map(|base| base.base.created).collect();
    let mut removed = surplus(&created, window);
    let mut problem = None;
    if removed > 0
        && let Some(newest) = stored.last()
        && !clocks_agree(store, prefix, newest).await?
    {
        let text = format!(
            "the clock of the agent's node and the clock of the store differ by more than {MAX_CLOCK_SKEW} s: no old \
             base is deleted; correct the clock of the node"
        );
        tracing::warn!("{text}");
        problem = Some(text);
        removed = 0;
    }
    for base in stored.drain(..removed) {
        tracing::info!(base = %base.name, "a base that is older than the retention window is deleted");
        let snapshot = base.base.snapshot.key.as_str();
        remove_base(store, prefix, base.name, Some(snapshot)).await?;
    }
    let mut last = Vec::new();
    for base in stored.iter().take(stored.len().saturating_sub(1)) {
        last.push(chain(store, prefix, base.name).await?.last);
    }
    let gaps = gaps(&stored, &last);
    monitor.holds(Held::new(&stored, gaps));
    monitor.retention_ends(problem.as_deref());
    Ok(())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use etcd::ClusterId;
    use store::LocalStore;
    use store::fake::{Call, FaultyStore};

    use super::*;
    use crate::base::{Base, SnapshotObject};
    use crate::fixture::{base_of, chain as segments};
    use crate::name::{SNAPSHOTS, snapshot_name};
    use crate::removal::remove_all;
    use crate::stored::{write_base, write_segment};

    const PREFIX: &str = "p/";
    const HOUR: Duration = Duration::from_hours(1);

    #[test]
    fn invariant_37_last_base_before_retention_window_is_kept() {
        let hours = |hours: &[i64]| -> Vec<i64> {
            hours.iter().map(|hour| hour * 3_600 * MICROS).collect()
        };
        for (created, window, expected) in [
            (hours(&[]), 1, 0),
            (hours(&[0]), 1, 0),
            // The window begins at hour 1. A restore to a time between hour 1 and hour 2 needs the base of hour 0.
            (hours(&[0, 2]), 1, 0),
            (hours(&[0, 1, 2]), 1, 1),
            (hours(&[0, 1, 2]), 2, 0),
            (hours(&[0, 1, 2]), 0, 2),
            // A base with a wrong time, here hour 9,000, causes the deletion of at most two bases.
            (hours(&[0, 1, 2, 3, 4, 9_000]), 24, 2),
        ] {
            let found = surplus(&created, HOUR * window);
            assert_eq!(found, expected, "{created:?} {window}");
        }
    }

    async fn store_base(store: &LocalStore, cluster: u64, revision: i64, hour: i64) -> StoredBase {
        let created = 1_764_000_000 * MICROS + hour * 3_600 * MICROS;
        let key = format!("{PREFIX}{SNAPSHOTS}{}", snapshot_name(created));
        store.put(&key, "snapshot".into()).await.unwrap();
        let base = Base {
            cluster_id: ClusterId(cluster),
            revision,
            snapshot: SnapshotObject {
                key,
                size: 8,
                sha256: "00".repeat(32),
            },
            created,
            encryption: None,
        };
        let base = base.encode().unwrap();
        write_base(store, PREFIX, &base).await.unwrap();
        base
    }

    /// Stores a chain with this number of transactions.
    async fn store_chain(store: &LocalStore, base: &StoredBase, length: usize) {
        for segment in segments(base, 1, length, 0) {
            let written = write_segment(store, PREFIX, base.name, &segment);
            written.await.unwrap();
        }
    }

    #[test]
    fn gap_is_reported_if_next_base_does_not_continue_chain() {
        let bases = [(7, 10), (7, 20), (7, 30), (8, 5)];
        let bases = bases.map(|(cluster, revision)| base_of(cluster, revision));
        let found = gaps(&bases, &[20, 25, 40]);
        let found: Vec<_> = found
            .iter()
            .map(|gap| (gap.after, gap.until, gap.cluster_changed))
            .collect();
        assert_eq!(found, [(25, 30, false), (40, 5, true)]);
    }

    #[test]
    fn base_without_segments_within_older_chain_causes_no_gap() {
        let bases =
            [(7, 10), (7, 20), (7, 30)].map(|(cluster, revision)| base_of(cluster, revision));
        // The answer to the write of the second base was lost, so the chain of the first base continued until the third
        // base.
        assert_eq!(gaps(&bases, &[30, 20]), []);
        assert_eq!(gaps(&bases, &[29, 20]), []);
        let found = gaps(&bases, &[25, 20]);
        let found: Vec<_> = found.iter().map(|gap| (gap.after, gap.until)).collect();
        assert_eq!(found, [(25, 30)]);
    }

    #[tokio::test]
    async fn tidy_reports_stored_bases_and_deletes_nothing_if_clocks_disagree() {
        let directory = tempfile::tempdir().unwrap();
        let store = LocalStore::new(directory.path());
        let first = store_base(&store, 7, 10, 0).await;
        store_chain(&store, &first, 3).await;
        let second = store_base(&store, 7, 20, 1).await;
        store_chain(&store, &second, 3).await;
        store_base(&store, 7, 23, 2).await;
        let monitor = Monitor::default();
        // The files are new, but the times in the bases are old, as if the clocks of the agent and of the store
        // differed.
        tidy(&store, PREFIX, Duration::ZERO, 0, &monitor)
            .await
            .unwrap();
        let progress = monitor.read();
        let problem = progress.retention_problem.unwrap();
        assert!(problem.contains("correct the clock"), "{problem}");
        let held = progress.held.unwrap();
        assert_eq!((held.bases, held.oldest_revision), (3, 10));
        assert_eq!(held.gap_count, 1);
        assert_eq!((held.gaps[0].after, held.gaps[0].until), (13, 20));
    }

    #[tokio::test]
    async fn base_is_deleted_with_its_segments_and_its_snapshot() {
        let directory = tempfile::tempdir().unwrap();
        let store = LocalStore::new(directory.path());
        let first = store_base(&store, 7, 10, 0).await;
        store_chain(&store, &first, 3).await;
        let second = store_base(&store, 7, 13, 1).await;
        store_chain(&store, &second, 3).await;
        for foreign in ["p/notes.txt", "p/snapshots/notes.txt", "other"] {
            store.put(foreign, "x".into()).await.unwrap();
        }
        let snapshot = Some(first.base.snapshot.key.as_str());
        remove_base(&store, PREFIX, first.name, snapshot)
            .await
            .unwrap();
        assert_eq!(bases(&store, PREFIX).await.unwrap(), [second.name]);
        assert_eq!(chain(&store, PREFIX, second.name).await.unwrap().last, 16);
        // Six objects remain: three foreign objects, and the base, the segment and the snapshot of `second`.
        assert_eq!(store.list("").await.unwrap().len(), 6);
        assert_eq!(remove_all(&store, PREFIX).await.unwrap(), 1);
        assert_eq!(store.list("").await.unwrap().len(), 3);
    }

    #[tokio::test]
    async fn denied_list_of_unfinished_uploads_blocks_neither_tidy_nor_remove_all() {
        let directory = tempfile::tempdir().unwrap();
        let local = LocalStore::new(directory.path());
        store_base(&local, 7, 10, 0).await;
        let store = FaultyStore::new(local);
        let denied = || store::Error::AccessDenied("403".to_owned());
        store.fail(Call::Unfinished, denied());
        store.fail(Call::Unfinished, denied());
        let monitor = Monitor::default();
        tidy(&store, PREFIX, HOUR, 0, &monitor).await.unwrap();
        assert_eq!(monitor.read().held.unwrap().bases, 1);
        assert_eq!(remove_all(&store, PREFIX).await.unwrap(), 1);
        assert_eq!(store.list("").await.unwrap().len(), 0);
    }

    /// A forged base can name any object of the bucket as its snapshot (invariant 13). Only snapshots in the prefix are
    /// deleted.
    #[tokio::test]
    async fn invariant_13_snapshot_outside_of_the_prefix_is_kept() {
        let directory = tempfile::tempdir().unwrap();
        let store = LocalStore::new(directory.path());
        let base = crate::fixture::base();
        store.put("snapshot", "x".into()).await.unwrap();
        write_base(&store, PREFIX, &base).await.unwrap();
        remove_base(&store, PREFIX, base.name, Some("snapshot"))
            .await
            .unwrap();
        assert_eq!(store.list("").await.unwrap().len(), 1);
    }
}
