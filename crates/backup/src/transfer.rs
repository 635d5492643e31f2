//! The transfer itself: a member's snapshot stream, looked at as it passes, into the store, in constant memory.
//!
//! It knows no Kubernetes. Given up or failed, it leaves nothing in the store that looks like a backup: the
//! manifest is written last, and a backup without its manifest is not one of ours.

use std::sync::Arc;

use api::backup::name;
use api::manifest::{BackupManifest, ManifestCluster, manifest_key};
use bytes::Bytes;
use etcd::{Etcd, InspectError, Inspected, Inspector};
use futures::FutureExt;
use futures::StreamExt;
use futures::future::{BoxFuture, join_all};
use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use store::compression::{Compressor, ZSTD};
pub use store::progress::Meter;
use store::{Store, Upload};
use tokio_util::sync::CancellationToken;

use crate::reason::{Reason, Trouble};
use crate::snapshot::{Moved, Stored};
use crate::workers::Worker;

mod adoption;
mod candidates;
mod object_name;
mod reading;
mod vouch;

pub use adoption::{Whose, Written, written};
pub(crate) use adoption::{manifest_of, whole};
use candidates::{Candidate, known, ranked};
pub use object_name::Name;
use vouch::{Ends, lying, vouch};

/// Everything a transfer needs.
#[derive(Clone)]
pub struct Transfer {
    /// Reaches the cluster.
    pub etcd: Arc<dyn Etcd>,
    /// Client URLs to begin with; the members they know are asked too.
    pub endpoints: Vec<String>,
    /// Reaches the bucket.
    pub store: Arc<dyn Store>,
    /// The object to write.
    pub name: Name,
    /// Whether it is compressed with Zstandard.
    pub compress: bool,
    /// The EtcdBackup's UID, for the manifest.
    pub uid: String,
    /// For the manifest, where it is known.
    pub cluster: Option<ManifestCluster>,
    /// When this process began: an unfinished upload that is older was left by one that died.
    pub since: Timestamp,
}

/// The manifest's form.
const FORMAT: u32 = 1;

impl Transfer {
    /// Takes one snapshot and stores it; `cancelled` gives it up.
    pub async fn run(
        &self,
        meter: &Meter,
        cancelled: &CancellationToken,
    ) -> Result<Stored, Trouble> {
        let candidates = tokio::select! {
            candidates = self.candidates() => candidates?,
            () = cancelled.cancelled() => return Err(given_up()),
        };
        let mut last = None;
        for candidate in candidates {
            match self.from(&candidate, meter, cancelled).await {
                // Another member may do what this one could not.
                Err(trouble)
                    if trouble.reason == Reason::EtcdUnreachable && !cancelled.is_cancelled() =>
                {
                    last = Some(trouble);
                }
                outcome => return outcome,
            }
        }
        Err(last.unwrap_or_else(given_up))
    }

