//! Checks whether a backup is encrypted as required, and whether its key exists. Performs no I/O.
//!
//! If the restore names keys, the backup must be encrypted. Without this rule, a writer to the bucket could replace an
//! encrypted backup with other data.
//!
//! Invariant 34: with `spec.backup`, the status of the EtcdBackup decides whether the backup must be encrypted,
//! because the spec of the EtcdBackup may have changed since the backup.

use api::backup::{EncryptionKey, StoredBackup};
use api::manifest::BackupManifest;
use api::restore::{ChosenBackup, RestoreEncryption};
use api::storage::SecretName;
use api::{EtcdBackup, EtcdRestore};
use kube::ResourceExt;
use store::encryption::Keys;

use crate::plan::choice::{self, REPLACED};
use crate::reason::{Reason, Trouble};

/// The field with the name of the Secret, in EtcdRestores and EtcdBackups.
pub(crate) const FIELD: &str = "spec.encryption.secret";

/// Returns the Secret with the keys for a backup of an EtcdBackup: the Secret in the EtcdRestore, or else the Secret in
/// the EtcdBackup. `None` if neither spec names a Secret, or if the status shows that the backup is not encrypted.
/// `stored` describes the backup in the status of the EtcdBackup.
///
/// # Errors
///
/// Fails if the backup is encrypted, but neither spec names a Secret.
pub(crate) fn by_name(
    restore: &EtcdRestore,
    backup: &EtcdBackup,
    stored: &StoredBackup,
) -> Result<Option<RestoreEncryption>, Trouble> {
    if restore.spec.encryption.is_some() {
        return Ok(restore.spec.encryption.clone());
    }
    let of_backup = backup.spec.encryption.as_ref();
    let of_backup = of_backup.map(|encryption| RestoreEncryption {
        secret: encryption.secret.clone(),
    });
    let is_described = stored.sha256.as_ref().is_some_and(|it| !it.is_empty());
    match (&stored.encryption_key, of_backup) {
        (Some(_), Some(encryption)) => Ok(Some(encryption)),
        (Some(key), None) => {
            let message = format!(
                "{FIELD}: the backup {} of the EtcdBackup {} is encrypted with the key {:?} (ID {}), but the \
                 EtcdBackup names no Secret: set {FIELD} of the EtcdRestore to a Secret with this key",
                stored.location,
                backup.name_any(),
                key.name,
                key.id
            );
            Err(Trouble::new(Reason::InvalidSpec, message))
        }
        // The status contains the SHA-256 of the backup but no key, so the backup is not encrypted. The SHA-256 detects
        // a replaced backup.
        (None, _) if is_described => Ok(None),
        // Retention found this backup in the store, and recorded neither its SHA-256 nor its key. The backup may be
        // encrypted, so the Secret of the EtcdBackup is used, if its spec names one.
        (None, of_backup) => Ok(of_backup),
    }
}

/// The Secret with the keys for the recorded changes of an EtcdBackup: the Secret in the EtcdRestore, or else the
/// Secret in the EtcdBackup. `None` if the changes must not be encrypted.
pub(crate) fn of_changes(restore: &EtcdRestore, backup: &EtcdBackup) -> Option<RestoreEncryption> {
    let of_backup = backup.spec.encryption.as_ref();
    let of_backup = of_backup.map(|encryption| RestoreEncryption {
        secret: encryption.secret.clone(),
    });
    restore.spec.encryption.clone().or(of_backup)
}

/// The Secret with the keys for the backup.
pub(crate) fn secret_of(chosen: &ChosenBackup) -> Option<SecretName<'_>> {
    choice::encryption_secret(chosen).map(|name| SecretName { field: FIELD, name })
}

/// If the status of the EtcdBackup records an encryption key, checks that the Secret contains this key. This check
/// needs no manifest, because the operator cannot read the manifest on a PersistentVolumeClaim. `keys` are the keys in
/// the Secret.
///
/// # Errors
///
/// Fails if the key is missing.
pub(crate) fn check_recorded_key(
    chosen: &ChosenBackup,
    keys: Option<&Keys>,
) -> Result<(), Trouble> {
    match (&chosen.encryption_key, keys) {
        (Some(key), Some(keys)) => require(chosen, key, keys),
        _ => Ok(()),
    }
}

fn require(chosen: &ChosenBackup, key: &EncryptionKey, keys: &Keys) -> Result<(), Trouble> {
    keys.require(&key.id, &key.name).map_err(|error| {
        let secret = choice::encryption_secret(chosen).unwrap_or_default();
        let message = format!("{FIELD}: Secret {secret} {error}");
        Trouble::new(Reason::SecretMissing, message)
    })
}

