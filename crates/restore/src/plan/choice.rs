//! Chooses the backup to restore, and records it in the status of the EtcdRestore before it is used. Later backups
//! have no effect. Performs no I/O.
//!
//! A changed spec leads to another choice until the restore holds the lock of the EtcdCluster.

use api::EtcdRestore;
use api::backup::StoredBackup;
use api::manifest::BackupManifest;
use api::restore::{ChosenBackup, RestoreEncryption};
use api::storage::{StorageBlock, StorageSource};
pub use member::{ENCRYPTION, REPLAY_REVISION, SHA256, SOURCE};
use sha2::{Digest, Sha256};

use crate::plan::action::{Action, Plan};
use crate::reason::{Reason, Trouble};
use crate::snapshot::{PodFacts, Snapshot};

/// The remedy if the stored backup differs from the backup in the status of the EtcdBackup.
pub(crate) const REPLACED: &str = "Put the recorded backup back, or select another backup with spec.backup.before. If \
                                   you trust the replaced backup, name it by its storage block instead of spec.backup";

/// The backup in `status.backup`. `None` before it was recorded.
pub fn recorded(restore: &EtcdRestore) -> Option<&ChosenBackup> {
    restore.status.as_ref()?.backup.as_ref()
}

/// The recorded backup, if it was chosen from the current spec. While the restore holds the lock, the recorded backup
/// is always valid.
pub fn valid_record(restore: &EtcdRestore, locked: bool) -> Option<&ChosenBackup> {
    let generation = restore.metadata.generation;
    recorded(restore).filter(|chosen| locked || chosen.generation == generation)
}

/// The plan that records the chosen backup before its first use (invariant 10). `None` if a valid backup is recorded
/// already.
pub fn to_record(restore: &EtcdRestore, snapshot: &Snapshot, locked: bool) -> Option<Plan> {
    if valid_record(restore, locked).is_some() {
        return None;
    }
    let Some(found) = snapshot.found.clone() else {
        return Some(Plan::wait_for("waiting for the check of the backup"));
    };
    let description = format!("recording the chosen backup {}", found.location);
    Some(Plan::act(
        Action::RecordBackup(Box::new(found)),
        &description,
    ))
}

/// The backup in a storage block, without metadata.
pub fn chosen_from(restore: &EtcdRestore, source: StorageBlock) -> ChosenBackup {
    let reference = restore.spec.backup.as_ref();
    ChosenBackup {
        location: location(&source),
        etcd_backup: reference.map(|reference| reference.name.clone()),
        etcd_revision: None,
        stored_size: None,
        sha256: None,
        encryption: restore.spec.encryption.clone(),
        encryption_key: None,
        continuous: None,
        bump_revision: restore.spec.bump_revision.unwrap_or_default(),
        generation: restore.metadata.generation,
        copy: None,
        source,
    }
}

/// A backup of an EtcdBackup. `stored` is its entry in the status of the EtcdBackup. Its SHA-256 and its key are
/// recorded, so that the restore accepts no other backup (invariant 34).
pub fn chosen_by_name(
    restore: &EtcdRestore,
    source: StorageBlock,
    stored: &StoredBackup,
    encryption: Option<RestoreEncryption>,
) -> ChosenBackup {
    let sha256 = stored.sha256.as_ref();
    let sha256 = sha256.map(|sha256| sha256.to_ascii_lowercase());
    ChosenBackup {
        sha256: sha256.filter(|sha256| !sha256.is_empty()),
        encryption,
        encryption_key: stored.encryption_key.clone(),
        ..chosen_from(restore, source)
    }
}

/// The recorded number by which the restore raises the revision, or `None` for 0. The restore marks all lower
/// revisions as compacted.
pub fn bump_revision(restore: &EtcdRestore) -> Option<u64> {
    let by = u64::try_from(recorded(restore)?.bump_revision).ok()?;
    (by > 0).then_some(by)
}

/// The revision up to which recorded changes are replayed after the backup. `None` for no changes.
pub fn replay_revision(chosen: &ChosenBackup) -> Option<i64> {
    chosen.continuous.as_ref().map(|point| point.revision)
}

