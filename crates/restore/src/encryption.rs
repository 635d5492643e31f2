//! Decides whether a backup is encrypted as the restore requires, and whether its key exists. Performs no I/O.
//!
//! If the restore names keys, the backup must be encrypted. Otherwise a writer to the bucket could replace an encrypted
//! backup and its manifest by other data.

use api::manifest::BackupManifest;
use api::restore::ChosenBackup;
use api::storage::SecretName;
use store::encryption::Keys;

use crate::plan::choice;
use crate::reason::{Reason, Trouble};

/// The field with the Secret, in an EtcdRestore and in an EtcdBackup.
pub(crate) const FIELD: &str = "spec.encryption.secret";

/// The Secret with the keys for the backup.
pub(crate) fn secret_of(chosen: &ChosenBackup) -> Option<SecretName<'_>> {
    choice::encryption_secret(chosen).map(|name| SecretName { field: FIELD, name })
}

/// Checks the manifest before the restore changes anything. `keys` are the keys in the Secret of the chosen backup. The
/// seed checks the object itself, because the manifest may be missing or changed.
///
/// # Errors
///
/// Fails if the backup must be encrypted but is not, or if its key is missing.
pub(crate) fn check(
    chosen: &ChosenBackup,
    manifest: &BackupManifest,
    keys: Option<&Keys>,
) -> Result<(), Trouble> {
    let key = manifest.encryption.as_ref().map(|found| &found.key);
    let secret = choice::encryption_secret(chosen).unwrap_or_default();
    match (key, keys) {
        (None, None) => Ok(()),
        (None, Some(_)) => Err(Trouble::new(
            Reason::SnapshotUnreadable,
            format!(
                "the backup {} is not encrypted, although the restore requires it ({FIELD}: {secret}): another writer may \
                 have replaced the backup. If the backup was made without encryption, name it by its storage block in the \
                 EtcdRestore, without spec.backup and spec.encryption",
                chosen.location
            ),
        )),
        (Some(key), None) => Err(Trouble::new(
            Reason::InvalidSpec,
            format!(
                "{FIELD}: the backup is encrypted with the key {:?} (ID {}): name a Secret with this key",
                key.name, key.id
            ),
        )),
        (Some(key), Some(keys)) => keys.require(&key.id, &key.name).map_err(|error| {
            let message = format!("{FIELD}: Secret {secret} {error}");
            Trouble::new(Reason::SecretMissing, message)
        }),
    }
}

#[cfg(test)]
mod tests {
    use api::EtcdRestore;
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
    fn backup_with_available_key_is_accepted() {
        assert_eq!(checked(false, None), Ok(()));
        assert_eq!(checked(true, Some(ID)), Ok(()));
    }

    /// A writer to the bucket can replace the backup and its manifest.
    #[test]
    fn unencrypted_backup_is_refused_if_restore_names_keys() {
        let trouble = checked(true, None).unwrap_err();
        assert_eq!(trouble.reason, Reason::SnapshotUnreadable);
        for part in ["s3://b/k is not encrypted", "keys", "storage block"] {
            assert!(trouble.message.contains(part), "{}", trouble.message);
        }
    }

    #[test]
    fn missing_key_is_reported_with_its_id() {
        let trouble = checked(false, Some(ID)).unwrap_err();
        assert_eq!(trouble.reason, Reason::InvalidSpec);
        assert!(trouble.message.contains(ID), "{}", trouble.message);
        let trouble = checked(true, Some("ffff")).unwrap_err();
        assert_eq!(trouble.reason, Reason::SecretMissing);
        for part in ["Secret keys", "ID ffff", ID] {
            assert!(trouble.message.contains(part), "{}", trouble.message);
        }
    }

    #[test]
    fn restore_without_keys_names_no_secret() {
        assert!(secret_of(&chosen(Value::Null)).is_none());
        let chosen = chosen(json!({ "secret": "keys" }));
        assert_eq!(secret_of(&chosen).unwrap().name, "keys");
    }
}
