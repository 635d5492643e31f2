//! What an operator that died has left in the store: what is whole and was made for this very backup is adopted, and
//! anything else is made again.

use api::backup::name;
use api::manifest::{BackupManifest, manifest_key};
use futures::StreamExt;
use jiff::Timestamp;
use store::{Object, Store};

use super::reading::is_described_still;
use super::{Name, in_store, stored};
use crate::reason::Trouble;
use crate::snapshot::Stored;

/// What the store holds of a backup that was under way when its operator died.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Written {
    /// All of it.
    Whole(Stored),
    /// Nothing, or what the next attempt replaces; so it is to be called.
    Not(Name),
}

/// Whose backup is looked for.
#[derive(Clone, Copy, Debug)]
pub struct Whose<'a> {
    /// The EtcdBackup's UID.
    pub uid: &'a str,
    /// The name of the EtcdCluster it is to be of, if its spec names one; it is of the same namespace. Times are whole
    /// seconds: what was made by the spec before may seem to be made since the spec was changed.
    pub cluster: Option<&'a str>,
    /// Whether all of it is read where the store does not tell one writing from another. A look that has to be over soon
    /// cannot do that.
    pub reads: bool,
}

impl Whose<'_> {
    fn is(&self, manifest: &BackupManifest) -> bool {
        let of = manifest.cluster.as_ref();
        manifest.backup_uid.as_deref() == Some(self.uid)
            && of.map(|cluster| cluster.name.as_str()) == self.cluster
    }
}

/// Looks for the backup that was written for this EtcdBackup since `begun`.
pub async fn written(
    store: &dyn Store,
    name: Name,
    whose: Whose<'_>,
    begun: Timestamp,
) -> Result<Written, Trouble> {
    let (path, time) = match &name {
        Name::Exact(key) => {
            let found = untouched(store, key, whose, |manifest| {
                whose.is(manifest) && manifest.created_at.0 >= begun
            });
            return Ok(found.await?.map_or(Written::Not(name), Written::Whole));
        }
        Name::Numbered { path, time, .. } => (path.clone(), *time),
    };
    // An identity that may write and not list begins anew under another name.
    let listed = match store.list(&name::prefix(&path)).await {
        Err(store::Error::AccessDenied(_)) => Vec::new(),
        listed => listed.map_err(|error| in_store(&error))?,
    };
    let mut left = None;
    for object in listed {
        // Invariant 13: a sibling's object begins like ours and is not ours.
        if name::parse(&path, &object.key).is_none_or(|parts| parts.time != time) {
            continue;
        }
        let found = untouched(store, &object.key, whose, |manifest| whose.is(manifest));
        match found.await? {
            Some(stored) => return Ok(Written::Whole(stored)),
            // Without a manifest, or with ours beside what somebody else has written over it. The manifest of another
            // EtcdBackup is of one that began in the same second.
            None => match manifest_of(store, &object.key).await? {
                Some(manifest) if !whose.is(&manifest) => {}
                _ => left = Some(object.key),
            },
        }
    }
    Ok(Written::Not(Name::Numbered { path, time, left }))
}

/// As [`whole`], and as it was when its manifest was written, where the store tells one writing from another: whoever
/// died after that may not have looked at it again (`vouch`). A copy of a good backup is another writing, so
/// this is asked for nothing else.
async fn untouched(
    store: &dyn Store,
    key: &str,
    whose: Whose<'_>,
    ours: impl FnOnce(&BackupManifest) -> bool,
) -> Result<Option<Stored>, Trouble> {
    let Some((manifest, held)) = pair(store, key, ours).await? else {
        return Ok(None);
    };
    let is_it = match (&manifest.store_tag, &held.tag) {
        (Some(written), Some(held)) => written == held,
        (_, None) if whose.reads => is_described_still(store, key, &manifest).await?,
        _ => true,
    };
    Ok(is_it.then(|| stored(store, key, &manifest)))
}

/// The backup under a key, if it has a manifest and the store holds all of what that says.
pub(crate) async fn whole(store: &dyn Store, key: &str) -> Result<Option<Stored>, Trouble> {
    let found = pair(store, key, |_| true).await?;
    Ok(found.map(|(manifest, _)| stored(store, key, &manifest)))
}

/// The manifest that `ours` takes and the object beside it, if that has the size it should have.
async fn pair(
    store: &dyn Store,
    key: &str,
    ours: impl FnOnce(&BackupManifest) -> bool,
) -> Result<Option<(BackupManifest, Object)>, Trouble> {
    let Some(manifest) = manifest_of(store, key).await?.filter(ours) else {
        return Ok(None);
    };
    let held = store.head(key).await.map_err(|error| in_store(&error))?;
    let size = manifest.stored_size.unwrap_or(manifest.size);
    let held = held.filter(|held| i64::try_from(held.size) == Ok(size));
    Ok(held.map(|held| (manifest, held)))
}

/// The manifest beside a backup; somebody else's object of this name is none of ours.
pub(crate) async fn manifest_of(
    store: &dyn Store,
    key: &str,
) -> Result<Option<BackupManifest>, Trouble> {
    /// More than any manifest has.
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
