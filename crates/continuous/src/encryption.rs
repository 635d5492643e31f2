//! Encrypts the snapshots and the segments of a continuous backup, with the format of encrypted backups
//! (docs/internals/backup-encryption.md).
//!
//! Names of objects, recorded sizes and recorded SHA-256 describe the content before the encryption. The other modules
//! therefore do not depend on the encryption. The objects that describe bases are not encrypted, so retention needs no
//! old keys.

use async_trait::async_trait;
use bytes::Bytes;
use futures::StreamExt;
use futures::stream::{self, BoxStream};
use store::encryption::{Encryptor, FORMAT, Key, Keys};
use store::unpack::{self, Unpacker};
use store::{Committed, Error, Object, ObjectStream, Store, Unfinished, Upload};

use crate::base::{BaseEncryption, BaseKey};
use crate::name::has_content;

/// A store whose snapshots and segments are encrypted.
pub struct EncryptedStore<'a> {
    inner: &'a dyn Store,
    /// The key for new objects. `None` if the store is only read.
    key: Option<Key>,
    /// The keys of the stored objects. With `None`, a read of an encrypted object fails.
    keys: Option<Keys>,
}

impl<'a> EncryptedStore<'a> {
    /// Encrypts new snapshots and segments with `key`. Reads a snapshot or segment only if it is encrypted with one of
    /// `keys`.
    pub fn new(inner: &'a dyn Store, key: Key, keys: Keys) -> Self {
        Self {
            inner,
            key: Some(key),
            keys: Some(keys),
        }
    }

    /// Reads objects, and refuses to write snapshots and segments. With `keys`, a read fails unless the snapshot or
    /// segment is encrypted with one of these keys. Without keys, a read of an encrypted object fails, and the error
    /// contains the ID of its key.
    pub fn for_reading(inner: &'a dyn Store, keys: Option<Keys>) -> Self {
        Self {
            inner,
            key: None,
            keys,
        }
    }

    /// The encryptor for a new object with this key. `None` for a base, which is not encrypted.
    fn encryptor(&self, key: &str) -> Result<Option<Encryptor>, Error> {
        if !has_content(key) {
            return Ok(None);
        }
        match &self.key {
            Some(key) => Ok(Some(Encryptor::new(key)?)),
            None => Err(Error::Other(format!(
                "{key} cannot be written without a key"
            ))),
        }
    }
}

/// The description of the encryption with this key, for a new base.
pub fn described(key: &Key) -> BaseEncryption {
    BaseEncryption {
        format: FORMAT.to_owned(),
        key: BaseKey {
            name: key.name().to_owned(),
            id: key.id().to_string(),
        },
    }
}

#[async_trait]
impl Store for EncryptedStore<'_> {
    fn location(&self) -> String {
        self.inner.location()
    }

    fn endpoint(&self) -> String {
        self.inner.endpoint()
    }

    async fn begin(&self, key: &str) -> Result<Box<dyn Upload>, Error> {
        let encryptor = self.encryptor(key)?;
        let inner = self.inner.begin(key).await?;
        let upload: Box<dyn Upload> = match encryptor {
            Some(encryptor) => Box::new(EncryptedUpload { inner, encryptor }),
            None => inner,
        };
        Ok(upload)
    }

    async fn put(&self, key: &str, content: Bytes) -> Result<(), Error> {
        let Some(mut encryptor) = self.encryptor(key)? else {
            return self.inner.put(key, content).await;
        };
        let mut stored = Vec::new();
        encryptor.push(&content, &mut stored)?;
        encryptor.finish(&mut stored)?;
        self.inner.put(key, stored.into()).await
    }

    /// Opens an object for reading. `size` in the result is the size before the decryption.
    async fn get(&self, key: &str) -> Result<ObjectStream, Error> {
        let stored = self.inner.get(key).await?;
        if !has_content(key) {
            return Ok(stored);
        }
        Ok(ObjectStream {
            size: stored.size,
            chunks: decrypted(stored.chunks, self.keys.clone()),
        })
    }

    async fn head(&self, key: &str) -> Result<Option<Object>, Error> {
        self.inner.head(key).await
    }

    async fn list(&self, prefix: &str) -> Result<Vec<Object>, Error> {
        self.inner.list(prefix).await
    }

    async fn delete(&self, key: &str) -> Result<(), Error> {
        self.inner.delete(key).await
    }

    async fn unfinished(&self, prefix: &str) -> Result<Vec<Unfinished>, Error> {
        self.inner.unfinished(prefix).await
    }

    async fn discard(&self, unfinished: &Unfinished) -> Result<(), Error> {
        self.inner.discard(unfinished).await
    }
}

/// An upload of an encrypted object.
struct EncryptedUpload {
    inner: Box<dyn Upload>,
    encryptor: Encryptor,
}

#[async_trait]
impl Upload for EncryptedUpload {
    async fn write(&mut self, chunk: Bytes) -> Result<(), Error> {
        let mut stored = Vec::new();
        self.encryptor.push(&chunk, &mut stored)?;
        if stored.is_empty() {
            return Ok(());
        }
        self.inner.write(stored.into()).await
    }

    async fn commit(self: Box<Self>) -> Result<Committed, Error> {
        let Self {
            mut inner,
            encryptor,
        } = *self;
        let mut stored = Vec::new();
        let ended = encryptor.finish(&mut stored);
        let written = match ended {
            Ok(()) => inner.write(stored.into()).await,
            Err(error) => Err(error.into()),
        };
        if let Err(error) = written {
            // The caller gets `error`, even if `abort` fails too. The upload then stays unfinished, and is no object.
            let _ = inner.abort().await;
            return Err(error);
        }
        inner.commit().await
    }

    async fn abort(self: Box<Self>) -> Result<(), Error> {
        self.inner.abort().await
    }
}

/// Decrypts the chunks of one object.
struct Reading {
    chunks: BoxStream<'static, Result<Bytes, Error>>,
    unpacker: Unpacker,
    has_ended: bool,
}

/// The content of a stored object, in constant memory.
///
/// A tenant can forge an object that is compressed with a window of 128 MiB (invariant 15). The recorder compresses no
/// objects as a whole, so this function decompresses nothing.
fn decrypted(
    chunks: BoxStream<'static, Result<Bytes, Error>>,
    keys: Option<Keys>,
) -> BoxStream<'static, Result<Bytes, Error>> {
    let reading = Reading {
        chunks,
        unpacker: Unpacker::without_decompression(keys),
        has_ended: false,
    };
    stream::try_unfold(reading, |mut reading| async move {
        let piece = reading.next().await?;
        Ok(piece.map(|piece| (piece, reading)))
    })
    .boxed()
}

impl Reading {
    async fn next(&mut self) -> Result<Option<Bytes>, Error> {
        loop {
            if let Some(piece) = self.unpacker.piece().map_err(in_content)? {
                return Ok(Some(piece));
            }
            if self.has_ended {
                return Ok(None);
            }
            if let Some(chunk) = self.chunks.next().await {
                self.unpacker.push(chunk?).map_err(in_content)?;
            } else {
                self.has_ended = true;
                self.unpacker.end().map_err(in_content)?;
            }
        }
    }
}

fn in_content(error: unpack::Error) -> Error {
    match error {
        unpack::Error::Encryption(error) => error.into(),
        unpack::Error::Compression(error) => Error::Other(error.to_string()),
    }
}

#[cfg(test)]
mod tests;
