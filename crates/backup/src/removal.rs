//! The removal of stored backups: of what a policy does not keep, or of all that one EtcdBackup has stored.
//!
//! It knows no Kubernetes. A backup goes before its manifest: a crash between the two leaves a manifest without a
//! backup, which nobody takes for one, and which is found and removed by the next removal. The other way round it
//! would leave a backup whose owner and checksum nobody knows any more.

use std::cmp::Reverse;
use std::collections::BTreeSet;
use std::sync::Arc;

use api::backup::name;
use api::manifest::{BackupManifest, MANIFEST_SUFFIX, manifest_key};
use futures::future::BoxFuture;
use futures::{FutureExt, StreamExt, TryStreamExt, stream};
use jiff::Timestamp;
use store::Store;
use tokio_util::sync::CancellationToken;

use crate::reason::{Reason, Trouble};
use crate::retention::{Found, Listing, Rules, read, surplus};
use crate::snapshot::{Kept, Listed};
use crate::transfer::{Meter, in_store, manifest_of, whole};
use crate::workers::Worker;

/// Deletions under way at the same time.
const AT_A_TIME: usize = 8;

/// What is removed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum What {
    /// What the rules do not keep, after the backup at this location.
    Surplus {
        /// What is kept.
        rules: Rules,
        /// Where the newest lies, as the status says it.
        newest: String,
        /// The UIDs of the other EtcdBackups that number theirs at the same path: what those stored is theirs.
        others: BTreeSet<String>,
    },
    /// All that carries the UID of the EtcdBackup.
    Everything,
}

/// A removal that can run.
pub struct Removal {
    /// Reaches the bucket.
    pub store: Arc<dyn Store>,
    /// The path of the spec.
    pub path: String,
    /// The EtcdBackup's UID.
    pub uid: String,
    /// What goes.
    pub what: What,
    /// The time, for what is too old.
    pub now: Timestamp,
}

impl Removal {
    /// Removes. Interrupted anywhere, it can be begun again.
    pub async fn run(&self) -> Result<Kept, Trouble> {
        match &self.what {
            What::Surplus {
                rules,
                newest,
                others,
            } => self.surplus(rules, newest, others).await,
            What::Everything => self.everything().await,
        }
    }

    async fn surplus(
        &self,
        rules: &Rules,
        newest: &str,
        others: &BTreeSet<String>,
    ) -> Result<Kept, Trouble> {
        let key = newest
            .strip_prefix(&self.store.location())
            .and_then(|key| key.strip_prefix('/'));
        let parts = key.and_then(|key| name::parse(&self.path, key));
        let (Some(key), Some(verified)) = (key, parts) else {
            // The newest lies elsewhere since the spec was changed: nothing here has a newer one yet.
            return Ok(Kept::default());
        };
        // Invariant 9: what replaces the others is in the store now, whole, with its manifest.
        let replaced_by = whole(self.store.as_ref(), key).await?;
        if replaced_by.is_none() {
            return Err(Trouble::new(
                Reason::BackupMissing,
                format!(
                    "the newest backup is not at {newest} as it was written: no older one is removed"
                ),
            ));
        }
        let mut listing = self.listing().await?;
        self.leave_out(others, key, &mut listing.backups).await?;
        let gone = surplus(&listing.backups, rules, verified, self.now);
        self.delete(gone.iter().map(|found| found.key.as_str()))
            .await?;
        // What a removal left that was cut off.
        let older = listing
            .orphans
            .iter()
            .filter(|found| found.parts < verified);
        for orphan in older {
            self.delete_orphan(orphan).await?;
        }
        let kept = listing.backups.iter().filter(|found| !gone.contains(found));
        Ok(Kept {
            backups: kept.map(|found| self.listed(found)).collect(),
            deleted: gone.len(),
            everything: false,
        })
    }

