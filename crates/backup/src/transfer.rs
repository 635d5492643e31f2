//! Streams the snapshot of a member to the store, and verifies its checksum. The memory use does not depend on the
//! size of the snapshot. Uses no Kubernetes API.
//!
//! A transfer writes the manifest last, because an object without a manifest does not count as a backup. If the
//! transfer fails or is canceled before the commit of the object, it stores no backup. A transfer that is canceled
//! after the commit may complete the backup.

use std::sync::Arc;
use std::time::Duration;

use api::backup::name;
use api::manifest::{BackupManifest, ManifestCluster, manifest_key};
use bytes::Bytes;
use etcd::{Etcd, Inspected, Inspector};
use futures::FutureExt;
use futures::StreamExt;
use futures::future::{BoxFuture, join_all};
use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use store::compression::ZSTD;
use store::encryption::Key;
pub use store::progress::Meter;
use store::{Store, Upload};
use tokio_util::sync::CancellationToken;

use crate::reason::{Reason, Trouble};
use crate::snapshot::{EndpointLimits, Moved, Stored};
use crate::workers::{Progress, Worker};

mod adoption;
mod candidates;
mod confirm;
mod content;
mod copy;
mod failure;
mod key_facts;
mod object_name;
mod pack;

pub use adoption::{EarlierAttempt, Owner, earlier_attempt};
pub(crate) use adoption::{complete_backup, manifest_of};
use candidates::{Candidate, of_cluster, ranked, usable};
use confirm::{Written, confirm, current_manifest};
pub(crate) use copy::{Place, copy_backup};
pub use failure::in_store;
use failure::{canceled, in_etcd, unreadable};
use key_facts::KeyFacts;
pub use object_name::ObjectName;
pub(crate) use pack::encryption_key;
use pack::{Packed, Packer, described};

/// The inputs of a transfer: the source, the store, and the object to write.
#[derive(Clone)]
pub struct Transfer {
    /// The client of the etcd cluster.
    pub etcd: Arc<dyn Etcd>,
    /// Client URLs to which the transfer connects first. It also connects to the members in etcd's member list that
    /// `limits` permits.
    pub endpoints: Vec<String>,
    /// The store that receives the backup.
    pub store: Arc<dyn Store>,
    /// The name of the backup's object in the store.
    pub name: ObjectName,
    /// True if the object is compressed with Zstandard.
    pub compress: bool,
    /// The key that encrypts the object; `None` without encryption.
    pub encryption: Option<Key>,
    /// The UID of the EtcdBackup, for the manifest.
    pub uid: String,
    /// The EtcdCluster, as the manifest records it. `None` if the spec names only endpoints.
    pub cluster: Option<ManifestCluster>,
    /// The members to which the transfer may connect (invariant 28).
    pub limits: EndpointLimits,
    /// The start time of this process. An unfinished upload from before this time is from an earlier process.
    pub since: Timestamp,
}

/// Version of the manifest's format.
const FORMAT: u32 = 1;

/// Minimum number of bytes that a transfer must copy within [`PROGRESS_WINDOW`]. It is larger than one part of an
/// upload (6 MiB), because the progress counts whole parts.
const MIN_PROGRESS: u64 = 8 << 20;

const PROGRESS_WINDOW: Duration = Duration::from_mins(5);

impl Transfer {
    /// Takes one snapshot, and stores it with its manifest. `cancelled` ends the transfer early.
    ///
    /// # Errors
    ///
    /// Fails if no member sends a snapshot, if the snapshot does not match its checksum, if the store fails, or if the
    /// transfer is canceled or too slow.
    pub async fn run(
        &self,
        meter: &Meter,
        cancelled: &CancellationToken,
    ) -> Result<Stored, Trouble> {
        self.run_within(PROGRESS_WINDOW, meter, cancelled).await
    }

