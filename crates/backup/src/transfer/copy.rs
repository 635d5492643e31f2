//! Copies one stored backup to another store. The copy has the bytes and the manifest of the original.
//!
//! The content is compared with the manifest while it is copied. The copied object becomes visible only if its content
//! matches the manifest. The manifest of the copy is written last (invariant 12).

use std::sync::Arc;

use api::manifest::BackupManifest;
use futures::StreamExt;
use jiff::Timestamp;
use store::progress::Meter;
use store::{ObjectStream, Store, Upload};
use tokio_util::sync::CancellationToken;

use super::adoption::pair;
use super::confirm::{Written, confirm, current_manifest};
use super::content::Comparison;
use super::{PROGRESS_WINDOW, cancelable, canceled, in_store, stalled, stored, too_slow, write};
use crate::reason::{Reason, Trouble};
use crate::snapshot::{Moved, Stored};

/// A store, and the key of a backup in this store.
#[derive(Clone)]
pub(crate) struct Place {
    pub(crate) store: Arc<dyn Store>,
    pub(crate) key: String,
}

impl Place {
    fn location(&self) -> String {
        format!("{}/{}", self.store.location(), self.key)
    }
}

/// Copies the backup from `from` to `to`, unless `to` contains the complete copy. `sha256` is the SHA-256 of the
/// snapshot in the status, if the status contains it. `replaces` is true if the copy may replace another backup at its
/// key. `since` is the start time of this process.
///
/// Returns `None` if `from` does not contain the complete backup.
pub(crate) async fn copy_backup(
    (from, to): (&Place, &Place),
    (sha256, replaces): (Option<&str>, bool),
    since: Timestamp,
    meter: &Meter,
    cancelled: &CancellationToken,
) -> Result<Option<Stored>, Trouble> {
    let found = pair(from.store.as_ref(), &from.key, |_| true).await;
    let Some((manifest, _)) = found.map_err(|trouble| in_first_store(&trouble))? else {
        return Ok(None);
    };
    if sha256.is_some_and(|sha256| !manifest.sha256.eq_ignore_ascii_case(sha256)) {
        return Err(Trouble::new(
            Reason::ChecksumMismatch,
            format!(
                "the backup {} was replaced: its manifest has another SHA-256 than the status of the EtcdBackup",
                from.location()
            ),
        ));
    }
    if let Some(copy) = complete_copy(to, &manifest).await? {
        return Ok(Some(copy));
    }
    // Invariant 9: another EtcdBackup with the same path may have written a backup at this key. The copy of a periodic
    // backup (`replaces` is false) does not replace that backup.
    if !replaces
        && let Some(other) = current_manifest(to.store.as_ref(), &to.key).await?
        && !is_same_backup(&other, &manifest)
    {
        return Err(Trouble::new(
            Reason::BackupMissing,
            format!(
                "another EtcdBackup has written {}: give each copy its own path",
                to.location()
            ),
        ));
    }
    let copied = copy_object((from, to), manifest, since, meter, cancelled);
    let manifest = Box::pin(copied).await?;
    Ok(Some(stored(to.store.as_ref(), &to.key, &manifest)))
}

/// The complete copy of the backup with this manifest; `None` if the store does not contain it.
async fn complete_copy(to: &Place, manifest: &BackupManifest) -> Result<Option<Stored>, Trouble> {
    let found = pair(to.store.as_ref(), &to.key, |copy| {
        is_same_backup(copy, manifest)
    });
    let found = match found.await {
        // Without the permission to list objects, S3 answers "access denied" for a missing object, so the copy counts
        // as missing.
        Err(trouble) if trouble.reason == Reason::AccessDenied => None,
        found => found?,
    };
    let unchanged = found.filter(|(copy, object)| match (&copy.store_tag, &object.tag) {
        (Some(written), Some(current)) => written == current,
        _ => true,
    });
    Ok(unchanged.map(|(copy, _)| stored(to.store.as_ref(), &to.key, &copy)))
}

