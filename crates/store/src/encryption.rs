//! Encrypts and decrypts stored objects with AES-256-GCM, in constant memory. docs/internals/backup-encryption.md
//! specifies the format, so that other programs can read it.
//!
//! HKDF derives the key of each object from a user's key and a random salt. The content is split into chunks with a tag
//! each. The nonce of a chunk contains the chunk's number, and whether it is the last chunk. Decryption therefore fails
//! if the object is truncated, or if a chunk is moved, repeated, missing or changed.
//!
//! This module returns plaintext only after it has checked the chunk's tag.

use aws_lc_rs::aead::{AES_256_GCM, Aad, LessSafeKey, Nonce, UnboundKey};
use aws_lc_rs::error::Unspecified;
use aws_lc_rs::hkdf::{HKDF_SHA256, Salt};

mod key;

pub use key::{Key, KeyError, KeyId, Keys, for_new_backups};

/// The name of the format in the manifest of a backup.
pub const FORMAT: &str = "aes256gcm-chunks-v1";

/// First bytes of an encrypted object. An etcd database and a Zstandard stream start with other bytes.
const MAGIC: [u8; 8] = *b"EtcdEnc1";

/// Number of bytes that are needed to recognize an encrypted object.
pub const BEGINNING: usize = MAGIC.len();

/// Length of the random salt in bytes.
const SALT: usize = 32;

/// Length of the header in bytes. The header contains [`MAGIC`], the ID of the key, and the salt.
const HEADER: usize = MAGIC.len() + KeyId::LENGTH + SALT;

/// Number of content bytes in each chunk except the last.
const CHUNK: usize = 64 << 10;

/// Length of the tag that follows each chunk, in bytes.
const TAG: usize = 16;

/// The `info` of HKDF for the key of an object.
const CONTENT: &[u8] = b"etcd-operator backup content v1";

/// Why an object cannot be encrypted or decrypted. The text never contains keys.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// The object is not encrypted, although keys were given.
    #[error(
        "the object is not encrypted, although encryption is required: another writer may have replaced the object"
    )]
    NotEncrypted,
    /// None of the keys has the ID in the header of the object.
    #[error(
        "the object is encrypted with the key that has the ID {id}, but the given keys are: {keys}"
    )]
    UnknownKey {
        /// The ID of the object's key.
        id: KeyId,
        /// The names and the IDs of the given keys, as text.
        keys: String,
    },
    /// The tag of a chunk is wrong.
    #[error(
        "chunk {chunk} of the encrypted object is damaged, truncated, moved or not encrypted with the key {id}"
    )]
    Damaged {
        /// The number of the chunk. The first chunk has the number 0.
        chunk: u64,
        /// The ID of the key.
        id: KeyId,
    },
    /// The object ends within its header, or before its first tag.
    #[error("the encrypted object is truncated")]
    Truncated,
    /// The cryptographic library failed.
    #[error("the cryptographic library failed")]
    Library,
}

impl From<Unspecified> for Error {
    fn from(_: Unspecified) -> Self {
        Self::Library
    }
}

/// The size of an encrypted object with this number of bytes of content.
pub fn stored_size(content: u64) -> u64 {
    // Even empty content has one chunk, which is empty.
    let chunks = content.div_ceil(CHUNK as u64).max(1);
    let tags = chunks.saturating_mul(TAG as u64);
    content.saturating_add(tags).saturating_add(HEADER as u64)
}

/// Whether an object is encrypted. `beginning` contains the object's first [`BEGINNING`] bytes.
pub fn is_encrypted(beginning: &[u8]) -> bool {
    beginning.starts_with(&MAGIC)
}

/// The nonce of a chunk: the chunk's number in 11 bytes, and one byte that is 1 only for the last chunk. A nonce is
/// unique, because each object has its own key.
fn nonce(chunk: u64, last: bool) -> Nonce {
    let mut bytes = [0; 12];
    bytes[3..11].copy_from_slice(&chunk.to_be_bytes());
    bytes[11] = u8::from(last);
    Nonce::assume_unique_for_key(bytes)
}

/// The key of one object.
fn content_key(key: &Key, salt: &[u8]) -> Result<LessSafeKey, Error> {
    let extracted = Salt::new(HKDF_SHA256, salt).extract(key.bytes());
    let info = [CONTENT];
    let expanded = extracted.expand(&info, &AES_256_GCM)?;
    Ok(LessSafeKey::new(UnboundKey::from(expanded)))
}

/// Encrypts a stream.
pub struct Encryptor {
    key: LessSafeKey,
    header: [u8; HEADER],
    /// True after the header was written.
    begun: bool,
    /// The number of the next chunk.
    next: u64,
    /// The content of the next chunk.
    filling: Vec<u8>,
}

impl Encryptor {
    /// Starts an encrypted stream with a new salt.
    ///
    /// # Errors
    /// Fails if the operating system returns no random bytes.
    pub fn new(key: &Key) -> Result<Self, Error> {
        let mut salt = [0; SALT];
        aws_lc_rs::rand::fill(&mut salt)?;
        Self::with_salt(key, salt)
    }

    fn with_salt(key: &Key, salt: [u8; SALT]) -> Result<Self, Error> {
        let mut header = [0; HEADER];
        let (magic, rest) = header.split_at_mut(MAGIC.len());
        let (id, stored_salt) = rest.split_at_mut(KeyId::LENGTH);
        magic.copy_from_slice(&MAGIC);
        id.copy_from_slice(key.id().as_bytes());
        stored_salt.copy_from_slice(&salt);
        Ok(Self {
            key: content_key(key, &salt)?,
            header,
            begun: false,
            next: 0,
            filling: Vec::with_capacity(CHUNK),
        })
    }