    /// Like [`Self::run`], with `window` instead of [`PROGRESS_WINDOW`].
    async fn run_within(
        &self,
        window: Duration,
        meter: &Meter,
        cancelled: &CancellationToken,
    ) -> Result<Stored, Trouble> {
        let candidates = tokio::select! {
            candidates = self.candidates() => candidates?,
            () = cancelled.cancelled() => return Err(canceled()),
        };
        let mut last = None;
        for candidate in candidates {
            match self.from(&candidate, window, meter, cancelled).await {
                // This member is unreachable. The loop tries the next member, which may be able to send its snapshot.
                Err(trouble)
                    if trouble.reason == Reason::EtcdUnreachable && !cancelled.is_cancelled() =>
                {
                    last = Some(trouble);
                }
                outcome => return outcome,
            }
        }
        Err(last.unwrap_or_else(canceled))
    }

    /// The members that answer, best first. All URLs are queried concurrently, so several dead members cause no longer
    /// delay than one.
    async fn candidates(&self) -> Result<Vec<Candidate>, Trouble> {
        let mut urls = self.endpoints.clone();
        // An error is ignored: without a quorum, etcd returns no member list, but a member without a quorum can send
        // its snapshot.
        let listed = self.etcd.members(&self.endpoints).await.ok();
        let members = listed.iter().flat_map(|listed| &listed.members);
        // Invariant 28: a hostile etcd may advertise client URLs outside of its cluster, so `limits` restricts these
        // URLs.
        let advertised = members.flat_map(|member| &member.client_urls);
        let advertised = advertised.filter(|url| self.limits.advertised.allows(url));
        urls.extend(advertised.cloned());
        urls.sort();
        urls.dedup();
        let requests = urls.into_iter().map(|url| async {
            let status = self.etcd.status(&url).await;
            (url, status)
        });
        let mut answers = Vec::new();
        let mut errors = Vec::new();
        let mut denied = None;
        for (url, status) in join_all(requests).await {
            match status {
                Ok(status) => answers.push(Candidate { url, status }),
                Err(error) => {
                    errors.push(error.to_string());
                    if matches!(error, etcd::Error::AccessDenied(_)) {
                        denied.get_or_insert(error);
                    }
                }
            }
        }
        if answers.is_empty()
            && let Some(error) = denied
        {
            return Err(in_etcd(&error));
        }
        if answers.is_empty() {
            return Err(Trouble::new(
                Reason::EtcdUnreachable,
                format!(
                    "no etcd member answered: check spec.etcdEndpoints or the cluster ({})",
                    errors.join("; ")
                ),
            ));
        }
        if let Some(expected) = self.limits.cluster_id {
            answers = of_cluster(answers, expected)?;
        }
        ranked(usable(answers, &self.endpoints, listed.as_ref()))
    }

    async fn from(
        &self,
        member: &Candidate,
        window: Duration,
        meter: &Meter,
        cancelled: &CancellationToken,
    ) -> Result<Stored, Trouble> {
        let key = cancelable(cancelled, self.free_key(member.status.revision)).await?;
        meter.set(Moved {
            bytes: 0,
            total: u64::try_from(member.status.db_size).ok(),
        });
        // If the unfinished uploads cannot be discarded, for example because the operator has no permission to list
        // objects, the transfer continues. The unfinished uploads then stay until a lifecycle rule of the bucket
        // deletes them.
        if let Err(trouble) = cancelable(cancelled, self.discard_leftovers(&key)).await {
            tracing::debug!(
                trouble = trouble.message,
                key,
                "cannot discard unfinished uploads"
            );
        }
        let mut upload = cancelable(cancelled, self.store.begin(&key)).await?;
        let copied = tokio::select! {
            copied = self.copy(member, upload.as_mut(), meter) => copied,
            () = stalled(meter, window) => Err(too_slow(&member.url)),
            () = cancelled.cancelled() => Err(canceled()),
        };
        let (inspected, packed) = match copied {
            Ok(copied) => copied,
            Err(trouble) => {
                if let Err(error) = upload.abort().await {
                    tracing::warn!(%error, key, "cannot discard an unfinished upload");
                }
                return Err(trouble);
            }
        };
        // The requests in `reads` may be slow, so they are sent before the commit. The time between the commit and the
        // write of the manifest must be short, because another writer could replace the object in this time.
        let reads = async {
            tokio::join!(
                self.key_facts(member, &inspected),
                current_manifest(self.store.as_ref(), &key)
            )
        };
        let (keys, previous) = tokio::select! {
            read = reads => read,
            () = cancelled.cancelled() => return Err(canceled()),
        };
        let previous = previous?;
        fail::fail_point!("backup-before-commit");
        // Invariant 12: `copy` has verified the checksum from etcd. At the commit, the store must acknowledge the whole
        // object.
        let committed = cancelable(cancelled, upload.commit()).await?;
        if committed.size != packed.size {
            return Err(Trouble::new(
                Reason::ChecksumMismatch,
                format!(
                    "the store acknowledged {} of {} bytes of {key}",
                    committed.size, packed.size
                ),
            ));
        }
        fail::fail_point!("backup-before-manifest");
        let manifest = BackupManifest {
            store_tag: committed.tag.clone(),
            ..self.manifest(member, &inspected, packed, keys)
        };
        let written = Written {
            store: self.store.as_ref(),
            key: &key,
            committed: &committed,
            previous: previous.as_ref(),
            manifest: &manifest,
        };
        Box::pin(confirm(&written, cancelled)).await?;
        Ok(stored(self.store.as_ref(), &key, &manifest))
    }