    /// Invariant 13: what a neighbour at the same path has stored goes by that one's rules. Where there is none, no
    /// manifest is read for it.
    async fn leave_out(
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
        let looks: Vec<_> = rest
            .into_iter()
            .map(|found| self.unless_of_others(found))
            .collect();
        let ours: Vec<Option<Found>> = stream::iter(looks)
            .buffered(AT_A_TIME)
            .try_collect()
            .await?;
        backups.extend(newest);
        backups.extend(ours.into_iter().flatten());
        backups.sort_by_key(|found| Reverse(found.parts));
        Ok(())
    }

    async fn unless_of_others(&self, found: Found) -> Result<Option<Found>, Trouble> {
        let manifest = manifest_of(self.store.as_ref(), &found.key).await?;
        Ok(self.is_ours(manifest.as_ref()).then_some(found))
    }

    /// Whether what lies beside this manifest may go.
    fn is_ours(&self, manifest: Option<&BackupManifest>) -> bool {
        let of = manifest.and_then(|manifest| manifest.backup_uid.as_ref());
        match &self.what {
            What::Surplus { others, .. } => !of.is_some_and(|uid| others.contains(uid)),
            What::Everything => of == Some(&self.uid),
        }
    }

    async fn everything(&self) -> Result<Kept, Trouble> {
        let mut keys = vec![self.path.clone()];
        let listing = self.listing().await?;
        keys.extend(listing.backups.iter().map(|found| found.key.clone()));
        keys.extend(listing.orphans.iter().map(|found| backup_of(&found.key)));
        let mut ours = Vec::new();
        for key in keys {
            // Another EtcdBackup may write to the same path.
            let manifest = manifest_of(self.store.as_ref(), &key).await?;
            if self.is_ours(manifest.as_ref()) {
                ours.push(key);
            }
        }
        self.delete(ours.iter().map(String::as_str)).await?;
        Ok(Kept {
            backups: Vec::new(),
            deleted: ours.len(),
            everything: true,
        })
    }

    async fn listing(&self) -> Result<Listing, Trouble> {
        let listed = self.store.list(&name::prefix(&self.path)).await;
        let objects = listed.map_err(|error| in_store(&error))?;
        // Invariant 13: only whole names of this path are looked at any further.
        Ok(read(
            &self.path,
            objects.iter().map(|object| object.key.as_str()),
        ))
    }

    async fn delete(&self, keys: impl Iterator<Item = &str>) -> Result<(), Trouble> {
        let deletions: Vec<_> = keys.map(|key| self.delete_one(key.to_owned())).collect();
        stream::iter(deletions)
            .buffer_unordered(AT_A_TIME)
            .try_collect::<()>()
            .await
    }

    async fn delete_one(&self, key: String) -> Result<(), Trouble> {
        let manifest = manifest_key(&key);
        let alone = matches!(&self.what, What::Surplus { others, .. } if others.is_empty());
        // Invariant 13: another EtcdBackup may have written there since the manifests were read.
        if !alone && !self.is_ours(manifest_of(self.store.as_ref(), &key).await?.as_ref()) {
            return Ok(());
        }
        let gone = self.store.delete(&key).await;
        gone.map_err(|error| in_store(&error))?;
        fail::fail_point!("backup-between-deletions");
        let gone = self.store.delete(&manifest).await;
        gone.map_err(|error| in_store(&error))
    }

    /// A listing may be older than what it lists: the backup is asked for by its name.
    async fn delete_orphan(&self, manifest: &Found) -> Result<(), Trouble> {
        let held = self.store.head(&backup_of(&manifest.key)).await;
        if held.map_err(|error| in_store(&error))?.is_none() {
            let gone = self.store.delete(&manifest.key).await;
            gone.map_err(|error| in_store(&error))?;
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
    type Product = Kept;

    fn store(&self) -> String {
        self.store.location()
    }

    fn run<'a>(
        &'a self,
        _: &'a Meter,
        cancelled: &'a CancellationToken,
    ) -> BoxFuture<'a, Result<Kept, Trouble>> {
        async {
            tokio::select! {
                kept = self.run() => kept,
                () = cancelled.cancelled() => {
                    Err(Trouble::new(Reason::StepFailed, "the removal was given up"))
                }
            }
        }
        .boxed()
    }
}
