//! Copies the stored backups of an EtcdBackup from its first store to a second store, and applies the retention rules
//! of the copy. Uses no Kubernetes API.
//!
//! Idempotent: a backup is not copied if the second store contains its complete copy. An interrupted task can therefore
//! be repeated.

use std::collections::BTreeSet;

use api::backup::name::{self, Numbered};
use futures::FutureExt;
use futures::future::BoxFuture;
use jiff::Timestamp;
use store::Target;
use store::progress::Meter;
use tokio_util::sync::CancellationToken;

use crate::reason::{Reason, Trouble};
use crate::removal::{Removal, RemovalScope};
use crate::retention::{Found, Rules, read, surplus};
use crate::snapshot::{Copied, Stored};
use crate::transfer::{Place, copy_backup, in_store, slot_key};
use crate::workers::{Progress, Worker};

/// A backup to copy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BackupToCopy {
    /// The part of the object name after the path of the store. A backup has the same suffix in every store.
    pub suffix: String,
    /// The SHA-256 of the snapshot, from the status. `None` if the status contains no SHA-256, for example if the
    /// operator has found the backup in a listing.
    pub sha256: Option<String>,
}

/// The retention rules of a copy, and their input.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CopyRules {
    /// All copies are kept.
    KeepAll,
    /// Copies that these rules do not keep are removed.
    Apply {
        /// The rules.
        rules: Rules,
        /// The UIDs of all other periodic EtcdBackups that write to the path of the copy. The backups of these
        /// EtcdBackups are kept.
        others: BTreeSet<String>,
        /// The current time, from which the ages of backups are computed.
        now: Timestamp,
    },
    /// The rules cannot be applied, for this reason.
    Blocked(Trouble),
}

/// The backups to copy to one store, and the retention rules for the copies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CopyJob {
    /// The backups, newest first.
    pub backups: Vec<BackupToCopy>,
    /// The retention rules of the copy.
    pub rules: CopyRules,
}

/// The inputs of a copying task.
pub struct Copying {
    /// The first store, with the path in the spec.
    pub from: Target,
    /// The store of the copy, with the path in `spec.copyTo`.
    pub to: Target,
    /// The backups to copy, and the retention rules.
    pub job: CopyJob,
    /// The UID of the EtcdBackup.
    pub uid: String,
    /// The time at which this process started. An unfinished upload that began before this time comes from an earlier
    /// process.
    pub since: Timestamp,
}

impl Copying {
    /// Copies the newest backup, then the older backups that the retention rules keep, and then removes old copies.
    ///
    /// # Errors
    ///
    /// Fails if the newest backup cannot be copied. If an older backup cannot be copied or old copies cannot be
    /// removed, the function succeeds, and the result contains the first problem.
    pub async fn run(
        &self,
        meter: &Meter,
        cancelled: &CancellationToken,
    ) -> Result<Copied, Trouble> {
        let Some((newest, older)) = self.job.backups.split_first() else {
            return Err(Trouble::new(
                Reason::StepFailed,
                "there is no backup to copy",
            ));
        };
        let copied = Box::pin(self.copy(newest, meter, cancelled)).await?;
        let stored = copied.ok_or_else(|| self.missing(newest))?;
        let rest = Box::pin(self.complete(&stored, older, meter, cancelled)).await;
        Ok(Copied {
            stored,
            problem: rest.err(),
        })
    }

    async fn copy(
        &self,
        backup: &BackupToCopy,
        meter: &Meter,
        cancelled: &CancellationToken,
    ) -> Result<Option<Stored>, Trouble> {
        let place = |target: &Target| Place {
            store: target.store.clone(),
            key: format!("{}{}", target.key, backup.suffix),
        };
        let places = (&place(&self.from), &place(&self.to));
        // If the EtcdBackup is not periodic, its backups have no suffix. Their copies have one key, so a copy may
        // replace the copy of an earlier backup.
        let expected = (backup.sha256.as_deref(), backup.suffix.is_empty());
        Box::pin(copy_backup(places, expected, self.since, meter, cancelled)).await
    }

