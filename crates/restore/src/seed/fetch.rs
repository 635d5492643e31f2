//! Fetches the snapshot to the data volume in constant memory, and verifies it. Every snapshot must match the SHA-256
//! that etcd appends. A backup must match its manifest. A snapshot of a member must have the expected cluster ID and
//! at least the expected revision.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use api::manifest::BackupManifest;
use api::storage::StorageBlock;
use api::version::EtcdVersion;
use clap::Args;
use etcd::{Access, ClusterId, Etcd, EtcdClient, Inspected, KeyHash};
use futures::StreamExt;
use member::Origin;
use member::tls;
use store::Target;
use store::progress::{Meter, Moved};

use super::content::EncryptionKeys;
use super::intake::Intake;
use super::prepare::expected_contents;
use super::replay::{ReplaySource, after_replay};
use super::snapshot::{fetched_before, unreadable};
use super::{Contents, Paths, already_restored, mounted, volume_trouble, write_json};
use crate::plan::choice;
use crate::reason::{Reason, Trouble};
use crate::source::{self, OpenedSource};

/// Arguments of `seed fetch`.
#[derive(Args, Clone, Debug)]
pub struct Fetch {
    /// Storage block of the backup with its name, as JSON. Contains no credentials
    #[arg(long, value_name = "JSON", value_parser = parse_source, required_unless_present = "member")]
    pub source: Option<StorageBlock>,
    #[command(flatten)]
    #[allow(
        missing_docs,
        reason = "a doc comment here would become part of the help text"
    )]
    pub survivor: Survivor,
    #[command(flatten)]
    #[allow(
        missing_docs,
        reason = "a doc comment here would become part of the help text"
    )]
    pub replay: ReplaySource,
    /// Directory where the Secret with the credentials is mounted. The default is the identity of the pod
    #[arg(long, value_name = "DIRECTORY")]
    pub secret: Option<PathBuf>,
    /// Directory where the Secret with the CA certificate is mounted
    #[arg(long, value_name = "DIRECTORY")]
    pub ca: Option<PathBuf>,
    /// Directory where the PersistentVolumeClaim with the backup is mounted
    #[arg(long, value_name = "DIRECTORY")]
    pub claim: Option<PathBuf>,
    /// Name of the Secret with the keys for an encrypted backup. A backup that is not encrypted is then rejected
    #[arg(long, value_name = "NAME", requires = "encryption_keys")]
    pub encryption_secret: Option<String>,
    /// Directory where the Secret with the keys is mounted
    #[arg(long, value_name = "DIRECTORY", requires = "encryption_secret")]
    pub encryption_keys: Option<PathBuf>,
    /// Version of etcd in the cluster. A backup of a newer minor version is rejected
    #[arg(long, value_name = "VERSION")]
    pub etcd_version: Option<String>,
    /// Required SHA-256 of the snapshot in hexadecimal, from the chosen backup
    #[arg(long, value_name = "HEX")]
    pub sha256: Option<String>,
    /// Increase of the revision by etcdutl. The report contains the resulting revision
    #[arg(long, value_name = "REVISIONS")]
    pub bump_revision: Option<u64>,
    /// File to which this program copies itself for the next container
    #[arg(long, value_name = "FILE")]
    pub copy_to: Option<PathBuf>,
    #[command(flatten)]
    #[allow(
        missing_docs,
        reason = "a doc comment here would become part of the help text"
    )]
    pub paths: Paths,
    /// The progress of the download, for the progress server.
    #[arg(skip)]
    pub meter: Arc<Meter>,
}

/// A running member that sends the snapshot, for the recovery of a lost quorum.
#[derive(Args, Clone, Debug, Default)]
pub struct Survivor {
    /// Client URL of the member that sends the snapshot
    #[arg(
        long,
        value_name = "URL",
        conflicts_with = "source",
        requires = "cluster_id"
    )]
    pub member: Option<String>,
    /// Required cluster ID of the member that sends the snapshot, in hexadecimal
    #[arg(long, value_name = "ID")]
    pub cluster_id: Option<ClusterId>,
    /// Directory where the Secret with the client certificate for that member is mounted
    #[arg(long, value_name = "DIRECTORY")]
    pub client_tls: Option<PathBuf>,
    /// Lowest accepted revision of the snapshot
    #[arg(long, value_name = "REVISION", default_value_t = 0)]
    pub revision: i64,
}

fn parse_source(text: &str) -> Result<StorageBlock, serde_json::Error> {
    serde_json::from_str(text)
}

