//! Finds the recorded changes for `spec.continuous.at`, before the restore changes anything.

use std::time::Duration;

use api::backup::EncryptionKey;
use api::problem::Chain;
use api::restore::{ChosenBackup, ChosenPoint, RestoreEncryption, RestorePoint};
use api::storage::{SecretName, StorageBlock, StorageSource};
use api::{EtcdBackup, EtcdRestore};
use continuous::{EncryptedStore, FoundPoint, Moment, Point, PointError, ReadError, find_point};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use k8s_openapi::jiff::Timestamp;
use kube::ResourceExt;
use runtime::slots::Place;
use store::encryption::{self, Keys};
use tokio::time::timeout;

use super::{ObserveContext, bucket};
use crate::encryption::FIELD;
use crate::plan::choice;
use crate::reason::{Reason, Trouble};
use crate::search::FoundBase;
use crate::seed::content::in_content;
use crate::source::{self, OpenedSource};

/// Time limit for the search. The search lists all segments of a base, and reads about 20 segments.
const TIME_LIMIT: Duration = Duration::from_mins(2);

/// A message names at most this number of problems in the chain of recorded changes. Invariant 15: a forged directory
/// can have 100,000 problems.
const NAMED_FAULTS: usize = 3;

/// The directory of the changes that an EtcdBackup has recorded, and a time in microseconds since the epoch. All
/// changes before this time are in the store. The time is `None` if the status of the EtcdBackup reports no time for
/// this directory.
pub(super) fn recorded_by(backup: &EtcdBackup) -> Result<(StorageBlock, Option<i64>), Trouble> {
    let spec = &backup.spec;
    let selected = spec
        .blocks()
        .select(&spec.storage_type, "spec", "storageType");
    let block = selected
        .map(StorageBlock::from)
        .map_err(|problem| Trouble::new(Reason::InvalidSpec, problem.to_string()))?;
    let path = block.source().path().to_owned();
    let directory = format!("{path}.continuous/{}", backup.uid().unwrap_or_default());
    let status = backup.status.as_ref();
    let recording = status.and_then(|status| status.continuous.as_deref());
    let is_current = |location: &&String| {
        let path = block.path_in(location);
        path.is_some_and(|path| path.trim_end_matches('/') == directory)
    };
    let complete = recording.and_then(|recording| {
        recording.location.as_ref().filter(is_current)?;
        Some(recording.complete_time.as_ref()?.0.as_microsecond())
    });
    Ok((block.at(directory), complete))
}

/// Finds the point in `spec.continuous.at`. `directory` is the storage block with the directory of the recorded
/// changes. All changes before `complete`, in microseconds since the epoch, are known to be in the store. `encryption`
/// names the Secret with the keys. `None` if the changes must not be encrypted.
pub(super) async fn find(
    context: &ObserveContext<'_>,
    restore: &EtcdRestore,
    namespace: &str,
    (directory, complete): (StorageBlock, Option<i64>),
    encryption: Option<RestoreEncryption>,
) -> Result<ChosenBackup, Trouble> {
    let at = restore.spec.continuous.as_ref().map(|block| &block.at);
    let (Some(at), Some((field, _))) = (at, at.and_then(requested)) else {
        return Err(no_point());
    };
    if let StorageSource::Pvc(_) | StorageSource::Local(_) = directory.source() {
        let message = "spec.continuous: the operator cannot read recorded changes in a directory: copy them to a \
                       bucket, and set the storage block of the bucket";
        return Err(Trouble::new(Reason::NotSupported, message));
    }
    let search = async {
        let secret = encryption.as_ref().map(|block| block.secret.as_str());
        let named = secret.map(|name| SecretName { field: FIELD, name });
        let data = bucket::secret(context, namespace, named).await?;
        let keys = data.as_ref().map(Keys::of);
        let opened = bucket::open(context, namespace, &directory).await?;
        let reads = context.reads.acquire(Place {
            namespace: namespace.to_owned(),
            store: choice::location(&directory),
            in_pod: false,
        });
        let _slot = reads.await;
        let found = find_in(&opened, &directory, (at, complete), (keys, secret));
        let found = Box::pin(found).await?;
        let place = (&directory, opened.0.key.as_str());
        chosen(restore, place, found, encryption.clone())
    };
    timeout(TIME_LIMIT, search).await.unwrap_or_else(|_| {
        let message = format!(
            "{field}: the search in {} took more than {TIME_LIMIT:?}: check the endpoint and the network",
            choice::location(&directory)
        );
        Err(Trouble::new(Reason::StoreUnreachable, message))
    })
}

fn no_point() -> Trouble {
    let message = "spec.continuous.at: set exactly one of time, revision and latest: true";
    Trouble::new(Reason::InvalidSpec, message)
}

