//! Deletes the objects of a continuous backup. Only objects whose names belong to the format are deleted (invariant
//! 13).

use futures::future::join_all;
use store::Store;

use crate::name::{BaseName, SNAPSHOTS, SegmentName, is_snapshot};
use crate::stored::{ReadError, base_key, bases, list, segment_key};

/// Maximum number of concurrent deletions.
const CONCURRENT: usize = 8;

/// Deletes the segments of a base from the last to the first, and the snapshot with this key if it belongs to the
/// backup. Deletes the object that describes the base last, so that an interrupted deletion can be repeated.
///
/// # Errors
/// Fails if the store fails.
pub(crate) async fn remove_base(
    store: &dyn Store,
    prefix: &str,
    base: BaseName,
    snapshot: Option<&str>,
) -> Result<(), ReadError> {
    let names = list(store, &format!("{prefix}{base}/")).await?;
    let mut names: Vec<SegmentName> = names
        .iter()
        .filter_map(|name| SegmentName::parse(name))
        .collect();
    names.sort();
    let segments = names.iter().rev();
    let mut keys: Vec<String> = segments
        .map(|name| segment_key(prefix, base, *name))
        .collect();
    // Only snapshots of this backup are deleted, because a forged `base.json` could name any object of the bucket.
    let directory = format!("{prefix}{SNAPSHOTS}");
    let is_own = |key: &&str| key.strip_prefix(&directory).is_some_and(is_snapshot);
    keys.extend(snapshot.filter(is_own).map(str::to_owned));
    delete(store, &keys).await?;
    delete(store, &[base_key(prefix, base)]).await
}

/// Deletes all objects of a continuous backup. The recorder must have ended before. Returns the number of deleted
/// bases. `prefix` is empty or ends with a slash.
///
/// # Errors
/// Fails if the store fails. The call can be repeated.
pub async fn remove_all(store: &dyn Store, prefix: &str) -> Result<usize, ReadError> {
    let names = bases(store, prefix).await?;
    for name in &names {
        remove_base(store, prefix, *name, None).await?;
    }
    let directory = format!("{prefix}{SNAPSHOTS}");
    let left = list(store, &directory).await?;
    let left = left.into_iter().filter(|name| is_snapshot(name));
    let keys: Vec<String> = left.map(|name| format!("{directory}{name}")).collect();
    delete(store, &keys).await?;
    discard_uploads(store, prefix, i64::MAX).await;
    Ok(names.len())
}

/// Removes the unfinished uploads of snapshots that started before `begun_before`, in seconds since the epoch. A
/// failure is only logged, because the credentials may lack the permission to list uploads. Unfinished uploads then
/// stay until a lifecycle rule of the bucket deletes them.
pub(crate) async fn discard_uploads(store: &dyn Store, prefix: &str, begun_before: i64) {
    let directory = format!("{prefix}{SNAPSHOTS}");
    if let Err(error) = discard_in(store, &directory, begun_before).await {
        tracing::debug!(%error, directory, "cannot discard unfinished uploads");
    }
}

async fn discard_in(
    store: &dyn Store,
    directory: &str,
    begun_before: i64,
) -> Result<(), store::Error> {
    for upload in store.unfinished(directory).await? {
        let is_own = upload.key.strip_prefix(directory).is_some_and(is_snapshot);
        if is_own && upload.is_older_than(begun_before) {
            store.discard(&upload).await?;
        }
    }
    Ok(())
}

/// Deletes objects in their order, several at a time.
async fn delete(store: &dyn Store, keys: &[String]) -> Result<(), ReadError> {
    for chunk in keys.chunks(CONCURRENT) {
        let deletions: Vec<_> = chunk.iter().map(|key| store.delete(key)).collect();
        for (key, deleted) in chunk.iter().zip(join_all(deletions).await) {
            deleted.map_err(|error| ReadError::store(key, error))?;
        }
    }
    Ok(())
}