    /// The key of the object. Another EtcdBackup with the same path may have started in the same second. In this case,
    /// the revision in the key is lowered until the key is free. This is correct, because the snapshot contains the
    /// lower revision as well.
    async fn free_key(&self, revision: i64) -> Result<String, store::Error> {
        /// Maximum number of EtcdBackups with the same path that can start in the same second.
        const MAX_SAME_SECOND: i64 = 16;
        let mut key = self.name.key(revision);
        if !matches!(self.name, ObjectName::Numbered { leftover: None, .. }) {
            return Ok(key);
        }
        for offset in 1..MAX_SAME_SECOND {
            let taken = match self.store.head(&manifest_key(&key)).await {
                // Without the permission to list objects, S3 answers "access denied" for a missing object. In this
                // case, the key counts as free.
                Err(store::Error::AccessDenied(_)) => false,
                found => found?.is_some(),
            };
            if !taken || revision < offset {
                break;
            }
            key = self.name.key(revision - offset);
        }
        Ok(key)
    }

    /// Discards unfinished uploads of earlier processes to this key. For a periodic backup, this includes uploads to
    /// all keys of its path, because each attempt may use another key.
    async fn discard_leftovers(&self, key: &str) -> Result<(), store::Error> {
        let (prefix, path) = match &self.name {
            ObjectName::Exact(key) => (key.clone(), None),
            ObjectName::Numbered { path, .. } => (name::prefix(path), Some(path)),
        };
        for unfinished in self.store.unfinished(&prefix).await? {
            // Invariant 13: uploads to other paths that begin with the same prefix are kept.
            let ours = unfinished.key == key
                || path.is_some_and(|path| name::parse(path, &unfinished.key).is_some());
            if ours && unfinished.is_older_than(self.since.as_second()) {
                self.store.discard(&unfinished).await?;
            }
        }
        Ok(())
    }

    async fn copy(
        &self,
        member: &Candidate,
        upload: &mut dyn Upload,
        meter: &Meter,
    ) -> Result<(Inspected, Packed), Trouble> {
        let mut snapshot = self
            .etcd
            .snapshot(&member.url)
            .await
            .map_err(|error| in_etcd(&error))?;
        let mut inspector = Inspector::new();
        let mut packer = Packer::new(self.compress, self.encryption.as_ref())?;
        while let Some(chunk) = snapshot.chunks.next().await {
            let chunk = chunk.map_err(|error| in_etcd(&error))?;
            inspector.push(&chunk);
            meter.advance_to(inspector.size());
            write(upload, packer.push(chunk)?).await?;
        }
        let (rest, object) = packer.finish()?;
        write(upload, rest).await?;
        let inspected = inspector
            .finish()
            .map_err(|error| unreadable(&member.url, error))?;
        if !inspected.trailer {
            return Err(Trouble::new(
                Reason::ChecksumMismatch,
                format!("member {} sent no checksum with its snapshot", member.url),
            ));
        }
        if inspected.store_revision() < member.status.revision {
            return Err(Trouble::new(
                Reason::SnapshotUnreadable,
                format!(
                    "member {} sent a snapshot of revision {}, older than its reported revision {}",
                    member.url,
                    inspected.store_revision(),
                    member.status.revision
                ),
            ));
        }
        Ok((inspected, object))
    }

