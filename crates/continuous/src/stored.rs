//! Writes the objects of a chain to a store, and reads and verifies them.

use std::collections::{BTreeSet, HashMap};

use bytes::{Bytes, BytesMut};
use futures::StreamExt;
use store::Store;

use crate::base::{BaseError, MAX_BASE, StoredBase};
use crate::chain::Chain;
use crate::header::HEADER;
use crate::name::{BASE, BASES, BaseName, SegmentName};
use crate::segment::{MAX_BODY, Scanner, Sealed, Segment, Times};
use crate::verify::{Verifier, VerifyError};

/// Maximum size of a segment's object in bytes. Incompressible data becomes slightly larger by compression.
pub(crate) const MAX_OBJECT: usize = HEADER + MAX_BODY + (MAX_BODY >> 6);

/// Maximum size of an object that is written in one request.
const ONE_REQUEST: usize = 8 << 20;

/// Why a chain cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// A request to the store failed.
    #[error("object {key} cannot be read")]
    Store {
        /// The key of the object, or the prefix of a listing.
        key: String,
        /// The error of the store.
        #[source]
        error: store::Error,
    },
    /// An object cannot be decrypted.
    #[error("object {key} cannot be decrypted")]
    Encryption {
        /// The key of the object.
        key: String,
        /// The problem. If a key is missing, the text contains the ID of this key.
        #[source]
        error: store::encryption::Error,
    },
    /// An object is larger than the format allows.
    #[error("object {key} has more than {limit} bytes")]
    TooLarge {
        /// The key of the object.
        key: String,
        /// The limit in bytes.
        limit: usize,
    },
    /// The object that describes a base is not valid.
    #[error("base {key} cannot be used")]
    Base {
        /// The key of the object.
        key: String,
        /// The problem.
        #[source]
        error: BaseError,
    },
    /// The revision or the SHA-256 of the object that describes a base differs from the name of the object.
    #[error("the object {key} describes another base than its name")]
    OtherBase {
        /// The key of the object.
        key: String,
    },
    /// A segment does not continue the chain.
    #[error("the chain is broken")]
    Chain(#[from] VerifyError),
}

impl ReadError {
    pub(crate) fn store(key: &str, error: store::Error) -> Self {
        let key = key.to_owned();
        match error {
            store::Error::Encryption(error) => Self::Encryption { key, error },
            error => Self::Store { key, error },
        }
    }
}

/// The key of the object that describes a base. `prefix` is empty or ends with a slash.
pub(crate) fn base_key(prefix: &str, base: BaseName) -> String {
    format!("{prefix}{BASES}{base}{BASE}")
}

pub(crate) fn segment_key(prefix: &str, base: BaseName, segment: SegmentName) -> String {
    format!("{prefix}{base}/{segment}")
}

/// Writes a base. The store must already have its snapshot. `prefix` is empty or ends with a slash.
///
/// # Errors
/// Fails if the store fails. The call can be repeated.
pub async fn write_base(
    store: &dyn Store,
    prefix: &str,
    base: &StoredBase,
) -> Result<(), store::Error> {
    let key = base_key(prefix, base.name);
    store.put(&key, base.object.clone()).await
}

/// Writes a segment. The store must already have all preceding segments. `prefix` is empty or ends with a slash.
///
/// # Errors
/// Fails if the store fails. The call can be repeated.
pub async fn write_segment(
    store: &dyn Store,
    prefix: &str,
    base: BaseName,
    segment: &Sealed,
) -> Result<(), store::Error> {
    let key = segment_key(prefix, base, segment.name);
    if segment.object.len() <= ONE_REQUEST {
        return store.put(&key, segment.object.clone()).await;
    }
    let mut upload = store.begin(&key).await?;
    let mut rest = segment.object.clone();
    while !rest.is_empty() {
        let chunk = rest.split_to(ONE_REQUEST.min(rest.len()));
        if let Err(error) = upload.write(chunk).await {
            // The caller gets the error of `write`, because it is the cause. If `abort` fails too, the upload stays
            // unfinished, and is no object.
            let _ = upload.abort().await;
            return Err(error);
        }
    }
    upload.commit().await.map(|_| ())
}

/// Lists the bases in the order of their revisions. `prefix` is empty or ends with a slash.
///
/// # Errors
/// Fails if the store fails.
pub async fn bases(store: &dyn Store, prefix: &str) -> Result<Vec<BaseName>, ReadError> {
    let names = list(store, &format!("{prefix}{BASES}")).await?;
    let bases: BTreeSet<BaseName> = names
        .iter()
        .filter_map(|name| name.strip_suffix(BASE))
        .filter_map(BaseName::parse)
        .collect();
    Ok(bases.into_iter().collect())
}