/// Searches the point in an open store. `keys` are the keys of the Secret with the name `secret`. Without keys, the
/// changes must not be encrypted.
pub(crate) async fn find_in(
    opened: &OpenedSource,
    directory: &StorageBlock,
    (at, complete): (&RestorePoint, Option<i64>),
    (keys, secret): (Option<Keys>, Option<&str>),
) -> Result<FoundBase, Trouble> {
    let (field, point) = requested(at).ok_or_else(no_point)?;
    let location = choice::location(directory);
    let prefix = format!("{}/", opened.0.key);
    let requires_encryption = keys.is_some();
    let store = EncryptedStore::for_reading(opened.0.store.as_ref(), keys);
    let found = find_point(&store, &prefix, point, complete, requires_encryption).await;
    let found = found.map_err(|error| {
        let trouble = || trouble(&error, field, &location);
        in_encryption(&error, field, &location, secret).unwrap_or_else(trouble)
    })?;
    check_snapshot(opened, &found).await?;
    found_base(directory, &prefix, &found)
}

/// The field of the requested point, and the point. `None` unless exactly one field is set.
fn requested(at: &RestorePoint) -> Option<(&'static str, Point)> {
    match (&at.time, at.revision, at.latest) {
        (Some(time), None, false) => {
            let time = Point::Time(time.0.as_microsecond());
            Some(("spec.continuous.at.time", time))
        }
        (None, Some(revision), false) => {
            Some(("spec.continuous.at.revision", Point::Revision(revision)))
        }
        (None, None, true) => Some(("spec.continuous.at.latest", Point::Latest)),
        _ => None,
    }
}

/// Fails if the snapshot of the base is missing or has another size. The seed verifies its SHA-256.
///
/// Invariant 13: the request has the identity of the operator. `find_point` returns only a base whose snapshot is in
/// the directory of the recorded changes, which the namespace may access.
async fn check_snapshot(opened: &OpenedSource, found: &FoundPoint) -> Result<(), Trouble> {
    let snapshot = &found.base.base.snapshot;
    let stored = opened.0.store.head(&snapshot.key).await;
    let stored = stored.map_err(|error| source::trouble(&error))?;
    let (size, expected) = (
        stored.map(|object| object.size),
        found.base.base.stored_size(),
    );
    if size == Some(expected) {
        return Ok(());
    }
    let problem = match size {
        None => "is missing".to_owned(),
        Some(size) => format!("has {size} bytes instead of {expected}"),
    };
    let message = format!(
        "spec.continuous.at: the snapshot {:?} of the base with revision {} {problem}: put the object back, or restore \
         a backup",
        snapshot.key, found.base.base.revision
    );
    Err(Trouble::new(Reason::SnapshotUnreadable, message))
}

/// The result of a search. `prefix` is the prefix of all recorded objects in the store.
fn found_base(
    directory: &StorageBlock,
    prefix: &str,
    found: &FoundPoint,
) -> Result<FoundBase, Trouble> {
    let base = &found.base.base;
    let (Some(time), Some(base_time)) = (micro_time(found.at.time), micro_time(base.created))
    else {
        return Err(invalid_base(directory, base.revision));
    };
    let number = |count: u64| i64::try_from(count).unwrap_or(i64::MAX);
    Ok(FoundBase {
        snapshot: base.snapshot.key.clone(),
        stored_size: number(base.stored_size()),
        sha256: base.snapshot.sha256.to_ascii_lowercase(),
        encryption_key: base.encryption.as_ref().map(|found| EncryptionKey {
            name: found.key.name.clone(),
            id: found.key.id.clone(),
        }),
        point: ChosenPoint {
            revision: found.at.revision,
            time,
            base: found.base.name.to_string(),
            base_revision: base.revision,
            base_time,
            cluster_id: base.cluster_id.to_string(),
            segments: number(found.segments),
            segment_bytes: number(found.bytes),
            prefix: prefix.to_owned(),
        },
    })
}

/// The entry for `status.backup` of a restore to a point. Its backup is the snapshot of the base. `key` is the key of
/// the directory in the store. Fails if the snapshot is in another directory.
pub(super) fn chosen(
    restore: &EtcdRestore,
    (directory, key): (&StorageBlock, &str),
    found: FoundBase,
    encryption: Option<RestoreEncryption>,
) -> Result<ChosenBackup, Trouble> {
    let (source, own) = (directory.source(), format!("{key}/"));
    let is_own = found.point.prefix == own
        && found.snapshot.starts_with(&own)
        && !found.snapshot.split('/').any(|part| part == "..");
    let Some(bucket) = source.path().strip_suffix(key).filter(|_| is_own) else {
        return Err(invalid_base(directory, found.point.base_revision));
    };
    let source = directory.clone().at(format!("{bucket}{}", found.snapshot));
    Ok(ChosenBackup {
        etcd_revision: Some(found.point.base_revision),
        stored_size: Some(found.stored_size),
        sha256: Some(found.sha256),
        encryption,
        encryption_key: found.encryption_key,
        continuous: Some(found.point),
        ..choice::chosen_from(restore, source)
    })
}

fn invalid_base(directory: &StorageBlock, revision: i64) -> Trouble {
    let message = format!(
        "spec.continuous: the base with revision {revision} in {} has no valid time or path",
        choice::location(directory)
    );
    Trouble::new(Reason::SnapshotUnreadable, message)
}