/// Fetches the snapshot, unless a data directory or a verified snapshot exists. Returns the revision, size and
/// checksums of the data that etcd will serve.
///
/// # Errors
///
/// Fails if the snapshot cannot be fetched, is not the chosen backup, or does not match its checksum or manifest.
pub async fn fetch(arguments: &Fetch) -> Result<Contents, Trouble> {
    // The operator's program has a few dozen MiB, so a second thread copies it during the download.
    let copied = arguments.copy_to.clone().map(|target| {
        let copied = tokio::task::spawn_blocking(move || copy_program(&target));
        async {
            let failed = |error| {
                let message =
                    format!("the operator's program was not copied to the volume: {error}");
                Trouble::new(Reason::SeedFailed, message)
            };
            copied.await.map_err(failed).flatten()
        }
    });
    let contents = fetch_once(arguments).await?;
    match copied {
        Some(copied) => copied.await.map(|()| contents),
        None => Ok(contents),
    }
}

async fn fetch_once(arguments: &Fetch) -> Result<Contents, Trouble> {
    let paths = &arguments.paths;
    if let Some(contents) = already_restored(paths)? {
        return Ok(contents);
    }
    let fetched = fetched_before(paths)?;
    let contents = match fetched.filter(|contents| is_requested(arguments, contents)) {
        Some(contents) => contents,
        None => fetch_now(arguments).await?,
    };
    let replayed = arguments.replay.replay_revision;
    if let (Some(_), Some(source)) = (replayed, &arguments.source) {
        let opened = open(arguments, source).await?;
        let store = opened.0.store.as_ref();
        let source = (store, keys(arguments)?);
        let progress = (contents.size, arguments.meter.as_ref());
        Box::pin(arguments.replay.fetch(source, paths, progress)).await?;
    }
    let contents = expected_contents(paths, contents, arguments.bump_revision)?;
    Ok(after_replay(contents, replayed))
}

async fn open(arguments: &Fetch, source: &StorageBlock) -> Result<OpenedSource, Trouble> {
    let secret = mounted(arguments.secret.as_deref())?;
    let ca = mounted(arguments.ca.as_deref())?;
    let claim = arguments.claim.as_deref();
    source::open(source, secret.as_ref(), ca.as_ref(), claim).await
}

async fn fetch_now(arguments: &Fetch) -> Result<Contents, Trouble> {
    let paths = &arguments.paths;
    fs::create_dir_all(paths.work())
        .map_err(|error| volume_trouble("create", &paths.work(), &error))?;
    let unfinished = paths.work().join("snapshot.unfinished");
    let contents = match (&arguments.source, &arguments.survivor.member) {
        (Some(source), _) => from_store(arguments, source, &unfinished).await?,
        (None, Some(member)) => {
            from_member(&arguments.survivor, member, &unfinished, &arguments.meter).await?
        }
        (None, None) => {
            let message = "no source of the snapshot: set --source or --member";
            return Err(Trouble::new(Reason::SeedFailed, message));
        }
    };
    write_json(&paths.expected(), &contents)?;
    // The snapshot is not synced to disk: after a crash, the next start of the container verifies the whole snapshot.
    fs::rename(&unfinished, paths.snapshot())
        .map_err(|error| volume_trouble("write", &paths.snapshot(), &error))?;
    Ok(contents)
}

/// The keys in the mounted Secret. `None` if the backup must not be encrypted.
fn keys(arguments: &Fetch) -> Result<Option<EncryptionKeys>, Trouble> {
    let secret = arguments.encryption_secret.as_deref();
    let keys = secret.map(|name| EncryptionKeys::read(name, arguments.encryption_keys.as_deref()));
    keys.transpose()
}

async fn from_store(
    arguments: &Fetch,
    source: &StorageBlock,
    target: &Path,
) -> Result<Contents, Trouble> {
    let keys = keys(arguments)?;
    let opened = open(arguments, source).await?;
    let manifest = opened.manifest().await?;
    check_version(arguments.etcd_version.as_deref(), manifest.as_ref())?;
    // If the SHA-256 in the manifest is not the SHA-256 of the chosen backup (`--sha256`), the fetch fails before the
    // download.
    if let Some(manifest) = manifest.as_ref().filter(|one| !one.sha256.is_empty()) {
        check_chosen(arguments, &manifest.sha256)?;
    }
    let size = manifest.as_ref().map(|manifest| manifest.size);
    arguments.meter.set(Moved {
        bytes: 0,
        total: size.and_then(|size| u64::try_from(size).ok()),
    });
    let inspected = download(&opened, target, &arguments.meter, keys).await?;
    let contents = verify(&inspected, manifest.as_ref())?;
    check_chosen(arguments, &contents.sha256)?;
    let origin = Origin {
        location_hash: choice::fingerprint(source),
        bump_revision: arguments.bump_revision.unwrap_or_default(),
        // If an encryption Secret is set, the download rejects a backup that is not encrypted, so the fetched backup is
        // encrypted.
        encrypted: Some(arguments.encryption_secret.is_some()),
        replayed_revision: None,
    };
    Ok(Contents {
        origin: Some(origin),
        ..contents
    })
}