/// Lists the keys with this prefix, without the prefix.
pub(crate) async fn list(store: &dyn Store, prefix: &str) -> Result<Vec<String>, ReadError> {
    let listed = list_sizes(store, prefix).await?;
    Ok(listed.into_iter().map(|(name, _)| name).collect())
}

/// Lists the keys with this prefix, without the prefix, and the sizes of the objects.
async fn list_sizes(store: &dyn Store, prefix: &str) -> Result<Vec<(String, u64)>, ReadError> {
    let listed = store.list(prefix).await;
    let listed = listed.map_err(|error| ReadError::store(prefix, error))?;
    let names = listed.into_iter().filter_map(|object| {
        let name = object.key.strip_prefix(prefix)?;
        Some((name.to_owned(), object.size))
    });
    Ok(names.collect())
}

/// Reads a whole object of at most `limit` bytes.
pub(crate) async fn read(store: &dyn Store, key: &str, limit: usize) -> Result<Bytes, ReadError> {
    let failed = |error| ReadError::store(key, error);
    let mut stream = store.get(key).await.map_err(failed)?;
    let mut object = BytesMut::new();
    while let Some(chunk) = stream.chunks.next().await {
        let chunk = chunk.map_err(failed)?;
        if object.len() + chunk.len() > limit {
            return Err(ReadError::TooLarge {
                key: key.to_owned(),
                limit,
            });
        }
        object.extend_from_slice(&chunk);
    }
    Ok(object.freeze())
}

/// Reads a base. `prefix` is empty or ends with a slash.
///
/// # Errors
/// Fails if the store fails, or if the base is not valid.
pub async fn read_base(
    store: &dyn Store,
    prefix: &str,
    name: BaseName,
) -> Result<StoredBase, ReadError> {
    let key = base_key(prefix, name);
    let object = read(store, &key, MAX_BASE).await?;
    let base = StoredBase::decode(object).map_err(|error| ReadError::Base {
        key: key.clone(),
        error,
    })?;
    if base.name == name {
        Ok(base)
    } else {
        Err(ReadError::OtherBase { key })
    }
}

/// Reads a base as [`read_base`] does. Fails if the snapshot of the base is not under `prefix`.
pub(crate) async fn read_own_base(
    store: &dyn Store,
    prefix: &str,
    name: BaseName,
) -> Result<StoredBase, ReadError> {
    let base = read_base(store, prefix, name).await?;
    base.check_snapshot(prefix)
        .map_err(|error| ReadError::Base {
            key: base_key(prefix, name),
            error,
        })?;
    Ok(base)
}

/// Finds the chain of a base. `prefix` is empty or ends with a slash.
pub(crate) async fn chain(
    store: &dyn Store,
    prefix: &str,
    base: BaseName,
) -> Result<Chain, ReadError> {
    let (chain, _) = chain_and_size(store, prefix, base).await?;
    Ok(chain)
}

/// The chain of a base, and the sizes of all segments of the base in bytes.
pub(crate) struct SizedChain {
    pub(crate) chain: Chain,
    sizes: HashMap<SegmentName, u64>,
}

impl SizedChain {
    /// Lists the segments of a base, and finds its chain. `prefix` is empty or ends with a slash.
    pub(crate) async fn list(
        store: &dyn Store,
        prefix: &str,
        base: BaseName,
    ) -> Result<Self, ReadError> {
        let listed = list_sizes(store, &format!("{prefix}{base}/")).await?;
        let named = listed.into_iter();
        let sizes: HashMap<SegmentName, u64> = named
            .filter_map(|(name, size)| Some((SegmentName::parse(&name)?, size)))
            .collect();
        let segments: Vec<SegmentName> = sizes.keys().copied().collect();
        Ok(Self {
            chain: Chain::find(base, &segments),
            sizes,
        })
    }

    /// The segments of the chain that a replay up to `revision` reads, in their order.
    pub(crate) fn needed(&self, revision: i64) -> Vec<SegmentName> {
        let segments = self.chain.segments.iter();
        let needed = segments.take_while(|name| name.first <= revision);
        needed.copied().collect()
    }

    /// The size of these segments in bytes.
    pub(crate) fn bytes(&self, segments: &[SegmentName]) -> u64 {
        let sizes = segments.iter().filter_map(|name| self.sizes.get(name));
        sizes.sum()
    }
}

/// Finds the chain of a base, and the number of bytes of all segments of the base.
async fn chain_and_size(
    store: &dyn Store,
    prefix: &str,
    base: BaseName,
) -> Result<(Chain, u64), ReadError> {
    let listed = list_sizes(store, &format!("{prefix}{base}/")).await?;
    let mut bytes = 0;
    let mut names = Vec::new();
    for (name, size) in &listed {
        if let Some(name) = SegmentName::parse(name) {
            names.push(name);
            bytes += size;
        }
    }
    Ok((Chain::find(base, &names), bytes))
}