fn micro_time(micros: i64) -> Option<MicroTime> {
    Timestamp::from_microsecond(micros).ok().map(MicroTime)
}

fn described(moment: &Moment) -> String {
    format!("revision {} ({})", moment.revision, time_text(moment.time))
}

fn time_text(micros: i64) -> String {
    let time = Timestamp::from_microsecond(micros);
    time.map_or_else(|_| micros.to_string(), |time| time.to_string())
}

/// Converts an error of the encryption. Returns `None` for other errors. `secret` is the name of the Secret with the
/// keys.
fn in_encryption(
    error: &PointError,
    field: &str,
    location: &str,
    secret: Option<&str>,
) -> Option<Trouble> {
    let not_encrypted = |object: String| {
        let message = format!(
            "{field}: {object} in {location} is not encrypted, although the restore requires it ({FIELD}: {}): another \
             writer may have stored it. If you have turned the encryption off, remove spec.encryption from the \
             EtcdRestore, and set the path in status.continuous.location of the EtcdBackup without its last slash \
             instead of spec.backup",
            secret.unwrap_or_default()
        );
        (Reason::SnapshotUnreadable, message)
    };
    let (reason, message) = match error {
        PointError::Read(ReadError::Encryption {
            key,
            error: encryption::Error::NotEncrypted,
        }) => not_encrypted(format!("the segment {key:?}")),
        PointError::Read(ReadError::Encryption { error, .. }) => {
            return Some(in_content(&error.clone().into(), secret));
        }
        PointError::Encrypted(key) => (
            Reason::InvalidSpec,
            format!(
                "{FIELD}: the recorded changes in {location} are encrypted with the key {:?} (ID {}): name a Secret \
                 with this key",
                key.name, key.id
            ),
        ),
        PointError::NotEncrypted(base) => {
            not_encrypted(format!("the base with {}", described(base)))
        }
        _ => return None,
    };
    Some(Trouble::new(reason, message))
}

/// Converts the error to a problem that names the field and the remedy. If the point is not recorded, the problem also
/// names the nearest points.
fn trouble(error: &PointError, field: &str, location: &str) -> Trouble {
    let (reason, problem) = match error {
        PointError::Read(ReadError::Store { error, .. }) => return source::trouble(error),
        PointError::Read(error) => (
            Reason::SnapshotUnreadable,
            format!(
                "the recorded changes in {location} are damaged: {}: put the object back, or restore a backup",
                Chain(error)
            ),
        ),
        PointError::NotEncrypted(_) | PointError::Encrypted(_) => {
            (Reason::SnapshotUnreadable, error.to_string())
        }
        PointError::NoBase => (
            Reason::BackupMissing,
            format!(
                "there are no recorded changes in {location}: correct spec.backup.name, or set the path in \
                 status.continuous.location of the EtcdBackup without its last slash"
            ),
        ),
        PointError::TooManyBases { limit } => (
            Reason::StoreUnreachable,
            format!(
                "there are more than {limit} bases in {location}: delete the bases that you do not need, each with its \
                 segments and its snapshot"
            ),
        ),
        PointError::BeforeOldest(oldest) => (
            Reason::PointNotRecorded,
            format!(
                "the point is before the oldest base in {location}, which has {}: set this point or a later one, or \
                 restore an older backup",
                described(oldest)
            ),
        ),
        PointError::AfterNewest(newest) => (
            Reason::PointNotRecorded,
            format!(
                "the newest recorded change in {location} has {}, and later changes are unknown: set \
                 spec.continuous.at.revision to this revision or an earlier one, or set latest: true",
                described(newest)
            ),
        ),
        PointError::InGap { before, after } => (
            Reason::PointNotRecorded,
            format!(
                "changes are missing in {location} at this point. The nearest points are {} before it and {} after \
                 it: set spec.continuous.at.revision to one of them",
                described(before),
                described(after)
            ),
        ),
        PointError::Broken { last, faults } => {
            let named = faults.iter().take(NAMED_FAULTS);
            let mut texts: Vec<String> = named.map(ToString::to_string).collect();
            if faults.len() > NAMED_FAULTS {
                texts.push(format!("{} more problems", faults.len() - NAMED_FAULTS));
            }
            (
                Reason::SnapshotUnreadable,
                format!(
                    "the recorded changes in {location} are not usable after {}: {}. Put the missing objects back, or \
                     set spec.continuous.at.revision to this revision or an earlier one",
                    described(last),
                    texts.join("; ")
                ),
            )
        }
        PointError::Ambiguous {
            first,
            first_time,
            second,
            second_time,
        } => (
            Reason::PointNotRecorded,
            format!(
                "two clusters in {location} have this revision: cluster {first} at {}, and cluster {second} at {}. Set \
                 spec.continuous.at.time instead",
                time_text(*first_time),
                time_text(*second_time)
            ),
        ),
    };
    Trouble::new(reason, format!("{field}: {problem}"))
}

#[cfg(test)]
mod tests;