/// The Secret with the keys for the backup. `None` if the backup must not be encrypted.
pub fn encryption_secret(chosen: &ChosenBackup) -> Option<&str> {
    let encryption = chosen.encryption.as_ref();
    encryption.map(|encryption| encryption.secret.as_str())
}

/// Adds the size of the stored object, and the revision and SHA-256 in its manifest.
pub fn add_metadata(chosen: &mut ChosenBackup, manifest: Option<&BackupManifest>, stored: u64) {
    chosen.stored_size = i64::try_from(stored).ok();
    if let Some(manifest) = manifest {
        chosen.etcd_revision = Some(manifest.revision);
        let sha256 = Some(manifest.sha256.to_ascii_lowercase());
        chosen.sha256 = sha256.filter(|sha256| !sha256.is_empty());
    }
}

/// Compares the stored backup with the recorded backup. Without a manifest, only the size is compared, and the seed
/// compares the SHA-256 later.
///
/// # Errors
///
/// Fails if the backup was overwritten, or if it is not the backup in the status of the EtcdBackup (invariant 34).
pub fn is_unchanged(
    chosen: &ChosenBackup,
    manifest: Option<&BackupManifest>,
    stored: u64,
) -> Result<(), Trouble> {
    let mut now = chosen.clone();
    add_metadata(&mut now, manifest, stored);
    let differs = |was: bool, same: bool| was && !same;
    let resized = differs(
        chosen.stored_size.is_some(),
        chosen.stored_size == now.stored_size,
    );
    let rewritten = differs(chosen.sha256.is_some(), chosen.sha256 == now.sha256);
    if !resized && !rewritten {
        return Ok(());
    }
    let location = &chosen.location;
    let message = match (&chosen.etcd_backup, chosen.stored_size) {
        // If no size is recorded, the operator has not read the backup before, so the recorded SHA-256 is from the
        // status of the EtcdBackup.
        (Some(name), None) => format!(
            "spec.backup.name: the status of the EtcdBackup {name} records the SHA-256 {} for the backup {location}, \
             but the manifest of this backup has {}: another writer may have replaced the backup. {REPLACED}",
            chosen.sha256.as_deref().unwrap_or_default(),
            now.sha256.as_deref().unwrap_or("none"),
        ),
        _ => format!(
            "the backup {location} was overwritten after this restore had chosen it: create a new EtcdRestore for the \
             current backup, or put the chosen backup back"
        ),
    };
    Err(Trouble::new(Reason::SnapshotUnreadable, message))
}

/// Adds the recorded backup and the remedy to the problem of a missing backup. A change of the spec would not help,
/// because the restore keeps the recorded backup.
pub fn name_missing_backup(restore: &EtcdRestore, mut trouble: Trouble) -> Trouble {
    if let Some(chosen) = recorded(restore)
        && matches!(
            trouble.reason,
            Reason::BackupMissing | Reason::BucketMissing
        )
    {
        let owner = chosen.etcd_backup.as_ref();
        let owner = owner.map_or_else(String::new, |name| format!(" of the EtcdBackup {name}"));
        // If no size is recorded, the operator has never read this backup, for example because it is on a
        // PersistentVolumeClaim. The backup may never have existed.
        let problem = match chosen.stored_size {
            Some(_) => "was deleted",
            None => "does not exist",
        };
        trouble.message = format!(
            "the backup {}{owner}, which this restore has chosen, {problem} ({}): put the backup back, or create a \
             new EtcdRestore",
            chosen.location, trouble.message
        );
    }
    trouble
}

/// Like [`name_missing_backup`], for the problem of the seed's pod.
pub fn name_missing_backup_in(restore: &EtcdRestore, pod: &mut PodFacts) {
    let trouble = pod.trouble.take();
    pod.trouble = trouble.map(|trouble| name_missing_backup(restore, trouble));
}

/// The SHA-256 of a storage block in hexadecimal. Equal blocks have equal fingerprints.
pub fn fingerprint(block: &StorageBlock) -> String {
    let text = serde_json::to_vec(block).unwrap_or_default();
    format!("{:x}", Sha256::digest(text))
}