    fn manifest(
        &self,
        member: &Candidate,
        inspected: &Inspected,
        packed: Packed,
        keys: KeyFacts,
    ) -> BackupManifest {
        let now = Timestamp::now();
        let compression = if self.compress { ZSTD } else { "none" };
        BackupManifest {
            format_version: FORMAT,
            etcd_version: member.status.version.clone(),
            cluster_id: member.status.cluster_id.to_string(),
            revision: inspected.store_revision(),
            size: i64::try_from(inspected.size).unwrap_or(i64::MAX),
            sha256: hex::encode(inspected.sha256),
            hash: keys.hash,
            keys: keys.count,
            compression: compression.to_owned(),
            stored_size: (self.compress || self.encryption.is_some())
                .then(|| i64::try_from(packed.size).unwrap_or(i64::MAX)),
            encryption: self.encryption.as_ref().map(described),
            stored_sha256: packed.sha256,
            store_tag: None,
            created_at: Time(Timestamp::from_second(now.as_second()).unwrap_or(now)),
            backup_uid: Some(self.uid.clone()),
            cluster: self.cluster.clone(),
        }
    }
}

fn stored(store: &dyn Store, key: &str, manifest: &BackupManifest) -> Stored {
    Stored {
        location: format!("{}/{key}", store.location()),
        etcd_version: manifest.etcd_version.clone(),
        cluster_id: manifest.cluster_id.clone(),
        revision: manifest.revision,
        size: manifest.size,
        sha256: manifest.sha256.clone(),
        keys: manifest.keys,
        encryption_key: manifest.encryption.as_ref().map(|found| found.key.clone()),
        created_at: manifest.created_at.0,
    }
}

async fn write(upload: &mut dyn Upload, chunk: Bytes) -> Result<(), Trouble> {
    if chunk.is_empty() {
        return Ok(());
    }
    upload.write(chunk).await.map_err(|error| in_store(&error))
}

impl Worker for Transfer {
    type Output = Stored;

    fn store(&self) -> String {
        slot_key(self.store.as_ref())
    }

    fn records_attempts(&self) -> bool {
        true
    }

    fn run<'a>(
        &'a self,
        progress: &'a Progress,
        cancelled: &'a CancellationToken,
    ) -> BoxFuture<'a, Result<Stored, Trouble>> {
        self.run(&progress.meter, cancelled).boxed()
    }
}

/// Identifies the store for the limit of concurrent transfers. Contains the endpoint, because different stores may
/// have a bucket of the same name.
pub(crate) fn slot_key(store: &dyn Store) -> String {
    format!("{} {}", store.endpoint(), store.location())
}

/// Sends a request to the store, and drops it when the transfer is canceled. An upload that is dropped discards its
/// data.
async fn cancelable<T>(
    cancelled: &CancellationToken,
    request: impl Future<Output = Result<T, store::Error>>,
) -> Result<T, Trouble> {
    tokio::select! {
        answer = request => answer.map_err(|error| in_store(&error)),
        () = cancelled.cancelled() => Err(canceled()),
    }
}

/// Returns as soon as fewer than [`MIN_PROGRESS`] bytes were copied within `window`. Without this check, a slow
/// transfer would occupy a slot until its deadline.
async fn stalled(meter: &Meter, window: Duration) {
    let mut before = meter.read().bytes;
    loop {
        tokio::time::sleep(window).await;
        let now = meter.read().bytes;
        if now.saturating_sub(before) < MIN_PROGRESS {
            return;
        }
        before = now;
    }
}

fn too_slow(member: &str) -> Trouble {
    let (size, minutes) = (MIN_PROGRESS >> 20, PROGRESS_WINDOW.as_secs() / 60);
    Trouble::new(
        Reason::TooSlow,
        format!(
            "less than {size} MiB were copied from {member} to the store within {minutes} minutes: check the network, the \
             store and the member"
        ),
    )
}

#[cfg(test)]
mod tests;