    /// Every member that can be found is asked at the same time: one that is dead costs nothing.
    async fn candidates(&self) -> Result<Vec<Candidate>, Trouble> {
        let mut urls = self.endpoints.clone();
        // Without a quorum there is no list, and still a member to save.
        let listed = self.etcd.members(&self.endpoints).await.ok();
        let members = listed.iter().flat_map(|listed| &listed.members);
        urls.extend(members.flat_map(|member| member.client_urls.iter().cloned()));
        urls.sort();
        urls.dedup();
        let asked = urls.into_iter().map(|url| async {
            let status = self.etcd.status(&url).await;
            (url, status)
        });
        let mut answers = Vec::new();
        let mut silent = Vec::new();
        let mut denied = None;
        for (url, status) in join_all(asked).await {
            match status {
                Ok(status) => answers.push(Candidate { url, status }),
                Err(error) => {
                    silent.push(error.to_string());
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
                    silent.join("; ")
                ),
            ));
        }
        ranked(known(answers, &self.endpoints, listed.as_ref()))
    }

    async fn from(
        &self,
        member: &Candidate,
        meter: &Meter,
        cancelled: &CancellationToken,
    ) -> Result<Stored, Trouble> {
        let key = unless(cancelled, self.free_key(member.status.revision)).await?;
        meter.set(Moved {
            bytes: 0,
            total: u64::try_from(member.status.db_size).ok(),
        });
        // Some identities may write and not list; then what was left stays for the bucket's own rules.
        if let Err(trouble) = unless(cancelled, self.discard_leftovers(&key)).await {
            tracing::debug!(
                trouble = trouble.message,
                "unfinished uploads are not looked for"
            );
        }
        let mut upload = unless(cancelled, self.store.begin(&key)).await?;
        let passed = tokio::select! {
            passed = self.pass(member, upload.as_mut(), meter) => passed,
            () = cancelled.cancelled() => Err(given_up()),
        };
        let (inspected, sent) = match passed {
            Ok(passed) => passed,
            Err(trouble) => {
                if let Err(error) = upload.abort().await {
                    tracing::warn!(%error, key, "an unfinished upload could not be removed");
                }
                return Err(trouble);
            }
        };
        // All that takes time comes before the commit: between it and the manifest somebody else may write.
        let looks = async {
            tokio::join!(
                self.hash(member, &inspected),
                lying(self.store.as_ref(), &key)
            )
        };
        let (hash, before) = tokio::select! {
            looked = looks => looked,
            () = cancelled.cancelled() => return Err(given_up()),
        };
        let before = before?;
        fail::fail_point!("backup-before-commit");
        // Invariant 12: the checksum etcd sent has matched; now the store acknowledges the whole object.
        let committed = unless(cancelled, upload.commit()).await?;
        if committed.size != sent {
            return Err(Trouble::new(
                Reason::ChecksumMismatch,
                format!(
                    "the store holds {} bytes of the {sent} that were sent",
                    committed.size
                ),
            ));
        }
        fail::fail_point!("backup-before-manifest");
        let manifest = BackupManifest {
            store_tag: committed.tag.clone(),
            ..self.manifest(member, &inspected, sent, hash)
        };
        let ends = Ends {
            store: self.store.as_ref(),
            key: &key,
            committed: &committed,
            before: before.as_ref(),
            manifest: &manifest,
        };
        Box::pin(vouch(&ends, cancelled)).await?;
        Ok(stored(self.store.as_ref(), &key, &manifest))
    }

    /// The name of the object. Two EtcdBackups of one path may begin in the same second: the second name says a revision
    /// less, which its backup holds as well.
    async fn free_key(&self, revision: i64) -> Result<String, store::Error> {
        /// Nobody has more of them at one path.
        const NAMESAKES: i64 = 16;
        let mut key = self.name.key(revision);
        if !matches!(self.name, Name::Numbered { left: None, .. }) {
            return Ok(key);
        }
        for less in 1..NAMESAKES {
            let taken = match self.store.head(&manifest_key(&key)).await {
                // So S3 answers for what is not there where nothing may be listed.
                Err(store::Error::AccessDenied(_)) => false,
                found => found?.is_some(),
            };
            if !taken || revision < less {
                break;
            }
            key = self.name.key(revision - less);
        }
        Ok(key)
    }

    /// Uploads a process has left that died; an earlier attempt may have had another name.
    async fn discard_leftovers(&self, key: &str) -> Result<(), store::Error> {
        let (prefix, path) = match &self.name {
            Name::Exact(key) => (key.clone(), None),
            Name::Numbered { path, .. } => (name::prefix(path), Some(path)),
        };
        for unfinished in self.store.unfinished(&prefix).await? {
            // Invariant 13: the prefix also finds other objects' uploads.
            let ours = unfinished.key == key
                || path.is_some_and(|path| name::parse(path, &unfinished.key).is_some());
            if ours && unfinished.is_older_than(self.since.as_second()) {
                self.store.discard(&unfinished).await?;
            }
        }
        Ok(())
    }

    async fn pass(
        &self,
        member: &Candidate,
        upload: &mut dyn Upload,
        meter: &Meter,
    ) -> Result<(Inspected, u64), Trouble> {
        let mut snapshot = self
            .etcd
            .snapshot(&member.url)
            .await
            .map_err(|error| in_etcd(&error))?;
        let mut inspector = Inspector::new();
        let compressor = self.compress.then(Compressor::new).transpose();
        let mut compressor = compressor.map_err(|error| defect(&error))?;
        let mut sent = 0;
        while let Some(chunk) = snapshot.chunks.next().await {
            let chunk = chunk.map_err(|error| in_etcd(&error))?;
            inspector.push(&chunk);
            meter.advance_to(inspector.size());
            let chunk = match &mut compressor {
                None => chunk,
                Some(compressor) => {
                    let mut smaller = Vec::new();
                    compressor
                        .push(&chunk, |piece| smaller.extend_from_slice(piece))
                        .map_err(|error| defect(&error))?;
                    smaller.into()
                }
            };
            sent += write(upload, chunk).await?;
        }
        if let Some(compressor) = compressor {
            let mut rest = Vec::new();
            compressor
                .finish(|piece| rest.extend_from_slice(piece))
                .map_err(|error| defect(&error))?;
            sent += write(upload, rest.into()).await?;
        }
        let inspected = inspector
            .finish()
            .map_err(|error| unreadable(&member.url, error))?;
        if !inspected.trailer {
            return Err(Trouble::new(
                Reason::ChecksumMismatch,
                format!("{} sent no checksum with its snapshot", member.url),
            ));
        }
        if inspected.store_revision() < member.status.revision {
            return Err(Trouble::new(
                Reason::SnapshotUnreadable,
                format!(
                    "{} sent revision {} after it had said {}",
                    member.url,
                    inspected.store_revision(),
                    member.status.revision
                ),
            ));
        }
        Ok((inspected, sent))
    }

    /// etcd's hash of the keys the snapshot holds. It proves at a restore that etcd reads what it read here; the bytes
    /// themselves are proven by the SHA-256. So a backup without it is as good, and none waits or fails for it.
    async fn hash(&self, member: &Candidate, inspected: &Inspected) -> Option<u32> {
        /// The member applies nothing while it reads its database, about half a second for each GiB.
        const LARGEST: i64 = 1 << 30;
        if member.status.db_size_in_use > LARGEST {
            return None;
        }
        let answer = self.etcd.hash(&member.url, inspected.store_revision());
        match answer.await {
            Ok(found) => found
                // A compaction since the snapshot has changed what counts.
                .filter(|found| found.compacted == inspected.compacted)
                .map(|found| found.hash),
            Err(error) => {
                tracing::debug!(%error, "the manifest will have no hash of the keys");
                None
            }
        }
    }

    fn manifest(
        &self,
        member: &Candidate,
        inspected: &Inspected,
        sent: u64,
        hash: Option<u32>,
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
            hash,
            compression: compression.to_owned(),
            stored_size: self
                .compress
                .then(|| i64::try_from(sent).unwrap_or(i64::MAX)),
            store_tag: None,
            created_at: Time(Timestamp::from_second(now.as_second()).unwrap_or(now)),
            backup_uid: Some(self.uid.clone()),
            cluster: self.cluster.clone(),
        }
    }
}

