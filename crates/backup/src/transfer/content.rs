//! Compares the content of a stored backup with its manifest. Copies need this comparison. A store without ETags also
//! needs it, because such a store does not show that an object was overwritten.

use std::io;

use api::manifest::BackupManifest;
use futures::StreamExt;
use sha2::{Digest, Sha256};
use store::Store;
use store::compression::{Decompressor, ZSTD};

use super::{in_store, manifest_of};
use crate::reason::Trouble;

/// Compares the content of an object with the size and the SHA-256 of its manifest, in constant memory. An encrypted
/// object is not decrypted: its manifest contains the SHA-256 of the encrypted data.
pub(super) struct Comparison {
    decompressor: Option<Decompressor>,
    digest: Sha256,
    size: u64,
    /// The size and the SHA-256 in the manifest.
    expected: (i64, String),
    /// True if the object cannot be decompressed.
    damaged: bool,
}

impl Comparison {
    pub(super) fn new(manifest: &BackupManifest) -> Self {
        let compressed = manifest.compression == ZSTD && manifest.stored_sha256.is_none();
        let decompressor = compressed.then(Decompressor::new).transpose();
        Self {
            damaged: decompressor.is_err(),
            decompressor: decompressor.ok().flatten(),
            digest: Sha256::new(),
            size: 0,
            expected: match &manifest.stored_sha256 {
                Some(stored) => (manifest.stored_size.unwrap_or_default(), stored.clone()),
                None => (manifest.size, manifest.sha256.clone()),
            },
        }
    }

    /// Adds the next bytes of the object.
    pub(super) fn push(&mut self, chunk: &[u8]) {
        let (digest, size) = (&mut self.digest, &mut self.size);
        let mut consume = |piece: &[u8]| {
            *size += piece.len() as u64;
            digest.update(piece);
        };
        match &mut self.decompressor {
            _ if self.damaged => {}
            None => consume(chunk),
            Some(decompressor) => {
                self.damaged = decompress(decompressor, chunk, consume).is_err();
            }
        }
    }

    /// True if the object is complete and matches the manifest.
    pub(super) fn matches(self) -> bool {
        let is_complete = self
            .decompressor
            .map_or(Ok(()), Decompressor::finish)
            .is_ok();
        let (size, sha256) = self.expected;
        !self.damaged
            && is_complete
            && i64::try_from(self.size) == Ok(size)
            && hex::encode(self.digest.finalize()).eq_ignore_ascii_case(&sha256)
    }
}

/// True if the object matches its manifest. False if the object is missing.
pub(super) async fn matches_manifest(
    store: &dyn Store,
    key: &str,
    manifest: &BackupManifest,
) -> Result<bool, Trouble> {
    let mut object = match store.get(key).await {
        Err(store::Error::NoSuchObject { .. }) => return Ok(false),
        object => object.map_err(|error| in_store(&error))?,
    };
    let mut comparison = Comparison::new(manifest);
    while let Some(chunk) = object.chunks.next().await {
        comparison.push(&chunk.map_err(|error| in_store(&error))?);
        if comparison.damaged {
            return Ok(false);
        }
    }
    Ok(comparison.matches())
}

/// Like [`matches_manifest`], but the stored manifest must be the same after the read. Another writer may replace the
/// object and the manifest during the read.
pub(super) async fn matches_unchanged_manifest(
    store: &dyn Store,
    key: &str,
    manifest: &BackupManifest,
) -> Result<bool, Trouble> {
    Ok(matches_manifest(store, key, manifest).await?
        && manifest_of(store, key).await?.as_ref() == Some(manifest))
}

fn decompress(
    decompressor: &mut Decompressor,
    mut chunk: &[u8],
    mut consume: impl FnMut(&[u8]),
) -> io::Result<()> {
    while let Some(piece) = decompressor.next(&mut chunk)? {
        consume(piece);
    }
    Ok(())
}
