//! Removes stored backups: the backups that the retention rules do not keep, or all stored objects of one EtcdBackup.
//! Uses no Kubernetes API.
//!
//! The object of a backup is deleted before its manifest. After a crash between the two deletions, the manifest without
//! an object does not count as a backup, and the next removal deletes the manifest. In the reverse order, a crash would
//! leave an object whose owner and checksum are unknown.

use std::cmp::Reverse;
use std::collections::BTreeSet;
use std::sync::Arc;

use api::backup::name;
use api::manifest::{BackupManifest, MANIFEST_SUFFIX, manifest_key};
use continuous::ReadError;
use futures::future::BoxFuture;
use futures::{FutureExt, StreamExt, TryStreamExt, stream};
use jiff::Timestamp;
use store::Store;
use tokio_util::sync::CancellationToken;

use crate::reason::{Reason, Trouble};
use crate::recording;
use crate::retention::{Found, Listing, Rules, read, surplus};
use crate::snapshot::{Listed, RemovalResult};
use crate::transfer::{complete_backup, in_store, manifest_of, slot_key};
use crate::workers::{Progress, Worker};

/// Maximum number of concurrent requests to the store.
const CONCURRENT: usize = 8;

/// The backups to remove.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RemovalScope {
    /// The backups that the retention rules do not keep, except the newest backup.
    Surplus {
        /// The retention rules in the spec.
        rules: Rules,
        /// The location of the newest backup, from the status.
        newest: String,
        /// The UIDs of all other periodic EtcdBackups with the same path. The backups of these EtcdBackups are kept.
        others: BTreeSet<String>,
        /// The time from which the ages of backups are computed.
        now: Timestamp,
    },
    /// All backups whose manifest has the UID of the EtcdBackup, and the objects of its agent.
    Everything,
}

/// The inputs of a removal.
pub struct Removal {
    /// The store with the backups.
    pub store: Arc<dyn Store>,
    /// The path in the spec of the EtcdBackup.
    pub path: String,
    /// The UID of the EtcdBackup. A manifest with another UID belongs to another EtcdBackup.
    pub uid: String,
    /// The backups to remove.
    pub scope: RemovalScope,
}

impl Removal {
    /// Removes the backups. Idempotent: an interrupted removal can be repeated.
    ///
    /// # Errors
    ///
    /// Fails if the store fails. `Surplus` also fails if the newest backup is missing or incomplete.
    pub async fn run(&self) -> Result<RemovalResult, Trouble> {
        match &self.scope {
            RemovalScope::Surplus {
                rules,
                newest,
                others,
                now,
            } => self.surplus(rules, newest, others, *now).await,
            RemovalScope::Everything => self.everything().await,
        }
    }

    async fn surplus(
        &self,
        rules: &Rules,
        newest: &str,
        others: &BTreeSet<String>,
        now: Timestamp,
    ) -> Result<RemovalResult, Trouble> {
        let key = newest
            .strip_prefix(&self.store.location())
            .and_then(|key| key.strip_prefix('/'));
        let parts = key.and_then(|key| name::parse(&self.path, key));
        let (Some(key), Some(verified)) = (key, parts) else {
            // The newest backup is not at the path in the spec. The path has changed, and no backup at the new path is
            // complete, so nothing is removed.
            return Ok(RemovalResult::default());
        };
        // Invariant 9: backups are removed only if the store contains the complete newest backup and its manifest.
        if complete_backup(self.store.as_ref(), key).await?.is_none() {
            return Err(Trouble::new(
                Reason::BackupMissing,
                format!(
                    "the newest backup at {newest} is missing or incomplete: the operator removes no older backup"
                ),
            ));
        }
        let mut listing = self.listing().await?;
        self.exclude_others(others, key, &mut listing.backups)
            .await?;
        let removed = surplus(&listing.backups, rules, verified, now);
        self.delete(removed.iter().map(|found| found.key.as_str()))
            .await?;
        // An interrupted removal may have left manifests without backups. This loop deletes these manifests.
        let older = listing
            .orphans
            .iter()
            .filter(|found| found.parts < verified);
        for orphan in older {
            self.delete_orphan(orphan).await?;
        }
        let kept = listing
            .backups
            .iter()
            .filter(|found| !removed.contains(found));
        Ok(RemovalResult {
            backups: kept.map(|found| self.listed(found)).collect(),
            deleted: removed.len(),
            everything: false,
        })
    }

    /// Removes the backups of other EtcdBackups from the list `backups`, because those EtcdBackups have separate
    /// retention rules (invariant 13). Without other EtcdBackups at this path, no manifest is read.
    async fn exclude_others(
        &self,
        others: &BTreeSet<String>,
        newest: &str,
        backups: &mut Vec<Found>,
    ) -> Result<(), Trouble> {
        if others.is_empty() {
            return Ok(());
        }
        let (newest, rest): (Vec<Found>, Vec<Found>) = std::mem::take(backups)
            .into_iter()
            .partition(|found| found.key == newest);
        let checks: Vec<_> = rest
            .into_iter()
            .map(|found| self.if_removable(found))
            .collect();
        let removable: Vec<Option<Found>> = stream::iter(checks)
            .buffered(CONCURRENT)
            .try_collect()
            .await?;
        backups.extend(newest);
        backups.extend(removable.into_iter().flatten());
        backups.sort_by_key(|found| Reverse(found.parts));
        Ok(())
    }

