//! Decrypts and decompresses the content of a stored backup, in constant memory. The object's first bytes show whether
//! it is encrypted and compressed. The manifest is not used for this decision, because another writer may have changed
//! or deleted the manifest.

use std::io;

use bytes::{Buf, Bytes, BytesMut};

use crate::compression::{self, Decompressor, is_zstd};
use crate::encryption::{self, Decryptor, Keys, is_encrypted};

/// Why the content of an object cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The object cannot be decrypted.
    #[error(transparent)]
    Encryption(#[from] encryption::Error),
    /// The object cannot be decompressed.
    #[error("the object cannot be decompressed")]
    Compression(#[from] io::Error),
}

/// Reads the content of a stored backup.
///
/// The caller calls [`piece`](Self::piece) until it returns `None`, after each [`push`](Self::push) and after
/// [`end`](Self::end). The content is complete only after [`finish`](Self::finish) has succeeded.
pub struct Unpacker {
    decryption: Decryption,
    expansion: Expansion,
    /// Decrypted bytes that [`Unpacker::piece`] has not processed yet.
    decrypted: Bytes,
}

enum Decryption {
    /// Too few bytes of the object have arrived to recognize encryption.
    Unknown {
        keys: Option<Keys>,
        first: BytesMut,
    },
    No,
    Yes(Box<Decryptor>),
}

enum Expansion {
    /// Too few bytes of the decrypted content are known to recognize compression.
    Unknown(BytesMut),
    No,
    Yes(Box<Decompressor>),
}

impl Unpacker {
    /// Starts to read an object. With `keys`, the object must be encrypted with one of these keys. Without `keys`, the
    /// object must not be encrypted.
    pub fn new(keys: Option<Keys>) -> Self {
        Self {
            decryption: Decryption::Unknown {
                keys,
                first: BytesMut::new(),
            },
            expansion: Expansion::Unknown(BytesMut::new()),
            decrypted: Bytes::new(),
        }
    }

    /// Starts to read an object as [`new`](Self::new) does, but never decompresses its content.
    pub fn without_decompression(keys: Option<Keys>) -> Self {
        Self {
            expansion: Expansion::No,
            ..Self::new(keys)
        }
    }

    /// Adds the next bytes of the object.
    ///
    /// # Errors
    /// Fails if the object is damaged, if its encryption key was not given, or if it is not encrypted although keys
    /// were given.
    pub fn push(&mut self, stored: Bytes) -> Result<(), Error> {
        match &mut self.decryption {
            Decryption::Unknown { first, .. } => {
                first.extend_from_slice(&stored);
                if first.len() >= encryption::BEGINNING {
                    self.begin()?;
                }
                Ok(())
            }
            Decryption::No => self.add(stored),
            Decryption::Yes(decryptor) => {
                let mut decrypted = Vec::new();
                decryptor.push(&stored, &mut decrypted)?;
                self.add(decrypted.into())
            }
        }
    }

    /// Returns the next piece of the content. `None` if more bytes of the object are needed.
    ///
    /// # Errors
    /// Fails if the object cannot be decompressed.
    pub fn piece(&mut self) -> Result<Option<Bytes>, Error> {
        match &mut self.expansion {
            Expansion::Unknown(_) => Ok(None),
            Expansion::No => {
                let piece = std::mem::take(&mut self.decrypted);
                Ok(Some(piece).filter(|piece| !piece.is_empty()))
            }
            Expansion::Yes(decompressor) => {
                let mut rest: &[u8] = &self.decrypted;
                let piece = decompressor.next(&mut rest)?;
                let piece = piece.map(Bytes::copy_from_slice);
                let read = self.decrypted.len() - rest.len();
                self.decrypted.advance(read);
                Ok(piece)
            }
        }
    }

    /// Marks the end of the object.
    ///
    /// # Errors
    /// Fails if the object is truncated or damaged, or if it is not encrypted although keys were given.
    pub fn end(&mut self) -> Result<(), Error> {
        self.begin()?;
        let decryption = std::mem::replace(&mut self.decryption, Decryption::No);
        if let Decryption::Yes(decryptor) = decryption {
            let mut decrypted = Vec::new();
            decryptor.finish(&mut decrypted)?;
            self.add(decrypted.into())?;
        }
        self.expand()
    }

    /// Checks that the content is complete. The caller must have called [`end`](Self::end) and taken all pieces.
    ///
    /// # Errors
    /// Fails if the compressed content is truncated.
    pub fn finish(self) -> Result<(), Error> {
        match self.expansion {
            Expansion::Yes(decompressor) => Ok(decompressor.finish()?),
            Expansion::Unknown(_) | Expansion::No => Ok(()),
        }
    }

    /// Detects whether the object is encrypted, and processes its first bytes.
    fn begin(&mut self) -> Result<(), Error> {
        let Decryption::Unknown { keys, first } = &mut self.decryption else {
            return Ok(());
        };
        let first = std::mem::take(first).freeze();
        self.decryption = match (is_encrypted(&first), keys.take()) {
            (true, keys) => Decryption::Yes(Box::new(Decryptor::new(keys.unwrap_or_default()))),
            (false, Some(_)) => return Err(encryption::Error::NotEncrypted.into()),
            (false, None) => Decryption::No,
        };
        self.push(first)
    }

    fn add(&mut self, decrypted: Bytes) -> Result<(), Error> {
        let Expansion::Unknown(first) = &mut self.expansion else {
            self.decrypted = decrypted;
            return Ok(());
        };
        first.extend_from_slice(&decrypted);
        if first.len() >= compression::BEGINNING {
            self.expand()?;
        }
        Ok(())
    }

    /// Detects whether the content is compressed.
    fn expand(&mut self) -> Result<(), Error> {
        if let Expansion::Unknown(first) = &mut self.expansion {
            self.decrypted = std::mem::take(first).freeze();
            self.expansion = if is_zstd(&self.decrypted) {
                Expansion::Yes(Box::new(Decompressor::new()?))
            } else {
                Expansion::No
            };
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compression::Compressor;
    use crate::encryption::{Encryptor, Key};
    use crate::testing::content;

    fn key(letter: char) -> Key {
        let text = String::from(letter).repeat(42) + "A=";
        Key::parse(&letter.to_string(), text.as_bytes()).unwrap()
    }

    fn keys(letter: char) -> Keys {
        let mut keys = Keys::default();
        keys.add(key(letter));
        keys
    }

    fn packed(content: &[u8], compress: bool, encrypt: Option<&Key>) -> Vec<u8> {
        let mut stored = content.to_vec();
        if compress {
            stored.clear();
            let mut compressor = Compressor::new().unwrap();
            compressor
                .push(content, |piece| stored.extend_from_slice(piece))
                .unwrap();
            compressor
                .finish(|piece| stored.extend_from_slice(piece))
                .unwrap();
        }
        let Some(key) = encrypt else { return stored };
        let mut encrypted = Vec::new();
        let mut encryptor = Encryptor::new(key).unwrap();
        encryptor.push(&stored, &mut encrypted).unwrap();
        encryptor.finish(&mut encrypted).unwrap();
        encrypted
    }

    fn unpacked(stored: &[u8], length: usize, keys: Option<Keys>) -> Result<Vec<u8>, Error> {
        unpacked_with(Unpacker::new(keys), stored, length)
    }

    fn unpacked_with(
        mut unpacker: Unpacker,
        stored: &[u8],
        length: usize,
    ) -> Result<Vec<u8>, Error> {
        let mut out = Vec::new();
        for chunk in stored.chunks(length) {
            unpacker.push(Bytes::copy_from_slice(chunk))?;
            while let Some(piece) = unpacker.piece()? {
                out.extend_from_slice(&piece);
            }
        }
        unpacker.end()?;
        while let Some(piece) = unpacker.piece()? {
            out.extend_from_slice(&piece);
        }
        unpacker.finish()?;
        Ok(out)
    }

    /// The content is the same for every split of the stream into chunks, even for a split within the first bytes.
    #[test]
    fn content_round_trips_with_any_compression_encryption_and_chunk_size() {
        for size in [0, 1, 3, 4, 7, 8, 60, 1000, 300_000] {
            let content = content(size);
            for (compress, encrypt) in [(false, false), (true, false), (false, true), (true, true)]
            {
                let stored = packed(&content, compress, encrypt.then(|| key('a')).as_ref());
                for length in [1, 3, 8, 48, 1000, 1 << 20] {
                    let found = unpacked(&stored, length, encrypt.then(|| keys('a'))).unwrap();
                    assert!(found == content, "{size} {compress} {encrypt} {length}");
                }
            }
        }
    }

    #[test]
    fn unpacker_without_decompression_returns_compressed_content() {
        for size in [0, 3, 1000, 300_000] {
            let compressed = packed(&content(size), true, None);
            for encrypt in [false, true] {
                let stored = packed(&compressed, false, encrypt.then(|| key('a')).as_ref());
                for length in [1, 8, 1000, 1 << 20] {
                    let unpacker = Unpacker::without_decompression(encrypt.then(|| keys('a')));
                    let found = unpacked_with(unpacker, &stored, length).unwrap();
                    assert!(found == compressed, "{size} {encrypt} {length}");
                }
            }
        }
        let found = unpacked_with(Unpacker::without_decompression(None), b"abc", 2).unwrap();
        assert_eq!(found, b"abc");
    }

    /// A writer to the bucket must not be able to replace an encrypted backup with an unencrypted object.
    #[test]
    fn unencrypted_object_is_refused_if_decryption_keys_are_given() {
        for size in [0, 3, 8, 1000] {
            for compress in [false, true] {
                let stored = packed(&content(size), compress, None);
                let error = unpacked(&stored, 100, Some(keys('a'))).unwrap_err();
                assert!(
                    matches!(error, Error::Encryption(encryption::Error::NotEncrypted)),
                    "{error:?}"
                );
            }
        }
    }

    #[test]
    fn error_of_missing_decryption_key_contains_key_id() {
        let stored = packed(b"content", true, Some(&key('a')));
        let id = key('a').id().to_string();
        for given in [None, Some(Keys::default()), Some(keys('b'))] {
            let error = unpacked(&stored, 100, given).unwrap_err().to_string();
            assert!(error.contains(&id), "{error}");
        }
    }

    #[test]
    fn truncated_compressed_or_encrypted_object_is_rejected() {
        let content = content(200_000);
        for (compress, encrypt) in [(true, false), (false, true), (true, true)] {
            let stored = packed(&content, compress, encrypt.then(|| key('a')).as_ref());
            for left in [stored.len() - 1, stored.len() / 2, 100] {
                let keys = encrypt.then(|| keys('a'));
                assert!(unpacked(&stored[..left], 4096, keys).is_err(), "{left}");
            }
        }
    }
}