/// True if the snapshot on the volume is the requested snapshot. An earlier pod with other arguments may have fetched
/// the snapshot on the volume.
fn is_requested(arguments: &Fetch, fetched: &Contents) -> bool {
    let origin = fetched.origin.as_ref();
    // Invariant 34: if this pod requires encryption, it does not reuse a snapshot that an earlier pod fetched without
    // keys, because the backup may not be encrypted.
    let encrypted = origin.and_then(|origin| origin.encrypted);
    if encrypted.unwrap_or_default() != arguments.encryption_secret.is_some() {
        return false;
    }
    let fingerprint = origin.map(|origin| origin.location_hash.as_str());
    match (&arguments.sha256, &arguments.source) {
        (None, Some(source)) => fingerprint == Some(choice::fingerprint(source).as_str()),
        _ => is_chosen(arguments, &fetched.sha256),
    }
}

fn is_chosen(arguments: &Fetch, sha256: &str) -> bool {
    let chosen = arguments.sha256.as_ref();
    chosen.is_none_or(|chosen| chosen.eq_ignore_ascii_case(sha256))
}

/// Fails if the snapshot is not the chosen backup (invariant 9).
fn check_chosen(arguments: &Fetch, sha256: &str) -> Result<(), Trouble> {
    if is_chosen(arguments, sha256) {
        return Ok(());
    }
    let chosen = arguments.sha256.as_deref().unwrap_or_default();
    Err(unreadable(&format!(
        "the SHA-256 of the snapshot is {sha256}, but the SHA-256 of the chosen backup is {chosen}: the backup was overwritten"
    )))
}

/// Fails if the cluster has an older minor release of etcd than the backup, because the older etcd cannot read the
/// database of the backup. The operator has checked this already, except for a backup on a PersistentVolumeClaim.
fn check_version(version: Option<&str>, manifest: Option<&BackupManifest>) -> Result<(), Trouble> {
    let parse = |text: &str| EtcdVersion::parse(text).ok();
    let backup = manifest.and_then(|manifest| parse(&manifest.etcd_version));
    match (version.and_then(parse), backup) {
        (Some(version), Some(backup)) if version.minor() < backup.minor() => Err(Trouble::new(
            Reason::InvalidSpec,
            format!(
                "the backup is from etcd {backup}, but the cluster's version is {version}: set the minor version of \
                 the backup or a later one in the EtcdCluster's spec.version, or in \
                 spec.etcdCluster.template.spec.version"
            ),
        )),
        _ => Ok(()),
    }
}

/// Fetches the snapshot from a member. This also works without a quorum. The cluster ID is checked first, because a
/// member of another cluster may have the address now.
async fn from_member(
    survivor: &Survivor,
    url: &str,
    target: &Path,
    meter: &Arc<Meter>,
) -> Result<Contents, Trouble> {
    let client = EtcdClient::new(access(survivor)?);
    let failed = |error: etcd::Error| {
        let message = format!("the snapshot of {url} cannot be fetched: {error}");
        Trouble::new(Reason::EtcdUnreachable, message)
    };
    let status = client.status(url).await.map_err(failed)?;
    if Some(status.cluster_id) != survivor.cluster_id {
        let message = format!(
            "the member at {url} belongs to another cluster ({}): its snapshot is not fetched",
            status.cluster_id
        );
        return Err(Trouble::new(Reason::SeedFailed, message));
    }
    let mut snapshot = client.snapshot(url).await.map_err(failed)?;
    let intake = Intake::begin(target, Arc::clone(meter), None);
    while let Some(chunk) = snapshot.chunks.next().await {
        if !intake.push(chunk.map_err(failed)?).await {
            break;
        }
    }
    let contents = verify(&intake.finish().await?, None)?;
    if contents.revision < survivor.revision {
        return Err(unreadable(&format!(
            "the snapshot has revision {}, but the member had revision {} when the operator chose the member",
            contents.revision, survivor.revision
        )));
    }
    Ok(contents)
}

