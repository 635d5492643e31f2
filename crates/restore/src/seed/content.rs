//! Reads the keys of an encrypted backup, and converts errors of its content.

use std::path::Path;

use store::encryption::{self, Keys};
use store::unpack;

use super::mounted;
use super::snapshot::unreadable;
use crate::encryption::FIELD;
use crate::reason::{Reason, Trouble};

/// The keys in a mounted Secret. The backup must be encrypted with one of these keys.
pub(super) struct EncryptionKeys {
    /// The name of the Secret, for messages.
    pub(super) secret: String,
    /// The keys in the Secret.
    pub(super) keys: Keys,
}

impl EncryptionKeys {
    /// Reads the keys from the mounted Secret. Without a directory, there are no keys.
    pub(super) fn read(secret: &str, directory: Option<&Path>) -> Result<Self, Trouble> {
        let data = mounted(directory)?.unwrap_or_default();
        Ok(Self {
            secret: secret.to_owned(),
            keys: Keys::of(&data),
        })
    }
}

/// Converts an error of the content of a backup. `secret` is the name of the Secret with the keys.
pub(crate) fn in_content(error: &unpack::Error, secret: Option<&str>) -> Trouble {
    match (error, secret) {
        (unpack::Error::Encryption(encryption::Error::UnknownKey { id, .. }), None) => {
            Trouble::new(
                Reason::InvalidSpec,
                format!(
                    "{FIELD}: the backup is encrypted with the key that has the ID {id}: name a Secret with this key"
                ),
            )
        }
        (unpack::Error::Encryption(encryption::Error::UnknownKey { id, keys }), Some(secret)) => {
            Trouble::new(
                Reason::SecretMissing,
                format!(
                    "{FIELD}: Secret {secret} has no key with the ID {id}, with which the backup is encrypted. The \
                     Secret has only these keys: {keys}. Add the key"
                ),
            )
        }
        (unpack::Error::Encryption(error), _) => unreadable(&error.to_string()),
        (unpack::Error::Compression(error), _) => {
            unreadable(&format!("the snapshot cannot be decompressed ({error})"))
        }
    }
}

#[cfg(test)]
mod tests {
    use store::encryption::Key;

    use super::*;

    #[test]
    fn decryption_errors_have_reason_and_details() {
        let text = b"AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=";
        let id = Key::parse("2026", text).unwrap().id();
        let unknown = || {
            let keys = "none".to_owned();
            encryption::Error::UnknownKey { id, keys }
        };
        for (error, secret, reason, part) in [
            (unknown(), None, Reason::InvalidSpec, "a62e0f7753a4df18"),
            (
                unknown(),
                Some("backup-keys"),
                Reason::SecretMissing,
                "Secret backup-keys has no key with the ID a62e0f7753a4df18",
            ),
            (
                encryption::Error::NotEncrypted,
                Some("backup-keys"),
                Reason::SnapshotUnreadable,
                "is not encrypted",
            ),
            (
                encryption::Error::Damaged { chunk: 7, id },
                Some("backup-keys"),
                Reason::SnapshotUnreadable,
                "chunk 7",
            ),
        ] {
            let trouble = in_content(&error.into(), secret);
            assert_eq!(trouble.reason, reason, "{}", trouble.message);
            assert!(trouble.message.contains(part), "{}", trouble.message);
        }
    }

    #[test]
    fn secret_without_valid_entry_has_no_encryption_keys() {
        let folder = tempfile::tempdir().unwrap();
        let found = EncryptionKeys::read("backup-keys", Some(folder.path())).unwrap();
        assert_eq!(found.keys.describe(), "none");
        std::fs::write(folder.path().join("notes"), "text").unwrap();
        let found = EncryptionKeys::read("backup-keys", Some(folder.path())).unwrap();
        assert_eq!(found.keys.describe(), "notes (not a key)");
    }
}
