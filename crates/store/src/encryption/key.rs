//! The keys of users, and their IDs. A key is 32 random bytes, written as base64.

use std::fmt;

use aws_lc_rs::hkdf::{HKDF_SHA256, KeyType, Salt};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;

use crate::SecretData;

/// Length of a key in bytes.
const LENGTH: usize = 32;

/// The `info` of HKDF for the ID of a key.
const ID: &[u8] = b"etcd-operator backup key id v1";

/// The public ID of a key. HKDF derives the ID, so it reveals nothing about the key.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct KeyId([u8; Self::LENGTH]);

impl KeyId {
    /// Length of an ID in bytes.
    pub(super) const LENGTH: usize = 8;

    /// Reads an ID from [`Self::LENGTH`] bytes of an object's header.
    pub(super) fn of_bytes(bytes: &[u8]) -> Self {
        let mut id = [0; Self::LENGTH];
        id.copy_from_slice(bytes);
        Self(id)
    }

    pub(super) fn as_bytes(&self) -> &[u8] {
        &self.0
    }
}

impl fmt::Display for KeyId {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&hex::encode(self.0))
    }
}

impl fmt::Debug for KeyId {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, formatter)
    }
}

/// The length of an ID, for HKDF.
struct IdLength;

impl KeyType for IdLength {
    fn len(&self) -> usize {
        KeyId::LENGTH
    }
}

/// Why a Secret has no usable key. The error text follows the name of the Secret in a message, and never contains a
/// key.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum KeyError {
    /// The Secret has no entry of this name.
    #[error("has no entry {0:?}: add this entry, or correct encryption.key")]
    Missing(String),
    /// The Secret is empty.
    #[error("has no entries: add a key")]
    Empty,
    /// The Secret has several entries, and the spec names none of them.
    #[error("has several entries ({0}): name the key for new backups in encryption.key")]
    Ambiguous(String),
    /// The entry is not a key.
    #[error(
        "has the entry {0:?}, which is not a key: a key is the base64 text of 32 random bytes (openssl rand -base64 32)"
    )]
    Malformed(String),
    /// No entry has the required ID.
    #[error(
        "has no key with the ID {id}, with which the backup is encrypted. The Secret has only these keys: {keys}. \
         Add the key{named}"
    )]
    Unknown {
        /// The required ID.
        id: String,
        /// The part of the message that names the key's entry in the Secret at the time of the backup.
        named: String,
        /// The names and the IDs of the keys, as text.
        keys: String,
    },
    /// The cryptographic library failed.
    #[error("has keys, but the cryptographic library failed")]
    Library,
}

/// A key of a user.
#[derive(Clone, PartialEq, Eq)]
pub struct Key {
    name: String,
    id: KeyId,
    bytes: [u8; LENGTH],
}

/// Shows only the name and the ID (invariant 14).
impl fmt::Debug for Key {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "Key({} {})", self.name, self.id)
    }
}

impl Key {
    /// Reads a key. White space at both ends is ignored, because `openssl` and editors add it.
    ///
    /// # Errors
    /// Fails if the text is not the base64 text of 32 bytes.
    pub fn parse(name: &str, text: &[u8]) -> Result<Self, KeyError> {
        let malformed = || KeyError::Malformed(name.to_owned());
        let decoded = STANDARD.decode(text.trim_ascii());
        let decoded = decoded.map_err(|_| malformed())?;
        let bytes: [u8; LENGTH] = decoded.try_into().map_err(|_| malformed())?;
        let extracted = Salt::none(HKDF_SHA256).extract(&bytes);
        let mut id = [0; KeyId::LENGTH];
        let info = [ID];
        let expanded = extracted.expand(&info, IdLength);
        let filled = expanded.and_then(|expanded| expanded.fill(&mut id));
        filled.map_err(|_| KeyError::Library)?;
        Ok(Self {
            name: name.to_owned(),
            id: KeyId(id),
            bytes,
        })
    }

    /// The name of the key, which is the name of its entry in the Secret.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The ID of the key.
    pub fn id(&self) -> KeyId {
        self.id
    }

    pub(super) fn bytes(&self) -> &[u8] {
        &self.bytes
    }
}

/// The keys of a Secret. A restore uses the key whose ID is in the backup.
#[derive(Clone, Debug, Default)]
pub struct Keys {
    keys: Vec<Key>,
    /// Names of the entries that are not keys.
    malformed: Vec<String>,
}

impl Keys {
    /// Reads all entries of a Secret. Entries that are not keys do not prevent the use of the other entries, and only
    /// appear in messages.
    pub fn of(data: &SecretData) -> Self {
        let mut keys = Self::default();
        for (name, text) in data {
            match Key::parse(name, text) {
                Ok(key) => keys.keys.push(key),
                Err(_) => keys.malformed.push(name.clone()),
            }
        }
        keys
    }

    /// Adds a key.
    pub fn add(&mut self, key: Key) {
        self.keys.push(key);
    }

    /// The key with this ID.
    pub fn find(&self, id: KeyId) -> Option<&Key> {
        self.keys.iter().find(|key| key.id == id)
    }

    /// Checks that one of the keys has this ID. `id` and `name` are the key's ID and name in the manifest of a backup.
    ///
    /// # Errors
    /// Fails if no key has this ID.
    pub fn require(&self, id: &str, name: &str) -> Result<(), KeyError> {
        if self.keys.iter().any(|key| key.id.to_string() == id) {
            return Ok(());
        }
        let named = if name.is_empty() {
            String::new()
        } else {
            format!(" {name:?}")
        };
        Err(KeyError::Unknown {
            id: id.to_owned(),
            named,
            keys: self.describe(),
        })
    }

    /// The names and the IDs of all keys, as messages show them.
    pub fn describe(&self) -> String {
        let keys = self.keys.iter();
        let keys = keys.map(|key| format!("{} (ID {})", key.name, key.id));
        let malformed = self.malformed.iter();
        let malformed = malformed.map(|name| format!("{name} (not a key)"));
        let all: Vec<String> = keys.chain(malformed).collect();
        if all.is_empty() {
            "none".to_owned()
        } else {
            all.join(", ")
        }
    }
}

/// The key for new backups: the named entry of the Secret, or its only entry.
///
/// # Errors
/// Fails if the entry is missing or is not a key. Without a name, also fails if the Secret has several entries.
pub fn for_new_backups(data: &SecretData, name: Option<&str>) -> Result<Key, KeyError> {
    if let Some(name) = name {
        let text = data.get(name);
        let text = text.ok_or_else(|| KeyError::Missing(name.to_owned()))?;
        return Key::parse(name, text);
    }
    let mut entries = data.iter();
    let (name, text) = entries.next().ok_or(KeyError::Empty)?;
    if entries.next().is_some() {
        let names: Vec<&str> = data.keys().map(String::as_str).collect();
        return Err(KeyError::Ambiguous(names.join(", ")));
    }
    Key::parse(name, text)
}