/// The client certificate for requests to the member, from the mounted Secret.
fn access(survivor: &Survivor) -> Result<Access, Trouble> {
    let Some(data) = mounted(survivor.client_tls.as_deref())? else {
        return Ok(Access::default());
    };
    let material = tls::material(
        tls::Purpose::Operator,
        "with the client certificate",
        Some(&data),
    );
    material
        .map(|material| tls::access(&material))
        .map_err(|fault| {
            let reason = Reason::parse(fault.code.as_str()).unwrap_or(Reason::SecretMissing);
            Trouble::new(reason, fault.message)
        })
}

/// Copies this program to a volume for the next container, whose etcd image contains neither this program nor a shell.
fn copy_program(target: &Path) -> Result<(), Trouble> {
    let copy = || {
        let program = std::env::current_exe()?;
        let unfinished = target.with_extension("unfinished");
        fs::copy(program, &unfinished)?;
        fs::rename(&unfinished, target)
    };
    copy().map_err(|error| volume_trouble("copy the operator's program to", target, &error))
}

async fn download(
    opened: &OpenedSource,
    target: &Path,
    meter: &Arc<Meter>,
    keys: Option<EncryptionKeys>,
) -> Result<Inspected, Trouble> {
    let Target { store, key } = &opened.0;
    let mut object = store
        .get(key)
        .await
        .map_err(|error| source::trouble(&error))?;
    let intake = Intake::begin(target, Arc::clone(meter), keys);
    let mut sent = 0;
    while let Some(chunk) = object.chunks.next().await {
        let chunk = chunk.map_err(|error| source::trouble(&error))?;
        sent += chunk.len() as u64;
        if !intake.push(chunk).await {
            return intake.finish().await;
        }
    }
    if sent != object.size {
        let message = format!(
            "the store sent {sent} of the {} bytes of the backup",
            object.size
        );
        return Err(Trouble::new(Reason::StoreUnreachable, message));
    }
    intake.finish().await
}

/// Compares the snapshot with the checksum from etcd, and with the manifest (invariant 12).
pub(super) fn verify(
    inspected: &Inspected,
    manifest: Option<&BackupManifest>,
) -> Result<Contents, Trouble> {
    if !inspected.trailer {
        return Err(unreadable(
            "the checksum from etcd at the end of the snapshot is missing",
        ));
    }
    if let Some(manifest) = manifest {
        compare(inspected, manifest)?;
    }
    Ok(Contents {
        revision: inspected.store_revision(),
        size: inspected.size,
        sha256: hex::encode(inspected.sha256),
        hash: manifest
            .and_then(|manifest| manifest.hash)
            .map(|hash| KeyHash {
                hash,
                compacted: inspected.compacted,
            }),
        keys: manifest.and_then(|manifest| manifest.keys),
        origin: None,
    })
}

fn compare(inspected: &Inspected, manifest: &BackupManifest) -> Result<(), Trouble> {
    let sha256 = hex::encode(inspected.sha256);
    if !manifest.sha256.is_empty() && !manifest.sha256.eq_ignore_ascii_case(&sha256) {
        return Err(unreadable(&format!(
            "the SHA-256 of the snapshot is {sha256}, but the manifest records {}",
            manifest.sha256
        )));
    }
    if u64::try_from(manifest.size).ok() != Some(inspected.size) {
        return Err(unreadable(&format!(
            "the snapshot has {} bytes, but the manifest records {} bytes",
            inspected.size, manifest.size
        )));
    }
    // The revision in the manifest is at least the revision of the last key in the database, and at most etcd's current
    // revision. These two revisions differ if the database has no keys, or was compacted after its last key.
    if !(inspected.revision..=inspected.store_revision()).contains(&manifest.revision) {
        return Err(unreadable(&format!(
            "the snapshot has revision {}, but the manifest records revision {}",
            inspected.revision, manifest.revision
        )));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(revision: i64, compacted: i64, recorded: i64) -> bool {
        let inspected = Inspected {
            size: 1,
            sha256: [0; 32],
            trailer: true,
            revision,
            compacted,
        };
        let manifest = format!(
            r#"{{"formatVersion":1,"etcdVersion":"3.7.3","clusterID":"1","revision":{recorded},"size":1,"sha256":"",
                "compression":"none","createdAt":"2026-01-01T00:00:00Z"}}"#
        );
        compare(&inspected, &serde_json::from_str(&manifest).unwrap()).is_ok()
    }

    #[test]
    fn manifest_with_revision_of_store_or_last_key_is_accepted() {
        assert!(check(21, 0, 21));
        assert!(check(0, 0, 1), "an empty store is at revision 1");
        assert!(
            check(10, 15, 15) && check(10, 15, 10),
            "the store was compacted at a later revision than its last key"
        );
        assert!(!check(21, 0, 22) && !check(21, 0, 20));
    }
}