/// Checks the encryption in the manifest before the restore changes anything. `keys` are the keys in the Secret. The
/// seed later checks the object too, because the manifest may be missing or wrong.
///
/// # Errors
///
/// Fails if the backup is not encrypted although it must be, if its key is missing, or if its key differs from the key
/// in the status of the EtcdBackup.
pub(crate) fn check(
    chosen: &ChosenBackup,
    manifest: &BackupManifest,
    keys: Option<&Keys>,
) -> Result<(), Trouble> {
    let key = manifest.encryption.as_ref().map(|found| &found.key);
    match (key, keys) {
        (None, None) => Ok(()),
        (None, Some(_)) => Err(not_encrypted(chosen)),
        (Some(key), None) => Err(Trouble::new(
            Reason::InvalidSpec,
            format!(
                "{FIELD}: the backup is encrypted with the key {:?} (ID {}): name a Secret with this key",
                key.name, key.id
            ),
        )),
        (Some(key), Some(keys)) => match &chosen.encryption_key {
            Some(recorded) if recorded.id != key.id => Err(other_encryption(
                chosen,
                recorded,
                &format!("is encrypted with the key {:?} (ID {})", key.name, key.id),
            )),
            _ => require(chosen, key, keys),
        },
    }
}

fn not_encrypted(chosen: &ChosenBackup) -> Trouble {
    if let Some(recorded) = &chosen.encryption_key {
        return other_encryption(chosen, recorded, "is not encrypted");
    }
    let secret = choice::encryption_secret(chosen).unwrap_or_default();
    let message = format!(
        "the backup {} is not encrypted, although the restore requires it ({FIELD}: {secret}): another writer may have \
         replaced the backup. If the backup was made without encryption, remove spec.encryption from the EtcdRestore, \
         and name the backup by its storage block instead of spec.backup",
        chosen.location
    );
    Trouble::new(Reason::SnapshotUnreadable, message)
}

