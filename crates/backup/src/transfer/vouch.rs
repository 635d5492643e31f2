//! The end of a transfer: the manifest beside what was committed, and a last look at both.
//!
//! Somebody else may write to the same path: then what was committed may be replaced before its manifest is there, and
//! the manifest of one backup would lie beside the data of another, which nothing restores. And a proxy may answer for
//! a store that holds nothing. So a backup is a success when the store has shown both as they were written.
//!
//! Some stores (directories) do not tell one writing of a key from another. There what lies under the key is read, all of
//! it: that another manifest has come since just before the commit tells only that somebody else writes, and nobody can
//! tell of data that has no manifest yet. A large backup is read for minutes, and what was begun to be read is read to its
//! end though somebody else has replaced it: so the manifest is looked at again when it was read.

use std::time::Duration;

use api::manifest::{BackupManifest, manifest_key};
use store::{Committed, Store};
use tokio_util::sync::CancellationToken;

use super::reading::{is_described, is_described_still};
use super::{given_up, in_store, manifest_of};
use crate::reason::{Reason, Trouble};

/// How long the manifest of what is committed may still take when the transfer is given up: without it nobody would
/// know whose the data is, and `deletionPolicy: Delete` would leave it behind.
const LAST: Duration = Duration::from_secs(10);

/// Between looks at the manifest.
const PAUSES: [Duration; 3] = [
    Duration::from_millis(100),
    Duration::from_millis(400),
    Duration::from_millis(1500),
];

/// What is written, and what was there.
pub(super) struct Ends<'a> {
    pub(super) store: &'a dyn Store,
    pub(super) key: &'a str,
    pub(super) committed: &'a Committed,
    /// The manifest that lay there just before the commit.
    pub(super) before: Option<&'a BackupManifest>,
    /// Ours.
    pub(super) manifest: &'a BackupManifest,
}

/// The manifest that lies there. S3 denies what is not there to those who may not list.
pub(super) async fn lying(store: &dyn Store, key: &str) -> Result<Option<BackupManifest>, Trouble> {
    match manifest_of(store, key).await {
        Err(trouble) if trouble.reason == Reason::AccessDenied => Ok(None),
        found => found,
    }
}

/// Writes the manifest and looks at both.
pub(super) async fn vouch(ends: &Ends<'_>, cancelled: &CancellationToken) -> Result<(), Trouble> {
    let work = written(ends);
    tokio::pin!(work);
    tokio::select! {
        done = &mut work => done,
        () = cancelled.cancelled() => {
            tokio::time::timeout(LAST, work).await.unwrap_or_else(|_| Err(given_up()))
        }
    }
}

async fn written(ends: &Ends<'_>) -> Result<(), Trouble> {
    let &Ends {
        store,
        key,
        committed,
        before,
        manifest,
    } = ends;
    if !is_there(store, key, committed).await? {
        return Err(replaced(store, key));
    }
    let text = serde_json::to_vec_pretty(manifest)
        .map_err(|error| Trouble::new(Reason::StepFailed, error.to_string()))?;
    let beside = manifest_key(key);
    // Invariant 12. Who writes there may have written the data, too, or only before us.
    let blind = committed.tag.is_none();
    if blind {
        let found = lying(store, key).await?;
        let is_ours = found.as_ref() == before
            || is_described(store, key, manifest).await? && lying(store, key).await? == found;
        if !is_ours {
            return Err(replaced(store, key));
        }
    }
    let put = store.put(&beside, text.into()).await;
    put.map_err(|error| in_store(&error))?;
    fail::fail_point!("backup-after-manifest");
    // Invariant 12.
    if !shows(store, key, manifest).await? {
        return Err(replaced(store, key));
    }
    if is_there(store, key, committed).await?
        && (!blind || is_described_still(store, key, manifest).await?)
    {
        return Ok(());
    }
    // Ours would vouch for somebody else's data; theirs, if it has come by now, does so rightly.
    if manifest_of(store, key).await?.as_ref() == Some(manifest)
        && let Err(error) = store.delete(&beside).await
    {
        tracing::warn!(%error, key, "a manifest lies beside data it does not describe");
    }
    Err(replaced(store, key))
}

/// Whether the store shows the manifest: some show for a moment what was there before.
async fn shows(store: &dyn Store, key: &str, manifest: &BackupManifest) -> Result<bool, Trouble> {
    for pause in PAUSES {
        if manifest_of(store, key).await?.as_ref() == Some(manifest) {
            return Ok(true);
        }
        tokio::time::sleep(pause).await;
    }
    Ok(manifest_of(store, key).await?.as_ref() == Some(manifest))
}

/// Whether the store still holds what it acknowledged.
async fn is_there(store: &dyn Store, key: &str, committed: &Committed) -> Result<bool, Trouble> {
    let held = store.head(key).await.map_err(|error| in_store(&error))?;
    Ok(held.is_some_and(|held| {
        let same = match (&held.tag, &committed.tag) {
            (Some(held), Some(committed)) => held == committed,
            _ => true,
        };
        same && held.size == committed.size
    }))
}

fn replaced(store: &dyn Store, key: &str) -> Trouble {
    Trouble::new(
        Reason::BackupMissing,
        format!(
            "what was stored at {}/{key} is not there as it was written: give each EtcdBackup a path of its own, and \
             look at what else writes there",
            store.location()
        ),
    )
}
