//! The end of a transfer: writes the manifest, and checks that the store returns the object and the manifest.
//!
//! Another writer may replace the object before the manifest is written. No restore would then accept the backup. A
//! proxy may acknowledge writes although the store contains nothing. A backup therefore succeeds only after the store
//! has returned the object and the manifest.
//!
//! A store without ETags, such as a directory, does not show that an object was overwritten. For such a store, the
//! whole object is read and compared with the manifest. The comparison takes minutes, so the manifest is read again
//! afterwards.

use std::time::Duration;

use api::manifest::{BackupManifest, manifest_key};
use store::{Committed, Store};
use tokio_util::sync::CancellationToken;

use super::content::{matches_manifest, matches_unchanged_manifest};
use super::{canceled, in_store, manifest_of};
use crate::reason::{Reason, Trouble};

/// Time limit for the manifest after a cancellation. An object without a manifest has no known owner, so
/// `deletionPolicy: Delete` would not delete it.
const CANCEL_GRACE: Duration = Duration::from_secs(10);

/// Delays between reads of the manifest, because the store may be eventually consistent.
const READ_RETRIES: [Duration; 3] = [
    Duration::from_millis(100),
    Duration::from_millis(400),
    Duration::from_millis(1500),
];

/// The object and the manifest of a transfer.
pub(super) struct Written<'a> {
    pub(super) store: &'a dyn Store,
    pub(super) key: &'a str,
    pub(super) committed: &'a Committed,
    /// The manifest in the store just before the commit, if any.
    pub(super) previous: Option<&'a BackupManifest>,
    /// The manifest of the committed object, which is written next.
    pub(super) manifest: &'a BackupManifest,
}

/// Reads the stored manifest. "Access denied" counts as a missing manifest, because this is the answer of S3 without
/// permission to list objects.
pub(super) async fn current_manifest(
    store: &dyn Store,
    key: &str,
) -> Result<Option<BackupManifest>, Trouble> {
    match manifest_of(store, key).await {
        Err(trouble) if trouble.reason == Reason::AccessDenied => Ok(None),
        found => found,
    }
}

/// Writes the manifest, and checks that the store returns the object and the manifest. After a cancellation, this
/// function continues for at most [`CANCEL_GRACE`].
pub(super) async fn confirm(
    written: &Written<'_>,
    cancelled: &CancellationToken,
) -> Result<(), Trouble> {
    let work = write_and_check(written);
    tokio::pin!(work);
    tokio::select! {
        done = &mut work => done,
        () = cancelled.cancelled() => {
            tokio::time::timeout(CANCEL_GRACE, work).await.unwrap_or_else(|_| Err(canceled()))
        }
    }
}

async fn write_and_check(written: &Written<'_>) -> Result<(), Trouble> {
    let &Written {
        store,
        key,
        committed,
        previous,
        manifest,
    } = written;
    if !is_stored(store, key, committed).await? {
        return Err(replaced(store, key));
    }
    let text = serde_json::to_vec_pretty(manifest)
        .map_err(|error| Trouble::new(Reason::StepFailed, error.to_string()))?;
    let manifest_key = manifest_key(key);
    // Invariant 12: without ETags, the store does not show that another writer has replaced the object. If the manifest
    // has changed since `previous` was read, the whole object is compared with the manifest of this transfer.
    let without_tags = committed.tag.is_none();
    if without_tags {
        let found = current_manifest(store, key).await?;
        let is_own = found.as_ref() == previous
            || matches_manifest(store, key, manifest).await?
                && current_manifest(store, key).await? == found;
        if !is_own {
            return Err(replaced(store, key));
        }
    }
    let put = store.put(&manifest_key, text.into()).await;
    put.map_err(|error| in_store(&error))?;
    fail::fail_point!("backup-after-manifest");
    // Invariant 12: a backup is complete only if the store returns its manifest.
    if !has_manifest(store, key, manifest).await? {
        return Err(replaced(store, key));
    }
    if is_stored(store, key, committed).await?
        && (!without_tags || matches_unchanged_manifest(store, key, manifest).await?)
    {
        return Ok(());
    }
    // Another writer has replaced or deleted the object. If the stored manifest is from this transfer, it is deleted,
    // because its object no longer exists. A manifest of another writer is kept.
    if manifest_of(store, key).await?.as_ref() == Some(manifest)
        && let Err(error) = store.delete(&manifest_key).await
    {
        tracing::warn!(%error, key, "cannot delete the manifest of a backup that another writer replaced or deleted");
    }
    Err(replaced(store, key))
}

/// True if the store returns the manifest. The read is repeated, because an eventually consistent store may return the
/// previous manifest.
async fn has_manifest(
    store: &dyn Store,
    key: &str,
    manifest: &BackupManifest,
) -> Result<bool, Trouble> {
    for pause in READ_RETRIES {
        if manifest_of(store, key).await?.as_ref() == Some(manifest) {
            return Ok(true);
        }
        tokio::time::sleep(pause).await;
    }
    Ok(manifest_of(store, key).await?.as_ref() == Some(manifest))
}

/// True if the object at the key has the size and the ETag of the committed object. Without ETags, only the size is
/// compared.
async fn is_stored(store: &dyn Store, key: &str, committed: &Committed) -> Result<bool, Trouble> {
    let object = store.head(key).await.map_err(|error| in_store(&error))?;
    Ok(object.is_some_and(|object| {
        let has_same_tag = match (&object.tag, &committed.tag) {
            (Some(current), Some(committed)) => current == committed,
            _ => true,
        };
        has_same_tag && object.size == committed.size
    }))
}

fn replaced(store: &dyn Store, key: &str) -> Trouble {
    Trouble::new(
        Reason::BackupMissing,
        format!(
            "the backup at {}/{key} was replaced or deleted by another writer: give each EtcdBackup its own path, and \
             check which other programs write to that path",
            store.location()
        ),
    )
}
