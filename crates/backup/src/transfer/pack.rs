//! Compresses and encrypts a snapshot. Compression is first, because encrypted data cannot be compressed. Performs no
//! I/O.

use api::backup::{Encryption, EncryptionKey};
use api::manifest::ManifestEncryption;
use bytes::Bytes;
use sha2::{Digest, Sha256};
use store::SecretData;
use store::compression::Compressor;
use store::encryption::{Encryptor, FORMAT, Key, for_new_backups};

use super::failure::{in_compression, in_encryption};
use crate::reason::{Reason, Trouble};

/// Compresses and encrypts a snapshot in constant memory.
pub(super) struct Packer {
    compressor: Option<Compressor>,
    encryption: Option<(Encryptor, Sha256)>,
    size: u64,
}

/// The object that a transfer has written.
pub(super) struct Packed {
    /// Size of the object in bytes.
    pub(super) size: u64,
    /// SHA-256 of the encrypted object in hexadecimal. `None` without encryption.
    pub(super) sha256: Option<String>,
}

impl Packer {
    pub(super) fn new(compress: bool, key: Option<&Key>) -> Result<Self, Trouble> {
        let compressor = compress.then(Compressor::new).transpose();
        let encryptor = key.map(Encryptor::new).transpose();
        let encryptor = encryptor.map_err(|error| in_encryption(&error))?;
        Ok(Self {
            compressor: compressor.map_err(|error| in_compression(&error))?,
            encryption: encryptor.map(|encryptor| (encryptor, Sha256::new())),
            size: 0,
        })
    }

    /// Adds the next bytes of the snapshot. Returns the next bytes of the object, which may be empty.
    pub(super) fn push(&mut self, chunk: Bytes) -> Result<Bytes, Trouble> {
        let chunk = match &mut self.compressor {
            None => chunk,
            Some(compressor) => {
                let mut compressed = Vec::new();
                compressor
                    .push(&chunk, |piece| compressed.extend_from_slice(piece))
                    .map_err(|error| in_compression(&error))?;
                compressed.into()
            }
        };
        let chunk = match &mut self.encryption {
            None => chunk,
            Some((encryptor, digest)) => {
                let mut encrypted = Vec::new();
                encryptor
                    .push(&chunk, &mut encrypted)
                    .map_err(|error| in_encryption(&error))?;
                digest.update(&encrypted);
                encrypted.into()
            }
        };
        self.size += chunk.len() as u64;
        Ok(chunk)
    }

    /// The last bytes of the object, and its size.
    pub(super) fn finish(mut self) -> Result<(Bytes, Packed), Trouble> {
        let mut rest = Vec::new();
        if let Some(compressor) = self.compressor {
            compressor
                .finish(|piece| rest.extend_from_slice(piece))
                .map_err(|error| in_compression(&error))?;
        }
        let mut sha256 = None;
        if let Some((mut encryptor, mut digest)) = self.encryption {
            let mut encrypted = Vec::new();
            let ended = encryptor
                .push(&rest, &mut encrypted)
                .and_then(|()| encryptor.finish(&mut encrypted));
            ended.map_err(|error| in_encryption(&error))?;
            digest.update(&encrypted);
            sha256 = Some(hex::encode(digest.finalize()));
            rest = encrypted;
        }
        self.size += rest.len() as u64;
        let packed = Packed {
            size: self.size,
            sha256,
        };
        Ok((rest.into(), packed))
    }
}

/// The key that encrypts new backups. `data` is the content of the Secret.
pub(crate) fn encryption_key(encryption: &Encryption, data: &SecretData) -> Result<Key, Trouble> {
    for_new_backups(data, encryption.key.as_deref()).map_err(|error| {
        let secret = &encryption.secret;
        let message = format!("spec.encryption.secret: Secret {secret} {error}");
        Trouble::new(Reason::SecretMissing, message)
    })
}

/// The encryption, as the manifest describes it.
pub(super) fn described(key: &Key) -> ManifestEncryption {
    ManifestEncryption {
        format: FORMAT.to_owned(),
        key: EncryptionKey {
            name: key.name().to_owned(),
            id: key.id().to_string(),
        },
    }
}