    /// Encrypts the next bytes, and appends the result to `out`.
    ///
    /// # Errors
    /// Fails if the cryptographic library fails.
    pub fn push(&mut self, mut content: &[u8], out: &mut Vec<u8>) -> Result<(), Error> {
        while !content.is_empty() {
            // The last chunk of an object has a different nonce. A full chunk is therefore encrypted only when more
            // bytes follow, because only then it is known not to be the last chunk.
            if self.filling.len() == CHUNK {
                self.seal(false, out)?;
            }
            let room = CHUNK - self.filling.len();
            let (now, rest) = content.split_at(room.min(content.len()));
            self.filling.extend_from_slice(now);
            content = rest;
        }
        Ok(())
    }

    /// Ends the stream, and appends its last chunk to `out`.
    ///
    /// # Errors
    /// Fails if the cryptographic library fails.
    pub fn finish(mut self, out: &mut Vec<u8>) -> Result<(), Error> {
        self.seal(true, out)
    }

    fn seal(&mut self, last: bool, out: &mut Vec<u8>) -> Result<(), Error> {
        if !self.begun {
            out.extend_from_slice(&self.header);
            self.begun = true;
        }
        let nonce = nonce(self.next, last);
        let header = Aad::from(self.header);
        let tag = self
            .key
            .seal_in_place_separate_tag(nonce, header, &mut self.filling)?;
        out.extend_from_slice(&self.filling);
        out.extend_from_slice(tag.as_ref());
        self.filling.clear();
        self.next += 1;
        Ok(())
    }
}

/// Decrypts a stream.
pub struct Decryptor {
    keys: Keys,
    /// `None` until the header is complete.
    object: Option<Opened>,
    /// Received bytes: first of the header, then of the next chunk and its tag.
    filling: Vec<u8>,
}

/// An object whose header was read.
struct Opened {
    key: LessSafeKey,
    id: KeyId,
    header: [u8; HEADER],
    next: u64,
}

impl Decryptor {
    /// Starts the decryption of a stream. The header of the stream names the key.
    pub fn new(keys: Keys) -> Self {
        Self {
            keys,
            object: None,
            filling: Vec::with_capacity(CHUNK + TAG),
        }
    }

    /// Decrypts the next bytes, and appends the verified content to `out`.
    ///
    /// # Errors
    /// Fails if the object is not encrypted, if its key is missing, or if a chunk is damaged.
    pub fn push(&mut self, mut stored: &[u8], out: &mut Vec<u8>) -> Result<(), Error> {
        while !stored.is_empty() {
            let full = if self.object.is_some() {
                CHUNK + TAG
            } else {
                HEADER
            };
            // The last chunk of an object has a different nonce. A full chunk is therefore decrypted only when more
            // bytes follow, because only then it is known not to be the last chunk.
            if self.filling.len() == full {
                self.open(false, out)?;
            }
            let room = full - self.filling.len();
            let (now, rest) = stored.split_at(room.min(stored.len()));
            self.filling.extend_from_slice(now);
            stored = rest;
            if self.object.is_none() && self.filling.len() == HEADER {
                self.read_header()?;
            }
        }
        Ok(())
    }

    /// Ends the decryption, and appends the content of the last chunk to `out`.
    ///
    /// # Errors
    /// Fails if the object is truncated, or if its last chunk is damaged.
    pub fn finish(mut self, out: &mut Vec<u8>) -> Result<(), Error> {
        if self.object.is_none() {
            return Err(Error::Truncated);
        }
        self.open(true, out)
    }

    fn read_header(&mut self) -> Result<(), Error> {
        let mut header = [0; HEADER];
        header.copy_from_slice(&self.filling);
        self.filling.clear();
        let (magic, rest) = header.split_at(MAGIC.len());
        let (id, salt) = rest.split_at(KeyId::LENGTH);
        if !is_encrypted(magic) {
            return Err(Error::NotEncrypted);
        }
        let id = KeyId::of_bytes(id);
        let key = self.keys.find(id).ok_or_else(|| Error::UnknownKey {
            id,
            keys: self.keys.describe(),
        })?;
        self.object = Some(Opened {
            key: content_key(key, salt)?,
            id,
            header,
            next: 0,
        });
        Ok(())
    }

    fn open(&mut self, last: bool, out: &mut Vec<u8>) -> Result<(), Error> {
        let Some(object) = &mut self.object else {
            return Err(Error::Truncated);
        };
        let damaged = Error::Damaged {
            chunk: object.next,
            id: object.id,
        };
        if self.filling.len() < TAG {
            return Err(damaged);
        }
        let nonce = nonce(object.next, last);
        let header = Aad::from(object.header);
        let content = object.key.open_in_place(nonce, header, &mut self.filling);
        let content = content.map_err(|_| damaged.clone())?;
        // An empty chunk is valid only in an empty object, because `Encryptor` writes an empty chunk for no other
        // object.
        if content.is_empty() && object.next > 0 {
            return Err(damaged);
        }
        out.extend_from_slice(content);
        self.filling.clear();
        object.next += 1;
        Ok(())
    }
}

#[cfg(test)]
mod tests;
