//! Searches the store for the backup of an earlier operator process that ended before it reported the backup. A
//! complete backup is adopted, and an incomplete backup is replaced.

use api::backup::name;
use api::manifest::{BackupManifest, manifest_key};
use futures::StreamExt;
use jiff::Timestamp;
use store::{Object, Store};

use super::content::matches_unchanged_manifest;
use super::{ObjectName, in_store, stored};
use crate::reason::Trouble;
use crate::snapshot::Stored;

/// The result of an earlier attempt for the backup in progress.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EarlierAttempt {
    /// The backup is complete.
    Complete(Stored),
    /// The backup is missing or incomplete. The next attempt uses this name, and overwrites an incomplete object with
    /// this name.
    Incomplete(ObjectName),
}

/// The EtcdBackup to which the stored backup must belong.
#[derive(Clone, Copy, Debug)]
pub struct Owner<'a> {
    /// The UID of the EtcdBackup.
    pub uid: &'a str,
    /// Name of the EtcdCluster in the spec, if any. The manifest must contain this name, because the backup may be
    /// from before a change of the spec.
    pub cluster: Option<&'a str>,
    /// True if the spec requires encryption. If true, the search ignores backups that are not encrypted. If false, the
    /// search ignores encrypted backups.
    pub encrypted: bool,
    /// True if the search reads and verifies the whole object when the store has no ETags. False in a reconcile,
    /// because such a read takes too long.
    pub verify_content: bool,
}

impl Owner<'_> {
    fn owns(&self, manifest: &BackupManifest) -> bool {
        let cluster = manifest.cluster.as_ref();
        manifest.backup_uid.as_deref() == Some(self.uid)
            && cluster.map(|cluster| cluster.name.as_str()) == self.cluster
            && manifest.encryption.is_some() == self.encrypted
    }
}

/// Searches the store for the complete backup of an earlier attempt. `begun` is the start of the backup.
///
/// # Errors
///
/// Fails if the store fails. Without permission to list objects, the result for a numbered name is `Incomplete`.
pub async fn earlier_attempt(
    store: &dyn Store,
    name: ObjectName,
    owner: Owner<'_>,
    begun: Timestamp,
) -> Result<EarlierAttempt, Trouble> {
    let (path, time) = match &name {
        ObjectName::Exact(key) => {
            let found = unchanged(store, key, owner, |manifest| {
                owner.owns(manifest) && manifest.created_at.0 >= begun
            });
            return Ok(found
                .await?
                .map_or(EarlierAttempt::Incomplete(name), EarlierAttempt::Complete));
        }
        ObjectName::Numbered { path, time, .. } => (path.clone(), *time),
    };
    // Without permission to list objects, the operator cannot find an object of the earlier attempt. The result then
    // has no `leftover`.
    let listed = match store.list(&name::prefix(&path)).await {
        Err(store::Error::AccessDenied(_)) => Vec::new(),
        listed => listed.map_err(|error| in_store(&error))?,
    };
    let mut leftover = None;
    for object in listed {
        // Invariant 13: objects of other paths that begin with the same prefix are skipped.
        if name::parse(&path, &object.key).is_none_or(|parts| parts.time != time) {
            continue;
        }
        let found = unchanged(store, &object.key, owner, |manifest| owner.owns(manifest));
        match found.await? {
            Some(stored) => return Ok(EarlierAttempt::Complete(stored)),
            // An object with a manifest that does not match `owner` is kept. Such an object is a backup of another
            // EtcdBackup or of an earlier spec, from the same second. Any other object is incomplete or overwritten, so
            // the next attempt replaces it.
            None => match manifest_of(store, &object.key).await? {
                Some(manifest) if !owner.owns(&manifest) => {}
                _ => leftover = Some(object.key),
            },
        }
    }
    Ok(EarlierAttempt::Incomplete(ObjectName::Numbered {
        path,
        time,
        leftover,
    }))
}

/// Like [`complete_backup`], but also requires that no other writer has overwritten the object since its manifest was
/// written. [`complete_backup`] does not check this, because a copy of a backup has another ETag.
async fn unchanged(
    store: &dyn Store,
    key: &str,
    owner: Owner<'_>,
    accepts: impl FnOnce(&BackupManifest) -> bool,
) -> Result<Option<Stored>, Trouble> {
    let Some((manifest, object)) = pair(store, key, accepts).await? else {
        return Ok(None);
    };
    let is_unchanged = match (&manifest.store_tag, &object.tag) {
        (Some(written), Some(current)) => written == current,
        (_, None) if owner.verify_content => {
            matches_unchanged_manifest(store, key, &manifest).await?
        }
        _ => true,
    };
    Ok(is_unchanged.then(|| stored(store, key, &manifest)))
}

/// The backup at a key. `None` without a manifest, or if the object does not have the size in its manifest.
pub(crate) async fn complete_backup(
    store: &dyn Store,
    key: &str,
) -> Result<Option<Stored>, Trouble> {
    let found = pair(store, key, |_| true).await?;
    Ok(found.map(|(manifest, _)| stored(store, key, &manifest)))
}

/// The manifest and its object. `None` if the manifest is missing, if `accepts` rejects it, or if the object has
/// another size.
pub(super) async fn pair(
    store: &dyn Store,
    key: &str,
    accepts: impl FnOnce(&BackupManifest) -> bool,
) -> Result<Option<(BackupManifest, Object)>, Trouble> {
    let Some(manifest) = manifest_of(store, key).await?.filter(accepts) else {
        return Ok(None);
    };
    let object = store.head(key).await.map_err(|error| in_store(&error))?;
    let size = manifest.stored_size.unwrap_or(manifest.size);
    let object = object.filter(|object| i64::try_from(object.size) == Ok(size));
    Ok(object.map(|object| (manifest, object)))
}

/// The manifest of a backup. `None` if it is missing or not valid.
pub(crate) async fn manifest_of(
    store: &dyn Store,
    key: &str,
) -> Result<Option<BackupManifest>, Trouble> {
    /// Upper bound on manifest size.
    const LIMIT: u64 = 4 << 20;
    let mut object = match store.get(&manifest_key(key)).await {
        Ok(object) => object,
        Err(store::Error::NoSuchObject { .. }) => return Ok(None),
        Err(error) => return Err(in_store(&error)),
    };
    if object.size > LIMIT {
        return Ok(None);
    }
    let mut text = Vec::new();
    while let Some(chunk) = object.chunks.next().await {
        text.extend_from_slice(&chunk.map_err(|error| in_store(&error))?);
    }
    Ok(serde_json::from_slice(&text).ok())
}