/// What a manifest says about the backup beside it.
fn stored(store: &dyn Store, key: &str, manifest: &BackupManifest) -> Stored {
    Stored {
        location: format!("{}/{key}", store.location()),
        etcd_version: manifest.etcd_version.clone(),
        cluster_id: manifest.cluster_id.clone(),
        revision: manifest.revision,
        size: manifest.size,
        sha256: manifest.sha256.clone(),
        created_at: manifest.created_at.0,
    }
}

async fn write(upload: &mut dyn Upload, chunk: Bytes) -> Result<u64, Trouble> {
    let size = chunk.len() as u64;
    if size > 0 {
        upload
            .write(chunk)
            .await
            .map_err(|error| in_store(&error))?;
    }
    Ok(size)
}

impl Worker for Transfer {
    type Product = Stored;

    fn store(&self) -> String {
        self.store.location()
    }

    fn is_counted(&self) -> bool {
        true
    }

    fn run<'a>(
        &'a self,
        meter: &'a Meter,
        cancelled: &'a CancellationToken,
    ) -> BoxFuture<'a, Result<Stored, Trouble>> {
        self.run(meter, cancelled).boxed()
    }
}

/// A call to the store that is not waited for any longer once the transfer is given up; an upload that is dropped
/// takes itself back.
async fn unless<T>(
    cancelled: &CancellationToken,
    call: impl Future<Output = Result<T, store::Error>>,
) -> Result<T, Trouble> {
    tokio::select! {
        answer = call => answer.map_err(|error| in_store(&error)),
        () = cancelled.cancelled() => Err(given_up()),
    }
}

fn given_up() -> Trouble {
    Trouble::new(Reason::StepFailed, "the backup was given up")
}

fn defect(error: &std::io::Error) -> Trouble {
    Trouble::new(
        Reason::StepFailed,
        format!("the snapshot cannot be compressed: {error}"),
    )
}

fn in_etcd(error: &etcd::Error) -> Trouble {
    let (reason, remedy) = match error {
        etcd::Error::AccessDenied(_) => (
            Reason::AccessDenied,
            "; name the Secret of a user with the role root: in spec.authSecret beside etcdEndpoints, in the \
             EtcdCluster's spec.auth.secret beside etcdCluster",
        ),
        _ => (Reason::EtcdUnreachable, ""),
    };
    Trouble::new(reason, format!("no snapshot from etcd: {error}{remedy}"))
}

/// What a failure of the store means for the backup.
pub fn in_store(error: &store::Error) -> Trouble {
    let reason = match error {
        store::Error::NoSuchBucket { .. } => Reason::BucketMissing,
        store::Error::AccessDenied(_) | store::Error::ClockSkew(_) => Reason::AccessDenied,
        store::Error::Invalid { .. } => Reason::InvalidSpec,
        store::Error::Secret { .. } => Reason::SecretMissing,
        _ => Reason::StoreUnreachable,
    };
    Trouble::new(reason, error.to_string())
}

fn unreadable(member: &str, error: InspectError) -> Trouble {
    let reason = match error {
        InspectError::ChecksumMismatch | InspectError::Truncated { .. } => Reason::ChecksumMismatch,
        InspectError::NotADatabase | InspectError::Broken { .. } => Reason::SnapshotUnreadable,
    };
    Trouble::new(reason, format!("the snapshot of {member}: {error}"))
}