/// True if both manifests describe the same backup. The manifests of a backup and of its copy differ only in
/// `store_tag`, the ETag.
fn is_same_backup(one: &BackupManifest, other: &BackupManifest) -> bool {
    let without_tag = |manifest: &BackupManifest| BackupManifest {
        store_tag: None,
        ..manifest.clone()
    };
    without_tag(one) == without_tag(other)
}

/// Copies the object, then writes its manifest. Returns the manifest of the copy.
async fn copy_object(
    (from, to): (&Place, &Place),
    manifest: BackupManifest,
    since: Timestamp,
    meter: &Meter,
    cancelled: &CancellationToken,
) -> Result<BackupManifest, Trouble> {
    let store = to.store.as_ref();
    let object = cancelable(cancelled, from.store.get(&from.key)).await;
    let object = object.map_err(|trouble| in_first_store(&trouble))?;
    let size = object.size;
    meter.set(Moved {
        bytes: 0,
        total: Some(size),
    });
    // If the unfinished uploads cannot be discarded, for example because the operator has no permission to list
    // objects, the copy continues. The unfinished uploads then stay until a lifecycle rule of the bucket deletes them.
    let discarded = store.discard_unfinished(&to.key, since.as_second());
    if let Err(trouble) = cancelable(cancelled, discarded).await {
        let key = &to.key;
        tracing::debug!(
            trouble = trouble.message,
            key,
            "cannot discard unfinished uploads"
        );
    }
    let mut upload = cancelable(cancelled, store.begin(&to.key)).await?;
    let copied = tokio::select! {
        copied = stream(object, upload.as_mut(), &manifest, meter) => copied,
        () = stalled(meter, PROGRESS_WINDOW) => Err(too_slow(&from.location())),
        () = cancelled.cancelled() => Err(canceled()),
    };
    let matches = match copied {
        Ok(true) => Ok(()),
        Ok(false) => Err(damaged(from)),
        Err(trouble) => Err(trouble),
    };
    if let Err(trouble) = matches {
        if let Err(error) = upload.abort().await {
            tracing::warn!(%error, key = to.key, "cannot discard an unfinished upload");
        }
        return Err(trouble);
    }
    let previous = current_manifest(store, &to.key).await?;
    fail::fail_point!("backup-before-copy-commit");
    // Invariant 12: `stream` has compared the content with the manifest. At the commit, the store must acknowledge the
    // whole object.
    let committed = cancelable(cancelled, upload.commit()).await?;
    if committed.size != size {
        return Err(Trouble::new(
            Reason::ChecksumMismatch,
            format!(
                "the store acknowledged {} of {size} bytes of {}",
                committed.size,
                to.location()
            ),
        ));
    }
    fail::fail_point!("backup-before-copy-manifest");
    let manifest = BackupManifest {
        store_tag: committed.tag.clone(),
        ..manifest
    };
    let written = Written {
        store,
        key: &to.key,
        committed: &committed,
        previous: previous.as_ref(),
        manifest: &manifest,
    };
    Box::pin(confirm(&written, cancelled)).await?;
    Ok(manifest)
}

/// Copies the bytes. Returns whether they match the manifest.
async fn stream(
    mut object: ObjectStream,
    upload: &mut dyn Upload,
    manifest: &BackupManifest,
    meter: &Meter,
) -> Result<bool, Trouble> {
    let mut comparison = Comparison::new(manifest);
    let mut moved = 0;
    while let Some(chunk) = object.chunks.next().await {
        let chunk = chunk.map_err(|error| in_first_store(&in_store(&error)))?;
        comparison.push(&chunk);
        moved += chunk.len() as u64;
        meter.advance_to(moved);
        write(upload, chunk).await?;
    }
    Ok(moved == object.size && comparison.matches())
}

/// Adds to the message that the problem is in the first store, and not in the store of the copy.
fn in_first_store(trouble: &Trouble) -> Trouble {
    let message = format!(
        "the backup cannot be read in the first store: {}",
        trouble.message
    );
    Trouble::new(trouble.reason, message)
}

fn damaged(from: &Place) -> Trouble {
    Trouble::new(
        Reason::ChecksumMismatch,
        format!(
            "the backup {} does not match its manifest: it is not copied. Check the first store, and make a new backup",
            from.location()
        ),
    )
}
