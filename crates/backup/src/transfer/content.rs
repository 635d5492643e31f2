//! Compares a stored backup with its manifest by reading the whole object. This is needed for stores without tags,
//! because these do not show that an object was overwritten.

use std::io;

use api::manifest::BackupManifest;
use futures::StreamExt;
use sha2::{Digest, Sha256};
use store::compression::{Decompressor, ZSTD};
use store::{ObjectStream, Store};

use super::{in_store, manifest_of};
use crate::reason::Trouble;

/// True if the object has the size and the SHA-256 of its manifest. An encrypted object is not decrypted: its manifest
/// contains the SHA-256 of the encrypted data.
pub(super) async fn matches_manifest(
    store: &dyn Store,
    key: &str,
    manifest: &BackupManifest,
) -> Result<bool, Trouble> {
    let object = match store.get(key).await {
        Err(store::Error::NoSuchObject { .. }) => return Ok(false),
        object => object.map_err(|error| in_store(&error))?,
    };
    let (size, sha256) = match &manifest.stored_sha256 {
        Some(stored) => (manifest.stored_size.unwrap_or_default(), stored),
        None => (manifest.size, &manifest.sha256),
    };
    let compressed = manifest.compression == ZSTD && manifest.stored_sha256.is_none();
    let read = read(object, compressed)
        .await
        .map_err(|error| in_store(&error))?;
    Ok(read.is_some_and(|found| {
        i64::try_from(found.0) == Ok(size) && found.1.eq_ignore_ascii_case(sha256)
    }))
}

/// Like [`matches_manifest`], but also requires that the stored manifest is unchanged after the read, because another
/// writer may replace both during the read.
pub(super) async fn matches_unchanged_manifest(
    store: &dyn Store,
    key: &str,
    manifest: &BackupManifest,
) -> Result<bool, Trouble> {
    Ok(matches_manifest(store, key, manifest).await?
        && manifest_of(store, key).await?.as_ref() == Some(manifest))
}

/// Size and SHA-256 of the object, after decompression if `compressed`. `None` if the decompression fails.
async fn read(
    mut object: ObjectStream,
    compressed: bool,
) -> Result<Option<(u64, String)>, store::Error> {
    let Ok(mut decompressor) = compressed.then(Decompressor::new).transpose() else {
        return Ok(None);
    };
    let (mut digest, mut size) = (Sha256::new(), 0);
    while let Some(chunk) = object.chunks.next().await {
        let chunk = chunk?;
        let mut consume = |piece: &[u8]| {
            size += piece.len() as u64;
            digest.update(piece);
        };
        match &mut decompressor {
            None => consume(&chunk),
            Some(decompressor) => {
                if decompress(decompressor, &chunk, consume).is_err() {
                    return Ok(None);
                }
            }
        }
    }
    let is_complete = decompressor.map_or(Ok(()), Decompressor::finish).is_ok();
    Ok(is_complete.then(|| (size, hex::encode(digest.finalize()))))
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
