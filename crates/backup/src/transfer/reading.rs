//! Whether a stored backup is the one its manifest describes, by reading all of it: for stores that do not tell one
//! writing of a key from another.

use std::io;

use api::manifest::BackupManifest;
use futures::StreamExt;
use sha2::{Digest, Sha256};
use store::compression::{Decompressor, ZSTD};
use store::{ObjectStream, Store};

use super::{in_store, manifest_of};
use crate::reason::Trouble;

/// Whether what lies under the key is what the manifest says. Nothing there is not.
pub(super) async fn is_described(
    store: &dyn Store,
    key: &str,
    manifest: &BackupManifest,
) -> Result<bool, Trouble> {
    let object = match store.get(key).await {
        Err(store::Error::NoSuchObject { .. }) => return Ok(false),
        object => object.map_err(|error| in_store(&error))?,
    };
    let compressed = manifest.compression == ZSTD;
    let read = read(object, compressed)
        .await
        .map_err(|error| in_store(&error))?;
    Ok(read.is_some_and(|(size, sha256)| {
        i64::try_from(size) == Ok(manifest.size) && sha256.eq_ignore_ascii_case(&manifest.sha256)
    }))
}

/// The same, and that the manifest lies beside it when it was read. Who writes to the same path takes the place of what is
/// being read, unseen by whoever reads it.
pub(super) async fn is_described_still(
    store: &dyn Store,
    key: &str,
    manifest: &BackupManifest,
) -> Result<bool, Trouble> {
    Ok(is_described(store, key, manifest).await?
        && manifest_of(store, key).await?.as_ref() == Some(manifest))
}

/// Size and SHA-256 of the snapshot; `None` where it is no whole one.
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
        let mut take = |piece: &[u8]| {
            size += piece.len() as u64;
            digest.update(piece);
        };
        match &mut decompressor {
            None => take(&chunk),
            Some(decompressor) => {
                if decompress(decompressor, &chunk, take).is_err() {
                    return Ok(None);
                }
            }
        }
    }
    let whole = decompressor.map_or(Ok(()), Decompressor::finish).is_ok();
    Ok(whole.then(|| (size, hex::encode(digest.finalize()))))
}

fn decompress(
    decompressor: &mut Decompressor,
    mut chunk: &[u8],
    mut take: impl FnMut(&[u8]),
) -> io::Result<()> {
    while let Some(piece) = decompressor.next(&mut chunk)? {
        take(piece);
    }
    Ok(())
}