/// The error if the manifest does not name the key `recorded`, which the status of the EtcdBackup records.
fn other_encryption(chosen: &ChosenBackup, recorded: &EncryptionKey, found: &str) -> Trouble {
    let message = format!(
        "spec.backup.name: the backup {} {found}, but the status of the EtcdBackup {} records the key {:?} (ID {}): \
         another writer may have replaced the backup. {REPLACED}",
        chosen.location,
        chosen.etcd_backup.as_deref().unwrap_or_default(),
        recorded.name,
        recorded.id
    );
    Trouble::new(Reason::SnapshotUnreadable, message)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};
    use store::SecretData;
    use store::encryption::FORMAT;

    use super::*;

    const TEXT: &str = "AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=";
    const ID: &str = "a62e0f7753a4df18";

    fn chosen(encryption: Value) -> ChosenBackup {
        let mut spec = json!({
            "etcdCluster": { "name": "main" }, "backupStorageType": "S3", "s3": { "path": "b/k" },
        });
        spec["encryption"] = encryption;
        let restore = EtcdRestore::new("again", serde_json::from_value(spec).unwrap());
        let block = json!({ "s3": { "path": "b/k" } });
        choice::chosen_from(&restore, serde_json::from_value(block).unwrap())
    }

    fn manifest(id: Option<&str>) -> BackupManifest {
        let encryption =
            id.map(|id| json!({ "format": FORMAT, "key": { "name": "2026", "id": id } }));
        serde_json::from_value(json!({
            "formatVersion": 1, "etcdVersion": "3.7.3", "clusterID": "1", "revision": 7, "size": 100,
            "sha256": "ab", "compression": "none", "createdAt": "2026-01-01T00:00:00Z", "encryption": encryption,
        }))
        .unwrap()
    }

    fn keys() -> Keys {
        let data = SecretData::from([("2026".to_owned(), TEXT.as_bytes().to_vec())]);
        Keys::of(&data)
    }

    fn checked(secret: bool, id: Option<&str>) -> Result<(), Trouble> {
        let encryption = if secret {
            json!({ "secret": "keys" })
        } else {
            Value::Null
        };
        let keys = secret.then(keys);
        check(&chosen(encryption), &manifest(id), keys.as_ref())
    }

    #[test]
    fn unencrypted_backup_and_backup_with_available_key_are_accepted() {
        assert_eq!(checked(false, None), Ok(()));
        assert_eq!(checked(true, Some(ID)), Ok(()));
    }

    /// A writer to the bucket can replace the backup and its manifest with data that is not encrypted.
    #[test]
    fn unencrypted_backup_is_refused_if_restore_names_keys() {
        let trouble = checked(true, None).unwrap_err();
        assert_eq!(trouble.reason, Reason::SnapshotUnreadable);
        for part in ["s3://b/k is not encrypted", "keys", "storage block"] {
            assert!(trouble.message.contains(part), "{}", trouble.message);
        }
    }

    #[test]
    fn missing_decryption_key_is_reported_with_id() {
        let trouble = checked(false, Some(ID)).unwrap_err();
        assert_eq!(trouble.reason, Reason::InvalidSpec);
        assert!(trouble.message.contains(ID), "{}", trouble.message);
        let trouble = checked(true, Some("ffff")).unwrap_err();
        assert_eq!(trouble.reason, Reason::SecretMissing);
        for part in ["Secret keys", "ID ffff", ID] {
            assert!(trouble.message.contains(part), "{}", trouble.message);
        }
    }

    fn chosen_by_name(secret: Option<&str>, stored: &Value) -> Result<ChosenBackup, Trouble> {
        let mut spec = json!({ "storageType": "S3", "s3": { "path": "b/k" } });
        spec["encryption"] = secret.map_or(Value::Null, |secret| json!({ "secret": secret }));
        let backup = EtcdBackup::new("nightly", serde_json::from_value(spec).unwrap());
        let spec = json!({ "etcdCluster": { "name": "main" }, "backup": { "name": "nightly" } });
        let restore = EtcdRestore::new("again", serde_json::from_value(spec).unwrap());
        let stored: StoredBackup = serde_json::from_value(stored.clone()).unwrap();
        let encryption = by_name(&restore, &backup, &stored)?;
        let block = json!({ "s3": { "path": "b/k" } });
        let block = serde_json::from_value(block).unwrap();
        Ok(choice::chosen_by_name(&restore, block, &stored, encryption))
    }

    fn stored(id: &str) -> Value {
        json!({ "location": "s3://b/k", "sha256": "AB", "encryptionKey": { "name": "2026", "id": id } })
    }

    #[test]
    fn invariant_34_status_decides_whether_backup_must_be_encrypted() {
        let plain = json!({ "location": "s3://b/k", "sha256": "AB" });
        let found_in_store = json!({ "location": "s3://b/k" });
        for (secret, stored, expected) in [
            // The backup `plain` was made before `spec.encryption` of the EtcdBackup was set.
            (Some("keys"), &plain, None),
            (None, &plain, None),
            (Some("keys"), &stored(ID), Some("keys")),
            (Some("keys"), &found_in_store, Some("keys")),
            (None, &found_in_store, None),
        ] {
            let chosen = chosen_by_name(secret, stored).unwrap();
            assert_eq!(choice::encryption_secret(&chosen), expected, "{stored}");
        }
        // This backup was made before `spec.encryption` of the EtcdBackup was removed.
        let trouble = chosen_by_name(None, &stored(ID)).unwrap_err();
        assert_eq!(trouble.reason, Reason::InvalidSpec);
        for part in [ID, "EtcdBackup nightly", "set spec.encryption.secret of"] {
            assert!(trouble.message.contains(part), "{}", trouble.message);
        }
    }

    #[test]
    fn invariant_34_backup_with_other_key_than_in_status_is_refused() {
        let recorded = chosen_by_name(Some("keys"), &stored(ID)).unwrap();
        let keys = keys();
        assert_eq!(check(&recorded, &manifest(Some(ID)), Some(&keys)), Ok(()));
        let other_is_recorded = chosen_by_name(Some("keys"), &stored("ffff")).unwrap();
        for (chosen, found, part) in [
            (&recorded, None, "is not encrypted"),
            (&other_is_recorded, Some(ID), "(ID ffff)"),
        ] {
            let trouble = check(chosen, &manifest(found), Some(&keys)).unwrap_err();
            assert_eq!(trouble.reason, Reason::SnapshotUnreadable);
            for part in [part, "spec.backup.name", "another writer", "storage block"] {
                assert!(trouble.message.contains(part), "{}", trouble.message);
            }
        }
    }

    #[test]
    fn recorded_key_missing_in_secret_is_reported_without_manifest() {
        let chosen = chosen_by_name(Some("keys"), &stored("ffff")).unwrap();
        let trouble = check_recorded_key(&chosen, Some(&keys())).unwrap_err();
        assert_eq!(trouble.reason, Reason::SecretMissing);
        for part in ["Secret keys", "ID ffff", ID] {
            assert!(trouble.message.contains(part), "{}", trouble.message);
        }
        let chosen = chosen_by_name(Some("keys"), &stored(ID)).unwrap();
        assert_eq!(check_recorded_key(&chosen, Some(&keys())), Ok(()));
    }

    #[test]
    fn keys_of_recorded_changes_come_from_restore_or_etcdbackup() {
        for (of_restore, of_backup, expected) in [
            (Some("a"), Some("b"), Some("a")),
            (None, Some("b"), Some("b")),
            (Some("a"), None, Some("a")),
            (None, None, None),
        ] {
            let block = |secret: Option<&str>| {
                secret.map_or(Value::Null, |secret| json!({ "secret": secret }))
            };
            let mut spec = json!({ "storageType": "S3", "s3": { "path": "b/k" } });
            spec["encryption"] = block(of_backup);
            let backup = EtcdBackup::new("nightly", serde_json::from_value(spec).unwrap());
            let mut spec =
                json!({ "etcdCluster": { "name": "main" }, "backup": { "name": "nightly" } });
            spec["encryption"] = block(of_restore);
            let restore = EtcdRestore::new("again", serde_json::from_value(spec).unwrap());
            let found = of_changes(&restore, &backup);
            assert_eq!(found.map(|found| found.secret).as_deref(), expected);
        }
    }

    #[test]
    fn restore_without_encryption_uses_no_key_secret() {
        assert!(secret_of(&chosen(Value::Null)).is_none());
        let chosen = chosen(json!({ "secret": "keys" }));
        assert_eq!(secret_of(&chosen).unwrap().name, "keys");
    }
}