    /// Copies the older backups, and applies the retention rules. The newest backup is already copied.
    async fn complete(
        &self,
        newest: &Stored,
        older: &[BackupToCopy],
        meter: &Meter,
        cancelled: &CancellationToken,
    ) -> Result<(), Trouble> {
        if let CopyRules::Blocked(trouble) = &self.job.rules {
            return Err(trouble.clone());
        }
        let surplus = self.surplus(newest, older).await?;
        // If an older backup cannot be copied, the loop continues with the next backup, and the retention rules are
        // applied. This is safe, because the rules do not count a missing copy, and keep an older copy in its place.
        let mut failed = None;
        for backup in older {
            // An older backup is not copied if the retention rules would delete its copy at once.
            let parts = self.parts(&backup.suffix);
            if parts.is_some_and(|parts| !surplus.contains(&parts)) {
                // `Ok(None)` means that retention has deleted the backup from the first store after the plan was made,
                // so there is nothing to copy.
                if let Err(trouble) = self.copy(backup, meter, cancelled).await {
                    if cancelled.is_cancelled() {
                        return Err(trouble);
                    }
                    failed = failed.or(Some(trouble));
                }
            }
        }
        let CopyRules::Apply { rules, others, now } = &self.job.rules else {
            return failed.map_or(Ok(()), Err);
        };
        let removal = Removal {
            store: self.to.store.clone(),
            path: self.to.key.clone(),
            uid: self.uid.clone(),
            scope: RemovalScope::Surplus {
                rules: rules.clone(),
                newest: newest.location.clone(),
                others: others.clone(),
                now: *now,
            },
        };
        tokio::select! {
            removed = removal.run() => failed.map_or(removed.map(drop), Err),
            () = cancelled.cancelled() => {
                Err(Trouble::new(Reason::StepFailed, "the removal of old copies was canceled"))
            }
        }
    }

    /// The copies that the retention rules would delete if all older backups were copied.
    async fn surplus(
        &self,
        newest: &Stored,
        older: &[BackupToCopy],
    ) -> Result<BTreeSet<Numbered>, Trouble> {
        let CopyRules::Apply { rules, now, .. } = &self.job.rules else {
            return Ok(BTreeSet::new());
        };
        let key = newest.location.strip_prefix(&self.to.store.location());
        let key = key.and_then(|key| key.strip_prefix('/'));
        let Some(verified) = key.and_then(|key| name::parse(&self.to.key, key)) else {
            return Ok(BTreeSet::new());
        };
        let listed = self.to.store.list(&name::prefix(&self.to.key)).await;
        let listed = listed.map_err(|error| in_store(&error))?;
        let copied: Vec<String> = older
            .iter()
            .map(|backup| format!("{}{}", self.to.key, backup.suffix))
            .collect();
        let keys = listed.iter().map(|object| object.key.as_str());
        let all: Vec<Found> =
            read(&self.to.key, keys.chain(copied.iter().map(String::as_str))).backups;
        let surplus = surplus(&all, rules, verified, *now);
        Ok(surplus.into_iter().map(|found| found.parts).collect())
    }

    fn parts(&self, suffix: &str) -> Option<Numbered> {
        name::parse(&self.to.key, &format!("{}{suffix}", self.to.key))
    }

    fn missing(&self, backup: &BackupToCopy) -> Trouble {
        Trouble::new(
            Reason::BackupMissing,
            format!(
                "the newest backup {}/{}{} is missing or incomplete in the first store: it cannot be copied",
                self.from.store.location(),
                self.from.key,
                backup.suffix
            ),
        )
    }
}

impl Worker for Copying {
    type Output = Copied;

    fn store(&self) -> String {
        slot_key(self.to.store.as_ref())
    }

    fn run<'a>(
        &'a self,
        progress: &'a Progress,
        cancelled: &'a CancellationToken,
    ) -> BoxFuture<'a, Result<Copied, Trouble>> {
        self.run(&progress.meter, cancelled).boxed()
    }
}