/// The location of a backup, in the format of `status.location` of an EtcdBackup.
pub fn location(block: &StorageBlock) -> String {
    let source = block.source();
    let path = source.path();
    match source {
        // OSS has the same API as S3, so the URL begins with `s3` for both.
        StorageSource::S3(_) | StorageSource::Oss(_) => format!("s3://{path}"),
        StorageSource::Abs(_) => format!("abs://{path}"),
        StorageSource::Gcs(_) => format!("gs://{path}"),
        StorageSource::Pvc(pvc) => format!("pvc://{}/{path}", pvc.claim_name),
        StorageSource::Local(_) => format!("file://{path}"),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn restore() -> EtcdRestore {
        let spec = json!({ "etcdCluster": { "name": "main" }, "backup": { "name": "nightly" } });
        let mut restore = EtcdRestore::new("again", serde_json::from_value(spec).unwrap());
        restore.metadata.generation = Some(1);
        restore
    }

    fn block(path: &str) -> StorageBlock {
        serde_json::from_value(json!({ "s3": { "path": path, "awsSecret": "aws" } })).unwrap()
    }

    fn manifest(sha256: &str) -> BackupManifest {
        serde_json::from_value(json!({
            "formatVersion": 1, "etcdVersion": "3.7.3", "clusterID": "1", "revision": 7, "size": 100,
            "sha256": sha256, "compression": "none", "createdAt": "2026-01-01T00:00:00Z",
        }))
        .unwrap()
    }

    #[test]
    fn overwritten_backup_is_detected() {
        let mut chosen = chosen_from(&restore(), block("b/k"));
        assert!(
            is_unchanged(&chosen, None, 5).is_ok(),
            "no size and no checksum is recorded, so any backup is accepted"
        );
        add_metadata(&mut chosen, Some(&manifest("AB")), 100);
        assert_eq!(
            (chosen.stored_size, chosen.etcd_revision),
            (Some(100), Some(7))
        );
        assert!(is_unchanged(&chosen, Some(&manifest("ab")), 100).is_ok());
        // A missing manifest is accepted, because the seed's pod compares the SHA-256 of the whole backup with the
        // recorded SHA-256.
        assert!(is_unchanged(&chosen, None, 100).is_ok());
        for (manifest, stored) in [
            (Some(manifest("cd")), 100),
            (Some(manifest("ab")), 99),
            (None, 99),
        ] {
            let trouble = is_unchanged(&chosen, manifest.as_ref(), stored).unwrap_err();
            assert_eq!(trouble.reason, Reason::SnapshotUnreadable);
            assert!(trouble.message.contains("s3://b/k"), "{}", trouble.message);
        }
    }

    /// A writer to the bucket can replace the backup and its manifest with an older backup.
    #[test]
    fn invariant_34_backup_with_other_sha256_than_in_status_is_refused() {
        let stored = |sha256: Value| -> StoredBackup {
            let stored = json!({ "location": "s3://b/k", "sha256": sha256 });
            serde_json::from_value(stored).unwrap()
        };
        let recorded = chosen_by_name(&restore(), block("b/k"), &stored(json!("AB")), None);
        assert_eq!(recorded.sha256.as_deref(), Some("ab"));
        assert!(is_unchanged(&recorded, Some(&manifest("ab")), 100).is_ok());
        // A missing manifest is accepted, because the seed's pod compares the SHA-256 of the whole backup with the
        // recorded SHA-256.
        assert!(is_unchanged(&recorded, None, 100).is_ok());
        for replaced in ["cd", ""] {
            let trouble = is_unchanged(&recorded, Some(&manifest(replaced)), 100).unwrap_err();
            assert_eq!(trouble.reason, Reason::SnapshotUnreadable);
            for part in [
                "spec.backup.name",
                "EtcdBackup nightly records the SHA-256 ab",
                "s3://b/k",
                "spec.backup.before",
                "storage block",
            ] {
                assert!(trouble.message.contains(part), "{}", trouble.message);
            }
        }
        // The status of the EtcdBackup contains no SHA-256 for a backup that the backup operator has only found in a
        // listing of the store. Any manifest is then accepted.
        for unknown in [Value::Null, json!("")] {
            let chosen = chosen_by_name(&restore(), block("b/k"), &stored(unknown), None);
            assert_eq!(chosen.sha256, None);
            assert!(is_unchanged(&chosen, Some(&manifest("cd")), 100).is_ok());
        }
    }

    #[test]
    fn missing_backup_is_reported_with_remedy() {
        let mut restore = restore();
        let missing = || Trouble::new(Reason::BackupMissing, "object \"k\" does not exist");
        assert_eq!(name_missing_backup(&restore, missing()), missing());
        let chosen = chosen_from(&restore, block("b/k_v7_2026-01-01-00:00:00"));
        restore.status.get_or_insert_default().backup = Some(chosen);
        let message = name_missing_backup(&restore, missing()).message;
        for part in [
            "s3://b/k_v7_2026-01-01-00:00:00",
            "EtcdBackup nightly",
            "new EtcdRestore",
        ] {
            assert!(message.contains(part), "{message}");
        }
        let other = || Trouble::new(Reason::PodNotStarting, "no node");
        assert_eq!(name_missing_backup(&restore, other()), other());
    }

    #[test]
    fn changed_spec_discards_recorded_backup_until_lock_is_held() {
        let mut restore = restore();
        assert_eq!(valid_record(&restore, true), None);
        let chosen = chosen_from(&restore, block("b/k"));
        restore.status.get_or_insert_default().backup = Some(chosen.clone());
        assert_eq!(valid_record(&restore, false), Some(&chosen));
        restore.metadata.generation = Some(2);
        assert_eq!(valid_record(&restore, false), None);
        assert_eq!(valid_record(&restore, true), Some(&chosen));
    }

    #[test]
    fn bump_revision_is_recorded_with_backup() {
        let mut restore = restore();
        restore.spec.bump_revision = Some(1000);
        let chosen = chosen_from(&restore, block("b/k"));
        assert_eq!(chosen.bump_revision, 1000);
        restore.status.get_or_insert_default().backup = Some(chosen);
        restore.spec.bump_revision = None;
        assert_eq!(bump_revision(&restore), Some(1000));
        // After the backup is chosen, a change of `bumpRevision` has no effect.
        let chosen = chosen_from(&restore, block("b/k"));
        restore.status.get_or_insert_default().backup = Some(chosen);
        restore.spec.bump_revision = Some(7);
        assert_eq!(bump_revision(&restore), None);
    }

    /// Volumes contain fingerprints, and later releases compare them, so the fingerprint of a block must never change.
    #[test]
    fn fingerprint_depends_on_fields_of_source_and_is_stable() {
        let of = |more: Value| -> String {
            let mut s3 = json!({ "path": "b/k" });
            s3.as_object_mut()
                .unwrap()
                .extend(more.as_object().unwrap().clone());
            fingerprint(&serde_json::from_value(json!({ "s3": s3 })).unwrap())
        };
        let fingerprints = [
            of(json!({})),
            of(json!({ "path": "b/newer" })),
            of(json!({ "endpoint": "http://s3" })),
            of(json!({ "awsSecret": "aws" })),
        ];
        let distinct: std::collections::BTreeSet<_> = fingerprints.iter().collect();
        assert_eq!(distinct.len(), fingerprints.len());
        let stored = format!("{:x}", Sha256::digest(r#"{"s3":{"path":"b/k"}}"#));
        assert_eq!(fingerprints[0], stored);
    }

    #[test]
    fn location_has_format_of_etcdbackup_status() {
        for (block, expected) in [
            (json!({ "s3": { "path": "b/k" } }), "s3://b/k"),
            (json!({ "gcs": { "path": "b/k" } }), "gs://b/k"),
            (json!({ "abs": { "path": "b/k" } }), "abs://b/k"),
            (
                json!({ "pvc": { "claimName": "c", "path": "a/k" } }),
                "pvc://c/a/k",
            ),
        ] {
            assert_eq!(location(&serde_json::from_value(block).unwrap()), expected);
        }
    }
}