/// The end of a stored chain, where a recorder continues.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tip {
    /// The last segment. `None` if the chain has no segment.
    pub segment: Option<Segment>,
    /// Number of segments of the chain.
    pub segments: u64,
    /// Number of bytes of all segments of the base.
    pub bytes: u64,
}

/// Reads the last segment of a chain, which a recorder continues. The segments before it are not verified. `prefix` is
/// empty or ends with a slash.
///
/// # Errors
/// Fails if the store fails, or if the segment is not valid.
pub async fn tip(store: &dyn Store, prefix: &str, base: BaseName) -> Result<Tip, ReadError> {
    let (chain, bytes) = chain_and_size(store, prefix, base).await?;
    let segment = match chain.segments.last().copied() {
        Some(name) => Some(read_segment(store, prefix, base, name).await?),
        None => None,
    };
    Ok(Tip {
        segment,
        segments: chain.segments.len() as u64,
        bytes,
    })
}

/// Reads one segment, and verifies that its SHA-256 and its last revision match its name. Does not verify that it
/// continues the preceding segment.
pub(crate) async fn read_segment(
    store: &dyn Store,
    prefix: &str,
    base: BaseName,
    name: SegmentName,
) -> Result<Segment, ReadError> {
    let object = read(store, &segment_key(prefix, base, name), MAX_OBJECT).await?;
    let invalid = |error| VerifyError::Invalid { name, error };
    let segment = Segment::decode(&object).map_err(invalid)?;
    if segment.digest.short() == name.digest && segment.header.last == name.last {
        Ok(segment)
    } else {
        Err(VerifyError::Misnamed { name }.into())
    }
}

/// Reads the times of one segment, and verifies that its SHA-256 and its last revision match its name. Does not verify
/// that it continues the preceding segment.
///
/// A forged segment cannot make this function use unlimited memory (invariant 15; see [`Scanner`]).
pub(crate) async fn read_times(
    store: &dyn Store,
    prefix: &str,
    base: BaseName,
    name: SegmentName,
) -> Result<Times, ReadError> {
    let key = segment_key(prefix, base, name);
    let failed = |error| ReadError::store(&key, error);
    let invalid = |error| VerifyError::Invalid { name, error };
    let mut stream = store.get(&key).await.map_err(failed)?;
    let mut scanner = Scanner::new();
    let mut size = 0;
    while let Some(chunk) = stream.chunks.next().await {
        let chunk = chunk.map_err(failed)?;
        size += chunk.len();
        if size > MAX_OBJECT {
            return Err(ReadError::TooLarge {
                key: key.clone(),
                limit: MAX_OBJECT,
            });
        }
        scanner.push(&chunk).map_err(invalid)?;
    }
    let times = scanner.finish().map_err(invalid)?;
    if times.digest.short() == name.digest && times.last == name.last {
        Ok(times)
    } else {
        Err(VerifyError::Misnamed { name }.into())
    }
}

/// Reads the segments of a chain in order.
pub struct Reader<'a> {
    store: &'a dyn Store,
    prefix: String,
    base: StoredBase,
    chain: Chain,
    verifier: Verifier,
    next: usize,
}

impl<'a> Reader<'a> {
    /// Reads a base, and lists its segments. `prefix` is empty or ends with a slash.
    ///
    /// # Errors
    /// Fails if the store fails, or if the base is not valid. Problems of segments are not errors: [`Chain::faults`]
    /// lists them.
    pub async fn open(
        store: &'a dyn Store,
        prefix: &str,
        name: BaseName,
    ) -> Result<Self, ReadError> {
        let base = read_base(store, prefix, name).await?;
        Ok(Self {
            store,
            prefix: prefix.to_owned(),
            chain: chain(store, prefix, name).await?,
            verifier: Verifier::new(&base),
            base,
            next: 0,
        })
    }

    /// The base.
    pub fn base(&self) -> &StoredBase {
        &self.base
    }

    /// The chain of the base.
    pub fn chain(&self) -> &Chain {
        &self.chain
    }

    /// The last revision that was read and verified.
    pub fn last(&self) -> i64 {
        self.verifier.last()
    }

    /// Reads and verifies the next segment. `None` at the end of the chain.
    ///
    /// # Errors
    /// Fails if the store fails, or if the segment does not continue the chain. The call can be repeated.
    pub async fn next(&mut self) -> Result<Option<Segment>, ReadError> {
        let Some(name) = self.chain.segments.get(self.next).copied() else {
            return Ok(None);
        };
        let key = segment_key(&self.prefix, self.base.name, name);
        let object = read(self.store, &key, MAX_OBJECT).await?;
        let segment = self.verifier.check(name, &object)?;
        self.next += 1;
        Ok(Some(segment))
    }
}

#[cfg(test)]
mod tests;
