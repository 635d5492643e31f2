//! Copies a base and its segments up to a revision, and verifies them, so that a replay needs no access to the store.

use std::io;
use std::pin::pin;

use bytes::Bytes;
use futures::{StreamExt, stream};
use store::Store;

use crate::chain::RangeError;
use crate::name::BaseName;
use crate::stored::{MAX_OBJECT, ReadError, SizedChain, base_key, read, read_base, segment_key};
use crate::verify::Verifier;

/// Number of segments that are read concurrently. Most segments have at most 8 MiB.
const CONCURRENT: usize = 4;

/// One copied object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CopiedPart {
    /// The key of the object without the prefix of the source.
    pub key: String,
    /// The content.
    pub content: Bytes,
    /// Number of bytes of all segments that are copied so far.
    pub bytes: u64,
    /// Number of bytes of all segments that the whole copy contains.
    pub total: u64,
}

/// Why a chain was not copied completely.
#[derive(Debug, thiserror::Error)]
pub enum CopyError {
    /// The chain cannot be read, or an object of the chain is damaged.
    #[error(transparent)]
    Read(#[from] ReadError),
    /// The chain does not contain the revision.
    #[error(transparent)]
    Range(#[from] RangeError),
    /// The caller could not write the object with this key.
    #[error("{key} cannot be written")]
    Write {
        /// The key of the object without the prefix of the source.
        key: String,
        /// The error of the caller.
        #[source]
        error: io::Error,
    },
}

/// Reads and verifies the base and all segments that a replay up to `revision` needs. Calls `write` for each object, in
/// the order of the chain. The snapshot of the base is not copied. `prefix` is empty or ends with a slash.
///
/// # Errors
/// Fails if the store or `write` fails, if an object is missing or damaged, or if the chain does not contain the
/// revision.
pub async fn copy_chain(
    store: &dyn Store,
    prefix: &str,
    name: BaseName,
    revision: i64,
    mut write: impl FnMut(&CopiedPart) -> io::Result<()>,
) -> Result<(), CopyError> {
    let mut write = |part: CopiedPart| {
        let written = write(&part);
        written.map_err(|error| CopyError::Write {
            key: part.key,
            error,
        })
    };
    let base = read_base(store, prefix, name).await?;
    let listed = SizedChain::list(store, prefix, name).await?;
    listed.chain.check(name, revision)?;
    let needed = listed.needed(revision);
    let total = listed.bytes(&needed);
    write(CopiedPart {
        key: base_key("", name),
        content: base.object.clone(),
        bytes: 0,
        total,
    })?;
    let mut verifier = Verifier::new(&base);
    let mut bytes = 0;
    let reads = needed.into_iter().map(|segment| async move {
        let key = segment_key(prefix, name, segment);
        (segment, read(store, &key, MAX_OBJECT).await)
    });
    let mut objects = pin!(stream::iter(reads).buffered(CONCURRENT));
    while let Some((segment, object)) = objects.next().await {
        let content = object?;
        verifier.check(segment, &content).map_err(ReadError::from)?;
        bytes += listed.bytes(&[segment]);
        write(CopiedPart {
            key: segment_key("", name, segment),
            content,
            bytes,
            total,
        })?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use store::LocalStore;
    use tempfile::TempDir;

    use super::*;
    use crate::chain::ChainFault;
    use crate::fixture::{base, chain};
    use crate::stored::{Reader, write_base, write_segment};

    /// A chain of four segments with five revisions each, from 11 to 30.
    async fn stored() -> (TempDir, LocalStore, BaseName) {
        let directory = tempfile::tempdir().unwrap();
        let store = LocalStore::new(directory.path());
        let base = base();
        write_base(&store, "main/", &base).await.unwrap();
        for segment in chain(&base, 4, 5, 0) {
            let written = write_segment(&store, "main/", base.name, &segment).await;
            written.unwrap();
        }
        (directory, store, base.name)
    }

    /// Copies to a directory, as the seed of a restore does.
    async fn copied(
        store: &LocalStore,
        name: BaseName,
        revision: i64,
    ) -> Result<(TempDir, Vec<CopiedPart>), CopyError> {
        let target = tempfile::tempdir().unwrap();
        let mut parts = Vec::new();
        copy_chain(store, "main/", name, revision, |part| {
            let path = target.path().join(&part.key);
            std::fs::create_dir_all(path.parent().unwrap())?;
            std::fs::write(path, &part.content)?;
            parts.push(part.clone());
            Ok(())
        })
        .await?;
        Ok((target, parts))
    }

    #[tokio::test]
    async fn copy_contains_segments_up_to_requested_revision() {
        let (_directory, store, name) = stored().await;
        for (revision, segments, last) in [
            (10, 0, 10),
            (11, 1, 15),
            (15, 1, 15),
            (16, 2, 20),
            (30, 4, 30),
        ] {
            let (target, parts) = copied(&store, name, revision).await.unwrap();
            assert_eq!(parts.len(), segments + 1);
            let end = parts.last().unwrap();
            assert_eq!(end.bytes, end.total);
            let copy = LocalStore::new(target.path());
            let mut reader = Reader::open(&copy, "", name).await.unwrap();
            assert_eq!(reader.chain().faults, []);
            while reader.next().await.unwrap().is_some() {}
            assert_eq!(reader.last(), last);
        }
        let error = copied(&store, name, 31).await.unwrap_err();
        assert!(matches!(
            error,
            CopyError::Range(RangeError::AfterEnd { last: 30, .. })
        ));
    }

    #[tokio::test]
    async fn copy_fails_at_missing_or_damaged_segment() {
        let (_directory, store, name) = stored().await;
        let (_target, parts) = copied(&store, name, 30).await.unwrap();
        let key = format!("main/{}", parts[2].key);
        let mut damaged = parts[2].content.to_vec();
        *damaged.last_mut().unwrap() ^= 1;
        store.put(&key, damaged.into()).await.unwrap();
        let error = copied(&store, name, 30).await.unwrap_err();
        assert!(matches!(error, CopyError::Read(ReadError::Chain(_))));
        assert!(copied(&store, name, 15).await.is_ok());
        store.delete(&key).await.unwrap();
        let error = copied(&store, name, 30).await.unwrap_err();
        let CopyError::Range(RangeError::AfterEnd { last, faults, .. }) = error else {
            panic!("{error:?}");
        };
        assert_eq!(last, 15);
        let missing = ChainFault::Missing {
            after: 15,
            next: 21,
        };
        assert_eq!(faults, [missing]);
    }
}