    async fn if_removable(&self, found: Found) -> Result<Option<Found>, Trouble> {
        let manifest = manifest_of(self.store.as_ref(), &found.key).await?;
        Ok(self.is_removable(manifest.as_ref()).then_some(found))
    }

    /// True if this removal may delete the backup with this manifest.
    fn is_removable(&self, manifest: Option<&BackupManifest>) -> bool {
        let owner = manifest.and_then(|manifest| manifest.backup_uid.as_ref());
        match &self.scope {
            RemovalScope::Surplus { others, .. } => !owner.is_some_and(|uid| others.contains(uid)),
            RemovalScope::Everything => owner == Some(&self.uid),
        }
    }

    async fn everything(&self) -> Result<RemovalResult, Trouble> {
        let mut keys = vec![self.path.clone()];
        let listing = self.listing().await?;
        keys.extend(listing.backups.iter().map(|found| found.key.clone()));
        keys.extend(listing.orphans.iter().map(|found| backup_of(&found.key)));
        let mut removable = Vec::new();
        for key in keys {
            // Another EtcdBackup may write to the same path, so the owner in the manifest decides whether this backup
            // is removed.
            let manifest = manifest_of(self.store.as_ref(), &key).await?;
            if self.is_removable(manifest.as_ref()) {
                removable.push(key);
            }
        }
        self.delete(removable.iter().map(String::as_str)).await?;
        // The objects of the agent are removed like the backups. No agent writes new objects, because the plan starts
        // this removal only after the agent has ended.
        let prefix = recording::prefix(&self.path, &self.uid);
        let removed = continuous::remove_all(self.store.as_ref(), &prefix).await;
        removed.map_err(|error| match error {
            ReadError::Store { error, .. } => in_store(&error),
            other => Trouble::new(Reason::StepFailed, other.to_string()),
        })?;
        Ok(RemovalResult {
            backups: Vec::new(),
            deleted: removable.len(),
            everything: true,
        })
    }

    async fn listing(&self) -> Result<Listing, Trouble> {
        let listed = self.store.list(&name::prefix(&self.path)).await;
        let objects = listed.map_err(|error| in_store(&error))?;
        // Invariant 13: `read` ignores objects whose complete name does not match the pattern of this path.
        Ok(read(
            &self.path,
            objects.iter().map(|object| object.key.as_str()),
        ))
    }

    async fn delete(&self, keys: impl Iterator<Item = &str>) -> Result<(), Trouble> {
        let deletions: Vec<_> = keys.map(|key| self.delete_one(key.to_owned())).collect();
        stream::iter(deletions)
            .buffer_unordered(CONCURRENT)
            .try_collect::<()>()
            .await
    }

    async fn delete_one(&self, key: String) -> Result<(), Trouble> {
        let manifest = manifest_key(&key);
        let is_sole_owner =
            matches!(&self.scope, RemovalScope::Surplus { others, .. } if others.is_empty());
        // Invariant 13: another EtcdBackup may have overwritten this object since the listing, so the owner in the
        // manifest is checked again.
        if !is_sole_owner {
            let current = manifest_of(self.store.as_ref(), &key).await?;
            if !self.is_removable(current.as_ref()) {
                return Ok(());
            }
        }
        let deleted = self.store.delete(&key).await;
        deleted.map_err(|error| in_store(&error))?;
        fail::fail_point!("backup-between-deletions");
        let deleted = self.store.delete(&manifest).await;
        deleted.map_err(|error| in_store(&error))
    }

    /// Deletes a manifest whose object is missing. The listing may be stale, so this function first checks that the
    /// store does not contain the object.
    async fn delete_orphan(&self, manifest: &Found) -> Result<(), Trouble> {
        let held = self.store.head(&backup_of(&manifest.key)).await;
        if held.map_err(|error| in_store(&error))?.is_none() {
            let deleted = self.store.delete(&manifest.key).await;
            deleted.map_err(|error| in_store(&error))?;
        }
        Ok(())
    }

    fn listed(&self, found: &Found) -> Listed {
        Listed {
            location: format!("{}/{}", self.store.location(), found.key),
            parts: found.parts,
        }
    }
}

fn backup_of(manifest: &str) -> String {
    manifest
        .strip_suffix(MANIFEST_SUFFIX)
        .unwrap_or(manifest)
        .to_owned()
}

impl Worker for Removal {
    type Output = RemovalResult;

    fn store(&self) -> String {
        slot_key(self.store.as_ref())
    }

    fn run<'a>(
        &'a self,
        _: &'a Progress,
        cancelled: &'a CancellationToken,
    ) -> BoxFuture<'a, Result<RemovalResult, Trouble>> {
        async {
            tokio::select! {
                result = self.run() => result,
                () = cancelled.cancelled() => {
                    Err(Trouble::new(Reason::StepFailed, "the removal was canceled"))
                }
            }
        }
        .boxed()
    }
}
